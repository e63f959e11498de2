//! Every route of a gateway with good, bad, stale, repeated, oversized and unauthorised requests, from a client that is none of ours.
//! Every answer is held against the OpenAPI document: no failure of the server's own, no status that is not documented.

use std::collections::BTreeSet;

use groupcast_tests::gateway::{Desk, group};
use serde_json::{Value, json};

fn fields(body: &Value) -> Vec<(String, Option<u64>, String)> {
    let errors = body["errors"].as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    errors.iter().map(|error| (text(&error["document"]), error["rule"].as_u64(), text(&error["field"]))).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_document_is_written_read_and_deleted() {
    let desk = Desk::start().await;
    let admin = &desk.admin;
    // Nothing there.
    assert_eq!(admin.get("/v1/groups/web").await.status, 404);
    assert_eq!(admin.get("/v1/groups").await.body["items"], json!([]));
    // Good.
    let made = admin.put("web", json!({ "rules": ["ingress tcp 443 from any"], "bindings": ["space:shop"] }), &[]).await;
    assert_eq!(made.status, 201, "{}", made.text);
    let etag = made.etag.clone().expect("an ETag");
    assert_eq!(etag, format!("\"{}\"", made.body["revision"]));
    let read = admin.get("/v1/groups/web").await;
    assert_eq!((read.status, read.etag.as_deref()), (200, Some(etag.as_str())));
    assert_eq!(read.body["document"]["rules"], json!(["ingress tcp 443 from any"]));
    assert!(read.body["changed_by"].as_str().is_some_and(|by| by.starts_with("root from 127.0.0.1")), "{}", read.text);
    assert_eq!(admin.ask("GET", "/v1/groups/web", &[("if-none-match", &etag)], None).await.status, 304);
    // The same again changes nothing.
    let same = admin.put("web", json!({ "rules": ["ingress tcp 443 from any"], "bindings": ["space:shop"] }), &[]).await;
    assert_eq!((same.status, &same.body["unchanged"], same.etag.as_deref()), (200, &json!(true), Some(etag.as_str())));
    // YAML, and why.
    let yaml = b"rules:\n  - ingress tcp 8443 from any\n".to_vec();
    let headers = [("content-type", "application/yaml"), ("if-match", etag.as_str()), ("groupcast-reason", "a new port")];
    let second = admin.ask("PUT", "/v1/groups/web", &headers, Some(yaml)).await;
    assert_eq!(second.status, 200, "{}", second.text);
    assert_eq!(admin.get("/v1/groups/web").await.body["reason"], "a new port");
    // Stale: the answer names who was faster, and when.
    let stale = admin.put("web", json!({ "rules": [] }), &[("if-match", &etag)]).await;
    assert_eq!(stale.status, 412);
    let detail = stale.body["detail"].as_str().unwrap();
    assert!(detail.contains("by root from 127.0.0.1 at 20") && detail.contains("group web"), "{detail}");
    assert_eq!(admin.put("web", json!({}), &[("if-none-match", "*")]).await.status, 412);
    assert_eq!(admin.put("new", json!({}), &[("if-match", "\"7\"")]).await.status, 412);
    assert_eq!(admin.delete("/v1/groups/web", &[("if-match", &etag)]).await.status, 412);
    // Bad conditions.
    for header in [("if-match", "7"), ("if-none-match", "\"7\""), ("idempotency-key", "")] {
        assert_eq!(admin.put("web", json!({}), &[header]).await.status, 400, "{header:?}");
    }
    // Bad documents: everything that is wrong, with rule and field.
    let bad = json!({ "rules": ["ingress tcp 443 from any", "nonsense", { "direction": "ingress", "protocol": "tcp", "ports": 0, "remote": "any" }], "more": 1 });
    let refused = admin.put("web", bad, &[]).await;
    assert_eq!(refused.status, 400);
    let found = fields(&refused.body);
    let rules: BTreeSet<Option<u64>> = found.iter().map(|(_, rule, _)| *rule).collect();
    assert_eq!(rules, BTreeSet::from([None, Some(1), Some(2)]), "{}", refused.text);
    assert!(found.iter().all(|(document, ..)| document == "group \"web\""), "{found:?}");
    for (body, status) in [
        ("", 400),
        ("[", 400),
        ("[]", 400),
        ("[{},{}]", 400),
        ("7", 400),
        (r#"{"id":"other"}"#, 400),
        (r#"{"kind":"template"}"#, 400),
    ] {
        let answer = admin.ask("PUT", "/v1/groups/web", &[], Some(body.as_bytes().to_vec())).await;
        assert_eq!(answer.status, status, "{body}: {}", answer.text);
    }
    assert_eq!(admin.put("not.an.id", json!({}), &[]).await.status, 400);
    assert_eq!(admin.get("/v1/groups/not%20an%20id").await.status, 400);
    // Oversized.
    let long = json!({ "name": "x".repeat(3_000_000) });
    assert_eq!(admin.put("web", long, &[]).await.status, 413);
    let wide =
        json!({ "members": (0..60_000u32).map(|i| format!("2001:db8:{:x}:{:x}::/64", i >> 16, i & 0xffff)).collect::<Vec<_>>() });
    assert_eq!(admin.put("web", wide, &[]).await.status, 413, "longer than one message");
    // Deleted, and gone.
    let gone = admin.delete("/v1/groups/web", &[]).await;
    assert_eq!((gone.status, &gone.body["revision"]), (200, &Value::Null));
    assert_eq!(admin.get("/v1/groups/web").await.status, 404);
    assert_eq!(admin.delete("/v1/groups/web", &[]).await.status, 404);
    assert_eq!(admin.put("web", json!({}), &[("if-none-match", "*")]).await.status, 201, "what was deleted can be made anew");
    // Templates go the same way.
    let template = json!({ "network": "n1", "prefixes": ["10.0.0.0/8"] }).to_string().into_bytes();
    let made = admin.ask("PUT", "/v1/templates/vm", &[], Some(template)).await;
    assert_eq!(made.status, 201, "{}", made.text);
    assert_eq!(admin.get("/v1/templates/vm").await.body["document"]["network"], "n1");
    assert_eq!(admin.get("/v1/templates").await.body["items"].as_array().unwrap().len(), 1);
    assert_eq!(admin.delete("/v1/templates/vm", &[]).await.status, 200);
    assert_eq!(admin.get("/v1/templates/vm").await.status, 404);
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_come_in_pages() {
    let desk = Desk::start().await;
    let groups: Vec<Value> = (0..25).map(|i| group(&format!("g{i:02}"), &[])).chain([group("other", &[])]).collect();
    desk.admin.change(&groups).await;
    let (mut ids, mut path, mut pages) = (Vec::new(), "/v1/groups?limit=10&prefix=g".to_owned(), 0);
    loop {
        let page = desk.admin.get(&path).await;
        let items = page.body["items"].as_array().unwrap().clone();
        ids.extend(items.iter().map(|item| item["document"]["id"].as_str().unwrap().to_owned()));
        pages += 1;
        match page.body["next"].as_str() {
            Some(next) => path = format!("/v1/groups?limit=10&prefix=g&after={next}"),
            None => break,
        }
    }
    assert_eq!((ids.len(), pages), (25, 3));
    assert!(ids.is_sorted());
    for bad in ["limit=0", "limit=1001", "limit=x", "limit=-1"] {
        assert_eq!(desk.admin.get(&format!("/v1/groups?{bad}")).await.status, 400, "{bad}");
        assert_eq!(desk.admin.get(&format!("/v1/changes?{bad}")).await.status, 400, "{bad}");
    }
    assert_eq!(desk.admin.get("/v1/groups?limit=1000").await.status, 200);
    assert_eq!(desk.admin.get("/v1/workloads").await.body["items"], json!([]));
    assert_eq!(desk.admin.get("/v1/hosts").await.body["items"], json!([]));
    for path in ["/v1/workloads/w", "/v1/hosts/h", "/v1/changes/999999", "/v1/nonsense"] {
        assert_eq!(desk.admin.get(path).await.status, 404, "{path}");
    }
    for path in
        ["/v1/workloads/a%20b", "/v1/hosts/a%20b", "/v1/changes/x", "/v1/changes/1?wait=sometime", "/v1/changes/1?timeout=x"]
    {
        assert_eq!(desk.admin.get(path).await.status, 400, "{path}");
    }
    assert_eq!(desk.admin.ask("PATCH", "/v1/groups", &[], None).await.status, 405);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_is_whole_planned_repeated_and_undone() {
    let desk = Desk::start().await;
    let admin = &desk.admin;
    let both = json!({ "reason": "both at once", "put": [{ "document": group("a", &["ingress tcp 1 from group:b"]) }, { "document": group("b", &[]) }] });
    // A plan changes nothing.
    let mut dry = both.clone();
    dry["dry_run"] = json!(true);
    let plan = admin.post("/v1/changes", dry.clone(), &[]).await;
    assert_eq!((plan.status, &plan.body["documents"][0]["action"]), (200, &json!("create")), "{}", plan.text);
    assert_eq!(admin.get("/v1/groups/a").await.status, 404);
    // Written once, however often it is sent.
    let first = admin.post("/v1/changes", both.clone(), &[("idempotency-key", "k1")]).await;
    assert_eq!(first.status, 201, "{}", first.text);
    let again = admin.post("/v1/changes", both.clone(), &[("idempotency-key", "k1")]).await;
    assert_eq!((again.status, &again.body["change"], &again.body["repeated"]), (200, &first.body["change"], &json!(true)));
    assert_eq!(again.body["documents"], first.body["documents"]);
    let other =
        admin.post("/v1/changes", json!({ "put": [{ "document": group("c", &[]) }] }), &[("idempotency-key", "k1")]).await;
    assert_eq!(other.status, 422);
    assert_eq!(admin.get("/v1/groups/c").await.status, 404);
    // Also one document, and its deletion.
    let one = admin.put("d", json!({}), &[("idempotency-key", "k2")]).await;
    let two = admin.put("d", json!({}), &[("idempotency-key", "k2")]).await;
    assert_eq!((two.status, &two.body["change"], &two.body["repeated"]), (200, &one.body["change"], &json!(true)));
    let one = admin.delete("/v1/groups/d", &[("idempotency-key", "k3")]).await;
    let two = admin.delete("/v1/groups/d", &[("idempotency-key", "k3")]).await;
    assert_eq!((two.status, &two.body["change"]), (200, &one.body["change"]), "{}", two.text);
    // A part that is wrong spoils the whole, and everything wrong is told.
    let broken = json!({ "put": [{ "document": group("e", &[]) }, { "document": group("f", &["x"]) }, { "document": { "kind": "workload", "id": "w", "host": "h", "network": "n" } }],
        "delete": [{ "kind": "nonsense", "id": "x" }, { "kind": "group", "id": "a.b" }] });
    let refused = admin.post("/v1/changes", broken, &[]).await;
    assert_eq!((refused.status, refused.body["errors"].as_array().unwrap().len()), (400, 6), "{}", refused.text);
    assert_eq!(admin.get("/v1/groups/e").await.status, 404);
    for (body, status) in [
        (json!({}), 400),
        (json!({ "put": [{ "document": group("e", &[]) }, { "document": group("e", &[]) }] }), 400),
        (json!({ "put": [{ "document": group("e", &[]), "revision": 7 }] }), 412),
        (json!({ "put": [{ "document": group("a", &[]), "revision": 0 }] }), 412),
        (json!({ "delete": [{ "kind": "group", "id": "nobody" }] }), 404),
        (json!({ "put": [], "unknown": 1 }), 400),
        (json!({ "put": [{ "document": group("e", &[]) }], "reason": "two\nlines" }), 400),
        (json!({ "put": [{ "document": group("e", &[]) }], "plan": "another" }), 412),
        (json!({ "put": [{ "document": { "kind": "group", "id": "e", "owner": "source:cc" } }] }), 409),
    ] {
        let answer = admin.post("/v1/changes", body.clone(), &[]).await;
        assert_eq!(answer.status, status, "{body}: {}", answer.text);
    }
    // A deny that names it keeps a group from being deleted.
    admin.change(&[group("z", &["deny ingress any from group:b"])]).await;
    let kept = admin.delete("/v1/groups/b", &[]).await;
    assert_eq!(kept.status, 409);
    assert!(kept.body["detail"].as_str().unwrap().contains("group z"), "{}", kept.text);
    // Undo restores what the change replaced, unless something newer depends on it.
    let number = first.body["change"].as_u64().unwrap();
    let refused = admin.post(&format!("/v1/changes/{number}/undo"), json!({}), &[]).await;
    assert_eq!(refused.status, 409, "group z names b: {}", refused.text);
    assert_eq!(admin.delete("/v1/groups/z", &[]).await.status, 200);
    let undone =
        admin.post(&format!("/v1/changes/{number}/undo"), json!({ "reason": "a mistake" }), &[("idempotency-key", "u")]).await;
    assert_eq!(undone.status, 201, "{}", undone.text);
    assert_eq!((admin.get("/v1/groups/a").await.status, admin.get("/v1/groups/b").await.status), (404, 404));
    let again =
        admin.post(&format!("/v1/changes/{number}/undo"), json!({ "reason": "a mistake" }), &[("idempotency-key", "u")]).await;
    assert_eq!((again.status, &again.body["change"]), (200, &undone.body["change"]), "{}", again.text);
    assert_eq!(admin.post(&format!("/v1/changes/{number}/undo"), json!({}), &[]).await.status, 412, "it is undone already");
    let redone = admin.post(&format!("/v1/changes/{}/undo", undone.body["change"]), json!({}), &[]).await;
    assert_eq!(redone.status, 201, "{}", redone.text);
    assert_eq!(admin.get("/v1/groups/a").await.body["document"]["rules"], json!(["ingress tcp 1 from group:b"]));
    assert_eq!(admin.post("/v1/changes/999999/undo", json!({}), &[]).await.status, 404);
    assert_eq!(admin.post("/v1/changes/x/undo", json!({}), &[]).await.status, 400);
    assert_eq!(admin.post(&format!("/v1/changes/{number}/undo"), json!("x"), &[]).await.status, 400);
    // Changes are remembered with who and why.
    let list = admin.get("/v1/changes?limit=1000").await;
    let reasons: Vec<&str> = list.body["items"].as_array().unwrap().iter().filter_map(|item| item["reason"].as_str()).collect();
    assert!(reasons.contains(&"both at once") && reasons.contains(&"a mistake"), "{reasons:?}");
    let shown = admin.get(&format!("/v1/changes/{number}")).await;
    assert_eq!((shown.status, &shown.body["documents_total"]), (200, &json!(2)), "{}", shown.text);
    // Without a controller nobody can wait.
    assert_eq!(admin.get(&format!("/v1/changes/{number}?wait=enforced&timeout=5s")).await.status, 503);
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_say_who_may_do_what() {
    let desk = Desk::start().await;
    let nobody = desk.admin.with_token("");
    for (method, path) in desk.admin.described.routes() {
        // A host that joins shows its join token instead, one that renews its credential the credential.
        let open = ["/livez", "/readyz", "/metrics", "/openapi.json", "/v1/join", "/v1/renew"].contains(&path);
        let path = path.replace("{id}", "x").replace("{number}", "1");
        let answer = nobody.ask(method, &path, &[], None).await;
        assert_eq!(answer.status == 401, !open, "{method} {path}: {}", answer.text);
    }
    for text in ["nonsense", "gct.root.wrong", "gct.nobody.wrong", "gct.root"] {
        assert_eq!(desk.admin.with_token(text).get("/v1/groups").await.status, 401, "{text}");
    }
    let viewer = desk.known(desk.token("eve", "viewer", &[])).await;
    assert_eq!(viewer.get("/v1/groups").await.status, 200);
    assert_eq!(viewer.put("web", json!({}), &[]).await.status, 403);
    assert_eq!(viewer.post("/v1/changes", json!({ "put": [{ "document": group("a", &[]) }] }), &[]).await.status, 403);
    let editor = desk.known(desk.token("ed", "editor", &[])).await;
    assert_eq!(editor.put("web", json!({}), &[]).await.status, 201);
    for user in [&viewer, &editor] {
        for (method, path) in [
            ("GET", "/v1/tokens"),
            ("POST", "/v1/tokens"),
            ("DELETE", "/v1/tokens/root"),
            ("GET", "/v1/export"),
            ("POST", "/v1/import"),
        ] {
            assert_eq!(user.ask(method, path, &[], None).await.status, 403, "{method} {path}");
        }
    }
    // Scope: ids, bindings and members, before and after.
    desk.admin.change(&[json!({ "kind": "group", "id": "shop-old", "bindings": ["global"] })]).await;
    let scope = ["--ids", "shop-", "--bindings", "space:shop", "--members", "10.1.0.0/16"];
    let scoped = desk.known(desk.token("shop", "editor", &scope)).await;
    assert_eq!(scoped.put("shop-web", json!({ "bindings": ["space:shop"], "members": ["10.1.2.3"] }), &[]).await.status, 201);
    for (id, document) in [
        ("web", json!({})),
        ("shop-web", json!({ "bindings": ["global"] })),
        ("shop-web", json!({ "members": ["192.0.2.1"] })),
        ("shop-old", json!({})),
    ] {
        let answer = scoped.put(id, document, &[]).await;
        assert_eq!((answer.status, answer.body["errors"].as_array().map(Vec::len)), (403, Some(1)), "{id}: {}", answer.text);
    }
    assert_eq!(scoped.delete("/v1/groups/shop-old", &[]).await.status, 403);
    let template = json!({ "network": "n" }).to_string().into_bytes();
    assert_eq!(scoped.ask("PUT", "/v1/templates/shop-t", &[], Some(template)).await.status, 403);
    assert_eq!(scoped.get("/v1/whoami").await.body["scope"]["ids"], json!(["shop-"]));
    // Made, listed and revoked through the API; the secret is never shown again.
    let made = desk.admin.post("/v1/tokens", json!({ "id": "tmp", "role": "viewer", "life": "1h" }), &[]).await;
    assert_eq!(made.status, 201, "{}", made.text);
    let text = made.body["token"].as_str().unwrap();
    let tmp = desk.admin.with_token(text);
    assert_eq!(tmp.get("/v1/whoami").await.body["id"], "tmp");
    let list = desk.admin.get("/v1/tokens").await;
    assert!(!list.text.contains(text.rsplit('.').next().unwrap()) && !list.text.contains("hash"), "{}", list.text);
    assert_eq!(desk.admin.post("/v1/tokens", json!({ "id": "tmp", "role": "viewer" }), &[]).await.status, 412, "it exists");
    for bad in [
        json!({}),
        json!({ "id": "a.b", "role": "viewer" }),
        json!({ "id": "x", "role": "root" }),
        json!({ "id": "x", "role": "viewer", "life": "long" }),
        json!({ "id": "x", "role": "admin", "scope": {} }),
        json!({ "id": "x", "role": "editor", "scope": { "members": ["ten"] } }),
    ] {
        assert_eq!(desk.admin.post("/v1/tokens", bad.clone(), &[]).await.status, 400, "{bad}");
    }
    assert_eq!(desk.admin.delete("/v1/tokens/tmp", &[]).await.status, 200);
    assert_eq!(tmp.get("/v1/whoami").await.status, 401);
    assert_eq!(desk.admin.delete("/v1/tokens/tmp", &[]).await.status, 404);
    // An export holds hashes only.
    let export = desk.admin.ask("GET", "/v1/export", &[], None).await;
    assert!(export.status == 200 && !export.text.contains(desk.admin.token.rsplit('.').next().unwrap()));
    // Who tries too often waits, and nobody else does.
    let guesser = desk.admin.with_token("gct.guess.wrong");
    let mut statuses = Vec::new();
    for _ in 0..12 {
        statuses.push(guesser.get("/v1/groups").await);
    }
    assert_eq!((statuses[0].status, statuses[11].status), (401, 429));
    assert!(statuses[11].retry_after.is_some());
    assert_eq!(desk.admin.get("/v1/groups").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_goes_out_and_documents_come_in_again() {
    let desk = Desk::start().await;
    desk.admin.change(&[group("a", &["ingress tcp 1 from group:b"]), group("b", &[])]).await;
    let export = desk.admin.ask("GET", "/v1/export", &[], None).await;
    assert_eq!(export.status, 200);
    let file = export.text.clone().into_bytes();
    assert_eq!(desk.admin.ask("POST", "/v1/import", &[], Some(file.clone())).await.status, 412, "they are there");
    let replaced = desk.admin.ask("POST", "/v1/import?replace=true", &[], Some(file.clone())).await;
    assert_eq!(
        (replaced.status, &replaced.body["documents"], &replaced.body["left_out"]),
        (201, &json!(2), &json!(1)),
        "{}",
        replaced.text
    );
    for id in ["a", "b"] {
        assert_eq!(desk.admin.delete(&format!("/v1/groups/{id}"), &[]).await.status, 200);
    }
    assert_eq!(desk.admin.ask("POST", "/v1/import", &[], Some(file.clone())).await.status, 201);
    assert_eq!(desk.admin.get("/v1/groups/a").await.body["document"]["rules"], json!(["ingress tcp 1 from group:b"]));
    for bad in [b"".to_vec(), b"nonsense".to_vec(), file[..file.len() / 2].to_vec()] {
        assert_eq!(desk.admin.ask("POST", "/v1/import", &[], Some(bad)).await.status, 400);
    }
    assert_eq!(desk.admin.ask("POST", "/v1/import?replace=perhaps", &[], Some(file)).await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_can_look() {
    let desk = Desk::start().await;
    assert_eq!(desk.admin.get("/livez").await.text, "ok\n");
    // It serves, and says what is wrong: there is no controller.
    let ready = desk.admin.get("/readyz").await;
    assert!(ready.status == 200 && ready.text.starts_with("ready, but") && ready.text.contains("nobody leads"), "{}", ready.text);
    desk.admin.get("/v1/groups").await;
    let metrics = desk.admin.get("/metrics").await.text;
    for name in ["groupcast_http_requests_total", "groupcast_http_seconds", "groupcast_follow_sequence"] {
        assert!(metrics.contains(name), "{name} is missing in:\n{metrics}");
    }
    let status = desk.admin.get("/v1/status").await;
    assert!(status.body["catalog"].as_u64().is_some_and(|sequence| sequence > 0), "{}", status.text);
    let document = desk.admin.get("/openapi.json").await.body;
    assert_eq!(document["components"]["securitySchemes"]["token"]["scheme"], "bearer");
    // Every reference leads somewhere.
    let text = document.to_string();
    for reference in text.split("\"#/components/schemas/").skip(1) {
        let name = reference.split('"').next().unwrap();
        assert!(document["components"]["schemas"].get(name).is_some(), "{name} is described nowhere");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_is_not_confirmed_takes_itself_back() {
    let mut desk = Desk::start().await;
    desk.admin.change(&[group("a", &["ingress tcp 1 from any"])]).await;
    let asked = |rule: &str, within: &str| json!({ "confirm": within, "put": [{ "document": group("a", &[rule]) }, { "document": group("b", &[]) }] });
    let rules = async |desk: &Desk| {
        desk.admin.get("/v1/groups/a").await.body["document"]["rules"][0].as_str().unwrap_or_default().to_owned()
    };
    // Confirmed, it stays.
    let kept = desk.admin.post("/v1/changes", asked("ingress tcp 2 from any", "2s"), &[("idempotency-key", "c1")]).await;
    assert_eq!((kept.status, kept.body["documents"].as_array().map(Vec::len)), (201, Some(2)), "{}", kept.text);
    let again = desk.admin.post("/v1/changes", asked("ingress tcp 2 from any", "2s"), &[("idempotency-key", "c1")]).await;
    assert_eq!((again.status, &again.body["change"]), (200, &kept.body["change"]), "{}", again.text);
    let path = format!("/v1/changes/{}/confirm", kept.body["change"]);
    assert_eq!(desk.admin.post(&path, json!({}), &[]).await.status, 200);
    assert_eq!(desk.admin.post(&path, json!({}), &[]).await.status, 404, "it has its confirmation");
    // Not confirmed, it goes, also when the gateway that took it is dead by then.
    let made = desk.admin.post("/v1/changes", asked("ingress tcp 3 from any", "1s"), &[]).await;
    assert_eq!(made.status, 201, "{}", made.text);
    assert_eq!(rules(&desk).await, "ingress tcp 3 from any");
    desk.gateway.kill();
    desk.gateway = groupcast_tests::gateway::Gateway::start(&desk.bus.url(0), &[]).await;
    desk.admin = desk.admin.at(&desk.gateway);
    desk.admin.ready().await;
    groupcast_tests::world::eventually("it is taken back", || async { rules(&desk).await == "ingress tcp 2 from any" }).await;
    let latest = desk.admin.get("/v1/changes?limit=1").await;
    assert!(
        latest.body["items"][0]["reason"].as_str().is_some_and(|reason| reason.contains("was not confirmed")),
        "{}",
        latest.text
    );
    // What was confirmed can still be undone by hand.
    assert_eq!(
        desk.admin.post(&format!("/v1/changes/{}/undo", latest.body["items"][0]["change"]), json!({}), &[]).await.status,
        201
    );
    for within in ["0s", "2h", "soon"] {
        assert_eq!(desk.admin.post("/v1/changes", asked("ingress tcp 4 from any", within), &[]).await.status, 400, "{within}");
    }
    let viewer = desk.known(desk.token("eve", "viewer", &[])).await;
    assert_eq!(viewer.post(&path, json!({}), &[]).await.status, 403);
    assert_eq!(desk.admin.post("/v1/changes/x/confirm", json!({}), &[]).await.status, 400);
    // Found by random requests: the bus has no message 0, which was taken for a bus that does not answer.
    for verb in ["confirm", "undo"] {
        assert_eq!(desk.admin.post(&format!("/v1/changes/0/{verb}"), json!({}), &[]).await.status, 404, "{verb}");
    }
    assert_eq!(desk.admin.get("/v1/changes/0").await.status, 404);
}
