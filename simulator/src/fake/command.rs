//! `groupcast-sim fake`: the servers by hand. Beside their own API they take orders under `/_fake/`:
//!
//! ```text
//! curl -d '{"groups":13500,"rules":10}'                               localhost:PORT/_fake/fill
//! curl -d '{"path":"/v3/security_groups","fault":{"status":{"status":503}},"times":2}' localhost:PORT/_fake/fault
//! curl -d '{"path":"/v3/security_groups","fault":"truncate"}'         localhost:PORT/_fake/fault
//! curl -d '{}'                                                       localhost:PORT/_fake/calm   # what is still to fail does not
//! curl -d '{"path":"group-7"}'                                      localhost:PORT/_fake/touch
//! curl -d '{"edit":{"delete":"group-7"}}'                             localhost:PORT/_fake/edit
//! curl -d '{"edit":{"delete_silently":"group-7"},"path":"/v3/security_groups","skip":1}' localhost:PORT/_fake/edit  # after page 2
//! curl -d '{"seconds":3600}'                                          localhost:PORT/_fake/clock-back
//! ```

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use serde::Deserialize;
use serde_json::json;

use super::serve::{Server, Shared};
use super::tls::Authority;
use super::{Call, CloudController, Fake, Fault, Neutron, Reply, What};

#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// A Cloud Controller with its UAA.
    CloudController(Options),
    /// Neutron with its Keystone.
    Neutron(Options),
}

#[derive(Debug, Clone, Args)]
pub struct Options {
    /// On loopback; any that is free if 0.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// Serve with TLS; certificates for it and for clients are written into this folder.
    #[arg(long)]
    tls: Option<PathBuf>,
    /// With TLS, where a client's certificate is asked for: a Cloud Controller's internal address.
    #[arg(long, default_value_t = 0)]
    internal_port: u16,
    /// Begin with so many groups.
    #[arg(long, default_value_t = 0)]
    groups: usize,
    /// Rules of each.
    #[arg(long, default_value_t = 10)]
    rules: usize,
}

/// A model that also takes orders.
struct Ordered<F>(F);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Order {
    #[serde(default)]
    path: String,
    fault: Option<Fault>,
    edit: Option<serde_json::Value>,
    #[serde(default)]
    skip: u32,
    times: Option<u32>,
    groups: Option<usize>,
    rules: Option<usize>,
    seconds: Option<u64>,
}

/// What orders do to a model.
trait Obeys: Fake {
    fn upset(&mut self, order: &Order, fault: Fault);
    /// Does it at once, or after such a call as the order names.
    fn edit(&mut self, order: &Order, edit: serde_json::Value) -> Result<(), serde_json::Error>;
    fn fill(&mut self, groups: usize, rules: usize);
    fn clock_back(&mut self, by: Duration);
    /// Changes a group of this name.
    fn touch(&mut self, name: &str);
    /// What is still to go wrong does not.
    fn calm(&mut self);
    /// Calls since the last time.
    fn calls(&mut self) -> usize;
}

impl Obeys for CloudController {
    fn upset(&mut self, order: &Order, fault: Fault) {
        self.upsets.add(&order.path, order.skip, order.times.unwrap_or(1), What::Fault(fault));
    }

    fn edit(&mut self, order: &Order, edit: serde_json::Value) -> Result<(), serde_json::Error> {
        let edit = serde_json::from_value(edit)?;
        match order.path.as_str() {
            "" => self.apply(&edit),
            path => self.upsets.add(path, order.skip, order.times.unwrap_or(1), What::Then(edit)),
        }
        Ok(())
    }

    fn fill(&mut self, groups: usize, rules: usize) {
        CloudController::fill(self, groups, rules);
    }

    fn clock_back(&mut self, by: Duration) {
        CloudController::clock_back(self, by);
    }

    fn touch(&mut self, name: &str) {
        self.apply(&super::cloud_controller::Edit::Touch(name.to_owned()));
    }

    fn calm(&mut self) {
        self.upsets.clear();
    }

    fn calls(&mut self) -> usize {
        self.calls.take().len()
    }
}

impl Obeys for Neutron {
    fn upset(&mut self, order: &Order, fault: Fault) {
        self.upsets.add(&order.path, order.skip, order.times.unwrap_or(1), What::Fault(fault));
    }

    fn edit(&mut self, order: &Order, edit: serde_json::Value) -> Result<(), serde_json::Error> {
        let edit = serde_json::from_value(edit)?;
        match order.path.as_str() {
            "" => self.apply(&edit),
            path => self.upsets.add(path, order.skip, order.times.unwrap_or(1), What::Then(edit)),
        }
        Ok(())
    }

    fn fill(&mut self, groups: usize, rules: usize) {
        for number in 0..groups {
            let id = self.create_group(&format!("group-{number}"));
            for port in 1..rules {
                self.add_rule(&id, json!({"direction": "egress", "ethertype": "IPv4", "protocol": "tcp", "port_range_min": port, "port_range_max": port}));
            }
        }
    }

    /// Neutron's revisions do not depend on a clock.
    fn clock_back(&mut self, _: Duration) {}

    fn touch(&mut self, name: &str) {
        self.apply(&super::neutron::Edit::TouchGroup(name.to_owned()));
    }

    fn calm(&mut self) {
        self.upsets.clear();
    }

    fn calls(&mut self) -> usize {
        self.calls.take().len()
    }
}

impl<F: Obeys> Fake for Ordered<F> {
    fn handle(&mut self, call: &Call, since: Duration) -> Reply {
        let Some(order) = call.path.strip_prefix("/_fake/") else { return self.0.handle(call, since) };
        let parsed: Order = match serde_json::from_slice(&call.body) {
            Ok(parsed) => parsed,
            Err(error) => return Reply::json(400, &json!({"error": error.to_string()})),
        };
        match order {
            "fault" => match parsed.fault.clone() {
                Some(fault) => self.0.upset(&parsed, fault),
                None => {
                    return Reply::json(
                        400,
                        &json!({"error": "no fault: write \"hang\", \"truncate\", \"null\", \"revoke\", \"repeat\", \"empty\", {\"huge\":{\"bytes\":N}}, {\"until\":{\"status\":503,\"seconds\":N}}, {\"status\":{\"status\":503}} or {\"body\":\"…\"}"}),
                    );
                }
            },
            "edit" => match self.0.edit(&parsed, parsed.edit.clone().unwrap_or_default()) {
                Ok(()) => {}
                Err(error) => return Reply::json(400, &json!({"error": error.to_string()})),
            },
            "fill" => self.0.fill(parsed.groups.unwrap_or(1), parsed.rules.unwrap_or(1)),
            "touch" => self.0.touch(&parsed.path),
            "calm" => self.0.calm(),
            "calls" => return Reply::json(200, &json!({"calls": self.0.calls()})),
            "clock-back" => self.0.clock_back(Duration::from_secs(parsed.seconds.unwrap_or(3_600))),
            _ => return Reply::json(404, &json!({"error": "orders are fault, calm, edit, fill, touch, calls and clock-back"})),
        }
        Reply::json(200, &json!({}))
    }
}

/// Serves until the process ends.
pub fn run(command: &Command) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            Command::CloudController(options) => {
                serve(options, CloudController::default(), "client groupcast, secret secret").await
            }
            Command::Neutron(options) => {
                serve(options, Neutron::default(), "user groupcast or application credential application, secret secret").await
            }
        }
    })
}

async fn serve<F: Obeys>(options: &Options, mut fake: F, whom: &str) -> anyhow::Result<()> {
    if options.groups > 0 {
        fake.fill(options.groups, options.rules);
    }
    let shared = Shared::new(Ordered(fake));
    let Some(folder) = &options.tls else {
        // Without certificates there is nothing to tell the internal address by.
        let server = Server::start(options.port, None, true, shared).await?;
        println!("{}  ({whom})", server.url());
        server.ended().await;
        return Ok(());
    };
    let authority = Authority::make(folder)?;
    let server = Server::start(options.port, Some(authority.acceptor(false)?), false, shared.clone()).await?;
    let internal = Server::start(options.internal_port, Some(authority.acceptor(true)?), true, shared).await?;
    println!("{}  ({whom})", server.url());
    println!("{}  with a client's certificate", internal.url());
    println!("ca_file = {:?}", authority.ca_file);
    println!("client_cert_file = {:?}\nclient_key_file = {:?}", authority.client_cert_file, authority.client_key_file);
    server.ended().await;
    Ok(())
}
