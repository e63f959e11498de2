//! Takes connections inside a namespace and carries them to a server outside of it.

use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;

use super::{Error, Namespace, failed};

pub struct Relay {
    address: SocketAddr,
    listener: TcpListener,
}

impl Relay {
    /// Listens on the namespace's loopback, on the port of the server that it leads to.
    pub fn new(inside: &Namespace, to: SocketAddr) -> Result<Self, Error> {
        let listener = inside.listen(SocketAddr::from((Ipv4Addr::LOCALHOST, to.port())))?;
        let address = listener.local_addr().map_err(|error| failed("a relay", error))?;
        let accepting = listener.try_clone().map_err(|error| failed("a relay", error))?;
        std::thread::spawn(move || {
            for near in accepting.incoming() {
                let near = match near {
                    Ok(near) => near,
                    // Told to end, or out of files for a while: then those who wait are taken later.
                    Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => return,
                    Err(_) => {
                        std::thread::sleep(crate::accepting::PAUSE);
                        continue;
                    }
                };
                // The server may be away for a moment: whoever asks asks again.
                if let Ok(far) = TcpStream::connect(to) {
                    carry(near, far);
                }
            }
        });
        Ok(Self { address, listener })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        // Ends the thread's waiting; on some systems an error that changes nothing.
        let _ = nix::sys::socket::shutdown(self.listener.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }
}

/// Both ways, each by a thread that ends with its direction.
fn carry(near: TcpStream, far: TcpStream) {
    let (Ok(near_too), Ok(far_too)) = (near.try_clone(), far.try_clone()) else { return };
    for (mut from, mut to) in [(near, far), (far_too, near_too)] {
        let _ = from.set_nodelay(true); // slower without, no more
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Write);
            let _ = from.shutdown(Shutdown::Read);
        });
    }
}
