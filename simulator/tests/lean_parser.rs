//! The lean client's parser: whatever pieces the bytes arrive in, the frames are the same; whatever the bytes are, it returns.

use groupcast_simulator::lean::{
    CONTROL_LINE_BYTES_MAX, Decoder, Frame, Headers, MessageFrame, Outbound, PAYLOAD_BYTES_MAX, ParseError, Parsed, parse,
};
use proptest::prelude::*;

/// A frame that owns its text, to compare streams of them.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Seen {
    Info(String),
    Message { subject: String, sid: u64, reply: Option<String>, headers: Vec<(String, String)>, payload: Vec<u8> },
    Ping,
    Pong,
    Ok,
    Error(String),
}

impl From<Frame<'_>> for Seen {
    fn from(frame: Frame<'_>) -> Self {
        match frame {
            Frame::Info(json) => Self::Info(json.to_owned()),
            Frame::Message(MessageFrame { subject, sid, reply, headers, payload }) => Self::Message {
                subject: subject.to_owned(),
                sid,
                reply: reply.map(str::to_owned),
                headers: headers.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
                payload: payload.to_vec(),
            },
            Frame::Ping => Self::Ping,
            Frame::Pong => Self::Pong,
            Frame::Ok => Self::Ok,
            Frame::Error(text) => Self::Error(text.to_owned()),
        }
    }
}

impl Seen {
    /// The bytes a server would send for it.
    fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Info(json) => format!("INFO {json}\r\n").into_bytes(),
            Self::Ping => b"PING\r\n".to_vec(),
            Self::Pong => b"PONG\r\n".to_vec(),
            Self::Ok => b"+OK\r\n".to_vec(),
            Self::Error(text) => format!("-ERR '{text}'\r\n").into_bytes(),
            Self::Message { subject, sid, reply, headers, payload } => {
                let reply = reply.as_ref().map(|reply| format!(" {reply}")).unwrap_or_default();
                let mut block = String::new();
                if !headers.is_empty() {
                    block = "NATS/1.0\r\n".to_owned();
                    block.extend(headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")));
                    block.push_str("\r\n");
                }
                let mut bytes = match block.len() {
                    0 => format!("MSG {subject} {sid}{reply} {}\r\n", payload.len()),
                    len => format!("HMSG {subject} {sid}{reply} {len} {}\r\n{block}", len + payload.len()),
                }
                .into_bytes();
                bytes.extend_from_slice(payload);
                bytes.extend_from_slice(b"\r\n");
                bytes
            }
        }
    }
}

fn any_frame() -> impl Strategy<Value = Seen> {
    let header = ("[A-Za-z-]{1,20}", "([!-~]([ -~]{0,20}[!-~])?)?");
    let message = (
        "[a-zA-Z0-9_.-]{1,40}",
        any::<u64>(),
        proptest::option::of("[a-zA-Z0-9_.]{1,20}"),
        proptest::collection::vec(header, 0..4),
        // Payloads full of line ends are what would mislead a parser that looks for them.
        proptest::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), any::<u8>()], 0..300),
    );
    prop_oneof![
        4 => message.prop_map(|(subject, sid, reply, headers, payload)| Seen::Message { subject, sid, reply, headers, payload }),
        1 => Just(Seen::Ping),
        1 => Just(Seen::Pong),
        1 => Just(Seen::Ok),
        1 => "[a-zA-Z ]{0,20}[a-z]".prop_map(|text| Seen::Error(text.trim().to_owned())),
        1 => "[a-z0-9]{0,200}".prop_map(|text| Seen::Info(format!("{{\"a\":\"{text}\"}}"))),
    ]
}

fn decode(chunks: &[&[u8]]) -> Result<(Vec<Seen>, usize), ParseError> {
    let mut decoder = Decoder::default();
    let mut seen = Vec::new();
    for chunk in chunks {
        decoder.feed(chunk, |frame| seen.push(frame.into()))?;
    }
    Ok((seen, decoder.held_bytes()))
}

fn split_at<'a>(mut bytes: &'a [u8], lengths: &[usize]) -> Vec<&'a [u8]> {
    let mut chunks = Vec::new();
    for len in lengths.iter().cycle() {
        if bytes.is_empty() {
            break;
        }
        let (front, rest) = bytes.split_at((*len).min(bytes.len()));
        chunks.push(front);
        bytes = rest;
    }
    chunks
}

proptest! {
    #[test]
    fn any_frames_survive_any_split(frames in proptest::collection::vec(any_frame(), 0..12), lengths in proptest::collection::vec(1usize..80, 1..8)) {
        let bytes: Vec<u8> = frames.iter().flat_map(Seen::bytes).collect();
        let (seen, held) = decode(&split_at(&bytes, &lengths)).unwrap();
        prop_assert_eq!(seen, frames);
        prop_assert_eq!(held, 0);
    }

    #[test]
    fn a_cut_stream_gives_the_frames_before_the_cut(frames in proptest::collection::vec(any_frame(), 1..6), cut in any::<prop::sample::Index>()) {
        let bytes: Vec<u8> = frames.iter().flat_map(Seen::bytes).collect();
        let cut = cut.index(bytes.len());
        let (seen, held) = decode(&[&bytes[..cut]]).unwrap();
        let whole: usize = seen.iter().map(|frame| frame.bytes().len()).sum();
        prop_assert_eq!(&seen[..], &frames[..seen.len()]);
        prop_assert_eq!(whole + held, cut);
    }

    /// Mutated streams, because random bytes rarely get past the first verb.
    #[test]
    fn broken_input_is_refused_or_read_but_never_panics_and_splits_agree(
        frames in proptest::collection::vec(any_frame(), 1..4),
        breaks in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        lengths in proptest::collection::vec(1usize..40, 1..5),
    ) {
        let mut bytes: Vec<u8> = frames.iter().flat_map(Seen::bytes).collect();
        for (at, byte) in breaks {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        prop_assert_eq!(decode(&[&bytes]), decode(&split_at(&bytes, &lengths)));
    }

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        if let Ok(Parsed::Frame(Frame::Message(message), _)) = parse(&bytes) {
            let _ = (message.headers.status(), message.headers.iter().count());
        }
    }

    #[test]
    fn header_blocks_of_any_bytes_never_panic(block in proptest::collection::vec(any::<u8>(), 0..100)) {
        let mut bytes = format!("HMSG a 1 {0} {0}\r\nNATS/1.0", block.len() + 12).into_bytes();
        bytes.extend_from_slice(&block);
        bytes.extend_from_slice(b"\r\n\r\n\r\n");
        if let Ok(Parsed::Frame(Frame::Message(message), taken)) = parse(&bytes) {
            prop_assert_eq!(taken, bytes.len());
            let _ = (message.headers.status(), message.headers.get("a"), message.headers.iter().count());
        } else {
            prop_assert!(false, "the frame around the block is whole");
        }
    }
}

fn only_message(bytes: &[u8]) -> MessageFrame<'_> {
    match parse(bytes) {
        Ok(Parsed::Frame(Frame::Message(message), taken)) if taken == bytes.len() => message,
        other => panic!("expected one message, got {other:?}"),
    }
}

#[test]
fn headers_are_read_in_place() {
    let message = only_message(b"HMSG a.b 9 r 38 40\r\nNATS/1.0\r\nA: 1\r\nB:two words \r\nA: 3\r\n\r\nhi\r\n");
    assert_eq!((message.subject, message.sid, message.reply, message.payload), ("a.b", 9, Some("r"), &b"hi"[..]));
    assert_eq!(message.headers.iter().collect::<Vec<_>>(), [("A", "1"), ("B", "two words"), ("A", "3")]);
    assert_eq!((message.headers.get("A"), message.headers.get("a"), message.headers.status()), (Some("1"), None, None));
}

#[test]
fn a_status_stands_in_the_first_line() {
    let message = only_message(b"HMSG i 1 16 16\r\nNATS/1.0 503\r\n\r\n\r\n");
    assert_eq!((message.headers.status(), message.headers.is_empty()), (Some(503), true));
    let message = only_message(b"HMSG i 1 28 28\r\nNATS/1.0 404 No Messages\r\n\r\n\r\n");
    assert_eq!(message.headers.status(), Some(404));
    assert_eq!(Headers::default().status(), None);
}

#[test]
fn refused_lines() {
    for bad in [
        "MSG\r\n",
        "MSG a\r\n",
        "MSG a 1\r\n",
        "MSG a x 1\r\n",
        "MSG a +1 1\r\n",
        "MSG a 1 r 2 3\r\n",
        "MSG a 1 -1\r\n",
        "HMSG a 1 5\r\n",
        "HMSG a 1 9 8\r\n",
        "HMSG a 1 r 3 4 5\r\n",
        "MSG a 1 99999999999999999999999\r\n",
        "HTTP/1.1 200 OK\r\n",
        "\r\n",
        "PING\n",
        "MSGS a 1 0\r\n\r\n",
        "HMSG a 1 2 2\r\nxx\r\n",
        "MSG a 1 2\r\nxxxx",
        "-ERR \u{fffd}'\u{0}\nx",
    ] {
        let result = parse(bad.as_bytes());
        assert!(result.is_err(), "{bad:?} gave {result:?}");
    }
    assert!(parse(b"PING \xff\r\n").is_err());
}

#[test]
fn a_line_may_be_as_long_as_the_limit_and_no_longer() {
    let longest = format!("INFO {}\r\n", "x".repeat(CONTROL_LINE_BYTES_MAX - "INFO ".len()));
    assert!(matches!(parse(longest.as_bytes()), Ok(Parsed::Frame(Frame::Info(_), _))));
    let longer = format!("INFO {}\r\n", "x".repeat(CONTROL_LINE_BYTES_MAX + 1 - "INFO ".len()));
    assert_eq!(parse(longer.as_bytes()), Err(ParseError::LineTooLong));
    // Without an end in sight: refused as soon as it can no longer fit.
    assert!(matches!(parse(&longer.as_bytes()[..CONTROL_LINE_BYTES_MAX + 1]), Ok(Parsed::Incomplete(_))));
    assert_eq!(parse(&longer.as_bytes()[..CONTROL_LINE_BYTES_MAX + 2]), Err(ParseError::LineTooLong));
}

#[test]
fn a_payload_may_be_as_large_as_the_limit_and_no_larger() {
    let mut largest = format!("MSG a 1 {PAYLOAD_BYTES_MAX}\r\n").into_bytes();
    largest.resize(largest.len() + PAYLOAD_BYTES_MAX, b'x');
    largest.extend_from_slice(b"\r\n");
    assert_eq!(only_message(&largest).payload.len(), PAYLOAD_BYTES_MAX);
    let (seen, held) = decode(&largest.chunks(100_000).collect::<Vec<_>>()).unwrap();
    assert_eq!((seen.len(), held), (1, 0));
    // Refused on the control line, before anything is kept for it.
    let larger = format!("MSG a 1 {}\r\n", PAYLOAD_BYTES_MAX + 1);
    assert_eq!(parse(larger.as_bytes()), Err(ParseError::PayloadTooLarge(PAYLOAD_BYTES_MAX + 1)));
}

#[test]
fn what_the_encoder_writes_as_headers_the_parser_reads() {
    let mut outbound = Outbound::default();
    outbound.publish_with_headers("a", Some("r"), &[("N", "v"), ("M", "w x")], b"xy");
    // A server turns HPUB into HMSG by inserting the subscription's number.
    let sent = String::from_utf8(outbound.pending().to_vec()).unwrap().replacen("HPUB a", "HMSG a 1", 1);
    let message = only_message(sent.as_bytes());
    assert_eq!(message.headers.iter().collect::<Vec<_>>(), [("N", "v"), ("M", "w x")]);
    assert_eq!((message.reply, message.payload), (Some("r"), &b"xy"[..]));
}
