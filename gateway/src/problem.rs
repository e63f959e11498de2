//! What is wrong, as RFC 9457 has it: all errors of a request at once, each with document, rule and field.

use std::collections::BTreeMap;

use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use groupcast_control::catalog;
use groupcast_control::change::Invalid;
use groupcast_control::log::NoAnswer;
use groupcast_policy::meaning::Exceeded;
use groupcast_policy::written;
use serde::{Deserialize, Serialize};
use utoipa::openapi::{self, RefOr};
use utoipa::{IntoResponses, ToSchema};

use crate::{heavy, plan};

/// The kind of what a gateway answers that has not read the streams: whatever was asked, nothing was done about it.
pub const STILL_READING: &str = "reading";
pub const CONTENT_TYPE: &str = "application/problem+json";

/// One thing that is wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Item {
    /// Kind and id, or where in the request it stands.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub document: String,
    /// Index of the rule, from 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<usize>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub field: String,
    /// What is wrong and what would be right.
    pub detail: String,
}

impl From<written::Problem> for Item {
    fn from(problem: written::Problem) -> Self {
        let written::Problem { document, rule, field, message, .. } = problem;
        Self { document, rule, field, detail: message }
    }
}

/// Problem details (RFC 9457).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Names the kind of problem: `urn:groupcast:problem:` and a word.
    #[serde(rename = "type")]
    pub kind: String,
    pub title: String,
    pub status: u16,
    pub detail: String,
    /// Everything that is wrong with the request.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<Item>,
    /// Seconds after which to try again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<u64>,
}

impl Problem {
    pub fn new(status: StatusCode, word: &str, detail: impl Into<String>) -> Self {
        Self {
            kind: format!("urn:groupcast:problem:{word}"),
            title: status.canonical_reason().unwrap_or("Problem").to_owned(),
            status: status.as_u16(),
            detail: detail.into(),
            errors: Vec::new(),
            retry_after: None,
        }
    }

    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad-request", detail)
    }

    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not-found", detail)
    }

    pub fn conflict(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "conflict", detail)
    }

    pub fn stale(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::PRECONDITION_FAILED, "stale", detail)
    }

    pub fn forbidden(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "forbidden", detail)
    }

    pub fn too_large(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too-large", detail)
    }

    pub fn unavailable(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", detail).retry_after(1)
    }

    /// Nothing was done, and will be when the streams are read.
    pub fn reading(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, STILL_READING, detail).retry_after(1)
    }

    pub fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds);
        self
    }

    pub fn with(mut self, errors: impl IntoIterator<Item = impl Into<Item>>) -> Self {
        self.errors.extend(errors.into_iter().map(Into::into));
        self
    }

    /// Problems of documents: the gravest says how the request is answered.
    pub fn of_documents(problems: Vec<written::Problem>) -> Self {
        let count = problems.len();
        let fault = problems.iter().map(|problem| problem.fault).max().unwrap_or(written::Fault::Invalid);
        let detail = match problems.first() {
            Some(first) if count == 1 => first.to_string(),
            Some(first) => format!("{first}; and {} more", count - 1),
            None => "the request cannot be taken".to_owned(),
        };
        let problem = match fault {
            written::Fault::Invalid => Self::new(StatusCode::BAD_REQUEST, "invalid-document", detail),
            written::Fault::Unknown => Self::not_found(detail),
            written::Fault::Conflict => Self::conflict(detail),
        };
        problem.with(problems)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_string(&self).unwrap_or_default();
        let mut response = (status, [(header::CONTENT_TYPE, CONTENT_TYPE)], body).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if status == StatusCode::UNAUTHORIZED {
            let bearer = (header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"groupcast\""));
            let (name, value): (HeaderName, HeaderValue) = bearer;
            response.headers_mut().insert(name, value);
        }
        response
    }
}

impl From<plan::NoPlan> for Problem {
    fn from(error: plan::NoPlan) -> Self {
        match error {
            plan::NoPlan::TooMany { .. } => Self::too_large(error.to_string()),
            plan::NoPlan::TooComplex(Exceeded::Stopped) => heavy::too_long(),
            plan::NoPlan::TooComplex(_) => Self::new(StatusCode::UNPROCESSABLE_ENTITY, "too-complex", error.to_string()),
        }
    }
}

impl From<NoAnswer> for Problem {
    fn from(error: NoAnswer) -> Self {
        Self::unavailable(error.to_string())
    }
}

impl From<Invalid> for Problem {
    fn from(invalid: Invalid) -> Self {
        let detail = invalid.to_string();
        match invalid {
            Invalid::Contradicts(problems) => Self::of_documents(problems),
            Invalid::Empty | Invalid::Twice { .. } | Invalid::Field { .. } | Invalid::NotWritable { .. } => {
                Self::bad_request(detail)
            }
            // More than a message, a batch or a change can hold.
            _ => Self::too_large(detail),
        }
    }
}

impl From<catalog::Error> for Problem {
    fn from(error: catalog::Error) -> Self {
        use catalog::Error;
        let detail = error.to_string();
        match error {
            Error::Invalid(invalid) => invalid.into(),
            Error::Refused(_) => Self::new(StatusCode::BAD_GATEWAY, "refused-by-bus", detail),
            Error::Unknown { .. } => Self::new(StatusCode::GATEWAY_TIMEOUT, "unknown-outcome", detail).retry_after(1),
            Error::Conflict { name, .. } | Error::Gone { name, .. } => {
                Self::stale(detail.clone()).with([Item { document: quoted(&name), detail, ..Item::default() }])
            }
            Error::KeyReused { .. } => Self::new(StatusCode::UNPROCESSABLE_ENTITY, "key-reused", detail),
            Error::UnknownChange(_) => Self::not_found(detail),
            Error::TooOld { .. } | Error::Unreadable(_) | Error::Forgotten { .. } => Self::conflict(detail),
            // Nobody answers, or the bus is busy.
            _ => Self::unavailable(detail),
        }
    }
}

/// A document as problems name it.
pub fn quoted(name: &groupcast_control::document::Name) -> String {
    format!("{} \"{}\"", name.kind.as_str(), name.id())
}

/// The problems that a family of routes may answer with, for the OpenAPI document.
fn problems(statuses: &[(u16, &str)]) -> BTreeMap<String, RefOr<openapi::Response>> {
    let one = |(status, description): &(u16, &str)| {
        let schema = openapi::Ref::from_schema_name("Problem");
        let content = openapi::content::ContentBuilder::new().schema(Some(schema)).build();
        let response = openapi::ResponseBuilder::new().description(*description).content(CONTENT_TYPE, content).build();
        (status.to_string(), RefOr::T(response))
    };
    statuses.iter().map(one).collect()
}

const READING: [(u16, &str); 4] = [
    (400, "A parameter is wrong"),
    (401, "No token, or one that is not good"),
    (429, "Too many attempts with a token that is not good"),
    (503, "The bus cannot be reached, or too much is asked at once"),
];

/// What a request that only reads may be refused with.
pub struct Reading;

impl IntoResponses for Reading {
    fn responses() -> BTreeMap<String, RefOr<openapi::Response>> {
        problems(&READING)
    }
}

/// What a request that reads one thing may be refused with.
pub struct ReadingOne;

impl IntoResponses for ReadingOne {
    fn responses() -> BTreeMap<String, RefOr<openapi::Response>> {
        let mut all = problems(&READING);
        all.extend(problems(&[(404, "There is none of that name")]));
        all
    }
}

/// What a request that writes may be refused with.
pub struct Writing;

impl IntoResponses for Writing {
    fn responses() -> BTreeMap<String, RefOr<openapi::Response>> {
        let mut all = ReadingOne::responses();
        all.extend(problems(&[
            (403, "The token may not do that, or its scope does not go so far"),
            (408, "The body did not arrive in time"),
            (409, "It contradicts what else exists, or belongs to a source"),
            (412, "Somebody has changed it meanwhile, or the plan is stale; the problem says who and when"),
            (413, "Too large"),
            (422, "The Idempotency-Key was used for another change, or it takes too much to say what the change would mean"),
            (502, "The bus refused it"),
            (504, "It is not known whether it was written: repeat it with the same Idempotency-Key"),
        ]));
        all
    }
}
