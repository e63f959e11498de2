//! A place between a client and its bus where a message is held back: the client may die meanwhile, and what it said arrives all the
//! same, or never.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::protocol::{Frames, stand_between};
use crate::world::eventually;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum Order {
    #[default]
    Pass,
    /// From the first message on whose subject begins so; what the same connection sends after it waits behind it.
    Hold(String),
    /// What is held never arrives, and its connection ends.
    Drop,
}

pub struct Hold {
    port: u16,
    order: watch::Sender<Order>,
    /// The subjects of the messages at which connections are held.
    held: watch::Sender<Vec<String>>,
    task: JoinHandle<()>,
}

impl Hold {
    pub async fn to(url: &str) -> Self {
        let (order, held) = (watch::Sender::new(Order::default()), watch::Sender::new(Vec::new()));
        let (orders, holds) = (order.clone(), held.clone());
        let (port, task) = stand_between(url, move |(near_in, far_out), (mut far_in, mut near_out)| {
            tokio::spawn(pass(near_in, far_out, orders.subscribe(), holds.clone()));
            tokio::spawn(async move { tokio::io::copy(&mut far_in, &mut near_out).await });
        })
        .await;
        Self { port, order, held, task }
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// Holds messages to subjects that begin so.
    pub fn hold(&self, prefix: &str) {
        self.held.send_replace(Vec::new());
        self.order.send_replace(Order::Hold(prefix.to_owned()));
    }

    /// Waits until one is held.
    pub async fn holds(&self) {
        eventually("a message is held", || async { !self.held.borrow().is_empty() }).await;
    }

    /// What is held arrives now, and everything passes.
    pub fn release(&self) {
        self.order.send_replace(Order::Pass);
    }

    /// What is held never arrives; connections that come afterwards pass.
    pub fn forget(&self) {
        self.order.send_replace(Order::Drop);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn pass(
    mut from: impl AsyncReadExt + Unpin,
    mut to: impl AsyncWriteExt + Unpin,
    mut orders: watch::Receiver<Order>,
    held: watch::Sender<Vec<String>>,
) -> Option<()> {
    let (mut buffer, mut frames) = (vec![0; 64 * 1024], Frames::default());
    loop {
        let read = from.read(&mut buffer).await.ok().filter(|read| *read > 0)?;
        for frame in frames.take(&buffer[..read]) {
            let subject = frame.subject.clone().unwrap_or_default();
            let is_held = matches!(&*orders.borrow(), Order::Hold(prefix) if subject.starts_with(prefix.as_str()));
            if is_held {
                held.send_modify(|held| held.push(subject));
                let order = orders.wait_for(|order| !matches!(order, Order::Hold(_))).await.ok()?.clone();
                if order == Order::Drop {
                    return None;
                }
            }
            to.write_all(&frame.bytes).await.ok()?;
        }
    }
}
