//! A host's credential on a bare socket.

use data_encoding::BASE64URL_NOPAD;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::connect::Identity;
use nkeys::KeyPair;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::world::{DEADLINE, World};

pub struct Connection {
    stream: BufReader<TcpStream>,
}

impl Connection {
    /// Connects and logs in as this host.
    pub async fn open(world: &World, host: &str) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", world.server.client_port())).await.unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        let info: Value = serde_json::from_str(line.strip_prefix("INFO ").unwrap()).unwrap();
        let between = |text: &str, start: &str| text.split(start).nth(1).unwrap().trim_start().lines().next().unwrap().to_owned();
        let (token, seed) = match world.identity(Role::Host, host) {
            Identity::Text(text) => (Some(between(text, "BEGIN NATS USER JWT-----")), between(text, "BEGIN USER NKEY SEED-----")),
            Identity::Seed(seed) => (None, seed.clone()),
            other => panic!("{other:?}"),
        };
        let key = KeyPair::from_seed(&seed).unwrap();
        let signature = BASE64URL_NOPAD.encode(&key.sign(info["nonce"].as_str().unwrap().as_bytes()).unwrap());
        let mut login = json!({ "verbose": false, "pedantic": false, "headers": true, "protocol": 1, "lang": "raw", "version": "1",
            "sig": signature, "no_responders": true });
        match token {
            Some(token) => login["jwt"] = json!(token),
            None => login["nkey"] = json!(key.public_key()),
        }
        let mut connection = Self { stream };
        connection.stream.write_all(format!("CONNECT {login}\r\nPING\r\n").as_bytes()).await.unwrap();
        line.clear();
        connection.stream.read_line(&mut line).await.unwrap();
        assert_eq!(line, "PONG\r\n");
        connection
    }

    /// Sends what it can; the server may close meanwhile.
    pub async fn send(&mut self, text: &str, filler: usize) {
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize(bytes.len() + filler, b'x');
        let _ = self.stream.write_all(&bytes).await;
    }

    /// Says goodbye, and returns all that the server said until it had handled everything.
    pub async fn end(mut self) -> String {
        let _ = self.stream.write_all(b"\r\nPING\r\n").await;
        let _ = self.stream.shutdown().await;
        let mut said = Vec::new();
        let _ = tokio::time::timeout(DEADLINE, self.stream.read_to_end(&mut said)).await.unwrap();
        String::from_utf8_lossy(&said).into_owned()
    }
}
