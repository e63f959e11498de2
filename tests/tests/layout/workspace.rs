//! The workspace as cargo sees it: packages, who uses whom, licences, targets.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Linked into the product, or run while it is built.
    Product,
    /// For tests, examples and benchmarks only.
    Dev,
}

#[derive(Default)]
pub struct Package {
    pub licence: String,
    pub uses: Vec<(String, Use)>,
    /// The folder, for a package of this workspace.
    pub home: Option<PathBuf>,
    /// Roots of the package's crates; `true` where the crate exists for tests only.
    pub roots: Vec<(PathBuf, bool)>,
}

/// By name; two versions of a package are one here.
pub struct Graph(pub BTreeMap<String, Package>);

impl Graph {
    /// Asks cargo, without network and without touching the lock file: everything needed was fetched to build this test.
    pub fn load(root: &Path) -> Self {
        let version = run(Command::new(std::env::var("RUSTC").unwrap_or("rustc".into())).arg("-vV"));
        let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("rustc names its host").to_owned();
        let cargo = std::env::var("CARGO").unwrap_or("cargo".into());
        let arguments = ["metadata", "--frozen", "--format-version", "1", "--filter-platform", &host];
        Self::parse(&run(Command::new(cargo).args(arguments).current_dir(root)))
    }

    fn parse(metadata: &str) -> Self {
        let metadata: Value = serde_json::from_str(metadata).expect("cargo metadata prints JSON");
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let members: BTreeSet<String> = list(&metadata["workspace_members"]).iter().map(text).collect();
        let mut names = BTreeMap::new();
        let mut graph = BTreeMap::<String, Package>::new();
        for package in list(&metadata["packages"]) {
            let (id, name) = (text(&package["id"]), text(&package["name"]));
            let entry = graph.entry(name.clone()).or_default();
            entry.licence = text(&package["license"]);
            if members.contains(&id) {
                entry.home = Path::new(&text(&package["manifest_path"])).parent().map(Path::to_path_buf);
                for target in list(&package["targets"]) {
                    let test = list(&target["kind"]).iter().any(|kind| kind == "test" || kind == "bench");
                    entry.roots.push((text(&target["src_path"]).into(), test));
                }
            }
            names.insert(id, name);
        }
        for node in list(&metadata["resolve"]["nodes"]) {
            for dependency in list(&node["deps"]) {
                let kinds = list(&dependency["dep_kinds"]);
                let kind = if kinds.iter().all(|kind| kind["kind"] == "dev") { Use::Dev } else { Use::Product };
                if let (Some(user), Some(used)) = (names.get(&text(&node["id"])), names.get(&text(&dependency["pkg"]))) {
                    graph.entry(user.clone()).or_default().uses.push((used.clone(), kind));
                }
            }
        }
        Graph(graph)
    }

    pub fn members(&self) -> impl Iterator<Item = (&str, &Package)> {
        self.0.iter().filter(|(_, package)| package.home.is_some()).map(|(name, package)| (name.as_str(), package))
    }

    /// Everything that `name` links or runs to build, itself excluded.
    pub fn product_closure(&self, name: &str) -> BTreeSet<&str> {
        let mut found = BTreeSet::new();
        let mut queue = vec![name];
        while let Some(next) = queue.pop() {
            let uses = self.0.get(next).map(|package| package.uses.as_slice()).unwrap_or_default();
            queue.extend(
                uses.iter()
                    .filter(|(used, kind)| *kind == Use::Product && found.insert(used.as_str()))
                    .map(|(used, _)| used.as_str()),
            );
        }
        found
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} does not start: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("cargo and rustc print UTF-8")
}

/// Whether a licence expression lets us use a package on the terms of `allowed`.
pub fn licence_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    // "/" is how packages wrote OR before expressions were standardised.
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let verdict = any(&mut words, allowed);
    verdict && words.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut verdict = all(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        verdict |= all(words, allowed);
    }
    verdict
}

fn all(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut verdict = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        verdict &= one(words, allowed);
    }
    verdict
}

fn one(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    match words.next() {
        Some("(") => {
            let verdict = any(words, allowed);
            verdict & words.next_if_eq(&")").is_some()
        }
        Some(name) => match words.next_if_eq(&"WITH").and_then(|_| words.next()) {
            Some(exception) => allowed.contains(&format!("{name} WITH {exception}")),
            None => allowed.contains(name),
        },
        None => false,
    }
}

mod tests {
    use super::*;

    #[test]
    fn licence_expressions() {
        let allowed = BTreeSet::from(["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].map(String::from));
        let rows = [
            ("MIT", true),
            ("GPL-3.0-only", false),
            ("", false),
            ("GPL-3.0-only OR MIT", true),
            ("GPL-3.0-only/MIT", true),
            ("GPL-3.0-only AND MIT", false),
            ("MIT AND ISC", true),
            ("(MIT OR GPL-3.0-only) AND ISC", true),
            ("(MIT AND GPL-3.0-only) OR GPL-3.0-only", false),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("Apache-2.0", false),
            ("MIT )", false),
            ("( MIT", false),
            ("MIT MIT", false),
        ];
        for (expression, verdict) in rows {
            assert_eq!(licence_allowed(expression, &allowed), verdict, "{expression}");
        }
    }

    #[test]
    fn metadata_is_understood() {
        let graph = Graph::parse(
            r#"{"workspace_members": ["a 1"],
                "packages": [
                    {"id": "a 1", "name": "a", "license": "MIT", "manifest_path": "/w/a/Cargo.toml",
                     "targets": [{"kind": ["lib"], "src_path": "/w/a/src/lib.rs"}, {"kind": ["test"], "src_path": "/w/a/tests/t.rs"}]},
                    {"id": "b 1", "name": "b", "license": null, "manifest_path": "/r/b/Cargo.toml", "targets": []},
                    {"id": "c 1", "name": "c", "license": "ISC", "manifest_path": "/r/c/Cargo.toml", "targets": []}],
                "resolve": {"nodes": [
                    {"id": "a 1", "deps": [{"pkg": "b 1", "dep_kinds": [{"kind": "dev"}]}, {"pkg": "c 1", "dep_kinds": [{"kind": "dev"}, {"kind": null}]}]},
                    {"id": "c 1", "deps": [{"pkg": "b 1", "dep_kinds": [{"kind": "build"}]}]}]}}"#,
        );
        let a = &graph.0["a"];
        assert_eq!(a.uses, [("b".into(), Use::Dev), ("c".into(), Use::Product)]);
        assert_eq!(a.home.as_deref(), Some(Path::new("/w/a")));
        assert_eq!(a.roots, [("/w/a/src/lib.rs".into(), false), ("/w/a/tests/t.rs".into(), true)]);
        assert_eq!(graph.members().map(|(name, _)| name).collect::<Vec<_>>(), ["a"]);
        assert_eq!(graph.product_closure("a"), BTreeSet::from(["b", "c"]));
        assert_eq!(graph.0["b"].licence, "");
    }
}
