//! The bus's protocol as far as a bystander needs it: where one message ends and the next begins, and what it is about.

use std::net::{Ipv4Addr, SocketAddr};

use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// Stands between clients and the server at `url`: every connection is handed to `pass` as two ways, from the client to the server
/// and back. Returns the port to connect to; who aborts the task takes no more connections.
pub async fn stand_between(
    url: &str,
    pass: impl Fn((OwnedReadHalf, OwnedWriteHalf), (OwnedReadHalf, OwnedWriteHalf)) + Send + 'static,
) -> (u16, JoinHandle<()>) {
    let target: SocketAddr = url.trim_start_matches("nats://").parse().expect("a server's address");
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    let task = tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let Ok(far) = TcpStream::connect(target).await else { continue };
            let _ = (near.set_nodelay(true), far.set_nodelay(true));
            let ((near_in, near_out), (far_in, far_out)) = (near.into_split(), far.into_split());
            pass((near_in, far_out), (far_in, near_out));
        }
    });
    (port, task)
}

/// One line of the protocol, with the body that belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub verb: String,
    /// Of a message, in either direction.
    pub subject: Option<String>,
    pub reply: Option<String>,
    /// All of it, as it was sent.
    pub bytes: Vec<u8>,
}

impl Frame {
    pub fn contains(&self, text: &str) -> bool {
        self.bytes.windows(text.len()).any(|window| window == text.as_bytes())
    }
}

/// Cuts a stream of bytes into frames.
#[derive(Default)]
pub struct Frames {
    held: Vec<u8>,
}

impl Frames {
    pub fn take(&mut self, bytes: &[u8]) -> Vec<Frame> {
        self.held.extend_from_slice(bytes);
        let (mut found, mut at) = (Vec::new(), 0);
        while let Some(end) = self.held[at..].windows(2).position(|pair| pair == b"\r\n") {
            let line = String::from_utf8_lossy(&self.held[at..at + end]).into_owned();
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let verb = words.first().copied().unwrap_or_default();
            // How many words it has without a reply: that is optional in all of them.
            let plain = match verb {
                "MSG" => 4,
                "HMSG" => 5,
                "PUB" => 3,
                "HPUB" => 4,
                _ => 0,
            };
            let size = words.last().and_then(|size| size.parse::<usize>().ok()).filter(|_| plain > 0);
            let whole = end + 2 + size.map_or(0, |size| size + 2);
            if self.held.len() < at + whole {
                break;
            }
            let subject = size.and_then(|_| words.get(1).map(|subject| (*subject).to_owned()));
            let before_reply = if verb.ends_with("MSG") { 3 } else { 2 };
            let reply = (plain > 0 && words.len() > plain).then(|| words[before_reply].to_owned());
            let bytes = self.held[at..at + whole].to_vec();
            found.push(Frame { verb: verb.to_owned(), subject, reply, bytes });
            at += whole;
        }
        self.held.drain(..at);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_apart_however_they_are_cut() {
        let sent = b"INFO {\"a\":1}\r\nPING\r\nMSG gc.t.x 7 5\r\nhello\r\nHMSG gc.t.y 8 reply 12 14\r\nNATS/1.0\r\n\r\nhi\r\n\
                     PUB a 2\r\nhi\r\nHPUB b back 12 12\r\nNATS/1.0\r\n\r\n\r\n+OK\r\n";
        let expected = [
            ("INFO", None, None, 14),
            ("PING", None, None, 6),
            ("MSG", Some("gc.t.x"), None, 23),
            ("HMSG", Some("gc.t.y"), Some("reply"), 43),
            ("PUB", Some("a"), None, 13),
            ("HPUB", Some("b"), Some("back"), 33),
            ("+OK", None, None, 5),
        ];
        for cut in 1..sent.len() {
            let mut frames = Frames::default();
            let mut found = frames.take(&sent[..cut]);
            found.extend(frames.take(&sent[cut..]));
            let of = |f: &Frame| (f.verb.clone(), f.subject.clone(), f.reply.clone(), f.bytes.len());
            let wanted = |(v, s, r, n): (&str, Option<&str>, Option<&str>, usize)| {
                (v.to_owned(), s.map(str::to_owned), r.map(str::to_owned), n)
            };
            assert_eq!(found.iter().map(of).collect::<Vec<_>>(), expected.map(wanted), "cut at {cut}");
            assert_eq!(found.iter().flat_map(|f| f.bytes.clone()).collect::<Vec<_>>(), sent);
        }
    }
}
