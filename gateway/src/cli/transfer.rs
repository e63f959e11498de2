//! `export` and `import`: through a gateway where one is named, else on the bus itself.

use std::path::PathBuf;

use reqwest::Method;

use super::client::Call;
use super::context::Connection;
use super::{Failure, Result, output};
use crate::api::transfer::Imported;
use crate::transfer::{self, ExportOptions, ImportOptions};

pub async fn export(connection: &Connection, options: ExportOptions) -> Result {
    if !connection.is_given() {
        return Ok(transfer::export(options).await?);
    }
    let text = connection.api()?.send(&Call::get(format!("/v1/export?audit={}", !options.no_audit))).await?;
    match &options.output {
        None => output::print(&text),
        Some(path) => crate::secret::write(path, text.trim_end())
            .map_err(|error| Failure::failed(format!("{} cannot be written: {error}", path.display()))),
    }
}

fn read(input: &Option<PathBuf>) -> std::io::Result<String> {
    match input {
        None => std::io::read_to_string(std::io::stdin()),
        Some(path) => std::fs::read_to_string(path),
    }
}

pub async fn import(connection: &Connection, options: ImportOptions) -> Result {
    if !connection.is_given() {
        return Ok(transfer::import(options).await?);
    }
    let text = read(&options.input).map_err(|error| Failure::failed(format!("the export cannot be read: {error}")))?;
    let call = Call::new(Method::POST, format!("/v1/import?replace={}", options.replace)).text(text);
    let imported: Imported = connection.api()?.fetch(&call).await?;
    let Imported { documents, left_out, entries_left_out, refused, .. } = imported;
    output::say(&format!("imported {documents} documents"));
    if left_out + entries_left_out > 0 {
        let more = format!(
            "left out: {left_out} tokens or documents of sources, {entries_left_out} entries of the registry or of the audit"
        );
        output::say(&format!("{more}; restore these on the bus (`groupcast import --server …`)"));
    }
    refused.iter().for_each(|item| output::say(&format!("refused: {}", item.detail)));
    Ok(())
}
