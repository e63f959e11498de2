//! The `[[source]]` tables of `groupcast.toml`.

use std::path::PathBuf;
use std::time::Duration;

use groupcast_bus_config::settings::{Key, Section};
use groupcast_policy::ids::SourceId;
use serde::{Deserialize, Deserializer, Serialize};

/// The most that a Cloud Controller gives in one page.
pub const PAGE_SIZE_MAX: usize = 5_000;
/// Ids of groups are made of the source's id, a dash and a UUID, and have room for 64 characters.
pub const ID_LEN_MAX: usize = 27;
/// No source is asked more often.
pub const POLL_INTERVAL_MIN: Duration = Duration::from_millis(50);
/// Two polls that follow each other faster see the same mishap.
pub const HOLD_INTERVAL_MIN: Duration = Duration::from_secs(1);
/// No interval is longer.
pub const INTERVAL_MAX: Duration = Duration::from_secs(30 * 24 * 3_600);
/// Sources of one controller.
pub const SOURCES_MAX: usize = 64;

/// One source.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Source {
    CloudController(CloudController),
    Neutron(Neutron),
    Directory(Directory),
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CloudController {
    #[serde(deserialize_with = "id")]
    pub id: SourceId,
    pub url: String,
    /// Where `asg_latest_update` lives.
    pub internal_url: String,
    pub uaa_url: String,
    pub client_id: String,
    pub client_secret_file: PathBuf,
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    #[serde(default)]
    pub client_cert_file: Option<PathBuf>,
    #[serde(default)]
    pub client_key_file: Option<PathBuf>,
    #[serde(default = "a_second", deserialize_with = "duration")]
    pub poll_interval: Duration,
    #[serde(default = "ten_minutes", deserialize_with = "duration")]
    pub full_sync_interval: Duration,
    #[serde(default = "a_minute", deserialize_with = "duration")]
    pub hold_interval: Duration,
    #[serde(default = "largest_page")]
    pub page_size: usize,
    #[serde(default = "half_a_minute", deserialize_with = "duration")]
    pub timeout: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Neutron {
    #[serde(deserialize_with = "id")]
    pub id: SourceId,
    pub url: String,
    /// Keystone's base, with or without `/v3`.
    pub auth_url: String,
    #[serde(default)]
    pub application_credential_id: Option<String>,
    #[serde(default)]
    pub application_credential_secret_file: Option<PathBuf>,
    #[serde(default)]
    pub username: Option<String>,
    #[serde(default = "default_domain")]
    pub user_domain: String,
    #[serde(default)]
    pub password_file: Option<PathBuf>,
    #[serde(default)]
    pub project: Option<String>,
    #[serde(default = "default_domain")]
    pub project_domain: String,
    #[serde(default)]
    pub ca_file: Option<PathBuf>,
    #[serde(default)]
    pub client_cert_file: Option<PathBuf>,
    #[serde(default)]
    pub client_key_file: Option<PathBuf>,
    #[serde(default = "five_seconds", deserialize_with = "duration")]
    pub poll_interval: Duration,
    #[serde(default = "ten_minutes", deserialize_with = "duration")]
    pub full_sync_interval: Duration,
    #[serde(default = "a_minute", deserialize_with = "duration")]
    pub hold_interval: Duration,
    #[serde(default = "neutron_page")]
    pub page_size: usize,
    #[serde(default = "half_a_minute", deserialize_with = "duration")]
    pub timeout: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Directory {
    #[serde(deserialize_with = "id")]
    pub id: SourceId,
    pub path: PathBuf,
    /// How often it is looked at. Files are read only when something has changed.
    #[serde(default = "half_a_second", deserialize_with = "duration")]
    pub poll_interval: Duration,
    #[serde(default = "ten_minutes", deserialize_with = "duration")]
    pub full_sync_interval: Duration,
    #[serde(default = "a_minute", deserialize_with = "duration")]
    pub hold_interval: Duration,
}

const fn a_second() -> Duration {
    Duration::from_secs(1)
}
const fn five_seconds() -> Duration {
    Duration::from_secs(5)
}
const fn a_minute() -> Duration {
    Duration::from_secs(60)
}
const fn half_a_minute() -> Duration {
    Duration::from_secs(30)
}
const fn ten_minutes() -> Duration {
    Duration::from_secs(600)
}
const fn half_a_second() -> Duration {
    Duration::from_millis(500)
}
const fn largest_page() -> usize {
    PAGE_SIZE_MAX
}
const fn neutron_page() -> usize {
    1_000
}
fn default_domain() -> String {
    "Default".to_owned()
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    humantime::parse_duration(&text).map_err(|error| serde::de::Error::custom(format!("{text:?}: {error}: write 60s or 10m")))
}

fn id<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SourceId, D::Error> {
    let id = SourceId::new(&String::deserialize(deserializer)?).map_err(serde::de::Error::custom)?;
    if id.as_str().len() > ID_LEN_MAX {
        return Err(serde::de::Error::custom(format!(
            "source id {id} is longer than {ID_LEN_MAX} characters: the ids of its groups begin with it; shorten it"
        )));
    }
    Ok(id)
}

/// A `[[source]]` table as it is written: every key of every kind, so that a wrong one is found whatever the kind.
#[derive(Debug, Clone, Default, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    pub id: Option<String>,
    pub kind: Option<String>,
    pub url: Option<String>,
    pub internal_url: Option<String>,
    pub uaa_url: Option<String>,
    pub client_id: Option<String>,
    pub client_secret_file: Option<PathBuf>,
    pub auth_url: Option<String>,
    pub application_credential_id: Option<String>,
    pub application_credential_secret_file: Option<PathBuf>,
    pub username: Option<String>,
    pub user_domain: Option<String>,
    pub password_file: Option<PathBuf>,
    pub project: Option<String>,
    pub project_domain: Option<String>,
    pub path: Option<PathBuf>,
    pub ca_file: Option<PathBuf>,
    pub client_cert_file: Option<PathBuf>,
    pub client_key_file: Option<PathBuf>,
    pub poll_interval: Option<String>,
    pub full_sync_interval: Option<String>,
    pub hold_interval: Option<String>,
    pub page_size: Option<usize>,
    pub timeout: Option<String>,
}

impl Table {
    /// As the kind reads it: what it does not know is an error.
    pub fn source(&self) -> Result<Source, String> {
        let mut value = serde_json::to_value(self).map_err(|error| error.to_string())?;
        if let Some(fields) = value.as_object_mut() {
            fields.retain(|_, value| !value.is_null());
        }
        let named = self.id.as_deref().unwrap_or("without an id");
        serde_json::from_value(value).map_err(|error| format!("source {named}: {error}"))
    }
}

/// All of them, judged alone and together.
pub fn sources(tables: &[Table]) -> Result<Vec<Source>, String> {
    let sources = tables.iter().map(Table::source).collect::<Result<Vec<_>, _>>()?;
    check(&sources).map_err(|error| error.to_string())?;
    Ok(sources)
}

/// What may stand in a table.
pub fn section() -> Section {
    let key = Key::new;
    Section::many(
        "source",
        "Where groups come from besides the gateway. Polled by the controller that leads. docs/sources.md says more.",
        vec![
            key("id", "", "What it is called; what it owns begins with this and a dash"),
            key("kind", "", "`cloud-controller`, `neutron` or `directory`"),
            key("url", "", "cloud-controller, neutron: base of the API"),
            key("internal_url", "", "cloud-controller: where `asg_latest_update` lives, with mutual TLS"),
            key("uaa_url", "", "cloud-controller: base of the token endpoint"),
            key("client_id", "", "cloud-controller: UAA client"),
            key("client_secret_file", "", "cloud-controller: file with its secret, read for every token"),
            key("auth_url", "", "neutron: base of Keystone v3"),
            key("application_credential_id", "", "neutron: application credential"),
            key("application_credential_secret_file", "", "neutron: file with its secret"),
            key("username", "", "neutron: instead of an application credential, a user"),
            key("user_domain", "Default", "neutron: domain of the user"),
            key("password_file", "", "neutron: file with the user's password"),
            key("project", "", "neutron: project of the user"),
            key("project_domain", "Default", "neutron: domain of the project"),
            key("path", "", "directory: folder of YAML files"),
            key("ca_file", "those of the system", "Authorities to trust, in PEM; only these"),
            key("client_cert_file", "", "Certificate to show, in PEM"),
            key("client_key_file", "", "Its key, in PEM"),
            key("poll_interval", "1s, 5s or 500ms by kind", "How often it is asked whether something is new"),
            key("full_sync_interval", "10m", "How often all of it is read, whatever it says about changes"),
            key("hold_interval", "60s", "How long most of it must be gone before that is believed"),
            key("page_size", "5000 or 1000 by kind", "Items of one page"),
            key("timeout", "30s", "How long one call may take"),
        ],
    )
}

/// How often a source is asked, how often it is asked for everything, and when it is believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    pub poll: Duration,
    pub full_sync: Duration,
    /// Most of it gone is believed when a poll so much later agrees.
    pub hold: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("two sources are called {0}: what a source owns begins with its id; name them apart")]
    Twice(SourceId),
    #[error("source {one} is the beginning of source {other}: groups of one would look like the other's; name them apart")]
    Beginning { one: SourceId, other: SourceId },
    #[error("{0} sources, at most {SOURCES_MAX} are polled by one controller: merge some")]
    TooMany(usize),
    #[error("source {id}: {field} {problem}")]
    Field { id: SourceId, field: &'static str, problem: String },
}

impl Source {
    pub fn id(&self) -> &SourceId {
        match self {
            Self::CloudController(source) => &source.id,
            Self::Neutron(source) => &source.id,
            Self::Directory(source) => &source.id,
        }
    }

    pub const fn kind(&self) -> &'static str {
        match self {
            Self::CloudController(_) => "cloud-controller",
            Self::Neutron(_) => "neutron",
            Self::Directory(_) => "directory",
        }
    }

    pub const fn intervals(&self) -> Intervals {
        let (poll, full_sync, hold) = match self {
            Self::CloudController(source) => (source.poll_interval, source.full_sync_interval, source.hold_interval),
            Self::Neutron(source) => (source.poll_interval, source.full_sync_interval, source.hold_interval),
            Self::Directory(source) => (source.poll_interval, source.full_sync_interval, source.hold_interval),
        };
        Intervals { poll, full_sync, hold }
    }

    /// What is wrong with it by itself.
    pub fn check(&self) -> Result<(), Invalid> {
        let wrong = |field: &'static str, problem: &str| {
            Err(Invalid::Field { id: self.id().clone(), field, problem: problem.to_owned() })
        };
        let intervals = self.intervals();
        if intervals.poll < POLL_INTERVAL_MIN {
            return wrong("poll_interval", "is below 50ms: nobody needs it that fresh; ask with `fresh` instead");
        }
        if intervals.full_sync < intervals.poll {
            return wrong("full_sync_interval", "is below poll_interval: raise it");
        }
        if intervals.hold < HOLD_INTERVAL_MIN {
            return wrong("hold_interval", "is below 1s: two polls that follow on each other's heels see the same mishap");
        }
        if INTERVAL_MAX < intervals.poll.max(intervals.full_sync).max(intervals.hold) {
            return wrong("poll_interval", "or another interval is above 30days: shorten it");
        }
        let url = |text: &str| text.starts_with("https://") || text.starts_with("http://");
        match self {
            Self::CloudController(source) => {
                for (field, text) in [("url", &source.url), ("internal_url", &source.internal_url), ("uaa_url", &source.uaa_url)]
                {
                    if !url(text) {
                        return wrong(field, "is no URL: write https://HOST[:PORT]");
                    }
                }
                if source.page_size == 0 || source.page_size > PAGE_SIZE_MAX {
                    return wrong("page_size", "is not between 1 and 5000, which is what a Cloud Controller takes");
                }
                if source.client_cert_file.is_some() != source.client_key_file.is_some() {
                    return wrong("client_cert_file", "needs client_key_file beside it, and the other way round");
                }
            }
            Self::Neutron(source) => {
                for (field, text) in [("url", &source.url), ("auth_url", &source.auth_url)] {
                    if !url(text) {
                        return wrong(field, "is no URL: write https://HOST[:PORT]");
                    }
                }
                if source.page_size == 0 || source.page_size > PAGE_SIZE_MAX {
                    return wrong("page_size", "is not between 1 and 5000");
                }
                if source.client_cert_file.is_some() != source.client_key_file.is_some() {
                    return wrong("client_cert_file", "needs client_key_file beside it, and the other way round");
                }
                let application =
                    source.application_credential_id.is_some() && source.application_credential_secret_file.is_some();
                let password = source.username.is_some() && source.password_file.is_some() && source.project.is_some();
                if application == password {
                    return wrong(
                        "application_credential_id",
                        "with application_credential_secret_file, or username, password_file and project: give one of the two",
                    );
                }
            }
            Self::Directory(_) => {}
        }
        Ok(())
    }
}

/// What is wrong with all of them together.
pub fn check(sources: &[Source]) -> Result<(), Invalid> {
    if sources.len() > SOURCES_MAX {
        return Err(Invalid::TooMany(sources.len()));
    }
    for (at, source) in sources.iter().enumerate() {
        source.check()?;
        for other in sources.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, other)| other) {
            if source.id() == other.id() {
                return Err(Invalid::Twice(source.id().clone()));
            }
            if other.id().as_str().starts_with(&format!("{}-", source.id())) {
                return Err(Invalid::Beginning { one: source.id().clone(), other: other.id().clone() });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: serde_json::Value) -> Result<Source, String> {
        serde_json::from_value::<Source>(json)
            .map_err(|e| e.to_string())
            .and_then(|s| s.check().map_err(|e| e.to_string()).map(|()| s))
    }

    fn cloud(id: &str) -> serde_json::Value {
        serde_json::json!({
            "kind": "cloud-controller", "id": id, "url": "https://api", "internal_url": "https://cc:9023", "uaa_url": "https://uaa",
            "client_id": "c", "client_secret_file": "/s",
        })
    }

    #[test]
    fn defaults_are_those_of_the_documentation() {
        let Ok(Source::CloudController(source)) = parse(cloud("cf")) else { panic!("valid") };
        assert_eq!((source.poll_interval, source.full_sync_interval, source.page_size), (a_second(), ten_minutes(), 5_000));
        assert_eq!(source.hold_interval, a_minute());
        let directory = parse(serde_json::json!({"kind": "directory", "id": "files", "path": "groups.d"})).unwrap();
        assert_eq!(directory.intervals().poll, half_a_second());
        let neutron = serde_json::json!({"kind": "neutron", "id": "os", "url": "http://n", "auth_url": "http://k",
            "application_credential_id": "a", "application_credential_secret_file": "/s"});
        assert_eq!(parse(neutron).unwrap().intervals().poll, Duration::from_secs(5));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |field: &str, value: serde_json::Value| {
            let mut source = cloud("cf");
            source[field] = value;
            parse(source).unwrap_err()
        };
        for (field, value, words) in [
            ("poll_intervall", "60s".into(), "unknown field `poll_intervall`"),
            ("poll_interval", "soon".into(), "\"soon\""),
            ("poll_interval", "1ms".into(), "source cf: poll_interval is below 50ms"),
            ("full_sync_interval", "500ms".into(), "full_sync_interval is below poll_interval"),
            ("hold_interval", "999ms".into(), "hold_interval is below 1s"),
            ("full_sync_interval", "31days".into(), "above 30days"),
            ("page_size", 0.into(), "page_size"),
            ("page_size", 5_001.into(), "page_size"),
            ("url", "api".into(), "url is no URL"),
            ("client_cert_file", "/c".into(), "needs client_key_file"),
            ("id", "no good".into(), "source id \"no good\" is not valid"),
            ("id", "x".repeat(ID_LEN_MAX + 1).into(), "longer than 27"),
            ("kind", "kubernetes".into(), "unknown variant `kubernetes`"),
        ] {
            let error = with(field, value);
            assert!(error.contains(words), "{field}: {error}");
        }
        let both = serde_json::json!({"kind": "neutron", "id": "os", "url": "http://n", "auth_url": "http://k"});
        assert!(parse(both).unwrap_err().contains("give one of the two"));
    }

    #[test]
    fn ids_of_sources_do_not_meet() {
        let all = |ids: &[&str]| check(&ids.iter().map(|id| parse(cloud(id)).unwrap()).collect::<Vec<_>>());
        assert_eq!(all(&["cf", "os"]), Ok(()));
        assert_eq!(all(&["cf", "cfx"]), Ok(()));
        assert!(matches!(all(&["cf", "cf"]), Err(Invalid::Twice(_))));
        assert!(matches!(all(&["cf-x", "cf"]), Err(Invalid::Beginning { .. })));
        let many: Vec<String> = (0..=SOURCES_MAX).map(|i| format!("s{i}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert_eq!((all(&many[1..]), all(&many)), (Ok(()), Err(Invalid::TooMany(SOURCES_MAX + 1))));
    }
}
