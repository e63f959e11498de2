//! `bench e2e`: everything as it runs. `groupcast up` and agents are processes, hosts are network namespaces; from an HTTP request until the
//! kernel of a host has committed what it changes, until three hosts have acknowledged it, and how many reads a gateway answers. Beside
//! it the least that the bus itself takes, in the same run.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use groupcast_bus_config::lab::{Agent, AgentSettings, Lab, Up};
use groupcast_control::place::{self, NETWORK, Place};
use hdrhistogram::Histogram;
use reqwest::{Client, Method};
use serde_json::{Value, json};

use super::e2e_commits::Commits;
use super::{Report, e2e_raw, say};

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Single documents, one after the other.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    puts: u32,
    /// Changes that concern all three hosts, one after the other.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    applies: u32,
    /// How long groups are read.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=600))]
    read_seconds: u32,
    /// The groupcast binary; without it, the one beside this program.
    #[arg(long, env = "GROUPCAST_BIN")]
    groupcast: Option<PathBuf>,
    /// The agent; without it, the one beside this program.
    #[arg(long, env = "GROUPCAST_AGENT_BIN")]
    agent: Option<PathBuf>,
}

const PLACES: [Place; 3] = [
    Place { workload: "w1", host: "h1", app: "one" },
    Place { workload: "w2", host: "h2", app: "two" },
    Place { workload: "w3", host: "h3", app: "three" },
];
/// Groups that are there beside those that change.
const GROUPS: usize = 100;
/// Readers at once, each on a connection of its own.
const READERS: usize = 8;
/// Flows are judged again at most ten times a second on a host: faster than this, the pace would be measured.
pub(super) const PAUSE: Duration = Duration::from_millis(120);
/// Nothing takes longer than this on a slow machine.
pub(super) const DEADLINE: Duration = Duration::from_secs(30);
const WARM_UP: u32 = 10;

pub(super) struct Bench {
    http: Client,
    up: Up,
    pub(super) lab: Lab,
    agents: Vec<Agent>,
    token: String,
    folder: PathBuf,
    next: u32,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.agents.clear();
        self.up.kill();
        let _ = std::fs::remove_dir_all(&self.folder); // below the folder for temporary files
    }
}

fn beside(named: &Option<PathBuf>, name: &str) -> anyhow::Result<PathBuf> {
    let path = named.clone().map_or_else(|| std::env::current_exe().map(|own| own.with_file_name(name)), Ok)?;
    ensure!(
        path.exists(),
        "{} is not there: build it (cargo build --release -p groupcast-gateway -p groupcast-host)",
        path.display()
    );
    Ok(path)
}

impl Bench {
    /// Everything on one machine, with more arguments for it, and an agent for each host of these places.
    pub(super) async fn start(
        groupcast: &Option<PathBuf>,
        agent: &Option<PathBuf>,
        places: &[Place],
        more: &[&str],
    ) -> anyhow::Result<Self> {
        let folder = std::env::temp_dir().join(format!("groupcast-bench-{}", std::process::id()));
        let (binary, agent) = (beside(groupcast, "groupcast")?, beside(agent, "groupcast-agent")?);
        let up = Up::start_with(&binary, &folder, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), more)?;
        let mut lab = Lab::new(up.bus_address()?)?;
        place::build(&mut lab, places)?;
        // Its client wants one, also for an address without TLS.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let http = Client::builder().no_proxy().timeout(DEADLINE).build()?;
        let token = up.token()?;
        let mut bench = Self { http, up, lab, agents: Vec::new(), token, folder, next: 0 };
        bench.ready().await?;
        // Nobody leads a bus on which nothing was ever written.
        let template = json!({ "kind": "template", "id": NETWORK, "network": NETWORK });
        bench.ask(Method::PUT, &format!("/v1/templates/{NETWORK}"), Some(template)).await?;
        place::enter(&bench.up, Some(&bench.lab), places).await?;
        for place in places {
            let started = bench.agent(&agent, *place)?;
            bench.agents.push(started);
        }
        Ok(bench)
    }

    fn agent(&self, binary: &Path, place: Place) -> anyhow::Result<Agent> {
        let folder = self.folder.join(place.host);
        std::fs::create_dir_all(&folder)?;
        let credentials = folder.join("agent.creds");
        self.up.credential(place.host, &credentials)?;
        let host = self.lab.hosts.get(place.host).context("a host")?;
        let settings = AgentSettings {
            binary: binary.to_owned(),
            host: place.host.to_owned(),
            bus: host.bus.clone(),
            credentials: Some(credentials),
            folder,
            dry_run: false,
        };
        let agent = Agent::start(settings, Some(&host.namespace))?;
        agent.attach(place.workload, &self.lab.workloads.get(place.workload).context("a workload")?.interface)?;
        Ok(agent)
    }

    pub(super) async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> anyhow::Result<Value> {
        let mut request = self.http.request(method, format!("{}{path}", self.up.addresses.gateway)).bearer_auth(&self.token);
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        let response = request.send().await?;
        let status = response.status();
        let text = response.text().await?;
        ensure!(status.is_success(), "{path} answered {status}: {text}");
        Ok(serde_json::from_str(&text).unwrap_or_default())
    }

    async fn ready(&self) -> anyhow::Result<()> {
        let start = Instant::now();
        while let Err(error) = self.ask(Method::GET, "/readyz", None).await {
            ensure!(start.elapsed() < DEADLINE, "the gateway is not ready: {error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// A document that was never so before.
    fn document(&mut self, app: &str) -> Value {
        self.next += 1;
        let rule = format!("ingress tcp {} from any", 1_024 + self.next % 50_000);
        json!({ "kind": "group", "id": app, "rules": [rule], "bindings": [format!("app:{app}")] })
    }

    async fn enforced(&self, change: u64, span: u64) -> anyhow::Result<()> {
        let start = Instant::now();
        loop {
            let shown = self.ask(Method::GET, &format!("/v1/changes/{change}?wait=enforced&timeout=10s"), None).await?;
            if shown["progress"]["done"] == true {
                ensure!(shown["progress"]["span"] == span, "change {change} concerns other hosts than it should: {shown}");
                return Ok(());
            }
            ensure!(start.elapsed() < DEADLINE, "change {change} is not enforced: {shown}");
        }
    }

    /// Single documents of one host: until its kernel has committed, and until it is known here that it has.
    async fn puts(&mut self, count: u32) -> anyhow::Result<[Histogram<u64>; 2]> {
        let mut commits = Commits::watch(&self.lab.hosts.get("h1").context("a host")?.namespace)?;
        let mut took = [Histogram::new(3)?, Histogram::new(3)?];
        for number in 0..count + WARM_UP {
            tokio::time::sleep(PAUSE).await;
            let document = self.document("one");
            commits.forget();
            let sent = Instant::now();
            let written = self.ask(Method::PUT, "/v1/groups/one", Some(document)).await?;
            let committed = commits.next(DEADLINE).await.context("the kernel heard of no change")?;
            self.enforced(written["change"].as_u64().context("a change")?, 1).await?;
            if number >= WARM_UP {
                took[0].record(micros(committed.duration_since(sent)))?;
                took[1].record(micros(sent.elapsed()))?;
            }
        }
        Ok(took)
    }

    /// Changes of three documents, one for each host, until all have acknowledged.
    async fn applies(&mut self, count: u32) -> anyhow::Result<Histogram<u64>> {
        let mut took = Histogram::new(3)?;
        for number in 0..count + WARM_UP {
            tokio::time::sleep(PAUSE).await;
            let put: Vec<Value> = ["one", "two", "three"].map(|app| json!({ "document": self.document(app) })).into();
            let sent = Instant::now();
            let written = self.ask(Method::POST, "/v1/changes", Some(json!({ "put": put }))).await?;
            self.enforced(written["change"].as_u64().context("a change")?, 3).await?;
            if number >= WARM_UP {
                took.record(micros(sent.elapsed()))?;
            }
        }
        Ok(took)
    }

    /// Pages of all groups, a second.
    async fn reads(&self, path: &str, seconds: u32) -> anyhow::Result<f64> {
        let end = Instant::now() + Duration::from_secs(seconds.into());
        let reader = || async {
            let mut count = 0u64;
            while Instant::now() < end {
                self.ask(Method::GET, path, None).await?;
                count += 1;
            }
            anyhow::Ok(count)
        };
        let start = Instant::now();
        let counts = futures::future::try_join_all((0..READERS).map(|_| reader())).await?;
        Ok(counts.iter().sum::<u64>() as f64 / start.elapsed().as_secs_f64())
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

pub async fn run(options: &Options) -> anyhow::Result<Report> {
    say("starting a bus, a controller, a gateway and three hosts");
    let mut bench = Bench::start(&options.groupcast, &options.agent, &PLACES, &[]).await?;
    let others: Vec<Value> = (0..GROUPS)
        .map(|number| json!({ "document": { "kind": "group", "id": format!("g{number}"), "rules": ["ingress tcp 443 from any"] } }))
        .collect();
    bench.ask(Method::POST, "/v1/changes", Some(json!({ "put": others }))).await?;
    say("single documents, until the kernel has them");
    let [committed, known] = bench.puts(options.puts).await?;
    say("changes for three hosts, until all have acknowledged");
    let applied = bench.applies(options.applies).await?;
    say("reading groups");
    let read = bench.reads(&format!("/v1/groups?limit={GROUPS}"), options.read_seconds).await?;
    let alive = bench.reads("/livez", options.read_seconds).await?;
    say("the bus alone");
    let raw = e2e_raw::measure(options.puts).await?;
    let ms = |took: &Histogram<u64>, quantile: f64| took.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Report::new("e2e")
        .with("puts", u64::from(options.puts))
        .with_goal("put_to_enforced_ms_p50", ms(&committed, 0.5), 10.0)
        .with("put_to_enforced_ms_p99", ms(&committed, 0.99))
        .with("put_to_known_ms_p50", ms(&known, 0.5))
        .with("put_to_known_ms_p99", ms(&known, 0.99))
        .with("apply_wait_ms_p50", ms(&applied, 0.5))
        .with("apply_wait_ms_p99", ms(&applied, 0.99))
        .with("get_groups_per_s", read)
        .with("get_livez_per_s", alive)
        .with("raw_request_ms_p50", ms(&raw.request, 0.5))
        .with("raw_publish_ack_ms_p50", ms(&raw.publish_ack, 0.5))
        .with("raw_chain_ms_p50", ms(&raw.chain, 0.5)))
}
