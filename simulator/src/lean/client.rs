//! A connection used by hand: send, then ask for the next message. For benchmarks, tests and tools; fleets use [`super::spawn`].

use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;

use bytes::Bytes;

use super::connection::{ClosedReason, ConnectError, ConnectOptions, Connection};
use super::encode::Outbound;
use super::parse::{Frame, Headers, MessageFrame};

/// A message that outlives the buffer it was read into.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    pub subject: String,
    pub sid: u64,
    pub reply: Option<String>,
    header_block: Bytes,
    pub payload: Bytes,
}

impl Message {
    pub fn headers(&self) -> Headers<'_> {
        Headers::trusted(&self.header_block)
    }
}

impl From<MessageFrame<'_>> for Message {
    fn from(frame: MessageFrame<'_>) -> Self {
        Self {
            subject: frame.subject.to_owned(),
            sid: frame.sid,
            reply: frame.reply.map(str::to_owned),
            header_block: Bytes::copy_from_slice(frame.headers.raw()),
            payload: Bytes::copy_from_slice(frame.payload),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error(transparent)]
    Closed(#[from] ClosedReason),
    #[error("the server reports: {0}")]
    Server(String),
    #[error("nobody answers requests on {0}")]
    NoResponders(String),
}

/// One connection and the messages of its last read. It reads only when asked to, so a caller that stops asking is the slow reader
/// that the server sees: nothing piles up here.
pub struct Client {
    connection: Connection,
    received: VecDeque<Result<Message, String>>,
    pongs: u64,
    pings: u64,
    next_sid: u64,
    inbox: Option<Inbox>,
}

struct Inbox {
    prefix: String,
    requests: u64,
}

static INBOXES: AtomicU64 = AtomicU64::new(0);

impl Client {
    pub async fn connect(address: SocketAddr, options: &ConnectOptions) -> Result<Self, ConnectError> {
        let connection = Connection::connect(address, options).await?;
        Ok(Self { connection, received: VecDeque::new(), pongs: 0, pings: 0, next_sid: 1, inbox: None })
    }

    /// For commands beside the ones below; [`Client::flush`] sends them.
    pub fn outbound(&mut self) -> &mut Outbound {
        self.connection.outbound()
    }

    /// Hands what waits to the kernel, without asking the server whether it has arrived.
    pub async fn send(&mut self) -> Result<(), ClientError> {
        Ok(self.connection.flush().await?)
    }

    pub fn received_bytes(&self) -> u64 {
        self.connection.received_bytes()
    }

    /// The number that messages of this subscription will carry.
    pub fn subscribe(&mut self, subject: &str) -> u64 {
        let sid = self.next_sid;
        self.next_sid += 1;
        self.connection.outbound().subscribe(subject, sid);
        sid
    }

    /// Sends what waits, and returns when the server has processed it. Messages that arrive meanwhile are kept for [`Client::next`].
    pub async fn flush(&mut self) -> Result<(), ClientError> {
        self.connection.outbound().ping();
        self.pings += 1;
        let sent = self.pings;
        self.connection.flush().await?;
        while self.pongs < sent {
            self.read_once().await?;
        }
        Ok(())
    }

    /// The next message in wire order, whatever its subject. An error the server reports comes in its place in that order.
    pub async fn next(&mut self) -> Result<Message, ClientError> {
        loop {
            if let Some(received) = self.received.pop_front() {
                return received.map_err(ClientError::Server);
            }
            self.read_once().await?;
        }
    }

    /// Sends one request and waits for its answer; other messages are kept, in order, for [`Client::next`].
    pub async fn request(&mut self, subject: &str, headers: &[(&str, &str)], payload: &[u8]) -> Result<Message, ClientError> {
        let reply = self.reply_subject();
        if headers.is_empty() {
            self.connection.outbound().publish(subject, Some(&reply), payload);
        } else {
            self.connection.outbound().publish_with_headers(subject, Some(&reply), headers, payload);
        }
        let mut looked_at = 0;
        loop {
            while looked_at < self.received.len() {
                if matches!(&self.received[looked_at], Ok(message) if message.subject == reply)
                    && let Some(Ok(answer)) = self.received.remove(looked_at)
                {
                    return match answer.headers().status() {
                        Some(503) if answer.payload.is_empty() => Err(ClientError::NoResponders(subject.to_owned())),
                        _ => Ok(answer),
                    };
                }
                looked_at += 1;
            }
            self.read_once().await?;
        }
    }

    /// A fresh reply subject that this client listens on.
    pub fn reply_subject(&mut self) -> String {
        let mut inbox = match self.inbox.take() {
            Some(inbox) => inbox,
            None => {
                // Unique among the clients of this machine, which is all that loopback needs.
                let prefix = format!("_INBOX.{}-{}", std::process::id(), INBOXES.fetch_add(1, Ordering::Relaxed));
                self.subscribe(&format!("{prefix}.*"));
                Inbox { prefix, requests: 0 }
            }
        };
        inbox.requests += 1;
        let subject = format!("{}.{}", inbox.prefix, inbox.requests);
        self.inbox = Some(inbox);
        subject
    }

    async fn read_once(&mut self) -> Result<(), ClosedReason> {
        let Self { connection, received, pongs, .. } = self;
        poll_fn(|cx| {
            // What waits to be sent (a PONG, a request) goes out first; if the socket is full, reading goes on meanwhile.
            if let Poll::Ready(Err(reason)) = connection.poll_write(cx) {
                return Poll::Ready(Err(reason));
            }
            connection.poll_frames(cx, |frame, _| match frame {
                Frame::Message(message) => received.push_back(Ok(message.into())),
                Frame::Error(text) => received.push_back(Err(text.to_owned())),
                Frame::Pong => *pongs += 1,
                Frame::Info(_) | Frame::Ok | Frame::Ping => {}
            })
        })
        .await
    }
}
