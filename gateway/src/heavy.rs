//! Work that takes long: on threads of its own, few at once, for a bounded time, and never with a lock that requests need.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use tokio::sync::Semaphore;

use crate::api::access::Caller;
use crate::problem::Problem;
use crate::shares::{Limits, Shares};

/// Computed at once.
pub const RUNNING_MAX: usize = 2;
/// Computed or waiting for that; further ones are asked to come back.
pub const WAITING: Limits = Limits { total: 16, token: 4, address: 8 };
/// How long one may be computed.
pub const DEADLINE: Duration = Duration::from_secs(10);

pub struct Heavy {
    running: Arc<Semaphore>,
    waiting: Arc<Shares>,
}

impl Default for Heavy {
    fn default() -> Self {
        Self { running: Arc::new(Semaphore::new(RUNNING_MAX)), waiting: Shares::new(WAITING) }
    }
}

/// Says that nobody waits for the answer any more.
struct Wanted(Arc<AtomicBool>);

impl Drop for Wanted {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// The time is up.
pub fn too_long() -> Problem {
    let detail = format!("this takes longer than {}: split it into smaller changes", humantime::format_duration(DEADLINE));
    Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "too-complex", detail)
}

impl Heavy {
    /// A place among those that are computed, for work that waits for others itself.
    pub async fn place(&self, caller: &Caller) -> Result<impl Drop + use<>, Problem> {
        let share = self.waiting.take(&caller.principal.id, caller.from).map_err(|full| full.problem("computations"))?;
        let running = self.running.clone().acquire_owned().await.map_err(|_| Problem::unavailable("this gateway ends"))?;
        Ok(Place(Some((share, running))))
    }

    /// Runs it on a thread of its own. It asks now and then whether to go on, which it must not when the time is up or nobody waits for it.
    pub async fn run<T: Send + 'static>(
        &self,
        caller: &Caller,
        work: impl FnOnce(&dyn Fn() -> bool) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let place = self.place(caller).await?;
        let wanted = Wanted(Arc::new(AtomicBool::new(true)));
        let (still, deadline) = (wanted.0.clone(), Instant::now() + DEADLINE);
        let computed = tokio::task::spawn_blocking(move || {
            // The place is given back when the thread is done, also if the client is gone by then.
            let _place = place;
            work(&|| still.load(Ordering::Relaxed) && Instant::now() < deadline)
        });
        computed.await.map_err(|error| Problem::unavailable(format!("it was not finished: {error}")))?
    }
}

struct Place(Option<(crate::shares::Share, tokio::sync::OwnedSemaphorePermit)>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.take();
    }
}
