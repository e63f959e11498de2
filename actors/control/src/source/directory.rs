//! A folder of YAML files. They are read whole whenever something about them has changed and they hold still; a file that cannot be
//! read keeps its last good documents in force and is named.
//!
//! What is read is decided by names, sizes, times and inodes. Looking at those is cheap and works on every file system, also where
//! files are swapped behind symbolic links, which is why no notification service is used.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use groupcast_policy::ids::{GroupId, SourceId};
use groupcast_policy::model::{Group, Owner};
use groupcast_policy::written::{self, Format, Node, Problem};

use super::owned::is_of;
use super::{Failed, Observation, Polled};

/// Files of one folder.
pub const FILES_MAX: usize = 10_000;
/// Longest file, in bytes.
pub const FILE_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// How long files must have held still.
pub const STILL: Duration = Duration::from_millis(100);
/// Whoever opens something without waiting for it.
const O_NONBLOCK: i32 = 0o4000;
/// Looks at files that do not hold still, in one poll.
pub const LOOKS_MAX: u32 = 20;

pub struct Directory {
    id: SourceId,
    path: PathBuf,
    good: Good,
}

/// What each file said when it could last be read.
pub type Good = BTreeMap<String, Last>;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Last {
    groups: Vec<Arc<Group>>,
    /// What stood there and could not be read.
    kept: BTreeSet<GroupId>,
    nameless: bool,
}

impl Directory {
    pub fn new(id: SourceId, path: PathBuf) -> Self {
        Self { id, path, good: Good::new() }
    }

    pub async fn poll(&mut self, full: bool, marker: Option<&str>) -> Result<Polled, Failed> {
        let mut before = self.look().await?;
        if !full && Some(mark(&before).as_str()) == marker {
            return Ok(Polled::Unchanged);
        }
        for look_number in 1.. {
            // Somebody may be in the middle of writing a file, and the part that is there may read well.
            tokio::time::sleep(STILL).await;
            let path = self.path.clone();
            let read = tokio::task::spawn_blocking(move || (read(&path), look(&path))).await;
            let (files, after) = read.map_err(|error| Failed::new(error.to_string()))?;
            let (mut files, after) = (files?, after?);
            if before != after && look_number < LOOKS_MAX {
                before = after;
                continue;
            }
            // One that is written all the time spoils only itself.
            for (name, content) in &mut files {
                if before.get(name) != after.get(name) {
                    *content = Err("it is written all the time: what it said stays".to_owned());
                }
            }
            let mut observation = observe(&self.id, &files, &mut self.good);
            observation.marker = (before == after).then(|| mark(&after));
            // As likely a volume that is not mounted as one that nobody wants any more.
            observation.doubtful = files.is_empty();
            return Ok(Polled::Observed(Box::new(observation)));
        }
        Err(Failed::new(format!("{} cannot be read", self.path.display())))
    }

    async fn look(&self) -> Result<Marks, Failed> {
        let path = self.path.clone();
        tokio::task::spawn_blocking(move || look(&path)).await.map_err(|error| Failed::new(error.to_string()))?
    }
}

/// Files that are meant: editors leave others beside them while they write.
pub fn is_meant(name: &str) -> bool {
    let kind = [".yaml", ".yml", ".json"].iter().any(|kind| name.ends_with(kind));
    kind && !name.starts_with(['.', '#', '~'])
}

fn names(path: &Path) -> Result<Vec<String>, Failed> {
    let failed = |error: std::io::Error| Failed::new(format!("{} cannot be read: {error}", path.display()));
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let Some(name) = name.to_str().filter(|name| is_meant(name)) else { continue };
        names.push(name.to_owned());
    }
    if names.len() > FILES_MAX {
        let words = format!("{} has {} files, at most {FILES_MAX} are read: merge some", path.display(), names.len());
        return Err(Failed::new(words));
    }
    names.sort();
    Ok(names)
}

/// What changes of a file whenever it does: its size, times and place; nothing where it cannot be looked at.
type Marks = BTreeMap<String, Option<(u64, u128, u64, i64, bool)>>;

fn look(path: &Path) -> Result<Marks, Failed> {
    use std::os::unix::fs::MetadataExt;
    let mark = |name: String| {
        let about = std::fs::metadata(path.join(&name)).ok().map(|about| {
            let at = about.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
            (about.len(), at.as_nanos(), about.ino(), about.ctime_nsec(), about.is_file())
        });
        (name, about)
    };
    Ok(names(path)?.into_iter().map(mark).collect())
}

/// All of it in short.
fn mark(marks: &Marks) -> String {
    let mut all = String::new();
    for (name, mark) in marks {
        let _ = writeln!(all, "{name} {mark:?}"); // writing to a string
    }
    format!("{:032x}", xxhash_rust::xxh3::xxh3_128(all.as_bytes()))
}

/// Names and contents; the folder itself must be there, a single file need not be readable.
pub type Files = Vec<(String, Result<String, String>)>;

fn read(path: &Path) -> Result<Files, Failed> {
    let within = path.canonicalize().map_err(|error| Failed::new(format!("{} cannot be read: {error}", path.display())))?;
    Ok(names(path)?.into_iter().map(|name| (name.clone(), content(&within, &name))).collect())
}

/// What a file of the folder says. A link may lead to another place in the folder, as volumes of containers have them, and nowhere else:
/// what is wrong with a file is shown to everybody, and what lies elsewhere is not for everybody.
fn content(folder: &Path, name: &str) -> Result<String, String> {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    let path = folder.join(name);
    let told = |error: std::io::Error| error.to_string();
    // Whoever opens a pipe would wait for its other end.
    let about = std::fs::metadata(&path).map_err(told)?;
    if !about.is_file() {
        return Err("it is no file".to_owned());
    }
    let file = std::fs::File::options().read(true).custom_flags(O_NONBLOCK).open(&path).map_err(told)?;
    // Where what is open really lies, whatever the link says by now.
    let opened = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).map_err(told)?;
    if !opened.starts_with(folder) {
        return Err("it is a link to something outside of the folder, which is not read: put the file itself there".to_owned());
    }
    let mut text = String::new();
    let count = file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(told)?;
    if count as u64 > FILE_BYTES_MAX {
        return Err(format!("it is longer than {FILE_BYTES_MAX} bytes: split it"));
    }
    Ok(text)
}

/// What the files say, given what each last said.
pub fn observe(source: &SourceId, files: &[(String, Result<String, String>)], good: &mut Good) -> Observation {
    let mut seen = Observation::default();
    let mut whence: BTreeMap<GroupId, &str> = BTreeMap::new();
    let mut now = Good::new();
    for (name, content) in files {
        let parsed = content.as_ref().map_err(Clone::clone).and_then(|text| documents(source, name, text));
        let last = match parsed {
            Ok((groups, problems)) => {
                let mut last = Last { groups, ..Last::default() };
                for (id, why) in problems {
                    let words = format!("file {name}: {why}");
                    match id {
                        Some(id) => {
                            seen.problems.add(words);
                            last.kept.insert(id);
                        }
                        None => {
                            seen.problems.add_nameless(words);
                            last.nameless = true;
                        }
                    }
                }
                last
            }
            Err(why) => {
                let words = format!("file {name}: {why}");
                match good.get(name) {
                    Some(last) => {
                        seen.problems.add(words);
                        last.clone()
                    }
                    // Where nobody knows what it said, it may be any of what is known.
                    None => {
                        seen.problems.add_nameless(words);
                        Last { nameless: true, ..Last::default() }
                    }
                }
            }
        };
        seen.problems.nameless |= last.nameless;
        seen.kept_groups.extend(last.kept.iter().cloned());
        for group in &last.groups {
            match whence.get(&group.id) {
                Some(first) => {
                    seen.problems.add(format!("file {name}: group {} stands in {first} already: remove one", group.id))
                }
                None => {
                    whence.insert(group.id.clone(), name);
                    seen.groups.insert(group.id.clone(), group.clone());
                }
            }
        }
        now.insert(name.clone(), last);
    }
    // What is bad in one file may be good in another.
    seen.kept_groups = seen.kept_groups.difference(&seen.groups.keys().cloned().collect::<BTreeSet<_>>()).cloned().collect();
    *good = now;
    seen
}

/// The groups of a file, and those that are wrong, with their ids where they have one.
#[allow(clippy::type_complexity)]
fn documents(source: &SourceId, name: &str, text: &str) -> Result<(Vec<Arc<Group>>, Vec<(Option<GroupId>, String)>), String> {
    let format = if name.ends_with(".json") { Format::Json } else { Format::Yaml };
    let nodes = written::nodes(format, text).map_err(|problem| problem.message)?;
    if nodes.is_empty() && !says_no_groups(text) {
        return Err("it is empty: what it said stays; delete the file, or write [], if that is meant".to_owned());
    }
    let (mut groups, mut wrong) = (Vec::new(), Vec::new());
    for (index, node) in nodes.iter().enumerate() {
        match group(source, node, index) {
            Ok(group) => groups.push(Arc::new(group)),
            Err(why) => {
                let id = node.get("id").and_then(Node::text).and_then(|id| GroupId::new(id).ok());
                wrong.push((id.filter(|id| is_of(source, id.as_str())), why));
            }
        }
    }
    Ok((groups, wrong))
}

/// A list without groups is meant; nothing at all is what a full disk leaves, or a writer that was ended.
fn says_no_groups(text: &str) -> bool {
    text.lines().any(|line| line.trim_start().starts_with('['))
}

fn group(source: &SourceId, node: &Node, index: usize) -> Result<Group, String> {
    if let Some(kind) = node.get("kind").and_then(Node::text).filter(|kind| *kind != "group") {
        let kind: String = kind.chars().take(40).collect();
        return Err(format!("document {index} is a {kind:?}: a folder holds groups; write others through a gateway"));
    }
    let told = |problems: Vec<Problem>| problems.iter().take(3).map(Problem::to_string).collect::<Vec<_>>().join("; ");
    let mut group = written::group(node, index).map_err(told)?;
    if !is_of(source, group.id.as_str()) {
        return Err(format!("group {}: what source {source} owns begins with its id; write {source}-{}", group.id, group.id));
    }
    let own = Owner::Source(source.clone());
    if group.owner != Owner::Gateway && group.owner != own {
        return Err(format!("group {}: owner is another source: leave it out", group.id));
    }
    group.owner = own;
    Ok(group)
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
