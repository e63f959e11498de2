//! The transport: one transaction is one datagram. The kernel works it off inside `send`, so what has not been complained about when
//! `send` returns is committed, and no acknowledgement is asked for that could overflow the receive queue.

use std::io;

use netlink_sys::{Socket, protocols::NETLINK_NETFILTER};
use nix::sys::socket::{MsgFlags, setsockopt, sockopt};

use super::wire::{Attributes, MESSAGE_HEADER, Messages, Writer};

pub const SUBSYSTEM: u16 = 10 << 8;
/// The inet family: IPv4 and IPv6 in one table.
pub const INET: u8 = 1;
/// Frames on their way through a bridge.
pub const BRIDGE: u8 = 7;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
const SUBSYSTEM_NUMBER: u16 = 10;

const REQUEST: u16 = 1;
const ACK: u16 = 4;
pub const CREATE: u16 = 0x400;
pub const APPEND: u16 = 0x800;
pub const DUMP: u16 = 0x300;
/// Every message about netfilter begins with a family and three bytes more.
pub const NETFILTER_HEAD_BYTES: usize = 4;
/// The kernel says what it made of the message.
pub const ECHO: u16 = 8;

const KIND_ERROR: u16 = 2;
const KIND_DONE: u16 = 3;
const FLAG_INTERRUPTED: u16 = 0x10;
const FLAG_ACK_TLVS: u16 = 0x200;
const ATTRIBUTE_WORDS: u16 = 1;

/// For errors of a whole transaction and for dumps; the kernel never sends a larger datagram than this.
const RECEIVE_BUFFER_BYTES: usize = 1 << 20;
const RECEIVE_QUEUE_BYTES: usize = 8 << 20;
/// What a member's leaving and the new stamp need: room for it is made at once.
const SMALL_BATCH_BYTES: usize = 2 << 10;
/// What a datagram needs beyond its own bytes.
const SEND_MARGIN_BYTES: usize = 64 << 10;
/// A dump that was disturbed by somebody's commit is taken again; neighbours commit all the time, but not for ever.
pub const DUMP_ATTEMPTS_MAX: usize = 200;

/// One complaint of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Complaint {
    /// The message it is about; `None`: the transaction as a whole.
    pub message: Option<usize>,
    pub errno: i32,
    pub words: Option<String>,
}

/// What the kernel says to a transaction; without complaints it is committed.
#[derive(Debug, Default)]
pub struct Reply {
    pub complaints: Vec<Complaint>,
    /// The handles of rules that were to be echoed, in the order they were added.
    pub handles: Vec<u64>,
}

/// The messages of one transaction.
#[derive(Debug)]
pub struct Batch {
    pub writer: Writer,
    sequence: u32,
    messages: usize,
}

impl Default for Batch {
    fn default() -> Self {
        let mut batch = Batch { writer: Writer::with_room(SMALL_BATCH_BYTES), sequence: 0, messages: 0 };
        batch.message_of(BATCH_BEGIN, REQUEST, 0, SUBSYSTEM_NUMBER, |_| {});
        batch
    }
}

impl Batch {
    fn message_of(&mut self, kind: u16, flags: u16, family: u8, resource: u16, fill: impl FnOnce(&mut Writer)) {
        let bytes = &mut self.writer.bytes;
        let start = bytes.len();
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(&self.sequence.to_ne_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&[family, 0]);
        bytes.extend_from_slice(&resource.to_be_bytes());
        fill(&mut self.writer);
        self.close(start);
    }

    fn close(&mut self, start: usize) {
        let length = (self.writer.bytes.len() - start) as u32;
        self.writer.bytes[start..start + 4].copy_from_slice(&length.to_ne_bytes());
        self.sequence += 1;
    }

    pub fn message(&mut self, family: u8, kind: u8, flags: u16, fill: impl FnOnce(&mut Writer)) {
        self.message_of(SUBSYSTEM | u16::from(kind), REQUEST | flags, family, 0, fill);
        self.messages += 1;
    }

    /// How many there are so far.
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// Takes over the messages that rustables wrote, without its wish for acknowledgements.
    pub fn splice(&mut self, batch: rustables::Batch) {
        for message in Messages(&batch.finalize()) {
            if message.kind == BATCH_BEGIN || message.kind == BATCH_END {
                continue;
            }
            let bytes = &mut self.writer.bytes;
            let start = bytes.len();
            bytes.extend_from_slice(&[0; 4]);
            bytes.extend_from_slice(&message.kind.to_ne_bytes());
            bytes.extend_from_slice(&(message.flags & !ACK).to_ne_bytes());
            bytes.extend_from_slice(&self.sequence.to_ne_bytes());
            bytes.extend_from_slice(&[0; 4]);
            bytes.extend_from_slice(message.body);
            while !bytes.len().is_multiple_of(4) {
                bytes.push(0);
            }
            self.close(start);
            self.messages += 1;
        }
    }
}

/// One message that stands by itself: `head` is what its family of messages begins with.
pub fn single(kind: u16, flags: u16, head: &[u8], fill: impl FnOnce(&mut Writer)) -> Writer {
    let mut writer = Writer::default();
    writer.bytes.extend_from_slice(&[0; 4]);
    writer.bytes.extend_from_slice(&kind.to_ne_bytes());
    writer.bytes.extend_from_slice(&(REQUEST | flags).to_ne_bytes());
    writer.bytes.extend_from_slice(&[0; 8]);
    writer.bytes.extend_from_slice(head);
    fill(&mut writer);
    let length = writer.bytes.len() as u32;
    writer.bytes[..4].copy_from_slice(&length.to_ne_bytes());
    writer
}

/// A socket stays in the network namespace that it was made in.
pub struct Transport {
    socket: Socket,
    port: u32,
    buffer: Vec<u8>,
    send_bytes: usize,
}

impl Transport {
    pub fn open() -> io::Result<Self> {
        Self::open_on(NETLINK_NETFILTER)
    }

    pub fn open_on(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        let port = socket.bind_auto()?.port_number();
        socket.set_ext_ack(true)?;
        socket.set_cap_ack(true)?;
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_QUEUE_BYTES)?;
        Ok(Self { socket, port, buffer: Vec::with_capacity(RECEIVE_BUFFER_BYTES), send_bytes: 0 })
    }

    /// By which the kernel names this socket in notifications.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// From now on the kernel tells what happens in this group.
    pub fn join(&mut self, group: u32) -> io::Result<()> {
        self.socket.add_membership(group)
    }

    /// Everything that was told and not looked at yet. `false`: more than the queue holds was told, and some of it is lost.
    pub fn told(&mut self, mut each: impl FnMut(&super::wire::Message<'_>)) -> io::Result<bool> {
        let mut complete = true;
        loop {
            match self.receive(MsgFlags::MSG_DONTWAIT) {
                Ok(()) => Messages(&self.buffer).for_each(|message| each(&message)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(complete),
                Err(error) if error.raw_os_error() == Some(nix::libc::ENOBUFS) => complete = false,
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends messages that stand by themselves; what the kernel said against any of them, as numbers of errors.
    pub fn each(&mut self, messages: &Writer) -> io::Result<Vec<i32>> {
        if messages.overflow {
            return Err(io::Error::other("an attribute is longer than netlink can carry: this is a bug, report it"));
        }
        self.send(&messages.bytes)?;
        let mut errors = Vec::new();
        let told = self.told(|message| errors.extend(errno(message)))?;
        if told { Ok(errors) } else { Err(io::Error::from_raw_os_error(nix::libc::ENOBUFS)) }
    }

    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let needed = bytes.len() + SEND_MARGIN_BYTES;
        if needed > self.send_bytes {
            setsockopt(&self.socket, sockopt::SndBufForce, &needed)?;
            self.send_bytes = needed;
        }
        self.socket.send(bytes, 0).map(|_| ())
    }

    fn receive(&mut self, flags: MsgFlags) -> io::Result<()> {
        self.buffer.clear();
        // The buffer's room is what is received into.
        let mut room = (&mut self.buffer).limit(RECEIVE_BUFFER_BYTES);
        self.socket.recv(&mut room, flags.bits()).map(|_| ())
    }

    pub fn commit(&mut self, mut batch: Batch) -> io::Result<Reply> {
        if batch.writer.overflow {
            return Err(io::Error::other("an attribute is longer than netlink can carry: this is a bug, report it"));
        }
        batch.message_of(BATCH_END, REQUEST, 0, SUBSYSTEM_NUMBER, |_| {});
        self.send(&batch.writer.bytes)?;
        let mut reply = Reply::default();
        loop {
            match self.receive(MsgFlags::MSG_DONTWAIT) {
                Ok(()) => {
                    for message in Messages(&self.buffer) {
                        reply.complaints.extend(complaint(&message));
                        reply.handles.extend(echoed(&message));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(reply),
                Err(error) => return Err(error),
            }
        }
    }

    /// Asks for all objects of a kind and hands their attributes on. `Interrupted`: somebody committed meanwhile.
    pub fn dump(
        &mut self,
        family: u8,
        kind: u8,
        ask: impl FnOnce(&mut Writer),
        mut each: impl FnMut(u8, Attributes<'_>),
    ) -> io::Result<()> {
        let request = single(SUBSYSTEM | u16::from(kind), DUMP, &[family, 0, 0, 0], ask);
        self.dump_all(&request, NETFILTER_HEAD_BYTES, |head, attributes| each(head[0], attributes))
    }

    /// The same for a request of any kind, whose answers begin with a head of so many bytes.
    pub fn dump_all(
        &mut self,
        request: &Writer,
        head_bytes: usize,
        mut each: impl FnMut(&[u8], Attributes<'_>),
    ) -> io::Result<()> {
        self.send(&request.bytes)?;
        let mut interrupted = false;
        loop {
            self.receive(MsgFlags::empty())?;
            for message in Messages(&self.buffer) {
                interrupted |= message.flags & FLAG_INTERRUPTED != 0;
                match message.kind {
                    KIND_DONE if interrupted => return Err(io::ErrorKind::Interrupted.into()),
                    KIND_DONE => return Ok(()),
                    KIND_ERROR => return Err(io::Error::from_raw_os_error(errno(&message).unwrap_or(0))),
                    _ => {
                        if let Some((head, attributes)) = message.body.split_at_checked(head_bytes) {
                            each(head, Attributes(attributes));
                        }
                    }
                }
            }
        }
    }
}

/// The number of an error message.
fn errno(message: &super::wire::Message<'_>) -> Option<i32> {
    complaint(message).map(|complaint| complaint.errno)
}

use bytes::BufMut;

/// The handle of a rule that the kernel tells of.
fn echoed(message: &super::wire::Message<'_>) -> Option<u64> {
    const NEW_RULE: u16 = SUBSYSTEM | 6;
    const HANDLE: u16 = 3;
    (message.kind == NEW_RULE).then(|| Attributes(message.body.get(4..).unwrap_or_default()).u64(HANDLE)).flatten()
}

/// An error message: a code, the header of what it is about, and with extended acknowledgements the kernel's words.
fn complaint(message: &super::wire::Message<'_>) -> Option<Complaint> {
    if message.kind != KIND_ERROR {
        return None;
    }
    let code = i32::from_ne_bytes(*message.body.first_chunk()?);
    if code == 0 {
        return None;
    }
    let sequence = message.body.get(12..16).and_then(|bytes| Some(u32::from_ne_bytes(*bytes.first_chunk()?)))?;
    let words = (message.flags & FLAG_ACK_TLVS != 0)
        .then(|| Attributes(message.body.get(4 + MESSAGE_HEADER..).unwrap_or_default()).text(ATTRIBUTE_WORDS))
        .flatten();
    // Sequence 0 opens the batch.
    let index = usize::try_from(sequence).ok().and_then(|sequence| sequence.checked_sub(1));
    Some(Complaint { message: index, errno: -code, words: words.map(str::to_owned) })
}
