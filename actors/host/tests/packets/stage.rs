//! A machine in a network namespace of its own, and the wires of its interfaces held by the test: what is written to a wire comes in on
//! the interface and is worked off before the write returns; what the machine sends out is read from it. So whether a packet passed is
//! known without waiting; a sentinel that nobody judges, sent after it, proves that the wires work.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;
use std::thread;

use groupcast_policy::net::Family;
use nix::sched::{CloneFlags, unshare};

use crate::packet::Packet;

/// Runs in a fresh network namespace, which ends with the thread; `None` where that is not allowed.
pub fn isolated<T: Send + 'static>(test: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let run = thread::spawn(move || {
        if let Err(error) = unshare(CloneFlags::CLONE_NEWNET) {
            eprintln!("not run: no network namespace ({error})");
            return None;
        }
        if let Err(error) = File::open("/dev/net/tun") {
            eprintln!("not run: no /dev/net/tun ({error})");
            return None;
        }
        settle_namespace();
        Some(test())
    });
    run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Makes the calling thread's fresh namespace a machine that forwards.
pub fn settle_namespace() {
    run("ip", &["link", "set", "lo", "up"]);
    for (path, value) in [
        ("ipv4/ip_forward", "1"),
        ("ipv6/conf/all/forwarding", "1"),
        ("ipv4/conf/all/rp_filter", "0"),
        ("ipv4/conf/default/rp_filter", "0"),
        ("ipv6/conf/default/accept_dad", "0"),
    ] {
        std::fs::write(format!("/proc/sys/net/{path}"), value).unwrap_or_else(|error| panic!("{path}: {error}"));
    }
}

pub fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}

pub struct Wire {
    file: File,
}

#[repr(C)]
struct InterfaceRequest {
    name: [u8; 16],
    flags: u16,
    padding: [u8; 22],
}

mod ioctl {
    nix::ioctl_write_int!(set_interface, b'T', 202);
}

/// The one call that nobody offers a safe form of.
#[allow(unsafe_code)]
fn attach(file: &File, name: &str) {
    const TUN: u16 = 1;
    const NO_PACKET_INFO: u16 = 0x1000;
    let mut request = InterfaceRequest { name: [0; 16], flags: TUN | NO_PACKET_INFO, padding: [0; 22] };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // Sound: the request outlives the call, and is as large as the kernel's.
    let result = unsafe { ioctl::set_interface(file.as_raw_fd(), &raw const request as nix::libc::c_ulong) };
    result.unwrap_or_else(|error| panic!("interface {name}: {error}"));
}

impl Wire {
    /// An interface of the machine, with the machine's own addresses on it and routes to those at the other end.
    pub fn new(name: &str, own: &[&str], peers: &[String]) -> Self {
        let file = OpenOptions::new().read(true).write(true).custom_flags(nix::libc::O_NONBLOCK).open("/dev/net/tun");
        let file = file.unwrap_or_else(|error| panic!("/dev/net/tun: {error}"));
        attach(&file, name);
        run("ip", &["link", "set", name, "up"]);
        for address in own {
            run("ip", &["address", "add", address, "dev", name]);
        }
        for peer in peers {
            run("ip", &["route", "add", peer, "dev", name]);
        }
        Self { file }
    }

    pub fn send(&mut self, packet: &Packet) {
        self.send_bytes(&packet.bytes());
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.file.write_all(bytes).unwrap_or_else(|error| panic!("{bytes:02x?}: {error}"));
    }

    /// Whether the packet is among what has come out since the last look.
    pub fn received(&mut self, packet: &Packet) -> bool {
        self.drain().iter().any(|bytes| packet.is(bytes))
    }

    /// Everything that has come out since the last look.
    pub fn drain(&mut self) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            match self.file.read(&mut buffer) {
                Ok(length) => all.push(buffer[..length].to_vec()),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return all,
                Err(error) => panic!("reading a wire: {error}"),
            }
        }
    }
}

pub const FAMILIES: [Family; 2] = [Family::V4, Family::V6];
