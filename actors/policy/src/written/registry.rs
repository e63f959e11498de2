//! Templates and workloads.

use std::sync::Arc;

use super::group::{kind, phases};
use super::{Node, reader::Reader};
use crate::doc::{Enforced, Phase};
use crate::ids::{NetworkId, TemplateId};
use crate::model::{
    HOST_ADDRESSES_MAX, HOST_WORKLOADS_MAX, HealthCheck, LABELS_MAX, Labels, PROBE_BYTES_MAX, Probe, Template, Workload,
};
use crate::text::shorten;

/// Most items in any list of a template or a workload.
pub const LIST_MAX: usize = 10_000;

const TEMPLATE_FIELDS: &[&str] = &[
    "kind",
    "id",
    "labels",
    "own_labels",
    "network",
    "spaces",
    "apps",
    "phase",
    "prefixes",
    "identities",
    "enforced",
    "health",
    "wide_prefixes",
    "workloads_max",
    "addresses_max",
];
/// Most of each that a template may allow a host.
const QUOTA_MAX: i64 = 1_000_000;

pub(super) fn read_template(reader: &mut Reader, node: &Node) -> Option<Template> {
    reader.map(node, "", TEMPLATE_FIELDS)?;
    kind(reader, node, "template");
    let id: Option<TemplateId> = reader.parsed(node.get("id"), "id");
    let id = reader.required(id, node.get("id"), "id", "the template's id");
    let network: Option<NetworkId> = reader.parsed(node.get("network"), "network");
    let network = reader.required(network, node.get("network"), "network", "the network its workloads are on");
    let labels = labels(reader, node.get("labels"));
    let mut own_labels = std::collections::BTreeSet::new();
    for item in reader.list(node.get("own_labels"), "own_labels", LABELS_MAX) {
        match reader.text(Some(item), "own_labels").map(Labels::key) {
            Some(Ok(key)) => {
                own_labels.insert(key);
            }
            Some(Err(error)) => reader.problem("own_labels", error),
            None => {}
        }
    }
    let phase = reader.text(node.get("phase"), "phase");
    let phases = phases(reader, phase.or(Some("running")), "phase");
    let health = match node.get("health") {
        None | Some(Node::Null) => None,
        Some(health) => {
            reader.map(health, "health", &["port", "path", "process", "interval_seconds"])?;
            let interval = number(reader, health.get("interval_seconds"), "health.interval_seconds", 1, 86_400);
            let probe = probe(reader, health);
            probe.zip(interval).map(|(probe, interval)| HealthCheck { probe, interval_seconds: interval as u32 })
        }
    };
    let template = Template {
        labels,
        own_labels,
        spaces: reader.set(node.get("spaces"), "spaces", LIST_MAX),
        apps: reader.set(node.get("apps"), "apps", LIST_MAX),
        phases: phases?,
        prefixes: reader.prefixes(node.get("prefixes"), "prefixes", LIST_MAX),
        identities: reader.set(node.get("identities"), "identities", LIST_MAX),
        enforced: enforced(reader, node.get("enforced")),
        health,
        wide_prefixes: reader.flag(node.get("wide_prefixes"), "wide_prefixes", false),
        workloads_max: quota(reader, node, "workloads_max", HOST_WORKLOADS_MAX)?,
        addresses_max: quota(reader, node, "addresses_max", HOST_ADDRESSES_MAX)?,
        id: id?,
        network: network?,
    };
    Some(template)
}

fn quota(reader: &mut Reader, node: &Node, field: &str, usual: u32) -> Option<u32> {
    match node.get(field) {
        None | Some(Node::Null) => Some(usual),
        some => number(reader, some, field, 1, QUOTA_MAX).and_then(|most| u32::try_from(most).ok()),
    }
}

/// A port, a port and a path, or a process.
fn probe(reader: &mut Reader, health: &Node) -> Option<Probe> {
    let is_there = |field: &str| health.get(field).is_some_and(|node| *node != Node::Null);
    let plain = |reader: &mut Reader, field: &str| {
        let text = reader.text(health.get(field), field)?.to_owned();
        let fits = Probe::is_plain(&text);
        if !fits {
            reader.problem(field, format!("is {:?}: write up to {PROBE_BYTES_MAX} printable characters", shorten(&text)));
        }
        fits.then_some(text)
    };
    if is_there("process") {
        if is_there("port") || is_there("path") {
            reader.problem("health", "names a process and a port: check one of them");
            return None;
        }
        return Some(Probe::Process { name: plain(reader, "process")? });
    }
    let port = number(reader, health.get("port"), "health.port", 1, i64::from(u16::MAX))? as u16;
    if !is_there("path") {
        return Some(Probe::Tcp { port });
    }
    let path = plain(reader, "path")?;
    if !path.starts_with('/') {
        reader.problem("path", format!("is {:?}: begin it with /", shorten(&path)));
        return None;
    }
    Some(Probe::Http { port, path })
}

const WORKLOAD_FIELDS: &[&str] = &[
    "kind",
    "id",
    "host",
    "network",
    "addresses",
    "pairs",
    "labels",
    "app",
    "space",
    "phase",
    "template",
    "incarnation",
    "enforced",
    "groups",
    "unhealthy",
];

pub(super) fn read_workload(reader: &mut Reader, node: &Node) -> Option<Workload> {
    reader.map(node, "", WORKLOAD_FIELDS)?;
    kind(reader, node, "workload");
    let id = reader.parsed(node.get("id"), "id");
    let id = reader.required(id, node.get("id"), "id", "the workload's id");
    let host = reader.parsed(node.get("host"), "host");
    let host = reader.required(host, node.get("host"), "host", "the host it runs on");
    let network = reader.parsed(node.get("network"), "network");
    let network = reader.required(network, node.get("network"), "network", "the network it is on");
    let phase = match reader.text(node.get("phase"), "phase") {
        None | Some("running") => Phase::Running,
        Some("staging") => Phase::Staging,
        Some(other) => {
            reader.problem("phase", format!("is {:?}: write running or staging", shorten(other)));
            Phase::Running
        }
    };
    let incarnation = match node.get("incarnation") {
        None | Some(Node::Null) => 1,
        node => number(reader, node, "incarnation", 0, i64::MAX).unwrap_or(1) as u64,
    };
    let workload = Workload {
        addresses: reader.prefixes(node.get("addresses"), "addresses", LIST_MAX),
        pairs: reader.prefixes(node.get("pairs"), "pairs", LIST_MAX),
        labels: labels(reader, node.get("labels")),
        app: reader.parsed(node.get("app"), "app"),
        space: reader.parsed(node.get("space"), "space"),
        phase,
        template: reader.parsed(node.get("template"), "template"),
        incarnation,
        enforced: enforced(reader, node.get("enforced")),
        groups: reader.set(node.get("groups"), "groups", LIST_MAX),
        unhealthy: reader.flag(node.get("unhealthy"), "unhealthy", false),
        id: id?,
        host: host?,
        network: network?,
    };
    Some(workload)
}

fn number(reader: &mut Reader, node: Option<&Node>, field: &str, min: i64, max: i64) -> Option<i64> {
    match node {
        Some(Node::Int(number)) if (min..=max).contains(number) => Some(*number),
        other => {
            let found = other.map_or("missing".to_string(), |o| match o {
                Node::Int(number) => format!("is {number}"),
                other => format!("is {}", other.kind()),
            });
            reader.problem(field, format!("{found}: write a number from {min} to {max}"));
            None
        }
    }
}

fn enforced(reader: &mut Reader, node: Option<&Node>) -> Option<Enforced> {
    match reader.text(node, "enforced")? {
        "both" => Some(Enforced::BOTH),
        "ingress" => Some(Enforced { ingress: true, egress: false }),
        "egress" => Some(Enforced { ingress: false, egress: true }),
        "none" => Some(Enforced { ingress: false, egress: false }),
        other => {
            reader.problem("enforced", format!("is {:?}: write both, ingress, egress or none", shorten(other)));
            None
        }
    }
}

fn labels(reader: &mut Reader, node: Option<&Node>) -> Labels {
    let entries = match node {
        None | Some(Node::Null) => return Labels::default(),
        Some(Node::Map(entries)) if entries.len() <= LABELS_MAX => entries,
        Some(Node::Map(entries)) => {
            reader.problem("labels", format!("{} labels: at most {LABELS_MAX} are allowed", entries.len()));
            return Labels::default();
        }
        Some(other) => {
            reader.problem("labels", format!("is {}: write a mapping from keys to values", other.kind()));
            return Labels::default();
        }
    };
    let mut list: Vec<(Arc<str>, Arc<str>)> = Vec::new();
    for (key, value) in entries {
        let text = match value {
            Node::Int(number) => number.to_string(),
            Node::Bool(flag) => flag.to_string(),
            value => match reader.text(Some(value), "labels") {
                Some(text) => text.to_string(),
                None if *value == Node::Null => String::new(),
                None => continue,
            },
        };
        match (Labels::key(key), Labels::value(&text)) {
            (Ok(key), Ok(value)) => list.push((key, value)),
            (key, value) => {
                [key.err(), value.err()].into_iter().flatten().for_each(|error| reader.problem("labels", error));
            }
        }
    }
    list.into_iter().collect()
}
