//! `bus tap`: topics as they go by, decoded.

use std::time::Duration;

use clap::{Args, Subcommand};
use futures::StreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::{connect, subjects};
use groupcast_messages::{Delta, Lead};
use groupcast_policy::topic::Topic;
use serde_json::{Value, json};

use super::output::{self, Format};
use super::{Failure, Result};
use crate::bus::BusOptions;

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Show topics as they are published, decoded.
    #[command(after_help = "Examples:\n  groupcast bus tap\n  groupcast bus tap --topic rules. -o jsonl")]
    Tap(TapOptions),
}

#[derive(Debug, Clone, Args)]
pub struct TapOptions {
    #[command(flatten)]
    bus: BusOptions,
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
    let settings = options.bus.settings();
    let bus =
        connect::Options::new(&settings.servers, Role::Viewer, &settings.name).identity(settings.identity).tls(settings.tls);
    let failed = |error: &dyn std::fmt::Display| Failure::failed(error.to_string()).hint("name the server with --server");
    let (client, _events) = connect::connect(bus).await.map_err(|error| failed(&error))?;
    let mut messages = client.subscribe(subjects::READ_ALL).await.map_err(|error| failed(&error))?;
    let end = options.within.map(|within| tokio::time::Instant::now() + within);
    let mut left = options.count.unwrap_or(usize::MAX);
    while left > 0 {
        let next = match end {
            None => messages.next().await,
            Some(end) => match tokio::time::timeout_at(end, messages.next()).await {
                Ok(next) => next,
                Err(_) => return Ok(()),
            },
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
            Format::Jsonl => shown.to_string() + "\n",
            Format::Table | Format::Wide => line(&shown),
        })?;
        left -= 1;
    }
    Ok(())
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
