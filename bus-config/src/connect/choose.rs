//! Which server a client goes to when it has lost one.
//!
//! The client library has one time limit for a whole attempt, and a server that thousands reach for at once needs a long one. So a server
//! that vanished, or one that is stopped and whose kernel still takes connections, would cost that long each time it is tried. Instead all
//! servers are greeted at once, and one that answers is taken. What a server says there decides only which of the servers that an operator
//! has named is next.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use async_nats::{ReconnectToServer, ServerAddr};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::{Notify, mpsc};

use super::{CONNECT_TIMEOUT, Event, RECONNECT_DELAY_FIRST, random, reconnect_delay};

/// How long a server has to greet at first; doubled with each attempt, as a server that everybody reaches for is slow.
pub const GREETED_WITHIN: Duration = Duration::from_secs(1);
/// After the first greeting, so long for others: one of them is taken by chance, so that a fleet spreads.
const OTHERS_WITHIN: Duration = Duration::from_millis(50);
/// Longest greeting that is read.
const GREETING_BYTES_MAX: u64 = 64 << 10;
/// A server that was left because it is cut off is gone to only if there is no other, for so long.
pub const AVOIDED_FOR: Duration = Duration::from_secs(30);

/// What is remembered between attempts, of one connection.
#[derive(Debug)]
pub(super) struct Chooser {
    delay_max: Duration,
    attempts: AtomicUsize,
    avoided: Mutex<HashMap<String, Instant>>,
    /// Where to go the next time, if it answers.
    preferred: Mutex<Option<ServerAddr>>,
    /// Told when the server says that it is about to go.
    pub leaving: Notify,
    /// Where it is said that no server answers. Not a reason for the connection's events to go on when it has ended.
    events: mpsc::WeakSender<Event>,
}

impl Chooser {
    pub fn new(delay_max: Duration, events: mpsc::WeakSender<Event>) -> Arc<Self> {
        let (attempts, avoided, preferred, leaving) = Default::default();
        Arc::new(Self { delay_max, attempts, avoided, preferred, leaving, events })
    }

    pub fn connected(&self) {
        self.attempts.store(0, Ordering::Relaxed);
    }

    fn avoided(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        // Nothing panics while it is held.
        self.avoided.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub fn avoid(&self, server_id: &str) {
        let mut avoided = self.avoided();
        avoided.retain(|_, since| since.elapsed() < AVOIDED_FOR);
        avoided.insert(server_id.to_owned(), Instant::now());
    }

    pub fn prefer(&self, server: &ServerAddr) {
        *self.preferred.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(server.clone());
    }

    fn is_avoided(&self, server_id: &str) -> bool {
        self.avoided().get(server_id).is_some_and(|since| since.elapsed() < AVOIDED_FOR)
    }

    /// The server to connect to next, after the wait that is due.
    pub async fn next(self: Arc<Self>, servers: Vec<ServerAddr>) -> ReconnectToServer {
        let preferred = self.preferred.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some(addr) = preferred
            && greeted(&addr, GREETED_WITHIN).await.is_some()
        {
            return ReconnectToServer { addr, delay: Some(Duration::ZERO) };
        }
        loop {
            let attempt = self.attempts.fetch_add(1, Ordering::Relaxed).saturating_add(1);
            tokio::time::sleep(reconnect_delay(attempt, RECONNECT_DELAY_FIRST, self.delay_max, random())).await;
            if let Some(addr) = self.greeting(&servers, within(attempt)).await {
                return ReconnectToServer { addr, delay: Some(Duration::ZERO) };
            }
            tracing::warn!(attempt, "trouble with the bus: no server answers");
            if let Some(events) = self.events.upgrade() {
                let _ = events.try_send(Event::Trouble("no server answers".to_owned())); // it is said again with the next attempt
            }
        }
    }

    /// One that answers, by chance; one that is avoided only if no other does in time.
    pub async fn greeting(&self, servers: &[ServerAddr], within: Duration) -> Option<ServerAddr> {
        let mut asked: FuturesUnordered<_> =
            servers.iter().map(|server| async move { (server, greeted(server, within).await) }).collect();
        let (mut good, mut second): (Vec<&ServerAddr>, Vec<&ServerAddr>) = Default::default();
        let deadline = tokio::time::Instant::now() + within;
        let mut until = deadline;
        while let Ok(Some((server, answer))) = tokio::time::timeout_at(until, asked.next()).await {
            match answer {
                Some(id) if self.is_avoided(&id) => second.push(server),
                Some(_) => {
                    good.push(server);
                    until = deadline.min(tokio::time::Instant::now() + OTHERS_WITHIN);
                }
                None => {}
            }
        }
        let choices = if good.is_empty() { second } else { good };
        let chosen = usize::try_from(random() % (choices.len().max(1) as u64)).unwrap_or(0);
        choices.get(chosen).map(|server| (*server).clone())
    }
}

fn within(attempt: usize) -> Duration {
    let doublings = u32::try_from(attempt.saturating_sub(1)).unwrap_or(u32::MAX).min(10);
    GREETED_WITHIN.saturating_mul(1 << doublings).min(CONNECT_TIMEOUT)
}

/// The id of a server that says its first line in time.
pub(super) async fn greeted(server: &ServerAddr, within: Duration) -> Option<String> {
    let greeting = async {
        for address in server.socket_addrs().await.ok()? {
            let Ok(stream) = TcpStream::connect(address).await else { continue };
            let mut line = Vec::new();
            BufReader::new(stream.take(GREETING_BYTES_MAX)).read_until(b'\n', &mut line).await.ok()?;
            let greeting: Value = serde_json::from_slice(line.strip_prefix(b"INFO ")?).ok()?;
            return greeting["server_id"].as_str().map(str::to_owned);
        }
        None
    };
    tokio::time::timeout(within, greeting).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;

    fn chooser() -> Arc<Chooser> {
        Chooser::new(Duration::ZERO, mpsc::channel(1).0.downgrade())
    }

    /// A server that says this to whoever connects, and nothing more.
    async fn says(line: &'static str) -> ServerAddr {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = format!("nats://{}", listener.local_addr().unwrap()).parse().unwrap();
        tokio::spawn(async move {
            let mut held = Vec::new();
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(line.as_bytes()).await;
                held.push(stream);
            }
        });
        address
    }

    #[test]
    fn a_server_has_longer_to_greet_each_time_and_never_longer_than_to_connect() {
        for (attempt, seconds) in [(0, 1), (1, 1), (2, 2), (3, 4), (6, 20), (usize::MAX, 20)] {
            assert_eq!(within(attempt), Duration::from_secs(seconds), "attempt {attempt}");
        }
    }

    #[tokio::test]
    async fn a_server_that_is_silent_or_says_something_else_is_not_chosen() {
        let (silent, odd, good) = (says("").await, says("HTTP/1.1 200\r\n").await, says("INFO {\"server_id\":\"a\"}\r\n").await);
        let chooser = chooser();
        for _ in 0..10 {
            let servers = [silent.clone(), odd.clone(), good.clone()];
            assert_eq!(chooser.greeting(&servers, Duration::from_secs(5)).await.as_ref(), Some(&good));
        }
        assert_eq!(chooser.greeting(&[silent, odd], Duration::from_millis(100)).await, None);
    }

    #[tokio::test]
    async fn a_server_that_was_left_is_chosen_only_if_there_is_no_other() {
        let (left, other) = (says("INFO {\"server_id\":\"a\"}\r\n").await, says("INFO {\"server_id\":\"b\"}\r\n").await);
        let chooser = chooser();
        chooser.avoid("a");
        for _ in 0..10 {
            let servers = [left.clone(), other.clone()];
            assert_eq!(chooser.greeting(&servers, Duration::from_secs(5)).await.as_ref(), Some(&other));
        }
        assert_eq!(chooser.greeting(std::slice::from_ref(&left), Duration::from_millis(500)).await, Some(left));
    }
}
