//! What the command line sends again, and to whom: gateways that are not there, have not read the streams yet, or do not know what became of it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use groupcast_tests::gateway::groupcast;

/// Nothing is waited for longer; a command that waits by itself gives up before.
const DEADLINE: Duration = Duration::from_secs(60);

/// Stands in for a gateway: answers each request with the next of these, and the last one for ever.
struct Stub {
    url: String,
    asked: Arc<Mutex<Vec<String>>>,
}

/// What a gateway answers.
#[derive(Clone, Copy)]
enum Say {
    /// As one that has not read the streams.
    Reading,
    /// As one whose bus does not answer: whether it was written is not said.
    Unavailable,
    /// As one that has written, and does not know whether it was taken.
    Unknown,
    Done,
}

impl Say {
    fn text(self) -> String {
        let problem = |status: u16, word: &str, detail: &str| {
            let body = format!(
                r#"{{"type":"urn:groupcast:problem:{word}","title":"x","status":{status},"detail":"{detail}","retry_after":1}}"#
            );
            (status, body)
        };
        let (status, body) = match self {
            Self::Reading => problem(503, "reading", "still reading CATALOG and REGISTRY"),
            Self::Unavailable => problem(503, "unavailable", "the bus does not answer"),
            Self::Unknown => problem(504, "unknown-outcome", "nobody knows"),
            // Enough for every command below.
            Self::Done => {
                let body = r#"{"format_version":"1","id":"h1","host":"h1","networks":["10.0.0.0/8"],"change":7,"token":"gcj.x","expires_at":"x",
                    "items":[],"documents":[],"revision":7,"repeated":false,"unchanged":false}"#;
                (200, body.to_owned())
            }
        };
        let again = if status == 200 { "" } else { "Retry-After: 1\r\n" };
        format!(
            "HTTP/1.1 {status} x\r\nContent-Type: application/json\r\n{again}Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        )
    }
}

fn request(stream: &mut TcpStream) -> Option<String> {
    let mut bytes = Vec::new();
    let mut more = [0; 4096];
    loop {
        let count = stream.read(&mut more).ok().filter(|count| *count > 0)?;
        bytes.extend_from_slice(&more[..count]);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = |line: &str| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse::<usize>().ok();
            if body.len() >= head.lines().find_map(length).unwrap_or(0) {
                return text.lines().next().map(str::to_owned);
            }
        }
    }
}

impl Stub {
    fn start(says: &'static [Say]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let asked = Arc::new(Mutex::new(Vec::new()));
        let kept = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let Some(line) = request(&mut stream) else { continue };
                let mut kept = kept.lock().expect("nobody panics");
                let say = says.get(kept.len()).or(says.last()).copied().unwrap_or(Say::Done);
                kept.push(line);
                let _ = stream.write_all(say.text().as_bytes());
            }
        });
        Self { url, asked }
    }

    fn asked(&self) -> usize {
        self.asked.lock().expect("nobody panics").len()
    }
}

/// A port that nobody listens on.
fn nowhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    format!("http://{}", listener.local_addr().expect("an address"))
}

fn run(gateways: &[&str], arguments: &[&str]) -> (i32, String) {
    let ran = groupcast(arguments, &[("GROUPCAST_GATEWAY", &gateways.join(",")), ("GROUPCAST_TOKEN", "gct.a.b")]);
    (ran.code, ran.stderr)
}

/// Commands by what it means to send them twice.
const READS: &[&str] = &["get", "groups"];
const GRANTS: &[&str] = &["host", "add", "h1", "--networks", "10.0.0.0/8"];
const DELETES: &[&str] = &["delete", "group", "web"];
/// Each time another token.
const MAKES: &[&str] = &["host", "token", "h1"];

/// What it shows, the command, what the gateway says, whether the command works, and how often it asks.
type Row = (&'static str, &'static [&'static str], &'static [Say], bool, usize);

/// `host add` and others ended at once with "still reading", and administrators wrote loops around them.
#[test]
fn commands_wait_for_a_gateway_that_is_still_reading() {
    use Say::*;
    let rows: [Row; 9] = [
        ("reading is waited for by what reads", READS, &[Reading, Reading, Done], true, 3),
        ("by what can be sent twice", GRANTS, &[Reading, Reading, Done], true, 3),
        ("by what has a key", DELETES, &[Reading, Reading, Done], true, 3),
        ("and by what cannot, since nothing was done", MAKES, &[Reading, Reading, Done], true, 3),
        ("for longer than other failures", MAKES, &[Reading, Reading, Reading, Reading, Reading, Done], true, 6),
        ("what may have been done is not sent twice", MAKES, &[Unavailable, Done], false, 1),
        ("nor where nobody knows", MAKES, &[Unknown, Done], false, 1),
        ("where twice is as good as once it is", GRANTS, &[Unknown, Unavailable, Done], true, 3),
        ("but not for ever", GRANTS, &[Unavailable], false, 4),
    ];
    for (what, arguments, says, works, asked) in rows {
        let stub = Stub::start(says);
        let (code, said) = run(&[&stub.url], arguments);
        assert_eq!((code == 0, stub.asked()), (works, asked), "{what}: {arguments:?}: {said}");
        let waits = matches!(says[0], Reading);
        assert_eq!(said.contains("still reading") && said.contains("trying again"), waits, "{what}: {said}");
        assert!(said.matches("trying again").count() <= 1, "it is said once: {said}");
    }
}

#[test]
fn waiting_for_a_gateway_ends() {
    let (stub, start) = (Stub::start(&[Say::Reading]), Instant::now());
    let (code, said) = run(&[&stub.url], GRANTS);
    assert!(code == 1 && said.contains("error: still reading"), "{code}: {said}");
    assert!(start.elapsed() < DEADLINE && stub.asked() > 4, "{} requests in {:?}", stub.asked(), start.elapsed());
    // Who says how long, waits so long and no longer. There is no other way to see it than the clock.
    let (stub, start) = (Stub::start(&[Say::Reading]), Instant::now());
    let (code, said) = run(&[&stub.url], &["delete", "group", "web", "--timeout", "2s"]);
    assert!(code == 5 && start.elapsed() < Duration::from_secs(20), "{code} after {:?}: {said}", start.elapsed());
}

/// With its first gateway dead, whatever has no key failed, although another gateway was named.
#[test]
fn every_command_turns_to_the_next_gateway_when_one_is_dead() {
    for arguments in [READS, GRANTS, DELETES, MAKES] {
        let (dead, alive) = ([nowhere(), nowhere(), nowhere(), nowhere()], Stub::start(&[Say::Done]));
        let (code, said) = run(&[&dead[0], &dead[1], &dead[2], &dead[3], &alive.url], arguments);
        assert_eq!((code, alive.asked()), (0, 1), "{arguments:?}: {said}");
        assert!(said.contains("cannot be reached") && said.contains(&dead[0]), "{arguments:?}: {said}");
    }
    // One that still reads is passed over for one that has read.
    let (reading, alive) = (Stub::start(&[Say::Reading]), Stub::start(&[Say::Done]));
    let (code, said) = run(&[&reading.url, &alive.url], MAKES);
    assert_eq!((code, reading.asked(), alive.asked()), (0, 1, 1), "{said}");
}
