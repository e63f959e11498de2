//! The entries of the guests: who is enrolled in which life, and what the policy hears of it.

use groupcast_control::document::Enrolled;
use groupcast_control::registration::lifecycle::{Effect, Event};
use groupcast_enforce::trial;
use groupcast_policy::model::{self, Workload};
use groupcast_policy::net::Prefix;

use super::{Entry, GUESTS, Guests, Step, address, id, number, template, workload_of};

impl Guests {
    /// Any controller's registrar, in one batch: the entry and the claim of its address, or nothing.
    pub(super) fn enrol(&mut self, guest: usize, boot: u64) {
        let held_by_another =
            (0..GUESTS).any(|other| other != guest && address(other) == address(guest) && self.registry[other].is_some());
        let overtaken =
            self.registry[guest].as_ref().is_some_and(|entry| entry.enrolled.boot.parse::<u64>().is_ok_and(|held| held > boot));
        if held_by_another || overtaken {
            return;
        }
        if self.guests[guest].boot == boot {
            self.guests[guest].enrol_at_ms = None;
        }
        let enrolled = Enrolled { boot: boot.to_string(), templates: vec![template(guest)], suspect: false };
        if self.registry[guest].as_ref().is_none_or(|entry| entry.enrolled != enrolled) {
            self.enrolments += 1;
            self.put(guest, Some(enrolled));
        }
    }

    pub(super) fn put(&mut self, guest: usize, enrolled: Option<Enrolled>) {
        self.sequence += 1;
        let (sequence, was) = (self.sequence, self.registry[guest].take());
        let (life, boot) = self.lives[guest].clone();
        if let Some(enrolled) = &enrolled {
            // Another boot, or an entry that was gone: another life.
            let incarnation = match &was {
                Some(entry) if boot == enrolled.boot => entry.incarnation,
                _ => life + 1,
            };
            if incarnation < life {
                self.failure = Some(format!("{} goes back from life {life} to {incarnation}", id(guest)));
            }
            self.lives[guest] = (incarnation, enrolled.boot.clone());
            self.registry[guest] = Some(Entry { sequence, enrolled: enrolled.clone(), incarnation });
        }
        let holders = (0..GUESTS).filter(|other| address(*other) == address(guest) && self.registry[*other].is_some()).count();
        if holders > 1 {
            self.failure = Some(format!("{holders} hosts hold the address of {}", id(guest)));
        }
        let lives = |entry: &Option<Entry>| entry.as_ref().map(|entry| entry.incarnation);
        if lives(&was) != lives(&self.registry[guest]) {
            self.registered(guest);
        }
        for control in 0..self.controls.len() {
            if self.controls[control].connected {
                let at = self.way().max(self.controls[control].last_entry_ms);
                self.controls[control].last_entry_ms = at;
                let process = self.controls[control].process;
                self.schedule(at, Step::Entry { control, process, guest, sequence, enrolled: enrolled.clone() });
            }
        }
    }

    /// The policy hears of it: a member of a group comes or goes.
    fn registered(&mut self, guest: usize) {
        let Some((workload, network)) = workload_of(guest) else { return };
        self.changed.push(match &self.registry[guest] {
            None => model::Event::WorkloadRemoved { id: workload, network },
            Some(entry) => {
                let mut made = Workload::new(workload, id(guest), network);
                made.addresses = Prefix::v4(0x0a02_0000 + address(guest) as u32, 32).into_iter().collect();
                made.groups = [trial::group_id(guest as u8 % trial::GROUPS)].into();
                made.incarnation = entry.incarnation;
                model::Event::workload(made)
            }
        });
    }

    pub(super) fn write(&mut self, control: usize, process: u64, effect: &Effect) {
        let (host, expected, suspect) = match effect {
            Effect::Suspect { host, sequence, .. } => (host, *sequence, Some(true)),
            Effect::Live { host, sequence } => (host, *sequence, Some(false)),
            Effect::Delete { host, sequence, .. } => (host, *sequence, None),
            Effect::Tell { .. } | Effect::Guard { .. } => return,
        };
        let Some(guest) = number(host) else { return };
        let found = self.registry[guest].clone().filter(|entry| entry.sequence == expected);
        let deleted = found.is_some() && suspect.is_none();
        self.deletions += u64::from(deleted);
        if let Some(entry) = found {
            self.put(guest, suspect.map(|suspect| Enrolled { suspect, ..entry.enrolled }));
        }
        if self.controls[control].process == process {
            self.tell(control, Event::Done { host: host.clone(), deleted });
        }
    }
}
