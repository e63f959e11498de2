//! Whether what is stored is safe: that the streams exist, that each server has its copy, that servers flush before they acknowledge and
//! have room, and that AUDIT lacks nothing. Judged by pure functions; what to do is said with each.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use async_nats::Client;
use groupcast_bus_config::alive::{self, Looked};
use groupcast_bus_config::streams::{ALL, AUDIT as AUDIT_STREAM, CATALOG, REGISTRY, Stream};
use groupcast_control::audit::{self, Audit, COMPARED_MAX, Complete};
use serde_json::Value;
use tokio_rustls::rustls::crypto::ring;

use crate::checks::{AUDIT, BUS_WITHIN, Finding, Grade, bad, good, unknown};

/// How long a server's monitoring has to answer.
const MONITOR_WITHIN: Duration = Duration::from_secs(2);
/// How often a copy that is behind is looked at again before that is called bad, and the pause between.
const LOOKS_MORE_MAX: usize = 5;
const LOOK_PAUSE: Duration = Duration::from_millis(200);
/// How long AUDIT may be behind CATALOG before that is called bad.
const AUDIT_WITHIN: Duration = Duration::from_secs(3);
/// A server with less room left, in percent of what it may use, needs attention.
const ROOM_PERCENT_MIN: u64 = 10;

/// What to do about a bus that has lost its data. A controller would make the streams anew, and empty.
pub const LOST: &str = "if this bus is new, start `groupcast controller`, which makes the streams. If it had data, that is lost: stop the \
                        controllers and restore it from the last export with `groupcast import --server URL FILE`; until then hosts keep the \
                        policy they have";

/// What the bus said to the last change, where it took none of it.
pub fn refused(why: &str) -> Finding {
    bad(
        "stores",
        format!("the bus refused the last change: {why}"),
        "is the disk of a server full? free room in its store_dir (`df`), or raise `max_file_store`, and restart it; a change that is taken \
         clears this",
    )
}

/// What to do about a bus that does not answer.
pub const SILENT: &str = "look at the servers and their logs: do they run, do they reach each other, is a disk full? On a full disk a server \
                          switches JetStream off until it is restarted: free room in its store_dir (`df`), and restart it. Hosts keep the \
                          policy they have";

/// Of each stream, what the bus says about it.
pub type Streams = Vec<(&'static Stream, Result<Looked, alive::Error>)>;

/// What is said about all streams. A copy that is behind is looked at again: while changes are written, each copy is for a moment.
pub async fn streams(client: &Client) -> Streams {
    let one = |stream: &'static Stream| async move { (stream, alive::look(client, stream, BUS_WITHIN).await) };
    let mut found = futures::future::join_all(ALL.iter().map(one)).await;
    for _ in 0..LOOKS_MORE_MAX {
        if !found.iter().any(|(_, looked)| looked.as_ref().is_ok_and(lags)) {
            break;
        }
        tokio::time::sleep(LOOK_PAUSE).await;
        let again = |(stream, looked): (&'static Stream, Result<Looked, alive::Error>)| async move {
            match looked {
                Ok(before) if lags(&before) => {
                    let now = alive::look(client, stream, BUS_WITHIN).await;
                    (stream, now.map(|now| still(&before, now)))
                }
                looked => (stream, looked),
            }
        };
        found = futures::future::join_all(found.into_iter().map(again)).await;
    }
    found
}

/// Whether some copy is behind that may catch up.
fn lags(looked: &Looked) -> bool {
    looked.copies.iter().any(|copy| !copy.is_good() && !copy.offline)
}

/// What is seen now, where a copy is behind only if it was before.
fn still(before: &Looked, mut now: Looked) -> Looked {
    for copy in now.copies.iter_mut().filter(|copy| !copy.offline) {
        copy.current |= before.copies.iter().any(|was| was.server == copy.server && was.is_good());
    }
    now
}

/// Streams that are missing or do not answer, and servers whose copies are behind.
pub fn judge(streams: &Streams) -> Vec<Finding> {
    let what = "stores";
    let (mut missing, mut derived, mut silent) = (Vec::new(), Vec::new(), Vec::new());
    let mut servers: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut copies = u64::MAX;
    for (stream, looked) in streams {
        match looked {
            Ok(looked) => {
                copies = copies.min(looked.replicas);
                for copy in looked.copies.iter().filter(|copy| !copy.is_good()) {
                    let how = if copy.offline { "offline".to_owned() } else { format!("{} behind", copy.lag) };
                    servers.entry(copy.server.as_str()).or_default().push(format!("{} ({how})", stream.name));
                }
            }
            Err(alive::Error::Missing { stream: name }) if [CATALOG.name, REGISTRY.name].contains(name) => missing.push(*name),
            Err(alive::Error::Missing { stream }) => derived.push(*stream),
            Err(error) => silent.push(format!("{}: {error}", stream.name)),
        }
    }
    let mut found = Vec::new();
    if !missing.is_empty() {
        found.push(bad(what, format!("{} does not exist", missing.join(" and ")), LOST));
    }
    if !derived.is_empty() {
        let lost =
            if derived.contains(&AUDIT_STREAM.name) { "; what it remembered is lost, unless an export has it" } else { "" };
        let advice = format!("restart a controller: it makes the stream anew{lost}");
        found.push(bad(what, format!("{} does not exist", derived.join(" and ")), advice));
    }
    if !silent.is_empty() {
        let advice = "a stream answers when most of its servers run, reach each other and have room: look at all of them, and at their disks";
        found.push(bad(what, silent.join("; "), advice));
    }
    for (server, streams) in servers {
        let words = format!("server {server} has not all of {}", streams.join(", "));
        let advice = format!(
            "does nats-server run on {server}, is it reached by the others, and is its disk full? On a full disk it switches JetStream off \
             until it is restarted: free room in its store_dir (`df`), restart it there, and look again. While one is missing, the loss of \
             another stops all writes"
        );
        found.push(bad(what, words, advice));
    }
    if found.is_empty() {
        found.push(match copies {
            0 | 1 => good(what, "all streams exist, in one copy: keep exports, a lost disk loses them"),
            copies => good(what, format!("all streams exist in {copies} copies, and each server has its own")),
        });
    }
    found
}

/// Whether AUDIT has all of CATALOG, as far back as that can be told.
pub async fn audit(client: &Client, exists: bool) -> Vec<Finding> {
    if !exists {
        return vec![unknown(AUDIT, "not all streams answer")];
    }
    let (reader, begun) = (Audit::new(client.clone()), Instant::now());
    loop {
        match reader.look().await {
            Err(error) => return vec![unknown(AUDIT, error)],
            // What was written a moment ago is copied in a moment.
            Ok(Complete { catalog, .. }) if catalog.behind() > 0 && catalog.gaps.is_empty() && begun.elapsed() < AUDIT_WITHIN => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Ok(looked) => {
                let registrations = judge_registrations(&looked.registry);
                return std::iter::once(judge_audit(&looked.catalog)).chain(registrations).collect();
            }
        }
    }
}

/// REGISTRY keeps one version of each entry, so a former state of a registration can be lost whenever a server dies. Nothing can be done
/// about it and nothing is wrong with the servers then, so it is said and not called bad.
fn judge_registrations(looked: &audit::Looked) -> Option<Finding> {
    let words = || {
        format!(
            "lacks {} former states of registrations, replaced before they were copied: messages {} of REGISTRY",
            looked.missing(),
            looked.named()
        )
    };
    (!looked.gaps.is_empty()).then(|| good("audit of registrations", words()))
}

fn judge_audit(looked: &audit::Looked) -> Finding {
    if !looked.gaps.is_empty() {
        let words =
            format!("lacks {} messages of CATALOG, replaced before they were copied: {}", looked.missing(), looked.named());
        return bad(
            AUDIT,
            words,
            "what they held is lost, unless an export has it; find out why the servers were away for so long",
        );
    }
    match looked.behind() {
        0 => good(AUDIT, format!("the latest {COMPARED_MAX} entries have no gap")),
        behind => bad(
            AUDIT,
            format!("{behind} messages of CATALOG are not copied yet"),
            "has AUDIT a leader, and do its servers have room? After CATALOG was made anew the servers take up to half a minute; if it goes \
             on, look at the servers' logs",
        ),
    }
}

/// What the servers' monitoring says, or that nobody knows.
pub async fn monitored(urls: &[String]) -> Vec<Finding> {
    if urls.is_empty() {
        let advice = "name the servers' monitoring: `[bus] monitor` in the gateway's file, or `groupcast doctor --monitor URL`";
        return vec![Finding {
            advice: advice.to_owned(),
            ..unknown("flushing", "how soon the servers flush to disk cannot be seen from here")
        }];
    }
    futures::future::join_all(urls.iter().map(|url| monitor(url))).await.into_iter().flatten().collect()
}

/// Says at start what is wrong with how the servers store. Without anybody to ask nothing is said: `doctor` says that it is not known.
pub async fn say(urls: Vec<String>) {
    if urls.is_empty() {
        return;
    }
    for finding in monitored(&urls).await {
        match finding.grade {
            Grade::Good => {}
            Grade::Bad => tracing::warn!(advice = finding.advice, "{}", finding.found),
            Grade::Unknown => tracing::warn!("{}: {}", finding.what, finding.found),
        }
    }
}

async fn monitor(url: &str) -> Vec<Finding> {
    // Whoever was first installed the same one; a command that asks nobody else has not.
    let _ = ring::default_provider().install_default();
    let get = async |path: &str| {
        let http = reqwest::Client::builder().timeout(MONITOR_WITHIN).no_proxy().build()?;
        // A server that is not well says so with another status.
        http.get(format!("{}{path}", url.trim_end_matches('/'))).send().await?.text().await
    };
    let text: String = match get("/varz").await {
        Ok(text) => text,
        Err(error) => return vec![unknown("flushing", format!("{url} does not say: {error}"))],
    };
    match serde_json::from_str::<Value>(&text) {
        Ok(varz) => judge_server(url, &varz),
        Err(error) => vec![unknown("flushing", format!("{url} is no monitoring of a nats-server: {error}"))],
    }
}

/// How one server stores.
fn judge_server(url: &str, varz: &Value) -> Vec<Finding> {
    let server = varz["server_name"].as_str().unwrap_or(url);
    let (config, stats) = (&varz["jetstream"]["config"], &varz["jetstream"]["stats"]);
    let interval = config["sync_interval"].as_u64().map(Duration::from_nanos);
    let mut found = vec![match (config["sync_always"].as_bool(), interval) {
        (Some(true), _) => good("flushing", format!("{server} has a write on disk before it calls it stored")),
        (_, Some(interval)) => bad(
            "flushing",
            format!(
                "{server} calls a write stored up to {interval:?} before it is on disk: a power cut takes what was acknowledged"
            ),
            format!("set `sync_interval: always` in the jetstream block of {server}, and restart it"),
        ),
        (_, None) => bad(
            "stores",
            format!("JetStream is off on {server}"),
            "its configuration does not have it, or its disk was full: free room in its store_dir (`df`), and restart nats-server there",
        ),
    }];
    if let (Some(used), Some(most)) = (stats["storage"].as_u64(), config["max_storage"].as_u64())
        && most > 0
    {
        let left = most.saturating_sub(used);
        if left.saturating_mul(100) / most < ROOM_PERCENT_MIN {
            found.push(bad(
                "stores",
                format!("{server} has used {used} of the {most} bytes that it may store"),
                "give its store_dir more room, raise `max_file_store` in its jetstream block, and restart it",
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use groupcast_bus_config::alive::Copy;
    use groupcast_bus_config::streams::TOPICS;
    use groupcast_control::audit::Gap;
    use serde_json::json;

    use super::*;

    fn looked(copies: Vec<Copy>) -> Result<Looked, alive::Error> {
        Ok(Looked { replicas: copies.len() as u64 + 1, copies, at: None })
    }

    fn copy(server: &str, current: bool, offline: bool) -> Copy {
        Copy { server: server.to_owned(), current, offline, lag: 7 }
    }

    #[test]
    fn a_missing_stream_is_restored_not_made_anew() {
        let gone = |stream: &'static Stream| (stream, Err(alive::Error::Missing { stream: stream.name }));
        let found = judge(&vec![gone(&CATALOG), (&REGISTRY, looked(vec![])), gone(&AUDIT_STREAM), gone(&TOPICS)]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].found.starts_with("CATALOG does not") && found[0].advice.contains("groupcast import"), "{found:?}");
        assert!(found[1].advice.contains("restart a controller"), "{found:?}");
        assert!(found.iter().all(|finding| finding.grade == Grade::Bad));
        let silent = (&CATALOG, Err(alive::Error::Silent { within: BUS_WITHIN }));
        assert!(judge(&vec![silent])[0].found.contains("did not answer"));
    }

    #[test]
    fn a_server_without_its_copies_is_named() {
        let all = vec![copy("n2", true, false), copy("n3", false, true)];
        let found = judge(&vec![(&CATALOG, looked(all.clone())), (&AUDIT_STREAM, looked(all))]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].found.contains("n3") && found[0].found.contains("CATALOG (offline), AUDIT (offline)"), "{found:?}");
        assert!(found[0].advice.contains("disk full") && found[0].advice.contains("restart"), "{found:?}");
        let good = judge(&vec![(&CATALOG, looked(vec![copy("n2", true, false), copy("n3", true, false)]))]);
        assert_eq!((good.len(), good[0].grade), (1, Grade::Good));
    }

    /// While changes were written, a healthy server was called bad now and then, with the advice to look whether its disk is full.
    #[test]
    fn a_copy_that_catches_up_is_not_behind() {
        let seen = |current, offline| looked(vec![copy("n2", true, false), copy("n3", current, offline)]).unwrap();
        assert!(lags(&seen(false, false)) && !lags(&seen(true, false)) && !lags(&seen(false, true)));
        for (before, now, is_good) in [
            ((false, false), (true, false), true),
            ((true, false), (false, false), true),
            ((false, false), (false, false), false),
            // One that is away is away at once.
            ((true, false), (false, true), false),
            ((false, true), (false, false), false),
        ] {
            let found = still(&seen(before.0, before.1), seen(now.0, now.1));
            assert!(found.copies[0].is_good() && found.copies[1].is_good() == is_good, "{before:?} {now:?}");
        }
        // Another server leads now: of the one that did nothing was known.
        let moved = Looked { copies: vec![copy("n1", false, false)], ..seen(true, false) };
        assert!(!still(&seen(true, false), moved).copies[0].is_good());
    }

    #[test]
    fn servers_that_flush_late_or_have_no_room_are_told() {
        let server = |jetstream: Value| judge_server("url", &json!({ "server_name": "n1", "jetstream": jetstream }));
        let grade = |config: Value| server(json!({ "config": config }))[0].grade;
        assert_eq!(grade(json!({ "sync_interval": 120_000_000_000u64 })), Grade::Bad);
        assert_eq!(grade(json!({ "sync_interval": 1u64 })), Grade::Bad, "also a short while is too long");
        assert_eq!(grade(json!({ "sync_interval": 120_000_000_000u64, "sync_always": true })), Grade::Good);
        assert!(server(json!({}))[0].found.contains("JetStream is off on n1"));
        let room = |used: u64| {
            server(json!({ "config": { "sync_always": true, "max_storage": 1_000 }, "stats": { "storage": used } })).len()
        };
        assert_eq!((room(900), room(901), room(5_000)), (1, 2, 2));
    }

    #[test]
    fn a_gap_in_the_audit_is_named() {
        let looked = audit::Looked { gaps: vec![Gap { first: 8, last: 9 }], copied: Some(12), written: 12 };
        let found = judge_audit(&looked);
        assert!(
            found.grade == Grade::Bad && found.found.contains("lacks 2 messages") && found.found.contains("8 to 9"),
            "{found:?}"
        );
        let behind = judge_audit(&audit::Looked { gaps: vec![], copied: Some(10), written: 12 });
        assert!(behind.grade == Grade::Bad && behind.found.starts_with("2 messages"), "{behind:?}");
        assert_eq!(judge_audit(&audit::Looked { gaps: vec![], copied: Some(12), written: 12 }).grade, Grade::Good);
        // Broke: of another CATALOG, made after the first was lost, nothing was copied yet, and all was called well.
        let anew = judge_audit(&audit::Looked { gaps: vec![], copied: None, written: 5 });
        assert!(anew.grade == Grade::Bad && anew.found.starts_with("5 messages"), "{anew:?}");
        let registrations = judge_registrations(&looked).expect("a word");
        assert!(
            registrations.grade == Grade::Good && registrations.found.contains("messages 8 to 9 of REGISTRY"),
            "{registrations:?}"
        );
        assert_eq!(judge_registrations(&audit::Looked::default()), None);
    }
}
