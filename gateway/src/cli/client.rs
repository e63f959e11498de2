//! Talks to a gateway. A request that is harmless to repeat is repeated, at the next gateway if there is one; any request is, if nothing was
//! done about it: the gateway was not reached, or it still reads the streams. That is said, so that whoever waits knows for what.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Certificate, Client, Method, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio_rustls::rustls::crypto::ring;

use super::context::Context;
use super::{Code, Failure, Result, output};
use crate::problem::{Problem, STILL_READING};

/// How long one gateway has to take a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one answer may take beyond what was asked to wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Attempts, over all gateways; one at each if there are more.
pub const ATTEMPTS_MAX: usize = 4;
/// How long a gateway is waited for that still reads, unless the caller says how long.
const READING_WITHIN: Duration = Duration::from_secs(30);
/// Longest event that is read.
const EVENT_BYTES_MAX: usize = 16 << 20;
/// Pause before the second attempt; it doubles up to the other.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(2);

pub struct Api {
    http: Client,
    gateways: Vec<String>,
    /// The one that answered last is asked first: one that vanished costs a command its time-out only once.
    first: AtomicUsize,
}

/// A request to a gateway.
#[derive(Debug, Clone)]
pub struct Call {
    method: Method,
    path: String,
    body: Option<(String, &'static str)>,
    key: Option<String>,
    reason: Option<String>,
    waits: Duration,
    deadline: Option<Instant>,
    impatient: bool,
}

impl Call {
    pub fn new(method: Method, path: impl Into<String>) -> Self {
        let (waits, path) = (Duration::ZERO, path.into());
        Self { method, path, body: None, key: None, reason: None, waits, deadline: None, impatient: false }
    }

    pub fn get(path: impl Into<String>) -> Self {
        Self::new(Method::GET, path)
    }

    pub fn json(mut self, body: &Value) -> Self {
        self.body = Some((body.to_string(), "application/json"));
        self
    }

    pub fn text(mut self, body: String) -> Self {
        self.body = Some((body, "application/jsonl"));
        self
    }

    /// With this key it is written once, however often it is sent.
    pub fn key(mut self, key: String) -> Self {
        self.key = Some(key);
        self
    }

    pub fn reason(mut self, reason: &str) -> Self {
        self.reason = Some(reason.to_owned()).filter(|reason| !reason.is_empty());
        self
    }

    /// The gateway holds the answer back for so long.
    pub fn waits(mut self, waits: Duration) -> Self {
        self.waits = waits;
        self
    }

    /// Nothing is tried after this, and no answer is waited for.
    pub fn until(mut self, deadline: Option<Instant>) -> Self {
        self.deadline = deadline;
        self
    }

    /// A gateway that still reads is not waited for: that is what is asked.
    pub fn at_once(mut self) -> Self {
        self.impatient = true;
        self
    }

    /// Time that is left.
    fn left(&self) -> Duration {
        self.deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Whether twice is as good as once. What is put says the whole of what is to be, without a condition; a second time finds it there.
    fn is_repeatable(&self) -> bool {
        [Method::GET, Method::PUT].contains(&self.method) || self.key.is_some()
    }
}

/// What may be done about an attempt that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Again {
    No,
    /// If twice is as good as once.
    Repeatable,
    /// The same, for as long as the caller has set.
    Waits,
    /// Nothing was done about it: another gateway may be asked.
    Untouched,
    /// The same: the gateway still reads.
    Reading,
}

/// A key that nobody else has.
pub fn random_key() -> String {
    let mut bytes = [0; 16];
    // Without randomness the clock and the process id still tell two commands apart.
    if getrandom::fill(&mut bytes).is_err() {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        bytes = (now ^ (u128::from(std::process::id()) << 96)).to_be_bytes();
    }
    data_encoding::HEXLOWER.encode(&bytes)
}

/// What goes into a path or a query.
pub fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes().map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

impl Api {
    pub fn new(context: &Context, token: &str) -> Result<Self> {
        // Whoever was first installed the same one.
        let _ = ring::default_provider().install_default();
        let mut headers = HeaderMap::new();
        let mut value = HeaderValue::from_str(&format!("Bearer {token}"))
            .map_err(|_| Failure::failed("the token holds characters that no token has").hint("is it the right file?"))?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
        let mut builder = Client::builder().default_headers(headers).connect_timeout(CONNECT_TIMEOUT).no_proxy();
        if let Some(path) = &context.authority {
            let failed = |error: String| Failure::failed(format!("authority {}: {error}", path.display()));
            let pem = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
            let authorities = Certificate::from_pem_bundle(&pem).map_err(|error| failed(error.to_string()))?;
            builder = builder.tls_certs_merge(authorities);
        }
        let http = builder.build().map_err(|error| Failure::failed(format!("cannot make an HTTP client: {error}")))?;
        let gateways = context.gateways.iter().map(|url| url.trim_end_matches('/').to_owned()).collect();
        Ok(Self { http, gateways, first: AtomicUsize::new(0) })
    }

    pub fn gateways(&self) -> &[String] {
        &self.gateways
    }

    async fn attempt(&self, gateway: &str, call: &Call) -> std::result::Result<Response, reqwest::Error> {
        let timeout = (ANSWER_TIMEOUT + call.waits).min(call.left());
        let mut request = self.http.request(call.method.clone(), format!("{gateway}{}", call.path)).timeout(timeout);
        if let Some((body, kind)) = &call.body {
            request = request.header(CONTENT_TYPE, *kind).body(body.clone());
        }
        if let Some(key) = &call.key {
            request = request.header(HeaderName::from_static("idempotency-key"), key);
        }
        if let Some(reason) = &call.reason {
            request = request.header(HeaderName::from_static("groupcast-reason"), reason);
        }
        request.send().await
    }

    /// Sends it; an answer that is no success becomes a failure.
    pub async fn send(&self, call: &Call) -> Result<String> {
        let count = self.gateways.len();
        let (first, begun) = (self.first.load(Ordering::Relaxed), Instant::now());
        let (mut pause, mut said) = (RETRY_PAUSE, Vec::new());
        let mut last = Failure::failed("no gateway is named");
        for attempt in 0.. {
            let at = (first + attempt) % count.max(1);
            let Some(gateway) = self.gateways.get(at) else { break };
            if call.left().is_zero() {
                break;
            }
            let (failure, again) = match self.answered(gateway, call).await {
                Ok(text) => {
                    self.first.store(at, Ordering::Relaxed);
                    return Ok(text);
                }
                Err(refused) => refused,
            };
            last = failure;
            let attempts_max = ATTEMPTS_MAX.max(count);
            let tries = attempt + 1 < attempts_max;
            let goes_on = match again {
                Again::No => false,
                Again::Repeatable => call.is_repeatable() && tries,
                Again::Waits => call.is_repeatable() && (call.deadline.is_some() || tries),
                Again::Untouched => tries,
                Again::Reading if call.impatient => attempt + 1 < count,
                Again::Reading => call.deadline.is_some() || begun.elapsed() < READING_WITHIN,
            };
            if !goes_on {
                break;
            }
            if matches!(again, Again::Untouched | Again::Reading) && !said.contains(&at) {
                said.push(at);
                output::say(&format!("{}; trying again{}", last.message, if count > 1 { ", at the next gateway" } else { "" }));
            }
            tokio::time::sleep(pause.min(call.left())).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
        if call.left().is_zero() {
            last = late(call, last);
        }
        Err(last)
    }

    /// The answer of one gateway, or what to do without it.
    async fn answered(&self, gateway: &str, call: &Call) -> std::result::Result<String, (Failure, Again)> {
        let lost = |error: reqwest::Error| {
            let again = if error.is_connect() { Again::Untouched } else { Again::Repeatable };
            (unreachable(gateway, &error), again)
        };
        let response = self.attempt(gateway, call).await.map_err(lost)?;
        let (status, when) = (response.status(), response.headers().contains_key(RETRY_AFTER));
        let text = response.text().await.map_err(lost)?;
        match status {
            status if status.is_success() => Ok(text),
            StatusCode::SERVICE_UNAVAILABLE if is_reading(&text) => Err((refused(status, &text), Again::Reading)),
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::GATEWAY_TIMEOUT => {
                Err((refused(status, &text), if when { Again::Waits } else { Again::Repeatable }))
            }
            status => Err((refused(status, &text), Again::No)),
        }
    }

    pub async fn fetch<T: DeserializeOwned>(&self, call: &Call) -> Result<T> {
        let text = self.send(call).await?;
        serde_json::from_str(&text).map_err(|error| {
            Failure::failed(format!("the gateway's answer cannot be read: {error}"))
                .hint("is it a groupcast gateway, and of this version?")
        })
    }

    /// Opens a stream of events, at the first gateway that has one; those that still read are waited for.
    pub async fn events(&self, path: &str) -> Result<Events> {
        let begun = Instant::now();
        let mut said = false;
        loop {
            let (mut last, mut reading) = (Failure::failed("no gateway is named"), false);
            for gateway in &self.gateways {
                match self.http.get(format!("{gateway}{path}")).header(ACCEPT, "text/event-stream").send().await {
                    Ok(response) if response.status().is_success() => return Ok(Events { response, text: Vec::new() }),
                    Ok(response) => {
                        let status = response.status();
                        let text = response.text().await.unwrap_or_default();
                        reading |= is_reading(&text);
                        last = refused(status, &text);
                    }
                    Err(error) => last = unreachable(gateway, &error),
                }
            }
            if !reading || begun.elapsed() >= READING_WITHIN {
                return Err(last);
            }
            if !std::mem::replace(&mut said, true) {
                output::say(&format!("{}; trying again", last.message));
            }
            tokio::time::sleep(RETRY_PAUSE_MAX / 2).await;
        }
    }

    /// All items of a list, page by page, at most `limit`.
    pub async fn list(&self, path: &str, limit: Option<usize>) -> Result<Items> {
        let limit = limit.unwrap_or(usize::MAX);
        let mut items: Vec<Value> = Vec::new();
        let mut after = String::new();
        loop {
            let page = limit.saturating_sub(items.len()).min(crate::api::PAGE_MAX);
            let sign = if path.contains('?') { '&' } else { '?' };
            let listed: Value = self.fetch(&Call::get(format!("{path}{sign}limit={page}{after}"))).await?;
            items.extend(listed["items"].as_array().cloned().unwrap_or_default());
            let cursor = if path.starts_with("/v1/changes") { "before" } else { "after" };
            match listed["next"].as_str() {
                Some(next) if items.len() < limit => after = format!("&{cursor}={}", escaped(next)),
                next => return Ok(Items { items, is_cut: next.is_some() }),
            }
        }
    }
}

/// What a list holds.
pub struct Items {
    pub items: Vec<Value>,
    /// There are more.
    pub is_cut: bool,
}

/// Events as a gateway sends them.
pub struct Events {
    response: Response,
    text: Vec<u8>,
}

impl Events {
    /// The next one; nothing when the stream ends or breaks.
    pub async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some(end) = self.text.windows(2).position(|pair| pair == b"\n\n") {
                let block: Vec<u8> = self.text.drain(..end + 2).collect();
                match event(&String::from_utf8_lossy(&block)) {
                    Some(event) => return Some(event),
                    None => continue,
                }
            }
            if self.text.len() > EVENT_BYTES_MAX {
                return None;
            }
            self.text.extend_from_slice(&self.response.chunk().await.ok()??);
        }
    }
}

/// One event; nothing for a comment, which keeps the connection alive.
fn event(block: &str) -> Option<(String, Value)> {
    let field = |name: &str| {
        let of = |line: &str| line.strip_prefix(name)?.strip_prefix(':').map(|value| value.trim_start().to_owned());
        let values: Vec<String> = block.lines().filter_map(of).collect();
        (!values.is_empty()).then(|| values.join("\n"))
    };
    let data = serde_json::from_str(&field("data")?).ok()?;
    Some((field("event").unwrap_or_else(|| "message".to_owned()), data))
}

/// What to do when a gateway answers that it cannot.
pub const LOOK: &str = "`groupcast doctor` looks at what is wrong";

/// The time is up: of what only reads that is all there is to say, of what writes that nobody knows.
fn late(call: &Call, last: Failure) -> Failure {
    let message = format!("no answer in time: {}", last.message);
    let hint = match call.method == Method::GET {
        true => last.hint.unwrap_or_else(|| LOOK.to_owned()),
        false => "whether it was written is not known: see `groupcast get changes` before you try again".to_owned(),
    };
    Failure { code: Code::TimedOut, message, details: last.details, hint: Some(hint) }
}

/// Whether the gateway says that it has not read the streams, and so has done nothing.
fn is_reading(text: &str) -> bool {
    serde_json::from_str::<Problem>(text).is_ok_and(|problem| problem.kind.rsplit(':').next() == Some(STILL_READING))
}

fn unreachable(gateway: &str, error: &reqwest::Error) -> Failure {
    let mut reason = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        reason = inner.to_string();
        source = inner.source();
    }
    let hint = "is the gateway running there? name another with --gateway or a context (`groupcast context list`)";
    Failure::failed(format!("{gateway} cannot be reached: {reason}")).hint(hint)
}

/// What a gateway says is wrong.
pub fn refused(status: StatusCode, text: &str) -> Failure {
    let Ok(problem) = serde_json::from_str::<Problem>(text) else {
        return Failure::failed(format!("the gateway answered {status}")).hint("is it a groupcast gateway?");
    };
    let code = match status.as_u16() {
        404 => Code::NotFound,
        409 | 412 | 422 => Code::Conflict,
        _ => Code::Failure,
    };
    let shown = |item: &crate::problem::Item| {
        let place = match (item.rule, item.field.as_str()) {
            (Some(rule), "" | "rule") => format!("rules[{rule}]: "),
            (Some(rule), field) => format!("rules[{rule}].{field}: "),
            (None, "") => String::new(),
            (None, field) => format!("{field}: "),
        };
        let document = if item.document.is_empty() { String::new() } else { format!("{}: ", item.document) };
        format!("{document}{place}{}", item.detail)
    };
    let hint = match problem.kind.rsplit(':').next() {
        Some("stale") => Some("read it again (`groupcast get`), decide anew, and apply again"),
        Some("unauthorized") => Some("an administrator makes a new token with `groupcast token add`"),
        Some("forbidden") => Some("`groupcast token list` shows roles and scopes to administrators"),
        Some("rate") => Some("check the token, and wait a minute"),
        Some("unavailable" | STILL_READING) => Some(LOOK),
        _ => None,
    };
    let details: Vec<String> = problem.errors.iter().map(shown).collect();
    let message = match details.len() {
        0 => problem.detail,
        1 => details[0].clone(),
        count => format!("{count} things are wrong"),
    };
    let details = if details.len() > 1 { details } else { Vec::new() };
    Failure { code, message, details, hint: hint.map(str::to_owned) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_into_a_path_is_escaped() {
        assert_eq!(escaped("web-1_x.y~"), "web-1_x.y~");
        assert_eq!(escaped("a/b?c=d&e #ä"), "a%2Fb%3Fc%3Dd%26e%20%23%C3%A4");
    }

    #[test]
    fn events_are_read_and_comments_are_none() {
        let read = event("event: gone\ndata: {\"host\":\"h1\"}\n\n").expect("an event");
        assert_eq!((read.0.as_str(), read.1["host"].as_str()), ("gone", Some("h1")));
        assert_eq!(event("data: {\ndata: \"a\": 1}\n\n").expect("two lines").1["a"], 1);
        for nothing in [": keep alive\n\n", "event: x\n\n", "data: no json\n\n", "\n\n"] {
            assert_eq!(event(nothing), None, "{nothing:?}");
        }
    }

    #[test]
    fn a_problem_becomes_a_failure_with_its_code() {
        let body = |errors: &str| {
            format!(r#"{{"type":"urn:groupcast:problem:stale","title":"x","status":412,"detail":"all","errors":[{errors}]}}"#)
        };
        let one = r#"{"document":"group \"web\"","rule":2,"field":"ports","detail":"is 0"}"#;
        let failure = refused(StatusCode::PRECONDITION_FAILED, &body(one));
        assert_eq!((failure.code, failure.message.as_str()), (Code::Conflict, "group \"web\": rules[2].ports: is 0"));
        let failure = refused(StatusCode::BAD_REQUEST, &body(&format!("{one},{one}")));
        assert_eq!((failure.code, failure.details.len()), (Code::Failure, 2));
        assert_eq!(refused(StatusCode::NOT_FOUND, &body("")).code, Code::NotFound);
        assert_eq!(refused(StatusCode::BAD_GATEWAY, "<html>").code, Code::Failure);
    }
}
