//! A reader that stands in for a host.

use std::collections::BTreeMap;
use std::time::Duration;

use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::{self, Options};
use groupcast_policy::doc;
use groupcast_policy::ids::HostId;
use groupcast_policy::topic::Topic;
use groupcast_topics::nats::{OnCommit, ReaderHandle, spawn_reader};
use groupcast_topics::reader;

use crate::world::eventually;

pub struct Host {
    pub id: HostId,
    pub reader: ReaderHandle,
}

impl Host {
    pub async fn start(url: &str, name: &str, settings: reader::Settings, watch: OnCommit) -> Self {
        let id = HostId::new(name).expect("a host's name");
        let options = Options::new(&[url.to_owned()], Role::Host, &id).reconnect_delay_max(Duration::from_millis(200));
        let (client, events) = connect::connect(options).await.expect("the bus can be reached");
        let seed = name.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(byte.into()));
        Self { reader: spawn_reader(client, events, id.clone(), settings, seed, watch), id }
    }

    pub async fn documents(&self) -> BTreeMap<Topic, doc::Document> {
        let look =
            self.reader.inspect(|reader| reader.documents().map(|(topic, document)| (topic.clone(), document.clone())).collect());
        look.await.expect("the reader lives")
    }

    pub async fn term(&self) -> u64 {
        self.reader.inspect(|reader| reader.cut().map_or(0, |cut| cut.term)).await.expect("the reader lives")
    }

    /// Waits until it exposes something.
    pub async fn synced(&self) {
        eventually("the host has joined", || async { self.term().await > 0 }).await;
    }
}
