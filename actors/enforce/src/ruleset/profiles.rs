//! Profiles: one for each distinct list of bindings, shared by all workloads that have it; and the scopes they jump to. Nothing but
//! jumps, so that a binding costs one jump, in its scope's chain, however many workloads are in the scope.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::doc::{Phase, Placement};
use groupcast_policy::ids::{AppId, GroupId, SpaceId, WorkloadId};
use groupcast_policy::model::Tier;
use groupcast_policy::resolve::{HostPolicy, Profile, WorkloadPolicy};
use groupcast_policy::rule::{Action, Direction};
use groupcast_policy::topic::Scope;
use xxhash_rust::xxh3::xxh3_64;

use super::Desired;
use super::workloads::Placed;
use crate::Name;
use crate::expression::{Statement, Verdict};
use crate::names::{self, View};
use crate::table::{Data, Elements, Key, Rule, SetKind};

/// What two workloads must have in common to share a profile.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProfileKey {
    pub phase: Phase,
    pub space: Option<SpaceId>,
    pub app: Option<AppId>,
    pub groups: BTreeSet<GroupId>,
    pub stateful: bool,
    /// Something of it is not synced: nothing is allowed.
    pub incomplete: bool,
}

impl ProfileKey {
    pub fn of(workload: &WorkloadPolicy<'_>, profile: &Profile) -> Self {
        let Placement { phase, space, app, groups, .. } = workload.placement;
        Self {
            phase: *phase,
            space: space.clone(),
            app: app.clone(),
            groups: groups.clone(),
            stateful: workload.stateful,
            incomplete: profile.incomplete,
        }
    }

    fn scopes(&self) -> impl Iterator<Item = (Tier, Scope)> + '_ {
        let space = self.space.clone().map(|id| (Tier::Space, Scope::Space(id)));
        let app = self.app.clone().map(|id| (Tier::App, Scope::App(id)));
        [Some((Tier::Global, Scope::Global)), space, app].into_iter().flatten()
    }

    fn view(&self) -> View {
        if self.stateful { View::Connection } else { View::Headers }
    }
}

/// Numbers of chains that are no profile's. A direction that is not enforced is open: judged, and found good. Where nothing is stamped,
/// because packets are judged by their headers, open is a plain accept.
pub const OPEN_OUT: u32 = 0;
pub const OPEN_IN: u32 = 1;
pub const PLAIN_ACCEPT: u32 = 2;
const RESERVED: u32 = 4;

/// The number under which a profile's chain of one direction is found.
pub fn number_of(profile: u32, direction: Direction) -> u32 {
    profile << 1 | u32::from(direction == Direction::Ingress)
}

/// What of a profile its workloads' elements depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    pub number: u32,
    pub stateful: bool,
}

/// The numbers of profiles. They follow from what the profile is, so that they stay when others come and go.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profiles {
    numbers: BTreeMap<ProfileKey, u32>,
    /// How many workloads have it.
    users: BTreeMap<u32, usize>,
}

impl Profiles {
    pub(super) fn of(placed: &BTreeMap<WorkloadId, Placed<'_>>) -> Self {
        let keys: BTreeSet<&ProfileKey> = placed.values().map(|workload| &workload.key).collect();
        let (mut numbers, mut taken) = (BTreeMap::new(), BTreeSet::new());
        for key in keys {
            let mut number = hash(key);
            // Two that collide take the next free number, in the order of their keys.
            while number < RESERVED || !taken.insert(number) {
                number = (number + 1) & NUMBER_MASK;
            }
            numbers.insert(key.clone(), number);
        }
        let mut users = BTreeMap::new();
        for number in placed.values().filter_map(|workload| numbers.get(&workload.key)) {
            *users.entry(*number).or_insert(0) += 1;
        }
        Self { numbers, users }
    }

    pub fn number(&self, key: &ProfileKey) -> Option<u32> {
        self.numbers.get(key).copied()
    }

    /// The profile of a workload placed like this, if another one has it already. Documents decide the rest of the key, and they are
    /// the same for both.
    pub fn find(&self, placement: &Placement) -> Option<Found> {
        let key = |last: bool| ProfileKey {
            phase: placement.phase,
            space: placement.space.clone(),
            app: placement.app.clone(),
            groups: placement.groups.clone(),
            stateful: last,
            incomplete: last,
        };
        let (key, number) = self.numbers.range(key(false)..=key(true)).next()?;
        Some(Found { number: *number, stateful: key.stateful })
    }

    pub(crate) fn join(&mut self, number: u32) {
        *self.users.entry(number).or_insert(0) += 1;
    }

    pub(crate) fn leave(&mut self, number: u32) {
        if let Some(users) = self.users.get_mut(&number) {
            *users = users.saturating_sub(1);
        }
    }

    pub fn users(&self, number: u32) -> usize {
        self.users.get(&number).copied().unwrap_or_default()
    }

    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }
}

/// A number and a side share 32 bits.
const NUMBER_MASK: u32 = u32::MAX >> 1;

fn hash(key: &ProfileKey) -> u32 {
    let optional = |id: Option<&str>| id.map_or(String::from("-"), |id| format!("={id}"));
    let mut text = format!(
        "{:?} {} {} {} {}",
        key.phase,
        optional(key.space.as_ref().map(SpaceId::as_str)),
        optional(key.app.as_ref().map(AppId::as_str)),
        key.stateful,
        key.incomplete
    );
    for group in &key.groups {
        text.push(' ');
        text.push_str(group.as_str());
    }
    (xxh3_64(text.as_bytes()) as u32) & NUMBER_MASK
}

/// The groups that chains must be written for.
pub type Used = BTreeSet<(View, GroupId)>;

pub fn write(desired: &mut Desired<'_>, policy: &HostPolicy<'_>, placed: &BTreeMap<WorkloadId, Placed<'_>>) -> Used {
    let mut used = Used::new();
    let mut scopes: BTreeMap<(View, Scope, Phase), BTreeSet<GroupId>> = BTreeMap::new();
    let mut written: BTreeSet<&ProfileKey> = BTreeSet::new();
    let mut verdicts: BTreeMap<Key, Data> = [
        (OPEN_OUT, names::sided("half", Direction::Egress)),
        (OPEN_IN, names::sided("half", Direction::Ingress)),
        (PLAIN_ACCEPT, Name::from("open")),
    ]
    .map(|(number, chain)| (Key::Number(number), Data::Verdict(Verdict::Goto(chain))))
    .into();
    for (workload, one) in placed {
        let key = &one.key;
        let Some(tiers) = policy.profile_of(workload) else { continue };
        let view = key.view();
        for (tier, scope) in key.scopes() {
            // The same app in two spaces has two lists, each without what its space already tries: the scope has both.
            scopes.entry((view, scope, key.phase)).or_default().extend(tiers.tier(tier).iter().cloned());
        }
        if written.insert(key) {
            let number = desired.profiles.number(key).unwrap_or_default();
            for direction in [Direction::Egress, Direction::Ingress] {
                let chain = names::profile(number, direction);
                let rules = profile_rules(policy, key, tiers.tier(Tier::Workload), direction);
                verdicts.insert(Key::Number(number_of(number, direction)), Data::Verdict(Verdict::Goto(chain.clone())));
                desired.put_chain(chain, rules);
            }
            if !key.incomplete {
                used.extend(tiers.tier(Tier::Workload).iter().map(|group| (view, group.clone())));
            }
        }
    }
    for ((view, scope, phase), groups) in scopes {
        for direction in [Direction::Egress, Direction::Ingress] {
            for action in [Action::Deny, Action::Allow] {
                let rules = jumps(policy, view, action, direction, groups.iter());
                desired.put_chain(names::scope(view, action, direction, &scope, phase), rules);
            }
        }
        used.extend(groups.into_iter().map(|group| (view, group)));
    }
    desired.put_set(names::profiles(), SetKind::NumberToVerdict, Elements::Keyed(verdicts));
    used
}

fn profile_rules(policy: &HostPolicy<'_>, key: &ProfileKey, own: &[GroupId], direction: Direction) -> Vec<Rule> {
    let view = key.view();
    let end = vec![Statement::goto(&names::end(view, direction))];
    if key.incomplete {
        return vec![end];
    }
    let mut rules = Vec::new();
    for action in [Action::Deny, Action::Allow] {
        for (_, scope) in key.scopes() {
            rules.push(vec![Statement::jump(&names::scope(view, action, direction, &scope, key.phase))]);
        }
        rules.extend(jumps(policy, view, action, direction, own.iter()));
    }
    rules.push(end);
    rules
}

/// Jumps to those of the groups that have something to say.
fn jumps<'g>(
    policy: &HostPolicy<'_>,
    view: View,
    action: Action,
    direction: Direction,
    groups: impl Iterator<Item = &'g GroupId>,
) -> Vec<Rule> {
    let has_rules = |group: &&GroupId| policy.groups.get(*group).is_some_and(|rules| !rules.rules(action, direction).is_empty());
    groups.filter(has_rules).map(|group| vec![Statement::jump(&names::group(view, action, direction, group))]).collect()
}
