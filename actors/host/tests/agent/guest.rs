//! A workload with a network namespace of its own behind a veth, and real datagrams between it and the host.

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::mpsc;
use std::time::Duration;

use nix::sched::{CloneFlags, unshare};
use nix::unistd::gettid;

use crate::world::{ip, run};

type Job = Box<dyn FnOnce() + Send>;

/// Its address is 10.7.N.2, the host's end of the wire is 10.7.N.1.
pub struct Guest {
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<std::thread::JoinHandle<()>>,
    host: Ipv4Addr,
}

impl Guest {
    pub fn new(interface: &str, subnet: u8) -> Self {
        let (jobs, work) = mpsc::channel::<Job>();
        let (told, id) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET).unwrap();
            told.send(gettid()).unwrap();
            work.into_iter().for_each(|job| job());
        });
        let id = id.recv().unwrap();
        let peer = format!("p{subnet}");
        ip(&format!("link add {interface} type veth peer name {peer}"));
        ip(&format!("link set {peer} netns {id}"));
        ip(&format!("addr add 10.7.{subnet}.1/24 dev {interface}"));
        ip(&format!("link set {interface} up"));
        let guest = Self { jobs: Some(jobs), thread: Some(thread), host: Ipv4Addr::new(10, 7, subnet, 1) };
        guest.at(move || {
            run("ip", &["addr", "add", &format!("10.7.{subnet}.2/24"), "dev", &peer]);
            run("ip", &["link", "set", &peer, "up"]);
        });
        guest
    }

    /// Does something where the workload is.
    pub fn at<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (answer, answered) = mpsc::channel();
        self.jobs.as_ref().unwrap().send(Box::new(move || answer.send(job()).unwrap())).unwrap();
        answered.recv().unwrap()
    }

    pub fn socket(&self) -> UdpSocket {
        self.at(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap())
    }

    /// Which of these ports of the host a datagram from this socket arrives at; the last one must, and proves the others' silence.
    pub fn reaches(&self, from: &UdpSocket, ports: &[u16]) -> Vec<u16> {
        let listeners: Vec<UdpSocket> = ports.iter().map(|port| UdpSocket::bind((self.host, *port)).unwrap()).collect();
        // The first datagram may wait for the neighbour's address while the others pass it: several rounds.
        const ROUNDS: usize = 3;
        for _ in 0..ROUNDS {
            ports.iter().for_each(|port| _ = from.send_to(b"x", (self.host, *port)).unwrap());
            if let Some(last) = listeners.last() {
                last.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
                last.recv(&mut [0; 8]).unwrap_or_else(|error| panic!("the sentinel did not arrive: {error}"));
            }
        }
        let arrived = listeners.iter().zip(ports).filter(|(listener, port)| {
            listener.set_nonblocking(true).unwrap();
            Some(*port) == ports.last() || listener.recv(&mut [0; 8]).is_ok()
        });
        arrived.map(|(_, port)| *port).collect()
    }

    /// Whether a datagram arrives while that of a neighbour whom nobody judges does.
    pub fn passes(&self, port: u16, neighbour: &Guest) -> bool {
        let listener = UdpSocket::bind((self.host, port)).unwrap();
        let (own, other) = (self.socket(), neighbour.socket());
        const ROUNDS: usize = 3;
        for _ in 0..ROUNDS {
            own.send_to(b"x", (self.host, port)).unwrap();
            assert_eq!(neighbour.reaches(&other, &[port]), [port]);
        }
        listener.set_nonblocking(true).unwrap();
        listener.recv(&mut [0; 8]).is_ok()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
