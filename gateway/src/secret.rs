//! Files that only their owner may read.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// A new file that only its owner may read, in the place of one that is there.
pub fn create(path: &Path) -> io::Result<std::fs::File> {
    // What an interrupted write left may have been made by somebody else.
    let _ = std::fs::remove_file(path);
    std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Writes a new file beside the old one and puts it in its place: nobody sees half a secret, or one that others can read.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut file = create(Path::new(&beside))?;
    file.write_all(text.as_bytes())?;
    file.write_all(b"\n")?;
    file.sync_all()?;
    std::fs::rename(&beside, path)
}

/// Whether a secret could be written there, without writing one.
pub fn probe(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a folder"));
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let _ = std::fs::remove_file(&beside);
    std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside)?;
    std::fs::remove_file(&beside)
}
