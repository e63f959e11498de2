//! `config`: judges configuration files before they are used, and says what they may hold.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::{Args, Subcommand};
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::credentials::HostSigner;
use groupcast_bus_config::held::Held;
use groupcast_bus_config::streams::version_supported;
use groupcast_bus_config::{connect, reach};

use super::output;
use super::{Code, Failure, Result};
use crate::config::{self, File, NAME};
use crate::expiry::Expiring;
use crate::tls;

/// The agent's file, which the agent itself judges: it is a program of its own.
const AGENT_NAME: &str = "agent.toml";
const AGENT: &str = "groupcast-agent";
/// Where files are unless they are named.
const FOLDER: &str = "/etc/groupcast";

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Judge configuration files, and the files that they name.
    Check(CheckOptions),
    /// Print what groupcast.toml may say, in Markdown.
    Reference,
}

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Examples:\n  groupcast config check groupcast.toml\n  groupcast config check /etc/groupcast/agent.toml   # asks groupcast-agent"
)]
pub struct CheckOptions {
    /// Files to judge; without any, the one that GROUPCAST_CONFIG names and those in /etc/groupcast.
    files: Vec<PathBuf>,
    /// Judge the files alone, and reach no server.
    #[arg(long)]
    offline: bool,
    /// Judge whether this machine is the one that others reach under this name or address, and of files those that are named.
    #[arg(long, value_name = "ADDRESS")]
    here: Option<String>,
}

pub async fn run(command: Command) -> Result {
    match command {
        Command::Reference => output::print(&config::reference()),
        Command::Check(options) => {
            // Who asks about the machine alone names no file.
            let files = if options.files.is_empty() && options.here.is_none() { usual() } else { options.files };
            if files.is_empty() && options.here.is_none() {
                let message = format!("there is no configuration to judge: {FOLDER} holds neither {NAME} nor {AGENT_NAME}");
                return Err(Failure::new(Code::NotFound, message).hint("name a file: groupcast config check FILE"));
            }
            let mut problems = Vec::new();
            if let Some(address) = &options.here {
                problems.extend(elsewhere(address).await);
            }
            for file in &files {
                match check(file, options.offline).await {
                    Ok(said) => output::print(&said)?,
                    Err(found) => problems.extend(found),
                }
            }
            match problems.len() {
                0 => Ok(()),
                count => {
                    let plural = if count == 1 { "" } else { "s" };
                    let mut failure = Failure::failed(format!("{count} problem{plural} in the configuration"));
                    failure.details = problems;
                    Err(failure.hint("docs/configuration.md and `groupcast config reference` say what may stand there"))
                }
            }
        }
    }
}

fn usual() -> Vec<PathBuf> {
    let named = std::env::var_os("GROUPCAST_CONFIG").map(PathBuf::from);
    let own = named.unwrap_or_else(|| Path::new(FOLDER).join(NAME));
    [own, Path::new(FOLDER).join(AGENT_NAME)].into_iter().filter(|path| path.exists()).collect()
}

/// What is good about a file, or everything that is wrong.
type Judged = std::result::Result<String, Vec<String>>;

/// That others reach another machine under this name.
async fn elsewhere(address: &str) -> Option<String> {
    match reach::is_here(address).await {
        Ok(true) => None,
        Ok(false) => Some(format!(
            "this machine does not have the address {address}: are these the files of another machine? If the address is translated on the \
             way here, set ANYWHERE=1 for the install script"
        )),
        Err(error) => Some(error.to_string()),
    }
}

async fn check(path: &Path, offline: bool) -> Judged {
    if is_agents(path) {
        return ask_agent(path, offline);
    }
    let file = config::read(path).map_err(|error| vec![error.to_string()])?;
    let mut problems = problems(&file, SystemTime::now());
    // What is wrong with the files would only be said once more by every server.
    if problems.is_empty() && !offline {
        problems = unreachable(&file).await;
    }
    if problems.is_empty() {
        let listen = file.gateway.listen();
        let tls = if file.gateway.certificate.is_some() { "with TLS" } else { "without TLS" };
        let servers = file.bus.settings().servers.join(", ");
        let reached = if offline { " (not asked)" } else { "" };
        return Ok(format!("{} is good: bus {servers}{reached}, API on {listen} {tls}\n", path.display()));
    }
    Err(problems.into_iter().map(|problem| format!("{}: {problem}", path.display())).collect())
}

/// What cannot be reached, and what the bus refuses. Servers are asked at the same time, each for [`reach::WITHIN`].
async fn unreachable(file: &File) -> Vec<String> {
    let settings = file.bus.settings();
    let mut found = Vec::new();
    let mut reached = Vec::new();
    for (server, outcome) in reach::servers(&settings.servers, &settings.tls).await {
        match outcome {
            Ok(said) if !version_supported(&said.version) => {
                found.push(format!("bus.servers: {server} is nats-server {}: groupcast needs 2.12 or newer", said.version));
            }
            Ok(_) => reached.push(server),
            Err(error) => found.push(format!("bus.servers: {error}")),
        }
    }
    let Some(first) = reached.into_iter().next() else { return found };
    let mut of_gateway = file.bus.clone();
    (of_gateway.credentials, of_gateway.name) = (file.gateway.credentials.clone(), None);
    let both = [("bus.credentials", Role::Controller, &file.bus), ("gateway.credentials", Role::Gateway, &of_gateway)];
    for (key, role, bus) in both.into_iter().filter(|(key, _, bus)| *key == "bus.credentials" || bus.credentials.is_some()) {
        let settings = bus.settings();
        let options = connect::Options::new(std::slice::from_ref(&first), role, &settings.name)
            .identity(settings.identity)
            .tls(settings.tls);
        match tokio::time::timeout(reach::WITHIN, connect::connect(options)).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => found.push(format!(
                "{key}: {first} refuses them: {}; were they made with the authority of this installation, and not revoked?",
                error.login()
            )),
            Err(_) => found.push(format!("{key}: {first} did not answer the login within {} s", reach::WITHIN.as_secs())),
        }
    }
    found
}

/// By its name, or by what no other file says.
fn is_agents(path: &Path) -> bool {
    let says_host = || {
        let text = std::fs::read_to_string(path).ok()?;
        text.parse::<toml::Table>().ok()?.get("host").map(toml::Value::is_str)
    };
    path.file_name().is_some_and(|name| name == AGENT_NAME) || says_host() == Some(true)
}

fn ask_agent(path: &Path, offline: bool) -> Judged {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(AGENT)).filter(|path| path.exists());
    let agent = beside.unwrap_or_else(|| AGENT.into());
    let asked = std::process::Command::new(&agent)
        .arg("--config")
        .arg(path)
        .args(["config", "check"])
        .args(offline.then_some("--offline"))
        .output();
    match asked {
        Ok(output) if output.status.success() => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).lines().map(str::to_owned).collect()),
        Err(error) => Err(vec![format!(
            "{}: this is an agent's configuration, and {AGENT} cannot be run here ({error}): on the host, run `{AGENT} --config {} config check`",
            path.display(),
            path.display()
        )]),
    }
}

/// What stands in the file and cannot work on this machine.
fn problems(file: &File, now: SystemTime) -> Vec<String> {
    let mut found = Vec::new();
    let secrets = [
        ("bus.credentials", &file.bus.credentials),
        ("gateway.credentials", &file.gateway.credentials),
        ("bus.tls_key", &file.bus.tls_key),
        ("gateway.key", &file.gateway.key),
        ("gateway.host_signer", &file.gateway.host_signer),
        ("controller.key", &file.controller.key),
        ("controller.token_file", &file.controller.token_file),
    ];
    let public = [
        ("bus.tls_authority", &file.bus.tls_authority),
        ("bus.tls_certificate", &file.bus.tls_certificate),
        ("gateway.certificate", &file.gateway.certificate),
        ("controller.certificate", &file.controller.certificate),
    ];
    let own = |list: &[(&str, &Option<PathBuf>)], secret: bool| {
        let named = list.iter().filter_map(|(key, path)| Some(((*key).to_owned(), (*path).clone()?, secret)));
        named.collect::<Vec<_>>()
    };
    let mut files: Vec<(String, PathBuf, bool)> = [own(&secrets, true), own(&public, false)].concat();
    for (id, table) in file.source.iter().map(|table| (table.id.clone().unwrap_or_default(), table)) {
        let secrets = [
            ("client_secret_file", &table.client_secret_file),
            ("application_credential_secret_file", &table.application_credential_secret_file),
            ("password_file", &table.password_file),
            ("client_key_file", &table.client_key_file),
        ];
        let public = [("ca_file", &table.ca_file), ("client_cert_file", &table.client_cert_file), ("path", &table.path)];
        let of = |(key, path, secret): (String, PathBuf, bool)| (format!("source {id}: {key}"), path, secret);
        files.extend(own(&secrets, true).into_iter().chain(own(&public, false)).map(of));
    }
    for (key, path, secret) in &files {
        match std::fs::File::open(path).and_then(|file| file.metadata()) {
            Err(error) => found.push(format!("{key} names {}, which cannot be read: {error}", path.display())),
            Ok(about) if *secret && about.permissions().mode() & 0o077 != 0 => {
                found.push(format!("{key} names {}, which others can read: chmod 600 it", path.display()));
            }
            // Its owner could put another in its place; and without root's powers, as the units have it, root cannot read it.
            Ok(about) if *secret && !is_ours(about.uid()) => {
                found.push(format!(
                    "{key} names {}, which belongs to user {}: chown it to whoever runs groupcast, or to root",
                    path.display(),
                    about.uid()
                ));
            }
            Ok(_) => {}
        }
    }
    let pairs = file.source.iter().map(|table| {
        let id = table.id.clone().unwrap_or_default();
        (format!("source {id}: client_cert_file"), table.client_cert_file.clone().zip(table.client_key_file.clone()))
    });
    let own = [
        ("gateway.certificate".to_owned(), file.gateway.certificate.clone().zip(file.gateway.key.clone())),
        ("bus.tls_certificate".to_owned(), file.bus.tls_certificate.clone().zip(file.bus.tls_key.clone())),
        ("controller.certificate".to_owned(), file.controller.certificate.clone().zip(file.controller.key.clone())),
    ];
    // What cannot be read is told above, once.
    let is_there = |path: &PathBuf| std::fs::File::open(path).is_ok();
    for (key, pair) in own.into_iter().chain(pairs) {
        if let Some((certificate, private)) = pair.filter(|(certificate, key)| is_there(certificate) && is_there(key))
            && let Err(error) = (tls::Files { certificate, key: private }).check()
        {
            found.push(format!("{key}: {error}"));
        }
    }
    for (key, one, other) in [
        ("gateway.certificate", &file.gateway.certificate, &file.gateway.key),
        ("bus.tls_certificate", &file.bus.tls_certificate, &file.bus.tls_key),
    ] {
        if one.is_some() != other.is_some() {
            found.push(format!("{key} and its key belong together: one of them is missing"));
        }
    }
    for (key, certificate) in [
        ("bus.tls_authority", &file.bus.tls_authority),
        ("bus.tls_certificate", &file.bus.tls_certificate),
        ("gateway.certificate", &file.gateway.certificate),
        ("controller.certificate", &file.controller.certificate),
    ] {
        let Some(path) = certificate.as_ref().filter(|path| is_there(path)) else { continue };
        match Expiring::Certificate(path.clone()).judge(now) {
            Ok(None) => {}
            Ok(Some(why)) => found.push(format!("{key}: {} {why}", path.display())),
            Err(error) => found.push(format!("{key}: {error}")),
        }
    }
    let mut of_gateway = file.bus.clone();
    (of_gateway.credentials, of_gateway.name) = (file.gateway.credentials.clone(), None);
    // Where the gateway has none of its own, one credential is for both, or for a gateway alone.
    let role = if file.gateway.credentials.is_some() { Some(Role::Controller) } else { None };
    for (key, role, bus) in [("bus.credentials", role, &file.bus), ("gateway.credentials", Some(Role::Gateway), &of_gateway)] {
        let Some(path) = bus.credentials.as_ref().filter(|path| is_there(path)) else { continue };
        let role = role.or_else(|| Held::read(path).ok()?.role).unwrap_or(Role::Controller);
        if let Err(error) = bus.check(role, now) {
            found.push(format!("{key}: {error}"));
        }
    }
    if let Some(path) = file.gateway.host_signer.as_ref().filter(|path| is_there(path))
        && let Err(error) = HostSigner::load(path)
    {
        found.push(format!("gateway.host_signer: {error}"));
    }
    let File { gateway, controller, .. } = file;
    for (section, listen, tls, allowed) in [
        ("gateway", gateway.listen(), gateway.certificate.is_some(), gateway.allow_plain),
        ("controller", controller.listen(), controller.certificate.is_some(), controller.allow_plain),
    ] {
        if !listen.ip().is_loopback() && !tls && !allowed.unwrap_or(false) {
            found.push(format!("{section}.listen is {listen}, which others can reach, and there is no {section}.certificate"));
        }
    }
    found
}

/// Root, or whoever runs this.
fn is_ours(owner: u32) -> bool {
    let own = std::fs::metadata("/proc/self").map(|about| about.uid());
    owner == 0 || own.is_ok_and(|own| own == owner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn everything_that_cannot_work_is_told_at_once() {
        let folder = std::env::temp_dir().join(format!("groupcast-config-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("groupcast.toml");
        let secret = folder.join("g.creds");
        let mut authority = groupcast_bus_config::credentials::Authority::new();
        let (role, name) = (groupcast_bus_config::accounts::Role::Gateway, "g1".parse().unwrap());
        let held = authority.mint(role, &name, None, std::time::SystemTime::now()).unwrap();
        std::fs::write(&secret, held.file_text()).unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o644)).unwrap();
        let text = format!(
            "[bus]\ncredentials = '/nonexistent/c.creds'\n[gateway]\nlisten = '0.0.0.0:1'\ncredentials = '{}'\n",
            secret.display()
        );
        std::fs::write(&path, text).unwrap();
        let problems = check(&path, true).await.unwrap_err();
        for words in ["bus.credentials names /nonexistent", "others can read", "others can reach"] {
            assert!(problems.iter().any(|problem| problem.contains(words)), "{words}: {problems:?}");
        }
        assert_eq!(problems.len(), 3);
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, format!("[gateway]\ncredentials = '{}'\n", secret.display())).unwrap();
        assert!(
            check(&path, true)
                .await
                .unwrap()
                .contains("is good: bus nats://127.0.0.1:4222 (not asked), API on 127.0.0.1:4270 without TLS")
        );
        std::fs::write(&path, "host = 'h1'\nservers = []").unwrap();
        assert!(is_agents(&path) && is_agents(Path::new("/nonexistent/agent.toml")));
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(check(&path, true).await.unwrap_err()[0].contains("cannot read the configuration"));
    }
}
