//! A Cloud Controller's application security groups.
//!
//! It says when groups last changed (at an address of its own, with mutual TLS), so that a poll that finds nothing new is one request.
//! A listing is by pages of the order of creation. Something deleted under it would shift what follows, and a page would begin too late:
//! so each page is one item shorter than the one before, which makes them overlap, and where they do they must agree. And the time of
//! the last change is asked again after every page. Either sign makes the listing begin again.
//!
//! Pages that agree where they overlap have missed nothing that was there all the time, whatever was changed meanwhile: as long as the last item
//! of a page keeps its place, so do all after it. So a server that is changed all the time is listed in spite of it; only the time of
//! before is remembered then, and the next poll lists again.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use groupcast_policy::ids::{GroupId, SourceId};
use groupcast_policy::model::Group;
use groupcast_policy::written::{Node, cloud_foundry};

use super::session::{Reply, Session, Uaa};
use super::transport::{Endpoint, Transport};
use super::{Failed, Observation, Polled, page};

/// Listings that are begun in one poll.
pub const LISTINGS_MAX: u32 = 6;
/// Listings that are begun again because the time of the last change moved; after these the pages must do.
pub const LISTINGS_MOVED_MAX: u32 = 2;
/// Pause before the second listing; it doubles.
pub const LISTING_PAUSE: Duration = Duration::from_millis(250);
/// What is shown of an identity, in characters.
const IDENTITY_SHOWN: usize = 80;
/// Longest answer that says a time, in bytes.
const TIME_BYTES_MAX: u64 = 4_096;

pub struct CloudController {
    id: SourceId,
    page_size: usize,
    session: Session<Uaa>,
    known: Arc<Known>,
}

/// The good items of the last listing by the bytes they came in: almost all of a listing is as it was the time before, and comparing
/// bytes costs a fraction of reading them. The key is ours alone, so that nobody can write two groups that look like one.
struct Known {
    key: u64,
    items: HashMap<u128, Arc<Item>>,
}

impl Known {
    fn hash(&self, bytes: &[u8]) -> u128 {
        xxhash_rust::xxh3::xxh3_128_with_seed(bytes, self.key)
    }
}

/// A group of a page, converted or not.
struct Item {
    /// What tells it from others.
    identity: String,
    read: Result<Arc<Group>, Bad>,
}

struct Bad {
    /// Which of ours it is.
    id: Option<GroupId>,
    /// It says what it is called, and nothing of ours can be called that.
    foreign: bool,
    words: String,
}

struct Listed {
    /// With the hashes of their bytes.
    items: Vec<(u128, Arc<Item>)>,
    total: usize,
    more: bool,
}

/// Why a listing cannot be used.
enum Broken {
    /// Something changed under it.
    Moved(String),
    /// The time of the last change is another than when it began.
    TimeMoved,
    Failed(Failed),
}

impl From<Failed> for Broken {
    fn from(failed: Failed) -> Self {
        Self::Failed(failed)
    }
}

impl CloudController {
    pub fn new(id: SourceId, page_size: usize, uaa: Uaa) -> Self {
        let known = Known { key: RandomState::new().build_hasher().finish(), items: HashMap::new() };
        Self { id, page_size, session: Session::new(uaa), known: Arc::new(known) }
    }

    pub async fn poll<X: Transport>(&mut self, transport: &X, full: bool, marker: Option<&str>) -> Result<Polled, Failed> {
        let mut time = self.last_update(transport).await?;
        if !full && time.is_some() && time.as_deref() == marker {
            return Ok(Polled::Unchanged);
        }
        let mut pause = LISTING_PAUSE;
        let (mut why, mut times_moved) = (String::new(), 0);
        for listing in 0..LISTINGS_MAX {
            if listing > 0 {
                transport.pause(pause).await;
                pause *= 2;
            }
            match self.list(transport, &mut time, times_moved < LISTINGS_MOVED_MAX).await {
                Ok(observation) => return Ok(Polled::Observed(Box::new(observation))),
                Err(Broken::Moved(what)) => why = what,
                Err(Broken::TimeMoved) => {
                    times_moved += 1;
                    why = "groups were changed meanwhile".to_owned();
                }
                Err(Broken::Failed(failed)) => return Err(failed),
            }
        }
        Err(Failed::new(format!(
            "{LISTINGS_MAX} listings were overtaken by changes ({why}): what was known stays, the next poll tries again"
        )))
    }

    /// When groups last changed; `None` where the server is too old to say.
    async fn last_update<X: Transport>(&mut self, transport: &X) -> Result<Option<String>, Failed> {
        #[derive(serde::Deserialize)]
        struct Answer {
            last_update: String,
        }
        let parse = |body: &mut dyn Read| {
            let answer: Result<Answer, _> = serde_json::from_reader(body.take(TIME_BYTES_MAX));
            let text = answer.map_err(|error| format!("the time of the last update cannot be read: {error}"))?.last_update;
            match humantime::parse_rfc3339(text.replace("+00:00", "Z").as_str()) {
                Ok(_) => Ok(text),
                Err(error) => {
                    Err(format!("the time of the last update is {:?}: {error}", text.chars().take(60).collect::<String>()))
                }
            }
        };
        match self.session.get(transport, Endpoint::Internal, "/internal/v4/asg_latest_update", parse).await? {
            Reply::Good(time) => Ok(Some(time)),
            Reply::NotFound => Ok(None),
        }
    }

    /// `strictly`: a time of the last change that moves makes it begin again.
    async fn list<X: Transport>(
        &mut self,
        transport: &X,
        time: &mut Option<String>,
        strictly: bool,
    ) -> Result<Observation, Broken> {
        let mut found = Found::default();
        let mut last: Option<String> = None;
        let before = time.clone();
        for number in 1.. {
            let size = (self.page_size + 1).saturating_sub(number);
            let begins = (number - 1) * size;
            let page = self.page(transport, number, size).await?;
            if !covers(self.page_size, page.total) {
                return Err(Failed::new(format!(
                    "{} groups do not fit into overlapping pages of at most {} (they hold {}): set page_size to {} or more",
                    page.total,
                    self.page_size,
                    capacity(self.page_size),
                    page_size_for(page.total),
                ))
                .into());
            }
            let now = self.last_update(transport).await?;
            if now != *time {
                *time = now;
                if strictly {
                    return Err(Broken::TimeMoved);
                }
            }
            if let Some(last) = &last
                && page.items.get(number - 2).is_none_or(|(_, item)| item.identity != *last)
            {
                return Err(Broken::Moved("a group was deleted between two pages".to_owned()));
            }
            // A page that says how many there are and shows others is not to be believed about what is gone.
            let ends = begins + page.items.len();
            if (page.more && page.items.len() != size) || (!page.more && ends != page.total) {
                let words = format!("page {number} ends at group {ends} and says that there are {}", page.total);
                return Err(Broken::Moved(words));
            }
            last = page.items.last().map(|(_, item)| item.identity.clone());
            found.take(begins, page.items);
            if !page.more {
                break;
            }
        }
        self.known = Arc::new(Known { key: self.known.key, items: found.good() });
        // What came while it was listed may not be in it: that is seen by the time of before.
        Ok(Observation { costly: before.is_none(), marker: before, ..found.observation() })
    }

    async fn page<X: Transport>(&mut self, transport: &X, number: usize, size: usize) -> Result<Listed, Failed> {
        let path = format!("/v3/security_groups?page={number}&per_page={size}&order_by=created_at");
        let (id, known) = (self.id.clone(), self.known.clone());
        let parse = move |body: &mut dyn Read| {
            let mut items = Vec::new();
            let beside = page::read(body, "resources", &["pagination"], &mut |index, bytes| {
                let (hash, item) = match bytes {
                    Ok(bytes) => {
                        let hash = known.hash(bytes);
                        let read = || Ok::<_, String>(Arc::new(item(&id, &page::node(bytes)?, index)));
                        (hash, known.items.get(&hash).cloned().map_or_else(read, Ok)?)
                    }
                    Err(too_long) => {
                        let hash = known.hash(too_long.begins);
                        let words = format!("security group at index {index}: {too_long}");
                        let read = Err(Bad { id: None, foreign: false, words });
                        (hash, Arc::new(Item { identity: format!("{hash:032x}"), read }))
                    }
                };
                items.push((hash, item));
                Ok(())
            })?;
            let pagination = beside.get("pagination").ok_or("there is no \"pagination\"")?;
            let total = match pagination.get("total_results") {
                Some(Node::Int(total)) if *total >= 0 => *total as usize,
                _ => return Err("pagination.total_results is no number".to_owned()),
            };
            let more = match pagination.get("next") {
                Some(Node::Null) => false,
                Some(Node::Map(_)) => true,
                _ => return Err("pagination.next is neither a link nor null".to_owned()),
            };
            if more && items.is_empty() {
                return Err("a page without groups says that there are more".to_owned());
            }
            Ok(Listed { items, total, more })
        };
        match self.session.get(transport, Endpoint::Api, &path, parse).await? {
            Reply::Good(listed) => Ok(listed),
            Reply::NotFound => Err(Failed::new(format!("{path} is not known there: is url a Cloud Controller's?"))),
        }
    }
}

fn item(source: &SourceId, node: &Node, index: usize) -> Item {
    let text = |key: &str| node.get(key).and_then(Node::text).unwrap_or_default();
    let identity = match text("guid") {
        "" => format!("{} {}", text("created_at"), text("name")),
        guid => guid.to_owned(),
    };
    let named = !text("guid").is_empty();
    let read = cloud_foundry::group(source, node, index).map(Arc::new).map_err(|problems| {
        let id = GroupId::new(&format!("{source}-{}", text("guid"))).ok().filter(|_| named);
        let words = problems.iter().take(3).map(ToString::to_string).collect::<Vec<_>>().join("; ");
        Bad { foreign: named && id.is_none(), id, words }
    });
    Item { identity, read }
}

/// Items by their places in the listing.
#[derive(Default)]
struct Found(BTreeMap<usize, (u128, Arc<Item>)>);

impl Found {
    /// Where pages overlap, the later one counts.
    fn take(&mut self, begins: usize, items: Vec<(u128, Arc<Item>)>) {
        self.0.extend((begins..).zip(items));
    }

    fn good(&self) -> HashMap<u128, Arc<Item>> {
        self.0.values().filter(|(_, item)| item.read.is_ok()).cloned().collect()
    }

    fn observation(self) -> Observation {
        let mut seen = Observation::default();
        let (mut identities, mut twins) = (BTreeSet::new(), BTreeSet::new());
        for (_, item) in self.0.values() {
            if !identities.insert(&item.identity) {
                twins.insert(&item.identity);
            }
        }
        for (_, item) in self.0.values() {
            match &item.read {
                Ok(group) if twins.contains(&item.identity) => drop(seen.kept_groups.insert(group.id.clone())),
                Ok(group) => drop(seen.groups.insert(group.id.clone(), group.clone())),
                Err(Bad { id: Some(id), words, .. }) => {
                    seen.problems.add(words);
                    seen.kept_groups.insert(id.clone());
                }
                Err(Bad { foreign: true, words, .. }) => seen.problems.add(words),
                Err(bad) => seen.problems.add_nameless(&bad.words),
            }
        }
        for twin in twins {
            // Which of them is meant is not known.
            let twin = twin.chars().take(IDENTITY_SHOWN).collect::<String>();
            seen.problems.add(format!(
                "security group {twin:?} stands there twice: what was known of it stays; ask the server's operator"
            ));
        }
        seen
    }
}

/// Page k is of P − k + 1 items and ends at item k · (P − k + 1): the largest such number is what can be listed.
pub const fn capacity(page_size: usize) -> usize {
    let half = page_size.div_ceil(2);
    half * (page_size + 1 - half)
}

pub const fn covers(page_size: usize, total: usize) -> bool {
    total <= capacity(page_size)
}

/// The smallest page size that can list so many.
pub fn page_size_for(total: usize) -> usize {
    // Pages of twice the root always hold them, and of somewhat less never do: the total is a stranger's number, not one to count up to.
    let root = total.isqrt();
    let least = root.saturating_mul(2).saturating_sub(2).max(1);
    (least..least + 8).find(|size| covers(*size, total)).unwrap_or(least + 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlapping_pages_can_hold() {
        for (page_size, holds) in [(1, 1), (2, 2), (3, 4), (4, 6), (5, 9), (5_000, 6_252_500)] {
            assert_eq!(capacity(page_size), holds, "{page_size}");
            let by_trying = (1..=page_size.min(4_000)).map(|k| k * (page_size - k + 1)).max();
            assert_eq!(by_trying, Some(holds));
        }
        assert_eq!([page_size_for(6), page_size_for(7), page_size_for(20_000)], [4, 5, 282]);
        for total in (0..2_000).chain([i64::MAX as usize]) {
            let size = page_size_for(total);
            assert!(covers(size, total) && (size == 1 || !covers(size - 1, total)), "{total}: {size}");
        }
    }
}
