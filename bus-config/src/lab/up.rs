//! `groupcast up` as a process: a private bus, a controller and a gateway on loopback.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::namespace::mortal;
use super::{Error, Said, failed};

/// How long it may take to serve.
pub const START_DEADLINE: Duration = Duration::from_secs(60);
/// How long it may take to end.
pub const END_DEADLINE: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(10);
/// Lines of its log that are shown when it does not start.
const LOG_LINES_SHOWN: usize = 20;
/// What a caller has set for itself and is not meant for this one.
const NOT_MEANT: [&str; 6] = [
    "GROUPCAST_CONFIG",
    "GROUPCAST_SERVERS",
    "GROUPCAST_CREDENTIALS",
    "GROUPCAST_GATEWAY_CREDENTIALS",
    "GROUPCAST_TOKEN",
    "GROUPCAST_CONTEXT",
];

/// What it says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addresses {
    pub bus: String,
    pub gateway: String,
    pub token_file: PathBuf,
}

impl Addresses {
    /// From what it prints, once it has printed all of it.
    fn read(text: &str) -> Option<Self> {
        let value = |name: &str| {
            let rest = text.split_once(name)?.1;
            rest.split_once('\n').map(|(value, _)| value.trim().to_owned())
        };
        Some(Self { bus: value("bus ")?, gateway: value("gateway ")?, token_file: value("token ")?.into() })
    }
}

pub struct Up {
    pub addresses: Addresses,
    pub binary: PathBuf,
    folder: PathBuf,
    process: Child,
}

impl Up {
    /// Starts it with its data below the folder, and waits until it serves. Ends when the thread that called this does.
    pub fn start(binary: &Path, folder: &Path, api: SocketAddr) -> Result<Self, Error> {
        Self::start_with(binary, folder, api, &[])
    }

    /// With more arguments.
    pub fn start_with(binary: &Path, folder: &Path, api: SocketAddr, more: &[&str]) -> Result<Self, Error> {
        let broken = |error: std::io::Error| failed("groupcast up", error);
        std::fs::create_dir_all(folder).map_err(broken)?;
        let (out, log) = (folder.join("up.out"), folder.join("up.log"));
        let mut command = Command::new(binary);
        command.arg("up").arg("--data").arg(folder.join("up")).args(["--api-listen", &api.to_string()]).args(more);
        NOT_MEANT.iter().for_each(|name| _ = command.env_remove(name));
        let mut command = mortal(&command);
        command.stdin(Stdio::null()).stdout(File::create(&out).map_err(broken)?).stderr(File::create(&log).map_err(broken)?);
        let mut process = command.spawn().map_err(broken)?;
        let start = Instant::now();
        loop {
            if let Some(addresses) = std::fs::read_to_string(&out).ok().and_then(|text| Addresses::read(&text)) {
                return Ok(Self { addresses, binary: binary.to_owned(), folder: folder.to_owned(), process });
            }
            if start.elapsed() > START_DEADLINE || process.try_wait().map_err(broken)?.is_some() {
                let _ = process.kill();
                let _ = process.wait();
                let log = std::fs::read_to_string(&log).unwrap_or_default();
                let lines: Vec<&str> = log.lines().collect();
                let end = lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n");
                return Err(failed("groupcast up", format!("it did not start, and said:\n{end}")));
            }
            std::thread::sleep(POLL);
        }
    }

    pub fn bus_address(&self) -> Result<SocketAddr, Error> {
        let text = self.addresses.bus.trim_start_matches("nats://");
        text.parse().map_err(|error| failed(format!("the bus {text}"), error))
    }

    pub fn token(&self) -> Result<String, Error> {
        let path = &self.addresses.token_file;
        let text = std::fs::read_to_string(path).map_err(|error| failed(path.display().to_string(), error))?;
        Ok(text.trim().to_owned())
    }

    /// Of the controller that it runs.
    pub fn controller_credentials(&self) -> PathBuf {
        self.folder.join("up/controller.creds")
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("up.log")).unwrap_or_default()
    }

    /// Runs the command line as somebody who has the first token.
    pub fn groupcast(&self, arguments: &[&str]) -> Result<Said, Error> {
        let mut command = Command::new(&self.binary);
        NOT_MEANT.iter().for_each(|name| _ = command.env_remove(name));
        command.args(arguments).stdin(Stdio::null());
        // Nor do the user's own contexts count here.
        command.env("GROUPCAST_CONTEXTS", self.folder.join("contexts.toml"));
        command.env("GROUPCAST_GATEWAY", &self.addresses.gateway).env("GROUPCAST_TOKEN_FILE", &self.addresses.token_file);
        Said::of(&mut command)
    }

    /// Makes a credential for a host's agent.
    pub fn credential(&self, host: &str, path: &Path) -> Result<(), Error> {
        let authority = self.folder.join("up/authority.json").display().to_string();
        let said = self.groupcast(&["host", "add", host, "--authority", &authority, "--out", &path.display().to_string()])?;
        if said.code == 0 { Ok(()) } else { Err(failed(format!("a credential for {host}"), said.stderr.trim())) }
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }

    /// Asks it to end, and waits, so that the bus closes its files. It may have heard the same Ctrl-C.
    pub fn end(mut self) {
        if let Ok(pid) = i32::try_from(self.process.id()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let start = Instant::now();
        while start.elapsed() < END_DEADLINE && matches!(self.process.try_wait(), Ok(None)) {
            std::thread::sleep(POLL);
        }
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_says_is_read_once_it_is_whole() {
        let text = "bus      nats://127.0.0.1:1\ngateway  http://127.0.0.1:2\n";
        assert_eq!(Addresses::read(text), None);
        assert_eq!(Addresses::read(&format!("{text}token    /x/tok")), None, "half a line");
        let whole = Addresses::read(&format!("{text}token    /x/token\n\nexport …")).unwrap();
        assert_eq!((whole.bus.as_str(), whole.gateway.as_str()), ("nats://127.0.0.1:1", "http://127.0.0.1:2"));
        assert_eq!(whole.token_file, Path::new("/x/token"));
    }
}
