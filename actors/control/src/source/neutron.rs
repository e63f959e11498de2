//! Neutron's security groups, address groups and ports.
//!
//! There is no useful "changed since": a poll lists ids and revisions, fetches what moved, and what a *complete* scan does not show is
//! gone. Pages follow each other by a marker, the last id seen. A marker that was deleted meanwhile makes the server answer the first
//! page again, or 404, or an empty page: an id that comes twice, a 404 after the first page, and an end after a marker that is gone mean that
//! the scan has to begin again. Every full sync fetches everything, whatever the revisions say.
//!
//! Whoever lacks the role is shown ports without the host they are bound to, and only those of one project: a port that does not say it
//! fails the poll.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use groupcast_policy::ids::{GroupId, SourceId, WorkloadId};
use groupcast_policy::model::{Group, Workload};
use groupcast_policy::written::{Node, Problem, neutron};

use super::session::{Keystone, Reply, Session};
use super::transport::{Endpoint, Transport};
use super::{Failed, Observation, PROBLEMS_MAX, Polled, page};

/// Scans of one list that are begun in one poll.
pub const SCANS_MAX: u32 = 6;
/// Pause before the second; it doubles.
pub const SCAN_PAUSE: Duration = Duration::from_millis(250);
/// Items fetched by their ids at once: more would make the request's line too long.
pub const FETCH_MAX: usize = 100;
/// Pages of one scan.
pub const PAGES_MAX: usize = 100_000;
/// Deleted items whose revision is remembered.
pub const DELETED_MAX: usize = 10_000;

/// One of the lists.
struct List {
    /// In the path and in the answer.
    path: &'static str,
    items: &'static str,
    links: &'static str,
    fields: &'static [&'static str],
    /// What every item shows to those who may see all of them.
    privileged: Option<&'static str>,
}

const GROUPS: List = List {
    path: "/v2.0/security-groups",
    items: "security_groups",
    links: "security_groups_links",
    fields: &["id", "name", "project_id", "stateful", "revision_number", "security_group_rules"],
    privileged: None,
};
const ADDRESS_GROUPS: List = List {
    path: "/v2.0/address-groups",
    items: "address_groups",
    links: "address_groups_links",
    fields: &["id", "name", "addresses"],
    privileged: None,
};
const PORTS: List = List {
    path: "/v2.0/ports",
    items: "ports",
    links: "ports_links",
    fields: &[
        "id",
        "network_id",
        "project_id",
        "security_groups",
        "fixed_ips",
        "allowed_address_pairs",
        "device_owner",
        "port_security_enabled",
        "binding:host_id",
        "revision_number",
    ],
    privileged: Some("binding:host_id"),
};
const EXTENSIONS: &str = "/v2.0/extensions?fields=alias";
const ADDRESS_GROUP_EXTENSION: &str = "address-group";
const SCANNED: &[&str] = &["id", "revision_number"];

/// An item, converted or not, and the version it is.
#[derive(Clone)]
struct Held<T> {
    revision: i64,
    read: Result<T, String>,
}

/// A list as it was read.
struct Cache<T> {
    items: BTreeMap<String, Held<T>>,
    /// What is wrong with items that do not say which they are.
    nameless: Vec<String>,
}

impl<T> Default for Cache<T> {
    fn default() -> Self {
        Self { items: BTreeMap::new(), nameless: Vec::new() }
    }
}

type Convert<T> = fn(&SourceId, &Node, usize) -> Result<T, Vec<Problem>>;

pub struct Neutron {
    id: SourceId,
    page_size: usize,
    session: Session<Keystone>,
    groups: Known<Arc<Group>>,
    ports: Known<Option<Arc<Workload>>>,
    /// Whether the server has address groups, once it is known; asked again with every full sync.
    has_address_groups: Option<bool>,
}

/// What is known of one list between polls.
struct Known<T> {
    cache: Cache<T>,
    /// Revisions of what is gone: an answer that shows it again with an older one is itself old.
    deleted: BTreeMap<String, i64>,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self { cache: Cache::default(), deleted: BTreeMap::new() }
    }
}

/// One page: items as they were converted, and where the next page is.
struct Page<T> {
    items: Vec<(Option<String>, Held<T>)>,
    next: bool,
    /// An item does not show what everybody who may see all of them is shown.
    unprivileged: bool,
}

impl Neutron {
    pub fn new(id: SourceId, page_size: usize, keystone: Keystone) -> Self {
        let session = Session::new(keystone);
        Self { id, page_size, session, groups: Known::default(), ports: Known::default(), has_address_groups: None }
    }

    pub async fn poll<X: Transport>(&mut self, transport: &X, full: bool, _: Option<&str>) -> Result<Polled, Failed> {
        let Self { id, page_size, session, groups, ports, has_address_groups } = self;
        let mut scan = Scan { source: id, page_size: *page_size, session, transport };
        // Groups before ports: a port that names a group created meanwhile waits for it, which allows nothing.
        let new_groups = scan.refresh(&GROUPS, groups, full, group).await?;
        if full {
            *has_address_groups = None;
        }
        let addresses = match has_address_groups {
            Some(false) => Cache::default(),
            _ => scan.address_groups(has_address_groups).await?,
        };
        let new_ports = scan.refresh(&PORTS, ports, full, port).await?;
        groups.replace(new_groups, full);
        ports.replace(new_ports, full);
        Ok(Polled::Observed(Box::new(Observation { partial: !full, ..self.observation(&addresses) })))
    }

    fn observation(&self, addresses: &Cache<Arc<Group>>) -> Observation {
        let mut seen = Observation::default();
        let nameless = [&self.groups.cache.nameless, &addresses.nameless, &self.ports.cache.nameless];
        nameless.into_iter().flatten().for_each(|words| seen.problems.add_nameless(words));
        for (id, held) in self.groups.cache.items.iter().chain(&addresses.items) {
            match &held.read {
                Ok(group) => drop(seen.groups.insert(group.id.clone(), group.clone())),
                Err(words) => {
                    seen.problems.add(words);
                    // One that no group of ours can be called is none of ours.
                    seen.kept_groups.extend(GroupId::new(&format!("{}-{id}", self.id)));
                }
            }
        }
        let mut holders: BTreeMap<_, &WorkloadId> = BTreeMap::new();
        for (id, held) in &self.ports.cache.items {
            let workload = match &held.read {
                Ok(Some(workload)) => workload,
                Ok(None) => continue, // bound to no host
                Err(words) => {
                    seen.problems.add(words);
                    seen.kept_workloads.extend(WorkloadId::new(&format!("{}-{id}", self.id)));
                    continue;
                }
            };
            let own = || workload.addresses.iter().filter(|prefix| prefix.is_host());
            let taken = own().find_map(|address| holders.get(&(&workload.network, *address)).map(|by| (address, *by)));
            if let Some((address, by)) = taken {
                seen.problems.add(format!("port {id}: address {address} is that of workload {by} too: give it to one"));
                seen.kept_workloads.insert(workload.id.clone());
                continue;
            }
            holders.extend(own().map(|address| ((&workload.network, *address), &workload.id)));
            seen.workloads.insert(workload.id.clone(), workload.clone());
        }
        seen
    }
}

impl<T> Known<T> {
    fn replace(&mut self, cache: Cache<T>, full: bool) {
        if full {
            self.deleted.clear();
        }
        for (id, held) in std::mem::replace(&mut self.cache, cache).items {
            if !self.cache.items.contains_key(&id) && self.deleted.len() < DELETED_MAX {
                self.deleted.insert(id, held.revision);
            }
        }
        self.deleted.retain(|id, _| !self.cache.items.contains_key(id));
    }
}

fn group(source: &SourceId, node: &Node, index: usize) -> Result<Arc<Group>, Vec<Problem>> {
    neutron::group(source, node, index).map(Arc::new)
}

fn address_group(source: &SourceId, node: &Node, index: usize) -> Result<Arc<Group>, Vec<Problem>> {
    neutron::address_group(source, node, index).map(Arc::new)
}

fn port(source: &SourceId, node: &Node, index: usize) -> Result<Option<Arc<Workload>>, Vec<Problem>> {
    neutron::port(source, node, index).map(|port| port.map(Arc::new))
}

/// Only the id and the revision count.
fn nothing(_: &SourceId, _: &Node, _: usize) -> Result<(), Vec<Problem>> {
    Ok(())
}

struct Scan<'a, X> {
    source: &'a SourceId,
    page_size: usize,
    session: &'a mut Session<Keystone>,
    transport: &'a X,
}

impl<X: Transport> Scan<'_, X> {
    /// The list as it is now, fetching only what moved unless everything is wanted.
    async fn refresh<T: Clone + Send + 'static>(
        &mut self,
        list: &List,
        known: &Known<T>,
        full: bool,
        convert: Convert<T>,
    ) -> Result<Cache<T>, Failed> {
        let missing = || Failed::new(format!("{} is not known there: is url Neutron's?", list.path));
        if full || known.cache.items.is_empty() {
            return self.whole(list, list.fields, convert).await?.ok_or_else(missing);
        }
        let wanted: Vec<&str> = SCANNED.iter().copied().chain(list.privileged).collect();
        let scanned = self.whole(list, &wanted, nothing).await?.ok_or_else(missing)?;
        let mut cache = Cache { items: BTreeMap::new(), nameless: scanned.nameless };
        let mut moved = Vec::new();
        for (id, Held { revision, .. }) in scanned.items {
            if known.deleted.get(&id).is_some_and(|deleted| revision < *deleted) {
                continue; // an old answer about something that is gone
            }
            match known.cache.items.get(&id) {
                // An older revision than the one known is an old answer.
                Some(held) if held.revision >= revision => {
                    cache.items.insert(id, held.clone());
                }
                _ => moved.push(id),
            }
        }
        for ids in moved.chunks(FETCH_MAX) {
            let mut left: BTreeSet<&String> = ids.iter().collect();
            while !left.is_empty() {
                let filter: String = left.iter().map(|id| format!("&id={}", escaped(id))).collect();
                let path = format!("{}?{}{filter}", list.path, fields(list.fields));
                let page = self.page(list, &path, convert).await?.ok_or_else(missing)?;
                if page.unprivileged {
                    return Err(unprivileged(list));
                }
                let before = left.len();
                for (id, held) in page.items {
                    if let Some(id) = id.filter(|id| left.remove(id)) {
                        cache.items.insert(id, held);
                    }
                }
                // A server may show fewer at once than are asked for.
                if !page.next || left.len() == before {
                    break;
                }
            }
            // Listed a moment ago and not shown now: gone since, or not shown. The next scan decides, not the lack of an answer.
            for id in left {
                cache.items.extend(known.cache.items.get(id).map(|held| (id.clone(), held.clone())));
            }
        }
        Ok(cache)
    }

    /// None where the server has no such list. That is believed if it says itself that it lacks the extension.
    async fn address_groups(&mut self, there: &mut Option<bool>) -> Result<Cache<Arc<Group>>, Failed> {
        if let Some(cache) = self.whole(&ADDRESS_GROUPS, ADDRESS_GROUPS.fields, address_group).await? {
            *there = Some(true);
            return Ok(cache);
        }
        let parse = |body: &mut dyn Read| {
            let mut aliases = BTreeSet::new();
            page::read(body, "extensions", &[], &mut |_, bytes| {
                let node = page::node(bytes.map_err(|too_long| too_long.to_string())?)?;
                aliases.extend(node.get("alias").and_then(Node::text).map(str::to_owned));
                Ok(())
            })?;
            Ok(aliases)
        };
        let path = ADDRESS_GROUPS.path;
        match self.session.get(self.transport, Endpoint::Api, EXTENSIONS, parse).await? {
            Reply::Good(aliases) if !aliases.is_empty() && !aliases.contains(ADDRESS_GROUP_EXTENSION) => {
                *there = Some(false);
                Ok(Cache::default())
            }
            Reply::Good(_) => {
                Err(Failed::new(format!("{path} answered 404 although the server has the extension: what was known stays")))
            }
            Reply::NotFound => Err(Failed::new(format!("{path} and {EXTENSIONS} answered 404: is url Neutron's?"))),
        }
    }

    /// The list whole, begun again when it is seen to have begun again. `None`: there is no such list.
    async fn whole<T: Send + 'static>(
        &mut self,
        list: &List,
        wanted: &[&str],
        convert: Convert<T>,
    ) -> Result<Option<Cache<T>>, Failed> {
        let mut pause = SCAN_PAUSE;
        for scan in 0..SCANS_MAX {
            if scan > 0 {
                self.transport.pause(pause).await;
                pause *= 2;
            }
            match self.once(list, wanted, convert).await? {
                Scanned::Whole(cache) => return Ok(Some(cache)),
                Scanned::Missing => return Ok(None),
                Scanned::BegunAgain => {}
            }
        }
        let words = format!("{SCANS_MAX} scans of {} were overtaken by deletions", list.path);
        Err(Failed::new(format!("{words}: what was known stays, the next poll tries again")))
    }

    async fn once<T: Send + 'static>(&mut self, list: &List, wanted: &[&str], convert: Convert<T>) -> Result<Scanned<T>, Failed> {
        let (mut cache, mut seen) = (Cache::default(), BTreeSet::new());
        let mut marker: Option<String> = None;
        for _ in 0..PAGES_MAX {
            let from = marker.as_deref().map_or(String::new(), |id| format!("&marker={}", escaped(id)));
            let query = format!("limit={}&sort_key=id&sort_dir=asc{from}&{}", self.page_size, fields(wanted));
            let Some(page) = self.page(list, &format!("{}?{query}", list.path), convert).await? else {
                return Ok(if marker.is_none() { Scanned::Missing } else { Scanned::BegunAgain });
            };
            if page.unprivileged {
                return Err(unprivileged(list));
            }
            if let (true, Some(marker)) = (page.items.is_empty(), &marker) {
                // A full last page says that there is more, and the page after it is empty. So may be one after a marker that is gone.
                return Ok(if self.is_there(list, marker).await? { Scanned::Whole(cache) } else { Scanned::BegunAgain });
            }
            let (before, more) = (marker.clone(), page.next);
            for (id, held) in page.items {
                let Some(id) = id else {
                    let words = held.read.err().unwrap_or_else(|| format!("{} shows an item without an id", list.path));
                    if cache.nameless.len() < PROBLEMS_MAX {
                        cache.nameless.push(words);
                    }
                    continue;
                };
                if !seen.insert(id.clone()) {
                    return Ok(Scanned::BegunAgain);
                }
                marker = Some(id.clone());
                cache.items.insert(id, held);
            }
            if !more {
                return Ok(Scanned::Whole(cache));
            }
            if marker == before {
                return Err(Failed::new(format!(
                    "{} shows a page of items without ids: nothing says where it goes on",
                    list.path
                )));
            }
        }
        Err(Failed::new(format!("{} has more than {PAGES_MAX} pages: raise page_size", list.path)))
    }

    async fn is_there(&mut self, list: &List, id: &str) -> Result<bool, Failed> {
        let path = format!("{}?fields=id&id={}", list.path, escaped(id));
        let page = self.page(list, &path, nothing).await?;
        Ok(page.is_some_and(|page| page.items.iter().any(|(shown, _)| shown.as_deref() == Some(id))))
    }

    async fn page<T: Send + 'static>(&mut self, list: &List, path: &str, convert: Convert<T>) -> Result<Option<Page<T>>, Failed> {
        let (items_field, links_field, source) = (list.items, list.links, self.source.clone());
        let privileged = list.privileged.filter(|field| path.contains(&format!("fields={}", escaped(field))));
        let parse = move |body: &mut dyn Read| {
            let (mut items, mut unprivileged) = (Vec::new(), false);
            let beside = page::read(body, items_field, &[links_field], &mut |index, bytes| {
                let node = match bytes {
                    Ok(bytes) => page::node(bytes)?,
                    Err(too_long) => {
                        let words = format!("{items_field} at index {index}: {too_long}");
                        items.push((None, Held { revision: 0, read: Err(words) }));
                        return Ok(());
                    }
                };
                let id = node.get("id").and_then(Node::text).filter(|id| !id.is_empty()).map(str::to_owned);
                unprivileged |= privileged.is_some_and(|field| matches!(node.get(field), None | Some(Node::Null)));
                let revision = if let Some(Node::Int(revision)) = node.get("revision_number") { *revision } else { 0 };
                let told =
                    |problems: Vec<Problem>| problems.iter().take(3).map(Problem::to_string).collect::<Vec<_>>().join("; ");
                items.push((id, Held { revision, read: convert(&source, &node, index).map_err(told) }));
                Ok(())
            })?;
            let next = match beside.get(links_field) {
                None | Some(Node::Null) => false,
                Some(Node::List(links)) => links.iter().any(|link| link.get("rel").and_then(Node::text) == Some("next")),
                Some(_) => return Err(format!("{links_field} is no list")),
            };
            Ok(Page { items, next, unprivileged })
        };
        match self.session.get(self.transport, Endpoint::Api, path, parse).await? {
            Reply::Good(page) => Ok(Some(page)),
            Reply::NotFound => Ok(None),
        }
    }
}

fn unprivileged(list: &List) -> Failed {
    let (path, field) = (list.path, list.privileged.unwrap_or_default());
    Failed::new(format!(
        "{path} is shown without {field}: the credential may not see where ports are, nor all of them; give it the admin role, or a role \
         that Neutron's policy shows it to. What was known stays"
    ))
}

enum Scanned<T> {
    Whole(Cache<T>),
    BegunAgain,
    Missing,
}

fn fields(names: &[&str]) -> String {
    names.iter().map(|name| format!("fields={}", escaped(name))).collect::<Vec<_>>().join("&")
}

/// What goes into a query.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~:".contains(&byte);
    text.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}
