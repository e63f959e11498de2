//! The controller's actors, one file each. They move messages between the bus and the machines of this crate and of
//! `groupcast-topics`; what to do is decided there. Mailboxes are bounded and every send's outcome is looked at.

pub mod compiler;
pub mod convergence;
pub mod fanout;
pub mod follower;
pub mod leadership;
pub mod liveness;
pub mod reaper;
pub mod registrar;
pub mod source;

use std::time::Duration;

/// Messages that may wait for an actor.
pub const MAILBOX_MAX: usize = 256;
/// Pause before something that failed is tried again.
pub const RETRY_PAUSE: Duration = Duration::from_millis(200);

/// Asks an actor whether it still answers.
#[derive(Debug, Clone, Copy, actix::Message)]
#[rtype(result = "()")]
pub struct Ping;
