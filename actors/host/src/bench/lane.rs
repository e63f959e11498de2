//! Real packets: a namespace that sends, one that forwards and one that receives, joined by veth. A sender's packet is carried through
//! all three before its system call returns, so that packets a second tell what one packet costs. Of each second, the time does not
//! count in which the sending thread waited for a processor: on a busy machine that measures the others.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sched::{CloneFlags, unshare};
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrIn, sendmmsg};

use super::Failure;

/// Packets handed over with one system call.
const BURST: usize = 64;
/// A flow is a socket of its own.
const FLOWS: usize = 16;
const PAYLOAD: [u8; 18] = [0; 18];

pub const SENDER: Ipv4Addr = Ipv4Addr::new(10, 64, 0, 2);
pub const RECEIVER: Ipv4Addr = Ipv4Addr::new(10, 64, 1, 2);

pub fn command(program: &str, words: &str) -> Result<(), Failure> {
    let output = Command::new(program).args(words.split_whitespace()).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} {words}: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}

/// A thread in a network namespace of its own, which lives as long as the thread.
struct Place {
    /// By which `ip` finds the namespace.
    thread: nix::unistd::Pid,
    jobs: Sender<Job>,
    done: JoinHandle<()>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Place {
    fn new() -> Result<Self, Failure> {
        let (jobs, queue): (Sender<Job>, Receiver<Job>) = channel();
        let (born, birth) = channel();
        let done = thread::spawn(move || {
            let outcome = unshare(CloneFlags::CLONE_NEWNET).map(|()| nix::unistd::gettid());
            if born.send(outcome).is_ok() {
                queue.into_iter().for_each(|job| job());
            }
        });
        let thread = birth.recv()??;
        Ok(Self { thread, jobs, done })
    }

    fn run<T: Send + 'static>(&self, job: impl FnOnce() -> Result<T, Failure> + Send + 'static) -> Result<T, Failure> {
        let (answer, answered) = channel();
        let job: Job = Box::new(move || _ = answer.send(job()));
        self.jobs.send(job).map_err(|_| "a namespace's thread has ended")?;
        answered.recv()?
    }

    fn end(self) {
        drop(self.jobs);
        let _ = self.done.join();
    }
}

/// How long the calling thread has waited for a processor.
fn waited() -> Result<Duration, Failure> {
    let all = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds = all.split_whitespace().nth(1).ok_or("the kernel does not say how long a thread waited")?;
    Ok(Duration::from_nanos(nanoseconds.parse()?))
}

pub struct Lane {
    pub name: &'static str,
    sender: Place,
    router: Place,
    receiver: Place,
    flows: Vec<UdpSocket>,
    port: u16,
}

impl Lane {
    /// `from` and `to` are the forwarding namespace's interfaces; packets go to this port.
    pub fn new(name: &'static str, from: &str, to: &str, port: u16) -> Result<Self, Failure> {
        let (sender, router, receiver) = (Place::new()?, Place::new()?, Place::new()?);
        let (from, to) = (from.to_owned(), to.to_owned());
        let (send_thread, receive_thread) = (sender.thread, receiver.thread);
        router.run(move || {
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
            std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "0")?;
            for (interface, peer, owner, address) in
                [(&from, "sender", send_thread, "10.64.0.1/24"), (&to, "receiver", receive_thread, "10.64.1.1/24")]
            {
                command("ip", &format!("link add {interface} type veth peer name {peer}"))?;
                command("ip", &format!("link set {peer} netns {owner}"))?;
                command("ip", &format!("address add {address} dev {interface}"))?;
                command("ip", &format!("link set {interface} up"))?;
            }
            Ok(())
        })?;
        let flows = sender.run(move || {
            command("ip", &format!("address add {SENDER}/24 dev sender"))?;
            command("ip", "link set sender up")?;
            command("ip", "route add default via 10.64.0.1")?;
            let flow = |_| -> io::Result<UdpSocket> {
                let socket = UdpSocket::bind((SENDER, 0))?;
                socket.connect((RECEIVER, port))?;
                Ok(socket)
            };
            Ok((0..FLOWS).map(flow).collect::<Result<Vec<_>, _>>()?)
        })?;
        receiver.run(|| {
            command("ip", &format!("address add {RECEIVER}/24 dev receiver"))?;
            command("ip", "link set receiver up")?;
            command("ip", "route add default via 10.64.1.1")
        })?;
        Ok(Self { name, sender, router, receiver, flows, port })
    }

    /// Each flow is answered once, which makes it established; from then on what arrives is counted and dropped before any socket, so that
    /// nothing answers and nothing has to be read.
    pub fn establish(&self) -> Result<(), Failure> {
        let port = self.port;
        let socket = self.receiver.run(move || Ok(UdpSocket::bind((RECEIVER, port))?))?;
        for flow in &self.flows {
            let patience = Some(Duration::from_secs(10));
            socket.set_read_timeout(patience)?;
            flow.set_read_timeout(patience)?;
            let lost = |error: io::Error| format!("{}: a flow is not established: {error}", self.name);
            flow.send(&PAYLOAD)?;
            let (_, from) = socket.recv_from(&mut [0; 64]).map_err(lost)?;
            socket.send_to(&PAYLOAD, from)?;
            flow.recv(&mut [0; 64]).map_err(lost)?;
        }
        Ok(())
    }

    pub fn sink(&self) -> Result<(), Failure> {
        self.receiver.run(|| {
            command("nft", "add table ip sink")?;
            command("nft", "add chain ip sink count { type filter hook prerouting priority -500 ; policy accept ; }")?;
            command("nft", "add rule ip sink count iifname receiver meta l4proto udp counter drop")
        })
    }

    /// In the namespace that forwards.
    pub fn at_router<T: Send + 'static>(&self, job: impl FnOnce() -> Result<T, Failure> + Send + 'static) -> Result<T, Failure> {
        self.router.run(job)
    }

    fn received(&self) -> Result<u64, Failure> {
        self.receiver.run(|| {
            // Bytes come before packets. Of the thread, not of the process: only the thread is in this namespace.
            let all = std::fs::read_to_string("/proc/thread-self/net/dev")?;
            let line = all.lines().find_map(|line| line.trim_start().strip_prefix("receiver:"));
            let packets = line.and_then(|line| line.split_whitespace().nth(1)).ok_or("the receiver's interface is not there")?;
            Ok(packets.parse()?)
        })
    }

    /// Packets a second that came through, sending for so long.
    pub fn round(&mut self, time: Duration) -> Result<f64, Failure> {
        let before = self.received()?;
        let (start, waited) = (Instant::now(), waited()?);
        let mut headers = MultiHeaders::preallocate(BURST, None);
        let bursts = [[io::IoSlice::new(&PAYLOAD)]; BURST];
        let addresses: [Option<SockaddrIn>; BURST] = [None; BURST];
        let mut sent = 0;
        while start.elapsed() < time {
            for flow in &self.flows {
                sent += sendmmsg(flow.as_raw_fd(), &mut headers, &bursts, addresses, [], MsgFlags::empty())?.count() as u64;
            }
        }
        let took = start.elapsed().saturating_sub(self::waited()?.saturating_sub(waited)).as_secs_f64();
        // What is still on its way on the other processor.
        let mut came = self.received()? - before;
        let deadline = Instant::now() + Duration::from_millis(100);
        while came < sent && Instant::now() < deadline {
            thread::yield_now();
            came = self.received()? - before;
        }
        let rate = came as f64 / took;
        if came * 10 < sent * 9 {
            return Err(format!("{}: of {sent} packets only {came} came through", self.name).into());
        }
        Ok(rate)
    }

    pub fn end(self) {
        drop(self.flows);
        [self.sender, self.router, self.receiver].into_iter().for_each(Place::end);
    }
}
