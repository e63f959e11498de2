//! The term that CATALOG has reserved, for operators: looked at, and repaired where nobody could lead with it.
//!
//! Controllers reserve terms themselves (`groupcast_topics::term`); this is for a store that was damaged, or written by a version that
//! let hosts raise it.

use async_nats::jetstream::stream::LastRawMessageErrorKind;
use async_nats::{Client, HeaderMap};
use groupcast_bus_config::{streams, subjects};
use groupcast_messages::Lead;
pub use groupcast_topics::term::{BadTerm, Reserved};
use groupcast_topics::term::{LIFE_MAX, TERM_MAX, TERMS_LEFT_OUT, life_of};

use crate::fence::term_of;
use crate::log::{Log, NoAnswer, Outcome, Outgoing, REQUEST_TIMEOUT};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error("a term must be below {TERM_MAX}: name a lower one")]
    TooHigh,
    #[error("the term cannot be written ({0}): are all controllers stopped, and is the credential a controller's?")]
    Write(String),
    #[error("stream TOPICS cannot be cleared ({0}): is the credential a controller's?")]
    Clear(String),
}

/// What repairing came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Repaired {
    /// Controllers can lead with what is there.
    Fine(Reserved),
    Written {
        now: Reserved,
        topics: Topics,
    },
}

/// What became of stream TOPICS, which is derived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topics {
    Kept,
    /// Its head named a term that nobody can lead with; controllers publish everything again.
    Cleared,
    /// Its sequences are used up: only another stream has others.
    UsedUp,
}

/// What is reserved, and the sequence it stands at.
pub async fn reserved(catalog: &Log) -> Result<(Result<Reserved, BadTerm>, u64), NoAnswer> {
    let entry = catalog.last(subjects::CATALOG_TERM).await?;
    Ok(entry.map_or((Ok(Reserved::default()), 0), |entry| (Reserved::decode(&entry.payload), entry.sequence)))
}

/// Stores a term that the next leader can go on from: above all good ones that are still known, and above `at_least`.
pub async fn repair(client: &Client, at_least: Option<u64>) -> Result<Repaired, Error> {
    let log = Log::catalog(client.clone());
    let (stored, expected) = reserved(&log).await?;
    let head = head(client).await?;
    let topics = judge(head.as_ref());
    let fences = [
        term_of(log.last(subjects::CATALOG_FENCE).await?.as_ref()),
        term_of(Log::registry(client.clone()).last(subjects::REGISTRY_FENCE).await?.as_ref()),
    ];
    if let (Ok(stored), Topics::Kept) = (&stored, topics)
        && fences.into_iter().chain(at_least).all(|term| stored.term() >= term)
    {
        return Ok(Repaired::Fine(*stored));
    }
    // Where only one of the streams was restored from an old copy, the other one's fence is of a later term.
    let mut known: Vec<Reserved> = fences.iter().filter_map(|term| Reserved::new(*term, 0).ok()).collect();
    if expected > 0 {
        let history = log.range(subjects::CATALOG_TERM, 1, expected).await?;
        known.extend(history.iter().filter_map(|entry| Reserved::decode(&entry.payload).ok()));
    }
    if let Some((sequence, Some(lead))) = &head {
        known.extend(Reserved::new(lead.term, life_of(*sequence)).ok());
    }
    let now = next(&known, at_least).ok_or(Error::TooHigh)?;
    let subject = subjects::CATALOG_TERM.to_owned();
    let message = Outgoing { subject, headers: HeaderMap::new(), expected, payload: now.encode() };
    match log.write(&[message]).await {
        Outcome::Committed(_) => {}
        other => return Err(Error::Write(format!("{other:?}"))),
    }
    if let (Topics::Cleared, Some((sequence, _))) = (topics, &head) {
        let cleared = streams::begin_topics(client, sequence.saturating_add(1)).await;
        cleared.map_err(|error| Error::Clear(error.to_string()))?;
    }
    Ok(Repaired::Written { now, topics })
}

/// Beyond every good one that is known, with room for those that are not.
fn next(known: &[Reserved], at_least: Option<u64>) -> Option<Reserved> {
    let (term, life) = known.iter().fold((0, 0), |(term, life), one| (one.term().max(term), one.life().max(life)));
    Reserved::new(term.saturating_add(TERMS_LEFT_OUT).max(at_least.unwrap_or(0)), life).ok()
}

fn judge(head: Option<&(u64, Option<Lead>)>) -> Topics {
    match head {
        Some((sequence, _)) if life_of(*sequence) >= LIFE_MAX => Topics::UsedUp,
        Some((_, Some(lead))) if lead.term < TERM_MAX => Topics::Kept,
        Some(_) => Topics::Cleared,
        None => Topics::Kept,
    }
}

/// The head of TOPICS and what it says, if that can be read; nothing of a stream that is empty or gone.
async fn head(client: &Client) -> Result<Option<(u64, Option<Lead>)>, NoAnswer> {
    let no_answer = |reason: String| NoAnswer { stream: streams::TOPICS.name, reason };
    let mut context = async_nats::jetstream::new(client.clone());
    context.set_timeout(REQUEST_TIMEOUT);
    let stream = context.get_stream_no_info(streams::TOPICS.name).await.map_err(|error| no_answer(error.to_string()))?;
    match stream.get_last_raw_message_by_subject(subjects::LEAD_WRITE).await {
        Ok(message) => Ok(Some((message.sequence, Lead::decode(&message.payload).ok()))),
        Err(error) => match error.kind() {
            LastRawMessageErrorKind::NoMessageFound | LastRawMessageErrorKind::JetStream(_) => Ok(None),
            _ => Err(no_answer(error.to_string())),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repaired_term_lies_beyond_all_good_ones_and_below_the_bound() {
        let known = [(7, 2), (9, 1)].map(|(term, life)| Reserved::new(term, life).unwrap());
        assert_eq!(next(&known, None), Reserved::new(9 + TERMS_LEFT_OUT, 2).ok());
        assert_eq!(next(&known, Some(5_000)), Reserved::new(5_000, 2).ok());
        assert_eq!(next(&[], None), Reserved::new(TERMS_LEFT_OUT, 0).ok());
        assert_eq!(next(&known, Some(TERM_MAX)), None);
        assert!(next(&known, Some(TERM_MAX - 1)).is_some());
    }

    #[test]
    fn topics_are_cleared_only_where_their_head_is_of_no_use() {
        let lead = |term| Some(Lead { term, ..Lead::default() });
        assert_eq!(judge(None), Topics::Kept);
        assert_eq!(judge(Some(&(1, lead(TERM_MAX - 1)))), Topics::Kept);
        assert_eq!(judge(Some(&(1, lead(TERM_MAX)))), Topics::Cleared);
        assert_eq!(judge(Some(&(1, None))), Topics::Cleared);
        assert_eq!(judge(Some(&(u64::MAX, lead(3)))), Topics::UsedUp);
    }
}
