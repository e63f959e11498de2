//! The table as the kernel holds it.
//!
//! A dump says when somebody committed meanwhile, whoever it was. Neighbours commit all the time, so a dump that was disturbed is taken
//! again until one is not, or two in a row are the same: nobody but us writes our table.
//!
//! Of the elements of a hash set it does not say everything: the kernel grows the table behind a set in the background, and a dump of
//! several datagrams that meets this skips elements or shows them twice, without a word. So such a dump is believed only if it holds
//! each element once and as many as the kernel counts, or, where the kernel does not tell (before 6.16), if two in a row agree.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use groupcast_enforce::table::{Base, Chain, Hook, Rule, Set, SetKind, Table};
use groupcast_enforce::{Name, names};

use super::Counted;
use super::expressions::{counter_of, read_rule, settle_icmp};
use super::sets::{WireElement, from_wire, is_hashed, read_kind};
use super::socket::{BRIDGE, DUMP_ATTEMPTS_MAX, INET, Transport};
use super::transaction::Handle;
use super::wire::{Attributes, Writer};

const GET_TABLE: u8 = 1;
const GET_CHAIN: u8 = 4;
const GET_RULE: u8 = 7;
const GET_SET: u8 = 10;
const GET_ELEMENT: u8 = 13;
/// How many elements a set holds, told since 6.16.
const SET_COUNT: u16 = 20;

/// A dump of so few elements fits into one datagram, whatever they are, and is made in one go.
const ONE_DATAGRAM_ELEMENTS_MAX: usize = 20;
/// Growing the table behind a set takes the kernel less than this for each hundred thousand elements.
const GROWING_PAUSE: Duration = Duration::from_millis(5);

/// A table of our name that is not what we would write: its parts that are not understood.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Strange(pub Vec<String>);

pub struct Read {
    pub table: Table,
    pub strange: Strange,
    /// Whether there is a table of the bridge family too.
    pub bridged: bool,
}

/// Takes a dump until it can be believed.
fn settled<T: PartialEq + Default>(
    transport: &mut Transport,
    (family, kind): (u8, u8),
    ask: impl Fn(&mut Writer),
    each: impl Fn(&mut T, Attributes<'_>),
) -> io::Result<T> {
    let mut before: Option<T> = None;
    for _ in 0..DUMP_ATTEMPTS_MAX {
        let mut now = T::default();
        match transport.dump(family, kind, &ask, |_, attributes| each(&mut now, attributes)) {
            Ok(()) => return Ok(now),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                if before.as_ref() == Some(&now) {
                    return Ok(now);
                }
                before = Some(now);
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!("a dump was disturbed {DUMP_ATTEMPTS_MAX} times: somebody commits to nftables without a pause")))
}

/// The flags of our table of a family, if it is there.
pub fn table_flags(transport: &mut Transport, family: u8, name: &str) -> io::Result<Option<u32>> {
    settled(
        transport,
        (family, GET_TABLE),
        |_| {},
        |found: &mut Option<u32>, attributes| {
            if attributes.text(1) == Some(name) {
                *found = Some(attributes.u32(2).unwrap_or_default());
            }
        },
    )
}

pub fn handles(transport: &mut Transport, table: &str, chain: &str) -> io::Result<Vec<Handle>> {
    let ask = |writer: &mut Writer| _ = writer.text(1, table).text(2, chain);
    let family = if names::is_of_bridge(chain) { BRIDGE } else { INET };
    settled(transport, (family, GET_RULE), ask, |handles: &mut Vec<Handle>, attributes| {
        if attributes.text(1) == Some(table) && attributes.text(2) == Some(chain) {
            handles.extend(attributes.u64(3).map(Handle::Kernel));
        }
    })
}

pub fn counters(transport: &mut Transport, table: &str) -> io::Result<Vec<Counted>> {
    let ask = |writer: &mut Writer| _ = writer.text(1, table);
    let mut found: BTreeMap<(Name, usize), (u64, u64)> = BTreeMap::new();
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    // Numbers move while they are read: a dump that was disturbed is as good as another.
    let outcome = transport.dump(INET, GET_RULE, ask, |_, attributes| {
        let (Some(of), Some(chain)) = (attributes.text(1), attributes.text(2)) else { return };
        if of != table {
            return;
        }
        let place = places.entry(chain.to_owned()).or_default();
        let at = *place;
        *place += 1;
        if let Some((packets, bytes)) = counter_of(attributes.nested(4)) {
            let sum = found.entry((names::counted(chain), at)).or_default();
            *sum = (sum.0 + packets, sum.1 + bytes);
        }
    });
    match outcome {
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => {
            let counted =
                |((chain, at), (packets, bytes)): ((Name, usize), _)| Counted { chain: chain.to_string(), at, packets, bytes };
            Ok(found.into_iter().map(counted).collect())
        }
    }
}

#[derive(Default, PartialEq)]
struct Listed {
    chains: BTreeMap<Name, Option<Base>>,
    strange: Vec<String>,
}

pub fn table(transport: &mut Transport, name: &str) -> io::Result<Option<Read>> {
    if table_flags(transport, INET, name)?.is_none() {
        return Ok(None);
    }
    let mut read = Read { table: Table::default(), strange: Strange::default(), bridged: false };
    read_family(transport, INET, name, &mut read)?;
    read.bridged = table_flags(transport, BRIDGE, name)?.is_some();
    if read.bridged {
        read_family(transport, BRIDGE, name, &mut read)?;
    }
    Ok(Some(read))
}

fn read_family(transport: &mut Transport, family: u8, name: &str, into: &mut Read) -> io::Result<()> {
    let Read { table, strange: Strange(strange), .. } = into;
    let is_misplaced = |name: &str| names::is_of_bridge(name) != (family == BRIDGE);
    let of_table = |writer: &mut Writer| _ = writer.text(1, name);

    let listed: Listed = settled(transport, (family, GET_CHAIN), of_table, |listed: &mut Listed, attributes| {
        let (Some(of), Some(chain)) = (attributes.text(1), attributes.text(3)) else { return };
        if of != name {
            return;
        }
        match base_of(family, attributes) {
            Ok(base) if !is_misplaced(chain) => _ = listed.chains.insert(chain.into(), base),
            _ => listed.strange.push(format!("chain {chain}")),
        }
    })?;
    strange.extend(listed.strange);
    for (chain, base) in listed.chains {
        table.chains.insert(chain, Chain { base, rules: Vec::new() });
    }

    type Rules = Vec<(String, Option<Rule>)>;
    let rules: Rules = settled(transport, (family, GET_RULE), of_table, |rules: &mut Rules, attributes| {
        if attributes.text(1) == Some(name) {
            let mut rule = read_rule(attributes.nested(4));
            rule.iter_mut().for_each(settle_icmp);
            rules.push((attributes.text(2).unwrap_or_default().to_owned(), rule));
        }
    })?;
    for (chain, rule) in rules {
        match (table.chains.get_mut(chain.as_str()), rule) {
            (Some(held), Some(rule)) => held.rules.push(rule),
            (_, None) => strange.push(format!("a rule in chain {chain}")),
            (None, _) => strange.push(format!("rules of chain {chain}")),
        }
    }

    type Sets = Vec<(String, Option<SetKind>, Option<u32>)>;
    let sets: Sets = settled(transport, (family, GET_SET), of_table, |sets: &mut Sets, attributes| {
        if let (Some(of), Some(set)) = (attributes.text(1), attributes.text(2))
            && of == name
        {
            sets.push((set.to_owned(), read_kind(attributes), attributes.u32(SET_COUNT)));
        }
    })?;
    for (set, kind, count) in sets {
        let Some(kind) = kind.filter(|_| !is_misplaced(&set)) else {
            strange.push(format!("set {set}"));
            continue;
        };
        match elements(transport, family, name, &set, kind, count)?.and_then(|elements| from_wire(kind, &elements)) {
            Some(elements) => _ = table.sets.insert(set.as_str().into(), Set { kind, elements }),
            None => strange.push(format!("elements of set {set}")),
        }
    }
    Ok(())
}

/// The elements of one set; `None`: one of them is not understood. `count`: how many the kernel says there are.
fn elements(
    transport: &mut Transport,
    family: u8,
    table: &str,
    set: &str,
    kind: SetKind,
    count: Option<u32>,
) -> io::Result<Option<Vec<WireElement>>> {
    type Found = Vec<Option<WireElement>>;
    let ask = |writer: &mut Writer| _ = writer.text(1, table).text(2, set);
    let mut before: Option<Found> = None;
    for _ in 0..DUMP_ATTEMPTS_MAX {
        let mut found: Found = settled(transport, (family, GET_ELEMENT), ask, |found: &mut Found, attributes| {
            found.extend(attributes.nested(3).map(|(_, element)| WireElement::read(Attributes(element))));
        })?;
        if !is_hashed(kind) || found.len() <= ONE_DATAGRAM_ELEMENTS_MAX && count.is_none() {
            return Ok(found.into_iter().collect());
        }
        found.sort_unstable();
        let each_once = found.windows(2).all(|pair| pair[0] != pair[1]);
        let complete = match count {
            Some(count) => usize::try_from(count) == Ok(found.len()),
            None => before.as_ref() == Some(&found),
        };
        if each_once && complete {
            return Ok(found.into_iter().collect());
        }
        before = Some(found);
        std::thread::sleep(GROWING_PAUSE);
    }
    Err(io::Error::other(format!("set {set} could not be read: {DUMP_ATTEMPTS_MAX} dumps of it were incomplete")))
}

/// An error: a base chain that is none of ours.
fn base_of(family: u8, chain: Attributes<'_>) -> Result<Option<Base>, ()> {
    let Some(hook) = chain.find(4).map(Attributes) else { return Ok(None) };
    let Some(number) = hook.u32(1) else { return Ok(None) };
    let hook_point = match (family, number) {
        (INET, 0) => Hook::Prerouting,
        (INET, 1) => Hook::Input,
        (INET, 2) => Hook::Forward,
        (INET, 3) => Hook::Output,
        (BRIDGE, 0) => Hook::PortIn,
        (BRIDGE, 4) => Hook::PortOut,
        _ => return Err(()),
    };
    let priority = hook.u32(2).ok_or(())? as i32;
    const POLICY_ACCEPT: u32 = 1;
    if chain.u32(5) != Some(POLICY_ACCEPT) || chain.text(7) != Some("filter") {
        return Err(());
    }
    Ok(Some(Base { hook: hook_point, priority }))
}
