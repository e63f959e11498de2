//! Controllers as processes of their own, killed and told to end by their own process ids.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Nothing takes longer than this on a slow machine.
const DEADLINE: Duration = Duration::from_secs(60);

/// A controller that is a process. Ends with its value.
pub(crate) struct Process {
    pub name: String,
    child: Child,
    address: SocketAddr,
}

impl Process {
    /// `binary`: where it is; without it, the one beside this program.
    pub fn start(binary: Option<&Path>, server: &str, name: String, lease_ms: u32) -> anyhow::Result<Self> {
        Self::start_with(binary, server, name, lease_ms, &[])
    }

    /// The same with more on its command line.
    pub fn start_with(binary: Option<&Path>, server: &str, name: String, lease_ms: u32, more: &[&str]) -> anyhow::Result<Self> {
        let binary = match binary {
            Some(path) => path.to_owned(),
            None => std::env::current_exe()?.with_file_name("groupcast"),
        };
        // Free a moment ago; should somebody take it in between, the process says so and the benchmark fails.
        let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
        let (listen, lease) = (address.to_string(), format!("{lease_ms}ms"));
        let child = Command::new(&binary)
            .args(["controller", "--server", server, "--name", &name, "--listen", &listen, "--lease", &lease])
            .args(more)
            .env("GROUPCAST_LOG", "warn")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .with_context(|| {
                format!("cannot run {}: build it with `cargo build --release -p groupcast-gateway`", binary.display())
            })?;
        Ok(Self { name, child, address })
    }

    /// What it holds in memory.
    pub fn rss_mb(&self) -> anyhow::Result<f64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the kernel says what it holds")?;
        let kb: f64 = line.split_whitespace().next().context("a number")?.parse()?;
        Ok(kb / 1024.0)
    }

    /// Processor time it has used.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
        super::fleet::cpu_of(self.child.id()).context("the kernel says what it used")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// SIGKILL.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    pub fn has_ended(&mut self) -> anyhow::Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// SIGTERM: hands over and ends.
    pub fn terminate(&self) -> anyhow::Result<()> {
        Ok(kill(Pid::from_raw(i32::try_from(self.child.id())?), Signal::SIGTERM)?)
    }
}

impl Process {
    /// Waits until it can lead.
    pub async fn ready(&self) -> anyhow::Result<()> {
        let begun = Instant::now();
        while !self.answers().await.unwrap_or(false) {
            ensure!(begun.elapsed() < DEADLINE, "{} does not become ready", self.name);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    async fn answers(&self) -> std::io::Result<bool> {
        Ok(self.page("/readyz").await?.starts_with("HTTP/1.1 200"))
    }

    async fn page(&self, path: &str) -> std::io::Result<String> {
        let mut stream = tokio::net::TcpStream::connect(self.address).await?;
        let request = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        Ok(answer)
    }

    /// What it counts under this name, summed over labels; nothing counts as 0.
    pub async fn metric(&self, name: &str) -> anyhow::Result<f64> {
        let page = self.page("/metrics").await?;
        let value = |line: &str| {
            let (labelled, value) = line.rsplit_once(' ')?;
            let is_named = labelled.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'));
            if is_named { value.trim().parse::<f64>().ok() } else { None }
        };
        Ok(page.lines().filter_map(value).sum())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
