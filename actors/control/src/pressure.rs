//! Back-pressure that reaches whoever writes: the streams take more than controllers publish, so a writer that is far ahead of what is
//! published waits, and is refused when nobody catches up.

use std::time::Duration;

use async_nats::Client;
use futures::StreamExt;
use groupcast_bus_config::subjects;
use groupcast_messages::Lead;
use tokio::sync::watch;

/// How many messages of CATALOG may be written and not published yet. Far more than a controller lets wait in itself, so that
/// what is merged is merged there.
pub const AHEAD_MAX: u64 = 20_000;
/// How long a writer waits for controllers to catch up.
pub const WAIT_MAX: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{ahead} messages are written and not published yet, more than {AHEAD_MAX}: controllers are overloaded, or none leads; try again \
     when they have caught up"
)]
pub struct Behind {
    pub ahead: u64,
}

/// How far CATALOG is published.
#[derive(Debug, Clone)]
pub struct Pressure {
    published: watch::Sender<u64>,
    ahead_max: u64,
    wait_max: Duration,
}

impl Default for Pressure {
    fn default() -> Self {
        Self::new(AHEAD_MAX, WAIT_MAX)
    }
}

impl Pressure {
    pub fn new(ahead_max: u64, wait_max: Duration) -> Self {
        Self { published: watch::Sender::new(0), ahead_max, wait_max }
    }

    /// The topics reflect CATALOG up to here.
    pub fn published(&self, catalog: u64) {
        self.published.send_if_modified(|published| {
            let moved = *published < catalog;
            *published = (*published).max(catalog);
            moved
        });
    }

    /// Learns it from the leaders' own messages, until the connection is closed.
    pub async fn follow(self, client: Client) -> Result<(), async_nats::SubscribeError> {
        let mut leads = client.subscribe(subjects::LEAD_READ).await?;
        while let Some(message) = leads.next().await {
            if let Ok(lead) = Lead::decode(&message.payload) {
                self.published(lead.catalog);
            }
        }
        Ok(())
    }

    /// Waits until what was written up to here is not too far ahead. Nothing is held up before it is known how far that is.
    pub async fn admit(&self, written: u64) -> Result<(), Behind> {
        let mut published = self.published.subscribe();
        let near = |published: &u64| *published == 0 || written.saturating_sub(*published) <= self.ahead_max;
        let waited = tokio::time::timeout(self.wait_max, published.wait_for(near)).await;
        match waited {
            Ok(_) => Ok(()),
            Err(_) => Err(Behind { ahead: written.saturating_sub(*self.published.borrow()) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_writer_that_is_far_ahead_waits_and_then_is_refused() {
        let pressure = Pressure::new(10, Duration::from_secs(5));
        assert_eq!(pressure.admit(1_000).await, Ok(()), "nobody has said yet how far it is published");
        pressure.published(100);
        assert_eq!(pressure.admit(110).await, Ok(()));
        assert_eq!(pressure.admit(111).await, Err(Behind { ahead: 11 }));
        let waiting = tokio::spawn({
            let pressure = pressure.clone();
            async move { pressure.admit(120).await }
        });
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert!(!waiting.is_finished());
        pressure.published(109);
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(!waiting.is_finished(), "still too far");
        pressure.published(110);
        assert_eq!(waiting.await.unwrap(), Ok(()));
        pressure.published(90);
        assert_eq!(pressure.admit(120).await, Ok(()), "what is published stays so");
    }
}
