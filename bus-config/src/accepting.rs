//! What a loop that accepts connections does when it cannot: a process without files to spare would find the same connection waiting at
//! once, again and again, and take a whole processor.

use std::io;
use std::time::Duration;

use tokio::time::Instant;

/// Between two attempts.
pub const PAUSE: Duration = Duration::from_millis(100);
/// How often it is told, as long as it goes on.
const TELL_EVERY: Duration = Duration::from_secs(10);

/// One for each loop.
#[derive(Debug)]
pub struct Accepting {
    what: &'static str,
    told: Option<Instant>,
}

impl Accepting {
    /// `what` is served there.
    pub fn new(what: &'static str) -> Self {
        Self { what, told: None }
    }

    /// A connection was not accepted. Returns when the next attempt makes sense: at once if only that connection was lost.
    pub async fn failed(&mut self, error: &io::Error) {
        if is_about_the_connection(error) {
            return;
        }
        if self.told.is_none_or(|told| told.elapsed() >= TELL_EVERY) {
            self.told = Some(Instant::now());
            tracing::warn!(served = self.what, %error, "connections wait: raise the limit of open files if this goes on");
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// The peer has gone: the next in the queue is another.
fn is_about_the_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_loop_without_files_waits_and_one_that_lost_a_peer_does_not() {
        const EMFILE: i32 = 24;
        const ENFILE: i32 = 23;
        let mut accepting = Accepting::new("a test");
        let start = Instant::now();
        for number in [EMFILE, ENFILE, EMFILE] {
            accepting.failed(&io::Error::from_raw_os_error(number)).await;
        }
        assert!(start.elapsed() >= 3 * PAUSE);
        let lost = io::ErrorKind::ConnectionAborted.into();
        assert!(tokio::time::timeout(Duration::ZERO, accepting.failed(&lost)).await.is_ok(), "at once");
    }
}
