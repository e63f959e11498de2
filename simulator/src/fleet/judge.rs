//! Whether every host holds what a compile from scratch gives, and nothing else; and what the smallest difference is.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use groupcast_policy::doc::Document;
use groupcast_policy::ids::HostId;
use groupcast_policy::needs::needed;
use groupcast_policy::topic::Topic;
use groupcast_topics::reader::Reader;

use super::member::Member;
use super::topology::World;
use super::watch::mark_held;

pub type Desired = HashMap<Topic, Document>;

/// Hosts that are asked at one time.
const ASKED_MAX: usize = 500;
const ROUND: Duration = Duration::from_millis(100);
/// For so many times as long as a round took nobody is asked, up to the longest pause: what is found out is late by that.
const PAUSES: u32 = 5;
const ROUND_MAX: Duration = Duration::from_millis(500);
/// A host that does not answer within this time is asked again.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Longest difference that is told, in characters.
const DIFFERENCE_MAX: usize = 300;

/// What a host holds that it does not need, or lacks, or holds otherwise than it should be; `None`: it is right.
pub fn difference(id: &HostId, reader: &Reader, desired: &Desired) -> Option<String> {
    let wanted = needed(id, desired);
    let held: BTreeSet<Topic> = reader.documents().map(|(topic, _)| topic.clone()).collect();
    if let Some(topic) = held.difference(&wanted).next() {
        return Some(format!("host {id} holds {topic}, which it does not need"));
    }
    if let Some(topic) = wanted.difference(&held).next() {
        return Some(format!("host {id} lacks {topic}"));
    }
    let absent = Document::absent();
    let wrong = reader.documents().filter_map(|(topic, document)| {
        let right = desired.get(topic).unwrap_or(&absent);
        (document.digest() != right.digest()).then(|| (topic, document.edit_to(right)))
    });
    // The smallest difference says most.
    let told = wrong.map(|(topic, edit)| (format!("{edit:?}"), topic)).min_by_key(|(words, _)| words.len())?;
    let (mut words, topic) = told;
    words.truncate((0..=DIFFERENCE_MAX.min(words.len())).rev().find(|at| words.is_char_boundary(*at)).unwrap_or(0));
    let revision = reader.revision(topic);
    Some(format!("host {id}, {topic} (revision {revision:?}): a compile from scratch differs by {words}"))
}

/// Asks every host again and again until none has anything to say, or the time is over: then what the last of them said.
pub async fn until_nothing_is_said<F>(members: &[Member], within: Duration, ask: F) -> Result<Duration, Vec<String>>
where
    F: Fn(usize, &Reader) -> Option<String> + Send + Sync + Clone + 'static,
{
    let begun = Instant::now();
    let mut open: Vec<&Member> = members.iter().collect();
    loop {
        let asking = Instant::now();
        let mut said = Vec::new();
        let mut still = Vec::new();
        for part in open.chunks(ASKED_MAX) {
            let asked: Vec<_> = part
                .iter()
                .map(|member| {
                    let (ask, number) = (ask.clone(), member.number);
                    (*member, member.look(move |reader| ask(number, reader)))
                })
                .collect();
            for (member, answer) in asked {
                let answer = match answer {
                    Some(answer) => tokio::time::timeout(ANSWER_WITHIN, answer).await.ok().and_then(Result::ok),
                    None => None,
                };
                match answer {
                    Some(None) => continue,
                    Some(Some(words)) => said.push(words),
                    None => said.push(format!("host number {} is not connected", member.number)),
                }
                still.push(member);
            }
        }
        if still.is_empty() {
            return Ok(begun.elapsed());
        }
        if begun.elapsed() > within {
            return Err(said);
        }
        open = still;
        // To ask ten thousand hosts takes the processors away from those who answer them.
        tokio::time::sleep((asking.elapsed() * PAUSES).clamp(ROUND, ROUND_MAX)).await;
    }
}

/// Of a host: whether it has every group's version of this moment, or a later one.
pub fn has_caught_up(world: &World, versions: &Arc<Vec<u32>>, number: usize, reader: &Reader) -> Option<String> {
    let own = (0..world.of_all).chain(world.follows[number].iter().map(|group| *group as usize));
    own.filter(|group| mark_held(world, *group, reader).is_none_or(|mark| mark < versions[*group]))
        .map(|group| format!("host {} lacks version {} of group {}", world.hosts[number], versions[group], world.groups[group]))
        .next()
}

/// Of a host: whether what it follows is a stream that is gone.
pub fn is_of_an_earlier_life(since: u64, reader: &Reader) -> Option<String> {
    let term = reader.cut().map_or(0, |cut| cut.term);
    (term < since).then(|| format!("a host is at term {term}, and the stream lives since {since}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// It may hold everything that is written, and follows nothing.
    #[test]
    fn whoever_did_not_hear_of_the_present_stream_is_not_back() {
        let reader = Reader::new(HostId::new("host-00000").unwrap(), groupcast_topics::reader::Settings::default(), 1);
        assert!(is_of_an_earlier_life(2, &reader).is_some_and(|words| words.contains("since 2")));
        assert!(is_of_an_earlier_life(0, &reader).is_none());
    }
}
