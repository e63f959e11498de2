//! MessagePack as a tree, as far as the messages use it and newer ones might.

use rmp::Marker;
use rmp::decode as read;
use rmp::encode as write;

use super::Random;

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    Nil,
    Flag(bool),
    Uint(u64),
    Negative(i64),
    Float(f64),
    Text(Vec<u8>),
    Bin(Vec<u8>),
    List(Vec<Value>),
    Map(Vec<(Value, Value)>),
    Extension(i8, Vec<u8>),
}

impl Value {
    pub fn text(text: &str) -> Self {
        Value::Text(text.as_bytes().to_vec())
    }

    /// Parses what our own encoders write.
    pub fn parse(bytes: &[u8]) -> Self {
        let mut rest = bytes;
        let value = Self::parse_one(&mut rest);
        assert!(rest.is_empty(), "{} bytes behind the value", rest.len());
        value
    }

    fn parse_one(rest: &mut &[u8]) -> Self {
        let marker = Marker::from_u8(rest[0]);
        let take = |rest: &mut &[u8], len: u32| {
            let (taken, tail) = rest.split_at(len as usize);
            *rest = tail;
            taken.to_vec()
        };
        match marker {
            Marker::True | Marker::False => Value::Flag(read::read_bool(rest).expect("a flag")),
            Marker::FixPos(_) | Marker::U8 | Marker::U16 | Marker::U32 | Marker::U64 => {
                Value::Uint(read::read_int(rest).expect("a number"))
            }
            Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => {
                let len = read::read_str_len(rest).expect("a text");
                Value::Text(take(rest, len))
            }
            Marker::Bin8 | Marker::Bin16 | Marker::Bin32 => {
                let len = read::read_bin_len(rest).expect("bytes");
                Value::Bin(take(rest, len))
            }
            Marker::FixArray(_) | Marker::Array16 | Marker::Array32 => {
                let len = read::read_array_len(rest).expect("a list");
                Value::List((0..len).map(|_| Self::parse_one(rest)).collect())
            }
            Marker::FixMap(_) | Marker::Map16 | Marker::Map32 => {
                let len = read::read_map_len(rest).expect("a map");
                Value::Map((0..len).map(|_| (Self::parse_one(rest), Self::parse_one(rest))).collect())
            }
            other => panic!("no message of ours has a {other:?}"),
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        self.write(&mut out);
        out
    }

    fn write(&self, out: &mut Vec<u8>) {
        match self {
            Value::Nil => write::write_nil(out).expect("memory"),
            Value::Flag(flag) => write::write_bool(out, *flag).expect("memory"),
            Value::Uint(number) => drop(write::write_uint(out, *number).expect("memory")),
            Value::Negative(number) => drop(write::write_sint(out, *number).expect("memory")),
            Value::Float(number) => write::write_f64(out, *number).expect("memory"),
            Value::Text(bytes) => {
                write::write_str_len(out, bytes.len() as u32).expect("memory");
                out.extend(bytes);
            }
            Value::Bin(bytes) => write::write_bin(out, bytes).expect("memory"),
            Value::List(items) => {
                write::write_array_len(out, items.len() as u32).expect("memory");
                items.iter().for_each(|item| item.write(out));
            }
            Value::Map(fields) => {
                write::write_map_len(out, fields.len() as u32).expect("memory");
                fields.iter().for_each(|(key, value)| {
                    key.write(out);
                    value.write(out);
                });
            }
            Value::Extension(kind, bytes) => {
                write::write_ext_meta(out, bytes.len() as u32, *kind).expect("memory");
                out.extend(bytes);
            }
        }
    }

    /// Calls `change` for the value itself and everything inside it.
    pub fn for_each(&mut self, change: &mut impl FnMut(&mut Value)) {
        change(self);
        match self {
            Value::List(items) => items.iter_mut().for_each(|item| item.for_each(change)),
            Value::Map(fields) => fields.iter_mut().for_each(|(_, value)| value.for_each(change)),
            _ => {}
        }
    }

    pub fn count(&mut self) -> usize {
        let mut count = 0;
        self.for_each(&mut |_| count += 1);
        count
    }

    /// Anything, of any type, nested to the given depth.
    pub fn any(random: &mut Random, depth: usize) -> Self {
        let len = random.below(5);
        match random.below(if depth == 0 { 8 } else { 10 }) {
            0 => Value::Nil,
            1 => Value::Flag(random.chance(2)),
            2 => Value::Uint(random.number()),
            3 => Value::Negative(-((random.number() >> 1) as i64) - 1),
            4 => Value::Float(random.word() as f64),
            5 => Value::text(&"newer ".repeat(len * len)),
            6 => Value::Bin(random.bytes(len * len * 8)),
            7 => {
                let bytes = random.pick(&[0, 1, 2, 4, 8, 16, 17, 300]);
                Value::Extension(random.word() as i8, random.bytes(bytes))
            }
            8 => Value::List((0..len).map(|_| Value::any(random, depth - 1)).collect()),
            _ => Value::Map((0..len).map(|_| (Value::any(random, 0), Value::any(random, depth - 1))).collect()),
        }
    }
}
