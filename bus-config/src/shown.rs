//! Where lines of a log go that a terminal may show. What others have written is in them.

use std::io::{self, Write};

use groupcast_policy::text::{shown, shown_json};

/// Writes whole lines, as a terminal may have them. They are coloured by nobody, because that is escapes too.
#[derive(Debug)]
pub struct Shown<W> {
    out: W,
    as_json: bool,
}

impl<W: Write> Shown<W> {
    pub fn text(out: W) -> Self {
        Self { out, as_json: false }
    }

    /// Of JSON, which means the same afterwards.
    pub fn json(out: W) -> Self {
        Self { out, as_json: true }
    }
}

impl<W: Write> Write for Shown<W> {
    /// All or nothing: a logger hands over a line at once.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let safe = if self.as_json { shown_json(&text) } else { shown(&text) };
        self.out.write_all(safe.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_written_whole_and_spelled_out() {
        let (mut text, mut json) = (Vec::new(), Vec::new());
        Shown::text(&mut text).write_all("host h\u{202e}1: \x1b[2J\n".as_bytes()).unwrap();
        Shown::json(&mut json).write_all("{\"host\":\"h\u{202e}1\"}\n".as_bytes()).unwrap();
        assert_eq!(String::from_utf8(text).unwrap(), "host h\\u{202e}1: \\u{1b}[2J\n");
        assert_eq!(String::from_utf8(json).unwrap(), "{\"host\":\"h\\u202e1\"}\n");
    }
}
