//! What is asked about sources over the bus: the leading controller answers, the others are silent.

use std::time::Duration;

use actix::Addr;
use async_nats::client::RequestErrorKind;
use async_nats::{Client, Message};
use futures::StreamExt;
use groupcast_bus_config::subjects;
use groupcast_messages::Cut;
use groupcast_policy::ids::SourceId;
use tokio::sync::watch;
use tokio::time::Instant;

use super::ask::{Ask, Told};
use super::heads::Heads;
use super::machine::Answer;
use crate::actors::RETRY_PAUSE;
use crate::actors::source::{ConfirmSource, LookAtSource, PollSource, SourceActor};

/// Questions answered at once; further ones wait.
const AT_ONCE_MAX: usize = 256;
/// How often whoever waits for an answer looks whether the one who was asked still leads, and how long that one has to say so.
const PROBE_EVERY: Duration = Duration::from_secs(1);
/// How long what was written may take to be compiled and published.
const PUBLISHED_WITHIN: Duration = Duration::from_secs(30);

#[derive(Clone, Default)]
pub struct Sources(Vec<(SourceId, Addr<SourceActor>)>);

impl Sources {
    pub fn new(sources: Vec<(SourceId, Addr<SourceActor>)>) -> Self {
        Self(sources)
    }

    /// Answers for as long as the connection lasts.
    pub async fn serve(self, client: Client, leading: watch::Receiver<Option<u64>>) {
        let heads = Heads::new(client.clone());
        loop {
            match client.subscribe(subjects::SOURCE).await {
                Err(error) => tracing::warn!(%error, "nobody can ask about sources; trying again"),
                Ok(asked) => {
                    let answer = |message| self.answer(&client, &heads, &leading, message);
                    asked.for_each_concurrent(AT_ONCE_MAX, answer).await;
                }
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    async fn answer(&self, client: &Client, heads: &Heads, leading: &watch::Receiver<Option<u64>>, message: Message) {
        let (Some(reply), Ok(ask)) = (message.reply, serde_json::from_slice::<Ask>(&message.payload)) else { return };
        let Some(term) = *leading.borrow() else { return };
        let waits = matches!(ask, Ask::Poll { .. } | Ask::Confirm { .. });
        let Some(mut told) = self.told(ask).await else { return };
        if let Told::List { term: shown, .. } = &mut told {
            *shown = term;
        }
        if let (true, Told::Done { catalog, registry }) = (waits, &told)
            && let Err(error) = heads.published(*catalog, *registry, Instant::now() + PUBLISHED_WITHIN).await
        {
            told = Told::Failed { message: error.to_string() };
        }
        let body = serde_json::to_vec(&told).unwrap_or_default();
        if let Err(error) = client.publish(reply, body.into()).await {
            tracing::warn!(%error, "a question about sources could not be answered");
        }
    }

    /// `None`: another leads by now, and answers.
    async fn told(&self, ask: Ask) -> Option<Told> {
        let named = |id: &str| self.0.iter().find(|(known, _)| known.as_str() == id).map(|(_, source)| source);
        match ask {
            Ask::List => {
                let looks = self.0.iter().map(|(_, source)| source.send(LookAtSource));
                let sources = futures::future::join_all(looks).await.into_iter().filter_map(Result::ok).collect();
                Some(Told::List { sources, term: 0 })
            }
            Ask::Poll { id, full } => match named(&id) {
                Some(source) => of(source.send(PollSource { full }).await),
                None => Some(Told::Unknown),
            },
            Ask::Confirm { id } => match named(&id) {
                Some(source) => of(source.send(ConfirmSource).await),
                None => Some(Told::Unknown),
            },
            Ask::Fresh => {
                let polls =
                    self.0.iter().map(|(id, source)| async move { (id, of(source.send(PollSource { full: false }).await)) });
                let (mut all, mut failures) = ((0, 0), Vec::new());
                for (id, told) in futures::future::join_all(polls).await {
                    match told? {
                        Told::Done { catalog, registry } => all = (all.0.max(catalog), all.1.max(registry)),
                        Told::Held { deletions } => failures.push(format!("source {id} has {deletions} deletions held back")),
                        Told::Failed { message } => failures.push(format!("source {id}: {message}")),
                        _ => {}
                    }
                }
                Some(match failures.is_empty() {
                    true => Told::Done { catalog: all.0, registry: all.1 },
                    false => Told::Failed { message: failures.join("; ") },
                })
            }
        }
    }
}

fn of(answer: Result<Answer, actix::MailboxError>) -> Option<Told> {
    Some(match answer {
        Ok(Answer::Done { catalog, registry }) => Told::Done { catalog, registry },
        Ok(Answer::Held { deletions }) => Told::Held { deletions },
        Ok(Answer::NothingHeld) => Told::NothingHeld,
        Ok(Answer::Failed(message)) => Told::Failed { message },
        Ok(Answer::NotLeading) => return None,
        Err(error) => Told::Failed { message: error.to_string() },
    })
}

/// Why there is no answer.
struct Unanswered {
    /// No controller is connected at all, leading or not.
    nobody: bool,
    /// It did not come in time.
    late: bool,
    why: String,
}

/// What is said when the one who leads was asked and has not answered: it waits for the source itself.
fn still_asked(ask: &Ask, within: Duration) -> String {
    let within = humantime::format_duration(within);
    match ask.source() {
        Some(id) => format!(
            "source {id} has not answered within {within}; the controller that leads goes on asking it: see `groupcast get source {id}`"
        ),
        None => format!(
            "a source has not answered within {within}; the controller that leads goes on asking: see `groupcast get sources`"
        ),
    }
}

/// Asks whoever leads. What takes long is asked again when another leads before it is answered: nobody would answer any more, and
/// asking twice does no harm. Where there is no controller in the first place, nothing is waited for.
pub async fn ask(client: &Client, ask: &Ask, within: Duration) -> Result<Told, String> {
    if *ask == Ask::List {
        return once(client, ask, within).await.map_err(|unanswered| unanswered.why);
    }
    let deadline = Instant::now() + within;
    let mut error = "no controller that leads answers".to_owned();
    let mut somebody = false;
    while Instant::now() < deadline {
        let asked = Instant::now();
        let term = match term(client).await {
            Ok(term) => term,
            Err(Unanswered { nobody: true, why, .. }) if !somebody => return Err(why),
            Err(unanswered) => {
                (error, somebody) = (unanswered.why, true);
                tokio::time::sleep_until((asked + PROBE_EVERY).min(deadline)).await;
                continue;
            }
        };
        somebody = true;
        tokio::select! {
            answer = once(client, ask, deadline.saturating_duration_since(Instant::now())) => {
                return answer.map_err(|unanswered| if unanswered.late { still_asked(ask, within) } else { unanswered.why });
            }
            () = superseded(client, term) => {}
        }
    }
    Err(error)
}

/// The term of whoever leads.
async fn term(client: &Client) -> Result<u64, Unanswered> {
    match once(client, &Ask::List, PROBE_EVERY).await? {
        Told::List { term, .. } => Ok(term),
        other => Err(Unanswered { nobody: false, late: false, why: format!("an unexpected answer: {other:?}") }),
    }
}

/// Until another leads.
async fn superseded(client: &Client, by: u64) {
    loop {
        tokio::time::sleep(PROBE_EVERY).await;
        if term(client).await.is_ok_and(|term| term != by) {
            return;
        }
    }
}

async fn once(client: &Client, ask: &Ask, within: Duration) -> Result<Told, Unanswered> {
    let payload = serde_json::to_vec(ask).unwrap_or_default();
    let request = async_nats::Request::new().payload(payload.into()).timeout(Some(within));
    let answer = client.send_request(subjects::SOURCE, request).await.map_err(|error| Unanswered {
        nobody: error.kind() == RequestErrorKind::NoResponders,
        late: error.kind() == RequestErrorKind::TimedOut,
        why: format!("no controller that leads answers ({error})"),
    })?;
    let unreadable = |error| Unanswered { nobody: false, late: false, why: format!("the answer cannot be read: {error}") };
    serde_json::from_slice(&answer.payload).map_err(unreadable)
}

/// Has every source read, and waits until what they say is published: where that is.
pub async fn fresh(client: &Client, heads: &Heads, within: Duration) -> Result<Cut, String> {
    let deadline = Instant::now() + within;
    let (catalog, registry) = match ask(client, &Ask::Fresh, within).await? {
        Told::Done { catalog, registry } => (catalog, registry),
        Told::Failed { message } => return Err(message),
        other => return Err(format!("an unexpected answer: {other:?}")),
    };
    heads.published(catalog, registry, deadline).await.map_err(|error| error.to_string())
}
