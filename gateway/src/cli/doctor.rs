//! `doctor`: what is wrong, and what to do about it.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::{alive, connect, streams};
use groupcast_control::log::Log;
use groupcast_control::terms::{self, BadTerm, Reserved};

use super::client::{Call, LOOK};
use super::context::Connection;
use super::output::{self, Paint};
use super::{Code, Failure, Result};
use crate::api::access::WhoAmI;
use crate::api::health::{Found, Status};
use crate::bus::{BusArguments, BusOptions};
use crate::checks::{Finding, Grade, bad, clock, good, unknown};
use crate::gateway::bus_options;
use crate::stores;

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
    bus: BusArguments,
}

pub async fn doctor(connection: &Connection, options: Options) -> Result {
    let mut findings = gateway(connection).await;
    let resolved = options.bus.resolved(Role::Gateway).map_err(anyhow::Error::from)?;
    if options.on_bus {
        findings.extend(bus(&resolved).await);
    }
    if let Some(urls) = &resolved.monitor {
        // What could not be seen from the gateway is seen from here.
        findings.retain(|finding| finding.grade != Grade::Unknown || finding.what != "flushing");
        findings.extend(stores::monitored(urls).await);
    }
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    findings.push(kernel(release.trim()));
    output::print(&shown(&findings, connection.color.stdout()))?;
    let unknown = findings.iter().filter(|finding| finding.grade == Grade::Unknown).count();
    match findings.iter().filter(|finding| finding.grade == Grade::Bad).count() {
        0 => {
            if unknown > 0 {
                output::say(&format!("nothing bad was found, but {unknown} of {} things are not known", findings.len()));
            }
            Ok(())
        }
        1 => Err(Failure::new(Code::Failure, "1 thing needs attention")),
        count => Err(Failure::new(Code::Failure, format!("{count} things need attention"))),
    }
}

pub fn shown(findings: &[Finding], paint: Paint) -> String {
    let mut text = String::new();
    for Finding { what, grade, found, advice } in findings {
        let mark = match grade {
            Grade::Good => paint.green("ok  "),
            Grade::Bad => paint.red("BAD "),
            Grade::Unknown => paint.yellow("??  "),
        };
        text += &format!("{mark} {what}: {found}\n");
        if !advice.is_empty() {
            text += &format!("       -> {advice}\n");
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
    match api.send(&Call::get("/readyz").at_once()).await {
        Ok(_) => findings.push(good("gateway", format!("{named} is ready"))),
        Err(failure) => {
            // The usual advice is what is being done here.
            let advice = failure.hint.filter(|hint| hint != LOOK).unwrap_or_else(|| "look at its log".to_owned());
            findings.push(bad("gateway", failure.message, advice));
            // One that is not ready can still say what it lacks, and what mends that.
            match api.fetch::<Found>(&Call::get("/v1/checks").at_once()).await {
                Ok(looked) => findings.extend(looked.findings),
                Err(_) => findings.push(unknown("leader, hosts, sources, clocks", "the gateway is not ready")),
            }
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
            for refused in &status.refused {
                findings.push(bad(
                    "document",
                    refused.clone(),
                    "write it again (`groupcast apply`); until then its last good version counts",
                ));
            }
        }
    }
    let asked = SystemTime::now();
    match api.fetch::<Found>(&Call::get("/v1/checks")).await {
        Err(failure) => findings.push(unknown("leader, hosts, sources, clocks", failure.message)),
        Ok(looked) => {
            findings.extend(looked.findings);
            let (theirs, now) = (humantime::parse_rfc3339(&looked.now).ok(), SystemTime::now());
            findings.push(clock("clock here", theirs, now, now.duration_since(asked).unwrap_or_default()));
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
    if let Err(error) = options.check(Role::Gateway, SystemTime::now()) {
        return vec![bad("credential", error.to_string(), "give --credentials the file, and --name only if it is its name")];
    }
    let advice = "is the server up, is this its address, and are the credentials a gateway's?";
    let connected = tokio::time::timeout(BUS_DEADLINE, connect::connect(bus_options(options))).await;
    let client = match connected {
        Ok(Ok((client, _events))) => client,
        Ok(Err(error)) => return vec![bad("bus", error.to_string(), advice)],
        Err(_) => return vec![bad("bus", format!("{servers} did not answer in time"), advice)],
    };
    let mut findings = vec![good("bus", format!("{servers} answers")), version(&client.server_info().version)];
    findings.push(match alive::takes_writes(&client, BUS_DEADLINE).await {
        Ok(took) => good("writes", format!("a write is answered after {} ms", took.as_millis())),
        Err(error) => bad("writes", error.to_string(), "does JetStream have a leader? see the servers' logs"),
    });
    findings.push(match tokio::time::timeout(BUS_DEADLINE, terms::reserved(&Log::catalog(client.clone()))).await {
        Ok(Ok((reserved, _))) => term(reserved),
        Ok(Err(error)) => bad("term", error.to_string(), "see what is said of the stores"),
        Err(_) => bad("term", "no answer in time", "does JetStream have a leader? see the servers' logs"),
    });
    let streams = stores::streams(&client).await;
    findings.extend(stores::judge(&streams));
    findings.extend(stores::audit(&client, streams.iter().all(|(_, looked)| looked.is_ok())).await);
    findings
}

/// Nobody leads with a term that has no successor.
fn term(reserved: std::result::Result<Reserved, BadTerm>) -> Finding {
    match reserved {
        Ok(reserved) => good("term", format!("{} is the last that was reserved", reserved.term())),
        Err(why) => {
            let advice =
                "stop the controllers, run `groupcast bus repair-term` with a controller's credential, and start them again";
            bad("term", format!("nobody can lead: {why}"), advice)
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
        assert_eq!(kernel("6.1.0-13-amd64").grade, Grade::Good);
        assert_eq!(kernel("6.12.3").grade, Grade::Good);
        assert!(kernel("5.10.0").grade == Grade::Bad && kernel("").grade == Grade::Bad);
        assert!(version("2.11.9").grade == Grade::Bad && version("2.12.0").grade == Grade::Good);
        assert_eq!(term(Reserved::decode(b"7 1")).grade, Grade::Good);
        assert_eq!(term(Reserved::decode(b"18446744073709551614")).grade, Grade::Bad);
        let text = shown(&[good("a", "fine"), bad("b", "broken", "mend it"), unknown("c", "dark")], Paint(false));
        assert_eq!(
            text,
            "ok   a: fine
BAD  b: broken
       -> mend it
??   c: not known: dark
"
        );
    }

    #[test]
    fn a_secret_that_others_can_read_is_told() {
        let path = std::env::temp_dir().join(format!("groupcast-doctor-{}", std::process::id()));
        crate::secret::write(&path, "x").unwrap();
        assert_eq!(private("token file", &path).grade, Grade::Good);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(private("token file", &path).grade, Grade::Bad);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(private("token file", &path).grade, Grade::Bad);
    }
}
