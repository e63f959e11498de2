//! Talks to a gateway. A request that is harmless to repeat is repeated, at the next gateway if there is one.

use std::time::Duration;

use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Certificate, Client, Method, Response, StatusCode};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio_rustls::rustls::crypto::ring;

use super::context::Context;
use super::{Code, Failure, Result};
use crate::problem::Problem;

/// How long one gateway has to take a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long one answer may take beyond what was asked to wait.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// Attempts, over all gateways.
pub const ATTEMPTS_MAX: usize = 4;
/// Longest event that is read.
const EVENT_BYTES_MAX: usize = 16 << 20;
/// Pause before the second attempt; it doubles.
const RETRY_PAUSE: Duration = Duration::from_millis(250);

pub struct Api {
    http: Client,
    gateways: Vec<String>,
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
}

impl Call {
    pub fn new(method: Method, path: impl Into<String>) -> Self {
        Self { method, path: path.into(), body: None, key: None, reason: None, waits: Duration::ZERO }
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

    fn is_repeatable(&self) -> bool {
        self.method == Method::GET || self.key.is_some()
    }
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
        Ok(Self { http, gateways })
    }

    pub fn gateways(&self) -> &[String] {
        &self.gateways
    }

    async fn attempt(&self, gateway: &str, call: &Call) -> std::result::Result<Response, reqwest::Error> {
        let timeout = ANSWER_TIMEOUT + call.waits;
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
        let mut pause = RETRY_PAUSE;
        let mut last = Failure::failed("no gateway is named");
        for attempt in 0..ATTEMPTS_MAX {
            let gateway = match self.gateways.get(attempt % self.gateways.len().max(1)) {
                Some(gateway) => gateway,
                None => break,
            };
            let (failure, again) = match self.attempt(gateway, call).await {
                Ok(response) => {
                    let status = response.status();
                    match (status.is_success(), response.text().await) {
                        (true, Ok(text)) => return Ok(text),
                        (false, Ok(text)) => {
                            let again = [StatusCode::SERVICE_UNAVAILABLE, StatusCode::GATEWAY_TIMEOUT].contains(&status);
                            (refused(status, &text), again)
                        }
                        (_, Err(error)) => (unreachable(gateway, &error), true),
                    }
                }
                Err(error) => (unreachable(gateway, &error), true),
            };
            last = failure;
            if !again || !call.is_repeatable() {
                break;
            }
            if attempt + 1 < ATTEMPTS_MAX {
                tokio::time::sleep(pause).await;
                pause *= 2;
            }
        }
        Err(last)
    }

    pub async fn fetch<T: DeserializeOwned>(&self, call: &Call) -> Result<T> {
        let text = self.send(call).await?;
        serde_json::from_str(&text).map_err(|error| {
            Failure::failed(format!("the gateway's answer cannot be read: {error}"))
                .hint("is it a groupcast gateway, and of this version?")
        })
    }

    /// Opens a stream of events.
    pub async fn events(&self, path: &str) -> Result<Events> {
        let mut last = Failure::failed("no gateway is named");
        for gateway in &self.gateways {
            match self.http.get(format!("{gateway}{path}")).header(ACCEPT, "text/event-stream").send().await {
                Ok(response) if response.status().is_success() => return Ok(Events { response, text: Vec::new() }),
                Ok(response) => {
                    let status = response.status();
                    last = refused(status, &response.text().await.unwrap_or_default());
                }
                Err(error) => last = unreachable(gateway, &error),
            }
        }
        Err(last)
    }

    /// All items of a list, page by page, at most `limit`.
    pub async fn list(&self, path: &str, limit: usize) -> Result<Vec<Value>> {
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
                _ => return Ok(items),
            }
        }
    }
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
        Some("unavailable") => Some("`groupcast doctor` looks at what is wrong"),
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
