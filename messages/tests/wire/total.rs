//! Whatever bytes come: a value or an error, and memory in proportion to the input.

use groupcast_messages::{DecodeError, PAYLOAD_BYTES_MAX};

use crate::support::memory::{MEMORY_BASE_BYTES, memory_bytes_max, peak_bytes};
use crate::support::message::{DECODERS, Decoder};
use crate::support::value::Value;
use crate::support::{Random, generate, mutate};

const ROUNDS: u64 = 4_000;

fn all_decoders_stay_small(input: &[u8], what: &str) {
    for decoder in DECODERS {
        let (_, memory) = peak_bytes(|| decoder.decode(input));
        assert!(memory <= memory_bytes_max(input.len()), "{decoder:?}: {memory} bytes for {}: {what}", input.len());
    }
}

#[test]
fn arbitrary_bytes_never_panic_nor_take_more_memory_than_they_are_worth() {
    for seed in 0..ROUNDS {
        let mut random = Random::new(seed);
        let len = random.below(512);
        let mut input = vec![0x80 | random.below(16) as u8, 0xa1, b'v', 1];
        input.extend(random.bytes(len));
        all_decoders_stay_small(&input, &format!("seed {seed}"));
        all_decoders_stay_small(&input[4..], &format!("seed {seed}"));
    }
}

#[test]
fn damaged_messages_never_panic_nor_take_more_memory_than_they_are_worth() {
    for seed in 0..ROUNDS {
        let mut random = Random::new(seed);
        let decoder = random.pick(&DECODERS);
        let (_, valid) = generate::encoded(&mut random, decoder);
        let mut damaged = valid.clone();
        mutate::scramble(&mut random, &mut damaged);
        all_decoders_stay_small(&damaged, &format!("scrambled, seed {seed}"));
        all_decoders_stay_small(&mutate::restructure(&mut random, &valid), &format!("restructured, seed {seed}"));
    }
}

#[test]
fn every_cut_of_a_message_is_an_error() {
    for seed in 0..20 {
        for decoder in DECODERS {
            let (_, valid) = generate::encoded(&mut Random::new(seed), decoder);
            for end in 0..valid.len() {
                assert!(decoder.decode(&valid[..end]).is_err(), "{decoder:?} of seed {seed} cut at {end}");
            }
        }
    }
}

/// Every length field at its largest, behind each key: the claim must not be believed.
#[test]
fn claimed_lengths_reserve_nothing() {
    let claims: [&[u8]; 9] = [
        &[0xdb, 0xff, 0xff, 0xff, 0xff],
        &[0xc6, 0xff, 0xff, 0xff, 0xff],
        &[0xdd, 0xff, 0xff, 0xff, 0xff],
        &[0xdf, 0xff, 0xff, 0xff, 0xff],
        &[0xc9, 0xff, 0xff, 0xff, 0xff, 0x01],
        &[0xdd, 0x00, 0x00, 0x10, 0x00],
        &[0xdc, 0x02, 0x00],
        &[0xda, 0xff, 0xff],
        &[0xc5, 0xff, 0xff],
    ];
    for key in 0x20..0x7f {
        for claim in claims {
            let input = [&[0x82, 0xa1, b'v', 1, 0xa1, key], claim].concat();
            for decoder in DECODERS {
                let (decoded, memory) = peak_bytes(|| decoder.decode(&input));
                assert!(decoded.is_err(), "{decoder:?} {}", char::from(key));
                assert!(memory <= MEMORY_BASE_BYTES, "{decoder:?} {}: {memory} bytes", char::from(key));
            }
        }
    }
    let input = [0xdf, 0xff, 0xff, 0xff, 0xff, 0xa1, b'v', 1];
    all_decoders_stay_small(&input, "a map of four billion fields");
}

#[test]
fn nesting_costs_nothing() {
    for opener in [0x91u8, 0x81] {
        let mut input = vec![0x82, 0xa1, b'v', 1, 0xa1, b'0'];
        input.extend(std::iter::repeat_n(opener, 500_000));
        for decoder in DECODERS {
            let (decoded, memory) = peak_bytes(|| decoder.decode(&input));
            assert_eq!(decoded, Err(DecodeError::Truncated { item: "unknown field" }), "{decoder:?}");
            assert!(memory <= MEMORY_BASE_BYTES, "{decoder:?}: {memory} bytes");
        }
    }
}

#[test]
fn an_oversized_message_is_refused_unread() {
    let mut input = vec![0x82, 0xa1, b'v', 1, 0xa1, b'0', 0xc6];
    let padding = PAYLOAD_BYTES_MAX - input.len() - 4;
    input.extend((padding as u32).to_be_bytes());
    input.resize(PAYLOAD_BYTES_MAX, 0);
    for decoder in DECODERS {
        let at_the_bound = decoder.decode(&input);
        assert!(!matches!(at_the_bound, Err(DecodeError::Oversized { .. })), "{decoder:?}");
        let mut above = input.clone();
        above.push(0);
        assert_eq!(decoder.decode(&above), Err(DecodeError::Oversized { found: PAYLOAD_BYTES_MAX + 1 }), "{decoder:?}");
    }
}

/// The inputs that become the most memory per byte: many items, each as short as it can be.
#[test]
fn the_densest_inputs_stay_within_the_factor() {
    use Value::{Bin, List, Uint};
    let text = Value::text;
    let map = |fields: &[(&str, Value)]| Value::Map(fields.iter().map(|(key, value)| (text(key), value.clone())).collect());
    let message = |fields: &[(&str, Value)]| map(&[&[("v", Uint(1))], fields].concat()).encode();
    let delta = |key: &str, items: Value| message(&[("t", Uint(1)), ("c", Uint(1)), ("d", Uint(1)), (key, items)]);
    let chunk = |entries: Vec<Value>| message(&[("q", Uint(1)), ("t", Uint(1)), ("h", Uint(1)), ("e", List(entries))]);
    let many = |count: usize, item: Value| List(vec![item; count]);
    let (workload, network) = (("w", text("w")), ("n", text("n")));
    let placement =
        map(&[workload.clone(), ("i", Uint(1)), network.clone(), ("a", Bin(vec![0; 4])), ("g", List(vec![text("g")]))]);
    let rule =
        map(&[("h", Uint(0)), ("t", Uint(2)), ("p", Uint(6)), ("r", Uint(1)), ("o", Bin(vec![0; 2])), ("a", Bin(vec![0; 2]))]);
    let registered = map(&[workload, network, ("l", List(vec![text("k"), text("")])), ("a", Bin(vec![0; 4]))]);
    let members = map(&[("k", Uint(4)), ("i", Bin(vec![0; 200_000]))]);
    let part = map(&[("i", Uint(0)), ("r", Uint(1)), ("b", Uint(2)), ("d", Uint(9)), ("e", members)]);
    let past = map(&[("r", Uint(1)), ("p", Bin(vec![]))]);
    let deltas = map(&[("i", Uint(0)), ("r", Uint(1)), ("b", Uint(1)), ("a", many(1_000, past))]);
    let same = map(&[("i", Uint(0)), ("r", Uint(1)), ("b", Uint(0))]);
    for (decoder, input) in [
        (Decoder::DeltaScope, delta("g", many(200_000, text("g")))),
        (Decoder::DeltaScope, delta("G", many(200_000, text("g")))),
        (Decoder::DeltaHost, delta("w", many(30_000, placement))),
        (Decoder::DeltaHost, delta("W", many(200_000, text("w")))),
        (Decoder::DeltaRules, delta("u", many(30_000, rule))),
        (Decoder::DeltaRules, delta("U", Bin(vec![0; 8 * 100_000]))),
        (Decoder::DeltaMembers, delta("a", Bin(vec![0; 4 * 200_000]))),
        (Decoder::DeltaMembers, delta("i", Bin(vec![0; 200_000]))),
        (Decoder::Answer, chunk(vec![part; 4])),
        (Decoder::Answer, chunk(vec![deltas; 100])),
        (Decoder::Answer, chunk(vec![same; 16_000])),
        (Decoder::Register, message(&[("b", Uint(1)), ("w", many(1_024, registered))])),
    ] {
        let (decoded, memory) = peak_bytes(|| decoder.decode(&input));
        assert!(decoded.is_ok(), "{decoder:?}: {:?}", decoded.err());
        assert!(memory <= memory_bytes_max(input.len()), "{decoder:?}: {memory} bytes of memory for {} of input", input.len());
    }
}
