//! All actors of a controller, started, watched and ended together.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use actix::prelude::*;
use async_nats::Client;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::alive::{self, Login};
use groupcast_bus_config::{connect, streams, subjects};
use groupcast_policy::ids::{HostId, SourceId, TemplateId};
use groupcast_policy::model::World;
pub use groupcast_topics::convergence::Standing;
use groupcast_topics::nats::{Compile, Ears, NodeHandle, spawn_node_hearing};
use groupcast_topics::node::{self, Vacancy};
use tokio::sync::{broadcast, oneshot, watch};

use crate::actors::RETRY_PAUSE;
use crate::actors::compiler::{CompilerActor, GetWorld, Look, Meet, Neighbours, Want};
use crate::actors::convergence::{AskProgress, AskSpan, ConvergenceActor, ConvergenceView, LookAtConvergence, Watch};
use crate::actors::fanout::Fanout;
use crate::actors::follower::Follower;
use crate::actors::leadership::{Leadership, LookAtNode, NodeView};
use crate::actors::liveness::{AskHosts, Confirm, Liveness, LivenessView, LookAtLiveness, ShownHost};
use crate::actors::reaper::{Expel, Reaper};
use crate::actors::registrar::Registrar;
use crate::actors::source::SourceActor;
use crate::audit::Audit;
use crate::feed::Health;
use crate::fence::Fences;
use crate::log::Log;
use crate::mirror::Origin;
use crate::names;
use crate::progress::Progress;
use crate::source::config::Source;
use crate::source::service::Sources;
use crate::stage::View;
use crate::watchdog::{Dead, Watchdog};
use crate::{registration, registry};

/// How long a leader that lets go may take; then the process ends all the same.
pub const RESIGN_DEADLINE: Duration = Duration::from_secs(3);
/// Attempts to read where the streams end before a compile is given up; the node asks again.
const ENDS_ATTEMPTS_MAX: u32 = 10;

#[derive(Debug, Clone)]
pub struct Settings {
    pub name: HostId,
    /// How to reach the bus; the name and role are set here.
    pub servers: Vec<String>,
    pub identity: connect::Identity,
    pub tls: connect::Tls,
    pub replicas: usize,
    pub lease: Duration,
    /// Whether it may lead.
    pub candidate: bool,
    pub reconnect_delay_max: Duration,
    /// What is polled while it leads.
    pub sources: Vec<Source>,
    pub registration: registration::settings::Settings,
}

impl Settings {
    pub fn new(name: HostId, servers: Vec<String>) -> Self {
        Self {
            name,
            servers,
            identity: connect::Identity::default(),
            tls: connect::Tls::default(),
            replicas: 1,
            lease: Duration::from_secs(3),
            candidate: true,
            reconnect_delay_max: connect::RECONNECT_DELAY_MAX,
            sources: Vec::new(),
            registration: registration::settings::Settings::default(),
        }
    }

    pub fn options(&self) -> connect::Options {
        connect::Options::new(&self.servers, Role::Controller, &self.name)
            .identity(self.identity.clone())
            .tls(self.tls.clone())
            .reconnect_delay_max(self.reconnect_delay_max)
    }
}

fn dead(actor: &'static str) -> Error {
    Error::Dead(Dead(actor))
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Connect(#[from] connect::Error),
    #[error(transparent)]
    Streams(#[from] streams::Error),
    #[error(transparent)]
    Registry(#[from] registry::Error),
    #[error(transparent)]
    Dead(#[from] Dead),
}

/// Everything that can be seen of a controller.
#[derive(Debug, Clone, Default)]
pub struct Status {
    pub compiler: View,
    pub node: NodeView,
    pub convergence: ConvergenceView,
    pub liveness: LivenessView,
    /// A stream that is not followed to its head, since when and why.
    pub lost: Option<String>,
    /// The connection on which it hears hosts is away, and not only for a moment.
    pub deaf: bool,
}

impl Status {
    /// Has read everything and goes on reading, holds everything that is published and hears hosts: it can serve them and lead.
    pub fn is_ready(&self) -> bool {
        self.compiler.loaded && self.node.synced && self.lost.is_none() && !self.deaf
    }

    /// Nobody leads though somebody should: on a blank bus nobody may.
    pub fn vacancy(&self) -> Option<&Vacancy> {
        self.node.vacancy.as_ref().filter(|_| !self.compiler.blank)
    }
}

pub struct Controller {
    compiler: Addr<CompilerActor>,
    convergence: Addr<ConvergenceActor>,
    leadership: Addr<Leadership>,
    liveness: Addr<Liveness>,
    reaper: Addr<Reaper>,
    watchdog: Watchdog,
    node: Arc<NodeHandle>,
    clients: [Client; 2],
    /// Whether the bus lets the second of them in.
    login: Login,
    healths: [(Origin, Health); 2],
    /// Each keeps its connection at a server that is of use.
    _guards: [connect::Guard; 3],
    fitness: tokio::task::JoinHandle<()>,
    ears: Ears,
    /// What waits for others is told before the runtime goes.
    ending: watch::Sender<bool>,
    thread: Arbiter,
}

impl Controller {
    /// Connects, makes sure of the streams, and starts everything. Must be called within an actix system; `runtime` is where tasks
    /// run that are no actor's.
    pub async fn start(settings: Settings, runtime: tokio::runtime::Handle) -> Result<Self, Error> {
        let clock = Instant::now();
        // What hosts send must not hold up what the streams say, nor the other way round: a connection for each.
        let (topics, topics_events) = connect::connect(settings.options()).await?;
        let (heard, heard_events) = connect::connect(settings.options()).await?;
        let (ears, heard_guard) = {
            let _in = runtime.enter();
            let guard = heard_events.guard(&heard);
            (Ears::new(heard, heard_events), guard)
        };
        let (follow, mut follow_events) = connect::connect(settings.options()).await?;
        let guards = {
            let _in = runtime.enter();
            [topics_events.guard(&topics), follow_events.guard(&follow), heard_guard]
        };
        let login = Login::default();
        let heard_login = login.clone();
        runtime.spawn(async move {
            while let Some(event) = follow_events.next().await {
                heard_login.heard(&event);
            }
        });
        streams::ensure(&follow, settings.replicas).await?;
        registry::upgrade::upgrade(&follow).await?;

        let thread = Arbiter::new();
        let compiler = Supervisor::start_in_arbiter(&thread.handle(), move |_| CompilerActor::new(clock));
        let node_settings = node::Settings {
            name: settings.name.to_string(),
            candidate: settings.candidate,
            lease_ms: settings.lease.as_millis() as u64,
            ..node::Settings::default()
        };
        let compile = compile(compiler.clone(), follow.clone(), runtime.clone());
        let node = {
            let _in = runtime.enter();
            let (topics, replicas, ears) = (topics.clone(), settings.replicas, ears.clone());
            Arc::new(spawn_node_hearing(ears, topics, topics_events, node_settings, replicas, seed(), compile))
        };
        let convergence = {
            let node = node.clone();
            Supervisor::start(move |_| ConvergenceActor::new(node))
        };
        let fanout = {
            let node = node.clone();
            Supervisor::start(move |_| Fanout::new(node))
        };
        let registrar = {
            let (client, ears, runtime) = (follow.clone(), ears.clone(), runtime.clone());
            Supervisor::start(move |_| Registrar::new(client, ears, runtime))
        };
        let fences = Fences::new(&follow);
        runtime.spawn(fences.clone().keep(node.leading()));
        runtime.spawn(Audit::new(follow.clone()).watch());
        let reaper = {
            let (client, fences, leading) = (follow.clone(), fences.clone(), node.leading());
            Supervisor::start(move |_| Reaper::new(client, fences, leading))
        };
        let liveness = {
            let (own, options, leading) = (settings.registration, (settings.options(), ears.clone()), node.leading());
            let reaper = (reaper.clone().recipient(), reaper.clone().recipient());
            let (client, runtime) = (follow.clone(), runtime.clone());
            Supervisor::start(move |_| Liveness::new(own, options, leading, reaper, client, runtime))
        };
        let leadership = Leadership::new(node.clone(), compiler.clone().recipient()).start();
        let neighbours = Neighbours {
            digests: leadership.clone().recipient(),
            documents: leadership.clone().recipient(),
            publish: fanout.clone().recipient(),
            published: convergence.clone().recipient(),
            touched_nothing: convergence.clone().recipient(),
        };
        compiler.send(Meet(neighbours)).await.map_err(|_| dead("compiler"))?;
        let healths = [Origin::Catalog, Origin::Registry].map(|origin| (origin, Health::default()));
        let [catalog, registry] = healths.clone().map(|(origin, health)| {
            let (client, next, runtime) = (follow.clone(), compiler.clone().recipient(), runtime.clone());
            Supervisor::start(move |_| Follower::new(origin, client, next, clock, runtime, health))
        });
        let fitness = runtime.spawn(keep_fit(node.clone(), healths.clone().map(|(_, health)| health)));
        let (ending, _) = watch::channel(false);
        let sources = sources(&settings, &follow, &fences, &node, &ending, &runtime);
        runtime.spawn(Sources::new(sources.clone()).serve(follow.clone(), node.leading()));
        let mut watchdog = Watchdog::default()
            .watch("compiler", compiler.clone().recipient())
            .watch("convergence", convergence.clone().recipient())
            .watch("leadership", leadership.clone().recipient())
            .watch("fanout", fanout.recipient())
            .watch("registrar", registrar.recipient())
            .watch("liveness", liveness.clone().recipient())
            .watch("reaper", reaper.clone().recipient())
            .watch("follower of the catalogue", catalog.recipient())
            .watch("follower of the registry", registry.recipient());
        for (_, source) in sources {
            watchdog = watchdog.watch("source", source.recipient());
        }
        let clients = [topics, follow];
        Ok(Self {
            compiler,
            convergence,
            leadership,
            liveness,
            reaper,
            watchdog,
            node,
            clients,
            login,
            healths,
            _guards: guards,
            fitness,
            ears,
            ending,
            thread,
        })
    }

    pub async fn status(&self) -> Result<Status, Error> {
        let compiler = self.compiler.send(Look).await.map_err(|_| dead("compiler"))?;
        let node = self.leadership.send(LookAtNode).await.map_err(|_| dead("leadership"))?;
        let node = node.ok_or(dead("topics"))?;
        let convergence = self.convergence.send(LookAtConvergence).await.map_err(|_| dead("convergence"))?;
        let convergence = convergence.ok_or(dead("topics"))?;
        let liveness = self.liveness.send(LookAtLiveness).await.map_err(|_| dead("liveness"))?;
        for (client, name) in self.clients.iter().zip(["topics", "follow"]) {
            let counted = client.statistics();
            let (sent, received) = (counted.out_bytes.load(Relaxed), counted.in_bytes.load(Relaxed));
            metrics::counter!(names::BUS_SENT_BYTES, "connection" => name).absolute(sent);
            metrics::counter!(names::BUS_RECEIVED_BYTES, "connection" => name).absolute(received);
        }
        for counted in self.ears.tallied() {
            metrics::counter!(names::HEARD, "kind" => counted.kind).absolute(counted.heard);
            metrics::counter!(names::UNHEARD, "kind" => counted.kind).absolute(counted.unheard);
        }
        metrics::gauge!(names::PUBLISHED_TOPICS).set(node.topics as f64);
        let lost = self.healths.iter().find_map(|(origin, health)| health.lost().map(|lost| lost.said_of(origin.as_str())));
        let deaf = self.ears.hearing().borrow().is_deaf(Instant::now());
        Ok(Status { compiler, node, convergence, liveness, lost, deaf })
    }

    /// Fails when an actor does not answer any more.
    pub async fn alive(&self) -> Result<(), Error> {
        Ok(self.watchdog.look().await?)
    }

    /// How far a change is, as far as this controller knows: whoever followed when it was published does.
    pub async fn progress(&self, change: u64) -> Result<Option<Progress>, Error> {
        self.convergence.send(AskProgress(change)).await.map_err(|_| dead("convergence"))
    }

    /// When the CATALOG was made that is followed: numbers of changes are of that stream alone.
    pub fn catalog_stream(&self) -> String {
        let [(_, catalog), _] = &self.healths;
        catalog.streams().borrow().clone()
    }

    pub async fn span(&self, change: u64) -> Result<Option<Vec<HostId>>, Error> {
        self.convergence.send(AskSpan(change)).await.map_err(|_| dead("convergence"))
    }

    /// Has the bus judge a write that it refuses: that a connection stands says nothing.
    pub async fn bus_takes_writes(&self, within: Duration) -> Result<Duration, alive::Error> {
        let [_, follow] = &self.clients;
        self.login.takes_writes(follow, within).await
    }

    /// What these hosts do, of those that were heard of.
    pub async fn standings(&self, hosts: Vec<HostId>) -> Result<Vec<(HostId, Standing)>, Error> {
        let look = self.node.inspect(move |node, convergence| {
            let now_ms = node.now_ms();
            hosts.into_iter().filter_map(|host| convergence.standing(&host, now_ms).map(|standing| (host, standing))).collect()
        });
        look.await.ok_or(dead("topics"))
    }

    /// The progress of every change that moves from now on.
    pub async fn watch(&self) -> Result<broadcast::Receiver<Arc<Progress>>, Error> {
        self.convergence.send(Watch).await.map_err(|_| dead("convergence"))
    }

    /// How these hosts are; `None` from a controller that does not lead.
    pub async fn hosts(&self, hosts: Vec<HostId>) -> Result<Option<Vec<ShownHost>>, Error> {
        self.liveness.send(AskHosts(hosts)).await.map_err(|_| dead("liveness"))
    }

    /// The silent hosts of a template are gone for good; whether this controller could act on it.
    pub async fn confirm(&self, template: TemplateId) -> Result<bool, Error> {
        self.liveness.send(Confirm(template)).await.map_err(|_| dead("liveness"))
    }

    /// Takes a host away with all it has enrolled; how many workloads went, or why none could.
    pub async fn expel(&self, host: HostId, by: String) -> Result<Result<usize, String>, Error> {
        self.reaper.send(Expel { host, by }).await.map_err(|_| dead("reaper"))
    }

    /// The desired state as it was read.
    pub async fn world(&self) -> Result<Box<World>, Error> {
        self.compiler.send(GetWorld).await.map_err(|_| dead("compiler"))
    }

    /// Lets go of the leadership, so that another need not wait for the lease to end.
    pub async fn resign(&self) {
        let mut leading = self.node.leading();
        self.node.resign().await;
        let _ = tokio::time::timeout(RESIGN_DEADLINE, leading.wait_for(Option::is_none)).await;
        self.ending.send_replace(true);
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.fitness.abort();
        self.thread.stop();
    }
}

/// Whoever does not read both streams to their heads must not lead: it would hold the lease and publish nothing. And what is known of changes
/// by their numbers ends with the stream that counted them.
async fn keep_fit(node: Arc<NodeHandle>, healths: [Health; 2]) {
    let [mut catalog, mut registry] = healths.each_ref().map(Health::watch);
    let mut streams = healths[0].streams();
    let mut followed = String::new();
    loop {
        let now = streams.borrow_and_update().clone();
        if !followed.is_empty() && now != followed {
            node.renumbered().await;
        }
        followed = now;
        let fit = catalog.borrow_and_update().is_none() & registry.borrow_and_update().is_none();
        node.fit(fit).await;
        let changed = tokio::select! {
            changed = catalog.changed() => changed,
            changed = registry.changed() => changed,
            changed = streams.changed() => changed,
        };
        if changed.is_err() {
            return;
        }
    }
}

fn sources(
    settings: &Settings,
    client: &Client,
    fences: &Arc<Fences>,
    node: &NodeHandle,
    ending: &watch::Sender<bool>,
    runtime: &tokio::runtime::Handle,
) -> Vec<(SourceId, Addr<SourceActor>)> {
    let start = |config: &Source| {
        let (config, client, leading, runtime) = (config.clone(), client.clone(), node.leading(), runtime.clone());
        let (id, fences, ending) = (config.id().clone(), fences.clone(), ending.subscribe());
        (id, Supervisor::start(move |_| SourceActor::new(&config, &client, fences, leading, ending, runtime, seed())))
    };
    settings.sources.iter().map(start).collect()
}

/// What the node asks for when no copy of what was published exists: everything that is in the streams at that moment, compiled.
fn compile(compiler: Addr<CompilerActor>, client: Client, runtime: tokio::runtime::Handle) -> Compile {
    Box::new(move || {
        let (answer, answered) = oneshot::channel();
        let (compiler, client) = (compiler.clone(), client.clone());
        runtime.spawn(async move {
            // Dropping the answer tells the node to ask again.
            let Some((catalog, registry)) = ends(&client).await else { return };
            let _ = compiler.send(Want { catalog, registry, answer }).await;
        });
        answered
    })
}

async fn ends(client: &Client) -> Option<(u64, u64)> {
    let (catalog, registry) = (Log::catalog(client.clone()), Log::registry(client.clone()));
    for _ in 0..ENDS_ATTEMPTS_MAX {
        let read = async |log: &Log, subject: &str| log.last(subject).await.map(|entry| entry.map_or(0, |entry| entry.sequence));
        if let (Ok(catalog), Ok(registry)) =
            (read(&catalog, subjects::CATALOG_ALL).await, read(&registry, subjects::REGISTRY_ALL).await)
        {
            return Some((catalog, registry));
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
    None
}

fn seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish()
}
