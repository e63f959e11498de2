//! What a consumer delivers.

use std::pin::Pin;
use std::task::{Context as Poller, Poll};
use std::time::Duration;

use async_nats::jetstream::Message;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, PullConsumer, pull};
use futures::{Stream, StreamExt};

use crate::log::Entry;

/// How often a consumer that has nothing to deliver says that it lives. The client library gives up after two that are missing.
pub const HEARTBEAT_EVERY: Duration = Duration::from_millis(500);
/// A consumer that nobody asks any more goes by itself.
const CONSUMER_KEPT: Duration = Duration::from_secs(30);
/// Messages asked for at once.
const PULLED_MAX: usize = 500;

/// A message of a stream, read in order.
#[derive(Debug, Clone)]
pub struct Delivered {
    pub entry: Entry,
    /// How many messages the stream holds behind this one.
    pub pending: u64,
}

/// Why a consumer delivers nothing any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("{0}")]
    Consumer(String),
    #[error("the consumer ended")]
    Ended,
    #[error("a message was lost on the way")]
    Gap,
    #[error("a message without its sequence")]
    NoSequence,
}

/// What a consumer delivers, in order and without gaps; the first thing that is wrong ends it.
pub struct Messages {
    stream: pull::Stream,
    /// The last one, as the consumer counts them.
    delivered: u64,
    is_over: bool,
}

impl Messages {
    fn new(stream: pull::Stream) -> Self {
        Self { stream, delivered: 0, is_over: false }
    }

    fn judge(&mut self, message: Message) -> Result<Delivered, Broken> {
        let info = message.info().map_err(|_| Broken::NoSequence)?;
        if info.consumer_sequence != self.delivered + 1 {
            return Err(Broken::Gap);
        }
        self.delivered = info.consumer_sequence;
        let (sequence, pending, at) = (info.stream_sequence, info.pending, info.published.into());
        let message = message.message;
        let (subject, headers) = (message.subject.to_string(), message.headers.unwrap_or_default());
        Ok(Delivered { entry: Entry { subject, sequence, headers, payload: message.payload, at }, pending })
    }
}

impl Stream for Messages {
    type Item = Result<Delivered, Broken>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Poller<'_>) -> Poll<Option<Self::Item>> {
        if self.is_over {
            return Poll::Ready(None);
        }
        let next = futures::ready!(self.stream.poll_next_unpin(context));
        let judged = match next {
            Some(Ok(message)) => self.judge(message),
            Some(Err(error)) => Err(Broken::Consumer(error.to_string())),
            None => Err(Broken::Ended),
        };
        self.is_over = judged.is_err();
        Poll::Ready(Some(judged))
    }
}

/// How consumers are made: in the memory of one server, without acknowledgements.
pub(crate) fn consumer(filter: &str, deliver_policy: DeliverPolicy) -> pull::Config {
    pull::Config {
        deliver_policy,
        filter_subject: filter.to_owned(),
        ack_policy: AckPolicy::None,
        max_deliver: 1,
        inactive_threshold: CONSUMER_KEPT,
        memory_storage: true,
        num_replicas: 1,
        ..Default::default()
    }
}

/// Begins to deliver.
pub(crate) async fn pulled(consumer: &PullConsumer) -> Result<Messages, Broken> {
    let pulling = consumer.stream().max_messages_per_batch(PULLED_MAX).heartbeat(HEARTBEAT_EVERY).messages().await;
    pulling.map(Messages::new).map_err(|error| Broken::Consumer(error.to_string()))
}
