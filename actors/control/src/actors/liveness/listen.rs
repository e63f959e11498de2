//! What a controller hears of hosts, and what the streams say of them: beats on the [`Ears`], entries, guards, templates and grants on a
//! connection of its own, all in one task that hands it on in order.

use std::time::{Duration, SystemTime};

use actix::prelude::*;
use async_nats::jetstream::consumer::DeliverPolicy;
use futures::StreamExt;
use groupcast_bus_config::connect;
use groupcast_bus_config::subjects::{self, CatalogKind, RegistryKey, parse_registry};
use groupcast_messages::Beat;
use groupcast_policy::ids::{HostId, TemplateId};
use groupcast_policy::model::HealthCheck;
use groupcast_topics::nats::{Ears, Kind};

use crate::document::{Document, GuardRecord, HostEntry, Name, decode_record};
use crate::feed::Delivered;
use crate::log::{Entry, Log};
use crate::names;
use crate::registration::grant::Grant;
use crate::registration::lifecycle::{Deaf, Event};
use crate::registry::boot_text;

/// Beats and entries taken at once while more are there.
const DRAIN_MAX: usize = 1_024;
/// How often it is checked that REGISTRY is still the stream that is followed.
const CHECK_EVERY: Duration = Duration::from_secs(5);

/// What came from the bus.
#[derive(Message)]
#[rtype(result = "()")]
pub struct Came(pub Vec<Heard>);

pub enum Heard {
    Event(Event),
    /// When a host's entry was written.
    Written(HostId, SystemTime),
    /// How a template says that health is checked; nothing of one that is gone.
    Template(TemplateId, Option<Option<HealthCheck>>),
    /// Every template was read once.
    Templates,
    /// Every grant was read once.
    Grants,
    /// A grant was written: whether the host may enrol anything.
    Grant(HostId, bool),
}

/// On a task of its own.
pub struct Listen {
    pub options: connect::Options,
    pub ears: Ears,
    pub next: Recipient<Came>,
}

impl Listen {
    async fn hand_on(&self, heard: Vec<Heard>) -> Result<(), MailboxError> {
        if heard.is_empty() { Ok(()) } else { self.next.send(Came(heard)).await }
    }

    /// Ends with why everything has to be begun anew.
    pub async fn run(&self) -> Result<&'static str, Box<dyn std::error::Error + Send + Sync>> {
        let (client, mut events) = connect::connect(self.options.clone()).await?;
        let _guard = events.guard(&client);
        let (mut beats, mut hearing) = (self.ears.listen(Kind::Beats).await?, self.ears.hearing());
        let beats = futures::stream::poll_fn(move |context| beats.poll_recv(context));
        let mut elections = futures::stream::select(
            client.subscribe(subjects::TOPICS_LEADER_ELECTED).await?,
            client.subscribe(subjects::REGISTRY_LEADER_ELECTED).await?,
        );
        let log = Log::registry(client.clone());
        let made_at = log.made_at().await?;
        let last = log.last(subjects::REGISTRY_HOSTS).await?.map_or(0, |entry| entry.sequence);
        let entries = log.follow(subjects::REGISTRY_HOSTS, DeliverPolicy::LastPerSubject).await?;
        let mut guards = log.follow(subjects::REGISTRY_GUARDS, DeliverPolicy::LastPerSubject).await?;
        let (catalog, of_templates) = (Log::catalog(client.clone()), subjects::catalog_kind_all(CatalogKind::Template));
        let last_template = catalog.last(&of_templates).await?.map_or(0, |entry| entry.sequence);
        let mut templates = catalog.follow(&of_templates, DeliverPolicy::LastPerSubject).await?;
        let of_grants = subjects::catalog_kind_all(CatalogKind::Host);
        let last_grant = catalog.last(&of_grants).await?.map_or(0, |entry| entry.sequence);
        let mut grants = catalog.follow(&of_grants, DeliverPolicy::LastPerSubject).await?;
        let mut check = tokio::time::interval(CHECK_EVERY);
        check.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut beats, mut entries) = (beats.ready_chunks(DRAIN_MAX), entries.ready_chunks(DRAIN_MAX));
        // Whoever is deaf on one of the two connections knows too little to judge silence.
        let mut reaches = Reaches { streams: true, hosts: hearing.borrow_and_update().away.is_none() };
        let mut loaded = last == 0;
        let mut begun = vec![reaches.event()];
        begun.extend(loaded.then_some(Heard::Event(Event::Loaded)));
        begun.extend((last_template == 0).then_some(Heard::Templates));
        begun.extend((last_grant == 0).then_some(Heard::Grants));
        self.hand_on(begun).await?;
        loop {
            // What the bus says about itself first, then entries: silence is never judged on less than what is known.
            let heard = tokio::select! {
                biased;
                event = events.next() => match event {
                    None | Some(connect::Event::Closed) => return Ok("the connection is closed"),
                    Some(connect::Event::Connected) => vec![reaches.streams(true)],
                    Some(connect::Event::Disconnected) => vec![reaches.streams(false)],
                    Some(connect::Event::SlowConsumer | connect::Event::Missed) => vec![Heard::Event(Event::Deaf(Deaf::Lost))],
                    Some(_) => continue,
                },
                changed = hearing.changed() => {
                    if changed.is_err() {
                        return Ok("the connection to hear hosts is closed");
                    }
                    vec![reaches.hosts(hearing.borrow_and_update().away.is_none())]
                }
                Some(_) = elections.next() => vec![Heard::Event(Event::Deaf(Deaf::Election))],
                Some(messages) = entries.next() => {
                    let mut heard = Vec::with_capacity(2 * messages.len());
                    for message in messages {
                        let Delivered { entry: Entry { subject, sequence, payload, at, .. }, pending } = message?;
                        if let Some(RegistryKey::Host(host)) = parse_registry(&subject) {
                            let entry: Option<HostEntry> = decode_record(&payload).ok();
                            heard.push(Heard::Written(host.clone(), at));
                            let enrolled = entry.and_then(|entry| entry.enrolled);
                            heard.push(Heard::Event(Event::Entry { host, sequence, enrolled }));
                        }
                        if !loaded && (pending == 0 || sequence >= last) {
                            loaded = true;
                            heard.push(Heard::Event(Event::Loaded));
                        }
                    }
                    heard
                }
                Some(message) = guards.next() => {
                    let entry = message?.entry;
                    match parse_registry(&entry.subject) {
                        Some(RegistryKey::Guard(template)) => {
                            let record: Option<GuardRecord> = decode_record(&entry.payload).ok();
                            vec![Heard::Event(Event::Guard { template, record })]
                        }
                        _ => continue,
                    }
                }
                Some(message) = templates.next() => {
                    let entry = message?.entry;
                    let read_once = entry.sequence >= last_template;
                    health(&entry).into_iter().chain(read_once.then_some(Heard::Templates)).collect()
                }
                Some(message) = grants.next() => {
                    let entry = message?.entry;
                    let read_once = entry.sequence >= last_grant;
                    read_once.then_some(Heard::Grants).into_iter().chain(granted(&entry)).collect()
                }
                _ = check.tick() => {
                    // Who lost its entries with a stream that was deleted must enrol again, and nothing else would tell this controller.
                    match log.made_at().await {
                        Ok(now) if now != made_at => return Ok("REGISTRY is another stream than before"),
                        _ => continue,
                    }
                }
                Some(messages) = beats.next() => {
                    metrics::counter!(names::BEATS).increment(messages.len() as u64);
                    messages.iter().filter_map(|(host, message)| beat(host, message)).map(Heard::Event).collect()
                }
                else => return Ok("the subscriptions ended"),
            };
            self.hand_on(heard).await?;
        }
    }
}

/// Which connections stand.
struct Reaches {
    streams: bool,
    hosts: bool,
}

impl Reaches {
    fn streams(&mut self, streams: bool) -> Heard {
        self.streams = streams;
        self.event()
    }

    fn hosts(&mut self, hosts: bool) -> Heard {
        self.hosts = hosts;
        self.event()
    }

    /// Also where nothing changed: something was lost, and silence is counted anew.
    fn event(&self) -> Heard {
        Heard::Event(Event::Connected(self.streams && self.hosts))
    }
}

/// One that cannot be read says nothing: its last good version counts.
fn health(entry: &Entry) -> Option<Heard> {
    let name = Name::parse(&entry.subject)?;
    let template = TemplateId::new(name.id()).ok()?;
    match Document::decode(&name, &entry.payload).ok()? {
        Some(Document::Template(document)) => Some(Heard::Template(template, Some(document.health.clone()))),
        Some(_) => None,
        None => Some(Heard::Template(template, None)),
    }
}

/// One that cannot be read says nothing.
fn granted(entry: &Entry) -> Option<Heard> {
    let name = Name::parse(&entry.subject)?;
    let host = HostId::new(name.id()).ok()?;
    let granted = match Document::decode(&name, &entry.payload).ok()? {
        Some(document) => !Grant::read(&document).ok()?.removing,
        None => false,
    };
    Some(Heard::Grant(host, granted))
}

fn beat(host: &HostId, message: &async_nats::Message) -> Option<Event> {
    let beat = Beat::decode(&message.payload).ok()?;
    let answer = message.headers.as_ref().and_then(|headers| headers.get(subjects::ANSWER_TOKEN));
    Some(Event::Beat { host: host.clone(), boot: boot_text(beat.boot), answer: answer.map(|token| token.as_str().to_owned()) })
}
