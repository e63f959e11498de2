//! The service manager: told when the agent is ready, that it lives, and that it ends.

use std::ffi::{OsStr, OsString};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use actix::Recipient;

use crate::enforcement::AskEnforced;

#[derive(Debug, Clone, Default)]
pub struct Manager {
    socket: Option<OsString>,
    /// It ends the agent if it hears nothing for this long.
    watchdog: Option<Duration>,
}

impl Manager {
    /// As the environment says; nobody, if it says nothing.
    pub fn from_environment() -> Self {
        let of = |name| std::env::var(name).ok();
        let is_for_us = of("WATCHDOG_PID").is_none_or(|pid| pid == std::process::id().to_string());
        Self::new(std::env::var_os("NOTIFY_SOCKET"), of("WATCHDOG_USEC").filter(|_| is_for_us).as_deref())
    }

    fn new(socket: Option<OsString>, watchdog_us: Option<&str>) -> Self {
        let watchdog = watchdog_us.and_then(|us| us.parse().ok()).filter(|us| *us > 0).map(Duration::from_micros);
        Self { socket, watchdog }
    }

    fn address(socket: &OsStr) -> std::io::Result<SocketAddr> {
        match socket.as_bytes().strip_prefix(b"@") {
            Some(name) => SocketAddr::from_abstract_name(name),
            None => SocketAddr::from_pathname(socket),
        }
    }

    pub fn tell(&self, words: &str) {
        let Some(socket) = &self.socket else { return };
        let sent = Self::address(socket).and_then(|address| {
            let own = UnixDatagram::unbound()?;
            // A manager that does not listen must not hold up whoever enforces.
            own.set_nonblocking(true)?;
            own.send_to_addr(words.as_bytes(), &address)
        });
        if let Err(error) = sent {
            tracing::warn!(%error, "the service manager was not told {words:?}");
        }
    }

    pub fn ready(&self, host: &str) {
        self.tell(&format!("READY=1\nSTATUS=enforces as host {host}"));
    }

    pub fn stopping(&self) {
        self.tell("STOPPING=1\nSTATUS=ends; the ruleset stays in force");
    }

    /// Says twice as often as it must that the agent lives, as long as whoever enforces answers.
    pub async fn watch(self, enforced: Recipient<AskEnforced>) {
        let Some(every) = self.watchdog.map(|watchdog| watchdog / 2) else { return };
        loop {
            match tokio::time::timeout(every, enforced.send(AskEnforced)).await {
                Ok(Ok(_)) => self.tell("WATCHDOG=1"),
                Ok(Err(error)) => tracing::error!(%error, "the enforcement does not answer"),
                Err(_) => tracing::error!("the enforcement does not answer in time"),
            }
            tokio::time::sleep(every).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn heard(socket: &UnixDatagram) -> String {
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut bytes = [0; 256];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    #[test]
    fn a_manager_is_told_by_path_and_by_abstract_name() {
        let name = format!("groupcast-notify-{}", std::process::id());
        let path = std::env::temp_dir().join(&name);
        let _ = std::fs::remove_file(&path);
        let by_path = UnixDatagram::bind(&path).unwrap();
        let by_name = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        for (address, socket) in [(path.as_os_str().to_owned(), by_path), (format!("@{name}").into(), by_name)] {
            let manager = Manager::new(Some(address), Some("1000000"));
            manager.ready("h0");
            assert!(heard(&socket).starts_with("READY=1\n"));
            manager.stopping();
            assert!(heard(&socket).starts_with("STOPPING=1\n"));
        }
        std::fs::remove_file(&path).unwrap();
        // Nobody there: nothing happens.
        Manager::new(Some(path.into()), None).ready("h0");
        Manager::default().ready("h0");
    }

    #[test]
    fn a_watchdog_is_what_the_environment_says() {
        let watchdog = |text| Manager::new(None, text).watchdog;
        assert_eq!(watchdog(Some("3000000")), Some(Duration::from_secs(3)));
        for none in [None, Some("0"), Some("x"), Some("-1")] {
            assert_eq!(watchdog(none), None);
        }
    }
}
