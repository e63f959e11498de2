//! `explain`: why a flow passes or does not.

use clap::Args;

use super::Result;
use super::client::{Call, escaped};
use super::context::Connection;
use super::output::{self, Format, Paint};
use crate::explained::{Explanation, Side};

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Examples:\n  groupcast explain web-1 db-1 tcp/5432\n  groupcast explain 192.0.2.7 web-1 tcp/443\n  groupcast explain web-1 10.0.0.53 udp/53"
)]
pub struct Options {
    /// A workload or an address.
    from: String,
    /// A workload or an address.
    to: String,
    /// tcp/5432, udp/53, icmp/8/0, gre.
    traffic: String,
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
}

pub async fn explain(connection: &Connection, options: Options) -> Result {
    let Options { from, to, traffic, output: format } = options;
    let path = format!("/v1/explain?from={}&to={}&traffic={}", escaped(&from), escaped(&to), escaped(&traffic));
    let explanation: Explanation = connection.api()?.fetch(&Call::get(path)).await?;
    let value = || serde_json::to_value(&explanation).unwrap_or_default();
    output::print(&match format {
        Format::Json => output::json(&value()),
        Format::Jsonl => output::json_line(&value()) + "\n",
        Format::Yaml => output::yaml(&value()),
        Format::Name => explanation.passes.map_or("unknown", verdict).to_owned() + "\n",
        Format::Table | Format::Wide => shown(&explanation, connection.color.stdout()),
    })
}

fn verdict(allowed: bool) -> &'static str {
    if allowed { "allowed" } else { "denied" }
}

pub fn shown(explanation: &Explanation, paint: Paint) -> String {
    let Explanation { from, to, source, destination, traffic, allowed, .. } = explanation;
    let colour = |allowed: bool, text: &str| if allowed { paint.green(text) } else { paint.red(text) };
    let mut text = format!("{from} ({source}) -> {to} ({destination}) {traffic}: {}", colour(*allowed, verdict(*allowed)));
    text += &match explanation.passes {
        Some(passes) if passes == *allowed => String::new(),
        Some(true) => paint.yellow(" by the policy, but it PASSES"),
        Some(false) => paint.yellow(" by the policy, but it does NOT pass"),
        None => paint.yellow(" by the policy; whether it passes is not known"),
    };
    text.push('\n');
    let sides = [("leaving", &explanation.egress), ("arriving at", &explanation.ingress)];
    for (word, side) in sides.into_iter().filter_map(|(word, side)| side.as_ref().map(|side| (word, side))) {
        text += &format!("\n{word} {}{}: {}\n", side.workload, on_host(side), colour(side.allowed, verdict(side.allowed)));
        for step in &side.path {
            let mark = if step.decides { "=>" } else { "  " };
            let line = format!("  {mark} group {} (revision {}) by {}", step.group, step.revision, step.scope);
            text += &(if step.decides { paint.bold(&line) } else { line });
            text.push('\n');
        }
        match &side.rule {
            Some(rule) => text += &format!("  rule: {rule}\n"),
            None => text += &format!("  {}\n", side.why),
        }
        if !side.happens.is_empty() {
            let line = format!("  {}", side.happens);
            text += &(if side.passes == Some(side.allowed) { line } else { paint.yellow(&line) });
            text.push('\n');
        }
    }
    if explanation.egress.is_none() && explanation.ingress.is_none() {
        text += "\nneither end is a workload, so nobody judges it\n";
    }
    if *allowed != explanation.replies_allowed {
        text += &format!("\nreplies: {}\n", colour(explanation.replies_allowed, verdict(explanation.replies_allowed)));
    }
    text
}

fn on_host(side: &Side) -> String {
    side.host.as_ref().map_or(String::new(), |host| format!(" on host {host}"))
}
