//! Topics that cannot be told apart by their hash. On the wire a topic is eight bytes, and whoever chooses names finds two with one hash in
//! minutes: nothing wrong is enforced then, but who has enforced what is not known for sure. So a change that brings such a name is refused.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::GroupId;
use crate::model::{Event, Group, World};
use crate::topic::{Topic, TopicHash};
use crate::written::{Fault, Problem};

/// The topics that exist because of a group.
fn topics(group: &Group) -> impl Iterator<Item = Topic> {
    let scopes = group.bindings.iter().filter_map(|binding| binding.target.scope()).map(Topic::Scope);
    [Topic::Rules(group.id.clone()), Topic::Members(group.id.clone())].into_iter().chain(scopes)
}

/// What speaks against the names that come with a change. Looks at every group, but only where names do come.
pub fn colliding(before: &World, events: &[Event]) -> Vec<Problem> {
    let mut fresh: BTreeMap<TopicHash, (Topic, &GroupId)> = BTreeMap::new();
    let mut problems = Vec::new();
    let mut refuse = |group: &GroupId, topic: &Topic, other: &Topic| {
        let message = format!("topic {topic} cannot be told from {other} on the bus: choose another id");
        problems.push(Problem {
            fault: Fault::Conflict,
            document: format!("group \"{group}\""),
            rule: None,
            field: "id".to_owned(),
            message,
        });
    };
    for event in events {
        let Event::Group { group, .. } = event else { continue };
        let known: BTreeSet<Topic> = before.catalogue.groups.get(&group.id).into_iter().flat_map(|g| topics(&g.value)).collect();
        for topic in topics(group).filter(|topic| !known.contains(topic)) {
            match fresh.get(&topic.hash64()) {
                Some((other, _)) if *other == topic => {}
                Some((other, _)) => refuse(&group.id, &topic, other),
                None => _ = fresh.insert(topic.hash64(), (topic, &group.id)),
            }
        }
    }
    if fresh.is_empty() {
        return problems;
    }
    for other in before.catalogue.groups.values().flat_map(|stored| topics(&stored.value)) {
        if let Some((topic, group)) = fresh.get(&other.hash64()).filter(|(topic, _)| *topic != other) {
            refuse(group, topic, &other);
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Found by a search of seven minutes on two busy processors.
    const ONE: &str = "gangljkhkomccbep";
    const OTHER: &str = "inbmehfmldhepkhj";

    fn put(id: &str) -> Event {
        Event::group(Group::new(id.parse().unwrap()))
    }

    #[test]
    fn a_name_that_cannot_be_told_from_another_is_refused() {
        let mut world = World::default();
        assert_eq!(colliding(&world, &[put(ONE), put("web")]), []);
        let together = colliding(&world, &[put(ONE), put(OTHER)]);
        assert_eq!(together.len(), 1, "{together:?}");
        world.apply(&put(ONE));
        assert_eq!(colliding(&world, &[put(ONE), put("web")]), [], "one that is there is no news");
        let refused = colliding(&world, &[put("web"), put(OTHER)]);
        assert_eq!(refused.len(), 1, "{refused:?}");
        let text = refused[0].to_string();
        assert!(text.contains(OTHER) && text.contains(ONE) && text.contains("choose another id"), "{text}");
    }
}
