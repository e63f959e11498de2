//! `groupcast export` and `groupcast import`.

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::Context;
use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::Identity;
use groupcast_bus_config::credentials::Authority;
use groupcast_bus_config::{connect, streams};
use groupcast_control::export;

use crate::bus::{BusArguments, BusOptions};
use crate::cli::output;
use crate::secret;

#[derive(Debug, Clone, Args)]
pub struct ExportOptions {
    #[command(flatten)]
    bus: BusArguments,
    /// Where to write it; without it, to stdout.
    #[arg(long, short)]
    pub output: Option<PathBuf>,
    /// Leave out what AUDIT remembers: who wrote which version of a document.
    #[arg(long)]
    pub no_audit: bool,
}

#[derive(Debug, Clone, Args)]
pub struct ImportOptions {
    #[command(flatten)]
    bus: BusArguments,
    /// Write over what is there.
    #[arg(long)]
    pub replace: bool,
    /// Copies of each stream, if they have to be created [default: what the configuration file says, or 1]
    #[arg(long)]
    replicas: Option<usize>,
    /// Also tell the servers who was revoked, as this authority remembers: a bus that lost its accounts would let them in again.
    #[arg(long, env = "GROUPCAST_AUTHORITY")]
    pub authority: Option<PathBuf>,
    /// The export; without it, stdin.
    pub input: Option<PathBuf>,
}

pub async fn export(options: ExportOptions) -> anyhow::Result<()> {
    let (client, _events) = connect::connect(options.bus.resolved(Role::Controller)?.settings().options()).await?;
    let counts = match &options.output {
        None => export::export(client, &mut BufWriter::new(std::io::stdout()), !options.no_audit).await?,
        Some(path) => {
            // Beside it first, so that a good export is never replaced by a part of one.
            let mut part = path.clone().into_os_string();
            part.push(".part");
            let file = secret::create(Path::new(&part)).with_context(|| format!("cannot write {}", part.display()))?;
            let mut out = BufWriter::new(file);
            let counts = export::export(client, &mut out, !options.no_audit).await?;
            out.into_inner().context("cannot write the export")?.sync_all().context("cannot write the export")?;
            std::fs::rename(&part, path).with_context(|| format!("cannot write {}", path.display()))?;
            counts
        }
    };
    report("exported", &counts);
    Ok(())
}

pub async fn import(options: ImportOptions) -> anyhow::Result<()> {
    let (client, _events) = connect::connect(options.bus.resolved(Role::Controller)?.settings().options()).await?;
    let replicas = options.replicas.or(options.bus.replicas()?).unwrap_or(1);
    streams::ensure(&client, replicas).await?;
    let counts = match &options.input {
        None => export::import(client, BufReader::new(std::io::stdin()), options.replace).await?,
        Some(path) => {
            let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
            export::import(client, BufReader::new(file), options.replace).await?
        }
    };
    report("imported", &counts);
    match &options.authority {
        Some(path) => revoked(&options.bus.resolved(Role::Controller)?, path).await?,
        None => output::say(
            "who was revoked is not told to the servers: if they lost their accounts, import again with --replace and --authority FILE",
        ),
    }
    Ok(())
}

/// How long the credential lives that brings revocations to the servers.
const SYSTEM_LIFE: Duration = Duration::from_secs(300);

/// Gives the servers the accounts as the authority has them, with everything that was ever revoked.
async fn revoked(bus: &BusOptions, path: &Path) -> anyhow::Result<()> {
    let mut authority = Authority::lock(path)?;
    let system = authority.system_credential(SYSTEM_LIFE, SystemTime::now())?;
    let settings = bus.settings();
    let options = connect::Options::new(&settings.servers, system.role, &system.name);
    let identity = Identity::Text(system.file_text());
    let (client, _events) = connect::connect(options.identity(identity).tls(settings.tls)).await?;
    authority.publish(&client).await?;
    authority.published();
    authority.save()?;
    output::say("the servers know again who was revoked");
    Ok(())
}

fn report(done: &str, counts: &export::Counts) {
    let audited = format!("{} former versions", counts.audited);
    output::say(&format!("{done} {} documents, {} entries and {audited}", counts.documents, counts.entries));
    for refused in &counts.refused {
        output::say(&format!("left out on import: {refused}"));
    }
}
