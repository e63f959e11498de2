//! Our bits of connections' marks, zeroed: before stamps are used again that connections may carry from another policy.
//!
//! Entries are never deleted, which would let the other end open the flow anew, and foreign bits stay: the kernel is told which
//! bits to write.

use std::io;

use super::socket::{DUMP, NETFILTER_HEAD_BYTES, Transport, single};
use super::wire::Writer;

const SUBSYSTEM: u16 = 1 << 8;
const NEW: u16 = SUBSYSTEM;
const GET: u16 = SUBSYSTEM | 1;

const TUPLE: u16 = 1;
const MARK: u16 = 8;
const ZONE: u16 = 18;
const MARK_MASK: u16 = 21;

/// Connections changed between two looks at the table: what is done is not found again.
pub const CONNECTIONS_PER_PASS_MAX: usize = 65_536;
/// Together with the above more connections than any kernel tracks.
pub const PASSES_MAX: usize = 1_024;
/// Messages of one datagram stay below this.
const DATAGRAM_BYTES_MAX: usize = 256 << 10;

/// Zeroes the bits of `mask` in every connection in which they are neither zero nor one of `keep`; how many that were.
pub fn zero(transport: &mut Transport, mask: u32, keep: &[u32]) -> io::Result<u64> {
    let mut count = 0;
    for _ in 0..PASSES_MAX {
        let found = carrying(transport, mask, keep)?;
        if found.is_empty() {
            return Ok(count);
        }
        count += found.len() as u64;
        let mut rest = &found[..];
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |message: &&Writer| {
                bytes += message.bytes.len();
                bytes <= DATAGRAM_BYTES_MAX
            };
            let (now, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            let mut datagram = Writer::default();
            now.iter().for_each(|message| datagram.bytes.extend_from_slice(&message.bytes));
            // A connection that ended meanwhile carries nothing any more.
            if let Some(error) = transport.each(&datagram)?.into_iter().find(|error| *error != nix::libc::ENOENT) {
                return Err(io::Error::from_raw_os_error(error));
            }
            rest = later;
        }
    }
    Err(io::Error::other(format!("connections carry old stamps after {PASSES_MAX} attempts to zero them")))
}

/// The messages that zero the bits, one for each connection that has some.
fn carrying(transport: &mut Transport, mask: u32, keep: &[u32]) -> io::Result<Vec<Writer>> {
    let request = single(GET, DUMP, &[0; NETFILTER_HEAD_BYTES], |_| {});
    let mut found = Vec::new();
    let outcome = transport.dump_all(&request, NETFILTER_HEAD_BYTES, |head, attributes| {
        let carried = attributes.u32(MARK).unwrap_or_default() & mask;
        let (Some(tuple), true) = (attributes.find(TUPLE), found.len() < CONNECTIONS_PER_PASS_MAX) else { return };
        if carried == 0 || keep.contains(&carried) {
            return;
        }
        found.push(single(NEW, 0, &[head[0], 0, 0, 0], |writer| {
            writer.nest(TUPLE, |inner| inner.bytes.extend_from_slice(tuple));
            attributes.find(ZONE).into_iter().for_each(|zone| _ = writer.put(ZONE, zone));
            writer.u32(MARK, 0).u32(MARK_MASK, mask);
        }));
    });
    match outcome {
        // Connections come and go while they are listed; the next look finds what this one missed.
        Err(error) if error.kind() != io::ErrorKind::Interrupted => Err(error),
        _ => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, UdpSocket};

    use super::super::tests::{ip, isolated, nft};
    use super::*;

    /// Real connections, one for each of these ports, marked by a rule of somebody's table.
    fn connections(ports: impl Iterator<Item = u16>) {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        ports.for_each(|port| _ = socket.send_to(b"x", (Ipv4Addr::LOCALHOST, port)));
    }

    fn marks(transport: &mut Transport) -> Vec<u32> {
        let mut marks = Vec::new();
        let request = single(GET, DUMP, &[0; NETFILTER_HEAD_BYTES], |_| {});
        let each =
            |_: &[u8], attributes: super::super::wire::Attributes<'_>| marks.push(attributes.u32(MARK).unwrap_or_default());
        transport.dump_all(&request, NETFILTER_HEAD_BYTES, each).unwrap();
        marks.sort_unstable();
        marks
    }

    #[test]
    fn only_our_bits_of_real_connections_are_zeroed_and_current_stamps_stay() {
        isolated(|| {
            ip("link set lo up");
            nft("add table inet t; add chain inet t o { type filter hook output priority 0; }; \
                 add rule inet t o udp dport 1001 ct mark set 0x7f000005; add rule inet t o udp dport 1002 ct mark set 0x01800005; \
                 add rule inet t o udp dport 1003 ct mark set 0x02000009; add rule inet t o udp dport 1004 ct mark set 0x03000000");
            connections(1001..1005);
            let mut transport = Transport::open().unwrap();
            // The refusal of a closed port is of the same connection.
            assert_eq!(marks(&mut transport), [0x0180_0005, 0x0200_0009, 0x0300_0000, 0x7f00_0005]);
            assert_eq!(zero(&mut transport, 0x00ff_ffff, &[0x0080_0005]).unwrap(), 2);
            assert_eq!(marks(&mut transport), [0x0180_0005, 0x0200_0000, 0x0300_0000, 0x7f00_0000]);
            assert_eq!(zero(&mut transport, 0x00ff_ffff, &[]).unwrap(), 1);
            assert_eq!(zero(&mut transport, 0x00ff_ffff, &[]).unwrap(), 0);
        });
    }

    #[test]
    fn many_connections_take_several_datagrams() {
        isolated(|| {
            ip("link set lo up");
            nft(
                "add table inet t; add chain inet t o { type filter hook output priority 0; }; add rule inet t o ct mark set 0x11000007",
            );
            let many: u16 = if std::env::var_os("GROUPCAST_FULL").is_some() { 60_000 } else { 5_000 };
            connections(1..=many);
            let mut transport = Transport::open().unwrap();
            assert_eq!(zero(&mut transport, 0x00ff_ffff, &[]).unwrap(), u64::from(many));
            assert!(marks(&mut transport).iter().all(|mark| *mark == 0x1100_0000));
        });
    }
}
