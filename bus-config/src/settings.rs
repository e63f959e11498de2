//! Configuration files. A section is a typed struct that belongs to whoever uses it, and a [`Section`] that says which keys it has and
//! what they mean: the reader judges unknown keys by it, and the reference page is written from it.
//!
//! A section is added by a struct that serde reads (`deny_unknown_fields`), a function that returns its [`Section`], a field in the
//! struct of the file, and [`keys_are_read`] in a test.

use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

/// Longest file that is read, in bytes.
pub const FILE_BYTES_MAX: u64 = 1024 * 1024;
/// How alike two words must be for one to be offered for the other.
const ALIKE_MIN: f64 = 0.7;

/// What is known about a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    pub name: String,
    pub about: String,
    /// What counts when it is not said; none where that says itself.
    pub default: Option<String>,
    /// The option that counts before the file.
    pub flag: Option<String>,
    /// The environment variable that counts before the file.
    pub variable: Option<String>,
}

impl Key {
    /// `default` may be empty.
    pub fn new(name: &str, default: &str, about: &str) -> Self {
        let default = (!default.is_empty()).then(|| default.to_owned());
        Self { name: name.to_owned(), about: about.to_owned(), default, flag: None, variable: None }
    }
}

/// What is known about a part of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Section {
    /// Empty for keys that stand outside of any section.
    pub name: String,
    /// Whether it may stand there several times, as `[[name]]`.
    pub many: bool,
    pub about: String,
    pub keys: Vec<Key>,
}

impl Section {
    /// Stands at most once, as `[name]`.
    pub fn one(name: &str, about: &str, keys: Vec<Key>) -> Self {
        Self { name: name.to_owned(), many: false, about: about.to_owned(), keys }
    }

    /// Stands once for each, as `[[name]]`.
    pub fn many(name: &str, about: &str, keys: Vec<Key>) -> Self {
        Self { many: true, ..Self::one(name, about, keys) }
    }

    /// Keys outside of any section.
    pub fn top(about: &str, keys: Vec<Key>) -> Self {
        Self::one("", about, keys)
    }

    fn heading(&self) -> String {
        if self.many { format!("[[{}]]", self.name) } else { format!("[{}]", self.name) }
    }

    /// A key as it is said in messages.
    fn path(&self, key: &str) -> String {
        if self.name.is_empty() { key.to_owned() } else { format!("{}.{key}", self.name) }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the configuration {path}: {error}")]
    Read { path: String, error: std::io::Error },
    #[error("the configuration {path} is larger than {FILE_BYTES_MAX} bytes: is it the right file?")]
    TooLarge { path: String },
    #[error("the configuration {path} is not valid: {error}")]
    Malformed { path: String, error: Box<toml::de::Error> },
    #[error("the configuration {path} says {key}, which is not known{}", hint(.closest))]
    Unknown { path: String, key: String, closest: Option<String> },
    #[error("the configuration {path} says {said}: write {heading}")]
    Shape { path: String, said: String, heading: String },
    #[error("the configuration {path}: {what}")]
    Wrong { path: String, what: String },
}

fn hint(closest: &Option<String>) -> String {
    closest.as_ref().map(|key| format!(": did you mean {key}?")).unwrap_or_default()
}

/// Reads a file whose sections are these.
pub fn read<T: DeserializeOwned>(path: &Path, sections: &[Section]) -> Result<T, Error> {
    let shown = path.display().to_string();
    let failed = |error| Error::Read { path: shown.clone(), error };
    if std::fs::metadata(path).map_err(failed)?.len() > FILE_BYTES_MAX {
        return Err(Error::TooLarge { path: shown });
    }
    parse(&shown, &std::fs::read_to_string(path).map_err(failed)?, sections)
}

/// Reads the text of a file; `path` is its name in messages.
pub fn parse<T: DeserializeOwned>(path: &str, text: &str, sections: &[Section]) -> Result<T, Error> {
    let malformed = |error| Error::Malformed { path: path.to_owned(), error: Box::new(error) };
    let table: toml::Table = toml::from_str(text).map_err(malformed)?;
    judge(path, &table, sections)?;
    toml::from_str(text).map_err(malformed)
}

/// Refuses the first key that is not known, and says what may have been meant.
fn judge(path: &str, table: &toml::Table, sections: &[Section]) -> Result<(), Error> {
    let unknown = |key, closest| Err(Error::Unknown { path: path.to_owned(), key, closest });
    let top = sections.iter().find(|section| section.name.is_empty());
    for (name, value) in table {
        if top.is_some_and(|top| top.keys.iter().any(|key| key.name == *name)) {
            continue;
        }
        let Some(section) = sections.iter().find(|section| !section.name.is_empty() && section.name == *name) else {
            // Perhaps a key that belongs into a section.
            let all = sections.iter().flat_map(|section| section.keys.iter().map(|key| (section.path(&key.name), &*key.name)));
            let named = sections.iter().filter(|section| !section.name.is_empty());
            return unknown(name.clone(), closest(name, named.map(|section| (section.heading(), &*section.name)).chain(all)));
        };
        let shape = |said: String| Error::Shape { path: path.to_owned(), said, heading: section.heading() };
        let tables: Vec<&toml::Table> = match value {
            toml::Value::Table(table) if !section.many => vec![table],
            toml::Value::Table(_) => return Err(shape(format!("[{name}], of which there may be several"))),
            toml::Value::Array(items) if section.many && items.iter().all(toml::Value::is_table) => {
                items.iter().filter_map(toml::Value::as_table).collect()
            }
            toml::Value::Array(_) if !section.many => return Err(shape(format!("[[{name}]], of which there is one"))),
            _ => return Err(shape(format!("{name}, which is a section"))),
        };
        for key in tables.into_iter().flat_map(|table| table.keys()) {
            if !section.keys.iter().any(|known| known.name == *key) {
                let keys = section.keys.iter().map(|known| (section.path(&known.name), &*known.name));
                return unknown(section.path(key), closest(key, keys));
            }
        }
    }
    Ok(())
}

fn closest<'a>(word: &str, known: impl Iterator<Item = (String, &'a str)>) -> Option<String> {
    let rated = known.map(|(shown, key)| (strsim::jaro_winkler(word, key), shown));
    let best = rated.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 > ALIKE_MIN).then_some(best.1)
}

/// A duration as people write it: `3s`, `250ms`.
pub fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| serde::de::Error::custom(format!("{text:?}: {error}")))
}

/// A duration that need not be said; the field is also `default`.
pub fn optional_duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    duration(deserializer).map(Some)
}

/// Whatever can be read from text and need not be said; the field is also `default`.
pub fn parsed<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(|error: T::Err| serde::de::Error::custom(error))
}

/// Whether the keys that are said to be known are those that the struct of the file reads: an unknown field names all that are.
pub fn keys_are_read<T: DeserializeOwned>(sections: &[Section]) -> Result<(), String> {
    for section in sections {
        let heading = if section.name.is_empty() { String::new() } else { section.heading() };
        let Err(error) = toml::from_str::<T>(&format!("{heading}\nnonsense = 1")) else {
            return Err(format!("{heading} reads anything: it lacks deny_unknown_fields"));
        };
        // `nonsense`, then what could have been said, each between backticks.
        let mut read: Vec<&str> = error.message().split('`').skip(1).step_by(2).skip(1).collect();
        if section.name.is_empty() {
            read.retain(|key| !sections.iter().any(|section| section.name == *key));
        }
        let mut known: Vec<&str> = section.keys.iter().map(|key| &*key.name).collect();
        read.sort_unstable();
        known.sort_unstable();
        if read != known {
            return Err(format!("{heading} reads {read:?}, and known are {known:?}"));
        }
    }
    Ok(())
}

/// The reference of a file, in Markdown.
pub fn reference(file: &str, about: &str, sections: &[Section]) -> String {
    let mut text = format!("## `{file}`\n\n{about}\n");
    for section in sections {
        let flags = section.keys.iter().any(|key| key.flag.is_some());
        if section.name.is_empty() {
            text += &format!("\n{}\n\n", section.about);
        } else {
            text += &format!("\n### `{}`\n\n{}\n\n", section.heading(), section.about);
        }
        text += if flags {
            "| key | default | meaning | before it counts |\n|---|---|---|---|\n"
        } else {
            "| key | default | meaning |\n|---|---|---|\n"
        };
        for key in &section.keys {
            let code = |text: &Option<String>| text.as_ref().map_or(String::new(), |text| format!("`{text}`"));
            let cell = |text: &str| text.replace('|', "\\|");
            text += &format!("| `{}` | {} | {} |", key.name, cell(&code(&key.default)), cell(&key.about));
            if flags {
                let before: Vec<String> =
                    [&key.flag, &key.variable].into_iter().filter(|said| said.is_some()).map(code).collect();
                text += &format!(" {} |", before.join(", "));
            }
            text.push('\n');
        }
    }
    text
}

/// Where a file's part of the reference page begins and ends.
fn marks(file: &str) -> (String, String) {
    (format!("<!-- begin {file} -->\n"), format!("<!-- end {file} -->\n"))
}

/// The page with this file's part replaced; `None` where the page has no place for it.
pub fn replaced(page: &str, file: &str, part: &str) -> Option<String> {
    let (begin, end) = marks(file);
    let (before, rest) = page.split_once(&begin)?;
    let (_, after) = rest.split_once(&end)?;
    Some(format!("{before}{begin}{part}{end}{after}"))
}

/// Holds the reference page to the code; with `GROUPCAST_UPDATE` set it is written anew.
pub fn page_is_current(page: &Path, file: &str, part: &str) -> Result<(), String> {
    let shown = page.display();
    let written = std::fs::read_to_string(page).map_err(|error| format!("{shown}: {error}"))?;
    let current = replaced(&written, file, part).ok_or_else(|| format!("{shown} has no place for {file}"))?;
    if current == written {
        return Ok(());
    }
    if std::env::var_os("GROUPCAST_UPDATE").is_some() {
        return std::fs::write(page, current).map_err(|error| format!("{shown}: {error}"));
    }
    Err(format!("{shown} is not what the code says about {file}: run this test with GROUPCAST_UPDATE=1 and commit the page"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Bread {
        loaves: Option<u32>,
        #[serde(deserialize_with = "optional_duration")]
        baked_for: Option<Duration>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Guest {
        name: String,
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(deny_unknown_fields, default)]
    struct Table {
        seats: Option<u32>,
        bread: Bread,
        guest: Vec<Guest>,
    }

    fn sections() -> Vec<Section> {
        let bread = vec![
            Key::new("loaves", "1", "How many"),
            Key { flag: Some("--baked-for".into()), ..Key::new("baked_for", "30m", "How | long") },
        ];
        vec![
            Section::top("The table.", vec![Key::new("seats", "", "Places")]),
            Section::one("bread", "What is eaten.", bread),
            Section::many("guest", "Who eats.", vec![Key::new("name", "", "Called")]),
        ]
    }

    fn read_text(text: &str) -> Result<Table, Error> {
        parse("t.toml", text, &sections())
    }

    #[test]
    fn what_is_known_is_read_and_nothing_else() {
        keys_are_read::<Table>(&sections()).unwrap();
        let mut more = sections();
        more[1].keys.push(Key::new("crust", "", ""));
        assert!(keys_are_read::<Table>(&more).unwrap_err().contains("crust"));
        let table =
            read_text("seats = 4\n[bread]\nloaves = 2\nbaked_for = '1h 5m'\n[[guest]]\nname = 'a'\n[[guest]]\nname = 'b'")
                .unwrap();
        assert_eq!((table.seats, table.bread.loaves, table.bread.baked_for), (Some(4), Some(2), Some(Duration::from_secs(3900))));
        assert_eq!(table.guest.iter().map(|guest| &*guest.name).collect::<Vec<_>>(), ["a", "b"]);
        for (text, words) in [
            ("seat = 4", "t.toml says seat, which is not known: did you mean seats?"),
            ("loaves = 4", "did you mean bread.loaves?"),
            ("[bred]\nloaves = 4", "did you mean [bread]?"),
            ("[bread]\nloafs = 4", "says bread.loafs, which is not known: did you mean bread.loaves?"),
            ("[[guests]]\nname = 'a'", "did you mean [[guest]]?"),
            ("[[guest]]\nname = 'a'\n[[guest]]\nnam = 'b'", "says guest.nam, which is not known: did you mean guest.name?"),
            ("[guest]\nname = 'a'", "write [[guest]]"),
            ("[[bread]]\nloaves = 4", "write [bread]"),
            ("bread = 4", "write [bread]"),
            ("guest = [4]", "write [[guest]]"),
            ("[bread]\nzzz = 4", "says bread.zzz, which is not known"),
            ("[bread]\nbaked_for = 'long'", "\"long\""),
            ("[bread]\nbaked_for = 3", "invalid type"),
            ("[[guest]]", "missing field"),
            ("[bread", "t.toml is not valid"),
        ] {
            let error = read_text(text).unwrap_err().to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn the_page_says_what_is_known() {
        let text = reference("t.toml", "A table.", &sections());
        for line in [
            "## `t.toml`",
            "### `[bread]`",
            "### `[[guest]]`",
            "| `seats` |  | Places |",
            "| `loaves` | `1` | How many |  |",
            "| `baked_for` | `30m` | How \\| long | `--baked-for` |",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        let page = "# P\n<!-- begin t.toml -->\nold\n<!-- end t.toml -->\nafter\n";
        let new = replaced(page, "t.toml", "new\n").unwrap();
        assert_eq!(new, "# P\n<!-- begin t.toml -->\nnew\n<!-- end t.toml -->\nafter\n");
        assert_eq!(replaced(page, "u.toml", "new\n"), None);
    }

    #[test]
    fn a_file_that_cannot_be_one_is_refused() {
        let path = std::env::temp_dir().join(format!("groupcast-settings-{}", std::process::id()));
        std::fs::write(&path, vec![b'#'; FILE_BYTES_MAX as usize]).unwrap();
        assert!(read::<Table>(&path, &sections()).is_ok());
        std::fs::write(&path, vec![b'#'; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(matches!(read::<Table>(&path, &sections()), Err(Error::TooLarge { .. })));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(read::<Table>(&path, &sections()), Err(Error::Read { .. })));
    }
}
