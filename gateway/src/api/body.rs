//! What a request brings: bounded bodies within bounded time, conditions, and keys.

use std::sync::LazyLock;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use futures::StreamExt;
use groupcast_control::change::{Expected, KEY_BYTES_MAX};
use groupcast_control::document::DOCUMENT_BYTES_MAX;
use groupcast_policy::written::{Format, Node, nodes};
use serde::de::DeserializeOwned;

use super::App;
use super::access::Caller;
use crate::problem::Problem;
use crate::shares::Share;

/// One document: YAML is longer than what is stored.
pub const SMALL_BYTES_MAX: usize = 2 * DOCUMENT_BYTES_MAX;
/// A change or an import.
pub const LARGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// What is read of a body that is too long, before the connection is closed on it.
pub const DRAINED_BYTES_MAX: usize = 2 * LARGE_BYTES_MAX;
/// A dry run of somebody who may only read.
pub const PLANNED_BYTES_MAX: usize = 8 * 1024 * 1024;
/// What is taken from somebody who has shown no token yet, and wants to join.
pub const STRANGER_BYTES_MAX: usize = 4 * 1024;
/// Values in a JSON body. Each takes up to some hundred bytes of memory, and two of the text.
pub const VALUES_MAX: usize = 2_000_000;
/// How long a client may take to send it, and may send nothing of it.
pub const BODY_DEADLINE: Duration = Duration::from_secs(60);
pub const BODY_STALL_MAX: Duration = Duration::from_secs(10);
/// How long a large body waits until there is a place for it.
const PLACE_DEADLINE: Duration = Duration::from_secs(5);
/// Characters of what is said to be wrong with a body.
const WORDS_MAX: usize = 400;
/// A body that takes long to read is read beside the thread's other requests.
const ASIDE_BYTES: usize = 64 * 1024;

pub static IDEMPOTENCY_KEY: LazyLock<HeaderName> = LazyLock::new(|| HeaderName::from_static("idempotency-key"));

/// Query parameters; what is wrong with them is told as a problem.
pub struct Queried<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Queried<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let rejected = |rejection: QueryRejection| Problem::bad_request(rejection.body_text());
        Query::from_request_parts(parts, state).await.map(|Query(value)| Self(value)).map_err(rejected)
    }
}

/// What stands in the path; what is wrong with it is told as a problem.
pub struct Named(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let rejected = |rejection: PathRejection| Problem::bad_request(rejection.body_text());
        Path::from_request_parts(parts, state).await.map(|Path(name)| Self(name)).map_err(rejected)
    }
}

/// Reads a body of at most `max` bytes. One that is longer is read to its end all the same, up to [`DRAINED_BYTES_MAX`], and thrown away:
/// a connection that is closed while the client still sends is reset, and the client never sees why.
pub async fn read(_: &App, body: Body, headers: &HeaderMap, max: usize) -> Result<Bytes, Problem> {
    within_time(at_most(body, said(headers), max.min(SMALL_BYTES_MAX), DRAINED_BYTES_MAX)).await
}

/// Reads the body of somebody who has shown no token yet: little, and no more than that is thrown away.
pub async fn of_stranger(body: Body, headers: &HeaderMap, max: usize) -> Result<Bytes, Problem> {
    within_time(at_most(body, said(headers), max, 16 * max)).await
}

/// Reads a body that may be large. There are few places for these, and one of them is taken until what is returned is dropped.
pub async fn large(
    app: &App,
    caller: &Caller,
    body: Body,
    headers: &HeaderMap,
    max: usize,
) -> Result<(Bytes, Option<Share>), Problem> {
    let said = said(headers);
    let place = match said.is_some_and(|length| length <= SMALL_BYTES_MAX) {
        true => None,
        false => Some(place(app, caller).await?),
    };
    Ok((within_time(at_most(body, said, max, DRAINED_BYTES_MAX)).await?, place))
}

async fn place(app: &App, caller: &Caller) -> Result<Share, Problem> {
    let deadline = tokio::time::Instant::now() + PLACE_DEADLINE;
    loop {
        match app.large_bodies.take(&caller.principal.id, caller.from) {
            Ok(place) => return Ok(place),
            Err(full) if tokio::time::Instant::now() >= deadline => return Err(full.problem("large bodies")),
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// The length that the client announces.
fn said(headers: &HeaderMap) -> Option<usize> {
    headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()).and_then(|l| l.parse::<usize>().ok())
}

/// Computes what takes long without holding up the thread's other requests.
pub fn aside<T>(bytes: usize, compute: impl FnOnce() -> T) -> T {
    if bytes <= ASIDE_BYTES { compute() } else { tokio::task::block_in_place(compute) }
}

fn slow() -> Problem {
    Problem::new(StatusCode::REQUEST_TIMEOUT, "slow", "the body did not arrive in time: send it again")
}

async fn within_time(reading: impl Future<Output = Result<Bytes, Problem>>) -> Result<Bytes, Problem> {
    tokio::time::timeout(BODY_DEADLINE, reading).await.unwrap_or_else(|_| Err(slow()))
}

async fn at_most(body: Body, said: Option<usize>, max: usize, drained_max: usize) -> Result<Bytes, Problem> {
    let mut parts = body.into_data_stream();
    let (mut kept, mut length) = (Vec::new(), said.filter(|said| *said > max).map_or(0, |_| max.saturating_add(1)));
    while let Some(part) = tokio::time::timeout(BODY_STALL_MAX, parts.next()).await.map_err(|_| slow())? {
        let part = part.map_err(|error| Problem::bad_request(format!("the body cannot be read: {error}")))?;
        length = length.saturating_add(part.len());
        match length {
            _ if length <= max => kept.extend_from_slice(&part),
            _ if length <= drained_max => kept = Vec::new(),
            _ => break,
        }
    }
    if length > max { Err(Problem::too_large(format!("the body is longer than {max} bytes: split it"))) } else { Ok(kept.into()) }
}

/// How many values a JSON text has at most: each but the first follows a comma, a colon or a bracket.
fn values(bytes: &[u8]) -> usize {
    let (mut count, mut in_text, mut escaped) = (1usize, false, false);
    for byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_text => escaped = true,
            b'"' => in_text = !in_text,
            b',' | b':' | b'[' | b'{' if !in_text => count += 1,
            _ => {}
        }
    }
    count
}

pub fn json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    if values(bytes) > VALUES_MAX {
        return Err(Problem::too_large(format!("the body has more than {VALUES_MAX} values: split it")));
    }
    serde_json::from_slice(bytes).map_err(|error| {
        // What is wrong may be quoted, and may be as long as the body.
        let words = error.to_string();
        let brief: String = words.chars().take(WORDS_MAX).collect();
        let cut = if brief.len() < words.len() { "…" } else { "" };
        Problem::bad_request(format!("the body is not what this route takes: {brief}{cut}"))
    })
}

/// How long a body takes to be read, in bytes of JSON. A few bytes of YAML can name a quarter of a million values.
pub fn length(headers: &HeaderMap, bytes: &[u8]) -> usize {
    if is_yaml(headers) { usize::MAX } else { bytes.len() }
}

fn is_yaml(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).is_some_and(|kind| kind.contains("yaml"))
}

/// The one document of a body: JSON, or YAML where the content type says so.
pub fn document(headers: &HeaderMap, bytes: &[u8]) -> Result<Node, Problem> {
    let format = if is_yaml(headers) { Format::Yaml } else { Format::Json };
    let text = std::str::from_utf8(bytes).map_err(|_| Problem::bad_request("the body is not UTF-8"))?;
    if format == Format::Json && values(bytes) > VALUES_MAX {
        return Err(Problem::too_large(format!("the body has more than {VALUES_MAX} values: split it")));
    }
    let mut found = nodes(format, text).map_err(|problem| Problem::of_documents(vec![problem]))?;
    match (found.pop(), found.is_empty()) {
        (Some(node), true) => Ok(node),
        (None, _) => Err(Problem::bad_request("the body holds no document")),
        (Some(_), false) => Err(Problem::bad_request("the body holds several documents: send them to /v1/changes")),
    }
}

pub fn etag(revision: u64) -> String {
    format!("\"{revision}\"")
}

fn revision(text: &str) -> Option<u64> {
    text.trim().strip_prefix('"')?.strip_suffix('"')?.parse().ok()
}

/// What `If-Match` and `If-None-Match` say about the version to replace.
pub fn expected(headers: &HeaderMap) -> Result<Expected, Problem> {
    let text = |name: HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default().trim().to_owned());
    match (text(header::IF_MATCH), text(header::IF_NONE_MATCH)) {
        (None, None) => Ok(Expected::Any),
        (None, Some(star)) if star == "*" => Ok(Expected::Absent),
        (Some(tag), None) => revision(&tag)
            .map(Expected::Revision)
            .ok_or_else(|| Problem::bad_request("If-Match takes one ETag as this gateway sends it, such as \"42\"")),
        _ => Err(Problem::bad_request("send If-Match with an ETag, or If-None-Match: *, not both and nothing else")),
    }
}

/// Whether the client holds this version already.
pub fn holds(headers: &HeaderMap, current: u64) -> bool {
    let value = headers.get(header::IF_NONE_MATCH).and_then(|value| value.to_str().ok());
    value.is_some_and(|list| list.split(',').any(|tag| revision(tag.trim().trim_start_matches("W/")) == Some(current)))
}

/// The key that makes a repetition harmless. Part of the space is ours, to tell users apart.
pub const CLIENT_KEY_BYTES_MAX: usize = KEY_BYTES_MAX - groupcast_policy::ids::ID_LEN_MAX - 1;

pub fn key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let Some(value) = headers.get(&*IDEMPOTENCY_KEY) else { return Ok(None) };
    let key = value.to_str().ok().filter(|key| !key.is_empty() && key.len() <= CLIENT_KEY_BYTES_MAX);
    let wrong = || Problem::bad_request(format!("Idempotency-Key is 1 to {CLIENT_KEY_BYTES_MAX} plain characters"));
    key.map(|key| Some(key.to_owned())).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn conditions_are_read_or_refused() {
        assert_eq!(expected(&headers(&[])), Ok(Expected::Any));
        assert_eq!(expected(&headers(&[("if-match", "\"42\"")])), Ok(Expected::Revision(42)));
        assert_eq!(expected(&headers(&[("if-none-match", "*")])), Ok(Expected::Absent));
        for bad in [
            &[("if-match", "42")][..],
            &[("if-match", "*")],
            &[("if-match", "W/\"42\"")],
            &[("if-none-match", "\"42\"")],
            &[("if-match", "\"42\""), ("if-none-match", "*")],
        ] {
            assert_eq!(expected(&headers(bad)).unwrap_err().status, 400, "{bad:?}");
        }
        assert!(holds(&headers(&[("if-none-match", "\"1\", \"42\"")]), 42));
        assert!(!holds(&headers(&[("if-none-match", "\"1\"")]), 42));
    }

    /// 370 bytes of YAML kept a thread and all its requests for more than a second: aliases make a quarter of a million values of them.
    #[test]
    fn yaml_is_read_aside_however_short_it_is() {
        let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x]\n");
        for level in 1..8 {
            let aliases = vec![format!("*a{}", level - 1); 8].join(", ");
            text.push_str(&format!("a{level}: &a{level} [{aliases}]\n"));
        }
        assert!(text.len() <= ASIDE_BYTES / 100, "{}", text.len());
        for kind in ["application/yaml", "application/x-yaml; charset=utf-8", "text/yaml"] {
            let headers = headers(&[("content-type", kind)]);
            assert!(length(&headers, text.as_bytes()) > ASIDE_BYTES, "{kind}");
            // And it is given up before all of them are made.
            assert!(document(&headers, text.as_bytes()).is_err(), "{kind}");
        }
        assert_eq!(length(&headers(&[("content-type", "application/json")]), b"{}"), 2);
    }

    #[test]
    fn a_key_is_bounded() {
        assert_eq!(key(&headers(&[])), Ok(None));
        let longest = "k".repeat(CLIENT_KEY_BYTES_MAX);
        assert_eq!(key(&headers(&[("idempotency-key", &longest)])), Ok(Some(longest.clone())));
        assert!(key(&headers(&[("idempotency-key", &format!("{longest}k"))])).is_err());
        assert!(key(&headers(&[("idempotency-key", "")])).is_err());
    }

    #[test]
    fn values_are_counted_before_they_are_read() {
        for (text, count) in [("1", 1), ("[]", 2), (r#"{"a": [1, 2]}"#, 5), (r#"["a,b:[{", "\\\",,"]"#, 3)] {
            assert_eq!(values(text.as_bytes()), count, "{text}");
        }
        let list = |count: usize| format!("[{}]", vec!["1"; count].join(","));
        assert!(json::<serde_json::Value>(list(VALUES_MAX - 1).as_bytes()).is_ok());
        assert_eq!(json::<serde_json::Value>(list(VALUES_MAX).as_bytes()).unwrap_err().status, 413);
    }

    #[tokio::test]
    async fn of_a_stranger_little_is_taken() {
        let body = |bytes: usize| Body::from(vec![b'x'; bytes]);
        assert_eq!(
            of_stranger(body(STRANGER_BYTES_MAX), &HeaderMap::new(), STRANGER_BYTES_MAX).await.unwrap().len(),
            STRANGER_BYTES_MAX
        );
        assert_eq!(
            of_stranger(body(STRANGER_BYTES_MAX + 1), &HeaderMap::new(), STRANGER_BYTES_MAX).await.unwrap_err().status,
            413
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stops_coming_is_not_waited_for() {
        let begun = futures::stream::iter([Ok::<_, std::io::Error>(Bytes::from_static(b"x"))]);
        let body = Body::from_stream(begun.chain(futures::stream::pending()));
        let start = tokio::time::Instant::now();
        assert_eq!(of_stranger(body, &HeaderMap::new(), STRANGER_BYTES_MAX).await.unwrap_err().status, 408);
        assert!(start.elapsed() < BODY_DEADLINE, "as long as a whole body may take");
    }

    #[test]
    fn an_answer_is_not_as_long_as_what_is_wrong() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Known {
            #[serde(rename = "a")]
            _a: Option<u8>,
        }
        assert!(json::<Known>(br#"{"a":1}"#).is_ok());
        for body in [format!(r#"{{"{}":1}}"#, "k".repeat(100_000)), format!(r#"{{"a":"{}"}}"#, "é".repeat(100_000))] {
            let problem = json::<Known>(body.as_bytes()).unwrap_err();
            assert!(problem.detail.ends_with('…') && problem.detail.chars().count() < 2 * WORDS_MAX, "{}", problem.detail.len());
        }
        assert!(!json::<Known>(b"{").unwrap_err().detail.ends_with('…'));
    }

    #[test]
    fn one_document_is_one() {
        let yaml = headers(&[("content-type", "application/yaml")]);
        assert!(document(&yaml, b"id: web\nrules: []\n").is_ok());
        assert!(document(&HeaderMap::new(), b"{\"id\":\"web\"}").is_ok());
        for (headers, body) in
            [(&yaml, &b"id: a\n---\nid: b\n"[..]), (&yaml, b""), (&HeaderMap::new(), b"id: web"), (&yaml, b"\xff")]
        {
            assert_eq!(document(headers, body).unwrap_err().status, 400);
        }
    }
}
