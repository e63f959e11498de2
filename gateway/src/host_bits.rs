//! Prefixes that were written with bits after their length: what they mean is not always what was meant, so whoever wrote them is told. Pure.

use std::net::IpAddr;

use groupcast_policy::text::{prefix_text, strict_prefix_text};
use groupcast_policy::written::Node;

use crate::problem::Item;

/// Warnings about one document.
const WARNED_MAX: usize = 20;

/// Everything that looks like a prefix and has such bits, with where it stands.
pub fn warnings(document: &Node) -> Vec<Item> {
    let text = |key: &str| document.get(key).and_then(Node::text).unwrap_or_default();
    let name = format!("{} {:?}", text("kind"), text("id"));
    let mut found = Vec::new();
    walk(document, String::new(), &mut |field, word| {
        if let Some(detail) = judged(word).filter(|_| found.len() < WARNED_MAX) {
            found.push(Item { document: name.clone(), rule: None, field: field.to_owned(), detail });
        }
    });
    found
}

fn judged(word: &str) -> Option<String> {
    let (address, _) = word.split_once('/')?;
    address.parse::<IpAddr>().ok()?;
    let taken = prefix_text(word).ok()?;
    strict_prefix_text(word).is_err().then(|| format!("{word} is taken for {taken}: bits after a prefix's length say nothing"))
}

fn walk(node: &Node, field: String, look: &mut impl FnMut(&str, &str)) {
    match node {
        // Words about it are not it.
        Node::Map(entries) => entries
            .iter()
            .filter(|(key, _)| !["description", "name", "labels"].contains(&key.as_str()))
            .for_each(|(key, node)| {
                let inner = if field.is_empty() { key.clone() } else { format!("{field}.{key}") };
                walk(node, inner, look);
            }),
        Node::List(items) => items.iter().enumerate().for_each(|(at, node)| walk(node, format!("{field}[{at}]"), look)),
        Node::Text(text) => text.split(|c: char| c.is_whitespace() || c == ',').for_each(|word| look(&field, word)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// They were dropped without a word.
    #[test]
    fn bits_after_the_length_are_told_with_their_place() {
        let text = r#"{"kind": "group", "id": "web", "members": ["10.0.0.5/24", "10.0.1.0/24", "10.0.0.7/32"],
            "rules": ["ingress tcp 22 from 192.0.2.9/30,198.51.100.0/24", {"direction": "ingress", "remote": ["2001:db8::1/64"]}],
            "description": "not 10.0.0.5/24"}"#;
        let node: Node = serde_json::from_str(text).unwrap();
        let found: Vec<(String, String)> = warnings(&node).into_iter().map(|item| (item.field, item.detail)).collect();
        let fields: Vec<&str> = found.iter().map(|(field, _)| field.as_str()).collect();
        assert_eq!(fields, ["members[0]", "rules[0]", "rules[1].remote[0]"], "{found:?}");
        assert!(found[0].1.starts_with("10.0.0.5/24 is taken for 10.0.0.0/24"), "{found:?}");
        let many = Node::List((0..100).map(|i| Node::from(format!("10.0.0.{i}/8").as_str())).collect());
        assert_eq!(warnings(&Node::Map(vec![("members".into(), many)])).len(), WARNED_MAX);
    }
}
