//! What a server sends to one client, seen at the client's socket and told apart by message, so that a byte that should not have
//! come can be named.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::protocol::Frames;

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

/// Stands between a client and its server, and counts what the server sends but for the keep-alive of the connection itself: the
/// server's PING and its PONG to the client's own PING carry nothing and are sent whether or not anything changes.
pub struct Tap {
    port: u16,
    seen: Arc<Mutex<Seen>>,
    task: JoinHandle<()>,
}

impl Tap {
    pub async fn to(url: &str) -> Self {
        let target: SocketAddr = url.trim_start_matches("nats://").parse().expect("a server's address");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let port = listener.local_addr().expect("an address").port();
        let seen = Arc::new(Mutex::new(Seen::default()));
        let shared = seen.clone();
        let task = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(target).await else { continue };
                let _ = (near.set_nodelay(true), far.set_nodelay(true));
                let ((mut near_in, mut near_out), (mut far_in, mut far_out)) = (near.into_split(), far.into_split());
                let (seen, mut frames) = (shared.clone(), Frames::default());
                tokio::spawn(async move { tokio::io::copy(&mut near_in, &mut far_out).await });
                tokio::spawn(async move {
                    let mut buffer = vec![0; 16 * 1024];
                    while let Ok(read @ 1..) = far_in.read(&mut buffer).await {
                        for frame in frames.take(&buffer[..read]) {
                            if matches!(frame.verb.as_str(), "PING" | "PONG") {
                                continue;
                            }
                            let mut seen = seen.lock().expect("lock");
                            seen.bytes += frame.bytes.len() as u64;
                            if seen.named.len() < NAMED_MAX {
                                let what = frame.subject.unwrap_or(frame.verb);
                                seen.named.push(Received { what, bytes: frame.bytes.len() });
                            }
                        }
                        if near_out.write_all(&buffer[..read]).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
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
