//! The cases of CASES.md D in which words arrive late or nobody is left to hear them, with real agents and controllers: each is killed
//! while what it said is held between it and the bus.

use std::time::SystemTime;

use groupcast_tests::agent::{Agent, isolated, own};
use groupcast_tests::control::{Controller, Hold};
use groupcast_tests::enrolled::{
    GRACE, LEAD, LEASE, SHORT, Sentinel, allowed, audited, causes, deleted_at, entries, gone, host_entry, is_suspect, judging,
    plane, plane_with, refusals, registered, workload_entry,
};
use groupcast_tests::world::eventually;

#[test]
fn d13_an_agent_killed_and_then_the_controller_that_missed_it_the_next_one_deletes_it() {
    isolated(|| async {
        let mut plane = plane(2).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        let mut agent = Agent::new(&plane.url(), "h1", &own("m1", "10.0.0.5"));
        agent.start().await;
        registered(&observer, "m1", 1).await;
        agent.kill();
        eventually("it is suspect", || is_suspect(&observer, "h1")).await;
        let judge = judging(&mut plane).await;
        let killed_at = SystemTime::now();
        plane.controllers[judge].kill();
        plane.controllers.remove(judge);
        // By the clock of the bus: whoever takes over has heard nobody yet, and waits for lease and grace first.
        let waited = deleted_at(&observer, "h1").await.duration_since(killed_at).expect("after it was killed");
        assert!(waited >= LEASE + GRACE, "deleted {waited:?} after the controller was killed");
        gone(&observer, "h1").await;
        audited(&observer, "gc.reg.w.m1", "deleted").await;
    });
}

#[test]
fn d15_a_farewell_of_an_earlier_boot_that_arrives_after_the_next_has_enrolled_is_ignored() {
    isolated(|| async {
        // Silence is another case.
        let plane = plane_with(1, &["--registration-lease", "30m", "--registration-grace", "30m"]).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        let hold = Hold::to(&plane.url()).await;
        let mut old = Agent::new(&hold.url(), "h1", &own("m1", "10.0.0.5"));
        old.start().await;
        registered(&observer, "m1", 1).await;
        // It says farewell while its machine goes down, and that stays somewhere in the network.
        hold.hold("gc.register.");
        let told = old.ask(&["leave"]);
        hold.holds().await;
        assert!(!told.status.success(), "nobody has answered its farewell");
        old.kill();
        let mut new = Agent::new(&plane.url(), "h1", &own("m1", "10.0.0.5"));
        new.start().await;
        registered(&observer, "m1", 2).await;
        let before = entries(&observer).await;
        hold.release();
        eventually("the farewell has arrived, and is refused", || async {
            refusals(&observer, "h1").await.iter().any(|reason| reason.contains("overtaken by a later one"))
        })
        .await;
        // Whatever else the first boot had to say came with it, and was heard by its successor too.
        let heard = new.beats();
        eventually("the host beats on", || async { new.beats() >= heard + 5 }).await;
        let mut after = entries(&observer).await;
        assert!(after.remove("gc.reg.r.h1").is_some(), "a trace of the refusal");
        assert_eq!(after, before, "and nothing else is written");
        assert!(new.registered("m1").is_some_and(|one| one["incarnation"] == 2));
        let ends = causes(&observer, "gc.reg.w.m1").await;
        assert!(ends.iter().all(|cause| cause.contains("enrolled")), "{ends:?}");
    });
}

/// All of an entry or nothing.
async fn is_whole(observer: &async_nats::Client) -> bool {
    let all = entries(observer).await;
    let found = ["gc.reg.h.h1", "gc.reg.w.m1", "gc.reg.a.net.0a000005"].map(|subject| all.contains_key(subject));
    assert!(found == [true; 3] || found == [false; 3], "{all:?}");
    found[0]
}

#[test]
fn d16_an_agent_killed_before_its_registration_reaches_anybody_leaks_nothing() {
    isolated(|| async {
        let plane = plane(2).await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        let hold = Hold::to(&plane.url()).await;
        hold.hold("gc.register.");
        let mut agent = Agent::new(&hold.url(), "h1", &own("m1", "10.0.0.5"));
        agent.start().await;
        hold.holds().await;
        agent.kill();
        assert!(!is_whole(&observer).await, "nobody has heard of it");
        // Its host is gone when it is written; nobody beats for it, and it goes again.
        hold.release();
        audited(&observer, "gc.reg.h.h1", "enrolled by its host").await;
        gone(&observer, "h1").await;
        assert!(!is_whole(&observer).await);
        audited(&observer, "gc.reg.h.h1", "deleted").await;
    });
}

#[test]
fn d16_an_agent_killed_before_its_entry_is_committed_leaks_nothing() {
    isolated(|| async {
        let mut plane = plane(0).await;
        let hold = Hold::to(&plane.url()).await;
        plane.controllers.push(Controller::start(&hold.url(), "held", LEAD, &SHORT));
        plane.ready().await;
        plane.leader().await;
        allowed(&plane, "vm", &["h1"]).await;
        let observer = plane.bus.observer("observer").await;
        // The registrar has taken it, and its commit is on its way when the host is gone.
        hold.hold("gc.reg.");
        let mut agent = Agent::new(&plane.url(), "h1", &own("m1", "10.0.0.5"));
        agent.start().await;
        hold.holds().await;
        agent.kill();
        assert!(!is_whole(&observer).await, "nothing is committed");
        hold.release();
        audited(&observer, "gc.reg.h.h1", "enrolled by its host").await;
        gone(&observer, "h1").await;
        assert!(!is_whole(&observer).await);

        // And now the registrar is killed too: what it was about to commit never is, and nobody else writes it.
        hold.hold("gc.reg.");
        agent.start().await;
        hold.holds().await;
        agent.kill();
        plane.controllers[0].kill();
        plane.controllers.clear();
        hold.forget();
        plane.add_controller_with(&SHORT);
        plane.ready().await;
        judging(&mut plane).await;
        Sentinel::new(&plane, "sentinel").await.passes(&observer).await;
        assert!(host_entry(&observer, "h1").await.is_none() && workload_entry(&observer, "m1").await.is_none());
        let enrolled = causes(&observer, "gc.reg.h.h1").await.iter().filter(|cause| cause.contains("enrolled")).count();
        assert_eq!(enrolled, 1, "the first time only");
    });
}
