//! `config`: judges configuration files before they are used, and says what they may hold.

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use super::output;
use super::{Code, Failure, Result};
use crate::config::{self, File, NAME};

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
}

pub fn run(command: Command) -> Result {
    match command {
        Command::Reference => output::print(&config::reference()),
        Command::Check(options) => {
            let files = if options.files.is_empty() { usual() } else { options.files };
            if files.is_empty() {
                let message = format!("there is no configuration to judge: {FOLDER} holds neither {NAME} nor {AGENT_NAME}");
                return Err(Failure::new(Code::NotFound, message).hint("name a file: groupcast config check FILE"));
            }
            let mut problems = Vec::new();
            for file in &files {
                match check(file) {
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

fn check(path: &Path) -> Judged {
    if is_agents(path) {
        return ask_agent(path);
    }
    let file = config::read(path).map_err(|error| vec![error.to_string()])?;
    let problems = problems(&file);
    if problems.is_empty() {
        let listen = file.gateway.listen();
        let tls = if file.gateway.certificate.is_some() { "with TLS" } else { "without TLS" };
        let servers = file.bus.settings().servers.join(", ");
        return Ok(format!("{} is good: bus {servers}, API on {listen} {tls}\n", path.display()));
    }
    Err(problems.into_iter().map(|problem| format!("{}: {problem}", path.display())).collect())
}

/// By its name, or by what no other file says.
fn is_agents(path: &Path) -> bool {
    let says_host = || {
        let text = std::fs::read_to_string(path).ok()?;
        text.parse::<toml::Table>().ok()?.get("host").map(toml::Value::is_str)
    };
    path.file_name().is_some_and(|name| name == AGENT_NAME) || says_host() == Some(true)
}

fn ask_agent(path: &Path) -> Judged {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name(AGENT)).filter(|path| path.exists());
    let agent = beside.unwrap_or_else(|| AGENT.into());
    let asked = std::process::Command::new(&agent).arg("--config").arg(path).args(["config", "check"]).output();
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
fn problems(file: &File) -> Vec<String> {
    let mut found = Vec::new();
    let secrets = [
        ("bus.credentials", &file.bus.credentials),
        ("gateway.credentials", &file.gateway.credentials),
        ("bus.tls_key", &file.bus.tls_key),
        ("gateway.key", &file.gateway.key),
    ];
    let public = [("bus.tls_authority", &file.bus.tls_authority), ("bus.tls_certificate", &file.bus.tls_certificate)];
    for (key, path, secret) in secrets.iter().map(|(k, p)| (*k, *p, true)).chain(public.iter().map(|(k, p)| (*k, *p, false))) {
        let Some(path) = path else { continue };
        match std::fs::File::open(path).and_then(|file| file.metadata()) {
            Err(error) => found.push(format!("{key} names {}, which cannot be read: {error}", path.display())),
            Ok(about) if secret && about.permissions().mode() & 0o077 != 0 => {
                found.push(format!("{key} names {}, which others can read: chmod 600 it", path.display()));
            }
            Ok(_) => {}
        }
    }
    if let Some(Err(error)) = file.gateway.files().map(|files| files.check()) {
        found.push(format!("gateway.certificate: {error}"));
    }
    found.extend(plain(file.gateway.listen(), file.gateway.certificate.is_some(), file.gateway.allow_plain.unwrap_or(false)));
    found
}

fn plain(listen: SocketAddr, tls: bool, allowed: bool) -> Option<String> {
    let open = !listen.ip().is_loopback() && !tls && !allowed;
    open.then(|| format!("gateway.listen is {listen}, which others can reach, and there is no gateway.certificate"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_that_cannot_work_is_told_at_once() {
        let folder = std::env::temp_dir().join(format!("groupcast-config-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("groupcast.toml");
        let secret = folder.join("g.creds");
        std::fs::write(&secret, "x").unwrap();
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o644)).unwrap();
        let text = format!(
            "[bus]\ncredentials = '/nonexistent/c.creds'\n[gateway]\nlisten = '0.0.0.0:1'\ncredentials = '{}'\n",
            secret.display()
        );
        std::fs::write(&path, text).unwrap();
        let problems = check(&path).unwrap_err();
        for words in ["bus.credentials names /nonexistent", "others can read", "others can reach"] {
            assert!(problems.iter().any(|problem| problem.contains(words)), "{words}: {problems:?}");
        }
        assert_eq!(problems.len(), 3);
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::write(&path, format!("[gateway]\ncredentials = '{}'\n", secret.display())).unwrap();
        assert!(check(&path).unwrap().contains("is good: bus nats://127.0.0.1:4222, API on 127.0.0.1:4270 without TLS"));
        std::fs::write(&path, "host = 'h1'\nservers = []").unwrap();
        assert!(is_agents(&path) && is_agents(Path::new("/nonexistent/agent.toml")));
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(check(&path).unwrap_err()[0].contains("cannot read the configuration"));
    }
}
