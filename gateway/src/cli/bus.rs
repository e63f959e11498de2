//! `bus init` and its like are in [`super::setup`]. `bus tap`: topics as they go by, decoded. `bus repair-term`: for a store that nobody can lead with.

use std::time::Duration;

use clap::{Args, Subcommand};
use futures::StreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::{connect, subjects};
use groupcast_control::terms::{self, Repaired, Topics};
use groupcast_messages::{Delta, Lead};
use groupcast_policy::topic::Topic;
use serde_json::{Value, json};

use super::output::{self, Format};
use super::{Failure, Result, setup};
use crate::bus::BusArguments;

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Make everything that an installation needs: keys, accounts, certificates, credentials, configurations and units, a folder for each machine.
    Init(setup::InitOptions),
    /// Make the same for further machines.
    Add(setup::AddOptions),
    /// Make new certificates for nodes.
    Renew(setup::RenewOptions),
    /// Show topics as they are published, decoded.
    #[command(after_help = "Examples:\n  groupcast bus tap\n  groupcast bus tap --topic rules. -o jsonl")]
    Tap(TapOptions),
    /// Store a term that controllers can lead with, where the stored one is damaged or has no successor.
    #[command(
        after_help = "Stop the controllers first, and use a controller's credential. Where `doctor --on-bus` calls the term good and agents \
                      report answers of a term that is over, CATALOG was restored from an old copy: name a higher term with --at-least.\n\n\
                      Examples:\n  groupcast bus repair-term\n  groupcast bus repair-term --at-least 5000"
    )]
    RepairTerm(RepairOptions),
}

#[derive(Debug, Clone, Args)]
pub struct RepairOptions {
    #[command(flatten)]
    bus: BusArguments,
    /// Go on from this term at least, also where the stored one is good.
    #[arg(long)]
    at_least: Option<u64>,
}

pub async fn repair_term(options: RepairOptions) -> Result {
    let hint = "name the server with --server and a controller's credential with --credentials";
    let bus = options.bus.resolved(Role::Controller).map_err(anyhow::Error::from)?;
    let connected = connect::connect(bus.settings().options()).await;
    let (client, _events) = connected.map_err(|error| Failure::failed(error.to_string()).hint(hint))?;
    let repaired = terms::repair(&client, options.at_least).await.map_err(|error| Failure::failed(error.to_string()))?;
    output::say(&match repaired {
        Repaired::Fine(now) => format!("term {} is good: controllers can lead, nothing was changed", now.term()),
        Repaired::Written { now, topics: Topics::Kept } => format!("terms go on after {}: start the controllers", now.term()),
        Repaired::Written { now, topics: Topics::Cleared } => {
            format!("terms go on after {}, and stream TOPICS was cleared: start the controllers, which fill it again", now.term())
        }
        Repaired::Written { now, topics: Topics::UsedUp } => format!(
            "terms go on after {}. The sequences of stream TOPICS are used up: delete it (`nats stream rm TOPICS`), or restart all servers \
             at once. It is derived, and the controllers make it again",
            now.term()
        ),
    });
    Ok(())
}

#[derive(Debug, Clone, Args)]
pub struct TapOptions {
    #[command(flatten)]
    bus: BusArguments,
    /// Only topics that begin so, such as `rules.` or `members.web`.
    #[arg(long, default_value = "")]
    topic: String,
    /// End after so many.
    #[arg(long)]
    count: Option<usize>,
    /// End after so long.
    #[arg(long, value_parser = humantime::parse_duration)]
    within: Option<Duration>,
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub async fn tap(options: TapOptions) -> Result {
    let settings = options.bus.resolved(Role::Viewer).map_err(anyhow::Error::from)?.settings();
    let bus =
        connect::Options::new(&settings.servers, Role::Viewer, &settings.name).identity(settings.identity).tls(settings.tls);
    let failed = |error: &dyn std::fmt::Display| Failure::failed(error.to_string()).hint("name the server with --server");
    let (client, mut events) = connect::connect(bus).await.map_err(|error| failed(&error))?;
    let mut messages = client.subscribe(subjects::READ_ALL).await.map_err(|error| failed(&error))?;
    let over = async {
        match options.within {
            Some(within) => tokio::time::sleep(within).await,
            None => std::future::pending().await,
        }
    };
    tokio::pin!(over);
    let mut left = options.count.unwrap_or(usize::MAX);
    while left > 0 {
        let next = tokio::select! {
            next = messages.next() => next,
            event = events.next() => {
                heard(event)?;
                continue;
            }
            () = &mut over => return Ok(()),
        };
        let Some(message) = next else { return Err(Failure::failed("the bus ended the subscription")) };
        let topic = subjects::parse_read(&message.subject);
        let name = topic.as_ref().map_or("leader".to_owned(), Topic::to_string);
        if !name.starts_with(&options.topic) {
            continue;
        }
        let shown = decoded(&name, topic.as_ref(), &message.payload);
        output::print(&match options.output {
            Format::Json => output::json(&shown),
            Format::Yaml => output::yaml(&shown),
            Format::Name => name + "\n",
            Format::Jsonl => output::json_line(&shown) + "\n",
            Format::Table | Format::Wide => line(&shown),
        })?;
        left -= 1;
    }
    Ok(())
}

/// A denied subscription is silent where it is made: nothing would ever arrive.
fn heard(event: Option<connect::Event>) -> Result {
    match event {
        Some(connect::Event::Denied(reason)) => {
            Err(Failure::failed(format!("this credential may not listen to topics: {reason}"))
                .hint("name a viewer's or a controller's credential with --credentials, and its name with --name"))
        }
        Some(connect::Event::Closed) | None => Err(Failure::failed("the connection to the bus is closed")),
        Some(connect::Event::Disconnected) => {
            output::say("the bus is away: topics that are published meanwhile are not shown");
            Ok(())
        }
        Some(connect::Event::SlowConsumer | connect::Event::Missed) => {
            output::say("topics came faster than they could be shown: some are left out");
            Ok(())
        }
        Some(_) => Ok(()),
    }
}

fn decoded(name: &str, topic: Option<&Topic>, payload: &[u8]) -> Value {
    let mut shown = json!({ "topic": name, "bytes": payload.len() });
    if let Some(topic) = topic {
        match Delta::decode(topic, payload) {
            Ok(delta) => {
                shown["term"] = delta.term.into();
                shown["change"] = delta.change.into();
                shown["edit"] = format!("{:?}", delta.edit).into();
            }
            Err(error) => shown["unreadable"] = error.to_string().into(),
        }
    } else {
        match Lead::decode(payload) {
            Ok(lead) => shown["lead"] = format!("{lead:?}").into(),
            Err(error) => shown["unreadable"] = error.to_string().into(),
        }
    }
    shown
}

fn line(shown: &Value) -> String {
    let text = |field: &str| shown[field].as_str().map_or_else(|| shown[field].to_string(), str::to_owned);
    match (shown.get("edit"), shown.get("lead")) {
        (Some(_), _) => format!(
            "{} change {} term {} ({} bytes): {}\n",
            text("topic"),
            text("change"),
            text("term"),
            text("bytes"),
            text("edit")
        ),
        (None, Some(_)) => format!("{} ({} bytes): {}\n", text("topic"), text("bytes"), text("lead")),
        (None, None) => format!("{} ({} bytes): cannot be read: {}\n", text("topic"), text("bytes"), text("unreadable")),
    }
}
