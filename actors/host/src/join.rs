//! Joining with a token: the host makes a key, has a gateway sign it, and keeps both as its credentials file. The key's seed never
//! leaves the machine; a token that was used with another key is refused.

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
    #[error("the gateway cannot be reached: {0}")]
    Unreachable(String),
    #[error("the gateway refuses: {0}")]
    Refused(String),
    #[error("the gateway's answer cannot be understood: {0}")]
    Strange(String),
    #[error("this token is for host {0}, agent.toml says {1}: use the right one")]
    OtherHost(HostId, HostId),
    #[error(transparent)]
    Credentials(#[from] groupcast_bus_config::credentials::Error),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Address {
    secure: bool,
    name: String,
    port: u16,
}

fn address(gateway: &str) -> Result<Address, Error> {
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
    Ok(Address { secure, name: name.to_owned(), port: port.parse().map_err(|_| wrong())? })
}

#[derive(Deserialize)]
struct Joined {
    host: String,
    credential: String,
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

/// Joins, and writes the credentials file.
pub async fn join(host: &HostId, gateway: &str, authority: Option<&Path>, token: &str, path: &Path) -> Result<(), Error> {
    let place = address(gateway)?;
    let key = key(path)?;
    let body = serde_json::json!({ "token": token, "public_key": key.public_key() }).to_string();
    let asked = tokio::time::timeout(WITHIN, post(&place, authority, "/v1/join", &body));
    let (status, answer) = asked.await.map_err(|_| Error::Unreachable("no answer in time".to_owned()))??;
    if status != 200 {
        let said = serde_json::from_str::<Problem>(&answer).map_or(format!("status {status}"), |problem| problem.detail);
        return Err(Error::Refused(said));
    }
    let joined: Joined = serde_json::from_str(&answer).map_err(|error| Error::Strange(error.to_string()))?;
    let of = HostId::new(&joined.host).map_err(|error| Error::Strange(error.to_string()))?;
    if of != *host {
        return Err(Error::OtherHost(of, host.clone()));
    }
    key.save(host, &joined.credential, path)?;
    // It is part of the credentials file now.
    let _ = std::fs::remove_file(waiting(path));
    Ok(())
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
