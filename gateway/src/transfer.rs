//! `groupcast export` and `groupcast import`.

use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::PathBuf;

use anyhow::Context;
use clap::Args;
use groupcast_bus_config::{connect, streams};
use groupcast_control::export;

use crate::bus::BusOptions;

#[derive(Debug, Clone, Args)]
pub struct ExportOptions {
    #[command(flatten)]
    bus: BusOptions,
    /// Where to write it; without it, to stdout.
    #[arg(long, short)]
    pub output: Option<PathBuf>,
}

#[derive(Debug, Clone, Args)]
pub struct ImportOptions {
    #[command(flatten)]
    bus: BusOptions,
    /// Write over what is there.
    #[arg(long)]
    pub replace: bool,
    /// Copies of each stream, if they have to be created.
    #[arg(long, default_value_t = 1)]
    replicas: usize,
    /// The export; without it, stdin.
    pub input: Option<PathBuf>,
}

pub async fn export(options: ExportOptions) -> anyhow::Result<()> {
    let (client, _events) = connect::connect(options.bus.settings().options()).await?;
    let counts = match &options.output {
        None => export::export(client, &mut BufWriter::new(std::io::stdout())).await?,
        Some(path) => {
            // Beside it first, so that a good export is never replaced by a part of one.
            let mut part = path.clone().into_os_string();
            part.push(".part");
            let file = File::create(&part).with_context(|| format!("cannot write {}", part.display()))?;
            let mut out = BufWriter::new(file);
            let counts = export::export(client, &mut out).await?;
            out.into_inner().context("cannot write the export")?.sync_all().context("cannot write the export")?;
            std::fs::rename(&part, path).with_context(|| format!("cannot write {}", path.display()))?;
            counts
        }
    };
    report("exported", &counts);
    Ok(())
}

pub async fn import(options: ImportOptions) -> anyhow::Result<()> {
    let (client, _events) = connect::connect(options.bus.settings().options()).await?;
    streams::ensure(&client, options.replicas).await?;
    let counts = match &options.input {
        None => export::import(client, BufReader::new(std::io::stdin()), options.replace).await?,
        Some(path) => {
            let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
            export::import(client, BufReader::new(file), options.replace).await?
        }
    };
    report("imported", &counts);
    Ok(())
}

fn report(done: &str, counts: &export::Counts) {
    eprintln!("{done} {} documents and {} entries", counts.documents, counts.entries);
    for refused in &counts.refused {
        eprintln!("left out on import: {refused}");
    }
}
