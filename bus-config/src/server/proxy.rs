//! A link between two cluster nodes that can be cut: a TCP relay on loopback. It runs on a thread of its own, so that it goes on
//! whatever the test's runtime is doing.

use std::net::Ipv4Addr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// What a link does with bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// Carries them.
    Open,
    /// Closes every connection and lets none through: both ends notice.
    Cut,
    /// Keeps connections open and carries nothing, as a router that drops packets does: nobody notices for a while.
    Stalled,
}

#[derive(Debug)]
pub(super) struct Proxy {
    port: u16,
    link: watch::Sender<Link>,
    target: watch::Sender<Option<u16>>,
}

impl Proxy {
    /// Listens at once; connections wait for a target.
    pub(super) fn start(runtime: &Runtime) -> std::io::Result<Self> {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let port = listener.local_addr()?.port();
        let link = watch::Sender::new(Link::Open);
        let target = watch::Sender::new(None);
        let (links, targets) = (link.subscribe(), target.subscribe());
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener)?
        };
        runtime.spawn(async move {
            // Ends with its runtime.
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(relay(near, links.clone(), targets.clone()));
            }
        });
        Ok(Self { port, link, target })
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn set_target(&self, port: u16) {
        self.target.send_replace(Some(port));
    }

    pub(super) fn set(&self, link: Link) {
        self.link.send_replace(link);
    }
}

async fn relay(near: TcpStream, mut links: watch::Receiver<Link>, mut targets: watch::Receiver<Option<u16>>) {
    let Ok(port) = targets.wait_for(Option::is_some).await.map(|port| port.unwrap_or_default()) else { return };
    if *links.borrow_and_update() == Link::Cut {
        return;
    }
    let Ok(far) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await else { return };
    let _ = (near.set_nodelay(true), far.set_nodelay(true));
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    // Whichever ends first, both halves are dropped and both ends see a closed connection.
    tokio::select! {
        _ = copy(near_read, far_write, links.clone()) => {}
        _ = copy(far_read, near_write, links.clone()) => {}
        _ = links.wait_for(|link| *link == Link::Cut) => {}
    }
}

async fn copy(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    mut links: watch::Receiver<Link>,
) -> Option<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = from.read(&mut buffer).await.ok().filter(|read| *read > 0)?;
        // A cut ends the relay from outside; here only a stall holds bytes back.
        links.wait_for(|link| *link == Link::Open).await.ok()?;
        to.write_all(&buffer[..read]).await.ok()?;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::time::Duration;

    use super::*;

    /// A connection through the proxy, and its far end.
    fn connected(proxy: &Proxy, far: &std::net::TcpListener) -> (std::net::TcpStream, std::net::TcpStream) {
        let near = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).unwrap();
        let (far, _) = far.accept().unwrap();
        for end in [&near, &far] {
            end.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        }
        (near, far)
    }

    #[test]
    fn an_open_link_carries_a_stalled_one_holds_and_a_cut_one_closes() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let proxy = Proxy::start(&runtime).unwrap();
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        proxy.set_target(listener.local_addr().unwrap().port());
        let (mut near, mut far) = connected(&proxy, &listener);
        let mut byte = [0];
        near.write_all(b"a").unwrap();
        far.read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"a");

        proxy.set(Link::Stalled);
        near.write_all(b"b").unwrap();
        far.set_nonblocking(true).unwrap();
        assert_eq!(far.read(&mut byte).unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        far.set_nonblocking(false).unwrap();
        proxy.set(Link::Open);
        far.read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"b");

        proxy.set(Link::Cut);
        assert_eq!(far.read(&mut byte).unwrap_or(0), 0);
        let mut refused = std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, proxy.port())).unwrap();
        assert_eq!(refused.read(&mut byte).unwrap_or(0), 0);
        proxy.set(Link::Open);
        let (mut near, mut far) = connected(&proxy, &listener);
        far.write_all(b"c").unwrap();
        near.read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"c");
    }
}
