//! Where a request comes from, and under which name it comes: proxies that are believed, and web pages that are not.
//!
//! A gateway on loopback is reached by every web page that a browser on the machine shows: the page's own name can be made to point at
//! 127.0.0.1 (DNS rebinding). The browser says that name in `Host`, and the page's origin in `Origin`: both must be ours.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use groupcast_policy::net::Prefix;
use groupcast_policy::text::prefix_text;

use crate::problem::Problem;

/// Proxies that a request is followed back through.
const HOPS_MAX: usize = 16;

/// Addresses whose word about the client counts.
#[derive(Debug, Clone, Default)]
pub struct Proxies(Vec<Prefix>);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("trusted_proxies: {text:?} is no address or prefix: {why}")]
pub struct NoProxy {
    text: String,
    why: String,
}

impl Proxies {
    pub fn read(texts: &[String]) -> Result<Self, NoProxy> {
        let one = |text: &String| prefix_text(text).map_err(|why| NoProxy { text: text.clone(), why: why.to_string() });
        Ok(Self(texts.iter().map(one).collect::<Result<_, _>>()?))
    }

    pub fn trust(&self, address: IpAddr) -> bool {
        self.0.iter().any(|prefix| prefix.contains(address.to_canonical()))
    }

    /// Where a request comes from: the last address in `X-Forwarded-For` that is not a proxy's, if a proxy says so.
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut client = peer.to_canonical();
        let values = headers.get_all("x-forwarded-for").iter().rev().filter_map(|value| value.to_str().ok());
        let hops = values.flat_map(|list| list.rsplit(','));
        for hop in hops.take(HOPS_MAX) {
            if !self.trust(client) {
                break;
            }
            match address(hop.trim()) {
                Some(hop) => client = hop.to_canonical(),
                // What a proxy could not say is not guessed.
                None => break,
            }
        }
        client
    }
}

/// An address, with or without a port.
fn address(text: &str) -> Option<IpAddr> {
    let with_port = || text.parse::<SocketAddr>().ok().map(|at| at.ip());
    text.parse().ok().or_else(with_port).or_else(|| text.strip_prefix('[')?.strip_suffix(']')?.parse().ok())
}

/// Which names a request may call us by.
#[derive(Debug, Clone, Default)]
pub struct Doors {
    /// Only what is on this machine reaches it, so a name must be one of loopback or of `names`.
    pub loopback: bool,
    pub names: Vec<String>,
}

/// The name without the port; `None` if it is no name.
fn name_of(host: &str) -> Option<&str> {
    match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map(|(name, _)| name),
        None => Some(host.rsplit_once(':').map_or(host, |(name, _)| name)),
    }
}

impl Doors {
    fn knows(&self, host: &str) -> bool {
        let Some(name) = name_of(host) else { return false };
        let is_loopback = name.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback());
        is_loopback || name.eq_ignore_ascii_case("localhost") || self.names.iter().any(|known| known.eq_ignore_ascii_case(name))
    }

    /// Why a request may not come in.
    pub fn refusal(&self, headers: &HeaderMap, authority: Option<&str>) -> Option<&'static str> {
        if !self.loopback {
            return None;
        }
        let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or_default());
        let host = authority.or_else(|| text(header::HOST)).unwrap_or_default();
        if !self.knows(host) {
            return Some("this is reached as localhost only: name other names in the setting `hosts` (`--api-host`)");
        }
        match text(header::ORIGIN) {
            Some(origin) if !origin.split_once("://").is_some_and(|(_, of)| of.eq_ignore_ascii_case(host)) => {
                Some("a web page of another origin may not ask here")
            }
            _ => None,
        }
    }
}

/// Refuses what comes under a foreign name.
pub async fn through(State(doors): State<Arc<Doors>>, request: Request, next: Next) -> Response {
    let authority = request.uri().authority().map(|authority| authority.as_str().to_owned());
    match doors.refusal(request.headers(), authority.as_deref()) {
        None => next.run(request).await,
        Some(why) => Problem::new(StatusCode::MISDIRECTED_REQUEST, "misdirected", why).into_response(),
    }
}

/// The address at the other end of the connection.
pub fn peer(extensions: &axum::http::Extensions) -> IpAddr {
    let peer = extensions.get::<ConnectInfo<SocketAddr>>().map(|info| info.0.ip());
    peer.unwrap_or(IpAddr::from([0, 0, 0, 0])).to_canonical()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        list.iter().for_each(|(name, value)| _ = headers.append(*name, value.parse().unwrap()));
        headers
    }

    #[test]
    fn only_a_trusted_proxy_is_believed() {
        let proxies = Proxies::read(&["10.0.0.0/24".to_owned(), "::1".to_owned()]).unwrap();
        let at = |text: &str| text.parse::<IpAddr>().unwrap();
        for (peer, said, client) in [
            ("192.0.2.1", "198.51.100.1", "192.0.2.1"),
            ("10.0.0.1", "198.51.100.1", "198.51.100.1"),
            // What the client says of itself stands to the left of what the proxy says of it.
            ("10.0.0.1", "127.0.0.1, 198.51.100.1", "198.51.100.1"),
            ("10.0.0.1", "198.51.100.1, 10.0.0.2", "198.51.100.1"),
            ("10.0.0.1", "198.51.100.1:4711", "198.51.100.1"),
            ("::1", "[2001:db8::1]", "2001:db8::1"),
            ("10.0.0.1", "unknown", "10.0.0.1"),
            ("10.0.0.1", "", "10.0.0.1"),
        ] {
            assert_eq!(proxies.client(at(peer), &headers(&[("x-forwarded-for", said)])), at(client), "{peer} {said}");
        }
        let two = headers(&[("x-forwarded-for", "192.0.2.9"), ("x-forwarded-for", "198.51.100.1")]);
        assert_eq!(proxies.client(at("10.0.0.1"), &two), at("198.51.100.1"));
        assert!(Proxies::read(&["balancer".to_owned()]).is_err());
    }

    #[test]
    fn a_page_with_a_name_of_its_own_stays_outside() {
        let doors = Doors { loopback: true, names: vec!["groupcast.example".to_owned()] };
        let allowed = |list: &[(&'static str, &str)]| doors.refusal(&headers(list), None).is_none();
        for host in ["127.0.0.1:4270", "localhost:4270", "LOCALHOST", "[::1]:4270", "127.8.8.8", "groupcast.example:443"] {
            assert!(allowed(&[("host", host)]), "{host}");
            assert!(allowed(&[("host", host), ("origin", &format!("http://{host}"))]), "{host}");
            assert!(!allowed(&[("host", host), ("origin", "http://evil.example")]), "{host}");
            assert!(!allowed(&[("host", host), ("origin", "null")]), "{host}");
        }
        for host in ["evil.example:4270", "localhost.evil.example", "", "[::1", "10.0.0.1", "127.0.0.1.evil.example"] {
            assert!(!allowed(&[("host", host)]), "{host}");
        }
        assert!(!allowed(&[]));
        assert!(doors.refusal(&headers(&[("host", "localhost")]), Some("evil.example")).is_some());
        assert!(Doors::default().refusal(&headers(&[("host", "anything.example")]), None).is_none());
    }
}
