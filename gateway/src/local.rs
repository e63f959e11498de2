//! What a gateway knows by following CATALOG and REGISTRY: the desired state, who wrote which version, tokens, and the latest changes.
//! Plain data: messages in, state out. Everything in it can be read again from the bus, so a gateway keeps nothing of its own.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::SystemTime;

use groupcast_bus_config::subjects::{CatalogKind, RegistryKey, parse_registry};
use groupcast_control::catalog::Version;
use groupcast_control::change::Record;
use groupcast_control::document::{Document, HostEntry, Name, decode_record};
use groupcast_control::mirror::{Item, Mirror, Origin};
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Event, World};

use crate::confirm;
use crate::token::Token;

/// Changes that are remembered with their authors.
pub const CHANGES_MAX: usize = 1_000;
/// Documents of one change that are named; the rest is counted.
pub const CHANGE_NAMES_MAX: usize = 100;

/// The version of a document that is there now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    pub revision: u64,
    pub change: u64,
    pub at: SystemTime,
    pub author: String,
    pub reason: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangeDocument {
    pub name: Name,
    pub revision: u64,
    pub deleted: bool,
}

/// A change as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    pub number: u64,
    pub at: SystemTime,
    pub author: String,
    pub reason: String,
    pub documents: Vec<ChangeDocument>,
    pub documents_total: usize,
}

/// A message of REGISTRY, read.
#[derive(Debug)]
pub struct Entered {
    pub item: Item,
    host: Option<(HostId, Option<HostEntry>)>,
}

impl Entered {
    pub fn read(subject: &str, payload: &[u8]) -> Self {
        let host = match parse_registry(subject) {
            // An entry that cannot be read is no host that can be shown.
            Some(RegistryKey::Host(host)) => Some((host, decode_record(payload).ok())),
            _ => None,
        };
        Self { item: Item::registry(subject, payload), host }
    }
}

#[derive(Debug, Default)]
pub struct Local {
    mirror: Mirror,
    world: Arc<World>,
    kept: BTreeMap<Name, Kept>,
    tokens: BTreeMap<String, Arc<Token>>,
    confirms: BTreeMap<Name, confirm::Held>,
    hosts: BTreeMap<HostId, HostEntry>,
    changes: VecDeque<Arc<Changed>>,
    /// From this number on every change is remembered.
    changes_from: u64,
    refused: BTreeSet<String>,
    catalog: Option<u64>,
    registry: Option<u64>,
    begun: bool,
}

impl Local {
    pub fn world(&self) -> &World {
        &self.world
    }

    /// As it is now, shared: what comes later leaves it as it is.
    pub fn world_now(&self) -> Arc<World> {
        self.world.clone()
    }

    /// Copies only what somebody still looks at.
    fn world_mut(&mut self) -> &mut World {
        Arc::make_mut(&mut self.world)
    }

    pub fn kept(&self, name: &Name) -> Option<&Kept> {
        self.kept.get(name)
    }

    /// The documents of a kind, in the order of their ids.
    pub fn kept_of(&self, kind: CatalogKind) -> impl Iterator<Item = (&Name, &Kept)> {
        self.kept.iter().filter(move |(name, _)| name.kind == kind)
    }

    pub fn token(&self, id: &str) -> Option<&Arc<Token>> {
        self.tokens.get(id)
    }

    pub fn tokens(&self) -> impl Iterator<Item = &Arc<Token>> {
        self.tokens.values()
    }

    /// Changes that are taken back unless they are confirmed: what says so, and the version it is.
    pub fn confirms(&self) -> impl Iterator<Item = (&Name, &confirm::Held, &Kept)> {
        self.confirms.iter().filter_map(|(name, held)| Some((name, held, self.kept.get(name)?)))
    }

    pub fn hosts(&self) -> &BTreeMap<HostId, HostEntry> {
        &self.hosts
    }

    /// Oldest first.
    pub fn changes(&self) -> impl DoubleEndedIterator<Item = &Arc<Changed>> {
        self.changes.iter()
    }

    /// Whether every change after this number is remembered here. One that this bus has not written yet is of another.
    pub fn remembers_after(&self, number: u64) -> bool {
        number.saturating_add(1) >= self.changes_from && number <= self.catalog.unwrap_or(0)
    }

    pub fn change(&self, number: u64) -> Option<&Arc<Changed>> {
        self.changes.binary_search_by_key(&number, |changed| changed.number).ok().map(|at| &self.changes[at])
    }

    /// Documents whose last version cannot be read; the one before it counts.
    pub fn refused(&self) -> impl Iterator<Item = &str> {
        self.refused.iter().map(String::as_str)
    }

    /// Both streams were read.
    pub fn is_loaded(&self) -> bool {
        self.catalog.is_some() && self.registry.is_some()
    }

    /// Somebody has written what controllers lead by, were it only that the bus is new.
    pub fn is_begun(&self) -> bool {
        self.begun
    }

    /// The last sequence read of each stream.
    pub fn through(&self) -> (u64, u64) {
        (self.catalog.unwrap_or(0), self.registry.unwrap_or(0))
    }

    pub fn document(&self, name: &Name) -> Option<Document> {
        let catalogue = &self.world.catalogue;
        match name.kind {
            CatalogKind::Group => catalogue.groups.get(&name.id().parse().ok()?).map(|s| Document::Group(s.value.clone())),
            CatalogKind::Template => {
                catalogue.templates.get(&name.id().parse().ok()?).map(|s| Document::Template(s.value.clone()))
            }
            CatalogKind::Token => self.tokens.get(name.id()).map(|token| token.document()),
            CatalogKind::Change
            | CatalogKind::Confirm
            | CatalogKind::Host
            | CatalogKind::Installation
            | CatalogKind::Source
            | CatalogKind::Term => None,
        }
    }

    /// Takes one or more whole changes of CATALOG, or everything it holds; returns the changes.
    pub fn catalog(&mut self, versions: Vec<Version>, through: u64, everything: bool) -> Vec<Arc<Changed>> {
        if everything {
            let there: BTreeSet<Name> = versions.iter().map(|version| version.name.clone()).collect();
            let gone: Vec<Name> = self.kept.keys().filter(|name| !there.contains(name)).cloned().collect();
            gone.iter().for_each(|name| self.remove(name));
            self.refused.clear();
            // The stream may be another one, and its numbers too: those of the past are read with it.
            self.changes.clear();
            self.begun = false;
        }
        let changes: Vec<Arc<Changed>> = changes_of(&versions).into_iter().map(Arc::new).collect();
        let ends = ends(&versions);
        for version in versions {
            let change = version.record().and_then(|record| ends.get(record).copied()).unwrap_or(version.revision);
            self.take(version, change);
        }
        if everything {
            // What was read before counts only if nothing lies between it and what is read again.
            let again = through.saturating_sub(CHANGES_MAX as u64).max(1);
            let joined = self.catalog.is_some_and(|before| before.saturating_add(1) >= again && before <= through);
            if !joined {
                self.changes.clear();
                self.changes_from = again;
            }
        }
        self.catalog = Some(through);
        if !everything {
            self.remember(&changes);
        }
        changes
    }

    /// Adds changes of the past, or those that came.
    pub fn remember(&mut self, changes: &[Arc<Changed>]) {
        for changed in changes {
            match self.changes.binary_search_by_key(&changed.number, |c| c.number) {
                Ok(at) => self.changes[at] = changed.clone(),
                Err(at) => self.changes.insert(at, changed.clone()),
            }
        }
        let over = self.changes.len().saturating_sub(CHANGES_MAX);
        if let Some(last) = self.changes.drain(..over).next_back() {
            self.changes_from = self.changes_from.max(last.number + 1);
        }
    }

    fn take(&mut self, version: Version, change: u64) {
        let Version { name, revision, at, author, reason, document, .. } = version;
        if matches!(name.kind, CatalogKind::Change | CatalogKind::Term) {
            return;
        }
        self.begun |= matches!(name.kind, CatalogKind::Group | CatalogKind::Template | CatalogKind::Installation);
        let document = match document {
            Ok(Some(document)) => document,
            Ok(None) => return self.remove(&name),
            Err(refused) => {
                self.refused.insert(refused.to_string());
                return;
            }
        };
        match document {
            Document::Group(group) => self.world_mut().apply(&Event::Group { revision, group }),
            Document::Template(template) => self.world_mut().apply(&Event::Template { revision, template }),
            Document::Other { body, .. } if name.kind == CatalogKind::Token => match Token::read(&name, &body) {
                Ok(token) => {
                    self.tokens.insert(name.id().to_owned(), Arc::new(token));
                }
                // A token that cannot be read opens nothing.
                Err(why) => {
                    self.tokens.remove(name.id());
                    self.refused.insert(format!("{name} is refused: {why}"));
                }
            },
            Document::Other { body, .. } if name.kind == CatalogKind::Confirm => {
                self.confirms.insert(name.clone(), confirm::read(&body));
            }
            Document::Other { .. } => {}
        }
        self.kept.insert(name, Kept { revision, change, at, author, reason });
    }

    fn remove(&mut self, name: &Name) {
        self.kept.remove(name);
        match (name.kind, name.id().parse(), name.id().parse()) {
            (CatalogKind::Group, Ok(id), _) => self.world_mut().apply(&Event::GroupRemoved(id)),
            (CatalogKind::Template, _, Ok(id)) => self.world_mut().apply(&Event::TemplateRemoved(id)),
            (CatalogKind::Token, ..) => {
                self.tokens.remove(name.id());
            }
            (CatalogKind::Confirm, ..) => {
                self.confirms.remove(name);
            }
            _ => {}
        }
    }

    /// Takes one or more whole changes of REGISTRY, or everything it holds.
    pub fn registry(&mut self, entered: Vec<Entered>, through: u64, everything: bool) {
        if everything {
            self.hosts.clear();
        }
        let mut items = Vec::with_capacity(entered.len());
        for Entered { item, host } in entered {
            match host {
                Some((host, Some(entry))) => {
                    self.hosts.insert(host, entry);
                }
                Some((host, None)) => {
                    self.hosts.remove(&host);
                }
                None => items.push(item),
            }
        }
        let events =
            if everything { self.mirror.load(Origin::Registry, items) } else { self.mirror.apply(Origin::Registry, items) };
        let world = self.world_mut();
        events.iter().for_each(|event| world.apply(event));
        self.registry = Some(through);
    }
}

/// Where the changes end that are led by a record, by the record's id.
fn ends(versions: &[Version]) -> BTreeMap<String, u64> {
    let records = versions.iter().filter(|version| version.name.kind == CatalogKind::Change);
    let end = |version: &Version| match &version.document {
        Ok(Some(Document::Other { body, .. })) => {
            let record: Record = serde_json::from_value(body.clone()).ok()?;
            Some((version.name.id().to_owned(), version.revision + record.documents))
        }
        _ => None,
    };
    records.filter_map(end).collect()
}

/// The changes that these versions were written with. A change of several documents is led by a record that says how many.
pub fn changes_of(versions: &[Version]) -> Vec<Changed> {
    let ends = ends(versions);
    let mut changes: BTreeMap<u64, Changed> = BTreeMap::new();
    for version in versions.iter().filter(|v| !matches!(v.name.kind, CatalogKind::Change | CatalogKind::Term)) {
        let end = version.record().map_or(Some(version.revision), |record| ends.get(record).copied());
        // Without its record nobody knows where the change ends: it is too old to be told.
        let Some(number) = end else { continue };
        let changed = changes.entry(number).or_insert_with(|| Changed {
            number,
            at: version.at,
            author: version.author.clone(),
            reason: version.reason.clone(),
            documents: Vec::new(),
            documents_total: 0,
        });
        changed.documents_total += 1;
        if changed.documents.len() < CHANGE_NAMES_MAX {
            let deleted = matches!(version.document, Ok(None));
            changed.documents.push(ChangeDocument { name: version.name.clone(), revision: version.revision, deleted });
        }
    }
    changes.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use async_nats::HeaderMap;
    use groupcast_control::change::{Record, record_id};
    use groupcast_control::document::encode_record;
    use groupcast_control::log::Entry;
    use groupcast_policy::model::Group;
    use proptest::prelude::*;

    /// After a restart a watcher was shown a part of what it had missed, without a word.
    #[test]
    fn it_is_known_from_where_on_all_changes_are_remembered() {
        let (mut local, max) = (Local::default(), CHANGES_MAX as u64);
        assert!(!local.remembers_after(1), "nothing was read yet");
        local.catalog(Vec::new(), 5 * max, true);
        assert!(local.remembers_after(4 * max - 1) && !local.remembers_after(4 * max - 2), "as far back as is read");
        assert!(local.remembers_after(5 * max) && !local.remembers_after(5 * max + 1), "not what this bus has not written");
        local.catalog(Vec::new(), 5 * max + 10, true);
        assert!(local.remembers_after(4 * max - 1), "what was remembered before still is");
        local.catalog(Vec::new(), 9 * max, true);
        assert!(local.remembers_after(8 * max - 1) && !local.remembers_after(8 * max - 2), "something lies between");
        local.catalog(Vec::new(), 10, true);
        assert!(local.remembers_after(0) && !local.remembers_after(9 * max), "another bus");
    }

    fn version(id: &str, text: Option<&str>, sequence: u64, record: Option<&str>) -> Version {
        let name = Name::new(CatalogKind::Group, id).unwrap();
        let group = |text: &str| Group { name: text.to_owned(), ..Group::new(id.parse().unwrap()) };
        let payload = text.map_or(Vec::new(), |text| Document::Group(Arc::new(group(text))).encode());
        read(&name, payload, sequence, record)
    }

    fn read(name: &Name, payload: Vec<u8>, sequence: u64, record: Option<&str>) -> Version {
        let mut headers = HeaderMap::new();
        headers.insert("Gc-Author", "ann");
        if let Some(record) = record {
            headers.insert("Gc-Record", record);
        }
        let at = SystemTime::UNIX_EPOCH;
        Version::of(&Entry { subject: name.subject(), sequence, headers, payload: payload.into(), at }).unwrap()
    }

    fn led(key: &str, documents: u64, sequence: u64) -> Version {
        let (author, reason, content) = ("ann".to_owned(), String::new(), String::new());
        let record = Record { author, reason, key: key.to_owned(), documents, content, promised: None };
        read(&Name::new(CatalogKind::Change, &record_id(key)).unwrap(), encode_record(&record), sequence, None)
    }

    #[test]
    fn changes_are_put_together_from_their_documents() {
        let record = record_id("k");
        let versions = vec![
            version("a", Some("x"), 1, None),
            led("k", 2, 2),
            version("a", Some("y"), 3, Some(&record)),
            version("b", None, 4, Some(&record)),
            version("c", Some("z"), 5, Some("forgotten")),
        ];
        let changes = changes_of(&versions);
        let shape: Vec<(u64, usize)> = changes.iter().map(|changed| (changed.number, changed.documents_total)).collect();
        assert_eq!(shape, [(1, 1), (4, 2)]);
        assert!(changes[1].documents[1].deleted && changes[1].author == "ann");
        let mut local = Local::default();
        local.catalog(versions, 5, false);
        assert_eq!(
            local.kept(&Name::new(CatalogKind::Group, "a").unwrap()).map(|kept| (kept.revision, kept.change)),
            Some((3, 4))
        );
        assert_eq!(local.change(4).map(|changed| changed.number), Some(4));
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let mut local = Local::default();
        for sequence in 1..=CHANGES_MAX as u64 + 10 {
            local.catalog(vec![version("a", Some("x"), sequence, None)], sequence, false);
        }
        assert_eq!(local.changes().count(), CHANGES_MAX);
        assert_eq!(local.changes().next().map(|changed| changed.number), Some(11));
        let record = record_id("k");
        let mut many = vec![led("k", CHANGE_NAMES_MAX as u64 + 5, 1)];
        many.extend((0..CHANGE_NAMES_MAX as u64 + 5).map(|i| version(&format!("g{i}"), Some("x"), 2 + i, Some(&record))));
        let changed = &changes_of(&many)[0];
        assert_eq!((changed.documents.len(), changed.documents_total), (CHANGE_NAMES_MAX, CHANGE_NAMES_MAX + 5));
    }

    proptest! {
        /// Whatever came, what is known is what somebody who reads everything afresh would know.
        #[test]
        fn increments_equal_a_fresh_look(steps in prop::collection::vec((0..4u8, prop::option::of(0..3u8), any::<bool>()), 0..40)) {
            let mut local = Local::default();
            let mut last: BTreeMap<u8, Version> = BTreeMap::new();
            for (sequence, (id, text, whole)) in (1u64..).zip(steps) {
                let made = version(&format!("g{id}"), text.map(|t| format!("t{t}")).as_deref(), sequence, None);
                last.insert(id, made.clone());
                let everything: Vec<Version> = last.values().cloned().collect();
                // Following may begin anew at any time.
                if whole { local.catalog(everything.clone(), sequence, true) } else { local.catalog(vec![made], sequence, false) };
                let mut fresh = Local::default();
                fresh.catalog(everything, sequence, true);
                prop_assert_eq!(local.world(), fresh.world());
                prop_assert_eq!(&local.kept, &fresh.kept);
                prop_assert_eq!(local.through(), fresh.through());
            }
        }
    }
}
