//! What a server sends, parsed from bytes: no IO, no allocation per frame, no panic on any input.

use memchr::memchr;

/// Longest control line accepted, without its line end. The longest a server sends is INFO: it lists the cluster's addresses.
pub const CONTROL_LINE_BYTES_MAX: usize = 64 * 1024;

/// Largest message accepted, headers included: what a server's `max_payload` may reasonably be set to.
pub const PAYLOAD_BYTES_MAX: usize = 8 * 1024 * 1024;

/// How much of an offending line an error repeats.
const EXCERPT_BYTES_MAX: usize = 64;

/// After a parse error the position in the stream is unknown: the only way on is a new connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    #[error("a control line is longer than {CONTROL_LINE_BYTES_MAX} bytes: is this a NATS server?")]
    LineTooLong,
    #[error("control line {0:?} is not of the NATS protocol: is this a NATS server?")]
    BadLine(String),
    #[error("a message of {0} bytes is larger than {PAYLOAD_BYTES_MAX}: lower max_payload on the server")]
    PayloadTooLarge(usize),
    #[error("a message does not end where its length says: the connection is out of step")]
    NoPayloadEnd,
    #[error("a message's header block does not start with NATS/1.0 and end with an empty line")]
    BadHeaders,
}

/// One unit of the protocol, borrowed from the buffer it was read into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Frame<'a> {
    /// The JSON text of the server's description of itself.
    Info(&'a str),
    Message(MessageFrame<'a>),
    Ping,
    Pong,
    Ok,
    /// The text between the quotes of `-ERR`.
    Error(&'a str),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageFrame<'a> {
    pub subject: &'a str,
    /// The number this client gave to the subscription that matched.
    pub sid: u64,
    pub reply: Option<&'a str>,
    pub headers: Headers<'a>,
    pub payload: &'a [u8],
}

/// What the front of a buffer holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parsed<'a> {
    /// One frame, and how many bytes of the buffer it took.
    Frame(Frame<'a>, usize),
    /// Not yet a whole frame. At least this many bytes are needed to have a chance of one.
    Incomplete(usize),
}

/// Parses the frame at the front of `buffer`.
pub fn parse(buffer: &[u8]) -> Result<Parsed<'_>, ParseError> {
    let Some(line_end) = memchr(b'\n', &buffer[..buffer.len().min(CONTROL_LINE_BYTES_MAX + 2)]) else {
        if buffer.len() > CONTROL_LINE_BYTES_MAX + 1 {
            return Err(ParseError::LineTooLong);
        }
        return Ok(Parsed::Incomplete(buffer.len() + 1));
    };
    let line = buffer[..line_end].strip_suffix(b"\r").ok_or_else(|| bad_line(&buffer[..line_end]))?;
    let text = std::str::from_utf8(line).map_err(|_| bad_line(line))?;
    let (verb, rest) = text.split_at(text.find([' ', '\t']).unwrap_or(text.len()));
    let start = line_end + 1;

    if verb.eq_ignore_ascii_case("MSG") {
        return message(buffer, start, rest, false).map_err(|error| error.unwrap_or_else(|| bad_line(line)));
    }
    if verb.eq_ignore_ascii_case("HMSG") {
        return message(buffer, start, rest, true).map_err(|error| error.unwrap_or_else(|| bad_line(line)));
    }
    let frame = if verb.eq_ignore_ascii_case("PING") {
        Frame::Ping
    } else if verb.eq_ignore_ascii_case("PONG") {
        Frame::Pong
    } else if verb.eq_ignore_ascii_case("+OK") {
        Frame::Ok
    } else if verb.eq_ignore_ascii_case("-ERR") {
        Frame::Error(rest.trim().trim_matches('\''))
    } else if verb.eq_ignore_ascii_case("INFO") {
        Frame::Info(rest.trim())
    } else {
        return Err(bad_line(line));
    };
    Ok(Parsed::Frame(frame, start))
}

/// `MSG <subject> <sid> [reply] <bytes>` or `HMSG <subject> <sid> [reply] <header bytes> <bytes>`, then the bytes.
/// `Err(None)` says that the control line is wrong; the caller has the line to name.
fn message<'a>(buffer: &'a [u8], start: usize, arguments: &'a str, with_headers: bool) -> Result<Parsed<'a>, Option<ParseError>> {
    let mut words = arguments.split([' ', '\t']).filter(|word| !word.is_empty());
    let subject = words.next().ok_or(None)?;
    let sid = words.next().and_then(number).ok_or(None)?;
    let (third, fourth, fifth) = (words.next().ok_or(None)?, words.next(), words.next());
    if words.next().is_some() {
        return Err(None);
    }
    let (reply, header_len, total) = match (with_headers, fourth, fifth) {
        (false, None, None) => (None, "0", third),
        (false, Some(total), None) => (Some(third), "0", total),
        (true, Some(total), None) => (None, third, total),
        (true, Some(header_len), Some(total)) => (Some(third), header_len, total),
        _ => return Err(None),
    };
    let header_len = number(header_len).and_then(|n| usize::try_from(n).ok()).ok_or(None)?;
    let total = number(total).and_then(|n| usize::try_from(n).ok()).ok_or(None)?;
    if total > PAYLOAD_BYTES_MAX {
        return Err(Some(ParseError::PayloadTooLarge(total)));
    }
    if header_len > total {
        return Err(None);
    }
    let end = start + total;
    let Some(tail) = buffer.get(end..end + 2) else {
        return Ok(Parsed::Incomplete(end + 2));
    };
    if tail != b"\r\n" {
        return Err(Some(ParseError::NoPayloadEnd));
    }
    let headers = if with_headers { Headers::new(&buffer[start..start + header_len])? } else { Headers::default() };
    let payload = &buffer[start + header_len..end];
    Ok(Parsed::Frame(Frame::Message(MessageFrame { subject, sid, reply, headers, payload }), end + 2))
}

/// Digits only: `str::parse` would also take a sign.
fn number(word: &str) -> Option<u64> {
    if word.bytes().all(|b| b.is_ascii_digit()) { word.parse().ok() } else { None }
}

fn bad_line(line: &[u8]) -> ParseError {
    ParseError::BadLine(String::from_utf8_lossy(&line[..line.len().min(EXCERPT_BYTES_MAX)]).into_owned())
}

/// A message's header block, read in place; a message without headers has an empty one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Headers<'a> {
    /// From `NATS/1.0` to the empty line, both included; or nothing.
    block: &'a [u8],
}

const VERSION: &[u8] = b"NATS/1.0";

impl<'a> Headers<'a> {
    fn new(block: &'a [u8]) -> Result<Self, ParseError> {
        if block.starts_with(VERSION) && block.ends_with(b"\r\n\r\n") { Ok(Self { block }) } else { Err(ParseError::BadHeaders) }
    }

    /// For a block that [`Headers::raw`] gave.
    pub(super) fn trusted(block: &'a [u8]) -> Self {
        Self { block }
    }

    pub fn is_empty(&self) -> bool {
        self.iter().next().is_none()
    }

    /// The status of a server's reply (`503`: nobody listens), which stands in the first line.
    pub fn status(&self) -> Option<u16> {
        let line = self.block.get(VERSION.len()..)?;
        let line = &line[..memchr(b'\r', line)?];
        std::str::from_utf8(line).ok()?.split_ascii_whitespace().next()?.parse().ok()
    }

    /// The value of the first header with exactly this name.
    pub fn get(&self, name: &str) -> Option<&'a str> {
        self.iter().find(|(found, _)| *found == name).map(|(_, value)| value)
    }

    /// Names and values in wire order. A line that is not `name: value` in UTF-8 is passed over: it harms nobody but itself.
    pub fn iter(&self) -> impl Iterator<Item = (&'a str, &'a str)> + use<'a> {
        let text = |(name, value)| Some((std::str::from_utf8(name).ok()?, std::str::from_utf8(value).ok()?));
        self.fields().filter_map(text)
    }

    /// Like [`Headers::iter`], of whatever bytes.
    pub fn fields(&self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> + use<'a> {
        let mut rest = self.block;
        let _version = next_line(&mut rest);
        std::iter::from_fn(move || next_line(&mut rest)).filter_map(|line| {
            let colon = memchr(b':', line)?;
            Some((&line[..colon], line[colon + 1..].trim_ascii()))
        })
    }

    /// The block as it travelled, to send the same headers again.
    pub fn raw(&self) -> &'a [u8] {
        self.block
    }
}

fn next_line<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let end = memchr(b'\n', rest)?;
    let line = &rest[..end];
    *rest = &rest[end + 1..];
    Some(line.strip_suffix(b"\r").unwrap_or(line))
}

/// Cuts a stream of bytes into frames, whatever pieces it arrives in. Holds nothing between whole frames.
#[derive(Debug, Default)]
pub struct Decoder {
    /// The beginning of a frame whose end has not arrived.
    partial: Vec<u8>,
    /// How long `partial` must be before parsing it again can succeed.
    needed: usize,
}

impl Decoder {
    /// Hands every frame that `chunk` completes to `on_frame`, in order.
    pub fn feed(&mut self, mut chunk: &[u8], mut on_frame: impl FnMut(Frame<'_>)) -> Result<(), ParseError> {
        // Only what the broken frame lacks is copied; the frames after it are parsed where they are.
        while !self.partial.is_empty() && !chunk.is_empty() {
            let missing = self.needed - self.partial.len();
            // One byte missing may mean "the rest of a line", whose length nobody knows: its end says where it ends.
            let take = if missing > 1 { missing } else { memchr(b'\n', chunk).map_or(chunk.len(), |end| end + 1) };
            let (front, rest) = chunk.split_at(take.min(chunk.len()));
            self.partial.extend_from_slice(front);
            chunk = rest;
            if self.partial.len() < self.needed {
                break;
            }
            match parse(&self.partial)? {
                Parsed::Frame(frame, _) => {
                    on_frame(frame);
                    self.partial = Vec::new();
                }
                Parsed::Incomplete(needed) => self.needed = needed,
            }
        }
        while !chunk.is_empty() {
            match parse(chunk)? {
                Parsed::Frame(frame, taken) => {
                    on_frame(frame);
                    chunk = &chunk[taken..];
                }
                Parsed::Incomplete(needed) => {
                    self.partial.reserve_exact(needed.max(chunk.len()));
                    self.partial.extend_from_slice(chunk);
                    self.needed = needed;
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Bytes kept for a frame that is not complete.
    pub fn held_bytes(&self) -> usize {
        self.partial.len()
    }
}
