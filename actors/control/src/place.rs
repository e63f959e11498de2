//! Writes where the workloads of a lab are, as a source that knows placements does: for the demonstration, tests and benchmarks.

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Identity};
use groupcast_bus_config::lab::{self, Lab, Up};
use groupcast_policy::ids::{HostId, InvalidId, NetworkId};
use groupcast_policy::model::Workload;
use groupcast_policy::net::Prefix;

use crate::registry::{self, Elsewhere, Registry};

/// The network of everything in a lab.
pub const NETWORK: &str = "lab";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Id(#[from] InvalidId),
    #[error(transparent)]
    Connect(#[from] connect::Error),
    #[error(transparent)]
    Registry(#[from] registry::Error),
    #[error(transparent)]
    Lab(#[from] lab::Error),
}

/// A workload that is to be somewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub workload: &'static str,
    pub host: &'static str,
    pub app: &'static str,
}

/// Makes the hosts and workloads in the lab.
pub fn build(lab: &mut Lab, places: &[Place]) -> Result<(), lab::Error> {
    for place in places {
        if !lab.hosts.contains_key(place.host) {
            lab.host(place.host)?;
        }
        lab.workload(place.workload, place.host)?;
    }
    Ok(())
}

/// Enters them into REGISTRY. Without a lab they get the addresses that they would have there.
pub async fn enter(up: &Up, lab: Option<&Lab>, places: &[Place]) -> Result<(), Error> {
    let servers = [up.addresses.bus.clone()];
    let identity = Identity::File(up.controller_credentials());
    let options = connect::Options::new(&servers, Role::Controller, &HostId::new("local")?).identity(identity);
    let (client, _events) = connect::connect(options).await?;
    let registry = Registry::new(client);
    let network = NetworkId::new(NETWORK)?;
    for (number, place) in places.iter().enumerate() {
        let host = HostId::new(place.host)?;
        let mut workload = Workload::new(place.workload.parse()?, host.clone(), network.clone());
        workload.app = Some(place.app.parse()?);
        let there = lab.and_then(|lab| lab.workloads.get(place.workload)).map(|workload| workload.address);
        let address = there.unwrap_or_else(|| lab::address(number + 1, 0));
        workload.addresses = [Prefix::host(address.into())].into();
        registry.register(&host, &[workload], Elsewhere::Move).await?;
    }
    Ok(())
}
