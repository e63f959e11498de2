//! One child process: started with a guard that ends it when we die, and only ever signalled while we hold it unreaped, so that
//! its process id cannot belong to anybody else.

use std::fs::OpenOptions;
use std::hash::{BuildHasher, Hasher};
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Error, Lock, POLL, PORT_ATTEMPTS_MAX};

/// Below the kernel's default range for outgoing connections, so that no client's socket takes a port while its server is down.
const PORTS: std::ops::Range<u16> = 12_000..32_000;

/// Three different ports that were free a moment ago.
pub(super) fn free_ports() -> Result<[u16; 3], Error> {
    let mut held = Vec::new();
    for _ in 0..PORT_ATTEMPTS_MAX * 3 {
        let port = PORTS.start + (random() % (PORTS.len() as u64)) as u16;
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            held.push((port, listener));
        }
        if let [(a, _), (b, _), (c, _)] = held.as_slice() {
            return Ok([*a, *b, *c]);
        }
    }
    Err(Error::NoPort)
}

/// Unpredictable enough for names and port choices; the standard library seeds it from the system.
pub(super) fn random() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

#[derive(Debug)]
pub(super) struct Process {
    child: Child,
    guard: Child,
}

impl Process {
    /// Starts the server with its folder as working directory. `temporary` is what the guard also removes; the server holds the lock as
    /// long as it lives.
    pub(super) fn spawn(
        binary: &Path,
        config: &Path,
        log: &Path,
        temporary: Option<&Path>,
        lock: Option<&Lock>,
    ) -> Result<Self, Error> {
        let failed = |error: std::io::Error| Error::CannotRun { path: binary.to_owned(), reason: error.to_string() };
        let open = OpenOptions::new().create(true).append(true).open(log);
        let output = open.map_err(|source| Error::File { what: "opening", path: log.to_owned(), source })?;
        let input = lock.map(Lock::share).transpose().map_err(failed)?.map_or_else(Stdio::null, Stdio::from);
        let mut child = Command::new(binary)
            .arg("-c")
            .arg(config)
            .current_dir(config.parent().unwrap_or(Path::new(".")))
            .stdin(input)
            .stdout(output.try_clone().map_err(failed)?)
            .stderr(output)
            .spawn()
            .map_err(failed)?;
        // Waits for the end of its input, which is a pipe that closes when we are gone, however that happens.
        let guard = Command::new("/bin/sh")
            .arg("-c")
            .arg("read -r _; kill -9 \"$1\" 2>/dev/null; if [ -n \"$2\" ]; then sleep 1; rm -rf -- \"$2\"; fi")
            .arg("nats-server-guard")
            .arg(child.id().to_string())
            .arg(temporary.unwrap_or(Path::new("")))
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        match guard {
            Ok(guard) => Ok(Self { child, guard }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(Error::CannotRun { path: "/bin/sh".into(), reason: error.to_string() })
            }
        }
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    fn signal(&self, signal: Signal) -> Result<(), Error> {
        let pid = self.child.id();
        let target = i32::try_from(pid).map(Pid::from_raw).map_err(|error| Error::Signal { pid, reason: error.to_string() })?;
        kill(target, signal).map_err(|error| Error::Signal { pid, reason: error.to_string() })
    }

    pub(super) fn pause(&self) -> Result<(), Error> {
        self.signal(Signal::SIGSTOP)
    }

    pub(super) fn resume(&self) -> Result<(), Error> {
        self.signal(Signal::SIGCONT)
    }

    pub(super) fn reload(&self) -> Result<(), Error> {
        self.signal(Signal::SIGHUP)
    }

    /// Ends it now; dropping does that.
    pub(super) fn kill(self) {
        drop(self);
    }

    /// Asks it to end and waits; ends it by force after the deadline.
    pub(super) fn stop(mut self, within: Duration) -> Result<(), Error> {
        self.resume()?;
        self.signal(Signal::SIGTERM)?;
        let deadline = Instant::now() + within;
        while Instant::now() < deadline && !self.ended() {
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The guard first: it must not signal a process id that is free again once the child is reaped.
        let _ = self.guard.kill();
        let _ = self.guard.wait();
        // SIGKILL ends a paused process too.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
