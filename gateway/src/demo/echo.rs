//! What the workloads of the demonstration do: they say back what they are told, line by line.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cli::{Failure, Result};

/// Connections at once; further ones are closed.
const CONNECTIONS_MAX: usize = 64;
/// Longest line that is said back, in bytes.
const LINE_BYTES_MAX: u64 = 1_024;

/// Until killed.
pub fn run(address: SocketAddr, name: &str) -> Result {
    let listener = TcpListener::bind(address).map_err(|error| Failure::failed(format!("cannot listen on {address}: {error}")))?;
    let open = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming().flatten() {
        if open.fetch_add(1, Ordering::Relaxed) >= CONNECTIONS_MAX {
            open.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (open, name) = (open.clone(), name.to_owned());
        std::thread::spawn(move || {
            let _ = say_back(stream, &name); // whoever talks to it sees how it ends
            open.fetch_sub(1, Ordering::Relaxed);
        });
    }
    Ok(())
}

fn say_back(stream: TcpStream, name: &str) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut writer = stream.try_clone()?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = String::new();
        let read = std::io::Read::take(&mut reader, LINE_BYTES_MAX).read_line(&mut line)?;
        if read == 0 {
            return Ok(());
        }
        writer.write_all(format!("{name} heard {}\n", line.trim_end()).as_bytes())?;
    }
}
