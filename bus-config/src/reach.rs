//! Whether a server can be reached, and whether what it shows can be trusted: step by step, so that whoever configures something is told which step
//! fails and what to do. The client library says of all of them that connecting failed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_nats::ServerAddr;
use serde::Deserialize;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{self, CertificateError, ClientConfig, RootCertStore};

use crate::connect::Tls;

/// How long one server has to take a connection, and then again to speak.
pub const WITHIN: Duration = Duration::from_secs(3);
/// Longest first line of a server that is read.
const FIRST_LINE_BYTES_MAX: u64 = 64 << 10;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{0:?} is no address of a server: write nats://NAME:4222")]
    Address(String),
    #[error("{name} is not known here: {reason}; is the name right, and does DNS or /etc/hosts have it?")]
    Unknown { name: String, reason: String },
    #[error("{at} does not answer: {reason}; is the server up, and does a firewall let this machine reach the port?")]
    Silent { at: String, reason: String },
    #[error("what listens on {at} is no nats-server: another program has the port, or the port is wrong")]
    NotNats { at: String },
    #[error("{at} takes the connection and says nothing: another program has the port, or the server stands still")]
    Mute { at: String },
    #[error(
        "{at} offers no TLS, and it is required: give the server a certificate, or set tls_required = false if nobody can be in between"
    )]
    NoTls { at: String },
    #[error("{at}: {why}")]
    NotTrusted { at: String, why: NotTrusted },
    #[error("{path} cannot be read: {reason}", path = path.display())]
    File { path: PathBuf, reason: String },
}

/// Why a certificate is not believed, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotTrusted {
    #[error(
        "its certificate has expired: make a new one (`groupcast bus renew`); if it should be good, look at the clock of this machine"
    )]
    Expired,
    #[error("its certificate is not valid yet: look at the clock of this machine, and of the one that made it")]
    NotYet,
    #[error(
        "its certificate is not for this name{names}: name the machine as the certificate does, or are these the files of another machine?"
    )]
    OtherName { names: String },
    #[error(
        "its certificate is signed by another authority than the one that is trusted: is the authority's file the one of this installation?"
    )]
    OtherAuthority,
    #[error("its certificate is not for this use: one of a server of the bus needs both, serverAuth and clientAuth")]
    OtherUse,
    #[error("{0}")]
    Otherwise(String),
}

impl From<&rustls::Error> for NotTrusted {
    fn from(error: &rustls::Error) -> Self {
        let rustls::Error::InvalidCertificate(certificate) = error else { return Self::Otherwise(error.to_string()) };
        match certificate {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => Self::NotYet,
            CertificateError::NotValidForName => Self::OtherName { names: String::new() },
            CertificateError::NotValidForNameContext { presented, .. } => {
                // As it is printed for programmers: DnsName("n1"), IpAddress(10.0.0.1).
                let plain =
                    |name: &String| name.split(['(', ')', '"']).filter(|part| !part.is_empty()).nth(1).unwrap_or(name).to_owned();
                let names: Vec<String> = presented.iter().map(plain).collect();
                Self::OtherName { names: format!(" (it is for {})", names.join(", ")) }
            }
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::OtherAuthority,
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => Self::OtherUse,
            _ => Self::Otherwise(error.to_string()),
        }
    }
}

/// What a server says first.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Reached {
    #[serde(default)]
    pub version: String,
    #[serde(default)]
    pub server_name: String,
    #[serde(default)]
    tls_required: bool,
    #[serde(default)]
    tls_available: bool,
}

fn file(path: &Path, reason: impl ToString) -> Error {
    Error::File { path: path.to_owned(), reason: reason.to_string() }
}

/// The certificates of a file; at least one.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let all = CertificateDer::pem_file_iter(path).map_err(|error| file(path, error))?;
    let all = all.collect::<Result<Vec<_>, _>>().map_err(|error| file(path, error))?;
    if all.is_empty() { Err(file(path, "it holds no certificate")) } else { Ok(all) }
}

fn roots(path: &Path) -> Result<Arc<RootCertStore>, Error> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| file(path, error))?;
    }
    Ok(Arc::new(roots))
}

/// Whether this certificate would be believed now, of a machine that others reach under this name. As `peer` also by other servers of the bus,
/// to whom it is shown as a client's.
pub fn believed(certificate: &Path, authority: &Path, name: &str, peer: bool) -> Result<(), Error> {
    let (chain, roots, now) = (certificates(certificate)?, roots(authority)?, UnixTime::now());
    let (first, between) = chain.split_first().ok_or_else(|| file(certificate, "it holds no certificate"))?;
    let wrong = |error: &rustls::Error| Error::NotTrusted { at: certificate.display().to_string(), why: error.into() };
    let other = |error: &dyn std::fmt::Display| file(authority, error);
    let of = ServerName::try_from(name.to_owned()).map_err(|_| Error::Address(name.to_owned()))?;
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone()).build();
    verifier.map_err(|error| other(&error))?.verify_server_cert(first, between, &of, &[], now).map_err(|error| wrong(&error))?;
    if peer {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build();
        verifier.map_err(|error| other(&error))?.verify_client_cert(first, between, now).map_err(|error| wrong(&error))?;
    }
    Ok(())
}

fn client(tls: &Tls) -> Result<ClientConfig, Error> {
    let roots = match &tls.authority {
        Some(path) => roots(path)?,
        None => {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            Arc::new(roots)
        }
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let versions = builder.with_safe_default_protocol_versions();
    let builder = versions.map_err(|error| file(Path::new("TLS"), error))?.with_root_certificates(roots);
    match &tls.certificate {
        None => Ok(builder.with_no_client_auth()),
        Some((certificate, key)) => {
            let private = PrivateKeyDer::from_pem_file(key).map_err(|error| file(key, error))?;
            builder.with_client_auth_cert(certificates(certificate)?, private).map_err(|error| file(key, error))
        }
    }
}

/// Reaches one server of the bus as any client would, up to its login.
pub async fn server(server: &str, tls: &Tls, required: bool) -> Result<Reached, Error> {
    let address: ServerAddr = server.parse().map_err(|_| Error::Address(server.to_owned()))?;
    let name = address.host().trim_start_matches('[').trim_end_matches(']').to_owned();
    let at = format!("{}:{}", address.host(), address.port());
    let stream = connected(&name, address.port(), &at).await?;
    let spoken = async {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        let not_nats = || Error::NotNats { at: at.clone() };
        (&mut stream).take(FIRST_LINE_BYTES_MAX).read_line(&mut line).await.map_err(|_| not_nats())?;
        let said = line.strip_prefix("INFO ").ok_or_else(not_nats)?;
        let said: Reached = serde_json::from_str(said).map_err(|_| not_nats())?;
        if said.tls_required || said.tls_available {
            handshake(stream.into_inner(), &name, &at, tls).await?;
        } else if required {
            return Err(Error::NoTls { at: at.clone() });
        }
        Ok(said)
    };
    tokio::time::timeout(WITHIN, spoken).await.map_err(|_| Error::Mute { at: at.clone() })?
}

/// The same of several, at the same time.
pub async fn servers(servers: &[String], tls: &Tls) -> Vec<(String, Result<Reached, Error>)> {
    let required = tls.is_required(servers);
    let outcomes = futures::future::join_all(servers.iter().map(|one| server(one, tls, required))).await;
    servers.iter().cloned().zip(outcomes).collect()
}

/// Reaches something that speaks TLS from its first byte, such as a gateway.
pub async fn secure(name: &str, port: u16, tls: &Tls) -> Result<(), Error> {
    let at = format!("{name}:{port}");
    let stream = connected(name, port, &at).await?;
    let spoken = tokio::time::timeout(WITHIN, handshake(stream, name, &at, tls));
    spoken.await.map_err(|_| Error::Mute { at: at.clone() })?
}

/// A connection within [`WITHIN`], to the first of its addresses that takes one.
async fn connected(name: &str, port: u16, at: &str) -> Result<TcpStream, Error> {
    let mut reason = format!("nothing came within {} s", WITHIN.as_secs());
    let tried = async {
        let found = tokio::net::lookup_host((name, port)).await;
        let found = found.map_err(|error| Error::Unknown { name: name.to_owned(), reason: error.to_string() })?;
        for address in found {
            match TcpStream::connect(address).await {
                Ok(stream) => return Ok(Some(stream)),
                Err(error) => reason = error.to_string(),
            }
        }
        Ok(None)
    };
    match tokio::time::timeout(WITHIN, tried).await {
        Ok(Ok(Some(stream))) => Ok(stream),
        Ok(Err(error)) => Err(error),
        Ok(Ok(None)) | Err(_) => Err(Error::Silent { at: at.to_owned(), reason }),
    }
}

async fn handshake(stream: TcpStream, name: &str, at: &str, tls: &Tls) -> Result<(), Error> {
    let of = ServerName::try_from(name.to_owned()).map_err(|_| Error::Address(name.to_owned()))?;
    let connector = TlsConnector::from(Arc::new(client(tls)?));
    match connector.connect(of, stream).await {
        Ok(_) => Ok(()),
        Err(error) => {
            let ours = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
            let why = ours.map_or_else(|| NotTrusted::Otherwise(format!("no TLS: {error}")), NotTrusted::from);
            Err(Error::NotTrusted { at: at.to_owned(), why })
        }
    }
}

/// Whether this machine has an address under this name. Asked of the kernel: what is not here cannot be listened on.
pub async fn is_here(name: &str) -> Result<bool, Error> {
    let found = tokio::net::lookup_host((name, 0)).await;
    let mut found = found.map_err(|error| Error::Unknown { name: name.to_owned(), reason: error.to_string() })?;
    Ok(found.any(|address| std::net::UdpSocket::bind(address).is_ok()))
}
