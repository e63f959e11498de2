//! `/metrics` and `/livez` on loopback: two fixed pages, no more of HTTP than they need.

use std::fmt::Write;
use std::net::SocketAddr;
use std::time::Duration;

use actix::Recipient;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::enforcement::{AskStatus, Status};

const REQUEST_BYTES_MAX: usize = 4 << 10;
const REQUEST_WITHIN: Duration = Duration::from_secs(5);

pub async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    if !address.ip().is_loopback() {
        return Err(std::io::Error::other(format!("http = {address}: metrics are served on loopback only")));
    }
    TcpListener::bind(address).await
}

pub async fn serve(listener: TcpListener, status: Recipient<AskStatus>) {
    loop {
        let Ok((stream, _)) = listener.accept().await else { continue };
        let status = status.clone();
        tokio::spawn(async move {
            let _ = tokio::time::timeout(REQUEST_WITHIN, answer(stream, &status)).await;
        });
    }
}

async fn answer(mut stream: TcpStream, status: &Recipient<AskStatus>) -> std::io::Result<()> {
    let mut request = vec![0; REQUEST_BYTES_MAX];
    let length = stream.read(&mut request).await?;
    let path = String::from_utf8_lossy(&request[..length]);
    let path = path.split_whitespace().nth(1).unwrap_or_default();
    let (code, body) = match (path, status.send(AskStatus).await) {
        ("/metrics", Ok(status)) => ("200 OK", metrics(&status)),
        ("/livez", Ok(_)) => ("200 OK", "ok\n".into()),
        ("/metrics" | "/livez", Err(error)) => ("503 Service Unavailable", format!("{error}\n")),
        _ => ("404 Not Found", "try /metrics or /livez\n".into()),
    };
    let head =
        format!("HTTP/1.1 {code}\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await
}

fn metrics(status: &Status) -> String {
    let rows = [
        ("groupcast_agent_transactions_total", status.transactions),
        ("groupcast_agent_operations_total", status.operations),
        ("groupcast_agent_stamp_bumps_total", status.bumps),
        ("groupcast_agent_failures_total", status.failures),
        ("groupcast_agent_repairs_total", status.repairs),
        ("groupcast_agent_topics", status.topics as u64),
        ("groupcast_agent_workloads", status.workloads.len() as u64),
        ("groupcast_agent_refused_workloads", status.refused.len() as u64),
        ("groupcast_agent_commit", status.commit),
        ("groupcast_agent_change", status.change),
        ("groupcast_agent_enforcing", u64::from(status.mode == "enforce")),
    ];
    rows.iter().fold(String::new(), |mut text, (name, value)| {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{name} {value}");
        text
    })
}
