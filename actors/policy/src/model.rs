//! The desired state: groups and templates (the catalogue), workloads (the registry), and the events that change them.
//!
//! Semantics in one place; the [`oracle`](crate::oracle) follows them word by word, the compiler must agree with it:
//!
//! - A workload *has* a group when one of the group's bindings reaches it (global, its space, its app, its id, a selector that
//!   matches its labels) for its phase, or when its registry entry names the group itself.
//! - The *members* of a group are the addresses and address pairs of all workloads that have it, and its static prefixes. A
//!   member as wide as the internet ([`is_internet`]), or cut into pieces of it ([`are_internet`]), counts only if the group says `internet_member`.
//! - In an enforced direction a packet is denied if any deny of any group of the workload matches; else allowed if any allow
//!   matches; else denied. In a direction that is not enforced everything is allowed.
//! - A rule that names a group which does not exist: an allow matches nothing, a deny matches every remote.
//! - Membership is by address: a packet does not show its network, so a member's address counts on every network.
//! - A workload id is unique. An entry that appears on another network has moved there, and a late removal from the old network
//!   is ignored.
//! - A workload is stateless only if it has a group and all its groups are stateless; stateful wins.

mod labels;
mod selector;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub use labels::{InvalidLabel, LABEL_LEN_MAX, LABELS_MAX, Labels};
pub(crate) use selector::fulfils;
pub use selector::{REQUIREMENTS_MAX, Requirement, Selector, parse_selector};

use crate::doc::{Enforced, Phase, Phases};
use crate::ids::{AppId, GroupId, HostId, NetworkId, SourceId, SpaceId, TemplateId, WorkloadId};
use crate::net::{Family, Prefix};
use crate::rule::Rule;
use crate::topic::Scope;

/// Who may edit a group: the gateway's users, or the source it comes from.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Owner {
    #[default]
    Gateway,
    Source(SourceId),
}

/// A rule as it was written: its meaning and what its author says about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupRule {
    pub rule: Rule,
    pub description: String,
}

impl From<Rule> for GroupRule {
    fn from(rule: Rule) -> Self {
        Self { rule, description: String::new() }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    Global,
    Space(SpaceId),
    App(AppId),
    Workload(WorkloadId),
    Selector(Selector),
}

impl Target {
    /// The scope above the single workload that this is, if it is one.
    pub fn scope(&self) -> Option<Scope> {
        match self {
            Target::Global => Some(Scope::Global),
            Target::Space(id) => Some(Scope::Space(id.clone())),
            Target::App(id) => Some(Scope::App(id.clone())),
            Target::Workload(_) | Target::Selector(_) => None,
        }
    }

    pub fn tier(&self) -> Tier {
        match self {
            Target::Global => Tier::Global,
            Target::Space(_) => Tier::Space,
            Target::App(_) => Tier::App,
            Target::Workload(_) | Target::Selector(_) => Tier::Workload,
        }
    }
}

/// The order in which allows are tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    Global,
    Space,
    App,
    Workload,
}

impl Tier {
    pub const ALL: [Tier; 4] = [Tier::Global, Tier::Space, Tier::App, Tier::Workload];
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Binding {
    pub target: Target,
    pub phases: Phases,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    pub id: GroupId,
    pub name: String,
    pub stateful: bool,
    pub rules: Vec<GroupRule>,
    pub bindings: Vec<Binding>,
    /// Static members. A group that is only these is an address group.
    pub members: BTreeSet<Prefix>,
    pub owner: Owner,
    /// Whether the whole internet may be a member.
    pub internet_member: bool,
    /// Only workloads that are well are members. The group's rules apply to the others all the same.
    pub healthy_members: bool,
}

impl Group {
    /// An empty group of the gateway's, named by its id.
    pub fn new(id: GroupId) -> Self {
        Self {
            name: id.to_string(),
            id,
            stateful: true,
            rules: Vec::new(),
            bindings: Vec::new(),
            members: BTreeSet::new(),
            owner: Owner::Gateway,
            internet_member: false,
            healthy_members: false,
        }
    }

    /// Its rules as they are enforced: equal ones once, and of two that differ only in `log` the one that logs.
    pub fn distinct_rules(&self) -> Vec<&Rule> {
        let mut rules: Vec<&Rule> = self.rules.iter().map(|r| &r.rule).collect();
        // `log` is the last field of the order: a rule that logs comes right after its silent twin.
        rules.sort_unstable();
        rules.dedup();
        let silent_twin = |a: &Rule, b: &Rule| !a.log && b.log && Rule { log: true, ..a.clone() } == *b;
        let mut kept: Vec<&Rule> = Vec::with_capacity(rules.len());
        for rule in rules {
            if kept.last().is_some_and(|last| rule.log && !last.log && silent_twin(last, rule)) {
                kept.pop();
            }
            kept.push(rule);
        }
        kept
    }

    /// Where it is bound, each target once with the union of its phases.
    pub fn bound(&self) -> BTreeMap<&Target, Phases> {
        let mut bound: BTreeMap<&Target, Phases> = BTreeMap::new();
        for binding in &self.bindings {
            bound.entry(&binding.target).and_modify(|p| *p = union(*p, binding.phases)).or_insert(binding.phases);
        }
        bound
    }

    /// Those of a workload's addresses and prefixes that count as members.
    pub fn admitted<'a>(&self, workload: &'a Workload) -> impl Iterator<Item = Prefix> + 'a {
        workload.members(self.internet_member)
    }

    /// Whether a workload that has the group is among its members.
    pub fn counts(&self, workload: &Workload) -> bool {
        !(self.healthy_members && workload.unhealthy)
    }
}

fn union(a: Phases, b: Phases) -> Phases {
    Phases::from_bits(a.bits() | b.bits()).unwrap_or(a)
}

/// A prefix this long or shorter is the internet: half of IPv4 (two halves are the whole) and IPv6's global unicast `2000::/3`.
const INTERNET_V4_LEN_MAX: u8 = 1;
const INTERNET_V6_LEN_MAX: u8 = 3;

pub fn is_internet(member: Prefix) -> bool {
    match member.family() {
        Family::V4 => member.len() <= INTERNET_V4_LEN_MAX,
        Family::V6 => member.len() <= INTERNET_V6_LEN_MAX,
    }
}

/// Whether these prefixes together hold as many addresses of a family as the internet: cut into pieces it is still the internet.
pub fn are_internet(members: impl IntoIterator<Item = Prefix>) -> bool {
    // Prefixes overlap only by holding one another, so the widest ones, in order, are the union.
    let mut wide: Vec<Prefix> = members.into_iter().filter(|member| !member.is_host()).collect();
    wide.sort_unstable();
    let (mut v4, mut v6, mut last) = (0_u64, 0_u128, None::<Prefix>);
    for member in wide {
        if last.is_some_and(|last| last.family() == member.family() && last.contains(member.net().addr())) {
            continue;
        }
        last = Some(member);
        match member.family() {
            Family::V4 => v4 = v4.saturating_add(1 << (32 - u32::from(member.len()))),
            Family::V6 => v6 = v6.saturating_add(1_u128.checked_shl(128 - u32::from(member.len())).unwrap_or(u128::MAX)),
        }
    }
    v4 >= 1 << (32 - INTERNET_V4_LEN_MAX) || v6 >= 1 << (128 - INTERNET_V6_LEN_MAX)
}

/// Longest path that is asked for, and longest name of a process.
pub const PROBE_BYTES_MAX: usize = 256;

/// What is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Probe {
    /// The port takes connections.
    Tcp { port: u16 },
    /// The path is answered with a status below 400.
    Http { port: u16, path: String },
    /// A process of this name runs on the host.
    Process { name: String },
}

impl Probe {
    /// Whether the text can be part of a request, and of a line in a log.
    pub fn is_plain(text: &str) -> bool {
        !text.is_empty() && text.len() <= PROBE_BYTES_MAX && text.bytes().all(|b| b.is_ascii_graphic())
    }
}

/// How a host checks that a workload is well.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthCheck {
    pub probe: Probe,
    pub interval_seconds: u32,
}

/// What a self-registering workload of a kind may be. Empty lists of spaces, apps, identities and prefixes allow none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template {
    pub id: TemplateId,
    /// What every workload of the kind is labelled with, unless it says otherwise and may.
    pub labels: Labels,
    /// The keys of labels a workload may bring itself.
    pub own_labels: BTreeSet<Arc<str>>,
    pub network: NetworkId,
    pub spaces: BTreeSet<SpaceId>,
    pub apps: BTreeSet<AppId>,
    pub phases: Phases,
    /// Where a workload's addresses must lie.
    pub prefixes: BTreeSet<Prefix>,
    /// Host identities that may use the template.
    pub identities: BTreeSet<HostId>,
    pub enforced: Option<Enforced>,
    pub health: Option<HealthCheck>,
    /// Whether a workload may have prefixes of more than one address.
    pub wide_prefixes: bool,
    /// Workloads and addresses that a host may enrol, with this template and all others together.
    pub workloads_max: u32,
    pub addresses_max: u32,
}

/// Workloads that a host may enrol, unless its template says otherwise.
pub const HOST_WORKLOADS_MAX: u32 = 2_000;
/// Addresses and prefixes of a host's workloads, unless its template says otherwise.
pub const HOST_ADDRESSES_MAX: u32 = 4_000;

impl Template {
    pub fn new(id: TemplateId, network: NetworkId) -> Self {
        Self {
            id,
            labels: Labels::default(),
            own_labels: BTreeSet::new(),
            network,
            spaces: BTreeSet::new(),
            apps: BTreeSet::new(),
            phases: Phases::RUNNING,
            prefixes: BTreeSet::new(),
            identities: BTreeSet::new(),
            enforced: None,
            health: None,
            wide_prefixes: false,
            workloads_max: HOST_WORKLOADS_MAX,
            addresses_max: HOST_ADDRESSES_MAX,
        }
    }
}

/// A registry entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Workload {
    pub id: WorkloadId,
    pub host: HostId,
    pub network: NetworkId,
    pub addresses: BTreeSet<Prefix>,
    /// Further addresses it may send from, such as Neutron's allowed address pairs. Members like its own.
    pub pairs: BTreeSet<Prefix>,
    pub labels: Labels,
    pub app: Option<AppId>,
    pub space: Option<SpaceId>,
    pub phase: Phase,
    pub template: Option<TemplateId>,
    pub incarnation: u64,
    /// `None`: as the template says, else both.
    pub enforced: Option<Enforced>,
    /// Groups that the entry names itself, as a Neutron port does. One that does not exist means nothing until it does.
    pub groups: BTreeSet<GroupId>,
    /// Its host found that it is not well.
    pub unhealthy: bool,
}

impl Workload {
    pub fn new(id: WorkloadId, host: HostId, network: NetworkId) -> Self {
        Self {
            id,
            host,
            network,
            addresses: BTreeSet::new(),
            pairs: BTreeSet::new(),
            labels: Labels::default(),
            app: None,
            space: None,
            phase: Phase::Running,
            template: None,
            incarnation: 1,
            enforced: None,
            groups: BTreeSet::new(),
            unhealthy: false,
        }
    }

    /// Everything it may send from.
    pub fn all_addresses(&self) -> impl Iterator<Item = Prefix> + '_ {
        self.addresses.iter().chain(&self.pairs).copied()
    }

    /// Those of them that are members where the internet is none, or is one. A prefix that is the internet is left out, and where the
    /// rest are the internet together, only single addresses are left.
    pub fn members(&self, internet_member: bool) -> impl Iterator<Item = Prefix> + '_ {
        let whole = move |prefix: &Prefix| internet_member || !is_internet(*prefix);
        let in_pieces = !internet_member && are_internet(self.all_addresses().filter(whole));
        self.all_addresses().filter(move |prefix| whole(prefix) && (!in_pieces || prefix.is_host()))
    }

    pub fn is_in(&self, scope: &Scope) -> bool {
        match scope {
            Scope::Global => true,
            Scope::Space(id) => self.space.as_ref() == Some(id),
            Scope::App(id) => self.app.as_ref() == Some(id),
        }
    }

    /// Its labels with those its template gives; its own win where the template lets it bring them. A template that is gone gives
    /// nothing and forbids nothing: what the entry says was checked when it was made.
    pub fn effective_labels(&self, template: Option<&Template>) -> Labels {
        let Some(template) = template else { return self.labels.clone() };
        if template.labels.is_empty() && self.labels.iter().all(|(key, _)| template.own_labels.contains(key)) {
            return self.labels.clone();
        }
        let own = self.labels.iter().filter(|(key, _)| template.own_labels.contains(*key));
        template.labels.iter().chain(own).map(|(k, v)| (k.clone(), v.clone())).collect()
    }

    pub fn effective_enforced(&self, template: Option<&Template>) -> Enforced {
        self.enforced.or(template.and_then(|t| t.enforced)).unwrap_or(Enforced::BOTH)
    }
}

/// A document and the version it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored<T> {
    pub revision: u64,
    pub value: Arc<T>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Catalogue {
    pub groups: BTreeMap<GroupId, Stored<Group>>,
    pub templates: BTreeMap<TemplateId, Stored<Template>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Registry {
    pub workloads: BTreeMap<WorkloadId, Arc<Workload>>,
}

/// One document written or removed. A slice of events is one change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Group {
        revision: u64,
        group: Arc<Group>,
    },
    GroupRemoved(GroupId),
    Template {
        revision: u64,
        template: Arc<Template>,
    },
    TemplateRemoved(TemplateId),
    Workload(Arc<Workload>),
    /// Ignored when the workload has moved to another network.
    WorkloadRemoved {
        id: WorkloadId,
        network: NetworkId,
    },
}

impl Event {
    pub fn group(group: Group) -> Self {
        Event::Group { revision: 0, group: Arc::new(group) }
    }

    pub fn template(template: Template) -> Self {
        Event::Template { revision: 0, template: Arc::new(template) }
    }

    pub fn workload(workload: Workload) -> Self {
        Event::Workload(Arc::new(workload))
    }
}

/// The whole desired state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct World {
    pub catalogue: Catalogue,
    pub registry: Registry,
}

impl World {
    pub fn apply(&mut self, event: &Event) {
        let Self { catalogue, registry } = self;
        match event {
            Event::Group { revision, group } => {
                catalogue.groups.insert(group.id.clone(), Stored { revision: *revision, value: group.clone() });
            }
            Event::GroupRemoved(id) => {
                catalogue.groups.remove(id);
            }
            Event::Template { revision, template } => {
                catalogue.templates.insert(template.id.clone(), Stored { revision: *revision, value: template.clone() });
            }
            Event::TemplateRemoved(id) => {
                catalogue.templates.remove(id);
            }
            Event::Workload(workload) => {
                registry.workloads.insert(workload.id.clone(), workload.clone());
            }
            Event::WorkloadRemoved { id, network } => {
                if registry.workloads.get(id).is_some_and(|held| held.network == *network) {
                    registry.workloads.remove(id);
                }
            }
        }
    }

    pub fn template_of(&self, workload: &Workload) -> Option<&Template> {
        workload.template.as_ref().and_then(|id| self.catalogue.templates.get(id)).map(|stored| &*stored.value)
    }

    pub fn labels_of(&self, workload: &Workload) -> Labels {
        workload.effective_labels(self.template_of(workload))
    }

    pub fn enforced_of(&self, workload: &Workload) -> Enforced {
        workload.effective_enforced(self.template_of(workload))
    }

    /// The events that build this state from nothing.
    pub fn events(&self) -> Vec<Event> {
        let groups = self.catalogue.groups.values();
        let templates = self.catalogue.templates.values();
        let groups = groups.map(|s| Event::Group { revision: s.revision, group: s.value.clone() });
        let templates = templates.map(|s| Event::Template { revision: s.revision, template: s.value.clone() });
        let workloads = self.registry.workloads.values().map(|w| Event::Workload(w.clone()));
        groups.chain(templates).chain(workloads).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::prefix_text;

    fn prefixes(list: &str) -> Vec<Prefix> {
        list.split_whitespace().map(|text| prefix_text(text).unwrap()).collect()
    }

    /// Four quarters were members where one half was not.
    #[test]
    fn the_internet_in_pieces_is_the_internet() {
        let rows = [
            ("", false),
            ("0.0.0.0/0", true),
            ("128.0.0.0/1", true),
            ("0.0.0.0/2", false),
            ("0.0.0.0/2 64.0.0.0/2", true),
            ("0.0.0.0/2 128.0.0.0/2", true),
            ("0.0.0.0/2 0.0.0.0/3 32.0.0.0/3 10.0.0.0/8", false),
            ("0.0.0.0/2 64.0.0.0/3 96.0.0.0/4 112.0.0.0/5", false),
            ("0.0.0.0/2 64.0.0.0/3 96.0.0.0/4 112.0.0.0/5 120.0.0.0/5", true),
            ("10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fd00::/8", false),
            ("2000::/3", true),
            ("2000::/4 3000::/4", true),
            ("2000::/4 4000::/5", false),
            ("::/0", true),
            ("0.0.0.0/2 2000::/4", false),
        ];
        for (list, internet) in rows {
            assert_eq!(are_internet(prefixes(list)), internet, "{list}");
        }
    }

    #[test]
    fn of_a_workload_that_is_the_internet_in_pieces_single_addresses_are_members() {
        let mut workload = Workload::new("w".parse().unwrap(), "h".parse().unwrap(), "n".parse().unwrap());
        let members = |workload: &Workload, internet| workload.members(internet).map(|p| p.to_string()).collect::<Vec<_>>();
        workload.addresses = prefixes("10.0.0.1/32 10.1.0.0/16").into_iter().collect();
        workload.pairs = prefixes("0.0.0.0/0").into_iter().collect();
        assert_eq!(members(&workload, false), ["10.0.0.1/32", "10.1.0.0/16"]);
        assert_eq!(members(&workload, true).len(), 3);
        workload.pairs = prefixes("0.0.0.0/2 64.0.0.0/2 128.0.0.0/2 192.0.0.0/2").into_iter().collect();
        assert_eq!(members(&workload, false), ["10.0.0.1/32"]);
        assert_eq!(members(&workload, true).len(), 6);
    }
}
