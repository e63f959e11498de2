//! What a conversation with a source needs of the world. The real one is [`http`](super::http); tests bring servers of their own.

use std::future::Future;
use std::io::Read;
use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    Api,
    /// Where a Cloud Controller says when groups last changed, with mutual TLS.
    Internal,
    /// Where tokens come from.
    Login,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Get,
    Post,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub endpoint: Endpoint,
    pub method: Method,
    /// Path and query.
    pub path: String,
    pub headers: Vec<(&'static str, String)>,
    /// Its type, and what it says.
    pub body: Option<(&'static str, String)>,
}

impl Request {
    pub fn get(endpoint: Endpoint, path: String) -> Self {
        Self { endpoint, method: Method::Get, path, headers: Vec::new(), body: None }
    }
}

/// What comes before an answer's body.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Head {
    pub status: u16,
    pub retry_after: Option<Duration>,
    /// `X-Subject-Token`, where Keystone puts a token.
    pub subject_token: Option<String>,
}

pub trait Transport: Send + Sync + 'static {
    /// Sends a request and has the answer's body read as it comes. An error says why there was no whole answer.
    fn exchange<T: Send + 'static>(
        &self,
        request: Request,
        read: impl FnOnce(Head, &mut dyn Read) -> T + Send + 'static,
    ) -> impl Future<Output = Result<T, String>> + Send;

    fn pause(&self, time: Duration) -> impl Future<Output = ()> + Send;

    /// Since some moment; never goes back.
    fn now(&self) -> Duration;
}
