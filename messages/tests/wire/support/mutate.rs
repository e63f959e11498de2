//! Ways to damage or extend a valid message.

use super::Random;
use super::value::Value;

/// What a newer version may do: more fields, anywhere behind the version, of any type.
pub fn extend(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    let mut tree = Value::parse(bytes);
    let mut top = true;
    tree.for_each(&mut |value| {
        let Value::Map(fields) = value else { return };
        // The version stays first.
        let first = usize::from(std::mem::take(&mut top));
        for key in ["0", "newer", "ü"] {
            let place = first + random.below(fields.len() + 1 - first);
            fields.insert(place, (Value::text(key), Value::any(random, 3)));
        }
    });
    tree.encode()
}

/// Well-formed MessagePack with something wrong in it: a field missing, doubled or moved, a value of another type or size.
pub fn restructure(random: &mut Random, bytes: &[u8]) -> Vec<u8> {
    const KEYS: &[u8] = b"vtcndomyzaApPrRqQiIjJgGhwWuUfxklebs";
    let mut tree = Value::parse(bytes);
    for _ in 0..1 + random.below(3) {
        let target = random.below(tree.count());
        let mut at = 0;
        tree.for_each(&mut |value| {
            if at == target {
                match value {
                    Value::Map(fields) if !fields.is_empty() => {
                        let place = random.below(fields.len());
                        match random.below(5) {
                            0 => drop(fields.remove(place)),
                            1 => fields.push(fields[place].clone()),
                            2 => {
                                let other = random.below(fields.len());
                                fields.swap(place, other);
                            }
                            3 => fields[place].0 = Value::Text(vec![random.pick(KEYS)]),
                            _ => fields.push((Value::Text(vec![random.pick(KEYS)]), Value::any(random, 2))),
                        }
                    }
                    Value::List(items) if !items.is_empty() && random.chance(2) => {
                        let item = items[random.below(items.len())].clone();
                        (0..1 + random.below(40)).for_each(|_| items.push(item.clone()));
                    }
                    Value::Bin(bytes) if random.chance(2) => scramble(random, bytes),
                    Value::Uint(number) if random.chance(2) => *number = random.number() >> random.below(64),
                    Value::Text(bytes) if random.chance(2) => scramble(random, bytes),
                    other => *other = Value::any(random, 2),
                }
            }
            at += 1;
        });
    }
    tree.encode()
}

/// A few bytes flipped, dropped, doubled or inserted.
pub fn scramble(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..1 + random.below(3) {
        if bytes.is_empty() {
            bytes.push(random.word() as u8);
        }
        let at = random.below(bytes.len());
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.pick(&[0, 1, 0x7f, 0x80, 0xc0, 0xc1, 0xc6, 0xdb, 0xdd, 0xdf, 0xff]),
            2 => drop(bytes.remove(at)),
            3 => bytes.insert(at, random.word() as u8),
            4 => bytes.truncate(at),
            _ => {
                let end = at + random.below(bytes.len() - at + 1);
                let piece = bytes[at..end].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
        }
    }
}
