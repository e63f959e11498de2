//! A folder of files, as people edit it.

use groupcast_control::source::poller::Poller;
use serde_json::json;

use crate::rig::{Folder, Rig, poller};

fn rig(folder: &Folder) -> Rig<Poller> {
    let config = json!({"kind": "directory", "id": "files", "path": folder.0, "poll_interval": "500ms"});
    Rig::new("files", "directory", poller(&config))
}

fn group(id: &str, rule: &str) -> String {
    format!("kind: group\nid: files-{id}\nname: {id}\nrules:\n  - {rule}\n")
}

const RULE: &str = "egress tcp 443 to 10.0.0.0/24";

#[tokio::test]
async fn files_come_change_and_go() {
    let folder = Folder::new();
    folder.write("web.yaml", &format!("{}---\n{}", group("web", RULE), group("db", RULE)));
    folder.write("one.json", r#"{"kind": "group", "id": "files-json", "name": "json"}"#);
    let mut rig = rig(&folder);
    rig.lead().await;
    assert_eq!(rig.names().into_iter().collect::<Vec<_>>(), ["db", "json", "web"]);
    assert_eq!(rig.streams.changes, [3], "one change");
    let polls = rig.status().polls;
    rig.interval().await;
    assert_eq!((rig.status().polls, rig.streams.changes.len()), (polls + 1, 1), "nothing changed, nothing written");
    folder.write("web.yaml", &group("web", "egress tcp 80 to any"));
    rig.interval().await;
    assert_eq!(rig.names().into_iter().collect::<Vec<_>>(), ["json", "web"]);
    assert!(rig.named("web").rules[0].rule.to_string().contains("tcp 80"));
    std::fs::remove_file(folder.0.join("one.json")).expect("removed");
    rig.interval().await;
    assert_eq!(rig.names().into_iter().collect::<Vec<_>>(), ["web"]);
}

#[tokio::test]
async fn a_file_that_does_not_parse_keeps_its_last_good_documents_and_is_named() {
    let folder = Folder::new();
    folder.write("good.yaml", &group("good", RULE));
    folder.write("bad.yaml", &group("bad", RULE));
    let mut rig = rig(&folder);
    rig.lead().await;
    folder.write("bad.yaml", "kind: group\n  id: [");
    folder.write("good.yaml", &group("good", "egress tcp 80 to any"));
    rig.interval().await;
    assert_eq!(rig.names().len(), 2);
    assert!(rig.named("good").rules[0].rule.to_string().contains("tcp 80"), "the others go on");
    let status = rig.status();
    assert!(status.malformed == 1 && status.malformed_named[0].contains("file bad.yaml: not YAML"), "{status:?}");
    // One wrong document of several spoils only itself.
    folder.write("bad.yaml", &format!("{}---\n{}", group("bad", "egress everything"), group("new", RULE)));
    rig.interval().await;
    assert_eq!(rig.names().len(), 3);
    assert!(rig.status().malformed_named[0].contains("files-bad"), "{:?}", rig.status().malformed_named);
    assert_eq!(rig.named("bad").rules.len(), 1);
    // Renamed while it cannot be read: nobody knows what it said, so nothing is deleted.
    folder.write("bad.yaml", "{");
    rig.interval().await;
    std::fs::rename(folder.0.join("bad.yaml"), folder.0.join("worse.yaml")).expect("renamed");
    rig.interval().await;
    assert_eq!(rig.names().len(), 3);
    std::fs::remove_file(folder.0.join("worse.yaml")).expect("removed");
    rig.interval().await;
    assert_eq!(rig.names().into_iter().collect::<Vec<_>>(), ["good"]);
}

#[tokio::test]
async fn a_rename_changes_nothing_and_what_editors_leave_is_not_read() {
    let folder = Folder::new();
    folder.write("a.yaml", &group("a", RULE));
    let mut rig = rig(&folder);
    rig.lead().await;
    let changes = rig.streams.changes.clone();
    std::fs::rename(folder.0.join("a.yaml"), folder.0.join("b.yml")).expect("renamed");
    for name in [".a.yaml.swp", "a.yaml~", "#a.yaml#", ".#a.yaml", "4913", "a.yaml.tmp", ".hidden.yaml", "README"] {
        folder.write(name, &group("stranger", RULE));
    }
    rig.interval().await;
    assert_eq!((rig.names().len(), &rig.streams.changes), (1, &changes));
    assert_eq!(rig.status().malformed, 0);
    // Written beside and moved over it, as editors do.
    folder.write(".b.yml.new", &group("a", "egress tcp 80 to any"));
    std::fs::rename(folder.0.join(".b.yml.new"), folder.0.join("b.yml")).expect("renamed");
    rig.interval().await;
    assert!(rig.named("a").rules[0].rule.to_string().contains("tcp 80"));
}

#[tokio::test]
async fn a_folder_that_is_gone_is_an_error_and_no_empty_folder() {
    let folder = Folder::new();
    let inner = folder.0.join("groups.d");
    std::fs::create_dir(&inner).expect("made");
    std::fs::write(inner.join("a.yaml"), group("a", RULE)).expect("written");
    let config = json!({"kind": "directory", "id": "files", "path": inner});
    let mut rig = Rig::new("files", "directory", poller(&config));
    rig.lead().await;
    std::fs::rename(&inner, folder.0.join("elsewhere")).expect("renamed");
    rig.interval().await;
    assert!(rig.error().contains("groups.d cannot be read"), "{}", rig.error());
    assert_eq!(rig.names().len(), 1);
}

#[tokio::test]
async fn what_is_no_group_of_this_source_is_refused_by_name() {
    let folder = Folder::new();
    let mut rig = rig(&folder);
    rig.lead().await;
    for (text, words) in [
        ("kind: group\nid: web\n".to_owned(), "write files-web"),
        ("kind: workload\nid: files-w\nhost: h\nnetwork: n\n".to_owned(), "a folder holds groups"),
        (group("x", RULE) + "owner: source:other\n", "owner is another source"),
        (format!("{}---\n{}", group("twice", RULE), group("twice", RULE)), "files-twice stands in f.yaml already"),
    ] {
        folder.write("f.yaml", &text);
        rig.interval().await;
        let named = rig.status().malformed_named;
        assert!(named.iter().any(|name| name.contains(words) && name.contains("f.yaml")), "{text}: {named:?}");
    }
}
