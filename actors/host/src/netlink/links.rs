//! Which interfaces belong to a bridge, a switch, a VRF or anything else that takes their packets before the hooks of the inet
//! family see them as theirs. Asked of the kernel, not of /sys, which shows the network namespace it was mounted in.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use netlink_sys::protocols::NETLINK_ROUTE;

use super::socket::{DUMP, Transport, single};
use super::wire::Attributes;

const GET_LINK: u16 = 18;
const HEAD_BYTES: usize = 16;
const GROUP_LINK: u32 = 1;

const NAME: u16 = 3;
const MASTER: u16 = 10;
const LINK_INFO: u16 = 18;
const INFO_KIND: u16 = 1;
const INFO_MASTER_KIND: u16 = 4;

/// Attempts to list the interfaces while somebody changes them all the time.
const ATTEMPTS_MAX: usize = 20;

/// What an interface belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Master {
    pub name: String,
    /// `bridge`, `vrf`, `openvswitch`, `bond` and so on.
    pub kind: String,
}

impl fmt::Display for Master {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = match self.kind.as_str() {
            "bridge" => "bridge ",
            "vrf" => "VRF ",
            "openvswitch" => "Open vSwitch ",
            _ => "",
        };
        write!(f, "{known}{}", self.name)
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Link {
    name: String,
    kind: String,
    master: Option<u32>,
    master_kind: String,
}

fn read(head: &[u8], attributes: Attributes<'_>) -> Option<(u32, Link)> {
    let index = u32::from_ne_bytes(*head.get(4..8)?.first_chunk()?);
    let info = attributes.nested(LINK_INFO);
    let text = |attributes: Attributes<'_>, kind| attributes.text(kind).unwrap_or_default().to_owned();
    let master = attributes.find(MASTER).and_then(|data| Some(u32::from_ne_bytes(*data.first_chunk()?)));
    Some((
        index,
        Link {
            name: attributes.text(NAME)?.to_owned(),
            kind: text(info, INFO_KIND),
            master,
            master_kind: text(info, INFO_MASTER_KIND),
        },
    ))
}

/// The interfaces that belong to something, by name.
fn masters(links: &BTreeMap<u32, Link>) -> BTreeMap<String, Master> {
    let of = |link: &Link| {
        let master = links.get(&link.master?);
        let kind = if link.master_kind.is_empty() { master.map(|m| m.kind.clone()) } else { Some(link.master_kind.clone()) };
        // It may be in another namespace, and then has no name here.
        let name = master.map_or_else(|| format!("interface {}", link.master.unwrap_or_default()), |m| m.name.clone());
        Some((link.name.clone(), Master { name, kind: kind.unwrap_or_default() }))
    };
    links.values().filter_map(of).collect()
}

/// The interfaces that there are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Present {
    /// Those that belong to something, by name.
    pub masters: BTreeMap<String, Master>,
    /// All of them, by number.
    pub names: BTreeMap<u32, String>,
}

/// The interfaces of the network namespace it was made in, and what becomes of them.
pub struct Links {
    asks: Transport,
    hears: Transport,
}

impl Links {
    pub fn open() -> io::Result<Self> {
        let mut hears = Transport::open_on(NETLINK_ROUTE)?;
        hears.join(GROUP_LINK)?;
        Ok(Self { asks: Transport::open_on(NETLINK_ROUTE)?, hears })
    }

    /// Whether any interface came, went or changed since the last look.
    pub fn changed(&mut self) -> io::Result<bool> {
        let mut any = false;
        let complete = self.hears.told(|_| any = true)?;
        Ok(any || !complete)
    }

    pub fn present(&mut self) -> io::Result<Present> {
        let request = single(GET_LINK, DUMP, &[0; HEAD_BYTES], |_| {});
        for _ in 0..ATTEMPTS_MAX {
            let mut links = BTreeMap::new();
            match self.asks.dump_all(&request, HEAD_BYTES, |head, attributes| links.extend(read(head, attributes))) {
                Ok(()) => {
                    let names = links.iter().map(|(index, link)| (*index, link.name.clone())).collect();
                    return Ok(Present { masters: masters(&links), names });
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::Error::other("interfaces change all the time: their list cannot be read"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{ip, isolated};
    use super::super::wire::Writer;
    use super::*;

    #[test]
    fn what_belongs_to_a_real_bridge_is_found_and_so_is_its_release() {
        isolated(|| {
            let mut links = Links::open().unwrap();
            ip("link add br0 type bridge");
            ip("link add gcw0 type veth peer name peer0");
            assert!(links.changed().unwrap());
            assert!(links.present().unwrap().masters.is_empty());
            ip("link set gcw0 master br0");
            assert!(links.changed().unwrap() && !links.changed().unwrap());
            let masters = links.present().unwrap().masters;
            assert_eq!(masters.len(), 1);
            assert_eq!(masters["gcw0"], Master { name: "br0".into(), kind: "bridge".into() });
            ip("link set gcw0 nomaster");
            assert!(links.changed().unwrap());
            assert!(links.present().unwrap().masters.is_empty());
        });
    }

    /// Not every kernel has VRFs and switches; what they look like is known.
    #[test]
    fn a_master_is_named_whatever_it_is() {
        let link = |index: u32, name: &str, kind: &str, master: Option<u32>, master_kind: &str| {
            let mut head = [0; HEAD_BYTES];
            head[4..8].copy_from_slice(&index.to_ne_bytes());
            let mut writer = Writer::default();
            writer.text(NAME, name);
            master.iter().for_each(|master| _ = writer.put(MASTER, &master.to_ne_bytes()));
            writer.nest(LINK_INFO, |info| {
                info.text(INFO_KIND, kind);
                if !master_kind.is_empty() {
                    info.text(INFO_MASTER_KIND, master_kind);
                }
            });
            read(&head, Attributes(&writer.bytes)).unwrap()
        };
        let links = BTreeMap::from([
            link(1, "lo", "", None, ""),
            link(2, "blue", "vrf", None, ""),
            link(3, "ovs-system", "openvswitch", None, ""),
            link(4, "gcw0", "veth", Some(2), "vrf"),
            link(5, "gcw1", "veth", Some(3), ""),
            link(6, "gcw2", "veth", Some(77), "bond"),
        ]);
        let found = masters(&links);
        let said: Vec<String> = found.iter().map(|(name, master)| format!("{name}: {master}")).collect();
        assert_eq!(said, ["gcw0: VRF blue", "gcw1: Open vSwitch ovs-system", "gcw2: interface 77"]);
    }
}
