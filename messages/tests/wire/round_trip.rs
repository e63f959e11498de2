//! What is encoded comes back.

use groupcast_messages::{Answer, Body, ChunkWriter, Cut, DecodeError, Delta, EncodedDocument, Past, TopicRef};
use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::topic::Topic;

use crate::support::message::DECODERS;
use crate::support::{Random, generate};

const ROUNDS: u64 = 2_000;
const CUT: Cut = Cut { term: 7, lead: 1_000 };

#[test]
fn every_message_comes_back() {
    for seed in 0..ROUNDS {
        for decoder in DECODERS {
            let message = generate::message(&mut Random::new(seed), decoder);
            assert_eq!(decoder.decode(&message.encode()).as_ref(), Ok(&message), "seed {seed}");
        }
    }
}

/// The digest is computed from the model, so a lossy encoding would show.
#[test]
fn an_edit_leads_to_the_same_digest_on_the_other_side() {
    for seed in 0..ROUNDS {
        let mut random = Random::new(seed);
        let topic = generate::topic(&mut random);
        let before = generate::document(&mut random, &topic, 2);
        let after = generate::document(&mut random, &topic, 2);
        let Some(edit) = before.edit_to(&after) else { continue };
        let delta = Delta { edit, digest: after.digest(), ..generate::delta(&mut random, &topic) };
        let received = Delta::decode(&topic, &delta.encode()).unwrap();
        let mut replica = before.clone();
        let outcome = replica.apply(&received.edit).unwrap();
        assert_eq!(outcome.digest, received.digest, "seed {seed}");
        assert_eq!(replica, after, "seed {seed}");
    }
}

/// What a reader does with an answer: parts and deltas applied in order, topic by topic.
fn read(payloads: &[Vec<u8>], held: &[(Topic, Document)]) -> Vec<(Topic, u64, Document)> {
    let mut read: Vec<(Topic, u64, Document)> = Vec::new();
    let mut open: Option<Digest> = None;
    for (number, payload) in payloads.iter().enumerate() {
        let Answer::Chunk(chunk) = Answer::decode(payload).unwrap() else { panic!("a refusal") };
        assert_eq!((chunk.ask, chunk.index as usize, chunk.cut), (9, number, CUT));
        assert_eq!(chunk.last, number + 1 == payloads.len());
        for entry in chunk.entries {
            let place = |topic: &Topic| held.iter().find(|(known, _)| known == topic).map(|(_, document)| document.clone());
            let topic = match entry.topic {
                TopicRef::Asked(place) => held[place as usize].0.clone(),
                TopicRef::Named(topic) => topic,
            };
            let continued = read.last().is_some_and(|(last, ..)| *last == topic);
            match entry.body {
                Body::Same => read.push((topic.clone(), entry.revision, place(&topic).unwrap())),
                Body::Deltas(deltas) => {
                    if !continued {
                        read.push((topic.clone(), entry.revision, place(&topic).unwrap()));
                    }
                    let document = &mut read.last_mut().unwrap().2;
                    for past in deltas {
                        let delta = Delta::decode(&topic, &past.payload).unwrap();
                        assert_eq!(document.apply(&delta.edit).unwrap().digest, delta.digest);
                    }
                }
                Body::Part { digest, last, edit } => {
                    if open.is_none() {
                        read.push((topic, entry.revision, Document::absent()));
                    }
                    assert_eq!(open.unwrap_or(digest), digest, "all parts name the digest of the whole");
                    let document = &mut read.last_mut().unwrap().2;
                    document.apply(&edit).unwrap();
                    open = (!last).then_some(digest);
                    assert!(!last || document.digest() == digest);
                }
            }
        }
    }
    assert_eq!(open, None, "the last part is flagged");
    read
}

#[test]
fn documents_come_back_from_chunks_of_any_size() {
    for seed in 0..ROUNDS / 4 {
        let mut random = Random::new(seed);
        let bytes_max = random.pick(&[1, 200, 700, 4_000, 60_000]);
        let mut writer = ChunkWriter::new(9, CUT, bytes_max);
        let mut expected = Vec::new();
        for revision in 0..random.below(12) as u64 {
            let topic = generate::topic(&mut random);
            let document = generate::document(&mut random, &topic, 20);
            if random.chance(2) {
                writer.push_document(TopicRef::Named(topic.clone()), true, revision, &document);
            } else {
                writer.push_encoded(TopicRef::Named(topic.clone()), false, revision, &EncodedDocument::new(&document));
            }
            expected.push((topic, revision, document));
        }
        assert_eq!(read(&writer.finish(), &[]), expected, "seed {seed}, chunks of {bytes_max}");
    }
}

#[test]
fn deltas_and_equal_topics_come_back_from_chunks_of_any_size() {
    for seed in 0..ROUNDS / 8 {
        let mut random = Random::new(seed);
        let bytes_max = random.pick(&[1, 300, 2_000, 60_000]);
        let mut writer = ChunkWriter::new(9, CUT, bytes_max);
        let (mut held, mut expected) = (Vec::new(), Vec::new());
        for place in 0..random.below(8) as u32 {
            // The name keeps the topics of one answer apart.
            let kind = random.pick(&["scope.app", "host", "rules", "members"]);
            let topic = Topic::parse(&format!("{kind}.t{place}")).unwrap();
            let before = generate::document(&mut random, &topic, 3);
            held.push((topic.clone(), before.clone()));
            let mut document = before;
            let mut deltas = Vec::new();
            for revision in 0..random.below(6) as u64 {
                let edit = generate::edit(&mut random, &topic, false);
                let digest = document.apply(&edit).unwrap().digest;
                let payload = Delta { edit, digest, ..generate::delta(&mut random, &topic) }.encode();
                deltas.push(Past { revision, payload });
            }
            if deltas.is_empty() {
                writer.push_same(TopicRef::Asked(place), true, 5);
            } else {
                writer.push_deltas(TopicRef::Asked(place), true, 5, &deltas);
            }
            expected.push((topic, 5, document));
        }
        assert_eq!(read(&writer.finish(), &held), expected, "seed {seed}, chunks of {bytes_max}");
    }
}

#[test]
fn an_answer_without_topics_is_one_chunk() {
    let payloads = ChunkWriter::new(9, CUT, 60_000).finish();
    assert_eq!(payloads.len(), 1);
    assert_eq!(read(&payloads, &[]), []);
}

#[test]
fn trailing_bytes_are_refused() {
    for decoder in DECODERS {
        let mut bytes = generate::message(&mut Random::new(1), decoder).encode();
        bytes.extend([0xc0, 0xc0]);
        assert_eq!(decoder.decode(&bytes), Err(DecodeError::Trailing { bytes: 2 }), "{decoder:?}");
    }
}
