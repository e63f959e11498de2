//! Whether a host may register what it asks for: its template says what a workload of the kind may be, and its grant where its
//! addresses may lie.

use groupcast_messages::{Register, RegisterWorkload};
use groupcast_policy::model::{Labels, Template, Workload};

use super::grant::Grant;

/// The workloads as they are to be registered, or what speaks against one of them.
pub fn admit(grant: &Grant, register: &Register, template: &Template) -> Result<Vec<Workload>, String> {
    let host = &grant.host;
    if !template.identities.contains(host) {
        return Err(format!("template {} may not be used by host {host}: add the host to its identities", template.id));
    }
    register.workloads.iter().map(|asked| one(grant, asked, template)).collect()
}

/// Whether a host may still have what it has registered, by what it is granted and its template says now.
pub fn stands(grant: &Grant, template: &Template, workload: &Workload) -> Result<(), String> {
    let asked = RegisterWorkload {
        workload: workload.id.clone(),
        network: workload.network.clone(),
        addresses: workload.addresses.clone(),
        labels: workload.labels.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect(),
        space: workload.space.clone(),
        app: workload.app.clone(),
        phase: workload.phase,
        incarnation: Some(workload.incarnation),
    };
    admit(grant, &Register { boot: 0, template: Some(template.id.to_string()), workloads: vec![asked] }, template).map(drop)
}

fn one(grant: &Grant, asked: &RegisterWorkload, template: &Template) -> Result<Workload, String> {
    let host = &grant.host;
    let refuse = |what: String| Err(format!("workload {}: {what} is not allowed by template {}", asked.workload, template.id));
    if asked.network != template.network {
        return refuse(format!("network {}", asked.network));
    }
    if let Some(space) = asked.space.as_ref().filter(|space| !template.spaces.contains(*space)) {
        return refuse(format!("space {space}"));
    }
    if let Some(app) = asked.app.as_ref().filter(|app| !template.apps.contains(*app)) {
        return refuse(format!("app {app}"));
    }
    if !template.phases.contains(asked.phase) {
        return refuse(format!("phase {:?}", asked.phase));
    }
    if let Some(address) = asked.addresses.iter().find(|address| !address.is_host() && !template.wide_prefixes) {
        let id = &asked.workload;
        return Err(format!(
            "workload {id}: {address} is wider than one address, which template {} does not allow: set wide_prefixes: true there",
            template.id
        ));
    }
    if let Some(address) = asked.addresses.iter().find(|address| !template.prefixes.iter().any(|wide| covers(*wide, **address))) {
        return refuse(format!("address {address}"));
    }
    if let Some(address) = asked.addresses.iter().find(|address| !grant.covers(**address)) {
        let id = &asked.workload;
        return Err(format!(
            "workload {id}: address {address} is in no network granted to host {host}: see `groupcast host add`"
        ));
    }
    let mut labels = Vec::with_capacity(asked.labels.len());
    for (key, value) in &asked.labels {
        match (Labels::key(key), Labels::value(value)) {
            (Ok(key), Ok(value)) if template.own_labels.contains(&key) => labels.push((key, value)),
            (Ok(key), Ok(_)) => return refuse(format!("label {key}")),
            (key, value) => {
                let error = [key.err(), value.err()].into_iter().flatten().next().map(|e| e.to_string()).unwrap_or_default();
                return Err(format!("workload {}: {error}", asked.workload));
            }
        }
    }
    let mut workload = Workload::new(asked.workload.clone(), host.clone(), asked.network.clone());
    workload.addresses = asked.addresses.clone();
    workload.labels = labels.into_iter().collect();
    (workload.space, workload.app, workload.phase) = (asked.space.clone(), asked.app.clone(), asked.phase);
    workload.template = Some(template.id.clone());
    Ok(workload)
}

/// Whether one prefix lies within another.
pub fn covers(wide: groupcast_policy::net::Prefix, narrow: groupcast_policy::net::Prefix) -> bool {
    wide.family() == narrow.family() && wide.len() <= narrow.len() && wide.contains(narrow.net().addr())
}

#[cfg(test)]
mod tests {
    use super::*;
    use groupcast_policy::doc::Phase;
    use groupcast_policy::net::Prefix;
    use std::collections::{BTreeMap, BTreeSet};

    fn asked() -> RegisterWorkload {
        RegisterWorkload {
            workload: "w".parse().unwrap(),
            network: "n".parse().unwrap(),
            addresses: BTreeSet::from([Prefix::v4(0x0a000001, 32).unwrap()]),
            labels: BTreeMap::from([("tier".to_owned(), "web".to_owned())]),
            space: Some("shop".parse().unwrap()),
            app: None,
            phase: Phase::Running,
            incarnation: None,
        }
    }

    fn template() -> Template {
        let mut template = Template::new("t".parse().unwrap(), "n".parse().unwrap());
        template.identities.insert("h".parse().unwrap());
        template.prefixes.insert(Prefix::v4(0x0a000000, 24).unwrap());
        template.spaces.insert("shop".parse().unwrap());
        template.own_labels.insert("tier".into());
        template
    }

    #[test]
    fn a_template_says_what_may_be() {
        let ask = |host: &str, workload: RegisterWorkload| {
            let register = Register { boot: 1, template: Some("t".to_owned()), workloads: vec![workload] };
            let grant = Grant::new(host.parse().unwrap(), vec![Prefix::v4(0x0a000000, 25).unwrap()]);
            admit(&grant, &register, &template())
        };
        let workload = &ask("h", asked()).unwrap()[0];
        assert_eq!((workload.host.as_str(), workload.labels.len(), workload.template.is_some()), ("h", 1, true));
        let at = |bits| RegisterWorkload { addresses: [Prefix::v4(bits, 32).unwrap()].into(), ..asked() };
        let wide = |len| RegisterWorkload { addresses: [Prefix::v4(0x0a000000, len).unwrap()].into(), ..asked() };
        let rows: [(&str, RegisterWorkload, &str); 11] = [
            ("h", wide(31), "10.0.0.0/31 is wider than one address"),
            ("h", wide(25), "10.0.0.0/25 is wider than one address"),
            ("h", at(0x0a000080), "in no network granted to host h"),
            ("h", at(0x0a000100), "address 10.0.1.0/32 is not allowed by template"),
            ("other", asked(), "may not be used by host other"),
            ("h", RegisterWorkload { network: "m".parse().unwrap(), ..asked() }, "network m"),
            ("h", RegisterWorkload { space: Some("bank".parse().unwrap()), ..asked() }, "space bank"),
            ("h", RegisterWorkload { app: Some("a".parse().unwrap()), ..asked() }, "app a"),
            ("h", RegisterWorkload { phase: Phase::Staging, ..asked() }, "phase Staging"),
            ("h", wide(8), "10.0.0.0/8 is wider than one address"),
            ("h", RegisterWorkload { labels: [("role".to_owned(), "admin".to_owned())].into(), ..asked() }, "label role"),
        ];
        for (host, workload, words) in rows {
            let refused = ask(host, workload).unwrap_err();
            assert!(refused.contains(words), "{refused}");
        }
        // Where wide ones are allowed they must lie in what template and grant allow all the same.
        let template = Template { wide_prefixes: true, ..template() };
        let grant = Grant::new("h".parse().unwrap(), vec![Prefix::v4(0x0a000000, 25).unwrap()]);
        let ask =
            |workload| admit(&grant, &Register { boot: 1, template: Some("t".to_owned()), workloads: vec![workload] }, &template);
        assert!(ask(wide(31)).is_ok() && ask(wide(25)).is_ok());
        assert!(ask(wide(24)).unwrap_err().contains("in no network granted"));
        assert!(ask(wide(8)).unwrap_err().contains("address 10.0.0.0/8 is not allowed by template"));
    }
}
