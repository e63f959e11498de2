//! What the command line says: data on stdout, words on stderr, and nothing to either that a terminal would obey.

use std::io::Write;

use groupcast_policy::text::{shown, shown_json};

/// A reader that went away, such as `head`, is no failure.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(shown(text).as_bytes()).and_then(|()| out.flush());
}

pub fn print_json(value: &impl serde::Serialize) {
    print(&json(value));
}

fn json(value: &impl serde::Serialize) -> String {
    shown_json(&serde_json::to_string_pretty(value).unwrap_or_default()) + "\n"
}

pub fn say(words: &str) {
    let _ = writeln!(std::io::stderr(), "groupcast-agent: {}", shown(words)); // nobody reads it
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_means_the_same() {
        let value = serde_json::json!({ "reason": "a\x1b[2Jb\u{202e}c\u{9b}d\te\"f" });
        let text = json(&value);
        assert!(!text.contains(['\x1b', '\u{202e}', '\u{9b}']), "{text:?}");
        assert_eq!(shown(&text), text, "nothing is left to spell out");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}
