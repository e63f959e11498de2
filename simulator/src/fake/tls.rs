//! Certificates for the servers and their clients, made on the spot.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{RootCertStore, ServerConfig};

/// An authority with a server's and a client's certificate, written as files for those who need them.
pub struct Authority {
    pub ca_file: PathBuf,
    pub client_cert_file: PathBuf,
    pub client_key_file: PathBuf,
    authority: CertificateDer<'static>,
    server: (CertificateDer<'static>, Vec<u8>),
}

impl Authority {
    pub fn make(folder: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        params.distinguished_name.push(rcgen::DnType::CommonName, "fake authority");
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let signed = |names: &[&str], usage: ExtendedKeyUsagePurpose| -> anyhow::Result<_> {
            let key = KeyPair::generate()?;
            let mut params = CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>())?;
            params.extended_key_usages = vec![usage];
            Ok((params.signed_by(&key, &ca)?, key))
        };
        let (server, server_key) = signed(&["localhost", "127.0.0.1"], ExtendedKeyUsagePurpose::ServerAuth)?;
        let (client, client_key) = signed(&["groupcast"], ExtendedKeyUsagePurpose::ClientAuth)?;
        let write = |name: &str, text: String| -> anyhow::Result<PathBuf> {
            let path = folder.join(name);
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
            Ok(path)
        };
        Ok(Self {
            ca_file: write("ca.pem", ca.pem())?,
            client_cert_file: write("client.pem", client.pem())?,
            client_key_file: write("client.key", client_key.serialize_pem())?,
            authority: ca.der().clone(),
            server: (server.der().clone(), server_key.serialize_der()),
        })
    }

    /// Accepts TLS, and with `mutual` only from clients with a certificate of this authority.
    pub fn acceptor(&self, mutual: bool) -> anyhow::Result<TlsAcceptor> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone()).with_safe_default_protocol_versions()?;
        let builder = match mutual {
            false => builder.with_no_client_auth(),
            true => {
                let mut roots = RootCertStore::empty();
                roots.add(self.authority.clone())?;
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let key = PrivateKeyDer::try_from(self.server.1.clone()).map_err(anyhow::Error::msg)?;
        Ok(TlsAcceptor::from(Arc::new(builder.with_single_cert(vec![self.server.0.clone()], key)?)))
    }
}
