//! One page of a listing, read as a stream: each item is handed on as it is complete, so that a page of thousands is never in memory
//! as a whole tree.

use std::fmt;
use std::io::{BufReader, Read};

use groupcast_policy::written::Node;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Items of one page; the servers' own limits are far below.
pub const ITEMS_MAX: usize = 100_000;

/// What stood beside the items.
#[derive(Debug, Clone, PartialEq)]
pub struct Beside(Vec<(String, Node)>);

impl Beside {
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, node)| node)
    }
}

/// Reads an object whose field `list` holds the items. No list, or nothing in its place, is an error: it never means "no items".
pub fn read(body: &mut dyn Read, list: &str, beside: &[&str], each: &mut dyn FnMut(usize, Node)) -> Result<Beside, String> {
    let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(64 * 1024, body));
    let page = Page { list, beside, each, found: false, fields: Vec::new() };
    let fields = page.deserialize(&mut json).map_err(|error| format!("the answer cannot be read: {error}"))?;
    json.end().map_err(|error| format!("the answer goes on after its end: {error}"))?;
    Ok(Beside(fields))
}

struct Page<'a> {
    list: &'a str,
    beside: &'a [&'a str],
    each: &'a mut dyn FnMut(usize, Node),
    found: bool,
    fields: Vec<(String, Node)>,
}

impl<'de> DeserializeSeed<'de> for Page<'_> {
    type Value = Vec<(String, Node)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Page<'_> {
    type Value = Vec<(String, Node)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an object with a list {:?}", self.list)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<Self::Value, A::Error> {
        while let Some(key) = map.next_key::<String>()? {
            if key == self.list {
                map.next_value_seed(Items { list: self.list, each: self.each })?;
                self.found = true;
            } else if self.beside.contains(&key.as_str()) {
                let node = map.next_value()?;
                self.fields.push((key, node));
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if self.found { Ok(self.fields) } else { Err(A::Error::custom(format!("there is no {:?}", self.list))) }
    }
}

struct Items<'a> {
    list: &'a str,
    each: &'a mut dyn FnMut(usize, Node),
}

impl<'de> DeserializeSeed<'de> for Items<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Items<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list as {:?}", self.list)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        let mut index = 0;
        while let Some(item) = items.next_element::<Node>()? {
            if index == ITEMS_MAX {
                return Err(A::Error::custom(format!("more than {ITEMS_MAX} items on one page")));
            }
            (self.each)(index, item);
            index += 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn items(text: &str) -> Result<(usize, Option<Node>), String> {
        let mut count = 0;
        let mut bytes = text.as_bytes();
        let beside = read(&mut bytes, "resources", &["pagination"], &mut |_, _| count += 1)?;
        Ok((count, beside.get("pagination").cloned()))
    }

    #[test]
    fn items_come_one_by_one_wherever_the_list_stands() {
        assert_eq!(items(r#"{"resources":[{},{"a":[1]}],"x":{"y":1},"pagination":7}"#), Ok((2, Some(Node::Int(7)))));
        assert_eq!(items(r#"{"pagination":null,"resources":[]}"#), Ok((0, Some(Node::Null))));
    }

    #[test]
    fn nothing_is_never_taken_for_no_items() {
        for text in [
            r#"{"resources":null}"#,
            r#"{"pagination":{}}"#,
            "{}",
            "[]",
            "null",
            "",
            r#"{"resources":[{}"#,
            r#"{"resources":[{}]"#,
            r#"{"resources":{}}"#,
            r#"{"resources":[]} x"#,
        ] {
            assert!(items(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_page_is_bounded() {
        let page = |count: usize| format!(r#"{{"resources":[{}0]}}"#, "0,".repeat(count - 1));
        assert!(items(&page(ITEMS_MAX)).is_ok());
        assert!(items(&page(ITEMS_MAX + 1)).is_err());
    }
}
