//! The layout of the repository as rules: who may use whom, what is pure, whose licence is which, and that nothing lies dead.

mod rules;
mod source;
mod workspace;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use rules::{MAY_USE, PURE, SUBJECTS_FILE};
use source::Source;
use workspace::Graph;

static TREE: LazyLock<Tree> = LazyLock::new(Tree::load);

struct Tree {
    root: PathBuf,
    graph: Graph,
    /// Every text file of ours, relative to the root.
    texts: BTreeMap<PathBuf, String>,
    /// Every Rust file that cargo compiles, relative to the root, and whether it is for tests only.
    compiled: BTreeMap<PathBuf, bool>,
}

impl Tree {
    fn load() -> Self {
        let root =
            Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is a folder of the repository").to_path_buf();
        let graph = Graph::load(&root);
        let mut texts = BTreeMap::new();
        collect(&root, &root, &mut texts);
        let inside = |path: &Path| path.strip_prefix(&root).expect("targets lie in the repository").to_path_buf();
        // The harness of the end-to-end tests is a library only because several test crates share it.
        let roots: Vec<(PathBuf, bool)> = graph
            .members()
            .flat_map(|(name, package)| {
                package.roots.iter().map(move |(path, test)| (inside(path), *test || name == "groupcast-tests"))
            })
            .collect();
        let compiled = source::reachable(&roots, |path| texts.get(path).cloned());
        Tree { root, graph, texts, compiled }
    }

    fn texts_named(&self, endings: &[&str]) -> impl Iterator<Item = (&Path, &str)> {
        let named = move |path: &Path| {
            path.extension().and_then(|ending| ending.to_str()).is_some_and(|ending| endings.contains(&ending))
        };
        self.texts.iter().filter(move |(path, _)| named(path)).map(|(path, text)| (path.as_path(), text.as_str()))
    }

    /// Runs a rule over the compiled files that `choose` selects by path and by whether they are for tests only.
    fn judge(&self, rule: fn(&Path, &Source) -> Vec<String>, choose: impl Fn(&Path, bool) -> bool) {
        let chosen: Vec<&PathBuf> =
            self.compiled.iter().filter(|(path, test)| choose(path, **test)).map(|(path, _)| path).collect();
        assert!(!chosen.is_empty(), "the rule has nothing to judge: the layout changed under it");
        expect_none(chosen.iter().flat_map(|path| rule(path, &Source::parse(&self.texts[*path]))));
    }
}

/// Reads all text files below `folder`, but nothing hidden and nothing that cargo built.
fn collect(root: &Path, folder: &Path, texts: &mut BTreeMap<PathBuf, String>) {
    for entry in
        std::fs::read_dir(folder).expect("the repository can be listed").map(|entry| entry.expect("the repository can be listed"))
    {
        let path = entry.path();
        if entry.file_name().to_string_lossy().starts_with('.') {
            continue;
        }
        if path.is_dir() {
            if !path.join("CACHEDIR.TAG").exists() {
                collect(root, &path, texts);
            }
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            texts.insert(path.strip_prefix(root).expect("found below the root").to_path_buf(), text);
        }
    }
}

fn expect_none(wrong: impl IntoIterator<Item = String>) {
    let wrong: Vec<String> = wrong.into_iter().collect();
    assert!(wrong.is_empty(), "\n{}\n", wrong.join("\n"));
}

#[test]
fn packages_use_only_those_below_them() {
    let members: BTreeSet<&str> = TREE.graph.members().map(|(name, _)| name).collect();
    assert_eq!(members, MAY_USE.iter().map(|(name, _)| *name).collect());
    expect_none(rules::directions(&TREE.graph));
}

#[test]
fn pure_packages_link_only_pure_crates() {
    expect_none(rules::purity_of_dependencies(&TREE.graph));
}

#[test]
fn pure_packages_have_no_io_async_or_clock() {
    let homes = TREE.graph.members().filter(|(name, _)| PURE.contains(name)).filter_map(|(_, package)| package.home.as_ref());
    let homes: Vec<&Path> = homes.filter_map(|home| home.strip_prefix(&TREE.root).ok()).collect();
    assert_eq!(homes.len(), PURE.len());
    // Their examples are programs and may read arguments; what others link may not.
    TREE.judge(rules::impurities, |path, test| !test && homes.iter().any(|home| path.starts_with(home.join("src"))));
}

#[test]
fn only_the_host_agent_reaches_rustables() {
    expect_none(rules::only_host_reaches_rustables(&TREE.graph));
}

#[test]
fn every_licence_is_the_right_one() {
    let allowed = rules::allowed_licences(&TREE.texts[Path::new("deny.toml")]);
    assert!(!allowed.is_empty() && !allowed.iter().any(|licence| licence.contains("GPL")), "{allowed:?}");
    expect_none(rules::licences(&TREE.graph, &allowed));
    assert!(TREE.texts[Path::new("LICENSE")].contains("Apache License\n"));
    assert!(TREE.texts[Path::new("actors/host/LICENSE")].contains("GNU GENERAL PUBLIC LICENSE\n"));
}

#[test]
fn every_package_takes_the_lints_of_the_workspace() {
    let manifests = TREE.texts.iter().filter(|(path, _)| path.ends_with("Cargo.toml") && path.as_os_str() != "Cargo.toml");
    expect_none(
        manifests
            .filter(|(_, text)| !text.contains("[lints]\nworkspace = true\n"))
            .map(|(path, _)| format!("{}: no [lints]", path.display())),
    );
}

#[test]
fn no_source_file_is_dead() {
    let files: Vec<PathBuf> = TREE.texts_named(&["rs"]).map(|(path, _)| path.to_path_buf()).collect();
    assert!(files.len() >= MAY_USE.len(), "every package has a source file");
    expect_none(rules::dead_files(&files, &TREE.compiled));
}

#[test]
fn no_source_file_is_endless() {
    expect_none(TREE.texts_named(&["rs"]).flat_map(|(path, text)| rules::too_long(path, text)));
}

#[test]
fn subjects_are_written_in_one_file() {
    TREE.judge(rules::stray_subjects, |path, test| !test && path != Path::new(SUBJECTS_FILE));
}

#[test]
fn no_call_that_hides_its_failure() {
    TREE.judge(rules::forbidden_calls, |_, _| true);
}

#[test]
fn words_are_those_of_the_design() {
    expect_none(
        TREE.texts_named(&["rs", "md", "toml", "conf", "service"]).flat_map(|(path, text)| rules::forbidden_words(path, text)),
    );
}
