//! What a server must be and must have stored.

use serde_json::Value;

/// Atomic batches and batched direct get arrived here.
pub const SERVER_VERSION_MIN: (u64, u64, u64) = (2, 12, 0);

/// Reads `2.12.8`, also with a leading `v` or a suffix such as `-RC.1`.
pub fn parse_version(text: &str) -> Option<(u64, u64, u64)> {
    let text = text.trim().trim_start_matches('v');
    let release = text.split(['-', '+']).next()?;
    let mut parts = release.split('.').map(|part| part.parse::<u64>().ok());
    let version = (parts.next()??, parts.next()??, parts.next()??);
    parts.next().is_none().then_some(version)
}

/// Whether groupcast runs on a server of this version. A version that cannot be read is refused.
pub fn version_supported(text: &str) -> bool {
    parse_version(text).is_some_and(|version| version >= SERVER_VERSION_MIN)
}

/// The first setting asked for that the server does not hold: its name, what was asked, what is stored.
///
/// Settings the server adds by itself are its business. Servers leave out what is false, zero or empty, so absent equals those.
pub fn dropped_setting(asked: &Value, stored: &Value) -> Option<(String, String, String)> {
    let fields = asked.as_object()?;
    for (name, wanted) in fields {
        let held = stored.get(name).unwrap_or(&Value::Null);
        if let (Some(wanted_list), Some(held_list)) = (wanted.as_array(), held.as_array())
            && wanted_list.iter().any(Value::is_object)
        {
            if wanted_list.len() != held_list.len() {
                return Some((name.clone(), wanted.to_string(), held.to_string()));
            }
            for (index, (one_wanted, one_held)) in wanted_list.iter().zip(held_list).enumerate() {
                if let Some((inner, inner_asked, inner_stored)) = dropped_setting(one_wanted, one_held) {
                    return Some((format!("{name}[{index}].{inner}"), inner_asked, inner_stored));
                }
            }
        } else if wanted.is_object() && held.is_object() {
            if let Some((inner, inner_asked, inner_stored)) = dropped_setting(wanted, held) {
                return Some((format!("{name}.{inner}"), inner_asked, inner_stored));
            }
        } else if wanted != held && !(is_nothing(wanted) && is_nothing(held)) {
            return Some((name.clone(), wanted.to_string(), held.to_string()));
        }
    }
    // A republish or source nobody asked for would publish or store what nobody expects.
    for name in ["republish", "sources", "mirror", "subject_transform"] {
        let held = stored.get(name).unwrap_or(&Value::Null);
        if !fields.contains_key(name) && fields.contains_key("retention") && !is_nothing(held) {
            return Some((name.to_owned(), "nothing".to_owned(), held.to_string()));
        }
    }
    None
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(set) => !set,
        Value::Number(number) => number.as_i64() == Some(0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::streams::{ALL, TOPICS};

    #[test]
    fn versions_below_the_minimum_are_refused() {
        for (text, good) in [
            ("2.12.0", true),
            ("2.12.8", true),
            ("2.15.1", true),
            ("v2.12.0", true),
            ("2.13.0-RC.1", true),
            ("3.0.0", true),
            ("2.11.99", false),
            ("2.9.10", false),
            ("1.99.99", false),
            ("", false),
            ("2.12", false),
            ("2.12.x", false),
            ("2.12.0.1", false),
            ("nonsense", false),
        ] {
            assert_eq!(version_supported(text), good, "{text:?}");
        }
    }

    #[test]
    fn a_faithful_server_passes() {
        for stream in ALL {
            let asked = stream.config(3);
            let mut stored = asked.clone();
            let fields = stored.as_object_mut().unwrap();
            fields.retain(|_, value| !is_nothing(value));
            fields.insert("duplicate_window".into(), json!(120_000_000_000u64));
            fields.insert("metadata".into(), json!({ "_nats.ver": "2.15.1" }));
            assert_eq!(dropped_setting(&asked, &stored), None, "{}", stream.name);
        }
    }

    #[test]
    fn every_setting_that_a_server_drops_or_changes_is_named() {
        for stream in ALL {
            let asked = stream.config(3);
            for name in asked.as_object().unwrap().keys() {
                if is_nothing(&asked[name]) {
                    continue;
                }
                let mut dropped = asked.clone();
                dropped.as_object_mut().unwrap().remove(name);
                assert_eq!(dropped_setting(&asked, &dropped).map(|found| found.0).as_ref(), Some(name), "{}", stream.name);
                let mut changed = asked.clone();
                changed[name] = json!("something else");
                assert_eq!(dropped_setting(&asked, &changed).map(|found| found.0).as_ref(), Some(name), "{}", stream.name);
            }
        }
    }

    #[test]
    fn inner_fields_and_extras_are_compared() {
        let asked = TOPICS.config(1);
        let mut other = asked.clone();
        other["republish"]["dest"] = json!("gc.x.>");
        assert_eq!(dropped_setting(&asked, &other).unwrap().0, "republish.dest");

        let audit = crate::streams::AUDIT.config(1);
        let mut fewer = audit.clone();
        fewer["sources"].as_array_mut().unwrap().pop();
        assert_eq!(dropped_setting(&audit, &fewer).unwrap().0, "sources");
        let mut renamed = audit.clone();
        renamed["sources"][1]["name"] = json!("OTHER");
        assert_eq!(dropped_setting(&audit, &renamed).unwrap().0, "sources[1].name");

        let catalog = crate::streams::CATALOG.config(1);
        let mut extra = catalog.clone();
        extra["republish"] = json!({ "src": ">", "dest": "x.>" });
        assert_eq!(dropped_setting(&catalog, &extra).unwrap().0, "republish");
        assert!(dropped_setting(&catalog, &Value::Null).is_some());
    }
}
