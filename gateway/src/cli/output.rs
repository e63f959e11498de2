//! How things are shown: tables for people, JSON and YAML for programs. Data goes to stdout.

use std::io::{IsTerminal, Write};

use clap::ValueEnum;
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

/// Colours what it is given, or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paint(pub bool);

impl Paint {
    fn with(self, code: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
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
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(Failure::failed(format!("stdout: {error}"))),
        _ => Ok(()),
    }
}

/// Words for people go to stderr.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}"); // nobody reads it
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
    serde_json::to_string_pretty(value).unwrap_or_default() + "\n"
}

pub fn yaml(value: &Value) -> String {
    serde_saphyr::to_string(value).unwrap_or_default()
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
    fn colour_only_where_it_is_wanted() {
        assert_eq!(Paint(true).green("x"), "\x1b[32mx\x1b[0m");
        assert_eq!(Paint(false).green("x"), "x");
        assert!(Colour::Always.is_on(false) && !Colour::Never.is_on(true) && !Colour::Auto.is_on(false));
    }
}
