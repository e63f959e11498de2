//! Follows CATALOG and REGISTRY into [`Local`], and tells whoever waits.

use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

use async_nats::Client;
use groupcast_bus_config::subjects;
use groupcast_control::assemble::{Assembler, Piece, Whole};
use groupcast_control::catalog::{Catalog, Version};
use groupcast_control::feed::{Anew, Delivered, Feed, Health};
use groupcast_control::log::{Log, NoAnswer, in_batch};
use groupcast_control::mirror::Origin;
use tokio::sync::{broadcast, watch};

use crate::local::{CHANGES_MAX, Changed, Entered, Local, changes_of};

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
    healths: [(Origin, Health); 2],
}

impl Default for Followed {
    fn default() -> Self {
        let (local, through, changes) = (RwLock::default(), watch::channel((0, 0)).0, broadcast::channel(WATCH_BEHIND_MAX).0);
        let healths = [Origin::Catalog, Origin::Registry].map(|origin| (origin, Health::default()));
        Self { local, through, changes, healths }
    }
}

impl Followed {
    /// Begins to follow; ends with the runtime.
    pub fn start(client: &Client) -> Arc<Self> {
        let followed = Arc::new(Self::default());
        for (origin, health) in followed.healths.clone() {
            let reader = Reader { origin, client: client.clone(), followed: followed.clone(), health: health.clone() };
            tokio::spawn(async move {
                loop {
                    let why = reader.run().await.map_or_else(|error| error.to_string(), |why| why.to_string());
                    health.is_lost(&why);
                    tracing::warn!(stream = origin.as_str(), %why, "following begins anew");
                    metrics::counter!("groupcast_follow_restarts_total", "stream" => origin.as_str()).increment(1);
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            });
        }
        followed
    }

    /// A stream that is not followed to its head, since when and why: what is known of it here may be old.
    pub fn lost(&self) -> Option<String> {
        self.healths.iter().find_map(|(origin, health)| health.lost().map(|lost| lost.said_of(origin.as_str())))
    }

    /// When the CATALOG was made that is followed: its numbers are of that stream alone.
    pub fn catalog_stream(&self) -> watch::Receiver<String> {
        let [(_, catalog), _] = &self.healths;
        catalog.streams()
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
    health: Health,
}

impl Reader {
    fn source(&self) -> (Log, &'static str) {
        match self.origin {
            Origin::Catalog => (Log::catalog(self.client.clone()), subjects::CATALOG_ALL),
            Origin::Registry => (Log::registry(self.client.clone()), subjects::REGISTRY_ALL),
        }
    }

    /// Ends with why everything has to be read again.
    async fn run(&self) -> Result<Anew, NoAnswer> {
        let (log, filter) = self.source();
        let (mut feed, last) = Feed::begin(log.clone(), filter, self.health.clone()).await?;
        let mut assembler = Assembler::new(last);
        if let Some(whole) = assembler.begin() {
            self.take(&log, whole).await?;
        }
        loop {
            let messages = match feed.next().await {
                Ok(messages) => messages,
                Err(why) => return Ok(why),
            };
            for message in messages {
                if let Some(whole) = assembler.push(self.piece(&message)) {
                    self.take(&log, whole).await?;
                }
            }
        }
    }

    fn piece(&self, Delivered { entry, pending }: &Delivered) -> Piece<Read> {
        let content = match self.origin {
            Origin::Catalog => Read::Catalog(Version::of(entry)),
            Origin::Registry => Read::Registry(Entered::read(&entry.subject, &entry.payload)),
        };
        Piece { sequence: entry.sequence, pending: *pending, batch: in_batch(&entry.headers), content }
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
