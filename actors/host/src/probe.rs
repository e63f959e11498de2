//! Looks whether a workload is well: a port, an answer to HTTP, a process.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use groupcast_policy::model::{HealthCheck, Probe};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Nobody waits longer for one check.
pub const WITHIN_MAX: Duration = Duration::from_secs(5);
/// What is read of an answer: its first line.
const ANSWER_BYTES_MAX: usize = 512;

/// Whether the check succeeds within half of its interval.
pub async fn is_well(check: &HealthCheck, address: Option<IpAddr>) -> bool {
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
