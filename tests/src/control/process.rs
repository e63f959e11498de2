//! Controllers as processes: the `groupcast` binary, killed, paused and told to end by its own process id.

use std::fs::File;
use std::io::{BufRead, Read, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::world::DEADLINE;

/// The binary of this very tree, built if it is not up to date. `GROUPCAST_BIN` names another.
pub fn binary() -> &'static PathBuf {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| built("GROUPCAST_BIN", "groupcast-gateway", "groupcast"))
}

/// The agent, likewise: the one beside the other where that is named.
pub fn agent_binary() -> &'static PathBuf {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| match std::env::var_os("GROUPCAST_BIN") {
        Some(path) if std::env::var_os("GROUPCAST_AGENT_BIN").is_none() => PathBuf::from(path).with_file_name("groupcast-agent"),
        _ => built("GROUPCAST_AGENT_BIN", "groupcast-host", "groupcast-agent"),
    })
}

fn built(variable: &str, package: &str, name: &str) -> PathBuf {
    if let Some(path) = std::env::var_os(variable) {
        return path.into();
    }
    // This test lies in <target>/<profile>/deps.
    let own = std::env::current_exe().expect("a path");
    let profile = own.parent().and_then(|deps| deps.parent()).expect("below the target folder");
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package", package, "--bin", name]);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR")).env("CARGO_TARGET_DIR", profile.parent().expect("the target folder"));
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("cargo runs").success(), "the {name} binary cannot be built");
    profile.join(name)
}

/// A controller that is a process of its own. Ends with its value.
pub struct Controller {
    pub name: String,
    child: Child,
    log: PathBuf,
    address: Option<SocketAddr>,
}

impl Controller {
    pub fn start(url: &str, name: &str, lease: Duration, more: &[&str]) -> Self {
        Self::start_in(url, name, lease, more, &[])
    }

    /// One with more in its environment.
    pub fn start_in(url: &str, name: &str, lease: Duration, more: &[&str], environment: &[(&str, &str)]) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let log = std::env::temp_dir().join(format!("groupcast-test-{}-{number}-{name}.log", std::process::id()));
        let stderr = File::create(&log).expect("a log file");
        let child = Command::new(binary())
            .args(["controller", "--server", url, "--name", name, "--listen", "127.0.0.1:0"])
            .args(["--lease", &format!("{}ms", lease.as_millis()), "--reconnect-delay-max", "200ms"])
            .args(more)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .expect("the controller starts");
        Self { name: name.to_owned(), child, log, address: None }
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn address(&mut self) -> Option<SocketAddr> {
        if self.address.is_none() {
            let log = self.log();
            let line = log.lines().find(|line| line.contains("serving metrics and health"))?;
            self.address = line.split("address=").nth(1)?.split_whitespace().next()?.parse().ok();
        }
        self.address
    }

    /// Status and body; `None` when nobody answers.
    pub fn get(&mut self, path: &str) -> Option<(u16, String)> {
        get(self.address()?, path)
    }

    /// The lines of an answer that goes on, as they come; they end when nothing comes for long.
    pub fn lines(&mut self, path: &str) -> impl Iterator<Item = String> + use<> {
        let stream = self.address().and_then(|address| request(address, path)).expect("it answers");
        std::io::BufReader::new(stream).lines().map_while(Result::ok)
    }

    pub fn json(&mut self, path: &str) -> Option<Value> {
        let (status, body) = self.get(path)?;
        (status == 200).then(|| serde_json::from_str(&body).ok()).flatten()
    }

    pub fn status(&mut self) -> Option<Value> {
        self.json("/v1/status")
    }

    /// Waits until it can serve and lead.
    pub async fn ready(&mut self) {
        self.wait_for("ready", |c| c.get("/readyz").is_some_and(|(status, _)| status == 200)).await;
    }

    /// Waits until it leads and has compared.
    pub async fn publishing(&mut self) {
        self.wait_for("publishing", |c| c.status().is_some_and(|status| status["publishing"] == true)).await;
    }

    pub async fn wait_for(&mut self, what: &str, mut condition: impl FnMut(&mut Self) -> bool) {
        let start = Instant::now();
        while !condition(self) {
            assert!(start.elapsed() < DEADLINE, "{} is not {what} in time; its log:\n{}", self.name, self.log());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).expect("the controller lives");
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    /// Tells it to hand over and end.
    pub fn terminate(&self) {
        self.signal(Signal::SIGTERM);
    }

    /// Waits for its end; whether it ended well.
    pub async fn ended(&mut self) -> bool {
        let start = Instant::now();
        while start.elapsed() < DEADLINE {
            if let Ok(Some(status)) = self.child.try_wait() {
                return status.success();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        false
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(60).collect();
            eprintln!("--- end of the log of {}:", self.name);
            tail.into_iter().rev().for_each(|line| eprintln!("{line}"));
        }
        let _ = std::fs::remove_file(&self.log);
    }
}

/// Runs another command of the binary to its end; standard output and error, and whether it succeeded.
pub fn run(arguments: &[&str]) -> (bool, String, String) {
    let output = Command::new(binary()).args(arguments).stdin(Stdio::null()).output().expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (output.status.success(), text(output.stdout), text(output.stderr))
}

fn request(address: SocketAddr, path: &str) -> Option<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(30))).ok()?;
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
    Some(stream)
}

fn get(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    let mut text = String::new();
    request(address, path)?.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.split_whitespace().nth(1)?.parse().ok()?, body.to_owned()))
}
