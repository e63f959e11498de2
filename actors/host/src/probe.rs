//! Looks whether a workload is well: a port, an answer to HTTP, a process. A template names port and path and a registration the address, so
//! neither may lead the agent, which is on the machine, to what only the machine can reach.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use groupcast_policy::ids::WorkloadId;
use groupcast_policy::model::{HealthCheck, Probe};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;

use crate::config::Config;
use crate::host;

/// Nobody waits longer for one check.
pub const WITHIN_MAX: Duration = Duration::from_secs(5);
/// What is read of an answer: its first line.
const ANSWER_BYTES_MAX: usize = 512;

/// How often names of the bus's servers are looked up.
const BUS_EVERY: Duration = Duration::from_secs(60);

/// Why a place is not looked at.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OutOfBounds {
    #[error("its health is not checked: {0} is loopback, link-local or many machines' address; register the workload's own")]
    Nobodys(IpAddr),
    #[error(
        "its health is not checked: {0} is this machine's own address, and it is not the machine; register the workload's own"
    )]
    Machines(IpAddr),
    #[error("its health is not checked: it is the machine itself, and {0} is no address of the machine")]
    Strangers(IpAddr),
    #[error("its health is not checked: at {0} is the bus")]
    Bus(SocketAddr),
}

/// What a workload's health is not looked for at.
#[derive(Debug, Clone)]
pub struct Bounds {
    /// The workload that is the machine itself.
    machine: Option<WorkloadId>,
    bus: watch::Receiver<BTreeSet<SocketAddr>>,
}

impl Bounds {
    pub fn new(config: &Config) -> Self {
        let places: Vec<(String, u16)> = config.servers.iter().filter_map(|server| place(server)).collect();
        let literal = places.iter().filter_map(|(name, port)| Some(SocketAddr::new(name.parse().ok()?, *port)));
        let (tell, bus) = watch::channel(literal.collect());
        // A name may come to mean another address.
        tokio::spawn(async move {
            loop {
                let mut found = BTreeSet::new();
                for (name, port) in &places {
                    found.extend(tokio::net::lookup_host((name.as_str(), *port)).await.into_iter().flatten());
                }
                // What is not found now keeps its place.
                tell.send_modify(|known: &mut BTreeSet<SocketAddr>| known.extend(found));
                tokio::select! {
                    () = tokio::time::sleep(BUS_EVERY) => {}
                    () = tell.closed() => return,
                }
            }
        });
        Self { machine: config.host_workload.clone(), bus }
    }

    fn judge(&self, workload: &WorkloadId, place: SocketAddr) -> Result<(), OutOfBounds> {
        let is_machine = self.machine.as_ref() == Some(workload);
        judge(place, is_machine, &host::all_addresses(), &self.bus.borrow())
    }
}

/// Name and port of `nats://host:4222`.
fn place(server: &str) -> Option<(String, u16)> {
    const DEFAULT: u16 = 4222;
    let place = server.split_once("://").map_or(server, |(_, place)| place);
    let place = place.split('/').next()?;
    let place = place.rsplit_once('@').map_or(place, |(_, place)| place);
    let (name, port) = match place.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((name, rest)) => (name, rest.strip_prefix(':')),
        None => place.split_once(':').map_or((place, None), |(name, port)| (name, Some(port))),
    };
    Some((name.to_owned(), port.map_or(Some(DEFAULT), |port| port.parse().ok())?))
}

/// Whether a workload may be looked at there. `own`: all addresses of the machine.
fn judge(place: SocketAddr, is_machine: bool, own: &BTreeSet<IpAddr>, bus: &BTreeSet<SocketAddr>) -> Result<(), OutOfBounds> {
    let address = place.ip().to_canonical();
    let is_nobodys = match address {
        IpAddr::V4(v4) => v4.is_loopback() || v4.is_link_local() || v4.is_unspecified() || v4.is_multicast() || v4.is_broadcast(),
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unicast_link_local() || v6.is_unspecified() || v6.is_multicast(),
    };
    if is_nobodys {
        return Err(OutOfBounds::Nobodys(address));
    }
    // The machine may carry the bus: then only its port is not looked at.
    let is_bus = |bus: &SocketAddr| bus.ip().to_canonical() == address && (!is_machine || bus.port() == place.port());
    if bus.iter().any(is_bus) {
        return Err(OutOfBounds::Bus(place));
    }
    match (is_machine, own.contains(&address)) {
        (false, true) => Err(OutOfBounds::Machines(address)),
        (true, false) => Err(OutOfBounds::Strangers(address)),
        (false, false) | (true, true) => Ok(()),
    }
}

/// Whether a workload is well; an error: it was not looked at, because it may not be there.
pub async fn look(
    check: &HealthCheck,
    address: Option<IpAddr>,
    bounds: &Bounds,
    workload: &WorkloadId,
) -> Result<bool, OutOfBounds> {
    if let (Some(address), Probe::Tcp { port } | Probe::Http { port, .. }) = (address, &check.probe) {
        bounds.judge(workload, SocketAddr::new(address, *port))?;
    }
    Ok(is_well(check, address).await)
}

/// Whether the check succeeds within half of its interval.
async fn is_well(check: &HealthCheck, address: Option<IpAddr>) -> bool {
    let within = (Duration::from_secs(u64::from(check.interval_seconds)) / 2).min(WITHIN_MAX);
    let checked = async {
        match &check.probe {
            Probe::Tcp { port } => TcpStream::connect(SocketAddr::new(address?, *port)).await.ok().map(drop),
            Probe::Http { port, path } => answers(SocketAddr::new(address?, *port), path).await,
            Probe::Process { name } => {
                let name = name.clone();
                let found = tokio::task::spawn_blocking(move || runs(&name)).await.unwrap_or(false);
                found.then_some(())
            }
        }
    };
    tokio::time::timeout(within, checked).await.ok().flatten().is_some()
}

async fn answers(address: SocketAddr, path: &str) -> Option<()> {
    let mut stream = TcpStream::connect(address).await.ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nUser-Agent: groupcast-agent\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    while answer.len() < ANSWER_BYTES_MAX && !answer.contains(&b'\n') {
        let mut bytes = [0; ANSWER_BYTES_MAX];
        match stream.read(&mut bytes).await.ok()? {
            0 => break,
            length => answer.extend_from_slice(&bytes[..length]),
        }
    }
    is_success(&answer).then_some(())
}

/// `HTTP/1.1 204 No Content` and whatever else is below 400.
fn is_success(answer: &[u8]) -> bool {
    let line = String::from_utf8_lossy(answer);
    let mut words = line.split(' ');
    let is_http = words.next().is_some_and(|version| version.starts_with("HTTP/1."));
    let status: Option<u16> = words.next().and_then(|word| word.trim().parse().ok());
    is_http && status.is_some_and(|status| (200..400).contains(&status))
}

/// Whether a process of this name runs: the kernel knows the first 15 bytes of it.
fn runs(name: &str) -> bool {
    const KERNEL_NAME_BYTES: usize = 15;
    let short: String = name.chars().take(KERNEL_NAME_BYTES).collect();
    let Ok(processes) = std::fs::read_dir("/proc") else { return false };
    processes
        .flatten()
        .any(|process| std::fs::read_to_string(process.path().join("comm")).is_ok_and(|found| found.trim_end() == short))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    fn check(probe: Probe) -> HealthCheck {
        HealthCheck { probe, interval_seconds: 4 }
    }

    #[tokio::test]
    async fn ports_answers_and_processes_are_looked_at() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, port) = (listener.local_addr().unwrap(), listener.local_addr().unwrap().port());
        let serve = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut bytes = [0; 64];
                let length = stream.read(&mut bytes).await.unwrap_or(0);
                let good = bytes[..length].starts_with(b"GET /good ");
                let _ = stream.write_all(if good { b"HTTP/1.1 200 OK\r\n\r\n" } else { b"HTTP/1.1 503 No\r\n\r\n" }).await;
            }
        });
        let ip = Some(address.ip());
        assert!(is_well(&check(Probe::Tcp { port }), ip).await);
        assert!(is_well(&check(Probe::Http { port, path: "/good".into() }), ip).await);
        assert!(!is_well(&check(Probe::Http { port, path: "/bad".into() }), ip).await);
        assert!(!is_well(&check(Probe::Tcp { port }), None).await, "nowhere to look");
        serve.abort();
        let _ = serve.await;
        assert!(!is_well(&check(Probe::Tcp { port }), ip).await);
        let own = std::fs::read_to_string("/proc/self/comm").unwrap().trim().to_owned();
        assert!(is_well(&check(Probe::Process { name: own }), None).await);
        assert!(!is_well(&check(Probe::Process { name: "no-such-process-here".into() }), None).await);
    }

    /// A registered address and a template's port led the agent to the machine's own services and to the bus.
    #[test]
    fn only_the_workloads_own_addresses_are_looked_at() {
        let own: BTreeSet<IpAddr> = ["127.0.0.1", "10.0.0.1", "fd00::1", "fe80::1"].map(|text| text.parse().unwrap()).into();
        let bus: BTreeSet<SocketAddr> =
            ["10.0.0.1:4222", "10.0.0.9:4222", "[fd00::9]:4222"].map(|text| text.parse().unwrap()).into();
        let rows = [
            ("10.1.0.5:80", true, false),
            ("[fd00::5]:80", true, false),
            ("10.0.0.1:22", false, true),
            ("10.0.0.1:4222", false, false),
            ("[::ffff:10.0.0.1]:22", false, true),
            ("[fd00::1]:22", false, true),
            ("10.0.0.9:80", false, false),
            ("10.0.0.9:4222", false, false),
            ("[fd00::9]:80", false, false),
            ("127.0.0.1:80", false, false),
            ("127.9.9.9:80", false, false),
            ("[::1]:80", false, false),
            ("[::ffff:127.0.0.1]:80", false, false),
            ("169.254.169.254:80", false, false),
            ("[fe80::1]:80", false, false),
            ("0.0.0.0:80", false, false),
            ("[::]:80", false, false),
            ("224.0.0.1:80", false, false),
            ("255.255.255.255:80", false, false),
        ];
        for (place, workload, machine) in rows {
            let at = place.parse().unwrap();
            assert_eq!(judge(at, false, &own, &bus).is_ok(), workload, "{place} for a workload");
            assert_eq!(judge(at, true, &own, &bus).is_ok(), machine, "{place} for the machine");
        }
    }

    #[test]
    fn servers_of_the_bus_are_places() {
        let rows = [
            ("nats://10.0.0.1:4333", Some(("10.0.0.1", 4333))),
            ("tls://user:secret@bus-1", Some(("bus-1", 4222))),
            ("nats://[fd00::1]:7/x", Some(("fd00::1", 7))),
            ("[::1]", Some(("::1", 4222))),
            ("nats://a:b", None),
        ];
        for (server, expected) in rows {
            assert_eq!(place(server), expected.map(|(name, port)| (name.to_owned(), port)), "{server}");
        }
    }

    #[test]
    fn the_first_line_of_an_answer_decides() {
        for (answer, well) in [
            (&b"HTTP/1.1 200 OK\r\n"[..], true),
            (b"HTTP/1.0 302 Found\r\n", true),
            (b"HTTP/1.1 404 Not Found\r\n", false),
            (b"HTTP/1.1 500 Oops\r\n", false),
            (b"SSH-2.0-x\r\n", false),
            (b"", false),
            (b"HTTP/1.1 abc\r\n", false),
        ] {
            assert_eq!(is_success(answer), well, "{}", String::from_utf8_lossy(answer));
        }
    }
}
