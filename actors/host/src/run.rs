//! The agent as a process: everything put together.

use std::path::Path;

use actix::prelude::*;
use groupcast_enforce::enforcer::Enforcer;
use groupcast_enforce::settings::Stamp;
use tokio::sync::mpsc;

use crate::api::{self, Doors};
use crate::config::Config;
use crate::disk::Disk;
use crate::enforcement::{Enforcement, Parts, Wake, settings_of};
use crate::inbox::{self, Queue};
use crate::keeper::Keeper;
use crate::netlink::Kernel;
use crate::state::State;
use crate::{host, http};

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

/// The keeper as it starts: the kernel's table if there is one, the disk's documents and attachments.
fn keeper<E: Enforcer>(config: &Config, state: &State, enforcer: E) -> Result<Keeper<E>, Failure>
where
    E::Error: 'static,
{
    let mut attachments = config.attachments();
    for written in &state.facts.attachments {
        match written.check() {
            Ok((workload, attached)) => _ = attachments.insert(workload, attached),
            Err(error) => tracing::warn!(%error, "a saved attachment is ignored"),
        }
    }
    let mode = state.facts.mode.as_ref().map(|(mode, _)| mode.as_str());
    let (settings, _) = settings_of(&config.settings, mode);
    // Where nobody knows the last stamp, a random one is very likely none that a connection carries.
    let random = (host::random()? % u64::from(Stamp::MAX.number() / 2)) as u32 + 1;
    let stamp = Stamp::new(state.facts.stamp).or(Stamp::new(random)).unwrap_or(Stamp::FIRST);
    Ok(Keeper::start(config.host.clone(), settings, attachments, stamp, state.documents.clone(), enforcer)?)
}

/// Loads what the disk remembers, or closes what is claimed, and ends: before the network is up.
pub fn boot(config: &Config) -> Result<(), Failure> {
    let state = remembered(config);
    let mut keeper = keeper(config, &state, Kernel::open(&config.table, config.owned_table)?)?;
    keeper.settle()?;
    Ok(())
}

/// Prints what the disk's state would make of the kernel.
pub fn dry_run(config: &Config) -> Result<String, Failure> {
    let state = remembered(config);
    let mut text = String::new();
    let sink = |script| text = script;
    let dry = groupcast_enforce::enforcer::DryRun { name: config.table.clone(), table: Default::default(), sink };
    keeper(config, &state, dry)?.settle()?;
    Ok(text)
}

/// Takes our table away, and nothing else.
pub fn cleanup(config: &Config) -> Result<(), Failure> {
    Kernel::open(&config.table, config.owned_table)?.remove()?;
    Ok(())
}

pub async fn run(config: Config) -> Result<(), Failure> {
    let listener = api::listen(&config.socket)?;
    if let Some(folder) = config.state.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let state = remembered(&config);
    let keeper = keeper(&config, &state, Kernel::open(&config.table, config.owned_table)?)?;
    let queue = Queue::default();
    let (enforced, mut acknowledge) = mpsc::unbounded_channel();
    let disk = Disk { path: config.state.clone() };
    let disk = Disk::start_in_arbiter(&Arbiter::new().handle(), move |_| disk);
    let parts = Parts {
        keeper,
        table: config.table.clone(),
        configured: config.settings.clone(),
        mode: state.facts.mode.clone(),
        queue: queue.clone(),
        enforced,
        disk: disk.recipient(),
        host: config.host.to_string(),
    };
    let enforcement = Enforcement::start_in_arbiter(&Arbiter::new().handle(), move |_| Enforcement::new(parts));
    let wake = enforcement.clone().recipient::<Wake>();
    let reader = inbox::open(&config, queue, host::random()?, move || {
        // A full mailbox holds a wake already.
        let _ = wake.try_send(Wake);
    })
    .await?;
    tokio::spawn(async move {
        while let Some(number) = acknowledge.recv().await {
            reader.enforced(number).await;
        }
    });
    if let Some(address) = config.http {
        let listener = http::listen(address).await?;
        tokio::spawn(http::serve(listener, enforcement.clone().recipient()));
    }
    let doors = Doors {
        attach: enforcement.clone().recipient(),
        detach: enforcement.clone().recipient(),
        mode: enforcement.clone().recipient(),
        status: enforcement.clone().recipient(),
        ruleset: enforcement.clone().recipient(),
        counters: enforcement.recipient(),
    };
    host::notify("READY=1");
    tokio::select! {
        () = api::serve(listener, doors) => {}
        () = ended() => tracing::info!("ends; the ruleset stays in force"),
    }
    remove_socket(&config.socket);
    Ok(())
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
