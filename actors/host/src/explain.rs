//! `groupcast-agent explain`: what the policy in force here says of a flow, and whether the kernel does it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use groupcast_enforce::settings::Attachments;
use groupcast_policy::doc::Placement;
use groupcast_policy::ids::{HostId, WorkloadId};
use groupcast_policy::packet::{ICMP, ICMPV6, Payload, has_ports};
use groupcast_policy::resolve::{HostPolicy, Told, Why, resolve};
use groupcast_policy::rule::{Direction, Remote};
use groupcast_policy::text::protocol_name;
use groupcast_policy::topic::Topic;

use crate::report::{Explanation, Judged};
use crate::state::Replica;

const ECHO_REQUEST_V4: u16 = 8;
const ECHO_REQUEST_V6: u8 = 128;

/// `tcp/443`, `udp/53`, `icmp/8/0`, `gre`, `47`.
pub fn parse_payload(text: &str) -> Result<Payload, String> {
    let wrong = || format!("{text:?} is not traffic: write tcp/443, udp/53, icmp/8/0, or a protocol by name or number");
    let mut parts = text.split('/');
    let name = parts.next().unwrap_or_default();
    let number = |part: Option<&str>| part.map(str::parse::<u16>).transpose().map_err(|_| wrong());
    let (first, second) = (number(parts.next())?, number(parts.next())?);
    // ICMP is the one of the packet's own family, and so not in the list of protocols by number.
    let icmp = (name == "icmp").then_some(ICMP);
    let by_name = || (0..=u8::MAX).find(|number| protocol_name(*number) == Some(name));
    let protocol = icmp.or_else(by_name).or_else(|| name.parse().ok()).ok_or_else(wrong)?;
    let byte = |value: u16| u8::try_from(value).map_err(|_| wrong());
    match (protocol, first, second, parts.next()) {
        (ICMP | ICMPV6, kind, code, None) => {
            Ok(Payload::Icmp { kind: byte(kind.unwrap_or(ECHO_REQUEST_V4))?, code: byte(code.unwrap_or_default())? })
        }
        (protocol, Some(destination), None, None) if has_ports(protocol) => {
            const SOME_PORT: u16 = 40_000;
            Ok(Payload::Ports { protocol, source: SOME_PORT, destination })
        }
        (protocol, None, None, None) if !has_ports(protocol) => Ok(Payload::Other(protocol)),
        _ => Err(wrong()),
    }
}

/// One end as this host knows it.
struct End<'p> {
    workload: Option<WorkloadId>,
    addresses: Vec<IpAddr>,
    placement: Option<&'p Placement>,
}

fn end<'p>(policy: &HostPolicy<'p>, text: &str) -> Result<End<'p>, String> {
    if let Ok(address) = text.parse::<IpAddr>() {
        let owner = policy.workloads.iter().find(|(_, of)| of.placement.addresses.iter().any(|own| own.contains(address)));
        let (workload, placement) = owner.map(|(id, of)| (id.clone(), of.placement)).unzip();
        return Ok(End { workload, addresses: vec![address], placement });
    }
    let id = WorkloadId::new(text).map_err(|error| format!("{text:?} is neither an address nor a workload: {error}"))?;
    let of = policy.workloads.get(&id).ok_or_else(|| {
        format!("workload {id} is not on this host, which knows no addresses of others: give its address instead")
    })?;
    let addresses = of.placement.addresses.iter().map(|prefix| prefix.net().addr()).collect();
    Ok(End { workload: Some(id), addresses, placement: Some(of.placement) })
}

/// What explains, beside the policy: where workloads are attached, and what keeps the kernel from doing as the policy says.
pub struct Situation<'s> {
    pub host: &'s HostId,
    pub documents: &'s Replica,
    pub attachments: &'s Attachments,
    /// Of the host as a whole; empty: the kernel does as the policy says.
    pub hindrances: Vec<String>,
    pub refused: BTreeMap<WorkloadId, String>,
}

pub fn explain(situation: &Situation<'_>, from: &str, to: &str, traffic: &str) -> Result<Explanation, String> {
    let payload = parse_payload(traffic)?;
    let policy = resolve(situation.host, situation.documents);
    let (from, to) = (end(&policy, from)?, end(&policy, to)?);
    let pairs = from.addresses.iter().flat_map(|source| to.addresses.iter().map(move |destination| (*source, *destination)));
    let (source, destination) = pairs
        .filter(|(source, destination)| source.is_ipv4() == destination.is_ipv4())
        .min()
        .ok_or("the two ends have no addresses of one family")?;
    // An echo request that is not given by its number is the family's own.
    let payload = match payload {
        Payload::Icmp { .. } if !traffic.contains('/') && source.is_ipv6() => Payload::Icmp { kind: ECHO_REQUEST_V6, code: 0 },
        payload => payload,
    };
    let mut notes = situation.hindrances.clone();
    let mut judgements = Vec::new();
    for (end, direction, remote) in [(&from, Direction::Egress, destination), (&to, Direction::Ingress, source)] {
        let (Some(workload), Some(placement)) = (&end.workload, end.placement) else {
            let side = if direction == Direction::Egress { "sender" } else { "receiver" };
            notes.push(format!("the {side} is no workload of this host: it is not judged here"));
            continue;
        };
        if let Some(why) = situation.refused.get(workload) {
            notes.push(why.clone());
        } else {
            match situation.attachments.get(workload) {
                None => notes.push(format!("workload {workload} is not attached: nothing of it passes")),
                Some(attached) if attached.audit => {
                    notes.push(format!("workload {workload} is audited: what is denied is logged and passes"));
                }
                Some(_) => {}
            }
        }
        let told = policy.explain(workload, direction, remote, &payload);
        judgements.push(judged(situation.host, placement, &told));
    }
    // The words about an end that is elsewhere are no hindrance.
    let enforced = notes.iter().all(|note| note.ends_with("it is not judged here"));
    Ok(Explanation { allowed: judgements.iter().all(|judged| judged.allowed), enforced, judgements, notes })
}

fn judged(host: &HostId, placement: &Placement, told: &Told) -> Judged {
    let mut topics = vec![Topic::Host(host.clone())];
    let (mut group, mut rule, mut rule_key, mut scope) = (None, None, None, None);
    if let Why::Rule(deciding) = &told.why {
        topics.extend(deciding.bound_by.clone().map(Topic::Scope));
        topics.push(Topic::Rules(deciding.group.clone()));
        if let Remote::Group(named) = &deciding.rule.remote {
            topics.push(Topic::Members(named.clone()));
        }
        group = Some(deciding.group.to_string());
        rule = Some(deciding.rule.to_string());
        rule_key = Some(format!("{}/{}", deciding.group, deciding.rule.key()));
        scope = Some(deciding.scope.clone());
    }
    Judged {
        workload: placement.workload.to_string(),
        direction: told.direction.to_string(),
        allowed: told.allowed,
        words: told.to_string(),
        group,
        rule,
        rule_key,
        scope,
        topics: topics.into_iter().map(|topic| (topic.to_string(), None)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use groupcast_enforce::interface::Interface;
    use groupcast_enforce::settings::{Attached, Attachment};
    use groupcast_enforce::trial::{self, Stage};
    use groupcast_policy::doc::Phases;
    use groupcast_policy::model::{Binding, Event, Group, GroupRule, Target, Workload};
    use groupcast_policy::needs::Documents;
    use groupcast_policy::net::{Family, Prefix};
    use groupcast_policy::text::parse_rule;

    use super::*;

    #[test]
    fn traffic_is_written_as_it_is_printed() {
        for text in ["tcp/443", "udp/53", "icmp/8/0", "sctp/7", "gre", "200"] {
            assert_eq!(parse_payload(text).unwrap().to_string(), text);
        }
        for bad in ["", "tcp", "tcp/0x1", "tcp/65536", "tcp/1/2", "icmp/256", "icmp/1/2/3", "nonsense/1", "gre/1"] {
            assert!(parse_payload(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn group_rule_scope_and_hindrances_are_named() {
        let mut stage = Stage::default();
        let rules = ["ingress tcp 443 from group:g1", "deny ingress tcp 22 from any", "egress any to any"];
        let rules = rules.iter().map(|text| GroupRule::from(parse_rule(text).unwrap())).collect();
        let bindings = vec![Binding { target: Target::Global, phases: Phases::BOTH }];
        let group = Group { rules, bindings, ..Group::new(trial::group_id(0)) };
        let members: BTreeSet<Prefix> = [Prefix::host("192.0.2.1".parse().unwrap())].into();
        let addresses = [Prefix::host(trial::address(0, Family::V4))].into();
        let workload = Workload { addresses, ..Workload::new(trial::workload_id(0), trial::host(), "n0".parse().unwrap()) };
        let events =
            [Event::group(group), Event::group(Group { members, ..Group::new(trial::group_id(1)) }), Event::workload(workload)];
        let topics: Vec<Topic> = stage.change(&events).into_iter().map(|(topic, _)| topic).collect();
        let documents: Replica = topics.into_iter().filter_map(|t| Some((t.clone(), stage.document(&t)?.clone()))).collect();
        let interface = Attachment::Interface(Interface::new("gcw0").unwrap());
        let attached = |audit| Attachments::from([(trial::workload_id(0), Attached { attachment: interface.clone(), audit })]);
        let ask = |attachments: &Attachments, hindrances: &[&str], from: &str, to: &str, traffic: &str| {
            let hindrances = hindrances.iter().map(ToString::to_string).collect();
            let refused = BTreeMap::new();
            explain(
                &Situation { host: &trial::host(), documents: &documents, attachments, hindrances, refused },
                from,
                to,
                traffic,
            )
        };
        let told = ask(&attached(false), &[], "192.0.2.1", "w0", "tcp/443").unwrap();
        assert!(told.allowed && told.enforced && told.judgements.len() == 1, "{told:?}");
        let judged = &told.judgements[0];
        assert_eq!((judged.group.as_deref(), judged.scope.as_deref()), (Some("g0"), Some("global")));
        assert_eq!(judged.rule.as_deref(), Some("ingress tcp 443 from group:g1"));
        let topics: Vec<&str> = judged.topics.keys().map(String::as_str).collect();
        assert_eq!(topics, ["host.h0", "members.g1", "rules.g0", "scope.global"]);
        // By its own address it is the same workload; and what is denied, and by nothing allowed.
        let own = trial::address(0, Family::V4).to_string();
        assert!(!ask(&attached(false), &[], "192.0.2.1", &own, "tcp/22").unwrap().allowed);
        assert!(!ask(&attached(false), &[], "192.0.2.9", "w0", "tcp/443").unwrap().allowed);
        let out = ask(&attached(false), &[], "w0", "192.0.2.9", "icmp").unwrap();
        assert!(out.allowed && out.judgements[0].direction == "egress");
        // What hinders is said.
        for (attachments, hindrances) in [(attached(true), &[][..]), (Attachments::new(), &[]), (attached(false), &["frozen"])] {
            let told = ask(&attachments, hindrances, "192.0.2.1", "w0", "tcp/443").unwrap();
            assert!(told.allowed && !told.enforced && !told.notes.is_empty(), "{told:?}");
        }
        assert!(ask(&attached(false), &[], "w7", "w0", "tcp/1").unwrap_err().contains("not on this host"));
        assert!(ask(&attached(false), &[], "2001:db8::1", "w0", "tcp/1").unwrap_err().contains("family"));
    }
}
