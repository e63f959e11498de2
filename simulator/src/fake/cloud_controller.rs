//! Cloud Controller's `/v3/security_groups`, the internal time of their last change, and UAA's `/oauth/token`.

use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::{Call, Calls, Fake, Fault, Reply, Tokens, Upsets, uuid};
use crate::random::Random;

/// What the real one takes at most.
const PER_PAGE_MAX: usize = 5_000;
const PER_PAGE_DEFAULT: usize = 50;
/// Spaces that [`CloudController::fill`] spreads its groups over.
const FILLED_SPACES: usize = 2_500;

#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    pub guid: String,
    pub name: String,
    /// Nanoseconds since 1970.
    pub created_at: u64,
    pub updated_at: u64,
    pub rules: Value,
    pub running: bool,
    pub staging: bool,
    pub running_spaces: Vec<String>,
    pub staging_spaces: Vec<String>,
    /// Fields that are shown instead of the right ones, to be malformed on purpose.
    pub instead: Option<Value>,
}

/// An edit, by the API of today or behind its back.
#[derive(Debug, Clone, serde::Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Edit {
    Create(String),
    Delete(String),
    /// Through the old API: the time of the last change stays.
    DeleteSilently(String),
    CreateSilently(String),
    Touch(String),
    /// For every application.
    Globalise(String),
    /// The server's clock goes back by so many seconds.
    ClockBack(u64),
}

pub struct CloudController {
    pub groups: Vec<Group>,
    pub upsets: Upsets<Edit>,
    pub tokens: Tokens,
    pub calls: Calls,
    pub client: (String, String),
    /// An old server does not say when groups last changed.
    pub tells_time: bool,
    pub last_update: u64,
    clock: u64,
    since: Duration,
    random: Random,
}

impl Default for CloudController {
    fn default() -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self {
            groups: Vec::new(),
            upsets: Upsets::default(),
            tokens: Tokens::default(),
            calls: Calls::default(),
            client: ("groupcast".into(), "secret".into()),
            tells_time: true,
            last_update: 0,
            clock: now.as_nanos() as u64,
            since: Duration::ZERO,
            random: Random::new(1),
        }
    }
}

fn seconds(nanos: u64) -> String {
    humantime::format_rfc3339_seconds(SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos)).to_string()
}

fn nanos(nanos: u64) -> String {
    humantime::format_rfc3339_nanos(SystemTime::UNIX_EPOCH + Duration::from_nanos(nanos)).to_string()
}

impl CloudController {
    /// A time that was never told before.
    fn tick(&mut self) -> u64 {
        self.clock += 1_000_003;
        self.clock
    }

    fn changed(&mut self) {
        self.last_update = self.tick();
    }

    pub fn clock_back(&mut self, by: Duration) {
        self.clock = self.clock.saturating_sub(by.as_nanos() as u64);
    }

    /// A group with one rule, bound to a space of its own; its guid.
    pub fn create(&mut self, name: &str) -> String {
        let guid = self.create_silently(name);
        self.changed();
        guid
    }

    pub fn create_silently(&mut self, name: &str) -> String {
        let (guid, now) = (uuid(&mut self.random), self.tick());
        let group = Group {
            guid: guid.clone(),
            name: name.to_owned(),
            created_at: now,
            updated_at: now,
            rules: json!([{"protocol": "tcp", "destination": "10.0.0.0/24", "ports": "443"}]),
            running: false,
            staging: false,
            // A space has a guid, which is shorter than a name may be.
            running_spaces: vec![format!("space-{}", name.chars().take(36).collect::<String>())],
            staging_spaces: Vec::new(),
            instead: None,
        };
        // Ordered by creation, as the database does it: a clock that went back puts it among the old.
        let at = self.groups.partition_point(|other| (other.created_at, &other.guid) < (now, &guid));
        self.groups.insert(at, group);
        guid
    }

    pub fn edit(&mut self, name: &str, edit: impl FnOnce(&mut Group)) {
        let now = self.tick();
        if let Some(group) = self.groups.iter_mut().find(|group| group.name == name) {
            edit(group);
            group.updated_at = now;
        }
        self.changed();
    }

    pub fn delete(&mut self, name: &str) {
        self.groups.retain(|group| group.name != name);
        self.changed();
    }

    pub fn group(&self, name: &str) -> Option<&Group> {
        self.groups.iter().find(|group| group.name == name)
    }

    /// So many groups of so many rules, in one go.
    pub fn fill(&mut self, groups: usize, rules: usize) {
        for number in 0..groups {
            self.create_silently(&format!("group-{number}"));
        }
        let rule = |i: usize| {
            let destination = format!("10.{}.{}.0/24", i / 250 % 250, i % 250);
            json!({"protocol": "tcp", "destination": destination, "ports": (i % 60_000 + 1).to_string()})
        };
        for (number, group) in self.groups.iter_mut().enumerate() {
            group.rules = (0..rules).map(|i| rule(number * rules + i)).collect();
            group.running_spaces = vec![format!("space-{}", number % FILLED_SPACES)];
        }
        self.changed();
    }

    pub fn apply(&mut self, edit: &Edit) {
        match edit {
            Edit::Create(name) => drop(self.create(name)),
            Edit::CreateSilently(name) => drop(self.create_silently(name)),
            Edit::Delete(name) => self.delete(name),
            Edit::DeleteSilently(name) => self.groups.retain(|group| group.name != *name),
            Edit::Touch(name) => {
                let port = self.clock % 60_000 + 1;
                self.edit(name, |group| {
                    group.rules = json!([{"protocol": "tcp", "destination": "10.0.0.0/24", "ports": port.to_string()}]);
                });
            }
            Edit::Globalise(name) => self.edit(name, |group| group.running = true),
            Edit::ClockBack(by) => self.clock_back(Duration::from_secs(*by)),
        }
    }

    fn list(&self, call: &Call, fault: Option<&Fault>) -> Reply {
        let number = |key: &str, default: usize, max: usize| match call.asked(key).map(str::parse::<usize>) {
            None => Some(default),
            Some(Ok(number)) if (1..=max).contains(&number) => Some(number),
            Some(_) => None,
        };
        let (Some(page), Some(per_page)) = (number("page", 1, usize::MAX), number("per_page", PER_PAGE_DEFAULT, PER_PAGE_MAX))
        else {
            let detail = "The query parameter is invalid: Page must be a positive integer, Per page must be between 1 and 5000";
            return error(400, 10_005, "CF-BadQueryParameter", detail);
        };
        let page = if fault == Some(&Fault::Repeat) { 1 } else { page };
        let listed = |key: &str| call.asked(key).map(|text| text.split(',').map(str::to_owned).collect::<Vec<_>>());
        let (names, guids) = (listed("names"), listed("guids"));
        let wanted = |group: &&Group| {
            names.as_ref().is_none_or(|names| names.contains(&group.name))
                && guids.as_ref().is_none_or(|guids| guids.contains(&group.guid))
        };
        let mut all: Vec<&Group> = self.groups.iter().filter(wanted).collect();
        if call.asked("order_by") == Some("-created_at") {
            all.reverse();
        }
        let total = all.len();
        let pages = total.div_ceil(per_page).max(1);
        let shown_max = if fault == Some(&Fault::Empty) { 0 } else { per_page };
        let resources: Vec<Value> =
            all.into_iter().skip((page - 1).saturating_mul(per_page)).take(shown_max).map(shown).collect();
        let link = |page: usize| json!({"href": format!("{}/v3/security_groups?page={page}&per_page={per_page}", base(call))});
        Reply::json(
            200,
            &json!({
                "pagination": {
                    "total_results": total,
                    "total_pages": pages,
                    "first": link(1),
                    "last": link(pages),
                    "next": if page < pages && shown_max > 0 { link(page + 1) } else { Value::Null },
                    "previous": if page > 1 { link(page - 1) } else { Value::Null },
                },
                "resources": if fault == Some(&Fault::Null) { Value::Null } else { Value::Array(resources) },
            }),
        )
    }

    fn write(&mut self, call: &Call, parts: &[&str]) -> Reply {
        let body = call.json();
        let unprocessable = |detail: &str| error(422, 10_008, "CF-UnprocessableEntity", detail);
        match (call.method.as_str(), parts) {
            ("POST", []) => {
                let Some(name) = body["name"].as_str() else { return unprocessable("Name can't be blank") };
                if self.group(name).is_some() {
                    return unprocessable(&format!("Security group with name '{name}' already exists."));
                }
                let guid = self.create(name);
                self.edit(name, |group| {
                    group.running_spaces = spaces(&body["relationships"]["running_spaces"]);
                    group.staging_spaces = spaces(&body["relationships"]["staging_spaces"]);
                    group.rules = json!([]);
                    patch(group, &body);
                });
                self.show(201, &guid)
            }
            ("PATCH", [guid]) => {
                let Some(name) = self.groups.iter().find(|group| group.guid == *guid).map(|group| group.name.clone()) else {
                    return not_found();
                };
                self.edit(&name, |group| patch(group, &body));
                self.show(200, guid)
            }
            ("DELETE", [guid]) => {
                let Some(name) = self.groups.iter().find(|group| group.guid == *guid).map(|group| group.name.clone()) else {
                    return not_found();
                };
                self.delete(&name);
                Reply::empty(202).with("location", format!("{}/v3/jobs/security_group.delete-{guid}", base(call)))
            }
            ("POST" | "DELETE", [guid, "relationships", which, rest @ ..]) => {
                let Some(name) = self.groups.iter().find(|group| group.guid == *guid).map(|group| group.name.clone()) else {
                    return not_found();
                };
                let (new, running) = (spaces(&body), *which == "running_spaces");
                let gone = rest.first().map(|space| (*space).to_owned());
                let adds = call.method == "POST";
                self.edit(&name, |group| {
                    let list = if running { &mut group.running_spaces } else { &mut group.staging_spaces };
                    list.retain(|space| Some(space) != gone.as_ref());
                    list.extend(new.into_iter().filter(|_| adds));
                });
                let shown = self.groups.iter().find(|group| group.guid == *guid);
                let list = shown.map(|group| if running { &group.running_spaces } else { &group.staging_spaces });
                if adds {
                    Reply::json(200, &json!({"data": related(list.map_or(&[], Vec::as_slice))}))
                } else {
                    Reply::empty(204)
                }
            }
            _ => not_found(),
        }
    }

    fn show(&self, status: u16, guid: &str) -> Reply {
        let found = self.groups.iter().find(|group| group.guid == guid);
        found.map_or_else(not_found, |group| Reply::json(status, &shown(group)))
    }
}

fn patch(group: &mut Group, body: &Value) {
    if let Some(name) = body["name"].as_str() {
        group.name = name.to_owned();
    }
    if body["rules"].is_array() {
        group.rules = body["rules"].clone();
    }
    let enabled = &body["globally_enabled"];
    group.running = enabled["running"].as_bool().unwrap_or(group.running);
    group.staging = enabled["staging"].as_bool().unwrap_or(group.staging);
}

fn spaces(node: &Value) -> Vec<String> {
    let data = node["data"].as_array().map(Vec::as_slice).unwrap_or_default();
    data.iter().filter_map(|space| space["guid"].as_str()).map(str::to_owned).collect()
}

fn related(spaces: &[String]) -> Value {
    spaces.iter().map(|space| json!({ "guid": space })).collect()
}

fn shown(group: &Group) -> Value {
    let mut shown = json!({
        "guid": group.guid,
        "created_at": seconds(group.created_at),
        "updated_at": seconds(group.updated_at),
        "name": group.name,
        "rules": group.rules,
        "globally_enabled": {"running": group.running, "staging": group.staging},
        "relationships": {
            "running_spaces": {"data": related(&group.running_spaces)},
            "staging_spaces": {"data": related(&group.staging_spaces)},
        },
        "links": {"self": {"href": format!("/v3/security_groups/{}", group.guid)}},
    });
    if let Some(fields) = group.instead.as_ref().and_then(Value::as_object) {
        fields.iter().for_each(|(key, value)| shown[key] = value.clone());
    }
    shown
}

fn base(call: &Call) -> String {
    format!("http://{}", call.header("host"))
}

fn error(status: u16, code: u32, title: &str, detail: &str) -> Reply {
    Reply::json(status, &json!({"errors": [{"code": code, "title": title, "detail": detail}]}))
}

fn not_found() -> Reply {
    error(404, 10_010, "CF-ResourceNotFound", "Security group not found")
}

impl Fake for CloudController {
    fn handle(&mut self, call: &Call, since: Duration) -> Reply {
        self.calls.note(call);
        self.since = since;
        let (fault, then) = self.upsets.of(&call.path);
        let reply = self.answer(call, fault.as_ref());
        then.iter().for_each(|edit| self.apply(edit));
        super::serve::upset(reply, fault.as_ref())
    }
}

impl CloudController {
    fn answer(&mut self, call: &Call, fault: Option<&Fault>) -> Reply {
        if fault == Some(&Fault::Revoke) {
            self.tokens.revoke();
        }
        let parts: Vec<&str> = call.path.trim_matches('/').split('/').collect();
        match (call.method.as_str(), parts.as_slice()) {
            ("GET", ["internal", "v4", "asg_latest_update"]) if call.internal => match self.tells_time {
                true => Reply::json(200, &json!({"last_update": nanos(self.last_update)})),
                false => error(404, 10_000, "CF-NotFound", "Unknown request"),
            },
            ("POST", ["oauth", "token"]) => self.token(call),
            ("GET", [""]) => {
                let (base, login) = (base(call), json!({"href": base(call)}));
                let link = |path: &str| json!({"href": format!("{base}{path}"), "meta": {"version": "3.180.0"}});
                Reply::json(
                    200,
                    &json!({"links": {
                        "self": link(""), "cloud_controller_v2": null, "cloud_controller_v3": link("/v3"), "login": login, "uaa": login,
                        "logging": null, "log_cache": null, "log_stream": null, "app_ssh": null, "network_policy_v1": null,
                    }}),
                )
            }
            ("GET", ["v3", "info"]) => Reply::json(200, &json!({"build": "", "name": "fake", "version": 0, "links": {}})),
            ("GET", ["v3"]) => Reply::json(200, &json!({"links": {"self": {"href": format!("{}/v3", base(call))}}})),
            ("GET", ["v3", "jobs", job]) => Reply::json(
                200,
                &json!({"guid": job, "operation": "security_group.delete", "state": "COMPLETE", "errors": [], "warnings": []}),
            ),
            (_, ["v3", "security_groups", rest @ ..]) => {
                let token = call.header("authorization");
                let token = token.strip_prefix("bearer ").or(token.strip_prefix("Bearer ")).unwrap_or_default();
                if !self.tokens.is_valid(token, self.since) {
                    return error(401, 1_000, "CF-InvalidAuthToken", "Invalid Auth Token");
                }
                match (call.method.as_str(), rest) {
                    ("GET", []) => self.list(call, fault),
                    ("GET", [guid]) => self.show(200, guid),
                    _ => self.write(call, rest),
                }
            }
            _ => error(404, 10_000, "CF-NotFound", "Unknown request"),
        }
    }

    fn token(&mut self, call: &Call) -> Reply {
        let basic = data_encoding::BASE64.encode(format!("{}:{}", self.client.0, self.client.1).as_bytes());
        let form = String::from_utf8_lossy(&call.body).into_owned();
        let (id, secret) = (format!("client_id={}", self.client.0), format!("client_secret={}", self.client.1));
        let by_form = form.split('&').any(|pair| pair == id) && form.split('&').any(|pair| pair == secret);
        if call.header("authorization") != format!("Basic {basic}") && !by_form {
            return Reply::json(401, &json!({"error": "unauthorized", "error_description": "Bad credentials"}));
        }
        let token = self.tokens.issue(self.since);
        let lasts = self.tokens.lasts.as_secs();
        Reply::json(
            200,
            &json!({
                "access_token": token, "token_type": "bearer", "expires_in": lasts, "scope": "cloud_controller.admin_read_only", "jti": "1",
            }),
        )
    }
}
