//! Certificates of the servers: an authority of the installation's own, or what the operator brings.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use groupcast_bus_config::reach;
use groupcast_bus_config::setup::Machine;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};

use crate::tls;

/// How long the authority and what it signs live unless said otherwise.
pub const LIFE: Duration = Duration::from_secs(2 * 365 * 24 * 3600);
const AUTHORITY_LIFE: Duration = Duration::from_secs(20 * 365 * 24 * 3600);
/// Valid from a day ago: clocks of machines that are set up are often behind.
const SINCE: Duration = Duration::from_secs(24 * 3600);
/// The longest life of a certificate.
pub const LIFE_MAX: Duration = AUTHORITY_LIFE;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a certificate cannot be made: {0}")]
    Make(#[from] rcgen::Error),
    #[error("{path} cannot be read: {source}", path = path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: {source}", path = path.display())]
    Files { path: PathBuf, source: tls::Error },
    #[error("node {node}: {source}")]
    NotBelieved { node: String, source: reach::Error },
    #[error("a certificate lives 1 day to {} days", LIFE_MAX.as_secs() / 86_400)]
    Life,
}

/// A certificate and its key, in PEM.
pub struct Made {
    pub certificate: String,
    pub key: String,
}

/// The installation's own authority for certificates.
pub struct Own {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
    key: String,
}

fn params(now: SystemTime, life: Duration) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.not_before = now.checked_sub(SINCE).unwrap_or(now).into();
    params.not_after = now.checked_add(life).unwrap_or(now).into();
    params
}

/// The same for every installation: what tells authorities apart is their key.
fn authority_params(now: SystemTime) -> CertificateParams {
    let mut params = params(now, AUTHORITY_LIFE);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, "groupcast bus authority");
    params
}

impl Own {
    pub fn new(now: SystemTime) -> Result<Self, Error> {
        let key = KeyPair::generate()?;
        let pem = authority_params(now).self_signed(&key)?.pem();
        let text = key.serialize_pem();
        Ok(Self { pem, issuer: Issuer::new(authority_params(now), key), key: text })
    }

    /// The one whose certificate and key these are.
    pub fn load(certificate: &Path, key: &Path, now: SystemTime) -> Result<Self, Error> {
        let files = tls::Files { certificate: certificate.to_owned(), key: key.to_owned() };
        files.check().map_err(|source| Error::Files { path: key.to_owned(), source })?;
        let (pem, text) = (read(certificate)?, read(key)?);
        let issuer = Issuer::new(authority_params(now), KeyPair::from_pem(&text)?);
        Ok(Self { pem, issuer, key: text })
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    /// For a node: as a server to clients, as a client to other nodes, and for whoever asks on the machine itself.
    pub fn node(&self, node: &Machine, now: SystemTime, life: Duration) -> Result<Made, Error> {
        if life < SINCE || life > LIFE_MAX {
            return Err(Error::Life);
        }
        let mut names = vec![node.address.clone()];
        for more in [node.name.as_str(), "localhost", "127.0.0.1", "::1"] {
            // A name with an underscore at either end is one of ours, and none for a certificate.
            if !names.iter().any(|name| name == more) && CertificateParams::new(vec![more.to_owned()]).is_ok() {
                names.push(more.to_owned());
            }
        }
        let mut signed = params(now, life);
        signed.subject_alt_names = CertificateParams::new(names)?.subject_alt_names;
        signed.distinguished_name = DistinguishedName::new();
        signed.distinguished_name.push(DnType::CommonName, node.name.as_str());
        signed.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        signed.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = signed.signed_by(&key, &self.issuer)?.pem();
        Ok(Made { certificate, key: key.serialize_pem() })
    }
}

fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })
}

/// What an operator brings for a node: `NAME.pem` and `NAME-key.pem` beside `authority.pem`, judged as clients and other nodes will.
pub fn brought(folder: &Path, node: &Machine, peer: bool) -> Result<Made, Error> {
    let certificate = folder.join(format!("{}.pem", node.name));
    let key = folder.join(format!("{}-key.pem", node.name));
    let files = tls::Files { certificate: certificate.clone(), key: key.clone() };
    files.check().map_err(|source| Error::Files { path: certificate.clone(), source })?;
    let believed = reach::believed(&certificate, &folder.join("authority.pem"), &node.address, peer);
    believed.map_err(|source| Error::NotBelieved { node: node.name.to_string(), source })?;
    Ok(Made { certificate: read(&certificate)?, key: read(&key)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Certificates are believed for their own machine, at this time, of this authority, and otherwise refused by name.
    #[test]
    fn certificates_are_judged_as_others_will() {
        let folder = std::env::temp_dir().join(format!("groupcast-certificates-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let now = SystemTime::now();
        let node = |text: &str| Machine::parse(text).unwrap();
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
        let own = Own::new(now).unwrap();
        write("authority.pem", &own.pem);
        write("authority-key.pem", own.key());
        let put = |own: &Own, at: &str, now: SystemTime, life: Duration| {
            let made = own.node(&node(at), now, life).unwrap();
            write("n1.pem", &made.certificate);
            write("n1-key.pem", &made.key);
        };
        let said = |at: &str| brought(&folder, &node(at), true).map(drop).map_err(|error| error.to_string());
        put(&own, "n1=10.0.0.1", now, LIFE);
        assert_eq!(said("n1=10.0.0.1"), Ok(()));
        assert_eq!(said("n1=n1"), Ok(()));
        assert_eq!(said("n1=127.0.0.1"), Ok(()));
        let words = said("n1=10.0.0.2").unwrap_err();
        assert!(words.contains("not for this name") && words.contains("another machine"), "{words}");
        // Loaded again it signs what is believed all the same.
        let again = Own::load(&folder.join("authority.pem"), &folder.join("authority-key.pem"), now).unwrap();
        put(&again, "n1", now, LIFE);
        assert_eq!(said("n1"), Ok(()));
        put(&own, "n1", now - SINCE * 3, SINCE);
        assert!(said("n1").unwrap_err().contains("expired"));
        put(&own, "n1", now + SINCE * 3, SINCE);
        assert!(said("n1").unwrap_err().contains("not valid yet"));
        put(&Own::new(now).unwrap(), "n1", now, LIFE);
        assert!(said("n1").unwrap_err().contains("another authority"));
        let other = own.node(&node("n1"), now, LIFE).unwrap();
        write("n1-key.pem", &other.key);
        assert!(said("n1").unwrap_err().contains("do not serve"));
        std::fs::remove_file(folder.join("n1.pem")).unwrap();
        assert!(said("n1").unwrap_err().contains("n1.pem"));
        for life in [Duration::ZERO, LIFE_MAX + Duration::from_secs(1)] {
            assert!(matches!(own.node(&node("n1"), now, life), Err(Error::Life)));
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
