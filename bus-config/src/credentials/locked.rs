//! One writer of an authority at a time: whoever reads it to write it again holds a lock from the one to the other. Two that did not would each
//! keep only what they added themselves, and a credential that nobody knows of cannot be revoked.

use std::fs::{File, OpenOptions, TryLockError};
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Authority, Error};

/// How long the lock is waited for: another command may be telling the servers, which takes as long as they do.
pub const LOCKED_WITHIN: Duration = Duration::from_secs(60);
/// How often it is tried.
const POLL: Duration = Duration::from_millis(20);

/// An authority that nobody else writes meanwhile.
pub struct Locked {
    authority: Authority,
    path: PathBuf,
    /// Beside the authority, because that is replaced whenever it is saved. The kernel lets go of it with the process.
    _lock: File,
}

impl Authority {
    /// Reads an authority that is to be written again, when whoever has it now is done.
    pub fn lock(path: &Path) -> Result<Locked, Error> {
        Self::lock_within(path, LOCKED_WITHIN)
    }

    pub(super) fn lock_within(path: &Path, within: Duration) -> Result<Locked, Error> {
        // What is not there is not locked either: a wrong name leaves nothing behind.
        Self::load(path)?;
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        let name = PathBuf::from(name);
        let failed = |what: &'static str| {
            let path = name.clone();
            move |source| Error::File { what, path, source }
        };
        let open = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&name);
        let lock = open.map_err(failed("opening"))?;
        let begun = Instant::now();
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) if begun.elapsed() < within => std::thread::sleep(POLL),
                Err(TryLockError::WouldBlock) => return Err(Error::Busy { path: path.to_owned(), within }),
                Err(TryLockError::Error(source)) => return Err(failed("locking")(source)),
            }
        }
        Ok(Locked { authority: Self::load(path)?, path: path.to_owned(), _lock: lock })
    }
}

impl Locked {
    pub fn save(&self) -> Result<(), Error> {
        self.authority.save(&self.path)
    }

    /// Lets others write it, and goes on with what was read.
    pub fn release(self) -> Authority {
        self.authority
    }
}

impl Deref for Locked {
    type Target = Authority;

    fn deref(&self) -> &Authority {
        &self.authority
    }
}

impl DerefMut for Locked {
    fn deref_mut(&mut self) -> &mut Authority {
        &mut self.authority
    }
}
