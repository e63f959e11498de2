//! `/metrics` and `/livez` on loopback: two fixed pages, no more of HTTP than they need.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use actix::Recipient;
use groupcast_bus_config::accepting::Accepting;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::enforcement::AskEnforced;
use crate::inbox::Inbox;
use crate::registration;
use crate::renew::Credential;

/// What a request may have before its first empty line.
pub const REQUEST_BYTES_MAX: usize = 4 << 10;
/// Requests answered at once; further ones wait.
pub const AT_ONCE_MAX: usize = 16;
const REQUEST_WITHIN: Duration = Duration::from_secs(5);
/// Whoever enforces answers within this time, or is stuck.
const ALIVE_WITHIN: Duration = Duration::from_secs(2);

pub async fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    if !address.ip().is_loopback() {
        return Err(std::io::Error::other(format!("http = {address}: metrics are served on loopback only")));
    }
    TcpListener::bind(address).await
}

/// Where the pages' contents come from.
#[derive(Clone)]
pub struct Pages {
    pub enforced: Recipient<AskEnforced>,
    pub inbox: Arc<Inbox>,
    pub registration: registration::Handle,
    pub credential: watch::Receiver<Credential>,
}

pub async fn serve(listener: TcpListener, pages: Pages) {
    let room = Arc::new(Semaphore::new(AT_ONCE_MAX));
    let mut accepting = Accepting::new("metrics");
    loop {
        let Ok(permit) = room.clone().acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                accepting.failed(&error).await;
                continue;
            }
        };
        let pages = pages.clone();
        tokio::spawn(async move {
            let _ = tokio::time::timeout(REQUEST_WITHIN, answer(stream, &pages)).await;
            drop(permit);
        });
    }
}

/// Method and path of a request, once all of its head is here; an error is the status to answer with.
fn path(head: &[u8]) -> Result<Option<&str>, &'static str> {
    if !head.windows(4).any(|end| end == b"\r\n\r\n") {
        return if head.len() >= REQUEST_BYTES_MAX { Err("431 Request Header Fields Too Large") } else { Ok(None) };
    }
    let line = head.split(|b| *b == b'\r').next().and_then(|line| std::str::from_utf8(line).ok()).ok_or("400 Bad Request")?;
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["GET", path, version] if version.starts_with("HTTP/1.") => Ok(Some(path.split('?').next().unwrap_or_default())),
        [_, _, version] if version.starts_with("HTTP/1.") => Err("405 Method Not Allowed"),
        _ => Err("400 Bad Request"),
    }
}

async fn answer(mut stream: TcpStream, pages: &Pages) -> std::io::Result<()> {
    let mut head = Vec::new();
    let (code, body) = loop {
        match path(&head) {
            Ok(Some(path)) => break page(path, pages).await,
            Err(code) => break (code, format!("{code}\n")),
            Ok(None) => {
                let mut bytes = [0; 1024];
                let room = bytes.len().min(REQUEST_BYTES_MAX - head.len());
                match stream.read(&mut bytes[..room]).await? {
                    0 => return Ok(()),
                    length => head.extend_from_slice(&bytes[..length]),
                }
            }
        }
    };
    let length = body.len();
    let kind = "text/plain; version=0.0.4; charset=utf-8";
    let head = format!("HTTP/1.1 {code}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await
}

async fn page(path: &str, pages: &Pages) -> (&'static str, String) {
    if !matches!(path, "/metrics" | "/livez") {
        return ("404 Not Found", "try /metrics or /livez\n".into());
    }
    let enforced = match tokio::time::timeout(ALIVE_WITHIN, pages.enforced.send(AskEnforced)).await {
        Ok(Ok(enforced)) => enforced,
        Ok(Err(error)) => return ("503 Service Unavailable", format!("the enforcement does not answer: {error}\n")),
        Err(_) => return ("503 Service Unavailable", format!("the enforcement does not answer within {ALIVE_WITHIN:?}\n")),
    };
    match path {
        "/livez" => ("200 OK", "ok\n".into()),
        _ => {
            let credential = pages.credential.borrow().metrics();
            ("200 OK", enforced.metrics(&pages.inbox.heard().await) + &pages.registration.now().metrics() + &credential)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_is_read_when_all_of_it_is_here() {
        let whole = b"GET /metrics?x=1 HTTP/1.1\r\nHost: a\r\n\r\n";
        for length in 0..whole.len() {
            assert_eq!(path(&whole[..length]), Ok(None), "{length}");
        }
        assert_eq!(path(whole), Ok(Some("/metrics")));
        let rows: [(&[u8], &str); 4] = [
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"GET /metrics\r\n\r\n", "400"),
            (b"\xff\xfe HTTP\r\n\r\n", "400"),
            (&[b'a'; REQUEST_BYTES_MAX], "431"),
        ];
        for (head, code) in rows {
            assert!(path(head).is_err_and(|found| found.starts_with(code)), "{code}");
        }
        assert_eq!(path(&[b'a'; REQUEST_BYTES_MAX - 1]), Ok(None));
    }

    #[tokio::test]
    async fn nobody_else_than_this_machine_is_served() {
        assert!(listen("0.0.0.0:0".parse().unwrap()).await.is_err());
        assert!(listen("127.0.0.1:0".parse().unwrap()).await.is_ok());
    }
}
