//! Many writers at several gateways, and gateways that die: nothing is lost, nothing happens twice, every conflict is told, and the
//! audit trail replays to the same state.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use groupcast_bus_config::streams;
use groupcast_tests::gateway::{Desk, Gateway, User, token};
use groupcast_tests::world::{eventually, full, seed};
use serde_json::{Value, json};

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

/// A document as an append-only list: every writer adds its own mark to what it read.
async fn append(user: &User, id: &str, mark: &str) -> (u32, u32) {
    let (mut stale, mut attempts) = (0, 0);
    loop {
        attempts += 1;
        let read = user.get(&format!("/v1/groups/{id}")).await;
        let (mut rules, condition) = match read.status {
            404 => (Vec::new(), ("if-none-match", "*".to_owned())),
            _ => {
                (read.body["document"]["rules"].as_array().cloned().unwrap_or_default(), ("if-match", read.etag.clone().unwrap()))
            }
        };
        rules.push(json!({ "rule": "ingress tcp 1 from any", "description": mark }));
        let written = user.put(id, json!({ "rules": rules }), &[(condition.0, &condition.1)]).await;
        match written.status {
            200 | 201 => return (attempts, stale),
            412 => {
                let detail = written.body["detail"].as_str().unwrap();
                assert!(detail.contains("was changed meanwhile, by w"), "a conflict names who was faster: {detail}");
                stale += 1;
            }
            other => panic!("{other}: {}", written.text),
        }
    }
}

/// What CATALOG and AUDIT hold of a kind, last version of each subject.
async fn replay(desk: &Desk, stream: &str) -> BTreeMap<String, String> {
    let client = desk.bus.observer("auditor").await;
    let context = async_nats::jetstream::new(client);
    let stream = context.get_stream(stream).await.expect("the stream");
    let state = stream.cached_info().state.clone();
    let mut found = BTreeMap::new();
    for sequence in state.first_sequence..=state.last_sequence {
        if let Ok(message) = stream.get_raw_message(sequence).await
            && message.subject.starts_with("gc.cat.group.")
        {
            match message.payload.is_empty() {
                true => found.remove(message.subject.as_str()),
                false => found.insert(message.subject.to_string(), String::from_utf8_lossy(&message.payload).into_owned()),
            };
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_writers_at_two_gateways_lose_nothing() {
    let desk = Desk::start().await;
    let other = Gateway::start(&desk.bus.url(0), &[]).await;
    let (writers, documents, marks) = (50, 5, if full() { 20 } else { 3 });
    let mut tasks = Vec::new();
    for writer in 0..writers {
        let user = desk.admin.with_token(&token(&desk.bus.url(0), &format!("w{writer}"), "editor", &[]));
        let user = if writer % 2 == 0 { user } else { user.at(&other) };
        tasks.push((writer, user));
    }
    for (_, user) in &tasks {
        user.ready().await;
        desk.known(user.clone()).await;
    }
    let run = tasks.into_iter().map(|(writer, user)| {
        tokio::spawn(async move {
            let mut total = (0, 0);
            for mark in 0..marks {
                let (attempts, stale) =
                    append(&user, &format!("d{}", (writer + mark) % documents), &format!("w{writer}-{mark}")).await;
                total = (total.0 + attempts, total.1 + stale);
            }
            total
        })
    });
    let (mut attempts, mut stale) = (0, 0);
    for task in run.collect::<Vec<_>>() {
        let total = task.await.expect("the writer ends");
        (attempts, stale) = (attempts + total.0, stale + total.1);
    }
    eprintln!("{} writes in {attempts} attempts, {stale} conflicts told", writers * marks);
    // Every mark is there, exactly once, at both gateways.
    for user in [desk.admin.clone(), desk.admin.at(&other)] {
        let mut found: Vec<String> = Vec::new();
        for document in 0..documents {
            let read = user.get(&format!("/v1/groups/d{document}")).await;
            let rules = read.body["document"]["rules"].as_array().cloned().unwrap_or_default();
            found.extend(rules.iter().map(|rule| rule["description"].as_str().unwrap().to_owned()));
        }
        let distinct: BTreeSet<&String> = found.iter().collect();
        assert_eq!((found.len(), distinct.len()), (writers * marks, writers * marks));
    }
    // AUDIT follows a moment later, and replays to the same.
    let now = replay(&desk, streams::CATALOG.name).await;
    assert_eq!(now.len(), documents);
    eventually("AUDIT has everything", || async { replay(&desk, streams::AUDIT.name).await == now }).await;
}

/// Last writer wins where nobody says what they expect: all are taken, none is refused.
#[tokio::test(flavor = "multi_thread")]
async fn writers_without_conditions_are_all_taken() {
    let desk = Desk::start().await;
    let tasks: Vec<_> = (0..30)
        .map(|writer| {
            let user = desk.admin.clone();
            tokio::spawn(async move { user.put("hot", json!({ "name": format!("n{writer}") }), &[]).await })
        })
        .collect();
    let mut changes = BTreeSet::new();
    for task in tasks {
        let answer = task.await.expect("an answer");
        assert!([200, 201].contains(&answer.status), "{}", answer.text);
        changes.insert(answer.body["change"].as_u64().unwrap());
    }
    assert_eq!(changes.len(), 30, "each is a change of its own");
    let last = desk.admin.get("/v1/groups/hot").await;
    assert_eq!(last.body["revision"].as_u64(), changes.last().copied());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_dies_loses_nothing_acknowledged_and_repeats_nothing() {
    let mut desk = Desk::start().await;
    let mut state = seed();
    let rounds = if full() { 100 } else { 12 };
    let (mut unanswered, mut repeated) = (0, 0);
    for round in 0..rounds {
        let documents: Vec<Value> = (0..3)
            .map(|i| json!({ "document": { "kind": "group", "id": format!("r{round}-{i}"), "name": format!("round {round}") } }))
            .collect();
        let body = json!({ "reason": format!("round {round}"), "put": documents });
        let key = format!("key-{round}");
        let user = desk.admin.clone();
        let (sent_key, sent_body) = (key.clone(), body.clone());
        let sent = tokio::spawn(async move {
            user.send("POST", "/v1/changes", &[("idempotency-key", &sent_key)], Some(sent_body.to_string().into_bytes())).await
        });
        // Anywhere between before the request is read and after it was answered.
        tokio::time::sleep(Duration::from_micros(random(&mut state) % 40_000)).await;
        desk.gateway.kill();
        let first = sent.await.expect("the request ends");
        desk.gateway = Gateway::start(&desk.bus.url(0), &[]).await;
        desk.admin = desk.admin.at(&desk.gateway);
        desk.admin.ready().await;
        if let Some(before) = u32::checked_sub(round, 1) {
            // Whoever is ready knows what was written.
            let last = reasons(&desk).await.get(&format!("round {before}")).copied();
            assert_eq!(last, Some(1), "round {before}, by a gateway that was just started");
        }
        let again = desk.admin.post("/v1/changes", body, &[("idempotency-key", &key)]).await;
        assert!([200, 201].contains(&again.status), "{}", again.text);
        if again.body["repeated"] == true {
            repeated += 1;
        }
        match first {
            Some(first) if [200, 201].contains(&first.status) => {
                assert_eq!(first.body["change"], again.body["change"], "acknowledged, so it is that one");
                assert_eq!(again.body["repeated"], true);
            }
            _ => unanswered += 1,
        }
    }
    eprintln!("{rounds} kills: {unanswered} requests unanswered, {repeated} had been written before the kill");
    // One change for every round, no more.
    let reasons = reasons(&desk).await;
    for round in 0..rounds {
        assert_eq!(reasons.get(&format!("round {round}")), Some(&1), "round {round}");
    }
}

/// How many changes were made for which reason.
async fn reasons(desk: &Desk) -> BTreeMap<String, usize> {
    let mut reasons: BTreeMap<String, usize> = BTreeMap::new();
    for item in desk.admin.get("/v1/changes?limit=1000").await.body["items"].as_array().unwrap() {
        *reasons.entry(item["reason"].as_str().unwrap_or_default().to_owned()).or_default() += 1;
    }
    reasons
}
