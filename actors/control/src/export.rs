//! Everything that is not derived, as a file, and back: what a bus that lost its data is restored from.
//!
//! One JSON object a line. The first says what it is; each other is a document or an entry; the last counts them, so that a file that
//! was cut off is noticed.

use std::collections::BTreeSet;
use std::io::{self, BufRead, Write};

use async_nats::{Client, HeaderMap};
use groupcast_bus_config::subjects::{self, CatalogKind};
use groupcast_topics::term::{BadTerm, Reserved};
use serde::{Deserialize, Serialize};

use crate::audit::{self, IMPORTED_AT, IMPORTED_REVISION};
use crate::catalog::{self, Catalog};
use crate::change::{CHANGE_DOCUMENTS_MAX, Change, Expected, Write as DocumentWrite};
use crate::document::{Document, Name};
use crate::log::{Entry, Log, NoAnswer, Outcome, Outgoing};
use crate::registration::grant::Grant;
use crate::registry::upgrade::renamed;
use crate::terms;

/// Of the file. A reader refuses any other.
pub const EXPORT_VERSION: u32 = 1;
/// Entries of REGISTRY written with one batch.
const ENTRIES_AT_ONCE: usize = 5_000;
/// Versions of documents read from AUDIT at once, and written to it without an answer.
const AUDITED_AT_ONCE: usize = 256;
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
    #[error(transparent)]
    Term(#[from] BadTerm),
    #[error("writing {subject} failed: {why}; import again, that does no harm")]
    Write { subject: String, why: String },
}

/// How much there was.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    pub documents: usize,
    pub entries: usize,
    /// Versions of documents, with who wrote them.
    pub audited: usize,
    /// Documents that cannot be read; they are left out of an import.
    pub refused: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
enum Line {
    Export {
        version: u32,
        term: u64,
    },
    Catalog {
        subject: String,
        payload: Payload,
    },
    Registry {
        subject: String,
        payload: Payload,
    },
    /// A former version of a document, as AUDIT keeps it.
    Audit {
        subject: String,
        revision: u64,
        at: String,
        author: String,
        reason: String,
        payload: Payload,
    },
    End {
        entries: usize,
    },
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

/// An export may go to a terminal, or be looked at on one.
fn line(out: &mut impl Write, line: &Line) -> Result<(), Error> {
    let json = serde_json::to_string(line).map_err(io::Error::from)?;
    Ok(writeln!(out, "{}", groupcast_policy::text::shown_json(&json))?)
}

/// What is said about this very bus, and means nothing on another.
const fn is_of_this_bus(kind: CatalogKind) -> bool {
    matches!(kind, CatalogKind::Change | CatalogKind::Confirm | CatalogKind::Installation | CatalogKind::Term)
}

/// Writes everything that CATALOG and REGISTRY hold, but what was deleted; and, if it is wanted, what AUDIT remembers of documents.
pub async fn export(client: Client, out: &mut impl Write, audit: bool) -> Result<Counts, Error> {
    let (catalog, registry) = (Log::catalog(client.clone()), Log::registry(client.clone()));
    let mut counts = Counts::default();
    // A term that nobody can lead with is not carried on: whoever exports it wants to be rid of it.
    let term = terms::reserved(&catalog).await?.0.map_or(0, Reserved::term);
    line(out, &Line::Export { version: EXPORT_VERSION, term })?;
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
    let kept = |entry: &Entry| !entry.payload.is_empty() && !subjects::is_about_leading(&entry.subject);
    for entry in registry.all(subjects::REGISTRY_ALL).await?.into_iter().filter(kept) {
        counts.entries += 1;
        line(out, &Line::Registry { subject: entry.subject, payload: Payload::of(&entry.payload) })?;
    }
    if audit {
        counts.audited = export_audit(client, out).await?;
    }
    line(out, &Line::End { entries: counts.documents + counts.entries + counts.audited })?;
    out.flush()?;
    Ok(counts)
}

/// What AUDIT keeps of documents, oldest first. Returns how much there was.
async fn export_audit(client: Client, out: &mut impl Write) -> Result<usize, Error> {
    let log = Log::audit(client);
    let filters = subjects::catalog_filters(None, None).map_err(|error| io::Error::other(error.to_string()))?;
    let mut count = 0;
    // What was imported is older than anything that was written here.
    for filter in filters.iter().rev() {
        let mut next = 1;
        loop {
            let page = log.page(filter, next, AUDITED_AT_ONCE, false).await?;
            let Some(last) = page.last() else { break };
            next = last.sequence + 1;
            for entry in &page {
                let Some(kept) = audit::kept(entry) else { continue };
                let text = |header: &str| entry.header(header).unwrap_or_default().to_owned();
                let at = humantime::format_rfc3339_millis(kept.at).to_string();
                let (author, reason, payload) = (text(catalog::AUTHOR), text(catalog::REASON), Payload::of(&entry.payload));
                line(out, &Line::Audit { subject: kept.subject, revision: kept.revision, at, author, reason, payload })?;
                count += 1;
            }
        }
    }
    Ok(count)
}

/// An export, read.
pub struct Read {
    pub term: u64,
    pub documents: Vec<Document>,
    /// Subject and payload.
    pub entries: Vec<(String, Vec<u8>)>,
    /// Former versions of documents, oldest first.
    pub audited: Vec<Audited>,
    /// What cannot be used, and is left out.
    pub refused: Vec<String>,
}

/// A former version of a document.
pub struct Audited {
    /// In CATALOG of the bus that was exported.
    subject: String,
    revision: u64,
    at: String,
    author: String,
    reason: String,
    payload: Vec<u8>,
}

pub fn read(mut input: impl BufRead) -> Result<Read, Error> {
    let mut all = Read { term: 0, documents: Vec::new(), entries: Vec::new(), audited: Vec::new(), refused: Vec::new() };
    let (mut number, mut found, mut text) = (0, 0, Vec::new());
    let mut names = BTreeSet::new();
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
            Line::Export { version, term } if number == 1 && version == EXPORT_VERSION => {
                // One that nobody can lead with is left out, not the documents with it.
                match Reserved::new(term, 0) {
                    Ok(good) => all.term = good.term(),
                    Err(_) => all.refused.push(format!("term {term}, which nobody can lead with")),
                }
            }
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
                let (subject, payload) = (renamed(&subject), payload.bytes().ok_or_else(|| malformed("not base64".to_owned()))?);
                if !names.insert(subject.clone()) {
                    return Err(malformed(format!("{subject:?} is there twice: an id has one holder, remove the other line")));
                }
                all.entries.push((subject, payload));
                found += 1;
            }
            Line::Audit { subject, revision, at, author, reason, payload } => {
                Name::parse(&subject).ok_or_else(|| malformed(format!("{subject:?} is no document")))?;
                humantime::parse_rfc3339(&at).map_err(|error| malformed(format!("{at:?}: {error}")))?;
                if author.chars().chain(reason.chars()).any(groupcast_policy::text::is_deceptive) {
                    return Err(malformed("an author or reason holds control characters".to_owned()));
                }
                let payload = payload.bytes().ok_or_else(|| malformed("not base64".to_owned()))?;
                all.audited.push(Audited { subject, revision, at, author, reason, payload });
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
    // Before the documents: an import that is begun again finds what it has written, and AUDIT has no document of its own yet.
    let audited = import_audit(&client, &all.audited).await?;
    let counts = Counts { documents: all.documents.len(), entries: all.entries.len(), audited, refused: all.refused };
    let catalog = Catalog::new(client);
    let mut documents = all.documents;
    if replace {
        remember_credentials(&catalog, &mut documents).await?;
    }
    for documents in documents.chunks(CHANGE_DOCUMENTS_MAX) {
        let writes = documents.iter().map(|document| DocumentWrite::put(document.clone(), expected)).collect();
        let change = Change { author: "import".to_owned(), reason: "restored from an export".to_owned(), key: None, writes };
        catalog.write(&change, None).await?;
    }
    Ok(counts)
}

/// Gives AUDIT what the exported one remembered; how much. Nothing where this is the AUDIT that it comes from.
async fn import_audit(client: &Client, audited: &[Audited]) -> Result<usize, Error> {
    let log = Log::audit(client.clone());
    let Some(newest) = audited.last() else { return Ok(0) };
    // That very version, not a later one: CATALOG may have been lost alone, and another counts from 1 again.
    let is_newest = |kept: audit::Kept| {
        kept.revision == newest.revision && humantime::format_rfc3339_millis(kept.at).to_string() == newest.at
    };
    let own = log.page(&newest.subject, 1, usize::MAX, true).await?;
    if own.iter().filter_map(audit::kept).any(is_newest) {
        return Ok(0);
    }
    // What an import that failed has brought already.
    let written = log.count(subjects::AUDITED_ALL).await?;
    let context = async_nats::jetstream::new(client.clone());
    for part in audited.get(written..).unwrap_or_default().chunks(AUDITED_AT_ONCE) {
        let mut answers = Vec::with_capacity(part.len());
        for one in part {
            let failed = |why: String| Error::Write { subject: one.subject.clone(), why };
            let subject = subjects::audited(&one.subject).ok_or_else(|| failed("it is no document".to_owned()))?;
            let mut headers = HeaderMap::new();
            headers.insert(catalog::AUTHOR, one.author.as_str());
            headers.insert(catalog::REASON, one.reason.as_str());
            headers.insert(IMPORTED_AT, one.at.as_str());
            headers.insert(IMPORTED_REVISION, one.revision.to_string().as_str());
            let sent = context.publish_with_headers(subject, headers, one.payload.clone().into()).await;
            answers.push((one, sent.map_err(|error| failed(error.to_string()))?));
        }
        for (one, answer) in answers {
            answer.await.map_err(|error| Error::Write { subject: one.subject.clone(), why: error.to_string() })?;
        }
    }
    Ok(audited.len().saturating_sub(written))
}

/// What was signed for hosts since the export was written is not forgotten, and what was revoked since is not revived.
async fn remember_credentials(catalog: &Catalog, documents: &mut [Document]) -> Result<(), Error> {
    for document in documents.iter_mut().filter(|document| document.name().kind == CatalogKind::Host) {
        let there = catalog.read(&document.name()).await?.map(|version| version.document);
        let (Some(Ok(Some(there))), Ok(grant)) = (there, Grant::read(document)) else { continue };
        if let Ok(there) = Grant::read(&there)
            && let Ok(merged) = grant.with_credentials_of(&there).document()
        {
            *document = merged;
        }
    }
    Ok(())
}

/// Terms never go back, also when CATALOG is another one.
async fn restore_term(catalog: &Log, exported: u64) -> Result<(), Error> {
    let (now, expected) = terms::reserved(catalog).await?;
    let now = now?;
    if now.term() >= exported {
        return Ok(());
    }
    let subject = subjects::CATALOG_TERM.to_owned();
    let payload = Reserved::new(exported, now.life())?.encode();
    let message = Outgoing { subject: subject.clone(), headers: HeaderMap::new(), expected, payload };
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
        let raw = r#"{"registry":{"subject":"gc.reg.h.h2","payload":{"base64":"/w=="}}}"#;
        let end = |n: usize| format!(r#"{{"end":{{"entries":{n}}}}}"#);
        let good = text(&[begin, entry, raw, &end(2)]).unwrap();
        assert_eq!((good.term, good.entries.len(), good.entries[1].1.as_slice()), (7, 2, [0xff].as_slice()));
        // What an earlier version wrote has another name now, and an id one holder.
        let former = |network: &str| format!(r#"{{"registry":{{"subject":"gc.reg.w.{network}.w1","payload":{{"text":"x"}}}}}}"#);
        assert_eq!(text(&[begin, &former("n"), &end(1)]).unwrap().entries[0].0, "gc.reg.w.w1");
        assert!(matches!(text(&[begin, &former("n"), &former("m"), &end(2)]), Err(Error::Malformed { line: 3, .. })));
        assert!(matches!(text(&[begin, entry]), Err(Error::CutOff { found: 1, expected: None })));
        assert!(matches!(text(&[begin, entry, &end(2)]), Err(Error::CutOff { found: 1, expected: Some(2) })));
        assert!(matches!(text(&[entry, &end(1)]), Err(Error::Malformed { line: 1, .. })));
        assert!(matches!(text(&[r#"{"export":{"version":2,"term":7}}"#]), Err(Error::Malformed { line: 1, .. })));
        assert!(matches!(
            text(&[begin, r#"{"registry":{"subject":"other","payload":{"text":""}}}"#]),
            Err(Error::Malformed { line: 2, .. })
        ));
        // Broke: an export carried a term that nobody can lead with into the next bus.
        let poisoned = r#"{"export":{"version":1,"term":18446744073709551614}}"#;
        let left_out = text(&[poisoned, entry, &end(1)]).unwrap();
        assert_eq!((left_out.term, left_out.entries.len(), left_out.refused.len()), (0, 1, 1));
        assert!(matches!(text(&[begin, begin]), Err(Error::Malformed { line: 2, .. })));
        assert!(matches!(text(&[""]), Err(Error::CutOff { .. })));
    }

    #[test]
    fn what_the_audit_remembers_is_checked_like_everything_else() {
        let line = |subject: &str, at: &str, author: &str| {
            format!(
                r#"{{"audit":{{"subject":"{subject}","revision":7,"at":"{at}","author":"{author}","reason":"","payload":{{"text":""}}}}}}"#
            )
        };
        let read = |line: &str| text(&[r#"{"export":{"version":1,"term":7}}"#, line, r#"{"end":{"entries":1}}"#]);
        let good = read(&line("gc.cat.group.web", "2026-11-18T07:00:00.000Z", "ann")).unwrap();
        assert_eq!((good.audited.len(), good.audited[0].revision, good.documents.len()), (1, 7, 0));
        for bad in [
            line("gc.reg.h.h1", "2026-11-18T07:00:00Z", "ann"),
            line("gc.cat.group.web", "yesterday", "ann"),
            line("gc.cat.group.web", "2026-11-18T07:00:00Z", "a\\nb"),
        ] {
            assert!(matches!(read(&bad), Err(Error::Malformed { line: 2, .. })), "{bad}");
        }
    }

    #[test]
    fn a_line_is_bounded() {
        let long = vec![b' '; LINE_BYTES_MAX + 1];
        assert!(matches!(read(long.as_slice()), Err(Error::Malformed { line: 1, why }) if why.contains("longer")));
    }
}
