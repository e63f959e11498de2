//! The names of everything in our table, made in one place; and what a name says about the object, so that a table read back from the
//! kernel is understood like one that was built.
//!
//! | name | what it is |
//! |---|---|
//! | `b_…` | where packets come in; `b_forward_…` with the fast path |
//! | `j_out`, `j_in` | the two judges: the policy of the flow's original sender, and of its original receiver |
//! | `p_N_out`, `p_N_o_out` | profile N: jumps to the denies, then to the allows, then the end; `o`: for packets that go onward |
//! | `sd_…`, `sa_…` | denies and allows of a scope: one jump for each group bound there |
//! | `d_…`, `a_…` | denies and allows of a group |
//! | `br_…` | in a table of the bridge family and of the same name: what closes claimed interfaces that belong to a bridge |
//! | `st_…` | what knows the stamp: the fast path, and what each judge writes on the flows it accepts |
//! | `x_…` | a refusal that knows what it logs |
//! | `m4_G`, `n4_G` | members of group G: addresses, ranges |
//! | `addr4_H`, `ports_H` | addresses and ports written in rules, named by a hash of their content, so that equal ones exist once |

use std::fmt;
use std::sync::LazyLock;

use groupcast_policy::doc::{Phase, RuleKey};
use groupcast_policy::ids::GroupId;
use groupcast_policy::net::Family;
use groupcast_policy::rule::{Action, Direction};
use groupcast_policy::topic::Scope;
use sha2::{Digest, Sha256};

use crate::Name;

/// The side of a chain: `out` judges a sender's egress, `in` a receiver's ingress.
pub fn side(direction: Direction) -> &'static str {
    match direction {
        Direction::Egress => "out",
        Direction::Ingress => "in",
    }
}

/// What rules look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum View {
    /// The connection, whose tuple is the same for packets of both directions.
    Connection,
    /// The packet's own headers, in its own direction.
    Headers,
    /// The headers of a packet that goes the way of its connection's first: they say what the connection's tuple says, and are read
    /// several times faster. Most packets that are judged are such.
    Onward,
}

impl View {
    fn letter(self) -> char {
        match self {
            View::Connection => 'c',
            View::Headers => 'h',
            View::Onward => 'o',
        }
    }

    /// The views that chains are written in, for workloads whose packets are judged in this one.
    pub fn written(self) -> &'static [View] {
        match self {
            View::Connection => &[View::Connection, View::Onward],
            View::Headers => &[View::Headers],
            View::Onward => &[View::Onward],
        }
    }

    /// Refusal knows both directions of a connection anyway.
    fn of_refusal(self) -> View {
        if self == View::Onward { View::Connection } else { self }
    }
}

fn name(text: fmt::Arguments<'_>) -> Name {
    Name::from(text.to_string())
}

const CURRENT: &str = "cur";
const HELD: &str = "held";
const BRIDGE: &str = "br_";
const FORWARD_OUT: &str = "b_forward_out";
const FORWARD_IN: &str = "b_forward_in";
const AUDITED: &str = "audited";
const AUDITED4: &str = "audited4";
const AUDITED6: &str = "audited6";
const SEEN: &str = "seen";
const PROFILES: &str = "profiles";

/// Made once: they stand in every transaction.
macro_rules! fixed {
    ($($(#[$doc:meta])* $function:ident = $text:expr),* $(,)?) => { $(
        $(#[$doc])*
        pub fn $function() -> Name {
            static NAME: LazyLock<Name> = LazyLock::new(|| Name::from($text));
            NAME.clone()
        }
    )* };
}

fixed! {
    /// Current stamp → accept, in tables of before the stamps stood in rules only.
    current = CURRENT,
    claims = "claims",
    /// Interfaces that have had a claimed name, by number.
    held = HELD,
    port_claims = "br_claims",
    port_in = "br_in",
    port_out = "br_out",
    /// Interfaces of workloads in audit mode; looked at only when something is about to be denied.
    audited = AUDITED,
    audited4 = AUDITED4,
    audited6 = AUDITED6,
    /// What was logged lately.
    seen = SEEN,
    /// Number of a profile and side → its chain.
    profiles = PROFILES,
    /// Which source addresses an interface may send from.
    source4 = "src4",
    source6 = "src6",
    source_span4 = "src4n",
    source_span6 = "src6n",
    /// The addresses of workloads, each beside itself.
    same4 = "same4",
    same6 = "same6",
    /// Who sends an error about a flow.
    related = "rel",
    /// What is forwarded and has no stamp, on its way to the judge of senders.
    unstamped_out = "f_out",
    /// What is stamped, on its way out by an interface that it may not have been judged for.
    bound = "bound",
    /// What the machine itself sends, past the fast path.
    local_out = "l_out",
    audit = "audit",
    no_connection = "nct",
    infrastructure_in = "infra_i",
    infrastructure_out = "infra_o",
    spoof = "b_spoof",
    /// What comes from an address of its own.
    own4 = "own4",
    own6 = "own6",
    /// The fast path of what is not forwarded: accepts what carries the current stamp, fully judged.
    fast = "st_fast",
    forward_out = FORWARD_OUT,
    forward_in = FORWARD_IN,
    stamp_out = "st_out",
    stamp_in = "st_in",
}

/// Whether it is in the table of the bridge family.
pub fn is_of_bridge(name: &str) -> bool {
    name.starts_with(BRIDGE)
}

/// The chain that stamps what its judge has accepted, and accepts it.
pub fn stamp(direction: Direction) -> Name {
    match direction {
        Direction::Egress => stamp_out(),
        Direction::Ingress => stamp_in(),
    }
}

/// Where a judge meets what is forwarded.
pub fn forward(direction: Direction) -> Name {
    match direction {
        Direction::Egress => forward_out(),
        Direction::Ingress => forward_in(),
    }
}

pub fn sided(stem: &str, direction: Direction) -> Name {
    name(format_args!("{stem}_{}", side(direction)))
}

/// The plain maps of the first step. `reply`: for packets in reply direction. `keyed` by interface, or by interface and address.
pub fn dispatch(direction: Direction, reply: bool, keyed: Keyed) -> Name {
    let keyed = match keyed {
        Keyed::Interface => "",
        Keyed::Address(Family::V4) => "4",
        Keyed::Address(Family::V6) => "6",
    };
    name(format_args!("w{keyed}_{}_{}", side(direction), if reply { 'r' } else { 'o' }))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Keyed {
    Interface,
    Address(Family),
}

pub fn members(group: &GroupId, family: Family) -> Name {
    name(format_args!("m{}_{group}", digit(family)))
}

/// Whether it is a set of members that are single addresses, of which there may be very many.
pub fn is_members(name: &str) -> bool {
    name.starts_with("m4_") || name.starts_with("m6_")
}

pub fn member_spans(group: &GroupId, family: Family) -> Name {
    name(format_args!("n{}_{group}", digit(family)))
}

pub fn addresses(family: Family, content: &[u8]) -> Name {
    name(format_args!("addr{}_{}", digit(family), content_hash(content)))
}

pub fn ports(content: &[u8]) -> Name {
    name(format_args!("ports_{}", content_hash(content)))
}

/// Of what a set holds. Those who write rules choose it, and two rules that name one set look into the same: so no two contents with one
/// hash may be found on purpose either. All of it, because half of it would be found with the work of a quarter.
fn content_hash(content: &[u8]) -> String {
    Sha256::digest(content).iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

fn digit(family: Family) -> char {
    match family {
        Family::V4 => '4',
        Family::V6 => '6',
    }
}

pub fn group(view: View, action: Action, direction: Direction, group: &GroupId) -> Name {
    let letter = if action == Action::Deny { 'd' } else { 'a' };
    name(format_args!("{letter}_{}_{group}_{}", view.letter(), side(direction)))
}

/// The chain under which it is told what a rule has met: that allows of a connection are written in two views, line for line, is
/// nobody's business.
pub fn counted(chain: &str) -> Name {
    match chain.strip_prefix("a_o_") {
        Some(rest) => name(format_args!("a_c_{rest}")),
        None => Name::from(chain),
    }
}

pub fn refusal(view: View, direction: Direction, group: &GroupId, rule: RuleKey) -> Name {
    name(format_args!("x_{}_{group}_{:016x}_{}", view.of_refusal().letter(), rule.0, side(direction)))
}

/// Where a profile ends: nothing allowed it.
pub fn end(view: View, direction: Direction) -> Name {
    name(format_args!("end_{}_{}", view.of_refusal().letter(), side(direction)))
}

pub fn deny(view: View, direction: Direction) -> Name {
    name(format_args!("deny_{}_{}", view.of_refusal().letter(), side(direction)))
}

pub fn scope(view: View, action: Action, direction: Direction, scope: &Scope, phase: Phase) -> Name {
    let letter = if action == Action::Deny { 'd' } else { 'a' };
    let phase = if phase == Phase::Running { 'r' } else { 's' };
    let view = view.letter();
    let side = side(direction);
    match scope {
        Scope::Global => name(format_args!("s{letter}_{phase}{view}_global_{side}")),
        Scope::Space(id) => name(format_args!("s{letter}_{phase}{view}_s_{id}_{side}")),
        Scope::App(id) => name(format_args!("s{letter}_{phase}{view}_a_{id}_{side}")),
    }
}

/// `onward`: for packets that go the way of their connection's first, where the connection is judged.
pub fn profile(number: u32, direction: Direction, onward: bool) -> Name {
    let onward = if onward { "_o" } else { "" };
    name(format_args!("p_{number:08x}{onward}_{}", side(direction)))
}

/// What a change of an object means for flows that were already judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// More of it allows more, less of it less.
    Allows,
    /// More of it denies more, less of it less.
    Denies,
    /// Nothing but jumps to both.
    Profile,
    /// Decides nothing, or nothing that a flow keeps: logs, counters, what is not reached without a profile.
    Neutral,
    /// Which of the two it is depends on the rules that name it.
    Named,
    /// The stamp itself.
    Stamp,
    /// Anything else: whatever changes, every flow is judged again.
    Frame,
}

pub fn chain_role(name: &str) -> Role {
    let beginnings = [
        ("a_", Role::Allows),
        ("sa_", Role::Allows),
        ("d_", Role::Denies),
        ("sd_", Role::Denies),
        ("p_", Role::Profile),
        ("x_", Role::Neutral),
        (BRIDGE, Role::Neutral),
        ("st_", Role::Stamp),
        (FORWARD_OUT, Role::Stamp),
        (FORWARD_IN, Role::Stamp),
    ];
    beginnings.iter().find(|(beginning, _)| name.starts_with(beginning)).map_or(Role::Frame, |(_, role)| *role)
}

pub fn set_role(name: &str) -> Role {
    match name {
        CURRENT => return Role::Stamp,
        // An interface is held while its name is claimed, which closes it anyway.
        PROFILES | SEEN | HELD => return Role::Neutral,
        AUDITED | AUDITED4 | AUDITED6 => return Role::Allows,
        _ => {}
    }
    if is_of_bridge(name) {
        return Role::Neutral;
    }
    let named = ["m4_", "m6_", "n4_", "n6_", "addr4_", "addr6_", "ports_"];
    if named.iter().any(|beginning| name.starts_with(beginning)) { Role::Named } else { Role::Frame }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roles_are_read_from_names() {
        let id = GroupId::new("global_out").unwrap();
        let (egress, deny) = (Direction::Egress, Action::Deny);
        let rows = [
            (group(View::Connection, deny, egress, &id), Role::Denies),
            (group(View::Headers, Action::Allow, egress, &id), Role::Allows),
            (scope(View::Headers, Action::Allow, egress, &Scope::Global, Phase::Running), Role::Allows),
            (scope(View::Headers, deny, egress, &Scope::Global, Phase::Staging), Role::Denies),
            (profile(1, egress, true), Role::Profile),
            (refusal(View::Connection, egress, &id, RuleKey(1)), Role::Neutral),
            (end(View::Connection, egress), Role::Frame),
            (super::deny(View::Connection, egress), Role::Frame),
            (audit(), Role::Frame),
            (stamp(egress), Role::Stamp),
            (fast(), Role::Stamp),
            (forward(egress), Role::Stamp),
            (sided("b_input", egress), Role::Frame),
            (sided("j", egress), Role::Frame),
            (spoof(), Role::Frame),
            (related(), Role::Frame),
            (port_in(), Role::Neutral),
            (bound(), Role::Frame),
            (unstamped_out(), Role::Frame),
            (local_out(), Role::Frame),
        ];
        for (name, role) in rows {
            assert_eq!(chain_role(&name), role, "{name}");
        }
        let rows = [
            (members(&id, Family::V4), Role::Named),
            (addresses(Family::V6, &[1]), Role::Named),
            (ports(&[1]), Role::Named),
            (claims(), Role::Frame),
            (held(), Role::Neutral),
            (port_claims(), Role::Neutral),
            (source_span4(), Role::Frame),
            (same6(), Role::Frame),
            (dispatch(egress, true, Keyed::Address(Family::V4)), Role::Frame),
            (profiles(), Role::Neutral),
            (current(), Role::Stamp),
            (audited4(), Role::Allows),
        ];
        for (name, role) in rows {
            assert_eq!(set_role(&name), role, "{name}");
        }
    }

    #[test]
    fn names_of_the_longest_ids_fit_the_kernel() {
        const NAME_LEN_MAX: usize = 255;
        let id = GroupId::new(&"g".repeat(groupcast_policy::ids::ID_LEN_MAX)).unwrap();
        assert!(refusal(View::Connection, Direction::Egress, &id, RuleKey(u64::MAX)).len() <= NAME_LEN_MAX);
        assert!(addresses(Family::V6, &[1]).len() <= NAME_LEN_MAX);
    }
}
