//! What this kernel can do, found out by trying: everything that a ruleset is made of, in one transaction whose last message is wrong
//! on purpose, so that none of it ever takes effect.

use groupcast_enforce::Name;
use groupcast_enforce::delta::{Op, Transaction};
use groupcast_enforce::expression::{Field, Statement, Test, Verdict};
use groupcast_enforce::table::{Base, Data, Elements, Hook, Key, SetKind};
use rustables::{MsgType, ProtocolFamily};

use super::socket::{Batch, Complaint, Transport};
use super::transaction::{Encoder, Handles};
use super::{FLAGS_OWNED, KernelError};

/// A feature and what it is needed for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    pub feature: &'static str,
    /// Without it nothing can be enforced.
    pub needed: bool,
    pub words: String,
}

struct Feature {
    name: &'static str,
    ops: Vec<Op>,
}

const OWNED: &str =
    "owned tables (owner and persist, kernel 6.9): others can touch our table, which is watched and repaired instead";

pub const BRIDGED: &str =
    "tables of the bridge family: a claimed interface that is given to a bridge is refused by name, but not closed there";

fn set(name: &str, kind: SetKind) -> Op {
    Op::AddSet { set: name.into(), kind }
}

fn rule(statements: Vec<Statement>) -> Op {
    Op::AddRule { chain: "c".into(), at: 0, rule: statements }
}

fn looks_at(fields: &[Field]) -> Vec<Op> {
    let tests = fields.iter().map(|field| {
        let test = if field.is_native() { Test::Masked { mask: 1, is: 0 } } else { Test::Is(0u8.into()) };
        rule(vec![Statement::Match { fields: vec![*field], test }, Statement::Counter])
    });
    tests.collect()
}

/// Sets come before the rules that look into them.
fn features() -> Vec<Feature> {
    let name = Name::from;
    let chain = |name: &str, base| Op::AddChain { chain: name.into(), base };
    let hook = |at: &str, hook, priority| chain(at, Some(Base { hook, priority }));
    let verdicts = Op::AddElements {
        set: name("numbers_to_verdicts"),
        kind: SetKind::NumberToVerdict,
        elements: Elements::Keyed([(Key::Number(1), Data::Verdict(Verdict::Goto(name("c"))))].into()),
    };
    let limit = Statement::Limit { seen: name("seen"), interface: Field::InInterface, number: 1, per_second: 5, burst: 10 };
    vec![
        Feature { name: "chains of the inet family", ops: vec![chain("c", None)] },
        Feature {
            name: "inet hooks prerouting (also before connection tracking), input, forward and output",
            ops: vec![
                hook("p", Hook::Prerouting, -310),
                hook("i", Hook::Input, 0),
                hook("f", Hook::Forward, 0),
                hook("o", Hook::Output, 0),
            ],
        },
        Feature { name: "hash sets of addresses", ops: vec![set("v4", SetKind::V4), set("v6", SetKind::V6)] },
        Feature {
            name: "interval sets",
            ops: vec![
                set("s4", SetKind::Spans4),
                set("s6", SetKind::Spans6),
                set("ports", SetKind::Ports),
                set("cl", SetKind::Claims),
            ],
        },
        Feature { name: "concatenated sets", ops: vec![set("iv4", SetKind::InterfaceV4), set("iv6", SetKind::InterfaceV6)] },
        Feature {
            name: "concatenated interval sets (kernel 5.6)",
            ops: vec![set("is4", SetKind::InterfaceSpan4), set("is6", SetKind::InterfaceSpan6)],
        },
        Feature { name: "data maps", ops: vec![set("numbers", SetKind::InterfaceToNumber)] },
        Feature { name: "verdict maps", ops: vec![set("numbers_to_verdicts", SetKind::NumberToVerdict), verdicts] },
        Feature {
            name: "two-step dispatch",
            ops: vec![rule(vec![Statement::Dispatch {
                fields: vec![Field::InInterface],
                numbers: name("numbers"),
                verdicts: name("numbers_to_verdicts"),
            }])],
        },
        Feature {
            name: "connection tracking expressions in the inet family (state, mark, direction, protocol, addresses, ports)",
            ops: looks_at(&[
                Field::CtState,
                Field::CtMark,
                Field::CtDirection,
                Field::CtProtocol,
                Field::CtSource4,
                Field::CtSource6,
                Field::CtDestination4,
                Field::CtDestination6,
                Field::CtDestinationPort,
            ]),
        },
        Feature { name: "writing connections' marks", ops: vec![rule(vec![Statement::SetMark { keep: !1, set: 1 }])] },
        Feature {
            name: "sets that packets fill, with limits (dynset)",
            ops: vec![set("seen", SetKind::Seen), rule(vec![limit])],
        },
        Feature {
            name: "logging by nflog",
            ops: vec![rule(vec![Statement::Log { prefix: "gc probe".into(), group: 5, snap_bytes: 96 }])],
        },
    ]
}

/// What is missing. Nothing is left behind, also not for a moment: the transaction cannot succeed.
pub fn run(transport: &mut Transport, table: &str) -> Result<Vec<Missing>, KernelError> {
    let mut missing = try_out(transport, &format!("{table}_probe"), features())?;
    missing.extend(table_of(transport, ProtocolFamily::Inet, FLAGS_OWNED, OWNED, &format!("{table}_probe"))?);
    missing.extend(table_of(transport, ProtocolFamily::Bridge, 0, BRIDGED, &format!("{table}_probe"))?);
    Ok(missing)
}

fn try_out(transport: &mut Transport, table: &str, features: Vec<Feature>) -> Result<Vec<Missing>, KernelError> {
    let mut of = Vec::new();
    let mut ops = Vec::new();
    for (index, feature) in features.iter().enumerate() {
        ops.extend(feature.ops.iter().cloned());
        of.resize(ops.len(), Some(index));
    }
    ops.push(Op::DeleteSet { set: "nowhere".into() });
    of.push(None);
    let encoder = Encoder { table, flags: 0, known: false, bridged: false, leftover: false };
    let encoded = encoder.encode(&Transaction { anew: false, ops }, &mut Handles::new());
    let complaints = transport.commit(encoded.batch)?.complaints;
    let mut missing: Vec<Missing> = Vec::new();
    for Complaint { message, errno, words } in complaints {
        let op = message.and_then(|message| encoded.origin.get(message).copied());
        let feature = match op {
            Some(Some(op)) => of.get(op).copied().flatten().and_then(|index| features.get(index)).map(|feature| feature.name),
            // The table itself, or the whole: then nothing can be.
            Some(None) | None => Some("tables of the inet family"),
        };
        let Some(feature) = feature else { continue };
        if missing.iter().all(|known| known.feature != feature) {
            let error = std::io::Error::from_raw_os_error(errno);
            let words = words.map_or_else(|| error.to_string(), |words| format!("{error}: {words}"));
            missing.push(Missing { feature, needed: true, words });
        }
    }
    Ok(missing)
}

/// Whether the kernel takes such a table.
fn table_of(
    transport: &mut Transport,
    family: ProtocolFamily,
    flags: u32,
    feature: &'static str,
    table: &str,
) -> Result<Option<Missing>, KernelError> {
    let mut part = rustables::Batch::new();
    let wanted = rustables::Table::new(family).with_name(table).with_flags(flags);
    let nowhere = rustables::Table::new(ProtocolFamily::Inet).with_name(format!("{table}_nowhere"));
    part.add(&wanted, MsgType::Add);
    part.add(&nowhere, MsgType::Del);
    let mut batch = Batch::default();
    batch.splice(part);
    let complaints = transport.commit(batch)?.complaints;
    let refused = complaints.iter().find(|complaint| complaint.message == Some(0));
    let words = |complaint: &Complaint| std::io::Error::from_raw_os_error(complaint.errno).to_string();
    Ok(refused.map(|complaint| Missing { feature, needed: false, words: words(complaint) }))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::tests::isolated;
    use super::*;

    #[test]
    fn this_kernel_has_everything_and_is_left_as_it_was() {
        isolated(|| {
            let mut transport = Transport::open().unwrap();
            let missing: Vec<Missing> = run(&mut transport, "gc").unwrap();
            assert!(missing.iter().all(|missing| !missing.needed), "{missing:?}");
            let listed = Command::new("nft").args(["list", "ruleset"]).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&listed.stdout), "");
        });
    }

    #[test]
    fn what_is_missing_is_named_once_and_alone() {
        isolated(|| {
            let mut transport = Transport::open().unwrap();
            let mut features = features();
            // Stands for what a kernel does not have: a jump into nothing, twice.
            let nowhere = || rule(vec![Statement::jump(&Name::from("not there"))]);
            features.insert(3, Feature { name: "jumps into nothing", ops: vec![nowhere(), nowhere()] });
            let missing = try_out(&mut transport, "gc_probe", features).unwrap();
            assert_eq!(missing.iter().map(|missing| missing.feature).collect::<Vec<_>>(), ["jumps into nothing"]);
            assert!(missing[0].needed && !missing[0].words.is_empty());
        });
    }
}
