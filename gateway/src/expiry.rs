//! Until when a certificate or a credential is good. Of a certificate only its validity is read, and nothing is verified: whoever shows it
//! is asked for it by others.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use groupcast_bus_config::held::Held;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject;

/// What ends within this time needs attention.
pub const WARNED: Duration = Duration::from_secs(14 * 24 * 3600);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} cannot be read: {reason}", path = path.display())]
    Read { path: PathBuf, reason: String },
    #[error("{path} holds a certificate whose validity cannot be read", path = path.display())]
    Validity { path: PathBuf },
}

/// Something that ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expiring {
    Certificate(PathBuf),
    Credential(PathBuf),
}

/// What is not good now, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotGood {
    #[error("has expired on {}: make another (`groupcast bus renew` for a node's certificate, `groupcast credential add` for a credential); if it should \
             be good, look at the clock of this machine", humantime::format_rfc3339_seconds(*.0))]
    Ended(SystemTime),
    #[error("is not valid before {}: look at the clock of this machine, and of the one that made it", humantime::format_rfc3339_seconds(*.0))]
    NotYet(SystemTime),
}

impl Expiring {
    /// Whether it is good at this time.
    pub fn judge(&self, now: SystemTime) -> Result<Option<NotGood>, Error> {
        if let Self::Certificate(path) = self
            && let Some(begins) = first(path)?.0.filter(|begins| *begins > now)
        {
            return Ok(Some(NotGood::NotYet(begins)));
        }
        Ok(self.ends()?.filter(|ends| *ends <= now).map(NotGood::Ended))
    }

    /// Nothing when it does not end.
    pub fn ends(&self) -> Result<Option<SystemTime>, Error> {
        match self {
            Self::Certificate(path) => first(path).map(|(_, ends)| Some(ends)),
            Self::Credential(path) => match Held::read(path) {
                Ok(held) => Ok(held.expires_at),
                Err(error) => Err(Error::Read { path: path.clone(), reason: error.to_string() }),
            },
        }
    }

    pub fn path(&self) -> &Path {
        match self {
            Self::Certificate(path) | Self::Credential(path) => path,
        }
    }
}

/// The last begin, if any can be written, and the first end among the certificates of a file.
fn first(path: &Path) -> Result<(Option<SystemTime>, SystemTime), Error> {
    let read = |reason: String| Error::Read { path: path.to_owned(), reason };
    let chain = CertificateDer::pem_file_iter(path).map_err(|error| read(error.to_string()))?;
    let mut all: Option<(Option<SystemTime>, SystemTime)> = None;
    for one in chain {
        let one = one.map_err(|error| read(error.to_string()))?;
        let (begins, ends) = validity(&one).ok_or_else(|| Error::Validity { path: path.to_owned() })?;
        all = Some(all.map_or((begins, ends), |(begun, first)| (begun.max(begins), first.min(ends))));
    }
    all.ok_or_else(|| read("it holds no certificate".to_owned()))
}

const SEQUENCE: u8 = 0x30;
const VERSION: u8 = 0xa0;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;

/// The next value of DER: its tag, its contents and what follows.
fn value(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (tag, rest) = bytes.split_first()?;
    let (short, rest) = rest.split_first()?;
    let (length, rest) = match short {
        0..=0x7f => (usize::from(*short), rest),
        0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(short & 0x7f))?;
            (digits.iter().fold(0usize, |length, digit| length << 8 | usize::from(*digit)), rest)
        }
        _ => return None,
    };
    let (contents, rest) = rest.split_at_checked(length)?;
    Some((*tag, contents, rest))
}

/// Certificate, its signed part, then: version, serial number, algorithm, issuer, validity.
/// A begin before 1970 is none that matters.
fn validity(certificate: &[u8]) -> Option<(Option<SystemTime>, SystemTime)> {
    let (_, certificate, _) = value(certificate).filter(|(tag, ..)| *tag == SEQUENCE)?;
    let (_, mut rest, _) = value(certificate).filter(|(tag, ..)| *tag == SEQUENCE)?;
    if rest.first() == Some(&VERSION) {
        rest = value(rest)?.2;
    }
    for _ in 0..3 {
        rest = value(rest)?.2;
    }
    let (_, validity, _) = value(rest).filter(|(tag, ..)| *tag == SEQUENCE)?;
    let (tag, text, rest) = value(validity)?;
    let begins = time(tag, std::str::from_utf8(text).ok()?);
    let (tag, text, _) = value(rest)?;
    Some((begins, time(tag, std::str::from_utf8(text).ok()?)?))
}

#[cfg(test)]
fn not_after(certificate: &[u8]) -> Option<SystemTime> {
    validity(certificate).map(|(_, ends)| ends)
}

/// `271118044525Z` or `20271118044525Z`.
fn time(tag: u8, text: &str) -> Option<SystemTime> {
    let digits = text.strip_suffix('Z').filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()))?;
    let full = match (tag, digits.len()) {
        // Two digits are of this century up to 49, as RFC 5280 says.
        (UTC_TIME, 12) if digits < "5" => format!("20{digits}"),
        (UTC_TIME, 12) => format!("19{digits}"),
        (GENERALIZED_TIME, 14) => digits.to_owned(),
        _ => return None,
    };
    let (date, clock) = full.split_at(8);
    let written = format!("{}-{}-{}T{}:{}:{}Z", &date[..4], &date[4..6], &date[6..], &clock[..2], &clock[2..4], &clock[4..]);
    humantime::parse_rfc3339(&written).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_certificate_is_read() {
        let mut params = rcgen::CertificateParams::new(["localhost".to_owned()]).unwrap();
        let path = std::env::temp_dir().join(format!("groupcast-expiry-{}", std::process::id()));
        for (year, text) in [(2031, "2031-02-03T00:00:00Z"), (2061, "2061-02-03T00:00:00Z")] {
            params.not_after = rcgen::date_time_ymd(year, 2, 3);
            let made = params.clone().self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap();
            let whole = made.der().to_vec();
            assert_eq!(not_after(&whole), humantime::parse_rfc3339(text).ok());
            // Half of one is none.
            (0..whole.len().min(120)).for_each(|end| assert_eq!(not_after(&whole[..end]), None));
            std::fs::write(&path, made.pem()).unwrap();
            let (own, ends) = (Expiring::Certificate(path.clone()), humantime::parse_rfc3339(text).unwrap());
            assert_eq!(own.judge(ends - Duration::from_secs(1)).unwrap(), None);
            assert_eq!(own.judge(ends).unwrap(), Some(NotGood::Ended(ends)));
            assert_eq!(Expiring::Certificate(path.clone()).ends().unwrap(), humantime::parse_rfc3339(text).ok());
        }
        params.not_before = rcgen::date_time_ymd(2030, 1, 1);
        std::fs::write(&path, params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().pem()).unwrap();
        let begins = humantime::parse_rfc3339("2030-01-01T00:00:00Z").unwrap();
        let own = Expiring::Certificate(path.clone());
        assert_eq!(own.judge(begins - Duration::from_secs(1)).unwrap(), Some(NotGood::NotYet(begins)));
        assert_eq!(own.judge(begins).unwrap(), None);
        std::fs::write(&path, "nothing").unwrap();
        assert!(Expiring::Certificate(path.clone()).ends().is_err() && Expiring::Credential(path.clone()).ends().is_err());
        std::fs::remove_file(&path).unwrap();
        assert_eq!(time(UTC_TIME, "991231235959Z"), humantime::parse_rfc3339("1999-12-31T23:59:59Z").ok());
        for wrong in ["", "Z", "2Z", "99123123595xZ", "991231235959"] {
            assert_eq!(time(UTC_TIME, wrong), None, "{wrong}");
        }
    }
}
