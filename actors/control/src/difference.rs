//! What one version of a document changed in the one before, as lines that people read. Pure.

use serde_json::Value;

/// Lines of one difference; the rest is counted.
pub const LINES_MAX: usize = 200;
/// Longest line in characters.
pub const LINE_CHARACTERS_MAX: usize = 300;

/// `+` is new, `-` is gone, `~` is another value. Lists are compared as what they hold: where a rule stands means nothing.
pub fn differences(before: &Value, after: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    compare("", before, after, &mut lines);
    let more = lines.len().saturating_sub(LINES_MAX);
    lines.truncate(LINES_MAX);
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    lines
}

fn compare(path: &str, before: &Value, after: &Value, lines: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(old), Value::Object(new)) => {
            for (key, value) in old {
                let path = below(path, key);
                match new.get(key) {
                    Some(now) => compare(&path, value, now, lines),
                    None => say('-', &path, value, lines),
                }
            }
            for (key, value) in new.iter().filter(|(key, _)| !old.contains_key(*key)) {
                say('+', &below(path, key), value, lines);
            }
        }
        (Value::Array(old), Value::Array(new)) if old != new => {
            let mut left: std::collections::HashMap<String, usize> = std::collections::HashMap::new();
            for item in new {
                *left.entry(item.to_string()).or_default() += 1;
            }
            let mut gone = Vec::new();
            for item in old {
                match left.get_mut(&item.to_string()) {
                    Some(count) if *count > 0 => *count -= 1,
                    _ => gone.push(item),
                }
            }
            let added: Vec<&Value> = new
                .iter()
                .rev()
                .filter(|item| match left.get_mut(&item.to_string()) {
                    Some(count) if *count > 0 => {
                        *count -= 1;
                        true
                    }
                    _ => false,
                })
                .collect();
            gone.iter().for_each(|item| line('-', path, item, lines));
            added.iter().rev().for_each(|item| line('+', path, item, lines));
            if gone.is_empty() && added.is_empty() {
                lines.push(format!("~ {path}: in another order"));
            }
        }
        (old, new) if old != new => lines.push(cut(format!("~ {path}: {} -> {}", text(old), text(new)))),
        _ => {}
    }
}

fn below(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Each item of a list is a line of its own.
fn say(sign: char, path: &str, value: &Value, lines: &mut Vec<String>) {
    match value {
        Value::Array(items) if !items.is_empty() => items.iter().for_each(|item| line(sign, path, item, lines)),
        _ => line(sign, path, value, lines),
    }
}

fn line(sign: char, path: &str, value: &Value, lines: &mut Vec<String>) {
    lines.push(cut(format!("{sign} {path}: {}", text(value))));
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn cut(line: String) -> String {
    match line.char_indices().nth(LINE_CHARACTERS_MAX) {
        Some((at, _)) => format!("{}…", &line[..at]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_difference_reads_as_what_was_done() {
        for (before, after, lines) in [
            (json!({}), json!({ "id": "web", "rules": ["a", "b"] }), vec!["+ id: web", "+ rules: a", "+ rules: b"]),
            (json!({ "id": "web" }), json!({}), vec!["- id: web"]),
            (json!({ "rules": ["a", "b", "c"] }), json!({ "rules": ["c", "d", "a"] }), vec!["- rules: b", "+ rules: d"]),
            (json!({ "rules": ["a", "a"] }), json!({ "rules": ["a"] }), vec!["- rules: a"]),
            (json!({ "rules": ["a"] }), json!({ "rules": ["a", "a"] }), vec!["+ rules: a"]),
            (json!({ "rules": ["a", "b"] }), json!({ "rules": ["b", "a"] }), vec!["~ rules: in another order"]),
            (json!({ "x": { "y": 1 } }), json!({ "x": { "y": 2 } }), vec!["~ x.y: 1 -> 2"]),
            (json!({ "x": 1 }), json!({ "x": 1 }), vec![]),
        ] {
            assert_eq!(differences(&before, &after), lines, "{before} {after}");
        }
    }

    #[test]
    fn a_difference_is_bounded() {
        let items = |count: usize| json!({ "members": (0..count).collect::<Vec<_>>() });
        assert_eq!(differences(&json!({}), &items(LINES_MAX)).len(), LINES_MAX);
        let lines = differences(&json!({}), &items(LINES_MAX + 1));
        assert_eq!((lines.len(), lines.last().map(String::as_str)), (LINES_MAX + 1, Some("and 1 more")));
        let long = differences(&json!({ "x": "" }), &json!({ "x": "ä".repeat(2 * LINE_CHARACTERS_MAX) }));
        assert_eq!(long[0].chars().count(), LINE_CHARACTERS_MAX + 1);
    }
}
