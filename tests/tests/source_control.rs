//! Sources as they run: controllers as processes with `[[source]]` in their file, a pretended Cloud Controller as a process, gateways and
//! hosts that ask.

use std::path::PathBuf;
use std::time::Duration;

use futures::StreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::subjects;
use groupcast_messages::{Cut, HostRequest, HostRequestAnswer};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::Topic;
use groupcast_tests::control::{Host, Plane, group, workload};
use groupcast_tests::fake::Fake;
use groupcast_tests::gateway::{Gateway, User, groupcast, scratch, token};
use groupcast_tests::world::{DEADLINE, eventually};
use groupcast_topics::reader;
use serde_json::json;

const LEASE: Duration = Duration::from_millis(600);

/// A folder with what a controller is configured by. Ends with its value.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let path = scratch("sources");
        std::fs::create_dir_all(path.join("groups.d")).expect("made");
        Self(path)
    }

    fn write(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Has sources read anew, as an agent does for a workload that starts.
async fn fresh(plane: &Plane, host: &HostId) -> Cut {
    let (client, _events) = plane.bus.connect(0, Role::Host, host.as_str()).await;
    let mut answers = client.subscribe(subjects::answers(host)).await.expect("subscribed");
    client.flush().await.expect("the server answers");
    let mut headers = async_nats::HeaderMap::new();
    headers.insert(subjects::ANSWER_TOKEN, "fresh");
    let request = HostRequest::Fresh { within_ms: 20_000 };
    client.publish_with_headers(subjects::register(host), headers, request.encode().into()).await.expect("sent");
    // The host's reader asks too, and is answered beside.
    let own = async {
        loop {
            let answer = answers.next().await.expect("subscribed");
            if subjects::answer_token(&answer.subject) == Some("fresh") {
                return answer;
            }
        }
    };
    let answer = tokio::time::timeout(DEADLINE, own).await.expect("in time");
    match HostRequestAnswer::decode(&answer.payload).expect("an answer") {
        HostRequestAnswer::Done { cut } => cut,
        HostRequestAnswer::Refused { reason, .. } => panic!("refused: {reason}"),
    }
}

async fn reached(host: &Host, cut: Cut) {
    let mut at = host.reader.cut();
    let there = at.wait_for(|at| at.is_some_and(|at| at >= cut));
    tokio::time::timeout(DEADLINE, there).await.expect("in time").expect("the reader lives");
}

/// The seed's race: a group is created and a workload started at once, while the source is hardly ever polled by itself.
#[tokio::test(flavor = "multi_thread")]
async fn who_starts_fresh_has_what_was_created_just_before() {
    let (cloud, folder) = (Fake::cloud_controller().await, Folder::new());
    let secret = cloud.secret();
    let config = folder.write(
        "groupcast.toml",
        &format!(
            "[[source]]\nid = \"cf\"\nkind = \"cloud-controller\"\nurl = \"{url}\"\ninternal_url = \"{url}\"\nuaa_url = \"{url}\"\n\
             client_id = \"groupcast\"\nclient_secret_file = \"{secret}\"\npoll_interval = \"1h\"\nfull_sync_interval = \"2h\"\n",
            url = cloud.url
        ),
    );
    let mut plane = Plane::start(0, LEASE).await;
    // Nobody leads a bus whose catalogue nobody has written.
    plane.put_groups(vec![group("first", &[], &[1])]).await;
    // Two: the one that is asked need not be the one that leads.
    plane.add_controller_with(&["--config", &config]);
    plane.add_controller_with(&["--config", &config]);
    let mut web = workload("h1", "web", 1, &[]);
    web.space = Some("shop".parse().expect("an id"));
    plane.register(vec![web]).await;
    plane.ready().await;
    plane.leader().await;
    let h1: HostId = "h1".parse().expect("an id");
    let host = plane.host("h1", reader::Settings::default(), Box::new(|_, _| true)).await;
    host.synced().await;
    fresh(&plane, &h1).await;
    for round in 0..5 {
        let group = cloud.space_group(&format!("group {round}"), "shop").await;
        let cut = fresh(&plane, &h1).await;
        reached(&host, cut).await;
        let rules = Topic::Rules(group.parse().expect("an id"));
        let documents = host.documents().await;
        assert!(documents.contains_key(&rules), "round {round}: {rules} is not among {:?}", documents.keys());
    }
}

/// What operators see and do; whoever leads polls.
#[tokio::test(flavor = "multi_thread")]
async fn sources_are_seen_polled_and_confirmed_through_a_gateway() {
    let folder = Folder::new();
    let groups: Vec<String> = (0..12).map(|i| format!("groups.d/g{i}.yaml")).collect();
    for (i, file) in groups.iter().enumerate() {
        folder.write(file, &format!("kind: group\nid: files-g{i}\nrules: [egress tcp 443 to any]\n"));
    }
    let path = folder.0.join("groups.d").display().to_string();
    // Nothing comes by itself in this test.
    let file = format!(
        "[[source]]\nid = \"files\"\nkind = \"directory\"\npath = \"{path}\"\npoll_interval = \"1h\"\nfull_sync_interval = \"2h\"\n"
    );
    let config = folder.write("groupcast.toml", &file);
    let mut plane = Plane::start(0, LEASE).await;
    // Nobody leads a bus whose catalogue nobody has written.
    plane.put_groups(vec![group("first", &[], &[1])]).await;
    plane.add_controller_with(&["--config", &config]);
    plane.add_controller_with(&["--config", &config]);
    plane.ready().await;
    let leader = plane.leader().await;
    let gateway = Gateway::start(&plane.url(), &[]).await;
    let admin = token(&plane.url(), "root", "admin", &[]);
    let viewer = token(&plane.url(), "eye", "viewer", &[]);
    let user = User::new(&gateway, &admin).await;
    eventually("the source is read", || async { user.get("/v1/sources/files").await.body["groups"] == 12 }).await;
    let listed = user.get("/v1/sources").await;
    assert_eq!((listed.status, listed.body["items"].as_array().map(Vec::len)), (200, Some(1)), "{listed:?}");
    assert_eq!((&listed.body["items"][0]["state"], &listed.body["items"][0]["kind"]), (&json!("good"), &json!("directory")));
    assert_eq!(user.get("/v1/sources/nothing").await.status, 404);
    eventually("the gateway knows them", || async { user.get("/v1/groups/files-g0").await.status == 200 }).await;
    // Whose they are, and who may not have them read.
    let refused = user.put("files-g0", json!({"id": "files-g0"}), &[]).await;
    assert_eq!(refused.status, 409, "{refused:?}");
    let eye = user.with_token(&viewer);
    assert_eq!(eye.ask("POST", "/v1/sources/files/poll", &[], None).await.status, 403);

    let environment = [("GROUPCAST_GATEWAY", gateway.url()), ("GROUPCAST_TOKEN", admin.clone())];
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    folder.write("groups.d/new.yaml", "kind: group\nid: files-new\n");
    let ran = groupcast(&["sources", "poll", "files"], &environment);
    assert_eq!(ran.code, 0, "{ran:?}");
    let ran = groupcast(&["get", "sources"], &environment);
    assert!(ran.code == 0 && ran.stdout.contains("directory") && ran.stdout.contains("13"), "{ran:?}");
    let ran = groupcast(&["sources", "confirm", "files"], &environment);
    assert!(ran.code == 3 && ran.stderr.contains("nothing held back"), "{ran:?}");
    let ran = groupcast(&["sources", "poll", "nothing"], &environment);
    assert_eq!(ran.code, 4, "{ran:?}");

    // Most of it is gone: held back until somebody says that it is meant.
    groups.iter().for_each(|file| std::fs::remove_file(folder.0.join(file)).expect("removed"));
    let ran = groupcast(&["sources", "poll", "files"], &environment);
    assert!(ran.code == 3 && ran.stderr.contains("12 of what it owns are gone"), "{ran:?}");
    let shown = user.get("/v1/sources/files").await;
    assert_eq!((&shown.body["state"], &shown.body["held_back"]["deletions"]), (&json!("held"), &json!(12)), "{shown:?}");
    let ran = groupcast(&["sources", "confirm", "files"], &environment);
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(user.get("/v1/sources/files").await.body["groups"], 1);

    // Another leads, and goes on with what there is.
    plane.controllers[leader].terminate();
    folder.write("groups.d/later.yaml", "kind: group\nid: files-later\n");
    eventually("the other reads it", || async { user.get("/v1/sources/files").await.body["groups"] == 2 }).await;
    folder.write("groups.d/later.yaml", "kind: group\nid: [");
    let polled = user.ask("POST", "/v1/sources/files/poll", &[], None).await;
    assert_eq!(polled.status, 200, "{polled:?}");
    let shown = user.get("/v1/sources/files").await;
    assert_eq!((&shown.body["groups"], &shown.body["malformed"]), (&json!(2), &json!(1)), "{shown:?}");
    assert!(shown.body["malformed_items"][0].as_str().is_some_and(|words| words.contains("later.yaml")), "{shown:?}");
}
