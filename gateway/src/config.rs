//! The configuration file, `groupcast.toml`. What the command line or the environment says counts before it.
//!
//! ```toml
//! [bus]
//! servers = ["nats://bus-1:4222", "nats://bus-2:4222"]
//! name = "c1"
//! credentials = "/etc/groupcast/c1.creds"
//!
//! [controller]
//! listen = "127.0.0.1:4280"
//! lease = "3s"
//!
//! [telemetry]
//! otlp_endpoint = "http://127.0.0.1:4318"
//! ```

use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use crate::bus::BusOptions;
use crate::controller::ControllerOptions;
use crate::telemetry::TelemetryOptions;

/// Longest file that is read, in bytes.
pub const FILE_BYTES_MAX: u64 = 1024 * 1024;

/// What a file may say.
const KNOWN: &[(&str, &[&str])] = &[
    ("bus", &["servers", "name", "credentials", "tls_authority", "tls_certificate", "tls_key", "reconnect_delay_max"]),
    ("controller", &["listen", "replicas", "lease", "never_lead"]),
    ("telemetry", &["otlp_endpoint", "otlp_sample_ratio"]),
];

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct File {
    pub bus: BusOptions,
    pub controller: ControllerOptions,
    pub telemetry: TelemetryOptions,
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
}

fn hint(closest: &Option<String>) -> String {
    closest.as_ref().map(|key| format!(": did you mean {key}?")).unwrap_or_default()
}

pub fn read(path: &Path) -> Result<File, Error> {
    let shown = path.display().to_string();
    let failed = |error| Error::Read { path: shown.clone(), error };
    if std::fs::metadata(path).map_err(failed)?.len() > FILE_BYTES_MAX {
        return Err(Error::TooLarge { path: shown });
    }
    parse(&shown, &std::fs::read_to_string(path).map_err(failed)?)
}

fn parse(path: &str, text: &str) -> Result<File, Error> {
    let malformed = |error| Error::Malformed { path: path.to_owned(), error: Box::new(error) };
    let table: toml::Table = toml::from_str(text).map_err(malformed)?;
    if let Some((key, closest)) = unknown(&table) {
        return Err(Error::Unknown { path: path.to_owned(), key, closest });
    }
    toml::from_str(text).map_err(malformed)
}

/// The first key that is not known, and what may have been meant.
fn unknown(table: &toml::Table) -> Option<(String, Option<String>)> {
    for (section, value) in table {
        let Some((_, keys)) = KNOWN.iter().find(|(known, _)| known == section) else {
            // Perhaps a key that belongs into a section.
            let all = KNOWN.iter().flat_map(|(section, keys)| keys.iter().map(move |key| (format!("{section}.{key}"), *key)));
            let sections = KNOWN.iter().map(|(section, _)| (format!("[{section}]"), *section));
            return Some((section.clone(), closest(section, sections.chain(all))));
        };
        for key in value.as_table().into_iter().flat_map(|table| table.keys()) {
            if !keys.contains(&key.as_str()) {
                let closest = closest(key, keys.iter().map(|key| (format!("{section}.{key}"), *key)));
                return Some((format!("{section}.{key}"), closest));
            }
        }
    }
    None
}

fn closest<'a>(word: &str, known: impl Iterator<Item = (String, &'a str)>) -> Option<String> {
    let rated = known.map(|(shown, key)| (strsim::jaro_winkler(word, key), shown));
    let best = rated.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 > 0.7).then_some(best.1)
}

/// A duration as people write it: `3s`, `250ms`.
pub(crate) fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map(Some).map_err(|error| serde::de::Error::custom(format!("{text:?}: {error}")))
}

/// Whatever can be read from text.
pub(crate) fn parsed<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(deserializer: D) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map(Some).map_err(|error: T::Err| serde::de::Error::custom(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_key_can_be_said() {
        let file = parse(
            "f",
            r#"
            [bus]
            servers = ["nats://a:1"]
            name = "c1"
            credentials = "/c"
            tls_authority = "/a"
            tls_certificate = "/b"
            tls_key = "/k"
            reconnect_delay_max = "5s"
            [controller]
            listen = "127.0.0.1:1"
            replicas = 3
            lease = "1500ms"
            never_lead = true
            [telemetry]
            otlp_endpoint = "http://x"
            otlp_sample_ratio = 0.5
            "#,
        )
        .unwrap();
        assert_eq!(file.bus.name().as_str(), "c1");
        assert_eq!(file.bus.reconnect_delay_max, Some(Duration::from_secs(5)));
        assert_eq!(file.controller.lease, Some(Duration::from_millis(1_500)));
        assert_eq!((file.controller.replicas, file.controller.never_lead), (Some(3), Some(true)));
        assert_eq!(file.telemetry.otlp_sample_ratio, Some(0.5));
        // The list of keys is the one that can be read: an unknown field names all that are.
        for (section, keys) in KNOWN {
            let error = toml::from_str::<File>(&format!("[{section}]\nnonsense = 1")).unwrap_err().to_string();
            keys.iter().for_each(|key| assert!(error.contains(&format!("`{key}`")), "{key}: {error}"));
            assert_eq!(error.matches('`').count() / 2, keys.len() + 1, "{error}");
        }
    }

    #[test]
    fn what_is_not_known_is_an_error_that_names_what_may_be_meant() {
        for (text, words) in [
            ("[controller]\nlese = \"3s\"", "says controller.lese, which is not known: did you mean controller.lease?"),
            ("[bus]\nserver = []", "did you mean bus.servers?"),
            ("[controler]\nlease = \"3s\"", "did you mean [controller]?"),
            ("lease = \"3s\"", "did you mean controller.lease?"),
            ("[telemetry]\nzzz = 1", "says telemetry.zzz, which is not known"),
            ("[controller]\nlease = \"soon\"", "\"soon\""),
            ("[controller]\nlease = 3", "invalid type"),
            ("[bus]\nname = \"no good\"", "host id \"no good\" is not valid"),
            ("[bus", "is not valid"),
        ] {
            let error = parse("groupcast.toml", text).unwrap_err().to_string();
            assert!(error.contains("groupcast.toml") && error.contains(words), "{text}: {error}");
        }
        assert!(parse("f", "").unwrap().bus.name.is_none());
    }

    #[test]
    fn the_command_line_counts_before_the_file() {
        let flags = BusOptions { servers: Some(vec!["a".into()]), ..BusOptions::default() };
        let file = BusOptions {
            servers: Some(vec!["b".into()]),
            credentials: Some("/c".into()),
            tls_certificate: Some("/cert".into()),
            tls_key: Some("/key".into()),
            ..BusOptions::default()
        };
        let both = flags.clone().or(file.clone());
        assert_eq!((both.servers.as_deref(), both.credentials.is_some()), (Some(["a".to_owned()].as_slice()), true));
        assert_eq!(both.settings().tls.certificate, Some(("/cert".into(), "/key".into())));
        let own = BusOptions { tls_certificate: Some("/mine".into()), tls_key: Some("/mine.key".into()), ..flags }.or(file);
        assert_eq!(own.settings().tls.certificate, Some(("/mine".into(), "/mine.key".into())), "never half of each");
        assert_eq!(BusOptions::default().settings().name.as_str(), "controller");
    }

    #[test]
    fn a_file_that_cannot_be_one_is_refused() {
        let path = std::env::temp_dir().join(format!("groupcast-config-{}", std::process::id()));
        std::fs::write(&path, vec![b'#'; FILE_BYTES_MAX as usize]).unwrap();
        assert!(read(&path).is_ok());
        std::fs::write(&path, vec![b'#'; FILE_BYTES_MAX as usize + 1]).unwrap();
        assert!(matches!(read(&path), Err(Error::TooLarge { .. })));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(read(&path), Err(Error::Read { .. })));
    }
}
