//! The same hosts with the client library that agents use. Each message costs a host's client something, and two hundred small ones
//! cost more than a few large ones; here the clients of all hosts share this machine's processors with the bus.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use async_nats::{Client, HeaderMap, Subscriber};
use futures::{StreamExt, TryStreamExt};
use groupcast_bus_config::connect::settle;
use groupcast_bus_config::server::Server;
use groupcast_bus_config::subjects;
use tokio::sync::watch;

use super::Installation;
use super::fetch::{CHECKED_EVERY, Fetcher, Way, check};
use crate::bench::fleet::{self, Finish};
use crate::bench::{bus, say};

const CONNECTING_MAX: usize = 64;
const SETTLED_WITHIN: Duration = Duration::from_secs(10);

/// From the moment connected hosts ask until the last of them has every document.
pub async fn all(way: Way, server: &Server, installation: &Arc<Installation>, bytes_per_host: usize) -> anyhow::Result<Duration> {
    let finish = Arc::new(Finish::default());
    let fetchers: Vec<Fetcher> = (0..installation.hosts)
        .map(|number| {
            let kept = (number % CHECKED_EVERY == 0).then(Vec::new);
            Fetcher::new(way, number, installation, bytes_per_host, kept, Arc::clone(&finish))
        })
        .collect::<anyhow::Result<_>>()?;
    let address = bus::address(server).to_string();
    let connected: Vec<(Fetcher, Client, Subscriber)> = futures::stream::iter(fetchers)
        .map(|fetcher| listen(&address, fetcher))
        .buffered(CONNECTING_MAX)
        .try_collect()
        .await
        .context("connecting the hosts")?;

    finish.expect(installation.hosts);
    let (go, wait) = watch::channel(false);
    let tasks: Vec<_> = connected
        .into_iter()
        .map(|(fetcher, client, answers)| tokio::spawn(fetch(fetcher, client, answers, wait.clone(), Arc::clone(&finish))))
        .collect();
    let (begun, cpu_before) = (Instant::now(), fleet::cpu(server));
    go.send_replace(true);
    let took = finish.wait().await?.duration_since(begun);
    let cpu = fleet::cpu(server).saturating_sub(cpu_before);
    for (number, task) in tasks.into_iter().enumerate() {
        if let Some(kept) = task.await??.kept {
            check(way, number, installation, &kept)?;
        }
    }
    say(format_args!("{way:?} with the agents' client: {took:?}, {cpu:?} of processor time"));
    Ok(took)
}

async fn listen(address: &str, fetcher: Fetcher) -> anyhow::Result<(Fetcher, Client, Subscriber)> {
    let client = async_nats::connect(address).await?;
    let answers = client.subscribe(fetcher.answers.clone()).await?;
    settle(&client, SETTLED_WITHIN).await?;
    Ok((fetcher, client, answers))
}

async fn fetch(
    mut fetcher: Fetcher,
    client: Client,
    mut answers: Subscriber,
    mut go: watch::Receiver<bool>,
    finish: Arc<Finish>,
) -> anyhow::Result<Fetcher> {
    go.wait_for(|go| *go).await?;
    let (subject, payload) = (fetcher.subject.clone(), fetcher.payload.clone().into());
    if fetcher.way == Way::DirectGet {
        client.publish_with_reply(subject, fetcher.answers.clone(), payload).await?;
    } else {
        let mut headers = HeaderMap::new();
        headers.insert(subjects::ANSWER_TOKEN, "s");
        client.publish_with_headers(subject, headers, payload).await?;
    }
    while let Some(message) = answers.next().await {
        if fetcher.take(&message.payload, message.status.map(|status| status.as_u16())) {
            finish.arrive();
            break;
        }
    }
    Ok(fetcher)
}
