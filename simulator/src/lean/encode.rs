//! What a client sends, written into one buffer per connection.

use std::io::Write;

use bytes::{Buf, BytesMut};

/// Commands waiting to be written to the socket. Subjects and header values come from our own code (typed functions and numbers),
/// never from outside, so they are not escaped here: see [`Outbound::publish_with_headers`] for what is checked.
#[derive(Debug, Default)]
pub struct Outbound {
    pending: BytesMut,
}

impl Outbound {
    pub fn connect(&mut self, json: &str) {
        self.words(&["CONNECT", json]);
    }

    /// `sid` is this client's own number for the subscription; it comes back with every message.
    pub fn subscribe(&mut self, subject: &str, sid: u64) {
        self.words(&["SUB", subject, decimal(sid, &mut [0; DECIMAL_LEN_MAX])]);
    }

    pub fn unsubscribe(&mut self, sid: u64) {
        self.words(&["UNSUB", decimal(sid, &mut [0; DECIMAL_LEN_MAX])]);
    }

    pub fn publish(&mut self, subject: &str, reply: Option<&str>, payload: &[u8]) {
        let total = decimal(payload.len() as u64, &mut [0; DECIMAL_LEN_MAX]).to_owned();
        match reply {
            Some(reply) => self.words(&["PUB", subject, reply, &total]),
            None => self.words(&["PUB", subject, &total]),
        }
        self.body(&[payload]);
    }

    /// A header name or value with a line break would end the header: such a header is cut at the break.
    pub fn publish_with_headers(&mut self, subject: &str, reply: Option<&str>, headers: &[(&str, &str)], payload: &[u8]) {
        let mut block = b"NATS/1.0\r\n".to_vec();
        for (name, value) in headers {
            block.extend_from_slice(up_to_line_break(name).as_bytes());
            block.extend_from_slice(b": ");
            block.extend_from_slice(up_to_line_break(value).as_bytes());
            block.extend_from_slice(b"\r\n");
        }
        block.extend_from_slice(b"\r\n");
        self.publish_with_header_block(subject, reply, &block, payload);
    }

    /// For a header block as it was received ([`super::Headers::raw`]).
    pub fn publish_with_header_block(&mut self, subject: &str, reply: Option<&str>, block: &[u8], payload: &[u8]) {
        let header_len = decimal(block.len() as u64, &mut [0; DECIMAL_LEN_MAX]).to_owned();
        let total = decimal((block.len() + payload.len()) as u64, &mut [0; DECIMAL_LEN_MAX]).to_owned();
        match reply {
            Some(reply) => self.words(&["HPUB", subject, reply, &header_len, &total]),
            None => self.words(&["HPUB", subject, &header_len, &total]),
        }
        self.body(&[block, payload]);
    }

    pub fn ping(&mut self) {
        self.pending.extend_from_slice(b"PING\r\n");
    }

    pub fn pong(&mut self) {
        self.pending.extend_from_slice(b"PONG\r\n");
    }

    /// Bytes not yet written to the socket.
    pub fn pending(&self) -> &[u8] {
        &self.pending
    }

    /// The first `len` bytes were written.
    pub(super) fn written(&mut self, len: usize) {
        self.pending.advance(len);
        if self.pending.is_empty() {
            // An idle connection holds no buffer.
            self.pending = BytesMut::new();
        }
    }

    fn words(&mut self, words: &[&str]) {
        for (at, word) in words.iter().enumerate() {
            if at > 0 {
                self.pending.extend_from_slice(b" ");
            }
            self.pending.extend_from_slice(word.as_bytes());
        }
        self.pending.extend_from_slice(b"\r\n");
    }

    fn body(&mut self, parts: &[&[u8]]) {
        for part in parts {
            self.pending.extend_from_slice(part);
        }
        self.pending.extend_from_slice(b"\r\n");
    }
}

/// Digits of `u64::MAX`.
const DECIMAL_LEN_MAX: usize = 20;

fn decimal(number: u64, digits: &mut [u8; DECIMAL_LEN_MAX]) -> &str {
    let mut rest = &mut digits[..];
    // The buffer holds any u64 and digits are ASCII: neither step can fail.
    let _ = write!(rest, "{number}");
    let len = DECIMAL_LEN_MAX - rest.len();
    std::str::from_utf8(&digits[..len]).unwrap_or_default()
}

fn up_to_line_break(text: &str) -> &str {
    text.split(['\r', '\n']).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(write: impl FnOnce(&mut Outbound)) -> String {
        let mut outbound = Outbound::default();
        write(&mut outbound);
        String::from_utf8(outbound.pending().to_vec()).unwrap()
    }

    #[test]
    fn every_command_as_the_protocol_spells_it() {
        let rows: &[(String, &str)] = &[
            (encoded(|o| o.connect("{}")), "CONNECT {}\r\n"),
            (encoded(|o| o.subscribe("a.*", 7)), "SUB a.* 7\r\n"),
            (encoded(|o| o.unsubscribe(u64::MAX)), "UNSUB 18446744073709551615\r\n"),
            (encoded(|o| o.publish("a", None, b"xy")), "PUB a 2\r\nxy\r\n"),
            (encoded(|o| o.publish("a", Some("r"), b"")), "PUB a r 0\r\n\r\n"),
            (
                encoded(|o| o.publish_with_headers("a", None, &[("N", "v")], b"xy")),
                "HPUB a 18 20\r\nNATS/1.0\r\nN: v\r\n\r\nxy\r\n",
            ),
            (encoded(|o| o.publish_with_headers("a", Some("r"), &[], b"")), "HPUB a r 12 12\r\nNATS/1.0\r\n\r\n\r\n"),
            (encoded(|o| o.ping()), "PING\r\n"),
            (encoded(|o| o.pong()), "PONG\r\n"),
        ];
        for (got, expected) in rows {
            assert_eq!(got, expected);
        }
    }

    #[test]
    fn a_line_break_in_a_header_cannot_smuggle_a_second_one() {
        let text = encoded(|o| o.publish_with_headers("a", None, &[("N\r\nEvil", "v\nEvil: 1")], b""));
        assert_eq!(text, "HPUB a 18 18\r\nNATS/1.0\r\nN: v\r\n\r\n\r\n");
    }

    #[test]
    fn what_was_written_is_gone_and_the_rest_stays() {
        let mut outbound = Outbound::default();
        outbound.ping();
        outbound.pong();
        outbound.written(8);
        assert_eq!(outbound.pending(), b"NG\r\n");
        outbound.written(4);
        assert!(outbound.pending().is_empty());
    }
}
