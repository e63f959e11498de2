//! Many connections, each with a state machine of its own: one small task per connection, one callback for everything it receives.

use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::task::AtomicWaker;
use tokio::task::JoinHandle;
use tokio::time::Sleep;

use super::connection::{ClosedReason, Connection, Wire};
use super::parse::Frame;

/// What lives at the end of a connection. All calls come from one task, in wire order; none may block.
pub trait Handler: Send + 'static {
    /// What the rest of the program tells this connection.
    type Command: Send + 'static;

    /// A message, PONG, INFO or error. PING has been answered already.
    fn on_frame(&mut self, frame: Frame<'_>, wire: &mut Wire<'_>);

    fn on_command(&mut self, command: Self::Command, wire: &mut Wire<'_>);

    /// When [`Handler::on_deadline`] wants to be called next; asked again after every other call.
    fn deadline(&self) -> Option<Instant> {
        None
    }

    fn on_deadline(&mut self, now: Instant, wire: &mut Wire<'_>) {
        let _ = (now, wire);
    }

    /// What keeps this connection from being served, if something does; asked whenever it would be.
    fn stall(&self) -> Option<Stall> {
        None
    }
}

/// A connection that is not served as it should be, on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stall {
    /// Nothing is read or written until then: as if the network were gone, or the process stopped.
    Silent(Instant),
    /// Nothing is read until then.
    Unread(Instant),
    /// What arrives is read only after this time.
    Late(Duration),
}

struct Mailbox<C> {
    /// `None` once the sender is gone.
    commands: Mutex<Option<VecDeque<C>>>,
    waker: AtomicWaker,
}

impl<C> Mailbox<C> {
    fn with<R>(&self, use_commands: impl FnOnce(&mut Option<VecDeque<C>>) -> R) -> R {
        // The lock is never held while foreign code runs, so a poisoned queue is still whole.
        use_commands(&mut self.commands.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Reaches one connection's handler from anywhere. Dropping it closes the connection.
pub struct CommandSender<C> {
    mailbox: Arc<Mailbox<C>>,
}

impl<C> CommandSender<C> {
    pub fn send(&self, command: C) {
        self.mailbox.with(|commands| {
            if let Some(commands) = commands {
                commands.push_back(command);
            }
        });
        self.mailbox.waker.wake();
    }
}

impl<C> Drop for CommandSender<C> {
    fn drop(&mut self) {
        self.mailbox.with(|commands| *commands = None);
        self.mailbox.waker.wake();
    }
}

/// A connection that runs by itself.
pub struct Running<H: Handler> {
    pub commands: CommandSender<H::Command>,
    /// Gives the handler back at the end, and says why the end came early if it did.
    pub task: JoinHandle<(H, Result<(), ClosedReason>)>,
}

/// Runs a connection until its [`CommandSender`] is dropped or it fails.
pub fn spawn<H: Handler>(connection: Connection, handler: H) -> Running<H> {
    let mailbox = Arc::new(Mailbox { commands: Mutex::new(Some(VecDeque::new())), waker: AtomicWaker::new() });
    let commands = CommandSender { mailbox: Arc::clone(&mailbox) };
    let mut member = Member { connection, handler, mailbox, timer: None, pause: None };
    let task = tokio::spawn(async move {
        let end = poll_fn(|cx| member.poll(cx)).await;
        (member.handler, end)
    });
    Running { commands, task }
}

struct Member<H: Handler> {
    connection: Connection,
    handler: H,
    mailbox: Arc<Mailbox<H::Command>>,
    /// Boxed and only there while a deadline is set: a timer is larger than everything else an idle connection holds.
    timer: Option<Pin<Box<Sleep>>>,
    /// While it is stalled.
    pause: Option<Pin<Box<Sleep>>>,
}

impl<H: Handler> Member<H> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), ClosedReason>> {
        self.mailbox.waker.register(cx.waker());
        if self.run_commands().is_none() {
            return Poll::Ready(Ok(()));
        }
        let stall = self.handler.stall();
        let reads = match stall {
            None => {
                self.pause = None;
                true
            }
            Some(Stall::Silent(until) | Stall::Unread(until)) => self.has_paused(until, cx),
            Some(Stall::Late(by)) => self.is_late_enough(by, cx),
        };
        if !reads && matches!(stall, Some(Stall::Silent(_))) {
            return Poll::Pending;
        }
        if reads && let Err(reason) = self.read_all(cx) {
            return Poll::Ready(Err(reason));
        }
        self.run_deadlines(cx);
        match self.connection.poll_write(cx) {
            Poll::Ready(Err(reason)) => Poll::Ready(Err(reason)),
            _ => Poll::Pending,
        }
    }

    /// Reads until the socket has no more: readiness is only reported again after it was exhausted. Tokio's budget ends this for a
    /// connection that is flooded, so the others get their turn.
    fn read_all(&mut self, cx: &mut Context<'_>) -> Result<(), ClosedReason> {
        loop {
            let handler = &mut self.handler;
            match self.connection.poll_frames(cx, |frame, wire| handler.on_frame(frame, wire)) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(reason)) => return Err(reason),
                Poll::Pending => return Ok(()),
            }
        }
    }

    fn has_paused(&mut self, until: Instant, cx: &mut Context<'_>) -> bool {
        let until = tokio::time::Instant::from_std(until);
        let pause = self.pause.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if pause.deadline() != until {
            pause.as_mut().reset(until);
        }
        let over = pause.as_mut().poll(cx).is_ready();
        if over {
            self.pause = None;
        }
        over
    }

    fn is_late_enough(&mut self, by: Duration, cx: &mut Context<'_>) -> bool {
        let until = match &self.pause {
            Some(pause) => pause.deadline().into_std(),
            None if self.connection.poll_readable(cx).is_ready() => Instant::now() + by,
            None => return false,
        };
        self.has_paused(until, cx)
    }

    /// `None` when the sender is gone.
    fn run_commands(&mut self) -> Option<()> {
        loop {
            let waiting = self.mailbox.with(|commands| commands.as_mut().map(std::mem::take))?;
            if waiting.is_empty() {
                return Some(());
            }
            for command in waiting {
                self.handler.on_command(command, &mut Wire::of(&mut self.connection));
            }
        }
    }

    fn run_deadlines(&mut self, cx: &mut Context<'_>) {
        while let Some(deadline) = self.handler.deadline() {
            let deadline = tokio::time::Instant::from_std(deadline);
            let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(deadline)));
            if timer.deadline() != deadline {
                timer.as_mut().reset(deadline);
            }
            if timer.as_mut().poll(cx).is_pending() {
                return;
            }
            self.timer = None;
            self.handler.on_deadline(Instant::now(), &mut Wire::of(&mut self.connection));
        }
        self.timer = None;
    }
}
