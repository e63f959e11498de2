//! Gateways as processes, and a client of their HTTP API that is none of ours: it checks every answer against the OpenAPI document.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use reqwest::{Client, Method, StatusCode};
use serde_json::{Value, json};

use crate::World;
use crate::control::binary;
use crate::world::DEADLINE;

/// A gateway that is a process of its own. Ends with its value.
pub struct Gateway {
    pub address: SocketAddr,
    child: Child,
    log: PathBuf,
}

/// A path that nobody else uses.
pub fn scratch(what: &str) -> PathBuf {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("groupcast-test-{}-{number}-{what}", std::process::id()))
}

/// A folder that nobody else uses, gone with its value.
pub struct Folder(pub PathBuf);

impl Folder {
    pub fn new(what: &str) -> Self {
        let path = scratch(what);
        std::fs::create_dir_all(&path).expect("made");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Gateway {
    pub async fn start(url: &str, more: &[&str]) -> Self {
        Self::start_as(url, &[&["--name", "g"], more].concat()).await
    }

    /// One that is told nothing about its name.
    pub async fn start_as(url: &str, more: &[&str]) -> Self {
        let log = scratch("gateway.log");
        let stderr = std::fs::File::create(&log).expect("a log file");
        let child = Command::new(binary())
            .args(["gateway", "--server", url, "--api-listen", "127.0.0.1:0", "--reconnect-delay-max", "200ms"])
            .args(more)
            .env("GROUPCAST_LOG", "info")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr)
            .spawn()
            .expect("the gateway starts");
        let mut gateway = Self { address: SocketAddr::from(([127, 0, 0, 1], 0)), child, log };
        let start = Instant::now();
        loop {
            let log = gateway.log();
            let address = log
                .lines()
                .find(|line| line.contains("serving the API"))
                .and_then(|line| line.split("address=").nth(1)?.split_whitespace().next()?.parse().ok());
            if let Some(address) = address {
                gateway.address = address;
                return gateway;
            }
            assert!(start.elapsed() < DEADLINE && gateway.child.try_wait().expect("its state").is_none(), "no gateway:\n{log}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.kill();
        if std::thread::panicking() {
            eprintln!("--- log of the gateway:\n{}", self.log());
        }
        let _ = std::fs::remove_file(&self.log);
    }
}

/// What the command line did.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

/// Runs a command of the binary, as a user without any settings.
pub fn groupcast(arguments: &[&str], environment: &[(&str, &str)]) -> Ran {
    let mut command = Command::new(binary());
    command.args(arguments).stdin(Stdio::null()).env("GROUPCAST_CONTEXTS", "/nonexistent/contexts.toml");
    for (name, value) in environment {
        command.env(name, value);
    }
    let output = command.output().expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ran { code: output.status.code().unwrap_or(-1), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Makes a token on the bus.
pub fn token(bus: &str, id: &str, role: &str, more: &[&str]) -> String {
    let arguments = [&["token", "add", id, "--role", role, "--on-bus", "--server", bus], more].concat();
    let ran = groupcast(&arguments, &[]);
    assert_eq!(ran.code, 0, "{ran:?}");
    ran.stdout.trim().to_owned()
}

/// An answer.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: u16,
    pub etag: Option<String>,
    pub content_type: String,
    pub retry_after: Option<String>,
    pub body: Value,
    pub text: String,
}

/// Routes and statuses as the OpenAPI document has them.
#[derive(Debug, Clone, Default)]
pub struct Described(BTreeMap<(String, String), BTreeSet<u16>>);

impl Described {
    pub fn read(document: &Value) -> Self {
        let mut routes = BTreeMap::new();
        for (path, item) in document["paths"].as_object().expect("paths") {
            for (method, operation) in item.as_object().expect("operations") {
                let statuses = operation["responses"].as_object().expect("responses");
                let statuses = statuses.keys().map(|status| status.parse().expect("a status")).collect();
                routes.insert((method.to_uppercase(), path.clone()), statuses);
            }
        }
        Self(routes)
    }

    pub fn routes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.keys().map(|(method, path)| (method.as_str(), path.as_str()))
    }

    /// The statuses of the route that a request goes to.
    fn statuses(&self, method: &str, path: &str) -> Option<&BTreeSet<u16>> {
        let path = path.split('?').next().unwrap_or_default();
        let fits = |template: &str| {
            let (mut theirs, mut ours) = (template.split('/'), path.split('/'));
            loop {
                match (theirs.next(), ours.next()) {
                    (None, None) => return true,
                    (Some(t), Some(o)) if t == o || t.starts_with('{') => {}
                    _ => return false,
                }
            }
        };
        self.0.iter().find(|((m, template), _)| m == method && fits(template)).map(|(_, statuses)| statuses)
    }

    /// Fails on an answer that is not documented, and on every failure of the server's own.
    pub fn check(&self, method: &str, path: &str, answer: &Answer) {
        let status = answer.status;
        assert!(status < 500 || status == 503 || status == 504, "{method} {path} answered {status}: {}", answer.text);
        if let Some(statuses) = self.statuses(method, path) {
            assert!(statuses.contains(&status), "{method} {path} answered {status}, which is not documented: {}", answer.text);
        } else {
            assert!([404, 405].contains(&status), "{method} {path} answered {status} and is not documented");
        }
        if status >= 400 {
            assert_eq!(answer.content_type, "application/problem+json", "{method} {path}");
            assert_eq!(answer.body["status"], status, "{}", answer.text);
            for field in ["type", "title", "detail"] {
                assert!(answer.body[field].as_str().is_some_and(|text| !text.is_empty()), "{field} of {}", answer.text);
            }
        }
    }
}

/// A user of a gateway.
#[derive(Clone)]
pub struct User {
    pub http: Client,
    pub base: String,
    pub token: String,
    pub described: Described,
}

impl User {
    pub async fn new(gateway: &Gateway, token: &str) -> Self {
        Self::of(gateway.url(), token).await
    }

    /// Of a gateway at this address.
    pub async fn of(base: String, token: &str) -> Self {
        // The first test of a process installs it for all.
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let http = Client::builder().no_proxy().timeout(Duration::from_secs(120)).build().expect("a client");
        let mut user = Self { http, base, token: token.to_owned(), described: Described::default() };
        // A gateway that was just started does not listen yet.
        let start = Instant::now();
        let document = loop {
            if let Some(answer) = user.send("GET", "/openapi.json", &[], None).await {
                break answer;
            }
            assert!(start.elapsed() < DEADLINE, "nobody answers at {}", user.base);
            tokio::time::sleep(Duration::from_millis(10)).await;
        };
        user.described = Described::read(&document.body);
        user.ready().await;
        user
    }

    pub fn with_token(&self, token: &str) -> Self {
        Self { token: token.to_owned(), ..self.clone() }
    }

    pub fn at(&self, gateway: &Gateway) -> Self {
        Self { base: gateway.url(), ..self.clone() }
    }

    pub async fn ready(&self) {
        let start = Instant::now();
        loop {
            match self.send("GET", "/readyz", &[], None).await {
                Some(answer) if answer.status == 200 => return,
                other => assert!(start.elapsed() < DEADLINE, "the gateway is not ready: {other:?}"),
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// `None` when nobody answers.
    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Option<Vec<u8>>) -> Option<Answer> {
        let method = Method::from_bytes(method.as_bytes()).expect("a method");
        let mut request = self.http.request(method, format!("{}{path}", self.base));
        if !self.token.is_empty() {
            request = request.header("authorization", format!("Bearer {}", self.token));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        if let Some(body) = body {
            request = request.body(body);
        }
        let response = request.send().await.ok()?;
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        let (etag, content_type, retry_after) =
            (header("etag"), header("content-type").unwrap_or_default(), header("retry-after"));
        let status = response.status().as_u16();
        let text = response.text().await.ok()?;
        let body = serde_json::from_str(&text).unwrap_or(Value::Null);
        Some(Answer { status, etag, content_type, retry_after, body, text })
    }

    /// Sends it and checks that the answer is one that is documented.
    pub async fn ask(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Option<Vec<u8>>) -> Answer {
        let answer = self.send(method, path, headers, body).await.expect("an answer");
        self.described.check(method, path, &answer);
        answer
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.ask("GET", path, &[], None).await
    }

    pub async fn put(&self, id: &str, document: Value, headers: &[(&str, &str)]) -> Answer {
        self.ask("PUT", &format!("/v1/groups/{id}"), headers, Some(document.to_string().into_bytes())).await
    }

    pub async fn delete(&self, path: &str, headers: &[(&str, &str)]) -> Answer {
        self.ask("DELETE", path, headers, None).await
    }

    pub async fn post(&self, path: &str, body: Value, headers: &[(&str, &str)]) -> Answer {
        self.ask("POST", path, headers, Some(body.to_string().into_bytes())).await
    }

    /// Writes these groups as one change; its number.
    pub async fn change(&self, groups: &[Value]) -> u64 {
        let put: Vec<Value> = groups.iter().map(|group| json!({ "document": group })).collect();
        let answer = self.post("/v1/changes", json!({ "put": put }), &[]).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.text);
        answer.body["change"].as_u64().expect("a number")
    }
}

/// A group as people write it.
pub fn group(id: &str, rules: &[&str]) -> Value {
    json!({ "kind": "group", "id": id, "rules": rules })
}

/// A bus with one gateway and an administrator's token.
pub struct Desk {
    pub bus: World,
    pub gateway: Gateway,
    pub admin: User,
}

impl Desk {
    pub async fn start() -> Self {
        let bus = World::one().await;
        let text = token(&bus.url(0), "root", "admin", &[]);
        let gateway = Gateway::start(&bus.url(0), &[]).await;
        let admin = User::new(&gateway, &text).await;
        Self { bus, gateway, admin }
    }

    pub fn token(&self, id: &str, role: &str, more: &[&str]) -> User {
        self.admin.with_token(&token(&self.bus.url(0), id, role, more))
    }

    /// Waits until the gateway knows the user's token.
    pub async fn known(&self, user: User) -> User {
        let start = Instant::now();
        while user.send("GET", "/v1/whoami", &[], None).await.is_none_or(|answer| answer.status != 200) {
            assert!(start.elapsed() < DEADLINE, "the token is never known");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        user
    }
}
