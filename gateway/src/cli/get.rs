//! `get`: what there is.

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use super::Result;
use super::client::{Call, escaped};
use super::context::Connection;
use super::output::{self, Format};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    #[value(alias = "group")]
    Groups,
    #[value(alias = "template")]
    Templates,
    #[value(alias = "workload")]
    Workloads,
    #[value(alias = "host")]
    Hosts,
    /// Hosts that enrolled themselves, with their workloads.
    #[value(alias = "registration")]
    Registrations,
    #[value(alias = "change")]
    Changes,
    #[value(alias = "source")]
    Sources,
    #[value(alias = "token")]
    Tokens,
}

impl Kind {
    pub(super) const fn path(self) -> &'static str {
        match self {
            Self::Groups => "/v1/groups",
            Self::Templates => "/v1/templates",
            Self::Workloads => "/v1/workloads",
            Self::Hosts => "/v1/hosts",
            Self::Registrations => "/v1/registrations",
            Self::Changes => "/v1/changes",
            Self::Sources => "/v1/sources",
            Self::Tokens => "/v1/tokens",
        }
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Groups => "group",
            Self::Templates => "template",
            Self::Workloads => "workload",
            Self::Hosts => "host",
            Self::Registrations => "registration",
            Self::Changes => "change",
            Self::Sources => "source",
            Self::Tokens => "token",
        }
    }
}

#[derive(Debug, Clone, Args)]
#[command(
    after_help = "Examples:\n  groupcast get groups\n  groupcast get group web -o yaml > web.yaml    # edit, then: groupcast apply -f web.yaml\n  \
                        groupcast get changes --limit 10\n  groupcast get hosts -o wide --watch"
)]
pub struct Options {
    #[arg(value_enum)]
    pub(super) kind: Kind,
    pub(super) id: Option<String>,
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    pub(super) output: Format,
    /// Those whose id begins so.
    #[arg(long)]
    prefix: Option<String>,
    /// How many at most; without it, all there are.
    #[arg(long)]
    pub(super) limit: Option<usize>,
    /// Stays, and shows each host, workload or registration again whenever it changes.
    #[arg(short, long)]
    watch: bool,
}

pub async fn get(connection: &Connection, options: Options) -> Result {
    let api = connection.api()?;
    if options.watch {
        return super::watching::watch(&api, &options).await;
    }
    let path = options.kind.path();
    let items = match (&options.id, options.kind) {
        // Tokens have no route of their own to be read by.
        (Some(id), Kind::Tokens) => {
            let all = api.list(path, None).await?;
            let found: Vec<Value> = all.items.into_iter().filter(|token| token["id"].as_str() == Some(id)).collect();
            if found.is_empty() {
                return Err(super::Failure::new(super::Code::NotFound, format!("token {id} does not exist")));
            }
            found
        }
        (Some(id), _) => vec![api.fetch(&Call::get(format!("{path}/{}", escaped(id)))).await?],
        (None, _) => {
            let prefix = options.prefix.as_ref().map(|prefix| format!("prefix={}", escaped(prefix)));
            let groups = (options.kind == Kind::Workloads && options.output == Format::Wide).then(|| "groups=true".to_owned());
            let query: Vec<String> = prefix.into_iter().chain(groups).collect();
            let query = if query.is_empty() { String::new() } else { format!("?{}", query.join("&")) };
            let all = api.list(&format!("{path}{query}"), options.limit).await?;
            if all.is_cut {
                output::say(&format!("these are the first {}; there are more: raise --limit or leave it out", all.items.len()));
            }
            all.items
        }
    };
    output::print(&shown(options.kind, options.id.is_some(), &items, options.output))
}

pub fn shown(kind: Kind, single: bool, items: &[Value], format: Format) -> String {
    let whole = || match (single, items) {
        (true, [one]) => one.clone(),
        _ => json!({ "format_version": "1", "items": items }),
    };
    match format {
        Format::Json => output::json(&whole()),
        Format::Yaml => output::yaml(&whole()),
        Format::Jsonl => items.iter().map(|item| output::json_line(item) + "\n").collect(),
        Format::Name => items.iter().map(|item| format!("{}/{}\n", kind.word(), id(kind, item))).collect(),
        Format::Table | Format::Wide => {
            let wide = format == Format::Wide;
            output::table(&head(kind, wide), items.iter().map(|item| row(kind, item, wide)).collect())
        }
    }
}

pub(super) fn text(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

pub(super) fn id(kind: Kind, item: &Value) -> String {
    match kind {
        Kind::Hosts | Kind::Registrations => text(&item["host"]),
        Kind::Changes => text(&item["change"]),
        Kind::Sources | Kind::Tokens => text(&item["id"]),
        _ => text(&item["document"]["id"]),
    }
}

fn count(value: &Value) -> String {
    value.as_array().map_or(0, Vec::len).to_string()
}

/// The groups that a workload has, each once; of one whose groups were not asked for, those of its own entry.
fn has(item: &Value) -> String {
    let Some(groups) = item["groups"].as_array() else { return joined(&item["document"]["groups"]) };
    let mut names: Vec<String> = Vec::new();
    for name in groups.iter().map(|one| text(&one["group"])) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.join(",")
}

fn joined(value: &Value) -> String {
    let items = value.as_array().map(Vec::as_slice).unwrap_or_default();
    items.iter().map(text).collect::<Vec<_>>().join(",")
}

/// How long ago a host was last heard of.
fn heard(item: &Value) -> String {
    let ago = |ms: u64| format!("{} ago", humantime::format_duration(std::time::Duration::from_secs(ms / 1_000)));
    item["heard_ms"].as_u64().or(item["standing"]["heard_ms_ago"].as_u64()).map_or(String::new(), ago)
}

pub(super) fn head(kind: Kind, wide: bool) -> Vec<&'static str> {
    let (mut narrow, more): (Vec<&str>, Vec<&str>) = match kind {
        Kind::Groups => {
            (vec!["id", "rules", "bindings", "members", "owner"], vec!["revision", "changed by", "changed at", "name"])
        }
        Kind::Templates => (vec!["id", "network", "spaces", "prefixes"], vec!["revision", "changed by", "changed at"]),
        Kind::Workloads => (
            vec!["id", "host", "addresses", "space", "app"],
            vec!["network", "phase", "labels", "groups", "incarnation", "health"],
        ),
        Kind::Hosts => (vec!["host", "state", "enforcement", "workloads"], vec!["since", "last heard", "reason", "names"]),
        Kind::Registrations => (
            vec!["host", "state", "templates", "workloads"],
            vec!["since", "last heard", "boot", "incarnations", "addresses", "unhealthy"],
        ),
        Kind::Changes => (vec!["change", "at", "by", "documents", "reason"], vec!["names"]),
        Kind::Sources => super::sources::head(),
        Kind::Tokens => (vec!["id", "role", "expires", "description"], vec!["ids", "bindings", "members", "created"]),
    };
    if wide {
        narrow.extend(more);
    }
    narrow
}

pub(super) fn row(kind: Kind, item: &Value, wide: bool) -> Vec<String> {
    let document = &item["document"];
    let changed = || vec![text(&item["revision"]), text(&item["changed_by"]), text(&item["changed_at"])];
    let (mut narrow, more): (Vec<String>, Vec<String>) = match kind {
        Kind::Groups => {
            let owner = text(&document["owner"]);
            let narrow = vec![
                text(&document["id"]),
                count(&document["rules"]),
                count(&document["bindings"]),
                count(&document["members"]),
                if owner.is_empty() { "gateway".to_owned() } else { owner },
            ];
            (narrow, [changed(), vec![text(&document["name"])]].concat())
        }
        Kind::Templates => (
            vec![text(&document["id"]), text(&document["network"]), joined(&document["spaces"]), joined(&document["prefixes"])],
            changed(),
        ),
        Kind::Workloads => {
            let labels = document["labels"]
                .as_object()
                .map(|labels| labels.iter().map(|(key, value)| format!("{key}={}", text(value))).collect::<Vec<_>>().join(","));
            let narrow = ["id", "host"].map(|field| text(&document[field]));
            let phase = if document["phase"].is_null() { "running".to_owned() } else { text(&document["phase"]) };
            (
                [narrow.to_vec(), vec![joined(&document["addresses"]), text(&document["space"]), text(&document["app"])]]
                    .concat(),
                vec![
                    text(&document["network"]),
                    phase,
                    labels.unwrap_or_default(),
                    has(item),
                    text(&document["incarnation"]),
                    if document["unhealthy"] == true { "unhealthy".to_owned() } else { String::new() },
                ],
            )
        }
        Kind::Hosts => {
            let names =
                item["workloads"].as_array().map(|list| list.iter().map(|w| text(&w["workload"])).collect::<Vec<_>>().join(","));
            let standing = &item["standing"];
            let enforcement = match (standing["state"].as_str(), standing["behind"] == true) {
                (None, _) => "unknown".to_owned(),
                (Some(state), true) => format!("{state}, behind"),
                (Some(state), false) => state.to_owned(),
            };
            (
                vec![text(&item["host"]), text(&item["state"]), enforcement, count(&item["workloads"])],
                vec![text(&item["since"]), heard(item), text(&standing["reason"]), names.unwrap_or_default()],
            )
        }
        Kind::Registrations => {
            let workloads = item["workloads"].as_array().map(Vec::as_slice).unwrap_or_default();
            let each = |show: &dyn Fn(&Value) -> String| {
                let shown: Vec<String> = workloads.iter().map(show).filter(|text| !text.is_empty()).collect();
                shown.join(",")
            };
            let unhealthy = |w: &Value| if w["healthy"] == false { text(&w["workload"]) } else { String::new() };
            (
                vec![text(&item["host"]), text(&item["state"]), joined(&item["templates"]), each(&|w| text(&w["workload"]))],
                vec![
                    text(&item["since"]),
                    heard(item),
                    text(&item["boot"]),
                    each(&|w| text(&w["incarnation"])),
                    each(&|w| joined(&w["addresses"])),
                    each(&unhealthy),
                ],
            )
        }
        Kind::Changes => {
            let name = |document: &Value| {
                let sign = if document["deleted"] == true { "-" } else { "" };
                format!("{sign}{}/{}", text(&document["kind"]), text(&document["id"]))
            };
            let names = item["documents"].as_array().map(|list| list.iter().map(name).collect::<Vec<_>>().join(","));
            (
                vec![
                    text(&item["change"]),
                    text(&item["changed_at"]),
                    text(&item["changed_by"]),
                    text(&item["documents_total"]),
                    text(&item["reason"]),
                ],
                vec![names.unwrap_or_default()],
            )
        }
        Kind::Sources => super::sources::row(item),
        Kind::Tokens => {
            let expires = match (item["expired"] == true, item["expires_at"].as_str()) {
                (true, _) => "expired".to_owned(),
                (false, Some(at)) => at.to_owned(),
                (false, None) => "never".to_owned(),
            };
            let scope = &item["scope"];
            let list = |field: &str| if scope.is_null() { "*".to_owned() } else { joined(&scope[field]) };
            (
                vec![text(&item["id"]), text(&item["role"]), expires, text(&item["description"])],
                vec![list("ids"), list("bindings"), list("members"), text(&item["created_at"])],
            )
        }
    };
    if wide {
        narrow.extend(more);
    }
    narrow
}
