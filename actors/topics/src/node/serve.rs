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
/// Bytes of a request, of which one of each kind is kept of a host: more than the largest that a host makes.
pub const REQUEST_BYTES_MAX: usize = 512 << 10;

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
    /// The last request of each host that waits, with its bytes. A host that asks again has given up on the one before: under load, answering
    /// both would make the load worse, and keeping both would let one host fill the memory.
    latest: crate::Map<(HostId, Kind), Latest>,
    next_ticket: u64,
    pub pending_resets: Vec<Topic>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    Snapshot,
    Entropy,
}

/// The request of a host that counts.
#[derive(Debug)]
struct Latest {
    id: u64,
    payload: Vec<u8>,
    /// Its place in the queues.
    ticket: u64,
    /// No read of the head that would count for it has begun.
    unread: bool,
}

/// Who asks, and what is kept here of it.
#[derive(Debug)]
enum Asker {
    /// The rest is with its latest request, if that still has this ticket.
    Host { host: HostId, kind: Kind, ticket: u64 },
    /// Another controller, with what it sent.
    Peer { id: u64, payload: Vec<u8> },
}

#[derive(Debug)]
struct Waiting {
    asker: Asker,
    since_ms: u64,
}

impl Node {
    pub(super) fn request(&mut self, id: u64, request: Request, now_ms: u64) {
        if self.serve.before_read.len() + self.serve.reading.len() + self.serve.before_cut.len() >= REQUESTS_MAX {
            return self.refuse_request(id, &request, "too many requests are waiting: ask again");
        }
        if let Request::Snapshot { host, payload } | Request::Entropy { host, payload } = &request
            && payload.len() > REQUEST_BYTES_MAX
        {
            let reason = format!("the request of host {host} has {} bytes, at most {REQUEST_BYTES_MAX}", payload.len());
            return self.refuse_request(id, &request, &reason);
        }
        let asker = match request {
            Request::Replica { payload } => Some(Asker::Peer { id, payload }),
            Request::Snapshot { host, payload } => self.latest_of(host, Kind::Snapshot, id, payload),
            Request::Entropy { host, payload } => self.latest_of(host, Kind::Entropy, id, payload),
        };
        if let Some(asker) = asker {
            self.serve.before_read.push_back(Waiting { asker, since_ms: now_ms });
        }
        self.start_read(now_ms);
    }

    /// The request before it is forgotten at once; its place is taken, unless a read has begun that does not count for the new one.
    fn latest_of(&mut self, host: HostId, kind: Kind, id: u64, payload: Vec<u8>) -> Option<Asker> {
        self.serve.next_ticket += 1;
        let ticket = self.serve.next_ticket;
        let key = (host.clone(), kind);
        let Some(latest) = self.serve.latest.get_mut(&key) else {
            self.serve.latest.insert(key, Latest { id, payload, ticket, unread: true });
            return Some(Asker::Host { host, kind, ticket });
        };
        self.out.push(Effect::Reply { id: latest.id, payloads: Vec::new() });
        (latest.id, latest.payload) = (id, payload);
        if std::mem::replace(&mut latest.unread, true) {
            return None;
        }
        latest.ticket = ticket;
        Some(Asker::Host { host, kind, ticket })
    }

    /// The request itself, with its number; none if a later one stands for it.
    fn request_of(&mut self, waiting: Waiting) -> Option<(u64, Request)> {
        let (key, ticket) = match waiting.asker {
            Asker::Peer { id, payload } => return Some((id, Request::Replica { payload })),
            Asker::Host { host, kind, ticket } => ((host, kind), ticket),
        };
        if self.serve.latest.get(&key).is_none_or(|latest| latest.ticket != ticket) {
            return None;
        }
        let Latest { id, payload, .. } = self.serve.latest.remove(&key)?;
        let request = match key {
            (host, Kind::Snapshot) => Request::Snapshot { host, payload },
            (host, Kind::Entropy) => Request::Entropy { host, payload },
        };
        Some((id, request))
    }

    fn start_read(&mut self, now_ms: u64) {
        let due = self.serve.read_after_ms <= now_ms;
        if due && !self.serve.before_read.is_empty() && self.connected && self.serve.reading.is_empty() && self.read_head(now_ms)
        {
            self.serve.reading = std::mem::take(&mut self.serve.before_read);
            self.mark_unread(false);
        }
    }

    /// Whether the read that is under way counts for those it was begun for.
    fn mark_unread(&mut self, unread: bool) {
        for waiting in &self.serve.reading {
            if let Asker::Host { host, kind, ticket } = &waiting.asker
                && let Some(latest) = self.serve.latest.get_mut(&(host.clone(), *kind))
                && latest.ticket == *ticket
            {
                latest.unread = unread;
            }
        }
    }

    pub(super) fn head_for_serve(&mut self, head: Option<&Option<(u64, Lead)>>, now_ms: u64) {
        let mut reading = std::mem::take(&mut self.serve.reading);
        match head {
            Some(Some((sequence, lead))) => {
                // What another request stands for takes no place.
                let latest = &self.serve.latest;
                reading.retain(|waiting| is_latest(latest, waiting));
                self.serve.before_cut.extend(reading.into_iter().map(|waiting| (lead.term, *sequence, waiting)));
                self.serve_advanced();
            }
            // Without a head nobody can say what is current. They wait for the next read until they are refused.
            _ => {
                self.serve.reading = reading;
                self.mark_unread(true);
                reading = std::mem::take(&mut self.serve.reading);
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
        let Some((id, request)) = self.request_of(waiting) else { return };
        let chunk_bytes_max = self.settings.chunk_bytes_max;
        let payloads = match &request {
            Request::Snapshot { host, payload } => match Ask::decode(payload) {
                Ok(ask) => self.replica.answer(host, self.needed_by(host), &ask, chunk_bytes_max),
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
                Ok(check) => vec![self.replica.compare(|| self.needed_by(host), &check).encode()],
                Err(_) => Vec::new(),
            },
        };
        self.out.push(Effect::Reply { id, payloads });
    }

    /// Known by host already, unless nobody wanted to know since the replica was replaced.
    fn needed_by(&self, host: &HostId) -> Topics {
        let known = self.followers.as_ref().and_then(|followers| followers.needed_by(host));
        known.unwrap_or_else(|| self.replica.needed_by(host))
    }

    fn reply_refusal(&mut self, waiting: Waiting, reason: &str) {
        if let Some((id, request)) = self.request_of(waiting) {
            self.refuse_request(id, &request, reason);
        }
    }

    fn refuse_request(&mut self, id: u64, request: &Request, reason: &str) {
        let payloads = match request {
            Request::Snapshot { payload, .. } | Request::Replica { payload } => {
                vec![refuse(Ask::decode(payload).map_or(0, |ask| ask.ask), reason)]
            }
            // A check that is not answered is made again in time.
            Request::Entropy { .. } => Vec::new(),
        };
        self.out.push(Effect::Reply { id, payloads });
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

    /// Requests that wait, and the bytes that are kept of those of hosts.
    #[cfg(test)]
    pub(super) fn serve_waiting(&self) -> (usize, usize) {
        let waiting = self.serve.before_read.len() + self.serve.reading.len() + self.serve.before_cut.len();
        (waiting, self.serve.latest.values().map(|latest| latest.payload.len()).sum())
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

fn is_latest(latest: &crate::Map<(HostId, Kind), Latest>, waiting: &Waiting) -> bool {
    match &waiting.asker {
        Asker::Peer { .. } => true,
        Asker::Host { host, kind, ticket } => latest.get(&(host.clone(), *kind)).is_some_and(|latest| latest.ticket == *ticket),
    }
}

fn pop_if<T>(queue: &mut VecDeque<T>, wanted: impl FnOnce(&T) -> bool) -> Option<T> {
    if queue.front().is_some_and(wanted) { queue.pop_front() } else { None }
}
