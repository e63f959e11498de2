//! From the topic reader to the enforcement: commits as they come, in order, and acknowledgements back.
//!
//! The reader calls from its own task and must not wait, so commits go into a queue that the enforcement empties as a whole. A queue
//! that grows beyond its bound is given up for the reader's whole state, which is what all of it leads to.

use std::sync::{Arc, Mutex, PoisonError};

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Identity, Options};
use groupcast_policy::topic::Topic;
use groupcast_topics::nats::{ReaderHandle, spawn_reader};
use groupcast_topics::reader::{self, Commit, Reader};

use crate::config::Config;
use crate::keeper::{Moved, MovedDocument};

/// Commits that wait for the enforcement.
pub const WAITING_COMMITS_MAX: usize = 1_000;

#[derive(Debug, Default)]
pub struct Waiting {
    commits: Vec<Moved>,
}

impl Waiting {
    fn push(&mut self, reader: &Reader, commit: &Commit) {
        let replaced = |topic: &Topic| Some(MovedDocument::Replaced(Box::new(reader.document(topic)?.clone())));
        if self.commits.len() >= WAITING_COMMITS_MAX {
            let edits = reader.documents().filter_map(|(topic, _)| Some((topic.clone(), replaced(topic)?))).collect();
            self.commits = vec![Moved { number: commit.number, change: commit.change, whole: true, edits, dropped: Vec::new() }];
            return;
        }
        let moved = |(topic, edit): &(_, Option<_>)| match edit {
            Some(edit) => Some((Clone::clone(topic), MovedDocument::Edited(Clone::clone(edit)))),
            None => Some((Clone::clone(topic), replaced(topic)?)),
        };
        self.commits.push(Moved {
            number: commit.number,
            change: commit.change,
            whole: false,
            edits: commit.edits.iter().filter_map(moved).collect(),
            dropped: commit.dropped.clone(),
        });
    }
}

/// The queue, shared by the reader's task and the enforcement.
#[derive(Debug, Clone, Default)]
pub struct Queue(Arc<Mutex<Waiting>>);

impl Queue {
    pub fn push(&self, reader: &Reader, commit: &Commit) {
        // Nothing panics while it is held, and a half-pushed commit is not possible.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(reader, commit);
    }

    pub fn take(&self) -> Vec<Moved> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).commits)
    }
}

/// Connects in the background: the agent starts, and enforces what it knows, also without the bus. `wake` is called after every commit.
pub async fn open(
    config: &Config,
    queue: Queue,
    seed: u64,
    wake: impl Fn() + Send + 'static,
) -> Result<ReaderHandle, connect::Error> {
    let identity = config.credentials.clone().map_or(Identity::Nobody, Identity::File);
    let options = Options::new(&config.servers, Role::Host, &config.host).identity(identity).in_background();
    let (client, events) = connect::connect(options).await?;
    let on_commit = move |reader: &Reader, commit: &Commit| {
        queue.push(reader, commit);
        wake();
        false
    };
    Ok(spawn_reader(client, events, config.host.clone(), reader::Settings::default(), seed, Box::new(on_commit)))
}
