//! A model behind HTTP.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use axum::body::{Body, Bytes};
use groupcast_bus_config::accepting::Accepting;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::{Call, Fake, Fault, Manner, Reply};

/// Longest request that is read.
const REQUEST_BYTES_MAX: usize = 16 * 1024 * 1024;

/// Spoils an answer.
pub fn upset(reply: Reply, fault: Option<&Fault>) -> Reply {
    match fault {
        None | Some(Fault::Null | Fault::Revoke | Fault::Repeat | Fault::Empty) => reply,
        Some(Fault::Until { status, seconds }) => {
            let reply = Reply { status: *status, body: b"{\"error\":\"on demand\"}".to_vec(), ..Reply::default() };
            let at = SystemTime::now() + Duration::from_secs(*seconds);
            reply.with("retry-after", httpdate::fmt_http_date(at))
        }
        Some(Fault::Huge { bytes }) => Reply { status: 200, body: huge(*bytes), ..Reply::default() },
        Some(Fault::Status { status, retry_after }) => {
            let reply = Reply { status: *status, body: b"{\"error\":\"on demand\"}".to_vec(), ..Reply::default() };
            retry_after.map_or(reply.clone(), |seconds| reply.with("retry-after", seconds))
        }
        Some(Fault::Hang) => Reply { manner: Manner::Hanging, ..reply },
        Some(Fault::Truncate) => Reply { manner: Manner::Truncated, ..reply },
        Some(Fault::Body(text)) => Reply { status: 200, body: text.clone().into_bytes(), ..Reply::default() },
    }
}

/// A page of a Cloud Controller with one group, whose rules take so many bytes.
fn huge(bytes: usize) -> Vec<u8> {
    let rule = br#"{"protocol":"tcp","destination":"10.0.0.0/24","ports":"443"},"#;
    let mut body = Vec::with_capacity(bytes + 1_024);
    body.extend(br#"{"pagination":{"total_results":1,"next":null},"resources":[{"guid":"huge","name":"huge","rules":["#);
    while body.len() < bytes {
        body.extend(rule);
    }
    body.pop(); // the last comma
    body.extend(br#"],"globally_enabled":{},"relationships":{}}]}"#);
    body
}

/// A model that several addresses serve.
pub struct Shared<F> {
    fake: Arc<Mutex<F>>,
    begun: Instant,
}

impl<F> Clone for Shared<F> {
    fn clone(&self) -> Self {
        Self { fake: self.fake.clone(), begun: self.begun }
    }
}

impl<F: Fake> Shared<F> {
    pub fn new(fake: F) -> Self {
        Self { fake: Arc::new(Mutex::new(fake)), begun: Instant::now() }
    }

    pub fn lock(&self) -> MutexGuard<'_, F> {
        self.fake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn handle(&self, call: &Call) -> Reply {
        let since = self.begun.elapsed();
        self.lock().handle(call, since)
    }
}

/// Serves until dropped.
pub struct Server {
    pub address: SocketAddr,
    pub tls: bool,
    task: tokio::task::JoinHandle<()>,
}

impl Server {
    pub async fn start<F: Fake>(port: u16, tls: Option<TlsAcceptor>, internal: bool, shared: Shared<F>) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.with_context(|| format!("cannot listen on port {port}"))?;
        let (address, secure) = (listener.local_addr()?, tls.is_some());
        Ok(Self { address, tls: secure, task: tokio::spawn(accept(listener, tls, internal, shared)) })
    }

    pub fn url(&self) -> String {
        format!("{}://localhost:{}", if self.tls { "https" } else { "http" }, self.address.port())
    }

    /// Until it ends by itself, which it does not.
    pub async fn ended(mut self) {
        let _ = (&mut self.task).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept<F: Fake>(listener: TcpListener, tls: Option<TlsAcceptor>, internal: bool, shared: Shared<F>) {
    // Ends its connections when it is dropped itself.
    let mut connections = JoinSet::new();
    let mut accepting = Accepting::new("a fake");
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                accepting.failed(&error).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true); // only slower without
        while connections.try_join_next().is_some() {}
        let (tls, shared) = (tls.clone(), shared.clone());
        connections.spawn(async move {
            match tls {
                None => talk(stream, internal, shared).await,
                Some(tls) => {
                    if let Ok(stream) = tls.accept(stream).await {
                        talk(stream, internal, shared).await;
                    }
                }
            }
        });
    }
}

async fn talk<F: Fake>(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, internal: bool, shared: Shared<F>) {
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(answer(request, internal, &shared).await) }
    });
    // A client that goes away is no concern of ours.
    let _ = hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn answer<F: Fake>(request: hyper::Request<Incoming>, internal: bool, shared: &Shared<F>) -> hyper::Response<Body> {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(Body::new(body), REQUEST_BYTES_MAX).await.unwrap_or_default();
    let target = head.uri.path_and_query().map_or("/", |target| target.as_str());
    let text = |value: &hyper::header::HeaderValue| value.to_str().unwrap_or_default().to_owned();
    let headers = head.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect();
    let call = Call { method: head.method.to_string(), headers, body: body.to_vec(), internal, ..Call::get(target) };
    let reply = shared.handle(&call);
    let mut response = hyper::Response::builder().status(reply.status).header("content-type", "application/json");
    for (name, value) in &reply.headers {
        response = response.header(*name, value);
    }
    let body = match reply.manner {
        Manner::Whole => Body::from(reply.body),
        Manner::Truncated => {
            let half = Bytes::copy_from_slice(&reply.body[..reply.body.len() / 2]);
            let broken = std::io::Error::other("on demand");
            Body::from_stream(futures::stream::iter([Ok(half), Err(broken)]))
        }
        Manner::Hanging => {
            // Longer than anybody waits; ends with the connection.
            tokio::time::sleep(Duration::from_secs(3_600)).await;
            Body::empty()
        }
    };
    response.body(body).unwrap_or_default()
}
