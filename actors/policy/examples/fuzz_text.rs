//! Feeds random and mutated inputs to every reader of outside text: rule lines, selectors, YAML, JSON and the dialects.
//!
//! `cargo run --release -p groupcast-policy --example fuzz_text -- [INPUTS] [SEED]`
//!
//! Any panic ends the run and shows seed and input number, which replay it. Whatever is accepted must print and read back as
//! the same.

use groupcast_policy::compiler::Compiler;
use groupcast_policy::ids::SourceId;
use groupcast_policy::model::{Event, parse_selector};
use groupcast_policy::text::parse_rule;
use groupcast_policy::written::{self, Format, Write, Written};

const INPUTS: u64 = 1_000_000;

const RULES: &[&str] = &[
    "ingress tcp 443,8000-8999 from group:web log",
    "deny egress any to 169.254.169.254/32",
    "egress ipv6 icmp 128/any to any",
    "ingress udp 53 from 10.0.0.1-10.0.0.9,2001:db8::/32,192.0.2.1",
    "egress 200 to 0.0.0.0/0,::/0",
    "ingress icmpv6 135 from fe80::/10",
];

const SELECTORS: &[&str] = &["env=prod,tier in (web,db),!old", "a!=b, c notin (d,e) ,f", "a==b", "x in ()"];

const YAML: &[&str] = &[
    "kind: group\nid: web\nname: Web\nstateful: false\nrules:\n  - ingress tcp 443 from any\n  - {direction: egress, protocol: udp, ports: [53, 5353], remote: [10.0.0.53]}\nbindings:\n  - space:shop\n  - {labels: \"env=prod\", within: space:shop, phase: running}\nmembers: [192.0.2.0/24]\n",
    "kind: template\nid: vm\nnetwork: n\nlabels: {env: dev}\nown_labels: [env]\nhealth: {port: 80, interval_seconds: 5}\n---\nkind: workload\nid: w\nhost: h\nnetwork: n\naddresses: [10.0.0.1, \"2001:db8::1\"]\nlabels: {a: 1}\n",
    "- kind: group\n  id: &x g\n- kind: group\n  id: *x\n  rules: !!seq [ {rule: ingress any from any, description: \"d\"} ]\n",
];

const JSON: &[&str] = &[
    r#"{"kind":"group","id":"web","rules":["ingress tcp 443 from any",{"direction":"egress","protocol":6,"ports":"80","remote":"group:db","log":true}],"bindings":["global staging"],"members":["0.0.0.0/1"],"internet_member":true}"#,
    r#"{"guid":"g1","name":"dns","rules":[{"protocol":"udp","destination":"10.0.0.53,10.0.0.1-10.0.0.9","ports":"53,1-5"},{"protocol":"icmp","destination":"10.0.0.0/8","type":8,"code":-1}],"globally_enabled":{"running":true,"staging":false},"relationships":{"running_spaces":{"data":[{"guid":"s"}]},"staging_spaces":{"data":[]}}}"#,
    r#"{"id":"g1","stateful":true,"security_group_rules":[{"direction":"ingress","ethertype":"IPv6","protocol":"icmp","port_range_min":128,"port_range_max":null,"remote_ip_prefix":"2001:db8::/32"},{"direction":"egress","remote_group_id":"g2"}]}"#,
    r#"{"id":"p1","binding:host_id":"h.example","network_id":"n","fixed_ips":[{"ip_address":"10.0.0.1"}],"allowed_address_pairs":[{"ip_address":"0.0.0.0/0"}],"security_groups":["g1"],"port_security_enabled":false,"device_owner":"network:dhcp"}"#,
    r#"[{"kind":"workload","id":"w","host":"h","network":"n","incarnation":9223372036854775807,"enforced":"none"}]"#,
];

/// Pieces that break readers.
const PIECES: &[&str] = &[
    "",
    " ",
    "\n",
    "\t",
    "\0",
    "0",
    "-1",
    "00",
    "65535",
    "65536",
    "4294967296",
    "18446744073709551616",
    "1e999",
    "-",
    "--",
    ",",
    ",,",
    ":",
    "::",
    "/",
    "/0",
    "/129",
    "[",
    "]",
    "{",
    "}",
    "\"",
    "'",
    "&a",
    "*a",
    "<<: *a",
    "!!binary",
    "%",
    "|",
    ">",
    "#",
    "null",
    "~",
    "true",
    "no",
    ".inf",
    "0x10",
    "1:30",
    "é",
    "\u{202e}",
    "\u{feff}",
    "group:",
    "any",
    "from",
    "to",
    "log",
    "deny",
    "ipv6",
    "icmp",
    "tcp",
    "255.255.255.255",
    "0.0.0.0-255.255.255.255",
    "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff",
    "::ffff:1.2.3.4",
    "fe80::1%eth0",
    "in (",
    ")",
];

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn of<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[self.below(list.len())]
    }
}

/// The words of a text: what stands between anything else than letters, digits and dots.
fn words(text: &[char]) -> Vec<(usize, usize)> {
    let is_word = |c: &char| c.is_alphanumeric() || *c == '.';
    let mut words = Vec::new();
    let mut start = None;
    for (at, c) in text.iter().chain([&' ']).enumerate() {
        match (is_word(c), start) {
            (true, None) => start = Some(at),
            (false, Some(first)) => {
                words.push((first, at));
                start = None;
            }
            _ => {}
        }
    }
    words
}

/// Exchanges one word, which leaves the structure whole and so reaches deeper.
fn exchange_word(random: &mut Random, text: &mut Vec<char>, other: &str) {
    let places = words(text);
    if places.is_empty() {
        return;
    }
    let (from, to) = places[random.below(places.len())];
    let foreign: Vec<char> = other.chars().collect();
    let choices = words(&foreign);
    let new: Vec<char> = match random.below(3) {
        0 if !choices.is_empty() => {
            let (a, b) = choices[random.below(choices.len())];
            foreign[a..b].to_vec()
        }
        1 => random.below(70_000).to_string().chars().collect(),
        _ => random.of(PIECES).chars().collect(),
    };
    drop(text.splice(from..to, new));
}

/// Cuts, doubles, swaps and inserts; works on characters, so that the result is text.
fn mutate(random: &mut Random, seed: &str, other: &str) -> String {
    let mut text: Vec<char> = seed.chars().collect();
    if random.below(2) == 0 {
        for _ in 0..1 + random.below(2) {
            exchange_word(random, &mut text, other);
        }
        return text.into_iter().collect();
    }
    for _ in 0..1 + random.below(4) {
        let (a, b) = (random.below(text.len() + 1), random.below(text.len() + 1));
        let (from, to) = (a.min(b), a.max(b).min(a.min(b) + 24));
        match random.below(7) {
            0 => drop(text.drain(from..to)),
            1 => drop(text.splice(from..from, random.of(PIECES).chars())),
            2 => drop(text.splice(from..to, random.of(PIECES).chars())),
            3 => {
                let copy: Vec<char> = text[from..to].to_vec();
                drop(text.splice(to..to, copy));
            }
            4 => {
                let foreign: Vec<char> = other.chars().skip(random.below(other.len())).take(random.below(24)).collect();
                drop(text.splice(from..to, foreign));
            }
            5 if from < text.len() => text[from] = char::from_u32(random.below(0x300) as u32).unwrap_or('x'),
            _ => text.truncate(from),
        }
    }
    text.into_iter().collect()
}

fn rule(input: &str) -> bool {
    let Ok(rule) = parse_rule(input) else { return false };
    assert_eq!(parse_rule(&rule.to_string()).as_ref(), Ok(&rule), "does not read back: {input:?}");
    true
}

fn selector(input: &str) -> bool {
    let Ok(requirements) = parse_selector(input) else { return false };
    let printed: Vec<String> = requirements.iter().map(ToString::to_string).collect();
    assert_eq!(parse_selector(&printed.join(",")).as_ref(), Ok(&requirements), "does not read back: {input:?}");
    true
}

fn document(format: Format, input: &str, compiler: &mut Compiler) -> bool {
    let Ok(documents) = written::read(format, input) else { return false };
    let Some(first) = documents.first() else { return false };
    for format in [Format::Json, Format::Yaml] {
        let again = written::read(format, &first.write(format));
        assert_eq!(again.as_deref(), Ok(std::slice::from_ref(first)), "does not read back: {input:?}");
    }
    let events: Vec<Event> = documents.into_iter().map(Event::from).collect();
    compiler.apply(&events);
    true
}

fn dialects(input: &str, source: &SourceId, compiler: &mut Compiler) -> bool {
    let Ok(nodes) = written::nodes(Format::Json, input) else { return false };
    let Some(node) = nodes.first() else { return false };
    let group = written::cloud_foundry::group(source, node, 0).or_else(|_| written::neutron::group(source, node, 0));
    let port = written::neutron::port(source, node, 0).ok().flatten();
    let _ = written::neutron::address_group(source, node, 0);
    for written in group.into_iter().map(Written::Group).chain(port.map(Written::Workload)) {
        let again = written::read(Format::Json, &written.write(Format::Json));
        assert_eq!(again.as_deref(), Ok(std::slice::from_ref(&written)), "does not read back: {input:?}");
        compiler.apply([&Event::from(written)]);
    }
    true
}

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let inputs = arguments.next().and_then(Result::ok).unwrap_or(INPUTS);
    let seed = arguments.next().and_then(Result::ok).unwrap_or(1);
    let source = SourceId::new("fuzz").expect("a valid id");
    let mut compiler = Compiler::new();
    let mut accepted = [0u64; 5];
    std::panic::set_hook(Box::new(move |panic| eprintln!("seed {seed}: {panic}")));
    for number in 0..inputs {
        // Each input by itself: a failure replays without those before it, apart from what the compiler holds.
        let mut random = Random(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
        let kind = (number % 5) as usize;
        let (seeds, others): (&[&str], &[&str]) = match kind {
            0 => (RULES, RULES),
            1 => (SELECTORS, PIECES),
            2 => (YAML, RULES),
            3 => (JSON, RULES),
            _ => (JSON, YAML),
        };
        let (seed_text, other) = (random.of(seeds), random.of(others));
        let input = mutate(&mut random, seed_text, other);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| match kind {
            0 => rule(&input),
            1 => selector(&input),
            2 => document(Format::Yaml, &input, &mut compiler),
            3 => document(Format::Json, &input, &mut compiler),
            _ => dialects(&input, &source, &mut compiler),
        }));
        match outcome {
            Ok(is_accepted) => accepted[kind] += u64::from(is_accepted),
            Err(_) => {
                eprintln!("input {number} of seed {seed}: {input:?}");
                std::process::exit(1);
            }
        }
        if number % 1_000_000 == 999_999 {
            eprintln!("{} inputs", number + 1);
        }
    }
    let [rules, selectors, yaml, json, dialects] = accepted;
    println!(
        "{inputs} inputs, no panic; accepted: rules {rules}, selectors {selectors}, yaml {yaml}, json {json}, dialects {dialects}"
    );
}
