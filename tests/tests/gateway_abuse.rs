//! One client must not take from the others what they share: time, memory, places, tokens and names. On real gateways.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use groupcast_bus_config::accounts::Role;
use groupcast_control::registry::{Elsewhere, Registry};
use groupcast_tests::control::{Controller, workload};
use groupcast_tests::gateway::{Desk, Folder, Gateway, User, group, groupcast};
use groupcast_tests::world::{DEADLINE, eventually};
use serde_json::{Value, json};

/// A gateway answers this at once, also on a machine with much to do.
const AT_ONCE: Duration = Duration::from_secs(5);

fn dry_run(groups: Vec<Value>) -> Value {
    json!({ "dry_run": true, "put": groups.into_iter().map(|group| json!({ "document": group })).collect::<Vec<_>>() })
}

/// A group that a global binding gives to every workload.
fn global(id: &str, rules: Vec<String>) -> Value {
    json!({ "kind": "group", "id": id, "rules": rules, "bindings": ["global"] })
}

/// A source that places one workload, without which a plan is about nobody.
async fn with_a_workload(desk: &Desk) {
    let (client, _events) = desk.bus.connect(0, Role::Controller, "placer").await;
    let registry = Registry::new(client);
    let placed = registry.register(&"h".parse().expect("an id"), &[workload("h", "w", 1, &[])], Elsewhere::Move).await;
    placed.expect("registered");
    eventually("the workload is seen", || async { desk.admin.get("/v1/workloads/w").await.status == 200 }).await;
}

/// Asks all the time whether the gateway lives, and for a document; the longest that took.
async fn longest_answer(user: &User, during: impl Future<Output = ()>) -> Duration {
    let mut longest = Duration::ZERO;
    tokio::pin!(during);
    loop {
        let start = Instant::now();
        let asked = async {
            assert_eq!(user.send("GET", "/livez", &[], None).await.expect("an answer").status, 200);
            assert_eq!(user.send("GET", "/v1/groups?limit=1", &[], None).await.expect("an answer").status, 200);
        };
        asked.await;
        longest = longest.max(start.elapsed());
        tokio::select! {
            () = during.as_mut() => return longest,
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn plans_of_a_viewer_hold_up_nobody() {
    let desk = Desk::start().await;
    with_a_workload(&desk).await;
    let viewer = desk.known(desk.token("eve", "viewer", &[])).await;
    // Many rules with a prefix each: long to compute where each cut looks at every rule.
    let prefix =
        |i: usize| format!("ingress tcp {} from 10.{}.{}.{}/31", 1 + i % 60_000, i >> 14 & 255, i >> 7 & 127, 2 * (i & 127));
    let apart: Vec<Value> =
        (0..5).map(|g| global(&format!("apart{g}"), (0..9_000).map(|i| prefix(g * 9_000 + i)).collect())).collect();
    // Each rule within the one before: what that means has as many parts as the square of the rules.
    let within = |i: usize| {
        format!(
            "ingress tcp {} from 10.{}.{}.0-10.{}.{}.255",
            1 + 2 * (i % 30_000),
            i / 256,
            i % 256,
            255 - i / 256,
            255 - i % 256
        )
    };
    let nested: Vec<Value> = vec![global("nested", (0..9_000).map(within).collect())];
    // As many stateful groups as stateless ones, all in one place.
    let mixed: Vec<Value> = (0..8_000)
        .map(|i| json!({ "kind": "group", "id": format!("m{i}"), "stateful": i % 2 == 0, "bindings": [format!("space:s{i}")] }))
        .collect();
    let during = async {
        let plans = [apart, nested, mixed].map(|groups| {
            let viewer = viewer.clone();
            async move { viewer.post("/v1/changes", dry_run(groups), &[]).await }
        });
        let writes = async {
            // While plans are computed others write, so that the state moves under them.
            for i in 0..10 {
                let answer = desk.admin.put(&format!("g{i}"), group(&format!("g{i}"), &[]), &[]).await;
                assert_eq!(answer.status, 201, "{}", answer.text);
            }
        };
        let (answers, ()) = tokio::join!(futures::future::join_all(plans), writes);
        let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
        assert_eq!(statuses[0], 200, "{}", answers[0].text.chars().take(300).collect::<String>());
        assert_eq!(answers[0].body["gained_total"].as_u64(), Some(45_000));
        assert_eq!(statuses[1], 422, "what is too much is refused: {}", answers[1].text.chars().take(300).collect::<String>());
        assert!(answers[1].body["detail"].as_str().is_some_and(|detail| detail.contains("split it")), "{}", answers[1].text);
        assert_eq!(statuses[2], 200, "{}", answers[2].text.chars().take(300).collect::<String>());
    };
    let longest = longest_answer(&desk.admin, during).await;
    assert!(longest < AT_ONCE, "somebody waited {longest:?} for somebody else's plan");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_viewer_sends_is_bounded_before_it_is_read() {
    let desk = Desk::start().await;
    let viewer = desk.known(desk.token("eve", "viewer", &[])).await;
    let long = |bytes: usize| vec![b' '; bytes];
    let answer = viewer.ask("POST", "/v1/changes", &[], Some(long(9 * 1024 * 1024))).await;
    assert_eq!(answer.status, 413, "{}", answer.text);
    let answer = viewer.ask("PUT", "/v1/groups/web", &[], Some(b"{}".to_vec())).await;
    assert_eq!(answer.status, 403, "{}", answer.text);
    let values = format!("{{\"put\":[{}]}}", vec!["1"; 3_000_000].join(","));
    let answer = desk.admin.ask("POST", "/v1/changes", &[], Some(values.into_bytes())).await;
    assert_eq!(answer.status, 413, "{}", answer.text);
}

/// Sends a request as it is written; all of the answer.
fn raw(address: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("connected");
    stream.set_read_timeout(Some(DEADLINE)).expect("set");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer); // what came before it was cut off counts
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn strangers_leave_nothing_in_memory() {
    let desk = Desk::start().await;
    let address = desk.gateway.address;
    for i in 0..200 {
        let method = format!("INVENTED{i}");
        let answer = raw(address, &format!("{method} /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"));
        assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
    }
    let metrics = desk.admin.send("GET", "/metrics", &[], None).await.expect("an answer").text;
    assert!(metrics.contains("groupcast_http_requests_total") && metrics.contains("method=\"other\""), "{metrics}");
    assert!(!metrics.contains("INVENTED"), "methods that somebody invented are remembered");
    let stranger = desk.admin.with_token("");
    let answer = stranger.ask("POST", "/v1/join", &[], Some(vec![b' '; 60 * 1024])).await;
    assert!([409, 413].contains(&answer.status), "{}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_large_body_of_a_stranger_is_not_taken() {
    let folder = Folder::new("abuse");
    let (data, port) = (folder.0.join("data"), free_port());
    let _up = up(&data, port).await;
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let body = format!("{{\"token\":\"{}\",\"public_key\":\"x\"}}", "x".repeat(100_000));
    let head =
        format!("POST /v1/join HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n", body.len());
    let answer = raw(address, &format!("{head}{body}"));
    assert!(answer.starts_with("HTTP/1.1 413") || answer.is_empty(), "{answer}");
    assert!(!answer.contains("forbidden"), "all of it was read: {answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_good_token_passes_whatever_others_tried_from_the_same_address() {
    let desk = Desk::start().await;
    let bad = desk.admin.with_token(&format!("gct.root.{}", "x".repeat(43)));
    let mut limited = false;
    for i in 0..100 {
        let user = if i % 2 == 0 { bad.clone() } else { desk.admin.with_token(&format!("gct.nobody{i}.{}", "x".repeat(43))) };
        let answer = user.get("/v1/whoami").await;
        assert!([401, 429].contains(&answer.status), "{}", answer.text);
        limited |= answer.status == 429;
    }
    assert!(limited, "who only fails is slowed down");
    let answer = desk.admin.get("/v1/whoami").await;
    assert_eq!(answer.status, 200, "a good token is locked out: {}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_trusted_proxy_says_where_a_request_comes_from() {
    let desk = Desk::start().await;
    let said = [("x-forwarded-for", "198.51.100.7")];
    let from = |answer: groupcast_tests::gateway::Answer| answer.body["from"].as_str().unwrap_or_default().to_owned();
    assert_eq!(from(desk.admin.ask("GET", "/v1/whoami", &said, None).await), "127.0.0.1");
    let behind = Gateway::start(&desk.bus.url(0), &["--trusted-proxy", "127.0.0.0/8"]).await;
    let behind = User::new(&behind, &desk.admin.token).await;
    assert_eq!(from(behind.ask("GET", "/v1/whoami", &said, None).await), "198.51.100.7");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_token_cannot_take_all_watches_and_a_revoked_one_keeps_none() {
    let desk = Desk::start().await;
    let viewer = desk.known(desk.token("eve", "viewer", &[])).await;
    let watch = async |user: &User, path: &str| {
        let request = user.http.get(format!("{}{path}", user.base)).bearer_auth(&user.token);
        request.send().await.expect("an answer")
    };
    let mut watching = Vec::new();
    let refused = loop {
        let path = if watching.len() % 2 == 0 { "/v1/watch" } else { "/v1/registrations-watch" };
        let response = watch(&viewer, path).await;
        if response.status() != 200 {
            break response.status().as_u16();
        }
        watching.push(response);
        assert!(watching.len() < 200, "one token took them all");
    };
    assert_eq!(refused, 503);
    assert_eq!(watch(&desk.admin, "/v1/watch").await.status(), 200, "others have places left");
    let change = desk.admin.change(&[group("web", &[])]).await;
    let (waiting, path) = (viewer.clone(), format!("/v1/changes/{change}?wait=enforced&timeout=120s"));
    let waiting = tokio::spawn(async move { waiting.get(&path).await.status });
    assert_eq!(desk.admin.delete("/v1/tokens/eve", &[]).await.status, 200);
    let ended = futures::future::join_all(watching.into_iter().map(|response| response.bytes()));
    tokio::time::timeout(DEADLINE, ended).await.expect("a revoked token still watches");
    assert_eq!(tokio::time::timeout(DEADLINE, waiting).await.expect("a revoked token still waits").expect("it ends"), 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_watch_ends_when_its_token_expires() {
    let desk = Desk::start().await;
    let viewer = desk.known(desk.token("eve", "viewer", &["--life", "3s"])).await;
    let request = viewer.http.get(format!("{}/v1/watch", viewer.base)).bearer_auth(&viewer.token);
    let response = request.send().await.expect("an answer");
    assert_eq!(response.status(), 200);
    let _ = tokio::time::timeout(DEADLINE, response.bytes()).await.expect("an expired token still watches");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_confirmation_is_its_users_alone() {
    let desk = Desk::start().await;
    let scoped = |ids: &'static str| ["--ids", ids, "--bindings", "space:shop"];
    let ann = desk.known(desk.token("ann", "editor", &scoped("ann-"))).await;
    let bob = desk.known(desk.token("bob", "editor", &scoped("bob-"))).await;
    let key = [("idempotency-key", "the-same")];
    let held = |id: &str, rule: &str| json!({ "confirm": "60s", "put": [{ "document": group(id, &[rule]) }] });
    let by_ann = ann.post("/v1/changes", held("ann-web", "ingress tcp 443 from any"), &key).await;
    assert_eq!(by_ann.status, 201, "{}", by_ann.text);
    let again = ann.post("/v1/changes", held("ann-web", "ingress tcp 443 from any"), &key).await;
    assert_eq!((again.status, &again.body["change"]), (200, &by_ann.body["change"]), "{}", again.text);
    // The same key in another's hand holds another change.
    let by_bob = bob.post("/v1/changes", held("bob-web", "ingress tcp 443 from any"), &key).await;
    assert_eq!(by_bob.status, 201, "{}", by_bob.text);
    let confirm = |change: &Value| format!("/v1/changes/{change}/confirm");
    let refused = bob.ask("POST", &confirm(&by_ann.body["change"]), &[], None).await;
    assert_eq!(refused.status, 403, "others confirm: {}", refused.text);
    let kept = ann.ask("POST", &confirm(&by_ann.body["change"]), &[], None).await;
    assert_eq!(kept.status, 200, "{}", kept.text);
    let kept = desk.admin.ask("POST", &confirm(&by_bob.body["change"]), &[], None).await;
    assert_eq!(kept.status, 200, "an administrator may: {}", kept.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_took_itself_back_stays_back() {
    let desk = Desk::start().await;
    let held = json!({ "confirm": "1s", "put": [{ "document": group("web", &["ingress tcp 443 from any"]) }] });
    assert_eq!(desk.admin.post("/v1/changes", held, &[("idempotency-key", "k")]).await.status, 201);
    eventually("it is taken back", || async { desk.admin.get("/v1/groups/web").await.status == 404 }).await;
    let changes = desk.admin.get("/v1/changes").await;
    let last = changes.body["items"][0]["change"].as_u64().expect("a number");
    // Undoing the taking back brings the group again, and nothing that would take it back once more.
    let undone = desk.admin.post(&format!("/v1/changes/{last}/undo"), json!({}), &[]).await;
    assert_eq!(undone.status, 201, "{}", undone.text);
    let refused = desk.admin.ask("POST", &format!("/v1/changes/{}/confirm", undone.body["change"]), &[], None).await;
    assert_eq!(refused.status, 404, "it waits for a confirmation again: {}", refused.text);
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        assert_eq!(desk.admin.get("/v1/groups/web").await.status, 200, "it was taken back once more");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn web_pages_with_names_of_their_own_are_kept_out() {
    let desk = Desk::start().await;
    let ask = |host: &str, more: &str| {
        let answer =
            raw(desk.gateway.address, &format!("GET /metrics HTTP/1.1\r\nhost: {host}\r\n{more}connection: close\r\n\r\n"));
        answer.split(' ').nth(1).unwrap_or_default().to_owned()
    };
    let port = desk.gateway.address.port();
    assert_eq!(ask(&format!("localhost:{port}"), ""), "200");
    assert_eq!(ask(&format!("evil.example:{port}"), ""), "421");
    assert_eq!(ask(&format!("localhost:{port}"), "origin: http://evil.example\r\n"), "421");
    let named = Gateway::start(&desk.bus.url(0), &["--api-host", "groupcast.example"]).await;
    let answer = raw(named.address, "GET /livez HTTP/1.1\r\nhost: groupcast.example\r\nconnection: close\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_shows_itself_to_nobody_outside_without_a_token() {
    let ran = groupcast(&["controller", "--listen", "0.0.0.0:0", "--server", "nats://127.0.0.1:9"], &[]);
    assert!(ran.code == 1 && ran.stderr.contains("--controller-certificate"), "{ran:?}");
    let (desk, folder) = (Desk::start().await, Folder::new("abuse"));
    let file = folder.0.join("token");
    std::fs::write(&file, "0123456789abcdef0123").expect("written");
    let token_file = file.display().to_string();
    let mut controller =
        Controller::start(&desk.bus.url(0), "c1", Duration::from_secs(1), &["--controller-token-file", &token_file]);
    controller.ready().await;
    let log = controller.log();
    let address = log.lines().find(|line| line.contains("serving metrics and health")).expect("it says where");
    let address = address.split("address=").nth(1).and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    let address: SocketAddr = address.expect("an address");
    let ask = |path: &str, more: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{more}connection: close\r\n\r\n");
        raw(address, &request).split(' ').nth(1).unwrap_or_default().to_owned()
    };
    assert_eq!(ask("/livez", ""), "200");
    assert_eq!(ask("/metrics", ""), "401");
    assert_eq!(ask("/v1/status", "authorization: Bearer wrong\r\n"), "401");
    assert_eq!(ask("/metrics", "authorization: Bearer 0123456789abcdef0123\r\n"), "200");
    let rebound = raw(address, "GET /livez HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n");
    assert!(rebound.starts_with("HTTP/1.1 421"), "{rebound}");
    controller.kill();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_viewer_gets_no_scope_that_narrows_nothing() {
    let desk = Desk::start().await;
    let new = json!({ "id": "eve", "role": "viewer", "scope": { "ids": ["shop-"] } });
    let answer = desk.admin.post("/v1/tokens", new, &[]).await;
    assert!(answer.status == 400 && answer.text.contains("reads everything"), "{}", answer.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_cannot_speak_to_a_terminal() {
    let desk = Desk::start().await;
    for name in ["a\u{202e}b", "a\u{1b}[2Jb", "a\u{2066}b", "a\u{200f}b", "a\u{9b}b"] {
        let document = json!({ "kind": "group", "id": "web", "name": name });
        let answer = desk.admin.put("web", document, &[]).await;
        assert_eq!(answer.status, 400, "{name:?}: {}", answer.text);
    }
    // What stands in a file that is refused comes back in the words that refuse it.
    let folder = Folder::new("abuse");
    let file = folder.0.join("evil.yaml");
    std::fs::write(
        &file,
        "kind: group\nid: web\nrules: [\"ingress \\x1b[2J\\u202e tcp from any\"]\nbindings: [\"\\x1b]0;x\\x07\"]\n",
    )
    .expect("written");
    let environment = [("GROUPCAST_GATEWAY", desk.gateway.url()), ("GROUPCAST_TOKEN", desk.admin.token.clone())];
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();
    for arguments in [&["apply", "-f"][..], &["plan", "-f"], &["apply", "-o", "json", "-f"]] {
        let ran = groupcast(&[arguments, &[file.to_str().expect("a path")]].concat(), &environment);
        let said = format!("{}{}", ran.stdout, ran.stderr);
        assert_ne!(ran.code, 0, "{ran:?}");
        let bad = said.chars().find(|c| (c.is_control() && *c != '\n') || ('\u{202a}'..='\u{202e}').contains(c));
        assert_eq!(bad, None, "{said:?}");
    }
    let answer = groupcast(&["get", "groups", "a\u{202e}b\u{1b}[2J"], &environment);
    assert!(!answer.stderr.contains(['\u{202e}', '\u{1b}']), "{answer:?}");
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a port").port()
}

struct Up(std::process::Child);

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Everything on one machine, with what signs for hosts that join.
async fn up(data: &std::path::Path, port: u16) -> Up {
    let child = std::process::Command::new(groupcast_tests::control::binary())
        .args(["up", "--data", &data.display().to_string(), "--api-listen", &format!("127.0.0.1:{port}")])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn();
    let up = Up(child.expect("it starts"));
    // The first test of a process installs it for all.
    let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
    let ready = format!("http://127.0.0.1:{port}/readyz");
    eventually("it is ready", || async { reqwest::get(&ready).await.is_ok_and(|answer| answer.status() == 200) }).await;
    up
}
