//! The agent of a host as a process: started in the host's namespace, asked over its local socket by its own command line.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::namespace::mortal;
use super::{CLAIM, Error, Namespace, failed};

/// How long an agent may take to answer on its socket.
pub const READY_DEADLINE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(10);
/// Longest path of a unix socket that every kernel takes.
const SOCKET_PATH_MAX: usize = 100;

#[derive(Debug, Clone)]
pub struct AgentSettings {
    pub binary: PathBuf,
    pub host: String,
    pub bus: String,
    pub credentials: Option<PathBuf>,
    /// Its own: configuration, state, socket and log.
    pub folder: PathBuf,
    /// Print what would be done to the kernel, and do nothing.
    pub dry_run: bool,
}

/// What the agent's command line said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Said {
    /// Runs it to its end.
    pub(super) fn of(command: &mut Command) -> Result<Self, Error> {
        let output = command.output().map_err(|error| failed(command.get_program().to_string_lossy(), error))?;
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Ok(Self { code: output.status.code().unwrap_or(-1), stdout: text(output.stdout), stderr: text(output.stderr) })
    }
}

pub struct Agent {
    settings: AgentSettings,
    process: Child,
}

impl AgentSettings {
    fn config(&self) -> PathBuf {
        self.folder.join("agent.toml")
    }

    fn socket(&self) -> PathBuf {
        let path = self.folder.join("agent.sock");
        match path.as_os_str().len() {
            0..=SOCKET_PATH_MAX => path,
            _ => std::env::temp_dir().join(format!("groupcast-{}-{}.sock", std::process::id(), self.host)),
        }
    }

    pub fn log(&self) -> PathBuf {
        self.folder.join("agent.log")
    }

    fn write(&self) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        let quoted = |path: &Path| toml::Value::from(path.display().to_string()).to_string();
        let mut text = format!("host = \"{}\"\nservers = [\"{}\"]\nclaims = [\"{CLAIM}\"]\n", self.host, self.bus);
        if let Some(path) = &self.credentials {
            text += &format!("credentials = {}\n", quoted(path));
        }
        text += &format!("state = {}\nsocket = {}\n", quoted(&self.folder.join("state")), quoted(&self.socket()));
        std::fs::write(self.config(), text)
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.binary);
        command.arg("--config").arg(self.config());
        command
    }
}

impl Agent {
    /// Starts it and waits until it answers. Without a namespace it runs where we are, and must not touch the kernel.
    pub fn start(settings: AgentSettings, inside: Option<&Namespace>) -> Result<Self, Error> {
        let what = format!("the agent of {}", settings.host);
        let broken = |error: std::io::Error| failed(&*what, error);
        settings.write().map_err(broken)?;
        let log = File::options().create(true).append(true).open(settings.log()).map_err(broken)?;
        let output = log.try_clone().map_err(broken)?;
        let mut command = settings.command();
        command.arg("run");
        if settings.dry_run {
            command.arg("--dry-run");
        }
        let mut command = mortal(&command);
        command.stdin(Stdio::null()).stdout(output).stderr(log);
        let process = match inside {
            Some(namespace) => namespace.run(move || command.spawn())?,
            None => command.spawn(),
        };
        let mut agent = Self { settings, process: process.map_err(broken)? };
        let start = Instant::now();
        loop {
            if agent.ask(&["status"])?.code == 0 {
                return Ok(agent);
            }
            let ended = agent.process.try_wait().map_err(broken)?;
            if ended.is_some() || start.elapsed() > READY_DEADLINE {
                return Err(failed(what, format!("does not answer:\n{}", agent.log())));
            }
            std::thread::sleep(POLL);
        }
    }

    pub fn host(&self) -> &str {
        &self.settings.host
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.settings.log()).unwrap_or_default()
    }

    /// Asks it over its socket.
    pub fn ask(&self, arguments: &[&str]) -> Result<Said, Error> {
        Said::of(self.settings.command().args(arguments).stdin(Stdio::null()))
    }

    /// Attaches a workload; returns when its policy is in force.
    pub fn attach(&self, workload: &str, interface: &str) -> Result<(), Error> {
        let said = self.ask(&["workload", "add", workload, "--interface", interface, "--within", "30s"])?;
        match said.code {
            0 => Ok(()),
            _ => Err(failed(format!("workload {workload} on {}", self.settings.host), said.stderr.trim())),
        }
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
    }
}
