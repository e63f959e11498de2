//! The operator's command line: one file for each family of verbs. Data goes to stdout, words to stderr, and the exit code says what
//! became of it.

pub mod apply;
pub mod audit;
pub mod bus;
pub mod client;
pub mod config;
pub mod context;
pub mod credential;
pub mod doctor;
pub mod explain;
pub mod get;
pub mod host;
pub mod init;
pub mod output;
pub mod plan;
pub mod registrations;
pub mod setup;
pub mod sources;
pub mod token;
pub mod transfer;
pub mod wait;
pub mod watching;

use std::fmt;
use std::process::ExitCode;

pub type Result<T = ()> = std::result::Result<T, Failure>;

/// What an exit code means. 2 is clap's: the command line cannot be understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    Failure = 1,
    Usage = 2,
    /// A conflict, or a plan that is stale.
    Conflict = 3,
    NotFound = 4,
    TimedOut = 5,
    /// At least one host reported that it failed.
    HostFailed = 6,
}

/// Why a command did not do what it was asked, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub code: Code,
    pub message: String,
    /// Further lines, each about one thing.
    pub details: Vec<String>,
    /// What to do next.
    pub hint: Option<String>,
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), details: Vec::new(), hint: None }
    }

    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(Code::Failure, message)
    }

    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Code::Usage, message)
    }

    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(self.code as u8)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.message)?;
        for detail in &self.details {
            write!(f, "\n  {detail}")?;
        }
        match &self.hint {
            Some(hint) => write!(f, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::failed(format!("{error:#}"))
    }
}
