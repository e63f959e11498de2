//! Which gateway a command talks to: flags, then the environment, then a named context of the user's own file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use super::client::Api;
use super::output::{self, Colour};
use super::{Code, Failure, Result};

/// Where `groupcast gateway` listens unless it is told otherwise.
pub const GATEWAY_DEFAULT: &str = "http://127.0.0.1:4270";

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Gateway")]
pub struct Connection {
    /// Gateway to talk to; several, separated by commas, are tried in turn.
    #[arg(long, global = true, env = "GROUPCAST_GATEWAY", value_delimiter = ',')]
    pub gateway: Vec<String>,
    /// File that holds the token. GROUPCAST_TOKEN may hold the token itself.
    #[arg(long, global = true, env = "GROUPCAST_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
    /// Authority to trust beside the system's, in PEM.
    #[arg(long, global = true, env = "GROUPCAST_GATEWAY_AUTHORITY")]
    pub gateway_authority: Option<PathBuf>,
    /// Context to use instead of the current one.
    #[arg(long, global = true, env = "GROUPCAST_CONTEXT")]
    pub context: Option<String>,
    /// Colour what people read.
    #[arg(long, global = true, value_enum, default_value_t = Colour::Auto)]
    pub color: Colour,
}

/// One gateway, or several that serve the same bus.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Context {
    pub gateways: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token_file: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub authority: Option<PathBuf>,
}

/// The user's own file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contexts {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    #[serde(default)]
    pub contexts: BTreeMap<String, Context>,
}

pub fn path() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("GROUPCAST_CONTEXTS") {
        return Ok(path.into());
    }
    let home = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from);
    let home = home.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".config")));
    home.map(|home| home.join("groupcast/contexts.toml"))
        .ok_or_else(|| Failure::failed("there is no home folder to keep contexts in").hint("set GROUPCAST_CONTEXTS to a file"))
}

impl Contexts {
    pub fn read(path: &Path) -> Result<Self> {
        match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(Failure::failed(format!("{} cannot be read: {error}", path.display()))),
            Ok(text) => {
                toml::from_str(&text).map_err(|error| Failure::failed(format!("{}: {}", path.display(), error.message())))
            }
        }
    }

    fn write(&self, path: &Path) -> Result {
        let failed = |error: std::io::Error| Failure::failed(format!("{} cannot be written: {error}", path.display()));
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        let text = toml::to_string(self).map_err(|error| Failure::failed(error.to_string()))?;
        let beside = path.with_extension("new");
        std::fs::write(&beside, text).and_then(|()| std::fs::rename(&beside, path)).map_err(failed)
    }
}

impl Connection {
    /// Whether the command line or the environment names a gateway.
    pub fn is_given(&self) -> bool {
        !self.gateway.is_empty() || self.context.is_some()
    }

    /// What flags, environment and the user's file say together.
    pub fn resolve(&self) -> Result<Context> {
        let file = Contexts::read(&path()?)?;
        let named = match self.context.as_ref().or(file.current.as_ref()) {
            None => Context::default(),
            Some(name) => file.contexts.get(name).cloned().ok_or_else(|| {
                Failure::new(Code::NotFound, format!("there is no context {name:?}")).hint("see `groupcast context list`")
            })?,
        };
        let gateways = match (self.gateway.is_empty(), named.gateways.is_empty()) {
            (false, _) => self.gateway.clone(),
            (true, false) => named.gateways,
            (true, true) => vec![GATEWAY_DEFAULT.to_owned()],
        };
        let token_file = self.token_file.clone().or(named.token_file);
        Ok(Context { gateways, token_file, authority: self.gateway_authority.clone().or(named.authority) })
    }

    pub fn api(&self) -> Result<Api> {
        let context = self.resolve()?;
        let token = match (std::env::var("GROUPCAST_TOKEN"), &context.token_file) {
            (Ok(token), _) if !token.trim().is_empty() => token,
            (_, Some(path)) => std::fs::read_to_string(path)
                .map_err(|error| Failure::failed(format!("token file {} cannot be read: {error}", path.display())))?,
            _ => {
                let hint =
                    "set GROUPCAST_TOKEN, give --token-file, or make one with `groupcast token add NAME --role admin --on-bus`";
                return Err(Failure::failed("there is no token to show to the gateway").hint(hint));
            }
        };
        Api::new(&context, token.trim())
    }
}

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// List contexts; the current one is marked.
    List,
    /// Add a context, or replace it.
    Add {
        name: String,
        /// Gateway; may be given several times.
        #[arg(long = "url", required = true)]
        urls: Vec<String>,
        /// File that holds the token.
        #[arg(long = "token")]
        token: Option<PathBuf>,
        /// Authority to trust, in PEM.
        #[arg(long = "authority")]
        authority: Option<PathBuf>,
    },
    /// Use this one from now on.
    Use { name: String },
    /// Forget one.
    Remove { name: String },
}

pub fn run(command: Command) -> Result {
    let path = path()?;
    let mut file = Contexts::read(&path)?;
    let unknown =
        |name: &str| Failure::new(Code::NotFound, format!("there is no context {name:?}")).hint("see `groupcast context list`");
    match command {
        Command::List => {
            let row = |(name, context): (&String, &Context)| {
                let current = if file.current.as_ref() == Some(name) { "*" } else { "" };
                let token = context.token_file.as_ref().map_or(String::new(), |path| path.display().to_string());
                vec![current.to_owned(), name.clone(), context.gateways.join(","), token]
            };
            return output::print(&output::table(&["", "name", "gateway", "token"], file.contexts.iter().map(row).collect()));
        }
        Command::Add { name, urls, token, authority } => {
            let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
            let context = Context { gateways: urls, token_file: token.map(absolute), authority: authority.map(absolute) };
            file.contexts.insert(name.clone(), context);
            file.current.get_or_insert(name);
        }
        Command::Use { name } => {
            file.contexts.get(&name).ok_or_else(|| unknown(&name))?;
            file.current = Some(name);
        }
        Command::Remove { name } => {
            file.contexts.remove(&name).ok_or_else(|| unknown(&name))?;
            file.current = file.current.filter(|current| *current != name);
        }
    }
    file.write(&path)
}
