//! All messages behind one face.

use groupcast_messages::{
    Ack, Answer, Ask, Beat, BeatAnswer, DecodeError, Delta, EntropyAnswer, EntropyCheck, HostRequest, HostRequestAnswer, Lead,
    Nudge, Register, RegisterAnswer,
};
use groupcast_policy::topic::Topic;

/// Names a decoder. Deltas are decoded for a topic, so each kind of topic is a decoder of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoder {
    DeltaScope,
    DeltaHost,
    DeltaRules,
    DeltaMembers,
    Lead,
    Ask,
    Answer,
    Ack,
    EntropyCheck,
    EntropyAnswer,
    Nudge,
    Beat,
    BeatAnswer,
    Register,
    RegisterAnswer,
    HostRequest,
    HostRequestAnswer,
}

pub const DECODERS: [Decoder; 17] = [
    Decoder::DeltaScope,
    Decoder::DeltaHost,
    Decoder::DeltaRules,
    Decoder::DeltaMembers,
    Decoder::Lead,
    Decoder::Ask,
    Decoder::Answer,
    Decoder::Ack,
    Decoder::EntropyCheck,
    Decoder::EntropyAnswer,
    Decoder::Nudge,
    Decoder::Beat,
    Decoder::BeatAnswer,
    Decoder::Register,
    Decoder::RegisterAnswer,
    Decoder::HostRequest,
    Decoder::HostRequestAnswer,
];

#[derive(Debug, Clone, PartialEq)]
pub enum Message {
    Delta(Delta),
    Lead(Lead),
    Ask(Ask),
    Answer(Answer),
    Ack(Ack),
    EntropyCheck(EntropyCheck),
    EntropyAnswer(EntropyAnswer),
    Nudge(Nudge),
    Beat(Beat),
    BeatAnswer(BeatAnswer),
    Register(Register),
    RegisterAnswer(RegisterAnswer),
    HostRequest(HostRequest),
    HostRequestAnswer(HostRequestAnswer),
}

impl Message {
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Message::Delta(m) => m.encode(),
            Message::Lead(m) => m.encode(),
            Message::Ask(m) => m.encode(),
            Message::Answer(m) => m.encode(),
            Message::Ack(m) => m.encode(),
            Message::EntropyCheck(m) => m.encode(),
            Message::EntropyAnswer(m) => m.encode(),
            Message::Nudge(m) => m.encode(),
            Message::Beat(m) => m.encode(),
            Message::BeatAnswer(m) => m.encode(),
            Message::Register(m) => m.encode(),
            Message::RegisterAnswer(m) => m.encode(),
            Message::HostRequest(m) => m.encode(),
            Message::HostRequestAnswer(m) => m.encode(),
        }
    }
}

impl Decoder {
    pub fn decode(self, bytes: &[u8]) -> Result<Message, DecodeError> {
        Ok(match self {
            Decoder::DeltaScope | Decoder::DeltaHost | Decoder::DeltaRules | Decoder::DeltaMembers => {
                Message::Delta(Delta::decode(&self.topic(), bytes)?)
            }
            Decoder::Lead => Message::Lead(Lead::decode(bytes)?),
            Decoder::Ask => Message::Ask(Ask::decode(bytes)?),
            Decoder::Answer => Message::Answer(Answer::decode(bytes)?),
            Decoder::Ack => Message::Ack(Ack::decode(bytes)?),
            Decoder::EntropyCheck => Message::EntropyCheck(EntropyCheck::decode(bytes)?),
            Decoder::EntropyAnswer => Message::EntropyAnswer(EntropyAnswer::decode(bytes)?),
            Decoder::Nudge => Message::Nudge(Nudge::decode(bytes)?),
            Decoder::Beat => Message::Beat(Beat::decode(bytes)?),
            Decoder::BeatAnswer => Message::BeatAnswer(BeatAnswer::decode(bytes)?),
            Decoder::Register => Message::Register(Register::decode(bytes)?),
            Decoder::RegisterAnswer => Message::RegisterAnswer(RegisterAnswer::decode(bytes)?),
            Decoder::HostRequest => Message::HostRequest(HostRequest::decode(bytes)?),
            Decoder::HostRequestAnswer => Message::HostRequestAnswer(HostRequestAnswer::decode(bytes)?),
        })
    }

    /// The topic its deltas are decoded for.
    pub fn topic(self) -> Topic {
        let token = match self {
            Decoder::DeltaHost => "host.h1",
            Decoder::DeltaRules => "rules.web",
            Decoder::DeltaMembers => "members.web",
            _ => "scope.space.s1",
        };
        Topic::parse(token).expect("a valid token")
    }
}
