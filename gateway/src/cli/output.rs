//! How things are shown: tables for people, JSON and YAML for programs. Data goes to stdout.

use std::hash::{BuildHasher, RandomState};
use std::io::{IsTerminal, Write};
use std::sync::LazyLock;

use clap::ValueEnum;
use groupcast_policy::text::{self, is_deceptive};
use serde_json::Value;

use super::{Failure, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Format {
    /// For people.
    #[default]
    Table,
    /// For people with wide screens.
    Wide,
    Json,
    Yaml,
    /// One JSON object a line.
    Jsonl,
    /// Only kind and id.
    Name,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Colour {
    /// When it goes to a terminal and NO_COLOR is not set.
    #[default]
    Auto,
    Always,
    Never,
}

impl Colour {
    pub fn is_on(self, terminal: bool) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto => terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        }
    }

    pub fn stdout(self) -> Paint {
        Paint(self.is_on(std::io::stdout().is_terminal()))
    }
}

/// Stands for the escape of our own colours until the text is printed. A character that nobody uses and nobody outside can guess: what
/// others write never becomes an escape.
static ESCAPE: LazyLock<char> = LazyLock::new(|| {
    let drawn = RandomState::new().hash_one("escape") % 0xfff0;
    char::from_u32(0x10_0000 + drawn as u32).unwrap_or('\u{10_0000}')
});

/// As a terminal may have it, in our own colours.
fn shown(text: &str) -> String {
    text::shown(text).replace(*ESCAPE, "\x1b")
}

/// Colours what it is given, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paint(pub bool);

impl Paint {
    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("{mark}[{code}m{text}{mark}[0m", mark = *ESCAPE) } else { text.to_owned() }
    }

    pub fn green(self, text: &str) -> String {
        self.with("32", text)
    }

    pub fn red(self, text: &str) -> String {
        self.with("31", text)
    }

    pub fn yellow(self, text: &str) -> String {
        self.with("33", text)
    }

    pub fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    pub fn dim(self, text: &str) -> String {
        self.with("2", text)
    }
}

/// Writes to stdout. A reader that went away, such as `head`, is no failure.
pub fn print(text: &str) -> Result {
    let mut out = std::io::stdout().lock();
    match out.write_all(shown(text).as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::failed(format!("stdout: {error}"))),
        _ => Ok(()),
    }
}

/// Words for people go to stderr.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", shown(text)); // nobody reads it
}

/// A table without lines: columns are as wide as they need to be, two blanks apart.
pub fn table(head: &[&str], rows: Vec<Vec<String>>) -> String {
    let head: Vec<String> = head.iter().map(|cell| cell.to_uppercase()).collect();
    let lines: Vec<Vec<String>> = std::iter::once(head).chain(rows).collect();
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut text = String::new();
    for line in &lines {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

pub fn json(value: &Value) -> String {
    text::shown_json(&serde_json::to_string_pretty(value).unwrap_or_default()) + "\n"
}

/// On one line.
pub fn json_line(value: &impl serde::Serialize) -> String {
    text::shown_json(&serde_json::to_string(value).unwrap_or_default())
}

pub fn yaml(value: &Value) -> String {
    let text = serde_saphyr::to_string(value).unwrap_or_default();
    // Only quoted text has escapes in YAML; JSON is YAML too.
    if text.chars().any(|c| c != '\n' && is_deceptive(c)) { json(value) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_as_wide_as_it_needs() {
        let rows = vec![vec!["web".to_owned(), "3".to_owned()], vec!["a-longer-one".to_owned(), "12".to_owned()]];
        let text = table(&["id", "rules"], rows);
        assert_eq!(text, "ID            RULES\nweb           3\na-longer-one  12\n");
    }

    #[test]
    fn what_others_wrote_reaches_no_terminal_as_an_escape() {
        let name = "a\x1b[2Jb\u{202e}c\u{9b}d\u{2066}e\u{200f}f\u{7f}g";
        let safe = "a\\u{1b}[2Jb\\u{202e}c\\u{9b}d\\u{2066}e\\u{200f}f\\u{7f}g";
        assert_eq!(shown(name), safe);
        let value = serde_json::json!({ "name": name });
        for text in [json(&value), json_line(&value), yaml(&value)] {
            assert!(text.chars().all(|c| c == '\n' || !is_deceptive(c)), "{text:?}");
        }
        for text in [json(&value), json_line(&value)] {
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value, "it means the same");
        }
        assert_eq!(shown(&table(&["name"], vec![vec![name.to_owned()]])), format!("NAME\n{safe}\n"));
    }

    #[test]
    fn colour_only_where_it_is_wanted() {
        assert_eq!(shown(&Paint(true).green("x")), "\x1b[32mx\x1b[0m");
        assert_eq!(Paint(false).green("x"), "x");
        assert!(Colour::Always.is_on(false) && !Colour::Never.is_on(true) && !Colour::Auto.is_on(false));
    }
}
