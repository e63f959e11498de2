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
use crate::problem::Problem;

/// One document: YAML is longer than what is stored.
pub const SMALL_BYTES_MAX: usize = 2 * DOCUMENT_BYTES_MAX;
/// A change or an import.
pub const LARGE_BYTES_MAX: usize = 64 * 1024 * 1024;
/// What is read of a body that is too long, before the connection is closed on it.
pub const DRAINED_BYTES_MAX: usize = 2 * LARGE_BYTES_MAX;
/// How long a client may take to send it.
pub const BODY_DEADLINE: Duration = Duration::from_secs(60);

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
pub async fn read(app: &App, body: Body, headers: &HeaderMap, max: usize) -> Result<Bytes, Problem> {
    let said = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()).and_then(|l| l.parse::<usize>().ok());
    let is_small = said.is_some_and(|length| length <= SMALL_BYTES_MAX) || max <= SMALL_BYTES_MAX;
    let _permit = match is_small {
        true => None,
        false => Some(app.large_bodies.acquire().await.map_err(|_| Problem::unavailable("this gateway ends"))?),
    };
    match tokio::time::timeout(BODY_DEADLINE, at_most(body, said, max)).await {
        Err(_) => Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "slow", "the body did not arrive in time: send it again")),
        Ok(outcome) => outcome,
    }
}

async fn at_most(body: Body, said: Option<usize>, max: usize) -> Result<Bytes, Problem> {
    let mut parts = body.into_data_stream();
    let (mut kept, mut length) = (Vec::new(), said.filter(|said| *said > max).map_or(0, |_| max.saturating_add(1)));
    while let Some(part) = parts.next().await {
        let part = part.map_err(|error| Problem::bad_request(format!("the body cannot be read: {error}")))?;
        length = length.saturating_add(part.len());
        match length {
            _ if length <= max => kept.extend_from_slice(&part),
            _ if length <= DRAINED_BYTES_MAX => kept = Vec::new(),
            _ => break,
        }
    }
    if length > max { Err(Problem::too_large(format!("the body is longer than {max} bytes: split it"))) } else { Ok(kept.into()) }
}

pub fn json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(bytes).map_err(|error| Problem::bad_request(format!("the body is not what this route takes: {error}")))
}

/// The one document of a body: JSON, or YAML where the content type says so.
pub fn document(headers: &HeaderMap, bytes: &[u8]) -> Result<Node, Problem> {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let format = if kind.contains("yaml") { Format::Yaml } else { Format::Json };
    let text = std::str::from_utf8(bytes).map_err(|_| Problem::bad_request("the body is not UTF-8"))?;
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

    #[test]
    fn a_key_is_bounded() {
        assert_eq!(key(&headers(&[])), Ok(None));
        let longest = "k".repeat(CLIENT_KEY_BYTES_MAX);
        assert_eq!(key(&headers(&[("idempotency-key", &longest)])), Ok(Some(longest.clone())));
        assert!(key(&headers(&[("idempotency-key", &format!("{longest}k"))])).is_err());
        assert!(key(&headers(&[("idempotency-key", "")])).is_err());
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
