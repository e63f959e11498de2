//! `registrations`: the word of an operator about hosts that are silent.

use clap::Subcommand;
use reqwest::Method;
use serde_json::{Value, json};

use super::client::Call;
use super::context::Connection;
use super::output;
use super::{Code, Failure, Result};

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Shows the templates of which nothing is deleted, because too many of their hosts are silent at once.
    Frozen,
    /// Confirms that the hosts of a template that are silent now are gone for good: they are deleted although they are many.
    #[command(
        after_help = "Example:\n  groupcast get registrations      # which are frozen\n  groupcast registrations confirm web-vms"
    )]
    Confirm { template: String },
}

pub async fn run(connection: &Connection, command: Command) -> Result {
    let api = connection.api()?;
    let frozen: Value = api.fetch(&Call::get("/v1/registrations-frozen")).await?;
    let items = frozen["items"].as_array().cloned().unwrap_or_default();
    match command {
        Command::Frozen => {
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let row = |item: &Value| ["template", "missing", "hosts"].map(|field| text(&item[field])).to_vec();
            output::print(&output::table(&["template", "missing", "hosts"], items.iter().map(row).collect()))
        }
        Command::Confirm { template } => {
            if !items.iter().any(|item| item["template"] == template.as_str()) {
                return Err(Failure::new(Code::NotFound, format!("nothing of template {template} is frozen"))
                    .hint("see `groupcast registrations frozen`"));
            }
            let call = Call::new(Method::POST, "/v1/registrations-frozen").json(&json!({ "template": template }));
            let _: Value = api.fetch(&call).await?;
            output::say(&format!("confirmed: the silent hosts of template {template} are deleted"));
            Ok(())
        }
    }
}
