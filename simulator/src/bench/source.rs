//! A Cloud Controller with many groups, read over TLS and written to a real bus: the first time, when nothing is new, and when one group
//! is. The server is a process of its own, so that memory is the source's alone.
//!
//! Beside it runs a bare client over the same kind of connection: it asks for the same pages and the same times and throws away what
//! comes. What the server needs to make them is in both.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::{connect, streams};
use groupcast_control::source::config::{Intervals, Source};
use groupcast_control::source::http::{Http, Settings};
use groupcast_control::source::machine::{Answer, Effect, Event, Machine};
use groupcast_control::source::poller::Poller;
use groupcast_control::source::store::Store;
use groupcast_control::source::transport::{Endpoint, Head, Method, Request, Transport};
use groupcast_policy::ids::{HostId, SourceId};
use serde_json::{Value, json};

use super::compile::peak_rss_mb;
use super::source_enforced::{self, Programs};
use super::{Report, bus, say};

/// As configured where nothing is said.
const PAGE_SIZE: usize = 5_000;

#[derive(Debug, Clone, Args)]
pub struct Options {
    #[arg(long, default_value_t = 13_500)]
    groups: usize,
    #[arg(long, default_value_t = 10)]
    rules: usize,
    /// Polls of each kind after the first; the median counts.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    #[command(flatten)]
    programs: Programs,
}

/// The server as a process. Ends with its value.
pub(super) struct Served {
    child: Child,
    folder: PathBuf,
    lines: Vec<String>,
}

impl Served {
    fn start(options: &Options) -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("groupcast-bench-source-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["fake", "cloud-controller", "--groups", &options.groups.to_string(), "--rules", &options.rules.to_string()])
            .arg("--tls")
            .arg(&folder)
            .stdout(Stdio::piped())
            .spawn()
            .context("the server starts")?;
        let output = child.stdout.take().context("its output")?;
        let lines = BufReader::new(output).lines().take(5).collect::<Result<Vec<_>, _>>();
        let mut served = Self { child, folder, lines: Vec::new() };
        served.lines = lines?;
        ensure!(served.lines.len() == 5, "the server ended: {:?}", served.lines);
        Ok(served)
    }

    fn url(&self, line: usize) -> String {
        self.lines[line].split_whitespace().next().unwrap_or_default().to_owned()
    }

    pub(super) fn folder(&self) -> &std::path::Path {
        &self.folder
    }

    fn config(&self) -> anyhow::Result<Source> {
        Ok(serde_json::from_value(self.table()?)?)
    }

    /// The same as a file.
    pub(super) fn toml(&self) -> anyhow::Result<String> {
        Ok(toml::to_string(&json!({"source": [self.table()?]}))?)
    }

    fn table(&self) -> anyhow::Result<Value> {
        let secret = self.folder.join("secret");
        std::fs::write(&secret, "secret")?;
        Ok(json!({
            "kind": "cloud-controller", "id": "cf", "url": self.url(0), "internal_url": self.url(1), "uaa_url": self.url(0),
            "client_id": "groupcast", "client_secret_file": secret, "ca_file": self.folder.join("ca.pem"),
            "client_cert_file": self.folder.join("client.pem"), "client_key_file": self.folder.join("client.key"),
        }))
    }

    fn http(&self) -> anyhow::Result<Http> {
        let identity = (self.folder.join("client.pem"), self.folder.join("client.key"));
        let http = Http::new(&Settings {
            api: &self.url(0),
            internal: &self.url(1),
            login: &self.url(0),
            ca_file: Some(&self.folder.join("ca.pem")),
            identity: Some((&identity.0, &identity.1)),
            timeout: Duration::from_secs(30),
        });
        http.map_err(anyhow::Error::msg)
    }

    /// Gives the server an order.
    pub(super) async fn order(&self, order: &str, body: Value) -> anyhow::Result<Value> {
        let request = Request {
            endpoint: Endpoint::Api,
            method: Method::Post,
            path: format!("/_fake/{order}"),
            headers: Vec::new(),
            body: Some(("application/json", body.to_string())),
        };
        let read = |_, body: &mut dyn std::io::Read| serde_json::from_reader::<_, Value>(body);
        Ok(self.http()?.exchange(request, read).await.map_err(anyhow::Error::msg)??)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// A client that asks and throws away what comes.
struct Bare {
    http: Http,
    token: String,
}

impl Bare {
    async fn new(served: &Served) -> anyhow::Result<Self> {
        let http = served.http()?;
        let form = "grant_type=client_credentials&client_id=groupcast&client_secret=secret".to_owned();
        let request = Request {
            endpoint: Endpoint::Login,
            method: Method::Post,
            path: "/oauth/token".to_owned(),
            headers: Vec::new(),
            body: Some(("application/x-www-form-urlencoded", form)),
        };
        let read = |_, body: &mut dyn std::io::Read| serde_json::from_reader::<_, Value>(body);
        let answer = http.exchange(request, read).await.map_err(anyhow::Error::msg)??;
        Ok(Self { http, token: answer["access_token"].as_str().context("a token")?.to_owned() })
    }

    /// Bytes of an answer.
    async fn get(&self, endpoint: Endpoint, path: String) -> anyhow::Result<u64> {
        let mut request = Request::get(endpoint, path);
        request.headers.push(("authorization", format!("bearer {}", self.token)));
        let read = |head: Head, body: &mut dyn std::io::Read| (head.status, std::io::copy(body, &mut std::io::sink()));
        let (status, bytes) = self.http.exchange(request, read).await.map_err(anyhow::Error::msg)?;
        ensure!(status == 200, "the server answers {status}");
        Ok(bytes?)
    }

    async fn time(&self) -> anyhow::Result<f64> {
        let begun = Instant::now();
        self.get(Endpoint::Internal, "/internal/v4/asg_latest_update".to_owned()).await?;
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    }

    /// Milliseconds of all pages with the time after each, and their bytes.
    async fn list(&self, groups: usize, page_size: usize) -> anyhow::Result<(f64, u64)> {
        let (begun, mut bytes, mut seen, mut page) = (Instant::now(), 0, 0, 1);
        self.time().await?;
        while seen < groups {
            let size = page_size + 1 - page;
            bytes +=
                self.get(Endpoint::Api, format!("/v3/security_groups?page={page}&per_page={size}&order_by=created_at")).await?;
            self.time().await?;
            (seen, page) = (page * size, page + 1);
        }
        Ok((begun.elapsed().as_secs_f64() * 1e3, bytes))
    }
}

struct Polling {
    machine: Machine,
    poller: Poller,
    store: Store,
    begun: Instant,
    changes: usize,
}

impl Polling {
    /// Sees an event and everything that follows from it through; the answer to the question in it, if there is one.
    async fn through(&mut self, event: Event) -> anyhow::Result<Option<Answer>> {
        let (mut effects, mut answered) = (self.machine.handle(event, self.now_ms()), None);
        while !effects.is_empty() {
            let mut next = Vec::new();
            for effect in effects {
                let event = match effect {
                    Effect::Load { run } => Event::Loaded { run, result: self.store.load().await.map(Box::new) },
                    Effect::Poll { run, full, marker } => {
                        Event::Polled { run, result: self.poller.poll(full, marker.as_deref()).await }
                    }
                    Effect::Write { run, plan } => {
                        self.changes += plan.changes.len();
                        Event::Written { run, result: self.store.write(&plan).await }
                    }
                    Effect::Answer { answer, .. } => {
                        answered = Some(answer);
                        continue;
                    }
                    Effect::WakeAt(_) => continue,
                };
                next.extend(self.machine.handle(event, self.now_ms()));
            }
            effects = next;
        }
        Ok(answered)
    }

    fn now_ms(&self) -> u64 {
        self.begun.elapsed().as_millis() as u64
    }

    /// Milliseconds that a poll takes, all of it written.
    async fn poll(&mut self, full: bool) -> anyhow::Result<f64> {
        let begun = Instant::now();
        match self.through(Event::PollNow { ask: 1, full }).await? {
            Some(Answer::Done { .. }) => Ok(begun.elapsed().as_secs_f64() * 1e3),
            other => bail!("the poll ended with {other:?}"),
        }
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

pub async fn run(options: &Options) -> anyhow::Result<Report> {
    let server = bus::start_server().await?;
    let named = connect::Options::new(&[server.url()], Role::Controller, &HostId::new("bench")?);
    let (client, _events) = connect::connect(named).await?;
    streams::ensure(&client, 1).await?;
    let served = Served::start(options)?;
    let (id, config) = (SourceId::new("cf")?, served.config()?);
    // Polls are asked for here; none comes by itself.
    let (poll, full_sync) = (Duration::from_secs(3_600), Duration::from_secs(360_000));
    let machine = Machine::new(id.clone(), "cloud-controller", Intervals { poll, full_sync, hold: poll }, 1);
    let begun = Instant::now();
    let mut polling = Polling { machine, poller: Poller::new(config), store: Store::new(id, &client), begun, changes: 0 };
    say(format_args!("{} groups of {} rules for the first time", options.groups, options.rules));
    let first = Instant::now();
    polling.through(Event::Leading(true)).await?;
    let full_sync_ms = first.elapsed().as_secs_f64() * 1e3;
    let status = polling.machine.status(polling.now_ms());
    ensure!(status.groups == options.groups, "{} groups are written: {:?}", status.groups, status.last_error);
    let first_changes = polling.changes;
    let (mut noop, mut again, mut one) = (Vec::new(), Vec::new(), Vec::new());
    let (mut bare_noop, mut bare_list, mut listed_bytes) = (Vec::new(), Vec::new(), 0);
    let bare = Bare::new(&served).await?;
    bare.time().await?;
    served.order("calls", json!({})).await?;
    for _ in 0..options.rounds {
        noop.push(polling.poll(false).await?);
    }
    let calls = served.order("calls", json!({})).await?["calls"].as_f64().context("a number")?;
    for _ in 0..options.rounds {
        bare_noop.push(bare.time().await?);
    }
    say("nothing is new, and everything is read all the same");
    for _ in 0..options.rounds.min(3) {
        again.push(polling.poll(true).await?);
    }
    say("one group is new");
    for round in 0..options.rounds {
        served.order("touch", json!({"path": format!("group-{round}")})).await?;
        let before = polling.changes;
        one.push(polling.poll(false).await?);
        ensure!(polling.changes == before + 1, "one change");
        // In turns, so that both meet the same machine.
        let (ms, bytes) = bare.list(options.groups, PAGE_SIZE).await?;
        bare_list.push(ms);
        listed_bytes = bytes;
    }
    let rss_mb = peak_rss_mb()?;
    say("from a change to the kernel of a host");
    let enforced = source_enforced::measure(&options.programs, &served, options.groups, options.rounds).await?;
    // Orders are calls too.
    let noop_requests = (calls / options.rounds as f64).round();
    let (one, bare_list) = (median(one), median(bare_list));
    let report = Report::new("source")
        .with("groups", options.groups)
        .with("rules", options.rules)
        .with("full_sync_ms", full_sync_ms)
        .with("full_sync_changes", first_changes)
        .with("full_sync_unchanged_ms", median(again))
        .with("noop_poll_ms", median(noop))
        .with_goal("noop_requests", noop_requests as u64, 1.0)
        .with("bare_noop_ms", median(bare_noop))
        .with("one_group_changed_ms", one)
        .with("bare_list_ms", bare_list)
        .with("one_group_changed_ratio", one / bare_list)
        .with("listed_mb", listed_bytes as f64 / 1e6)
        .with("rss_mb", rss_mb);
    let ms = |took: &hdrhistogram::Histogram<u64>, quantile: f64| took.value_at_quantile(quantile) as f64 / 1e3;
    Ok(match enforced {
        None => report,
        Some(enforced) => report
            .with_goal("change_to_enforced_ms_p50", ms(&enforced.polled, 0.5), 1_500.0)
            .with("change_to_enforced_ms_max", ms(&enforced.polled, 1.0))
            .with("told_to_enforced_ms_p50", ms(&enforced.told, 0.5))
            .with("told_to_enforced_ms_max", ms(&enforced.told, 1.0)),
    })
}
