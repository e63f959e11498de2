//! Convergence at the size it is made for, with every byte counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use groupcast_messages::{Ack, Cut, HostState};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::{Topic, TopicHash};
use groupcast_topics::convergence::{BATCHES_MAX, Convergence, Settings};
use groupcast_topics::node::{Committed, Reach};

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code)]
// SAFETY: every call is the system allocator's; only sizes are counted beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(layout.size(), Ordering::Relaxed);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const HOSTS: usize = 10_000;

fn committed(batch: u64, topics: Vec<(TopicHash, u64)>, span: Vec<(HostId, Reach)>) -> Committed {
    let cut = Cut { term: 1, lead: lead(batch) };
    Committed { cut, since: 1, change: batch, after: batch - 1, catalog: batch, topics, span, ..Committed::default() }
}

fn lead(batch: u64) -> u64 {
    batch * 20_000
}

/// How many bytes `BATCHES_MAX` batches hold that no host has finished, and what becomes of them when all have.
fn measure(what: &str, bytes_max: usize, mut batch: impl FnMut(u64, &[HostId]) -> Committed, finish: impl Fn(&HostId) -> Ack) {
    let hosts: Vec<HostId> = (0..HOSTS).map(|i| HostId::new(&format!("host-{i}")).unwrap()).collect();
    let before = HELD.load(Ordering::Relaxed);
    let mut convergence = Convergence::new(Settings::default());
    for number in 1..=BATCHES_MAX as u64 + 1 {
        convergence.committed(&batch(number, &hosts), number);
    }
    let held = HELD.load(Ordering::Relaxed) - before;
    eprintln!("{what}: {held} bytes for {HOSTS} hosts and {BATCHES_MAX} batches in flight");
    assert_eq!((convergence.unfinished(), convergence.behind()), (BATCHES_MAX, HOSTS));
    assert!(held < bytes_max, "{what}: {held} bytes");
    for host in &hosts {
        convergence.acknowledged(host, &finish(host), 5_000);
    }
    assert_eq!((convergence.unfinished(), convergence.behind()), (0, 0));
    convergence.took();
    let after = HELD.load(Ordering::Relaxed) - before;
    assert!(after < bytes_max, "{what}: {after} bytes when all is done");
}

fn ack(reached: Vec<(TopicHash, u64)>) -> Ack {
    Ack { term: 1, state: HostState::Enforcing, reached }
}

/// One test: the allocator counts for the whole process.
#[test]
fn ten_thousand_hosts_and_a_thousand_changes_in_flight_fit() {
    const MIB: usize = 1024 * 1024;
    // Ten groups that every host follows, changed in turn.
    let one = |number: u64, hosts: &[HostId]| {
        let reach = vec![(TopicHash(number % 10), lead(number) + 1)];
        committed(number, reach.clone(), hosts.iter().map(|host| (host.clone(), reach.clone().into())).collect())
    };
    let last = lead(BATCHES_MAX as u64 + 1) + 1;
    measure("one topic each", 8 * MIB, one, |_| ack((0..10).map(|topic| (TopicHash(topic), last)).collect()));

    // Every host follows another part of thirty-two topics.
    let parts = |number: u64, hosts: &[HostId]| {
        let topics: Vec<(TopicHash, u64)> = (0..32).map(|i| (TopicHash(i), lead(number) + 1 + i)).collect();
        let part = |at: usize| topics.iter().enumerate().filter(move |(i, _)| (at + 1) >> (i % 14) & 1 == 1).map(|(_, t)| *t);
        let span = hosts.iter().enumerate().map(|(at, host)| (host.clone(), part(at).collect())).collect();
        committed(number, topics.clone(), span)
    };
    measure("parts of 32 topics", 96 * MIB, parts, |_| ack((0..32).map(|i| (TopicHash(i), last + i)).collect()));

    // A thousand changes published together, of ten hosts each: every host is concerned by one of them.
    let many = |number: u64, hosts: &[HostId]| {
        let topics: Vec<(TopicHash, u64)> = (0..1_000).map(|i| (TopicHash(i), lead(number) + 1 + i)).collect();
        let span = hosts.iter().enumerate().map(|(at, host)| (host.clone(), [topics[at / 10]].into())).collect();
        committed(number, topics.clone(), span)
    };
    measure("a thousand changes each", 112 * MIB, many, |_| ack((0..1_000).map(|i| (TopicHash(i), u64::MAX / 2)).collect()));

    // More topics than can be listed: a message to each host in every batch.
    let own = |host: &HostId| Topic::Host(host.clone()).hash64();
    let tallied = |number: u64, hosts: &[HostId]| {
        let mut topics: Vec<(TopicHash, u64)> = (0..40).map(|i| (TopicHash(i), lead(number) + 1 + i)).collect();
        let message = |at: usize, host: &HostId| (own(host), lead(number) + 41 + at as u64);
        let span = hosts.iter().enumerate().map(|(at, host)| (host.clone(), [message(at, host)].into())).collect();
        topics.extend(hosts.iter().enumerate().map(|(at, host)| message(at, host)));
        Committed { tallied: true, ..committed(number, topics, span) }
    };
    measure("a message to each host", 96 * MIB, tallied, |host| ack(vec![(own(host), u64::MAX / 2)]));
}
