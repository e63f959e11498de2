//! Two accounts, and what each role may do in its own: one table, from which the operator-signed tokens and the static
//! configuration are both made, so that they cannot differ.
//!
//! Streams and controllers live in CTL, hosts in HOSTS. CTL hands to HOSTS the topics, orders and answers as streams and takes
//! the hosts' requests as services; nothing else crosses. Why hosts must be apart: the server checks no permission on a reply
//! field, so whoever may publish one subject that a stream captures, or one JetStream request, can have the answer published
//! anywhere *in that account*. For the same reason a viewer, who lives in CTL, may publish nothing at all.
//!
//! A gateway has to write CATALOG and to ask JetStream, so in CTL its permissions keep a faulty gateway in its place, not one that
//! was taken over: with `STREAM.MSG.GET` or an acknowledged write and a reply field it can have something stored on the leader's
//! chain or a topic. It may define every policy anyway; what it gains is to do so past the leader and the audit.

use std::time::Duration;

use groupcast_policy::ids::HostId;
use serde_json::{Value, json};

use crate::streams::{ALL, AUDIT, CATALOG, REGISTRY, TOPICS};
use crate::subjects;

/// The accounts by name, as operators see them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Account {
    Control,
    Hosts,
}

impl Account {
    pub const ALL: [Self; 2] = [Self::Control, Self::Hosts];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Control => "CTL",
            Self::Hosts => "HOSTS",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    Controller,
    Gateway,
    /// Watches topics go by.
    Viewer,
    Host,
    /// A leafnode server that hosts connect to; it speaks for all hosts behind it and must confine each itself.
    Edge,
}

impl Role {
    pub const ALL: [Self; 5] = [Self::Controller, Self::Gateway, Self::Viewer, Self::Host, Self::Edge];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Controller => "controller",
            Self::Gateway => "gateway",
            Self::Viewer => "viewer",
            Self::Host => "host",
            Self::Edge => "edge",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.as_str() == text)
    }

    pub const fn account(self) -> Account {
        match self {
            Self::Controller | Self::Gateway | Self::Viewer => Account::Control,
            Self::Host | Self::Edge => Account::Hosts,
        }
    }

    /// The inbox prefix a client of this role and name must use.
    pub fn inbox_prefix(self, name: &HostId) -> String {
        match self.account() {
            Account::Control => subjects::control_inbox_prefix(name),
            Account::Hosts => subjects::inbox_prefix(name),
        }
    }
}

/// What a user may publish and subscribe to. Whatever is not named is forbidden; an empty list forbids everything.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Permissions {
    pub publish: Vec<String>,
    /// Taken out of `publish` again.
    pub publish_never: Vec<String>,
    pub subscribe: Vec<String>,
}

/// The table. `name` is the user's own: a host's id, or a controller's, gateway's or viewer's.
/// Subscriptions of one connection of a host: all the topics that it can follow and ask for, and some more.
pub const HOST_SUBSCRIPTIONS_MAX: u32 = 20_000;
/// Bytes of one message of a host: more than a request that names all the topics it can follow.
pub const HOST_PAYLOAD_BYTES_MAX: u32 = 512 << 10;
/// Connections of all hosts together, below what a server takes by default, so that hosts cannot keep controllers out. The server knows no limit
/// on the connections of one user (nats-server issue 1552): that is left to a firewall in front of it.
pub const HOSTS_CONNECTIONS_MAX: u32 = 60_000;

pub fn permissions(role: Role, name: &HostId) -> Permissions {
    let owned = |list: &[&str]| list.iter().map(|subject| (*subject).to_owned()).collect::<Vec<_>>();
    let inbox = subjects::inbox_all(&role.inbox_prefix(name));
    match role {
        // Not among these: replies from the hosts' account, so that no answer can be steered by a host; deleting streams, and
        // purging or moving any but TOPICS, which begins every life at sequences of its own, holds nothing that is not derived, and
        // may have to be freed from a leader that is stuck; subscribing to what the leader writes, where a refused batch would show.
        Role::Controller => {
            let mut publish = owned(&[
                subjects::WRITE_ALL,
                subjects::CATALOG_ALL,
                subjects::REGISTRY_ALL,
                subjects::AUDITED_ALL,
                subjects::ANSWER_ALL,
                subjects::CTL_ALL,
                subjects::REPLICA,
                subjects::PROGRESSED,
                subjects::SOURCE,
                subjects::CONTROL_INBOXES,
                subjects::JS_ACCOUNT_INFO,
            ]);
            for stream in ALL {
                publish.extend(subjects::js_reading(stream.name));
                publish.extend(["STREAM.CREATE", "STREAM.UPDATE"].map(|operation| subjects::js_api(operation, stream.name)));
            }
            publish.extend(["STREAM.PURGE", "STREAM.LEADER.STEPDOWN"].map(|operation| subjects::js_api(operation, TOPICS.name)));
            let mut subscribe = owned(&subjects::SERVICES_ALL);
            subscribe.extend(owned(&[
                &inbox,
                subjects::READ_ALL,
                subjects::REPLICA,
                subjects::PROGRESS,
                subjects::SOURCE,
                subjects::REGISTRATIONS,
                subjects::TOPICS_LEADER_ELECTED,
                subjects::REGISTRY_LEADER_ELECTED,
            ]));
            Permissions { publish, publish_never: Vec::new(), subscribe }
        }
        Role::Gateway => {
            let mut publish = owned(&[
                subjects::CATALOG_ALL,
                subjects::PROGRESS,
                subjects::SOURCE,
                subjects::REGISTRATIONS,
                subjects::JS_ACCOUNT_INFO,
                &inbox,
            ]);
            for stream in [CATALOG, REGISTRY, AUDIT] {
                publish.extend(subjects::js_reading(stream.name));
            }
            // The leader's chain says how far changes are published; topics it does not read, only whether their stream is well.
            publish.push(subjects::js_api("STREAM.INFO", TOPICS.name));
            let subscribe = owned(&[&inbox, subjects::PROGRESSED, subjects::LEAD_READ]);
            Permissions { publish, publish_never: owned(&[subjects::CATALOG_TERMS]), subscribe }
        }
        Role::Viewer => Permissions { subscribe: vec![inbox, subjects::READ_ALL.to_owned()], ..Permissions::default() },
        Role::Host => {
            let mut subscribe = owned(&[subjects::READ_SCOPES, subjects::READ_RULES, subjects::READ_MEMBERS]);
            subscribe.extend([subjects::read_host(name), subjects::ctl(name), subjects::answers(name), inbox.clone()]);
            let mut publish = subjects::services(name).to_vec();
            // To itself only, which is how a client finds out that the server has handled all it sent.
            publish.push(inbox);
            Permissions { publish, publish_never: Vec::new(), subscribe }
        }
        Role::Edge => {
            let mut subscribe = owned(&subjects::TO_HOSTS);
            subscribe.push(inbox);
            Permissions { publish: owned(&subjects::SERVICES_ALL), publish_never: Vec::new(), subscribe }
        }
    }
}

/// How long the server remembers the reply field of a request that crossed the accounts. Nobody answers there, but for every
/// request that names a reply it holds some 600 bytes this long: with its own two minutes, one host could fill its memory.
pub const REPLY_REMEMBERED: Duration = Duration::from_secs(1);

/// Denied to those who may publish nothing: the server takes an empty allow list for "everything is allowed".
pub const EVERYTHING: &str = ">";

impl Permissions {
    /// As the server takes it, in a user's token and in a configuration file alike.
    pub fn render(&self) -> (Value, Value) {
        let publish = if self.publish.is_empty() {
            json!({ "deny": [EVERYTHING] })
        } else if self.publish_never.is_empty() {
            json!({ "allow": self.publish })
        } else {
            json!({ "allow": self.publish, "deny": self.publish_never })
        };
        (publish, json!({ "allow": self.subscribe }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(role: Role, name: &str) -> Permissions {
        permissions(role, &HostId::new(name).unwrap())
    }

    #[test]
    fn roles_parse_back() {
        for role in Role::ALL {
            assert_eq!(Role::parse(role.as_str()), Some(role));
        }
        assert_eq!(Role::parse("root"), None);
    }

    #[test]
    fn a_host_names_only_itself_and_shared_topics() {
        let Permissions { publish, publish_never, subscribe } = named(Role::Host, "h1");
        assert_eq!(publish, ["gc.snap.h1", "gc.register.h1", "gc.beat.h1", "gc.ack.h1", "gc.entropy.h1", "_INBOX_h1.>"]);
        assert!(publish_never.is_empty());
        let own = ["gc.t.host.h1", "gc.ctl.h1", "gc.answer.h1.*", "_INBOX_h1.>"];
        assert_eq!(subscribe[..3], ["gc.t.scope.>", "gc.t.rules.>", "gc.t.members.>"]);
        assert_eq!(subscribe[3..], own);
    }

    #[test]
    fn nobody_subscribes_to_what_the_leader_writes_and_only_controllers_write_it() {
        for role in Role::ALL {
            let Permissions { publish, subscribe, .. } = named(role, "x");
            assert!(!subscribe.iter().any(|subject| subject.starts_with("gc.w") || subject == ">"), "{role:?}");
            let writes = publish.iter().any(|subject| subject.starts_with("gc.w"));
            assert_eq!(writes, role == Role::Controller, "{role:?}");
        }
    }

    #[test]
    fn nobody_may_answer_through_a_reply_field_from_the_hosts_account() {
        for role in Role::ALL {
            let Permissions { publish, .. } = named(role, "x");
            assert!(!publish.iter().any(|subject| subject.starts_with("_R_") || subject.starts_with('>')), "{role:?}");
        }
    }

    #[test]
    fn a_viewer_publishes_nothing() {
        assert!(named(Role::Viewer, "v").publish.is_empty());
    }
}
