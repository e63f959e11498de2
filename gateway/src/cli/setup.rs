//! `bus init`, `bus add`, `bus renew`: a folder for each machine of an installation, with everything it needs. Whole or not at all, and nothing that is
//! there is overwritten.

use std::fs::{DirBuilder, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use clap::Args;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::credentials::Authority;
use groupcast_bus_config::setup::{self, Machine, OPERATOR, Plan, Ports, Text};
use groupcast_policy::ids::HostId;

use super::{Code, Failure, Result, output};
use certificates::{Made, Own};

mod certificates;

/// What `bus add` and `bus renew` go by.
const PLAN: &str = "cluster.json";
const AUTHORITY: &str = "authority.json";
const TRUSTED: &str = "authority.pem";
const TRUSTED_KEY: &str = "authority-key.pem";
/// Where servers keep the accounts, beside their store.
const ACCOUNTS: &str = "/var/lib/groupcast/accounts";

#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  groupcast bus init --nodes n1,n2,n3 --hosts h1,h2 --out cluster\n  \
                  groupcast bus init --nodes n1=10.0.0.1,n2=10.0.0.2,n3=10.0.0.3 --out cluster\n  \
                  groupcast bus init --nodes bus.example.com --certificates pki --out cluster\n\n\
                  docs/deployment.md says what comes next.")]
pub struct InitOptions {
    /// Servers of the bus, 1, 3 or 5, with commas: host names as all other machines resolve them, or NAME=ADDRESS. Each also runs a controller and a
    /// gateway.
    #[arg(long, required = true, value_delimiter = ',', value_name = "NODE")]
    nodes: Vec<String>,
    /// Hosts that enforce, with commas. Others are added later (`groupcast bus add`), or join with a token (`groupcast host token`).
    #[arg(long, value_delimiter = ',', value_name = "HOST")]
    hosts: Vec<String>,
    /// Folder to make, with a folder for each machine in it. Must not exist.
    #[arg(long)]
    out: PathBuf,
    /// Folder with certificates of your own: authority.pem, and NODE.pem and NODE-key.pem for each node. Without it an authority is made.
    #[arg(long)]
    certificates: Option<PathBuf>,
    /// How long certificates of nodes live.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "730d", conflicts_with = "certificates")]
    certificate_life: Duration,
    /// How long credentials of controllers and gateways live, such as 365d; without it, until they are revoked.
    #[arg(long, value_parser = humantime::parse_duration)]
    life: Option<Duration>,
    /// Port on which servers take clients.
    #[arg(long, default_value_t = Ports::default().client)]
    client_port: u16,
    /// Port on which servers take each other.
    #[arg(long, default_value_t = Ports::default().cluster)]
    cluster_port: u16,
    /// Port of the gateways.
    #[arg(long, default_value_t = Ports::default().gateway)]
    gateway_port: u16,
    /// Port on which controllers show metrics and health.
    #[arg(long, default_value_t = Ports::default().controller)]
    controller_port: u16,
    /// Where the programs are on the machines.
    #[arg(long, default_value = "/usr/bin")]
    programs: String,
    /// Interfaces of workloads on the hosts, with commas.
    #[arg(long, value_delimiter = ',', default_value = "tap*")]
    claims: Vec<String>,
}

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Examples:\n  groupcast bus add --hosts h3 --out cluster\n  groupcast bus add --nodes n4,n5 --out cluster"
)]
pub struct AddOptions {
    /// Further servers of the bus, so that there are 3 or 5.
    #[arg(long, value_delimiter = ',', value_name = "NODE")]
    nodes: Vec<String>,
    /// Further hosts.
    #[arg(long, value_delimiter = ',', value_name = "HOST")]
    hosts: Vec<String>,
    /// The folder that `groupcast bus init` made.
    #[arg(long)]
    out: PathBuf,
    /// Folder with certificates of your own, as for `groupcast bus init`.
    #[arg(long)]
    certificates: Option<PathBuf>,
    /// How long credentials of controllers and gateways live, such as 365d; without it, until they are revoked.
    #[arg(long, value_parser = humantime::parse_duration)]
    life: Option<Duration>,
}

#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:\n  groupcast bus renew --out cluster\n  groupcast bus renew n1 --out cluster")]
pub struct RenewOptions {
    /// Nodes whose certificates are made anew; without any, all.
    nodes: Vec<HostId>,
    /// The folder that `groupcast bus init` made.
    #[arg(long)]
    out: PathBuf,
    /// How long the new ones live.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "730d")]
    certificate_life: Duration,
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::failed(error.to_string())
}

fn wrong(error: setup::Error) -> Failure {
    Failure::usage(error.to_string())
}

fn unwritable(path: &Path, error: &std::io::Error) -> Failure {
    failed(format!("{} cannot be written: {error}", path.display())).hint("is the disk full, and is the folder yours?")
}

/// Writes a new file that only its owner can read.
fn write(path: &Path, text: &str, mode: u32) -> Result {
    let written = OpenOptions::new().write(true).create_new(true).mode(mode).open(path).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.map_err(|error| unwritable(path, &error))
}

/// Puts another file in the place of one.
fn replace(path: &Path, text: &str, mode: u32) -> Result {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    let _ = std::fs::remove_file(&beside); // left by one that was interrupted
    write(&beside, text, mode)?;
    std::fs::rename(&beside, path).map_err(|error| unwritable(path, &error))
}

fn make_folder(path: &Path) -> Result {
    DirBuilder::new().mode(0o700).create(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            let message = format!("{} is there already, and is no machine's of {PLAN}", path.display());
            Failure::new(Code::Conflict, message).hint("left by a command that was interrupted? Then remove it and try again")
        }
        _ => unwritable(path, &error),
    })
}

const SECRET: u32 = 0o600;

fn mode(file: &Text) -> u32 {
    if file.name == "install" { 0o700 } else { SECRET }
}

fn machines(texts: &[String]) -> Result<Vec<Machine>> {
    texts.iter().map(|text| Machine::parse(text.trim()).map_err(wrong)).collect()
}

/// Who signs and makes what.
struct Maker<'a> {
    plan: &'a Plan,
    authority: &'a mut Authority,
    /// The authority for certificates; the operator's own if there is none.
    own: Option<Own>,
    brought: Option<&'a Path>,
    trusted: String,
    certificate_life: Duration,
    life: Option<Duration>,
    now: SystemTime,
}

impl Maker<'_> {
    fn credential(&mut self, path: &Path, role: Role, name: &HostId) -> Result {
        let life = self.life.filter(|_| role != Role::Host);
        self.authority.mint(role, name, life, self.now).and_then(|made| made.save(path)).map_err(failed)
    }

    fn certificate(&self, node: &Machine) -> Result<Made> {
        let made = match (self.brought, &self.own) {
            (Some(folder), _) => certificates::brought(folder, node, self.plan.nodes.len() > 1),
            (None, Some(own)) => own.node(node, self.now, self.certificate_life),
            (None, None) => {
                let hint = "name the folder with those of the new nodes with --certificates";
                return Err(failed("the certificates are your own: none can be made here").hint(hint));
            }
        };
        made.map_err(failed)
    }

    fn node(&mut self, folder: &Path, node: &Machine) -> Result {
        make_folder(folder)?;
        let accounts = self.authority.server_config(ACCOUNTS).map_err(failed)?;
        for file in setup::node_files(self.plan, node, &accounts).map_err(wrong)? {
            write(&folder.join(&file.name), &file.text, mode(&file))?;
        }
        let Made { certificate, key } = self.certificate(node)?;
        write(&folder.join("server.pem"), &certificate, SECRET)?;
        write(&folder.join("server-key.pem"), &key, SECRET)?;
        write(&folder.join(TRUSTED), &self.trusted, SECRET)?;
        self.credential(&folder.join("controller.creds"), Role::Controller, &node.name)?;
        self.credential(&folder.join("gateway.creds"), Role::Gateway, &node.name)?;
        self.authority.host_signer().and_then(|signer| signer.save(&folder.join("host-signer.json"))).map_err(failed)
    }

    fn host(&mut self, folder: &Path, host: &HostId) -> Result {
        make_folder(folder)?;
        for file in setup::host_files(self.plan, host) {
            write(&folder.join(&file.name), &file.text, mode(&file))?;
        }
        write(&folder.join(TRUSTED), &self.trusted, SECRET)?;
        self.credential(&folder.join("host.creds"), Role::Host, host)
    }

    /// `at` is where the folder will be.
    fn operator(&mut self, folder: &Path, at: &Path) -> Result {
        make_folder(folder)?;
        let name = HostId::new(OPERATOR).map_err(failed)?;
        let shown = at.display().to_string();
        write(&folder.join("groupcast.toml"), &setup::operator_settings(self.plan, &shown), SECRET)?;
        write(&folder.join("prometheus.yml"), &setup::prometheus(self.plan, &format!("{shown}/{TRUSTED}")), SECRET)?;
        write(&folder.join(TRUSTED), &self.trusted, SECRET)?;
        for role in [Role::Controller, Role::Gateway, Role::Viewer] {
            self.credential(&folder.join(format!("{}.creds", role.as_str())), role, &name)?;
        }
        Ok(())
    }
}

/// A folder beside the one that is to be made; it goes away unless it becomes that one.
struct Staging(PathBuf);

impl Staging {
    fn beside(out: &Path) -> Result<Self> {
        let name = out.file_name().map(|name| name.to_string_lossy().into_owned());
        let name = name.ok_or_else(|| Failure::usage(format!("{} is no folder that can be made", out.display())))?;
        let path = out.with_file_name(format!(".{name}.{}.new", std::process::id()));
        make_folder(&path)?;
        Ok(Self(path))
    }

    fn become_(self, out: &Path) -> Result {
        std::fs::rename(&self.0, out).map_err(|error| unwritable(out, &error))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // it may have become what it was for
    }
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| failed(format!("{}: {error}", path.display())))
}

fn plan_text(plan: &Plan) -> Result<String> {
    serde_json::to_string_pretty(plan).map(|text| text + "\n").map_err(failed)
}

pub fn init(options: InitOptions) -> Result {
    let out = absolute(&options.out)?;
    let hosts = machines(&options.hosts)?.into_iter().map(|host| host.name).collect();
    let (client, cluster) = (options.client_port, options.cluster_port);
    let plan = Plan {
        nodes: machines(&options.nodes)?,
        hosts,
        ports: Ports { client, cluster, gateway: options.gateway_port, controller: options.controller_port },
        programs: options.programs.clone(),
        claims: options.claims.clone(),
    };
    plan.check().map_err(wrong)?;
    // An empty folder, perhaps made on purpose, is as good as none.
    let is_free = std::fs::read_dir(&out).map_or(!out.exists(), |mut entries| entries.next().is_none());
    if !is_free {
        let message = format!("{} is there already, and nothing in it is overwritten", out.display());
        return Err(Failure::new(Code::Conflict, message)
            .hint("name another folder; `groupcast bus add` adds machines to an installation"));
    }
    let staging = Staging::beside(&out)?;
    let now = SystemTime::now();
    let own = options.certificates.is_none().then(|| Own::new(now)).transpose().map_err(failed)?;
    let trusted = match (&own, &options.certificates) {
        (Some(own), _) => own.pem.clone(),
        (None, folder) => {
            let path = folder.clone().unwrap_or_default().join(TRUSTED);
            std::fs::read_to_string(&path).map_err(|error| {
                let hint = "the folder holds authority.pem, and NODE.pem and NODE-key.pem for each node";
                failed(format!("{} cannot be read: {error}", path.display())).hint(hint)
            })?
        }
    };
    write(&staging.0.join(PLAN), &plan_text(&plan)?, SECRET)?;
    write(&staging.0.join(TRUSTED), &trusted, SECRET)?;
    if let Some(own) = &own {
        write(&staging.0.join(TRUSTED_KEY), own.key(), SECRET)?;
    }
    let mut authority = Authority::new();
    let mut maker = Maker {
        plan: &plan,
        authority: &mut authority,
        own,
        brought: options.certificates.as_deref(),
        trusted,
        certificate_life: options.certificate_life,
        life: options.life,
        now,
    };
    for node in &plan.nodes {
        maker.node(&staging.0.join(node.name.as_str()), node)?;
    }
    for host in &plan.hosts {
        maker.host(&staging.0.join(host.as_str()), host)?;
    }
    maker.operator(&staging.0.join(OPERATOR), &out.join(OPERATOR))?;
    authority.save(&staging.0.join(AUTHORITY)).map_err(failed)?;
    staging.become_(&out)?;
    said(&plan, &options.out);
    Ok(())
}

/// What to do next, as it is typed.
fn said(plan: &Plan, out: &Path) {
    let shown = out.display();
    let count = |number: usize, what: &str| format!("{number} {what}{}", if number == 1 { "" } else { "s" });
    output::say(&format!(
        "{shown} is made, for {} and {}. Next:",
        count(plan.nodes.len(), "node"),
        count(plan.hosts.len(), "host")
    ));
    let names = plan.nodes.iter().map(|node| (&node.name, node.address.as_str()));
    for (name, address) in names.chain(plan.hosts.iter().map(|host| (host, host.as_str()))) {
        output::say(&format!("  tar -C {shown} -c {name} | ssh root@{address} 'tar -x --no-same-owner && sh {name}/install'"));
    }
    let urls: Vec<String> = plan.gateways().iter().map(|url| format!("--url {url}")).collect();
    output::say(&format!(
        "  groupcast token add root --role admin --on-bus --within 60s --config {shown}/{OPERATOR}/groupcast.toml --out \
         {shown}/{OPERATOR}/token\n  groupcast context add {} {} --token {shown}/{OPERATOR}/token --authority {shown}/{TRUSTED}\n  \
         groupcast init\n\
         {shown}/{AUTHORITY} and {shown}/{TRUSTED_KEY} are the keys to everything: keep them where only administrators are.",
        out.file_name().map_or_else(|| "prod".into(), |name| name.to_string_lossy()),
        urls.join(" "),
    ));
}

/// The plan of a folder that was made before.
fn planned(out: &Path) -> Result<Plan> {
    let path = out.join(PLAN);
    let hint = "name the folder that `groupcast bus init` made, as its owner";
    let text = std::fs::read_to_string(&path)
        .map_err(|error| failed(format!("{} cannot be read: {error}", path.display())).hint(hint))?;
    serde_json::from_str(&text).map_err(|error| failed(format!("{}: {error}", path.display())).hint(hint))
}

/// The authority for certificates, unless certificates are the operator's own.
fn own(out: &Path, now: SystemTime) -> Result<Option<Own>> {
    let key = out.join(TRUSTED_KEY);
    match key.exists() {
        true => Own::load(&out.join(TRUSTED), &key, now).map(Some).map_err(failed),
        false => Ok(None),
    }
}

/// What is to be copied again to a machine that was there before, and what is not touched because somebody has edited it.
#[derive(Default)]
struct Updated {
    written: Vec<String>,
    edited: Vec<String>,
}

impl Updated {
    /// The files as they were and as they are to be; what is neither was edited.
    fn update(&mut self, out: &Path, machine: &HostId, old: Vec<Text>, new: Vec<Text>) -> Result {
        for (old, new) in old.into_iter().zip(new).filter(|(old, new)| old != new) {
            let path = out.join(machine.as_str()).join(&new.name);
            let name = format!("{machine}/{}", new.name);
            match std::fs::read_to_string(&path) {
                Ok(text) if text == new.text => {}
                Ok(text) if text == old.text => {
                    replace(&path, &new.text, mode(&new))?;
                    self.written.push(name);
                }
                Ok(_) | Err(_) => self.edited.push(name),
            }
        }
        Ok(())
    }
}

/// Machines that are there already are left as they are, so it can be repeated.
pub fn add(options: AddOptions) -> Result {
    if options.nodes.is_empty() && options.hosts.is_empty() {
        return Err(Failure::usage("nothing to do: name --nodes or --hosts"));
    }
    let out = absolute(&options.out)?;
    planned(&out)?;
    // Held to the end: the plan is read and written again like the authority.
    let mut authority = super::host::locked(&out.join(AUTHORITY))?;
    let old = planned(&out)?;
    let mut plan = old.clone();
    for node in machines(&options.nodes)? {
        match old.nodes.iter().find(|known| known.name == node.name) {
            Some(known) if *known == node => {}
            Some(known) => {
                let message = format!("node {} is there with address {}, not {}", node.name, known.address, node.address);
                return Err(Failure::new(Code::Conflict, message).hint("choose another name"));
            }
            None => plan.nodes.push(node),
        }
    }
    let named = machines(&options.hosts)?.into_iter().map(|host| host.name);
    plan.hosts.extend(named.filter(|host| !old.hosts.contains(host)));
    plan.check().map_err(wrong)?;
    if old.nodes.len() == 1 && plan.nodes.len() > 1 {
        // The server does not take what it stored alone into a cluster.
        let hint = "make a new installation with `groupcast bus init`, then `groupcast export` here and `groupcast import` there";
        return Err(Failure::usage("a single server does not become one of three: its streams would be gone").hint(hint));
    }
    let now = SystemTime::now();
    let trusted = std::fs::read_to_string(out.join(TRUSTED)).map_err(|error| failed(format!("{TRUSTED}: {error}")))?;
    let mut maker = Maker {
        plan: &plan,
        authority: &mut authority,
        own: own(&out, now)?,
        brought: options.certificates.as_deref(),
        trusted,
        certificate_life: certificates::LIFE,
        life: options.life,
        now,
    };
    // A folder that is there and not in the plan was left by one that was interrupted, or is somebody else's.
    let mut made = Vec::new();
    for node in plan.nodes.iter().filter(|node| !old.nodes.contains(node)) {
        maker.node(&out.join(node.name.as_str()), node)?;
        made.push(node.name.to_string());
    }
    for host in plan.hosts.iter().filter(|host| !old.hosts.contains(host)) {
        maker.host(&out.join(host.as_str()), host)?;
        made.push(host.to_string());
    }
    authority.save().map_err(failed)?;
    let mut updated = Updated::default();
    for node in &old.nodes {
        let accounts = std::fs::read_to_string(out.join(node.name.as_str()).join("accounts.conf")).unwrap_or_default();
        let files = |plan: &Plan| setup::node_files(plan, node, &accounts).map_err(wrong);
        updated.update(&out, &node.name, files(&old)?, files(&plan)?)?;
    }
    for host in &old.hosts {
        updated.update(&out, host, setup::host_files(&old, host), setup::host_files(&plan, host))?;
    }
    replace(&out.join(PLAN), &plan_text(&plan)?, SECRET)?;
    match made.is_empty() {
        true => output::say("everything named is there already"),
        false => output::say(&format!("made {}: copy each folder to its machine and run its install", made.join(", "))),
    }
    if !updated.written.is_empty() {
        let machines = updated.written.join(", ");
        output::say(&format!(
            "{machines} changed: copy and install them again; then, node by node, `systemctl reload groupcast-nats` and `systemctl restart \
             groupcast-controller groupcast-gateway`, and on hosts `systemctl restart groupcast-agent`"
        ));
    }
    match updated.edited.is_empty() {
        true => Ok(()),
        false => {
            let message = format!("edited, and left as it is: {}", updated.edited.join(", "));
            Err(failed(message).hint("add the new servers there yourself"))
        }
    }
}

pub fn renew(options: RenewOptions) -> Result {
    let out = absolute(&options.out)?;
    let (plan, now) = (planned(&out)?, SystemTime::now());
    let own = own(&out, now)?.ok_or_else(|| {
        let hint = "put the new ones into /etc/groupcast on each node as server.pem and server-key.pem, and `systemctl reload groupcast-nats`";
        failed(format!("{} holds no {TRUSTED_KEY}: the certificates are your own", out.display())).hint(hint)
    })?;
    if let Some(unknown) = options.nodes.iter().find(|name| !plan.nodes.iter().any(|node| node.name == **name)) {
        let known: Vec<&str> = plan.nodes.iter().map(|node| node.name.as_str()).collect();
        return Err(Failure::new(Code::NotFound, format!("there is no node {unknown}; there are {}", known.join(", "))));
    }
    for node in plan.nodes.iter().filter(|node| options.nodes.is_empty() || options.nodes.contains(&node.name)) {
        let made = own.node(node, now, options.certificate_life).map_err(failed)?;
        let folder = out.join(node.name.as_str());
        replace(&folder.join("server.pem"), &made.certificate, SECRET)?;
        replace(&folder.join("server-key.pem"), &made.key, SECRET)?;
        output::say(&format!(
            "certificate of {} made anew: copy and install {} again, then `systemctl reload groupcast-nats` there",
            node.name,
            folder.display()
        ));
    }
    Ok(())
}
