//! The last good state on disk: documents and stamp. Written whole beside the old one, synced, then renamed over it; a
//! file that is damaged or not ours is named and ignored.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::path::Path;

use groupcast_messages::{Body, CHUNK_BYTES_MAX, Chunk, ChunkWriter, Cut, TopicRef};
use groupcast_policy::doc::{Digest, Document};
use groupcast_policy::topic::Topic;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::files::write_whole;

pub type Replica = HashMap<Topic, Document>;

/// What it is, and in its last byte in which version: only this one is believed, what another version says is fetched anew.
const MAGIC: &[u8; 8] = b"gcstate2";
/// More than any host could hold.
const FILE_BYTES_MAX: u64 = 1 << 30;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    pub host: String,
    pub stamp: u32,
    /// The bits of marks that it is written to.
    #[serde(default)]
    pub mark_mask: Option<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    pub facts: Facts,
    pub documents: Replica,
}

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("it is damaged or not a state file ({0}): it is ignored, and written anew after the next commit")]
    Damaged(&'static str),
    #[error("it is a state file of version {found:?}, this agent writes {ours:?}: it is ignored, and written anew after the next commit", ours = char::from(MAGIC[7]))]
    Version { found: char },
}

impl State {
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        let facts = serde_json::to_vec(&self.facts).unwrap_or_default();
        let mut piece = |bytes: &[u8]| {
            body.extend((bytes.len() as u32).to_be_bytes());
            body.extend_from_slice(bytes);
        };
        piece(&facts);
        let mut writer = ChunkWriter::new(0, Cut { term: 0, lead: 0 }, CHUNK_BYTES_MAX);
        // Sorted, so that equal states are equal files.
        for (topic, document) in self.documents.iter().collect::<BTreeMap<_, _>>() {
            writer.push_document(TopicRef::Named(topic.clone()), true, 0, document);
        }
        writer.finish().iter().for_each(|chunk| piece(chunk));
        let mut file = MAGIC.to_vec();
        file.extend(xxh3_64(&body).to_be_bytes());
        file.extend(body);
        file
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, StateError> {
        let damaged = StateError::Damaged;
        let rest = match (bytes.strip_prefix(MAGIC), bytes.strip_prefix(&MAGIC[..7])) {
            (Some(rest), _) => rest,
            (None, Some([version, ..])) if version.is_ascii_graphic() => {
                return Err(StateError::Version { found: char::from(*version) });
            }
            _ => return Err(damaged("no magic")),
        };
        let (sum, body) = rest.split_first_chunk::<8>().ok_or(damaged("cut off"))?;
        if xxh3_64(body) != u64::from_be_bytes(*sum) {
            return Err(damaged("checksum"));
        }
        let mut pieces = Vec::new();
        let mut rest = body;
        while let Some((length, after)) = rest.split_first_chunk::<4>() {
            let length = u32::from_be_bytes(*length) as usize;
            let (piece, later) = after.split_at_checked(length).ok_or(damaged("cut off"))?;
            pieces.push(piece);
            rest = later;
        }
        let (facts, chunks) = pieces.split_first().ok_or(damaged("no facts"))?;
        let facts: Facts = serde_json::from_slice(facts).map_err(|_| damaged("facts"))?;
        let mut documents = Replica::new();
        let mut digests: HashMap<Topic, Digest> = HashMap::new();
        for chunk in chunks {
            for entry in Chunk::decode(chunk).map_err(|_| damaged("chunk"))?.entries {
                let (TopicRef::Named(topic), Body::Part { digest, edit, .. }) = (entry.topic, entry.body) else {
                    return Err(damaged("entry"));
                };
                documents.entry(topic.clone()).or_default().apply(&edit).map_err(|_| damaged("document"))?;
                digests.insert(topic, digest);
            }
        }
        if documents.iter().any(|(topic, document)| digests.get(topic) != Some(&document.digest())) {
            return Err(damaged("digest"));
        }
        Ok(Self { facts, documents })
    }

    pub fn read(path: &Path) -> Result<Option<Self>, StateError> {
        match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
            Ok(metadata) if metadata.len() > FILE_BYTES_MAX => return Err(StateError::Damaged("too large")),
            Ok(_) => {}
        }
        Self::decode(&fs::read(path)?).map(Some)
    }

    pub fn write(&self, path: &Path) -> io::Result<()> {
        write_whole(path, &self.encode())
    }
}

#[cfg(test)]
mod tests {
    use groupcast_enforce::trial::{self, Dice, Stage};
    use groupcast_policy::needs::Documents;

    use super::*;

    fn some_state() -> State {
        let mut dice = Dice::new(5);
        let mut stage = Stage::default();
        let mut documents = Replica::new();
        for _ in 0..20 {
            for (topic, _) in stage.change(&[trial::event(&mut dice)]) {
                documents.insert(topic.clone(), stage.document(&topic).cloned().unwrap_or_default());
            }
        }
        let facts = Facts { host: "h0".into(), stamp: 9, mark_mask: Some(0xff_ffff) };
        State { facts, documents }
    }

    #[test]
    fn a_state_reads_back() {
        let state = some_state();
        assert!(state.documents.len() > 5);
        assert_eq!(State::decode(&state.encode()).unwrap(), state);
        assert_eq!(State::decode(&State::default().encode()).unwrap(), State::default());
    }

    #[test]
    fn damage_anywhere_is_noticed() {
        let good = some_state().encode();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(State::decode(&bad).is_err(), "byte {at}");
        }
        for length in (0..good.len()).step_by(7) {
            assert!(State::decode(&good[..length]).is_err(), "cut to {length}");
        }
    }

    #[test]
    fn a_new_state_replaces_the_old_one_whole() {
        let folder = std::env::temp_dir().join(format!("groupcast-state-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("state");
        assert!(State::read(&path).unwrap().is_none());
        State::default().write(&path).unwrap();
        some_state().write(&path).unwrap();
        assert_eq!(State::read(&path).unwrap().unwrap(), some_state());
        fs::write(&path, b"gcstate2 nonsense").unwrap();
        assert!(matches!(State::read(&path), Err(StateError::Damaged(_))));
        fs::remove_dir_all(&folder).unwrap();
    }
}
