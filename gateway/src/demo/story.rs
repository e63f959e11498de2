//! The story: what is done, what must come of it, and what came of it.

use std::path::Path;
use std::time::{Duration, Instant};

use groupcast_control::place::NETWORK;
use reqwest::Method;
use serde_json::json;

use super::failed;
use super::stage::{PLACES, PORT as DB, Stage, heard};
use super::steps::{Step, Teller};
use crate::api::changes::{AcceptedChange, ShownChange};
use crate::cli::apply::documents;
use crate::cli::client::{Api, Call, random_key};
use crate::cli::{Code, Result};
use crate::progress::Behind;

/// How long a connection that is allowed may take: a lost first packet is repeated after a second.
const CONNECTS_WITHIN: Duration = Duration::from_secs(5);
/// How long one that is denied is tried.
const REFUSED_AFTER: Duration = Duration::from_millis(700);
/// How long silence is listened to.
const SILENT_FOR: Duration = Duration::from_millis(500);
/// How long a change may take to be in force everywhere.
const ENFORCED_WITHIN: Duration = Duration::from_secs(30);
/// How long the first controller may take to lead.
const READY_WITHIN: Duration = Duration::from_secs(60);

const SHOP: &str = "# The shop's web servers may ask its database, and nobody else may.
kind: group
id: web
rules:
  - egress tcp 5432 to group:db
bindings: [\"app:web\"]
---
kind: group
id: db
rules:
  - ingress tcp 5432 from group:web
bindings: [\"app:db\"]
";
const CLOSED: &str = "# The database, closed.
kind: group
id: db
rules: []
bindings: [\"app:db\"]
";

/// Tells it from beginning to end. A step that fails is told and the story goes on; one that cannot be tried ends it.
pub async fn tell(teller: &mut Teller, binary: &Path, agent: &Path, folder: &Path) -> Result<Stage> {
    teller.words("groupcast: three hosts on this machine, and a database that only the web server may ask");
    let start = Instant::now();
    let mut stage = Stage::start(binary, folder)?;
    let api = stage.api()?;
    ready(&api).await?;
    // Nobody leads a bus on which nothing was ever written: it might be one that lost its data.
    let template = json!({ "kind": "template", "id": NETWORK, "network": NETWORK });
    api.send(&Call::new(Method::PUT, format!("/v1/templates/{NETWORK}")).json(&template).key(random_key())).await?;
    let addresses = stage.up.addresses.clone();
    let outcome = format!("bus {} and gateway {}", addresses.bus, addresses.gateway);
    teller.step(&Step::new("up", "start a private bus, a controller and a gateway", true, outcome).took(start.elapsed()));

    let start = Instant::now();
    stage.people(agent).await?;
    let about = "start three hosts, each with an agent and a workload";
    let places: Vec<String> = PLACES.iter().map(|place| format!("{} on {}", place.workload, place.host)).collect();
    let outcome = match stage.has_packets() {
        true => format!("{}, in network namespaces of their own", places.join(", ")),
        false => format!("{}; WITHOUT ROOT: the agents run dry, nothing is enforced and no packet is sent", places.join(", ")),
    };
    teller.step(&Step::new("hosts", about, true, outcome).took(start.elapsed()));

    teller.step(&packets(&stage, "refused", "web-1", "db-1", false)?);

    let shop = stage.file("shop.yaml", SHOP)?.display().to_string();
    let (shown, code) = stage.groupcast(&["plan", "-f", &shop])?;
    let ok = code == 0 && shown.contains("5432");
    teller.step(&Step::new("plan", "groupcast plan -f shop.yaml", ok, "what it would mean, before it means it").shown(shown));

    let about = "write both groups as one change, and wait until it is in force";
    let (_, step) = applied(&stage, &api, "apply", &shop, about, 2).await?;
    teller.step(&step);
    teller.step(&packets(&stage, "connects", "web-1", "db-1", true)?);
    teller.step(&packets(&stage, "still-refused", "job-1", "db-1", false)?);

    for (name, from, expected) in [("explain", "web-1", true), ("explain-denied", "job-1", false)] {
        let (shown, code) = stage.groupcast(&["explain", from, "db-1", "tcp/5432"])?;
        let verdict = if expected { "allowed" } else { "denied" };
        let (agrees, words) = match stage.has_packets() {
            true => {
                let in_force = !expected || shown.contains("in force on the host");
                let agrees = shown.lines().next().is_some_and(|line| line.ends_with(verdict)) && in_force;
                (agrees, format!("{verdict}, as the packets said"))
            }
            false => (shown.contains("is a dry run"), "what the documents say, and that nothing is enforced".to_owned()),
        };
        let about = format!("groupcast explain {from} db-1 tcp/5432");
        teller.step(&Step::new(name, about, code == 0 && agrees, words).shown(shown));
    }

    let revoked = revoked(teller, &stage, &api).await?;
    undone(teller, &stage, &api, revoked).await?;
    teller.step(&packets(&stage, "connects-again", "web-1", "db-1", true)?);
    Ok(stage)
}

/// Waits until the gateway has read everything.
async fn ready(api: &Api) -> Result {
    let start = Instant::now();
    while let Err(failure) = api.send(&Call::get("/readyz")).await {
        if start.elapsed() > READY_WITHIN {
            return Err(failure);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

/// Tries a connection, and says a line over it.
fn packets(stage: &Stage, name: &'static str, from: &str, to: &str, expected: bool) -> Result<Step> {
    let about = format!("{from} connects to {to} on tcp/{DB}");
    let start = Instant::now();
    let within = if expected { CONNECTS_WITHIN } else { REFUSED_AFTER };
    let Some(outcome) = stage.connect(from, to, DB, within)? else {
        // What a dry agent lets pass is everything; the documents have their own word.
        let (shown, _) = stage.groupcast(&["explain", from, to, &format!("tcp/{DB}"), "-o", "json"])?;
        let allowed = serde_json::from_str::<serde_json::Value>(&shown).ok().and_then(|explained| explained["allowed"].as_bool());
        let verdict = allowed.map_or("not known", |allowed| if allowed { "allowed" } else { "denied" });
        let words = format!("{verdict} according to the documents; no packet was sent");
        return Ok(Step::new(name, about, allowed == Some(expected), words));
    };
    let (works, words) = match outcome {
        Ok(stream) if heard(&stream, "hello", CONNECTS_WITHIN) => (true, format!("{to} answers")),
        Ok(_) => (false, "connected, but nothing came back".to_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => (false, "no answer: the packets are dropped".to_owned()),
        Err(error) => (false, format!("no connection: {error}")),
    };
    let step = Step::new(name, about, works == expected, words);
    Ok(if works { step.took(start.elapsed()) } else { step })
}

/// Writes the documents of a file and waits until every host has them in force; the change and what came of it.
async fn applied(stage: &Stage, api: &Api, name: &'static str, file: &str, about: &str, span: u32) -> Result<(u64, Step)> {
    let body = json!({ "put": documents(&[file.into()])?, "reason": "the demonstration" });
    let start = Instant::now();
    let call = Call::new(Method::POST, "/v1/changes").json(&body).key(random_key());
    let accepted: AcceptedChange = api.fetch(&call).await?;
    let step = match stage.has_packets() {
        true => enforced(api, name, about, accepted.change, start, span).await?,
        false => arrived(api, name, about, accepted.change, span).await?,
    };
    Ok((accepted.change, step))
}

async fn enforced(api: &Api, name: &'static str, about: &str, change: u64, start: Instant, span: u32) -> Result<Step> {
    let path = format!("/v1/changes/{change}?wait=enforced&timeout={}ms", ENFORCED_WITHIN.as_millis());
    let shown: ShownChange = api.fetch(&Call::get(path).waits(ENFORCED_WITHIN)).await?;
    let took = start.elapsed();
    let (done, hosts) = shown.progress.as_ref().map_or((false, 0), |progress| (progress.done, progress.span));
    let words = match done {
        true => format!("change {change} is in force on all {hosts} hosts it concerns, from request to kernel"),
        false => format!("change {change} is not in force everywhere"),
    };
    Ok(Step::new(name, about, done && hosts == span, words).took(took))
}

/// A dry agent says so of every change that reaches it, and enforces none.
async fn arrived(api: &Api, name: &'static str, about: &str, change: u64, span: u32) -> Result<Step> {
    let start = Instant::now();
    loop {
        let shown: ShownChange = api.fetch(&Call::get(format!("/v1/changes/{change}?wait=enforced&timeout=200ms"))).await?;
        let dry = |behind: &[Behind]| behind.len() == span as usize && behind.iter().all(|host| host.state == "dry-run");
        let arrived = shown.progress.as_ref().is_some_and(|progress| progress.span == span && dry(&progress.behind));
        if arrived || start.elapsed() > ENFORCED_WITHIN {
            let words = match arrived {
                true => {
                    format!("change {change} reached all {span} hosts it concerns, and none enforces it: their agents run dry")
                }
                false => format!("change {change} did not reach all {span} hosts it concerns"),
            };
            return Ok(Step::new(name, about, arrived, words));
        }
    }
}

/// A live connection is cut by a change; its number.
async fn revoked(teller: &mut Teller, stage: &Stage, api: &Api) -> Result<u64> {
    let stream = match stage.connect("web-1", "db-1", DB, CONNECTS_WITHIN)? {
        None => None,
        Some(Err(error)) => return Err(failed(format!("the connection that is to be cut cannot be made: {error}"))),
        Some(Ok(stream)) => Some(stream),
    };
    if let Some(stream) = &stream {
        let lines = (0..5).filter(|line| heard(stream, &format!("line {line}"), CONNECTS_WITHIN)).count();
        let words = format!("{lines} of 5 lines answered");
        teller.step(&Step::new("live", "web-1 keeps a connection open and talks over it", lines == 5, words));
    }
    let closed = stage.file("closed.yaml", CLOSED)?.display().to_string();
    let about = "take the database's rule away while the connection is open";
    let (change, step) = applied(stage, api, "revoke", &closed, about, 1).await?;
    teller.step(&step);
    if let Some(stream) = &stream {
        let silent = !heard(stream, "still there?", SILENT_FOR);
        let words = if silent { "nothing comes back: the flow is cut" } else { "the flow goes on" };
        teller.step(&Step::new("cut", "web-1 talks over the open connection", silent, words));
    }
    teller.step(&packets(stage, "refused-again", "web-1", "db-1", false)?);
    Ok(change)
}

async fn undone(teller: &mut Teller, stage: &Stage, api: &Api, change: u64) -> Result {
    let start = Instant::now();
    let call = Call::new(Method::POST, format!("/v1/changes/{change}/undo")).json(&json!({ "reason": "the demonstration" }));
    match api.fetch::<AcceptedChange>(&call.key(random_key())).await {
        Ok(accepted) => {
            let about = format!("groupcast undo {change} --wait");
            teller.step(&match stage.has_packets() {
                true => enforced(api, "undo", &about, accepted.change, start, 1).await?,
                false => arrived(api, "undo", &about, accepted.change, 1).await?,
            });
        }
        Err(failure) if failure.code == Code::Conflict => {
            teller.step(&Step::new("undo", format!("groupcast undo {change} --wait"), false, failure.message));
        }
        Err(failure) => return Err(failure),
    }
    Ok(())
}
