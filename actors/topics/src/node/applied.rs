//! A batch that is in the stream, published or followed, comes into the replica, and what it means to hosts is known: who has to reach
//! which revisions, and what is not waited for any more.

use std::sync::Arc;

use groupcast_messages::{Companions, Cut};
use groupcast_policy::doc::{Document, Edit};
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::{Topic, TopicHash};

use super::{Committed, Node, Reach};
use crate::Map;
use crate::replica::{PublishedDelta, Replica, Unfit};

impl Node {
    /// What a batch means to hosts, judged before it is applied: whoever follows a topic now has to reach it.
    pub(super) fn judged(
        &mut self,
        cut: Cut,
        since: u64,
        published: &[PublishedDelta],
        (change, catalog): (u64, u64),
    ) -> Committed {
        let after = self.reflected.map_or(change.saturating_sub(1), |(_, catalog)| catalog);
        self.reflected = Some((cut.lead, catalog));
        let topics = published.iter().map(|m| (m.topic.hash64(), m.revision)).collect();
        let span = self.span(published.iter().map(|m| (&m.topic, m.revision)));
        let bytes = published.iter().map(|m| m.payload.len()).sum();
        let tallied = published.iter().any(|m| m.delta.companions == Companions::Tallied);
        Committed { cut, since, change, after, catalog, bytes, topics, tallied, span, ..Committed::default() }
    }

    /// The hosts that followed any of the topics when they were published, and what of it each must reach.
    pub(super) fn span<'a>(&mut self, topics: impl Iterator<Item = (&'a Topic, u64)>) -> Vec<(HostId, Reach)> {
        let mut span: std::collections::BTreeMap<HostId, Vec<(TopicHash, u64)>> = Default::default();
        let followers = self.followers();
        let topics: Vec<(&Topic, u64)> = topics.collect();
        if let [(topic, revision)] = topics[..] {
            let reach: Reach = [(topic.hash64(), revision)].into();
            return followers.of(topic).map(|host| (host.clone(), Arc::clone(&reach))).collect();
        }
        for (topic, revision) in topics {
            let hash = topic.hash64();
            for host in followers.of(topic) {
                span.entry(host.clone()).or_default().push((hash, revision));
            }
        }
        span.into_iter().map(|(host, reach)| (host, reach.into())).collect()
    }

    /// Into the replica and the followers; what hosts cease to follow with it is not waited for.
    pub(super) fn apply(
        &mut self,
        cut: Cut,
        since: u64,
        batch: &[PublishedDelta],
        committed: &mut Committed,
    ) -> Result<(), Unfit> {
        if let Some(followers) = &mut self.followers {
            let mut ceased = Vec::new();
            // Documents that refer to each other change one after the other, each against the state left by the one before.
            if batch.len() == 1 {
                let edit = batch[0].meaning.as_ref().unwrap_or(&batch[0].delta.edit);
                if *edit != Edit::Reset {
                    ceased = followers.edit(&batch[0].topic, edit, &self.replica);
                }
            } else {
                let mut overlay = Overlay { replica: &self.replica, changed: Map::default() };
                for message in batch {
                    let edit = message.meaning.as_ref().unwrap_or(&message.delta.edit);
                    if *edit == Edit::Reset || matches!(message.topic, Topic::Members(_)) {
                        continue;
                    }
                    // An empty edit refers to nothing, but it may be how a host without workloads becomes known.
                    ceased.extend(followers.edit(&message.topic, edit, &overlay));
                    if !edit.is_empty() {
                        overlay.edit(&message.topic, edit);
                    }
                }
            }
            // What one edit takes away another may have given back.
            ceased.retain(|(host, topic)| !followers.follows(host, topic));
            committed.leave_out(ceased);
        }
        let result = self.replica.apply(cut, since, batch);
        if result.is_err() {
            self.followers = None;
        }
        result
    }
}

impl Committed {
    fn leave_out(&mut self, ceased: Vec<(HostId, Topic)>) {
        self.unfollowed = ceased.iter().map(|(host, topic)| (host.clone(), topic.hash64())).collect();
        self.unfollowed.sort_unstable();
        if !ceased.is_empty() {
            let unfollowed = &self.unfollowed;
            for (host, reach) in &mut self.span {
                // Pairs of one host lie together: most hosts have none.
                let from = unfollowed.partition_point(|(other, _)| other < host);
                let own = unfollowed[from..].iter().take_while(|(other, _)| other == host);
                let own: Vec<TopicHash> = own.map(|(_, topic)| *topic).collect();
                if !own.is_empty() {
                    *reach = reach.iter().filter(|(topic, _)| !own.contains(topic)).copied().collect();
                }
            }
            self.span.retain(|(_, reach)| !reach.is_empty());
        }
        let own = |(host, topic): (HostId, Topic)| matches!(topic, Topic::Host(_)).then_some(host);
        self.left = ceased.into_iter().filter_map(own).collect();
    }
}

/// The replica with some documents as they will be.
struct Overlay<'a> {
    replica: &'a Replica,
    changed: Map<Topic, Document>,
}

impl groupcast_policy::needs::Documents for Overlay<'_> {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        self.changed.get(topic).or_else(|| self.replica.document(topic))
    }
}

impl Overlay<'_> {
    fn edit(&mut self, topic: &Topic, edit: &Edit) {
        let mut document = self.document_now(topic);
        if document.apply(edit).is_ok() {
            self.changed.insert(topic.clone(), document);
        }
    }

    fn document_now(&self, topic: &Topic) -> Document {
        groupcast_policy::needs::Documents::document(self, topic).cloned().unwrap_or_default()
    }
}
