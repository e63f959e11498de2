//! Documents out: what is written here reads back as the same.

use super::group::{scope_text, target_text};
use super::{Format, Node, Written};
use crate::doc::{Enforced, Phase, Phases};
use crate::model::{
    Binding, Group, GroupRule, HOST_ADDRESSES_MAX, HOST_WORKLOADS_MAX, Labels, Owner, Probe, Target, Template, Workload,
};

/// Everything that can be written as a document.
pub trait Write {
    fn node(&self) -> Node;

    fn write(&self, format: Format) -> String {
        let node = self.node();
        match format {
            // A tree of strings, numbers and lists with string keys has no way to fail.
            Format::Json => serde_json::to_string(&node).unwrap_or_default(),
            Format::Yaml => serde_saphyr::to_string(&node).unwrap_or_default(),
        }
    }
}

#[derive(Default)]
struct Fields(Vec<(String, Node)>);

impl Fields {
    fn text(&mut self, key: &str, value: impl ToString) -> &mut Self {
        self.node(key, Node::Text(value.to_string()))
    }

    fn node(&mut self, key: &str, value: Node) -> &mut Self {
        self.0.push((key.to_string(), value));
        self
    }

    fn list<T: ToString>(&mut self, key: &str, items: impl IntoIterator<Item = T>) -> &mut Self {
        let list: Vec<Node> = items.into_iter().map(|item| Node::Text(item.to_string())).collect();
        if list.is_empty() { self } else { self.node(key, Node::List(list)) }
    }

    fn labels(&mut self, key: &str, labels: &Labels) -> &mut Self {
        let entries: Vec<_> = labels.iter().map(|(k, v)| (k.to_string(), Node::Text(v.to_string()))).collect();
        if entries.is_empty() { self } else { self.node(key, Node::Map(entries)) }
    }

    fn enforced(&mut self, enforced: Option<Enforced>) -> &mut Self {
        match enforced {
            None => self,
            Some(Enforced { ingress: true, egress: true }) => self.text("enforced", "both"),
            Some(Enforced { ingress: true, egress: false }) => self.text("enforced", "ingress"),
            Some(Enforced { ingress: false, egress: true }) => self.text("enforced", "egress"),
            Some(Enforced { ingress: false, egress: false }) => self.text("enforced", "none"),
        }
    }

    fn end(&mut self) -> Node {
        Node::Map(std::mem::take(&mut self.0))
    }
}

fn phases_text(phases: Phases) -> &'static str {
    match phases {
        Phases::RUNNING => "running",
        Phases::STAGING => "staging",
        _ => "both",
    }
}

fn rule_node(rule: &GroupRule) -> Node {
    if rule.description.is_empty() {
        return Node::Text(rule.rule.to_string());
    }
    Fields::default().text("rule", &rule.rule).text("description", &rule.description).end()
}

fn binding_node(binding: &Binding) -> Node {
    match (&binding.target, target_text(&binding.target)) {
        (_, Some(target)) if binding.phases == Phases::BOTH => Node::Text(target),
        (_, Some(target)) => Node::Text(format!("{target} {}", phases_text(binding.phases))),
        (Target::Selector(selector), None) => Fields::default()
            .text("labels", selector)
            .text("within", scope_text(&selector.within))
            .text("phase", phases_text(binding.phases))
            .end(),
        (_, None) => Node::Null,
    }
}

impl Write for Group {
    fn node(&self) -> Node {
        let mut fields = Fields::default();
        fields.text("kind", "group").text("id", &self.id).text("name", &self.name);
        if !self.stateful {
            fields.node("stateful", Node::Bool(false));
        }
        if !self.rules.is_empty() {
            fields.node("rules", Node::List(self.rules.iter().map(rule_node).collect()));
        }
        if !self.bindings.is_empty() {
            fields.node("bindings", Node::List(self.bindings.iter().map(binding_node).collect()));
        }
        fields.list("members", &self.members);
        if let Owner::Source(source) = &self.owner {
            fields.text("owner", format!("source:{source}"));
        }
        if self.internet_member {
            fields.node("internet_member", Node::Bool(true));
        }
        if self.healthy_members {
            fields.node("healthy_members", Node::Bool(true));
        }
        fields.end()
    }
}

impl Write for Template {
    fn node(&self) -> Node {
        let mut fields = Fields::default();
        fields.text("kind", "template").text("id", &self.id).text("network", &self.network);
        fields.labels("labels", &self.labels).list("own_labels", &self.own_labels).list("spaces", &self.spaces);
        fields.list("apps", &self.apps).text("phase", phases_text(self.phases)).list("prefixes", &self.prefixes);
        fields.list("identities", &self.identities).enforced(self.enforced);
        if let Some(health) = &self.health {
            let mut check = Fields::default();
            match &health.probe {
                Probe::Tcp { port } => check.node("port", Node::Int(i64::from(*port))),
                Probe::Http { port, path } => check.node("port", Node::Int(i64::from(*port))).text("path", path),
                Probe::Process { name } => check.text("process", name),
            };
            check.node("interval_seconds", Node::Int(i64::from(health.interval_seconds)));
            fields.node("health", check.end());
        }
        if self.wide_prefixes {
            fields.node("wide_prefixes", Node::Bool(true));
        }
        for (field, most, usual) in
            [("workloads_max", self.workloads_max, HOST_WORKLOADS_MAX), ("addresses_max", self.addresses_max, HOST_ADDRESSES_MAX)]
        {
            if most != usual {
                fields.node(field, Node::Int(i64::from(most)));
            }
        }
        fields.end()
    }
}

impl Write for Workload {
    fn node(&self) -> Node {
        let mut fields = Fields::default();
        fields.text("kind", "workload").text("id", &self.id).text("host", &self.host).text("network", &self.network);
        fields.list("addresses", &self.addresses).list("pairs", &self.pairs).labels("labels", &self.labels);
        if let Some(app) = &self.app {
            fields.text("app", app);
        }
        if let Some(space) = &self.space {
            fields.text("space", space);
        }
        if self.phase == Phase::Staging {
            fields.text("phase", "staging");
        }
        if let Some(template) = &self.template {
            fields.text("template", template);
        }
        // Incarnations count lives, not packets: they stay far below the bound.
        fields.node("incarnation", Node::Int(i64::try_from(self.incarnation).unwrap_or(i64::MAX)));
        fields.enforced(self.enforced).list("groups", &self.groups);
        if self.unhealthy {
            fields.node("unhealthy", Node::Bool(true));
        }
        fields.end()
    }
}

impl Write for Written {
    fn node(&self) -> Node {
        match self {
            Written::Group(group) => group.node(),
            Written::Template(template) => template.node(),
            Written::Workload(workload) => workload.node(),
        }
    }
}
