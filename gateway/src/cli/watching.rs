//! `get --watch`: what there is, and then whatever changes. Nothing is asked for again and again: the gateway tells.

use std::time::Duration;

use serde_json::{Value, json};

use super::client::{Api, Call, escaped};
use super::get::{self, Kind, Options};
use super::output::{self, Format};
use super::{Code, Failure, Result};

/// Pause before a stream of events that ended is opened again.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);
/// In a row, before it is given up.
const REOPENS_MAX: u32 = 10;

pub async fn watch(api: &Api, options: &Options) -> Result {
    if !matches!(options.kind, Kind::Hosts | Kind::Workloads | Kind::Registrations) {
        let message = "only hosts, workloads and registrations can be watched";
        return Err(Failure::new(Code::Usage, message).hint("changes: `groupcast wait`, or GET /v1/watch"));
    }
    let mut page = Page { options, widths: Vec::new() };
    let mut reopens = 0;
    loop {
        // Opened first: what changes while the list is read is told afterwards.
        let opened = api.events("/v1/registrations-watch?initial=false").await;
        let mut events = match opened {
            Ok(events) => events,
            Err(failure) if reopens == 0 || reopens >= REOPENS_MAX => return Err(failure),
            Err(_) => {
                reopens += 1;
                tokio::time::sleep(REOPEN_PAUSE).await;
                continue;
            }
        };
        let there = api.list(options.kind.path(), options.limit).await?.items;
        page.print(there.into_iter().filter(|item| page.wants(item)).collect())?;
        reopens = 1;
        while let Some((event, data)) = events.next().await {
            let host = get::text(&data["host"]);
            let items = match (event.as_str(), options.kind) {
                ("gone", Kind::Workloads) => vec![json!({ "document": { "id": "", "host": host }, "gone": true })],
                ("gone", _) => vec![json!({ "host": host, "state": "gone" })],
                ("registration", Kind::Registrations) => vec![data],
                ("placed", Kind::Registrations) => Vec::new(),
                (_, Kind::Workloads) => api.list(&format!("/v1/workloads?host={}", escaped(&host)), options.limit).await?.items,
                // Gone again by now: that is told next.
                (_, _) => match api.fetch(&Call::get(format!("/v1/hosts/{}", escaped(&host)))).await {
                    Ok(item) => vec![item],
                    Err(failure) if failure.code == Code::NotFound => Vec::new(),
                    Err(failure) => return Err(failure),
                },
            };
            page.print(items.into_iter().filter(|item| page.wants(item)).collect())?;
        }
        output::say("the gateway ended the stream of events: opening it again");
        tokio::time::sleep(REOPEN_PAUSE).await;
    }
}

/// What was printed so far: columns keep their widths.
struct Page<'a> {
    options: &'a Options,
    widths: Vec<usize>,
}

impl Page<'_> {
    fn wants(&self, item: &Value) -> bool {
        let id = get::id(self.options.kind, item);
        // That a host is gone says it of its workloads too.
        item["gone"] == true || self.options.id.as_ref().is_none_or(|wanted| *wanted == id)
    }

    fn print(&mut self, items: Vec<Value>) -> Result {
        let (kind, format) = (self.options.kind, self.options.output);
        match format {
            Format::Table | Format::Wide => {
                let wide = format == Format::Wide;
                let mut lines: Vec<Vec<String>> = Vec::new();
                if self.widths.is_empty() {
                    lines.push(get::head(kind, wide).into_iter().map(str::to_uppercase).collect());
                }
                lines.extend(items.iter().map(|item| match item["gone"] == true {
                    true => vec![String::new(), get::text(&item["document"]["host"]), "gone".to_owned()],
                    false => get::row(kind, item, wide),
                }));
                output::print(&aligned(&lines, &mut self.widths))
            }
            Format::Name => output::print(&get::shown(kind, false, &items, format)),
            // One object a line: a list that never ends has no closing bracket.
            Format::Json | Format::Jsonl | Format::Yaml => {
                output::print(&items.iter().map(|item| output::json_line(item) + "\n").collect::<String>())
            }
        }
    }
}

/// Columns as wide as anything that was ever in them.
fn aligned(lines: &[Vec<String>], widths: &mut Vec<usize>) -> String {
    for line in lines {
        widths.resize(widths.len().max(line.len()), 0);
        for (cell, width) in line.iter().zip(widths.iter_mut()) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for line in lines {
        let cells = line.iter().zip(widths.iter()).map(|(cell, width)| format!("{cell:<width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_keep_their_widths() {
        let line = |cells: &[&str]| cells.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>();
        let mut widths = Vec::new();
        assert_eq!(
            aligned(&[line(&["HOST", "STATE"]), line(&["long-name", "live"])], &mut widths),
            "HOST       STATE\nlong-name  live\n"
        );
        assert_eq!(aligned(&[line(&["h1", "suspect", "more"])], &mut widths), "h1         suspect  more\n");
    }
}
