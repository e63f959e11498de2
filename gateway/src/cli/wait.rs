//! `wait`: until every host that a change concerns has it in force.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use clap::Args;

use super::client::{Api, Call};
use super::context::Connection;
use super::{Code, Failure, Result, output};
use crate::api::changes::ShownChange;
use crate::progress::{Behind, Progress};

/// How long the gateway is asked to hold back one answer: the bar moves at least as often.
const ROUND: Duration = Duration::from_millis(1_000);
const BAR_WIDTH: usize = 30;
/// Laggards that are named.
const NAMED_MAX: usize = 20;

#[derive(Debug, Clone, Args)]
pub struct WaitOptions {
    /// Wait until every host it concerns has it in force.
    #[arg(short, long)]
    pub wait: bool,
    /// How long the command may take, writing and waiting together [default: 30s of waiting]
    #[arg(long, value_parser = humantime::parse_duration)]
    pub timeout: Option<Duration>,
}

impl WaitOptions {
    /// When the command must be over, if that was said.
    pub fn deadline(&self) -> Option<Instant> {
        self.timeout.and_then(|timeout| Instant::now().checked_add(timeout))
    }
}

/// How long is waited unless it is said.
const WAIT_DEFAULT: Duration = Duration::from_secs(30);
/// How much longer than asked an answer may take that was asked to come by then.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// The change to wait for.
    change: u64,
    /// How long to wait.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "30s")]
    timeout: Duration,
}

pub async fn wait(connection: &Connection, options: Options) -> Result {
    wait_for(&connection.api()?, connection, options.change, Instant::now().checked_add(options.timeout)).await
}

/// Fails with the exit code that says why not.
pub async fn wait_for(api: &Api, connection: &Connection, change: u64, deadline: Option<Instant>) -> Result {
    let deadline = deadline.unwrap_or_else(|| Instant::now() + WAIT_DEFAULT);
    let terminal = std::io::stderr().is_terminal();
    let paint = output::Paint(connection.color.is_on(terminal));
    // The last round may be too short for any answer: what was known before it still is.
    let mut known: Option<Progress> = None;
    loop {
        let round = deadline.saturating_duration_since(Instant::now()).min(ROUND);
        let path = format!("/v1/changes/{change}?wait=enforced&timeout={}ms", round.as_millis());
        let call = Call::get(path).waits(round).until(deadline.checked_add(GRACE));
        match api.fetch::<ShownChange>(&call).await {
            Ok(shown) => known = shown.progress.or(known),
            // What was known before the gateway fell silent is more than nothing.
            Err(failure) if known.is_none() || Instant::now() < deadline => return Err(failure),
            Err(_) => {}
        }
        if terminal && let Some(progress) = &known {
            let _ = write!(std::io::stderr(), "\r\x1b[K{}", bar(progress));
        }
        let late = Instant::now() >= deadline;
        let done = known.as_ref().is_some_and(|progress| progress.done);
        if done || late || known.as_ref().is_some_and(is_hopeless) {
            if terminal {
                let _ = write!(std::io::stderr(), "\r\x1b[K");
            }
            return judged(change, known.as_ref(), paint);
        }
    }
}

/// Nothing gets better by waiting: a host failed, or everybody who is missing has to be told something first.
fn is_hopeless(progress: &Progress) -> bool {
    let missing = progress.span.saturating_sub(progress.enforced) as usize;
    let all_are_held = missing > 0 && progress.behind.len() >= missing && progress.behind.iter().all(Behind::is_held);
    all_are_held || progress.behind.iter().any(Behind::failed)
}

/// Hosts enforced of span.
pub fn bar(progress: &Progress) -> String {
    let (enforced, span) = (progress.enforced as usize, progress.span as usize);
    let filled = (BAR_WIDTH * enforced.min(span)).checked_div(span).unwrap_or(BAR_WIDTH);
    format!("[{}{}] {enforced} of {span} hosts enforce it", "#".repeat(filled), ".".repeat(BAR_WIDTH - filled))
}

fn judged(change: u64, progress: Option<&Progress>, paint: output::Paint) -> Result {
    let Some(progress) = progress else {
        let message = format!("change {change} was not published in time, or nobody knows how far it is");
        return Err(Failure::new(Code::TimedOut, message).hint("does a controller lead? see `groupcast doctor`"));
    };
    if progress.done {
        output::say(&paint.green(&finished(progress)));
        return Ok(());
    }
    Err(unfinished(progress))
}

pub fn finished(progress: &Progress) -> String {
    let Progress { change, span, last_ms, .. } = progress;
    match (span, last_ms) {
        (0, _) => format!("change {change} concerns no host"),
        (1, Some(ms)) => format!("change {change} is enforced on its one host after {ms} ms"),
        (_, Some(ms)) => format!("change {change} is enforced on all {span} hosts after {ms} ms"),
        (_, None) => format!("change {change} is enforced on all {span} hosts"),
    }
}

pub fn unfinished(progress: &Progress) -> Failure {
    let Progress { change, span, enforced, behind, .. } = progress;
    // Those that have to be told something first.
    let (held, others): (Vec<&Behind>, Vec<&Behind>) = behind.iter().partition(|behind| behind.is_held());
    let line = |b: &&Behind| format!("{}: {}; {}", b.host, b.why, b.advice());
    let mut details: Vec<String> = held.iter().chain(&others).take(NAMED_MAX).map(line).collect();
    let more = (span.saturating_sub(*enforced) as usize).saturating_sub(details.len());
    if more > 0 {
        details.push(format!("and {more} more"));
    }
    let (code, hint) = match (held.is_empty(), behind.iter().all(|b| b.state == "waiting")) {
        (false, _) => (Code::HostFailed, "waiting does not help: each line says what its host does instead, and how to end it"),
        (true, true) => (Code::TimedOut, "it goes on by itself: wait longer with `groupcast wait`"),
        (true, false) => (Code::TimedOut, "hosts that are back get it by themselves: wait longer with `groupcast wait`"),
    };
    let message = format!("change {change} is enforced on {enforced} of {span} hosts");
    Failure { code, message, details, hint: Some(hint.to_owned()) }
}
