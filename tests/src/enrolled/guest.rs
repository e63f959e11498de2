//! A host as the protocol has it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_nats::{Client, HeaderMap};
use futures::StreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::subjects;
use groupcast_messages::{
    Beat, BeatAnswer, HostRequest, HostRequestAnswer, HostState, Register, RegisterAnswer, RegisterWorkload,
};
use groupcast_policy::ids::{HostId, NetworkId, WorkloadId};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

use super::{BEAT, asked};
use crate::control::Plane;
use crate::world::{DEADLINE, eventually};

/// What was not answered for so long is asked again.
const AGAIN_AFTER: Duration = Duration::from_secs(3);

type Waiting = Arc<Mutex<HashMap<String, oneshot::Sender<Vec<u8>>>>>;

/// A host as the protocol has it: enrols, beats, and enrols again when it is told that it is not known.
pub struct Guest {
    pub id: HostId,
    pub client: Client,
    pub boot: u64,
    waiting: Waiting,
    /// No two guests have it, also of one host: they hear each other's answers.
    life: u64,
    next: AtomicU64,
    /// How long it goes on asking.
    patience: Duration,
    /// When it asks again.
    again_after: Duration,
    /// How often it was told that it is not known.
    pub told: Arc<AtomicU64>,
    /// Beats sent.
    sent: Arc<AtomicU64>,
    enrolment: Arc<Mutex<Option<Register>>>,
    beats: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl Guest {
    pub async fn new(plane: &Plane, name: &str, boot: u64) -> Self {
        let (client, _events) = plane.bus.connect(0, Role::Host, name).await;
        Self::with(client, name, boot).await
    }

    pub async fn with(client: Client, name: &str, boot: u64) -> Self {
        let id: HostId = name.parse().expect("an id");
        let mut answers = client.subscribe(subjects::answers(&id)).await.expect("subscribed");
        client.flush().await.expect("the server answers");
        let (waiting, told, beats) = (Waiting::default(), Arc::new(AtomicU64::new(0)), watch::Sender::new(false));
        let enrolment: Arc<Mutex<Option<Register>>> = Arc::default();
        static LIVES: AtomicU64 = AtomicU64::new(0);
        let life = LIVES.fetch_add(1, Ordering::Relaxed);
        let listen = {
            let (waiting, told, enrolment) = (waiting.clone(), told.clone(), enrolment.clone());
            let (client, id) = (client.clone(), id.clone());
            tokio::spawn(async move {
                while let Some(message) = answers.next().await {
                    let token = subjects::answer_token(&message.subject).unwrap_or_default().to_owned();
                    if token.starts_with("beat") {
                        if BeatAnswer::decode(&message.payload) == Ok(BeatAnswer::Unknown) {
                            let times = told.fetch_add(1, Ordering::SeqCst);
                            let again = enrolment.lock().expect("lock").clone();
                            if let Some(register) = again {
                                send(&client, subjects::register(&id), &format!("again-{life}-{times}"), register.encode()).await;
                            }
                        }
                        continue;
                    }
                    let waiter = waiting.lock().expect("lock").remove(&token);
                    if let Some(waiter) = waiter {
                        let _ = waiter.send(message.payload.to_vec());
                    }
                }
            })
        };
        let sent = Arc::new(AtomicU64::new(0));
        let beating = {
            let (client, id, mut beats, sent) = (client.clone(), id.clone(), beats.subscribe(), sent.clone());
            tokio::spawn(async move {
                let mut count = 0;
                // Whoever does not beat is not woken for it: there may be ten thousand of them.
                while beats.wait_for(|beats| *beats).await.is_ok() {
                    // Not at once: a beat that overtakes the entry of its own enrolment is answered that the host is not known.
                    tokio::time::sleep(BEAT).await;
                    if !*beats.borrow() {
                        continue;
                    }
                    count += 1;
                    let (version, state) = ("test".to_owned(), HostState::Enforcing);
                    let beat = Beat { boot, count, term: 0, version, state };
                    send(&client, subjects::beat(&id), &format!("beat-{count}"), beat.encode()).await;
                    sent.store(count, Ordering::SeqCst);
                }
            })
        };
        let (tasks, next) = (vec![listen, beating], AtomicU64::new(0));
        let (patience, again_after) = (DEADLINE, AGAIN_AFTER);
        Self { id, client, boot, waiting, life, next, patience, again_after, told, sent, enrolment, beats, tasks }
    }

    /// One that goes on asking for longer, or repeats itself sooner.
    pub fn asking(mut self, patience: Duration, again_after: Duration) -> Self {
        (self.patience, self.again_after) = (patience, again_after);
        self
    }

    /// As an agent does: under the same token for as long as it is the same request, so that whichever answer comes counts.
    async fn ask(&self, payload: Vec<u8>) -> Vec<u8> {
        let token = format!("t{}-{}", self.life, self.next.fetch_add(1, Ordering::SeqCst));
        let (answer, mut answered) = oneshot::channel();
        self.waiting.lock().expect("lock").insert(token.clone(), answer);
        let begun = Instant::now();
        while begun.elapsed() < self.patience {
            send(&self.client, subjects::register(&self.id), &token, payload.clone()).await;
            // In a world of three leaders change, and a request may be lost.
            if let Ok(Ok(answer)) = tokio::time::timeout(self.again_after, &mut answered).await {
                return answer;
            }
        }
        panic!("host {} is never answered", self.id)
    }

    pub async fn enrol(&self, template: &str, workloads: Vec<RegisterWorkload>) -> RegisterAnswer {
        let register = Register { boot: self.boot, template: Some(template.to_owned()), workloads };
        let answer = RegisterAnswer::decode(&self.ask(register.encode()).await).expect("an answer");
        if matches!(answer, RegisterAnswer::Registered { .. }) {
            *self.enrolment.lock().expect("lock") = Some(register);
        }
        answer
    }

    /// Enrols one workload and begins to beat; its incarnation.
    pub async fn settle(&self, template: &str, workload: &str, number: u32) -> u64 {
        let incarnation = incarnation(&self.enrol(template, vec![asked(workload, number)]).await);
        self.beats(true);
        incarnation
    }

    pub async fn request(&self, request: HostRequest) -> HostRequestAnswer {
        HostRequestAnswer::decode(&self.ask(request.encode()).await).expect("an answer")
    }

    pub fn beats(&self, beats: bool) {
        self.beats.send_replace(beats);
    }

    /// Says farewell as an agent does: it is silent from then on, and does not come back because it is told that it is gone.
    pub async fn leave(&self) -> HostRequestAnswer {
        self.beats(false);
        self.forget();
        self.request(HostRequest::Leave { boot: self.boot }).await
    }

    /// The workloads of its last registration.
    pub fn workloads(&self) -> Vec<(NetworkId, WorkloadId)> {
        let enrolment = self.enrolment.lock().expect("lock");
        let workloads = enrolment.iter().flat_map(|register| &register.workloads);
        workloads.map(|workload| (workload.network.clone(), workload.workload.clone())).collect()
    }

    /// Silent for good.
    pub fn vanish(&self) {
        self.beats(false);
        self.forget();
    }

    /// Waits until it has beaten for so long: time that has passed, whoever was there to hear it.
    pub async fn beats_for(&self, time: Duration) {
        let until = self.sent.load(Ordering::SeqCst) + 1 + time.as_millis().div_ceil(BEAT.as_millis()) as u64;
        eventually(&format!("{} has sent {until} beats", self.id), || async { self.sent.load(Ordering::SeqCst) >= until }).await;
    }

    /// It does not enrol again by itself any more.
    pub fn forget(&self) {
        *self.enrolment.lock().expect("lock") = None;
    }

    pub fn told(&self) -> u64 {
        self.told.load(Ordering::SeqCst)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

async fn send(client: &Client, subject: String, token: &str, payload: Vec<u8>) {
    let mut headers = HeaderMap::new();
    headers.insert(subjects::ANSWER_TOKEN, token);
    // Without a bus it is lost, as a host's words are.
    let _ = client.publish_with_headers(subject, headers, payload.into()).await;
}

/// Of the one workload that was registered.
pub fn incarnation(answer: &RegisterAnswer) -> u64 {
    match answer {
        RegisterAnswer::Registered { incarnations, .. } => incarnations[0].1,
        refused => panic!("{refused:?}"),
    }
}

/// Whether it may pass, and the words.
pub fn refusal(answer: &RegisterAnswer) -> (bool, String) {
    match answer {
        RegisterAnswer::Refused { retryable, reason } => (*retryable, reason.clone()),
        registered => panic!("{registered:?}"),
    }
}
