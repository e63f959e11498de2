//! Follows CATALOG and REGISTRY into [`Local`], and tells whoever waits.

use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use async_nats::Client;
use async_nats::connection::State;
use async_nats::jetstream::consumer::DeliverPolicy;
use futures::{FutureExt, StreamExt};
use groupcast_bus_config::subjects;
use groupcast_control::assemble::{Assembler, Piece, Whole};
use groupcast_control::catalog::{Catalog, Version};
use groupcast_control::log::{Entry, Log, NoAnswer, in_batch};
use groupcast_control::mirror::Origin;
use tokio::sync::{broadcast, watch};

use crate::local::{CHANGES_MAX, Changed, Entered, Local, changes_of};

/// Messages taken at once while more are there.
const DRAIN_MAX: usize = 1_024;
/// How often it is checked that the stream is still the one that is followed.
const CHECK_EVERY: Duration = Duration::from_secs(5);
/// Pause before following begins anew.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Changes that wait for a slow watcher before it is cut off.
pub const WATCH_BEHIND_MAX: usize = 256;

/// The state that all requests share.
pub struct Followed {
    local: RwLock<Local>,
    /// The last sequence read of CATALOG and REGISTRY.
    through: watch::Sender<(u64, u64)>,
    changes: broadcast::Sender<Arc<Changed>>,
}

impl Default for Followed {
    fn default() -> Self {
        Self { local: RwLock::default(), through: watch::channel((0, 0)).0, changes: broadcast::channel(WATCH_BEHIND_MAX).0 }
    }
}

impl Followed {
    /// Begins to follow; ends with the runtime.
    pub fn start(client: &Client) -> Arc<Self> {
        let followed = Arc::new(Self::default());
        for origin in [Origin::Catalog, Origin::Registry] {
            let reader = Reader { origin, client: client.clone(), followed: followed.clone() };
            tokio::spawn(async move {
                loop {
                    let why = reader.run().await.unwrap_or_else(|error| error.to_string());
                    tracing::warn!(stream = origin.as_str(), %why, "following begins anew");
                    metrics::counter!("groupcast_follow_restarts_total", "stream" => origin.as_str()).increment(1);
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            });
        }
        followed
    }

    /// Never held across a wait.
    pub fn local(&self) -> RwLockReadGuard<'_, Local> {
        // Nothing panics while it writes; should it all the same, the state is still one that the stream had or will have.
        self.local.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Local> {
        self.local.write().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn changes(&self) -> broadcast::Receiver<Arc<Changed>> {
        self.changes.subscribe()
    }

    /// The last sequence read of CATALOG and REGISTRY, whenever one of them moves.
    pub fn moves(&self) -> watch::Receiver<(u64, u64)> {
        self.through.subscribe()
    }

    /// Waits until CATALOG is read up to this sequence; whether it is.
    pub async fn reached(&self, catalog: u64, within: Duration) -> bool {
        let mut through = self.through.subscribe();
        tokio::time::timeout(within, through.wait_for(|(c, _)| *c >= catalog)).await.is_ok_and(|r| r.is_ok())
    }

    fn moved(&self) {
        let through = self.local().through();
        self.through.send_replace(through);
        metrics::gauge!("groupcast_follow_sequence", "stream" => "catalog").set(through.0 as f64);
        metrics::gauge!("groupcast_follow_sequence", "stream" => "registry").set(through.1 as f64);
    }
}

enum Read {
    Catalog(Option<Version>),
    Registry(Entered),
}

struct Reader {
    origin: Origin,
    client: Client,
    followed: Arc<Followed>,
}

impl Reader {
    fn source(&self) -> (Log, &'static str) {
        match self.origin {
            Origin::Catalog => (Log::catalog(self.client.clone()), subjects::CATALOG_ALL),
            Origin::Registry => (Log::registry(self.client.clone()), subjects::REGISTRY_ALL),
        }
    }

    /// Ends with why everything has to be read again.
    async fn run(&self) -> Result<String, NoAnswer> {
        let (log, filter) = self.source();
        let last = log.last(filter).await?.map_or(0, |entry| entry.sequence);
        let mut assembler = Assembler::new(last);
        let mut messages = log.follow(filter, DeliverPolicy::LastPerSubject).await?;
        if let Some(whole) = assembler.begin() {
            self.take(&log, whole).await?;
        }
        let mut check = tokio::time::interval(CHECK_EVERY);
        let mut seen = 0;
        loop {
            let first = tokio::select! {
                message = messages.next() => message,
                _ = check.tick() => match self.is_another(&log, filter, seen).await {
                    true => return Ok("the stream is another one".to_owned()),
                    false => continue,
                }
            };
            let (mut next, mut taken) = (Some(first), 0);
            while let Some(message) = next.take() {
                let message = match message {
                    Some(Ok(message)) => message,
                    Some(Err(error)) => return Ok(error.to_string()),
                    None => return Ok("the consumer ended".to_owned()),
                };
                let Some(piece) = self.piece(message) else { return Ok("a message without its sequence".to_owned()) };
                seen = piece.sequence;
                if let Some(whole) = assembler.push(piece) {
                    self.take(&log, whole).await?;
                }
                taken += 1;
                if taken < DRAIN_MAX {
                    next = messages.next().now_or_never();
                }
            }
        }
    }

    /// A stream that was made anew ends far before what was seen of it. The newest messages of REGISTRY may have expired.
    async fn is_another(&self, log: &Log, filter: &str, seen: u64) -> bool {
        if self.client.connection_state() != State::Connected {
            return false;
        }
        let Ok(last) = log.last(filter).await else { return false };
        let last = last.map_or(0, |entry| entry.sequence);
        let expired = self.origin == Origin::Registry && last > 0 && seen.saturating_sub(last) < DRAIN_MAX as u64;
        last < seen && !expired && log.at(seen).await.is_ok_and(|entry| entry.is_none())
    }

    fn piece(&self, message: async_nats::jetstream::Message) -> Option<Piece<Read>> {
        let info = message.info().ok()?;
        let (sequence, pending, at) = (info.stream_sequence, info.pending, info.published.into());
        let message = message.message;
        let batch = message.headers.as_ref().and_then(in_batch);
        let subject = message.subject.to_string();
        let content = match self.origin {
            Origin::Catalog => {
                let headers = message.headers.unwrap_or_default();
                Read::Catalog(Version::of(&Entry { subject, sequence, headers, payload: message.payload, at }))
            }
            Origin::Registry => Read::Registry(Entered::read(&subject, sequence, &message.payload)),
        };
        Some(Piece { sequence, pending, batch, content })
    }

    async fn take(&self, log: &Log, whole: Whole<Read>) -> Result<(), NoAnswer> {
        let Whole { contents, through, everything, .. } = whole;
        let (mut versions, mut entered) = (Vec::new(), Vec::new());
        for content in contents {
            match content {
                Read::Catalog(version) => versions.extend(version),
                Read::Registry(entry) => entered.push(entry),
            }
        }
        match self.origin {
            Origin::Registry => self.followed.write().registry(entered, through, everything),
            Origin::Catalog => {
                let mut good = Vec::new();
                for refused in versions.iter().filter(|version| everything && version.document.is_err()) {
                    // The newest version that can be read stands in for one that cannot.
                    let history = Catalog::new(self.client.clone()).history(&refused.name).await?;
                    good.extend(history.into_iter().find(|version| version.document.is_ok()));
                }
                good.extend(versions);
                if everything {
                    // Before the rest: whoever has that counts as loaded, and is asked for the changes too.
                    let past = self.recall(log, through).await?;
                    let mut local = self.followed.write();
                    local.catalog(good, through, everything);
                    local.remember(&past);
                } else {
                    let changes = self.followed.write().catalog(good, through, everything);
                    // Nobody watching is no error.
                    changes.into_iter().for_each(|changed| drop(self.followed.changes.send(changed)));
                }
            }
        }
        self.followed.moved();
        Ok(())
    }

    /// Reads the latest changes with their authors.
    async fn recall(&self, log: &Log, through: u64) -> Result<Vec<Arc<Changed>>, NoAnswer> {
        if through == 0 {
            return Ok(Vec::new());
        }
        let first = through.saturating_sub(CHANGES_MAX as u64).max(1);
        let entries = log.range(subjects::CATALOG_ALL, first, through).await?;
        let versions: Vec<Version> = entries.iter().filter_map(Version::of).collect();
        Ok(changes_of(&versions).into_iter().map(Arc::new).collect())
    }
}
