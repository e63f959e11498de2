//! Neutron's security groups, address groups and ports.
//!
//! There is no useful "changed since": a poll lists ids and revisions, fetches what moved, and what a *complete* scan does not show is
//! gone. Pages follow each other by a marker, the last id seen. A marker that was deleted meanwhile makes the server answer the first
//! page again: an id that comes twice means that the scan has to begin again. Every full sync fetches everything, whatever the
//! revisions say.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use groupcast_policy::ids::{GroupId, SourceId, WorkloadId};
use groupcast_policy::model::{Group, Workload};
use groupcast_policy::written::{Node, Problem, neutron};

use super::session::{Keystone, Reply, Session};
use super::transport::{Endpoint, Transport};
use super::{Failed, Observation, Polled, page};

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
}

const GROUPS: List = List {
    path: "/v2.0/security-groups",
    items: "security_groups",
    links: "security_groups_links",
    fields: &["id", "name", "project_id", "stateful", "revision_number", "security_group_rules"],
};
const ADDRESS_GROUPS: List = List {
    path: "/v2.0/address-groups",
    items: "address_groups",
    links: "address_groups_links",
    fields: &["id", "name", "addresses"],
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
};
const SCANNED: &[&str] = &["id", "revision_number"];

/// An item, converted or not, and the version it is.
struct Held<T> {
    revision: i64,
    read: Result<T, String>,
}

type Cache<T> = BTreeMap<String, Held<T>>;
type Convert<T> = fn(&SourceId, &Node, usize) -> Result<T, Vec<Problem>>;

pub struct Neutron {
    id: SourceId,
    page_size: usize,
    session: Session<Keystone>,
    groups: Known<Arc<Group>>,
    ports: Known<Option<Arc<Workload>>>,
}

/// What is known of one list between polls.
struct Known<T> {
    cache: Cache<T>,
    /// Revisions of what is gone: an answer that shows it again with an older one is itself old.
    deleted: BTreeMap<String, i64>,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self { cache: BTreeMap::new(), deleted: BTreeMap::new() }
    }
}

/// One page: items as they were converted, and where the next page is.
struct Page<T> {
    items: Vec<(Option<String>, Held<T>)>,
    next: bool,
}

impl Neutron {
    pub fn new(id: SourceId, page_size: usize, keystone: Keystone) -> Self {
        Self { id, page_size, session: Session::new(keystone), groups: Known::default(), ports: Known::default() }
    }

    pub async fn poll<X: Transport>(&mut self, transport: &X, full: bool, _: Option<&str>) -> Result<Polled, Failed> {
        let Self { id, page_size, session, groups, ports } = self;
        let mut scan = Scan { source: id, page_size: *page_size, session, transport };
        // Groups before ports: a port that names a group created meanwhile waits for it, which allows nothing.
        let new_groups = scan.refresh(&GROUPS, groups, full, group).await?;
        // Where the extension is not there, there are none.
        let addresses = scan.whole(&ADDRESS_GROUPS, ADDRESS_GROUPS.fields, address_group).await?.unwrap_or_default();
        let new_ports = scan.refresh(&PORTS, ports, full, port).await?;
        groups.replace(new_groups, full);
        ports.replace(new_ports, full);
        Ok(Polled::Observed(Box::new(self.observation(&addresses))))
    }

    fn observation(&self, addresses: &Cache<Arc<Group>>) -> Observation {
        let mut seen = Observation::default();
        for (id, held) in self.groups.cache.iter().chain(addresses) {
            match &held.read {
                Ok(group) => drop(seen.groups.insert(group.id.clone(), group.clone())),
                Err(words) => {
                    seen.problems.add(words);
                    match GroupId::new(&format!("{}-{id}", self.id)) {
                        Ok(id) => drop(seen.kept_groups.insert(id)),
                        Err(_) => seen.problems.nameless = true,
                    }
                }
            }
        }
        let mut holders: BTreeMap<_, &WorkloadId> = BTreeMap::new();
        for (id, held) in &self.ports.cache {
            let workload = match &held.read {
                Ok(Some(workload)) => workload,
                Ok(None) => continue, // bound to no host
                Err(words) => {
                    seen.problems.add(words);
                    match WorkloadId::new(&format!("{}-{id}", self.id)) {
                        Ok(id) => drop(seen.kept_workloads.insert(id)),
                        Err(_) => seen.problems.nameless = true,
                    }
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
        for (id, held) in std::mem::replace(&mut self.cache, cache) {
            if !self.cache.contains_key(&id) && self.deleted.len() < DELETED_MAX {
                self.deleted.insert(id, held.revision);
            }
        }
        self.deleted.retain(|id, _| !self.cache.contains_key(id));
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
        if full || known.cache.is_empty() {
            return self.whole(list, list.fields, convert).await?.ok_or_else(missing);
        }
        let scanned = self.whole(list, SCANNED, nothing).await?.ok_or_else(missing)?;
        let mut cache = Cache::new();
        let mut moved = Vec::new();
        for (id, Held { revision, .. }) in scanned {
            if known.deleted.get(&id).is_some_and(|deleted| revision < *deleted) {
                continue; // an old answer about something that is gone
            }
            match known.cache.get(&id) {
                // An older revision than the one known is an old answer.
                Some(held) if held.revision >= revision => {
                    cache.insert(id, Held { revision: held.revision, read: held.read.clone() });
                }
                _ => moved.push(id),
            }
        }
        for ids in moved.chunks(FETCH_MAX) {
            let filter: String = ids.iter().map(|id| format!("&id={}", escaped(id))).collect();
            let path = format!("{}?{}{filter}", list.path, fields(list.fields));
            let page = self.page(list, &path, convert).await?.ok_or_else(missing)?;
            for (id, held) in page.items {
                let id = id.ok_or_else(|| Failed::new(format!("{} shows an item without an id", list.path)))?;
                if ids.contains(&id) {
                    cache.insert(id, held);
                }
            }
        }
        Ok(cache)
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
        let (mut cache, mut seen) = (Cache::new(), BTreeSet::new());
        let mut marker: Option<String> = None;
        for _ in 0..PAGES_MAX {
            let from = marker.as_deref().map_or(String::new(), |id| format!("&marker={}", escaped(id)));
            let query = format!("limit={}&sort_key=id&sort_dir=asc{from}&{}", self.page_size, fields(wanted));
            let Some(page) = self.page(list, &format!("{}?{query}", list.path), convert).await? else {
                return Ok(Scanned::Missing);
            };
            // A full last page says that there is more; the page after it is empty.
            let more = page.next && !page.items.is_empty();
            for (id, held) in page.items {
                let id = id.ok_or_else(|| Failed::new(format!("{} shows an item without an id", list.path)))?;
                if !seen.insert(id.clone()) {
                    return Ok(Scanned::BegunAgain);
                }
                marker = Some(id.clone());
                cache.insert(id, held);
            }
            if !more {
                return Ok(Scanned::Whole(cache));
            }
        }
        Err(Failed::new(format!("{} has more than {PAGES_MAX} pages: raise page_size", list.path)))
    }

    async fn page<T: Send + 'static>(&mut self, list: &List, path: &str, convert: Convert<T>) -> Result<Option<Page<T>>, Failed> {
        let (items_field, links_field, source) = (list.items, list.links, self.source.clone());
        let parse = move |body: &mut dyn Read| {
            let mut items = Vec::new();
            let beside = page::read(body, items_field, &[links_field], &mut |index, bytes| {
                let node = page::node(bytes)?;
                let id = node.get("id").and_then(Node::text).map(str::to_owned);
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
            Ok(Page { items, next })
        };
        match self.session.get(self.transport, Endpoint::Api, path, parse).await? {
            Reply::Good(page) => Ok(Some(page)),
            Reply::NotFound => Ok(None),
        }
    }
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
