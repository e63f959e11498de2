//! Chains of the older iptables that drop: they are hooked in beside nf_tables, and nothing of nf_tables tells of them. Asked of the kernel by
//! the socket option that iptables-legacy uses itself, and only about tables that are there: to ask about another would make it.

use std::collections::BTreeSet;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::AsRawFd;

use nix::libc;

const GET_INFO: i32 = 64;
const GET_ENTRIES: i32 = 65;
const NAME_BYTES: usize = 32;
/// Name, valid hooks, entries and underflows of five hooks, count, size.
const INFO_BYTES: usize = 84;
/// Name and size, and what aligns the counters of the first entry.
const ENTRIES_HEAD_BYTES: usize = 40;
/// A larger table than anybody has.
const TABLE_BYTES_MAX: usize = 64 << 20;
/// Somebody may change the table between the two questions.
const ATTEMPTS_MAX: usize = 5;
const HOOKS: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

#[derive(Debug, Clone, Copy)]
struct Family {
    program: &'static str,
    names: &'static str,
    level: i32,
    /// Of an entry, where it says where its target is; two bytes on, where the next entry is.
    target_at: usize,
}

const V4: Family =
    Family { program: "iptables", names: "/proc/thread-self/net/ip_tables_names", level: libc::IPPROTO_IP, target_at: 88 };
const V6: Family =
    Family { program: "ip6tables", names: "/proc/thread-self/net/ip6_tables_names", level: libc::IPPROTO_IPV6, target_at: 140 };

/// A sentence for each chain that drops something.
pub fn drops() -> io::Result<Vec<String>> {
    let mut told = Vec::new();
    for family in [V4, V6] {
        let names = match std::fs::read_to_string(family.names) {
            Ok(names) => names,
            // Not in this kernel.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for table in names.lines().filter(|name| !name.is_empty() && name.len() < NAME_BYTES) {
            let Some(held) = read(family, table)? else { continue };
            told.extend(held.drops().into_iter().map(|(hook, how)| {
                let program = family.program;
                format!("{program} (legacy), table {table}, chain {hook} {how}: what we accept must be accepted there too")
            }));
        }
    }
    Ok(told)
}

/// A table as the kernel hands it over.
struct Held {
    target_at: usize,
    valid_hooks: u32,
    hook_entries: [u32; 5],
    underflows: [u32; 5],
    entries: Vec<u8>,
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn half(bytes: &[u8], at: usize) -> Option<usize> {
    Some(usize::from(u16::from_ne_bytes(*bytes.get(at..)?.first_chunk()?)))
}

/// `None`: it is gone.
fn read(family: Family, table: &str) -> io::Result<Option<Held>> {
    let socket = match family.level {
        libc::IPPROTO_IPV6 => UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?,
        _ => UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?,
    };
    for _ in 0..ATTEMPTS_MAX {
        let mut info = vec![0; INFO_BYTES];
        info[..table.len()].copy_from_slice(table.as_bytes());
        match option(&socket, family.level, GET_INFO, &mut info) {
            Ok(()) => {}
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            Err(error) => return Err(error),
        }
        let strange = || io::Error::other("an answer that is not understood");
        let five = |at: usize| -> Option<[u32; 5]> {
            let words: Vec<u32> = (0..5).map_while(|index| word(&info, at + 4 * index)).collect();
            words.try_into().ok()
        };
        let valid_hooks = word(&info, 32).ok_or_else(strange)?;
        let (hook_entries, underflows) = five(36).zip(five(56)).ok_or_else(strange)?;
        let size = word(&info, 80).ok_or_else(strange)? as usize;
        if size > TABLE_BYTES_MAX {
            return Err(io::Error::other(format!("table {table} has {size} bytes, at most {TABLE_BYTES_MAX} are looked at")));
        }
        let mut all = vec![0; ENTRIES_HEAD_BYTES + size];
        all[..table.len()].copy_from_slice(table.as_bytes());
        all[NAME_BYTES..NAME_BYTES + 4].copy_from_slice(&(size as u32).to_ne_bytes());
        match option(&socket, family.level, GET_ENTRIES, &mut all) {
            Ok(()) => {
                let entries = all.split_off(ENTRIES_HEAD_BYTES);
                return Ok(Some(Held { target_at: family.target_at, valid_hooks, hook_entries, underflows, entries }));
            }
            // Of another size by now.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINVAL)) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!("table {table} changes all the time")))
}

/// What the standard library and `nix` offer knows no options whose size is only known at run time.
#[allow(unsafe_code)]
fn option(socket: &UdpSocket, level: i32, name: i32, bytes: &mut [u8]) -> io::Result<()> {
    let mut length = bytes.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to where `bytes` begins, which has that many and outlives the call.
    let outcome = unsafe { libc::getsockopt(socket.as_raw_fd(), level, name, bytes.as_mut_ptr().cast(), &mut length) };
    if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the target of an entry does.
#[derive(Debug, PartialEq, Eq)]
enum Does {
    Drop,
    Jump(usize),
    /// The beginning of another chain, or the end of all.
    Ends,
    Other,
}

impl Held {
    /// What the entry there does, and where the next one is.
    fn entry(&self, at: usize) -> Option<(Does, usize)> {
        const DATA_AT: usize = 32;
        const DROP: i32 = -1;
        let entry = self.entries.get(at..)?;
        let (target_at, next) = (half(entry, self.target_at)?, half(entry, self.target_at + 2)?);
        let target = entry.get(target_at..)?;
        let name = target.get(2..31)?.split(|byte| *byte == 0).next()?;
        let does = match name {
            b"" => match i32::from_ne_bytes(*target.get(DATA_AT..)?.first_chunk()?) {
                DROP => Does::Drop,
                verdict => usize::try_from(verdict).map_or(Does::Other, Does::Jump),
            },
            b"REJECT" | b"DROP" | b"TARPIT" => Does::Drop,
            b"ERROR" => Does::Ends,
            _ => Does::Other,
        };
        (next > 0).then_some((does, at.checked_add(next)?))
    }

    /// Whether a rule from here to the end of its chain drops, or leads to one that does.
    fn reaches_drop(&self, from: usize, before: usize) -> bool {
        let (mut open, mut done) = (vec![(from, before)], BTreeSet::new());
        while let Some((mut at, before)) = open.pop() {
            if !done.insert(at) {
                continue;
            }
            while at < before {
                match self.entry(at) {
                    Some((Does::Drop, _)) => return true,
                    Some((Does::Jump(to), next)) => {
                        open.push((to, self.entries.len()));
                        at = next;
                    }
                    Some((Does::Other, next)) => at = next,
                    Some((Does::Ends, _)) | None => break,
                }
            }
        }
        false
    }

    fn drops(&self) -> Vec<(&'static str, &'static str)> {
        let hooks = HOOKS.iter().enumerate().filter(|(hook, _)| self.valid_hooks & 1 << hook != 0);
        let told = hooks.filter_map(|(hook, name)| {
            let (first, policy) = (self.hook_entries[hook] as usize, self.underflows[hook] as usize);
            if matches!(self.entry(policy), Some((Does::Drop, _))) {
                return Some((*name, "drops what it does not accept"));
            }
            self.reaches_drop(first, policy).then_some((*name, "has rules that drop"))
        });
        told.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::isolated;
    use super::*;

    /// To look must not make a table that was not there: its hooks would cost every packet.
    #[test]
    fn to_look_makes_no_table() {
        isolated(|| {
            assert_eq!(drops().unwrap(), [""; 0]);
            for family in [V4, V6] {
                assert_eq!(std::fs::read_to_string(family.names).unwrap_or_default(), "", "{}", family.program);
            }
        });
    }

    /// Whatever bytes there are, it ends.
    #[test]
    fn damaged_tables_are_read_to_an_end() {
        let mut entry = vec![0u8; 112 + 40];
        entry[88..90].copy_from_slice(&112u16.to_ne_bytes());
        entry[90..92].copy_from_slice(&152u16.to_ne_bytes());
        // A jump to itself.
        entry[112 + 32..112 + 36].copy_from_slice(&0i32.to_ne_bytes());
        let held =
            |entries: Vec<u8>| Held { target_at: 88, valid_hooks: 31, hook_entries: [0; 5], underflows: [152; 5], entries };
        assert!(held(entry.clone()).drops().is_empty());
        let mut standing = entry.clone();
        standing[90..92].copy_from_slice(&0u16.to_ne_bytes());
        assert!(held(standing).drops().is_empty(), "an entry without a next one");
        let mut dropping = entry.clone();
        dropping[112 + 32..112 + 36].copy_from_slice(&(-1i32).to_ne_bytes());
        assert_eq!(held(dropping).drops().len(), 5);
        for length in 0..entry.len() {
            held(entry[..length].to_vec()).drops();
        }
    }
}
