//! Answers hosts that enrol, end or report on their workloads. Stateless: every controller runs one, and the bus shares the requests
//! out. The host is who the subject says, which the bus has verified.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use actix::prelude::*;
use async_nats::{Client, Message as BusMessage};
use futures::StreamExt;
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_messages::{Cut, HostRequest, HostRequestAnswer, Register, RegisterAnswer};
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{HealthCheck, Template};

use super::{MAILBOX_MAX, Ping, RETRY_PAUSE};
use crate::catalog::Catalog;
use crate::document::{Document, Name};
use crate::names;
use crate::registration::admit::admit;
use crate::registration::grant::Grant;
use crate::registry::{Enrolment, Error, Registered, Registry};

/// Controllers share the hosts' requests.
const GROUP: &str = "registrar";
/// Requests answered at once; further ones wait in the subscription.
pub const AT_ONCE_MAX: usize = 64;
/// A host's refusals are written down this often at most: whoever is refused may ask without end.
pub const REFUSAL_EVERY: Duration = Duration::from_secs(10);
/// Hosts whose last refusal is remembered; with more of them, the memory begins anew.
pub const REFUSALS_MAX: usize = 10_000;

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
        let (client, own) = (self.client.clone(), context.address());
        self.task = Some(self.runtime.spawn(async move {
            let desk = Desk { client, refusals: Arc::default() };
            if let Err(error) = desk.serve().await {
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
    /// When a host's refusal was last written down.
    refusals: Arc<Mutex<HashMap<HostId, Instant>>>,
}

impl Desk {
    async fn serve(&self) -> Result<(), async_nats::Error> {
        let requests = self.client.queue_subscribe(subjects::REGISTER_ALL, GROUP.to_owned()).await?;
        requests.for_each_concurrent(AT_ONCE_MAX, |request| self.take(request)).await;
        Ok(())
    }

    async fn take(&self, request: BusMessage) {
        let Some((host, subject)) = addressed(&request) else { return };
        let begun = Instant::now();
        let answer = match HostRequest::decode(&request.payload) {
            Ok(asked) => self.request(&host, asked).await,
            Err(_) => self.register(&host, &request.payload).await,
        };
        let answer = match answer {
            Ok(answer) => answer,
            Err((retryable, reason)) => {
                metrics::counter!(names::REGISTRATIONS_REFUSED).increment(1);
                tracing::warn!(%host, retryable, %reason, "a registration is refused");
                self.write_down(&host, &reason).await;
                // A refusal of any request reads the same.
                RegisterAnswer::Refused { retryable, reason }.encode()
            }
        };
        metrics::histogram!(names::REGISTER_SECONDS).record(begun.elapsed().as_secs_f64());
        if let Err(error) = self.client.publish(subject, answer.into()).await {
            tracing::warn!(%error, "a registration could not be answered");
        }
    }

    fn registry(&self) -> Registry {
        Registry::new(self.client.clone())
    }

    /// What a host asks beside enrolling.
    async fn request(&self, host: &HostId, asked: HostRequest) -> Result<Vec<u8>, Refusal> {
        match asked {
            HostRequest::Fresh { within_ms } => {
                let fresh = crate::source::service::fresh(&self.client, Duration::from_millis(within_ms)).await;
                fresh.map(|cut| HostRequestAnswer::Done { cut }.encode()).map_err(|reason| (true, reason))
            }
            HostRequest::Leave { boot } => {
                let ended = self.registry().end(host, boot, None).await.map_err(refusal)?;
                self.ended(host, "left", &ended);
                Ok(done())
            }
            HostRequest::Remove { boot, workloads } => {
                let ended = self.registry().end(host, boot, Some(&workloads)).await.map_err(refusal)?;
                self.ended(host, "removed", &ended);
                Ok(done())
            }
            HostRequest::Health { reports, .. } => {
                let changed = self.registry().health(host, &reports).await.map_err(refusal)?;
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
        let catalog = Catalog::new(self.client.clone());
        let (grant, template) = tokio::try_join!(granted(&catalog, host), template(&catalog, &register))?;
        let (workloads, health) = match &template {
            Some(template) => (admit(&grant, &register, template).map_err(|reason| (false, reason))?, template.health.clone()),
            None => (Vec::new(), None::<HealthCheck>),
        };
        let enrolment = Enrolment { boot: register.boot, template: register.template.clone() };
        let registered = self.registry().enrol(host, &enrolment, &workloads).await.map_err(refusal)?;
        metrics::counter!(names::REGISTRATIONS).increment(1);
        tracing::debug!(%host, workloads = workloads.len(), sequence = registered.sequence, "enrolled");
        Ok(RegisterAnswer::Registered { incarnations: registered.incarnations, health }.encode())
    }

    /// Leaves a trace of the refusal in AUDIT, now and then.
    async fn write_down(&self, host: &HostId, reason: &str) {
        {
            let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
            if refusals.get(host).is_some_and(|at| at.elapsed() < REFUSAL_EVERY) {
                return;
            }
            if refusals.len() >= REFUSALS_MAX {
                refusals.clear();
            }
            refusals.insert(host.clone(), Instant::now());
        }
        if let Err(error) = self.registry().refused(host, reason).await {
            tracing::warn!(%host, %error, "a refusal could not be written down");
        }
    }
}

/// Who asks, and where the answer goes.
fn addressed(request: &BusMessage) -> Option<(HostId, String)> {
    let host = subjects::host_of(&request.subject)?;
    let token = request.headers.as_ref()?.get(subjects::ANSWER_TOKEN)?.as_str();
    Some((host, subjects::answer_to(&request.subject, token)?))
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
async fn template(catalog: &Catalog, register: &Register) -> Result<Option<Arc<Template>>, Refusal> {
    let Some(id) = &register.template else {
        return match register.workloads.is_empty() {
            true => Ok(None),
            false => Err((false, "no template is named: say what the host's workloads are".to_owned())),
        };
    };
    let name = Name::new(CatalogKind::Template, id).map_err(|error| (false, error.to_string()))?;
    match catalog.read(&name).await.map_err(|error| (true, error.to_string()))?.map(|version| version.document) {
        Some(Ok(Some(Document::Template(template)))) => Ok(Some(template)),
        Some(Err(refused)) => Err((true, refused.to_string())),
        _ => Err((true, format!("template {id} does not exist: create it"))),
    }
}
