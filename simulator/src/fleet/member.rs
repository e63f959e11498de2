//! A host of the fleet: the real reader over a connection of its own, on a model kernel if it has one. It comes back when it loses its
//! connection, and keeps what it holds meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use groupcast_policy::ids::HostId;
use groupcast_topics::reader::Reader;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::machine::Machine;
use super::trouble::Trouble;
use super::watch::{RAW_SUBJECT, Shared, Watch};
use crate::host::{Command, Host};
use crate::lean::{self, CommandSender, ConnectOptions, Connection};
use crate::random::Random;

const RETRY: Duration = Duration::from_millis(200);
/// A server that is overrun, or stopped, answers late: then it is tried again.
const CONNECT_WITHIN: Duration = Duration::from_secs(20);

/// Its connection, while there is one; without it the connection ends.
type Line = Arc<Mutex<Option<CommandSender<Command>>>>;

/// Reaches one host from the fleet.
pub struct Member {
    pub number: usize,
    pub trouble: Arc<Trouble>,
    line: Line,
    /// It is to begin anew when it comes back.
    crash: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

struct Life {
    shared: Arc<Shared>,
    host: Host<Watch>,
    id: HostId,
    number: usize,
    line: Line,
    crash: Arc<AtomicBool>,
}

/// Begins a host that lives until the run ends.
pub fn spawn(shared: &Arc<Shared>, number: usize, kernel: bool) -> anyhow::Result<Member> {
    let id = shared.world.hosts[number].clone();
    let machine = kernel.then(|| Machine::new(&shared.world, number).map(Box::new)).transpose()?;
    let (trouble, line, crash) = (Arc::<Trouble>::default(), Line::default(), Arc::<AtomicBool>::default());
    let watch = Watch::new(Arc::clone(shared), number, machine, Arc::clone(&trouble));
    let host = Host::new(id.clone(), Arc::clone(&shared.reading), number as u64, watch);
    let life = Life { shared: Arc::clone(shared), host, id, number, line: Arc::clone(&line), crash: Arc::clone(&crash) };
    Ok(Member { number, trouble, line, crash, task: tokio::spawn(life.live()) })
}

fn locked(line: &Line) -> std::sync::MutexGuard<'_, Option<CommandSender<Command>>> {
    line.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Life {
    /// What is in force does not depend on the connection.
    fn look(&mut self) {
        let (watch, reader) = self.host.observed();
        watch.looked_at(reader);
    }

    async fn live(mut self) {
        let mut random = Random::new(self.number as u64 ^ 0x5eed);
        let mut first = true;
        loop {
            let Some(connection) = connect(&self.shared, &self.id, &mut random, first).await else { return };
            first = false;
            if self.crash.swap(false, Ordering::AcqRel) {
                self.host.begin_anew(self.id.clone(), Arc::clone(&self.shared.reading), random.next());
                self.host.observer().begun_anew();
            }
            self.look();
            let lean::Running { commands, task } = lean::spawn(connection, self.host);
            commands.send(Command::Overhear(RAW_SUBJECT.to_owned()));
            commands.send(Command::Start);
            self.shared.connected.fetch_add(1, Ordering::Relaxed);
            *locked(&self.line) = Some(commands);
            if self.shared.ended.load(Ordering::Acquire) {
                locked(&self.line).take();
            }
            let ended = task.await;
            locked(&self.line).take();
            self.shared.connected.fetch_sub(1, Ordering::Relaxed);
            self.host = match ended {
                Ok((host, _)) => host,
                Err(_) => return self.shared.violated(format!("host {} panicked", self.id)),
            };
            self.host.disconnected();
            self.look();
        }
    }
}

/// `None` when the run is over.
async fn connect(shared: &Shared, id: &HostId, random: &mut Random, mut first: bool) -> Option<Connection> {
    let options = ConnectOptions { name: id.to_string(), ..Default::default() };
    loop {
        if shared.ended.load(Ordering::Acquire) {
            return None;
        }
        if !std::mem::take(&mut first) {
            let jitter_ms = shared.reconnect_jitter.as_millis().max(1) as u64;
            tokio::time::sleep(Duration::from_millis(random.next() % jitter_ms)).await;
        }
        match tokio::time::timeout(CONNECT_WITHIN, Connection::connect(shared.address, &options)).await {
            Ok(Ok(connection)) => return Some(connection),
            _ => tokio::time::sleep(RETRY).await,
        }
    }
}

impl Member {
    /// Cuts its connection; it comes back by itself, unless the run is over.
    pub fn cut(&self) {
        locked(&self.line).take();
    }

    /// Ends it; another begins in its place and knows nothing, on the same kernel.
    pub fn crash(&self) {
        self.crash.store(true, Ordering::Release);
        self.cut();
    }

    /// What is found out about what it holds; `None` while it is not connected, or cut off before it has an answer.
    pub fn look<T: Send + 'static>(&self, look: impl FnOnce(&Reader) -> T + Send + 'static) -> Option<oneshot::Receiver<T>> {
        let (tell, told) = oneshot::channel();
        let line = locked(&self.line);
        line.as_ref()?.send(Command::Look(Box::new(move |reader| drop(tell.send(look(reader))))));
        Some(told)
    }

    /// The run is over.
    pub async fn end(self) {
        self.cut();
        self.task.abort();
        let _ = self.task.await;
    }
}
