//! What is looked at before anybody says that all is well: a write to the bus, who leads, what hosts and sources do, clocks, what expires.
//! Whatever could not be looked at is called not known.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use groupcast_bus_config::alive;
use groupcast_bus_config::streams::CATALOG;
use groupcast_control::begin::ADVICE;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::sources::{self, ShownSource};
use crate::api::{App, PAGE_MAX};
use crate::expiry::{Expiring, WARNED};
use crate::happens::HEARD_WITHIN_MS;
use crate::progress::{Behind, HostStanding};
use crate::registrations::{Leader, Silent};
use crate::stores;

/// How long the bus has to answer a write.
pub const BUS_WITHIN: Duration = Duration::from_secs(2);
/// How old a look may be that readiness goes by.
pub const LOOKED_WITHIN: Duration = Duration::from_secs(5);
/// How old what a person is told may be.
pub const TOLD_WITHIN: Duration = Duration::from_millis(200);
/// The same of the bus alone, which decides whether it is ready.
const BUS_LOOKED_WITHIN: Duration = Duration::from_secs(1);
/// Clocks further apart than this make expiry and times in records misleading.
pub const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(5);
/// A host that has not got what was published for so long is behind; less is usual.
const BEHIND_MS_MAX: u64 = 10_000;
/// Hosts and sources that one finding names.
const NAMED_MAX: usize = 10;

/// How something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Grade {
    Good,
    Bad,
    /// It could not be looked at.
    Unknown,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    pub what: String,
    pub grade: Grade,
    pub found: String,
    /// What to do; empty when all is well.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub advice: String,
}

pub fn good(what: &str, found: impl Into<String>) -> Finding {
    Finding { what: what.to_owned(), grade: Grade::Good, found: found.into(), advice: String::new() }
}

pub fn bad(what: &str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { what: what.to_owned(), grade: Grade::Bad, found: found.into(), advice: advice.into() }
}

pub fn unknown(what: &str, why: impl std::fmt::Display) -> Finding {
    Finding { what: what.to_owned(), grade: Grade::Unknown, found: format!("not known: {why}"), advice: String::new() }
}

pub const AUDIT: &str = "audit";
pub const BUS: &str = "bus";
pub const LEADER: &str = "leader";
pub const GATEWAY: &str = "gateway";

/// What to do about a credential that the bus does not take.
const NOT_TAKEN: &str = "`groupcast credential list` says which are valid, and `groupcast credential add` makes another: put it where this gateway's \
                         is. Ask another gateway meanwhile";

type Known<T> = tokio::sync::Mutex<Option<(Instant, T)>>;

/// Whether the bus takes writes, as it was a moment ago: to look makes the servers write, and anybody may ask. One looks, the others wait
/// for what it finds.
#[derive(Default)]
pub struct BusLook(Known<Result<Duration, alive::Error>>);

impl BusLook {
    pub async fn at(&self, look: impl Future<Output = Result<Duration, alive::Error>>) -> Result<Duration, alive::Error> {
        let mut kept = self.0.lock().await;
        if let Some((_, found)) = kept.as_ref().filter(|(at, _)| at.elapsed() < BUS_LOOKED_WITHIN) {
            return found.clone();
        }
        let found = look.await;
        *kept = Some((Instant::now(), found.clone()));
        found
    }
}

/// What was found last, so that who asks often costs the bus little.
#[derive(Default)]
pub struct Checks {
    bus: BusLook,
    all: Known<Arc<Vec<Finding>>>,
}

impl Checks {
    pub async fn bus(&self, app: &App) -> Result<Duration, alive::Error> {
        match app.login.get() {
            Some(login) => self.bus.at(login.takes_writes(&app.client, BUS_WITHIN)).await,
            None => self.bus.at(alive::takes_writes(&app.client, BUS_WITHIN)).await,
        }
    }

    /// Everything, as it was at most so long ago.
    pub async fn all(&self, app: &App, within: Duration) -> Arc<Vec<Finding>> {
        let mut kept = self.all.lock().await;
        if let Some((_, found)) = kept.as_ref().filter(|(at, _)| at.elapsed() < within) {
            return found.clone();
        }
        let found = Arc::new(look(app, self.bus(app).await).await);
        *kept = Some((Instant::now(), found.clone()));
        found
    }
}

async fn look(app: &App, bus: Result<Duration, alive::Error>) -> Vec<Finding> {
    let mut found = vec![following(app.followed.lost())];
    match bus {
        Ok(took) => found.push(good(BUS, format!("{} answers a write after {} ms", CATALOG.name, took.as_millis()))),
        Err(error) => {
            match &error {
                // Nothing else can be known, and the servers may be as well as ever.
                alive::Error::NotTaken { .. } => found.push(bad(BUS, error.to_string(), NOT_TAKEN)),
                _ => {
                    let looked = stores::streams(&app.client).await;
                    let advice = match looked.iter().any(|(_, looked)| matches!(looked, Err(alive::Error::Missing { .. }))) {
                        true => stores::LOST,
                        false => stores::SILENT,
                    };
                    found.push(bad(BUS, error.to_string(), advice));
                    found.extend(stores::judge(&looked).into_iter().filter(|finding| finding.grade == Grade::Bad));
                }
            }
            found.extend(
                [LEADER, "hosts", "sources", "clocks", "stores", AUDIT].map(|what| unknown(what, "the bus does not answer")),
            );
            found.extend(expiries(app, SystemTime::now()));
            return found;
        }
    }
    found.extend(app.catalog.refused().map(|why| stores::refused(&why)));
    let begun = app.followed.local().is_begun();
    let asked = SystemTime::now();
    let (leader, looked, standings, sources) =
        tokio::join!(app.registrations.leader(), stores::streams(&app.client), standings(app), sources::all(app));
    let audited = stores::audit(&app.client, looked.iter().all(|(_, looked)| looked.is_ok()));
    let (audited, monitored) = tokio::join!(audited, stores::monitored(app.monitors.get().map_or(&[], Vec::as_slice)));
    let now = SystemTime::now();
    found.push(leading(&leader, begun));
    found.extend(standings.map_or_else(|| vec![unknown("hosts", "no controller answers")], |standings| hosts(&standings)));
    found.extend(leader.iter().flat_map(silent));
    found.extend(match &sources {
        Ok(sources) => self::sources(sources),
        Err(problem) => vec![unknown("sources", &problem.detail)],
    });
    // What the clocks said lies somewhere between the two looks at ours.
    let spent = now.duration_since(asked).unwrap_or_default();
    let bus_clock = looked.first().and_then(|(_, looked)| looked.as_ref().ok()).and_then(|looked| looked.at);
    found.push(clock("clock of the bus", bus_clock, now, spent));
    found.push(clock("clock of the leader", leader.as_ref().ok().map(|leader| leader.at()), now, spent));
    found.extend(stores::judge(&looked));
    found.extend(monitored);
    found.extend(audited);
    found.extend(expiries(app, now));
    found
}

/// What every registered host does, as far as controllers know; `None` when none answers.
async fn standings(app: &App) -> Option<BTreeMap<String, Option<HostStanding>>> {
    let hosts: Vec<String> = app.followed.local().hosts().keys().map(ToString::to_string).collect();
    if hosts.is_empty() {
        return Some(BTreeMap::new());
    }
    let mut all = BTreeMap::new();
    for page in hosts.chunks(PAGE_MAX) {
        let mut known = app.progress.hosts(page.to_vec()).await?;
        all.extend(page.iter().map(|host| (host.clone(), known.remove(host))));
    }
    Some(all)
}

/// Whether this gateway reads what is written: all that it shows comes from there.
fn following(lost: Option<String>) -> Finding {
    match lost {
        None => good(GATEWAY, "reads what is written"),
        Some(lost) => bad(GATEWAY, lost, "it goes on by itself when the bus answers; ask another gateway meanwhile"),
    }
}

fn leading(leader: &Result<Leader, Silent>, begun: bool) -> Finding {
    match leader {
        Ok(leader) if leader.publishes => good(LEADER, format!("{} leads, in term {}", leader.name, leader.term)),
        Ok(leader) => bad(
            LEADER,
            format!("{} leads in term {}, and publishes nothing yet", leader.name, leader.term),
            "it still compares what is written with what is published; if that goes on, look at its log",
        ),
        Err(_) if !begun => bad(LEADER, "nobody leads: the catalogue is empty", ADVICE),
        Err(Silent::NoController) => bad(
            LEADER,
            "nobody leads: no controller runs",
            "start `groupcast controller`, better two of them; until then nothing is published",
        ),
        Err(Silent::NoLeader) => bad(
            LEADER,
            "nobody leads: controllers run, and none says that it leads",
            "nothing is published until one does: wait a few seconds, then look at the controllers' logs",
        ),
        Err(Silent::Failed(why)) => unknown(LEADER, why),
    }
}

fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(NAMED_MAX);
    let shown = names.iter().take(NAMED_MAX).cloned().collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

fn hosts(standings: &BTreeMap<String, Option<HostStanding>>) -> Vec<Finding> {
    let (mut lax, mut behind, mut silent, mut unheard) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut advice: Vec<&str> = Vec::new();
    for (host, standing) in standings {
        let Some(standing) = standing else {
            unheard.push(host.clone());
            continue;
        };
        if standing.heard_ms_ago > HEARD_WITHIN_MS {
            silent.push(format!("{host} ({} s)", standing.heard_ms_ago / 1_000));
        } else if standing.state != "enforcing" {
            let why = if standing.reason.is_empty() { String::new() } else { format!(": {}", standing.reason) };
            lax.push(format!("{host} is {}{why}", standing.state));
            let state = Behind { host: host.clone(), state: standing.state.clone(), why: String::new() };
            advice.extend(Some(state.advice()).filter(|words| !advice.contains(words)));
        } else if standing.behind_ms > BEHIND_MS_MAX {
            behind.push(format!("{host} ({} s)", standing.behind_ms / 1_000));
        }
    }
    let mut found = Vec::new();
    if !lax.is_empty() {
        found.push(bad("hosts", format!("{} do not enforce as they should: {}", lax.len(), listed(&lax)), advice.join("; ")));
    }
    if !behind.is_empty() {
        let words = format!("{} have not got what is published: {}", behind.len(), listed(&behind));
        found.push(bad("hosts", words, "are their agents connected? see `groupcast-agent status` there"));
    }
    if !silent.is_empty() {
        let words = format!("of {} nothing was heard for long: {}", silent.len(), listed(&silent));
        found.push(bad("hosts", words, "do their agents run, and do they reach the bus? what they enforce is what they had"));
    }
    if !unheard.is_empty() {
        let words = format!("{} have not said what they do since the controllers began: {}", unheard.len(), listed(&unheard));
        found.push(unknown("hosts", words));
    }
    if found.is_empty() {
        found.push(good(
            "hosts",
            match standings.len() {
                0 => "none are registered".to_owned(),
                count => format!("{count} enforce what is published"),
            },
        ));
    }
    found
}

/// Hosts that enrolled themselves and have gone silent, and what becomes of them.
fn silent(leader: &Leader) -> Vec<Finding> {
    let mut found = Vec::new();
    if leader.deaf {
        let advice = "nobody can enrol, and silence is not judged: does the server take more connections? see the leader's log";
        found.push(bad("registrations", format!("{} leads, and does not hear hosts", leader.name), advice));
    }
    if leader.suspects > 0 {
        let words = format!("{} that enrolled themselves are silent", leader.suspects);
        found.push(match leader.frozen.first() {
            None => bad("registrations", words, "see `groupcast get registrations`; they are deleted when their grace ends"),
            Some(first) => bad(
                "registrations",
                format!(
                    "{words}; too many at once of template {}: those stay until somebody says that they are gone",
                    listed(&leader.frozen)
                ),
                format!("find out what they have in common; if they are gone for good: groupcast registrations confirm {first}"),
            ),
        });
    }
    found
}

fn sources(sources: &[ShownSource]) -> Vec<Finding> {
    if sources.is_empty() {
        return vec![good("sources", "none are configured")];
    }
    let mut found: Vec<Finding> = Vec::new();
    for source in sources {
        let what = format!("source {}", source.id);
        let error = source.last_error.as_ref().map_or(String::new(), |error| format!(": {}", error.message));
        match source.state.as_str() {
            "held" => found.push(bad(
                &what,
                "holds back deletions that are most of what it owns",
                format!("if they are meant: groupcast sources confirm {}", source.id),
            )),
            "failing" => found.push(bad(
                &what,
                format!("fails{error}"),
                "what it said last stays in force; see `groupcast get sources -o wide`",
            )),
            "waiting" => found.push(unknown(&what, "it has not been read yet")),
            "malformed" => found.push(bad(
                &what,
                match source.deletions_stopped {
                    true => format!(
                        "{} of its items cannot be read, and nothing of it is deleted until that is mended",
                        source.malformed
                    ),
                    false => format!("{} of its items cannot be read", source.malformed),
                },
                "their last good versions count; see `groupcast get sources -o wide`",
            )),
            _ => {}
        }
    }
    if found.is_empty() {
        found.push(good("sources", format!("{} are read", sources.len())));
    }
    found
}

/// Whether another clock agrees with ours, which was looked at after it, within what the look took.
pub fn clock(what: &str, theirs: Option<SystemTime>, ours: SystemTime, spent: Duration) -> Finding {
    let Some(theirs) = theirs else { return unknown(what, "nobody said what time it is") };
    let (apart, word) = match ours.duration_since(theirs) {
        Ok(behind) => (behind.saturating_sub(spent), "behind"),
        Err(ahead) => (ahead.duration(), "ahead of"),
    };
    match apart > CLOCK_DIFFERENCE_MAX {
        false => good(what, "agrees with the gateway's"),
        true => bad(what, format!("{} s {word} the gateway's", apart.as_secs()), "synchronise the clocks of the machines"),
    }
}

fn expiries(app: &App, now: SystemTime) -> Vec<Finding> {
    app.expiring.get().map(Vec::as_slice).unwrap_or_default().iter().map(|expiring| expiry(expiring, now)).collect()
}

fn expiry(expiring: &Expiring, now: SystemTime) -> Finding {
    let (what, advice) = match expiring {
        Expiring::Certificate(_) => ("certificate", "replace the files: they are read again by themselves"),
        Expiring::Credential(_) => {
            ("credential", "make another with the authority and replace the file: it is read again when connecting")
        }
    };
    let path = expiring.path().display();
    match expiring.ends() {
        Err(error) => unknown(what, error),
        Ok(None) => good(what, format!("{path} does not expire")),
        Ok(Some(ends)) => {
            let at = humantime::format_rfc3339_seconds(ends);
            match ends.duration_since(now) {
                Err(_) => bad(what, format!("{path} expired at {at}"), advice),
                Ok(left) if left < WARNED => bad(what, format!("{path} expires at {at}"), advice),
                Ok(_) => good(what, format!("{path} is good until {at}")),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn standing(state: &str, heard_ms_ago: u64, behind_ms: u64) -> Option<HostStanding> {
        let (state, behind) = (state.to_owned(), behind_ms > 0);
        Some(HostStanding { state, reason: "why".into(), audited: vec![], audited_total: 0, heard_ms_ago, behind, behind_ms })
    }

    /// With hosts in bypass, killed or behind it said that all is well.
    #[test]
    fn hosts_are_good_only_if_all_enforce_are_heard_and_have_everything() {
        for (standing, grade, words) in [
            (standing("enforcing", 0, 0), Grade::Good, "1 enforce"),
            (standing("enforcing", HEARD_WITHIN_MS, BEHIND_MS_MAX), Grade::Good, "1 enforce"),
            (standing("enforcing", HEARD_WITHIN_MS + 1, 0), Grade::Bad, "nothing was heard for long: h1"),
            (standing("enforcing", 0, BEHIND_MS_MAX + 1), Grade::Bad, "have not got what is published: h1"),
            (standing("bypassed", 0, 0), Grade::Bad, "h1 is bypassed: why"),
            (standing("auditing-some", 0, 0), Grade::Bad, "h1 is auditing-some"),
            (standing("frozen", 0, 0), Grade::Bad, "h1 is frozen"),
            (standing("dreaming", 0, 0), Grade::Bad, "h1 is dreaming"),
            (None, Grade::Unknown, "not known: 1 have not said"),
        ] {
            let found = hosts(&BTreeMap::from([("h1".to_owned(), standing)]));
            assert_eq!(found.len(), 1);
            assert!(found[0].grade == grade && found[0].found.contains(words), "{words}: {found:?}");
            assert_eq!(found[0].advice.is_empty(), grade != Grade::Bad, "{found:?}");
        }
        assert_eq!(hosts(&BTreeMap::new())[0].grade, Grade::Good);
        let many = (0..30).map(|i| (format!("h{i:02}"), standing("bypassed", 0, 0))).collect();
        assert!(hosts(&many)[0].found.ends_with("and 20 more"));
    }

    #[tokio::test]
    async fn who_asks_often_makes_the_bus_write_seldom() {
        let (bus, looks) = (BusLook::default(), std::cell::Cell::new(0));
        for _ in 0..1_000 {
            let found = bus.at(async {
                looks.set(looks.get() + 1);
                Ok(Duration::from_millis(3))
            });
            assert_eq!(found.await, Ok(Duration::from_millis(3)));
        }
        assert!((1..100).contains(&looks.get()), "{} looks", looks.get());
    }

    fn led() -> Leader {
        Leader { name: "c1".into(), term: 7, publishes: true, now_ms: 0, suspects: 0, frozen: Vec::new(), deaf: false }
    }

    #[test]
    fn what_becomes_of_silent_hosts_is_said_as_it_is() {
        assert!(silent(&led()).is_empty());
        let few = silent(&Leader { suspects: 2, ..led() });
        assert!(few.len() == 1 && few[0].advice.contains("deleted when their grace ends"), "{few:?}");
        let many = silent(&Leader { suspects: 9, frozen: vec!["vm".into()], ..led() });
        assert!(many[0].found.contains("template vm: those stay") && !many[0].advice.contains("grace"), "{many:?}");
        assert!(many[0].advice.ends_with("groupcast registrations confirm vm"), "{many:?}");
        let deaf = silent(&Leader { deaf: true, ..led() });
        assert!(deaf.len() == 1 && deaf[0].grade == Grade::Bad && deaf[0].found.contains("does not hear hosts"), "{deaf:?}");
    }

    #[test]
    fn nobody_leading_is_said_and_why() {
        let leader = |publishes| Leader { publishes, ..led() };
        assert_eq!(leading(&Ok(leader(true)), true).found, "c1 leads, in term 7");
        assert_eq!(leading(&Ok(leader(false)), true).grade, Grade::Bad);
        for silent in [Silent::NoController, Silent::NoLeader] {
            let found = leading(&Err(silent), true);
            assert!(found.grade == Grade::Bad && found.found.starts_with("nobody leads") && !found.advice.is_empty());
        }
        assert_eq!(leading(&Err(Silent::NoLeader), false).advice, ADVICE);
        assert_eq!(leading(&Err(Silent::Failed("x".into())), true).grade, Grade::Unknown);
    }

    #[test]
    fn clocks_may_differ_by_what_the_look_took() {
        let (now, spent) = (SystemTime::now(), Duration::from_secs(2));
        let grade = |theirs: SystemTime| clock("c", Some(theirs), now, spent).grade;
        assert_eq!(grade(now - CLOCK_DIFFERENCE_MAX - spent), Grade::Good);
        assert_eq!(grade(now - CLOCK_DIFFERENCE_MAX - spent - Duration::from_millis(1)), Grade::Bad);
        assert_eq!(grade(now + CLOCK_DIFFERENCE_MAX), Grade::Good);
        assert_eq!(grade(now + CLOCK_DIFFERENCE_MAX + Duration::from_millis(1)), Grade::Bad);
        assert_eq!(clock("c", None, now, spent).grade, Grade::Unknown);
    }
}
