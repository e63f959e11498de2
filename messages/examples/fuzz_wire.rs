//! Fuzz target for every decoder, on the stable toolchain: `cargo run --release --example fuzz_wire -- --inputs 10000000 --seed 1`.
//!
//! Inputs are arbitrary bytes, valid messages, valid messages of a newer version, damaged bytes, damaged structure, and pieces of two
//! messages joined. Whatever the input: no panic, memory in proportion to it; what is accepted encodes to something that decodes to
//! the same; what is valid is accepted and unchanged. Each input has a seed of its own, printed when it fails; `--seed` with it and
//! `--inputs 1` replays it.

#[path = "../tests/wire/support/mod.rs"]
mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use groupcast_messages::DecodeError;
use support::memory::{memory_bytes_max, peak_bytes};
use support::message::{DECODERS, Decoder, Message};
use support::{Random, generate, mutate};

const USAGE: &str = "usage: fuzz [--inputs N] [--seed S]";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Arbitrary,
    Valid,
    Newer,
    Scrambled,
    Restructured,
    Joined,
}

const WAYS: [Way; 6] = [Way::Arbitrary, Way::Valid, Way::Newer, Way::Scrambled, Way::Restructured, Way::Joined];

#[derive(Default, Clone, Copy)]
struct Tally {
    accepted: u64,
    refused: u64,
}

fn main() -> ExitCode {
    let (mut inputs, mut seed) = (1_000_000u64, 1u64);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let Some(number) = arguments.next().and_then(|text| text.parse().ok()) else {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        };
        match name.as_str() {
            "--inputs" => inputs = number,
            "--seed" => seed = number,
            _ => {
                eprintln!("{USAGE}");
                return ExitCode::from(2);
            }
        }
    }
    let mut tallies = [Tally::default(); WAYS.len()];
    let mut memory_factor_max = 0.0f64;
    for number in 0..inputs {
        let seed = seed.wrapping_add(number);
        match catch_unwind(AssertUnwindSafe(|| one(seed))) {
            Ok(Ok(outcome)) => {
                let tally = &mut tallies[outcome.way as usize];
                if outcome.accepted {
                    tally.accepted += 1
                } else {
                    tally.refused += 1
                }
                memory_factor_max = memory_factor_max.max(outcome.memory_factor);
            }
            Ok(Err(why)) => return failed(seed, &why),
            Err(_) => return failed(seed, "the decoder panicked (message above)"),
        }
    }
    println!("{inputs} inputs from seed {seed} over {} decoders: no failure", DECODERS.len());
    for (way, Tally { accepted, refused }) in WAYS.iter().zip(tallies) {
        println!("{:<14}{accepted:>12} accepted{refused:>12} refused", format!("{way:?}"));
    }
    println!("most memory per input byte, inputs of 256 bytes and more: {memory_factor_max:.1}");
    ExitCode::SUCCESS
}

fn failed(seed: u64, why: &str) -> ExitCode {
    eprintln!("seed {seed}: {why}\nreplay with --seed {seed} --inputs 1");
    ExitCode::FAILURE
}

struct Outcome {
    way: Way,
    accepted: bool,
    memory_factor: f64,
}

fn one(seed: u64) -> Result<Outcome, String> {
    let mut random = Random::new(seed);
    let random = &mut random;
    // Seeds of neighbouring inputs differ by little; their first words do not.
    let decoder = random.pick(&DECODERS);
    let way = random.pick(&WAYS);
    let (message, valid) = generate::encoded(random, decoder);
    let input = match way {
        Way::Arbitrary => arbitrary(random),
        Way::Valid => valid,
        Way::Newer => mutate::extend(random, &valid),
        Way::Scrambled => {
            let mut bytes = valid;
            mutate::scramble(random, &mut bytes);
            bytes
        }
        Way::Restructured => mutate::restructure(random, &valid),
        Way::Joined => {
            let other_decoder = random.pick(&DECODERS);
            let (_, other) = generate::encoded(random, other_decoder);
            let (head, tail) = (random.below(valid.len() + 1), random.below(other.len() + 1));
            [&valid[..head], &other[tail..]].concat()
        }
    };
    let (decoded, memory) = peak_bytes(|| decoder.decode(&input));
    if memory > memory_bytes_max(input.len()) {
        return Err(format!("{decoder:?}: {memory} bytes of memory for {} bytes of input", input.len()));
    }
    let accepted = check(decoder, way, &message, &decoded)?;
    let memory_factor = if input.len() >= 256 { memory as f64 / input.len() as f64 } else { 0.0 };
    Ok(Outcome { way, accepted, memory_factor })
}

fn check(decoder: Decoder, way: Way, message: &Message, decoded: &Result<Message, DecodeError>) -> Result<bool, String> {
    if matches!(way, Way::Valid | Way::Newer) && decoded.as_ref() != Ok(message) {
        return Err(format!("{decoder:?}: {way:?}: {message:?} came back as {decoded:?}"));
    }
    match decoded {
        Ok(value) => match decoder.decode(&value.encode()) {
            Ok(again) if again == *value => Ok(true),
            again => Err(format!("{decoder:?}: accepted {value:?}, then gave {again:?}")),
        },
        Err(error) if error.to_string().is_empty() => Err(format!("{decoder:?}: an error without words")),
        Err(_) => Ok(false),
    }
}

/// Bytes without meaning; often behind a valid beginning, because nothing gets past the version otherwise.
fn arbitrary(random: &mut Random) -> Vec<u8> {
    let mut bytes = Vec::new();
    if !random.chance(4) {
        bytes.extend([0x80 | random.below(16) as u8, 0xa1, b'v', 1]);
    }
    let count_max = if random.chance(16) { 4096 } else { 64 };
    let count = random.below(count_max);
    bytes.extend(random.bytes(count));
    bytes
}
