//! One connection: a socket, what is half received and what waits to be sent.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::encode::Outbound;
use super::parse::{Decoder, Frame, ParseError};

/// A connection with more than this to send is talking to a server that does not read: it ends instead of growing.
pub const OUTBOUND_BYTES_MAX: usize = 64 * 1024 * 1024;

/// One read takes at most this much. Large enough for a snapshot chunk and its headers in one go.
const READ_BYTES_MAX: usize = 128 * 1024;

thread_local! {
    /// Every connection reads into this and parses in place, so that ten thousand idle connections hold no buffers.
    static SCRATCH: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_BYTES_MAX]);
}

/// Who the client says it is.
#[derive(Clone, Default)]
pub enum Credentials {
    #[default]
    None,
    UserPassword {
        user: String,
        password: String,
    },
    /// A static key that the server's configuration lists.
    Nkey(Arc<nkeys::KeyPair>),
    /// A user JWT and the key it was issued for.
    Jwt {
        jwt: String,
        key: Arc<nkeys::KeyPair>,
    },
}

#[derive(Clone, Default)]
pub struct ConnectOptions {
    /// Shown in the server's connection list.
    pub name: String,
    pub credentials: Credentials,
}

#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("no TCP connection to {address}: {source}; is the server up, and is the file-descriptor limit high enough?")]
    Tcp { address: SocketAddr, source: io::Error },
    #[error("{address} sent no usable INFO line: is it a NATS server?")]
    NoInfo { address: SocketAddr },
    #[error("{address} asks for TLS, which this client does not speak: use a plain listener")]
    TlsRequired { address: SocketAddr },
    #[error("cannot sign the nonce of {address}: {reason}; check the key")]
    Sign { address: SocketAddr, reason: String },
    #[error("{address} refused the connection: {text}")]
    Refused { address: SocketAddr, text: String },
    #[error("the connection to {address} ended while it was set up: {reason}")]
    Closed { address: SocketAddr, reason: ClosedReason },
}

/// Why a connection is no longer usable.
#[derive(Debug, thiserror::Error)]
pub enum ClosedReason {
    #[error("the server closed the connection")]
    ByServer,
    #[error("the socket failed: {0}")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Protocol(#[from] ParseError),
    #[error("more than {OUTBOUND_BYTES_MAX} bytes wait to be sent: the server does not read")]
    OutboundFull,
}

/// The part of a server's INFO line this client acts on.
#[derive(serde::Deserialize)]
struct Info {
    #[serde(default)]
    nonce: String,
    #[serde(default)]
    tls_required: bool,
}

/// A connected client. Nothing happens on it unless it is polled; it owns no task and no buffer while it is idle.
pub struct Connection {
    stream: TcpStream,
    decoder: Decoder,
    outbound: Outbound,
    received_bytes: u64,
}

impl Connection {
    pub async fn connect(address: SocketAddr, options: &ConnectOptions) -> Result<Self, ConnectError> {
        let tcp = |source| ConnectError::Tcp { address, source };
        let stream = TcpStream::connect(address).await.map_err(tcp)?;
        stream.set_nodelay(true).map_err(tcp)?;
        let mut connection = Self { stream, decoder: Decoder::default(), outbound: Outbound::default(), received_bytes: 0 };
        let closed = |reason| ConnectError::Closed { address, reason };

        let mut info = None;
        connection
            .read_until(|frame| match frame {
                Frame::Info(json) => {
                    info = serde_json::from_str::<Info>(json).ok();
                    true
                }
                _ => false,
            })
            .await
            .map_err(closed)?;
        let info = info.ok_or(ConnectError::NoInfo { address })?;
        if info.tls_required {
            return Err(ConnectError::TlsRequired { address });
        }
        let connect = connect_json(options, &info.nonce).map_err(|reason| ConnectError::Sign { address, reason })?;
        connection.outbound.connect(&connect);
        connection.outbound.ping();
        connection.flush().await.map_err(closed)?;

        let mut refused = None;
        let answered = connection
            .read_until(|frame| match frame {
                Frame::Pong => true,
                Frame::Error(text) => {
                    refused = Some(text.to_owned());
                    true
                }
                _ => false,
            })
            .await;
        if let Some(text) = refused {
            return Err(ConnectError::Refused { address, text });
        }
        answered.map_err(closed)?;
        Ok(connection)
    }

    /// Where to write commands; [`Connection::flush`] or [`Connection::poll_write`] sends them.
    pub fn outbound(&mut self) -> &mut Outbound {
        &mut self.outbound
    }

    /// Every byte the socket has delivered, protocol included, since it was opened.
    pub fn received_bytes(&self) -> u64 {
        self.received_bytes
    }

    /// Waits until everything in [`Connection::outbound`] has been handed to the kernel.
    pub async fn flush(&mut self) -> Result<(), ClosedReason> {
        poll_fn(|cx| self.poll_write(cx)).await
    }

    /// Ready when nothing waits to be sent.
    pub fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClosedReason>> {
        while !self.outbound.pending().is_empty() {
            if self.outbound.pending().len() > OUTBOUND_BYTES_MAX {
                return Poll::Ready(Err(ClosedReason::OutboundFull));
            }
            let written = ready!(Pin::new(&mut self.stream).poll_write(cx, self.outbound.pending()))?;
            if written == 0 {
                return Poll::Ready(Err(ClosedReason::ByServer));
            }
            self.outbound.written(written);
        }
        Poll::Ready(Ok(()))
    }

    /// Ready when there is something to read, or an end to be found.
    pub fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.stream.poll_read_ready(cx).map(drop)
    }

    /// Reads once and hands every whole frame to `on_frame`, in wire order; PING is answered here. Safe to stop polling at any time.
    ///
    /// `on_frame` runs inside this call and must not poll another connection of the same thread.
    pub fn poll_frames(
        &mut self,
        cx: &mut Context<'_>,
        mut on_frame: impl FnMut(Frame<'_>, &mut Wire<'_>),
    ) -> Poll<Result<(), ClosedReason>> {
        SCRATCH.with_borrow_mut(|scratch| {
            let mut buffer = ReadBuf::new(scratch);
            ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer))?;
            let chunk = buffer.filled();
            if chunk.is_empty() {
                return Poll::Ready(Err(ClosedReason::ByServer));
            }
            self.received_bytes += chunk.len() as u64;
            let mut wire = Wire { outbound: &mut self.outbound, received_bytes: self.received_bytes };
            self.decoder.feed(chunk, |frame| match frame {
                Frame::Ping => wire.outbound.pong(),
                frame => on_frame(frame, &mut wire),
            })?;
            Poll::Ready(Ok(()))
        })
    }

    /// Reads until `is_last` says so. Frames behind that one in the same read are seen by `is_last` too, and lost: for the handshake.
    async fn read_until(&mut self, mut is_last: impl FnMut(Frame<'_>) -> bool) -> Result<(), ClosedReason> {
        let mut done = false;
        while !done {
            poll_fn(|cx| self.poll_frames(cx, |frame, _| done |= is_last(frame))).await?;
        }
        Ok(())
    }
}

/// What a callback may do with its connection.
pub struct Wire<'a> {
    pub outbound: &'a mut Outbound,
    /// See [`Connection::received_bytes`]; what was read together with the frame at hand is included.
    pub received_bytes: u64,
}

impl<'a> Wire<'a> {
    pub(super) fn of(connection: &'a mut Connection) -> Self {
        Self { received_bytes: connection.received_bytes, outbound: &mut connection.outbound }
    }
}

fn connect_json(options: &ConnectOptions, nonce: &str) -> Result<String, String> {
    let mut connect = serde_json::json!({
        "verbose": false,
        "pedantic": false,
        "tls_required": false,
        "name": options.name,
        "lang": "rust",
        "version": env!("CARGO_PKG_VERSION"),
        "protocol": 1,
        "echo": true,
        "headers": true,
        "no_responders": true,
    });
    let sign = |key: &nkeys::KeyPair| {
        key.sign(nonce.as_bytes()).map(|signature| base64_url(&signature)).map_err(|error| error.to_string())
    };
    match &options.credentials {
        Credentials::None => {}
        Credentials::UserPassword { user, password } => {
            connect["user"] = user.as_str().into();
            connect["pass"] = password.as_str().into();
        }
        Credentials::Nkey(key) => {
            connect["nkey"] = key.public_key().into();
            connect["sig"] = sign(key)?.into();
        }
        Credentials::Jwt { jwt, key } => {
            connect["jwt"] = jwt.as_str().into();
            connect["sig"] = sign(key)?.into();
        }
    }
    Ok(connect.to_string())
}

/// URL-safe base64 without padding, as the server expects signatures: too little to bring a crate for.
fn base64_url(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let bits = group.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for at in 0..=group.len() {
            text.push(char::from(ALPHABET[(bits >> (18 - 6 * at)) as usize & 63]));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::base64_url;

    #[test]
    fn base64_of_every_tail_length() {
        for (bytes, text) in
            [(&b""[..], ""), (b"f", "Zg"), (b"fo", "Zm8"), (b"foo", "Zm9v"), (b"foob", "Zm9vYg"), (b"\xfb\xff", "-_8")]
        {
            assert_eq!(base64_url(bytes), text);
        }
    }
}
