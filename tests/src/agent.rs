//! The real agent as a process, in a network namespace of the test's own: stopped, killed, paused, rebooted and cut off.

use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};

use crate::world::DEADLINE;

/// The agent of this very tree: the one beside `GROUPCAST_BIN` where that is named, otherwise built if it is not up to date.
pub fn binary() -> &'static PathBuf {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("GROUPCAST_BIN") {
            return PathBuf::from(path).with_file_name("groupcast-agent");
        }
        let own = std::env::current_exe().expect("a path");
        let profile = own.parent().and_then(|deps| deps.parent()).expect("below the target folder");
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.args(["build", "--quiet", "--package", "groupcast-host", "--bin", "groupcast-agent"]);
        cargo.current_dir(env!("CARGO_MANIFEST_DIR")).env("CARGO_TARGET_DIR", profile.parent().expect("the target folder"));
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo runs").success(), "the agent cannot be built");
        profile.join("groupcast-agent")
    })
}

/// Runs in a fresh network namespace with loopback up, on a runtime of its own; says so where that is not allowed.
pub fn isolated<F: Future<Output = ()>>(test: impl FnOnce() -> F + Send + 'static) {
    // Before the namespace is another: building may need a network.
    crate::control::binary();
    binary();
    let run = std::thread::spawn(move || {
        if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
            eprintln!("not run: no network namespace ({error})");
            return;
        }
        ip("link set lo up");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
        runtime.block_on(test());
    });
    run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// `agent.toml` for a host that enrols itself, with this template, as this workload at this address.
pub fn own(workload: &str, address: &str) -> String {
    format!(
        "host_workload = '{workload}'\n[[enrol]]\nworkload = '{workload}'\ntemplate = 'vm'\nnetwork = 'net'\nspace = 'shop'\naddresses = ['{address}']\n"
    )
}

pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().expect("ip runs");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A folder with an agent's configuration, and the agent while it runs.
pub struct Agent {
    pub folder: PathBuf,
    child: Option<Child>,
    /// What runs it, if not we ourselves.
    runner: Vec<String>,
}

impl Agent {
    pub fn new(server: &str, host: &str, more: &str) -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("groupcast-agent-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let path = folder.display();
        // Tests between namespaces do without TLS unless they say otherwise.
        let plain = !groupcast_bus_config::connect::is_loopback(server) && !more.contains("tls_");
        let more = if plain { format!("tls_required = false\n{more}") } else { more.to_owned() };
        let text = format!(
            "host = '{host}'\nservers = ['{server}']\ntable = 'gc{number}'\nstate = '{path}/state'\nsocket = '{path}/agent.sock'\n\
             boot_file = '{path}/boot'\nbeat = '200ms'\n{more}\n"
        );
        std::fs::write(folder.join("agent.toml"), text).expect("written");
        let agent = Self { folder, child: None, runner: Vec::new() };
        agent.reboot();
        agent
    }

    /// In this namespace.
    pub fn within(mut self, namespace: &str) -> Self {
        self.runner = ["ip", "netns", "exec", namespace].map(str::to_owned).to_vec();
        self
    }

    /// From now on it is another boot of the machine.
    pub fn reboot(&self) {
        static BOOT: AtomicU64 = AtomicU64::new(0);
        let boot = BOOT.fetch_add(1, Ordering::Relaxed);
        std::fs::write(self.folder.join("boot"), format!("boot {boot}\n")).expect("written");
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = match &self.runner[..] {
            [runner, more @ ..] => {
                let mut command = Command::new(runner);
                command.args(more).arg(binary());
                command
            }
            [] => Command::new(binary()),
        };
        command.arg("--config").arg(self.folder.join("agent.toml")).args(arguments).stdin(Stdio::null());
        command
    }

    pub fn ask(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().expect("the agent's command runs")
    }

    /// Asks for something that must succeed.
    pub fn does(&self, arguments: &[&str]) -> String {
        let output = self.ask(arguments);
        let words = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {words}");
        words
    }

    pub async fn start(&mut self) {
        let log = std::fs::File::options().create(true).append(true).open(self.folder.join("log")).expect("a log");
        self.child = Some(self.command(&["run"]).stderr(log).stdout(Stdio::null()).spawn().expect("the agent starts"));
        let start = Instant::now();
        while !self.ask(&["status"]).status.success() {
            assert!(start.elapsed() < DEADLINE, "the agent does not answer:\n{}", self.log());
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }

    /// How this workload is registered, as the agent knows it.
    pub fn registered(&self, workload: &str) -> Option<Value> {
        let status: Value = serde_json::from_slice(&self.ask(&["status"]).stdout).ok()?;
        status["registration"]["workloads"].as_array()?.iter().find(|one| one["workload"] == workload).cloned()
    }

    /// How often it has beaten.
    pub fn beats(&self) -> u64 {
        let status: Value = serde_json::from_slice(&self.ask(&["status"]).stdout).unwrap_or_default();
        status["registration"]["beats"].as_u64().unwrap_or_default()
    }

    fn signal(&self, signal: Signal) {
        let child = self.child.as_ref().expect("it runs");
        kill(Pid::from_raw(child.id() as i32), signal).expect("it lives");
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// SIGTERM, as a service manager stops it.
    pub fn stop(&mut self) {
        self.signal(Signal::SIGTERM);
        let ended = self.child.take().expect("it runs").wait().expect("it ends");
        assert!(ended.success(), "{}", self.log());
    }

    pub fn pause(&self) {
        self.signal(Signal::SIGSTOP);
    }

    pub fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            let log = self.log();
            let tail: Vec<&str> = log.lines().rev().take(40).collect();
            eprintln!("--- end of the agent's log:");
            tail.into_iter().rev().for_each(|line| eprintln!("{line}"));
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Another machine on a wire of this namespace's: what listens there is at addresses that are not ours.
pub struct Elsewhere {
    jobs: Option<std::sync::mpsc::Sender<Box<dyn FnOnce() + Send>>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Elsewhere {
    /// `interface` is this end of the wire; the other has the addresses 10.0.7.2 to 10.0.7.9.
    pub fn new(interface: &str) -> Self {
        let (jobs, work) = std::sync::mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let (told, id) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).expect("a namespace");
            told.send(nix::unistd::gettid()).expect("heard");
            work.into_iter().for_each(|job| job());
        });
        let id = id.recv().expect("a thread");
        ip(&format!("link add {interface} type veth peer name there netns {id}"));
        ip(&format!("addr add 10.0.7.1/24 dev {interface}"));
        ip(&format!("link set {interface} up"));
        let elsewhere = Self { jobs: Some(jobs), thread: Some(thread) };
        elsewhere.at(|| {
            (2..10).for_each(|last| ip(&format!("addr add 10.0.7.{last}/24 dev there")));
            ip("link set there up");
        });
        elsewhere
    }

    fn at<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (answer, answered) = std::sync::mpsc::channel();
        let job = Box::new(move || _ = answer.send(job()));
        self.jobs.as_ref().expect("open").send(job).expect("the thread lives");
        answered.recv().expect("an answer")
    }

    /// A listener there; a port that was ours a moment ago may not be free at once.
    pub fn listen(&self, address: &'static str, port: u16) -> TcpListener {
        let start = Instant::now();
        loop {
            match self.at(move || std::net::TcpListener::bind((address, port))) {
                Ok(listener) => {
                    listener.set_nonblocking(true).expect("set");
                    return TcpListener::from_std(listener).expect("a listener");
                }
                Err(error) => assert!(start.elapsed() < DEADLINE, "{address}:{port}: {error}"),
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

impl Drop for Elsewhere {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A namespace of its own behind a link that can be cut; the bus is reached through it.
pub struct Island {
    pub name: String,
    link: String,
    pub url: String,
    task: tokio::task::JoinHandle<()>,
}

impl Island {
    pub async fn new(bus: &str) -> Self {
        let (name, link) = (format!("gct{}", std::process::id()), "gct0".to_owned());
        ip(&format!("netns add {name}"));
        ip(&format!("link add {link} type veth peer name gct1 netns {name}"));
        ip(&format!("addr add 10.200.0.1/24 dev {link}"));
        ip(&format!("link set {link} up"));
        ip(&format!("-n {name} link set lo up"));
        ip(&format!("-n {name} addr add 10.200.0.2/24 dev gct1"));
        ip(&format!("-n {name} link set gct1 up"));
        let far = bus.trim_start_matches("nats://").to_owned();
        let listener = TcpListener::bind("10.200.0.1:0").await.expect("a port");
        let url = format!("nats://{}", listener.local_addr().expect("an address"));
        let task = tokio::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                let far = far.clone();
                tokio::spawn(async move {
                    if let Ok(mut far) = TcpStream::connect(far).await {
                        let _ = tokio::io::copy_bidirectional(&mut near, &mut far).await;
                    }
                });
            }
        });
        Self { name, link, url, task }
    }

    pub fn cut(&self) {
        ip(&format!("link set {} down", self.link));
    }

    pub fn mend(&self) {
        ip(&format!("link set {} up", self.link));
    }
}

impl Drop for Island {
    fn drop(&mut self) {
        self.task.abort();
        let _ = Command::new("ip").args(["netns", "del", &self.name]).output();
    }
}
