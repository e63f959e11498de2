//! What people see: every verb of the command line on a real gateway, against snapshots (`GROUPCAST_UPDATE=1` writes them anew), and the
//! exit code of every outcome.

use std::path::{Path, PathBuf};
use std::time::Duration;

use groupcast_tests::control::{Plane, workload};
use groupcast_tests::gateway::{Gateway, Ran, User, group, groupcast, scratch, token};
use groupcast_tests::world::eventually;
use groupcast_topics::reader;

const LEASE: Duration = Duration::from_millis(600);

/// What differs from run to run, by what it is.
fn steady(text: &str) -> String {
    let mut out = String::new();
    let mut words = text.split_inclusive([' ', '\n', '"', ',', '(', ')', ':']).peekable();
    while let Some(word) = words.next() {
        let bare = word.trim_end_matches([' ', '\n', '"', ',', '(', ')', ':']);
        let tail = &word[bare.len()..];
        let is_time = bare.len() >= 13 && bare.as_bytes()[4] == b'-' && bare.as_bytes()[10] == b'T';
        if is_time {
            out += "TIME";
            // The rest of it stands behind its colons.
            for _ in 0..2 {
                let rest = words.next().unwrap_or_default();
                out += rest.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.' || c == 'Z' || c == ':');
            }
        } else {
            out += bare;
            out += tail;
        }
    }
    out
}

fn snapshot(name: &str, ran: &Ran) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(format!("{name}.txt"));
    let mut found = format!("exit code {}\n--- stdout\n{}--- stderr\n{}", ran.code, steady(&ran.stdout), steady(&ran.stderr));
    let lines: Vec<String> = found.lines().map(|line| line.trim_end().to_owned()).collect();
    found = lines.join("\n") + "\n";
    if std::env::var_os("GROUPCAST_UPDATE").is_some() {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        std::fs::write(&path, &found).expect("written");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(found, expected, "{} differs; if that is right, run again with GROUPCAST_UPDATE=1", path.display());
}

struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let path = scratch("folder");
        std::fs::create_dir_all(&path).expect("made");
        Self(path)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_verb_says_what_it_did() {
    let mut plane = Plane::start(1, LEASE).await;
    plane.ready().await;
    let text = token(&plane.url(), "root", "admin", &[]);
    let gateway = Gateway::start(&plane.url(), &[]).await;
    let user = User::new(&gateway, &text).await;
    let folder = Folder::new();
    let token_file = folder.file("token", &text);
    std::fs::set_permissions(&token_file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).expect("closed");
    let (url, bus) = (gateway.url(), plane.url());
    let run = |arguments: &[&str]| {
        groupcast(arguments, &[("GROUPCAST_GATEWAY", &url), ("GROUPCAST_TOKEN_FILE", &token_file), ("NO_COLOR", "1")])
    };
    // Numbers of changes depend on when the controller reserved its terms: they are read, not written down.
    let hidden = |ran: &Ran, secrets: &[&str]| {
        let hide = |text: &str| {
            secrets.iter().fold(text.replace(&url, "GATEWAY").replace(&bus, "BUS"), |text, secret| text.replace(secret, "N"))
        };
        let hide = |text: &str| hide(text).replace(&folder.0.display().to_string(), "FOLDER");
        Ran { code: ran.code, stdout: hide(&ran.stdout), stderr: hide(&ran.stderr) }
    };
    plane.register(vec![workload("h1", "w1", 1, &[]), workload("h2", "w2", 2, &[])]).await;
    eventually("the registry is read", || async { user.get("/v1/workloads/w2").await.status == 200 }).await;
    // A controller leads as soon as there is a document, and knows how far changes are that come later.
    user.change(&[group("first", &[])]).await;
    plane.leader().await;
    let file = folder.file(
        "shop.yaml",
        "kind: group\nid: web\nrules:\n  - egress tcp 5432 to group:db\nbindings: [workload:w1]\n---\nkind: group\nid: db\nrules:\n  \
         - {rule: ingress tcp 5432 from group:web, description: the shop}\nbindings: [workload:w2]\n",
    );
    snapshot("plan", &run(&["plan", "-f", &file]));
    assert!(
        groupcast(
            &["plan", "-f", &file, "--color", "always"],
            &[("GROUPCAST_GATEWAY", &url), ("GROUPCAST_TOKEN_FILE", &token_file)]
        )
        .stdout
        .contains("\x1b[32m+ group web\x1b[0m")
    );
    let saved = folder.path("shop.plan");
    assert_eq!(run(&["plan", "-f", &file, "--out", &saved]).code, 0);
    let applied = run(&["apply", "--plan", &saved, "-r", "open the shop"]);
    assert_eq!(applied.code, 0, "{applied:?}");
    let number = applied.stdout.trim().to_owned();
    snapshot("apply", &hidden(&applied, &[&number]));
    snapshot("apply_stale_plan", &run(&["apply", "--plan", &saved]));
    snapshot("apply_unchanged", &{
        let ran = run(&["apply", "-f", &file]);
        hidden(&ran, &[ran.stdout.trim()])
    });
    // Nobody is there: waiting ends with the laggards' names.
    let waited = run(&["wait", &number, "--timeout", "300ms"]);
    assert_eq!(waited.code, 5, "{waited:?}");
    snapshot("wait_late", &hidden(&waited, &[&number]));
    let hosts = [
        plane.host("h1", reader::Settings::default(), Box::new(|_, _| true)).await,
        plane.host("h2", reader::Settings::default(), Box::new(|_, _| true)).await,
    ];
    let waited = run(&["wait", &number]);
    assert!(waited.code == 0 && waited.stderr.contains("is enforced on all 2 hosts after"), "{waited:?}");
    // A gateway asks whether hosts have it, and says nothing if nobody answers in time.
    eventually("what decides is known to be in force", || async {
        run(&["explain", "w1", "w2", "tcp/22"]).stdout.matches("in force on the host").count() == 2
    })
    .await;
    // What there is.
    for (name, arguments) in [
        ("get_groups", &["get", "groups"][..]),
        ("get_group_yaml", &["get", "group", "db", "-o", "yaml"]),
        ("get_groups_name", &["get", "groups", "-o", "name"]),
        ("get_workloads", &["get", "workloads"]),
        ("get_workloads_wide", &["get", "workloads", "-o", "wide"]),
        ("get_hosts", &["get", "hosts"]),
        ("get_missing", &["get", "group", "nobody"]),
        ("get_tokens", &["token", "list"]),
        ("delete_missing", &["delete", "group", "nobody"]),
        ("undo_unknown", &["undo", "999999"]),
        ("explain_denied", &["explain", "w1", "w2", "tcp/22"]),
        ("explain_wrong", &["explain", "w1", "w2", "tcp"]),
        ("explain_unknown", &["explain", "w1", "nobody", "tcp/22"]),
    ] {
        let ran = run(arguments);
        let revisions: Vec<String> = (1..40)
            .rev()
            .flat_map(|n| {
                [format!("revision {n}"), format!("revision: {n}\n"), format!("change: {n}\n"), format!("(change {n})")]
            })
            .collect();
        let mut ran = hidden(&ran, &[]);
        for pattern in &revisions {
            let kept: String = pattern.chars().filter(|c| !c.is_ascii_digit()).collect();
            ran.stdout = ran.stdout.replace(pattern.as_str(), &kept);
        }
        snapshot(name, &ran);
    }
    let json = run(&["get", "groups", "-o", "json"]);
    let parsed: serde_json::Value = serde_json::from_str(&json.stdout).expect("JSON");
    assert_eq!((&parsed["format_version"], parsed["items"].as_array().map(Vec::len)), (&"1".into(), Some(3)));
    let explained = run(&["explain", "w1", "w2", "tcp/5432"]);
    assert!(
        explained.code == 0
            && explained.stdout.contains("tcp/5432: allowed")
            && explained.stdout.contains("rule: egress tcp 5432 to group:db"),
        "{explained:?}"
    );
    // What `get` prints, `apply` takes, but only over the version it showed.
    let shown = run(&["get", "group", "db", "-o", "yaml"]).stdout.replace("the shop", "the new shop");
    let edited = folder.file("db.yaml", &shown);
    let applied = run(&["apply", "-f", &edited, "--wait"]);
    assert!(applied.code == 0 && applied.stderr.contains("written: 1 document"), "{applied:?}");
    let again = folder.file("db2.yaml", &shown.replace("the new shop", "another"));
    let stale = run(&["apply", "-f", &again]);
    assert!(
        stale.code == 3
            && stale.stderr.contains("was changed meanwhile, by root from 127.0.0.1")
            && stale.stderr.contains("hint: "),
        "{stale:?}"
    );
    // Everything that is wrong at once.
    let wrong =
        folder.file("wrong.yaml", "kind: group\nid: a\nrules: [nonsense here]\n---\nkind: group\nid: b\nmembers: [ten]\n");
    snapshot("apply_wrong", &run(&["apply", "-f", &wrong]));
    snapshot("apply_no_file", &hidden(&run(&["apply", "-f", &folder.path("none.yaml")]), &[]));
    assert_eq!(run(&["apply"]).code, 2);
    assert_eq!(run(&["get", "nonsense"]).code, 2);
    // Back again.
    let undone = run(&["undo", applied.stdout.trim(), "--wait"]);
    assert!(undone.code == 0, "{undone:?}");
    let undone_again = run(&["undo", applied.stdout.trim()]);
    assert!(undone_again.code == 3 && undone_again.stderr.contains("hint: take back what came later"), "{undone_again:?}");
    let deleted = run(&["delete", "group", "web", "-r", "closed", "--wait"]);
    assert!(deleted.code == 0 && deleted.stderr.contains("web deleted"), "{deleted:?}");
    let changes = run(&["get", "changes", "-o", "wide"]);
    assert!(
        changes.stdout.contains("closed") && changes.stdout.contains("-group/web") && changes.stdout.contains("open the shop"),
        "{changes:?}"
    );
    // Out and in again.
    let export = folder.path("export.jsonl");
    assert_eq!(run(&["export", "--output", &export]).code, 0);
    let imported = run(&["import", &export]);
    assert!(imported.code == 3 && imported.stderr.contains("group db was changed meanwhile"), "{imported:?}");
    let imported = run(&["import", "--replace", &export]);
    assert!(imported.code == 0 && imported.stderr.contains("imported 2 documents"), "{imported:?}");
    // Who may.
    let viewer = folder.path("viewer");
    assert_eq!(run(&["token", "add", "eve", "--role", "viewer", "--life", "1h", "--out", &viewer]).code, 0);
    let mode =
        std::fs::metadata(&viewer).map(|about| std::os::unix::fs::PermissionsExt::mode(&about.permissions())).expect("written");
    assert_eq!(mode & 0o777, 0o600);
    let as_viewer = |arguments: &[&str]| groupcast(arguments, &[("GROUPCAST_GATEWAY", &url), ("GROUPCAST_TOKEN_FILE", &viewer)]);
    assert_eq!(as_viewer(&["get", "groups"]).code, 0);
    snapshot("apply_viewer", &as_viewer(&["apply", "-f", &file]));
    assert_eq!(run(&["token", "remove", "eve"]).code, 0);
    snapshot("get_revoked", &as_viewer(&["get", "groups"]));
    snapshot("get_no_token", &groupcast(&["get", "groups"], &[("GROUPCAST_GATEWAY", &url)]));
    let nobody = groupcast(&["get", "groups"], &[("GROUPCAST_GATEWAY", "http://127.0.0.1:9"), ("GROUPCAST_TOKEN", "x")]);
    snapshot("get_unreachable", &nobody);
    // Health, in words.
    let well = run(&["doctor", "--on-bus", "--server", &bus]);
    assert!(
        well.code == 0 && well.stdout.contains("ok   token: root with role admin") && !well.stdout.contains("BAD"),
        "{well:?}"
    );
    // Topics as they go by.
    let tapped = {
        let bus = bus.clone();
        let tap = std::thread::spawn(move || {
            groupcast(&["bus", "tap", "--server", &bus, "--topic", "rules.tapped", "--count", "1", "--within", "20s"], &[])
        });
        let start = std::time::Instant::now();
        while !tap.is_finished() && start.elapsed() < Duration::from_secs(25) {
            user.change(&[serde_json::json!({ "kind": "group", "id": "tapped", "name": format!("{:?}", start.elapsed()), "bindings": ["workload:w1"],
                "rules": [format!("ingress tcp {} from any", start.elapsed().as_millis() % 60_000 + 1)] })])
                .await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        tap.join().expect("it ends")
    };
    assert!(tapped.code == 0 && tapped.stdout.starts_with("rules.tapped change "), "{tapped:?}");
    drop(hosts);
}

#[test]
fn contexts_name_gateways() {
    let folder = Folder::new();
    let contexts = folder.path("contexts.toml");
    let run = |arguments: &[&str]| groupcast(arguments, &[("GROUPCAST_CONTEXTS", &contexts)]);
    assert_eq!(run(&["context", "add", "prod", "--url", "https://g1:4270", "--url", "https://g2:4270"]).code, 0);
    assert_eq!(run(&["context", "add", "lab", "--url", "http://127.0.0.1:9"]).code, 0);
    snapshot("context_list", &run(&["context", "list"]));
    assert_eq!(run(&["context", "use", "lab"]).code, 0);
    assert_eq!(run(&["context", "use", "none"]).code, 4);
    let unreachable = groupcast(&["get", "groups"], &[("GROUPCAST_CONTEXTS", &contexts), ("GROUPCAST_TOKEN", "x")]);
    assert!(unreachable.stderr.contains("http://127.0.0.1:9 cannot be reached"), "{unreachable:?}");
    assert_eq!(run(&["context", "remove", "lab"]).code, 0);
    assert_eq!(run(&["--context", "lab", "get", "groups"]).code, 4);
    std::fs::write(&contexts, "nonsense = 1").expect("written");
    assert_eq!(run(&["context", "list"]).code, 1);
}

#[test]
fn help_completions_and_man_pages_are_there() {
    let help = groupcast(&["--help"], &[]);
    for verb in [
        "up",
        "serve",
        "controller",
        "gateway",
        "plan",
        "apply",
        "get",
        "explain",
        "wait",
        "undo",
        "delete",
        "bus",
        "export",
        "import",
        "host",
        "token",
        "doctor",
    ] {
        assert!(help.stdout.contains(&format!("\n  {verb} ")), "{verb} is missing in:\n{}", help.stdout);
        let own = groupcast(&[verb, "--help"], &[]);
        assert_eq!(own.code, 0, "{verb}");
    }
    assert!(groupcast(&["apply", "--help"], &[]).stdout.contains("Examples:"));
    for shell in ["bash", "zsh", "fish"] {
        assert!(groupcast(&["completions", shell], &[]).stdout.contains("groupcast"), "{shell}");
    }
    let folder = Folder::new();
    assert_eq!(groupcast(&["man", &folder.path("man")], &[]).code, 0);
    assert!(Path::new(&folder.path("man/groupcast-apply.1")).exists());
    snapshot("usage", &groupcast(&["aply"], &[]));
}
