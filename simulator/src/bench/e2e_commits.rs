//! When the kernel of a namespace commits to its nftables, as it tells everybody who listens: the end of every transaction is a message
//! about the new generation.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::Context;
use groupcast_bus_config::lab::Namespace;
use nix::sys::socket::{self, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType};
use tokio::sync::mpsc;

/// The multicast group of nftables, as a bit.
const NFTABLES: u32 = 1 << 6;
/// `NFT_MSG_NEWGEN` of the subsystem nftables.
const NEW_GENERATION: u16 = (10 << 8) | 15;
const HEADER_BYTES: usize = 16;
const BUFFER_BYTES: usize = 256 * 1024;

pub struct Commits(mpsc::UnboundedReceiver<Instant>);

impl Commits {
    /// From now on. The thread that listens ends with the process: nothing else wakes it.
    pub fn watch(inside: &Namespace) -> anyhow::Result<Self> {
        let open = || {
            let fd =
                socket::socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkNetFilter)?;
            socket::bind(fd.as_raw_fd(), &NetlinkAddr::new(0, NFTABLES))?;
            Ok::<OwnedFd, nix::Error>(fd)
        };
        let fd = inside.run(open)?.context("the kernel's messages cannot be heard")?;
        let (told, heard) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            let mut buffer = vec![0; BUFFER_BYTES];
            loop {
                // Messages that were lost because nobody read in time are followed by others.
                let Ok(length) = socket::recv(fd.as_raw_fd(), &mut buffer, MsgFlags::empty()) else { continue };
                let now = Instant::now();
                if ends_a_transaction(&buffer[..length]) && told.send(now).is_err() {
                    return;
                }
            }
        });
        Ok(Self(heard))
    }

    /// What came until now counts no more.
    pub fn forget(&mut self) {
        while self.0.try_recv().is_ok() {}
    }

    pub async fn next(&mut self, within: Duration) -> Option<Instant> {
        tokio::time::timeout(within, self.0.recv()).await.ok().flatten()
    }
}

/// Whether one of the messages is about a new generation.
fn ends_a_transaction(mut bytes: &[u8]) -> bool {
    while bytes.len() >= HEADER_BYTES {
        let length = u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        if u16::from_ne_bytes([bytes[4], bytes[5]]) == NEW_GENERATION {
            return true;
        }
        if length < HEADER_BYTES {
            return false;
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, payload: usize) -> Vec<u8> {
        let length = (HEADER_BYTES + payload) as u32;
        let mut bytes = [length.to_ne_bytes().as_slice(), &kind.to_ne_bytes(), &[0; 10]].concat();
        bytes.resize((length as usize).next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn the_end_of_a_transaction_is_found_behind_other_messages() {
        let rule = message(10 << 8 | 6, 21);
        assert!(!ends_a_transaction(&rule) && !ends_a_transaction(&[]) && !ends_a_transaction(&[0; 40]));
        assert!(ends_a_transaction(&[rule, message(NEW_GENERATION, 4)].concat()));
    }
}
