//! One page of a listing, read as a stream: each item is handed on as it is complete, as the bytes it came in, so that a page of thousands
//! is never in memory as a whole tree, and an item that is known by its bytes need not be read at all.
//!
//! Items are cut out of the page and the rest, with a `0` in the place of each, is read as a document of its own: that is what finds a
//! page that is no page.

use std::fmt;
use std::io::Read;

use groupcast_policy::written::Node;
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Items of one page; the servers' own limits are far below.
pub const ITEMS_MAX: usize = 100_000;
/// What may stand beside the items, in bytes.
pub const BESIDE_BYTES_MAX: usize = 1024 * 1024;
/// Longest item, in bytes: far more than any that could be published, and what is made of it takes several times as much memory.
pub const ITEM_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Read at once.
const CHUNK_BYTES: usize = 64 * 1024;

/// Takes an item: which it is, and the bytes it came in.
pub type Each<'a> = dyn FnMut(usize, Result<&[u8], TooLong<'_>>) -> Result<(), String> + 'a;

/// An item that is too long to be read; it spoils only itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("longer than {ITEM_BYTES_MAX} bytes: split it")]
pub struct TooLong<'a> {
    /// How it begins.
    pub begins: &'a [u8],
}

/// What stood beside the items.
#[derive(Debug, Clone, PartialEq)]
pub struct Beside(Vec<(String, Node)>);

impl Beside {
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, node)| node)
    }
}

/// Reads one item.
pub fn node(bytes: &[u8]) -> Result<Node, String> {
    serde_json::from_slice(bytes).map_err(unreadable)
}

fn unreadable(error: impl fmt::Display) -> String {
    format!("the answer cannot be read: {error}")
}

/// Reads an object whose field `list` holds the items. No list, or nothing in its place, is an error: it never means "no items".
pub fn read(body: &mut dyn Read, list: &str, beside: &[&str], each: &mut Each<'_>) -> Result<Beside, String> {
    let mut cutter = Cutter {
        list,
        rest: Vec::new(),
        item: Vec::new(),
        too_long: false,
        items: 0,
        within: Within::Rest,
        text: Text::No,
        depth: 0,
        key: Key::None,
    };
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        let count = match body.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(unreadable(error)),
        };
        cutter.cut(&chunk[..count], each)?;
        if cutter.rest.len() > BESIDE_BYTES_MAX {
            return Err(unreadable(format!("more than {BESIDE_BYTES_MAX} bytes beside {list:?}")));
        }
    }
    let Cutter { rest, items, .. } = cutter;
    let mut json = serde_json::Deserializer::from_slice(&rest);
    let page = Page { list, beside, items, found: false, fields: Vec::new() };
    let fields = page.deserialize(&mut json).map_err(unreadable)?;
    json.end().map_err(|error| format!("the answer goes on after its end: {error}"))?;
    Ok(Beside(fields))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Within {
    /// Not in the list.
    Rest,
    /// In the list, between items.
    List,
    /// In an item, so many brackets deep.
    Item(usize),
    /// In an item without brackets or quotes.
    Bare,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Text {
    No,
    Yes,
    /// The next byte is not looked at.
    Escaped,
}

/// How far the name of a field of the page itself is read.
enum Key {
    None,
    Begun(Vec<u8>),
    Read(Vec<u8>),
    /// With its colon.
    Asked(Vec<u8>),
}

struct Cutter<'a> {
    list: &'a str,
    rest: Vec<u8>,
    item: Vec<u8>,
    /// The item goes on after what is kept of it.
    too_long: bool,
    items: usize,
    within: Within,
    text: Text,
    depth: usize,
    key: Key,
}

impl Cutter<'_> {
    fn cut(&mut self, bytes: &[u8], each: &mut Each<'_>) -> Result<(), String> {
        let mut at = 0;
        while at < bytes.len() {
            let Within::Item(depth) = self.within else {
                // Looked at again if it ends an item without being part of it.
                at += usize::from(self.beside(bytes[at], each)?);
                continue;
            };
            let (end, depth) = self.inside(&bytes[at..], depth);
            self.keep(&bytes[at..at + end]);
            self.within = Within::Item(depth);
            at += end;
            if depth == 0 && self.text == Text::No {
                self.hand_on(each)?;
            }
        }
        Ok(())
    }

    /// How many of these bytes belong to the item, and how deep it is then.
    fn inside(&mut self, bytes: &[u8], mut depth: usize) -> (usize, usize) {
        for (at, byte) in bytes.iter().enumerate() {
            match (self.text, byte) {
                (Text::Escaped, _) => self.text = Text::Yes,
                (Text::Yes, b'\\') => self.text = Text::Escaped,
                (Text::Yes, b'"') => self.text = Text::No,
                (Text::Yes, _) => continue,
                (Text::No, b'"') => self.text = Text::Yes,
                (Text::No, b'{' | b'[') => depth += 1,
                (Text::No, b'}' | b']') => depth = depth.saturating_sub(1),
                (Text::No, _) => continue,
            }
            if depth == 0 && self.text == Text::No {
                return (at + 1, depth);
            }
        }
        (bytes.len(), depth)
    }

    /// Whether the byte was taken.
    fn beside(&mut self, byte: u8, each: &mut Each<'_>) -> Result<bool, String> {
        match (self.within, byte) {
            (Within::Bare, b',' | b']' | b' ' | b'\t' | b'\n' | b'\r') => {
                self.hand_on(each)?;
                return Ok(false);
            }
            (Within::Bare, _) => self.keep(&[byte]),
            (Within::List, b',' | b' ' | b'\t' | b'\n' | b'\r') => self.rest.push(byte),
            (Within::List, b']') => {
                (self.within, self.depth, self.key) = (Within::Rest, self.depth - 1, Key::None);
                self.rest.push(byte);
            }
            (Within::List, b'{' | b'[') => self.begin(byte, Within::Item(1)),
            (Within::List, b'"') => {
                self.text = Text::Yes;
                self.begin(byte, Within::Item(0));
            }
            (Within::List, _) => self.begin(byte, Within::Bare),
            (Within::Rest | Within::Item(_), _) => self.outside(byte),
        }
        Ok(true)
    }

    fn begin(&mut self, byte: u8, within: Within) {
        self.item.push(byte);
        self.within = within;
    }

    fn keep(&mut self, bytes: &[u8]) {
        let kept = bytes.len().min(ITEM_BYTES_MAX - self.item.len());
        self.item.extend_from_slice(&bytes[..kept]);
        self.too_long |= kept < bytes.len();
    }

    fn hand_on(&mut self, each: &mut Each<'_>) -> Result<(), String> {
        if self.items == ITEMS_MAX {
            return Err(unreadable(format!("more than {ITEMS_MAX} items on one page")));
        }
        let item = if self.too_long { Err(TooLong { begins: &self.item }) } else { Ok(self.item.as_slice()) };
        each(self.items, item)?;
        self.too_long = false;
        self.items += 1;
        self.item.clear();
        self.rest.push(b'0');
        self.within = Within::List;
        Ok(())
    }

    fn outside(&mut self, byte: u8) {
        self.rest.push(byte);
        match (self.text, byte) {
            (Text::Escaped, _) => self.text = Text::Yes,
            (Text::Yes, b'\\') => self.text = Text::Escaped,
            (Text::Yes, b'"') => {
                self.text = Text::No;
                self.key = match std::mem::replace(&mut self.key, Key::None) {
                    Key::Begun(name) => Key::Read(name),
                    _ => Key::None,
                };
            }
            (Text::Yes, _) => {
                if let Key::Begun(name) = &mut self.key {
                    name.push(byte);
                }
            }
            (Text::No, b'"') => {
                self.text = Text::Yes;
                self.key = if self.depth == 1 { Key::Begun(Vec::new()) } else { Key::None };
            }
            (Text::No, b':') => {
                self.key = match std::mem::replace(&mut self.key, Key::None) {
                    Key::Read(name) => Key::Asked(name),
                    _ => Key::None,
                };
            }
            (Text::No, b' ' | b'\t' | b'\n' | b'\r') => {}
            (Text::No, b'[') if self.depth == 1 && matches!(&self.key, Key::Asked(name) if name == self.list.as_bytes()) => {
                (self.within, self.depth) = (Within::List, 2);
            }
            (Text::No, b'{' | b'[') => (self.depth, self.key) = (self.depth + 1, Key::None),
            (Text::No, b'}' | b']') => (self.depth, self.key) = (self.depth.saturating_sub(1), Key::None),
            (Text::No, _) => self.key = Key::None,
        }
    }
}

/// The page without its items.
struct Page<'a> {
    list: &'a str,
    beside: &'a [&'a str],
    /// That were cut out.
    items: usize,
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
                let items = map.next_value_seed(Places { list: self.list })?;
                // A list that stands there twice, or whose name is written in another way.
                if std::mem::replace(&mut self.found, true) || items != self.items {
                    return Err(A::Error::custom(format!("{:?} does not stand there once and plainly", self.list)));
                }
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

/// Counts the places of items.
struct Places<'a> {
    list: &'a str,
}

impl<'de> DeserializeSeed<'de> for Places<'_> {
    type Value = usize;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<usize, D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Places<'_> {
    type Value = usize;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list as {:?}", self.list)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<usize, A::Error> {
        let mut count = 0;
        while items.next_element::<IgnoredAny>()?.is_some() {
            count += 1;
        }
        Ok(count)
    }
}

#[cfg(test)]
#[path = "page_tests.rs"]
mod tests;
