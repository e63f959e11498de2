//! What a server sends to one client, seen at the client's socket and told apart by message, so that a byte that should not have
//! come can be named.

use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::JoinHandle;

use super::protocol::{Frame, Frames, stand_between};

/// Messages remembered by subject.
const NAMED_MAX: usize = 1_000;

/// One thing the server sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// Of a message its subject, else the word of the protocol.
    pub what: String,
    pub bytes: usize,
}

#[derive(Default)]
struct Seen {
    bytes: u64,
    named: Vec<Received>,
}

impl Seen {
    fn take(&mut self, frames: Vec<Frame>) {
        for frame in frames.into_iter().filter(|frame| !matches!(frame.verb.as_str(), "PING" | "PONG")) {
            let bytes = frame.bytes.len();
            self.bytes += bytes as u64;
            if self.named.len() < NAMED_MAX {
                self.named.push(Received { what: frame.subject.unwrap_or(frame.verb), bytes });
            }
        }
    }
}

/// Stands between a client and its server, and counts what the server sends but for the keep-alive of the connection itself: the
/// server's PING and its PONG to the client's own PING carry nothing and are sent whether or not anything changes.
pub struct Tap {
    port: u16,
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

impl Tap {
    pub async fn to(url: &str) -> Self {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let shared = seen.clone();
        let (port, task) = stand_between(url, move |(mut near_in, mut far_out), (mut far_in, mut near_out)| {
            let (seen, mut frames) = (shared.clone(), Frames::default());
            tokio::spawn(async move { tokio::io::copy(&mut near_in, &mut far_out).await });
            tokio::spawn(async move {
                let mut buffer = vec![0; 16 * 1024];
                while let Ok(read @ 1..) = far_in.read(&mut buffer).await {
                    seen.lock().expect("lock").take(frames.take(&buffer[..read]));
                    if near_out.write_all(&buffer[..read]).await.is_err() {
                        return;
                    }
                }
            });
        })
        .await;
        Self { port, seen, task }
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub fn bytes(&self) -> u64 {
        self.seen.lock().expect("lock").bytes
    }

    /// What came since the last call, in order.
    pub fn drain(&self) -> Vec<Received> {
        std::mem::take(&mut self.seen.lock().expect("lock").named)
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        self.task.abort();
    }
}
