//! Servers that pretend to be a Cloud Controller with its UAA, or Neutron with its Keystone: what they say is what the real ones say,
//! and on demand they fail in the ways that the real ones do.
//!
//! Each is a plain model that turns a [`Call`] into a [`Reply`]; [`serve`] puts it behind HTTP, with TLS where wanted. Tests that need
//! thousands of schedules call the models directly ([`local`]).

pub mod cloud_controller;
pub mod command;
pub mod local;
pub mod neutron;
pub mod serve;
pub mod tls;

use std::time::Duration;

use serde_json::Value;

pub use cloud_controller::CloudController;
pub use neutron::Neutron;

/// Calls that are remembered.
const CALLS_MAX: usize = 100_000;

/// A request.
#[derive(Debug, Clone, Default)]
pub struct Call {
    pub method: String,
    pub path: String,
    pub query: Vec<(String, String)>,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// It came by the address that asks for a client's certificate.
    pub internal: bool,
}

impl Call {
    pub fn header(&self, name: &str) -> &str {
        let found = self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map_or("", |(_, value)| value.as_str())
    }

    pub fn asked(&self, key: &str) -> Option<&str> {
        self.query.iter().find(|(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_default()
    }

    /// From the path and query of a URL.
    pub fn get(path_and_query: &str) -> Self {
        let (path, query) = path_and_query.split_once('?').unwrap_or((path_and_query, ""));
        let pairs = query.split('&').filter(|pair| !pair.is_empty());
        let pair = |pair: &str| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (unescaped(key), unescaped(value))
        };
        Self { method: "GET".into(), path: unescaped(path), query: pairs.map(pair).collect(), ..Self::default() }
    }
}

fn unescaped(text: &str) -> String {
    let (mut bytes, mut out) = (text.bytes(), Vec::new());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits: Vec<u8> = bytes.by_ref().take(2).collect();
                std::str::from_utf8(&digits).ok().and_then(|hex| u8::from_str_radix(hex, 16).ok()).unwrap_or(b'?')
            }
            byte => byte,
        });
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// How an answer is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Manner {
    #[default]
    Whole,
    /// The connection breaks in the middle.
    Truncated,
    /// Nothing comes.
    Hanging,
}

#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    pub manner: Manner,
}

impl Reply {
    pub fn json(status: u16, body: &Value) -> Self {
        Self { status, body: body.to_string().into_bytes(), ..Self::default() }
    }

    pub fn empty(status: u16) -> Self {
        Self { status, ..Self::default() }
    }

    pub fn with(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.push((name, value.to_string()));
        self
    }
}

/// What goes wrong with an answer.
#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    Status {
        status: u16,
        retry_after: Option<u64>,
    },
    Hang,
    Truncate,
    /// Answered with 200 and this.
    Body(String),
    /// The list is null.
    Null,
    /// All tokens end before the call is looked at.
    Revoke,
    /// Where a listing is to go on is not heeded: it begins again.
    Repeat,
    /// A list that ends before its first item, whatever is said beside it.
    Empty,
    /// A status, and until when to leave the server alone, as a date.
    Until {
        status: u16,
        seconds: u64,
    },
    /// An answer with one item of so many bytes.
    Huge {
        bytes: usize,
    },
}

/// Something that happens when calls of a kind come.
#[derive(Debug, Clone)]
pub struct Upset<E> {
    /// In their path.
    pub path: String,
    /// So many of them pass first.
    pub skip: u32,
    /// Then it happens to so many.
    pub times: u32,
    pub what: What<E>,
}

#[derive(Debug, Clone)]
pub enum What<E> {
    Fault(Fault),
    /// After the call was answered, this is done: between two pages, for example.
    Then(E),
}

/// What is still to happen.
#[derive(Debug, Clone)]
pub struct Upsets<E>(Vec<Upset<E>>);

impl<E> Default for Upsets<E> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<E: Clone> Upsets<E> {
    pub fn add(&mut self, path: &str, skip: u32, times: u32, what: What<E>) {
        self.0.push(Upset { path: path.to_owned(), skip, times, what });
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// What happens to a call of this path: at most one fault, and everything that follows it.
    pub fn of(&mut self, path: &str) -> (Option<Fault>, Vec<E>) {
        let (mut fault, mut then) = (None, Vec::new());
        for upset in self.0.iter_mut().filter(|upset| path.contains(&upset.path) && upset.times > 0) {
            if upset.skip > 0 {
                upset.skip -= 1;
                continue;
            }
            match &upset.what {
                What::Fault(_) if fault.is_some() => continue,
                What::Fault(one) => fault = Some(one.clone()),
                What::Then(edit) => then.push(edit.clone()),
            }
            upset.times -= 1;
        }
        self.0.retain(|upset| upset.times > 0);
        (fault, then)
    }
}

/// A server's model.
pub trait Fake: Send + 'static {
    /// `since` is how long the server has run.
    fn handle(&mut self, call: &Call, since: Duration) -> Reply;
}

/// Calls that came, for those who count them.
#[derive(Debug, Clone, Default)]
pub struct Calls(Vec<String>);

impl Calls {
    fn note(&mut self, call: &Call) {
        if self.0.len() < CALLS_MAX {
            let query: Vec<String> = call.query.iter().map(|(key, value)| format!("{key}={value}")).collect();
            self.0.push(format!("{} {}?{}", call.method, call.path, query.join("&")));
        }
    }

    pub fn take(&mut self) -> Vec<String> {
        std::mem::take(&mut self.0)
    }

    /// Those whose path holds this.
    pub fn of(&self, path: &str) -> usize {
        self.0.iter().filter(|call| call.contains(path)).count()
    }
}

/// Tokens and when they end.
#[derive(Debug, Clone)]
pub struct Tokens {
    issued: Vec<(String, Duration)>,
    pub lasts: Duration,
    count: u64,
}

impl Default for Tokens {
    fn default() -> Self {
        Self { issued: Vec::new(), lasts: Duration::from_secs(600), count: 0 }
    }
}

impl Tokens {
    fn issue(&mut self, since: Duration) -> String {
        self.count += 1;
        let token = format!("token-{}", self.count);
        self.issued.retain(|(_, ends)| *ends > since);
        self.issued.push((token.clone(), since.saturating_add(self.lasts)));
        token
    }

    fn is_valid(&self, token: &str, since: Duration) -> bool {
        self.issued.iter().any(|(known, ends)| known == token && *ends > since)
    }

    pub fn revoke(&mut self) {
        self.issued.clear();
    }

    /// How many were given out.
    pub fn count(&self) -> u64 {
        self.count
    }
}

/// A made-up UUID that is the same in every run.
fn uuid(random: &mut crate::random::Random) -> String {
    let (high, low) = (random.next(), random.next());
    format!(
        "{:08x}-{:04x}-4{:03x}-8{:03x}-{:012x}",
        high >> 32,
        (high >> 16) & 0xffff,
        high & 0xfff,
        low >> 52,
        low & 0xffff_ffff_ffff
    )
}
