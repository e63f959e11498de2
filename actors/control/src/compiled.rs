//! Everything compiled: the compiler and the documents it has produced so far, so that a controller that comes to lead can compare
//! them with what is published, and one that lost everything can publish it anew.

use groupcast_policy::compiler::Compiler;
use groupcast_policy::doc::{Digest, Document, Edit};
use groupcast_policy::model::Event;
use groupcast_policy::topic::Topic;
use groupcast_topics::Map;

#[derive(Default)]
pub struct Compiled {
    compiler: Compiler,
    documents: Map<Topic, Document>,
    hosts: usize,
}

impl Compiled {
    /// Takes one change and says which topics it edits.
    pub fn apply(&mut self, events: &[Event]) -> Vec<(Topic, Edit)> {
        if events.is_empty() {
            return Vec::new();
        }
        let change = self.compiler.apply(events);
        for (topic, edit) in &change.edits {
            let document = self.documents.entry(topic.clone()).or_default();
            let was_there = document.content().is_some();
            if document.apply(edit).is_err() {
                // The compiler's edits lead from its last document to its next one; should one not, the document itself is right.
                *document = self.compiler.document(topic);
            }
            let is_there = document.content().is_some();
            if matches!(topic, Topic::Host(_)) {
                self.hosts = self.hosts + usize::from(is_there) - usize::from(was_there);
            }
            if !is_there {
                self.documents.remove(topic);
            }
        }
        change.edits
    }

    pub fn documents(&self) -> &Map<Topic, Document> {
        &self.documents
    }

    /// Hosts that have a workload.
    pub fn hosts(&self) -> usize {
        self.hosts
    }

    /// The topics of which something else is published than what was compiled.
    pub fn differing(&self, published: &Map<Topic, Digest>) -> Vec<Topic> {
        let ours = self.documents.iter().filter(|(topic, document)| published.get(*topic) != Some(&document.digest()));
        let gone = published.iter().filter(|(topic, digest)| **digest != Digest::ABSENT && !self.documents.contains_key(*topic));
        let mut topics: Vec<Topic> = ours.map(|(topic, _)| topic.clone()).chain(gone.map(|(topic, _)| topic.clone())).collect();
        topics.sort_unstable();
        topics
    }

    /// The edits that lead from what is published of these topics to what was compiled.
    pub fn edits_from(&self, published: &Map<Topic, Document>, topics: &[Topic]) -> Vec<(Topic, Edit)> {
        let absent = Document::absent();
        let edit = |topic: &Topic| {
            let (before, after) = (published.get(topic).unwrap_or(&absent), self.documents.get(topic).unwrap_or(&absent));
            Some((topic.clone(), before.edit_to(after)?))
        };
        topics.iter().filter_map(edit).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use groupcast_policy::model::{Binding, Group, GroupRule, Target, Workload, World};
    use groupcast_policy::net::Prefix;
    use groupcast_policy::text::parse_rule;
    use proptest::prelude::*;

    fn group(id: u8, remote: u8, global: bool, member: u8) -> Event {
        let mut group = Group::new(format!("g{id}").parse().unwrap());
        group.rules.push(GroupRule::from(parse_rule(&format!("ingress tcp 443 from group:g{remote}")).unwrap()));
        let target = if global { Target::Global } else { Target::Workload("w1".parse().unwrap()) };
        group.bindings.push(Binding { target, phases: groupcast_policy::doc::Phases::BOTH });
        group.members.insert(Prefix::v4(0x0a000000 + u32::from(member), 32).unwrap());
        Event::group(group)
    }

    fn workload(id: u8, host: u8, address: u8) -> Event {
        let mut workload =
            Workload::new(format!("w{id}").parse().unwrap(), format!("h{host}").parse().unwrap(), "n".parse().unwrap());
        workload.addresses.insert(Prefix::v4(0x0b000000 + u32::from(address), 32).unwrap());
        Event::workload(workload)
    }

    fn any_event() -> impl Strategy<Value = Event> {
        prop_oneof![
            4 => (0..4u8, 0..4u8, any::<bool>(), 0..3u8).prop_map(|(id, remote, global, member)| group(id, remote, global, member)),
            1 => (0..4u8).prop_map(|id| Event::GroupRemoved(format!("g{id}").parse().unwrap())),
            4 => (0..4u8, 0..3u8, 0..3u8).prop_map(|(id, host, address)| workload(id, host, address)),
            1 => (0..4u8).prop_map(|id| Event::WorkloadRemoved { id: format!("w{id}").parse().unwrap(), network: "n".parse().unwrap() }),
        ]
    }

    proptest! {
        #[test]
        fn increments_equal_a_compile_from_scratch(changes in prop::collection::vec(prop::collection::vec(any_event(), 0..4), 0..12)) {
            let (mut compiled, mut world) = (Compiled::default(), World::default());
            let mut published: Map<Topic, Document> = Map::default();
            for events in changes {
                for (topic, edit) in compiled.apply(&events) {
                    published.entry(topic).or_default().apply(&edit).unwrap();
                }
                events.iter().for_each(|event| world.apply(event));
                let scratch: Map<Topic, Document> = groupcast_policy::scratch::documents(&world).into_iter().collect();
                prop_assert_eq!(compiled.documents(), &scratch);
                prop_assert_eq!(compiled.hosts(), scratch.keys().filter(|t| matches!(t, Topic::Host(_))).count());
                // Whoever published all edits has nothing left to do.
                let digests = published.iter().map(|(topic, document)| (topic.clone(), document.digest())).collect();
                prop_assert_eq!(compiled.differing(&digests), vec![]);
            }
        }

        #[test]
        fn only_what_differs_is_published(before in prop::collection::vec(any_event(), 0..20), after in prop::collection::vec(any_event(), 0..6)) {
            let mut old = Compiled::default();
            old.apply(&before);
            let mut new = Compiled::default();
            new.apply(&before);
            new.apply(&after);
            let digests = old.documents().iter().map(|(topic, document)| (topic.clone(), document.digest())).collect();
            let differing = new.differing(&digests);
            let mut published = old.documents().clone();
            for (topic, edit) in new.edits_from(old.documents(), &differing) {
                let document = published.entry(topic.clone()).or_default();
                let digest = document.digest();
                document.apply(&edit).unwrap();
                prop_assert_ne!(digest, document.digest(), "{} is published though it did not change", topic);
            }
            published.retain(|_, document| document.content().is_some());
            prop_assert_eq!(&published, new.documents());
        }
    }
}
