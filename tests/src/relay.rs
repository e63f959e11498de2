//! A relay in front of a server, for one client: while it is stalled, bytes in either direction wait in it, and nobody notices.

use std::net::Ipv4Addr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

pub struct Relay {
    port: u16,
    open: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

impl Relay {
    pub async fn to(port: u16) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let own = listener.local_addr().expect("an address").port();
        let open = watch::Sender::new(true);
        let states = open.clone();
        let task = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                if let Ok(far) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await {
                    let _ = (near.set_nodelay(true), far.set_nodelay(true));
                    let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
                    tokio::spawn(carry(near_in, far_out, states.subscribe()));
                    tokio::spawn(carry(far_in, near_out, states.subscribe()));
                }
            }
        });
        Self { port: own, open, task }
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub fn stall(&self) {
        self.open.send_replace(false);
    }

    pub fn resume(&self) {
        self.open.send_replace(true);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// In small pieces, so that a stall falls between any two bytes.
async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut open: watch::Receiver<bool>) -> Option<()> {
    let mut buffer = [0; 1_000];
    loop {
        let read = from.read(&mut buffer).await.ok().filter(|read| *read > 0)?;
        open.wait_for(|open| *open).await.ok()?;
        to.write_all(&buffer[..read]).await.ok()?;
    }
}
