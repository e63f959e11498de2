//! A source of groups that everybody has: a folder that the controllers read, changed while a scenario runs, and gone during an outage.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use groupcast_control::catalog::Catalog;
use groupcast_control::document::{Document, Name};
use groupcast_policy::ids::GroupId;
use groupcast_policy::model::Group;

use super::watch::Shared;

/// What the ids of its groups begin with.
pub const SOURCE: &str = "files";
/// Groups in it.
const GROUPS: u32 = 3;
const CHANGED_EVERY: Duration = Duration::from_secs(2);

pub struct Source {
    /// Ours: configuration, and the folder that is read.
    folder: PathBuf,
    version: AtomicU32,
    /// What is there or not is changed by one at a time.
    lock: std::sync::Mutex<()>,
}

impl Drop for Source {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder); // below the folder for temporary files
    }
}

fn id(number: u32) -> String {
    format!("{SOURCE}-{number}")
}

fn port(version: u32, number: u32) -> u32 {
    2_000 + (version * GROUPS + number) % 30_000
}

impl Source {
    pub fn start() -> anyhow::Result<Arc<Self>> {
        let folder = std::env::temp_dir().join(format!("groupcast-source-{}", std::process::id()));
        let source = Self { folder, version: AtomicU32::new(0), lock: std::sync::Mutex::new(()) };
        std::fs::create_dir_all(source.read_folder())?;
        std::fs::write(
            source.config(),
            format!("[[source]]\nid = \"{SOURCE}\"\nkind = \"directory\"\npath = {:?}\n", source.read_folder()),
        )?;
        source.write()?;
        Ok(Arc::new(source))
    }

    fn read_folder(&self) -> PathBuf {
        self.folder.join("groups.d")
    }

    fn config(&self) -> PathBuf {
        self.folder.join("groupcast.toml")
    }

    /// For a controller's command line.
    pub fn arguments(&self) -> Vec<String> {
        vec!["--config".to_owned(), self.config().display().to_string()]
    }

    fn write(&self) -> anyhow::Result<()> {
        let version = self.version.load(Ordering::Relaxed);
        let documents = (0..GROUPS).map(|number| {
            let rule = format!("egress tcp {} to 192.0.2.0/24", port(version, number));
            format!("kind: group\nid: {}\nrules: [\"{rule}\"]\nbindings: [global]\n", id(number))
        });
        let text = documents.collect::<Vec<_>>().join("---\n");
        let (new, path) = (self.read_folder().join(".new"), self.read_folder().join("groups.yaml"));
        std::fs::write(&new, text)?;
        Ok(std::fs::rename(&new, &path)?)
    }

    /// Gone, or back.
    pub async fn fail(&self, gone: bool) -> anyhow::Result<()> {
        let _alone = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let (there, away) = (self.read_folder(), self.folder.join("away"));
        let (from, to) = if gone { (there, away) } else { (away, there) };
        Ok(std::fs::rename(from, to)?)
    }

    /// Changes its groups until the run is over.
    pub async fn change(self: Arc<Self>, shared: Arc<Shared>) -> anyhow::Result<()> {
        while !shared.ended.load(Ordering::Relaxed) {
            tokio::time::sleep(CHANGED_EVERY).await;
            let _alone = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            if self.read_folder().exists() {
                self.version.fetch_add(1, Ordering::Relaxed);
                self.write()?;
            }
        }
        Ok(())
    }

    /// Its groups as they are in the catalogue, when they are what the folder says.
    pub async fn settled(&self, catalog: &Catalog, within: Duration) -> anyhow::Result<Vec<Arc<Group>>> {
        let begun = Instant::now();
        let version = self.version.load(Ordering::Relaxed);
        let mut groups = Vec::new();
        for number in 0..GROUPS {
            let group = loop {
                let name = Name::group(&GroupId::new(&id(number))?);
                let wanted = format!("egress tcp {} to 192.0.2.0/24", port(version, number));
                if let Ok(Some(there)) = catalog.read(&name).await
                    && let Ok(Some(Document::Group(group))) = there.document
                    && group.rules.iter().any(|rule| rule.rule.to_string() == wanted)
                {
                    break group;
                }
                anyhow::ensure!(
                    begun.elapsed() < within,
                    "the source's group {number} is not as its folder says after {within:?}"
                );
                tokio::time::sleep(Duration::from_millis(100)).await;
            };
            groups.push(group);
        }
        Ok(groups)
    }
}

/// Whether a group is the source's, and so everybody's.
pub fn is_sourced(id: &str) -> bool {
    id.strip_prefix(SOURCE).is_some_and(|rest| rest.starts_with('-'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_outage_takes_the_folder_away_and_gives_it_back() {
        let source = Source::start().unwrap();
        assert!(source.read_folder().join("groups.yaml").exists());
        source.fail(true).await.unwrap();
        assert!(!source.read_folder().exists());
        source.fail(false).await.unwrap();
        assert!(source.read_folder().join("groups.yaml").exists());
        assert!(is_sourced("files-0") && !is_sourced("filesystem"));
    }
}
