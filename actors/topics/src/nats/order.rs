//! One queue out of many subscriptions.
//!
//! The client library queues per subscription, so order across subjects is lost there. It is regained by sequence: the connection
//! fills the queues in the order of the wire, so whatever precedes a message that was taken out is in some queue already. Two sweeps
//! over all queues therefore see everything up to the highest sequence of the first.

use std::task::Poll;

use async_nats::{Message, Subscriber};
use futures::StreamExt;
use groupcast_policy::topic::Topic;
use tokio_stream::StreamMap;

use super::Republished;

/// Messages taken out at once; the rest waits in the client's queues.
const SWEEP_MAX: usize = 4_096;

#[derive(Default)]
pub(super) struct Ordered {
    subscriptions: StreamMap<Topic, Subscriber>,
    /// Taken out in the second sweep, of a higher sequence than the first saw.
    carried: Vec<(u64, u64, Topic, Message)>,
}

impl Ordered {
    pub fn contains(&self, topic: &Topic) -> bool {
        self.subscriptions.contains_key(topic)
    }

    pub fn insert(&mut self, topic: Topic, subscriber: Subscriber) {
        self.subscriptions.insert(topic, subscriber);
    }

    pub fn remove(&mut self, topic: &Topic) -> Option<Subscriber> {
        self.subscriptions.remove(topic)
    }

    /// The next messages in the order of their sequences: (revision, previous, topic, message). Waits until there is one.
    pub async fn next(&mut self) -> Vec<(u64, u64, Topic, Message)> {
        std::future::poll_fn(|context| {
            let mut first = std::mem::take(&mut self.carried);
            if self.sweep(&mut first, context) == 0 && first.is_empty() {
                return Poll::Pending;
            }
            let highest = first.iter().map(|(sequence, ..)| *sequence).max().unwrap_or(0);
            let mut second = Vec::new();
            self.sweep(&mut second, context);
            for entry in second {
                if entry.0 < highest { first.push(entry) } else { self.carried.push(entry) }
            }
            if !self.carried.is_empty() {
                context.waker().wake_by_ref();
            }
            first.sort_by_key(|(sequence, ..)| *sequence);
            Poll::Ready(first)
        })
        .await
    }

    fn sweep(&mut self, into: &mut Vec<(u64, u64, Topic, Message)>, context: &mut std::task::Context<'_>) -> usize {
        let mut taken = 0;
        while taken < SWEEP_MAX {
            match self.subscriptions.poll_next_unpin(context) {
                Poll::Ready(Some((topic, message))) => {
                    taken += 1;
                    if let Some(Republished { sequence, previous }) = Republished::of(&message) {
                        into.push((sequence, previous, topic, message));
                    }
                }
                // An empty map is not the end: topics come and go.
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
        taken
    }
}
