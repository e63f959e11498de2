//! `doctor`: what is wrong, and what to do about it.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use clap::Args;
use groupcast_bus_config::{connect, streams};
use groupcast_control::begin::ADVICE;
use groupcast_control::log::Log;

use super::client::Call;
use super::context::Connection;
use super::output::{self, Paint};
use super::{Code, Failure, Result};
use crate::api::access::WhoAmI;
use crate::api::health::Status;
use crate::bus::BusOptions;
use crate::gateway::bus_options;

/// Clocks further apart than this make expiry and times in records misleading.
const CLOCK_DIFFERENCE_MAX: Duration = Duration::from_secs(5);
/// How long the bus has to answer.
const BUS_DEADLINE: Duration = Duration::from_secs(5);
/// The oldest kernel that agents enforce on, and the first whose tables survive their owner.
const KERNEL_MIN: (u32, u32) = (6, 1);
const KERNEL_OWNED: (u32, u32) = (6, 9);

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Also look at the bus.
    #[arg(long)]
    on_bus: bool,
    #[command(flatten)]
    bus: BusOptions,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub what: String,
    pub found: String,
    /// What to do; nothing when all is well.
    pub advice: Option<String>,
}

fn good(what: &str, found: impl Into<String>) -> Finding {
    Finding { what: what.to_owned(), found: found.into(), advice: None }
}

fn bad(what: &str, found: impl Into<String>, advice: impl Into<String>) -> Finding {
    Finding { what: what.to_owned(), found: found.into(), advice: Some(advice.into()) }
}

pub async fn doctor(connection: &Connection, options: Options) -> Result {
    let mut findings = gateway(connection).await;
    if options.on_bus {
        findings.extend(bus(&options.bus).await);
    }
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    findings.push(kernel(release.trim()));
    output::print(&shown(&findings, connection.color.stdout()))?;
    match findings.iter().filter(|finding| finding.advice.is_some()).count() {
        0 => Ok(()),
        1 => Err(Failure::new(Code::Failure, "1 thing needs attention")),
        count => Err(Failure::new(Code::Failure, format!("{count} things need attention"))),
    }
}

pub fn shown(findings: &[Finding], paint: Paint) -> String {
    let mut text = String::new();
    for Finding { what, found, advice } in findings {
        match advice {
            None => text += &format!("{} {what}: {found}\n", paint.green("ok  ")),
            Some(advice) => text += &format!("{} {what}: {found}\n       -> {advice}\n", paint.red("BAD ")),
        }
    }
    text
}

async fn gateway(connection: &Connection) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Ok(context) = connection.resolve()
        && let Some(path) = &context.token_file
    {
        findings.push(private("token file", path));
    }
    let api = match connection.api() {
        Ok(api) => api,
        Err(failure) => {
            findings.push(bad("gateway", failure.message, failure.hint.unwrap_or_default()));
            return findings;
        }
    };
    let named = api.gateways().join(", ");
    match api.send(&Call::get("/readyz")).await {
        Ok(_) => findings.push(good("gateway", format!("{named} is ready"))),
        Err(failure) => {
            let advice = failure.hint.unwrap_or_else(|| "look at its log".to_owned());
            findings.push(bad("gateway", failure.message, advice));
            return findings;
        }
    }
    match api.fetch::<WhoAmI>(&Call::get("/v1/whoami")).await {
        Ok(who) => findings.push(good("token", format!("{} with role {}", who.id, who.role.as_str()))),
        Err(failure) => {
            findings.push(bad("token", failure.message, failure.hint.unwrap_or_default()));
            return findings;
        }
    }
    match api.fetch::<Status>(&Call::get("/v1/status")).await {
        Err(failure) => findings.push(bad("status", failure.message, failure.hint.unwrap_or_default())),
        Ok(status) => {
            let counts = format!(
                "{} groups, {} workloads on {} hosts, CATALOG {}, REGISTRY {}",
                status.groups, status.workloads, status.hosts, status.catalog, status.registry
            );
            findings.push(good("state", counts));
            findings.push(version(&status.server_version));
            findings.push(match status.controller {
                true => good("controller", "at least one listens"),
                false => {
                    bad("controller", "none listens: nothing is published", "start `groupcast controller`, better two of them")
                }
            });
            if !status.begun {
                findings.push(bad("catalogue", "empty", ADVICE));
            }
            for refused in &status.refused {
                findings.push(bad(
                    "document",
                    refused.clone(),
                    "write it again (`groupcast apply`); until then its last good version counts",
                ));
            }
        }
    }
    findings
}

fn version(found: &str) -> Finding {
    match streams::version_supported(found) {
        true => good("nats-server", found),
        false => bad("nats-server", found, "groupcast needs 2.12 or newer: upgrade the servers one by one"),
    }
}

/// A secret that others can read is none.
fn private(what: &str, path: &Path) -> Finding {
    match std::fs::metadata(path) {
        Err(error) => bad(what, format!("{}: {error}", path.display()), "name the right file with --token-file or a context"),
        Ok(about) if about.permissions().mode() & 0o077 != 0 => {
            bad(what, format!("{} can be read by others", path.display()), format!("chmod 600 {}", path.display()))
        }
        Ok(_) => good(what, format!("{} is its owner's only", path.display())),
    }
}

async fn bus(options: &BusOptions) -> Vec<Finding> {
    let settings = options.settings();
    let servers = settings.servers.join(", ");
    let advice = "is the server up, is this its address, and are the credentials a gateway's?";
    let connected = tokio::time::timeout(BUS_DEADLINE, connect::connect(bus_options(options))).await;
    let client = match connected {
        Ok(Ok((client, _events))) => client,
        Ok(Err(error)) => return vec![bad("bus", error.to_string(), advice)],
        Err(_) => return vec![bad("bus", format!("{servers} did not answer in time"), advice)],
    };
    let mut findings = vec![good("bus", format!("{servers} answers")), version(&client.server_info().version)];
    for log in [Log::catalog(client.clone()), Log::registry(client)] {
        let stream = log.stream();
        match tokio::time::timeout(BUS_DEADLINE, log.last(">")).await {
            Ok(Ok(last)) => {
                findings
                    .push(good(stream, last.as_ref().map_or("empty".to_owned(), |entry| format!("ends at {}", entry.sequence))));
                findings.extend(last.map(|entry| clock(stream, entry.at, SystemTime::now())));
            }
            Ok(Err(error)) => findings.push(bad(stream, error.to_string(), "a controller makes the streams: start one")),
            Err(_) => findings.push(bad(stream, "no answer in time", "does JetStream have a leader? see the servers' logs")),
        }
    }
    findings
}

/// What was stored cannot have been stored in the future.
fn clock(stream: &str, stored: SystemTime, now: SystemTime) -> Finding {
    let ahead = stored.duration_since(now).unwrap_or_default();
    match ahead > CLOCK_DIFFERENCE_MAX {
        false => good("clock", format!("agrees with the last message of {stream}")),
        true => {
            bad("clock", format!("{} s behind the servers'", ahead.as_secs()), "synchronise the clocks, here and on the servers")
        }
    }
}

fn kernel(release: &str) -> Finding {
    let mut parts = release.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse::<u32>().ok());
    match (parts.next(), parts.next()) {
        (Some(major), Some(minor)) if (major, minor) >= KERNEL_OWNED => {
            good("kernel here", format!("{release} (agents own their table)"))
        }
        (Some(major), Some(minor)) if (major, minor) >= KERNEL_MIN => {
            good("kernel here", format!("{release} (agents watch their table; from 6.9 on they own it)"))
        }
        (Some(_), Some(_)) => bad("kernel here", release, "an agent on this machine needs 6.1 or newer"),
        _ => bad("kernel here", "unknown", "agents need Linux 6.1 or newer"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_say_what_to_do() {
        assert_eq!(kernel("6.1.0-13-amd64").advice, None);
        assert_eq!(kernel("6.12.3").advice, None);
        assert!(kernel("5.10.0").advice.is_some() && kernel("").advice.is_some());
        assert!(version("2.11.9").advice.is_some() && version("2.12.0").advice.is_none());
        let now = SystemTime::now();
        assert!(clock("CATALOG", now + Duration::from_secs(60), now).advice.is_some());
        assert!(clock("CATALOG", now - Duration::from_secs(60), now).advice.is_none());
        let text = shown(&[good("a", "fine"), bad("b", "broken", "mend it")], Paint(false));
        assert_eq!(text, "ok   a: fine\nBAD  b: broken\n       -> mend it\n");
    }

    #[test]
    fn a_secret_that_others_can_read_is_told() {
        let path = std::env::temp_dir().join(format!("groupcast-doctor-{}", std::process::id()));
        crate::secret::write(&path, "x").unwrap();
        assert_eq!(private("token file", &path).advice, None);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert!(private("token file", &path).advice.is_some());
        std::fs::remove_file(&path).unwrap();
        assert!(private("token file", &path).advice.is_some());
    }
}
