//! From a request to hosts that enforce it: waiting by long poll and by server-sent events, progress, explanations, slow readers.

use std::time::Duration;

use groupcast_tests::control::{Plane, workload};
use groupcast_tests::gateway::{Folder, Gateway, User, group, groupcast, token};
use groupcast_tests::world::eventually;
use groupcast_topics::reader;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const LEASE: Duration = Duration::from_millis(600);

struct Stage {
    plane: Plane,
    gateway: Gateway,
    user: User,
}

async fn stage() -> Stage {
    let mut plane = Plane::start(1, LEASE).await;
    plane.ready().await;
    let text = token(&plane.url(), "root", "admin", &[]);
    let gateway = Gateway::start(&plane.url(), &[]).await;
    let user = User::new(&gateway, &text).await;
    user.change(&[group("web", &["egress tcp 5432 to group:db"]), group("db", &[])]).await;
    plane.register(vec![workload("h1", "w1", 1, &["web"]), workload("h2", "w2", 2, &["db"])]).await;
    plane.leader().await;
    eventually("the gateway has read the registry", || async { user.get("/v1/workloads/w2").await.status == 200 }).await;
    Stage { plane, gateway, user }
}

/// A stream of events, read by hand so that it can also not be read.
struct Events {
    stream: TcpStream,
    buffer: String,
}

impl Events {
    async fn open(gateway: &Gateway, user: &User, path: &str, last: Option<u64>) -> Self {
        // A small window, so that a reader who does not read is noticed soon.
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(4_096).expect("a small window");
        let mut stream = socket.connect(gateway.address).await.expect("connected");
        let last = last.map_or(String::new(), |last| format!("Last-Event-ID: {last}\r\n"));
        let head = format!(
            "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {}\r\n{last}\r\n",
            user.token
        );
        stream.write_all(head.as_bytes()).await.expect("sent");
        Self { stream, buffer: String::new() }
    }

    /// The next event of this kind.
    async fn next(&mut self, kind: &str) -> Option<Value> {
        self.next_of(&[kind]).await.map(|(_, event)| event)
    }

    /// The next event of one of these kinds.
    async fn next_of(&mut self, kinds: &[&str]) -> Option<(String, Value)> {
        let mut bytes = [0; 65_536];
        loop {
            while let Some((event, rest)) =
                self.buffer.split_once("\n\n").map(|(event, rest)| (event.to_owned(), rest.to_owned()))
            {
                self.buffer = rest;
                let field =
                    |name: &str| event.lines().find_map(|line| line.strip_prefix(name).map(|text| text.trim().to_owned()));
                if let Some(kind) = field("event:").filter(|kind| kinds.contains(&kind.as_str())) {
                    return Some((kind, serde_json::from_str(&field("data:")?).ok()?));
                }
            }
            let length = tokio::time::timeout(Duration::from_secs(30), self.stream.read(&mut bytes)).await.ok()?.ok()?;
            if length == 0 {
                return None;
            }
            self.buffer += &String::from_utf8_lossy(&bytes[..length]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_is_waited_for_until_every_host_has_it() {
    let Stage { plane, gateway, user } = stage().await;
    let mut events = Events::open(&gateway, &user, "/v1/watch", None).await;
    // Only one of the two hosts is there: the other is named.
    let one = plane.host("h1", reader::Settings::default(), Box::new(|_, _| true)).await;
    eventually("the host has joined", || async { !one.documents().await.is_empty() }).await;
    let number = user
        .change(&[
            group("web", &["egress tcp 5432 to group:db", "egress tcp 1 to any"]),
            group("db", &["ingress tcp 5432 from group:web"]),
        ])
        .await;
    let late = user.get(&format!("/v1/changes/{number}?wait=enforced&timeout=300ms")).await;
    assert_eq!((late.status, &late.body["progress"]["done"]), (200, &json!(false)), "{}", late.text);
    assert_eq!(
        (&late.body["progress"]["span"], &late.body["progress"]["behind"][0]["host"]),
        (&json!(2), &json!("h2")),
        "{}",
        late.text
    );
    // It comes, and whoever waits is told.
    let waiting = {
        let user = user.clone();
        tokio::spawn(async move { user.get(&format!("/v1/changes/{number}?wait=enforced&timeout=30s")).await })
    };
    let _two = plane.host("h2", reader::Settings::default(), Box::new(|_, _| true)).await;
    let done = waiting.await.expect("an answer");
    assert_eq!((&done.body["progress"]["done"], &done.body["progress"]["enforced"]), (&json!(true), &json!(2)), "{}", done.text);
    // The same as events: first that it was written, then how far it is.
    let changed = loop {
        let event = events.next("change").await.expect("an event");
        if event["change"] == number {
            break event;
        }
    };
    assert_eq!(changed["documents_total"], 2);
    loop {
        let progress = events.next("progress").await.expect("an event");
        if progress["change"] == number && progress["done"] == true {
            break;
        }
    }
    // Who comes later with the last number begins after it.
    let next = user.change(&[group("web", &["egress tcp 5432 to group:db"])]).await;
    let mut later = Events::open(&gateway, &user, "/v1/watch", Some(number)).await;
    assert_eq!(later.next("change").await.expect("an event")["change"], next);
    // A change that concerns nobody is done at once.
    let nobody = user.change(&[group("nobody", &[])]).await;
    let done = user.get(&format!("/v1/changes/{nobody}?wait=enforced")).await;
    assert_eq!((&done.body["progress"]["done"], &done.body["progress"]["span"]), (&json!(true), &json!(0)), "{}", done.text);
    // What is explained says whether the host has it.
    let answer = user.get("/v1/explain?from=w1&to=w2&traffic=tcp/5432").await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(
        (&answer.body["allowed"], &answer.body["egress"]["rule"]),
        (&json!(true), &json!("egress tcp 5432 to group:db")),
        "{}",
        answer.text
    );
    assert_eq!(answer.body["egress"]["host"], "h1");
    eventually("the host has it", || async {
        let answer = user.get("/v1/explain?from=w1&to=w2&traffic=tcp/5432").await;
        answer.body["egress"]["enforced"] == true && answer.body["ingress"]["enforced"] == true
    })
    .await;
    let denied = user.get("/v1/explain?from=w1&to=w2&traffic=tcp/22").await;
    assert_eq!(denied.body["allowed"], false);
    assert!(denied.body["egress"]["why"].as_str().unwrap().contains("the port is 22"), "{}", denied.text);
    for (query, status) in [
        ("from=w1&to=w2", 400),
        ("from=w1&to=w2&traffic=x", 400),
        ("from=nobody&to=w2&traffic=tcp/1", 404),
        ("from=a%20b&to=w2&traffic=tcp/1", 400),
        ("from=2001:db8::1&to=w2&traffic=tcp/1", 400),
    ] {
        assert_eq!(user.get(&format!("/v1/explain?{query}")).await.status, status, "{query}");
    }
    // A plan says what would change in meaning.
    let plan = user.post("/v1/changes", json!({ "dry_run": true, "put": [{ "document": group("db", &[]) }] }), &[]).await;
    assert_eq!((&plan.body["lost_total"], &plan.body["hosts"]), (&json!(1), &json!(["h2"])), "{}", plan.text);
    // It is good for as long as it would mean the same.
    let name = plan.body["plan"].as_str().unwrap().to_owned();
    let apply = |plan: &str| json!({ "put": [{ "document": group("db", &[]) }], "plan": plan });
    user.change(&[group("unrelated", &[])]).await;
    let mut dry = apply(&name);
    dry["dry_run"] = json!(true);
    assert_eq!(user.post("/v1/changes", dry, &[]).await.body["plan"].as_str(), Some(name.as_str()), "unrelated changes leave it");
    user.change(&[group("db", &["ingress tcp 5433 from any"])]).await;
    assert_eq!(user.post("/v1/changes", apply(&name), &[]).await.status, 412, "it would mean something else");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_reads_too_slowly_is_cut_and_nobody_else_is() {
    let Stage { plane: _plane, gateway, user } = stage().await;
    let mut slow = Events::open(&gateway, &user, "/v1/watch", None).await;
    let mut quick = Events::open(&gateway, &user, "/v1/watch", None).await;
    let reading = tokio::spawn(async move {
        let mut seen = 0;
        while let Some(event) = quick.next("change").await {
            seen += 1;
            if event["reason"] == "the last" {
                return seen;
            }
        }
        0
    });
    // Large events, more of them than sockets hold and than are kept for anybody.
    let (writers, rounds) = (4, 200);
    let mut tasks = Vec::new();
    for writer in 0..writers {
        let user = user.clone();
        tasks.push(tokio::spawn(async move {
            let names: Vec<String> = (0..100).map(|i| format!("{writer}-{i:03}{}", "x".repeat(58))).collect();
            for round in 0..rounds {
                let document = |id: &String| json!({ "document": { "kind": "group", "id": id, "name": format!("n{round}") } });
                let put: Vec<Value> = names.iter().map(document).collect();
                assert_eq!(user.post("/v1/changes", json!({ "put": put }), &[]).await.status, 201);
            }
        }));
    }
    for task in tasks {
        task.await.expect("written");
    }
    let body = json!({ "reason": "the last", "put": [{ "document": group("last", &[]) }] });
    assert_eq!(user.post("/v1/changes", body, &[]).await.status, 201);
    let seen = tokio::time::timeout(Duration::from_secs(60), reading).await.expect("in time").expect("it ends");
    assert_eq!(seen, writers * rounds + 1, "the quick reader saw everything");
    // The slow one is told so behind what its socket held, or was cut off without a word if it took nothing for too long.
    let mut held = 0;
    let cut = loop {
        match slow.next_of(&["change", "cut"]).await {
            Some((kind, event)) if kind == "change" => {
                assert_ne!(event["reason"], "the last", "everything was kept for it");
                held += 1;
            }
            other => break other,
        }
    };
    assert!(held < writers * rounds, "{held}");
    if let Some((_, event)) = cut {
        assert!(event["missed"].as_u64().is_some_and(|missed| missed > 0), "{event}");
        assert!(slow.next("change").await.is_none(), "and that it is over");
    }
}

/// `apply --wait` of what was written before ended with 0 at once, also where no host had it.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_written_before_is_waited_for_too() {
    let stage = stage().await;
    let folder = Folder::new("before");
    let file = folder.0.join("web.yaml").display().to_string();
    std::fs::write(&file, "kind: group\nid: web\nrules: [egress tcp 5433 to group:db]\n").expect("written");
    let url = stage.gateway.url();
    let environment = [("GROUPCAST_GATEWAY", url.as_str()), ("GROUPCAST_TOKEN", stage.user.token.as_str())];
    // Nobody follows for h1.
    for words in ["written", "nothing to do"] {
        let ran = groupcast(&["apply", "-f", &file, "--wait", "--timeout", "2s"], &environment);
        assert!(ran.code != 0 && ran.stderr.contains(words), "{ran:?}");
    }
    drop(stage.plane);
}
