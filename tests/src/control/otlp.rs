//! A collector of traces: takes what is sent over HTTP and reads as much of it as a test wants to know.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A span as it was sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Span {
    pub trace: Vec<u8>,
    pub id: Vec<u8>,
    pub parent: Vec<u8>,
    pub name: String,
    /// Attributes, shown as text.
    pub attributes: BTreeMap<String, String>,
    /// How many events it holds.
    pub events: usize,
}

impl Span {
    pub fn change(&self) -> Option<u64> {
        self.attributes.get("change")?.parse().ok()
    }
}

pub struct Collector {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<Span>>>,
    task: JoinHandle<()>,
}

impl Collector {
    pub async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let spans: Arc<Mutex<Vec<Span>>> = Arc::default();
        let shared = spans.clone();
        let task = tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let spans = shared.clone();
                tokio::spawn(async move {
                    while let Some(body) = request(&mut stream).await {
                        spans.lock().expect("lock").extend(read(&body));
                        let answer = "HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n";
                        if stream.write_all(answer.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { address, spans, task }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn spans(&self) -> Vec<Span> {
        self.spans.lock().expect("lock").clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The body of the next request; `None` at the end.
async fn request(stream: &mut tokio::net::TcpStream) -> Option<Vec<u8>> {
    let mut held = Vec::new();
    loop {
        if let Some(end) = held.windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&held[..end]).to_ascii_lowercase();
            let length: usize = head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse().ok())?;
            if held.len() >= end + 4 + length {
                return Some(held[end + 4..end + 4 + length].to_vec());
            }
        }
        if stream.read_buf(&mut held).await.ok()? == 0 {
            return None;
        }
    }
}

/// A field of a protobuf message: its number, and a number or bytes.
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

fn fields(mut bytes: &[u8]) -> Vec<(u64, Value<'_>)> {
    let mut found = Vec::new();
    while let Some(key) = varint(&mut bytes) {
        let length = match key & 7 {
            0 => {
                let Some(number) = varint(&mut bytes) else { break };
                found.push((key >> 3, Value::Number(number)));
                continue;
            }
            1 => 8,
            2 => varint(&mut bytes).unwrap_or(u64::MAX),
            5 => 4,
            _ => break,
        };
        let Some((value, rest)) = usize::try_from(length).ok().and_then(|length| bytes.split_at_checked(length)) else { break };
        bytes = rest;
        found.push((key >> 3, Value::Bytes(value)));
    }
    found
}

fn inside(bytes: &[u8], number: u64) -> impl Iterator<Item = &[u8]> {
    fields(bytes).into_iter().filter_map(move |(field, value)| match value {
        Value::Bytes(bytes) if field == number => Some(bytes),
        _ => None,
    })
}

/// All spans of an `ExportTraceServiceRequest`: resources, scopes, spans.
fn read(body: &[u8]) -> Vec<Span> {
    let spans = inside(body, 1).flat_map(|resource| inside(resource, 2)).flat_map(|scope| inside(scope, 2));
    spans.map(span).collect()
}

fn span(bytes: &[u8]) -> Span {
    let mut span = Span { events: inside(bytes, 11).count(), ..Span::default() };
    for (field, value) in fields(bytes) {
        match (field, value) {
            (1, Value::Bytes(id)) => span.trace = id.to_vec(),
            (2, Value::Bytes(id)) => span.id = id.to_vec(),
            (4, Value::Bytes(id)) => span.parent = id.to_vec(),
            (5, Value::Bytes(name)) => span.name = String::from_utf8_lossy(name).into_owned(),
            (9, Value::Bytes(attribute)) => {
                let key = inside(attribute, 1).map(String::from_utf8_lossy).collect();
                let value = inside(attribute, 2).flat_map(fields).map(|(_, value)| match value {
                    Value::Number(number) => number.to_string(),
                    Value::Bytes(text) => String::from_utf8_lossy(text).into_owned(),
                });
                span.attributes.insert(key, value.collect());
            }
            _ => {}
        }
    }
    span
}
