//! How a keeper begins: by the kernel's table if there is one, by what the disk knows, by nothing.

use groupcast_enforce::engine::{Engine, held_in};
use groupcast_enforce::settings::{Attachments, Settings, Stamp};
use groupcast_enforce::stamp;
use groupcast_policy::ids::HostId;

use super::{Counts, Keeper};
use crate::holder::Holder;
use crate::state::Replica;

/// What is known about the stamps that connections may carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Marks {
    /// None is ahead of ours.
    Known,
    /// Only the disk knows ours, and it may be behind by a few.
    Behind,
    /// Any.
    Unknown,
}

/// The disk is behind by fewer stamps than this: by what is bumped while it is being written.
pub const STAMPS_BEHIND_MAX: u32 = 1_000;

/// What is known before the enforcer is asked.
pub struct Known {
    pub host: HostId,
    pub settings: Settings,
    pub attachments: Attachments,
    pub documents: Replica,
    /// The last one that the disk knows.
    pub stamp: Option<Stamp>,
    /// The last life wrote its stamps to other bits of marks than this one does.
    pub bits_moved: bool,
    pub random: Stamp,
}

impl<E: Holder> Keeper<E> {
    /// Takes over the table that the enforcer holds, if it does. `stamp` is where stamps begin if it does not.
    pub fn start(
        host: HostId,
        settings: Settings,
        attachments: Attachments,
        stamp: Stamp,
        documents: Replica,
        enforcer: E,
    ) -> Result<Self, E::Error> {
        Self::start_from(
            Known { host, settings, attachments, documents, stamp: None, bits_moved: false, random: stamp },
            enforcer,
        )
    }

    /// The same from what the disk knows.
    pub fn start_from(known: Known, mut enforcer: E) -> Result<Self, E::Error> {
        let Known { host, mut settings, attachments, documents, stamp, bits_moved, random } = known;
        let held = enforcer.read()?;
        let adopted = held.is_some();
        let in_kernel = held.as_ref().and_then(|table| stamp::stamp_of(&settings, table));
        // The kernel knows best. The disk may be behind. Where nobody knows, it begins where nobody expects.
        let ahead = stamp.and_then(|stamp| Stamp::new(stamp.number() + STAMPS_BEHIND_MAX));
        let (begin, marks) = match (in_kernel, stamp, ahead) {
            // The old table goes on writing what looks like any stamp until ours is there: it is taken away afterwards.
            _ if bits_moved => (random, Marks::Behind),
            (Some(held), stamp, _) => (stamp.map_or(held, |stamp| stamp.max(held)), Marks::Known),
            (None, Some(_), Some(ahead)) => (ahead, Marks::Behind),
            (None, ..) => (random, Marks::Unknown),
        };
        settings.closes_ports &= enforcer.closes_ports();
        if let Some(table) = &held {
            // What was claimed when it was written stays so until it is seen to be gone.
            settings.held.extend(held_in(table));
        }
        let engine = match held {
            Some(table) => Engine::adopt(host, settings, attachments, begin, table),
            None => Engine::new(host, settings, attachments, begin),
        };
        let counts = Counts::default();
        Ok(Self {
            engine,
            enforcer,
            documents,
            cached: true,
            shown: None,
            frozen: false,
            adopted,
            stale: in_kernel.is_some_and(|held| stamp.is_none_or(|stamp| held > stamp)),
            taken_over: false,
            marks,
            counts,
        })
    }
}
