//! The certificate a gateway shows, read again when its files change. One that cannot be read leaves the old one in place.

use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, SystemTime};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::{self, ServerConfig};

/// How often the files are looked at.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} cannot be read: {reason}", path = path.display())]
    Read { path: PathBuf, reason: String },
    #[error("certificate {certificate} and key {key} do not serve: {reason}", certificate = certificate.display(), key = key.display())]
    Unfit { certificate: PathBuf, key: PathBuf, reason: String },
}

/// Files of a certificate chain and its key, in PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Files {
    fn load(&self) -> Result<Arc<CertifiedKey>, Error> {
        let unfit = |reason: String| Error::Unfit { certificate: self.certificate.clone(), key: self.key.clone(), reason };
        let read = |path: &Path, error: String| Error::Read { path: path.to_owned(), reason: error };
        let chain = CertificateDer::pem_file_iter(&self.certificate).map_err(|e| read(&self.certificate, e.to_string()))?;
        let chain: Vec<_> = chain.collect::<Result<_, _>>().map_err(|e| read(&self.certificate, e.to_string()))?;
        if chain.is_empty() {
            return Err(read(&self.certificate, "it holds no certificate".to_owned()));
        }
        let key = PrivateKeyDer::from_pem_file(&self.key).map_err(|e| read(&self.key, e.to_string()))?;
        let key = CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|e| unfit(e.to_string()))?;
        Ok(Arc::new(key))
    }

    /// Whether they serve.
    pub fn check(&self) -> Result<(), Error> {
        self.load().map(drop)
    }

    /// Changes whenever one of the files does.
    fn mark(&self) -> [Option<(SystemTime, u64)>; 2] {
        [&self.certificate, &self.key].map(|path| {
            let about = std::fs::metadata(path).ok()?;
            Some((about.modified().ok()?, about.len()))
        })
    }
}

#[derive(Debug)]
struct Current(RwLock<Arc<CertifiedKey>>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone())
    }
}

/// Accepts TLS with what the files hold, now and later.
pub fn acceptor(files: Files) -> Result<TlsAcceptor, Error> {
    let mark = files.mark();
    let current = Arc::new(Current(RwLock::new(files.load()?)));
    let unfit = |reason: rustls::Error| Error::Unfit {
        certificate: files.certificate.clone(),
        key: files.key.clone(),
        reason: reason.to_string(),
    };
    let builder = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(unfit)?;
    let mut config = builder.with_no_client_auth().with_cert_resolver(current.clone());
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    tokio::spawn(follow(files, mark, current));
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn follow(files: Files, mut mark: [Option<(SystemTime, u64)>; 2], current: Arc<Current>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let now = files.mark();
        if now == mark {
            continue;
        }
        match files.load() {
            Ok(key) => {
                *current.0.write().unwrap_or_else(std::sync::PoisonError::into_inner) = key;
                mark = now;
                tracing::info!(certificate = %files.certificate.display(), "the certificate was read again");
            }
            // The two files are seldom replaced in one step: looked at again.
            Err(error) => tracing::warn!(%error, "the new certificate cannot be used; the old one stays"),
        }
    }
}
