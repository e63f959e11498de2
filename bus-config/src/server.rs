//! Finding, starting, hurting and ending a nats-server: for the one-machine mode and for every test.
//!
//! A [`Server`] is a child process on loopback ports of its own. It ends when the value is dropped, and also when this process
//! dies without dropping it. It can be killed and started again on the same ports and files, paused and resumed. [`Cluster`] is
//! three of them with routes that can be cut.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::streams::BATCH_MESSAGES_MAX;

mod cluster;
mod find;
mod lock;
mod monitor;
mod process;
mod proxy;

pub use cluster::{Cluster, NODES};
pub use find::{SERVER_VARIABLE, find, find_in};
pub use proxy::Link;

pub use lock::Lock;

use process::Process;

/// How long a server may take to accept connections, or a cluster to elect a leader. Generous: test machines are shared.
pub const READY_DEADLINE: Duration = Duration::from_secs(60);
/// How long a server may take to end when asked politely.
pub const STOP_DEADLINE: Duration = Duration::from_secs(10);
/// How long a server that was left alone may take to end, and to give its folder free.
pub const LOCK_DEADLINE: Duration = Duration::from_secs(5);
/// Attempts to find ports that nobody takes between choosing and listening.
pub const PORT_ATTEMPTS_MAX: usize = 20;

const POLL: Duration = Duration::from_millis(10);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "no nats-server 2.12 or newer found: looked at {}; run `./test --setup`, or set {SERVER_VARIABLE} to the path of one",
        looked_at.join(", ")
    )]
    NotFound { looked_at: Vec<String> },
    #[error("{path} is nats-server {version}, groupcast needs 2.12 or newer", path = path.display())]
    TooOld { path: PathBuf, version: String },
    #[error("cannot run {path}: {reason}", path = path.display())]
    CannotRun { path: PathBuf, reason: String },
    #[error("{what} {path}: {source}", path = path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error("nats-server ended while starting:\n{log}")]
    Ended { log: String },
    #[error("nats-server was not ready within {} s ({reason}):\n{log}", READY_DEADLINE.as_secs())]
    NotReady { reason: String, log: String },
    #[error("no free loopback port found in {PORT_ATTEMPTS_MAX} attempts")]
    NoPort,
    #[error("signal to nats-server {pid} failed: {reason}")]
    Signal { pid: u32, reason: String },
    #[error("monitoring {path} of the server failed: {reason}")]
    Monitor { path: String, reason: String },
    #[error("{path} is in use by another server (process {holder}): two would destroy what both store; end it first", path = path.display())]
    InUse { path: PathBuf, holder: String },
    #[error("the server is not running: start it again first")]
    NotRunning,
}

/// What a client must present, or show, on a TLS listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// With an authority named here, clients must present a certificate signed by it.
    pub client_authority: Option<PathBuf>,
}

/// How to run a server. The default is one server without authentication that keeps everything in a temporary folder.
#[derive(Debug, Clone)]
pub struct Config {
    binary: Option<PathBuf>,
    store_dir: Option<PathBuf>,
    client_port: Option<u16>,
    batch_messages_max: u64,
    flushes: Flushes,
    tls: Option<Tls>,
    fragments: Vec<String>,
}

/// When a server has what it stored on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Flushes {
    /// Before it says that it is stored. What was acknowledged survives a power cut.
    #[default]
    Always,
    /// This long after it said so. For tests that show what that loses.
    Within(Duration),
}

impl Flushes {
    fn setting(self) -> String {
        match self {
            Self::Always => "always".to_owned(),
            Self::Within(time) => format!("\"{}s\"", time.as_secs().max(1)),
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::plain()
    }
}

impl Config {
    /// No authentication, one account that may do everything.
    pub fn plain() -> Self {
        Self {
            binary: None,
            store_dir: None,
            client_port: None,
            batch_messages_max: BATCH_MESSAGES_MAX,
            flushes: Flushes::default(),
            tls: None,
            fragments: Vec::new(),
        }
    }

    /// Uses this binary instead of looking for one.
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Self {
        self.binary = Some(path.into());
        self
    }

    /// Keeps files here and leaves them when the server ends.
    pub fn store_dir(mut self, path: impl Into<PathBuf>) -> Self {
        self.store_dir = Some(path.into());
        self
    }

    /// Listens here instead of on a free port.
    pub fn client_port(mut self, port: u16) -> Self {
        self.client_port = Some(port);
        self
    }

    /// The batch limit written into the configuration; 0 leaves the server's default.
    pub fn batch_messages_max(mut self, limit: u64) -> Self {
        self.batch_messages_max = limit;
        self
    }

    /// When what is stored is on disk; without a word, before it is acknowledged.
    pub fn flushes(mut self, flushes: Flushes) -> Self {
        self.flushes = flushes;
        self
    }

    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Adds configuration text: accounts, users, an operator. Relative paths in it are relative to the server's own folder.
    pub fn with(mut self, fragment: impl Into<String>) -> Self {
        self.fragments.push(fragment.into());
        self
    }

    fn render(&self, name: &str, ports: Ports, store: &Path, cluster: Option<&str>) -> String {
        let Ports { client, monitor, .. } = ports;
        let limits = match self.batch_messages_max {
            0 => String::new(),
            limit => format!(", limits {{ batch {{ max_msgs: {limit} }} }}"),
        };
        let mut text = format!(
            "server_name: \"{name}\"\nlisten: \"127.0.0.1:{client}\"\nhttp: \"127.0.0.1:{monitor}\"\n\
             max_control_line: 65536\nping_interval: \"5s\"\nping_max: 2\njetstream {{ store_dir: \"{}\", sync_interval: {}{limits} }}\n",
            store.display(),
            self.flushes.setting()
        );
        if let Some(tls) = &self.tls {
            text += &format!("tls {{ cert_file: \"{}\", key_file: \"{}\"", tls.certificate.display(), tls.key.display());
            if let Some(authority) = &tls.client_authority {
                text += &format!(", ca_file: \"{}\", verify: true", authority.display());
            }
            // A fleet that reconnects at once needs far longer than the default 2 s.
            text += ", timeout: 20 }\n";
        }
        for part in cluster.into_iter().chain(self.fragments.iter().map(String::as_str)) {
            text += part;
            text.push('\n');
        }
        text
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ports {
    client: u16,
    monitor: u16,
    /// For routes; unused by a server that is alone.
    cluster: u16,
}

impl Ports {
    fn choose(client: Option<u16>) -> Result<Self, Error> {
        let [free, monitor, cluster] = process::free_ports()?;
        Ok(Self { client: client.unwrap_or(free), monitor, cluster })
    }
}

/// A folder that goes away with its owner, unless it was given by the user.
#[derive(Debug)]
struct Folder {
    path: PathBuf,
    temporary: bool,
    /// Nobody else runs a server on what was given by the user, as long as this or the server lives.
    lock: Option<Lock>,
}

impl Folder {
    fn new(given: Option<&Path>) -> Result<Self, Error> {
        let (path, temporary) = match given {
            Some(path) => (path.to_owned(), false),
            None => (std::env::temp_dir().join(format!("groupcast-{}-{:016x}", std::process::id(), process::random())), true),
        };
        std::fs::create_dir_all(&path).map_err(|source| Error::File { what: "making folder", path: path.clone(), source })?;
        let lock = if temporary { None } else { Some(Lock::take_within(&path, LOCK_DEADLINE)?) };
        Ok(Self { path, temporary, lock })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.temporary
            && let Err(error) = std::fs::remove_dir_all(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "temporary folder of nats-server not removed");
        }
    }
}

/// A running (or killed, or paused) nats-server.
#[derive(Debug)]
pub struct Server {
    // Before `folder`, so that the process is gone when its files are removed.
    process: Option<Process>,
    binary: PathBuf,
    config: Config,
    name: String,
    ports: Ports,
    cluster: Option<String>,
    folder: Folder,
}

impl Server {
    /// Starts a server and waits until it accepts connections, without blocking the async runtime.
    pub async fn start(config: Config) -> Result<Self, Error> {
        off_runtime(move || Self::start_blocking(config)).await
    }

    /// As [`Server::start`], for callers without a runtime.
    pub fn start_blocking(config: Config) -> Result<Self, Error> {
        for _ in 0..PORT_ATTEMPTS_MAX {
            let mut server = Self::prepare(&config, Ports::choose(config.client_port)?, None)?;
            match server.launch() {
                Ok(()) => return Ok(server),
                Err(Error::Ended { log }) if port_taken(&log) && config.client_port.is_none() => continue,
                Err(error) => return Err(error),
            }
        }
        Err(Error::NoPort)
    }

    fn prepare(config: &Config, ports: Ports, cluster: Option<String>) -> Result<Self, Error> {
        let binary = match &config.binary {
            Some(path) => path.clone(),
            None => find()?,
        };
        let folder = Folder::new(config.store_dir.as_deref())?;
        let name = format!("gc-{:016x}", process::random());
        Ok(Self { process: None, binary, config: config.clone(), name, ports, cluster, folder })
    }

    fn write_config(&self) -> Result<PathBuf, Error> {
        let text = self.config.render(&self.name, self.ports, &self.folder.path.join("jetstream"), self.cluster.as_deref());
        let path = self.config_path();
        std::fs::write(&path, text).map_err(|source| Error::File { what: "writing", path: path.clone(), source })?;
        Ok(path)
    }

    /// Starts the process on the ports and files it has, and waits until it answers.
    fn launch(&mut self) -> Result<(), Error> {
        let path = self.write_config()?;
        let temporary = self.folder.temporary.then_some(self.folder.path.as_path());
        let mut process = Process::spawn(&self.binary, &path, &self.log_path(), temporary, self.folder.lock.as_ref())?;
        let deadline = Instant::now() + READY_DEADLINE;
        let mut reason = "no connection".to_owned();
        while Instant::now() < deadline {
            if process.ended() {
                return Err(Error::Ended { log: self.log_tail() });
            }
            match monitor::greeting(self.ports.client) {
                // Somebody else's server on the port we wanted: ours is about to end.
                Ok(found) if found != self.name => reason = format!("port {} belongs to server {found}", self.ports.client),
                Ok(_) => {
                    self.process = Some(process);
                    return Ok(());
                }
                Err(error) => reason = error.to_string(),
            }
            std::thread::sleep(POLL);
        }
        Err(Error::NotReady { reason, log: self.log_tail() })
    }

    /// Where clients connect.
    pub fn url(&self) -> String {
        let scheme = if self.config.tls.is_some() { "tls" } else { "nats" };
        format!("{scheme}://127.0.0.1:{}", self.ports.client)
    }

    pub fn client_port(&self) -> u16 {
        self.ports.client
    }

    /// Where it says how it is, over HTTP on loopback.
    pub fn monitor_port(&self) -> u16 {
        self.ports.monitor
    }

    /// The server's own folder: configuration, log, files, account tokens.
    pub fn dir(&self) -> &Path {
        &self.folder.path
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn config_path(&self) -> PathBuf {
        self.folder.path.join("nats-server.conf")
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path.join("nats-server.log")
    }

    /// Everything the server has logged, over all its lives.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }

    pub fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(Process::pid)
    }

    pub fn is_running(&self) -> bool {
        self.process.is_some()
    }

    /// Whether it was started and has ended by itself, or was ended by somebody else.
    pub fn has_ended(&mut self) -> bool {
        self.process.as_mut().is_some_and(Process::ended)
    }

    /// The last lines of its log.
    pub fn last_words(&self) -> String {
        self.log_tail()
    }

    /// Starts it again on the same ports and files, for callers without a runtime.
    pub fn restart_blocking(&mut self) -> Result<(), Error> {
        self.kill();
        self.launch()
    }

    /// Ends the server with no chance to write anything (SIGKILL), as a crash does. Its ports and files stay reserved for
    /// [`Server::restart`].
    pub fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }

    /// Ends the server in order.
    pub async fn stop(&mut self) -> Result<(), Error> {
        match self.process.take() {
            Some(process) => off_runtime(move || process.stop(STOP_DEADLINE)).await,
            None => Ok(()),
        }
    }

    /// Starts a killed or stopped server again, on the same ports and files; a running one is killed first.
    pub async fn restart(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + READY_DEADLINE;
        loop {
            match self.restart_once().await {
                // The port may be somebody's outgoing connection for a moment.
                Err(Error::Ended { log }) if port_taken(&log) && Instant::now() < deadline => tokio::time::sleep(POLL).await,
                other => return other,
            }
        }
    }

    async fn restart_once(&mut self) -> Result<(), Error> {
        self.kill();
        let mut taken = std::mem::replace(self, self.husk());
        let (back, result) = off_runtime(move || {
            let result = taken.launch();
            (taken, result)
        })
        .await;
        *self = back;
        result
    }

    /// Stands in while the real one is on another thread.
    fn husk(&self) -> Self {
        Self {
            process: None,
            binary: self.binary.clone(),
            config: self.config.clone(),
            name: self.name.clone(),
            ports: self.ports,
            cluster: None,
            folder: Folder { path: self.folder.path.clone(), temporary: false, lock: None },
        }
    }

    /// Freezes the process (SIGSTOP): connections stay open and nothing answers.
    pub fn pause(&self) -> Result<(), Error> {
        self.process.as_ref().ok_or(Error::NotRunning)?.pause()
    }

    /// Lets a paused process go on (SIGCONT).
    pub fn resume(&self) -> Result<(), Error> {
        self.process.as_ref().ok_or(Error::NotRunning)?.resume()
    }

    /// Replaces the text given by [`Config::with`] and has the running server read it. Users that are gone from it are
    /// disconnected. The server tells in its log when it does not like the text, and goes on with the old one.
    pub fn reload(&mut self, fragment: impl Into<String>) -> Result<(), Error> {
        self.config.fragments = vec![fragment.into()];
        self.write_config()?;
        self.process.as_ref().ok_or(Error::NotRunning)?.reload()
    }

    /// Asks the server's monitoring, for example `/varz` or `/jsz?accounts=true`.
    pub async fn monitor(&self, path: &str) -> Result<Value, Error> {
        let (port, path) = (self.ports.monitor, path.to_owned());
        off_runtime(move || monitor::get(port, &path)).await
    }
}

fn port_taken(log: &str) -> bool {
    log.contains("address already in use")
}

/// Runs something that blocks without holding up the async runtime's thread.
async fn off_runtime<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only a runtime that is shutting down cancels blocking work; nobody can be waiting for this then.
            Err(_) => panic!("the async runtime is shutting down"),
        },
    }
}
