//! Whether somebody else touches our table, where the kernel cannot forbid it: it tells about every change of every table, and of
//! those only the ones of ours that were not our doing matter.

use std::io;

use super::socket::{BRIDGE, INET, NETFILTER_HEAD_BYTES, SUBSYSTEM, Transport};
use super::wire::Attributes;

const GROUP_NFTABLES: u32 = 7;
const NEW_GENERATION: u16 = SUBSYSTEM | 15;
const SUBSYSTEM_MASK: u16 = 0xff00;
/// Of everything but a generation.
const TABLE_NAME: u16 = 1;

pub struct Watch {
    hears: Transport,
}

impl Watch {
    pub fn open() -> io::Result<Self> {
        let mut hears = Transport::open()?;
        hears.join(GROUP_NFTABLES)?;
        Ok(Self { hears })
    }

    /// Since the last look, somebody other than `own` may have changed the table.
    pub fn is_disturbed(&mut self, table: &str, own: u32) -> io::Result<bool> {
        let mut disturbed = false;
        let complete = self.hears.told(|message| {
            if message.kind & SUBSYSTEM_MASK != SUBSYSTEM || message.kind == NEW_GENERATION || message.port == own {
                return;
            }
            let Some((head, attributes)) = message.body.split_at_checked(NETFILTER_HEAD_BYTES) else { return };
            disturbed |= [INET, BRIDGE].contains(&head[0]) && Attributes(attributes).text(TABLE_NAME) == Some(table);
        })?;
        // What was lost may have been about our table.
        Ok(disturbed || !complete)
    }
}
