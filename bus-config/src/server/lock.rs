//! One server on one folder: the kernel keeps the lock for as long as anybody holds the file open, and the server itself does, so that it
//! outlives whoever started it by exactly as much as the server does.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::{Error, POLL};

/// In the folder that is locked.
const NAME: &str = "lock";

/// The folder is ours.
#[derive(Debug)]
pub struct Lock(File);

impl Lock {
    /// Takes the folder, or says who has it.
    pub fn take(folder: &Path) -> Result<Self, Error> {
        let path = folder.join(NAME);
        let failed = |what: &'static str| {
            let path = path.clone();
            move |source| Error::File { what, path, source }
        };
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let mut file = open.map_err(failed("opening"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let read = file.read_to_string(&mut holder);
                let holder = if read.is_ok() && !holder.trim().is_empty() { holder.trim().to_owned() } else { "unknown".into() };
                return Err(Error::InUse { path: folder.to_owned(), holder });
            }
            Err(TryLockError::Error(source)) => return Err(failed("locking")(source)),
        }
        let written = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| write!(file, "{}", std::process::id()));
        written.map_err(failed("writing"))?;
        Ok(Self(file))
    }

    /// The same, and waits for a server that is about to end: it outlives whoever was killed by a moment.
    pub fn take_within(folder: &Path, within: Duration) -> Result<Self, Error> {
        let begun = Instant::now();
        loop {
            match Self::take(folder) {
                Err(Error::InUse { .. }) if begun.elapsed() < within => std::thread::sleep(POLL),
                taken => return taken,
            }
        }
    }

    /// What a child is given as its input, which it does not read, to hold the lock itself.
    pub(super) fn share(&self) -> std::io::Result<File> {
        self.0.try_clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_one_holder_and_is_free_when_that_is_gone() {
        let folder = std::env::temp_dir().join(format!("groupcast-lock-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let first = Lock::take(&folder).unwrap();
        let words = Lock::take(&folder).unwrap_err().to_string();
        assert!(words.contains(&format!("process {}", std::process::id())), "{words}");
        drop(first);
        drop(Lock::take(&folder).unwrap());
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(matches!(Lock::take(&folder), Err(Error::File { .. })));
    }
}
