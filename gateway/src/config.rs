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
//! [gateway]
//! listen = "0.0.0.0:4270"
//! certificate = "/etc/groupcast/cert.pem"
//! key = "/etc/groupcast/key.pem"
//!
//! [telemetry]
//! otlp_endpoint = "http://127.0.0.1:4318"
//! ```
//!
//! A section is a struct that belongs to whoever uses it. To add one: a field in [`File`], a line in [`sections`], and then the reference
//! page is written anew by the test below with `GROUPCAST_UPDATE=1`. A section that has no flags goes into the options of the command
//! that uses it as a field with `#[arg(skip)]`, which its `with_file` fills.

use std::path::{Path, PathBuf};

use clap::Args;
use groupcast_bus_config::settings::{self, Key, Section};
use serde::Deserialize;

pub use groupcast_bus_config::settings::Error;

use crate::bus::BusOptions;
use crate::controller::ControllerOptions;
use crate::gateway::GatewayOptions;
use crate::registrations::RegistrationOptions;
use crate::telemetry::TelemetryOptions;

/// The name of the file.
pub const NAME: &str = "groupcast.toml";

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct File {
    pub bus: BusOptions,
    pub controller: ControllerOptions,
    pub registration: RegistrationOptions,
    pub gateway: GatewayOptions,
    pub telemetry: TelemetryOptions,
    pub source: Vec<groupcast_control::source::config::Table>,
}

/// Where the file is.
#[derive(Debug, Clone, Default, Args)]
pub struct ConfigOption {
    /// Configuration file; what is said here counts before what it says.
    #[arg(long, env = "GROUPCAST_CONFIG")]
    pub config: Option<PathBuf>,
}

impl ConfigOption {
    /// What the file says; nothing if none is named.
    pub fn read(&self) -> Result<File, Error> {
        self.config.as_deref().map_or(Ok(File::default()), read)
    }
}

/// What a file may say.
pub fn sections() -> Vec<Section> {
    vec![
        flags::<BusOptions>("bus", "How the bus is reached. Controllers and gateways both use it.", ""),
        flags::<ControllerOptions>("controller", "For `groupcast controller` and `groupcast serve`.", "controller_"),
        flags::<RegistrationOptions>(
            "registration",
            "How long the silence of hosts is forgiven, and how many may be silent at once. For `groupcast controller` and `groupcast serve`; \
             the same on all controllers.",
            "registration_",
        ),
        flags::<GatewayOptions>("gateway", "For `groupcast gateway` and `groupcast serve`.", "api_"),
        flags::<TelemetryOptions>("telemetry", "Where traces go.", ""),
        groupcast_control::source::config::section(),
    ]
}

/// A section whose keys can also be said as flags: what is known about them the command line knows. Flags that would be ambiguous
/// have a prefix that the section makes needless.
fn flags<A: Args>(name: &str, about: &str, prefix: &str) -> Section {
    const DEFAULT: &str = " [default: ";
    let command = A::augment_args(clap::Command::new("groupcast"));
    let keys = command.get_arguments().map(|argument| {
        let id = argument.get_id().as_str();
        let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        let (about, default) = help.split_once(DEFAULT).map_or((&*help, ""), |(about, rest)| (about, rest.trim_end_matches(']')));
        Key {
            flag: argument.get_long().map(|long| format!("--{long}")),
            variable: argument.get_env().map(|variable| variable.to_string_lossy().into_owned()),
            ..Key::new(id.strip_prefix(prefix).unwrap_or(id), default, about)
        }
    });
    Section::one(name, about, keys.collect())
}

/// Reads a file, and checks by itself what stands in it.
pub fn read(path: &Path) -> Result<File, Error> {
    checked(&path.display().to_string(), settings::read(path, &sections())?)
}

fn checked(path: &str, file: File) -> Result<File, Error> {
    let halves = [
        ("bus.tls_certificate", "bus.tls_key", file.bus.tls_certificate.is_some(), file.bus.tls_key.is_some()),
        ("gateway.certificate", "gateway.key", file.gateway.certificate.is_some(), file.gateway.key.is_some()),
        ("controller.certificate", "controller.key", file.controller.certificate.is_some(), file.controller.key.is_some()),
    ];
    for (one, other, has_one, has_other) in halves {
        let (there, missing) = if has_one { (one, other) } else { (other, one) };
        if has_one != has_other {
            return Err(Error::Wrong { path: path.to_owned(), what: format!("{there} needs {missing} beside it") });
        }
    }
    if let Err(what) = groupcast_control::source::config::sources(&file.source) {
        return Err(Error::Wrong { path: path.to_owned(), what });
    }
    Ok(file)
}

/// What the reference page says about this file.
pub fn reference() -> String {
    let about = "Read by `groupcast controller`, `gateway` and `serve`, and by every command that goes to the bus itself, where `--config` or \
        `GROUPCAST_CONFIG` names it. A flag counts before \
        an environment variable, that before the file. Durations are written as `250ms`, `3s`, `1h 30m`. A key that is not known is an error. \
        `groupcast config check` judges it.";
    settings::reference(NAME, about, &sections())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn parse(path: &str, text: &str) -> Result<File, Error> {
        checked(path, settings::parse(path, text, &sections())?)
    }

    #[test]
    fn every_known_key_can_be_said() {
        settings::keys_are_read::<File>(&sections()).unwrap();
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
            [gateway]
            listen = "127.0.0.1:2"
            certificate = "/c"
            key = "/k"
            allow_plain = true
            credentials = "/g"
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
        assert_eq!((file.gateway.listen.map(|at| at.port()), file.gateway.allow_plain), (Some(2), Some(true)));
        assert_eq!(file.telemetry.otlp_sample_ratio, Some(0.5));
    }

    #[test]
    fn what_is_not_known_is_an_error_that_names_what_may_be_meant() {
        for (text, words) in [
            ("[controller]\nlese = \"3s\"", "says controller.lese, which is not known: did you mean controller.lease?"),
            ("[bus]\nserver = []", "did you mean bus.servers?"),
            ("[controler]\nlease = \"3s\"", "did you mean [controller]?"),
            ("replicas = 3", "did you mean controller.replicas?"),
            ("[gateway]\napi_listen = \"x\"", "did you mean gateway.listen?"),
            ("[telemetry]\nzzz = 1", "says telemetry.zzz, which is not known"),
            ("[controller]\nlease = \"soon\"", "\"soon\""),
            ("[controller]\nlease = 3", "invalid type"),
            ("[bus]\nname = \"no good\"", "host id \"no good\" is not valid"),
            ("[telemetry]\notlp_sample_ratio = 1.5", "from 0 to 1"),
            ("[gateway]\nkey = \"/k\"", "gateway.key needs gateway.certificate beside it"),
            ("[bus]\ntls_certificate = \"/c\"", "bus.tls_certificate needs bus.tls_key beside it"),
            ("[[source]]\nid = \"cf\"\nkind = \"kubernetes\"", "source cf: unknown variant `kubernetes`"),
            (
                "[[source]]\nid = \"files\"\nkind = \"directory\"\npath = \"groups.d\"\nurl = \"https://x\"",
                "source files: unknown field `url`",
            ),
            ("[[source]]\nid = \"f\"\npoll_intervall = \"3s\"", "did you mean source.poll_interval?"),
            ("[bus", "is not valid"),
        ] {
            let error = parse("groupcast.toml", text).unwrap_err().to_string();
            assert!(error.contains("groupcast.toml") && error.contains(words), "{text}: {error}");
        }
        assert!(parse("f", "").unwrap().bus.name.is_none());
    }

    #[test]
    fn the_reference_is_current() {
        let page = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md"));
        settings::page_is_current(page, NAME, &reference()).unwrap();
        // Every key says what it means.
        for section in sections() {
            section.keys.iter().for_each(|key| {
                assert!(!key.about.is_empty() && (section.many || key.flag.is_some()), "{}.{}", section.name, key.name)
            });
        }
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
        let flags =
            GatewayOptions { certificate: Some("/mine".into()), key: Some("/mine.key".into()), ..GatewayOptions::default() };
        let file = GatewayOptions {
            certificate: Some("/c".into()),
            key: Some("/k".into()),
            allow_plain: Some(true),
            ..GatewayOptions::default()
        };
        let both = flags.or(file);
        assert_eq!((both.certificate, both.key, both.allow_plain), (Some("/mine".into()), Some("/mine.key".into()), Some(true)));
    }
}
