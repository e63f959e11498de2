//! The few bytes of protocol needed to know that a server is there and how it is.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use serde_json::Value;

use super::Error;

const TIMEOUT: Duration = Duration::from_secs(2);
/// Largest answer of the monitoring port that is read.
const ANSWER_LEN_MAX: u64 = 16 << 20;
const GREETING_LEN_MAX: u64 = 64 << 10;

fn connect(port: u16) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&(Ipv4Addr::LOCALHOST, port).into(), TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    Ok(stream)
}

/// The name of the server that listens for clients on this port.
pub(super) fn greeting(port: u16) -> io::Result<String> {
    let mut line = String::new();
    BufReader::new(connect(port)?.take(GREETING_LEN_MAX)).read_line(&mut line)?;
    let bad = || io::Error::new(io::ErrorKind::InvalidData, "not a NATS server");
    let info: Value = serde_json::from_str(line.trim().strip_prefix("INFO ").ok_or_else(bad)?).map_err(|_| bad())?;
    Ok(info["server_name"].as_str().ok_or_else(bad)?.to_owned())
}

pub(super) fn get(port: u16, path: &str) -> Result<Value, Error> {
    let failed = |reason: String| Error::Monitor { path: path.to_owned(), reason };
    let answer = (|| {
        let mut stream = connect(port)?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n").as_bytes())?;
        let mut answer = String::new();
        stream.take(ANSWER_LEN_MAX).read_to_string(&mut answer)?;
        io::Result::Ok(answer)
    })()
    .map_err(|error| failed(error.to_string()))?;
    let (_, body) = answer.split_once("\r\n\r\n").ok_or_else(|| failed("no body".to_owned()))?;
    serde_json::from_str(body).map_err(|error| failed(error.to_string()))
}
