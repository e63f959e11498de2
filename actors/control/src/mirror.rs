//! What CATALOG and REGISTRY say, as events for the compiler. What cannot be read leaves the version before it in force.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use groupcast_bus_config::subjects::{CatalogKind, RegistryKey, parse_registry};
use groupcast_policy::ids::{GroupId, TemplateId, WorkloadId};
use groupcast_policy::model::{Event, Group, Stored, Template, Workload, World};

use crate::document::{Document, Name, Refused, decode_workload};

/// Refused documents that are remembered by name.
pub const REFUSED_MAX: usize = 1_000;

/// One message, read.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    Group {
        id: GroupId,
        revision: u64,
        group: Option<Arc<Group>>,
    },
    Template {
        id: TemplateId,
        revision: u64,
        template: Option<Arc<Template>>,
    },
    Workload {
        id: WorkloadId,
        workload: Option<Arc<Workload>>,
    },
    Refused(Refused),
    /// What an earlier version wrote under this name has another now.
    Rewritten {
        name: String,
    },
    /// Somebody said that the bus is new: what is not there was never written.
    Begun,
    /// Nothing that the policy depends on.
    Nothing,
}

impl Item {
    pub fn catalog(subject: &str, revision: u64, payload: &[u8]) -> Self {
        let Some(name) = Name::parse(subject) else {
            let why = "its subject names no kind that this version knows, or no valid id".to_owned();
            return Self::Refused(Refused { name: shown(subject), why });
        };
        if name.kind == CatalogKind::Installation {
            return Self::Begun;
        }
        if !matches!(name.kind, CatalogKind::Group | CatalogKind::Template) {
            return Self::Nothing;
        }
        match (Document::decode(&name, payload), name.kind) {
            (Ok(Some(Document::Group(group))), _) => Self::Group { id: group.id.clone(), revision, group: Some(group) },
            (Ok(Some(Document::Template(template))), _) => {
                Self::Template { id: template.id.clone(), revision, template: Some(template) }
            }
            (Ok(None), CatalogKind::Group) => {
                name.id().parse().map_or(Self::Nothing, |id| Self::Group { id, revision, group: None })
            }
            (Ok(None), CatalogKind::Template) => {
                name.id().parse().map_or(Self::Nothing, |id| Self::Template { id, revision, template: None })
            }
            (Ok(_), _) => Self::Nothing,
            (Err(refused), _) => Self::Refused(refused),
        }
    }

    pub fn registry(subject: &str, payload: &[u8]) -> Self {
        match parse_registry(subject) {
            Some(RegistryKey::Workload(id)) => match decode_workload(&id, payload) {
                Ok(workload) => Self::Workload { id, workload: workload.map(Arc::new) },
                Err(refused) => Self::Refused(refused),
            },
            Some(RegistryKey::FormerWorkload(network, id)) => {
                let name = format!("workload {id} on network {network}");
                let why = "an earlier version wrote it: start a controller of this version, which rewrites it".to_owned();
                if payload.is_empty() { Self::Rewritten { name } } else { Self::Refused(Refused { name, why }) }
            }
            Some(
                RegistryKey::Address(..)
                | RegistryKey::Ranges(_)
                | RegistryKey::RangesSeen(..)
                | RegistryKey::Host(_)
                | RegistryKey::Refusal(_)
                | RegistryKey::Guard(_)
                | RegistryKey::Fence
                | RegistryKey::Fenced,
            ) => Self::Nothing,
            None => {
                let why = "its subject is none of the registry's".to_owned();
                Self::Refused(Refused { name: shown(subject), why })
            }
        }
    }

    /// What a refusal of it would be called.
    fn name(&self) -> Option<String> {
        match self {
            Self::Group { id, .. } => Some(Name::group(id).to_string()),
            Self::Template { id, .. } => Some(Name::template(id).to_string()),
            Self::Workload { id, .. } => Some(format!("workload {id}")),
            Self::Refused(refused) => Some(refused.name.clone()),
            Self::Rewritten { name } => Some(name.clone()),
            Self::Begun | Self::Nothing => None,
        }
    }
}

fn shown(subject: &str) -> String {
    subject.chars().take(100).collect()
}

/// Which of the two streams something comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    Catalog,
    Registry,
}

impl Origin {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Catalog => "catalog",
            Self::Registry => "registry",
        }
    }
}

#[derive(Debug, Default)]
pub struct Mirror {
    groups: BTreeMap<GroupId, Stored<Group>>,
    templates: BTreeMap<TemplateId, Stored<Template>>,
    /// An id has one holder: its entry is named by nothing else.
    workloads: HashMap<WorkloadId, Arc<Workload>>,
    refused: BTreeMap<(&'static str, String), Refused>,
    /// Refusals beyond those remembered.
    unremembered: usize,
}

impl Mirror {
    /// Takes one or more whole changes; what it returns is one.
    pub fn apply(&mut self, origin: Origin, items: Vec<Item>) -> Vec<Event> {
        items.into_iter().filter_map(|item| self.take(origin, item)).collect()
    }

    /// Takes everything a stream holds: what is not in it is gone.
    pub fn load(&mut self, origin: Origin, items: Vec<Item>) -> Vec<Event> {
        let mut kept: BTreeSet<String> = items.iter().filter_map(Item::name).collect();
        let mut gone: Vec<Item> = Vec::new();
        let mut miss = |item: Item| {
            if item.name().is_some_and(|name| kept.insert(name)) {
                gone.push(item);
            }
        };
        match origin {
            Origin::Catalog => {
                self.groups.iter().for_each(|(id, s)| miss(Item::Group { id: id.clone(), revision: s.revision, group: None }));
                self.templates
                    .iter()
                    .for_each(|(id, s)| miss(Item::Template { id: id.clone(), revision: s.revision, template: None }));
            }
            Origin::Registry => self.workloads.keys().for_each(|id| miss(Item::Workload { id: id.clone(), workload: None })),
        }
        self.refused.retain(|(of, _), _| *of != origin.as_str());
        self.unremembered = 0;
        gone.into_iter().chain(items).filter_map(|item| self.take(origin, item)).collect()
    }

    fn take(&mut self, origin: Origin, item: Item) -> Option<Event> {
        if let Item::Refused(refused) = item {
            let key = (origin.as_str(), refused.name.clone());
            if self.refused.len() < REFUSED_MAX || self.refused.contains_key(&key) {
                self.refused.insert(key, refused);
            } else {
                self.unremembered += 1;
            }
            return None;
        }
        if !self.refused.is_empty()
            && let Some(name) = item.name()
        {
            self.refused.remove(&(origin.as_str(), name));
        }
        match item {
            Item::Group { id, revision, group: Some(group) } => {
                let stored = Stored { revision, value: group.clone() };
                let before = self.groups.insert(id, stored);
                (before.is_none_or(|before| before.value != group)).then_some(Event::Group { revision, group })
            }
            Item::Group { id, group: None, .. } => self.groups.remove(&id).map(|_| Event::GroupRemoved(id)),
            Item::Template { id, revision, template: Some(template) } => {
                let stored = Stored { revision, value: template.clone() };
                let before = self.templates.insert(id, stored);
                (before.is_none_or(|before| before.value != template)).then_some(Event::Template { revision, template })
            }
            Item::Template { id, template: None, .. } => self.templates.remove(&id).map(|_| Event::TemplateRemoved(id)),
            Item::Workload { id, workload: Some(workload) } => {
                let before = self.workloads.insert(id, workload.clone());
                (before.as_ref() != Some(&workload)).then_some(Event::Workload(workload))
            }
            Item::Workload { id, workload: None } => {
                let before = self.workloads.remove(&id)?;
                Some(Event::WorkloadRemoved { id, network: before.network.clone() })
            }
            Item::Refused(_) | Item::Rewritten { .. } | Item::Begun | Item::Nothing => None,
        }
    }

    pub fn has_documents(&self) -> bool {
        !self.groups.is_empty() || !self.templates.is_empty()
    }

    pub fn has_workloads(&self) -> bool {
        !self.workloads.is_empty()
    }

    /// What is refused now, and how many more there are than can be named.
    pub fn refused(&self) -> (impl Iterator<Item = &Refused>, usize) {
        (self.refused.values(), self.unremembered)
    }

    pub fn refused_count(&self) -> usize {
        self.refused.len() + self.unremembered
    }

    /// The whole desired state.
    pub fn world(&self) -> World {
        let mut world = World::default();
        world.catalogue.groups = self.groups.clone();
        world.catalogue.templates = self.templates.clone();
        world.registry.workloads.extend(self.workloads.iter().map(|(id, workload)| (id.clone(), workload.clone())));
        world
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::document::encode_workload;
    use groupcast_bus_config::subjects;
    use groupcast_policy::ids::NetworkId;
    use proptest::prelude::*;

    fn group(id: &str, name: &str, revision: u64) -> Item {
        let group = Group { name: name.to_owned(), ..Group::new(id.parse().unwrap()) };
        let payload = Document::Group(Arc::new(group)).encode();
        Item::catalog(&subjects::catalog(CatalogKind::Group, id).unwrap(), revision, &payload)
    }

    fn workload(network: &str, id: &str, incarnation: Option<u64>) -> Item {
        let (network, id): (NetworkId, WorkloadId) = (network.parse().unwrap(), id.parse().unwrap());
        let payload = incarnation.map_or(Vec::new(), |incarnation| {
            encode_workload(&Workload { incarnation, ..Workload::new(id.clone(), "h".parse().unwrap(), network.clone()) })
        });
        Item::registry(&subjects::registry_workload(&id), &payload)
    }

    #[test]
    fn a_malformed_document_spoils_only_itself() {
        let mut mirror = Mirror::default();
        assert_eq!(mirror.apply(Origin::Catalog, vec![group("web", "one", 1)]).len(), 1);
        let bad = Item::catalog(&subjects::catalog(CatalogKind::Group, "web").unwrap(), 2, b"rubbish");
        let events = mirror.apply(Origin::Catalog, vec![bad, group("db", "two", 3)]);
        assert!(matches!(&events[..], [Event::Group { group, .. }] if group.id.as_str() == "db"));
        let (refused, more) = mirror.refused();
        assert_eq!((refused.map(|r| r.name.clone()).collect::<Vec<_>>(), more), (vec!["group web".to_owned()], 0));
        assert_eq!(mirror.world().catalogue.groups.len(), 2, "the last good version stays");
        mirror.apply(Origin::Catalog, vec![group("web", "good again", 4)]);
        assert_eq!(mirror.refused_count(), 0);
    }

    #[test]
    fn refusals_are_bounded() {
        let mut mirror = Mirror::default();
        let bad = |i: usize| Item::catalog(&subjects::catalog(CatalogKind::Group, &format!("g{i}")).unwrap(), 1, b"x");
        mirror.apply(Origin::Catalog, (0..REFUSED_MAX + 1).map(bad).collect());
        let (named, more) = mirror.refused();
        assert_eq!((named.count(), more), (REFUSED_MAX, 1));
    }

    #[test]
    fn what_is_not_there_any_more_goes_and_what_is_equal_stays_quiet() {
        let mut mirror = Mirror::default();
        mirror.apply(Origin::Catalog, vec![group("a", "x", 1), group("b", "x", 2)]);
        mirror.apply(Origin::Registry, vec![workload("n", "w", Some(1))]);
        let events = mirror.load(Origin::Catalog, vec![group("a", "x", 9)]);
        assert_eq!(events, [Event::GroupRemoved("b".parse().unwrap())]);
        assert_eq!(mirror.load(Origin::Registry, vec![workload("n", "w", Some(1))]), []);
        // A document that cannot be read is not gone.
        let bad = Item::catalog(&subjects::catalog(CatalogKind::Group, "a").unwrap(), 10, b"x");
        assert_eq!(mirror.load(Origin::Catalog, vec![bad]), []);
    }

    #[test]
    fn subjects_of_others_are_refused_by_name() {
        for (item, name) in [
            (Item::catalog("gc.cat.nonsense.x", 1, b"x"), "gc.cat.nonsense.x"),
            (Item::catalog("gc.cat.group.a.b", 1, b"x"), "gc.cat.group.a.b"),
            (Item::registry("gc.reg.z.x", b"x"), "gc.reg.z.x"),
            (Item::registry("gc.reg.w.n.w", b"x"), "workload w on network n"),
        ] {
            assert!(matches!(item, Item::Refused(refused) if refused.name == name));
        }
        assert_eq!(Item::catalog(subjects::CATALOG_TERM, 1, b"7"), Item::Nothing);
    }

    proptest! {
        /// Whatever order things came in, what counts is what somebody who reads everything afresh would see.
        #[test]
        fn increments_equal_a_fresh_look(steps in prop::collection::vec((0..3u8, 0..3u8, prop::option::of(1..4u64)), 0..60)) {
            let (mut mirror, mut world) = (Mirror::default(), World::default());
            let mut last: BTreeMap<u8, Item> = BTreeMap::new();
            for (network, id, incarnation) in steps {
                let item = workload(&format!("n{network}"), &format!("w{id}"), incarnation);
                last.insert(id, item.clone());
                for event in mirror.apply(Origin::Registry, vec![item]) {
                    world.apply(&event);
                }
                prop_assert_eq!(&world, &mirror.world());
                let mut fresh = Mirror::default();
                fresh.load(Origin::Registry, last.values().cloned().collect());
                prop_assert_eq!(fresh.world(), mirror.world());
            }
        }
    }
}
