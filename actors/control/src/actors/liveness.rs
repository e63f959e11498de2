//! Hears hosts and follows their entries, on connections that others do not use (`listen`), and runs the [`Lifecycle`]. Every controller has
//! one; while this one leads, what is decided goes to the reaper, hosts that beat without an entry are told to enrol again, and hosts whose
//! template is edited how health is checked now.

mod listen;

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime};

use actix::prelude::*;
use async_nats::Client;
use groupcast_bus_config::{connect, subjects};
use groupcast_messages::BeatAnswer;
use groupcast_policy::ids::{HostId, TemplateId};
use groupcast_topics::nats::Ears;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use self::listen::{Came, Heard, Listen};
use super::reaper::{Look, LookAt, Order};
use super::{MAILBOX_MAX, Ping, RETRY_PAUSE};
use crate::document::GuardRecord;
use crate::names;
use crate::registration::checks::Checks;
use crate::registration::lifecycle::{Effect, Event, Lifecycle};
use crate::registration::review::Review;
use crate::registration::settings::Settings;

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

/// The task that listens ended, and why.
#[derive(Message)]
#[rtype(result = "()")]
struct Ended(String);

pub struct Liveness {
    lifecycle: Lifecycle,
    checks: Checks,
    review: Review,
    settings: Settings,
    options: connect::Options,
    ears: Ears,
    leading: watch::Receiver<Option<u64>>,
    /// What the lifecycle was told of that.
    term: Option<u64>,
    reaper: Recipient<Order>,
    looks: Recipient<LookAt>,
    client: Client,
    since: BTreeMap<HostId, SystemTime>,
    clock: Instant,
    runtime: tokio::runtime::Handle,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Liveness {
    pub fn new(
        settings: Settings,
        (options, ears): (connect::Options, Ears),
        leading: watch::Receiver<Option<u64>>,
        reaper: (Recipient<Order>, Recipient<LookAt>),
        client: Client,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        let (lifecycle, checks, review) = (Lifecycle::new(settings), Checks::default(), Review::default());
        let ((reaper, looks), since, clock, term) = (reaper, BTreeMap::new(), Instant::now(), None);
        Self {
            lifecycle,
            checks,
            review,
            settings,
            options,
            ears,
            leading,
            term,
            reaper,
            looks,
            client,
            since,
            clock,
            runtime,
            task: None,
        }
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
        let Some(term) = self.term else { return tracing::warn!(?effect, "decided without leading: nothing is done") };
        let ordered = effect.clone();
        let answer = self.reaper.send(Order { effect, term }).into_actor(self);
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

    /// Has those hosts looked at whose grant or template was edited.
    fn look_again(&mut self, sweeps: bool, context: &mut Context<Self>) {
        if !self.lifecycle.acts() {
            return;
        }
        let (now_ms, lifecycle) = (self.now_ms(), &self.lifecycle);
        for host in self.review.take(sweeps, now_ms, |host| lifecycle.seen(host, now_ms).is_some()) {
            let looked = self.looks.send(LookAt(host.clone())).into_actor(self);
            context.spawn(looked.map(move |look, this, context| {
                let look = look.unwrap_or(Look::Again);
                this.review.done(&host, look == Look::Again);
                if look == Look::Evicted {
                    this.tell_evicted(host);
                }
                if look != Look::Again {
                    this.look_again(false, context);
                }
            }));
        }
    }

    /// It enrols again what it has, and is told what is refused, and why.
    fn tell_evicted(&self, host: HostId) {
        let client = self.client.clone();
        self.runtime.spawn(async move {
            if let Some(subject) = subjects::answer(&host, subjects::TOLD_TOKEN)
                && let Err(error) = client.publish(subject, BeatAnswer::Unknown.encode().into()).await
            {
                tracing::warn!(%host, %error, "a host was not told that it has lost something: it learns it when it refreshes");
            }
        });
    }

    fn sweep(&mut self, context: &mut Context<Self>) {
        self.step(Event::Tick, context);
        self.look_again(true, context);
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
        let (own, next) = (context.address(), context.address().recipient());
        let listen = Listen { options: self.options.clone(), ears: self.ears.clone(), next };
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
        // Another term is another reign, also where it is this controller's again: lease and grace are counted anew.
        if self.term.is_some() && term.is_some() {
            self.step(Event::Leading(false), context);
        }
        self.term = term;
        self.step(Event::Leading(term.is_some()), context);
        if term.is_some() {
            self.review.begin(self.lifecycle.known());
        }
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
        self.review = Review::default();
        self.since.clear();
    }
}

impl Handler<Came> for Liveness {
    type Result = ();

    fn handle(&mut self, Came(heard): Came, context: &mut Self::Context) {
        for heard in heard {
            match heard {
                Heard::Event(event) => {
                    match &event {
                        Event::Entry { host, enrolled: None, .. } => _ = self.since.remove(host),
                        Event::Entry { host, enrolled: Some(enrolled), .. } => {
                            self.review.entry(host, enrolled.templates.iter().map(String::as_str), self.now_ms());
                        }
                        _ => {}
                    }
                    let is_loaded = event == Event::Loaded;
                    self.step(event, context);
                    if is_loaded {
                        self.review.begin(self.lifecycle.known());
                    }
                }
                Heard::Written(host, at) => _ = self.since.insert(host, at),
                Heard::Template(template, Some(health)) => {
                    let now_ms = self.now_ms();
                    self.review.template(template.clone(), self.lifecycle.hosts_of(&template), now_ms);
                    self.checks.template(template, health, now_ms);
                }
                Heard::Grant(host, granted) => self.review.grant(host, granted, self.now_ms()),
                Heard::Template(template, None) => self.checks.gone(&template),
                Heard::Templates => self.checks.loaded(),
                Heard::Grants => self.review.loaded(),
            }
        }
        self.look_again(false, context);
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
        let Some(term) = self.term.filter(|_| self.lifecycle.acts()) else { return Box::pin(actix::fut::ready(false)) };
        tracing::warn!(%template, "an operator confirms that the silent hosts are gone");
        let now_ms = self.now_ms();
        let effects = self.lifecycle.handle(Event::Confirm { template: template.clone() }, now_ms);
        let written = futures::future::join_all(effects.into_iter().map(|effect| self.reaper.send(Order { effect, term })));
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
