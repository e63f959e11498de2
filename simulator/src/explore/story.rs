//! What the explored world is about: a small catalogue and registry, compiled; hosts that register themselves; hosts with model kernels
//! that enforce what they are given; and packets that show whether they do.

use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::engine::Engine;
use groupcast_enforce::kernel::{Fate, ModelKernel, Packet, begins_a_connection};
use groupcast_enforce::ruleset::build;
use groupcast_enforce::settings::{Settings, Stamp};
use groupcast_enforce::trial::{self, Dice, Probe, Stage, WORKLOADS};
use groupcast_policy::doc::Document;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::Event;
use groupcast_policy::needs::Documents;
use groupcast_policy::resolve::{HostPolicy, resolve};
use groupcast_policy::rule::Direction;
use groupcast_policy::topic::Topic;
use groupcast_topics::Map;
use groupcast_topics::random::Random;
use groupcast_topics::reader::{Commit, Reader};
use groupcast_topics::sim::{Moment, Script};

use super::guests::{Guests, Rates};

/// Workloads are registered on the first two hosts; a third would have none.
pub const HOSTS_MAX: u64 = 2;
/// Events in one change, at most.
const EVENTS_MAX: u64 = 3;
/// New flows tried after every commit of a host, and how many of those that passed are watched from then on.
const PROBES: usize = 4;
const OPEN_MAX: usize = 8;

struct Machine {
    id: HostId,
    engine: Engine,
    kernel: ModelKernel,
    /// The agent has begun anew: it adopts the table and compares everything with the first commit.
    begun: bool,
    open: Vec<Probe>,
    /// Everything that passed since connections were forgotten: what follows it belongs to a connection.
    met: Vec<Probe>,
}

/// Whether a packet belongs to the connection that another began.
fn belongs(first: &Probe, probe: &Probe) -> bool {
    let same = (first.from, first.to, first.payload) == (probe.from, probe.to, probe.payload);
    let answers = (first.from, first.to, first.payload.reply()) == (probe.to, probe.from, probe.payload);
    first.family == probe.family && (same || answers)
}

impl Machine {
    fn new(id: HostId) -> Self {
        let engine = Engine::new(id.clone(), settings(), trial::attachments(), Stamp::FIRST);
        Self { id, engine, kernel: ModelKernel::default(), begun: true, open: Vec::new(), met: Vec::new() }
    }
}

pub struct Story {
    stage: Stage,
    machines: Vec<Machine>,
    guests: Guests,
    dice: Dice,
}

fn settings() -> Settings {
    Settings { claims: trial::claims(), ..Settings::default() }
}

/// What a reader exposes.
struct Exposed<'r>(&'r Reader);

impl Documents for Exposed<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.0.document(topic)
    }
}

fn packet(probe: &Probe) -> Packet {
    let behind = |place: u8| if place == WORKLOADS { trial::outside() } else { trial::interface(place) };
    Packet::first(behind(probe.from), behind(probe.to), probe.source(), probe.destination(), probe.payload)
}

/// Whether both ends that the host judges allow a flow, or its answer, by the documents alone.
fn allows(policy: &HostPolicy<'_>, probe: &Probe, answer: bool) -> bool {
    let judge = |place: u8, direction: Direction, remote| {
        if place == WORKLOADS {
            return true;
        }
        let id = trial::workload_id(place);
        let Some(workload) = policy.workloads.get(&id) else { return false };
        match (answer && !workload.stateful, direction) {
            (false, _) => policy.verdict(&id, direction, remote, &probe.payload),
            (true, Direction::Egress) => policy.verdict(&id, Direction::Ingress, remote, &probe.payload.reply()),
            (true, Direction::Ingress) => policy.verdict(&id, Direction::Egress, remote, &probe.payload.reply()),
        }
    };
    judge(probe.from, Direction::Egress, probe.destination()) && judge(probe.to, Direction::Ingress, probe.source())
}

fn fate(passes: bool) -> Fate {
    if passes { Fate::Passed } else { Fate::Dropped }
}

impl Story {
    pub fn new(seed: u64, hosts: u64, controllers: u64, rates: Rates) -> anyhow::Result<Self> {
        let machines = (0..hosts.clamp(1, HOSTS_MAX)).map(|number| Ok(Machine::new(HostId::new(&format!("h{number}"))?)));
        let guests = Guests::new(seed, controllers as usize, rates);
        Ok(Self { stage: Stage::default(), machines: machines.collect::<anyhow::Result<_>>()?, guests, dice: Dice::new(seed) })
    }

    fn apply(&mut self, events: &[Event], desired: &mut Map<Topic, Document>) {
        for (topic, _) in self.stage.change(events) {
            let document = self.stage.document(&topic).cloned().unwrap_or_default();
            desired.insert(topic, document);
        }
    }
}

impl Script for Story {
    fn hosts(&self) -> u64 {
        self.machines.len() as u64
    }

    fn change(&mut self, desired: &mut Map<Topic, Document>, random: &mut Random) {
        let mut events = Vec::new();
        for _ in 0..1 + random.below(EVENTS_MAX) {
            let small = self.dice.percent(50);
            events.push(if small { self.stage.nudge(&mut self.dice) } else { trial::event(&mut self.dice) });
        }
        self.apply(&events, desired);
    }

    fn passed(&mut self, moment: &Moment<'_>, desired: &mut Map<Topic, Document>) -> Result<bool, String> {
        let events = self.guests.passed(moment)?;
        if !events.is_empty() {
            self.apply(&events, desired);
        }
        Ok(!events.is_empty())
    }

    fn settled(&mut self) -> Result<(), String> {
        self.guests.settled()
    }

    fn crashed(&mut self, host: usize) {
        let machine = &mut self.machines[host];
        let (stamp, table) = (machine.engine.stamp(), machine.kernel.table.clone());
        machine.engine = Engine::adopt(machine.id.clone(), settings(), trial::attachments(), stamp, table);
        machine.begun = true;
    }

    fn committed(&mut self, host: usize, commit: &Commit, reader: &Reader) -> Result<(), String> {
        let machine = &mut self.machines[host];
        let documents = Exposed(reader);
        let mut edits = commit.edits.clone();
        edits.extend(commit.dropped.iter().map(|topic| (topic.clone(), None)));
        let whole = std::mem::take(&mut machine.begun);
        let plan = if whole { machine.engine.compare(&documents) } else { machine.engine.change(&edits, &documents) };
        machine.kernel.commit(&plan.transaction).map_err(|error| format!("its kernel refuses the transaction: {error}"))?;
        machine.engine.committed(plan);

        let policy = resolve(&machine.id, &documents);
        let wrong =
            |what: &str, probe: &Probe, found: Fate| format!("{what} {found:?}, which its documents do not say: {probe:?}");
        for probe in &machine.open {
            // The answer first: a flow that only sends in reply direction must stop too.
            for (what, answer) in [("the answer of an open flow", true), ("an open flow", false)] {
                let later = if answer { packet(probe).answer().later() } else { packet(probe).later() };
                let found = machine.kernel.send(&later);
                if found != fate(allows(&policy, probe, answer)) {
                    return Err(wrong(what, probe, found));
                }
            }
        }
        for _ in 0..PROBES {
            let probe = Probe::roll(&mut self.dice);
            if machine.met.iter().any(|met| belongs(met, &probe)) {
                continue; // nothing new
            }
            let found = machine.kernel.send(&packet(&probe));
            let expected = begins_a_connection(probe.family, &probe.payload) && allows(&policy, &probe, false);
            if found != fate(expected) {
                return Err(wrong("a new flow", &probe, found));
            }
            if found == Fate::Passed {
                machine.met.push(probe);
            }
            let answered = found == Fate::Passed && machine.kernel.send(&packet(&probe).answer()) == Fate::Passed;
            if answered && machine.open.len() < OPEN_MAX {
                machine.open.push(probe);
            }
        }
        machine.open.retain(|probe| allows(&policy, probe, false) && allows(&policy, probe, true));
        if machine.open.is_empty() {
            machine.kernel.forget();
            machine.met.clear();
        }
        Ok(())
    }

    fn ended(&mut self, host: usize, reader: &Reader) -> Result<(), String> {
        let machine = &mut self.machines[host];
        let documents = Exposed(reader);
        let scratch = build(&machine.id, &documents, &trial::attachments(), &settings(), machine.engine.stamp());
        let differences = machine.kernel.table.differences(&scratch.to_table());
        match differences.first() {
            None => Ok(()),
            Some(difference) => {
                Err(format!("its table differs from a new one in {} points, first {difference}", differences.len()))
            }
        }
    }
}
