//! The control plane as it runs: controllers as processes on a bus of the test's own, with readers standing in for hosts and a model
//! that says what every host should hold.

mod gate;
mod hold;
mod host;
mod make;
mod marked;
mod otlp;
mod process;
mod protocol;
mod tap;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use groupcast_control::catalog::{Accepted, Catalog};
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::{Document, Name};
use groupcast_control::registry::{Elsewhere, Registry};
use groupcast_policy::doc;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::{Event, Group, Workload, World as Model};
use groupcast_policy::needs::needed;
use groupcast_policy::topic::Topic;
use groupcast_topics::nats::OnCommit;
use groupcast_topics::reader;

pub use gate::{Gate, Moment, Step};
pub use hold::Hold;
pub use host::Host;
pub use make::{address, group, shown_mark, workload};
pub use marked::{GROUPS, Witness, marked, plane_with_hosts};
pub use otlp::{Collector, Span};
pub use process::{Controller, agent_binary, binary, run};
pub use tap::Tap;

use crate::World;
use crate::world::DEADLINE;

/// A bus, what was written to it, and whoever follows.
pub struct Plane {
    pub bus: World,
    pub lease: Duration,
    pub controllers: Vec<Controller>,
    pub catalog: Catalog,
    pub registry: Registry,
    /// What the streams say.
    pub model: Model,
    /// Where controllers that were started behind a gate connect to, by their names.
    gates: BTreeMap<String, Gate>,
    started: usize,
}

impl Plane {
    pub async fn start(controllers: usize, lease: Duration) -> Self {
        let bus = World::one().await;
        let client = bus.observer("writer").await;
        let (catalog, registry) = (Catalog::new(client.clone()), Registry::new(client));
        let mut plane = Self {
            bus,
            lease,
            controllers: Vec::new(),
            catalog,
            registry,
            model: Model::default(),
            gates: BTreeMap::new(),
            started: 0,
        };
        for _ in 0..controllers {
            plane.add_controller();
        }
        plane
    }

    pub fn url(&self) -> String {
        self.bus.url(0)
    }

    pub fn add_controller(&mut self) {
        self.add_controller_with(&[]);
    }

    /// One with more on its command line.
    pub fn add_controller_with(&mut self, more: &[&str]) {
        self.started += 1;
        let name = format!("c{}", self.started);
        self.controllers.push(Controller::start(&self.url(), &name, self.lease, more));
    }

    /// One whose messages pass a gate.
    pub async fn add_gated_controller(&mut self) {
        self.started += 1;
        let (name, gate) = (format!("c{}", self.started), Gate::to(&self.url()).await);
        self.controllers.push(Controller::start(&gate.url(), &name, self.lease, &[]));
        self.gates.insert(name, gate);
    }

    /// The gate of this controller.
    pub fn gate(&self, controller: usize) -> &Gate {
        &self.gates[&self.controllers[controller].name]
    }

    pub async fn ready(&mut self) {
        for controller in &mut self.controllers {
            controller.ready().await;
        }
    }

    /// Waits until one of them leads and publishes; which.
    pub async fn leader(&mut self) -> usize {
        let start = Instant::now();
        loop {
            for (index, controller) in self.controllers.iter_mut().enumerate() {
                if controller.status().is_some_and(|status| status["publishing"] == true) {
                    return index;
                }
            }
            assert!(start.elapsed() < DEADLINE, "nobody leads");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Writes groups as one change, over whatever is there.
    pub async fn put_groups(&mut self, groups: Vec<Group>) -> Accepted {
        let events: Vec<Event> = groups.iter().cloned().map(Event::group).collect();
        let accepted = write_groups(&self.catalog, groups).await.expect("the change is written");
        events.iter().for_each(|event| self.model.apply(event));
        accepted
    }

    pub async fn delete_group(&mut self, id: &str) -> Accepted {
        let id = id.parse().expect("a group's id");
        let writes = vec![Write::delete(Name::group(&id), Expected::Any)];
        let change = Change { author: "test".to_owned(), reason: String::new(), key: None, writes };
        let accepted = self.catalog.write(&change, None).await.expect("the change is written");
        self.model.apply(&Event::GroupRemoved(id));
        accepted
    }

    pub async fn register(&mut self, workloads: Vec<Workload>) {
        let mut by_host: BTreeMap<HostId, Vec<Workload>> = BTreeMap::new();
        for workload in workloads {
            by_host.entry(workload.host.clone()).or_default().push(workload);
        }
        for (host, workloads) in by_host {
            let registered = self.registry.register(&host, &workloads, Elsewhere::Move).await.expect("registered");
            for (workload, (_, incarnation)) in workloads.into_iter().zip(registered.incarnations) {
                self.model.apply(&Event::workload(Workload { incarnation, ..workload }));
            }
        }
    }

    /// What a compile from scratch says this host should hold.
    pub fn expected(&self, host: &HostId) -> BTreeMap<Topic, doc::Document> {
        expected(&self.model, host)
    }

    /// Waits until the host holds exactly that.
    pub async fn settled(&self, host: &Host) {
        let wanted = self.expected(&host.id);
        let start = Instant::now();
        loop {
            let found = host.documents().await;
            if found == wanted {
                return;
            }
            if start.elapsed() > DEADLINE {
                let differing: BTreeSet<&Topic> =
                    wanted.keys().chain(found.keys()).filter(|t| wanted.get(*t) != found.get(*t)).collect();
                panic!("host {} does not settle: differs in {differing:?}", host.id);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// A host that follows topics like an agent; every state it exposes is handed to `watch`.
    pub async fn host(&self, name: &str, settings: reader::Settings, watch: OnCommit) -> Host {
        Host::start(&self.url(), name, settings, watch).await
    }
}

pub fn expected(model: &Model, host: &HostId) -> BTreeMap<Topic, doc::Document> {
    let all: groupcast_topics::Map<Topic, doc::Document> = groupcast_policy::scratch::documents(model).into_iter().collect();
    needed(host, &all).into_iter().map(|topic| (topic.clone(), all.get(&topic).cloned().unwrap_or_default())).collect()
}

pub async fn write_groups(catalog: &Catalog, groups: Vec<Group>) -> Result<Accepted, groupcast_control::catalog::Error> {
    let put = |group: Group| Write::put(Document::Group(std::sync::Arc::new(group)), Expected::Any);
    let writes = groups.into_iter().map(put).collect();
    let change = Change { author: "test".to_owned(), reason: "a test".to_owned(), key: None, writes };
    catalog.write(&change, None).await
}
