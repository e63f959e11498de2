//! Answers hosts that enrol, end or report on their workloads. Stateless: every controller runs one, and the bus shares the requests
//! out. The host is who the subject says, which the bus has verified.
//!
//! Ten thousand hosts may come at once. They wait in a [`Queue`] that is bounded by their number; what they share (their template) is
//! read once for many; and what they write goes into common batches.

mod shared;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use actix::prelude::*;
use async_nats::{Client, Message as BusMessage};
use bytes::Bytes;
use futures::StreamExt;
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_messages::{Cut, HostRequest, HostRequestAnswer, Register, RegisterAnswer};
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{HealthCheck, Template};
use groupcast_topics::admission::{self, Admission};
use groupcast_topics::nats::{Ears, Kind};

use tokio::task::JoinSet;

use self::shared::SharedReads;
use super::{MAILBOX_MAX, Ping, RETRY_PAUSE};
use crate::catalog::Catalog;
use crate::document::{Document, Name};
use crate::names;
use crate::registration::admit::admit;
use crate::registration::grant::Grant;
use crate::registration::queue::{Pushed, Queue, Request};
use crate::registration::refusals::Refusals;
use crate::registry::{ATTEMPTS_MAX, Enrolment, Error, Limits, Registered, Registry};
use crate::source::heads::Heads;
use crate::source::turns::Turns;

/// Requests answered at once; further ones wait in the queue.
pub const AT_ONCE_MAX: usize = 128;
/// Requests taken from the bus at once while more are there.
const DRAIN_MAX: usize = 1_024;

/// What was judged longer ago is judged again before it is written: the leader looks only at what is written soon after an edit.
const JUDGED_FOR_MAX: Duration = Duration::from_secs(30);
const _: () = assert!((JUDGED_FOR_MAX.as_millis() as u64) < crate::registration::review::RACE_MS);

#[derive(Message)]
#[rtype(result = "()")]
struct Deaf;

pub struct Registrar {
    client: Client,
    ears: Ears,
    runtime: tokio::runtime::Handle,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Registrar {
    pub fn new(client: Client, ears: Ears, runtime: tokio::runtime::Handle) -> Self {
        Self { client, ears, runtime, task: None }
    }
}

impl Actor for Registrar {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        let (client, ears, own, runtime) = (self.client.clone(), self.ears.clone(), context.address(), self.runtime.clone());
        self.task = Some(self.runtime.spawn(async move {
            if let Err(error) = Desk::new(client, &runtime).serve(&ears).await {
                tracing::error!(%error, "cannot hear registrations");
            }
            let _ = own.send(Deaf).await;
        }));
    }

    fn stopping(&mut self, _: &mut Self::Context) -> Running {
        if let Some(task) = self.task.take() {
            task.abort();
        }
        Running::Stop
    }
}

impl Drop for Registrar {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl Supervised for Registrar {}

impl Handler<Deaf> for Registrar {
    type Result = ();

    fn handle(&mut self, _: Deaf, context: &mut Self::Context) {
        context.run_later(RETRY_PAUSE, |_, context| context.stop());
    }
}

impl Handler<Ping> for Registrar {
    type Result = ();

    fn handle(&mut self, _: Ping, _: &mut Self::Context) {}
}

/// Whether the same request may succeed later, and why it is refused now.
type Refusal = (bool, String);

#[derive(Clone)]
struct Desk {
    client: Client,
    catalog: Catalog,
    templates: SharedReads,
    registry: Registry,
    refusals: Arc<Mutex<Refusals>>,
    heads: Heads,
    /// What each host has written, and how often its workloads' health changed.
    writes: Arc<Mutex<Admission>>,
    flaps: Arc<Mutex<Admission>>,
    clock: Instant,
}

impl Desk {
    fn new(client: Client, runtime: &tokio::runtime::Handle) -> Self {
        let (catalog, registry) = (Catalog::new(client.clone()), Registry::shared(client.clone(), runtime));
        Self {
            templates: SharedReads::of(catalog.clone()),
            heads: Heads::new(client.clone()),
            client,
            catalog,
            registry,
            refusals: Arc::default(),
            writes: Arc::new(Mutex::new(Admission::new(admission::WRITES))),
            flaps: Arc::new(Mutex::new(Admission::new(admission::HEALTH))),
            clock: Instant::now(),
        }
    }

    async fn serve(&self, ears: &Ears) -> Result<(), async_nats::Error> {
        let mut requests = ears.listen(Kind::Registrations).await?;
        let mut requests = futures::stream::poll_fn(move |context| requests.poll_recv(context)).ready_chunks(DRAIN_MAX);
        let mut queue: Queue<Bytes> = Queue::default();
        let (mut at_work, mut waiting_for_sources) = (JoinSet::new(), JoinSet::new());
        let mut turns = Turns::default();
        loop {
            while at_work.len() < AT_ONCE_MAX
                && let Some((host, request)) = queue.take()
            {
                let desk = self.clone();
                at_work.spawn(async move {
                    desk.answer(&host, request).await;
                    host
                });
            }
            metrics::gauge!(names::REGISTER_WAITING).set(queue.waiting() as f64);
            metrics::gauge!(names::REGISTER_WAITING_PEAK).set(queue.peak() as f64);
            tokio::select! {
                messages = requests.next() => {
                    let Some(messages) = messages else { return Ok(()) };
                    for (host, request) in messages.into_iter().filter_map(addressed) {
                        // Whoever waits for a source must not hold up what the host asks for meanwhile.
                        if matches!(HostRequest::decode(&request.payload), Ok(HostRequest::Fresh { .. })) {
                            self.fresh(host, request, &mut turns, &mut waiting_for_sources).await;
                            continue;
                        }
                        let answer = request.answer.clone();
                        match queue.push(host, request) {
                            Pushed::Waits => {}
                            Pushed::Repeated | Pushed::Shared => metrics::counter!(names::REGISTER_REPEATED).increment(1),
                            Pushed::Full => self.turn_away(answer, "too many hosts register at once: try again").await,
                            Pushed::OwnFull => self.turn_away(answer, "too many requests of this host wait: try again").await,
                        }
                    }
                }
                Some(done) = at_work.join_next() => match done {
                    Ok(host) => queue.done(&host),
                    // What the host is left with is not known: everything begins anew, and hosts ask again.
                    Err(error) => return Err(error.into()),
                },
                Some(done) = waiting_for_sources.join_next() => turns.left(&done?),
            }
        }
    }

    /// Lets a host wait for sources, or says why not: who is not answered would wait for nothing.
    async fn fresh(&self, host: HostId, request: Request<Bytes>, turns: &mut Turns, waiting: &mut JoinSet<HostId>) {
        if let Err(refused) = turns.take(&host, self.now_ms()) {
            let refused = RegisterAnswer::Refused { retryable: true, reason: refused.to_string() };
            return self.send(request.answer, refused.encode()).await;
        }
        let desk = self.clone();
        waiting.spawn(async move {
            desk.answer(&host, request).await;
            host
        });
    }

    async fn turn_away(&self, answer: String, reason: &str) {
        metrics::counter!(names::REGISTER_TURNED_AWAY).increment(1);
        self.send(answer, RegisterAnswer::Refused { retryable: true, reason: reason.to_owned() }.encode()).await;
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Refuses a host that has written its share.
    fn may_write(&self, host: &HostId, of: &Mutex<Admission>) -> Result<(), Refusal> {
        let may = of.lock().unwrap_or_else(PoisonError::into_inner).may(host, self.now_ms());
        may.then_some(()).ok_or_else(|| (true, format!("host {host} changes its workloads too often: try again later")))
    }

    fn wrote(&self, host: &HostId, of: &Mutex<Admission>, cost: usize) {
        of.lock().unwrap_or_else(PoisonError::into_inner).spend(host, cost as u64, self.now_ms());
    }

    async fn send(&self, answer: String, payload: Vec<u8>) {
        if let Err(error) = self.client.publish(answer, payload.into()).await {
            tracing::warn!(%error, "a registration could not be answered");
        }
    }

    async fn answer(&self, host: &HostId, request: Request<Bytes>) {
        let begun = Instant::now();
        let answer = match HostRequest::decode(&request.payload) {
            Ok(asked) => self.request(host, asked).await,
            Err(_) => self.register(host, &request.payload).await,
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err((retryable, reason)) => {
                metrics::counter!(names::REGISTRATIONS_REFUSED).increment(1);
                self.write_down(host, retryable, &reason).await;
                // A refusal of any request reads the same.
                RegisterAnswer::Refused { retryable, reason }.encode()
            }
        };
        metrics::histogram!(names::REGISTER_SECONDS).record(begun.elapsed().as_secs_f64());
        self.send(request.answer, answer).await;
    }

    /// What a host asks beside enrolling.
    async fn request(&self, host: &HostId, asked: HostRequest) -> Result<Vec<u8>, Refusal> {
        match asked {
            HostRequest::Fresh { within_ms } => {
                let fresh = crate::source::service::fresh(&self.client, &self.heads, Duration::from_millis(within_ms)).await;
                fresh.map(|cut| HostRequestAnswer::Done { cut }.encode()).map_err(|reason| (true, reason))
            }
            HostRequest::Leave { boot } => {
                let ended = self.registry.end(host, boot, None).await.map_err(refusal)?;
                self.wrote(host, &self.writes, ended.cost);
                self.ended(host, "left", &ended);
                Ok(done())
            }
            HostRequest::Remove { boot, workloads } => {
                let ended = self.registry.end(host, boot, Some(&workloads)).await.map_err(refusal)?;
                self.wrote(host, &self.writes, ended.cost);
                self.ended(host, "removed", &ended);
                Ok(done())
            }
            HostRequest::Health { reports, .. } => {
                self.may_write(host, &self.flaps)?;
                self.may_write(host, &self.writes)?;
                let changed = self.registry.health(host, &reports).await.map_err(refusal)?;
                if changed > 0 {
                    self.wrote(host, &self.flaps, 1);
                    self.wrote(host, &self.writes, changed);
                    metrics::counter!(names::HEALTH_CHANGES).increment(changed as u64);
                    tracing::info!(%host, changed, "health of workloads changed");
                }
                Ok(done())
            }
        }
    }

    fn ended(&self, host: &HostId, cause: &'static str, ended: &Registered) {
        metrics::counter!(names::REGISTRATIONS_ENDED, "cause" => cause).increment(ended.incarnations.len() as u64);
        if !ended.incarnations.is_empty() {
            tracing::info!(%host, workloads = ended.incarnations.len(), cause, "registrations ended");
        }
    }

    async fn register(&self, host: &HostId, payload: &[u8]) -> Result<Vec<u8>, Refusal> {
        self.may_write(host, &self.writes)?;
        let register = Register::decode(payload).map_err(|error| (false, format!("the request cannot be read: {error}")))?;
        for attempt in 0..ATTEMPTS_MAX {
            // First the entry, then what is granted: whoever takes the grant away writes the entry afterwards, so that what was judged
            // by the old grant is not written any more.
            let (before, begun) = (self.registry.before(host, attempt == 0).await.map_err(refusal)?, Instant::now());
            let (grant, template) = tokio::try_join!(granted(&self.catalog, host), template(&self.templates, &register))?;
            let (workloads, health) = match &template {
                Some(template) => {
                    (admit(&grant, &register, template).map_err(|reason| (false, reason))?, template.health.clone())
                }
                None => (Vec::new(), None::<HealthCheck>),
            };
            if begun.elapsed() > JUDGED_FOR_MAX {
                continue;
            }
            let limits = Limits::of(template.as_deref());
            let enrolment = Enrolment { boot: register.boot, template: register.template.clone(), limits };
            let registered = self.registry.enrol(host, before, &enrolment, &workloads).await.map_err(refusal)?;
            let Some(registered) = registered else { continue };
            self.wrote(host, &self.writes, registered.cost);
            metrics::counter!(names::REGISTRATIONS).increment(1);
            tracing::debug!(%host, workloads = workloads.len(), sequence = registered.sequence, "enrolled");
            return Ok(RegisterAnswer::Registered { incarnations: registered.incarnations, health }.encode());
        }
        Err(refusal(Error::Busy))
    }

    /// Leaves a trace of the refusal in the log and in AUDIT, now and then: whoever asks without end must fill neither.
    async fn write_down(&self, host: &HostId, retryable: bool, reason: &str) {
        {
            let now_ms = self.now_ms();
            let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
            if !refusals.is_news(host, reason, now_ms) {
                return;
            }
        }
        tracing::warn!(%host, retryable, %reason, "a registration is refused");
        if let Err(error) = self.registry.refused(host, reason).await {
            tracing::warn!(%host, %error, "a refusal could not be written down");
        }
    }
}

/// Who asks, for what, and where the answer goes.
fn addressed((host, message): (HostId, BusMessage)) -> Option<(HostId, Request<Bytes>)> {
    let token = message.headers.as_ref()?.get(subjects::ANSWER_TOKEN)?.as_str();
    let answer = subjects::answer_to(&message.subject, token)?;
    Some((host, Request { payload: message.payload, answer }))
}

/// It is written; when it is published the topics say.
fn done() -> Vec<u8> {
    HostRequestAnswer::Done { cut: Cut::default() }.encode()
}

fn refusal(error: Error) -> Refusal {
    let lasting = matches!(
        error,
        Error::OtherHost { .. }
            | Error::Twice { .. }
            | Error::SharedAddress { .. }
            | Error::TooLarge { .. }
            | Error::TooLong { .. }
            | Error::Mapped { .. }
            | Error::Quota { .. }
            | Error::Internet { .. }
            | Error::Overtaken { .. }
    );
    (!lasting, error.to_string())
}

async fn granted(catalog: &Catalog, host: &HostId) -> Result<Grant, Refusal> {
    let unknown = || (true, format!("host {host} is not known: add it with `groupcast host add {host} --networks ...`"));
    let name = Grant::name(host).map_err(|error| (false, error.to_string()))?;
    let found = catalog.read(&name).await.map_err(|error| (true, error.to_string()))?;
    match found.map(|version| version.document) {
        Some(Ok(Some(document))) => {
            let read = Grant::read(&document);
            let grant = read.map_err(|error| (true, format!("what is granted to host {host} cannot be read: {error}")))?;
            if grant.removing { Err(unknown()) } else { Ok(grant) }
        }
        Some(Err(refused)) => Err((true, refused.to_string())),
        _ => Err(unknown()),
    }
}

/// The template that is asked for; nothing for a host that enrols without workloads.
async fn template(templates: &SharedReads, register: &Register) -> Result<Option<Arc<Template>>, Refusal> {
    let Some(id) = &register.template else {
        return match register.workloads.is_empty() {
            true => Ok(None),
            false => Err((false, "no template is named: say what the host's workloads are".to_owned())),
        };
    };
    let name = Name::new(CatalogKind::Template, id).map_err(|error| (false, error.to_string()))?;
    let found = templates.read(&name).await.map_err(|error| (true, error.to_string()))?;
    match found.as_ref().map(|version| &version.document) {
        Some(Ok(Some(Document::Template(template)))) => Ok(Some(template.clone())),
        Some(Err(refused)) => Err((true, refused.to_string())),
        _ => Err((true, format!("template {id} does not exist: create it"))),
    }
}
