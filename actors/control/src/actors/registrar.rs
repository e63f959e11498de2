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
use crate::registry::{Enrolment, Error, Registered, Registry};

/// Controllers share the hosts' requests.
const GROUP: &str = "registrar";
/// Requests answered at once; further ones wait in the queue.
pub const AT_ONCE_MAX: usize = 128;
/// Requests taken from the bus at once while more are there.
const DRAIN_MAX: usize = 1_024;
/// Hosts that wait for a source's poll at once. They change nothing here, and wait for long.
pub const FRESH_MAX: usize = 1_000;

#[derive(Message)]
#[rtype(result = "()")]
struct Deaf;

pub struct Registrar {
    client: Client,
    runtime: tokio::runtime::Handle,
    task: Option<tokio::task::JoinHandle<()>>,
}

impl Registrar {
    pub fn new(client: Client, runtime: tokio::runtime::Handle) -> Self {
        Self { client, runtime, task: None }
    }
}

impl Actor for Registrar {
    type Context = Context<Self>;

    fn started(&mut self, context: &mut Self::Context) {
        context.set_mailbox_capacity(MAILBOX_MAX);
        let (client, own, runtime) = (self.client.clone(), context.address(), self.runtime.clone());
        self.task = Some(self.runtime.spawn(async move {
            if let Err(error) = Desk::new(client, &runtime).serve().await {
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
    clock: Instant,
}

impl Desk {
    fn new(client: Client, runtime: &tokio::runtime::Handle) -> Self {
        let (catalog, registry) = (Catalog::new(client.clone()), Registry::shared(client.clone(), runtime));
        Self {
            templates: SharedReads::of(catalog.clone()),
            client,
            catalog,
            registry,
            refusals: Arc::default(),
            clock: Instant::now(),
        }
    }

    async fn serve(&self) -> Result<(), async_nats::Error> {
        let requests = self.client.queue_subscribe(subjects::REGISTER_ALL, GROUP.to_owned()).await?;
        let mut requests = requests.ready_chunks(DRAIN_MAX);
        let mut queue: Queue<Bytes> = Queue::default();
        let (mut at_work, mut waiting_for_sources) = (JoinSet::new(), JoinSet::new());
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
                            if waiting_for_sources.len() < FRESH_MAX {
                                let desk = self.clone();
                                waiting_for_sources.spawn(async move { desk.answer(&host, request).await });
                            }
                            continue;
                        }
                        let answer = request.answer.clone();
                        match queue.push(host, request) {
                            Pushed::Waits => {}
                            Pushed::Repeated | Pushed::Shared => metrics::counter!(names::REGISTER_REPEATED).increment(1),
                            Pushed::Full => self.turn_away(answer).await,
                        }
                    }
                }
                Some(done) = at_work.join_next() => match done {
                    Ok(host) => queue.done(&host),
                    // What the host is left with is not known: everything begins anew, and hosts ask again.
                    Err(error) => return Err(error.into()),
                },
                Some(_) = waiting_for_sources.join_next() => {}
            }
        }
    }

    async fn turn_away(&self, answer: String) {
        metrics::counter!(names::REGISTER_TURNED_AWAY).increment(1);
        let reason = "too many hosts register at once: try again".to_owned();
        self.send(answer, RegisterAnswer::Refused { retryable: true, reason }.encode()).await;
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
                tracing::warn!(%host, retryable, %reason, "a registration is refused");
                self.write_down(host, &reason).await;
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
                let fresh = crate::source::service::fresh(&self.client, Duration::from_millis(within_ms)).await;
                fresh.map(|cut| HostRequestAnswer::Done { cut }.encode()).map_err(|reason| (true, reason))
            }
            HostRequest::Leave { boot } => {
                let ended = self.registry.end(host, boot, None).await.map_err(refusal)?;
                self.ended(host, "left", &ended);
                Ok(done())
            }
            HostRequest::Remove { boot, workloads } => {
                let ended = self.registry.end(host, boot, Some(&workloads)).await.map_err(refusal)?;
                self.ended(host, "removed", &ended);
                Ok(done())
            }
            HostRequest::Health { reports, .. } => {
                let changed = self.registry.health(host, &reports).await.map_err(refusal)?;
                if changed > 0 {
                    metrics::counter!(names::HEALTH_CHANGES).increment(changed as u64);
                    tracing::info!(%host, changed, "health of workloads changed");
                }
                Ok(done())
            }
        }
    }

    fn ended(&self, host: &HostId, cause: &'static str, ended: &Registered) {
        metrics::counter!(names::REGISTRATIONS_ENDED, "cause" => cause).increment(ended.incarnations.len() as u64);
        tracing::info!(%host, workloads = ended.incarnations.len(), cause, "registrations ended");
    }

    async fn register(&self, host: &HostId, payload: &[u8]) -> Result<Vec<u8>, Refusal> {
        let register = Register::decode(payload).map_err(|error| (false, format!("the request cannot be read: {error}")))?;
        let (grant, template) = tokio::try_join!(granted(&self.catalog, host), template(&self.templates, &register))?;
        let (workloads, health) = match &template {
            Some(template) => (admit(&grant, &register, template).map_err(|reason| (false, reason))?, template.health.clone()),
            None => (Vec::new(), None::<HealthCheck>),
        };
        let enrolment = Enrolment { boot: register.boot, template: register.template.clone() };
        let registered = self.registry.enrol(host, &enrolment, &workloads).await.map_err(refusal)?;
        metrics::counter!(names::REGISTRATIONS).increment(1);
        tracing::debug!(%host, workloads = workloads.len(), sequence = registered.sequence, "enrolled");
        Ok(RegisterAnswer::Registered { incarnations: registered.incarnations, health }.encode())
    }

    /// Leaves a trace of the refusal in AUDIT, now and then.
    async fn write_down(&self, host: &HostId, reason: &str) {
        {
            let now_ms = u64::try_from(self.clock.elapsed().as_millis()).unwrap_or(u64::MAX);
            let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
            if !refusals.is_news(host, reason, now_ms) {
                return;
            }
        }
        if let Err(error) = self.registry.refused(host, reason).await {
            tracing::warn!(%host, %error, "a refusal could not be written down");
        }
    }
}

/// Who asks, for what, and where the answer goes.
fn addressed(message: BusMessage) -> Option<(HostId, Request<Bytes>)> {
    let host = subjects::host_of(&message.subject)?;
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
            Grant::read(&document).map_err(|error| (true, format!("what is granted to host {host} cannot be read: {error}")))
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
