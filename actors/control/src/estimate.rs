//! How many messages the batch would have that publishes a change, known before the change is written: one that no batch can hold is
//! refused where it is made, because once it is written it can only be published in parts.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use groupcast_policy::compiler::Compiler;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Event, World};
use groupcast_policy::topic::Topic;
use groupcast_topics::LISTED_TOPICS_MAX;

/// Whoever knows the desired state can say it.
pub trait Estimate: Send + Sync {
    /// Messages of the batch, its lead message included.
    fn messages(&self, events: &[Event]) -> usize;
}

/// Compiles a change on trial: takes it, looks, and takes it back. Costs twice what the change itself costs.
#[derive(Default)]
pub struct Trial(Mutex<State>);

#[derive(Default)]
struct State {
    compiler: Compiler,
    world: World,
}

impl Trial {
    /// Follows what was written.
    pub fn follow(&self, events: &[Event]) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.compiler.apply(events);
        events.iter().for_each(|event| state.world.apply(event));
    }
}

impl Estimate for Trial {
    fn messages(&self, events: &[Event]) -> usize {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let back: Vec<Event> = events.iter().rev().filter_map(|event| taken_back(&state.world, event)).collect();
        let edits = state.compiler.apply(events).edits;
        state.compiler.apply(&back);
        let mut messages = edits.len() + 1;
        if edits.len() > LISTED_TOPICS_MAX {
            // Every host that follows any of them gets a message of its own, unless its topic is among them.
            let own = |topic: &Topic| if let Topic::Host(host) = topic { Some(host.clone()) } else { None };
            let own: BTreeSet<HostId> = edits.iter().filter_map(|(topic, _)| own(topic)).collect();
            let hosts: BTreeSet<HostId> = edits.iter().flat_map(|(topic, _)| state.compiler.span(topic)).collect();
            messages += hosts.difference(&own).count();
        }
        messages
    }
}

/// The event that undoes one, given what was there before.
fn taken_back(world: &World, event: &Event) -> Option<Event> {
    let group = |id| match world.catalogue.groups.get(id) {
        Some(stored) => Event::Group { revision: stored.revision, group: stored.value.clone() },
        None => Event::GroupRemoved(id.clone()),
    };
    let template = |id| match world.catalogue.templates.get(id) {
        Some(stored) => Event::Template { revision: stored.revision, template: stored.value.clone() },
        None => Event::TemplateRemoved(id.clone()),
    };
    Some(match event {
        Event::Group { group: new, .. } => group(&new.id),
        Event::GroupRemoved(id) => group(id),
        Event::Template { template: new, .. } => template(&new.id),
        Event::TemplateRemoved(id) => template(id),
        Event::Workload(new) => match world.registry.workloads.get(&new.id) {
            Some(before) => Event::Workload(before.clone()),
            None => Event::WorkloadRemoved { id: new.id.clone(), network: new.network.clone() },
        },
        Event::WorkloadRemoved { id, .. } => Event::Workload(world.registry.workloads.get(id)?.clone()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use groupcast_messages::Lead;
    use groupcast_policy::doc::Document;
    use groupcast_policy::model::{Group, GroupRule, Workload};
    use groupcast_policy::needs::Followers;
    use groupcast_policy::net::Prefix;
    use groupcast_policy::scratch;
    use groupcast_policy::text::parse_rule;
    use groupcast_topics::Map;
    use groupcast_topics::batch::{Proposal, build};
    use groupcast_topics::replica::Replica;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn group(id: u8, remote: u8, member: u8) -> Event {
        let mut group = Group::new(format!("g{id}").parse().unwrap());
        group.rules.push(GroupRule::from(parse_rule(&format!("ingress tcp 443 from group:g{remote}")).unwrap()));
        group.members.insert(Prefix::v4(0x0a00_0000 + u32::from(member), 32).unwrap());
        Event::group(group)
    }

    fn workload(id: u8, group: u8) -> Event {
        let mut workload =
            Workload::new(format!("w{id}").parse().unwrap(), format!("h{id}").parse().unwrap(), "n".parse().unwrap());
        workload.groups.insert(format!("g{group}").parse().unwrap());
        Event::workload(workload)
    }

    fn any_event() -> impl Strategy<Value = Event> {
        prop_oneof![
            6 => (0..40u8, 0..40u8, 0..9u8).prop_map(|(id, remote, member)| group(id, remote, member)),
            2 => (0..40u8).prop_map(|id| Event::GroupRemoved(format!("g{id}").parse().unwrap())),
            3 => (0..6u8, 0..40u8).prop_map(|(id, group)| workload(id, group)),
            1 => (0..6u8).prop_map(|id| Event::WorkloadRemoved { id: format!("w{id}").parse().unwrap(), network: "n".parse().unwrap() }),
        ]
    }

    /// The batch that a leader would really build.
    fn built(before: &BTreeMap<Topic, Document>, after: &BTreeMap<Topic, Document>) -> usize {
        let documents: Map<Topic, Document> = before.clone().into_iter().collect();
        let hosts = before.keys().filter_map(|topic| if let Topic::Host(host) = topic { Some(host.clone()) } else { None });
        let followers = Followers::of_hosts(hosts, &documents);
        let replica = Replica::restore(Default::default(), 0, before.clone().into_iter().map(|(t, d)| (t, 1, d)));
        let absent = Document::absent();
        let topics: BTreeSet<&Topic> = before.keys().chain(after.keys()).collect();
        let edit = |topic: &&Topic| {
            let (old, new) = (before.get(*topic).unwrap_or(&absent), after.get(*topic).unwrap_or(&absent));
            Some(((*topic).clone(), old.edit_to(new)?))
        };
        let edits = topics.iter().filter_map(edit).collect();
        build(Proposal { edits, ..Proposal::default() }, Lead::default(), 0, &replica, &followers).unwrap().messages.len() + 1
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn it_is_what_a_leader_would_publish(
            before in prop::collection::vec(any_event(), 0..80),
            changes in prop::collection::vec(prop::collection::vec(any_event(), 1..60), 1..4),
        ) {
            let (trial, mut world) = (Trial::default(), World::default());
            trial.follow(&before);
            before.iter().for_each(|event| world.apply(event));
            for events in changes {
                let mut after = world.clone();
                events.iter().for_each(|event| after.apply(event));
                let expected = built(&scratch::documents(&world), &scratch::documents(&after));
                prop_assert_eq!(trial.messages(&events), expected);
                prop_assert_eq!(trial.messages(&events), expected, "asking changes nothing");
                trial.follow(&events);
                world = after;
            }
        }
    }
}
