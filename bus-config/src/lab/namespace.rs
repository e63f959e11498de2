//! A network namespace and the thread that lives in it. Sockets keep the namespace they were born in, and processes that of the thread
//! that started them: whatever is to happen inside is done by that thread.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};
use nix::unistd::Pid;

use super::{Error, failed};

type Job = Box<dyn FnOnce() + Send>;

pub struct Namespace {
    name: String,
    thread_id: Pid,
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// Whether this process may make namespaces.
pub fn is_allowed() -> bool {
    std::thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET).is_ok()).join().unwrap_or(false)
}

impl Namespace {
    /// A new one with nothing in it but loopback, which is up.
    pub fn new(name: &str) -> Result<Self, Error> {
        let (jobs, queue) = mpsc::channel::<Job>();
        let (told, tell) = mpsc::channel();
        let builder = std::thread::Builder::new().name(name.to_owned());
        let thread = builder.spawn(move || {
            let made = unshare(CloneFlags::CLONE_NEWNET).map(|()| nix::unistd::gettid());
            let goes_on = made.is_ok();
            let _ = told.send(made); // whoever made this waits for it
            if goes_on {
                queue.into_iter().for_each(|job| job());
            }
        });
        let thread = thread.map_err(|error| failed("no thread for a namespace", error))?;
        let thread_id = tell.recv().map_err(|error| failed("a namespace's thread", error))?.map_err(Error::NotAllowed)?;
        let namespace = Self { name: name.to_owned(), thread_id, jobs: Some(jobs), thread: Some(thread) };
        // The lab is IPv4 alone: addresses that the kernel makes up by itself would only delay it.
        let _ = namespace.set("ipv6/conf/all/disable_ipv6", "1");
        namespace.ip("link set lo up")?;
        Ok(namespace)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// By which `nsenter --net=/proc/…/ns/net` finds it, as long as it is there.
    pub fn thread_id(&self) -> i32 {
        self.thread_id.as_raw()
    }

    /// Does it inside, and waits for it.
    pub fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Error> {
        let (done, outcome) = mpsc::channel();
        let job: Job = Box::new(move || drop(done.send(work())));
        let jobs = self.jobs.as_ref().ok_or_else(|| Error::Unknown(self.name.clone()))?;
        jobs.send(job).map_err(|_| failed(&self.name, "its thread ended"))?;
        outcome.recv().map_err(|_| failed(&self.name, "what was to happen there did not end"))
    }

    /// Runs a program inside, to its end.
    pub fn call(&self, program: &str, arguments: &[&str]) -> Result<String, Error> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null());
        let what = format!("{program} {} in {}", arguments.join(" "), self.name);
        let output = self.run(move || command.output())?.map_err(|error| failed(&what, error))?;
        if !output.status.success() {
            return Err(failed(what, String::from_utf8_lossy(&output.stderr).trim()));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub fn ip(&self, arguments: &str) -> Result<(), Error> {
        // Not every PATH has it.
        let program =
            ["/usr/sbin/ip", "/sbin/ip", "/usr/bin/ip"].into_iter().find(|path| Path::new(path).exists()).unwrap_or("ip");
        self.call(program, &arguments.split(' ').collect::<Vec<_>>()).map(drop)
    }

    /// Sets a kernel setting of the namespace, below `net/`.
    fn set(&self, name: &str, value: &'static str) -> Result<(), Error> {
        let path = format!("/proc/sys/net/{name}");
        let what = format!("setting {name} in {}", self.name);
        self.run(move || std::fs::write(path, value))?.map_err(|error| failed(what, error))
    }

    /// Lets it pass on packets.
    pub fn forward(&self) -> Result<(), Error> {
        self.set("ipv4/ip_forward", "1")
    }

    /// A wire to another one; both ends are up.
    pub fn wire(&self, name: &str, other: &Self, name_there: &str) -> Result<(), Error> {
        self.ip(&format!("link add {name} type veth peer name {name_there} netns {}", other.thread_id()))?;
        self.ip(&format!("link set {name} up"))?;
        other.ip(&format!("link set {name_there} up"))
    }

    /// Starts a process inside. It is killed when the namespace's thread ends, which also means: when we are killed.
    pub fn spawn(&self, command: &Command) -> Result<Child, Error> {
        let mut mortal = mortal(command);
        let what = format!("{} in {}", command.get_program().to_string_lossy(), self.name);
        self.run(move || mortal.stdin(Stdio::null()).spawn())?.map_err(|error| failed(what, error))
    }

    pub fn listen(&self, address: SocketAddr) -> Result<TcpListener, Error> {
        let what = format!("listening on {address} in {}", self.name);
        self.run(move || TcpListener::bind(address))?.map_err(|error| failed(what, error))
    }

    /// A connection that comes from here.
    pub fn connect(&self, address: SocketAddr, within: Duration) -> io::Result<TcpStream> {
        self.run(move || TcpStream::connect_timeout(&address, within)).map_err(io::Error::other)?
    }
}

/// The same command, which ends when the thread that starts it does. Output and environment are not taken over: set them on what is
/// returned, or let the command itself say.
pub fn mortal(command: &Command) -> Command {
    let mut wrapped = Command::new("setpriv");
    wrapped.args(["--pdeathsig", "KILL", "--"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => wrapped.env(name, value),
            None => wrapped.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        wrapped.current_dir(folder);
    }
    wrapped
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it has nothing to say
        }
    }
}
