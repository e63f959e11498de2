//! The names of the replicated documents. A topic's token is the tail of its subjects and is stable on the wire.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64;

use crate::ids::{AppId, GroupId, HostId, ID_LEN_MAX, InvalidId, SpaceId};

/// Where groups can be bound above the single workload.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    Global,
    Space(SpaceId),
    App(AppId),
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Topic {
    /// The (group, phase) pairs bound to a scope.
    Scope(Scope),
    /// One host's workloads as the control plane knows them.
    Host(HostId),
    /// A group's rules.
    Rules(GroupId),
    /// A group's addresses and prefixes.
    Members(GroupId),
}

/// Names a topic in eight bytes where the reader knows the candidates: companions, acknowledgements, requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TopicHash(pub u64);

/// The longest token: a space or an app and its id.
const TOKEN_LEN_MAX: usize = "scope.space.".len() + ID_LEN_MAX;

struct Token {
    bytes: [u8; TOKEN_LEN_MAX],
    len: usize,
}

impl fmt::Write for Token {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.len + text.len();
        self.bytes.get_mut(self.len..end).ok_or(fmt::Error)?.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTopic {
    #[error("topic {0:?} has no kind that this version knows (scope, host, rules, members)")]
    Kind(String),
    #[error(transparent)]
    Id(#[from] InvalidId),
}

impl Topic {
    pub fn hash64(&self) -> TopicHash {
        // Of every topic of a host at every check: written where no memory has to be had for it.
        let mut token = Token { bytes: [0; TOKEN_LEN_MAX], len: 0 };
        match fmt::Write::write_fmt(&mut token, format_args!("{self}")) {
            Ok(()) => TopicHash(xxh3_64(&token.bytes[..token.len])),
            Err(_) => TopicHash(xxh3_64(self.to_string().as_bytes())),
        }
    }

    /// Whether this host may read it: of hosts' own topics only its own, as the bus has it too.
    pub fn is_readable_by(&self, host: &HostId) -> bool {
        !matches!(self, Topic::Host(other) if other != host)
    }

    pub fn parse(token: &str) -> Result<Self, InvalidTopic> {
        let unknown = || InvalidTopic::Kind(token.chars().take(80).collect());
        let (kind, rest) = token.split_once('.').ok_or_else(unknown)?;
        Ok(match kind {
            "scope" => Topic::Scope(match rest.split_once('.') {
                None if rest == "global" => Scope::Global,
                Some(("space", id)) => Scope::Space(SpaceId::new(id)?),
                Some(("app", id)) => Scope::App(AppId::new(id)?),
                _ => return Err(unknown()),
            }),
            "host" => Topic::Host(HostId::new(rest)?),
            "rules" => Topic::Rules(GroupId::new(rest)?),
            "members" => Topic::Members(GroupId::new(rest)?),
            _ => return Err(unknown()),
        })
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Topic::Scope(Scope::Global) => f.write_str("scope.global"),
            Topic::Scope(Scope::Space(id)) => write!(f, "scope.space.{id}"),
            Topic::Scope(Scope::App(id)) => write!(f, "scope.app.{id}"),
            Topic::Host(id) => write!(f, "host.{id}"),
            Topic::Rules(id) => write!(f, "rules.{id}"),
            Topic::Members(id) => write!(f, "members.{id}"),
        }
    }
}

impl fmt::Debug for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_parse_back() {
        for token in ["scope.global", "scope.space.s1", "scope.app.a-1", "host.h1", "rules.web", "members.db_2"] {
            assert_eq!(Topic::parse(token).map(|t| t.to_string()).as_deref(), Ok(token));
        }
        for bad in [
            "",
            "leader",
            "scope",
            "scope.",
            "scope.global.x",
            "scope.space",
            "scope.team.x",
            "host.a.b",
            "rules.",
            "members.>",
            "x.y",
        ] {
            assert!(Topic::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_hash_is_fixed_because_it_is_on_the_wire() {
        let topic = Topic::parse("members.web").unwrap();
        assert_eq!(topic.hash64(), TopicHash(xxh3_64(b"members.web")));
    }
}
