//! Leaves a server that is of no use, though it answers: one that is cut off from its peers, or about to go. Goes home when it is well again.
//!
//! A server without its peers keeps its clients, greets new ones and answers pings, and not one write to our streams succeeds there. So each
//! connection that needs the streams asks for their leaders, and goes to another server when one is missing for long. Where no server has one,
//! going does not help: the pauses grow.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_nats::connection::State;
use async_nats::{Client, ServerAddr};
use tokio::task::JoinHandle;

use super::choose::{Chooser, GREETED_WITHIN, greeted};
use super::random;
use crate::head::{self, COPY_SILENT_MAX};
use crate::streams::Stream;

/// How often the leaders are asked for.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long they have to answer.
const LOOKED_WITHIN: Duration = Duration::from_secs(1);
/// A server from which a stream's leader could not be reached for so long is left. An election takes four seconds or more, and leaving does
/// not shorten it.
pub const LEADERLESS_MAX: Duration = Duration::from_secs(4);
/// Pause before a server is left once more without a leader having been found in between; it doubles.
const LEAVE_PAUSE_FIRST: Duration = Duration::from_secs(4);
const LEAVE_PAUSE_MAX: Duration = Duration::from_secs(60);
/// Who had to leave the server it first chose returns after so long at the earliest, and up to as long again: a fleet does not come at once.
pub const HOME_AFTER: Duration = Duration::from_secs(60);
/// It doubles each time the home had to be left again.
const HOME_AFTER_MAX: Duration = Duration::from_secs(3_600);
/// Clients of a server that goes leave it within this time.
const LEAVING_SPREAD: Duration = Duration::from_secs(1);

/// Ends when it is dropped.
#[derive(Debug)]
pub struct Guard(JoinHandle<()>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Guard {
    pub(super) fn start(
        client: Client,
        chooser: Arc<Chooser>,
        servers: Vec<ServerAddr>,
        needed: &'static [&'static Stream],
        home_after: Duration,
    ) -> Self {
        Self(tokio::spawn(watch(client, chooser, servers, needed, home_after)))
    }
}

/// What to do about the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Advice {
    Stay,
    Leave,
}

/// Decides when a server without leaders is left. Plain: the time is told.
#[derive(Debug, Default)]
struct Patience {
    /// Since when a leader is missing.
    missing_since: Option<Instant>,
    /// When a server was left last, and how long to wait before the next is.
    left: Option<(Instant, Duration)>,
}

impl Patience {
    /// `missing_for` is how long a leader has been missing at least, as far as this look tells; `None` when all answered.
    fn looked(&mut self, missing_for: Option<Duration>, now: Instant) -> Advice {
        let Some(missing_for) = missing_for else {
            *self = Self::default();
            return Advice::Stay;
        };
        let begun = now.checked_sub(missing_for).unwrap_or(now);
        let since = self.missing_since.map_or(begun, |since| since.min(begun));
        self.missing_since = Some(since);
        let is_paused = self.left.is_some_and(|(at, pause)| now.duration_since(at) < pause);
        if now.duration_since(since) < LEADERLESS_MAX || is_paused {
            return Advice::Stay;
        }
        let pause = self.left.map_or(LEAVE_PAUSE_FIRST, |(_, pause)| (pause * 2).min(LEAVE_PAUSE_MAX));
        (self.left, self.missing_since) = (Some((now, pause)), None);
        Advice::Leave
    }

    /// Another connection: what was missing on the last one says nothing about it.
    fn moved(&mut self) {
        self.missing_since = None;
    }
}

/// How long a leader of these streams has been missing, by one look from here; `None` when each was reached.
async fn missing_for(client: &Client, needed: &[&'static Stream]) -> Option<Duration> {
    let begun = Instant::now();
    let looks = needed.iter().map(|stream| head::look(client, stream, LOOKED_WITHIN));
    let missing = futures::future::join_all(looks).await.into_iter().filter_map(Result::err).filter(|error| !error.is_led());
    missing
        .map(|error| match error {
            head::Error::NoMajority { silent, .. } => silent.max(COPY_SILENT_MAX),
            _ => begun.elapsed(),
        })
        .max()
}

/// Where a connection belongs: a fleet that spread by chance stays spread if each comes back to where it was. Plain: the time is told, and
/// what chance decides is a part of it between 0 and 1.
#[derive(Debug)]
struct Home<S> {
    server: S,
    away_since: Option<Instant>,
    /// How long it stays away at least ...
    after: Duration,
    /// ... and how much longer, so that not all come at once.
    spread: Duration,
}

impl<S: PartialEq> Home<S> {
    fn new(server: S, after: Duration, chance: f64) -> Self {
        Self { server, away_since: None, after, spread: after.mul_f64(chance) }
    }

    /// The connection is with this server now.
    fn arrived(&mut self, server: &S, now: Instant) {
        self.away_since = if self.server == *server { None } else { self.away_since.or(Some(now)) };
    }

    /// The server it is with is left because it is of no use.
    fn left(&mut self) {
        if self.away_since.is_none() {
            self.after = (self.after * 2).min(HOME_AFTER_MAX);
        }
    }

    /// Whether it is time to go back; if so, not again at once should it fail.
    fn is_due(&mut self, now: Instant, chance: f64) -> bool {
        let is_due = self.away_since.is_some_and(|since| now.duration_since(since) >= self.after + self.spread);
        if is_due {
            (self.away_since, self.spread) = (Some(now), self.after.mul_f64(chance));
        }
        is_due
    }
}

/// Between 0 and 1, by chance.
fn chance() -> f64 {
    (random() % 1_000) as f64 / 1_000.0
}

async fn watch(
    client: Client,
    chooser: Arc<Chooser>,
    servers: Vec<ServerAddr>,
    needed: &'static [&'static Stream],
    home_after: Duration,
) {
    if servers.len() < 2 {
        return; // there is nowhere to go
    }
    let (mut patience, mut home, mut here): (Patience, Option<Home<ServerAddr>>, String) = Default::default();
    let mut tick = tokio::time::interval(LOOK_EVERY);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let is_leaving = tokio::select! {
            _ = tick.tick() => false,
            () = chooser.leaving.notified() => true,
        };
        if client.connection_state() != State::Connected {
            patience.moved();
            continue;
        }
        let now_here = client.server_info().server_id;
        if now_here != here
            && let Some(server) = with_id(&servers, &now_here).await
        {
            here = now_here;
            patience.moved();
            let home = home.get_or_insert_with(|| Home::new(server.clone(), home_after, chance()));
            home.arrived(&server, Instant::now());
        }
        if is_leaving {
            tokio::time::sleep(LEAVING_SPREAD.mul_f64(chance())).await;
            leave(&client, &chooser, "the server is about to go").await;
            continue;
        }
        if patience.looked(missing_for(&client, needed).await, Instant::now()) == Advice::Leave {
            home.iter_mut().for_each(Home::left);
            leave(&client, &chooser, "a stream's leader cannot be reached from this server").await;
            continue;
        }
        if let Some(home) = &mut home
            && home.is_due(Instant::now(), chance())
            && greeted(&home.server, GREETED_WITHIN).await.is_some()
        {
            tracing::info!("the server that was left is back: returning to it");
            chooser.prefer(&home.server);
            let _ = client.force_reconnect().await; // a client that ended needs no server
        }
    }
}

/// Which of the servers this is.
async fn with_id(servers: &[ServerAddr], id: &str) -> Option<ServerAddr> {
    let answers = futures::future::join_all(servers.iter().map(|server| greeted(server, GREETED_WITHIN))).await;
    servers.iter().zip(answers).find(|(_, answer)| answer.as_deref() == Some(id)).map(|(server, _)| server.clone())
}

pub(super) async fn leave(client: &Client, chooser: &Chooser, why: &str) {
    let info = client.server_info();
    tracing::warn!(server = %info.server_name, why, "leaving a server of the bus for another");
    chooser.avoid(&info.server_id);
    let _ = client.force_reconnect().await; // a client that ended needs no server
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_left_when_a_leader_is_missing_for_long_and_then_ever_more_seldom() {
        let (start, mut patience) = (Instant::now(), Patience::default());
        let mut left = Vec::new();
        for second in 0..200u64 {
            let now = start + Duration::from_secs(second);
            if patience.looked(Some(Duration::ZERO), now) == Advice::Leave {
                left.push(second);
            }
        }
        assert_eq!(left, [4, 9, 17, 33, 65, 125, 185], "the pauses double up to a minute");
        assert_eq!(patience.looked(None, start + Duration::from_secs(200)), Advice::Stay);
        let again = start + Duration::from_secs(300);
        assert_eq!(patience.looked(Some(Duration::ZERO), again), Advice::Stay);
        assert_eq!(patience.looked(Some(Duration::ZERO), again + LEADERLESS_MAX), Advice::Leave, "patience is as at first");
    }

    #[test]
    fn what_a_look_knows_of_the_past_counts_and_a_move_forgets_it() {
        let (now, mut patience) = (Instant::now() + Duration::from_secs(60), Patience::default());
        assert_eq!(patience.looked(Some(LEADERLESS_MAX - Duration::from_millis(1)), now), Advice::Stay);
        patience.moved();
        assert_eq!(patience.looked(Some(Duration::ZERO), now + Duration::from_secs(1)), Advice::Stay);
        assert_eq!(patience.looked(Some(LEADERLESS_MAX), now + Duration::from_secs(1)), Advice::Leave);
    }

    #[test]
    fn who_had_to_leave_goes_home_after_one_to_two_times_as_long_and_later_each_time() {
        let (start, second) = (Instant::now(), Duration::from_secs(1));
        for chance in [0.0, 0.5, 0.999] {
            let mut home = Home::new("a", HOME_AFTER, chance);
            home.arrived(&"a", start);
            assert!(!home.is_due(start + HOME_AFTER_MAX, chance), "it is there");
            // It is left twice as long as at first: a server that was bad once may be bad again.
            home.left();
            let left = start + second;
            home.arrived(&"b", left);
            home.arrived(&"c", left + second);
            let due = left + (HOME_AFTER * 2) + HOME_AFTER.mul_f64(chance);
            assert!(
                !home.is_due(due - second, chance) && home.is_due(due, chance),
                "counted from when it left, not from where it went"
            );
            // It fails: not again at once.
            let again = due + (HOME_AFTER * 2).mul_f64(1.0 + chance);
            assert!(!home.is_due(due + second, chance) && !home.is_due(again - second, chance) && home.is_due(again, chance));
            home.arrived(&"a", again);
            assert!(!home.is_due(again + HOME_AFTER_MAX, chance), "it is home");
            // Leaving another server says nothing about home.
            home.arrived(&"b", again);
            home.left();
            assert_eq!(home.after, HOME_AFTER * 2);
            home.arrived(&"a", again);
            (0..20).for_each(|_| home.left());
            assert_eq!(home.after, HOME_AFTER_MAX);
        }
    }
}
