//! Everything that is not derived, as a file, and back: what a bus that lost its data is restored from.
//!
//! One JSON object a line. The first says what it is; each other is a document or an entry; the last counts them, so that a file that
//! was cut off is noticed.

use std::io::{self, BufRead, Write};

use async_nats::{Client, HeaderMap};
use groupcast_bus_config::subjects::{self, CatalogKind};
use serde::{Deserialize, Serialize};

use crate::catalog::{self, Catalog};
use crate::change::{CHANGE_DOCUMENTS_MAX, Change, Expected, Write as DocumentWrite};
use crate::document::{Document, Name};
use crate::log::{Log, NoAnswer, Outcome, Outgoing};

/// Of the file. A reader refuses any other.
pub const EXPORT_VERSION: u32 = 1;
/// Entries of REGISTRY written with one batch.
const ENTRIES_AT_ONCE: usize = 5_000;
/// Longest line that is read, in bytes.
pub const LINE_BYTES_MAX: usize = 8 * 1024 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the file cannot be read or written: {0}")]
    Io(#[from] io::Error),
    #[error("line {line} is not of an export: {why}")]
    Malformed { line: usize, why: String },
    #[error("the file ends early: {found} entries, {expected:?} were written; use another copy")]
    CutOff { found: usize, expected: Option<usize> },
    #[error("{subject} is there already: import into an empty bus, or with --replace")]
    Exists { subject: String },
    #[error(transparent)]
    NoAnswer(#[from] NoAnswer),
    #[error(transparent)]
    Catalog(#[from] catalog::Error),
    #[error("writing {subject} failed: {why}; import again, that does no harm")]
    Write { subject: String, why: String },
}

/// How much there was.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    pub documents: usize,
    pub entries: usize,
    /// Documents that cannot be read; they are left out of an import.
    pub refused: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
enum Line {
    Export { version: u32, term: u64 },
    Catalog { subject: String, payload: Payload },
    Registry { subject: String, payload: Payload },
    End { entries: usize },
}

/// Text where it is text, so that people can read it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Payload {
    Text(String),
    Base64(String),
}

impl Payload {
    fn of(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Base64(data_encoding::BASE64.encode(bytes)),
        }
    }

    fn bytes(self) -> Option<Vec<u8>> {
        match self {
            Self::Text(text) => Some(text.into_bytes()),
            Self::Base64(text) => data_encoding::BASE64.decode(text.as_bytes()).ok(),
        }
    }
}

fn line(out: &mut impl Write, line: &Line) -> Result<(), Error> {
    serde_json::to_writer(&mut *out, line).map_err(io::Error::from)?;
    Ok(out.write_all(b"\n")?)
}

/// What is said about this very bus, and means nothing on another.
const fn is_of_this_bus(kind: CatalogKind) -> bool {
    matches!(kind, CatalogKind::Change | CatalogKind::Confirm | CatalogKind::Installation | CatalogKind::Term)
}

/// Writes everything that CATALOG and REGISTRY hold, but what was deleted.
pub async fn export(client: Client, out: &mut impl Write) -> Result<Counts, Error> {
    let (catalog, registry) = (Log::catalog(client.clone()), Log::registry(client));
    let mut counts = Counts::default();
    line(out, &Line::Export { version: EXPORT_VERSION, term: term(&catalog).await?.0 })?;
    for entry in catalog.all(subjects::CATALOG_ALL).await? {
        let Some(name) = Name::parse(&entry.subject) else { continue };
        if entry.payload.is_empty() || is_of_this_bus(name.kind) {
            continue;
        }
        if let Err(refused) = Document::decode(&name, &entry.payload) {
            counts.refused.push(refused.to_string());
        }
        counts.documents += 1;
        line(out, &Line::Catalog { subject: entry.subject, payload: Payload::of(&entry.payload) })?;
    }
    for entry in registry.all(subjects::REGISTRY_ALL).await?.into_iter().filter(|entry| !entry.payload.is_empty()) {
        counts.entries += 1;
        line(out, &Line::Registry { subject: entry.subject, payload: Payload::of(&entry.payload) })?;
    }
    line(out, &Line::End { entries: counts.documents + counts.entries })?;
    out.flush()?;
    Ok(counts)
}

/// An export, read.
pub struct Read {
    pub term: u64,
    pub documents: Vec<Document>,
    /// Subject and payload.
    pub entries: Vec<(String, Vec<u8>)>,
    /// Documents that cannot be read.
    pub refused: Vec<String>,
}

pub fn read(mut input: impl BufRead) -> Result<Read, Error> {
    let mut all = Read { term: 0, documents: Vec::new(), entries: Vec::new(), refused: Vec::new() };
    let (mut number, mut found, mut text) = (0, 0, Vec::new());
    loop {
        text.clear();
        number += 1;
        let malformed = |why: String| Error::Malformed { line: number, why };
        let length = io::Read::take(&mut input, LINE_BYTES_MAX as u64 + 1).read_until(b'\n', &mut text)?;
        if length == 0 {
            return Err(Error::CutOff { found, expected: None });
        }
        if length > LINE_BYTES_MAX {
            return Err(malformed(format!("longer than {LINE_BYTES_MAX} bytes")));
        }
        let parsed: Line = serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
        match parsed {
            Line::Export { version, term } if number == 1 && version == EXPORT_VERSION => all.term = term,
            Line::Export { version, .. } if number == 1 => return Err(malformed(format!("version {version} is not known here"))),
            _ if number == 1 => return Err(malformed("it does not begin as one".to_owned())),
            Line::Catalog { subject, payload } => {
                let name = Name::parse(&subject).ok_or_else(|| malformed(format!("{subject:?} is no document")))?;
                let payload = payload.bytes().ok_or_else(|| malformed("not base64".to_owned()))?;
                match Document::decode(&name, &payload) {
                    Ok(document) => all.documents.extend(document),
                    Err(refused) => all.refused.push(refused.to_string()),
                }
                found += 1;
            }
            Line::Registry { subject, payload } => {
                subjects::parse_registry(&subject).ok_or_else(|| malformed(format!("{subject:?} is no entry")))?;
                all.entries.push((subject, payload.bytes().ok_or_else(|| malformed("not base64".to_owned()))?));
                found += 1;
            }
            Line::End { entries } if entries == found => return Ok(all),
            Line::End { entries } => return Err(Error::CutOff { found, expected: Some(entries) }),
            Line::Export { .. } => return Err(malformed("it begins twice".to_owned())),
        }
    }
}

/// Writes an export into a bus. The registry goes first: nobody leads before there is a document, and documents that fit into one
/// change all appear at once, so no host is told of a part.
pub async fn import(client: Client, input: impl BufRead, replace: bool) -> Result<Counts, Error> {
    let all = read(input)?;
    let (log, registry) = (Log::catalog(client.clone()), Log::registry(client.clone()));
    let expected = if replace { Expected::Any } else { Expected::Absent };
    if !replace
        && let (documents, _) = Catalog::new(client.clone()).documents().await?
        && let Some(there) = documents.first()
    {
        return Err(Error::Exists { subject: there.name.to_string() });
    }
    restore_term(&log, all.term).await?;
    for chunk in all.entries.chunks(ENTRIES_AT_ONCE) {
        let mut messages = Vec::with_capacity(chunk.len());
        for (subject, payload) in chunk {
            let there = registry.last(subject).await?;
            if there.as_ref().is_some_and(|entry| entry.payload.as_ref() == payload.as_slice()) {
                continue; // from an import before this one
            }
            if there.as_ref().is_some_and(|entry| !entry.payload.is_empty()) && !replace {
                return Err(Error::Exists { subject: subject.clone() });
            }
            let expected = there.map_or(0, |entry| entry.sequence);
            messages.push(Outgoing { subject: subject.clone(), headers: HeaderMap::new(), expected, payload: payload.clone() });
        }
        if messages.is_empty() {
            continue;
        }
        match registry.write(&messages).await {
            Outcome::Committed(_) => {}
            other => return Err(Error::Write { subject: messages[0].subject.clone(), why: format!("{other:?}") }),
        }
    }
    let counts = Counts { documents: all.documents.len(), entries: all.entries.len(), refused: all.refused };
    let catalog = Catalog::new(client);
    for documents in all.documents.chunks(CHANGE_DOCUMENTS_MAX) {
        let writes = documents.iter().map(|document| DocumentWrite::put(document.clone(), expected)).collect();
        let change = Change { author: "import".to_owned(), reason: "restored from an export".to_owned(), key: None, writes };
        catalog.write(&change, None).await?;
    }
    Ok(counts)
}

/// The highest term, and the sequence it stands at.
async fn term(catalog: &Log) -> Result<(u64, u64), NoAnswer> {
    let entry = catalog.last(subjects::CATALOG_TERM).await?;
    let number = |entry: &crate::log::Entry| std::str::from_utf8(&entry.payload).ok()?.parse().ok();
    Ok(entry.map_or((0, 0), |entry| (number(&entry).unwrap_or(0), entry.sequence)))
}

/// Terms never go back, also when CATALOG is another one.
async fn restore_term(catalog: &Log, exported: u64) -> Result<(), Error> {
    let (now, expected) = term(catalog).await?;
    if now >= exported {
        return Ok(());
    }
    let subject = subjects::CATALOG_TERM.to_owned();
    let message =
        Outgoing { subject: subject.clone(), headers: HeaderMap::new(), expected, payload: exported.to_string().into_bytes() };
    match catalog.write(&[message]).await {
        Outcome::Committed(_) => Ok(()),
        other => Err(Error::Write { subject, why: format!("{other:?}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(lines: &[&str]) -> Result<Read, Error> {
        read(lines.join("\n").as_bytes())
    }

    #[test]
    fn a_file_that_is_not_whole_is_refused() {
        let begin = r#"{"export":{"version":1,"term":7}}"#;
        let entry = r#"{"registry":{"subject":"gc.reg.h.h1","payload":{"text":"{}"}}}"#;
        let raw = r#"{"registry":{"subject":"gc.reg.h.h1","payload":{"base64":"/w=="}}}"#;
        let end = |n: usize| format!(r#"{{"end":{{"entries":{n}}}}}"#);
        let good = text(&[begin, entry, raw, &end(2)]).unwrap();
        assert_eq!((good.term, good.entries.len(), good.entries[1].1.as_slice()), (7, 2, [0xff].as_slice()));
        assert!(matches!(text(&[begin, entry]), Err(Error::CutOff { found: 1, expected: None })));
        assert!(matches!(text(&[begin, entry, &end(2)]), Err(Error::CutOff { found: 1, expected: Some(2) })));
        assert!(matches!(text(&[entry, &end(1)]), Err(Error::Malformed { line: 1, .. })));
        assert!(matches!(text(&[r#"{"export":{"version":2,"term":7}}"#]), Err(Error::Malformed { line: 1, .. })));
        assert!(matches!(
            text(&[begin, r#"{"registry":{"subject":"other","payload":{"text":""}}}"#]),
            Err(Error::Malformed { line: 2, .. })
        ));
        assert!(matches!(text(&[begin, begin]), Err(Error::Malformed { line: 2, .. })));
        assert!(matches!(text(&[""]), Err(Error::CutOff { .. })));
    }

    #[test]
    fn a_line_is_bounded() {
        let long = vec![b' '; LINE_BYTES_MAX + 1];
        assert!(matches!(read(long.as_slice()), Err(Error::Malformed { line: 1, why }) if why.contains("longer")));
    }
}
