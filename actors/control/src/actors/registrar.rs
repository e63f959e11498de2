//! Answers hosts that register their workloads. Stateless: every controller runs one, and the bus shares the requests out. The host is
//! who the subject says, which the bus has verified.

use actix::prelude::*;
use async_nats::{Client, Message as BusMessage};
use futures::StreamExt;
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_messages::{Register, RegisterAnswer};
use groupcast_policy::ids::HostId;

use super::{MAILBOX_MAX, Ping, RETRY_PAUSE};
use crate::admit::admit;
use crate::catalog::Catalog;
use crate::document::{Document, Name};
use crate::names;
use crate::registry::{Elsewhere, Error, Registry};

/// Controllers share the hosts' requests.
const GROUP: &str = "registrar";
/// Requests answered at once; further ones wait in the subscription.
pub const AT_ONCE_MAX: usize = 64;

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
            if let Err(error) = serve(client).await {
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

async fn serve(client: Client) -> Result<(), async_nats::Error> {
    let requests = client.queue_subscribe(subjects::REGISTER_ALL, GROUP.to_owned()).await?;
    requests
        .for_each_concurrent(AT_ONCE_MAX, |request| {
            let client = client.clone();
            async move {
                if let Some((subject, answer)) = answer(&client, &request).await
                    && let Err(error) = client.publish(subject, answer.encode().into()).await
                {
                    tracing::warn!(%error, "a registration could not be answered");
                }
            }
        })
        .await;
    Ok(())
}

async fn answer(client: &Client, request: &BusMessage) -> Option<(String, RegisterAnswer)> {
    let host = subjects::host_of(&request.subject)?;
    let token = request.headers.as_ref()?.get(subjects::ANSWER_TOKEN)?.as_str();
    let subject = subjects::answer_to(&request.subject, token)?;
    let answer = match register(client, &host, &request.payload).await {
        Ok(incarnations) => RegisterAnswer::Registered { incarnations },
        Err((retryable, reason)) => {
            metrics::counter!(names::REGISTRATIONS_REFUSED).increment(1);
            tracing::warn!(%host, retryable, %reason, "a registration is refused");
            RegisterAnswer::Refused { retryable, reason }
        }
    };
    Some((subject, answer))
}

/// Whether the same registration may succeed later, and why it is refused now.
type Refusal = (bool, String);

async fn register(
    client: &Client,
    host: &HostId,
    payload: &[u8],
) -> Result<Vec<(groupcast_policy::ids::WorkloadId, u64)>, Refusal> {
    let register = Register::decode(payload).map_err(|error| (false, format!("the request cannot be read: {error}")))?;
    let Some(id) = &register.template else {
        return Err((false, "no template is named: say what the host's workloads are".to_owned()));
    };
    let name = Name::new(CatalogKind::Template, id).map_err(|error| (false, error.to_string()))?;
    let found = Catalog::new(client.clone()).read(&name).await.map_err(|error| (true, error.to_string()))?;
    let template = match found.map(|version| version.document) {
        Some(Ok(Some(Document::Template(template)))) => template,
        Some(Err(refused)) => return Err((true, refused.to_string())),
        _ => return Err((true, format!("template {id} does not exist: create it"))),
    };
    let workloads = admit(host, &register, &template).map_err(|reason| (false, reason))?;
    let registered = Registry::new(client.clone()).register(host, &workloads, Elsewhere::Refuse).await;
    registered.map(|registered| registered.incarnations).map_err(|error| {
        let lasting =
            matches!(error, Error::OtherHost { .. } | Error::Twice { .. } | Error::SharedAddress { .. } | Error::TooLarge { .. });
        (!lasting, error.to_string())
    })
}
