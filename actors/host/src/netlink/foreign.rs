//! What others have in nf_tables, and in the older iptables, that interferes with us: chains at our hooks that drop, flowtables, whose flows pass no hook, and
//! rules that write our bits of connections' marks. Only read; nothing of it is ever touched.

use std::collections::{BTreeMap, BTreeSet};
use std::io;

use serde::{Deserialize, Serialize};

use super::legacy;
use super::socket::{BRIDGE, DUMP, DUMP_ATTEMPTS_MAX, INET, NETFILTER_HEAD_BYTES, SUBSYSTEM, Transport, single};
use super::wire::{Attributes, Writer};

const GET_CHAIN: u16 = SUBSYSTEM | 4;
const GET_RULE: u16 = SUBSYSTEM | 7;
const GET_FLOWTABLE: u16 = SUBSYSTEM | 23;
const CT_MARK: u32 = 3;

/// Sentences printed of each kind; a host may have thousands of such rules, and the first few say what to look at.
pub const FOREIGN_PRINTED_MAX: usize = 50;

/// Each a sentence that names table and chain.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Foreign {
    /// What we accept may still be dropped there.
    pub drops: Vec<String>,
    /// What is offloaded there passes no hook, and so is not judged.
    pub flowtables: Vec<String>,
    /// What we stamped may lose its stamp there, or be given one.
    pub marks: Vec<String>,
    /// What the machine does not forward, whatever we accept.
    #[serde(default)]
    pub forwarding: Vec<String>,
    /// What could not be read, and why.
    pub unread: Vec<String>,
}

/// Family, table, chain.
type Place = (u8, String, String);

#[derive(Debug, Default)]
struct Seen {
    /// Hook, priority and whether it drops what no rule decides.
    bases: BTreeMap<Place, (u32, i32, bool)>,
    drops: BTreeSet<Place>,
    leads: BTreeMap<Place, BTreeSet<Place>>,
    marks: BTreeMap<Place, u32>,
    flowtables: BTreeSet<(u8, String, String, String)>,
}

pub fn read(transport: &mut Transport, own: &str, mask: u32) -> Foreign {
    let mut seen = Seen::default();
    let mut unread = Vec::new();
    let mut note = |what: &str, outcome: io::Result<()>| {
        if let Err(error) = outcome {
            unread.push(format!("{what}: {error}"));
        }
    };
    let is_own = |family: u8, attributes: Attributes<'_>| [INET, BRIDGE].contains(&family) && attributes.text(1) == Some(own);
    let mut dump = |kind, each: &mut dyn FnMut(u8, Attributes<'_>)| -> io::Result<()> {
        let request = single(kind, DUMP, &[0; NETFILTER_HEAD_BYTES], |_: &mut Writer| {});
        for _ in 0..DUMP_ATTEMPTS_MAX {
            let outcome = transport.dump_all(&request, NETFILTER_HEAD_BYTES, |head, attributes| {
                if !is_own(head[0], attributes) {
                    each(head[0], attributes);
                }
            });
            // All of these are sets: what is seen twice is there once.
            match outcome {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                outcome => return outcome,
            }
        }
        Ok(())
    };
    note("chains", dump(GET_CHAIN, &mut |family, attributes| _ = seen.chain(family, attributes)));
    note("rules", dump(GET_RULE, &mut |family, attributes| _ = seen.rule(family, attributes)));
    note("flowtables", dump(GET_FLOWTABLE, &mut |family, attributes| _ = seen.flowtable(family, attributes)));
    let mut told = seen.told(mask);
    match legacy::drops() {
        Ok(drops) => told.drops.extend(drops.into_iter().take(FOREIGN_PRINTED_MAX)),
        Err(error) => unread.push(format!("iptables (legacy): {error}")),
    }
    Foreign { unread, ..told }
}

impl Seen {
    fn chain(&mut self, family: u8, attributes: Attributes<'_>) -> Option<()> {
        const POLICY_DROP: u32 = 0;
        let place = (family, attributes.text(1)?.to_owned(), attributes.text(3)?.to_owned());
        let hook = attributes.find(4).map(Attributes)?;
        let drops = attributes.u32(5) == Some(POLICY_DROP);
        self.bases.insert(place, (hook.u32(1)?, hook.u32(2)? as i32, drops));
        Some(())
    }

    fn rule(&mut self, family: u8, attributes: Attributes<'_>) -> Option<()> {
        let table = attributes.text(1)?.to_owned();
        let place = (family, table.clone(), attributes.text(2)?.to_owned());
        // Which bits a register would write if it were written to a mark.
        let mut registers: BTreeMap<u32, u32> = BTreeMap::new();
        for (_, expression) in attributes.nested(4) {
            let expression = Attributes(expression);
            let data = expression.nested(2);
            match expression.text(1)? {
                "reject" => _ = self.drops.insert(place.clone()),
                "immediate" => match verdict(data) {
                    Some((0, _)) => _ = self.drops.insert(place.clone()),
                    Some((-4 | -3, Some(chain))) => {
                        self.leads.entry(place.clone()).or_default().insert((family, table.clone(), chain.to_owned()));
                    }
                    _ => registers.extend(data.u32(1).map(|register| (register, u32::MAX))),
                },
                "bitwise" => {
                    let value = |kind| data.nested(kind).find(1).and_then(|data| Some(u32::from_ne_bytes(*data.first_chunk()?)));
                    let bits = value(4).zip(value(5)).map_or(u32::MAX, |(mask, xor)| !mask | xor);
                    registers.extend(data.u32(2).map(|register| (register, bits)));
                }
                "ct" => {
                    if let (Some(CT_MARK), Some(register)) = (data.u32(2), data.u32(4)) {
                        *self.marks.entry(place.clone()).or_default() |= registers.get(&register).copied().unwrap_or(u32::MAX);
                    }
                }
                "target" => self.compat(&place, data),
                _ => {}
            }
        }
        Some(())
    }

    /// A target of iptables inside nf_tables.
    fn compat(&mut self, place: &Place, data: Attributes<'_>) {
        match data.text(1) {
            Some("REJECT" | "DROP") => _ = self.drops.insert(place.clone()),
            Some("CONNMARK") => {
                // The mark, the bits of it that are written, the bits of the packet's mark, and the mode: 2 writes the packet's.
                let info = data.find(3).unwrap_or_default();
                let word = |at: usize| info.get(at..at + 4).and_then(|word| Some(u32::from_ne_bytes(*word.first_chunk()?)));
                const RESTORES: u8 = 2;
                if info.get(12) != Some(&RESTORES) {
                    *self.marks.entry(place.clone()).or_default() |= word(4).unwrap_or(u32::MAX);
                }
            }
            _ => {}
        }
    }

    fn flowtable(&mut self, family: u8, attributes: Attributes<'_>) -> Option<()> {
        let devices = attributes.nested(3).nested(3).filter_map(|(_, name)| std::str::from_utf8(name).ok());
        let devices: Vec<&str> = devices.map(|name| name.trim_end_matches('\0')).collect();
        let (table, name) = (attributes.text(1)?.to_owned(), attributes.text(2)?.to_owned());
        self.flowtables.insert((family, table, name, devices.join(", ")));
        Some(())
    }

    /// Whether a chain, or one that it leads to, drops something.
    fn reaches_drop(&self, from: &Place) -> bool {
        let (mut open, mut done) = (vec![from], BTreeSet::new());
        while let Some(place) = open.pop() {
            if self.drops.contains(place) {
                return true;
            }
            if done.insert(place) {
                open.extend(self.leads.get(place).into_iter().flatten());
            }
        }
        false
    }

    fn told(&self, mask: u32) -> Foreign {
        const ARP: u8 = 3;
        let drops = self.bases.iter().filter(|((family, ..), _)| *family != ARP).filter_map(|(place, (hook, priority, policy))| {
            let how = match (policy, self.reaches_drop(place)) {
                (true, _) => "drops what it does not accept",
                (false, true) => "has rules that drop",
                (false, false) => return None,
            };
            let (family, table, chain) = place;
            Some(format!(
                "table {} {table}, chain {chain} at {} (priority {priority}) {how}: what we accept must be accepted there too",
                family_name(*family),
                hook_name(*family, *hook)
            ))
        });
        let flowtables = self.flowtables.iter().map(|(family, table, name, devices)| {
            let family = family_name(*family);
            format!("table {family} {table}, flowtable {name} ({devices}): flows offloaded there are judged no more")
        });
        let marks = self.marks.iter().filter(|(_, bits)| *bits & mask != 0).map(|((family, table, chain), bits)| {
            let (family, bits) = (family_name(*family), bits & mask);
            format!(
                "table {family} {table}, chain {chain} writes our bits {bits:#x} of connections' marks: set mark_shift to others"
            )
        });
        Foreign {
            drops: drops.take(FOREIGN_PRINTED_MAX).collect(),
            flowtables: flowtables.take(FOREIGN_PRINTED_MAX).collect(),
            marks: marks.take(FOREIGN_PRINTED_MAX).collect(),
            forwarding: Vec::new(),
            unread: Vec::new(),
        }
    }
}

/// Code and chain of an immediate verdict.
fn verdict(data: Attributes<'_>) -> Option<(i32, Option<&str>)> {
    let verdict = data.nested(2).find(2).map(Attributes)?;
    Some((verdict.u32(1)? as i32, verdict.text(2)))
}

fn family_name(family: u8) -> &'static str {
    match family {
        INET => "inet",
        2 => "ip",
        3 => "arp",
        5 => "netdev",
        7 => "bridge",
        10 => "ip6",
        _ => "?",
    }
}

fn hook_name(family: u8, hook: u32) -> &'static str {
    match (family, hook) {
        (5, 0) | (INET, 5) => "ingress",
        (5, 1) => "egress",
        (_, 0) => "prerouting",
        (_, 1) => "input",
        (_, 2) => "forward",
        (_, 3) => "output",
        (_, 4) => "postrouting",
        _ => "an unknown hook",
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{isolated, nft};
    use super::*;

    #[test]
    fn what_others_have_in_a_real_kernel_is_told() {
        isolated(|| {
            let mut transport = Transport::open().unwrap();
            assert_eq!(read(&mut transport, "gc", 0x00ff_ffff), Foreign::default());
            nft("add table inet gc; add chain inet gc ours { type filter hook input priority 0; policy drop; }");
            nft("add table ip filter; add chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }");
            nft("add table inet fw; add chain inet fw quiet { type filter hook forward priority 5; }; \
                 add chain inet fw input { type filter hook input priority 5; }; add chain inet fw a; add chain inet fw b; \
                 add rule inet fw quiet accept; add rule inet fw input jump a; add rule inet fw a goto b; \
                 add rule inet fw b tcp dport 1 drop; add rule inet fw a jump b");
            nft("add table ip6 m; add chain ip6 m every; add rule ip6 m every ct mark set 7; add chain ip6 m above; \
                 add rule ip6 m above ct mark set ct mark and 0x00ffffff or 0x05000000; add chain ip6 m ours; \
                 add rule ip6 m ours ct mark set ct mark or 0x00010000; add chain ip6 m reads; add rule ip6 m reads ct mark 5 accept");
            let told = read(&mut transport, "gc", 0x00ff_ffff);
            let begin = |list: &[String]| list.iter().map(|text| text.split(':').next().unwrap().to_owned()).collect::<Vec<_>>();
            assert_eq!(
                begin(&told.drops),
                [
                    "table inet fw, chain input at input (priority 5) has rules that drop",
                    "table ip filter, chain FORWARD at forward (priority 0) drops what it does not accept",
                ]
            );
            assert_eq!(
                begin(&told.marks),
                [
                    "table ip6 m, chain every writes our bits 0xffffff of connections' marks",
                    "table ip6 m, chain ours writes our bits 0x10000 of connections' marks",
                ]
            );
            assert_eq!((told.flowtables.len(), told.unread), (0, vec![]));
        });
    }

    #[test]
    fn flowtables_and_targets_of_iptables_are_told() {
        let mut seen = Seen::default();
        let mut writer = Writer::default();
        writer.text(1, "fast").text(2, "f").nest(3, |hook| {
            hook.u32(1, 0).u32(2, 0).nest(3, |devices| _ = devices.text(1, "eth0").text(1, "eth1"));
        });
        seen.flowtable(INET, Attributes(&writer.bytes)).unwrap();
        for (name, mode, ctmask) in [("CONNMARK", 0u8, 0xff00_0001u32), ("CONNMARK", 2, u32::MAX), ("REJECT", 0, 0)] {
            let mut writer = Writer::default();
            let mut info = [0u8; 13];
            info[4..8].copy_from_slice(&ctmask.to_ne_bytes());
            info[12] = mode;
            writer.text(1, "mangle").text(2, &format!("{name}{mode}")).nest(4, |list| {
                list.nest(1, |expression| {
                    expression.text(1, "target").nest(2, |data| _ = data.text(1, name).put(3, &info));
                });
            });
            seen.rule(2, Attributes(&writer.bytes)).unwrap();
        }
        let told = seen.told(0x00ff_ffff);
        assert!(told.flowtables[0].starts_with("table inet fast, flowtable f (eth0, eth1)"), "{told:?}");
        assert_eq!(told.marks.len(), 1);
        assert!(told.marks[0].starts_with("table ip mangle, chain CONNMARK0 writes our bits 0x1 "), "{told:?}");
        assert_eq!(seen.drops.len(), 1);
    }

    #[test]
    fn what_is_told_is_bounded() {
        let mut seen = Seen::default();
        for number in 0..=FOREIGN_PRINTED_MAX {
            seen.bases.insert((INET, "t".into(), format!("c{number}")), (0, 0, true));
        }
        assert_eq!(seen.told(1).drops.len(), FOREIGN_PRINTED_MAX);
    }
}
