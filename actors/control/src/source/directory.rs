//! A folder of YAML files. They are read whole whenever something about them has changed and they hold still; a file that cannot be
//! read keeps its last good documents in force and is named.
//!
//! What is read is decided by names, sizes, times and inodes. Looking at those is cheap and works on every file system, also where
//! files are swapped behind symbolic links, which is why no notification service is used.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
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
        if !full && Some(before.as_str()) == marker {
            return Ok(Polled::Unchanged);
        }
        for _ in 0..LOOKS_MAX {
            // Somebody may be in the middle of writing a file, and the part that is there may read well.
            tokio::time::sleep(STILL).await;
            let path = self.path.clone();
            let read = tokio::task::spawn_blocking(move || (read(&path), look(&path))).await;
            let (files, after) = read.map_err(|error| Failed::new(error.to_string()))?;
            let (files, after) = (files?, after?);
            if before != after {
                before = after;
                continue;
            }
            let mut observation = observe(&self.id, &files, &mut self.good);
            observation.marker = Some(after);
            return Ok(Polled::Observed(Box::new(observation)));
        }
        Err(Failed::new(format!("{} is written to all the time: what was known stays", self.path.display())))
    }

    async fn look(&self) -> Result<String, Failed> {
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

/// Changes whenever a file does.
fn look(path: &Path) -> Result<String, Failed> {
    use std::os::unix::fs::MetadataExt;
    let mut all = String::new();
    for name in names(path)? {
        let about = std::fs::metadata(path.join(&name));
        let mark = about.map(|about| {
            let at = about.modified().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
            (about.len(), at.as_nanos(), about.ino(), about.ctime_nsec(), about.is_file())
        });
        let _ = writeln!(all, "{name} {:?}", mark.ok()); // writing to a string
    }
    Ok(format!("{:032x}", xxhash_rust::xxh3::xxh3_128(all.as_bytes())))
}

/// Names and contents; the folder itself must be there, a single file need not be readable.
pub type Files = Vec<(String, Result<String, String>)>;

fn read(path: &Path) -> Result<Files, Failed> {
    let content = |name: &String| {
        let file = path.join(name);
        let about = std::fs::metadata(&file).map_err(|error| error.to_string())?;
        match about.len() {
            _ if !about.is_file() => Err("it is no file".to_owned()),
            bytes if bytes > FILE_BYTES_MAX => Err(format!("it is {bytes} bytes, at most {FILE_BYTES_MAX} are read: split it")),
            _ => std::fs::read_to_string(&file).map_err(|error| error.to_string()),
        }
    };
    Ok(names(path)?.into_iter().map(|name| (name.clone(), content(&name))).collect())
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
                    seen.problems.add(format!("file {name}: {why}"));
                    match id {
                        Some(id) => drop(last.kept.insert(id)),
                        None => last.nameless = true,
                    }
                }
                last
            }
            Err(why) => {
                seen.problems.add(format!("file {name}: {why}"));
                // Where nobody knows what it said, it may be any of what is known.
                good.get(name).cloned().unwrap_or(Last { nameless: true, ..Last::default() })
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
