//! Worlds, packets, edits and meanings. The language is described in `tests/tables/semantics.table`.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use groupcast_policy::compiler::{Change, Compiler};
use groupcast_policy::doc::{Document, Edit, Enforced, Phase, Phases};
use groupcast_policy::ids::{GroupId, HostId, NetworkId, SourceId, TemplateId, WorkloadId};
use groupcast_policy::meaning::{Budget, Meaning, Statement, meaning};
use groupcast_policy::model::{Binding, Event, Group, Labels, Selector, Target, Template, Workload, World, parse_selector};
use groupcast_policy::needs::Documents;
use groupcast_policy::net::{AddressSet, Prefix};
use groupcast_policy::oracle::{End, Verdict};
use groupcast_policy::packet::Payload;
use groupcast_policy::resolve::resolve;
use groupcast_policy::rule::Direction;
use groupcast_policy::text::{parse_rule, prefix_text, protocol_number};
use groupcast_policy::topic::{Scope, Topic};
use groupcast_policy::{check, written};

use super::lines;

static ABSENT: std::sync::LazyLock<Document> = std::sync::LazyLock::new(Document::absent);

#[derive(Default)]
struct Bench {
    before: World,
    world: World,
    compiler: Compiler,
    documents: HashMap<Topic, Document>,
    change: Change,
    revision: u64,
    refusals: Vec<String>,
}

impl Documents for Bench {
    fn document(&self, topic: &Topic) -> Option<&Document> {
        Some(self.documents.get(topic).unwrap_or(&ABSENT))
    }
}

impl Bench {
    fn apply(&mut self, events: &[Event]) {
        self.before = self.world.clone();
        self.refusals = check::change(&self.world, events).iter().map(ToString::to_string).collect();
        events.iter().for_each(|event| self.world.apply(event));
        self.change = self.compiler.apply(events);
        for (topic, edit) in &self.change.edits {
            self.documents.entry(topic.clone()).or_default().apply(edit).unwrap();
        }
    }

    fn end(&self, text: &str) -> End {
        match text.parse::<IpAddr>() {
            Ok(address) => End::Address(address),
            Err(_) => End::Workload(text.parse().unwrap()),
        }
    }

    fn resolved(&self, end: &End, direction: Direction, remote: IpAddr, payload: &Payload) -> bool {
        let End::Workload(id) = end else { return true };
        let Some(entry) = self.world.registry.workloads.get(id) else { return false };
        resolve(&entry.host, self).verdict(id, direction, remote, payload)
    }

    /// `FROM -> TO PAYLOAD [reply] VERDICT [because WORDS]`
    fn ask(&self, number: usize, line: &str) {
        let (question, because) = line.split_once(" because ").map_or((line, None), |(q, b)| (q, Some(b.trim())));
        let words: Vec<&str> = question.split_whitespace().collect();
        let (from, to, what, is_reply, expected) = match words[..] {
            [from, "->", to, what, expected] => (from, to, what, false, expected),
            [from, "->", to, what, "reply", expected] => (from, to, what, true, expected),
            _ => panic!("line {number}: not a question: {line}"),
        };
        let (from, to) = (self.end(from), self.end(to));
        let flow = self.world.flow(from.clone(), to.clone(), payload(what)).unwrap_or_else(|| panic!("line {number}: no flow"));
        let verdict = if is_reply { self.world.reply_verdict(&flow) } else { self.world.verdict(&flow) };
        let words = why(&verdict);
        let found = if verdict.allowed { "allowed" } else { "denied" };
        assert_eq!(found, expected, "line {number}: {line}\n{words}");
        if let Some(because) = because {
            assert!(words.contains(because), "line {number}: {because:?} is not in {words:?}");
        }
        if !is_reply {
            let resolved = self.resolved(&from, Direction::Egress, flow.destination, &flow.payload)
                && self.resolved(&to, Direction::Ingress, flow.source, &flow.payload);
            assert_eq!(resolved, verdict.allowed, "line {number}: {line}: the host decides otherwise; {words}");
        }
    }
}

fn why(verdict: &Verdict) -> String {
    let judgements = [&verdict.egress, &verdict.ingress].into_iter().flatten();
    judgements.map(ToString::to_string).collect::<Vec<_>>().join(" / ")
}

/// `tcp/80`, `icmp/8/0`, `gre`.
fn payload(text: &str) -> Payload {
    let mut parts = text.split('/');
    let name = parts.next().unwrap_or("");
    let mut number = || parts.next().and_then(|p| p.parse::<u16>().ok());
    match (name, number(), number()) {
        ("icmp", Some(kind), Some(code)) => Payload::Icmp { kind: kind as u8, code: code as u8 },
        (name, Some(destination), source) => {
            Payload::Ports { protocol: protocol_number(name).unwrap(), source: source.unwrap_or(40000), destination }
        }
        (name, None, _) => Payload::Other(protocol_number(name).unwrap()),
    }
}

fn phases(text: &str) -> Phases {
    match text {
        "running" => Phases::RUNNING,
        "staging" => Phases::STAGING,
        _ => Phases::BOTH,
    }
}

/// `global`, `space:ID`, `app:ID`, `workload:ID`, `labels:SELECTOR[@SCOPE]`, each with `/running` or `/staging`.
fn binding(text: &str) -> Binding {
    let (target, phase) = match text.rsplit_once('/') {
        Some((target, phase @ ("running" | "staging"))) => (target, phases(phase)),
        _ => (text, Phases::BOTH),
    };
    let scope = |text: &str| match text.split_once(':') {
        Some(("space", id)) => Scope::Space(id.parse().unwrap()),
        Some(("app", id)) => Scope::App(id.parse().unwrap()),
        _ => Scope::Global,
    };
    let target = match target.split_once(':') {
        None => Target::Global,
        Some(("space", id)) => Target::Space(id.parse().unwrap()),
        Some(("app", id)) => Target::App(id.parse().unwrap()),
        Some(("workload", id)) => Target::Workload(id.parse().unwrap()),
        Some((_, selector)) => {
            let (selector, within) = selector.split_once('@').unwrap_or((selector, "global"));
            // Words are split at spaces, so `in` is written `key~in~(a,b)`.
            let requirements = parse_selector(&selector.replace('~', " ")).unwrap();
            Target::Selector(Selector::new(scope(within), requirements))
        }
    };
    Binding { target, phases: phase }
}

fn labels(text: &str) -> Labels {
    let pair = |pair: &str| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        (Labels::key(key).unwrap(), Labels::value(value).unwrap())
    };
    text.split(',').map(pair).collect()
}

fn enforced(text: &str) -> Enforced {
    Enforced { ingress: ["both", "ingress"].contains(&text), egress: ["both", "egress"].contains(&text) }
}

fn statement(bench: &mut Bench, number: usize, line: &str) -> Event {
    let mut words = line.split_whitespace();
    match (words.next(), words.next()) {
        (Some("remove"), Some(what)) => match what.split_once(':') {
            Some(("group", id)) => Event::GroupRemoved(id.parse().unwrap()),
            Some(("template", id)) => Event::TemplateRemoved(id.parse().unwrap()),
            Some(("workload", id)) => {
                let network = words.next().map(|n| n.parse().unwrap());
                let id: WorkloadId = id.parse().unwrap();
                let held = bench.world.registry.workloads.get(&id).map(|w| w.network.clone());
                Event::WorkloadRemoved { id, network: network.or(held).unwrap() }
            }
            _ => panic!("line {number}: {line}"),
        },
        (Some("workload"), Some(id)) => {
            let mut workload = Workload::new(id.parse().unwrap(), "h1".parse().unwrap(), NetworkId::new("net").unwrap());
            for word in words {
                match word.split_once('=').filter(|(key, _)| key.bytes().all(|b| b.is_ascii_lowercase())) {
                    None => workload.addresses.extend(word.split(',').map(|a| prefix_text(a).unwrap())),
                    Some(("host", id)) => workload.host = HostId::new(id).unwrap(),
                    Some(("net", id)) => workload.network = NetworkId::new(id).unwrap(),
                    Some(("groups", ids)) => workload.groups = ids.split(',').map(|id| GroupId::new(id).unwrap()).collect(),
                    Some(("space", id)) => workload.space = Some(id.parse().unwrap()),
                    Some(("app", id)) => workload.app = Some(id.parse().unwrap()),
                    Some(("pairs", list)) => workload.pairs = list.split(',').map(|p| prefix_text(p).unwrap()).collect(),
                    Some(("phase", "staging")) => workload.phase = Phase::Staging,
                    Some(("labels", list)) => workload.labels = labels(list),
                    Some(("template", id)) => workload.template = Some(TemplateId::new(id).unwrap()),
                    Some(("enforced", text)) => workload.enforced = Some(enforced(text)),
                    Some(other) => panic!("line {number}: {other:?}"),
                }
            }
            Event::Workload(Arc::new(workload))
        }
        (Some("template"), Some(id)) => {
            let mut template = Template::new(id.parse().unwrap(), NetworkId::new("net").unwrap());
            for word in words {
                match word.split_once('=') {
                    Some(("labels", list)) => template.labels = labels(list),
                    Some(("own", keys)) => template.own_labels = keys.split(',').map(Arc::from).collect(),
                    Some(("enforced", text)) => template.enforced = Some(enforced(text)),
                    other => panic!("line {number}: {other:?}"),
                }
            }
            Event::template(template)
        }
        (Some("group"), Some(_)) => {
            let (head, rules) = line.split_once(": ").or(line.strip_suffix(':').map(|head| (head, ""))).expect("no colon");
            let mut words = head.split_whitespace().skip(1);
            let mut group = Group::new(words.next().unwrap().parse().unwrap());
            for word in words {
                match word.split_once('=') {
                    None if word == "stateless" => group.stateful = false,
                    None if word == "internet" => group.internet_member = true,
                    Some(("on", target)) => group.bindings.push(binding(target)),
                    Some(("members", list)) => group.members = list.split(',').map(|p| prefix_text(p).unwrap()).collect(),
                    other => panic!("line {number}: {other:?}"),
                }
            }
            let rule = |text: &str| parse_rule(text).unwrap_or_else(|e| panic!("line {number}: {text}: {e:?}")).into();
            group.rules = rules.split(';').map(str::trim).filter(|r| !r.is_empty()).map(rule).collect();
            bench.revision += 1;
            Event::Group { revision: bench.revision, group: Arc::new(group) }
        }
        _ => panic!("line {number}: {line}"),
    }
}

fn summary(topic: &Topic, edit: &Edit) -> String {
    let mut parts = vec![topic.to_string()];
    match edit {
        Edit::Scope { put, remove } => {
            parts.extend(put.iter().map(|(group, _)| format!("+{group}")));
            parts.extend(remove.iter().map(|group| format!("-{group}")));
        }
        Edit::Host { put, remove } => {
            parts.extend(put.iter().map(|placement| format!("+{}", placement.workload)));
            parts.extend(remove.iter().map(|workload| format!("-{workload}")));
        }
        Edit::Rules { put, remove, .. } => parts.push(format!("+{} -{}", put.len(), remove.len())),
        Edit::Members { add, remove } => {
            parts.extend(add.iter().map(|member| format!("+{member}")));
            parts.extend(remove.iter().map(|member| format!("-{member}")));
            if add.is_empty() && remove.is_empty() {
                parts.push("empty".into());
            }
        }
        Edit::Retire => parts.push("retired".into()),
        Edit::Reset => parts.push("reset".into()),
    }
    parts.join(" ")
}

fn meant(old: &World, new: &World) -> Meaning {
    meaning(old, new, &mut Budget::new(&|| true)).expect("within the budget")
}

fn said(list: &[Statement]) -> Vec<String> {
    let mut texts: Vec<String> = list.iter().map(|s| s.to_string().split(" (for").next().unwrap_or("").to_string()).collect();
    texts.sort();
    texts
}

pub fn run(table: &str) {
    let mut bench = Bench::default();
    let mut section = String::new();
    // What a list section must hold, exactly.
    let mut list: Vec<String> = Vec::new();
    let mut batch: Vec<(usize, String)> = Vec::new();
    let closing = [(table.lines().count() + 1, "end")];
    for (number, line) in lines(table).chain(closing) {
        let is_head = !line.starts_with(' ');
        if !is_head {
            let line = line.trim();
            match section.as_str() {
                "world" | "change" => batch.push((number, line.to_string())),
                "check" => bench.ask(number, line),
                _ => list.push(line.to_string()),
            }
            continue;
        }
        match section.as_str() {
            "world" | "change" => {
                let lines = std::mem::take(&mut batch);
                let events: Vec<Event> = lines.iter().map(|(number, line)| statement(&mut bench, *number, line)).collect();
                bench.apply(&events);
            }
            "" | "check" => {}
            other => {
                let found: Vec<String> = match other {
                    "edits" => {
                        let sorted: BTreeMap<&Topic, &Edit> =
                            bench.change.edits.iter().map(|(topic, edit)| (topic, edit)).collect();
                        sorted.into_iter().map(|(topic, edit)| summary(topic, edit)).collect()
                    }
                    "gained" => said(&meant(&bench.before, &bench.world).gained),
                    "lost" => said(&meant(&bench.before, &bench.world).lost),
                    "hosts" => meant(&bench.before, &bench.world).hosts.iter().map(ToString::to_string).collect(),
                    "refused" => bench.refusals.clone(),
                    "mixed" => check::mixed_workloads(&bench.world).iter().map(ToString::to_string).collect(),
                    other => panic!("line {number}: no section {other}"),
                };
                let expected = std::mem::take(&mut list);
                if other == "refused" {
                    assert_eq!(found.len(), expected.len(), "before line {number}: {found:?}");
                    let all = found.iter().zip(&expected).all(|(f, e)| f.contains(e.as_str()));
                    assert!(all, "before line {number}: {found:?} is not {expected:?}");
                } else {
                    assert_eq!(found, expected, "{other} before line {number}");
                }
            }
        }
        section = line.trim().to_string();
        if section == "world" {
            bench = Bench::default();
        }
    }
}

/// The seed's example: the answer of the compact call and of the one it replaces must decide every packet alike.
pub fn run_neutron_example(json: &str) {
    let nodes = written::nodes(written::Format::Json, json).unwrap();
    let example = &nodes[0];
    let source = SourceId::new("n").unwrap();
    let list = |node: Option<&written::Node>| match node {
        Some(written::Node::Map(entries)) => entries.clone(),
        _ => panic!("a mapping is missing"),
    };
    let texts = |node: Option<&written::Node>| match node {
        Some(written::Node::List(items)) => items.iter().filter_map(|i| i.text().map(str::to_string)).collect::<Vec<_>>(),
        _ => Vec::new(),
    };
    let port = |id: &str, address: &str, groups: &[String]| {
        let mut workload =
            Workload::new(WorkloadId::new(id).unwrap(), HostId::new("h1").unwrap(), NetworkId::new("net").unwrap());
        workload.addresses = [prefix_text(address).unwrap()].into();
        workload.groups = groups.iter().map(|g| GroupId::new(g).unwrap()).collect();
        Event::workload(workload)
    };

    let mut compact = Bench::default();
    let mut expanded = Bench::default();
    let mut events = Vec::new();
    let member_ips = example.get("compact").and_then(|c| c.get("security_group_member_ips"));
    for (id, body) in list(member_ips) {
        let rules = example.get("compact").and_then(|c| c.get("security_groups")).and_then(|g| g.get(&id));
        let mut group = Group::new(GroupId::new(&format!("n-{id}")).unwrap());
        if let Some(written::Node::List(rules)) = rules.and_then(|g| g.get("rules")) {
            group.rules = rules.iter().map(|rule| written::neutron::rule(&source, rule).unwrap()).collect();
        }
        for family in ["ipv4", "ipv6"] {
            group.members.extend(texts(body.get(family)).iter().map(|ip| prefix_text(ip).unwrap()));
        }
        events.push(Event::group(group));
    }
    let mut addresses: BTreeMap<String, String> = BTreeMap::new();
    for (id, device) in list(example.get("compact").and_then(|c| c.get("devices"))) {
        let address = texts(device.get("fixed_ips"))[0].clone();
        let groups: Vec<String> = texts(device.get("security_groups")).iter().map(|g| format!("n-{g}")).collect();
        events.push(port(&id, &address, &groups));
        addresses.insert(id, address);
    }
    compact.apply(&events);

    let mut events = Vec::new();
    for (id, device) in list(example.get("expanded")) {
        let mut group = Group::new(GroupId::new(&format!("all-of-{id}")).unwrap());
        let Some(written::Node::List(rules)) = device.get("security_group_rules") else { panic!("no rules") };
        for rule in rules {
            // The old answer names the source prefix beside the group it was expanded from.
            let written::Node::Map(fields) = rule else { panic!("no rule") };
            let mut fields = fields.clone();
            fields.retain(|(key, _)| key != "remote_group_id" && key != "security_group_id");
            fields.iter_mut().filter(|(key, _)| key == "source_ip_prefix").for_each(|f| f.0 = "remote_ip_prefix".into());
            group.rules.push(written::neutron::rule(&source, &written::Node::Map(fields)).unwrap());
        }
        let name = group.id.to_string();
        events.push(Event::group(group));
        events.push(port(&id, &addresses[&id], &[name]));
    }
    expanded.apply(&events);

    // Exact over all packets: between the two policies nothing is gained or lost.
    let (mut old, mut new) = (compact.world.clone(), expanded.world.clone());
    // The two worlds name their groups differently; the meaning looks at packets only.
    // The expanded call leaves a device's own address out, from which it receives nothing anyway.
    let own = |id: &WorkloadId| -> IpAddr { addresses[id.as_str()].parse().unwrap() };
    let difference = meant(&old, &new);
    for statement in difference.gained.iter().chain(&difference.lost) {
        for id in statement.workloads.iter() {
            let only_own = AddressSet::from_prefixes([Prefix::host(own(id))]);
            assert_eq!(statement.addresses, only_own, "{statement}");
        }
    }
    // And the oracle agrees where it is asked.
    let mut asked = 0;
    for id in addresses.keys().map(|id| WorkloadId::new(id).unwrap()) {
        for host in 0..=255u8 {
            for net in [11u8, 33, 34] {
                for what in ["tcp/22", "udp/53", "icmp/8/0", "icmp/3/1", "gre"] {
                    for direction in [Direction::Ingress, Direction::Egress] {
                        let remote = IpAddr::from([192, 168, net, host]);
                        if remote == own(&id) {
                            continue;
                        }
                        let one = compact.world.judge(&id, direction, remote, &payload(what));
                        let two = expanded.world.judge(&id, direction, remote, &payload(what));
                        assert_eq!(one.allowed, two.allowed, "{one} / {two}");
                        let end = End::Workload(id.clone());
                        assert_eq!(compact.resolved(&end, direction, remote, &payload(what)), one.allowed);
                        assert_eq!(expanded.resolved(&end, direction, remote, &payload(what)), one.allowed);
                        asked += 1;
                    }
                }
            }
        }
    }
    assert_eq!(asked, 2 * (256 * 3 - 1) * 5 * 2);
    // The comparison has teeth: one member less is seen.
    let mut events = old.events();
    for event in &mut events {
        if let Event::Group { group, .. } = event {
            let group = Arc::make_mut(group);
            if let Some(first) = group.members.first().copied() {
                group.members.remove(&first);
            }
        }
    }
    events.iter().for_each(|event| old.apply(event));
    std::mem::swap(&mut old, &mut new);
    assert!(!meant(&old, &new).is_empty());
}
