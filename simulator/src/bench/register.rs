//! `bench register`: a whole fleet enrols at once, and then lives: it beats, some leave and come back, some vanish. The controller is a
//! process of its own; every host has a connection of its own. What is left in the registry at the end is counted against what should be.
//!
//! Two baselines in the same run: the same hosts ask somebody who answers at once (`echo_ms`: what the bus takes to carry the
//! requests), and one client writes what has to be written, one batch for each host, many on their way (`raw_ms`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::subjects::RegistryKey;
use groupcast_bus_config::{connect, streams, subjects};
use groupcast_control::catalog::Catalog;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Document;
use groupcast_control::log::Log;
use groupcast_control::registration::grant::Grant;
use groupcast_messages::{Beat, HostRequest, HostRequestAnswer, HostState, Register, RegisterAnswer, RegisterWorkload};
use groupcast_policy::doc::Phase;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::Template;
use groupcast_policy::net::Prefix;
use hdrhistogram::Histogram;

use super::fleet::{self, Finish};
use super::process::Process;
use super::register_raw::{self, Echo};
use super::{Report, bus, say};
use crate::lean::{Frame, Handler, Running, Wire, spawn};
use crate::random::Random;

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Hosts, each with a connection of its own.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(super) hosts: u32,
    /// Workloads of each.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(super) workloads: u32,
    /// How long the fleet lives after that, in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    steady_seconds: u32,
    /// Hosts that leave and come back, or vanish, in one minute, in percent.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=100))]
    churn_percent: u32,
    /// The groupcast binary; without it, the one beside this program.
    #[arg(long, env = "GROUPCAST_BIN")]
    groupcast: Option<PathBuf>,
}

const BEAT: Duration = Duration::from_secs(5);
const LEASE: Duration = Duration::from_secs(20);
const GRACE: Duration = Duration::from_secs(10);
/// What was not answered for so long is asked again, as an agent does.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Of those that churn, every so manieth vanishes without a word.
const VANISHES_EVERY: u32 = 4;
/// Grants written in one change.
const GRANTS_AT_ONCE: usize = 4_000;

/// What all hosts share.
#[derive(Debug, Default)]
struct Shared {
    finish: Finish,
    waiting: AtomicUsize,
    waiting_peak: AtomicUsize,
    asked_again: AtomicUsize,
    refused: Mutex<BTreeMap<String, usize>>,
    took_us: Mutex<Vec<u64>>,
}

impl Shared {
    fn sent(&self) {
        let waiting = self.waiting.fetch_add(1, Ordering::Relaxed) + 1;
        self.waiting_peak.fetch_max(waiting, Ordering::Relaxed);
    }

    fn reset(&self) {
        for count in [&self.waiting, &self.waiting_peak, &self.asked_again] {
            count.store(0, Ordering::Relaxed);
        }
        self.took_us.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

enum Command {
    Enrol,
    /// As if it had never enrolled.
    Forget,
    /// Farewell, and back as soon as that is answered.
    Churn,
    /// Silent from here on.
    Vanish,
}

/// One host at the end of a connection.
struct Host {
    id: HostId,
    register: Vec<u8>,
    shared: Arc<Shared>,
    beats: u64,
    beat_at: Option<Instant>,
    /// What it waits for, and since when it was last asked for.
    asked: Option<(Asked, Instant)>,
    /// Whether it never was enrolled, and since when it wants to be, however often it has asked.
    first: bool,
    wants_since: Option<Instant>,
    listens: bool,
    token: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    Enrol,
    Leave,
}

impl Host {
    fn ask(&mut self, asked: Asked, wire: &mut Wire<'_>) {
        self.token += 1;
        let payload = match asked {
            Asked::Enrol => self.register.clone(),
            Asked::Leave => HostRequest::Leave { boot: 1 }.encode(),
        };
        let token = format!("t{}", self.token);
        wire.outbound.publish_with_headers(&subjects::register(&self.id), None, &[(subjects::ANSWER_TOKEN, &token)], &payload);
        let now = Instant::now();
        self.asked = Some((asked, now));
        self.wants_since.get_or_insert(now);
        self.shared.sent();
    }

    fn answered(&mut self, payload: &[u8], wire: &mut Wire<'_>) {
        let Some((asked, since)) = self.asked.take() else { return };
        self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
        match asked {
            Asked::Leave => {
                if matches!(HostRequestAnswer::decode(payload), Ok(HostRequestAnswer::Done { .. })) {
                    self.ask(Asked::Enrol, wire);
                }
            }
            Asked::Enrol => match RegisterAnswer::decode(payload) {
                Ok(RegisterAnswer::Registered { .. }) => {
                    if std::mem::take(&mut self.first) {
                        let since = self.wants_since.take().unwrap_or(since);
                        let took_us = since.elapsed().as_micros() as u64;
                        self.shared.took_us.lock().unwrap_or_else(PoisonError::into_inner).push(took_us);
                        self.shared.finish.arrive();
                    }
                    self.beat_at.get_or_insert_with(Instant::now);
                }
                Ok(RegisterAnswer::Refused { reason, .. }) => {
                    *self.shared.refused.lock().unwrap_or_else(PoisonError::into_inner).entry(reason).or_default() += 1;
                    self.ask(Asked::Enrol, wire);
                }
                Err(_) => self.ask(Asked::Enrol, wire),
            },
        }
    }
}

impl Handler for Host {
    type Command = Command;

    fn on_frame(&mut self, frame: Frame<'_>, wire: &mut Wire<'_>) {
        let Frame::Message(message) = frame else { return };
        match subjects::answer_token(message.subject) {
            // Whoever has vanished, or is about to enrol anyway, hears nothing new.
            Some("beat") if self.asked.is_none() && self.beat_at.is_some() => self.ask(Asked::Enrol, wire),
            Some(token) if token == format!("t{}", self.token) => {
                let payload = message.payload.to_vec();
                self.answered(&payload, wire);
            }
            _ => {}
        }
    }

    fn on_command(&mut self, command: Command, wire: &mut Wire<'_>) {
        match command {
            Command::Enrol => {
                if !std::mem::replace(&mut self.listens, true) {
                    wire.outbound.subscribe(&subjects::answers(&self.id), 1);
                }
                self.ask(Asked::Enrol, wire);
            }
            Command::Forget => (self.first, self.beat_at, self.asked, self.wants_since) = (true, None, None, None),
            Command::Churn if self.asked.is_none() => self.ask(Asked::Leave, wire),
            Command::Churn => {}
            Command::Vanish => {
                self.beat_at = None;
                if self.asked.take().is_some() {
                    self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let again = self.asked.map(|(_, since)| since + ANSWER_WITHIN);
        [self.beat_at, again].into_iter().flatten().min()
    }

    fn on_deadline(&mut self, now: Instant, wire: &mut Wire<'_>) {
        if let Some((asked, since)) = self.asked
            && now >= since + ANSWER_WITHIN
        {
            self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
            self.shared.asked_again.fetch_add(1, Ordering::Relaxed);
            self.ask(asked, wire);
        }
        if self.beat_at.is_some_and(|at| now >= at) {
            self.beats += 1;
            // Spread by the host's own number and the beat's: the same in every run.
            let spread = (u64::from(self.id.as_str().bytes().fold(7u32, |sum, b| sum.wrapping_mul(31) + u32::from(b))) * 37
                + self.beats * 101)
                % 500;
            self.beat_at = Some(now + BEAT * (750 + spread as u32) / 1_000);
            let beat = Beat { boot: 1, count: self.beats, term: 0, version: "bench".to_owned(), state: HostState::Enforcing };
            let subject = subjects::beat(&self.id);
            wire.outbound.publish_with_headers(&subject, None, &[(subjects::ANSWER_TOKEN, "beat")], &beat.encode());
        }
    }
}

pub(super) fn id(number: u32) -> anyhow::Result<HostId> {
    Ok(HostId::new(&format!("h{number:05}"))?)
}

fn register(options: &Options, number: u32) -> anyhow::Result<Vec<u8>> {
    let mut workloads = Vec::new();
    for w in 0..options.workloads {
        let address = Prefix::v4(0x0a00_0000 + number * 128 + w, 32).context("an address")?;
        workloads.push(RegisterWorkload {
            workload: format!("w{number:05}-{w}").parse()?,
            network: "net".parse()?,
            addresses: BTreeSet::from([address]),
            labels: BTreeMap::new(),
            space: Some("shop".parse()?),
            app: None,
            phase: Phase::Running,
            incarnation: None,
        });
    }
    Ok(Register { boot: 1, template: Some("vm".to_owned()), workloads }.encode())
}

/// The template, and a grant for every host.
async fn prepare(client: &async_nats::Client, options: &Options) -> anyhow::Result<()> {
    say(format_args!("granting {} hosts", options.hosts));
    let mut template = Template::new("vm".parse()?, "net".parse()?);
    template.prefixes.insert(Prefix::v4(0x0a00_0000, 8).context("a prefix")?);
    template.spaces.insert("shop".parse()?);
    let mut writes = Vec::new();
    for number in 0..options.hosts {
        let host = id(number)?;
        template.identities.insert(host.clone());
        let wide = Prefix::v4(0x0a00_0000, 8).context("a prefix")?;
        writes.push(Write::put(Grant::new(host, vec![wide]).document()?, Expected::Absent));
    }
    writes.push(Write::put(Document::Template(Arc::new(template)), Expected::Absent));
    let catalog = Catalog::new(client.clone());
    while !writes.is_empty() {
        let rest = writes.split_off(writes.len().min(GRANTS_AT_ONCE));
        let change =
            Change { author: "bench".into(), reason: String::new(), key: None, writes: std::mem::replace(&mut writes, rest) };
        catalog.write(&change, None).await?;
    }
    Ok(())
}

/// What is in the registry and belongs to nobody who should be there, and what is missing.
async fn orphans(client: &async_nats::Client, options: &Options, vanished: &BTreeSet<u32>) -> anyhow::Result<(u64, u64)> {
    let all = Log::registry(client.clone()).all(subjects::REGISTRY_ALL).await?;
    let there: BTreeSet<String> = all.into_iter().filter(|entry| !entry.payload.is_empty()).map(|entry| entry.subject).collect();
    let (mut expected, network) = (BTreeSet::new(), "net".parse()?);
    for number in (0..options.hosts).filter(|number| !vanished.contains(number)) {
        expected.insert(subjects::registry_host(&id(number)?));
        for w in 0..options.workloads {
            expected.insert(subjects::registry_workload(&format!("w{number:05}-{w}").parse()?));
            let address = std::net::Ipv4Addr::from_bits(0x0a00_0000 + number * 128 + w);
            expected.insert(subjects::registry_address(&network, address.into()));
        }
    }
    let is_entry = |subject: &&String| {
        let key = subjects::parse_registry(subject);
        matches!(key, Some(RegistryKey::Host(_) | RegistryKey::Workload(..) | RegistryKey::Address(..)))
    };
    let orphans = there.iter().filter(is_entry).filter(|subject| !expected.contains(*subject)).count();
    Ok((orphans as u64, expected.difference(&there).count() as u64))
}

pub async fn run(options: &Options) -> anyhow::Result<Report> {
    let server = bus::start_server().await?;
    let own = connect::Options::new(&[server.url()], Role::Controller, &HostId::new("bench")?);
    let (client, _events) = connect::connect(own).await?;
    streams::ensure(&client, 1).await?;
    prepare(&client, options).await?;
    let more = [
        ("--registration-lease", format!("{}s", LEASE.as_secs())),
        ("--registration-grace", format!("{}s", GRACE.as_secs())),
        ("--registration-deletions-per-second", "1000".to_owned()),
    ];
    let more: Vec<&str> = more.iter().flat_map(|(flag, value)| [*flag, value.as_str()]).collect();
    let raw_ms = register_raw::batches(options).await?;
    let shared = Arc::new(Shared::default());
    let mut hosts: Vec<Running<Host>> = Vec::new();
    for (number, connection) in (0..).zip(fleet::connect(bus::address(&server), options.hosts as usize).await?) {
        let host = Host {
            id: id(number)?,
            register: register(options, number)?,
            shared: shared.clone(),
            beats: 0,
            beat_at: None,
            asked: None,
            first: true,
            wants_since: None,
            listens: false,
            token: 0,
        };
        hosts.push(spawn(connection, host));
    }
    say(format_args!("{} hosts ask somebody who answers at once", options.hosts));
    let echo = Echo::start(&client, options.workloads).await?;
    let echo_ms = enrol_all(&hosts, &shared).await?;
    echo.end();
    hosts.iter().for_each(|host| host.commands.send(Command::Forget));
    shared.reset();

    let controller = Process::start_with(options.groupcast.as_deref(), &server.url(), "c1".to_owned(), 3_000, &more)?;
    controller.ready().await?;
    say(format_args!("{} hosts with {} workloads each register at once", options.hosts, options.workloads));
    let all_registered_ms = enrol_all(&hosts, &shared).await?;
    let mut took: Histogram<u64> = Histogram::new(3)?;
    for took_us in shared.took_us.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        took.record(*took_us)?;
    }
    let (peak_waiting, controller_rss_mb) = (shared.waiting_peak.load(Ordering::Relaxed), controller.rss_mb()?);
    let peak_queue = controller.metric("groupcast_register_waiting_peak").await? as u64;

    say(format_args!("and live for {} s", options.steady_seconds));
    // What registering took is given back first, as far as it is.
    tokio::time::sleep(BEAT).await;
    let (rss, cpu, since) = (controller.rss_mb()?, controller.cpu()?, Instant::now());
    let vanished = live(options, &hosts, since).await;
    let (elapsed, used) = (since.elapsed(), controller.cpu()? - cpu);
    let rss_growth_mb = controller.rss_mb()? - rss;

    say(format_args!("{} have vanished; waiting until they are forgotten", vanished.len()));
    let deadline = Instant::now() + LEASE + GRACE + Duration::from_secs(30);
    let (mut left, mut missing) = orphans(&client, options, &vanished).await?;
    while (left, missing) != (0, 0) && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(500)).await;
        (left, missing) = orphans(&client, options, &vanished).await?;
    }
    for (reason, count) in shared.refused.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        say(format_args!("{count} times refused: {reason}"));
    }
    ensure!(missing == 0, "{missing} entries of living hosts are missing");
    Ok(Report::new("register")
        .with("hosts", u64::from(options.hosts))
        .with("workloads", u64::from(options.workloads))
        .with("all_registered_ms", all_registered_ms)
        .with("p50_ms", took.value_at_quantile(0.5) as f64 / 1e3)
        .with("p99_ms", took.value_at_quantile(0.99) as f64 / 1e3)
        .with("raw_ms", raw_ms)
        .with("ratio_to_raw", all_registered_ms / raw_ms)
        .with("echo_ms", echo_ms)
        .with("peak_queue", peak_queue)
        .with("peak_waiting_hosts", peak_waiting)
        .with("asked_again", shared.asked_again.load(Ordering::Relaxed))
        .with("controller_rss_mb", controller_rss_mb)
        .with("steady_seconds", elapsed.as_secs_f64())
        .with("churned", u64::from(churns(options)))
        .with("cpu_percent", 100.0 * used.as_secs_f64() / elapsed.as_secs_f64())
        .with("rss_growth_mb", rss_growth_mb)
        .with_goal("orphans", left, 0.0))
}

/// All of them at once; how long it takes until the last one is told that it is enrolled.
async fn enrol_all(hosts: &[Running<Host>], shared: &Shared) -> anyhow::Result<f64> {
    shared.finish.expect(hosts.len());
    let begun = Instant::now();
    hosts.iter().for_each(|host| host.commands.send(Command::Enrol));
    Ok((shared.finish.wait().await? - begun).as_secs_f64() * 1e3)
}

/// Hosts that leave and come back, or vanish, in the time there is.
fn churns(options: &Options) -> u32 {
    options.hosts * options.churn_percent / 100 * options.steady_seconds / 60
}

/// Lets the fleet live; who vanished.
async fn live(options: &Options, hosts: &[Running<Host>], since: Instant) -> BTreeSet<u32> {
    let (mut random, mut vanished) = (Random::new(7), BTreeSet::new());
    let (count, whole) = (churns(options), Duration::from_secs(u64::from(options.steady_seconds)));
    for step in 0..count {
        tokio::time::sleep_until((since + whole * step / count).into()).await;
        let number = (random.next() % u64::from(options.hosts)) as u32;
        if vanished.contains(&number) {
            continue;
        }
        if step % VANISHES_EVERY == VANISHES_EVERY - 1 {
            vanished.insert(number);
            hosts[number as usize].commands.send(Command::Vanish);
        } else {
            hosts[number as usize].commands.send(Command::Churn);
        }
    }
    tokio::time::sleep_until((since + whole).into()).await;
    vanished
}
