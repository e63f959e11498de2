//! Somebody between a client and a bus with TLS: passes everything on, or rewrites the first line of the server, which is in the clear.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

/// What it does to the server's first line.
#[derive(Debug, Clone)]
pub enum Deed {
    Nothing,
    /// Says that the server wants no encryption, and speaks it with the server itself: whoever believes that is read and written.
    Denies,
    /// The same, by leaving out every word on it.
    Strips,
    /// Names another server to go to.
    Names(String),
}

pub struct Middle {
    pub address: SocketAddr,
    /// Connections made to it, and of these how many have ended.
    met: Arc<AtomicUsize>,
    left: Arc<AtomicUsize>,
    /// Clients that told it in the clear who they are.
    fooled: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Middle {
    /// `authority` is that of the real server at `far`.
    pub async fn new(at: &str, far: SocketAddr, authority: &Path, deed: Deed) -> Self {
        let listener = TcpListener::bind(at).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_file_iter(authority).expect("an authority") {
            roots.add(certificate.expect("a certificate")).expect("taken");
        }
        let tls = Arc::new(ClientConfig::builder().with_root_certificates(roots).with_no_client_auth());
        let [met, left, fooled] = [0; 3].map(|count| Arc::new(AtomicUsize::new(count)));
        let counts = (met.clone(), left.clone(), fooled.clone());
        let task = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                counts.0.fetch_add(1, Ordering::Relaxed);
                let (left, standing) = (counts.1.clone(), stand(near, far, tls.clone(), deed.clone(), counts.2.clone()));
                tokio::spawn(async move {
                    standing.await;
                    left.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        Self { address, met, left, fooled, task }
    }

    pub fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    pub fn met(&self) -> usize {
        self.met.load(Ordering::Relaxed)
    }

    pub fn left(&self) -> usize {
        self.left.load(Ordering::Relaxed)
    }

    pub fn fooled(&self) -> usize {
        self.fooled.load(Ordering::Relaxed)
    }
}

impl Drop for Middle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn stand(near: TcpStream, far: SocketAddr, tls: Arc<ClientConfig>, deed: Deed, fooled: Arc<AtomicUsize>) -> Option<()> {
    let mut far = TcpStream::connect(far).await.ok()?;
    let mut line = Vec::new();
    // Byte by byte: what follows the first line is not ours to hold.
    while line.last() != Some(&b'\n') {
        line.push(far.read_u8().await.ok()?);
    }
    let mut info: Value = serde_json::from_slice(line.strip_prefix(b"INFO ")?).ok()?;
    match &deed {
        Deed::Nothing => {}
        Deed::Denies => (info["tls_required"], info["tls_available"]) = (json!(false), json!(false)),
        Deed::Strips => ["tls_required", "tls_available", "tls_verify"].iter().for_each(|key| {
            info.as_object_mut().and_then(|info| info.remove(*key));
        }),
        Deed::Names(other) => info["connect_urls"] = json!([other]),
    }
    let mut near = BufReader::new(near);
    near.write_all(format!("INFO {info}\r\n").as_bytes()).await.ok()?;
    // The first byte of TLS is 0x16; a client that was fooled says CONNECT.
    if near.fill_buf().await.ok()?.first() == Some(&b'C') {
        fooled.fetch_add(1, Ordering::Relaxed);
        let name = ServerName::try_from("127.0.0.1").ok()?;
        let mut far = tokio_rustls::TlsConnector::from(tls).connect(name, far).await.ok()?;
        tokio::io::copy_bidirectional(&mut near, &mut far).await.ok()?;
    } else if matches!(deed, Deed::Nothing | Deed::Names(_)) {
        tokio::io::copy_bidirectional(&mut near, &mut far).await.ok()?;
    }
    // Of a client that was not fooled it has nothing: it hangs up.
    Some(())
}

/// An authority, and a certificate of it for these names: `authority.pem`, `server.pem` and `server-key.pem` in the folder.
pub fn certificates(folder: &Path, names: &[&str]) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("an authority");
    let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).expect("names");
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let key = KeyPair::generate().expect("a key");
    let certificate = params.signed_by(&key, &authority).expect("signed");
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("written");
    write("authority.pem", &authority.pem());
    write("server.pem", &certificate.pem());
    write("server-key.pem", &key.serialize_pem());
}
