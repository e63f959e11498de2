//! The leaders' chain as it is republished, and what must hold of it.

use futures::StreamExt;
use groupcast_bus_config::subjects;
use groupcast_messages::Lead;
use groupcast_topics::nats::Republished;
use tokio::sync::mpsc;

use crate::World;

/// A lead message and where it stands.
#[derive(Debug, Clone)]
pub struct Led {
    pub sequence: u64,
    pub previous: u64,
    pub lead: Lead,
}

/// Every lead message from now on.
pub struct Chronicle(mpsc::UnboundedReceiver<Led>);

impl Chronicle {
    pub async fn of(world: &World) -> Self {
        let client = world.observer("chronicle").await;
        let mut messages = client.subscribe(subjects::LEAD_READ).await.expect("subscribed");
        client.flush().await.expect("the server answers");
        let (sender, leads) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            let _client = client;
            while let Some(message) = messages.next().await {
                let of = Republished::of(&message).expect("from the stream");
                let lead = Lead::decode(&message.payload).expect("a lead message");
                if sender.send(Led { sequence: of.sequence, previous: of.previous, lead }).is_err() {
                    return;
                }
            }
        });
        Self(leads)
    }

    /// What came since it was last asked.
    pub fn so_far(&mut self) -> Vec<Led> {
        let mut all = Vec::new();
        while let Ok(led) = self.0.try_recv() {
            all.push(led);
        }
        all
    }

    pub async fn next(&mut self) -> Led {
        self.0.recv().await.expect("the chronicle is kept")
    }

    /// All that came until now.
    pub async fn end(mut self) -> Vec<Led> {
        self.0.close();
        let mut all = Vec::new();
        while let Some(led) = self.0.recv().await {
            all.push(led);
        }
        all
    }
}

/// Each lead message follows the one before it, unless a new life of the stream begins with it; terms grow along the sequences, and a
/// term has one leader. (Of two that find an empty stream at the same time, the one with the higher term begins its life once more.)
pub fn one_leader_per_term(leads: &[Led]) {
    for pair in leads.windows(2) {
        let (before, next) = (&pair[0], &pair[1]);
        let anew = next.previous == 0 && next.lead.since > before.lead.since;
        let chained = anew || next.previous == before.sequence;
        assert!(chained && next.sequence > before.sequence, "the chain is broken between {before:?} and {next:?}");
        assert!(next.lead.term >= before.lead.term, "{next:?} after {before:?}");
        let one = next.lead.term > before.lead.term || next.lead.leader == before.lead.leader;
        assert!(one, "two leaders in one term: {before:?} and {next:?}");
    }
}
