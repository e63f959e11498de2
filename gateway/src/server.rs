//! Takes connections: a bounded number of them, with or without TLS, and none that does not keep up.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::http::Request;
use groupcast_bus_config::accepting::Accepting;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsAcceptor;

use crate::doors::Proxies;
use crate::shares::{Limits, Shares};

/// Connections at once; further ones wait to be accepted.
pub const CONNECTIONS_MAX: usize = 2_048;
/// Connections of one address; further ones are closed at once. A trusted proxy speaks for many, and has as many as there are.
pub const ADDRESS_CONNECTIONS_MAX: usize = 512;
/// How long a client may take for the TLS handshake.
pub const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
/// How long a client may take to send the head of a request, and may stay between two.
pub const HEAD_DEADLINE: Duration = Duration::from_secs(30);
/// Longest head of a request, which anybody may send.
pub const HEAD_BYTES_MAX: usize = 64 * 1024;
/// A client that takes nothing for so long is cut off.
pub const STALL_MAX: Duration = Duration::from_secs(30);
/// How long requests in flight may take to end when the process is told to.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// A connection whose writes fail when nothing of them is taken for [`STALL_MAX`].
struct Patient<T> {
    inner: T,
    stall: Option<Pin<Box<Sleep>>>,
}

impl<T> Patient<T> {
    fn new(inner: T) -> Self {
        Self { inner, stall: None }
    }

    fn judge<R>(&mut self, outcome: Poll<io::Result<R>>, context: &mut Context<'_>) -> Poll<io::Result<R>> {
        if outcome.is_ready() {
            self.stall = None;
            return outcome;
        }
        let stall = self.stall.get_or_insert_with(|| Box::pin(tokio::time::sleep(STALL_MAX)));
        match stall.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing"))),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Patient<T> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Patient<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.judge(outcome, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_flush(context);
        self.judge(outcome, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outcome = Pin::new(&mut self.inner).poll_shutdown(context);
        self.judge(outcome, context)
    }
}

/// Waits until it is told to end, or nobody can tell any more.
async fn told(end: &mut watch::Receiver<bool>) {
    let _ = end.wait_for(|end| *end).await;
}

#[derive(Debug, thiserror::Error)]
pub enum NoListener {
    #[error("cannot listen on {address}: another program has the port; `ss -ltnp 'sport = :{}'` names it, or choose another port", address.port())]
    Taken { address: SocketAddr },
    #[error("cannot listen on {address}: this machine does not have the address; 0.0.0.0 and [::] stand for all that it has")]
    NotHere { address: SocketAddr },
    #[error("cannot listen on {address}: {source}")]
    Otherwise { address: SocketAddr, source: std::io::Error },
}

/// Listens, or says what to do about it.
pub async fn listening(address: SocketAddr) -> Result<TcpListener, NoListener> {
    TcpListener::bind(address).await.map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => NoListener::Taken { address },
        std::io::ErrorKind::AddrNotAvailable => NoListener::NotHere { address },
        _ => NoListener::Otherwise { address, source },
    })
}

/// Serves until `end` says so, then lets requests in flight finish.
pub async fn serve(
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Router,
    proxies: Proxies,
    end: watch::Receiver<bool>,
) {
    let most = Most { connections: CONNECTIONS_MAX, of_address: ADDRESS_CONNECTIONS_MAX, proxies };
    serve_at_most(most, listener, tls, router, end).await;
}

/// Connections at once, and of one address that is not a proxy's.
pub struct Most {
    pub connections: usize,
    pub of_address: usize,
    pub proxies: Proxies,
}

pub async fn serve_at_most(
    most: Most,
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    router: Router,
    mut end: watch::Receiver<bool>,
) {
    let connections_max = most.connections;
    let connections = Arc::new(Semaphore::new(connections_max));
    let mut accepting = Accepting::new("the API");
    let shares = Shares::new(Limits { total: connections_max, token: connections_max, address: most.of_address });
    loop {
        let permit = tokio::select! {
            permit = connections.clone().acquire_owned() => permit,
            () = told(&mut end) => break,
        };
        let Ok(permit) = permit else { break };
        let (stream, peer) = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    accepting.failed(&error).await;
                    continue;
                }
            },
            () = told(&mut end) => break,
        };
        let share = match most.proxies.trust(peer.ip()) {
            true => None,
            false => match shares.take("", peer.ip()) {
                Ok(share) => Some(share),
                Err(full) => {
                    metrics::counter!("groupcast_http_connections_refused_total").increment(1);
                    tracing::debug!(%peer, ?full, "a connection was refused");
                    continue;
                }
            },
        };
        let (tls, router, end) = (tls.clone(), router.clone(), end.clone());
        tokio::spawn(async move {
            connection(stream, peer, tls, router, end).await;
            drop((permit, share));
        });
    }
    let all = connections.acquire_many(connections_max as u32);
    if tokio::time::timeout(DRAIN_DEADLINE, all).await.is_err() {
        tracing::warn!("some requests were still in flight at the end");
    }
}

async fn connection(stream: TcpStream, peer: SocketAddr, tls: Option<TlsAcceptor>, router: Router, end: watch::Receiver<bool>) {
    let _ = stream.set_nodelay(true); // slower without, no more
    let stream = Patient::new(stream);
    match tls {
        None => speak(stream, peer, router, end).await,
        Some(tls) => match tokio::time::timeout(HANDSHAKE_DEADLINE, tls.accept(stream)).await {
            Ok(Ok(stream)) => speak(stream, peer, router, end).await,
            Ok(Err(error)) => tracing::debug!(%peer, %error, "no TLS"),
            Err(_) => tracing::debug!(%peer, "no TLS in time"),
        },
    }
}

async fn speak<T>(stream: T, peer: SocketAddr, router: Router, mut end: watch::Receiver<bool>)
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(ConnectInfo(peer));
        let router = router.clone();
        async move { tower_service::Service::call(&mut router.clone(), request).await }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_DEADLINE).max_buf_size(HEAD_BYTES_MAX);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = told(&mut end) => {
            connection.as_mut().graceful_shutdown();
            let deadline = Instant::now() + DRAIN_DEADLINE;
            match tokio::time::timeout_at(deadline, connection).await {
                Ok(outcome) => outcome,
                Err(_) => return,
            }
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%peer, %error, "a connection ended");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const LONG: usize = 1024 * 1024;

    fn router() -> Router {
        Router::new().route("/", get(|| async { "hello" })).route("/long", get(|| async { "x".repeat(LONG) }))
    }

    fn request(path: &str) -> Vec<u8> {
        format!("GET {path} HTTP/1.1\r\nHost: here\r\n\r\n").into_bytes()
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_nothing_is_cut_off() {
        let (near, mut far) = tokio::io::duplex(1024);
        let (_end, ended) = watch::channel(false);
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let spoken = tokio::spawn(speak(Patient::new(near), peer, router(), ended));
        far.write_all(&request("/long")).await.unwrap();
        let start = Instant::now();
        spoken.await.unwrap();
        let waited = start.elapsed();
        assert!(waited >= STALL_MAX && waited < STALL_MAX + Duration::from_secs(1), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_is_slow_gets_everything() {
        let (near, mut far) = tokio::io::duplex(1024);
        let (_end, ended) = watch::channel(false);
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let spoken = tokio::spawn(speak(Patient::new(near), peer, router(), ended));
        far.write_all(&request("/long")).await.unwrap();
        let (mut taken, mut buffer) = (0, [0; 64 * 1024]);
        while taken < LONG {
            tokio::time::sleep(STALL_MAX - Duration::from_secs(1)).await;
            let read = far.read(&mut buffer).await.unwrap();
            assert_ne!(read, 0, "cut off after {taken} bytes");
            taken += read;
        }
        drop(far);
        spoken.await.unwrap();
    }

    #[tokio::test]
    async fn an_address_that_has_its_share_gets_no_more_and_takes_nobody_elses() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_end, ended) = watch::channel(false);
        let most = Most { connections: 10, of_address: 2, proxies: Proxies::default() };
        tokio::spawn(serve_at_most(most, listener, None, router(), ended));
        let from = async |last: u8| {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind(SocketAddr::from(([127, 0, 0, last], 0))).unwrap();
            let mut stream = socket.connect(address).await.unwrap();
            let _ = stream.write_all(&request("/")).await; // it may be closed already
            let answered = stream.read(&mut [0; 1024]).await.is_ok_and(|read| read > 0);
            (stream, answered)
        };
        let held = [from(1).await, from(1).await];
        assert!(held.iter().all(|(_, answered)| *answered));
        assert!(!from(1).await.1, "a third of the same address");
        assert!(from(2).await.1, "the first of another");
    }

    #[tokio::test]
    async fn connections_beyond_the_bound_wait_for_their_turn() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (_end, ended) = watch::channel(false);
        let most = Most { connections: 2, of_address: 2, proxies: Proxies::default() };
        tokio::spawn(serve_at_most(most, listener, None, router(), ended));
        let mut open = Vec::new();
        for _ in 0..2 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(&request("/")).await.unwrap();
            assert!(stream.read(&mut [0; 1024]).await.unwrap() > 0);
            open.push(stream);
        }
        let mut third = TcpStream::connect(address).await.unwrap();
        third.write_all(&request("/")).await.unwrap();
        let mut answer = [0; 1024];
        let waited = tokio::time::timeout(Duration::from_millis(200), third.read(&mut answer)).await;
        assert!(waited.is_err(), "answered beside two others");
        drop(open.pop());
        assert!(third.read(&mut answer).await.unwrap() > 0);
    }
}
