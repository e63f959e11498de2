//! A name for every state, the same for all that behave alike: it does not matter which host or controller is which, how long ago
//! something was that is over, how often something was written, or what somebody has heard who does not judge.

use std::hash::{DefaultHasher, Hasher};

use super::{CONTROLLERS, Effect, HOSTS, IDS, Lifecycle, PAST_STEPS, STEP_MS, World, boot_number, number};

impl World {
    /// A name for all states that behave like this one: the least of those that differ in who is who.
    pub fn key(&self) -> u128 {
        [[0, 1], [1, 0]]
            .into_iter()
            .flat_map(|hosts| [[0, 1], [1, 0]].map(|controls| self.key_as(hosts, controls)))
            .min()
            .unwrap_or_default()
    }

    fn key_as(&self, hosts: [usize; HOSTS], controls: [usize; CONTROLLERS]) -> u128 {
        let mut bytes: Vec<u8> = Vec::with_capacity(160);
        let renamed = |h: usize| u8::from(hosts[h] != h);
        let ago = |at: u64| ((self.now - at.min(self.now)) / STEP_MS).min(PAST_STEPS) as u8;
        // Sequences are only ever compared with that of the entry or claim they speak of, and an old one stays old.
        let current = |h: usize, sequence: u64| u8::from(self.sequence_of(h) == sequence);
        for h in hosts {
            let machine = &self.machines[h];
            bytes.extend([u8::from(machine.alive), machine.boot, u8::from(machine.alive && machine.content)]);
            match &self.registry[h] {
                Err(_) => bytes.push(9),
                Ok(entry) => bytes.extend([u8::from(entry.enrolled.suspect), boot_number(&entry.enrolled.boot)]),
            }
        }
        bytes.push(self.claim.0.map_or(9, renamed));
        for request in &self.requests {
            let is_current = request.looked == (self.sequence_of(request.host), self.claim.1);
            bytes.extend([20 + renamed(request.host), request.boot, u8::from(request.leave), u8::from(is_current)]);
        }
        bytes.push(30 + self.leader.map_or(9, |leader| u8::from(controls[leader] != leader)));
        for control in controls.map(|c| &self.controls[c]) {
            for order in &control.orders {
                let (kind, host, sequence) = match order {
                    Effect::Suspect { host, sequence, .. } => (40, host, *sequence),
                    Effect::Live { host, sequence } => (42, host, *sequence),
                    Effect::Delete { host, sequence, .. } => (44, host, *sequence),
                    Effect::Tell { .. } | Effect::Guard { .. } => continue,
                };
                let host = number(host);
                bytes.extend([kind + renamed(host), current(host, sequence)]);
            }
            bytes.extend([50, u8::from(control.cut)]);
            // Whoever does not judge counts anew when it does: what it has heard until then is forgotten, by everybody alike.
            let judges = control.lifecycle.acts();
            if judges {
                bytes.push(ago(control.floor));
                bytes.extend(hosts.map(|h| ago(control.heard[h])));
            }
            let ago_if_judging = |at: u64| if judges { ago(at) } else { 0 };
            control.lifecycle.key_into(&mut bytes, hosts, &ago, &ago_if_judging, &current);
        }
        let [mut one, mut other] = [DefaultHasher::new(), DefaultHasher::new()];
        other.write_u8(1);
        one.write(&bytes);
        other.write(&bytes);
        u128::from(one.finish()) << 64 | u128::from(other.finish())
    }
}

impl Lifecycle {
    /// Everything in it that can make a difference later.
    fn key_into(
        &self,
        bytes: &mut Vec<u8>,
        hosts: [usize; HOSTS],
        ago: &impl Fn(u64) -> u8,
        heard_ago: &impl Fn(u64) -> u8,
        current: &impl Fn(usize, u64) -> u8,
    ) {
        for h in hosts {
            let is_deleting = u8::from(self.deleting.contains_key(&IDS[h]));
            let Some(host) = self.hosts.get(&IDS[h]) else {
                bytes.push(60 + is_deleting);
                continue;
            };
            let spared = (host.spared_until_ms.saturating_sub(self.ticked_ms) / STEP_MS) as u8;
            bytes.extend([62 + is_deleting, u8::from(host.suspect), u8::from(host.busy), u8::from(host.confirmed)]);
            bytes.extend([current(h, host.sequence), boot_number(&host.boot), heard_ago(host.heard_ms), spared]);
        }
        bytes.extend(self.deleted.iter().map(|(at_ms, _)| 70 + ago(*at_ms)));
        let flags = [self.leading, self.connected, self.loaded, self.frozen.is_empty(), self.told.is_empty()];
        bytes.extend(flags.map(|flag| 80 + u8::from(flag)));
        // It begins anew with the lead.
        let budget = if self.acts() { (self.budget / 1_000).min(HOSTS as u64) as u8 } else { 0 };
        bytes.extend([heard_ago(self.floor_ms), ago(self.ticked_ms), self.busy as u8, budget]);
    }
}

/// Keys are hashes already.
#[derive(Default)]
pub struct Own(u64);

impl Hasher for Own {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {}

    fn write_u128(&mut self, key: u128) {
        self.0 = key as u64;
    }
}
