//! What `bench register` is compared with: the bus alone.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::StreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::{connect, streams, subjects};
use groupcast_control::document::{Claim, Enrolled, HostEntry, encode_record, encode_workload};
use groupcast_control::log::{Log, Outcome, Outgoing};
use groupcast_messages::{Register, RegisterAnswer};
use groupcast_policy::ids::HostId;
use groupcast_policy::model::Workload;
use groupcast_policy::net::Prefix;

use super::register::{Options, id};
use super::{bus, say};

/// Batches on their way at once: the server takes no more than fifty.
const AT_ONCE: usize = 32;
const HEARD_WITHIN: Duration = Duration::from_secs(5);

/// Hosts written for at most; what the rest would take is reckoned. Ten thousand take minutes.
const SAMPLE_MAX: u32 = 1_000;

/// Writes one batch for each host, with a server of its own; in milliseconds.
pub async fn batches(options: &Options) -> anyhow::Result<f64> {
    let sample = options.hosts.min(SAMPLE_MAX);
    say(format_args!("one client writes {sample} batches"));
    let server = bus::start_server().await?;
    let own = connect::Options::new(&[server.url()], Role::Controller, &HostId::new("raw")?);
    let (client, _events) = connect::connect(own).await?;
    streams::ensure(&client, 1).await?;
    let log = Log::registry(client);
    let mut all = Vec::with_capacity(sample as usize);
    for number in 0..sample {
        all.push(batch(options, number)?);
    }
    let begun = Instant::now();
    let log = &log;
    let mut written =
        futures::stream::iter(all.iter().map(|batch| async move { log.write(batch).await })).buffer_unordered(AT_ONCE);
    while let Some(outcome) = written.next().await {
        ensure!(matches!(outcome, Outcome::Committed(_)), "the bus did not take a batch: {outcome:?}");
    }
    Ok(begun.elapsed().as_secs_f64() * 1e3 * f64::from(options.hosts) / f64::from(sample))
}

/// What enrolling one host writes.
fn batch(options: &Options, number: u32) -> anyhow::Result<Vec<Outgoing>> {
    let host = id(number)?;
    let outgoing = |subject: String, payload: Vec<u8>| {
        let mut headers = async_nats::HeaderMap::new();
        headers.insert(groupcast_control::registry::CAUSE, "enrolled by its host");
        Outgoing { subject, headers, expected: 0, payload }
    };
    let (mut messages, mut names) = (Vec::new(), Vec::new());
    for w in 0..options.workloads {
        let bits = 0x0a00_0000 + number * 128 + w;
        let mut workload = Workload::new(format!("w{number:05}-{w}").parse()?, host.clone(), "net".parse()?);
        workload.addresses.insert(Prefix::v4(bits, 32).context("an address")?);
        (workload.space, workload.template) = (Some("shop".parse()?), Some("vm".parse()?));
        messages.push(outgoing(subjects::registry_workload(&workload.id), encode_workload(&workload)));
        let claim = Claim { workload: workload.id.to_string(), host: host.to_string() };
        let subject = subjects::registry_address(&workload.network, std::net::Ipv4Addr::from_bits(bits).into());
        messages.push(outgoing(subject, encode_record(&claim)));
        names.push((workload.network.clone(), workload.id.clone()));
    }
    let mut entry = HostEntry::new(&host, names);
    entry.enrolled = Some(Enrolled { boot: "0000000000000001".into(), templates: vec!["vm".into()], suspect: false });
    messages.push(outgoing(subjects::registry_host(&host), encode_record(&entry)));
    Ok(messages)
}

/// Somebody who takes every registration without a look.
pub struct Echo(tokio::task::JoinHandle<()>);

impl Echo {
    pub async fn start(client: &async_nats::Client, workloads: u32) -> anyhow::Result<Self> {
        let mut requests = client.subscribe(subjects::REGISTER_ALL).await?;
        tokio::time::timeout(HEARD_WITHIN, client.flush()).await.context("the bus answers")??;
        let client = client.clone();
        Ok(Self(tokio::spawn(async move {
            while let Some(request) = requests.next().await {
                let token = request.headers.as_ref().and_then(|headers| headers.get(subjects::ANSWER_TOKEN));
                let Some(answer) = token.and_then(|token| subjects::answer_to(&request.subject, token.as_str())) else {
                    continue;
                };
                let Ok(register) = Register::decode(&request.payload) else { continue };
                let incarnations = register.workloads.iter().take(workloads as usize).map(|w| (w.workload.clone(), 1)).collect();
                let payload = RegisterAnswer::Registered { incarnations, health: None }.encode();
                if client.publish(answer, payload.into()).await.is_err() {
                    return;
                }
            }
        })))
    }

    pub fn end(self) {
        self.0.abort();
    }
}
