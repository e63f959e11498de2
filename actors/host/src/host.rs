//! What the machine itself says.

use std::path::Path;

/// The bridge, switch or VRF that an interface belongs to: hooks of the inet family do not see its packets as the interface's.
pub fn master_of(interface: &str) -> Option<String> {
    let link = std::fs::read_link(Path::new("/sys/class/net").join(interface).join("master")).ok()?;
    Some(link.file_name()?.to_string_lossy().into_owned())
}

/// Tells the service manager something, if there is one.
pub fn notify(words: &str) {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let sent = std::os::unix::net::UnixDatagram::unbound().and_then(|socket| socket.send_to(words.as_bytes(), Path::new(&path)));
    if let Err(error) = sent {
        tracing::warn!(%error, "the service manager was not told {words:?}");
    }
}

/// A number that nobody can guess, from the kernel.
pub fn random() -> std::io::Result<u64> {
    use std::io::Read;
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_ne_bytes(bytes))
}
