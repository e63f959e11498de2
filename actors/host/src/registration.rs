//! Runs the [`Enroller`]: beats, sends what it wants to the controllers, checks health, and keeps on disk what the local API enrolled.

mod told;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use groupcast_messages::{Beat, HostRequest, HostRequestAnswer, HostState};
use groupcast_policy::ids::{NetworkId, WorkloadId};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};

use self::told::heard;
pub use self::told::{Told, beat_token, register_token, told};
use crate::enforcement::Progress;
use crate::enrol::{ANSWER_WITHIN_MS, ENROLMENTS_MAX, Effect, Enroller, Enrolment, Event, Standing, WrittenEnrolment};
use crate::files::write_whole;
use crate::host;
use crate::inbox::Inbox;
use crate::probe::{self, Bounds};

/// How often waits are looked at.
const TICK: Duration = Duration::from_millis(100);
/// Orders that may wait.
const ORDERS_MAX: usize = 256;
/// What controllers said and nobody has looked at.
pub const TOLD_MAX: usize = 256;
/// A removal has this long to be taken before whoever asked is told that it will be.
const REMOVE_WITHIN: Duration = Duration::from_secs(2);
/// Controllers answer a farewell within this time, or are not there.
const LEAVE_WITHIN: Duration = Duration::from_secs(5);

/// What is said about registration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Registration {
    /// Which boot of the machine this is.
    pub boot: String,
    pub beats: u64,
    pub left: bool,
    pub workloads: Vec<Standing>,
}

impl Registration {
    /// For `/metrics`.
    pub fn metrics(&self) -> String {
        let of = |state: &str| self.workloads.iter().filter(|one| one.state == state).count();
        let unhealthy = self.workloads.iter().filter(|one| !one.healthy).count();
        let mut text = String::new();
        for (name, kind, words, value) in [
            ("beats_total", "counter", "Beats sent.", self.beats),
            ("unhealthy_workloads", "gauge", "Enrolled workloads whose check fails.", unhealthy as u64),
            ("left", "gauge", "Whether the host has said farewell.", u64::from(self.left)),
        ] {
            text.push_str(&format!("# HELP groupcast_agent_{name} {words}\n# TYPE groupcast_agent_{name} {kind}\n"));
            text.push_str(&format!("groupcast_agent_{name} {value}\n"));
        }
        let name = "groupcast_agent_enrolled_workloads";
        text.push_str(&format!("# HELP {name} Workloads to be enrolled, by how far that is.\n# TYPE {name} gauge\n"));
        for state in ["registered", "waiting", "refused", "absent"] {
            text.push_str(&format!("{name}{{state=\"{state}\"}} {}\n", of(state)));
        }
        text
    }
}

/// As the disk has it.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    format_version: String,
    enrolments: Vec<WrittenEnrolment>,
    /// Ended here, and not yet removed there.
    ended: Vec<(String, String)>,
    /// Whatever may be registered, also what agent.toml enrols: what that does not name any more, or on another network, has ended.
    #[serde(default)]
    registered: Vec<(String, String)>,
}

const FORMAT_VERSION: &str = "1";

enum Order {
    /// Answered when it is noted, not when it is registered.
    Want(Box<(Enrolment, WrittenEnrolment)>, oneshot::Sender<()>),
    Unwant(WorkloadId),
    Leave(oneshot::Sender<Result<(), String>>),
}

/// Everybody's hold on the task.
#[derive(Clone)]
pub struct Handle {
    orders: mpsc::Sender<Order>,
    told: watch::Receiver<Registration>,
    /// What agent.toml enrols, by workload.
    configured: Arc<BTreeMap<String, WrittenEnrolment>>,
}

impl Handle {
    /// As what agent.toml enrols a workload that is not enrolled any more, if it does.
    pub fn lapsed(&self, workload: &WorkloadId) -> Option<WrittenEnrolment> {
        let is_enrolled = self.told.borrow().workloads.iter().any(|one| one.workload == workload.as_str());
        self.configured.get(workload.as_str()).filter(|_| !is_enrolled).cloned()
    }

    /// Enrols a workload and waits until it is registered, or refused.
    pub async fn enrol(&self, written: WrittenEnrolment) -> Result<(), String> {
        let enrolment = written.check()?;
        let id = enrolment.asked.workload.to_string();
        let mut told = self.told.clone();
        let (noted, is_noted) = oneshot::channel();
        self.order(Order::Want(Box::new((enrolment, written)), noted)).await?;
        // What was said before that is about what it was enrolled as before.
        is_noted.await.map_err(|_| "the agent is ending".to_owned())?;
        let mine = |registration: &Registration| registration.workloads.iter().find(|one| one.workload == id).cloned();
        let decided = told.wait_for(|now| mine(now).is_some_and(|one| one.state != "waiting")).await;
        let standing = decided.map_err(|_| "the agent is ending".to_owned()).map(|now| mine(&now))?;
        match standing {
            Some(Standing { incarnation: Some(_), .. }) | None => Ok(()),
            Some(Standing { why, .. }) => Err(why.unwrap_or_else(|| "refused".to_owned())),
        }
    }

    /// A workload has ended: its registration goes, now or as soon as the controllers hear of it.
    pub async fn end(&self, workload: &WorkloadId) -> Result<(), String> {
        let is_mine = self.told.borrow().workloads.iter().any(|one| one.workload == workload.as_str());
        if !is_mine {
            return Ok(());
        }
        let mut told = self.told.clone();
        self.order(Order::Unwant(workload.clone())).await?;
        let gone = told.wait_for(|now| !now.workloads.iter().any(|one| one.workload == workload.as_str()));
        // Whatever is not taken in time is repeated.
        let _ = tokio::time::timeout(REMOVE_WITHIN, gone).await;
        Ok(())
    }

    pub async fn leave(&self) -> Result<(), String> {
        let (answer, answered) = oneshot::channel();
        self.order(Order::Leave(answer)).await?;
        answered.await.unwrap_or_else(|_| Err("the agent is ending".to_owned()))
    }

    pub fn now(&self) -> Registration {
        self.told.borrow().clone()
    }

    async fn order(&self, order: Order) -> Result<(), String> {
        self.orders.send(order).await.map_err(|_| "the agent is ending".to_owned())
    }
}

/// Begins with what the operator has written and what the disk remembers.
pub fn start(
    config: &crate::config::Config,
    inbox: Arc<Inbox>,
    told_by_controllers: mpsc::Receiver<Told>,
    progress: watch::Receiver<Progress>,
    absent: watch::Receiver<BTreeSet<WorkloadId>>,
) -> std::io::Result<Handle> {
    let boot = host::boot(&config.enrol.boot_file)?;
    let path = beside(&config.state);
    let kept = read(&path);
    let mut own = kept.enrolments;
    own.retain(|written| written.check().is_ok());
    let machine = config.host_workload.as_ref().map(|id| id.as_str());
    let whole = |written: &WrittenEnrolment| {
        let mut written = written.clone();
        if written.addresses.is_empty() && machine == Some(written.workload.as_str()) {
            written.addresses = host::addresses();
        }
        written
    };
    let configured: Vec<WrittenEnrolment> = config.enrol.workloads.iter().map(whole).collect();
    let mut enrolments = Vec::new();
    for written in configured.iter().cloned().chain(own.iter().map(whole)) {
        match written.check() {
            Ok(enrolment) => enrolments.push(enrolment),
            Err(error) => tracing::warn!(workload = written.workload, %error, "an enrolment is ignored"),
        }
    }
    // The last of an id counts, and what is not where it was registered has ended there.
    let now: BTreeMap<&WorkloadId, &NetworkId> = enrolments.iter().map(|one| (&one.asked.workload, &one.asked.network)).collect();
    let parsed =
        |(network, id): &(String, String)| -> Option<(NetworkId, WorkloadId)> { Some((network.parse().ok()?, id.parse().ok()?)) };
    let gone = kept.registered.iter().filter_map(parsed).filter(|(network, id)| now.get(id) != Some(&network));
    let mut enroller = Enroller::new(boot, kept.ended.iter().filter_map(parsed).chain(gone).collect::<Vec<_>>());
    enroller.handle(Event::Absent(absent.borrow().clone()), 0);
    let last: BTreeMap<WorkloadId, Enrolment> = enrolments.iter().map(|one| (one.asked.workload.clone(), one.clone())).collect();
    last.into_values().for_each(|enrolment| _ = enroller.handle(Event::Want(enrolment), 0));
    let configured = configured.into_iter().map(|written| (written.workload.clone(), written)).collect();
    let (orders, inbox_orders) = mpsc::channel(ORDERS_MAX);
    let (telling, told) = watch::channel(Registration { boot: format!("{boot:016x}"), ..Registration::default() });
    let (done, results) = mpsc::channel(ORDERS_MAX);
    inbox.wants(wanted(&enroller));
    let bounds = Bounds::new(config);
    let task =
        Task { enroller, inbox, boot, beat: config.enrol.beat, path, own, telling, done, beats: 0, progress, absent, bounds };
    task.keep();
    tokio::spawn(task.run(inbox_orders, results, told_by_controllers));
    Ok(Handle { orders, told, configured: Arc::new(configured) })
}

struct Task {
    enroller: Enroller,
    inbox: Arc<Inbox>,
    boot: u64,
    beat: Duration,
    path: PathBuf,
    /// What the local API enrolled.
    own: Vec<WrittenEnrolment>,
    telling: watch::Sender<Registration>,
    done: mpsc::Sender<Event>,
    beats: u64,
    progress: watch::Receiver<Progress>,
    /// Workloads that are attached where there is no interface.
    absent: watch::Receiver<BTreeSet<WorkloadId>>,
    /// Where health may be looked for.
    bounds: Bounds,
}

impl Task {
    async fn run(
        mut self,
        mut orders: mpsc::Receiver<Order>,
        mut results: mpsc::Receiver<Event>,
        mut told: mpsc::Receiver<Told>,
    ) {
        let clock = Instant::now();
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut connected, mut beat_at) = (false, Instant::now());
        loop {
            let mut noted = None;
            let event = tokio::select! {
                order = orders.recv() => match order {
                    None => return,
                    Some(order) => self.taken(order, &mut noted).await,
                },
                Ok(()) = self.absent.changed() => Some(Event::Absent(self.absent.borrow_and_update().clone())),
                Some(result) = results.recv() => Some(result),
                Some(told) = told.recv() => Some(heard(told)),
                _ = tick.tick() => {
                    let now = self.inbox.is_connected();
                    let changed = now != connected;
                    connected = now;
                    if changed && now {
                        // Whoever was away says at once that it is back, and hears at once whether it was forgotten.
                        beat_at = Instant::now();
                    }
                    Some(if changed { Event::Connected(now) } else { Event::Tick })
                }
            };
            let is_kept = matches!(event, Some(Event::Want(_) | Event::Unwant(_) | Event::Removed { taken: true, .. }));
            let now_ms = u64::try_from(clock.elapsed().as_millis()).unwrap_or(u64::MAX);
            let effects = event.map(|event| self.enroller.handle(event, now_ms)).unwrap_or_default();
            // On disk before it is sent: what has ended must not come back with a restart.
            if is_kept {
                self.keep();
            }
            effects.into_iter().for_each(|effect| self.perform(effect));
            if connected && self.enroller.is_needed() && Instant::now() >= beat_at {
                beat_at = Instant::now() + jittered(self.beat);
                self.send_beat().await;
            }
            self.tell();
            if let Some(noted) = noted {
                let _: Result<(), ()> = noted.send(()); // whoever asked may have gone
            }
        }
    }

    async fn taken(&mut self, order: Order, noted: &mut Option<oneshot::Sender<()>>) -> Option<Event> {
        match order {
            Order::Want(wanted, waiter) => {
                *noted = Some(waiter);
                let (enrolment, written) = *wanted;
                let id = enrolment.asked.workload.to_string();
                self.own.retain(|one| one.workload != id);
                if self.own.len() < ENROLMENTS_MAX {
                    self.own.push(written);
                }
                Some(Event::Want(enrolment))
            }
            Order::Unwant(id) => {
                self.own.retain(|one| one.workload != id.as_str());
                Some(Event::Unwant(id))
            }
            Order::Leave(answer) => {
                // Whether there is a bus is looked at now: the last tick may have been before it was reached.
                let outcome = self.farewell().await;
                let left = outcome.is_ok();
                let told = outcome
                    .map_err(|why| format!("the controllers were not told ({why}): they forget this host when it stays silent"));
                let _ = answer.send(told); // whoever asked may have gone
                left.then_some(Event::Leave)
            }
        }
    }

    async fn farewell(&self) -> Result<(), String> {
        match self.inbox.ask(&HostRequest::Leave { boot: self.boot }, LEAVE_WITHIN).await? {
            HostRequestAnswer::Done { .. } => Ok(()),
            HostRequestAnswer::Refused { reason, .. } => Err(format!("they refuse: {reason}")),
        }
    }

    fn perform(&self, effect: Effect) {
        let (inbox, done, bounds) = (self.inbox.clone(), self.done.clone(), self.bounds.clone());
        let within = Duration::from_millis(ANSWER_WITHIN_MS);
        tokio::spawn(async move {
            let event = match effect {
                Effect::Register { number, register } => {
                    if let Err(error) = inbox.register(register.encode(), number).await {
                        tracing::debug!(%error, "a registration was not sent");
                    }
                    // Whoever waits for its answer also knows when it is lost.
                    return;
                }
                Effect::Request(request) => {
                    let answer = inbox.ask(&request, within).await;
                    // A refusal is an answer: what is refused will not be taken later either.
                    let taken = match &answer {
                        Ok(HostRequestAnswer::Done { .. }) => true,
                        Ok(HostRequestAnswer::Refused { retryable, .. }) => !retryable,
                        Err(_) => false,
                    };
                    match request {
                        HostRequest::Remove { workloads, .. } => Event::Removed { workloads, taken },
                        HostRequest::Health { reports, .. } => Event::Reported { reports, taken },
                        HostRequest::Fresh { .. } | HostRequest::Leave { .. } => return,
                    }
                }
                Effect::Check { workload, incarnation, address, check } => {
                    let outcome = probe::look(&check, address, &bounds, &workload).await;
                    let (healthy, why) = (outcome == Ok(true), outcome.err().map(|refused| refused.to_string()));
                    Event::Checked { workload, incarnation, healthy, why }
                }
            };
            let _ = done.send(event).await; // the agent ends
        });
    }

    async fn send_beat(&mut self) {
        self.beats += 1;
        let state: HostState = self.progress.borrow().state.clone();
        let term = self.inbox.term().await;
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let beat = Beat { boot: self.boot, count: self.beats, term, version, state };
        if let Err(error) = self.inbox.beat(beat.encode(), self.beats).await {
            tracing::debug!(%error, "a beat was not sent");
        }
    }

    fn tell(&self) {
        let now = Registration {
            boot: format!("{:016x}", self.boot),
            beats: self.beats,
            left: self.enroller.has_left(),
            workloads: self.enroller.standings(),
        };
        let changed = self.telling.send_if_modified(|told| {
            let changed = *told != now;
            *told = now;
            changed
        });
        if changed {
            self.inbox.wants(wanted(&self.enroller));
        }
    }

    fn keep(&self) {
        let ended = |(network, id): &(NetworkId, WorkloadId)| (network.to_string(), id.to_string());
        let kept = Kept {
            format_version: FORMAT_VERSION.to_owned(),
            enrolments: self.own.clone(),
            ended: self.enroller.ended().map(ended).collect(),
            registered: self.enroller.wanted().map(|(network, id)| (network.to_string(), id.to_string())).collect(),
        };
        if let Err(error) = write(&self.path, &kept) {
            tracing::warn!(path = %self.path.display(), %error, "what was enrolled is not on disk: a restart forgets it");
        }
    }
}

/// What this host enrols and was not refused: what takes it away waits until it is enrolled again.
fn wanted(enroller: &Enroller) -> BTreeSet<WorkloadId> {
    let standings = if enroller.is_needed() { enroller.standings() } else { Vec::new() };
    standings.iter().filter(|one| one.state != "refused").filter_map(|one| one.workload.parse().ok()).collect()
}

/// Anything from three quarters of it to five: a fleet that was started together does not beat together.
fn jittered(interval: Duration) -> Duration {
    let share = host::random().unwrap_or(0) % 501;
    interval * (750 + share as u32) / 1_000
}

fn beside(state: &Path) -> PathBuf {
    let mut path = state.as_os_str().to_owned();
    path.push(".enrolments");
    path.into()
}

fn read(path: &Path) -> Kept {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Kept::default(),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "what was enrolled cannot be read");
            return Kept::default();
        }
    };
    match serde_json::from_str::<Kept>(&text) {
        Ok(kept) if kept.format_version == FORMAT_VERSION => kept,
        Ok(_) | Err(_) => {
            tracing::warn!(path = %path.display(), "what was enrolled cannot be understood: it is enrolled again when it is added");
            Kept::default()
        }
    }
}

fn write(path: &Path, kept: &Kept) -> std::io::Result<()> {
    write_whole(path, &serde_json::to_vec(kept)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_enrolled_is_counted() {
        let one = |state: &str, healthy| Standing {
            workload: "w".into(),
            template: "t".into(),
            state: state.into(),
            incarnation: None,
            why: None,
            healthy,
            unchecked: None,
        };
        let workloads = vec![one("registered", true), one("registered", false), one("refused", true)];
        let text = Registration { boot: "b".into(), beats: 7, left: false, workloads }.metrics();
        for line in [
            "groupcast_agent_beats_total 7",
            "groupcast_agent_unhealthy_workloads 1",
            "groupcast_agent_left 0",
            "groupcast_agent_enrolled_workloads{state=\"registered\"} 2",
            "groupcast_agent_enrolled_workloads{state=\"waiting\"} 0",
            "groupcast_agent_enrolled_workloads{state=\"refused\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }

    #[test]
    fn beats_are_spread() {
        let interval = Duration::from_secs(4);
        for _ in 0..100 {
            assert!((Duration::from_secs(3)..=Duration::from_secs(5)).contains(&jittered(interval)));
        }
    }

    #[test]
    fn what_is_kept_reads_back_and_what_is_damaged_is_nothing() {
        let path = std::env::temp_dir().join(format!("groupcast-enrolments-{}", std::process::id()));
        let pair = || vec![("n".to_owned(), "w".to_owned())];
        let kept = Kept { format_version: "1".into(), enrolments: Vec::new(), ended: pair(), registered: pair() };
        write(&path, &kept).unwrap();
        assert_eq!(read(&path).ended, kept.ended);
        std::fs::write(&path, "{").unwrap();
        assert!(read(&path).ended.is_empty());
        std::fs::remove_file(&path).unwrap();
        assert!(read(&path).ended.is_empty());
    }
}
