//! Whether the controllers could publish a change as one batch, known before it is written. A bound that costs nothing says so of almost
//! every change; the few that it cannot judge are compiled on trial.

use std::collections::BTreeSet;
use std::sync::Arc;

use groupcast_bus_config::streams;
use groupcast_control::estimate::{Estimate, Trial};
use groupcast_policy::ids::GroupId;
use groupcast_policy::model::{Event, Group, World};

use crate::follow::Followed;

const BATCH_MESSAGES_MAX: usize = streams::BATCH_MESSAGES_MAX as usize;

pub struct Bounds(pub Arc<Followed>);

impl Estimate for Bounds {
    fn messages(&self, events: &[Event]) -> usize {
        let world = {
            let local = self.0.local();
            let most = messages_max(local.world(), events);
            if most <= BATCH_MESSAGES_MAX {
                return most;
            }
            local.world_now()
        };
        // Rare, and as much work as a controller's start: not on a thread that others wait for.
        tokio::task::block_in_place(|| compiled(&world, events))
    }
}

fn compiled(world: &World, events: &[Event]) -> usize {
    let trial = Trial::default();
    trial.follow(&world.events());
    trial.messages(events)
}

/// No batch for these events has more messages: its lead message; one to each host, be it that the host's own topic changes or that it is
/// told about many others; rules and members of each group that is written; the scopes that each was bound to and is now. What a
/// template changes are labels, and so members.
fn messages_max(world: &World, events: &[Event]) -> usize {
    let hosts: BTreeSet<_> = world.registry.workloads.values().map(|workload| &workload.host).collect();
    let bindings = |group: Option<&Group>| group.map_or(0, |group| group.bindings.len());
    let before = |id: &GroupId| world.catalogue.groups.get(id).map(|stored| &*stored.value);
    let of_event = |event: &Event| match event {
        Event::Group { group, .. } => 2 + bindings(Some(group)) + bindings(before(&group.id)),
        Event::GroupRemoved(id) => 2 + bindings(before(id)),
        Event::Template { .. } | Event::TemplateRemoved(_) => world.catalogue.groups.len(),
        // Not written here.
        Event::Workload(_) | Event::WorkloadRemoved { .. } => BATCH_MESSAGES_MAX,
    };
    events.iter().map(of_event).fold(1 + hosts.len(), usize::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use groupcast_policy::model::{Binding, GroupRule, Requirement, Selector, Target, Template, Workload};
    use groupcast_policy::text::parse_rule;
    use groupcast_policy::topic::Scope;
    use proptest::prelude::*;

    fn target(number: u8) -> Target {
        match number {
            0 => Target::Global,
            1 | 2 => Target::Space(format!("s{number}").parse().unwrap()),
            3 | 4 => Target::App(format!("a{number}").parse().unwrap()),
            5 => Target::Selector(Selector::new(Scope::Global, [Requirement::Exists(Arc::from("tier"))])),
            _ => Target::Workload(format!("w{number}").parse().unwrap()),
        }
    }

    fn group(id: u8, remote: u8, targets: &[u8], stateful: bool) -> Event {
        let mut group = Group::new(format!("g{id}").parse().unwrap());
        group.stateful = stateful;
        group.rules.push(GroupRule::from(parse_rule(&format!("ingress tcp 443 from group:g{remote}")).unwrap()));
        let bound: BTreeSet<u8> = targets.iter().copied().collect();
        let phases = groupcast_policy::doc::Phases::BOTH;
        group.bindings = bound.into_iter().map(|number| Binding { target: target(number), phases }).collect();
        Event::group(group)
    }

    fn workload(id: u8, group: u8, host: u8) -> Event {
        let ids = (format!("w{id}").parse().unwrap(), format!("h{host}").parse().unwrap());
        let mut workload = Workload::new(ids.0, ids.1, "n".parse().unwrap());
        workload.groups.insert(format!("g{group}").parse().unwrap());
        workload.template = Some("t".parse().unwrap());
        workload.space = Some(format!("s{}", 1 + id % 2).parse().unwrap());
        workload.app = Some(format!("a{}", 3 + id % 2).parse().unwrap());
        Event::workload(workload)
    }

    fn template(labelled: bool) -> Event {
        let mut template = Template::new("t".parse().unwrap(), "n".parse().unwrap());
        if labelled {
            template.labels = [(Arc::from("tier"), Arc::from("web"))].into_iter().collect();
        }
        Event::Template { revision: 1, template: Arc::new(template) }
    }

    fn written() -> impl Strategy<Value = Event> {
        prop_oneof![
            6 => (0..40u8, 0..40u8, prop::collection::vec(0..9u8, 0..4), any::<bool>())
                .prop_map(|(id, remote, targets, stateful)| group(id, remote, &targets, stateful)),
            2 => (0..40u8).prop_map(|id| Event::GroupRemoved(format!("g{id}").parse().unwrap())),
            1 => any::<bool>().prop_map(template),
            1 => Just(Event::TemplateRemoved("t".parse().unwrap())),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]
        #[test]
        fn the_bound_is_never_below_what_is_published(
            placed in prop::collection::vec((0..12u8, 0..40u8, 0..5u8), 0..20),
            before in prop::collection::vec(written(), 0..60),
            change in prop::collection::vec(written(), 1..50),
        ) {
            let mut world = World::default();
            placed.iter().for_each(|(id, group, host)| world.apply(&workload(*id, *group, *host)));
            before.iter().for_each(|event| world.apply(event));
            let (most, exact) = (messages_max(&world, &change), compiled(&world, &change));
            prop_assert!(exact <= most, "{exact} messages, and the bound says {most}");
        }
    }
}
