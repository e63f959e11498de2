//! What controllers say to this host about its registration, and the tokens by which it is known.

use groupcast_bus_config::subjects;
use groupcast_messages::{BeatAnswer, RegisterAnswer};
use groupcast_policy::model::HealthCheck;

use crate::enrol::Event;

/// What controllers say to a host without being waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Told {
    /// The host is not known.
    Forgotten,
    /// The answer to the registration of this number.
    Registered { number: u64, answer: RegisterAnswer },
    /// A template says anew how health is checked.
    Check { template: String, health: Option<HealthCheck> },
}

/// What is said under this token, if it is anything of the kind.
pub fn told(life: u64, token: &str, payload: &[u8]) -> Option<Told> {
    if token.starts_with(BEAT_TOKENS) || token == subjects::TOLD_TOKEN {
        return match BeatAnswer::decode(payload).ok()? {
            BeatAnswer::Known => None,
            BeatAnswer::Unknown => Some(Told::Forgotten),
            BeatAnswer::Check { template, health } => Some(Told::Check { template, health }),
        };
    }
    let number = token.strip_prefix(&register_tokens(life))?.parse().ok()?;
    Some(Told::Registered { number, answer: RegisterAnswer::decode(payload).ok()? })
}

/// The same for the machine.
pub(super) fn heard(told: Told) -> Event {
    match told {
        Told::Forgotten => Event::Forgotten,
        Told::Check { template, health } => Event::Health { template, health },
        Told::Registered { number, answer } => {
            if let RegisterAnswer::Refused { reason, retryable } = &answer {
                tracing::warn!(%reason, retryable, "a registration is refused");
            }
            Event::Registered { number, answer }
        }
    }
}

/// The token of a beat's answer.
pub fn beat_token(count: u64) -> String {
    format!("{BEAT_TOKENS}{count}")
}

const BEAT_TOKENS: &str = "beat-";

/// The token of a registration's answer: the same for all its repetitions, and of this start of the agent only.
pub fn register_token(life: u64, number: u64) -> String {
    format!("{}{number}", register_tokens(life))
}

fn register_tokens(life: u64) -> String {
    format!("register-{life:x}-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_controllers_say_is_told_apart_by_its_token() {
        let answer = RegisterAnswer::Refused { retryable: true, reason: "no".into() };
        let (unknown, refused) = (BeatAnswer::Unknown.encode(), answer.encode());
        assert_eq!(told(0xab, &beat_token(7), &unknown), Some(Told::Forgotten));
        assert_eq!(told(0xab, &beat_token(7), &BeatAnswer::Known.encode()), None);
        assert_eq!(register_token(0xab, 7), "register-ab-7");
        assert_eq!(told(0xab, "register-ab-7", &refused), Some(Told::Registered { number: 7, answer }));
        for (token, payload) in [("register-ac-7", &refused), ("register-ab-x", &refused), ("register-ab-7", &unknown)] {
            assert_eq!(told(0xab, token, payload), None, "{token}: of another start, or damaged");
        }
        assert_eq!(told(0xab, "host-ab-7", &refused), None, "somebody waits for that");
        let check = BeatAnswer::Check { template: "vm".into(), health: None }.encode();
        assert_eq!(told(0xab, subjects::TOLD_TOKEN, &check), Some(Told::Check { template: "vm".into(), health: None }));
    }
}
