//! The port to whatever holds the ruleset: a kernel, a dry run that prints it, a model that decides packets.

use std::convert::Infallible;

use crate::delta::{Inconsistent, Transaction};
use crate::kernel::ModelKernel;
use crate::table::Table;
use crate::text::Script;

pub trait Enforcer {
    type Error: std::error::Error;

    /// All of the transaction, or after an error nothing of it.
    fn commit(&mut self, transaction: &Transaction) -> Result<(), Self::Error>;

    /// What is there; `None` where no table of ours is.
    fn read(&mut self) -> Result<Option<Table>, Self::Error>;
}

impl Enforcer for ModelKernel {
    type Error = Inconsistent;

    fn commit(&mut self, transaction: &Transaction) -> Result<(), Inconsistent> {
        self.table.commit(transaction)
    }

    fn read(&mut self) -> Result<Option<Table>, Inconsistent> {
        Ok((self.table != Table::default()).then(|| self.table.clone()))
    }
}

/// Touches nothing: hands each new state of the table to a sink as nft text.
pub struct DryRun<S> {
    pub name: String,
    pub table: Table,
    pub sink: S,
}

impl<S: FnMut(String)> Enforcer for DryRun<S> {
    type Error = Infallible;

    fn commit(&mut self, transaction: &Transaction) -> Result<(), Infallible> {
        // What does not fit is shown as far as it went: a dry run has nobody to protect.
        let _ = self.table.apply(transaction);
        (self.sink)(Script { name: &self.name, table: &self.table }.to_string());
        Ok(())
    }

    fn read(&mut self) -> Result<Option<Table>, Infallible> {
        Ok(Some(self.table.clone()))
    }
}
