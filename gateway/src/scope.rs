//! How far a token goes: which ids it may write, where it may bind, which addresses it may make members.
//!
//! A scoped token writes groups only, and only groups that lie within its scope *before and after*: whoever could change the rules of a
//! group that is bound globally would rule everywhere, whatever its own bindings say.

use groupcast_bus_config::subjects::CatalogKind;
use groupcast_control::document::{Document, Name};
use groupcast_policy::model::{Group, Target};
use groupcast_policy::net::{AddressSet, Prefix};
use groupcast_policy::text::{prefix_text, strict_prefix_text};
use groupcast_policy::topic::Scope as Place;
use groupcast_policy::written::{Fault, PROBLEMS_MAX, Problem};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Most entries of each list.
pub const SCOPE_ITEMS_MAX: usize = 1_000;

/// An empty list allows nothing of its kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Scope {
    /// Groups whose id begins with one of these.
    #[serde(default)]
    pub ids: Vec<String>,
    /// `global`, `space:ID`, `app:ID`, `workload:ID`; an id may end in `*`. Labels are allowed within a place that is listed.
    #[serde(default)]
    pub bindings: Vec<String>,
    /// Static members must lie within one of these prefixes.
    #[serde(default)]
    pub members: Vec<String>,
}

impl Scope {
    /// What is wrong with it.
    pub fn check(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut wrong = |field: String, message: String| {
            problems.push(Problem { fault: Fault::Invalid, document: "scope".into(), rule: None, field, message });
        };
        for (field, list) in [("ids", &self.ids), ("bindings", &self.bindings), ("members", &self.members)] {
            if list.len() > SCOPE_ITEMS_MAX {
                wrong(field.to_owned(), format!("{} items: at most {SCOPE_ITEMS_MAX} are allowed", list.len()));
            }
        }
        for (index, id) in self.ids.iter().enumerate() {
            if Name::new(CatalogKind::Group, id).is_err() {
                wrong(format!("ids[{index}]"), "is no beginning of an id: use A-Z a-z 0-9 _ -".into());
            }
        }
        for (index, binding) in self.bindings.iter().enumerate() {
            let known = binding == "global" || ["space:", "app:", "workload:"].iter().any(|kind| binding.starts_with(kind));
            if !known {
                wrong(format!("bindings[{index}]"), "write global, space:ID, app:ID or workload:ID; an id may end in *".into());
            }
        }
        for (index, member) in self.members.iter().enumerate() {
            if let Err(error) = strict_prefix_text(member) {
                wrong(format!("members[{index}]"), error.to_string());
            }
        }
        problems
    }

    fn allows_id(&self, id: &str) -> bool {
        self.ids.iter().any(|prefix| id.starts_with(prefix.as_str()))
    }

    fn allows_place(&self, place: &str) -> bool {
        self.bindings.iter().any(|allowed| match allowed.strip_suffix('*') {
            Some(beginning) if beginning.contains(':') => place.starts_with(beginning),
            _ => place == allowed,
        })
    }

    /// Read once, for any number of documents.
    pub fn read(&self) -> Allowed<'_> {
        let members = self.members.iter().filter_map(|text| prefix_text(text).ok());
        Allowed { scope: self, members: AddressSet::from_prefixes(members) }
    }
}

/// A scope whose prefixes were read.
#[derive(Debug)]
pub struct Allowed<'s> {
    scope: &'s Scope,
    members: AddressSet,
}

impl Allowed<'_> {
    fn allows_member(&self, member: Prefix) -> bool {
        let AddressSet { v4, v6 } = AddressSet::from_prefixes([member]);
        v4.spans().iter().all(|span| self.members.v4.holds(span.first(), span.last()))
            && v6.spans().iter().all(|span| self.members.v6.holds(span.first(), span.last()))
    }

    /// What a document has that goes beyond the scope; `was` says that it is the version there is now.
    pub fn beyond(&self, name: &Name, document: Option<&Document>, was: bool) -> Vec<Problem> {
        let shown = format!("{} \"{}\"", name.kind.as_str(), name.id());
        let problem = |field: String, message: String| Problem {
            fault: Fault::Invalid,
            document: shown.clone(),
            rule: None,
            field,
            message,
        };
        if name.kind != CatalogKind::Group {
            return vec![problem("kind".into(), "your token has a scope and may write groups only".into())];
        }
        if !self.scope.allows_id(name.id()) {
            let message = format!("your token may write ids that begin with {} only", self.scope.ids.join(", "));
            return vec![problem("id".into(), message)];
        }
        let Some(Document::Group(group)) = document else { return Vec::new() };
        let tail = if was { " (as it is now: somebody with a wider scope must change it)" } else { "" };
        let mut problems = Vec::new();
        for (index, binding) in group.bindings.iter().enumerate() {
            let place = place(&binding.target);
            if !self.scope.allows_place(&place) {
                let message = format!("{place} is beyond your token's scope{tail}");
                problems.push(problem(format!("bindings[{index}]"), message));
            }
        }
        problems.extend(
            self.foreign(group)
                .take(PROBLEMS_MAX)
                .map(|member| problem("members".into(), format!("{member} is beyond your token's scope{tail}"))),
        );
        problems
    }

    fn foreign<'g>(&'g self, group: &'g Group) -> impl Iterator<Item = &'g Prefix> + 'g {
        group.members.iter().filter(|member| !self.allows_member(**member))
    }
}

/// The place a binding reaches at most: labels reach no further than what they are within.
fn place(target: &Target) -> String {
    match target {
        Target::Workload(id) => format!("workload:{id}"),
        Target::Selector(selector) => scope_text(&selector.within),
        Target::Global => scope_text(&Place::Global),
        Target::Space(id) => scope_text(&Place::Space(id.clone())),
        Target::App(id) => scope_text(&Place::App(id.clone())),
    }
}

fn scope_text(place: &Place) -> String {
    match place {
        Place::Global => "global".to_owned(),
        Place::Space(id) => format!("space:{id}"),
        Place::App(id) => format!("app:{id}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use groupcast_policy::written::{Format, Written, read};
    use std::sync::Arc;

    fn scope() -> Scope {
        let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect();
        Scope {
            ids: list(&["shop-"]),
            bindings: list(&["space:shop", "app:shop-*"]),
            members: list(&["10.1.0.0/16", "2001:db8::/32"]),
        }
    }

    fn group(text: &str) -> Document {
        match read(Format::Yaml, text).expect("a good document").remove(0) {
            Written::Group(group) => Document::Group(Arc::new(group)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_scope_says_what_may_be_written() {
        let rows = [
            ("id: shop-web", ""),
            ("id: shop-web\nbindings: [space:shop, app:shop-front]", ""),
            ("id: shop-web\nmembers: [10.1.2.3, 2001:db8::1]", ""),
            ("id: shop-web\nbindings: [{labels: a=b, within: space:shop}]", ""),
            ("id: bank-web", "id"),
            ("id: shop-web\nbindings: [global]", "bindings[0]"),
            ("id: shop-web\nbindings: [space:shop, space:bank]", "bindings[1]"),
            ("id: shop-web\nbindings: [workload:w1]", "bindings[0]"),
            ("id: shop-web\nbindings: [{labels: a=b}]", "bindings[0]"),
            ("id: shop-web\nmembers: [10.0.0.0/8]", "members"),
            ("id: shop-web\nmembers: [192.0.2.1]", "members"),
        ];
        for (text, field) in rows {
            let document = group(&format!("kind: group\n{text}"));
            let found = scope().read().beyond(&document.name(), Some(&document), false);
            let fields: Vec<&str> = found.iter().map(|p| p.field.as_str()).collect();
            let expected: Vec<&str> = if field.is_empty() { vec![] } else { vec![field] };
            assert_eq!(fields, expected, "{text}");
        }
        let template = Name::new(CatalogKind::Template, "shop-t").unwrap();
        assert_eq!(scope().read().beyond(&template, None, false).len(), 1);
    }

    #[test]
    fn an_empty_scope_allows_nothing() {
        let document = group("kind: group\nid: x");
        assert_eq!(Scope::default().read().beyond(&document.name(), Some(&document), false).len(), 1);
    }

    #[test]
    fn a_scope_that_means_nothing_is_named() {
        let list = |item: &str| vec![item.to_owned()];
        assert!(scope().check().is_empty());
        assert_eq!(Scope { ids: list("a.b"), ..scope() }.check()[0].field, "ids[0]");
        assert_eq!(Scope { bindings: list("everywhere"), ..scope() }.check()[0].field, "bindings[0]");
        assert_eq!(Scope { bindings: list("*"), ..scope() }.check()[0].field, "bindings[0]");
        assert_eq!(Scope { members: list("ten"), ..scope() }.check()[0].field, "members[0]");
        let many = |n: usize| Scope { ids: vec!["a".into(); n], ..scope() };
        assert!(many(SCOPE_ITEMS_MAX).check().is_empty());
        assert_eq!(many(SCOPE_ITEMS_MAX + 1).check()[0].field, "ids");
    }
}
