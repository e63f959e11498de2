//! The rules. Each takes what it judges as an argument and returns what is wrong, so that each is also tried on something wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::source::Source;
use crate::workspace::{Graph, Package, Use, licence_allowed};

/// Who may use whom within the workspace, tests included. The order is that of the layers: nobody uses what stands below it.
pub const MAY_USE: [(&str, &[&str]); 10] = [
    ("groupcast-policy", &[]),
    ("groupcast-enforce", &["groupcast-policy"]),
    ("groupcast-messages", &["groupcast-policy"]),
    ("groupcast-bus-config", &["groupcast-messages", "groupcast-policy"]),
    ("groupcast-topics", &["groupcast-bus-config", "groupcast-messages", "groupcast-policy"]),
    ("groupcast-control", &["groupcast-topics", "groupcast-bus-config", "groupcast-messages", "groupcast-policy"]),
    (
        "groupcast-host",
        &["groupcast-enforce", "groupcast-topics", "groupcast-bus-config", "groupcast-messages", "groupcast-policy"],
    ),
    (
        "groupcast-gateway",
        &["groupcast-control", "groupcast-topics", "groupcast-bus-config", "groupcast-messages", "groupcast-policy"],
    ),
    (
        "groupcast-simulator",
        &[
            "groupcast-control",
            "groupcast-enforce",
            "groupcast-topics",
            "groupcast-bus-config",
            "groupcast-messages",
            "groupcast-policy",
        ],
    ),
    (
        "groupcast-tests",
        &[
            "groupcast-control",
            "groupcast-enforce",
            "groupcast-topics",
            "groupcast-bus-config",
            "groupcast-messages",
            "groupcast-policy",
        ],
    ),
];

/// The packages without IO, async and clock.
pub const PURE: [&str; 2] = ["groupcast-policy", "groupcast-enforce"];

/// What pure packages may use: data structures, hashes, text forms, derive macros.
pub const PURE_MAY_USE: [&str; 11] = [
    "foldhash",
    "groupcast-policy",
    "hashbrown",
    "ipnet",
    "roaring",
    "serde",
    "serde-saphyr",
    "serde_json",
    "sha2",
    "thiserror",
    "xxhash-rust",
];

/// What must not be linked into a pure package even through one of these: crates that open sockets, wait, run tasks or tell the time.
pub const IMPURE: [&str; 21] = [
    "actix",
    "async-io",
    "async-nats",
    "async-std",
    "chrono",
    "futures-executor",
    "futures-util",
    "hyper",
    "jiff",
    "mio",
    "nix",
    "polling",
    "quanta",
    "rayon",
    "reqwest",
    "rustix",
    "rustls",
    "smol",
    "socket2",
    "time",
    "tokio",
];

pub const GPL: &str = "GPL-3.0-or-later";
pub const GPL_PACKAGES: [&str; 3] = ["groupcast-host", "rustables", "rustables-macros"];

/// Longest source file in lines: beyond it there is a seam that nobody has looked for.
pub const FILE_LINES_MAX: usize = 900;

/// The one file that writes subjects.
pub const SUBJECTS_FILE: &str = "bus-config/src/subjects.rs";

pub fn directions(graph: &Graph) -> Vec<String> {
    let members: BTreeSet<&str> = graph.members().map(|(name, _)| name).collect();
    let mut wrong = Vec::new();
    for (name, package) in graph.members() {
        let Some((_, may_use)) = MAY_USE.iter().find(|(user, _)| *user == name) else {
            wrong.push(format!("{name}: a new package; say in MAY_USE whom it may use"));
            continue;
        };
        let uses = package.uses.iter().map(|(used, _)| used.as_str());
        let forbidden = uses.filter(|used| members.contains(used) && !may_use.contains(used));
        wrong.extend(forbidden.map(|used| format!("{name} uses {used}: not in this direction")));
    }
    wrong
}

pub fn purity_of_dependencies(graph: &Graph) -> Vec<String> {
    let mut wrong = Vec::new();
    for name in PURE {
        let uses = graph.0.get(name).map(|package| package.uses.as_slice()).unwrap_or_default();
        let unlisted = uses.iter().filter(|(used, kind)| *kind == Use::Product && !PURE_MAY_USE.contains(&used.as_str()));
        wrong.extend(unlisted.map(|(used, _)| format!("{name} uses {used}: if it is pure, say so in PURE_MAY_USE")));
        let linked = graph.product_closure(name).into_iter().filter(|used| IMPURE.contains(used));
        wrong.extend(linked.map(|used| format!("{name} links {used}, which is not pure")));
    }
    wrong
}

pub fn only_host_reaches_rustables(graph: &Graph) -> Vec<String> {
    let mut wrong = Vec::new();
    for (name, package) in graph.members().filter(|(name, _)| *name != "groupcast-host") {
        let dev = package.uses.iter().filter(|(_, kind)| *kind == Use::Dev).map(|(used, _)| used.as_str());
        let reached =
            dev.flat_map(|used| graph.product_closure(used).into_iter().chain([used])).chain(graph.product_closure(name));
        wrong.extend(
            reached
                .filter(|used| *used == "rustables")
                .take(1)
                .map(|_| format!("{name} reaches rustables: its licence would become GPL")),
        );
    }
    if !graph.product_closure("groupcast-host").contains("rustables") {
        wrong.push("groupcast-host does not link rustables: this rule judges nothing".into());
    }
    wrong
}

/// `allowed` are the licences of deny.toml.
pub fn licences(graph: &Graph, allowed: &BTreeSet<String>) -> Vec<String> {
    let judge = |(name, package): (&String, &Package)| {
        let (gpl, licence) = (GPL_PACKAGES.contains(&name.as_str()), package.licence.as_str());
        let right = match &package.home {
            _ if gpl => licence == GPL,
            Some(_) => licence == "Apache-2.0",
            None => licence_allowed(licence, allowed),
        };
        (!right).then(|| format!("{name}: licence {licence:?} is not what deny.toml and NOTICE say"))
    };
    graph.0.iter().filter_map(judge).collect()
}

/// The licences that deny.toml allows to everybody.
pub fn allowed_licences(deny_toml: &str) -> BTreeSet<String> {
    let section = deny_toml.split_once("\nallow = [").and_then(|(_, rest)| rest.split_once(']'));
    section.map(|(list, _)| list.split('"').skip(1).step_by(2).map(String::from).collect()).unwrap_or_default()
}

/// `files` are all the files there are, `reachable` those that cargo compiles.
pub fn dead_files(files: &[PathBuf], reachable: &BTreeMap<PathBuf, bool>) -> Vec<String> {
    let dead = files.iter().filter(|file| !reachable.contains_key(*file));
    dead.map(|file| format!("{}: no `mod` and no cargo target names it; delete it or declare it", file.display())).collect()
}

pub fn too_long(path: &Path, text: &str) -> Vec<String> {
    let lines = text.lines().count();
    let words = || format!("{}: {lines} lines, at most {FILE_LINES_MAX}: look for the seam", path.display());
    (lines > FILE_LINES_MAX).then(words).into_iter().collect()
}

/// A word for which the design has better ones, in any text but where it is somebody else's name.
pub fn forbidden_words(path: &Path, text: &str) -> Vec<String> {
    let word = concat!("ep", "och");
    let theirs = [format!("unix {word}"), format!("unix_{word}")];
    let hit = |line: &&str| theirs.iter().fold(line.to_lowercase(), |line, theirs| line.replace(theirs, "")).contains(word);
    let lines = (1..).zip(text.lines()).filter(|(_, line)| hit(line));
    lines
        .map(|(number, _)| format!("{}:{number}: {word:?}; we say term, revision, incarnation or stamp", path.display()))
        .collect()
}

/// Judges product code: no subject is written but in the one file of typed functions.
pub fn stray_subjects(path: &Path, source: &Source) -> Vec<String> {
    let heads = [
        "cat",
        "reg",
        "w",
        "t",
        "snap",
        "register",
        "beat",
        "ack",
        "entropy",
        "ctl",
        "answer",
        "replica",
        "progress",
        "progressed",
    ];
    let is_subject = |text: &str| {
        text.starts_with("_INBOX_")
            || text.match_indices("gc.").any(|(at, _)| {
                let starts_word = !text[..at].ends_with(|c: char| c.is_alphanumeric());
                let head = text[at + 3..].split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
                starts_word && heads.contains(&head)
            })
    };
    let stray = source.strings.iter().filter(|literal| !source.is_test(literal.at) && is_subject(&literal.text));
    stray
        .map(|literal| {
            format!("{}:{}: subject {:?}; write it in {SUBJECTS_FILE}", path.display(), source.line_of(literal.at), literal.text)
        })
        .collect()
}

/// Judges any code.
pub fn forbidden_calls(path: &Path, source: &Source) -> Vec<String> {
    let compact: String = source.code.split_whitespace().collect();
    let rows = [
        (
            source.tokens().iter().any(|(_, token)| *token == "do_send"),
            "do_send ignores a full mailbox and a dead actor: use send or try_send",
        ),
        (compact.contains("deny(warnings)"), "warnings are denied by ./test, not in source"),
    ];
    rows.into_iter().filter(|(found, _)| *found).map(|(_, why)| format!("{}: {why}", path.display())).collect()
}

/// Judges product code of the pure packages.
pub fn impurities(path: &Path, source: &Source) -> Vec<String> {
    const WORDS: [&str; 14] = [
        "async",
        "await",
        "tokio",
        "futures",
        "Instant",
        "SystemTime",
        "File",
        "OpenOptions",
        "TcpStream",
        "TcpListener",
        "UdpSocket",
        "UnixStream",
        "UnixListener",
        "UnixDatagram",
    ];
    const STD_MODULES: [&str; 6] = ["env", "fs", "io", "process", "thread", "time"];
    // The one thing in std::time that is not a clock.
    const PURE_PATH: &str = "Duration";
    let tokens = source.tokens();
    let word = |i: usize| tokens.get(i).map_or("", |token| token.1);
    let mut found = Vec::new();
    for (i, (at, token)) in tokens.iter().enumerate().filter(|(_, (at, _))| !source.is_test(*at)) {
        if WORDS.contains(token) {
            found.push((*at, (*token).to_owned()));
        }
        if *token != "std" || word(i + 1) != ":" {
            continue;
        }
        // Either `std::module` or the first words of the items of `std::{…}`.
        let modules = if word(i + 3) == "{" { top_level_items(&tokens, i + 4) } else { vec![i + 3] };
        let impure = |m: &usize| STD_MODULES.contains(&word(*m)) && !(word(*m) == "time" && word(m + 3) == PURE_PATH);
        found.extend(modules.iter().filter(|m| impure(m)).map(|m| (*at, format!("std::{}", word(*m)))));
    }
    found
        .iter()
        .map(|(at, what)| format!("{}:{}: {what} in a crate without IO, async and clock", path.display(), source.line_of(*at)))
        .collect()
}

/// The places of the first words of the comma-separated items that begin at `start`, up to the brace that closes them.
fn top_level_items(tokens: &[(usize, &str)], start: usize) -> Vec<usize> {
    let (mut found, mut depth) = (vec![start], 0);
    for (i, (_, token)) in tokens.iter().enumerate().skip(start) {
        match *token {
            "{" => depth += 1,
            "}" if depth == 0 => break,
            "}" => depth -= 1,
            "," if depth == 0 => found.push(i + 1),
            _ => {}
        }
    }
    found
}

mod tests {
    use super::*;

    /// A graph from rows `name (licence) -> uses; name marked with ~ for tests only`; packages named groupcast-* are ours.
    fn graph(rows: &[(&str, &str, &[&str])]) -> Graph {
        let package = |(name, licence, uses): &(&str, &str, &[&str])| {
            let used = |used: &&str| match used.strip_prefix('~') {
                Some(used) => (used.to_owned(), Use::Dev),
                None => ((*used).to_owned(), Use::Product),
            };
            let home = name.starts_with("groupcast-").then(|| PathBuf::from(name));
            (
                (*name).to_owned(),
                Package { licence: (*licence).to_owned(), uses: uses.iter().map(used).collect(), home, roots: Vec::new() },
            )
        };
        Graph(rows.iter().map(package).collect())
    }

    fn judge(rule: fn(&Path, &Source) -> Vec<String>, text: &str) -> Vec<String> {
        rule(Path::new("f.rs"), &Source::parse(text))
    }

    #[test]
    fn directions_catches_the_wrong_way_and_the_unknown() {
        let right = graph(&[("groupcast-policy", "", &["ipnet"]), ("groupcast-messages", "", &["groupcast-policy", "rmp"])]);
        assert_eq!(directions(&right), Vec::<String>::new());
        let wrong = graph(&[
            ("groupcast-policy", "", &["~groupcast-messages"]),
            ("groupcast-messages", "", &["groupcast-host"]),
            ("groupcast-host", "", &[]),
            ("groupcast-new", "", &[]),
        ]);
        assert_eq!(
            directions(&wrong),
            [
                "groupcast-messages uses groupcast-host: not in this direction",
                "groupcast-new: a new package; say in MAY_USE whom it may use",
                "groupcast-policy uses groupcast-messages: not in this direction"
            ]
        );
    }

    #[test]
    fn nobody_may_use_host_or_tests_and_every_layer_only_those_above_it() {
        for (place, (user, uses)) in MAY_USE.iter().enumerate() {
            for used in *uses {
                assert!(!["groupcast-host", "groupcast-tests"].contains(used), "{user} -> {used}");
                assert!(MAY_USE[..place].iter().any(|(name, _)| name == used), "{user} -> {used}");
            }
        }
    }

    #[test]
    fn purity_catches_what_is_linked_far_below_but_not_what_tests_use() {
        let right =
            graph(&[("groupcast-policy", "", &["ipnet", "~proptest"]), ("ipnet", "", &["x"]), ("proptest", "", &["tokio"])]);
        assert_eq!(purity_of_dependencies(&right), Vec::<String>::new());
        let wrong = graph(&[
            ("groupcast-enforce", "", &["groupcast-policy"]),
            ("groupcast-policy", "", &["ipnet"]),
            ("ipnet", "", &["mio"]),
        ]);
        assert_eq!(
            purity_of_dependencies(&wrong),
            ["groupcast-policy links mio, which is not pure", "groupcast-enforce links mio, which is not pure"]
        );
        let unlisted = graph(&[("groupcast-policy", "", &["surprise"])]);
        assert_eq!(purity_of_dependencies(&unlisted), ["groupcast-policy uses surprise: if it is pure, say so in PURE_MAY_USE"]);
    }

    #[test]
    fn rustables_is_found_also_behind_others_and_in_tests() {
        let host = ("groupcast-host", "", ["rustables"].as_slice());
        assert_eq!(only_host_reaches_rustables(&graph(&[host, ("groupcast-topics", "", &["rmp"])])), Vec::<String>::new());
        let wrong = graph(&[
            host,
            ("groupcast-topics", "", &["between"]),
            ("between", "", &["rustables"]),
            ("groupcast-tests", "", &["~rustables"]),
        ]);
        assert_eq!(only_host_reaches_rustables(&wrong).len(), 2);
        assert_eq!(
            only_host_reaches_rustables(&graph(&[("groupcast-host", "", &[])])).len(),
            1,
            "a rule that judges nothing says so"
        );
    }

    #[test]
    fn licences_are_judged_by_who_we_are() {
        let allowed = allowed_licences("[licenses]\nallow = [\n    \"MIT\", # why\n    \"ISC\",\n]\nother = [\"X\"]\n");
        assert_eq!(allowed, BTreeSet::from(["MIT", "ISC"].map(String::from)));
        let right = graph(&[
            ("groupcast-policy", "Apache-2.0", &[]),
            ("groupcast-host", GPL, &[]),
            ("rustables", GPL, &[]),
            ("x", "GPL-2.0 OR MIT", &[]),
        ]);
        assert_eq!(licences(&right, &allowed), Vec::<String>::new());
        let wrong =
            graph(&[("groupcast-policy", "MIT", &[]), ("groupcast-host", "Apache-2.0", &[]), ("x", GPL, &[]), ("y", "", &[])]);
        assert_eq!(licences(&wrong, &allowed).len(), 4);
    }

    #[test]
    fn a_file_that_nothing_names_is_dead() {
        let files = ["src/lib.rs", "src/old.rs"].map(PathBuf::from);
        let found = dead_files(&files, &BTreeMap::from([("src/lib.rs".into(), false)]));
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("src/old.rs"));
    }

    #[test]
    fn length_at_the_bound() {
        assert!(too_long(Path::new("f"), &"x\n".repeat(FILE_LINES_MAX)).is_empty());
        assert_eq!(too_long(Path::new("f"), &"x\n".repeat(FILE_LINES_MAX + 1)).len(), 1);
    }

    #[test]
    fn forbidden_words_in_text_and_code() {
        let word = concat!("Ep", "och");
        let wrong = [format!("the {word} of a leader"), format!("let {}_of = 1;", word.to_lowercase())];
        let right = [format!("since the UNIX {word}"), format!("SystemTime::UNIX_{}", word.to_uppercase()), "term".into()];
        assert!(wrong.iter().all(|text| forbidden_words(Path::new("f"), text).len() == 1));
        assert!(right.iter().all(|text| forbidden_words(Path::new("f"), text).is_empty()));
    }

    #[test]
    fn subjects_are_found_in_product_code_only() {
        let wrong = [
            r#"f("gc.t.>")"#,
            r##"f(r#"gc.w.leader"#)"##,
            r#"f("$X.gc.reg.h.one")"#,
            r#"f("_INBOX_h1.>")"#,
            r#"format!("gc.snap.{host}")"#,
        ];
        let right = [
            r#"// "gc.t.>""#,
            r#"#[cfg(test)] mod tests { fn f() { "gc.t.>" } }"#,
            r#"f("gc.nft")"#,
            r#"f("gc.table")"#,
            r#"f("abgc.t.x")"#,
            r#"f("see gc.")"#,
        ];
        assert!(wrong.iter().all(|text| judge(stray_subjects, text).len() == 1));
        assert_eq!(right.iter().flat_map(|text| judge(stray_subjects, text)).collect::<Vec<_>>(), Vec::<String>::new());
    }

    #[test]
    fn forbidden_calls_in_code_only() {
        assert_eq!(judge(forbidden_calls, "fn f() { actor\n    .do_send(Message) }").len(), 1);
        assert_eq!(judge(forbidden_calls, "#![deny( warnings )]").len(), 1);
        assert_eq!(judge(forbidden_calls, "// do_send(\nf(\"do_send(\")").len(), 0);
    }

    #[test]
    fn impurities_are_found_however_they_are_imported() {
        let wrong = [
            "use std::fs;",
            "use std::{collections::BTreeMap, fs};",
            "use std::{collections::{BTreeMap, BTreeSet}, net::TcpStream};",
            "async fn f() {}",
            "fn f() { let now = Instant::now(); }",
            "use std::time;",
            "tokio::spawn(f)",
            "fn f() { std::thread::sleep(x) }",
            "use std::net::UdpSocket;",
        ];
        let right = [
            "use std::net::IpAddr;",
            "use std::time::Duration;",
            "use std::{fmt, net::{IpAddr, Ipv4Addr}, time::Duration};",
            "// std::fs\nf(\"std::fs\")",
            "#[cfg(test)] mod tests { use std::fs; }",
            "let fs = io + process;",
        ];
        assert!(wrong.iter().all(|text| judge(impurities, text).len() == 1));
        assert_eq!(right.iter().flat_map(|text| judge(impurities, text)).collect::<Vec<_>>(), Vec::<String>::new());
    }
}
