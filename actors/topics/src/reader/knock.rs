//! A host that comes back and holds something makes itself known before it subscribes: it has its revisions compared, and whoever answers
//! that can answer a request. A bus that lost everything is filled again first, topic by topic, and every subscriber would receive all of
//! it only to ask for the same afterwards. What is held stays in force meanwhile. The price: a round trip, and where an answer is lost, or no
//! controller is there yet, up to the pause between two attempts in which a change that is published does not reach this host. A nudge ends the pause: it comes half a
//! second after such a change.

use super::Reader;

#[derive(Debug)]
pub(super) struct Knock {
    again_ms: u64,
    times: u32,
}

impl Knock {
    pub fn at(now_ms: u64) -> Self {
        Self { again_ms: now_ms, times: 0 }
    }

    pub fn again_ms(&self) -> u64 {
        self.again_ms
    }

    /// Somebody is there: the long pause that a time without anybody has led to is over.
    pub fn at_once(&mut self, now_ms: u64) {
        *self = Self::at(now_ms);
    }
}

impl Reader {
    pub(super) fn tick_knock(&mut self, now_ms: u64) {
        let Some(knock) = self.knock.as_mut().filter(|knock| knock.again_ms <= now_ms) else { return };
        let pause = (self.settings.knock_min_ms << knock.times.min(20)).min(self.settings.knock_max_ms);
        knock.times += 1;
        knock.again_ms = now_ms + pause / 2 + self.random.below(pause / 2 + 1);
        self.check();
    }
}
