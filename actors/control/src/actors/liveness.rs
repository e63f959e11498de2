//! Hears hosts and follows their entries, on a connection of its own, and runs the [`Lifecycle`]. Every controller has one; while this
//! one leads, what is decided goes to the reaper, hosts that beat without an entry are told to enrol again, and hosts whose template is
//! edited how health is checked now.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use actix::prelude::*;
use async_nats::Client;
use async_nats::jetstream::consumer::DeliverPolicy;
use futures::StreamExt;
use groupcast_bus_config::connect;
use groupcast_bus_config::subjects::{self, CatalogKind, RegistryKey, parse_registry};
use groupcast_messages::{Beat, BeatAnswer};
use groupcast_policy::ids::{HostId, TemplateId};
use groupcast_policy::model::HealthCheck;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::reaper::Order;
use super::{MAILBOX_MAX, Ping, RETRY_PAUSE};
use crate::document::{Document, GuardRecord, HostEntry, Name, decode_record};
use crate::log::Log;
use crate::names;
use crate::registration::checks::Checks;
use crate::registration::lifecycle::{Deaf, Effect, Event, Lifecycle};
use crate::registration::settings::Settings;
use crate::registry::boot_text;

/// Beats and entries taken at once while more are there.
const DRAIN_MAX: usize = 1_024;
/// How often it is checked that REGISTRY is still the stream that is followed.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// How these hosts are, as the leader knows it; `None` from a controller that does not lead.
#[derive(Message)]
#[rtype(result = "Option<Vec<ShownHost>>")]
pub struct AskHosts(pub Vec<HostId>);

/// The silent hosts of a template are gone for good. Whether this controller can act on it.
#[derive(Message)]
#[rtype(result = "bool")]
pub struct Confirm(pub TemplateId);

/// What can be seen of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LivenessView {
    pub acts: bool,
    pub hosts: usize,
    pub suspects: usize,
    pub frozen: Vec<GuardRecord>,
}

#[derive(Message)]
#[rtype(result = "LivenessView")]
pub struct LookAtLiveness;

/// A host as it is told to gateways.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShownHost {
    pub host: String,
    /// `live`, `suspect`, or `frozen`: suspect, and not deleted because too many are.
    pub state: String,
    pub boot: String,
    /// Since when the entry is as it is, by the clock of the bus.
    pub since: String,
    /// How long ago it was last heard of by the leader; nothing was heard before it led.
    pub heard_ms: u64,
}

/// What came from the bus.
#[derive(Message)]
#[rtype(result = "()")]
struct Came(Vec<Heard>);

enum Heard {
    Event(Event),
    /// When a host's entry was written.
    Written(HostId, SystemTime),
    /// How a template says that health is checked; nothing of one that is gone.
    Template(TemplateId, Option<Option<HealthCheck>>),
    /// Every template was read once.
    Templates,
}

/// The task that listens ended, and why.
#[derive(Message)]
#[rtype(result = "()")]
struct Ended(String);

pub struct Liveness {
    lifecycle: Lifecycle,
    checks: Checks,
    settings: Settings,
    options: connect::Options,
    leading: watch::Receiver<Option<u64>>,
    reaper: Recipient<Order>,
    client: Client,
    since: BTreeMap<HostId, SystemTime>,
    clock: Instant,
    runtime: tokio::runtime::Handle,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Liveness {
    pub fn new(
        settings: Settings,
        options: connect::Options,
        leading: watch::Receiver<Option<u64>>,
        reaper: Recipient<Order>,
        client: Client,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        let (lifecycle, checks, clock) = (Lifecycle::new(settings), Checks::default(), Instant::now());
        Self { lifecycle, checks, settings, options, leading, reaper, client, since: BTreeMap::new(), clock, runtime, task: None }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn step(&mut self, event: Event, context: &mut Context<Self>) {
        let now_ms = self.now_ms();
        for effect in self.lifecycle.handle(event, now_ms) {
            self.perform(effect, context);
        }
    }

    fn perform(&mut self, effect: Effect, context: &mut Context<Self>) {
        if let Effect::Tell { host, answer } = effect {
            let client = self.client.clone();
            self.runtime.spawn(async move {
                if let Some(subject) = subjects::answer(&host, &answer)
                    && let Err(error) = client.publish(subject, BeatAnswer::Unknown.encode().into()).await
                {
                    tracing::warn!(%host, %error, "a host was not told to enrol again");
                }
            });
            return;
        }
        let ordered = effect.clone();
        let answer = self.reaper.send(Order(effect)).into_actor(self);
        context.spawn(answer.map(move |done, this, context| {
            let done = done.unwrap_or(false);
            match ordered {
                Effect::Suspect { host, .. } | Effect::Live { host, .. } | Effect::Delete { host, .. } => {
                    this.step(Event::Done { host, deleted: done }, context);
                }
                Effect::Guard { template, .. } if !done => this.step(Event::NotGuarded { template }, context),
                Effect::Tell { .. } | Effect::Guard { .. } => {}
            }
        }));
    }

    /// Hosts whose template says anew how health is checked. Unasked, under a token that agents know.
    fn tell_checks(&mut self) {
        let now_ms = self.now_ms();
        for (template, health) in self.checks.due(self.lifecycle.acts(), now_ms) {
            let hosts: Vec<HostId> = self.lifecycle.hosts_of(&template).cloned().collect();
            tracing::info!(%template, hosts = hosts.len(), "hosts are told how health is checked");
            let told = bytes::Bytes::from(BeatAnswer::Check { template: template.to_string(), health }.encode());
            let client = self.client.clone();
            self.runtime.spawn(async move {
                for host in hosts {
                    if let Some(subject) = subjects::answer(&host, subjects::TOLD_TOKEN)
                        && let Err(error) = client.publish(subject, told.clone()).await
                    {
                        tracing::warn!(%host, %error, "a host was not told how health is checked: it learns it when it refreshes");
                    }
                }
            });
        }
    }

    fn sweep(&mut self, context: &mut Context<Self>) {
        self.step(Event::Tick, context);
        self.tell_checks();
        metrics::gauge!(names::REGISTERED_HOSTS).set(self.lifecycle.hosts() as f64);
        metrics::gauge!(names::SUSPECT_HOSTS).set(self.lifecycle.suspects() as f64);
        metrics::gauge!(names::FROZEN_TEMPLATES).set(self.lifecycle.frozen().count() as f64);
    }

    fn shown(&self, host: &HostId) -> Option<ShownHost> {
        let seen = self.lifecycle.seen(host, self.now_ms())?;
        let state = match (seen.suspect, seen.frozen) {
            (true, true) => "frozen",
            (true, false) => "suspect",
            (false, _) => "live",
        };
        let since = self.since.get(host).copied().unwrap_or(SystemTime::UNIX_EPOCH);
        let since = humantime::format_rfc3339_millis(since).to_string();
        Some(ShownHost { host: host.to_string(), state: state.to_owned(), boot: seen.boot, since, heard_ms: seen.silent_ms })
    }

    fn abort(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl Actor for Liveness {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        let (listen, own) = (Listen { options: self.options.clone(), next: context.address().recipient() }, context.address());
        self.task = Some(self.runtime.spawn(async move {
            let why = match listen.run().await {
                Ok(why) => why.to_owned(),
                Err(error) => error.to_string(),
            };
            // Nobody to tell: the actor is gone.
            let _ = own.send(Ended(why)).await;
        }));
        context.run_interval(self.settings.sweep, Self::sweep);
        let mut leading = self.leading.clone();
        leading.mark_changed();
        context.add_stream(turns(leading));
    }

    fn stopping(&mut self, _: &mut Self::Context) -> Running {
        self.abort();
        Running::Stop
    }
}

/// Whether this controller leads, whenever that changes.
fn turns(leading: watch::Receiver<Option<u64>>) -> impl futures::Stream<Item = Option<u64>> {
    futures::stream::unfold(leading, |mut leading| async move {
        leading.changed().await.ok()?;
        let term = *leading.borrow_and_update();
        Some((term, leading))
    })
}

impl StreamHandler<Option<u64>> for Liveness {
    fn handle(&mut self, term: Option<u64>, context: &mut Self::Context) {
        self.step(Event::Leading(term.is_some()), context);
    }

    fn finished(&mut self, _: &mut Self::Context) {}
}

impl Drop for Liveness {
    fn drop(&mut self) {
        self.abort();
    }
}

impl Supervised for Liveness {
    fn restarting(&mut self, _: &mut Self::Context) {
        self.abort();
        // What was heard until now is not what will be heard from now on: everything is counted anew.
        self.lifecycle = Lifecycle::new(self.settings);
        self.checks = Checks::default();
        self.since.clear();
    }
}

impl Handler<Came> for Liveness {
    type Result = ();

    fn handle(&mut self, Came(heard): Came, context: &mut Self::Context) {
        for heard in heard {
            match heard {
                Heard::Event(event) => {
                    if let Event::Entry { host, enrolled: None, .. } = &event {
                        self.since.remove(host);
                    }
                    self.step(event, context);
                }
                Heard::Written(host, at) => _ = self.since.insert(host, at),
                Heard::Template(template, Some(health)) => self.checks.template(template, health, self.now_ms()),
                Heard::Template(template, None) => self.checks.gone(&template),
                Heard::Templates => self.checks.loaded(),
            }
        }
        self.tell_checks();
    }
}

impl Handler<Ended> for Liveness {
    type Result = ();

    fn handle(&mut self, Ended(why): Ended, context: &mut Self::Context) {
        tracing::warn!(%why, "hearing hosts begins anew");
        self.step(Event::Connected(false), context);
        context.run_later(RETRY_PAUSE, |_, context| context.stop());
    }
}

impl Handler<AskHosts> for Liveness {
    type Result = Option<Vec<ShownHost>>;

    fn handle(&mut self, AskHosts(hosts): AskHosts, _: &mut Self::Context) -> Self::Result {
        self.lifecycle.acts().then(|| hosts.iter().filter_map(|host| self.shown(host)).collect())
    }
}

impl Handler<Confirm> for Liveness {
    type Result = ResponseActFuture<Self, bool>;

    /// Answered when it is written: whoever leads next goes by it.
    fn handle(&mut self, Confirm(template): Confirm, _: &mut Self::Context) -> Self::Result {
        if !self.lifecycle.acts() {
            return Box::pin(actix::fut::ready(false));
        }
        tracing::warn!(%template, "an operator confirms that the silent hosts are gone");
        let now_ms = self.now_ms();
        let effects = self.lifecycle.handle(Event::Confirm { template: template.clone() }, now_ms);
        let written = futures::future::join_all(effects.into_iter().map(|effect| self.reaper.send(Order(effect))));
        Box::pin(written.into_actor(self).map(move |written, this, context| {
            let is_written = written.iter().all(|done| matches!(done, Ok(true)));
            if !is_written {
                this.step(Event::NotGuarded { template }, context);
            }
            is_written
        }))
    }
}

impl Handler<LookAtLiveness> for Liveness {
    type Result = MessageResult<LookAtLiveness>;

    fn handle(&mut self, _: LookAtLiveness, _: &mut Self::Context) -> Self::Result {
        let (hosts, suspects) = (self.lifecycle.hosts(), self.lifecycle.suspects());
        let frozen = self.lifecycle.frozen().collect();
        MessageResult(LivenessView { acts: self.lifecycle.acts(), hosts, suspects, frozen })
    }
}

impl Handler<Ping> for Liveness {
    type Result = ();

    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

/// The connection, on a task of its own.
struct Listen {
    options: connect::Options,
    next: Recipient<Came>,
}

impl Listen {
    async fn hand_on(&self, heard: Vec<Heard>) -> Result<(), MailboxError> {
        if heard.is_empty() { Ok(()) } else { self.next.send(Came(heard)).await }
    }

    /// Ends with why everything has to be begun anew.
    async fn run(&self) -> Result<&'static str, Box<dyn std::error::Error + Send + Sync>> {
        let (client, mut events) = connect::connect(self.options.clone()).await?;
        let beats = client.subscribe(subjects::BEAT_ALL).await?;
        let mut elections = futures::stream::select(
            client.subscribe(subjects::TOPICS_LEADER_ELECTED).await?,
            client.subscribe(subjects::REGISTRY_LEADER_ELECTED).await?,
        );
        let log = Log::registry(client.clone());
        let made_at = log.made_at().await?;
        let last = log.last(subjects::REGISTRY_HOSTS).await?.map_or(0, |entry| entry.sequence);
        let entries = log.follow(subjects::REGISTRY_HOSTS, DeliverPolicy::LastPerSubject).await?;
        let mut guards = log.follow(subjects::REGISTRY_GUARDS, DeliverPolicy::LastPerSubject).await?;
        let (catalog, of_templates) = (Log::catalog(client.clone()), subjects::catalog_kind_all(CatalogKind::Template));
        let last_template = catalog.last(&of_templates).await?.map_or(0, |entry| entry.sequence);
        let mut templates = catalog.follow(&of_templates, DeliverPolicy::LastPerSubject).await?;
        let mut check = tokio::time::interval(CHECK_EVERY);
        check.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut beats, mut entries) = (beats.ready_chunks(DRAIN_MAX), entries.ready_chunks(DRAIN_MAX));
        let mut loaded = last == 0;
        let mut begun = vec![Heard::Event(Event::Connected(true))];
        begun.extend(loaded.then_some(Heard::Event(Event::Loaded)));
        begun.extend((last_template == 0).then_some(Heard::Templates));
        self.hand_on(begun).await?;
        loop {
            // What the bus says about itself first, then entries: silence is never judged on less than what is known.
            let heard = tokio::select! {
                biased;
                event = events.next() => match event {
                    None | Some(connect::Event::Closed) => return Ok("the connection is closed"),
                    Some(connect::Event::Connected) => vec![Heard::Event(Event::Connected(true))],
                    Some(connect::Event::Disconnected) => vec![Heard::Event(Event::Connected(false))],
                    Some(connect::Event::SlowConsumer | connect::Event::Missed) => vec![Heard::Event(Event::Deaf(Deaf::Lost))],
                    Some(_) => continue,
                },
                Some(_) = elections.next() => vec![Heard::Event(Event::Deaf(Deaf::Election))],
                Some(messages) = entries.next() => {
                    let mut heard = Vec::with_capacity(2 * messages.len());
                    for message in messages {
                        let message = message?;
                        let info = message.info()?;
                        let (sequence, pending, at) = (info.stream_sequence, info.pending, SystemTime::from(info.published));
                        if let Some(RegistryKey::Host(host)) = parse_registry(&message.subject) {
                            let entry: Option<HostEntry> = decode_record(&message.payload).ok();
                            heard.push(Heard::Written(host.clone(), at));
                            let enrolled = entry.and_then(|entry| entry.enrolled);
                            heard.push(Heard::Event(Event::Entry { host, sequence, enrolled }));
                        }
                        if !loaded && (pending == 0 || sequence >= last) {
                            loaded = true;
                            heard.push(Heard::Event(Event::Loaded));
                        }
                    }
                    heard
                }
                Some(message) = guards.next() => {
                    let message = message?;
                    match parse_registry(&message.subject) {
                        Some(RegistryKey::Guard(template)) => {
                            let record: Option<GuardRecord> = decode_record(&message.payload).ok();
                            vec![Heard::Event(Event::Guard { template, record })]
                        }
                        _ => continue,
                    }
                }
                Some(message) = templates.next() => {
                    let message = message?;
                    let read_once = message.info()?.stream_sequence >= last_template;
                    health(&message).into_iter().chain(read_once.then_some(Heard::Templates)).collect()
                }
                _ = check.tick() => {
                    // Who lost its entries with a stream that was deleted must enrol again, and nothing else would tell this controller.
                    match log.made_at().await {
                        Ok(now) if now != made_at => return Ok("REGISTRY is another stream than before"),
                        _ => continue,
                    }
                }
                Some(messages) = beats.next() => {
                    metrics::counter!(names::BEATS).increment(messages.len() as u64);
                    messages.iter().filter_map(beat).map(Heard::Event).collect()
                }
                else => return Ok("the subscriptions ended"),
            };
            self.hand_on(heard).await?;
        }
    }
}

/// One that cannot be read says nothing: its last good version counts.
fn health(message: &async_nats::Message) -> Option<Heard> {
    let name = Name::parse(&message.subject)?;
    let template = TemplateId::new(name.id()).ok()?;
    match Document::decode(&name, &message.payload).ok()? {
        Some(Document::Template(document)) => Some(Heard::Template(template, Some(document.health.clone()))),
        Some(_) => None,
        None => Some(Heard::Template(template, None)),
    }
}

fn beat(message: &async_nats::Message) -> Option<Event> {
    let host = subjects::host_of(&message.subject)?;
    let beat = Beat::decode(&message.payload).ok()?;
    let answer = message.headers.as_ref().and_then(|headers| headers.get(subjects::ANSWER_TOKEN));
    Some(Event::Beat { host, boot: boot_text(beat.boot), answer: answer.map(|token| token.as_str().to_owned()) })
}
