//! The fault table: everything that breaks a bus of three nodes, one after the other in an order that a seed decides, while an operator goes on
//! changing a policy and packets go on being sent. A few of the faults, or all with `GROUPCAST_FULL`, or those that `GROUPCAST_FAULTS` names, as
//! in `GROUPCAST_FAULTS=StoreWiped,BusLostAndImported`. What it prints is the table.
//!
//! A clock is wrong for a controller, a gateway and an agent, not for a server: nats-server asks the kernel for the time without libc, and
//! nothing short of another machine has it see another one.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use async_nats::HeaderMap;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::streams;
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_control::log::{Log, Outcome, Outgoing};
use groupcast_tests::World;
use groupcast_tests::agent::isolated;
use groupcast_tests::gateway::User;
use groupcast_tests::nodes::{BREAKER, CONTROLLERS, DISKED, GATEWAYS, HOSTS, NODES, Nodes, Outside};
use groupcast_tests::world::{full, seed};
use nix::sys::signal::Signal;

/// Passes in every policy, and in none.
const ALWAYS: u16 = 7000;
const NEVER: u16 = 9999;
/// Passes in every second policy.
const SOMETIMES: u16 = 5432;
/// How long what is allowed may take: a lost first packet is repeated after one second and after three.
const PASSES_WITHIN: Duration = Duration::from_secs(10);
const DENIED_AFTER: Duration = Duration::from_millis(250);
/// How long after a fault is mended changes must be in force again.
const RECOVERED_WITHIN: Duration = Duration::from_secs(90);
/// How long a fault lasts that is not over by itself.
const LASTS: Duration = Duration::from_secs(12);
/// How long a credential lives that is to expire: long enough to begin with.
const CREDENTIAL_LIFE: Duration = Duration::from_secs(12);
const TOKEN_LIFE: Duration = Duration::from_secs(4);
/// Of the certificates that replace those an installation begins with, which live longer.
const CERTIFICATE_LIFE: Duration = Duration::from_secs(400 * 24 * 3600);
/// Pairs of changes that are looked at after an import.
const AFTER_IMPORT: usize = 5;
/// How far a clock is off.
const SKEW_SECONDS: i64 = 600;
/// Changes come into force at least so often while nothing is wrong; what takes longer counts as time without.
const USUAL: Duration = Duration::from_secs(3);
/// A stop of enforcement that nobody may pass over in silence.
const STALL_UNSAID_MAX: Duration = Duration::from_secs(15);

/// Where something is said about how things are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Screen {
    Doctor,
    Readyz,
}

use Screen::*;

/// What is seen from outside while faults come and go.
#[derive(Default)]
struct Seen {
    /// When changes were in force everywhere.
    enforced: Mutex<Vec<Instant>>,
    /// The numbers of the changes that were acknowledged and not looked for yet.
    acknowledged: Mutex<BTreeSet<u64>>,
    probes: AtomicU64,
    wrong: Mutex<Vec<String>>,
    /// Changes that were refused or did not come into force in time, and what the operator was told.
    late: Mutex<Vec<String>>,
    said: Mutex<BTreeSet<(Screen, String)>>,
    /// The policy is to be left alone, and is.
    pausing: AtomicBool,
    paused: AtomicBool,
    is_over: AtomicBool,
}

impl Seen {
    fn goes_on(&self) -> bool {
        while self.pausing.load(Ordering::SeqCst) && !self.is_over.load(Ordering::SeqCst) {
            self.paused.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(20));
        }
        self.paused.store(false, Ordering::SeqCst);
        !self.is_over.load(Ordering::SeqCst)
    }

    /// Waits until nobody changes the policy, and what was under way has ended.
    async fn pause(&self) {
        self.pausing.store(true, Ordering::SeqCst);
        let start = Instant::now();
        while !self.paused.load(Ordering::SeqCst) {
            assert!(start.elapsed() < RECOVERED_WITHIN, "a change does not end");
            lasts(Duration::from_millis(20)).await;
        }
    }

    fn go_on(&self) {
        self.pausing.store(false, Ordering::SeqCst);
    }

    /// The same words with other numbers are the same; names of machines are kept.
    fn heard(&self, screen: Screen, who: &str, words: &str) {
        let mut shown = format!("{who}: ");
        for c in words.chars().take(WORDS_MAX) {
            match (shown.chars().last(), c) {
                (Some('#'), '0'..='9') => {}
                (Some(before), '0'..='9') if !before.is_ascii_alphabetic() => shown.push('#'),
                _ => shown.push(c),
            }
        }
        self.said.lock().expect("lock").insert((screen, shown));
    }

    fn has_said(&self, screen: Screen, words: &[&str]) -> bool {
        self.said.lock().expect("lock").iter().any(|(on, said)| *on == screen && words.iter().all(|word| said.contains(word)))
    }

    /// Waits until somebody says this there: what is broken is not mended before.
    async fn until_said(&self, screen: Screen, words: &[&str]) {
        let start = Instant::now();
        while !self.has_said(screen, words) {
            let said = || self.said.lock().expect("lock").clone();
            assert!(start.elapsed() < RECOVERED_WITHIN, "{screen:?} never says {words:?}, but: {:#?}", said());
            lasts(Duration::from_millis(50)).await;
        }
    }

    /// What was said so far is to be said again.
    fn forget(&self) {
        self.said.lock().expect("lock").clear();
    }

    fn is_wrong(&self, what: String) {
        self.wrong.lock().expect("lock").push(what);
    }
}

/// Characters of what was said that are kept.
const WORDS_MAX: usize = 150;

/// Changes the policy without end, at whichever gateway takes it, and has packets say whether what is called enforced is.
fn churn(outside: Outside, seen: Arc<Seen>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        let mut number = 0u64;
        while seen.goes_on() {
            number += 1;
            let is_open = number % 2 == 1;
            let ports: &[u16] = if is_open { &[SOMETIMES, ALWAYS] } else { &[ALWAYS] };
            let path = outside.policy(ports, &number.to_string());
            let file = path.display().to_string();
            let mut gateways = GATEWAYS;
            gateways.rotate_left(usize::from(number % 4 < 2));
            let ran = outside.operator(&gateways, &["apply", "-f", &file, "--wait", "--timeout", "20s"]);
            let _ = std::fs::remove_file(path);
            // What was taken has a number, whether or not it came into force in time.
            if !ran.stdout.trim().is_empty() {
                seen.acknowledged.lock().expect("lock").insert(number);
            }
            if ran.code == 0 {
                seen.enforced.lock().expect("lock").push(Instant::now());
                let within = if is_open { PASSES_WITHIN } else { DENIED_AFTER };
                seen.probes.fetch_add(1, Ordering::Relaxed);
                if outside.passes(SOMETIMES, within) != is_open {
                    seen.is_wrong(format!("after change {number} was enforced, port {SOMETIMES} is not as it says ({is_open})"));
                }
            } else {
                let why = ran.stderr.lines().find(|line| line.starts_with("error")).unwrap_or_default().to_owned();
                seen.late.lock().expect("lock").push(format!("change {number}: {why}"));
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    })
}

/// Sends packets that must pass, and packets that must not, whatever happens.
fn probe(outside: Outside, seen: Arc<Seen>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        while !seen.is_over.load(Ordering::SeqCst) {
            seen.probes.fetch_add(2, Ordering::Relaxed);
            if !outside.passes(ALWAYS, PASSES_WITHIN) {
                seen.is_wrong(format!("port {ALWAYS} does not pass"));
            }
            if outside.passes(NEVER, DENIED_AFTER) {
                seen.is_wrong(format!("port {NEVER} passes"));
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    })
}

/// What this process says of itself, unless all is well.
fn readyz(outside: &Outside, name: &str) -> Option<String> {
    let said = if CONTROLLERS.contains(&name) { outside.controller(name, "/readyz") } else { outside.gateway(name, "/readyz") };
    match said {
        None => Some("does not answer".to_owned()),
        Some((200, body)) if body.trim() == "ok" => None,
        Some((200, body)) => Some(body.trim().to_owned()),
        Some((_, body)) => {
            let problem: serde_json::Value = serde_json::from_str(&body).unwrap_or_default();
            Some(format!("not ready: {}", problem["detail"].as_str().unwrap_or(&body)))
        }
    }
}

/// What `groupcast doctor` calls bad at this gateway, as what and how; nothing when it does not answer.
fn doctor(outside: &Outside, gateway: &str) -> Option<Vec<(String, String)>> {
    let (_, body) = outside.gateway(gateway, "/v1/checks").filter(|(status, _)| *status == 200)?;
    let checks: serde_json::Value = serde_json::from_str(&body).ok()?;
    let text = |finding: &serde_json::Value, field: &str| finding[field].as_str().unwrap_or("?").to_owned();
    let bad = checks["findings"].as_array()?.iter().filter(|finding| finding["grade"] == "bad");
    Some(bad.map(|finding| (text(finding, "what"), text(finding, "found"))).collect())
}

/// Asks one of them how it is, again and again.
fn ask(outside: Outside, seen: Arc<Seen>, name: &'static str) -> JoinHandle<()> {
    std::thread::spawn(move || {
        while !seen.is_over.load(Ordering::SeqCst) {
            if let Some(words) = readyz(&outside, name) {
                seen.heard(Readyz, name, &words);
            }
            if GATEWAYS.contains(&name) {
                for (what, found) in doctor(&outside, name).into_iter().flatten() {
                    seen.heard(Doctor, &what, &found);
                }
            }
            std::thread::sleep(Duration::from_millis(300));
        }
    })
}

/// Waits until everybody says that all is well: what is over must not be called broken.
async fn all_well(outside: &Outside, after: &str) {
    let start = Instant::now();
    loop {
        let ready = CONTROLLERS.into_iter().chain(GATEWAYS).filter_map(|name| Some((name.to_owned(), readyz(outside, name)?)));
        let mut wrong: Vec<(String, String)> = ready.collect();
        for gateway in GATEWAYS {
            match doctor(outside, gateway) {
                Some(bad) => wrong.extend(bad),
                None => wrong.push((gateway.to_owned(), "no doctor".to_owned())),
            }
        }
        if wrong.is_empty() {
            return;
        }
        assert!(start.elapsed() < RECOVERED_WITHIN, "{after}: it is over, and this is said: {wrong:#?}");
        lasts(Duration::from_millis(200)).await;
    }
}

/// What can break: one list, of which the type and the order before the seed shuffles it are made.
macro_rules! faults {
    ($($name:ident),* $(,)?) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        enum Fault {
            $($name),*
        }
        const ALL: &[Fault] = &[$(Fault::$name),*];
    };
}

faults![
    StepDowns,
    MetaLeaderKilled,
    ServersKilledOneByOne,
    AllServersKilled,
    RouteCut,
    NodeIsolated,
    ServerStopped,
    LinkDown,
    NodeVanishes,
    ControllerTerminated,
    ControllerKilled,
    ControllerStopped,
    BothControllersDown,
    GatewayKilledInAWait,
    RollingRestart,
    StoreWiped,
    DiskFull,
    BusLostAndImported,
    CredentialsRevoked,
    CredentialsExpired,
    TokenRevoked,
    TokenExpired,
    CertificatesRotated,
    ClocksWrong,
];

use Fault::*;

/// Names faults to run instead, with commas between; one may be named several times.
const CHOSEN: &str = "GROUPCAST_FAULTS";
const FEW: [Fault; 4] = [NodeVanishes, NodeIsolated, ServerStopped, ControllerKilled];

/// The faults of [`CHOSEN`], or all of them, or a few.
fn chosen() -> Vec<Fault> {
    match std::env::var(CHOSEN) {
        Ok(names) => {
            let named = |name: &str| {
                let fault = ALL.iter().find(|fault| format!("{fault:?}") == name);
                *fault.unwrap_or_else(|| panic!("{CHOSEN}: no fault is called {name:?}, but these: {ALL:?}"))
            };
            names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(named).collect()
        }
        Err(_) if full() => ALL.to_vec(),
        Err(_) => FEW.to_vec(),
    }
}

async fn lasts(time: Duration) {
    tokio::time::sleep(time).await;
}

/// So long, and until all of this was said: what is mended at once nobody has to notice.
async fn broken_for(time: Duration, seen: &Seen, truth: Vec<(Screen, Vec<String>)>) {
    lasts(time).await;
    for (screen, words) in truth {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        seen.until_said(screen, &words).await;
    }
}

async fn step_down(client: &async_nats::Client, stream: &str) {
    let subject = groupcast_bus_config::subjects::js_api("STREAM.LEADER.STEPDOWN", stream);
    // The next one answers.
    let _ = client.request(subject, "".into()).await;
}

/// Waits until this controller could lead.
async fn until_ready(nodes: &Nodes, controller: &str) {
    let start = Instant::now();
    while readyz(&nodes.outside(), controller).is_some_and(|words| !words.starts_with("ready")) {
        assert!(start.elapsed() < RECOVERED_WITHIN, "{controller} does not become ready");
        lasts(Duration::from_millis(50)).await;
    }
}

/// Waits until no gateway takes this token any more.
async fn refused_everywhere(nodes: &Nodes, user: &User, why: &str) {
    let start = Instant::now();
    for gateway in GATEWAYS {
        let mut there = user.clone();
        there.base = nodes.gateway_url(gateway);
        while there.send("GET", "/v1/whoami", &[], None).await.is_none_or(|answer| answer.status != 401) {
            assert!(start.elapsed() < RECOVERED_WITHIN, "{gateway} takes a token that was {why}");
            lasts(Duration::from_millis(20)).await;
        }
    }
}

/// Breaks it, and mends it. What cannot be done here is said, and why.
async fn happens(fault: Fault, nodes: &mut Nodes, seen: &Seen, node: &'static str) -> Result<(), String> {
    let leader = nodes.leading().unwrap_or(CONTROLLERS[0]);
    match fault {
        StepDowns => {
            let (client, _events) = nodes.connect(BREAKER).await;
            for stream in [&streams::CATALOG, &streams::REGISTRY, &streams::TOPICS] {
                step_down(&client, stream.name).await;
                lasts(Duration::from_secs(2)).await;
            }
        }
        MetaLeaderKilled => {
            let meta = nodes.monitor(node, "/jsz").and_then(|jsz| jsz["meta_cluster"]["leader"].as_str().map(str::to_owned));
            let meta = NODES.into_iter().find(|name| Some(*name) == meta.as_deref()).unwrap_or(node);
            nodes.kill(meta);
            broken_for(LASTS, seen, truth(fault, node)).await;
            nodes.start_again(meta);
        }
        ServersKilledOneByOne => {
            for name in NODES {
                nodes.kill(name);
                broken_for(LASTS / 2, seen, vec![lacks(name)]).await;
                nodes.start_again(name);
                nodes.formed().await;
            }
        }
        AllServersKilled => {
            NODES.iter().for_each(|name| nodes.kill(name));
            broken_for(LASTS, seen, truth(fault, node)).await;
            NODES.iter().for_each(|name| nodes.start_again(name));
        }
        RouteCut => {
            let other = NODES.into_iter().find(|other| *other != node).expect("another");
            nodes.cut(node, other);
            lasts(LASTS).await;
            nodes.heal();
        }
        NodeIsolated => {
            nodes.isolate(node);
            broken_for(LASTS, seen, truth(fault, node)).await;
            nodes.heal();
        }
        ServerStopped => {
            nodes.signal(node, Signal::SIGSTOP);
            lasts(Duration::from_secs(10)).await;
            nodes.signal(node, Signal::SIGCONT);
        }
        LinkDown => {
            nodes.link(node, "down");
            broken_for(LASTS, seen, truth(fault, node)).await;
            nodes.link(node, "up");
        }
        NodeVanishes => {
            nodes.vanish(node);
            broken_for(LASTS, seen, truth(fault, node)).await;
            nodes.appear(node);
        }
        ControllerTerminated => {
            nodes.stop(leader).await;
            lasts(Duration::from_secs(3)).await;
            nodes.start_again(leader);
        }
        ControllerKilled => {
            nodes.kill(leader);
            lasts(LASTS / 2).await;
            nodes.start_again(leader);
        }
        ControllerStopped => {
            nodes.signal(leader, Signal::SIGSTOP);
            lasts(Duration::from_secs(10)).await;
            nodes.signal(leader, Signal::SIGCONT);
        }
        BothControllersDown => {
            CONTROLLERS.iter().for_each(|name| nodes.kill(name));
            broken_for(Duration::from_secs(60), seen, truth(fault, node)).await;
            CONTROLLERS.iter().for_each(|name| nodes.start_again(name));
        }
        GatewayKilledInAWait => {
            // An operator waits there without end in the churn: it is always in one.
            nodes.kill("g1");
            broken_for(LASTS / 2, seen, truth(fault, node)).await;
            nodes.start_again("g1");
        }
        RollingRestart => {
            for name in NODES {
                nodes.stop(name).await;
                nodes.start_again(name);
                nodes.formed().await;
            }
        }
        StoreWiped => {
            nodes.kill(node);
            nodes.wipe(node);
            broken_for(LASTS / 2, seen, truth(fault, node)).await;
            nodes.start_again(node);
            nodes.formed().await;
        }
        BusLostAndImported => {
            seen.pause().await;
            let file = nodes.folder.0.join("export.jsonl").display().to_string();
            let _ = std::fs::remove_file(&file); // none but the first has one
            let exported = nodes.on_bus(&["export", "--output", &file]);
            assert_eq!(exported.code, 0, "{exported:?}");
            for name in NODES {
                nodes.kill(name);
                nodes.wipe(name);
            }
            NODES.iter().for_each(|name| nodes.start_again(name));
            nodes.formed().await;
            let start = Instant::now();
            loop {
                let imported = nodes.on_bus(&["import", "--replicas", "3", "--replace", &file]);
                if imported.code == 0 {
                    break;
                }
                assert!(start.elapsed() < RECOVERED_WITHIN, "{imported:?}");
                lasts(Duration::from_millis(500)).await;
            }
            seen.go_on();
            // The first changes of the new stream have numbers that the old one had, too.
            for _ in 0..AFTER_IMPORT {
                in_force_after(seen, Instant::now(), fault).await;
            }
        }
        DiskFull => {
            let disk = nodes.disk.as_ref().ok_or("no disk can be mounted here")?;
            disk.fill()?;
            // A copy may lag for a moment at any time; this one never catches up.
            lasts(LASTS).await;
            seen.forget();
            seen.until_said(Doctor, &["stores", &format!("server {DISKED} has not all of")]).await;
            seen.until_said(Readyz, &["needs attention", "stores"]).await;
            // As doctor says.
            nodes.disk.as_ref().ok_or("no disk")?.free()?;
            nodes.kill(DISKED);
            nodes.start_again(DISKED);
            nodes.formed().await;
        }
        CredentialsRevoked => {
            let guard = nodes.guard.as_ref().expect("guarded");
            guard.revoke(Role::Controller, leader);
            guard.revoke(Role::Gateway, "g1");
            for name in [leader, "g1"] {
                seen.until_said(Readyz, &[name, "not ready", "does not take the credential"]).await;
            }
            seen.until_said(Doctor, &["bus: ", "does not take the credential"]).await;
            lasts(LASTS / 2).await;
            let guard = nodes.guard.as_ref().expect("guarded");
            guard.credential(Role::Controller, leader, None);
            guard.credential(Role::Gateway, "g1", None);
        }
        CredentialsExpired => {
            let who = [(Role::Gateway, "g1"), (Role::Host, HOSTS[1])];
            for (role, name) in who {
                nodes.guard.as_ref().expect("guarded").credential(role, name, Some(CREDENTIAL_LIFE));
                nodes.stop(name).await;
                nodes.start_again(name);
            }
            seen.until_said(Readyz, &["g1", "not ready", "does not take the credential"]).await;
            seen.until_said(Doctor, &["credential", "g1.creds expired at"]).await;
            seen.until_said(Doctor, &["hosts", HOSTS[1]]).await;
            for (role, name) in who {
                nodes.guard.as_ref().expect("guarded").credential(role, name, None);
            }
        }
        TokenExpired => {
            let life = format!("{}s", TOKEN_LIFE.as_secs());
            let made = nodes.operator(&GATEWAYS, &["token", "add", "passing", "--role", "viewer", "--life", &life]);
            assert_eq!(made.code, 0, "{made:?}");
            let user = nodes.user("g1").await.with_token(made.stdout.trim());
            refused_everywhere(nodes, &user, "expired").await;
            let removed = nodes.operator(&GATEWAYS, &["token", "remove", "passing"]);
            assert_eq!(removed.code, 0, "{removed:?}");
        }
        CertificatesRotated => {
            let ends = |nodes: &Nodes, node: &str| nodes.monitor(node, "/varz").map(|varz| varz["tls_cert_not_after"].clone());
            let before: Vec<_> = NODES.iter().map(|node| ends(nodes, node)).collect();
            nodes.guard.as_ref().expect("guarded").renew(CERTIFICATE_LIFE);
            NODES.iter().for_each(|node| nodes.signal(node, Signal::SIGHUP));
            let start = Instant::now();
            for (node, before) in NODES.iter().zip(before) {
                while ends(nodes, node).is_none_or(|now| now.is_null()) || ends(nodes, node) == before {
                    assert!(start.elapsed() < RECOVERED_WITHIN, "{node} goes on showing the certificate that was replaced");
                    lasts(Duration::from_millis(50)).await;
                }
            }
            // Its clients and its peers meet again, with what is new.
            nodes.kill(node);
            nodes.start_again(node);
            nodes.formed().await;
        }
        ClocksWrong => {
            let other = CONTROLLERS.into_iter().find(|name| *name != leader).expect("another");
            let off = [(other, SKEW_SECONDS), ("g1", -SKEW_SECONDS), (HOSTS[1], SKEW_SECONDS)];
            for (name, seconds) in off {
                if !nodes.skew(name, seconds) {
                    return Err("no clock of one process can be set wrong here".to_owned());
                }
                nodes.stop(name).await;
                nodes.start_again(name);
            }
            // Whoever restarts all controllers waits for each.
            until_ready(nodes, other).await;
            in_force_after(seen, Instant::now(), fault).await;
            // The one whose clock is wrong leads.
            nodes.stop(leader).await;
            seen.until_said(Doctor, &["clock of the leader", "ahead of the gateway's"]).await;
            seen.until_said(Doctor, &["clock of the bus", "ahead of the gateway's"]).await;
            seen.until_said(Readyz, &["needs attention", "clock"]).await;
            // Nothing that is in force depends on the time of day.
            in_force_after(seen, Instant::now(), fault).await;
            nodes.start_again(leader);
            in_force_after(seen, Instant::now(), fault).await;
            until_ready(nodes, leader).await;
            for (name, _) in off {
                nodes.skew(name, 0);
                nodes.stop(name).await;
                nodes.start_again(name);
            }
        }
        TokenRevoked => {
            let made = nodes.operator(&GATEWAYS, &["token", "add", "brief", "--role", "viewer"]);
            assert_eq!(made.code, 0, "{made:?}");
            let user = nodes.user("g1").await.with_token(made.stdout.trim());
            assert_eq!(user.get("/v1/whoami").await.status, 200);
            let revoked = nodes.operator(&GATEWAYS, &["token", "remove", "brief"]);
            assert_eq!(revoked.code, 0, "{revoked:?}");
            refused_everywhere(nodes, &user, "revoked").await;
        }
    }
    Ok(())
}

fn lacks(node: &str) -> (Screen, Vec<String>) {
    (Doctor, vec!["stores".to_owned(), format!("server {node} has not all of")])
}

/// What must have been said when it is over, beside what was waited for: where, and which words.
fn truth(fault: Fault, node: &str) -> Vec<(Screen, Vec<String>)> {
    let all = |screen: Screen, names: &[&str], words: &str| -> Vec<(Screen, Vec<String>)> {
        names.iter().map(|name| (screen, vec![format!("{name}: "), words.to_owned()])).collect()
    };
    match fault {
        AllServersKilled => [all(Readyz, &CONTROLLERS, "not ready"), all(Readyz, &GATEWAYS, "not ready")].concat(),
        BothControllersDown => {
            let mut said = all(Readyz, &GATEWAYS, "nobody leads");
            said.push((Doctor, vec!["leader: nobody leads: no controller runs".to_owned()]));
            said.extend(all(Readyz, &CONTROLLERS, "does not answer"));
            said
        }
        ControllerKilled | ControllerStopped => vec![(Doctor, vec!["leader: nobody leads".to_owned()])],
        MetaLeaderKilled => vec![(Doctor, vec!["stores".to_owned(), "has not all of".to_owned()])],
        GatewayKilledInAWait => all(Readyz, &["g1"], "does not answer"),
        LinkDown | NodeVanishes | NodeIsolated | StoreWiped => vec![lacks(node)],
        ServersKilledOneByOne => NODES.map(lacks).to_vec(),
        _ => Vec::new(),
    }
}

struct Row {
    fault: Fault,
    /// Why it could not be done here.
    not_run: Option<String>,
    /// From the time it was mended until changes came into force that had begun since.
    recovered: Duration,
    /// All the time in which no change came into force, beyond what is usual.
    down: Duration,
    /// The longest such time.
    stall: Duration,
    acknowledged: usize,
    lost: Vec<u64>,
    probes: u64,
    wrong: Vec<String>,
    said: BTreeSet<(Screen, String)>,
    untold: Vec<(Screen, Vec<String>)>,
    late: Vec<String>,
}

/// The number that the policy has now, by its name.
async fn number_now(nodes: &Nodes) -> u64 {
    let document = nodes.user("g2").await.get("/v1/groups/one").await;
    let name = document.body["name"].as_str().or(document.body["document"]["name"].as_str()).unwrap_or_default().to_owned();
    name.trim_start_matches('n').parse().unwrap_or(0)
}

/// Which of these changes are lost: the last must be what counts, or an earlier one of what came after it; and AUDIT must have each.
async fn lost(nodes: &Nodes, acknowledged: &BTreeSet<u64>) -> Vec<u64> {
    let now = number_now(nodes).await;
    let last = acknowledged.last().copied().filter(|last| *last > now);
    let start = Instant::now();
    loop {
        let audit = nodes.operator(&GATEWAYS, &["audit", "group/one", "-o", "jsonl"]);
        let has = |number: &u64| audit.stdout.contains(&format!("\"n{number}\""));
        let missing: Vec<u64> = acknowledged.iter().copied().filter(|number| !has(number)).collect();
        if missing.is_empty() || start.elapsed() > RECOVERED_WITHIN {
            return missing.into_iter().chain(last).collect();
        }
        lasts(Duration::from_millis(500)).await; // it may be copied in a moment
    }
}

async fn row(fault: Fault, nodes: &mut Nodes, seen: &Seen, node: &'static str) -> Row {
    in_force_after(seen, Instant::now(), fault).await;
    let probes = seen.probes.load(Ordering::Relaxed);
    seen.forget();
    let begun = Instant::now();
    let not_run = happens(fault, nodes, seen, node).await.err();
    let mended = Instant::now();
    in_force_after(seen, mended, fault).await;
    let ends = Instant::now();
    let times: Vec<Instant> = seen.enforced.lock().expect("lock").iter().filter(|at| **at >= begun).copied().collect();
    let befores = std::iter::once(begun).chain(times.iter().copied());
    let gaps: Vec<Duration> = befores.zip(times.iter().copied().chain([ends])).map(|(a, b)| b.duration_since(a)).collect();
    all_well(&nodes.outside(), &format!("{fault:?}")).await;
    let acknowledged = std::mem::take(&mut *seen.acknowledged.lock().expect("lock"));
    let said = seen.said.lock().expect("lock").clone();
    let truth = if not_run.is_some() { Vec::new() } else { truth(fault, node) };
    let is_untold =
        |(screen, words): &(Screen, Vec<String>)| !seen.has_said(*screen, &words.iter().map(String::as_str).collect::<Vec<_>>());
    Row {
        fault,
        not_run,
        recovered: ends.duration_since(mended),
        down: gaps.iter().filter(|gap| **gap > USUAL).sum(),
        stall: gaps.into_iter().max().unwrap_or_default(),
        acknowledged: acknowledged.len(),
        lost: lost(nodes, &acknowledged).await,
        probes: seen.probes.load(Ordering::Relaxed) - probes,
        wrong: std::mem::take(&mut *seen.wrong.lock().expect("lock")),
        untold: truth.into_iter().filter(is_untold).collect(),
        late: std::mem::take(&mut *seen.late.lock().expect("lock")),
        said,
    }
}

/// An export failed on a bus that was well: that a consumer was placed was heard before the own server had heard of the consumer.
#[tokio::test(flavor = "multi_thread")]
async fn who_reads_on_three_nodes_is_not_told_that_nobody_is_there() {
    let world = World::three().await;
    let mut logs = Vec::new();
    for node in 0..NODES.len() {
        logs.push(Log::catalog(world.connect(node, Role::Controller, &format!("reader-{node}")).await.0));
    }
    let subject = subjects::catalog(CatalogKind::Group, "one").expect("a subject");
    let message = Outgoing { subject, headers: HeaderMap::new(), expected: 0, payload: b"{}".to_vec() };
    assert!(matches!(logs[0].write(&[message]).await, Outcome::Committed(_)));
    for round in 0..READS {
        for (node, log) in logs.iter().enumerate() {
            let read = log.page(subjects::CATALOG_ALL, 1, 10, false).await;
            assert!(read.as_ref().is_ok_and(|page| !page.is_empty()), "round {round}, node {node}: {read:?}");
        }
    }
}

/// Times that each node is read from. Each leaves a consumer for half a minute, and a stream takes only so many.
const READS: usize = 100;

#[test]
fn whatever_breaks_nothing_acknowledged_is_lost_no_packet_is_wrong_and_everybody_says_so() {
    isolated(|| async {
        let mut random = seed();
        let mut draw = |below: usize| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as usize % below
        };
        let mut faults = chosen();
        for at in (1..faults.len()).rev() {
            faults.swap(at, draw(at + 1));
        }
        let mut nodes = Nodes::guarded().await;
        let outside = nodes.outside();
        let first = outside.policy(&[ALWAYS], "0").display().to_string();
        let ran = nodes.operator(&GATEWAYS, &["apply", "-f", &first, "--wait", "--timeout", "60s"]);
        assert_eq!(ran.code, 0, "{ran:?}");
        all_well(&outside, "nothing has happened yet").await;
        let seen = Arc::new(Seen::default());
        let mut threads = vec![probe(outside.clone(), seen.clone()), churn(outside.clone(), seen.clone())];
        threads.extend(CONTROLLERS.into_iter().chain(GATEWAYS).map(|name| ask(outside.clone(), seen.clone(), name)));
        let mut rows = Vec::new();
        for fault in faults {
            let node = NODES[draw(NODES.len())];
            let row = row(fault, &mut nodes, &seen, node).await;
            show(&row);
            rows.push(row);
        }
        seen.is_over.store(true, Ordering::SeqCst);
        threads.into_iter().for_each(|thread| thread.join().expect("it ends"));
        eprintln!(
            "\n| fault | recovered after the mend | without a change in force | longest | acknowledged | lost | probes | wrong | doctor said | \
             /readyz said |\n|---|---|---|---|---|---|---|---|---|---|"
        );
        rows.iter().for_each(show);
        for row in &rows {
            let Row { fault, wrong, lost, stall, said, untold, .. } = row;
            assert!(wrong.is_empty(), "{fault:?}: {wrong:?}");
            assert!(lost.is_empty(), "{fault:?}: acknowledged and lost: {lost:?}");
            assert!(untold.is_empty(), "{fault:?}: nobody said {untold:?}, but: {said:#?}");
            let alarm = said.iter().find(|(screen, words)| *screen == Doctor && words.starts_with("stores"));
            let is_quiet = matches!(fault, TokenRevoked | TokenExpired);
            assert!(!is_quiet || alarm.is_none(), "{fault:?}: a store is called bad, and none is: {alarm:?}");
            assert!(*stall < STALL_UNSAID_MAX || !said.is_empty(), "{fault:?}: nobody said anything in {stall:?}");
        }
    });
}

/// Waits for two changes that came into force after this: the first may have begun before.
async fn in_force_after(seen: &Seen, after: Instant, fault: Fault) {
    let start = Instant::now();
    while seen.enforced.lock().expect("lock").iter().filter(|at| **at > after).count() < 2 {
        assert!(
            start.elapsed() < RECOVERED_WITHIN,
            "{fault:?}: no change comes into force; said: {:?}",
            seen.said.lock().expect("lock")
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Things said on one screen that the table shows.
const SAID_SHOWN_MAX: usize = 6;

fn show(row: &Row) {
    let fault = row.fault;
    if let Some(why) = &row.not_run {
        eprintln!("| {fault:?} | not run: {why} |");
        return;
    }
    let said = |screen: Screen| {
        let all: Vec<&str> = row.said.iter().filter(|(on, _)| *on == screen).map(|(_, words)| words.as_str()).collect();
        let more = if all.len() > SAID_SHOWN_MAX { format!("; and {} more", all.len() - SAID_SHOWN_MAX) } else { String::new() };
        let shown = all.into_iter().take(SAID_SHOWN_MAX).collect::<Vec<_>>().join("; ").replace('|', "/");
        if shown.is_empty() { "all ok".to_owned() } else { shown + &more }
    };
    let [recovered, down, stall] = [row.recovered, row.down, row.stall].map(|time| format!("{:.1} s", time.as_secs_f64()));
    eprintln!(
        "| {fault:?} | {recovered} | {down} | {stall} | {} | {} | {} | {} | {} | {} |",
        row.acknowledged,
        row.lost.len(),
        row.probes,
        row.wrong.len(),
        said(Doctor),
        said(Readyz)
    );
    row.wrong.iter().for_each(|what| eprintln!("wrong: {what}"));
    row.late.iter().take(SAID_SHOWN_MAX).for_each(|what| eprintln!("  {fault:?}, told meanwhile: {what}"));
}
