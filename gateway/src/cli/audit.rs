//! `audit`: who wrote what, when, and what it changed.

use std::time::{Duration, SystemTime};

use clap::{Args, ValueEnum};
use serde_json::Value;

use super::client::{Api, Call, escaped};
use super::context::Connection;
use super::get::text;
use super::output::{self, Paint};
use super::{Failure, Result};
use crate::api::health::Found;
use crate::checks::{AUDIT, Grade};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line, with the document as it was written.
    Jsonl,
    Json,
}

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Examples:\n  groupcast audit --since 1h\n  groupcast audit group/web\n  groupcast audit --by ann --since 2026-11-01T00:00:00Z -o jsonl"
)]
pub struct Options {
    /// Only this document (`group/web`), or documents of this kind (`group`).
    what: Option<String>,
    /// Only what was written by authors that begin so, such as a token's id.
    #[arg(long)]
    by: Option<String>,
    /// Only what is so young (`1h`, `7d`), or was written since then (`2026-11-18T07:00:00Z`).
    #[arg(long)]
    since: Option<String>,
    /// Only what is older than this, or was written until then.
    #[arg(long)]
    until: Option<String>,
    /// How many at most, oldest first; without it, all there are.
    #[arg(long)]
    limit: Option<usize>,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// A time, or how long ago it was.
fn moment(name: &str, written: &str, now: SystemTime) -> Result<String> {
    let time = match humantime::parse_duration(written) {
        Ok(ago) => now.checked_sub(ago).unwrap_or(SystemTime::UNIX_EPOCH + Duration::from_secs(1)),
        Err(_) => humantime::parse_rfc3339_weak(written).map_err(|error| {
            Failure::usage(format!("--{name} {written}: {error}")).hint("write 1h, 7d or 2026-11-18T07:00:00Z")
        })?,
    };
    Ok(humantime::format_rfc3339_millis(time).to_string())
}

fn path(options: &Options, now: SystemTime) -> Result<String> {
    let mut query: Vec<String> = Vec::new();
    if let Some(what) = &options.what {
        let (kind, id) = what.split_once('/').map_or((what.as_str(), None), |(kind, id)| (kind, Some(id)));
        // As `get` takes them, groups and group mean the same.
        query.push(format!("kind={}", escaped(kind.strip_suffix('s').unwrap_or(kind))));
        query.extend(id.map(|id| format!("id={}", escaped(id))));
    }
    query.extend(options.by.as_ref().map(|by| format!("by={}", escaped(by))));
    for (name, written) in [("since", &options.since), ("until", &options.until)] {
        if let Some(written) = written {
            query.push(format!("{name}={}", escaped(&moment(name, written, now)?)));
        }
    }
    Ok(if query.is_empty() { "/v1/audit".to_owned() } else { format!("/v1/audit?{}", query.join("&")) })
}

pub async fn audit(connection: &Connection, options: Options) -> Result {
    let api = connection.api()?;
    let all = api.list(&path(&options, SystemTime::now())?, options.limit).await?;
    if all.is_cut {
        output::say(&format!("these are the first {}; there are more: raise --limit or leave it out", all.items.len()));
    }
    output::print(&shown(&all.items, options.output, connection.color.stdout()))?;
    whole(&api).await;
    Ok(())
}

/// Nobody takes a list for complete that is not known to be.
async fn whole(api: &Api) {
    match api.fetch::<Found>(&Call::get("/v1/checks")).await {
        Ok(found) => {
            for finding in found.findings.iter().filter(|finding| finding.what == AUDIT && finding.grade != Grade::Good) {
                output::say(&format!("{}: {}", finding.what, finding.found));
            }
        }
        Err(failure) => output::say(&format!("whether anything is missing here is not known: {}", failure.message)),
    }
}

fn shown(items: &[Value], format: Format, paint: Paint) -> String {
    match format {
        Format::Jsonl => items.iter().map(|item| output::json_line(item) + "\n").collect(),
        Format::Json => output::json(&serde_json::json!({ "format_version": "1", "items": items })),
        Format::Text => items.iter().map(|item| entry(item, paint)).collect(),
    }
}

fn entry(item: &Value, paint: Paint) -> String {
    let name = format!("{}/{}", text(&item["kind"]), text(&item["id"]));
    let done = if item["deleted"] == true { " deleted" } else { "" };
    let imported = if item["imported"] == true { ", imported" } else { "" };
    let reason = text(&item["reason"]);
    let why = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let head = format!("{} {} by {}", text(&item["at"]), paint.bold(&(name + done)), text(&item["by"]));
    let mut lines = format!("{head} (revision {}{imported}){why}\n", text(&item["revision"]));
    for line in item["difference"].as_array().map(Vec::as_slice).unwrap_or_default() {
        let line = text(line);
        let painted = match line.chars().next() {
            Some('+') => paint.green(&line),
            Some('-') => paint.red(&line),
            _ => line,
        };
        lines += &format!("    {painted}\n");
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(what: Option<&str>, since: Option<&str>) -> Options {
        let owned = |text: &str| text.to_owned();
        let (what, since) = (what.map(owned), since.map(owned));
        Options { what, by: None, since, until: None, limit: None, output: Format::Text }
    }

    #[test]
    fn what_is_asked_for_becomes_a_query() {
        let now = humantime::parse_rfc3339("2026-11-18T07:00:00Z").unwrap();
        for (what, since, wanted) in [
            (None, None, "/v1/audit"),
            (Some("group/web"), None, "/v1/audit?kind=group&id=web"),
            (Some("groups"), None, "/v1/audit?kind=group"),
            (None, Some("1h"), "/v1/audit?since=2026-11-18T06%3A00%3A00.000Z"),
            (None, Some("2026-11-01 00:00:00"), "/v1/audit?since=2026-11-01T00%3A00%3A00.000Z"),
        ] {
            assert_eq!(path(&options(what, since), now).unwrap(), wanted);
        }
        assert!(path(&options(None, Some("yesterday")), now).is_err());
    }

    #[test]
    fn an_entry_says_who_what_and_when() {
        let item = serde_json::json!({
            "kind": "group", "id": "web", "revision": 7, "at": "2026-11-18T07:00:00.000Z", "by": "ann from 10.0.0.1",
            "reason": "TICKET-1", "difference": ["+ rules: ingress tcp 443 from any"],
        });
        assert_eq!(
            entry(&item, Paint(false)),
            "2026-11-18T07:00:00.000Z group/web by ann from 10.0.0.1 (revision 7): TICKET-1\n    + rules: ingress tcp 443 from any\n"
        );
    }
}
