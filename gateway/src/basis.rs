//! What a change is judged on: one moment of what the gateway knows, shared and not copied, so that nobody waits for the judgement.

use std::sync::Arc;

use groupcast_control::change::Write;
use groupcast_control::document::Document;
use groupcast_policy::model::World;

use crate::local::{Kept, Local};

#[derive(Debug, Clone)]
pub struct Basis {
    pub world: Arc<World>,
    /// CATALOG and REGISTRY sequences.
    pub through: (u64, u64),
    /// In the order of the writes.
    now: Vec<Now>,
}

/// What a write would replace.
#[derive(Debug, Clone, Default)]
pub struct Now {
    pub document: Option<Document>,
    pub kept: Option<Kept>,
}

impl Basis {
    pub fn of(local: &Local, writes: &[Write]) -> Self {
        let now = |write: &Write| Now { document: local.document(&write.name), kept: local.kept(&write.name).cloned() };
        Self { world: local.world_now(), through: local.through(), now: writes.iter().map(now).collect() }
    }

    /// The writes this was made for, each with what it would replace.
    pub fn of_each<'a>(&'a self, writes: &'a [Write]) -> impl Iterator<Item = (&'a Write, &'a Now)> {
        writes.iter().zip(&self.now)
    }
}
