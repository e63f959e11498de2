//! The actor that writes the last good state and what was ordered, on a thread of its own because syncing takes as long as it takes.

use std::path::PathBuf;

use actix::prelude::*;

use crate::orders::Orders;
use crate::state::State;

/// Answered when it is on disk, or why it is not.
#[derive(Message)]
#[rtype(result = "Result<(), String>")]
pub struct Save(pub Box<State>);

/// Answered when it is on disk, or why it is not.
#[derive(Message)]
#[rtype(result = "Result<(), String>")]
pub struct SaveOrders(pub Orders);

pub struct Disk {
    pub path: PathBuf,
}

/// One that is written, one that waits: a third would only replace the second.
const WAITING_MAX: usize = 2;

impl Actor for Disk {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(WAITING_MAX);
    }
}

impl Handler<Save> for Disk {
    type Result = Result<(), String>;

    fn handle(&mut self, Save(state): Save, _: &mut Self::Context) -> Self::Result {
        let path = self.path.display();
        let words = "after a restart without the bus the host enforces what was saved before, or is closed";
        state.write(&self.path).map_err(|error| format!("the last good state cannot be written to {path}: {error}; {words}"))
    }
}

impl Handler<SaveOrders> for Disk {
    type Result = Result<(), String>;

    fn handle(&mut self, SaveOrders(orders): SaveOrders, _: &mut Self::Context) -> Self::Result {
        let path = Orders::path(&self.path);
        orders.write(&path).map_err(|error| {
            format!(
                "it is in force, but a restart would forget it: {} cannot be written ({error}); repeat it then",
                path.display()
            )
        })
    }
}
