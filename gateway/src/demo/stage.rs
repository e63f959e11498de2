//! Everything the story needs, started and ended together: `groupcast up` as a process, agents as processes in the namespaces of their
//! hosts, workloads as processes in theirs.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use groupcast_bus_config::lab::{self, Addresses, Agent, AgentSettings, Lab, Up};
use groupcast_control::place::{self, Place};

use super::failed;
use crate::cli::client::Api;
use crate::cli::context::{Context, GATEWAY_DEFAULT};
use crate::cli::{Failure, Result};

/// Who is where.
pub const PLACES: [Place; 3] = [
    Place { workload: "web-1", host: "h1", app: "web" },
    Place { workload: "db-1", host: "h2", app: "db" },
    Place { workload: "job-1", host: "h3", app: "jobs" },
];
/// Where the workloads answer.
pub const PORT: u16 = 5432;

pub struct Stage {
    folder: PathBuf,
    agents: Vec<Agent>,
    /// `None` without the right to make namespaces: nothing is enforced then, and no packet goes anywhere.
    lab: Option<Lab>,
    workloads: Vec<Child>,
    pub up: Up,
}

/// Where people expect the API, if that is free.
fn usual_address() -> Option<SocketAddr> {
    let usual = GATEWAY_DEFAULT.trim_start_matches("http://").parse::<SocketAddr>();
    usual.ok().filter(|address| TcpListener::bind(address).is_ok())
}

impl Stage {
    /// `groupcast up` as a process, and nothing beside it yet.
    pub fn start(binary: &Path, folder: &Path) -> Result<Self> {
        let anywhere = || Up::start(binary, folder, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)));
        // Somebody may have taken the usual one just now.
        let up = match usual_address() {
            Some(usual) => Up::start(binary, folder, usual).or_else(|_| anywhere())?,
            None => anywhere()?,
        };
        Ok(Self { folder: folder.to_owned(), agents: Vec::new(), lab: None, workloads: Vec::new(), up })
    }

    pub fn has_packets(&self) -> bool {
        self.lab.is_some()
    }

    pub fn api(&self) -> Result<Api> {
        let gateways = vec![self.up.addresses.gateway.clone()];
        Api::new(&Context { gateways, ..Context::default() }, &self.up.token()?)
    }

    /// Runs the command line as a person would; what it prints, and its exit code.
    pub fn groupcast(&self, arguments: &[&str]) -> Result<(String, i32)> {
        let said = self.up.groupcast(arguments)?;
        Ok((said.stderr + &said.stdout, said.code))
    }

    /// A file of the story.
    pub fn file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.folder.join(name);
        std::fs::write(&path, text).map_err(|error| failed(format!("{}: {error}", path.display())))?;
        Ok(path)
    }

    /// Hosts, agents and workloads; in namespaces where that is allowed.
    pub async fn people(&mut self, agent: &Path) -> Result {
        if lab::is_allowed() {
            let mut lab = Lab::new(self.up.bus_address()?)?;
            place::build(&mut lab, &PLACES)?;
            self.lab = Some(lab);
        }
        place::enter(&self.up, self.lab.as_ref(), &PLACES).await.map_err(failed)?;
        for Place { workload, host, .. } in PLACES {
            let folder = self.folder.join(host);
            std::fs::create_dir_all(&folder).map_err(failed)?;
            let credentials = folder.join("agent.creds");
            self.up.credential(host, &credentials)?;
            let placed = self.lab.as_ref().and_then(|lab| Some((lab.hosts.get(host)?, lab.workloads.get(workload)?)));
            let settings = AgentSettings {
                binary: agent.to_owned(),
                host: host.to_owned(),
                bus: placed.map_or(self.up.addresses.bus.clone(), |(host, _)| host.bus.clone()),
                credentials: Some(credentials),
                folder,
                dry_run: placed.is_none(),
            };
            let agent = Agent::start(settings, placed.map(|(host, _)| &host.namespace))?;
            agent.attach(workload, placed.map_or("gcw0", |(_, workload)| &workload.interface))?;
            if let Some((_, placed)) = placed {
                let mut command = Command::new(&self.up.binary);
                command.args(["echo", &format!("0.0.0.0:{PORT}"), workload]);
                self.workloads.push(placed.namespace.spawn(&command)?);
            }
            self.agents.push(agent);
        }
        Ok(())
    }

    /// A connection by real packets; `None` where there are none.
    pub fn connect(&self, from: &str, to: &str, port: u16, within: Duration) -> Result<Option<std::io::Result<TcpStream>>> {
        Ok(self.lab.as_ref().map(|lab| lab.connect(from, to, port, within)).transpose()?)
    }

    /// What to do now, for whoever stays.
    pub fn farewell(&self) -> String {
        let Addresses { bus, gateway, token_file } = &self.up.addresses;
        let binary = self.up.binary.display();
        let mut text = format!(
            "\neverything stays up; Ctrl-C ends it\n\n  bus      {bus}\n  gateway  {gateway}\n  logs     {folder}/up.log, {folder}/h*/agent.log\n\n\
             try, in another terminal:\n\n  export GROUPCAST_GATEWAY={gateway} GROUPCAST_TOKEN_FILE={token}\n  {binary} get groups\n  \
             {binary} get hosts\n  {binary} explain web-1 db-1 tcp/5432\n  {binary} get changes -o wide\n",
            folder = self.folder.display(),
            token = token_file.display(),
        );
        if let Some(path) = self.try_script() {
            text += &format!("  {} web-1 db-1 5432      # a real connection\n", path.display());
        }
        text
    }

    /// A program that makes a connection between workloads, for people.
    fn try_script(&self) -> Option<PathBuf> {
        use std::os::unix::fs::OpenOptionsExt;
        let lab = self.lab.as_ref()?;
        let mut rooms = BTreeMap::new();
        for (name, workload) in &lab.workloads {
            rooms.insert(name.clone(), (workload.namespace.thread_id(), workload.address));
        }
        let list = |what: fn(&(i32, Ipv4Addr)) -> String| {
            rooms.iter().map(|(name, room)| format!("    {name}) echo {} ;;\n", what(room))).collect::<String>()
        };
        let text = format!(
            "#!/bin/bash\n# A connection from one workload to another: {{FROM}} {{TO}} {{PORT}}\n\
             room() {{ case \"$1\" in\n{}    *) echo \"no workload $1\" >&2; exit 2 ;;\n  esac; }}\n\
             address() {{ case \"$1\" in\n{}    *) echo \"$1\" ;;\n  esac; }}\n\
             from=$(room \"$1\") to=$(address \"$2\")\n\
             nsenter --net=/proc/{}/task/$from/ns/net timeout 2 bash -c \"exec 3<>/dev/tcp/$to/$3 && echo hello >&3 && head -n 1 <&3\" ||\n    {{ echo \"$1 does not reach $2 on tcp/$3\"; exit 1; }}\n",
            list(|room| room.0.to_string()),
            list(|room| room.1.to_string()),
            std::process::id(),
        );
        let path = self.folder.join("try");
        let file = File::options().write(true).create(true).truncate(true).mode(0o700).open(&path);
        file.and_then(|mut file| file.write_all(text.as_bytes())).ok()?;
        Some(path)
    }

    /// Ends everything, in order.
    pub fn end(mut self) {
        self.agents.clear();
        self.workloads.iter_mut().for_each(|child| {
            let _ = child.kill();
            let _ = child.wait();
        });
        self.up.end();
    }
}

/// Says a line and waits for the answer.
pub fn heard(stream: &TcpStream, line: &str, within: Duration) -> bool {
    let mut writer = stream;
    if stream.set_read_timeout(Some(within)).is_err() || writer.write_all(format!("{line}\n").as_bytes()).is_err() {
        return false;
    }
    let mut answer = String::new();
    let read = BufReader::new(stream).read_line(&mut answer);
    read.is_ok() && answer.trim_end().ends_with(line)
}

impl From<lab::Error> for Failure {
    fn from(error: lab::Error) -> Self {
        Self::failed(error.to_string())
    }
}
