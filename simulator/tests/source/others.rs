//! What others have written beside a source, and what it minds.

use groupcast_control::source::machine::Answer;
use groupcast_policy::ids::GroupId;
use groupcast_policy::model::Group;

use crate::cloud_controller::with;
use crate::rig::Cloud;

#[tokio::test]
async fn what_the_gateway_owns_is_not_taken() {
    let mut cloud = Cloud::start(50).await;
    let guid = cloud.shared.lock().create("taken");
    cloud.shared.lock().create("free");
    let id: GroupId = format!("cf-{guid}").parse().expect("an id");
    let theirs = Group::new(id.clone());
    cloud.rig.streams.groups.insert(id.clone(), (5, std::sync::Arc::new(theirs.clone())));
    cloud.rig.lead().await;
    assert_eq!(*cloud.rig.streams.groups[&id].1, theirs);
    assert!(cloud.rig.names().contains("free"));
    assert!(cloud.rig.status().malformed_named[0].contains("belongs to somebody else"));
}

/// CASES.md B 5: a group that a deny names is not deleted. A source cannot be refused, so what it allowed ends and its name stays.
#[tokio::test]
async fn b5_a_group_that_a_gateways_deny_names_stays_for_its_members_and_allows_nothing() {
    let mut cloud = with(&["named", "free"], 50).await;
    let id: GroupId = cloud.rig.named("named").id.clone();
    let bindings = cloud.rig.named("named").bindings.clone();
    cloud.rig.streams.deny(std::slice::from_ref(&id));
    cloud.shared.lock().delete("named");
    cloud.shared.lock().delete("free");
    cloud.shared.lock().create("new");
    cloud.rig.interval().await;
    assert_eq!(cloud.rig.names().into_iter().collect::<Vec<_>>(), ["named", "new"], "everything else goes on");
    assert!(cloud.rig.named("named").rules.is_empty() && cloud.rig.named("named").bindings == bindings);
    let status = cloud.rig.status();
    assert_eq!((status.withheld, status.malformed, cloud.rig.error()), (1, 0, String::new()));
    let words = format!("group {id} is not deleted: deny rules[0] of group closed names it");
    assert!(status.withheld_named[0].contains(&words), "{:?}", status.withheld_named);
    // Nothing is written again and again.
    let changes = cloud.rig.streams.changes.len();
    assert!(matches!(cloud.rig.poll_now(true).await, Answer::Done { .. }));
    assert_eq!(cloud.rig.streams.changes.len(), changes);
    // The deny goes, and so does the group.
    cloud.rig.streams.deny(&[]);
    assert!(matches!(cloud.rig.poll_now(true).await, Answer::Done { .. }));
    cloud.expect_equal();
    assert_eq!(cloud.rig.status().withheld, 0);
}
