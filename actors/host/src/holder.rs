//! What keeping a ruleset in force needs of a kernel beside holding it.

use groupcast_enforce::delta::Transaction;
use groupcast_enforce::enforcer::{DryRun, Enforcer};
use groupcast_enforce::table::Table;

use crate::netlink::{Counted, Foreign};

pub trait Holder: Enforcer {
    /// Zeroes these bits in the mark of every connection in which they are none of `keep`; in how many.
    fn zero_marks(&mut self, mask: u32, keep: &[u32]) -> Result<u64, Self::Error>;

    /// Makes a table that was there ours to keep, and changes nothing in it.
    fn take_over(&mut self) -> Result<(), Self::Error> {
        self.commit(&Transaction::default())
    }

    /// What is there of a table that we made. What somebody put into it that we do not understand is no reason to leave it: such a
    /// table reads as one that is not ours, and is made anew.
    fn found(&mut self) -> Result<Table, Self::Error> {
        Ok(self.read()?.unwrap_or_default())
    }

    /// What rules have met, where packets are.
    fn counters(&mut self) -> Result<Vec<Counted>, Self::Error> {
        Ok(Vec::new())
    }

    /// What others have that interferes, where there are others; `mask` is ours of the connection mark.
    fn foreign(&mut self, _mask: u32) -> Foreign {
        Foreign::default()
    }

    /// Whether ports of bridges can be closed.
    fn closes_ports(&self) -> bool {
        true
    }

    /// Whether, since the last look, somebody else may have touched the table.
    fn is_disturbed(&mut self) -> bool;
}

/// A dry run has no connections and no neighbours.
impl<S: FnMut(String)> Holder for DryRun<S> {
    fn zero_marks(&mut self, _: u32, _: &[u32]) -> Result<u64, Self::Error> {
        Ok(0)
    }

    fn is_disturbed(&mut self) -> bool {
        false
    }
}
