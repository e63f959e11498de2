//! The lean client against async-nats: the same script on the same real server must see the same things.

use std::net::SocketAddr;
use std::time::Duration;

use async_nats::HeaderMap;
use futures::StreamExt;
use groupcast_bus_config::server::{Config, Server};
use groupcast_simulator::lean::{Client, ClientError, ConnectOptions, Credentials, Frame, Handler, Message, Wire, spawn};
use tokio::time::timeout;

/// How long anything here may take before it counts as lost. Generous: machines are shared.
const DEADLINE: Duration = Duration::from_secs(30);

/// Largest payload of the script: the default limit of a server.
const LARGE: usize = 1024 * 1024;

/// What a message looks like to a subscriber, whichever client received it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Received {
    subject: String,
    headers: Vec<(String, String)>,
    payload: Vec<u8>,
}

/// The operations both clients have, so that one script drives either.
trait Subject {
    async fn subscribe(&mut self, subject: &str);
    async fn publish(&mut self, subject: &str, headers: &[(&str, &str)], payload: &[u8]);
    async fn flush(&mut self);
    async fn request(&mut self, subject: &str, payload: &[u8]) -> Option<Vec<u8>>;
    async fn next(&mut self) -> Received;
}

impl Subject for Client {
    async fn subscribe(&mut self, subject: &str) {
        Client::subscribe(self, subject);
    }

    async fn publish(&mut self, subject: &str, headers: &[(&str, &str)], payload: &[u8]) {
        if headers.is_empty() {
            self.outbound().publish(subject, None, payload);
        } else {
            self.outbound().publish_with_headers(subject, None, headers, payload);
        }
    }

    async fn flush(&mut self) {
        timeout(DEADLINE, Client::flush(self)).await.expect("flush in time").expect("flush");
    }

    async fn request(&mut self, subject: &str, payload: &[u8]) -> Option<Vec<u8>> {
        match timeout(DEADLINE, Client::request(self, subject, &[], payload)).await.expect("answer in time") {
            Ok(answer) => Some(answer.payload.to_vec()),
            Err(ClientError::NoResponders(_)) => None,
            Err(error) => panic!("{error}"),
        }
    }

    async fn next(&mut self) -> Received {
        let message: Message = timeout(DEADLINE, Client::next(self)).await.expect("message in time").expect("message");
        let headers = message.headers().iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Received { headers, subject: message.subject, payload: message.payload.to_vec() }
    }
}

struct Reference {
    client: async_nats::Client,
    subscriptions: futures::stream::SelectAll<async_nats::Subscriber>,
}

impl Subject for Reference {
    async fn subscribe(&mut self, subject: &str) {
        self.subscriptions.push(self.client.subscribe(subject.to_owned()).await.expect("subscribe"));
    }

    async fn publish(&mut self, subject: &str, headers: &[(&str, &str)], payload: &[u8]) {
        let mut map = HeaderMap::new();
        headers.iter().for_each(|(name, value)| map.append(*name, *value));
        let payload = payload.to_vec().into();
        match headers.len() {
            0 => self.client.publish(subject.to_owned(), payload).await.expect("publish"),
            _ => self.client.publish_with_headers(subject.to_owned(), map, payload).await.expect("publish"),
        }
    }

    async fn flush(&mut self) {
        timeout(DEADLINE, self.client.flush()).await.expect("flush in time").expect("flush");
    }

    async fn request(&mut self, subject: &str, payload: &[u8]) -> Option<Vec<u8>> {
        match timeout(DEADLINE, self.client.request(subject.to_owned(), payload.to_vec().into())).await.expect("answer in time") {
            Ok(answer) => Some(answer.payload.to_vec()),
            Err(error) if error.kind() == async_nats::RequestErrorKind::NoResponders => None,
            Err(error) => panic!("{error}"),
        }
    }

    async fn next(&mut self) -> Received {
        let message = timeout(DEADLINE, self.subscriptions.next()).await.expect("message in time").expect("message");
        let mut headers: Vec<(String, String)> = Vec::new();
        for (name, values) in message.headers.iter().flat_map(HeaderMap::iter) {
            headers.extend(values.iter().map(|value| (name.to_string(), value.to_string())));
        }
        Received { subject: message.subject.to_string(), headers, payload: message.payload.to_vec() }
    }
}

async fn server() -> Server {
    Server::start(Config::plain()).await.expect("a nats-server for the test")
}

fn address(server: &Server) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], server.client_port()))
}

async fn lean(server: &Server) -> Client {
    Client::connect(address(server), &ConnectOptions { name: "lean".to_owned(), ..Default::default() }).await.expect("connect")
}

/// Sends and receives through `subject`, with `helper` on the other side, and lists everything it saw.
async fn script(subject: &mut impl Subject, helper: &async_nats::Client) -> Vec<Received> {
    let mut seen = Vec::new();
    subject.subscribe("a.plain").await;
    subject.subscribe("a.*.wild").await;
    subject.subscribe("a.rest.>").await;
    subject.flush().await;

    // Its own messages, one at a time so that the order is the same for a client that queues per subscription.
    let large: Vec<u8> = (0..LARGE).map(|at| (at % 251) as u8).collect();
    type Step<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a [u8]);
    let script: &[Step] = &[
        ("a.plain", &[], b"one"),
        ("a.plain", &[("Some-Name", "some value"), ("Other", "")], b"two"),
        ("a.plain", &[("Twice", "1"), ("Twice", "2")], b""),
        ("a.b.wild", &[], b"\r\nMSG a.plain 1 3\r\nbad\r\n"),
        ("a.rest.c.d", &[("X", "y")], b"PING\r\n"),
        ("a.plain", &[], &large),
    ];
    for (name, headers, payload) in script {
        subject.publish(name, headers, payload).await;
        subject.flush().await;
        let mut received = subject.next().await;
        received.headers.sort();
        seen.push(received);
    }
    assert_eq!(seen.last().map(|received| received.payload.len()), Some(LARGE));

    // Requests: answered by the helper, and by nobody.
    let mut service = helper.subscribe("svc").await.expect("subscribe");
    let helper_side = helper.clone();
    let answering = tokio::spawn(async move {
        while let Some(request) = service.next().await {
            let mut answer = b"answer to ".to_vec();
            answer.extend_from_slice(&request.payload);
            helper_side.publish(request.reply.expect("a reply subject"), answer.into()).await.expect("publish");
        }
    });
    // async-nats has no flush that waits for the server: ask until the service is known.
    while helper.request("svc", "known?".into()).await.is_err() {
        tokio::task::yield_now().await;
    }
    for request in ["r1", "r2"] {
        let payload = subject.request("svc", request.as_bytes()).await.expect("an answer");
        seen.push(Received { subject: "answer".to_owned(), headers: Vec::new(), payload });
    }
    answering.abort();
    assert_eq!(subject.request("nobody.listens", b"").await, None);

    // Many messages while nobody reads: all are there afterwards, in order.
    for number in 0..SLOW_COUNT {
        helper.publish("a.plain", slow_payload(number).into()).await.expect("publish");
    }
    helper.flush().await.expect("flush");
    for number in 0..SLOW_COUNT {
        let received = subject.next().await;
        assert_eq!((received.subject.as_str(), &received.payload), ("a.plain", &slow_payload(number)), "message {number}");
    }
    seen
}

/// Enough to overflow the socket's buffers, below what a server keeps for a client by default (64 MB).
const SLOW_COUNT: u32 = 20_000;

fn slow_payload(number: u32) -> Vec<u8> {
    let mut payload = number.to_be_bytes().to_vec();
    payload.resize(1000, b'.');
    payload
}

#[tokio::test]
async fn both_clients_see_the_same() {
    let server = server().await;
    let helper = async_nats::connect(server.url()).await.expect("connect");
    let client = async_nats::connect(server.url()).await.expect("connect");
    let expected = script(&mut Reference { client, subscriptions: futures::stream::SelectAll::new() }, &helper).await;
    let seen = script(&mut lean(&server).await, &helper).await;
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn messages_of_all_subjects_come_in_wire_order() {
    let server = server().await;
    let mut reader = lean(&server).await;
    let mut writer = lean(&server).await;
    for subject in ["o.1", "o.2", "o.*", "o.3"] {
        reader.subscribe(subject);
    }
    Subject::flush(&mut reader).await;
    let subjects: Vec<String> = (0..300).map(|number| format!("o.{}", 1 + number * 7 % 3)).collect();
    for (number, subject) in subjects.iter().enumerate() {
        writer.outbound().publish(subject, None, number.to_string().as_bytes());
    }
    Subject::flush(&mut writer).await;
    for (number, subject) in subjects.iter().enumerate() {
        // Once for its own subscription and once for the wildcard, in whatever order the server matched the two.
        for _ in 0..2 {
            let message = Subject::next(&mut reader).await;
            assert_eq!((message.subject.as_str(), message.payload), (subject.as_str(), number.to_string().into_bytes()));
        }
    }
}

#[tokio::test]
async fn every_byte_is_counted() {
    let server = server().await;
    let mut reader = lean(&server).await;
    let sid = reader.subscribe("count.me");
    Subject::flush(&mut reader).await;
    let before = reader.received_bytes();
    let mut writer = lean(&server).await;
    writer.outbound().publish_with_headers("count.me", None, &[("A", "b")], b"hello");
    Subject::flush(&mut writer).await;
    Subject::next(&mut reader).await;
    let expected = format!("HMSG count.me {sid} 18 23\r\nNATS/1.0\r\nA: b\r\n\r\nhello\r\n").len() as u64;
    assert_eq!(reader.received_bytes() - before, expected);
}

#[tokio::test]
async fn a_reader_that_is_too_slow_is_told_by_its_connection() {
    let server = Server::start(Config::plain().with("max_payload: 100000\nmax_pending: 200000\nwrite_deadline: \"100ms\""))
        .await
        .expect("server");
    let mut reader = lean(&server).await;
    reader.subscribe("flood");
    Subject::flush(&mut reader).await;
    let helper = async_nats::connect(server.url()).await.expect("connect");
    // Until the server has given up on it: more than any socket buffer holds.
    let payload = vec![b'x'; 100_000];
    loop {
        let connections = server.monitor("/connz").await.expect("connz");
        if !connections["connections"].as_array().expect("list").iter().any(|one| one["name"] == "lean") {
            break;
        }
        for _ in 0..20 {
            helper.publish("flood", payload.clone().into()).await.expect("publish");
        }
        helper.flush().await.expect("flush");
    }
    // It drains what was under way and then learns that the connection is gone, instead of waiting for ever.
    let end = timeout(DEADLINE, async {
        loop {
            match Client::next(&mut reader).await {
                Ok(_) => {}
                Err(error) => break error,
            }
        }
    });
    assert!(matches!(end.await.expect("an end"), ClientError::Closed(_) | ClientError::Server(_)));
}

#[tokio::test]
async fn credentials_are_presented_as_the_server_asks() {
    let key = nkeys::KeyPair::new_user();
    let users = format!("authorization {{ users: [ {{ nkey: {} }}, {{ user: u, password: p }} ] }}", key.public_key());
    let server = Server::start(Config::plain().with(users)).await.expect("server");
    let connect = async |credentials| {
        Client::connect(address(&server), &ConnectOptions { name: String::new(), credentials })
            .await
            .map(|_| ())
            .map_err(|error| error.to_string())
    };
    assert_eq!(connect(Credentials::Nkey(key.into())).await, Ok(()));
    assert_eq!(connect(Credentials::UserPassword { user: "u".to_owned(), password: "p".to_owned() }).await, Ok(()));
    for refused in [Credentials::None, Credentials::Nkey(nkeys::KeyPair::new_user().into())] {
        let error = connect(refused).await.expect_err("refused");
        assert!(error.contains("Authorization Violation"), "{error}");
    }
}

/// Counts messages, tells when it has them all, and asks to be woken once.
struct Counter {
    expected: usize,
    payloads: Vec<Vec<u8>>,
    wake_at: Option<std::time::Instant>,
    woken: bool,
    done: Option<tokio::sync::oneshot::Sender<()>>,
}

impl Counter {
    fn tell_if_done(&mut self) {
        if self.payloads.len() == self.expected
            && self.woken
            && let Some(done) = self.done.take()
        {
            let _ = done.send(());
        }
    }
}

impl Handler for Counter {
    type Command = String;

    fn on_frame(&mut self, frame: Frame<'_>, _wire: &mut Wire<'_>) {
        if let Frame::Message(message) = frame {
            self.payloads.push(message.payload.to_vec());
            self.tell_if_done();
        }
    }

    fn on_command(&mut self, command: String, wire: &mut Wire<'_>) {
        wire.outbound.publish("echo", None, command.as_bytes());
    }

    fn deadline(&self) -> Option<std::time::Instant> {
        self.wake_at
    }

    fn on_deadline(&mut self, _now: std::time::Instant, wire: &mut Wire<'_>) {
        self.wake_at = None;
        self.woken = true;
        wire.outbound.publish("echo", None, b"woken");
    }
}

#[tokio::test]
async fn a_fleet_of_connections_runs_by_itself() {
    const MEMBERS: usize = 50;
    let server = server().await;
    let mut members = Vec::new();
    for number in 0..MEMBERS {
        let mut connection =
            groupcast_simulator::lean::Connection::connect(address(&server), &ConnectOptions::default()).await.expect("connect");
        connection.outbound().subscribe("echo", 1);
        connection.outbound().ping();
        connection.flush().await.expect("flush");
        let (done, when_done) = tokio::sync::oneshot::channel();
        // Only the first wakes, and its words reach everybody.
        let wake_at = (number == 0).then(|| std::time::Instant::now() + Duration::from_millis(5));
        let counter = Counter { expected: 0, payloads: Vec::new(), wake_at, woken: number > 0, done: Some(done) };
        members.push((connection, counter, when_done));
    }
    // Every subscription is in place before anybody speaks.
    let mut probe = lean(&server).await;
    Subject::flush(&mut probe).await;
    timeout(DEADLINE, async {
        while server.monitor("/varz").await.expect("varz")["subscriptions"].as_u64() < Some(MEMBERS as u64) {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("all subscribed");
    let mut running = Vec::new();
    for (connection, mut counter, when_done) in members {
        counter.expected = MEMBERS + 1;
        running.push((spawn(connection, counter), when_done));
    }
    for (number, (member, _)) in running.iter().enumerate() {
        member.commands.send(number.to_string());
    }
    for (member, when_done) in running {
        timeout(DEADLINE, when_done).await.expect("done in time").expect("done");
        drop(member.commands);
        let (counter, end) = timeout(DEADLINE, member.task).await.expect("ended in time").expect("no panic");
        assert!(end.is_ok(), "{end:?}");
        assert_eq!(counter.payloads.len(), MEMBERS + 1);
    }
}
