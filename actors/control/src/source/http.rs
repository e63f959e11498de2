//! Talks HTTP to a source. Every call has a deadline, every answer a bound, and a body is read as it comes, on a thread that may wait.

use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use futures::StreamExt;
use reqwest::{Certificate, Client, Identity, Response};
use tokio::sync::mpsc;

use super::transport::{Endpoint, Head, Method, Request, Transport};

/// How long a server has to take a connection.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest answer, in bytes. What is made of it takes several times as much memory.
pub const ANSWER_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Pieces of an answer that wait to be read.
const PIECES_MAX: usize = 16;

pub struct Http {
    client: Client,
    api: String,
    internal: String,
    login: String,
    timeout: Duration,
    begun: Instant,
}

/// Where to, and as whom.
pub struct Settings<'a> {
    pub api: &'a str,
    pub internal: &'a str,
    pub login: &'a str,
    pub ca_file: Option<&'a Path>,
    /// Certificate and key.
    pub identity: Option<(&'a Path, &'a Path)>,
    pub timeout: Duration,
}

impl Http {
    pub fn new(settings: &Settings<'_>) -> Result<Self, String> {
        // Whoever was first installed the same one.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let read = |path: &Path| std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()));
        let mut builder = Client::builder().connect_timeout(CONNECT_TIMEOUT).timeout(settings.timeout);
        builder = builder.no_proxy().redirect(reqwest::redirect::Policy::none());
        if let Some(path) = settings.ca_file {
            let authorities =
                Certificate::from_pem_bundle(&read(path)?).map_err(|error| format!("{}: {error}", path.display()))?;
            if authorities.is_empty() {
                return Err(format!("{}: it holds no certificate", path.display()));
            }
            builder = builder.tls_certs_only(authorities);
        }
        if let Some((certificate, key)) = settings.identity {
            let pem = [read(certificate)?, b"\n".to_vec(), read(key)?].concat();
            let failed = |error| format!("{} and {}: {error}", certificate.display(), key.display());
            builder = builder.identity(Identity::from_pem(&pem).map_err(failed)?);
        }
        let client = builder.build().map_err(|error| format!("cannot make an HTTP client: {}", innermost(&error)))?;
        let base = |url: &str| url.trim_end_matches('/').to_owned();
        let (api, internal, login) = (base(settings.api), base(settings.internal), base(settings.login));
        Ok(Self { client, api, internal, login, timeout: settings.timeout, begun: Instant::now() })
    }
}

/// The cause that says most.
fn innermost(error: &reqwest::Error) -> String {
    let mut words = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        words = inner.to_string();
        source = inner.source();
    }
    words
}

impl Transport for Http {
    async fn exchange<T: Send + 'static>(
        &self,
        request: Request,
        read: impl FnOnce(Head, &mut dyn Read) -> T + Send + 'static,
    ) -> Result<T, String> {
        let base = match request.endpoint {
            Endpoint::Api => &self.api,
            Endpoint::Internal => &self.internal,
            Endpoint::Login => &self.login,
        };
        let url = format!("{base}{}", request.path);
        let mut call = match request.method {
            Method::Get => self.client.get(&url),
            Method::Post => self.client.post(&url),
        };
        for (name, value) in &request.headers {
            call = call.header(*name, value);
        }
        if let Some((kind, body)) = request.body {
            call = call.header("content-type", kind).body(body);
        }
        let answer = call.send().await.map_err(|error| self.told(base, &error))?;
        let head = head(&answer);
        if let Some(bytes) = answer.content_length().filter(|bytes| *bytes > ANSWER_BYTES_MAX) {
            return Err(format!("{base} answers {bytes} bytes, at most {ANSWER_BYTES_MAX} are read: lower page_size"));
        }
        let (pieces, receiver) = mpsc::channel(PIECES_MAX);
        let reading = tokio::task::spawn_blocking(move || read(head, &mut Body::new(receiver)));
        let mut stream = answer.bytes_stream();
        let mut cut_off = None;
        loop {
            let piece = match stream.next().await {
                None => Piece::End,
                Some(Ok(bytes)) => Piece::Bytes(bytes),
                Some(Err(error)) => {
                    cut_off = Some(self.told(base, &error));
                    Piece::CutOff
                }
            };
            let last = !matches!(piece, Piece::Bytes(_));
            // A reader that has seen enough is gone.
            if pieces.send(piece).await.is_err() || last {
                break;
            }
        }
        drop(pieces);
        let value = reading.await.map_err(|error| error.to_string())?;
        cut_off.map_or(Ok(value), Err)
    }

    async fn pause(&self, time: Duration) {
        tokio::time::sleep(time).await;
    }

    fn now(&self) -> Duration {
        self.begun.elapsed()
    }
}

impl Http {
    fn told(&self, base: &str, error: &reqwest::Error) -> String {
        if error.is_timeout() {
            return format!("{base} did not answer within {}", humantime::format_duration(self.timeout));
        }
        format!("{base}: {}", innermost(error))
    }
}

fn head(answer: &Response) -> Head {
    let header = |name: &str| answer.headers().get(name).and_then(|value| value.to_str().ok());
    Head {
        status: answer.status().as_u16(),
        retry_after: header("retry-after").and_then(|text| retry_after(text, header("date"), SystemTime::now())),
        subject_token: header("x-subject-token").map(str::to_owned),
    }
}

/// How long a server wants to be left alone: in seconds, or until a date by its own clock where it says what time that shows.
pub fn retry_after(text: &str, date: Option<&str>, now: SystemTime) -> Option<Duration> {
    if let Ok(seconds) = text.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let until = httpdate::parse_http_date(text).ok()?;
    let theirs = date.and_then(|date| httpdate::parse_http_date(date).ok()).unwrap_or(now);
    Some(until.duration_since(theirs).unwrap_or_default())
}

enum Piece {
    Bytes(Bytes),
    End,
    CutOff,
}

/// A body that arrives in pieces, as something to read from.
struct Body {
    pieces: mpsc::Receiver<Piece>,
    piece: Bytes,
    bytes: u64,
    ended: bool,
}

impl Body {
    fn new(pieces: mpsc::Receiver<Piece>) -> Self {
        Self { pieces, piece: Bytes::new(), bytes: 0, ended: false }
    }
}

impl Read for Body {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(Piece::Bytes(bytes)) => {
                    self.bytes += bytes.len() as u64;
                    if self.bytes > ANSWER_BYTES_MAX {
                        return Err(io::Error::other(format!("more than {ANSWER_BYTES_MAX} bytes: lower page_size")));
                    }
                    self.piece = bytes;
                }
                Some(Piece::End) => self.ended = true,
                Some(Piece::CutOff) | None => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        let count = buffer.len().min(self.piece.len());
        buffer[..count].copy_from_slice(&self.piece.split_to(count));
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_says_when_to_come_back_in_seconds_or_by_its_own_clock() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777); // Sun, 06 Nov 1994 08:49:37 GMT
        let later = "Sun, 06 Nov 1994 08:51:37 GMT";
        for (text, date, seconds) in [
            ("120", None, Some(120)),
            (" 0 ", None, Some(0)),
            ("18446744073709551615", None, Some(u64::MAX)),
            (later, None, Some(120)),
            // The server's clock is an hour ahead of ours.
            ("Sun, 06 Nov 1994 09:51:37 GMT", Some("Sun, 06 Nov 1994 09:49:37 GMT"), Some(120)),
            ("Sun, 06 Nov 1994 08:00:00 GMT", None, Some(0)),
            (later, Some("rubbish"), Some(120)),
            ("soon", None, None),
            ("-1", None, None),
        ] {
            assert_eq!(retry_after(text, date, now), seconds.map(Duration::from_secs), "{text}");
        }
    }
}
