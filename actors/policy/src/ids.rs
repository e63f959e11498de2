//! Ids are subject-safe tokens, so that any id can stand in a NATS subject, a file name and an nftables comment unescaped.

use std::fmt;
use std::sync::Arc;

/// Longest id in bytes.
pub const ID_LEN_MAX: usize = 64;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} id {text:?} is not valid: use 1 to {ID_LEN_MAX} characters out of A-Z a-z 0-9 _ -")]
pub struct InvalidId {
    pub kind: &'static str,
    /// The offending text, cut to a length that is safe to print.
    pub text: String,
}

fn check(kind: &'static str, text: &str) -> Result<(), InvalidId> {
    let fits = (1..=ID_LEN_MAX).contains(&text.len());
    if fits && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-') {
        return Ok(());
    }
    Err(InvalidId { kind, text: text.chars().take(ID_LEN_MAX + 1).collect() })
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        ///
        /// Cheap to clone: the text is shared.
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            pub fn new(text: &str) -> Result<Self, InvalidId> {
                check($kind, text)?;
                Ok(Self(Arc::from(text)))
            }

            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                Self::new(text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}:{}", $kind, self.0)
            }
        }
    };
}

id!(/// A security group.
    GroupId, "group");
id!(/// A space: a tenant's or project's part of a platform.
    SpaceId, "space");
id!(/// An application inside a space.
    AppId, "app");
id!(/// One workload: a container, a virtual machine, or a host itself.
    WorkloadId, "workload");
id!(/// A host that runs an agent.
    HostId, "host");
id!(/// An address space: the same address on two networks belongs to two workloads.
    NetworkId, "network");
id!(/// What a self-registering workload of a kind may be.
    TemplateId, "template");
id!(/// A system that groups and workloads are read from. What it owns has ids that begin with this one.
    SourceId, "source");

/// Characters that stay of a host's name that is too long for an id; a hash of the whole follows.
const NAME_KEPT_LEN: usize = 47;

impl HostId {
    /// The id of a host that another system knows by its name: dots become `_`. A name longer than an id may be is cut, and ends in a hash
    /// of the whole, so that two such hosts stay two.
    pub fn of_name(name: &str) -> Result<Self, InvalidId> {
        let id = name.replace('.', "_");
        if id.len() <= ID_LEN_MAX || !id.is_ascii() {
            return Self::new(&id);
        }
        Self::new(&format!("{}_{:016x}", &id[..NAME_KEPT_LEN], xxhash_rust::xxh3::xxh3_64(name.as_bytes())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_of_a_host_is_cut_and_stays_its_own() {
        assert_eq!(HostId::of_name("n1.example.org").unwrap().as_str(), "n1_example_org");
        assert_eq!(HostId::of_name(&"a".repeat(ID_LEN_MAX)).unwrap().as_str(), "a".repeat(ID_LEN_MAX));
        let [one, other] = ["org", "com"].map(|end| HostId::of_name(&format!("{}.{end}", "a".repeat(ID_LEN_MAX - 3))).unwrap());
        assert!(one != other && one.as_str().len() == ID_LEN_MAX, "{one} {other}");
        for bad in [String::new(), "ä".repeat(99), " ".repeat(99)] {
            assert!(HostId::of_name(&bad).is_err());
        }
    }

    #[test]
    fn length_is_bounded_on_both_sides() {
        assert!(GroupId::new("").is_err());
        assert!(GroupId::new(&"a".repeat(ID_LEN_MAX)).is_ok());
        assert!(GroupId::new(&"a".repeat(ID_LEN_MAX + 1)).is_err());
    }

    #[test]
    fn nothing_that_means_something_in_a_subject_passes() {
        for bad in ["a.b", "a*", ">", "a b", "a\n", "ä", "a/b", "$x", "a\0"] {
            let error = HostId::new(bad).unwrap_err();
            assert!(error.to_string().contains("host id"), "{error}");
        }
    }

    #[test]
    fn an_error_never_prints_an_endless_id() {
        let error = GroupId::new(&"ä".repeat(100_000)).unwrap_err();
        assert!(error.text.chars().count() <= ID_LEN_MAX + 1);
    }
}
