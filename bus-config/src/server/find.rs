//! Where a usable nats-server may be.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use super::Error;
use crate::streams::version_supported;

/// Names a nats-server to use before any other.
pub const SERVER_VARIABLE: &str = "GROUPCAST_NATS_SERVER";
/// Where `./test --setup` puts one, below the workspace's root.
const LOCAL: &str = ".nats-server/nats-server";

/// The server to use: the one named by [`SERVER_VARIABLE`], else one on PATH that is new enough, else the one `./test --setup`
/// installed in the current folder or one above it.
///
/// A server named by the variable that cannot be used is an error: silently using another would hide the mistake.
pub fn find() -> Result<PathBuf, Error> {
    find_in(&std::env::current_dir().unwrap_or_default())
}

/// As [`find`], looking for the installed one from this folder upwards.
pub fn find_in(folder: &Path) -> Result<PathBuf, Error> {
    let named = std::env::var_os(SERVER_VARIABLE).filter(|value| !value.is_empty());
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|dir| dir.join("nats-server")).filter(|path| path.is_file()).collect();
    let installed = folder.ancestors().map(|dir| dir.join(LOCAL)).find(|path| path.is_file());
    choose(named.map(PathBuf::from), on_path, installed)
}

fn choose(named: Option<PathBuf>, on_path: Vec<PathBuf>, installed: Option<PathBuf>) -> Result<PathBuf, Error> {
    if let Some(path) = named {
        return checked(path);
    }
    let mut looked_at = vec![format!("{SERVER_VARIABLE} (not set)")];
    for path in on_path.into_iter().chain(installed) {
        match checked(path) {
            Ok(path) => return Ok(path),
            Err(error) => looked_at.push(error.to_string()),
        }
    }
    looked_at.push(format!("PATH and {LOCAL} (nothing usable)"));
    Err(Error::NotFound { looked_at })
}

/// The path, if it runs and is new enough. Asked once per path and process.
fn checked(path: PathBuf) -> Result<PathBuf, Error> {
    static KNOWN: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let known = || KNOWN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if known().contains(&path) {
        return Ok(path);
    }
    let output = Command::new(&path).arg("--version").stdin(Stdio::null()).output();
    let output = output.map_err(|error| Error::CannotRun { path: path.clone(), reason: error.to_string() })?;
    let text = String::from_utf8_lossy(&output.stdout);
    // "nats-server: v2.15.1"
    let version = text.split_whitespace().last().unwrap_or_default().to_owned();
    if !version_supported(&version) {
        return Err(Error::TooOld { path, version });
    }
    known().push(path.clone());
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A program that only says its version.
    fn fake(dir: &Path, name: &str, version: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, format!("#!/bin/sh\necho nats-server: {version}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn the_first_usable_server_in_order_is_taken() {
        let folder = super::super::Folder::new(None).unwrap();
        let old = fake(&folder.path, "old", "v2.9.10");
        let path = fake(&folder.path, "path", "v2.12.0");
        let local = fake(&folder.path, "local", "v2.15.1");
        let gone = folder.path.join("gone");
        let some = |path: &PathBuf| Some(path.clone());

        assert_eq!(choose(some(&local), vec![path.clone()], None).unwrap(), local);
        assert_eq!(choose(None, vec![path.clone()], some(&local)).unwrap(), path);
        assert_eq!(choose(None, vec![old.clone(), path.clone()], some(&local)).unwrap(), path);
        assert_eq!(choose(None, vec![old.clone()], some(&local)).unwrap(), local);
        assert!(matches!(choose(some(&old), vec![path.clone()], some(&local)), Err(Error::TooOld { .. })));
        assert!(matches!(choose(some(&gone), vec![path], some(&local)), Err(Error::CannotRun { .. })));

        let message = choose(None, vec![old], None).unwrap_err().to_string();
        for part in ["v2.9.10", "./test --setup", SERVER_VARIABLE] {
            assert!(message.contains(part), "{message}");
        }
    }
}
