//! What somebody at a terminal sees: a bar while a change is waited for, and a question that takes the change back unless it is answered.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use groupcast_bus_config::lab::Up;
use groupcast_control::place::{self, Place};
use groupcast_tests::control::binary;
use groupcast_tests::gateway::{Folder, User};
use groupcast_tests::world::{DEADLINE, eventually};

/// A command on a terminal of its own, which `script` makes.
struct Terminal {
    child: Child,
    read: mpsc::Receiver<Vec<u8>>,
    shown: String,
}

impl Terminal {
    fn run(up: &Up, arguments: &str) -> Self {
        let mut child = Command::new("script")
            .args(["-qefc", &format!("{} {arguments}", binary().display()), "/dev/null"])
            .env("GROUPCAST_GATEWAY", &up.addresses.gateway)
            .env("GROUPCAST_TOKEN_FILE", &up.addresses.token_file)
            .env("GROUPCAST_CONTEXTS", "/nonexistent/contexts.toml")
            .env("TERM", "xterm")
            .env_remove("NO_COLOR")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("script runs");
        let mut output = child.stdout.take().expect("a pipe");
        let (told, read) = mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut buffer) {
                let _ = told.send(buffer[..count].to_vec()); // nobody looks any more
            }
        });
        Self { child, read, shown: String::new() }
    }

    fn shows(&mut self, words: &str) {
        let start = Instant::now();
        while !self.shown.contains(words) {
            let left = DEADLINE.saturating_sub(start.elapsed());
            let bytes = self.read.recv_timeout(left).unwrap_or_else(|_| panic!("{words} was never shown in {:?}", self.shown));
            self.shown += &String::from_utf8_lossy(&bytes);
        }
    }

    fn types(&mut self, words: &str) {
        let input = self.child.stdin.as_mut().expect("a pipe");
        input.write_all(words.as_bytes()).and_then(|()| input.flush()).expect("typed");
    }

    fn code(&mut self) -> i32 {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("its state") {
                self.read.try_iter().for_each(|bytes| self.shown += &String::from_utf8_lossy(&bytes));
                return status.code().unwrap_or(-1);
            }
            assert!(start.elapsed() < DEADLINE, "it does not end: {:?}", self.shown);
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bar_moves_and_a_question_is_asked() {
    let folder = Folder::new("terminal");
    let up = Up::start(binary(), &folder.0, SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).expect("groupcast up");
    let user = User::of(up.addresses.gateway.clone(), &up.token().expect("a token")).await;
    let file = folder.0.join("web.yaml");
    let write = |port: u16| {
        let text = format!("kind: group\nid: web\nrules: [ingress tcp {port} from any]\nbindings: [\"app:web\"]\n");
        std::fs::write(&file, text).expect("written");
        file.display().to_string()
    };
    let first = write(443);
    let mut kept = Terminal::run(&up, &format!("apply -f {first} --confirm 60s"));
    kept.shows("type yes to keep it");
    kept.types("yes\n");
    kept.shows("stays");
    assert_eq!(kept.code(), 0);

    // Anything else is no.
    let port = async || user.get("/v1/groups/web").await.body["document"]["rules"][0].as_str().unwrap_or_default().to_owned();
    let second = write(444);
    let mut taken_back = Terminal::run(&up, &format!("apply -f {second} --confirm 1s"));
    taken_back.shows("type yes to keep it");
    taken_back.types("no\n");
    taken_back.shows("is taken back");
    assert_eq!(taken_back.code(), 3);
    eventually("it is as before", || async { port().await.contains("443") }).await;

    // A host without an agent: the bar stands, and the host is named.
    place::enter(&up, None, &[Place { workload: "web-1", host: "h1", app: "web" }]).await.expect("registered");
    eventually("it is registered", || async { user.get("/v1/workloads/web-1").await.status == 200 }).await;
    let third = write(445);
    let mut waiting = Terminal::run(&up, &format!("apply -f {third} --wait --timeout 4s"));
    waiting.shows("[..............................] 0 of 1 hosts enforce it");
    assert_eq!(waiting.code(), 5, "{}", waiting.shown);
    assert!(waiting.shown.contains("\x1b[K") && waiting.shown.contains("\r\n  h1: "), "{:?}", waiting.shown);
}
