//! Answering hosts from memory. A request is answered only when the replica has reached what was the stream's head after the
//! request arrived: an answer is never older than what the host has already seen.

use std::collections::VecDeque;

use groupcast_messages::{ASK_TOPICS_MAX, Ask, Cut, EntropyCheck, Lead};
use groupcast_policy::ids::HostId;
use groupcast_policy::needs::Topics;
use groupcast_policy::topic::Topic;

use super::{Effect, Node, Request};
use crate::replica::refuse;

/// Requests that may wait for the head.
pub const REQUESTS_MAX: usize = 65_536;

/// So many times as long as usual requests wait while a lost stream is filled again.
const FILLING_WAITS: u64 = 10;

/// Pause after a read of the head that told nothing.
const READ_RETRY_MS: u64 = 50;

/// Requests answered before the answers are sent: when a thousand hosts ask at once, the bus carries the first answers while the
/// next ones are written, and no memory is needed for all of them.
const REPLIES_AT_ONCE: usize = 8;

#[derive(Debug, Default)]
pub(super) struct Serve {
    // Who came first stands first in each of these: ten thousand may wait, and only the first of them is ever looked at.
    /// Came while a head read was under way: the next one counts for them.
    before_read: VecDeque<Waiting>,
    reading: VecDeque<Waiting>,
    /// After a read that told nothing, the next one waits until then.
    read_after_ms: u64,
    /// Know which head they wait for.
    before_cut: VecDeque<(u64, u64, Waiting)>,
    /// The replica holds contents that are not published yet: readers would be handed revisions that do not exist.
    pub hold_until_published: bool,
    /// The last request of each host that waits. A host that asks again has given up on the one before: under load, answering
    /// both would make the load worse.
    latest: crate::Map<(HostId, Kind), u64>,
    pub pending_resets: Vec<Topic>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Snapshot,
    Entropy,
}

/// Whose request it is, where a later one of the same kind stands for it.
fn asker(request: &Request) -> Option<(HostId, Kind)> {
    match request {
        Request::Snapshot { host, .. } => Some((host.clone(), Kind::Snapshot)),
        Request::Entropy { host, .. } => Some((host.clone(), Kind::Entropy)),
        Request::Replica { .. } => None,
    }
}

#[derive(Debug)]
struct Waiting {
    id: u64,
    request: Request,
    since_ms: u64,
}

impl Node {
    pub(super) fn request(&mut self, id: u64, request: Request, now_ms: u64) {
        let waiting = Waiting { id, request, since_ms: now_ms };
        if self.serve.before_read.len() + self.serve.reading.len() + self.serve.before_cut.len() >= REQUESTS_MAX {
            return self.reply_refusal(waiting, "too many requests are waiting: ask again");
        }
        if let Some(asker) = asker(&waiting.request) {
            self.serve.latest.insert(asker, id);
        }
        self.serve.before_read.push_back(waiting);
        self.start_read(now_ms);
    }

    fn start_read(&mut self, now_ms: u64) {
        let due = self.serve.read_after_ms <= now_ms;
        if due && !self.serve.before_read.is_empty() && self.connected && self.serve.reading.is_empty() && self.read_head(now_ms)
        {
            self.serve.reading = std::mem::take(&mut self.serve.before_read);
        }
    }

    pub(super) fn head_for_serve(&mut self, head: Option<&Option<(u64, Lead)>>, now_ms: u64) {
        let mut reading = std::mem::take(&mut self.serve.reading);
        match head {
            Some(Some((sequence, lead))) => {
                self.serve.before_cut.extend(reading.into_iter().map(|waiting| (lead.term, *sequence, waiting)));
                self.serve_advanced();
            }
            // Without a head nobody can say what is current. They wait for the next read until they are refused.
            _ => {
                reading.append(&mut self.serve.before_read);
                self.serve.before_read = reading;
                self.serve.read_after_ms = now_ms + READ_RETRY_MS;
            }
        }
        self.start_read(now_ms);
    }

    /// The replica moved: answer whoever waited for that.
    pub(super) fn serve_advanced(&mut self) {
        let cut = self.replica.cut();
        if self.serve.before_cut.is_empty() || !self.can_serve() {
            return;
        }
        for _ in 0..REPLIES_AT_ONCE {
            let ready = pop_if(&mut self.serve.before_cut, |waiting| !is_behind(cut, waiting));
            let Some((_, _, waiting)) = ready else { return };
            self.reply(waiting);
        }
    }

    /// How long a request may wait. While a lost stream is filled again no controller can answer, and a fleet that is refused asks again and
    /// again: then they wait here, one request of each host.
    fn serve_wait_ms(&self) -> u64 {
        let filling = self.serve.hold_until_published || self.follow.incomplete;
        if filling { self.settings.serve_wait_ms * FILLING_WAITS } else { self.settings.serve_wait_ms }
    }

    /// A stream that lacks topics must not make hosts forget them.
    fn can_serve(&self) -> bool {
        self.follow.is_synced() && !self.serve.hold_until_published && !self.follow.incomplete
    }

    fn reply(&mut self, waiting: Waiting) {
        if let Some(asker) = asker(&waiting.request) {
            if self.serve.latest.get(&asker) != Some(&waiting.id) {
                return self.out.push(Effect::Reply { id: waiting.id, payloads: Vec::new() });
            }
            self.serve.latest.remove(&asker);
        }
        let chunk_bytes_max = self.settings.chunk_bytes_max;
        let payloads = match &waiting.request {
            Request::Snapshot { host, payload } => match Ask::decode(payload) {
                Ok(ask) => {
                    self.term_seen = self.term_seen.max(ask.term);
                    self.replica.answer(self.needed_by(host), &ask, chunk_bytes_max)
                }
                Err(error) => {
                    vec![refuse(
                        0,
                        &format!(
                            "the request of host {host} does not decode ({error}): at most {ASK_TOPICS_MAX} topics, this version"
                        ),
                    )]
                }
            },
            Request::Replica { payload } => match Ask::decode(payload) {
                Ok(ask) => self.replica.dump(&ask, chunk_bytes_max),
                Err(error) => vec![refuse(0, &format!("the request does not decode ({error})"))],
            },
            Request::Entropy { host, payload } => match EntropyCheck::decode(payload) {
                Ok(check) => {
                    self.term_seen = self.term_seen.max(check.term);
                    vec![self.replica.compare(|| self.needed_by(host), &check).encode()]
                }
                Err(_) => Vec::new(),
            },
        };
        self.out.push(Effect::Reply { id: waiting.id, payloads });
    }

    /// Known by host already, unless nobody wanted to know since the replica was replaced.
    fn needed_by(&self, host: &HostId) -> Topics {
        let known = self.followers.as_ref().and_then(|followers| followers.needed_by(host));
        known.unwrap_or_else(|| self.replica.needed_by(host))
    }

    fn reply_refusal(&mut self, waiting: Waiting, reason: &str) {
        let payloads = match &waiting.request {
            Request::Snapshot { payload, .. } | Request::Replica { payload } => {
                vec![refuse(Ask::decode(payload).map_or(0, |ask| ask.ask), reason)]
            }
            // A check that is not answered is made again in time.
            Request::Entropy { .. } => Vec::new(),
        };
        self.out.push(Effect::Reply { id: waiting.id, payloads });
    }

    pub(super) fn tick_serve(&mut self, now_ms: u64) {
        self.serve_advanced();
        let limit = self.serve_wait_ms();
        let late = |waiting: &Waiting| waiting.since_ms + limit <= now_ms;
        // Those that only wait for their turn are answered, however late.
        let (cut, open) = (self.replica.cut(), self.can_serve());
        loop {
            let unread = pop_if(&mut self.serve.before_read, late);
            let behind = pop_if(&mut self.serve.before_cut, |waiting| late(&waiting.2) && (!open || is_behind(cut, waiting)));
            if unread.is_none() && behind.is_none() {
                break;
            }
            for waiting in unread.into_iter().chain(behind.map(|(_, _, waiting)| waiting)) {
                self.reply_refusal(waiting, "this controller is behind the stream: ask again");
            }
        }
        self.start_read(now_ms);
    }

    pub(super) fn serve_deadline(&self) -> Option<u64> {
        let first = self.serve.before_cut.front();
        let waiting = self.serve.before_read.front().into_iter().chain(first.map(|(_, _, waiting)| waiting));
        let refuse = waiting.map(|waiting| waiting.since_ms).min().map(|since| since + self.serve_wait_ms());
        let unread = !self.serve.before_read.is_empty() && self.head_read_ms.is_none() && self.connected;
        let read = unread.then_some(self.serve.read_after_ms);
        let ready = first.filter(|waiting| self.can_serve() && !is_behind(self.replica.cut(), waiting)).map(|_| 0);
        [refuse, read, ready].into_iter().flatten().min()
    }
}

/// Whether the replica has not reached the head that this one waits for.
fn is_behind(cut: Cut, (term, lead, _): &(u64, u64, Waiting)) -> bool {
    (cut.term, cut.lead) < (*term, *lead)
}

fn pop_if<T>(queue: &mut VecDeque<T>, wanted: impl FnOnce(&T) -> bool) -> Option<T> {
    if queue.front().is_some_and(wanted) { queue.pop_front() } else { None }
}
