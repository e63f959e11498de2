//! Waiting until something is published. However many wait, the head of TOPICS is read by one task, and only while somebody waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_nats::Client;
use groupcast_bus_config::{streams, subjects};
use groupcast_messages::{Cut, Lead};
use tokio::sync::watch;
use tokio::time::Instant;

/// How often it is looked whether something is published.
const LOOK_EVERY: Duration = Duration::from_millis(10);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("what the sources say is written, but not published in time")]
    Late,
}

/// Where the stream stands: the lead message's sequence and content.
type Head = Option<(u64, Lead)>;

#[derive(Clone)]
pub struct Heads(Arc<Shared>);

struct Shared {
    client: Client,
    head: watch::Sender<Head>,
    looking: AtomicBool,
}

/// The cut of a head that has all of this.
fn reached(head: &Head, catalog: u64, registry: u64) -> Option<Cut> {
    let (sequence, lead) = head.as_ref()?;
    let has = lead.catalog >= catalog && lead.registry >= registry && !lead.incomplete;
    has.then_some(Cut { term: lead.term, lead: *sequence })
}

impl Heads {
    pub fn new(client: Client) -> Self {
        Self(Arc::new(Shared { client, head: watch::Sender::new(None), looking: AtomicBool::new(false) }))
    }

    /// Waits until what is written up to these sequences is compiled and published.
    pub async fn published(&self, catalog: u64, registry: u64, deadline: Instant) -> Result<Cut, Error> {
        let mut head = self.0.head.subscribe();
        if !self.0.looking.swap(true, Ordering::AcqRel) {
            tokio::spawn(look(self.0.clone()));
        }
        let found = tokio::time::timeout_at(deadline, head.wait_for(|head| reached(head, catalog, registry).is_some())).await;
        match found {
            Ok(Ok(head)) => reached(&head, catalog, registry).ok_or(Error::Late),
            Ok(Err(_)) | Err(_) => Err(Error::Late),
        }
    }
}

/// Ends when nobody waits any more.
async fn look(shared: Arc<Shared>) {
    loop {
        // From the stream's leader: what is there is published.
        if let Some(head) = read(&shared.client).await {
            shared.head.send_if_modified(|known| {
                let moved = *known != Some(head.clone());
                *known = Some(head.clone());
                moved
            });
        }
        tokio::time::sleep(LOOK_EVERY).await;
        if shared.head.receiver_count() == 0 {
            // A stream may be lost until somebody waits again: nothing is known then.
            shared.head.send_replace(None);
            shared.looking.store(false, Ordering::Release);
            // Who came in between thinks that somebody looks.
            if shared.head.receiver_count() == 0 || shared.looking.swap(true, Ordering::AcqRel) {
                return;
            }
        }
    }
}

async fn read(client: &Client) -> Option<(u64, Lead)> {
    let jetstream = async_nats::jetstream::new(client.clone());
    let topics = jetstream.get_stream_no_info(streams::TOPICS.name).await.ok()?;
    let head = topics.get_last_raw_message_by_subject(subjects::LEAD_WRITE).await.ok()?;
    Some((head.sequence, Lead::decode(&head.payload).ok()?))
}
