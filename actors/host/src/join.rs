//! Joining with a token: the host makes a key, has a gateway sign it, and keeps both as its credentials file. The key's seed never
//! leaves the machine; a token that was used with another key is refused.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use groupcast_bus_config::credentials::OwnKey;
use groupcast_policy::ids::HostId;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

/// How long a gateway has to answer.
const WITHIN: Duration = Duration::from_secs(20);
/// The longest answer that is read, in bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("gateway {0:?}: write https://gateway:4270")]
    Address(String),
    #[error("gateway {0:?}: others could read what is sent there: write https://..., plain http is for loopback only")]
    Plain(String),
    #[error("the gateway cannot be reached: {0}")]
    Unreachable(String),
    #[error("the gateway refuses: {detail}")]
    Refused { status: u16, detail: String },
    #[error("the gateway's answer cannot be understood: {0}")]
    Strange(String),
    #[error("this token is for host {0}, agent.toml says {1}: use the right one")]
    OtherHost(HostId, HostId),
    #[error(
        "agent.toml names no gateway, so nobody renews the credential, which expires in {0} s: write gateway = \"https://...\""
    )]
    NoGateway(u64),
    #[error("the credentials file cannot be read: {0}")]
    File(#[from] std::io::Error),
    #[error("the gateway's new credential expires before the one at hand: that one stays")]
    Shorter,
    #[error("the bus does not take the new credential, the one at hand stays: {0}")]
    NotTaken(#[from] groupcast_bus_config::connect::Error),
    /// What each of several said, the first that counts last.
    #[error("none of the gateways helps: {}", .0.join("; "))]
    None(Vec<String>),
    #[error(transparent)]
    Credentials(#[from] groupcast_bus_config::credentials::Error),
}

impl Error {
    /// Whether another gateway may do better: this one is away, busy, or not as it should be. One that refuses knows what it says.
    pub fn is_the_gateways(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::Strange(_) | Self::Shorter | Self::NotTaken(_) => true,
            Self::Refused { status, .. } => *status >= 500,
            _ => false,
        }
    }
}

/// Each gateway once, from the one of this number on.
pub fn in_turn(gateways: &[Gateway], first: usize) -> impl Iterator<Item = &Gateway> {
    let (before, after) = gateways.split_at(first.checked_rem(gateways.len()).unwrap_or(0));
    after.iter().chain(before)
}

/// What gateways said that were asked in turn.
pub struct Tried {
    only_one: bool,
    said: Vec<String>,
}

impl Tried {
    pub fn of(gateways: &[Gateway]) -> Self {
        Self { only_one: gateways.len() == 1, said: Vec::new() }
    }

    /// Goes on with the next one, unless that would not do better.
    pub fn failed(&mut self, gateway: &Gateway, error: Error) -> Result<(), Error> {
        if self.only_one || !error.is_the_gateways() {
            return Err(error);
        }
        self.said.push(format!("{}:{}: {error}", gateway.address.name, gateway.address.port));
        Ok(())
    }

    pub fn none(self) -> Error {
        Error::None(self.said)
    }
}

/// A gateway, and whom to trust that it is one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gateway {
    pub address: Address,
    /// Authorities in PEM; the system's if there is none.
    pub authority: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    secure: bool,
    name: String,
    pub port: u16,
}

impl Address {
    pub fn is_secure(&self) -> bool {
        self.secure
    }

    pub fn name(&self) -> &str {
        &self.name
    }
}

pub fn address(gateway: &str) -> Result<Address, Error> {
    let wrong = || Error::Address(gateway.to_owned());
    let (scheme, rest) = gateway.split_once("://").ok_or_else(wrong)?;
    let secure = match scheme {
        "https" => true,
        "http" => false,
        _ => return Err(wrong()),
    };
    let place = rest.trim_end_matches('/');
    let (name, port) = place.rsplit_once(':').ok_or_else(wrong)?;
    let name = name.trim_start_matches('[').trim_end_matches(']');
    if name.is_empty() || name.contains('/') {
        return Err(wrong());
    }
    let is_loopback = name == "localhost" || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback());
    if !secure && !is_loopback {
        return Err(Error::Plain(gateway.to_owned()));
    }
    Ok(Address { secure, name: name.to_owned(), port: port.parse().map_err(|_| wrong())? })
}

#[derive(Deserialize)]
struct Joined {
    host: String,
    credential: String,
    expires_at: u64,
}

#[derive(Deserialize)]
struct Problem {
    detail: String,
}

/// The key that waits to be signed: the same if joining is tried again, because a token binds to the first.
fn key(path: &Path) -> Result<OwnKey, Error> {
    let waiting = waiting(path);
    if let Ok(seed) = std::fs::read_to_string(&waiting) {
        return Ok(OwnKey::from_seed(seed.trim())?);
    }
    let key = OwnKey::new();
    key.save_seed(&waiting)?;
    Ok(key)
}

fn waiting(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".joining");
    name.into()
}

/// Joins, and writes the credentials file. When the credential expires, in seconds since 1970.
pub async fn join(host: &HostId, gateways: &[Gateway], token: &str, path: &Path) -> Result<u64, Error> {
    let key = key(path)?;
    let body = serde_json::json!({ "token": token, "public_key": key.public_key(), "proof": key.prove(token)? }).to_string();
    // One that has signed and was not heard signs again for the same key.
    let mut tried = Tried::of(gateways);
    for gateway in gateways {
        match signed(host, gateway, "/v1/join", &body).await {
            Ok(joined) => {
                key.save(host, &joined.credential, path)?;
                // It is part of the credentials file now.
                let _ = std::fs::remove_file(waiting(path));
                return Ok(joined.expires_at);
            }
            Err(error) => tried.failed(gateway, error)?,
        }
    }
    Err(tried.none())
}

/// Has the gateway sign the credential in this file anew, for the same key.
pub async fn renewed(host: &HostId, gateway: &Gateway, key: &OwnKey, token: &str) -> Result<String, Error> {
    let body = serde_json::json!({ "credential": token, "proof": key.prove(token)? }).to_string();
    Ok(signed(host, gateway, "/v1/renew", &body).await?.credential)
}

/// What the gateway has signed for this host.
async fn signed(host: &HostId, gateway: &Gateway, path: &str, body: &str) -> Result<Joined, Error> {
    let asked = tokio::time::timeout(WITHIN, post(&gateway.address, gateway.authority.as_deref(), path, body));
    let (status, answer) = asked.await.map_err(|_| Error::Unreachable("no answer in time".to_owned()))??;
    if status != 200 {
        let said = serde_json::from_str::<Problem>(&answer).map_or(format!("status {status}"), |problem| problem.detail);
        return Err(Error::Refused { status, detail: said });
    }
    let joined: Joined = serde_json::from_str(&answer).map_err(|error| Error::Strange(error.to_string()))?;
    let of = HostId::new(&joined.host).map_err(|error| Error::Strange(error.to_string()))?;
    if of == *host { Ok(joined) } else { Err(Error::OtherHost(of, host.clone())) }
}

async fn post(place: &Address, authority: Option<&Path>, path: &str, body: &str) -> Result<(u16, String), Error> {
    let unreachable = |error: std::io::Error| Error::Unreachable(error.to_string());
    let stream = TcpStream::connect((place.name.as_str(), place.port)).await.map_err(unreachable)?;
    if !place.secure {
        return exchange(stream, place, path, body).await;
    }
    let name = ServerName::try_from(place.name.clone()).map_err(|error| Error::Unreachable(error.to_string()))?;
    let connector = TlsConnector::from(Arc::new(tls(authority)?));
    exchange(connector.connect(name, stream).await.map_err(unreachable)?, place, path, body).await
}

fn tls(authority: Option<&Path>) -> Result<ClientConfig, Error> {
    let mut roots = RootCertStore::empty();
    match authority {
        Some(path) => {
            let wrong = |error: String| Error::Unreachable(format!("authority {}: {error}", path.display()));
            let certificates = CertificateDer::pem_file_iter(path).map_err(|error| wrong(error.to_string()))?;
            for certificate in certificates {
                let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
                roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
            }
        }
        None => _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs),
    }
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Unreachable(error.to_string()))?;
    Ok(builder.with_root_certificates(roots).with_no_client_auth())
}

async fn exchange<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    place: &Address,
    path: &str,
    body: &str,
) -> Result<(u16, String), Error> {
    let unreachable = |error: std::io::Error| Error::Unreachable(error.to_string());
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: {}:{}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        place.name,
        place.port,
        body.len()
    );
    stream.write_all(head.as_bytes()).await.map_err(unreachable)?;
    stream.write_all(body.as_bytes()).await.map_err(unreachable)?;
    stream.flush().await.map_err(unreachable)?;
    let mut bytes = Vec::new();
    match stream.take(ANSWER_BYTES_MAX).read_to_end(&mut bytes).await {
        Ok(_) => {}
        // A peer that closes without saying so: what came is judged by itself.
        Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {}
        Err(error) => return Err(unreachable(error)),
    }
    answer(&String::from_utf8_lossy(&bytes))
}

/// Status and body. With `Connection: close` the body ends with the connection; chunks are put together.
fn answer(text: &str) -> Result<(u16, String), Error> {
    let strange = || Error::Strange(text.chars().take(80).collect());
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(strange)?;
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).ok_or_else(strange)?;
    let chunked = head.lines().any(|line| {
        let line = line.to_ascii_lowercase();
        line.starts_with("transfer-encoding:") && line.contains("chunked")
    });
    if !chunked {
        return Ok((status, body.to_owned()));
    }
    let (mut rest, mut whole) = (body, String::new());
    while let Some((length, after)) = rest.split_once("\r\n") {
        let length = usize::from_str_radix(length.trim(), 16).map_err(|_| strange())?;
        if length == 0 {
            break;
        }
        whole += after.get(..length).ok_or_else(strange)?;
        rest = after.get(length + 2..).unwrap_or_default();
    }
    Ok((status, whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_or_refused() {
        let good = address("https://gw.example:4270/").unwrap();
        assert_eq!(good, Address { secure: true, name: "gw.example".into(), port: 4270 });
        assert_eq!(address("http://[::1]:80").unwrap().name, "::1");
        for bad in ["", "gw:1", "ftp://gw:1", "https://gw", "https://:1", "https://gw:x", "https://a/b:1"] {
            assert!(address(bad).is_err(), "{bad}");
        }
        for plain in ["http://gw.example:4270", "http://10.0.0.1:4270", "http://localhost.example:1"] {
            assert!(matches!(address(plain), Err(Error::Plain(_))), "{plain}: a token would be readable on the way");
        }
        assert!(address("http://localhost:1").is_ok() && address("http://127.0.0.1:1").is_ok());
    }

    #[test]
    fn gateways_are_asked_in_turn_until_one_helps_or_refuses() {
        let gateway = |port: u16| Gateway { address: address(&format!("https://n:{port}")).unwrap(), authority: None };
        let gateways: Vec<Gateway> = (1..=3).map(gateway).collect();
        // The status that each answers, 0 for none at all; whom it asks, which one first; and whether one helps.
        let rows: [([u16; 3], usize, &[u16], bool); 8] = [
            ([200, 200, 200], 0, &[1], true),
            ([200, 200, 200], 5, &[3], true),
            ([0, 0, 200], 0, &[1, 2, 3], true),
            ([200, 0, 0], 1, &[2, 3, 1], true),
            ([503, 200, 200], 0, &[1, 2], true),
            ([200, 403, 200], 1, &[2], false),
            ([0, 429, 200], 0, &[1, 2], false),
            ([0, 500, 0], usize::MAX, &[1, 2, 3], false),
        ];
        for (answers, first, expected, helps) in rows {
            let (mut asked, mut tried) = (Vec::new(), Tried::of(&gateways));
            let mut outcome = Err(None);
            for gateway in in_turn(&gateways, first) {
                asked.push(gateway.address.port);
                let refused = match answers[usize::from(gateway.address.port) - 1] {
                    200 => {
                        outcome = Ok(());
                        break;
                    }
                    0 => Error::Unreachable("away".into()),
                    status => Error::Refused { status, detail: "no".into() },
                };
                if let Err(error) = tried.failed(gateway, refused) {
                    outcome = Err(Some(error));
                    break;
                }
            }
            assert_eq!((&asked[..], outcome.is_ok()), (expected, helps), "{answers:?} from {first}: {outcome:?}");
            if let Err(None) = outcome {
                let words = tried.none().to_string();
                assert!(["n:1: the gateway cannot", "n:2: the gateway refuses", "n:3:"].iter().all(|part| words.contains(part)));
            }
        }
        assert_eq!(in_turn(&[], 7).count(), 0);
        let alone = Tried::of(&gateways[..1]).failed(&gateways[0], Error::Unreachable("away".into()));
        assert!(matches!(alone, Err(Error::Unreachable(_))), "one gateway's words are its own");
    }

    #[test]
    fn answers_are_put_together() {
        assert_eq!(answer("HTTP/1.1 200 OK\r\nA: b\r\n\r\n{}").unwrap(), (200, "{}".into()));
        let chunked = "HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
        assert_eq!(answer(chunked).unwrap(), (403, "abcde".into()));
        for strange in
            ["", "HTTP/1.1 200 OK", "HTTP/1.1 x\r\n\r\n", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"]
        {
            assert!(answer(strange).is_err(), "{strange}");
        }
    }
}
