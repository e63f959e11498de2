//! Profiles: one for each distinct list of bindings, shared by all workloads that have it; and the scopes they jump to. Nothing but
//! jumps, so that a binding costs one jump, in its scope's chain, however many workloads are in the scope.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::doc::{Content, Phase, Placement, Rules};
use groupcast_policy::ids::{AppId, GroupId, SpaceId, WorkloadId};
use groupcast_policy::needs::Documents;
use groupcast_policy::rule::{Action, Direction};
use groupcast_policy::topic::{Scope, Topic};
use xxhash_rust::xxh3::xxh3_64;

use super::Desired;
use super::workloads::Placed;
use crate::Name;
use crate::expression::{Field, STATE_RELATED, Statement, Test, Verdict};
use crate::names::{self, View};
use crate::table::{Data, Elements, Key, Rule, SetKind};

/// What two workloads must have in common to share a profile.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProfileKey {
    pub phase: Phase,
    pub space: Option<SpaceId>,
    pub app: Option<AppId>,
    pub groups: BTreeSet<GroupId>,
}

/// What the documents make of a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Stateless only if all its groups are.
    pub stateful: bool,
    /// Something of it is not synced: nothing is allowed.
    pub incomplete: bool,
}

impl Shape {
    pub fn view(self) -> View {
        if self.stateful { View::Connection } else { View::Headers }
    }
}

impl ProfileKey {
    pub fn of(placement: &Placement) -> Self {
        let Placement { phase, space, app, groups, .. } = placement;
        Self { phase: *phase, space: space.clone(), app: app.clone(), groups: groups.clone() }
    }

    pub fn scopes(&self) -> impl Iterator<Item = Scope> + '_ {
        let space = self.space.clone().map(Scope::Space);
        let app = self.app.clone().map(Scope::App);
        [Some(Scope::Global), space, app].into_iter().flatten()
    }
}

/// Numbers of chains that are no profile's. A direction that is not enforced is open: judged, and found good. Where nothing is stamped,
/// because packets are judged by their headers, open is a plain accept.
pub const OPEN_OUT: u32 = 0;
pub const OPEN_IN: u32 = 1;
pub const PLAIN_ACCEPT: u32 = 2;
const RESERVED: u32 = 4;

/// The number under which one of a profile's chains is found.
pub fn number_of(profile: u32, direction: Direction, onward: bool) -> u32 {
    profile << 2 | u32::from(onward) << 1 | u32::from(direction == Direction::Ingress)
}

/// What of a profile its workloads' elements depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    pub number: u32,
    pub stateful: bool,
}

/// A number and which of four chains it is share 32 bits.
const NUMBER_MASK: u32 = u32::MAX >> 2;

/// The numbers of profiles. They follow from what the profile is, so that they stay when others come and go.
pub fn numbers<'k>(keys: impl IntoIterator<Item = &'k ProfileKey>) -> BTreeMap<&'k ProfileKey, u32> {
    let keys: BTreeSet<&ProfileKey> = keys.into_iter().collect();
    let (mut numbers, mut taken) = (BTreeMap::new(), BTreeSet::new());
    for key in keys {
        let mut number = first_number(key);
        // Two that collide take the next free number, in the order of their keys.
        while number < RESERVED || !taken.insert(number) {
            number = (number + 1) & NUMBER_MASK;
        }
        numbers.insert(key, number);
    }
    numbers
}

/// The number of a profile that collides with no other; `None` where it would not be its own.
pub fn lone_number(key: &ProfileKey) -> Option<u32> {
    Some(first_number(key)).filter(|number| *number >= RESERVED)
}

fn first_number(key: &ProfileKey) -> u32 {
    let optional = |id: Option<&str>| id.map_or(String::from("-"), |id| format!("={id}"));
    let (space, app) = (optional(key.space.as_ref().map(SpaceId::as_str)), optional(key.app.as_ref().map(AppId::as_str)));
    let mut text = format!("{:?} {space} {app}", key.phase);
    for group in &key.groups {
        text.push(' ');
        text.push_str(group.as_str());
    }
    (xxh3_64(text.as_bytes()) as u32) & NUMBER_MASK
}

/// The groups bound to a scope for a phase; `None`: not synced.
pub fn bound(documents: &impl Documents, scope: &Scope, phase: Phase) -> Option<BTreeSet<GroupId>> {
    let document = documents.document(&Topic::Scope(scope.clone()))?;
    let Some(Content::Scope(bound)) = document.content() else { return Some(BTreeSet::new()) };
    Some(bound.iter().filter(|(_, phases)| phases.contains(phase)).map(|(group, _)| group.clone()).collect())
}

/// A group's rules; `None`: not synced, or no such group.
pub fn rules_of<'d>(documents: &'d impl Documents, group: &GroupId) -> Option<&'d Rules> {
    match documents.document(&Topic::Rules(group.clone()))?.content() {
        Some(Content::Rules(rules)) => Some(rules),
        _ => None,
    }
}

/// The four chains that a group or scope can have.
pub const CHAINS: [(Action, Direction); 4] = [
    (Action::Deny, Direction::Egress),
    (Action::Deny, Direction::Ingress),
    (Action::Allow, Direction::Egress),
    (Action::Allow, Direction::Ingress),
];

/// Which of its four chains a group has, in the order of [`CHAINS`].
pub type Has = [bool; 4];

pub fn has(rules: &Rules) -> Has {
    CHAINS.map(|(action, direction)| rules.rules.values().any(|rule| (rule.action, rule.direction) == (action, direction)))
}

/// Whether anything is denied, by direction in the order of [`SIDES`].
pub type Denies = [bool; 2];

pub fn denies_of([egress, ingress, ..]: Has) -> Denies {
    [egress, ingress]
}

/// The groups that chains must be written for.
pub type Used = BTreeSet<(View, GroupId)>;

pub fn write(desired: &mut Desired<'_>, documents: &impl Documents, placed: &BTreeMap<WorkloadId, Placed<'_>>) -> Used {
    let mut used = Used::new();
    let mut scopes: BTreeSet<(View, Scope, Phase)> = BTreeSet::new();
    let mut verdicts: BTreeMap<Key, Data> = fixed_verdicts().into();
    let profiles: BTreeMap<&ProfileKey, Shape> = placed.values().map(|one| (&one.key, one.shape)).collect();
    for (key, number) in numbers(placed.values().map(|one| &one.key)) {
        let shape = profiles[key];
        let has = |group: &GroupId| rules_of(documents, group).map(has).unwrap_or_default();
        let denies = |scope: &Scope| {
            let groups = bound(documents, scope, key.phase).unwrap_or_default();
            let all = groups.iter().map(|group| denies_of(has(group)));
            all.fold(Denies::default(), |sum, one| [sum[0] || one[0], sum[1] || one[1]])
        };
        verdicts.extend(profile_verdicts(number));
        for (name, direction, onward) in profile_chains(number) {
            let rules = match onward {
                true => onward_rules(key, number, shape, direction, has, denies),
                false => profile_rules(key, shape, shape.view(), direction, has, denies),
            };
            desired.put_chain(name, rules);
        }
        if !shape.incomplete {
            scopes.extend(key.scopes().map(|scope| (shape.view(), scope, key.phase)));
            used.extend(key.groups.iter().map(|group| (shape.view(), group.clone())));
        }
    }
    for (view, scope, phase) in scopes {
        let groups = bound(documents, &scope, phase).unwrap_or_default();
        for (index, (action, direction)) in CHAINS.into_iter().enumerate() {
            let has = |group: &&GroupId| rules_of(documents, group).is_some_and(|rules| has(rules)[index]);
            for view in view.written() {
                let rules = jumps(*view, action, direction, groups.iter().filter(has));
                desired.put_chain(names::scope(*view, action, direction, &scope, phase), rules);
            }
        }
        used.extend(groups.into_iter().map(|group| (view, group)));
    }
    desired.put_set(names::profiles(), SetKind::NumberToVerdict, Elements::Keyed(verdicts));
    used
}

fn fixed_verdicts() -> [(Key, Data); 3] {
    [(OPEN_OUT, names::stamp(Direction::Egress)), (OPEN_IN, names::stamp(Direction::Ingress)), (PLAIN_ACCEPT, Name::from("open"))]
        .map(|(number, chain)| (Key::Number(number), Data::Verdict(Verdict::Goto(chain))))
}

/// A profile's chains, whatever the documents make of it.
pub fn profile_chains(number: u32) -> [(Name, Direction, bool); 4] {
    let chain = |direction, onward| (names::profile(number, direction, onward), direction, onward);
    let [egress, ingress] = SIDES;
    [chain(egress, false), chain(ingress, false), chain(egress, true), chain(ingress, true)]
}

/// What leads to a profile's chains.
pub fn profile_verdicts(number: u32) -> [(Key, Data); 4] {
    profile_chains(number).map(|(chain, direction, onward)| {
        (Key::Number(number_of(number, direction, onward)), Data::Verdict(Verdict::Goto(chain)))
    })
}

/// For packets that go the way of their connection's first, by their headers. An error about a packet belongs to that packet's
/// connection and says nothing about it in its own headers: it is judged by the connection.
pub fn onward_rules(
    key: &ProfileKey,
    number: u32,
    shape: Shape,
    direction: Direction,
    has: impl Fn(&GroupId) -> Has,
    denies: impl Fn(&Scope) -> Denies,
) -> Vec<Rule> {
    let by_connection = Statement::goto(&names::profile(number, direction, false));
    if !shape.stateful {
        return vec![vec![by_connection]];
    }
    let is_related = Test::MaskedNot { mask: STATE_RELATED, is_not: 0 };
    let is_related = Statement::Match { fields: vec![Field::CtState], test: is_related };
    let mut rules = vec![vec![is_related, by_connection]];
    rules.extend(profile_rules(key, shape, View::Onward, direction, has, denies));
    rules
}

/// Every packet that is judged runs through this, and hardly any scope denies anything: those that do not are not asked. The first
/// deny in a scope therefore costs a jump in each of its profiles, the next ones none.
pub fn profile_rules(
    key: &ProfileKey,
    shape: Shape,
    view: View,
    direction: Direction,
    has: impl Fn(&GroupId) -> Has,
    denies: impl Fn(&Scope) -> Denies,
) -> Vec<Rule> {
    let end = vec![Statement::goto(&names::end(view, direction))];
    if shape.incomplete {
        return vec![end];
    }
    let mut rules = Vec::new();
    for (index, (action, _)) in CHAINS.into_iter().enumerate().filter(|(_, (_, of))| *of == direction) {
        let side = usize::from(direction == Direction::Ingress);
        for scope in key.scopes().filter(|scope| action == Action::Allow || denies(scope)[side]) {
            rules.push(vec![Statement::jump(&names::scope(view, action, direction, &scope, key.phase))]);
        }
        rules.extend(jumps(view, action, direction, key.groups.iter().filter(|group| has(group)[index])));
    }
    rules.push(end);
    rules
}

/// Jumps to the chains of groups, in the order of those chains' names: so the place of one is found by its name alone.
pub fn jumps<'g>(view: View, action: Action, direction: Direction, groups: impl Iterator<Item = &'g GroupId>) -> Vec<Rule> {
    let mut chains: Vec<Name> = groups.map(|group| names::group(view, action, direction, group)).collect();
    chains.sort_unstable();
    chains.iter().map(|chain| vec![Statement::jump(chain)]).collect()
}

pub const SIDES: [Direction; 2] = [Direction::Egress, Direction::Ingress];
