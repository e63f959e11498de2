//! Packets as bytes, with right checksums: connection tracking calls the others invalid.

use std::net::IpAddr;

use groupcast_policy::packet::{ICMP, ICMPV6, Payload, TCP};

pub const SYN: u8 = 2;
pub const SYN_ACK: u8 = 18;
pub const ACK: u8 = 16;

/// What a test sends: the addresses, what is above them, and what tells this flow from all others where there are no ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet {
    pub source: IpAddr,
    pub destination: IpAddr,
    pub payload: Payload,
    pub tcp_flags: u8,
    pub icmp_id: u16,
}

pub fn sum(bytes: &[u8], mut sum: u32) -> u32 {
    for pair in bytes.chunks(2) {
        sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or_default());
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

impl Packet {
    pub fn answer(&self) -> Self {
        let tcp_flags = if self.tcp_flags == SYN { SYN_ACK } else { ACK };
        Self { source: self.destination, destination: self.source, payload: self.payload.reply(), tcp_flags, ..*self }
    }

    pub fn later(&self) -> Self {
        Self { tcp_flags: ACK, ..*self }
    }

    pub fn protocol(&self) -> u8 {
        match self.payload {
            Payload::Ports { protocol, .. } | Payload::Other(protocol) => protocol,
            Payload::Icmp { .. } if self.source.is_ipv4() => ICMP,
            Payload::Icmp { .. } => ICMPV6,
        }
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut above = match self.payload {
            Payload::Ports { protocol: TCP, source, destination } => {
                let mut tcp = [source.to_be_bytes(), destination.to_be_bytes()].concat();
                // Sequence numbers that conntrack finds in order: the handshake, and empty packets after it.
                let (sequence, acknowledged): (u32, u32) = match self.tcp_flags {
                    SYN => (1000, 0),
                    SYN_ACK => (1000, 1001),
                    _ => (1001, 1001),
                };
                tcp.extend(sequence.to_be_bytes());
                tcp.extend(acknowledged.to_be_bytes());
                tcp.extend([5 << 4, self.tcp_flags, 0xff, 0xff, 0, 0, 0, 0]);
                tcp
            }
            Payload::Ports { source, destination, .. } => {
                [source.to_be_bytes(), destination.to_be_bytes(), 8u16.to_be_bytes(), [0, 0]].concat()
            }
            Payload::Icmp { kind, code } => [[kind, code], [0, 0], self.icmp_id.to_be_bytes(), [0, 1]].concat(),
            Payload::Other(_) => vec![0; 8],
        };
        let checksum_at = match self.payload {
            Payload::Ports { protocol: TCP, .. } => Some(16),
            Payload::Ports { .. } => Some(6),
            Payload::Icmp { .. } => Some(2),
            Payload::Other(_) => None,
        };
        if let Some(at) = checksum_at {
            let checksum = checksum(self.source, self.destination, self.protocol(), &above);
            above[at..at + 2].copy_from_slice(&checksum);
        }
        with_head(self.source, self.destination, self.protocol(), &above, &[])
    }

    /// Whether these bytes are this packet, whatever happened to its hop limit on the way.
    pub fn is(&self, bytes: &[u8]) -> bool {
        let own = self.bytes();
        let skip = if self.source.is_ipv4() { 20 } else { 40 };
        let addresses = if self.source.is_ipv4() { 12..20 } else { 8..40 };
        bytes.len() == own.len() && bytes[addresses.clone()] == own[addresses] && bytes[skip..] == own[skip..]
    }
}

/// What stands in an IPv4 header before the hop limit: number, flags, offset.
const NOT_FRAGMENTED: [u8; 4] = [0, 0, 0x40, 0];

/// An IP packet around what is above. `fragment`: number, flags and offset of IPv4, where it is one.
pub fn with_head(source: IpAddr, destination: IpAddr, protocol: u8, above: &[u8], fragment: &[u8]) -> Vec<u8> {
    let length = above.len() as u16;
    let mut bytes = if source.is_ipv4() {
        let mut head = vec![0x45, 0];
        head.extend((20 + length).to_be_bytes());
        head.extend(if fragment.is_empty() { &NOT_FRAGMENTED } else { fragment });
        head.extend([64, protocol, 0, 0]);
        head.extend(octets(source));
        head.extend(octets(destination));
        let checksum = !(sum(&head, 0) as u16);
        head[10..12].copy_from_slice(&checksum.to_be_bytes());
        head
    } else {
        let mut head = vec![0x60, 0, 0, 0];
        head.extend(length.to_be_bytes());
        head.extend([protocol, 255]);
        head.extend(octets(source));
        head.extend(octets(destination));
        head
    };
    bytes.extend(above);
    bytes
}

/// The checksum of what is above, with the addresses where its protocol counts them in.
pub fn checksum(source: IpAddr, destination: IpAddr, protocol: u8, above: &[u8]) -> [u8; 2] {
    let with_addresses = protocol != ICMP;
    let addresses = sum(&octets(destination), sum(&octets(source), 0)) + u32::from(protocol) + above.len() as u32;
    match !(sum(above, if with_addresses { addresses } else { 0 }) as u16) {
        0 => [0xff, 0xff],
        other => other.to_be_bytes(),
    }
}
