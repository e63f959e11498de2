//! The agent as a process: everything put together.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use actix::prelude::*;
use groupcast_enforce::enforcer::DryRun;
use groupcast_enforce::settings::Stamp;
use groupcast_messages::HostState;
use tokio::sync::{mpsc, watch};

use crate::api::{self, Doors};
use crate::config::Config;
use crate::disk::Disk;
use crate::enforcement::{AskEnforced, Enforcement, Keep, Parts, Progress, Wake};
use crate::files::guard_folder;
use crate::holder::Holder;
use crate::host;
use crate::http::{self, Pages};
use crate::inbox::{Inbox, Queue};
use crate::keeper::{Keeper, Known};
use crate::mode::settings_of;
use crate::netlink::{Kernel, Links};
use crate::notify::Manager;
use crate::orders::Orders;
use crate::registration;
use crate::renew;
use crate::state::State;

/// The agent does not end before what is in force is on disk, but does not wait for a broken one.
const KEEP_WITHIN: Duration = Duration::from_secs(5);

type Failure = Box<dyn std::error::Error>;

/// What the disk remembers, or nothing: a damaged file is named and not believed.
fn remembered(config: &Config) -> State {
    match State::read(&config.state) {
        Ok(Some(state)) if state.facts.host == config.host.as_str() => state,
        Ok(Some(state)) => {
            tracing::warn!(path = %config.state.display(), of = %state.facts.host, "the saved state is another host's: ignored");
            State::default()
        }
        Ok(None) => State::default(),
        Err(error) => {
            tracing::warn!(path = %config.state.display(), %error, "no saved state");
            State::default()
        }
    }
}

/// What was ordered before, or nothing.
fn ordered(config: &Config) -> Orders {
    let path = Orders::path(&config.state);
    match Orders::read(&path) {
        Ok(Some(orders)) if orders.host == config.host.as_str() => orders,
        Ok(Some(orders)) => {
            tracing::warn!(path = %path.display(), of = %orders.host, "the saved orders are another host's: ignored");
            Orders::default()
        }
        Ok(None) => Orders::default(),
        Err(error) => {
            tracing::error!(path = %path.display(), %error, "no saved orders: attach the workloads again, until then they are closed");
            Orders::default()
        }
    }
}

/// The keeper as it starts: the kernel's table if there is one, the disk's documents, what was ordered.
fn keeper<E: Holder>(config: &Config, state: &State, orders: &Orders, enforcer: E) -> Result<Keeper<E>, Failure>
where
    E::Error: 'static,
{
    let mut attachments = config.attachments();
    for written in &orders.attachments {
        match written.check() {
            Ok((workload, attached)) => _ = attachments.insert(workload, attached),
            Err(error) => tracing::warn!(%error, "a saved attachment is ignored"),
        }
    }
    let mode = orders.mode.as_ref().map(|(mode, _)| mode.as_str());
    let (settings, _) = settings_of(&config.settings, mode);
    let random = (host::random()? % u64::from(Stamp::MAX.number() / 2)) as u32 + 1;
    let known = Known {
        host: config.host.clone(),
        settings,
        attachments,
        documents: state.documents.clone(),
        stamp: Stamp::new(state.facts.stamp),
        bits_moved: state.facts.mark_mask.is_some_and(|mask| mask != config.settings.mark.mask()),
        random: Stamp::new(random).unwrap_or(Stamp::FIRST),
    };
    Ok(Keeper::start_from(known, enforcer)?)
}

/// The kernel, if it can do what is needed; each feature that it lacks is named.
fn kernel(config: &Config) -> Result<(Kernel, Vec<String>), Failure> {
    let mut kernel = Kernel::open(&config.table, config.owned_table)?;
    let missing = kernel.probe()?;
    let named: Vec<String> = missing.iter().map(|missing| format!("{} ({})", missing.feature, missing.words)).collect();
    named.iter().for_each(|feature| tracing::warn!(%feature, "this kernel lacks"));
    if missing.iter().any(|missing| missing.needed) {
        let needed: Vec<String> =
            missing.iter().filter(|missing| missing.needed).map(|missing| missing.feature.to_owned()).collect();
        return Err(format!(
            "this kernel cannot enforce anything, it lacks: {}; load the modules nf_tables and nf_conntrack, or run kernel 6.1 or newer",
            needed.join("; ")
        )
        .into());
    }
    Ok((kernel, named))
}

/// Loads what the disk remembers, or closes what is claimed, and ends: before the network is up.
pub fn boot(config: &Config) -> Result<(), Failure> {
    guard_folder(&config.state)?;
    let state = remembered(config);
    let (kernel, _) = kernel(config)?;
    let mut keeper = keeper(config, &state, &ordered(config), kernel)?;
    keeper.settle()?;
    Ok(())
}

/// Prints what the disk's state would make of the kernel.
pub fn dry_run(config: &Config) -> Result<String, Failure> {
    let state = remembered(config);
    let mut text = String::new();
    let sink = |script| text = script;
    let dry = DryRun { name: config.table.clone(), table: Default::default(), sink };
    keeper(config, &state, &ordered(config), dry)?.settle()?;
    Ok(text)
}

/// Takes our table away, and nothing else.
pub fn cleanup(config: &Config) -> Result<(), Failure> {
    if std::os::unix::net::UnixStream::connect(&config.socket).is_ok() {
        let socket = config.socket.display();
        let words = "it would put the table back: stop it first (`systemctl stop groupcast-agent`)";
        return Err(format!("an agent is running here, it answers on {socket}; {words}").into());
    }
    match Kernel::open(&config.table, config.owned_table)?.remove() {
        Err(error) if error.is_anothers() => {
            let table = &config.table;
            Err(format!("another process owns table {table}, perhaps an agent with another socket: stop it first").into())
        }
        outcome => Ok(outcome?),
    }
}

/// Follows the bus and enforces what it says.
pub async fn run(config: Config) -> Result<(), Failure> {
    let (kernel, missing_features) = kernel(&config)?;
    let links = Links::open()?;
    run_with(config, kernel, missing_features, Some(links), false).await
}

/// The same, and prints what would be done to the kernel instead of doing it. Needs no rights.
pub async fn run_dry(config: Config) -> Result<(), Failure> {
    tracing::warn!("dry run: nothing is enforced");
    let sink = |script: String| crate::terminal::print(&script);
    let dry = DryRun { name: config.table.clone(), table: Default::default(), sink };
    run_with(config, dry, vec!["everything: this is a dry run".to_owned()], None, true).await
}

async fn run_with<E>(
    config: Config,
    enforcer: E,
    missing_features: Vec<String>,
    links: Option<Links>,
    dry_run: bool,
) -> Result<(), Failure>
where
    E: Holder + Unpin + Send + 'static,
    E::Error: 'static,
{
    let manager = Manager::from_environment();
    guard_folder(&config.state)?;
    let listener = api::listen(&config.socket)?;
    let state = remembered(&config);
    let orders = ordered(&config);
    let keeper = keeper(&config, &state, &orders, enforcer)?;
    let queue = Queue::from(&config.host, &state.documents);
    // Nothing is said to be enforced before somebody has looked.
    let starting = HostState::Failing { reason: "the agent is starting".into() };
    let (progress, told) = watch::channel(Progress { turns: 0, enforced: 0, state: starting });
    let (absent, is_absent) = watch::channel(BTreeSet::new());
    let disk = Disk { path: config.state.clone() };
    let disk = Disk::start_in_arbiter(&Arbiter::new().handle(), move |_| disk);
    let parts = Parts {
        keeper,
        table: config.table.clone(),
        configured: config.settings.clone(),
        mode: orders.mode,
        queue: queue.clone(),
        progress,
        disk: disk.clone().recipient(),
        disk_of_orders: disk.recipient(),
        host: config.host.clone(),
        missing_features,
        dry_run,
        links,
        absent,
    };
    let enforcement = Enforcement::start_in_arbiter(&Arbiter::new().handle(), move |_| Enforcement::new(parts));
    // What the disk knows is in force before anybody is told that we are ready.
    enforcement.send(AskEnforced).await?;
    let wake = enforcement.clone().recipient::<Wake>();
    let (tells, heard) = mpsc::channel(registration::TOLD_MAX);
    let wake = move || {
        // A full mailbox holds a wake already.
        let _ = wake.try_send(Wake);
    };
    let inbox = Arc::new(Inbox::open(&config, queue, host::random()?, wake, tells).await?);
    let registration = registration::start(&config, inbox.clone(), heard, told.clone(), is_absent)?;
    let credential = renew::start(&config, inbox.clone());
    tokio::spawn(acknowledge(inbox.clone(), told.clone()));
    tokio::spawn(manager.clone().watch(enforcement.clone().recipient()));
    if let Some(address) = config.http {
        let listener = http::listen(address).await?;
        tokio::spawn(http::serve(
            listener,
            Pages {
                enforced: enforcement.clone().recipient(),
                inbox: inbox.clone(),
                registration: registration.clone(),
                credential: credential.clone(),
            },
        ));
    }
    let doors = Doors {
        attach: enforcement.clone().recipient(),
        detach: enforcement.clone().recipient(),
        audit: enforcement.clone().recipient(),
        mode: enforcement.clone().recipient(),
        enforced: enforcement.clone().recipient(),
        standing: enforcement.clone().recipient(),
        foreign: enforcement.clone().recipient(),
        ruleset: enforcement.clone().recipient(),
        counters: enforcement.clone().recipient(),
        explanation: enforcement.clone().recipient(),
        progress: told,
        inbox,
        registration,
        credential,
    };
    let keep = enforcement.recipient::<Keep>();
    manager.ready(config.host.as_str());
    tokio::select! {
        () = api::serve(listener, doors) => {}
        () = ended() => tracing::info!("ends; the ruleset stays in force"),
    }
    manager.stopping();
    if tokio::time::timeout(KEEP_WITHIN, keep.send(Keep)).await.is_err() {
        tracing::warn!("the disk takes too long: the last good state may be a little behind");
    }
    remove_socket(&config.socket);
    Ok(())
}

/// Tells the reader what is in force and what the host does with it: the newest, whatever came between.
async fn acknowledge(inbox: Arc<Inbox>, mut told: watch::Receiver<Progress>) {
    loop {
        let Progress { enforced, state, .. } = told.borrow_and_update().clone();
        inbox.reader().state(state).await;
        inbox.reader().enforced(enforced).await;
        if told.changed().await.is_err() {
            return;
        }
    }
}

async fn ended() {
    let signal = |kind| tokio::signal::unix::signal(kind);
    let (Ok(mut terminate), Ok(mut interrupt)) =
        (signal(tokio::signal::unix::SignalKind::terminate()), signal(tokio::signal::unix::SignalKind::interrupt()))
    else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
}

fn remove_socket(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "the socket is left behind");
    }
}
