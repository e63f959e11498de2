//! What hosts have asked for and nobody has answered yet. Each host's requests are answered in the order they came, one at a time, so
//! that a removal does not overtake the registration before it; hosts take turns. A request that is repeated while it waits is the
//! same request with another place for the answer, so what waits is bounded by the number of hosts, not by their impatience.
//!
//! One that is repeated while it is being answered shares that answer, if it is to go to the same place: by that a host says that it is
//! the same request. Another place is another request, though the words are the same: with other controllers it may have done something
//! in between.

use std::collections::{HashMap, VecDeque};

use groupcast_policy::ids::HostId;

/// Requests that may wait. With more of them hosts are told to ask again later.
pub const WAITING_MAX: usize = 20_000;
/// Bytes of all of them.
pub const WAITING_BYTES_MAX: usize = 256 << 20;
/// Requests of one host that may wait: a host that starts adds its workloads one by one.
pub const OF_A_HOST_MAX: usize = 256;
/// Bytes of one host's: two of the largest messages that the bus carries.
pub const OF_A_HOST_BYTES_MAX: usize = 2 << 20;

/// What is asked for.
pub trait Payload: PartialEq + Clone {
    fn bytes(&self) -> usize;
}

impl Payload for bytes::Bytes {
    fn bytes(&self) -> usize {
        self.len()
    }
}

/// A request, and where its answer goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request<P> {
    pub payload: P,
    pub answer: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    Waits,
    /// The same was waiting already; the answer goes to where it was asked for last.
    Repeated,
    /// The same is being answered.
    Shared,
    /// Nobody will answer it: too many wait.
    Full,
    /// Nobody will answer it: too many of this host wait.
    OwnFull,
}

#[derive(Debug)]
struct Line<P> {
    waiting: VecDeque<Request<P>>,
    bytes: usize,
    /// The request of the host that is being answered.
    busy: Option<Request<P>>,
}

#[derive(Debug)]
pub struct Queue<P> {
    lines: HashMap<HostId, Line<P>>,
    /// Hosts whose turn it is, in order: they have something waiting and nothing being answered.
    ready: VecDeque<HostId>,
    waiting: usize,
    bytes: usize,
    waiting_max: usize,
    peak: usize,
}

impl<P: Payload> Default for Queue<P> {
    fn default() -> Self {
        Self::new(WAITING_MAX)
    }
}

impl<P: Payload> Queue<P> {
    pub fn new(waiting_max: usize) -> Self {
        Self { lines: HashMap::new(), ready: VecDeque::new(), waiting: 0, bytes: 0, waiting_max, peak: 0 }
    }

    pub fn push(&mut self, host: HostId, request: Request<P>) -> Pushed {
        let line = self.lines.entry(host.clone()).or_insert_with(|| Line { waiting: VecDeque::new(), bytes: 0, busy: None });
        // Only the last one: what came between may have changed what an earlier one means.
        if let Some(last) = line.waiting.back_mut().filter(|last| last.payload == request.payload) {
            last.answer = request.answer;
            return Pushed::Repeated;
        }
        if line.waiting.is_empty() && line.busy.as_ref() == Some(&request) {
            return Pushed::Shared;
        }
        let bytes = request.payload.bytes();
        let is_full = self.waiting >= self.waiting_max || self.bytes.saturating_add(bytes) > WAITING_BYTES_MAX;
        let is_own_full = line.waiting.len() >= OF_A_HOST_MAX || line.bytes.saturating_add(bytes) > OF_A_HOST_BYTES_MAX;
        if is_full || is_own_full {
            if line.waiting.is_empty() && line.busy.is_none() {
                self.lines.remove(&host);
            }
            return if is_own_full { Pushed::OwnFull } else { Pushed::Full };
        }
        if line.waiting.is_empty() && line.busy.is_none() {
            self.ready.push_back(host);
        }
        line.waiting.push_back(request);
        line.bytes += bytes;
        self.bytes += bytes;
        self.waiting += 1;
        self.peak = self.peak.max(self.waiting);
        Pushed::Waits
    }

    /// Whoever is next; it has to be [`Self::done`] before that host's next one is.
    pub fn take(&mut self) -> Option<(HostId, Request<P>)> {
        let host = self.ready.pop_front()?;
        let line = self.lines.get_mut(&host)?;
        let request = line.waiting.pop_front()?;
        line.busy = Some(request.clone());
        let bytes = request.payload.bytes();
        line.bytes -= bytes;
        self.bytes -= bytes;
        self.waiting -= 1;
        Some((host, request))
    }

    pub fn done(&mut self, host: &HostId) {
        let Some(line) = self.lines.get_mut(host) else { return };
        line.busy = None;
        match line.waiting.is_empty() {
            true => _ = self.lines.remove(host),
            false => self.ready.push_back(host.clone()),
        }
    }

    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// The most that ever waited.
    pub fn peak(&self) -> usize {
        self.peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> HostId {
        name.parse().unwrap()
    }

    impl Payload for u32 {
        fn bytes(&self) -> usize {
            if *self > HEAVY { (*self - HEAVY) as usize } else { 1 }
        }
    }

    /// A request of more than this weighs what is above it.
    const HEAVY: u32 = 1_000_000;

    fn asks(payload: u32, answer: &str) -> Request<u32> {
        Request { payload, answer: answer.to_owned() }
    }

    #[test]
    fn hosts_take_turns_and_each_is_answered_in_order() {
        let mut queue = Queue::default();
        for (name, payload) in [("a", 1), ("a", 2), ("b", 3), ("a", 4)] {
            assert_eq!(queue.push(host(name), asks(payload, "t")), Pushed::Waits);
        }
        assert_eq!(queue.take(), Some((host("a"), asks(1, "t"))));
        assert_eq!(queue.take(), Some((host("b"), asks(3, "t"))));
        assert_eq!(queue.take(), None, "a's second waits for the answer to its first");
        queue.done(&host("b"));
        queue.done(&host("a"));
        assert_eq!(queue.take(), Some((host("a"), asks(2, "t"))));
        assert_eq!(queue.take(), None);
        queue.done(&host("a"));
        assert_eq!(queue.take(), Some((host("a"), asks(4, "t"))));
        queue.done(&host("a"));
        assert!(queue.lines.is_empty() && queue.ready.is_empty(), "nothing is kept of who was answered");
        assert_eq!((queue.waiting(), queue.peak()), (0, 4));
    }

    #[test]
    fn a_repetition_takes_the_place_of_what_waits_and_never_of_something_before_another_request() {
        let mut queue = Queue::default();
        queue.push(host("a"), asks(1, "first"));
        assert_eq!(queue.push(host("a"), asks(1, "second")), Pushed::Repeated);
        assert_eq!(queue.waiting(), 1);
        // Enrol, leave, enrol: the second enrolment is another one.
        queue.push(host("a"), asks(2, "leave"));
        assert_eq!(queue.push(host("a"), asks(1, "third")), Pushed::Waits);
        let mut order = Vec::new();
        while let Some((_, request)) = queue.take() {
            order.push((request.payload, request.answer));
            queue.done(&host("a"));
        }
        assert_eq!(order, [(1, "second".to_owned()), (2, "leave".to_owned()), (1, "third".to_owned())]);
    }

    /// It was answered anew, although the answer it wanted was on its way.
    #[test]
    fn a_repetition_of_what_is_being_answered_shares_the_answer() {
        let mut queue = Queue::default();
        queue.push(host("a"), asks(1, "t"));
        assert_eq!(queue.take(), Some((host("a"), asks(1, "t"))));
        assert_eq!(queue.push(host("a"), asks(1, "t")), Pushed::Shared);
        assert_eq!(queue.push(host("b"), asks(1, "t")), Pushed::Waits, "of another host it is another");
        assert_eq!(queue.push(host("a"), asks(2, "t")), Pushed::Waits, "as are other words");
        assert_eq!(queue.push(host("a"), asks(1, "t")), Pushed::Waits, "and the same after others");
        queue.done(&host("a"));
        let mut queue = Queue::default();
        queue.push(host("a"), asks(1, "t"));
        queue.take();
        assert_eq!(queue.push(host("a"), asks(1, "u")), Pushed::Waits, "and what is to be answered elsewhere");
        queue.done(&host("a"));
        assert_eq!(queue.take(), Some((host("a"), asks(1, "u"))));
        queue.done(&host("a"));
        assert_eq!(queue.push(host("a"), asks(1, "u")), Pushed::Waits, "what was answered is asked anew");
    }

    #[test]
    fn beyond_its_bounds_nothing_waits() {
        let mut queue = Queue::new(3);
        for name in ["a", "b", "c"] {
            assert_eq!(queue.push(host(name), asks(1, "t")), Pushed::Waits);
        }
        assert_eq!(queue.push(host("d"), asks(1, "t")), Pushed::Full);
        assert_eq!(queue.lines.len(), 3, "nothing is kept of who was turned away");
        assert_eq!(queue.push(host("a"), asks(1, "again")), Pushed::Repeated, "a repetition takes no room");
        queue.take();
        assert_eq!(queue.push(host("d"), asks(1, "t")), Pushed::Waits);
        let mut queue = Queue::default();
        for payload in 0..OF_A_HOST_MAX as u32 {
            assert_eq!(queue.push(host("a"), asks(payload, "t")), Pushed::Waits);
        }
        assert_eq!(queue.push(host("a"), asks(999, "t")), Pushed::OwnFull);
        assert_eq!(queue.push(host("b"), asks(999, "t")), Pushed::Waits, "one host does not crowd out another");
    }

    #[test]
    fn beyond_so_many_bytes_nothing_waits() {
        let mut queue = Queue::default();
        let most = OF_A_HOST_BYTES_MAX as u32 + HEAVY;
        assert_eq!(queue.push(host("a"), asks(most + 1, "t")), Pushed::OwnFull);
        assert!(queue.lines.is_empty());
        assert_eq!(queue.push(host("a"), asks(most, "t")), Pushed::Waits);
        assert_eq!(queue.push(host("a"), asks(1, "t")), Pushed::OwnFull);
        queue.take();
        assert_eq!(queue.push(host("a"), asks(1, "t")), Pushed::Waits, "what is being answered does not wait");
        let mut queue = Queue::default();
        let hosts = WAITING_BYTES_MAX / OF_A_HOST_BYTES_MAX;
        for number in 0..hosts {
            assert_eq!(queue.push(host(&format!("h{number}")), asks(most, "t")), Pushed::Waits);
        }
        assert_eq!(queue.push(host("late"), asks(1, "t")), Pushed::Full);
    }
}
