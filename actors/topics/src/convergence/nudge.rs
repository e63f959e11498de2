//! Telling hosts that stay behind what they should have.

use groupcast_messages::{NUDGE_TOPICS_MAX, Nudge};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::TopicHash;

use super::Convergence;
use super::batch::revision;
use crate::Map;

impl Convergence {
    /// The stream elected a new leader: what it was about to republish may be lost. Everyone behind is told at once.
    pub fn stream_leader_changed(&mut self, now_ms: u64) {
        self.rows.iter_mut().flatten().for_each(|row| row.nudge_ms = row.nudge_ms.min(now_ms));
        self.quiet_until_ms = Some(now_ms);
    }

    /// The nudges that are due.
    pub fn tick(&mut self, now_ms: u64) -> Vec<(HostId, Vec<u8>)> {
        let mut nudges = Vec::new();
        if self.quiet_until_ms.is_none_or(|due| due > now_ms) {
            return nudges;
        }
        for slot in 0..self.rows.len() as u32 {
            let Some(row) = self.rows[slot as usize].as_mut().filter(|row| row.is_behind() && row.nudge_ms <= now_ms) else {
                continue;
            };
            row.backoff_ms = (row.backoff_ms * 2).min(self.settings.nudge_backoff_max_ms);
            row.nudge_ms = now_ms + row.backoff_ms;
            let host = row.host.clone();
            nudges.push((host, Nudge { cut: self.cut, should: self.should(slot) }.encode()));
        }
        let behind = self.rows.iter().flatten().filter(|row| row.is_behind());
        self.quiet_until_ms = behind.map(|row| row.nudge_ms).min();
        nudges
    }

    /// What a host should have and has not, each topic once.
    fn should(&self, slot: u32) -> Vec<(TopicHash, u64)> {
        let Some(row) = self.rows[slot as usize].as_ref() else { return Vec::new() };
        let mut should: Map<TopicHash, u64> = row.forgotten.into_iter().collect();
        let open = row.open.iter().filter_map(|number| self.batches.get(number.checked_sub(self.first)? as usize));
        for (topic, wanted) in open.flat_map(|batch| batch.wanted(slot, row.own)) {
            if revision(&row.partial, topic) < wanted && (should.len() < NUDGE_TOPICS_MAX || should.contains_key(&topic)) {
                let most = should.entry(topic).or_default();
                *most = (*most).max(wanted);
            }
        }
        let mut should: Vec<(TopicHash, u64)> = should.into_iter().collect();
        should.sort_unstable();
        should
    }

    pub fn deadline_ms(&self) -> Option<u64> {
        self.quiet_until_ms
    }
}
