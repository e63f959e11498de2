//! Neutron's security groups, rules, address groups and ports, and Keystone's tokens.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde_json::{Map, Value, json};

use super::{Call, Calls, Fake, Fault, Reply, Tokens, Upsets, uuid};
use crate::random::Random;

#[derive(Debug, Clone, serde::Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Edit {
    CreateGroup(String),
    DeleteGroup(String),
    TouchGroup(String),
    CreatePort(String),
    DeletePort(String),
}

/// What a server answers to a marker that is not there any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Vanished {
    /// The first page again.
    #[default]
    Begins,
    NotFound,
    /// A page without items.
    Ends,
}

/// The lists, by their names in paths.
const LISTS: [(&str, &str, &str); 4] = [
    ("security-groups", "security_groups", "security_group"),
    ("security-group-rules", "security_group_rules", "security_group_rule"),
    ("address-groups", "address_groups", "address_group"),
    ("ports", "ports", "port"),
];

pub struct Neutron {
    /// Objects of each list by their ids.
    pub objects: BTreeMap<&'static str, BTreeMap<String, Value>>,
    pub upsets: Upsets<Edit>,
    pub tokens: Tokens,
    pub calls: Calls,
    /// Name and password of the user; id and secret of the application credential.
    pub user: (String, String),
    pub application: (String, String),
    /// Whoever asks has the role that sees everything; without it `binding:host_id` is left out.
    pub admin: bool,
    /// `pagination_max_limit`.
    pub limit_max: usize,
    pub vanished: Vanished,
    /// Whether there is the extension.
    pub address_groups: bool,
    since: Duration,
    random: Random,
}

impl Default for Neutron {
    fn default() -> Self {
        Self {
            objects: LISTS.iter().map(|(path, ..)| (*path, BTreeMap::new())).collect(),
            upsets: Upsets::default(),
            tokens: Tokens::default(),
            calls: Calls::default(),
            user: ("groupcast".into(), "secret".into()),
            application: ("application".into(), "secret".into()),
            admin: true,
            limit_max: usize::MAX,
            vanished: Vanished::default(),
            address_groups: true,
            since: Duration::ZERO,
            random: Random::new(2),
        }
    }
}

fn error(status: u16, kind: &str, message: &str) -> Reply {
    Reply::json(status, &json!({"NeutronError": {"type": kind, "message": message, "detail": ""}}))
}

fn not_found(path: &str) -> Reply {
    error(404, "NotFound", &format!("{path} could not be found."))
}

impl Neutron {
    fn list_of(&mut self, path: &str) -> Option<&mut BTreeMap<String, Value>> {
        self.objects.get_mut(path)
    }

    pub fn all(&self, path: &str) -> impl Iterator<Item = &Value> {
        self.objects.get(path).into_iter().flat_map(BTreeMap::values)
    }

    fn named(&self, path: &str, name: &str) -> Option<String> {
        self.all(path).find(|object| object["name"] == name).and_then(|object| object["id"].as_str()).map(str::to_owned)
    }

    /// A security group with one rule; its id.
    pub fn create_group(&mut self, name: &str) -> String {
        let id = self.insert("security-groups", json!({"name": name, "stateful": true, "project_id": "p1"}));
        self.add_rule(
            &id,
            json!({"direction": "ingress", "ethertype": "IPv4", "protocol": "tcp", "port_range_min": 443, "port_range_max": 443}),
        );
        id
    }

    pub fn add_rule(&mut self, group: &str, mut rule: Value) -> String {
        rule["security_group_id"] = json!(group);
        let id = self.insert("security-group-rules", rule);
        self.bump("security-groups", group);
        id
    }

    /// A port bound to a host, with an address of its own and these groups; its id.
    pub fn create_port(&mut self, name: &str, host: &str, address: &str, groups: &[&str]) -> String {
        self.insert(
            "ports",
            json!({
                "name": name, "network_id": "net1", "project_id": "p1", "security_groups": groups,
                "fixed_ips": [{"subnet_id": "s1", "ip_address": address}], "allowed_address_pairs": [], "device_owner": "compute:nova",
                "port_security_enabled": true, "binding:host_id": host,
            }),
        )
    }

    pub fn insert(&mut self, path: &'static str, mut object: Value) -> String {
        let id = uuid(&mut self.random);
        object["id"] = json!(id);
        object["revision_number"] = json!(1);
        for (field, default) in [("description", json!("")), ("project_id", json!("p1"))] {
            if object[field].is_null() {
                object[field] = default;
            }
        }
        object["tenant_id"] = object["project_id"].clone();
        if let Some(list) = self.list_of(path) {
            list.insert(id.clone(), object);
        }
        id
    }

    fn bump(&mut self, path: &str, id: &str) {
        if let Some(object) = self.list_of(path).and_then(|list| list.get_mut(id)) {
            object["revision_number"] = json!(object["revision_number"].as_i64().unwrap_or(0) + 1);
        }
    }

    pub fn update(&mut self, path: &'static str, id: &str, fields: &Value) {
        if let (Some(object), Some(fields)) = (self.list_of(path).and_then(|list| list.get_mut(id)), fields.as_object()) {
            fields.iter().for_each(|(key, value)| object[key] = value.clone());
        }
        self.bump(path, id);
    }

    pub fn delete(&mut self, path: &'static str, id: &str) -> bool {
        if path == "security-groups"
            && let Some(rules) = self.list_of("security-group-rules")
        {
            rules.retain(|_, rule| rule["security_group_id"] != id);
        }
        let gone = self.list_of(path).and_then(|list| list.remove(id));
        if path == "security-group-rules"
            && let Some(group) = gone.as_ref().and_then(|rule| rule["security_group_id"].as_str())
        {
            self.bump("security-groups", group);
        }
        gone.is_some()
    }

    pub fn apply(&mut self, edit: &Edit) {
        match edit {
            Edit::CreateGroup(name) => drop(self.create_group(name)),
            Edit::DeleteGroup(name) => {
                if let Some(id) = self.named("security-groups", name) {
                    self.delete("security-groups", &id);
                }
            }
            Edit::TouchGroup(name) => {
                if let Some(id) = self.named("security-groups", name) {
                    let port = self.random.next() % 60_000 + 1;
                    self.add_rule(&id, json!({"direction": "egress", "ethertype": "IPv4", "protocol": "udp", "port_range_min": port, "port_range_max": port}));
                }
            }
            Edit::CreatePort(name) => {
                let address =
                    format!("10.{}.{}.{}", self.random.next() % 250, self.random.next() % 250, self.random.next() % 250);
                let groups: Vec<String> =
                    self.all("security-groups").take(2).filter_map(|g| g["id"].as_str().map(str::to_owned)).collect();
                let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
                let host = format!("host{}", self.random.next() % 3);
                self.create_port(name, &host, &address, &groups);
            }
            Edit::DeletePort(name) => {
                if let Some(id) = self.named("ports", name) {
                    self.delete("ports", &id);
                }
            }
        }
    }

    /// As the API shows it: a group with its rules.
    fn shown(&self, path: &str, object: &Value) -> Value {
        let mut shown = object.clone();
        if let Some(fields) = shown.as_object_mut().filter(|_| path == "ports" && !self.admin) {
            fields.remove("binding:host_id");
        }
        if path == "security-groups" {
            let rules = self.all("security-group-rules").filter(|rule| rule["security_group_id"] == object["id"]);
            shown["security_group_rules"] = rules.cloned().collect();
        }
        shown
    }

    fn list(
        &self,
        call: &Call,
        (path, collection, _): (&'static str, &'static str, &'static str),
        fault: Option<&Fault>,
    ) -> Reply {
        let all =
            |key: &str| -> Vec<&str> { call.query.iter().filter(|(known, _)| known == key).map(|(_, v)| v.as_str()).collect() };
        let (ids, names, fields) = (all("id"), all("name"), all("fields"));
        let limit = call.asked("limit").and_then(|text| text.parse::<usize>().ok()).filter(|limit| *limit > 0);
        let limit = limit.or(Some(usize::MAX)).map(|limit| limit.min(self.limit_max)).filter(|limit| *limit < usize::MAX);
        let Some(list) = self.objects.get(path) else { return not_found(path) };
        let wanted = |object: &&Value| {
            let is = |list: &[&str], key: &str| list.is_empty() || object[key].as_str().is_some_and(|text| list.contains(&text));
            is(&ids, "id") && is(&names, "name")
        };
        let gone = call.asked("marker").is_some_and(|marker| !list.contains_key(marker));
        match self.vanished {
            Vanished::NotFound if gone => return not_found("marker"),
            Vanished::Ends if gone => return Reply::json(200, &json!({ collection: [] })),
            _ => {}
        }
        // An unknown marker answers the first page again.
        let marker = call.asked("marker").filter(|marker| list.contains_key(*marker) && fault != Some(&Fault::Repeat));
        let after = list.iter().filter(|(id, _)| marker.is_none_or(|marker| id.as_str() > marker)).map(|(_, object)| object);
        let shown_max = if fault == Some(&Fault::Empty) { 0 } else { limit.unwrap_or(usize::MAX) };
        let page: Vec<&Value> = after.filter(wanted).take(shown_max).collect();
        let mut links = Vec::new();
        // A full page says that there is another, also when it is the last.
        if let (Some(limit), Some(last)) = (limit, page.last())
            && page.len() == limit
        {
            let href = format!(
                "http://{}/v2.0/{path}?limit={limit}&marker={}",
                call.header("host"),
                last["id"].as_str().unwrap_or_default()
            );
            links.push(json!({"rel": "next", "href": href}));
        }
        let items: Vec<Value> = page
            .into_iter()
            .map(|object| self.shown(path, object))
            .map(|object| match object {
                Value::Object(object) if !fields.is_empty() => {
                    Value::Object(object.into_iter().filter(|(key, _)| fields.contains(&key.as_str())).collect::<Map<_, _>>())
                }
                object => object,
            })
            .collect();
        let mut body = json!({ collection: if fault == Some(&Fault::Null) { Value::Null } else { Value::Array(items) } });
        if !links.is_empty() {
            body[format!("{collection}_links")] = Value::Array(links);
        }
        Reply::json(200, &body)
    }

    fn write(&mut self, call: &Call, (path, _, one): (&'static str, &'static str, &'static str), id: Option<&str>) -> Reply {
        let body = call.json()[one].clone();
        match (call.method.as_str(), id) {
            ("POST", None) => {
                let id = match path {
                    "security-group-rules" => {
                        let group = body["security_group_id"].as_str().unwrap_or_default().to_owned();
                        if !self.objects[&"security-groups"].contains_key(&group) {
                            return not_found(&format!("Security group {group}"));
                        }
                        self.add_rule(&group, body)
                    }
                    "security-groups" => {
                        let id = self.insert(path, body);
                        if self.objects[&path][&id]["stateful"].is_null() {
                            self.update(path, &id, &json!({"stateful": true}));
                        }
                        for family in ["IPv4", "IPv6"] {
                            self.add_rule(&id, json!({"direction": "egress", "ethertype": family}));
                        }
                        id
                    }
                    _ => self.insert(path, body),
                };
                let shown = self.shown(path, &self.objects[&path][&id]);
                Reply::json(201, &json!({ one: shown }))
            }
            ("PUT", Some(id)) if self.objects[&path].contains_key(id) => {
                self.update(path, id, &body);
                let shown = self.shown(path, &self.objects[&path][id]);
                Reply::json(200, &json!({ one: shown }))
            }
            ("DELETE", Some(id)) => {
                let used = path == "security-groups"
                    && self
                        .all("ports")
                        .any(|port| port["security_groups"].as_array().is_some_and(|groups| groups.contains(&json!(id))));
                match () {
                    () if used => error(409, "SecurityGroupInUse", &format!("Security Group {id} in use.")),
                    () if self.delete(path, id) => Reply::empty(204),
                    () => not_found(id),
                }
            }
            _ => not_found(path),
        }
    }

    fn token(&mut self, call: &Call) -> Reply {
        let identity = &call.json()["auth"]["identity"];
        let (application, user) = (&identity["application_credential"], &identity["password"]["user"]);
        let known = (application["id"] == self.application.0.as_str() && application["secret"] == self.application.1.as_str())
            || (user["name"] == self.user.0.as_str() && user["password"] == self.user.1.as_str());
        if !known {
            let body = json!({"error": {"code": 401, "title": "Unauthorized", "message": "The request you have made requires authentication."}});
            return Reply::json(401, &body);
        }
        let token = self.tokens.issue(self.since);
        let now = SystemTime::now();
        let time = |at: SystemTime| humantime::format_rfc3339_micros(at).to_string();
        let host = format!("http://{}", call.header("host"));
        let endpoint = |kind: &str, name: &str| {
            let url = |interface: &str| json!({"id": interface, "interface": interface, "region": "RegionOne", "region_id": "RegionOne", "url": host});
            json!({"type": kind, "name": name, "id": name, "endpoints": [url("public"), url("internal"), url("admin")]})
        };
        let body = json!({"token": {
            "methods": ["password"], "issued_at": time(now), "expires_at": time(now + self.tokens.lasts),
            "user": {"id": "u1", "name": self.user.0, "domain": {"id": "default", "name": "Default"}},
            "project": {"id": "p1", "name": "project", "domain": {"id": "default", "name": "Default"}},
            "roles": [{"id": "r1", "name": "admin"}],
            "catalog": [endpoint("network", "neutron"), endpoint("identity", "keystone")],
        }});
        Reply::json(201, &body).with("x-subject-token", token)
    }

    fn answer(&mut self, call: &Call, fault: Option<&Fault>) -> Reply {
        if fault == Some(&Fault::Revoke) {
            self.tokens.revoke();
        }
        let host = format!("http://{}", call.header("host"));
        let parts: Vec<&str> = call.path.trim_matches('/').split('/').collect();
        match (call.method.as_str(), parts.as_slice()) {
            ("POST", ["v3", "auth", "tokens"]) => return self.token(call),
            ("GET", ["v3"]) => {
                let version = json!({"id": "v3.14", "status": "stable", "updated": "2020-04-07T00:00:00Z",
                    "links": [{"rel": "self", "href": format!("{host}/v3/")}], "media-types": []});
                return Reply::json(200, &json!({ "version": version }));
            }
            ("GET", [""]) => {
                let version = |id: &str, path: &str| json!({"id": id, "status": "CURRENT", "links": [{"rel": "self", "href": format!("{host}/{path}/")}]});
                return Reply::json(200, &json!({"versions": [version("v2.0", "v2.0")]}));
            }
            _ => {}
        }
        if !self.tokens.is_valid(call.header("x-auth-token"), self.since) {
            let body = json!({"error": {"code": 401, "title": "Unauthorized", "message": "The request you have made requires authentication."}});
            return Reply::json(401, &body);
        }
        match (call.method.as_str(), parts.as_slice()) {
            ("GET", ["v2.0"]) => Reply::json(200, &json!({"resources": []})),
            ("GET", ["v2.0", "extensions", ..]) => {
                let all = ["security-group", "address-group"]
                    .into_iter()
                    .filter(|alias| self.address_groups || *alias != "address-group");
                Reply::json(
                    200,
                    &json!({"extensions": all.map(|alias| json!({"alias": alias, "name": alias})).collect::<Vec<_>>()}),
                )
            }
            (_, ["v2.0", "address-groups", ..]) if !self.address_groups => not_found("address-groups"),
            (method, ["v2.0", name, rest @ ..]) => {
                let Some(list) = LISTS.into_iter().find(|(path, ..)| path == name) else { return not_found(name) };
                match (method, rest) {
                    ("GET", []) => self.list(call, list, fault),
                    ("GET", [id]) => match self.objects[&list.0].get(*id) {
                        Some(object) => Reply::json(200, &json!({ list.2: self.shown(list.0, object) })),
                        None => not_found(id),
                    },
                    (_, rest) => self.write(call, list, rest.first().copied()),
                }
            }
            _ => not_found(&call.path),
        }
    }
}

impl Fake for Neutron {
    fn handle(&mut self, call: &Call, since: Duration) -> Reply {
        self.calls.note(call);
        self.since = since;
        let (fault, then) = self.upsets.of(&call.path);
        let reply = self.answer(call, fault.as_ref());
        then.iter().for_each(|edit| self.apply(edit));
        super::serve::upset(reply, fault.as_ref())
    }
}
