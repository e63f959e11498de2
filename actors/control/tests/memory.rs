//! Convergence at the size it is made for, with every byte counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use groupcast_control::progress::{BATCHES_MAX, Convergence};
use groupcast_messages::{Ack, Cut, HostState};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::TopicHash;
use groupcast_topics::node::Committed;

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
/// Eight bytes for each host and batch in the host's list, grown by doubling, and four in the batch's.
const BYTES_MAX: usize = 256 * 1024 * 1024;

#[test]
fn ten_thousand_hosts_and_a_thousand_changes_in_flight_fit() {
    let hosts: Vec<HostId> = (0..HOSTS).map(|i| HostId::new(&format!("host-{i}")).unwrap()).collect();
    let before = HELD.load(Ordering::Relaxed);
    let mut convergence = Convergence::default();
    convergence.begin(1);
    let revision = |batch: u64| 1_000 + batch * 2;
    for batch in 0..=BATCHES_MAX as u64 {
        // Ten groups that every host follows, changed in turn.
        let reach = vec![(TopicHash(batch % 10), revision(batch))];
        let span = hosts.iter().map(|host| (host.clone(), reach.clone())).collect();
        let cut = Cut { term: 1, lead: revision(batch) - 1 };
        convergence.committed(&Committed { proposal: None, cut, change: batch, topics: Vec::new(), span }, &[batch], batch);
    }
    let held = HELD.load(Ordering::Relaxed) - before;
    assert_eq!((convergence.unfinished(), convergence.behind()), (BATCHES_MAX, HOSTS));
    assert!(held < BYTES_MAX, "{held} bytes for {HOSTS} hosts and {BATCHES_MAX} batches");
    let reached = (0..10).map(|topic| (TopicHash(topic), revision(BATCHES_MAX as u64))).collect();
    let ack = Ack { term: 1, state: HostState::Enforcing, reached };
    for host in &hosts {
        assert_eq!(convergence.acknowledged(host, &ack, 5_000).len(), BATCHES_MAX);
    }
    assert_eq!((convergence.unfinished(), convergence.behind()), (0, 0));
}
