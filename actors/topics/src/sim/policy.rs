//! Who decides what is desired, and random policies over a small universe, so that documents refer to each other and change together.

use crate::Map;
use std::net::{IpAddr, Ipv4Addr};

use groupcast_policy::doc::{Content, Document, Enforced, Phase, Phases, Placement, Rules};
use groupcast_policy::ids::{GroupId, HostId, NetworkId, SpaceId, WorkloadId};
use groupcast_policy::net::Prefix;
use groupcast_policy::rule::{Action, Direction, Remote, Rule, Traffic};
use groupcast_policy::topic::{Scope, Topic};

use crate::random::Random;
use crate::reader::{Commit, Reader};

/// How things are, for whoever lives beside the topics.
#[derive(Debug, Clone, Copy)]
pub struct Moment<'a> {
    pub now_ms: u64,
    /// Things still go wrong.
    pub active: bool,
    pub controllers: &'a [Controller],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Controller {
    /// Another one after every crash.
    pub process: u64,
    pub connected: bool,
    pub leads: bool,
}

/// What is desired, and what hosts do with what they are given.
pub trait Script {
    /// Named `h0`, `h1` and so on.
    fn hosts(&self) -> u64;

    /// Changes what is desired.
    fn change(&mut self, desired: &mut Map<Topic, Document>, random: &mut Random);

    /// Which of so many edits become effective together, as lengths of runs; empty: all of them.
    fn divide(&mut self, edits: usize, random: &mut Random) -> Vec<usize> {
        let _ = (edits, random);
        Vec::new()
    }

    /// A host exposes another state, which is in force when this returns.
    fn committed(&mut self, host: usize, commit: &Commit, reader: &Reader) -> Result<(), String> {
        let _ = (host, commit, reader);
        Ok(())
    }

    /// A host's process has ended and another one begun.
    fn crashed(&mut self, host: usize) {
        let _ = host;
    }

    /// Time passes. True: something else is desired now.
    fn passed(&mut self, moment: &Moment<'_>, desired: &mut Map<Topic, Document>) -> Result<bool, String> {
        let _ = (moment, desired);
        Ok(false)
    }

    /// Everything has settled.
    fn settled(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// What a host holds when everything has settled.
    fn ended(&mut self, host: usize, reader: &Reader) -> Result<(), String> {
        let _ = (host, reader);
        Ok(())
    }
}

/// Documents that are no policy's, for the protocol alone.
#[derive(Debug, Clone, Copy)]
pub struct Universe {
    pub hosts: u64,
    pub groups: u64,
    pub spaces: u64,
}

fn named<T>(prefix: &str, number: u64, new: impl Fn(&str) -> Result<T, groupcast_policy::ids::InvalidId>) -> T {
    new(&format!("{prefix}{number}")).expect("a letter and a number are an id")
}

pub(super) fn host(number: u64) -> HostId {
    named("h", number, HostId::new)
}

fn group(number: u64) -> GroupId {
    named("g", number, GroupId::new)
}

impl Script for Universe {
    fn hosts(&self) -> u64 {
        self.hosts
    }

    /// Half of the time each edit is taken for a change of its own, or for one with the next.
    fn divide(&mut self, edits: usize, random: &mut Random) -> Vec<usize> {
        if random.below(2) == 0 {
            return Vec::new();
        }
        let (mut wholes, mut left) = (Vec::new(), edits);
        while left > 0 {
            let length = left.min(1 + random.below(3) as usize);
            wholes.push(length);
            left -= length;
        }
        wholes
    }

    /// Changes a few documents of `desired`, now and then very many at once.
    fn change(&mut self, desired: &mut Map<Topic, Document>, random: &mut Random) {
        let count = match random.below(20) {
            0 => 40 + random.below(20),
            n => 1 + n % 4,
        };
        for _ in 0..count {
            let topic = self.any_topic(random);
            let mut content = desired.get(&topic).and_then(Document::content).cloned();
            if random.below(30) == 0 && !matches!(topic, Topic::Host(_)) {
                content = None;
            } else {
                self.edit(&topic, &mut content, random);
            }
            desired.insert(topic, content.map_or_else(Document::absent, Document::new));
        }
    }
}

impl Universe {
    fn any_topic(&self, random: &mut Random) -> Topic {
        match random.below(10) {
            0 => Topic::Host(host(random.below(self.hosts))),
            1 => Topic::Scope(Scope::Global),
            2 => Topic::Scope(Scope::Space(named("s", random.below(self.spaces), SpaceId::new))),
            3 | 4 => Topic::Rules(group(random.below(self.groups))),
            _ => Topic::Members(group(random.below(self.groups))),
        }
    }

    fn edit(&self, topic: &Topic, content: &mut Option<Content>, random: &mut Random) {
        match topic {
            Topic::Host(_) => {
                let mut placements = if let Some(Content::Host(held)) = content.take() { held } else { Default::default() };
                let workload = named("w", random.below(3), WorkloadId::new);
                if random.below(4) == 0 {
                    placements.remove(&workload);
                } else {
                    placements.insert(workload.clone(), self.placement(workload, random));
                }
                *content = Some(Content::Host(placements));
            }
            Topic::Scope(_) => {
                let mut bound = if let Some(Content::Scope(held)) = content.take() { held } else { Default::default() };
                let group = group(random.below(self.groups));
                if bound.len() > 6 || random.below(3) == 0 {
                    bound.pop_first();
                }
                bound.insert(group, Phases::from_bits(1 + random.below(3) as u8).expect("1 to 3"));
                *content = Some(Content::Scope(bound));
            }
            Topic::Rules(_) => {
                let mut rules = if let Some(Content::Rules(held)) = content.take() { held } else { Rules::default() };
                if rules.rules.len() > 6 || random.below(3) == 0 {
                    rules.rules.pop_first();
                }
                let rule = Rule {
                    action: if random.below(4) == 0 { Action::Deny } else { Action::Allow },
                    direction: Direction::Ingress,
                    family: None,
                    traffic: Traffic::Any,
                    remote: Remote::Group(group(random.below(self.groups))),
                    log: false,
                };
                rules.rules.insert(rule.key(), rule);
                *content = Some(Content::Rules(rules));
            }
            Topic::Members(_) => {
                let mut members = if let Some(Content::Members(held)) = content.take() { held } else { Default::default() };
                if members.len() > 20 || random.below(3) == 0 {
                    members.v4.remove_smallest(1);
                }
                let address = Ipv4Addr::from_bits(0x0a00_0000 + random.below(4_000) as u32);
                members = members.iter().chain([Prefix::host(IpAddr::V4(address))]).collect();
                *content = Some(Content::Members(members));
            }
        }
    }

    fn placement(&self, workload: WorkloadId, random: &mut Random) -> Placement {
        Placement {
            workload,
            incarnation: 1 + random.below(5),
            network: named("n", 0, NetworkId::new),
            addresses: Default::default(),
            space: (random.below(2) == 0).then(|| named("s", random.below(self.spaces), SpaceId::new)),
            app: None,
            phase: if random.below(3) == 0 { Phase::Staging } else { Phase::Running },
            enforced: Enforced::BOTH,
            groups: (0..random.below(5)).map(|_| group(random.below(self.groups))).collect(),
        }
    }
}
