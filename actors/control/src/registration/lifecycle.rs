//! Who is silent for how long, and what comes of it: suspect after a lease, deleted after a grace, both by compare-and-swap on the
//! very entry that was looked at. Silence is judged on this controller's own monotonic clock, and counted anew whenever this controller
//! may have been deaf or has just begun to lead; what other machines' clocks say matters nowhere.
//!
//! Every controller keeps one of these. Only the leader's has effects.

mod guarding;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use groupcast_policy::ids::{HostId, TemplateId};

use super::guard::Counts;
use super::settings::Settings;
use crate::document::{Enrolled, GuardRecord};

/// Entries that are being written at once.
pub const WRITES_MAX: usize = 32;

/// Why silence counts from now on only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Deaf {
    /// The bus was out of reach.
    Disconnected,
    /// A stream has another leader: the servers were busy with themselves.
    Election,
    /// Messages were dropped on the way here.
    Lost,
    /// This process stood still.
    Stalled,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Event {
    /// A host's entry as REGISTRY has it at this sequence; nothing for a host that is gone or that only a source speaks of.
    Entry {
        host: HostId,
        sequence: u64,
        enrolled: Option<Enrolled>,
    },
    /// Every entry was read once.
    Loaded,
    /// A host lives. Where an answer goes, if it wants one.
    Beat {
        host: HostId,
        boot: String,
        answer: Option<String>,
    },
    Leading(bool),
    Connected(bool),
    Deaf(Deaf),
    /// What was ordered for this host is done, or was given up because the entry was another by then.
    Done {
        host: HostId,
        deleted: bool,
    },
    /// An operator knows that the silent hosts of a template are gone.
    Confirm {
        template: TemplateId,
    },
    /// What REGISTRY says about a template's freeze and the operator's word.
    Guard {
        template: TemplateId,
        record: Option<GuardRecord>,
    },
    /// That could not be written.
    NotGuarded {
        template: TemplateId,
    },
    Tick,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Each of these only if the entry still stands at this sequence.
    Suspect {
        host: HostId,
        sequence: u64,
        silent_ms: u64,
    },
    Live {
        host: HostId,
        sequence: u64,
    },
    Delete {
        host: HostId,
        sequence: u64,
        silent_ms: u64,
        confirmed: bool,
    },
    /// The host's entry is not what it thinks: it has to enrol again.
    Tell {
        host: HostId,
        answer: String,
    },
    /// Nothing of the template is deleted any more, or is again, or an operator has confirmed some: to be written down.
    Guard {
        template: TemplateId,
        record: Option<GuardRecord>,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Host {
    sequence: u64,
    boot: String,
    templates: BTreeSet<TemplateId>,
    suspect: bool,
    /// The last sign of life, on this controller's clock: a beat or an enrolment.
    heard_ms: u64,
    /// Not deleted before, whatever its silence: its template has just thawed.
    spared_until_ms: u64,
    /// Something is being written about it.
    busy: bool,
    /// An operator knows that it is gone.
    confirmed: bool,
}

/// How a host is, for whoever asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub suspect: bool,
    pub frozen: bool,
    pub boot: String,
    /// How long nothing was heard, as far as this controller could hear.
    pub silent_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Lifecycle {
    settings: Settings,
    hosts: BTreeMap<HostId, Host>,
    /// Templates of which nothing is deleted.
    frozen: BTreeMap<TemplateId, Counts>,
    /// What REGISTRY says of it, as far as is known here.
    told: BTreeMap<TemplateId, GuardRecord>,
    /// Deletions under way: of which templates, unless an operator has confirmed that the host is gone.
    deleting: BTreeMap<HostId, BTreeSet<TemplateId>>,
    /// Deleted for silence and not confirmed: when, and of which templates. Oldest first.
    deleted: VecDeque<(u64, BTreeSet<TemplateId>)>,
    /// Silence before counts for nobody.
    floor_ms: u64,
    ticked_ms: u64,
    leading: bool,
    connected: bool,
    loaded: bool,
    busy: usize,
    /// Deletions that may go ahead, in thousandths.
    budget: u64,
}

/// Of hosts that enrolled without a template.
const NO_TEMPLATE: &str = "-";

impl Lifecycle {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            hosts: BTreeMap::new(),
            frozen: BTreeMap::new(),
            told: BTreeMap::new(),
            deleting: BTreeMap::new(),
            deleted: VecDeque::new(),
            floor_ms: 0,
            ticked_ms: 0,
            leading: false,
            connected: false,
            loaded: false,
            busy: 0,
            budget: 0,
        }
    }

    pub fn handle(&mut self, event: Event, now_ms: u64) -> Vec<Effect> {
        match event {
            Event::Entry { host, sequence, enrolled } => self.entry(host, sequence, enrolled, now_ms),
            Event::Loaded => self.loaded = true,
            Event::Beat { host, boot, answer } => return self.beat(host, &boot, answer, now_ms),
            Event::Leading(leading) => {
                self.leading = leading;
                self.floor_ms = now_ms;
                self.budget = 0;
            }
            Event::Connected(connected) => {
                self.connected = connected;
                self.floor_ms = now_ms;
            }
            Event::Deaf(_) => self.floor_ms = now_ms,
            Event::Done { host, deleted } => self.done(&host, deleted, now_ms),
            Event::Confirm { template } => return self.confirm(template, now_ms),
            Event::Guard { template, record } => self.guarded(template, record),
            Event::NotGuarded { template } => _ = self.told.remove(&template),
            Event::Tick => return self.tick(now_ms),
        }
        Vec::new()
    }

    /// Whether what it says about hosts is worth anything.
    pub fn acts(&self) -> bool {
        self.leading && self.connected && self.loaded
    }

    pub fn seen(&self, host: &HostId, now_ms: u64) -> Option<Seen> {
        let host = self.hosts.get(host)?;
        let frozen = host.templates.iter().any(|template| self.frozen.contains_key(template));
        Some(Seen { suspect: host.suspect, frozen, boot: host.boot.clone(), silent_ms: now_ms.saturating_sub(host.heard_ms) })
    }

    /// Every host that has enrolled itself.
    pub fn known(&self) -> impl Iterator<Item = &HostId> {
        self.hosts.keys()
    }

    pub fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Those that have enrolled workloads of this template.
    pub fn hosts_of<'a>(&'a self, template: &'a TemplateId) -> impl Iterator<Item = &'a HostId> {
        self.hosts.iter().filter(|(_, host)| host.templates.contains(template)).map(|(id, _)| id)
    }

    pub fn suspects(&self) -> usize {
        self.hosts.values().filter(|host| host.suspect).count()
    }

    fn entry(&mut self, id: HostId, sequence: u64, enrolled: Option<Enrolled>, now_ms: u64) {
        let Some(Enrolled { boot, templates, suspect }) = enrolled else {
            if let Some(gone) = self.hosts.remove(&id) {
                self.busy -= usize::from(gone.busy);
            }
            return;
        };
        let mut templates: BTreeSet<TemplateId> = templates.iter().filter_map(|id| TemplateId::new(id).ok()).collect();
        if templates.is_empty() {
            templates.extend(TemplateId::new(NO_TEMPLATE));
        }
        let known = self.hosts.get(&id);
        // An entry that is not suspect was written because the host spoke, to this controller or to another.
        let heard_ms = known.filter(|_| suspect).map_or(now_ms, |host| host.heard_ms);
        let busy = known.is_some_and(|host| host.busy);
        let confirmed = match known {
            Some(host) => suspect && host.confirmed,
            // One that is new to a leader has just enrolled; to anybody else it may have been there for long.
            None => !self.acts() && self.was_confirmed(&id, &templates),
        };
        let spared_until_ms = known.map_or(0, |host| host.spared_until_ms);
        self.hosts.insert(id, Host { sequence, boot, templates, suspect, heard_ms, spared_until_ms, busy, confirmed });
    }

    fn beat(&mut self, id: HostId, boot: &str, answer: Option<String>, now_ms: u64) -> Vec<Effect> {
        let acts = self.acts();
        let Some(host) = self.hosts.get_mut(&id) else {
            let tell = answer.filter(|_| acts).map(|answer| Effect::Tell { host: id, answer });
            return tell.into_iter().collect();
        };
        host.heard_ms = now_ms;
        host.confirmed = false;
        if !acts {
            return Vec::new();
        }
        let mut effects = Vec::new();
        if host.boot != boot {
            effects.extend(answer.map(|answer| Effect::Tell { host: id.clone(), answer }));
        }
        if host.suspect && !host.busy {
            host.busy = true;
            self.busy += 1;
            effects.push(Effect::Live { host: id, sequence: host.sequence });
        }
        effects
    }

    fn done(&mut self, id: &HostId, deleted: bool, now_ms: u64) {
        // That it is gone the stream says, a moment earlier or later; perhaps it has enrolled again meanwhile.
        if let Some(host) = self.hosts.get_mut(id) {
            self.busy -= usize::from(std::mem::take(&mut host.busy));
        }
        if let Some(templates) = self.deleting.remove(id)
            && deleted
        {
            self.deleted.push_back((now_ms, templates));
        }
    }

    fn silent_ms(&self, host: &Host, now_ms: u64) -> u64 {
        now_ms.saturating_sub(host.heard_ms.max(self.floor_ms))
    }

    fn tick(&mut self, now_ms: u64) -> Vec<Effect> {
        let since_ms = now_ms.saturating_sub(self.ticked_ms);
        self.ticked_ms = now_ms;
        let lease_ms = self.settings.lease.as_millis() as u64;
        // A process that stood still has not heard what was said meanwhile, though its clock went on.
        if since_ms > (lease_ms / 2).max(2 * self.settings.sweep.as_millis() as u64) {
            self.floor_ms = now_ms;
        }
        if !self.acts() {
            return Vec::new();
        }
        let mut effects = self.guard(now_ms);
        let per_second = 1_000 * u64::from(self.settings.deletions_per_second);
        self.budget = (self.budget + since_ms * per_second / 1_000).min(per_second);
        let grace_ms = self.settings.grace.as_millis() as u64;
        let ids: Vec<HostId> = self.hosts.keys().cloned().collect();
        for id in ids {
            if self.busy >= WRITES_MAX {
                break;
            }
            let Some(host) = self.hosts.get(&id) else { continue };
            let silent_ms = self.silent_ms(host, now_ms);
            let frozen = !host.confirmed && host.templates.iter().any(|template| self.frozen.contains_key(template));
            if silent_ms < lease_ms || host.busy || frozen {
                continue;
            }
            let (sequence, confirmed) = (host.sequence, host.confirmed);
            let effect = if !host.suspect {
                Effect::Suspect { host: id.clone(), sequence, silent_ms }
            } else if silent_ms >= lease_ms + grace_ms && now_ms >= host.spared_until_ms && self.budget >= 1_000 {
                self.budget -= 1_000;
                if !confirmed {
                    self.deleting.insert(id.clone(), host.templates.clone());
                }
                Effect::Delete { host: id.clone(), sequence, silent_ms, confirmed }
            } else {
                continue;
            };
            if let Some(host) = self.hosts.get_mut(&id) {
                host.busy = true;
                self.busy += 1;
            }
            effects.push(effect);
        }
        effects
    }
}

#[cfg(test)]
mod explored;

#[cfg(test)]
#[path = "lifecycle_tests.rs"]
mod tests;
