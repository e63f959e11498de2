//! A gate between one controller and its bus, at which the controller is killed: before or after any single message that it sends or
//! is sent. All a controller does to the world are these messages, so between two of them one moment is like another.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use groupcast_bus_config::{streams, subjects};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

use super::protocol::{Frame, Frames, stand_between};

/// Which message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The nth message of a change as it is read from CATALOG.
    Read(usize),
    /// The nth message of the batch that publishes it, the lead message first.
    Publish(usize),
    /// The stream's word that the batch is committed.
    Committed,
}

/// On which side of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    pub step: Step,
    pub after: bool,
}

struct Trap {
    moment: Moment,
    process: i32,
    read: usize,
    published: usize,
    /// How long after a message it received it dies.
    delay: Duration,
    set_off: bool,
    sprung: bool,
}

impl Trap {
    fn step_of(&mut self, frame: &Frame, sent: bool) -> Option<Step> {
        let subject = frame.subject.as_deref()?;
        let catalog = format!("$JS.ACK.{}.", streams::CATALOG.name);
        if sent && (subject == subjects::LEAD_WRITE || subjects::parse_write(subject).is_some()) {
            // A batch begins with its lead message; one without deltas only keeps the lease.
            let lead = subject == subjects::LEAD_WRITE;
            if lead && !frame.contains("Nats-Batch-Id") {
                return None;
            }
            self.published = if lead { 0 } else { self.published + 1 };
            return Some(Step::Publish(self.published));
        }
        if !sent && frame.reply.as_deref().is_some_and(|reply| reply.starts_with(&catalog)) {
            self.read += 1;
            return Some(Step::Read(self.read - 1));
        }
        let word = !sent && frame.contains(&format!("\"stream\":\"{}\"", streams::TOPICS.name)) && frame.contains("\"batch\"");
        word.then_some(Step::Committed)
    }

    fn spring(&mut self) {
        self.sprung = true;
        let _ = kill(Pid::from_raw(self.process), Signal::SIGKILL); // it may be dead already
    }
}

type Shared = Arc<Mutex<Option<Trap>>>;

pub struct Gate {
    port: u16,
    trap: Shared,
    task: JoinHandle<()>,
}

impl Gate {
    pub async fn to(url: &str) -> Self {
        let trap = Shared::default();
        let shared = trap.clone();
        let (port, task) = stand_between(url, move |(near_in, far_out), (far_in, near_out)| {
            tokio::spawn(pass(near_in, far_out, true, shared.clone()));
            tokio::spawn(pass(far_in, near_out, false, shared.clone()));
        })
        .await;
        Self { port, trap, task }
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// From now on the process dies at this moment; if that is after a message it receives, so much later.
    pub fn set(&self, moment: Moment, process: u32, delay: Duration) {
        let trap = Trap { moment, process: process as i32, read: 0, published: 0, delay, set_off: false, sprung: false };
        *self.trap.lock().expect("lock") = Some(trap);
    }

    pub fn has_sprung(&self) -> bool {
        self.trap.lock().expect("lock").as_ref().is_some_and(|trap| trap.sprung)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Passes on message by message. Of a process that was killed nothing more is passed on, though it may have been on its way: it
/// would not have been sent.
async fn pass(mut from: impl AsyncReadExt + Unpin, mut to: impl AsyncWriteExt + Unpin, sent: bool, shared: Shared) {
    let (mut buffer, mut frames) = (vec![0; 64 * 1024], Frames::default());
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let mut out = Vec::with_capacity(read);
        let (mut dead, mut later) = (false, None);
        for frame in frames.take(&buffer[..read]) {
            let mut trap = shared.lock().expect("lock");
            let hit = match trap.as_mut() {
                None => false,
                Some(trap) => {
                    dead |= trap.sprung;
                    !dead && !trap.set_off && trap.step_of(&frame, sent) == Some(trap.moment.step)
                }
            };
            if !dead && (!hit || trap.as_ref().is_some_and(|trap| trap.moment.after)) {
                out.extend_from_slice(&frame.bytes);
            }
            let Some(trap) = trap.as_mut().filter(|_| hit) else { continue };
            trap.set_off = true;
            if !sent && trap.moment.after {
                // It has to receive the message before it dies; what it does with it in that time is done.
                later = Some(trap.delay);
            } else {
                trap.spring();
                dead = true;
            }
        }
        let written = to.write_all(&out).await;
        if let Some(delay) = later {
            let shared = shared.clone();
            tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                shared.lock().expect("lock").iter_mut().for_each(Trap::spring);
            });
        }
        if written.is_err() || dead {
            break;
        }
    }
    let _ = to.shutdown().await;
}
