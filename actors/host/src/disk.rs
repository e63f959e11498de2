//! The actor that writes the last good state, on a thread of its own because syncing takes as long as it takes.

use std::path::PathBuf;

use actix::prelude::*;

use crate::state::State;

#[derive(Message)]
#[rtype(result = "()")]
pub struct Save(pub Box<State>);

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
    type Result = ();

    fn handle(&mut self, Save(state): Save, _: &mut Self::Context) {
        if let Err(error) = state.write(&self.path) {
            tracing::error!(path = %self.path.display(), %error, "the last good state is not saved: after a restart without the bus the host is closed");
        }
    }
}
