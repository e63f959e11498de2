//! Names of network interfaces, and the patterns by which a host claims them.

use std::fmt;

/// The kernel's limit is 16 bytes with the closing zero.
pub const INTERFACE_NAME_LEN_MAX: usize = 15;

/// An interface name as the kernel compares it: padded with zeros.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Interface([u8; INTERFACE_NAME_LEN_MAX + 1]);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidInterface {
    #[error(
        "interface {0:?} is not a name: use 1 to {INTERFACE_NAME_LEN_MAX} printable characters without space, slash, colon, quote or star"
    )]
    Name(String),
    #[error("claim {0:?} is not a pattern: write a name, or the beginning of one (at least one character) followed by a star")]
    Claim(String),
}

/// What is longer is cut before it is printed in an error.
const ERROR_TEXT_CHARS_MAX: usize = 40;

fn is_name(text: &str, len_max: usize) -> bool {
    let allowed = |b: u8| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'"' | b'*' | b'\\');
    (1..=len_max).contains(&text.len()) && text.bytes().all(allowed) && text != "." && text != ".."
}

fn padded(text: &str) -> [u8; INTERFACE_NAME_LEN_MAX + 1] {
    let mut bytes = [0; INTERFACE_NAME_LEN_MAX + 1];
    bytes[..text.len()].copy_from_slice(text.as_bytes());
    bytes
}

impl Interface {
    /// The missing interface: a packet that the host itself sends came in nowhere. It equals no name.
    pub const NONE: Interface = Interface([0; INTERFACE_NAME_LEN_MAX + 1]);

    pub const LOOPBACK: Interface = Interface(*b"lo\0\0\0\0\0\0\0\0\0\0\0\0\0\0");

    pub fn new(text: &str) -> Result<Self, InvalidInterface> {
        if !is_name(text, INTERFACE_NAME_LEN_MAX) {
            return Err(InvalidInterface::Name(text.chars().take(ERROR_TEXT_CHARS_MAX).collect()));
        }
        Ok(Self(padded(text)))
    }

    /// `None` if these bytes are no padded name.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes.split(|b| *b == 0).next()?).ok()?;
        Self::new(text).ok()
    }

    pub fn bytes(&self) -> &[u8; INTERFACE_NAME_LEN_MAX + 1] {
        &self.0
    }

    pub fn as_str(&self) -> &str {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(self.0.len());
        std::str::from_utf8(&self.0[..end]).unwrap_or_default()
    }
}

impl fmt::Display for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Interface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

/// A name, or the beginning of names (`tap*`): the interfaces that only workloads have. A packet through one of them never passes
/// unjudged. The beginning is never empty, so none but
/// [`Claim::HOST`] covers [`Interface::NONE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Claim {
    beginning: Interface,
    open: bool,
}

impl Claim {
    /// Claims what is behind no interface: the machine itself. Not to be written by anybody.
    pub const HOST: Claim = Claim { beginning: Interface::NONE, open: false };

    pub fn new(text: &str) -> Result<Self, InvalidInterface> {
        let error = || InvalidInterface::Claim(text.chars().take(ERROR_TEXT_CHARS_MAX).collect());
        let (beginning, open) = match text.strip_suffix('*') {
            Some(beginning) => (beginning, true),
            None => (text, false),
        };
        if !is_name(beginning, if open { INTERFACE_NAME_LEN_MAX - 1 } else { INTERFACE_NAME_LEN_MAX }) {
            return Err(error());
        }
        Ok(Self { beginning: Interface(padded(beginning)), open })
    }

    pub fn covers(&self, interface: &Interface) -> bool {
        let (first, last) = self.span();
        first <= interface.0 && interface.0 <= last
    }

    /// First and last of the names it covers, as the kernel sorts them.
    pub fn span(&self) -> ([u8; 16], [u8; 16]) {
        let mut last = self.beginning.0;
        if self.open {
            last[self.beginning.as_str().len()..].fill(0xff);
        }
        (self.beginning.0, last)
    }

    /// The claim that covers exactly this span, if there is one.
    pub fn from_span(first: &[u8], last: &[u8]) -> Option<Self> {
        if (first, last) == (&Interface::NONE.0[..], &Interface::NONE.0[..]) {
            return Some(Claim::HOST);
        }
        let beginning = Interface::from_bytes(first)?;
        let claims = [Claim { beginning, open: false }, Claim { beginning, open: true }];
        claims.into_iter().find(|claim| claim.span() == (beginning.0, last.try_into().unwrap_or_default()))
    }
}

/// The fewest claims that cover the same: the kernel refuses intervals that overlap.
pub fn disjoint(claims: impl IntoIterator<Item = Claim>) -> Vec<Claim> {
    let mut sorted: Vec<Claim> = claims.into_iter().collect();
    // The widest of those with one beginning first.
    sorted.sort_by_key(|claim| (claim.beginning, !claim.open));
    let mut kept: Vec<Claim> = Vec::new();
    for claim in sorted {
        if !kept.last().is_some_and(|last| last.covers(&claim.beginning)) {
            kept.push(claim);
        }
    }
    kept
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.beginning, if self.open { "*" } else { "" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_and_plain() {
        assert!(Interface::new(&"a".repeat(INTERFACE_NAME_LEN_MAX)).is_ok());
        for bad in ["", ".", "..", "a b", "a/b", "a:b", "a\"", "a*", "ä", "a\0", &"a".repeat(INTERFACE_NAME_LEN_MAX + 1)] {
            assert!(Interface::new(bad).is_err(), "{bad:?}");
        }
        assert_eq!(Interface::from_bytes(Interface::new("tap0").unwrap().bytes()).unwrap().as_str(), "tap0");
    }

    #[test]
    fn a_claim_covers_what_begins_like_it() {
        let rows = [
            ("tap*", "tap", true),
            ("tap*", "tap0", true),
            ("tap*", "tapäh", false),
            ("tap*", "ta", false),
            ("tap*", "tbp", false),
            ("tap0", "tap0", true),
            ("tap0", "tap01", false),
            ("tap0", "tap", false),
        ];
        for (claim, name, covered) in rows {
            let Ok(interface) = Interface::new(name) else { continue };
            assert_eq!(Claim::new(claim).unwrap().covers(&interface), covered, "{claim} {name}");
            assert!(!Claim::new(claim).unwrap().covers(&Interface::NONE));
        }
        for bad in ["", "*", "a**", "a*b", &"a".repeat(16), &format!("{}*", "a".repeat(15))] {
            assert!(Claim::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn claims_are_read_back_from_their_spans_and_never_overlap() {
        for text in ["tap*", "tap0", "v*", "aaaaaaaaaaaaaa*", "aaaaaaaaaaaaaaa"] {
            let claim = Claim::new(text).unwrap();
            let (first, last) = claim.span();
            assert_eq!(Claim::from_span(&first, &last), Some(claim));
            assert_eq!(claim.to_string(), text);
        }
        let kept = disjoint(["tap0", "tap*", "tap*", "ta", "tap01*", "v0", "v*"].map(|c| Claim::new(c).unwrap()));
        assert_eq!(kept.iter().map(Claim::to_string).collect::<Vec<_>>(), ["ta", "tap*", "v*"]);
    }
}
