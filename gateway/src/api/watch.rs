//! What happens, as server-sent events. Who reads too slowly is told so and cut off: nothing is kept for them.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use futures::stream::{self, Stream, StreamExt};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::sync::broadcast::error::RecvError;
use utoipa::{IntoParams, ToSchema};

use super::App;
use super::access::Caller;
use super::body::Queried;
use super::changes::ShownChange;
use crate::local::Changed;
use crate::problem::{Problem, Reading};
use crate::progress::Progress;

/// Sent while nothing happens, so that both ends notice when the other is gone.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Which {
    /// Only this change.
    pub change: Option<u64>,
}

/// One event: a change that was written (`change`), how far one is (`progress`), changes that cannot be told any more (`gap`), or the end
/// for a slow reader (`cut`).
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "it stands in the OpenAPI document only")]
pub enum Happened {
    Change(ShownChange),
    Progress(Progress),
}

fn change_event(changed: &Changed) -> Event {
    let data = serde_json::to_string(&ShownChange::new(changed, None)).unwrap_or_default();
    Event::default().event("change").id(changed.number.to_string()).data(data)
}

/// Every change as it is written, and how far changes are. With `Last-Event-ID` (a change's number) begins after that one; what this gateway
/// does not remember any more is said to be missing by the event `gap`.
#[utoipa::path(get, path = "/v1/watch", tag = "reading", security(("token" = [])),
    params(Which, ("Last-Event-ID" = Option<u64>, Header)), responses(
    (status = 200, description = "Server-sent events: change, progress, gap, cut", body = Happened, content_type = "text/event-stream"),
    Reading,
))]
pub async fn watch(
    State(app): State<App>,
    caller: Caller,
    headers: HeaderMap,
    Queried(which): Queried<Which>,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>>>, Problem> {
    let permit = app.watchers.take(&caller.principal.id, caller.from).map_err(|full| full.problem("watches"))?;
    let last = match headers.get("last-event-id") {
        None => None,
        Some(value) => {
            let number = value.to_str().ok().and_then(|text| text.parse::<u64>().ok());
            Some(number.ok_or_else(|| Problem::bad_request("Last-Event-ID is the number of a change"))?)
        }
    };
    let (mut changes, mut moves) = (app.followed.changes(), app.progress.moves());
    let wanted = move |number: u64| which.change.is_none_or(|change| change == number);
    let mut shown = 0;
    let (missed, gap): (Vec<Arc<Changed>>, Option<Event>) = match last {
        None => (Vec::new(), None),
        Some(last) => {
            let local = app.followed.local();
            let (end, _) = local.through();
            // A number that this bus has not reached is that of one that was lost: all of this one is new.
            let after = if last > end { 0 } else { last };
            let missed: Vec<Arc<Changed>> = local.changes().filter(|changed| changed.number > after).cloned().collect();
            let gap =
                (!local.remembers_after(last)).then(|| gap_event(last, missed.first().map(|changed| changed.number), last > end));
            shown = after;
            (missed, gap)
        }
    };
    let shown = missed.last().map_or(shown, |changed| changed.number);
    let past: Vec<Event> = missed.iter().filter(|changed| wanted(changed.number)).map(|changed| change_event(changed)).collect();
    let known = match which.change {
        None => None,
        Some(change) => match app.progress.ask(change).await {
            crate::progress::Known::Progress(progress) => Some(progress_event(&progress)),
            _ => None,
        },
    };
    let live = async_stream(permit, move |mut say| async move {
        loop {
            let event = tokio::select! {
                changed = changes.recv() => match changed {
                    Ok(changed) if changed.number > shown && wanted(changed.number) => change_event(&changed),
                    Ok(_) => continue,
                    Err(RecvError::Lagged(missed)) => {
                        say.send(cut_event(missed)).await;
                        return;
                    }
                    Err(RecvError::Closed) => return,
                },
                moved = moves.recv() => match moved {
                    Ok(progress) if wanted(progress.change) => progress_event(&progress),
                    Ok(_) => continue,
                    Err(RecvError::Lagged(missed)) => {
                        say.send(cut_event(missed)).await;
                        return;
                    }
                    Err(RecvError::Closed) => return,
                },
                () = say.closed() => return,
            };
            if !say.send(event).await {
                return;
            }
        }
    });
    let all = stream::iter(gap.into_iter().chain(past).chain(known)).chain(live).map(Ok);
    let all = all.take_until(caller.no_longer_good(app));
    Ok(Sse::new(all).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

fn progress_event(progress: &Progress) -> Event {
    Event::default().event("progress").data(serde_json::to_string(progress).unwrap_or_default())
}

fn gap_event(after: u64, before: Option<u64>, another_bus: bool) -> Event {
    metrics::counter!("groupcast_watchers_gaps_total").increment(1);
    let detail = match another_bus {
        true => "the bus was restored and has not reached this number: read everything anew",
        false => "this gateway does not remember all changes after this number: read everything anew, or see /v1/audit",
    };
    Event::default().event("gap").data(json!({ "after": after, "before": before, "detail": detail }).to_string())
}

fn cut_event(missed: u64) -> Event {
    metrics::counter!("groupcast_watchers_cut_total").increment(1);
    let detail = "you read too slowly: connect again with Last-Event-ID";
    Event::default().event("cut").data(json!({ "missed": missed, "detail": detail }).to_string())
}

/// Where a producer puts events; one may wait, so that a reader who does not read stops the producer and not the memory.
struct Say(tokio::sync::mpsc::Sender<Event>);

impl Say {
    async fn send(&mut self, event: Event) -> bool {
        self.0.send(event).await.is_ok()
    }

    async fn closed(&self) {
        self.0.closed().await;
    }
}

/// A stream of what a task says; `held` lives as long as the stream's reader.
fn async_stream<H, F>(held: H, produce: impl FnOnce(Say) -> F) -> impl Stream<Item = Event>
where
    H: Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    tokio::spawn(produce(Say(sender)));
    stream::unfold((receiver, held), |(mut receiver, held)| async move {
        let event = receiver.recv().await?;
        Some((event, (receiver, held)))
    })
}
