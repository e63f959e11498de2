//! Files that are the agent's own: written whole, readable by nobody else, in folders where nobody else can plant another.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const FILE_MODE: u32 = 0o600;
const FOLDER_MODE: u32 = 0o700;

const STICKY: u32 = 0o1000;
const GROUP_WRITES: u32 = 0o020;
const OTHERS_WRITE: u32 = 0o002;

#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    #[error("folder {}: {error}", path.display())]
    Io { path: PathBuf, error: io::Error },
    #[error("others can write folder {} (mode {mode:o}), and so what the agent keeps there: `chmod go-w {}`, or name another", path.display(), path.display())]
    Open { path: PathBuf, mode: u32 },
    #[error("folder {} belongs to user {owner}, neither the agent's nor root: `chown` it, or name another", path.display())]
    Strangers { path: PathBuf, owner: u32 },
}

/// What decides about a folder.
struct Facts {
    mode: u32,
    owner: u32,
    group: u32,
    /// As whom the agent runs.
    user: u32,
    own_group: u32,
}

impl Facts {
    fn is_open(&self) -> bool {
        // Many systems give each user a group of their own, which may write what they make.
        self.mode & OTHERS_WRITE != 0 || (self.mode & GROUP_WRITES != 0 && self.group != self.own_group)
    }

    fn is_strangers(&self) -> bool {
        self.owner != self.user && self.owner != 0
    }
}

/// Makes the folder of a file where it is not there, and judges it: whoever can write it, or rename one above it, decides what is read.
pub fn guard_folder(of: &Path) -> Result<(), FolderError> {
    let folder = match of.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let broken = |path: &Path| {
        let path = path.to_owned();
        move |error| FolderError::Io { path, error }
    };
    DirBuilder::new().recursive(true).mode(FOLDER_MODE).create(folder).map_err(broken(folder))?;
    // What links lead to is what is written.
    let real = fs::canonicalize(folder).map_err(broken(folder))?;
    let (user, own_group) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    for (depth, path) in real.ancestors().enumerate() {
        let about = fs::metadata(path).map_err(broken(path))?;
        let facts = Facts { mode: about.mode() & 0o7777, owner: about.uid(), group: about.gid(), user, own_group };
        let is_open = match depth {
            0 => facts.is_open(),
            // Above it, whoever can write can rename; but not what is others' in a sticky folder.
            _ => facts.mode & OTHERS_WRITE != 0 && facts.mode & STICKY == 0,
        };
        if is_open {
            return Err(FolderError::Open { path: path.to_owned(), mode: facts.mode });
        }
        if depth == 0 && facts.is_strangers() {
            return Err(FolderError::Strangers { path: path.to_owned(), owner: facts.owner });
        }
    }
    Ok(())
}

/// After this the file holds these bytes, whatever happens; if it fails, what it held before. Only its owner can read it.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    // A rest of an earlier attempt, or something planted: taken away, and never written through.
    match fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(FILE_MODE).open(&beside)?;
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&beside, path));
    if let Err(error) = written {
        // On a full disk what is half written takes room from what comes next.
        let _ = fs::remove_file(&beside);
        return Err(error);
    }
    // The rename itself lasts only once its folder is synced.
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => File::open(folder)?.sync_all(),
        _ => File::open(".")?.sync_all(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("groupcast-files-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn what_is_written_is_private_and_leaves_nothing_beside_it() {
        let folder = folder("private");
        let (path, victim) = (folder.join("state"), folder.join("victim"));
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, folder.join("state.new")).unwrap();
        symlink(&victim, &path).unwrap();
        write_whole(&path, b"one").unwrap();
        write_whole(&path, b"two").unwrap();
        assert_eq!((fs::read(&path).unwrap(), fs::read(&victim).unwrap()), (b"two".to_vec(), b"precious".to_vec()));
        assert_eq!(fs::symlink_metadata(&path).unwrap().permissions().mode() & 0o7777, FILE_MODE);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
        // What cannot be replaced is an error, and the file stays as it was.
        fs::create_dir(folder.join("state.new")).unwrap();
        assert!(write_whole(&path, b"three").is_err());
        assert_eq!(fs::read(&path).unwrap(), b"two");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_folder_is_made_private_and_refused_where_others_can_write() {
        let folder = folder("guard");
        let path = folder.join("a/b/state");
        guard_folder(&path).unwrap();
        assert_eq!(fs::metadata(folder.join("a/b")).unwrap().permissions().mode() & 0o777, FOLDER_MODE);
        let set = |name: &str, mode| fs::set_permissions(folder.join(name), fs::Permissions::from_mode(mode)).unwrap();
        for mode in [0o777, 0o702, 0o1777] {
            set("a/b", mode);
            assert!(matches!(guard_folder(&path), Err(FolderError::Open { mode: told, .. }) if told == mode), "{mode:o}");
        }
        set("a/b", 0o755);
        set("a", 0o777);
        assert!(matches!(guard_folder(&path), Err(FolderError::Open { .. })), "the one above it");
        set("a", 0o1777);
        guard_folder(&path).unwrap();
        // A link does not hide what it leads to.
        set("a/b", 0o777);
        symlink(folder.join("a/b"), folder.join("link")).unwrap();
        assert!(matches!(guard_folder(&folder.join("link/state")), Err(FolderError::Open { .. })));
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn groups_and_owners_are_judged() {
        let facts = |mode, owner, group| Facts { mode, owner, group, user: 1_000, own_group: 1_000 };
        assert!(!facts(0o775, 1_000, 1_000).is_open(), "the agent's own group");
        assert!(facts(0o775, 1_000, 27).is_open());
        assert!(!facts(0o755, 0, 0).is_strangers());
        assert!(facts(0o700, 1_001, 1_000).is_strangers());
    }
}
