//! A model as the transport of a source, without HTTP and without waiting: time passes when somebody pauses.

use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use groupcast_control::source::http::retry_after;
use groupcast_control::source::transport::{Endpoint, Head, Method, Request, Transport};

use super::{Call, Fake, Manner};

pub struct Local<F> {
    fake: Arc<Mutex<F>>,
    now: Mutex<Duration>,
}

impl<F: Fake> Local<F> {
    pub fn new(fake: Arc<Mutex<F>>) -> Self {
        Self { fake, now: Mutex::default() }
    }

    pub fn pass(&self, time: Duration) {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) += time;
    }
}

/// A body that breaks off.
struct Broken<'a>(&'a [u8]);

impl Read for Broken<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        if self.0.is_empty() {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        self.0.read(buffer)
    }
}

impl<F: Fake> Transport for Local<F> {
    async fn exchange<T: Send + 'static>(
        &self,
        request: Request,
        read: impl FnOnce(Head, &mut dyn Read) -> T + Send + 'static,
    ) -> Result<T, String> {
        self.pass(Duration::from_millis(1));
        let mut call = Call::get(&request.path);
        call.method = if request.method == Method::Post { "POST".into() } else { "GET".into() };
        call.headers = request.headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
        call.body = request.body.map(|(_, body)| body.into_bytes()).unwrap_or_default();
        call.internal = request.endpoint == Endpoint::Internal;
        let reply = self.fake.lock().unwrap_or_else(PoisonError::into_inner).handle(&call, self.now());
        let header = |name: &str| reply.headers.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
        let head = Head {
            status: reply.status,
            retry_after: header("retry-after").and_then(|text| retry_after(&text, None, SystemTime::now())),
            subject_token: header("x-subject-token"),
        };
        match reply.manner {
            Manner::Hanging => Err("did not answer in time".to_owned()),
            Manner::Truncated => {
                let _ = read(head, &mut Broken(&reply.body[..reply.body.len() / 2])); // what it makes of it does not count
                Err("the connection broke".to_owned())
            }
            Manner::Whole => Ok(read(head, &mut reply.body.as_slice())),
        }
    }

    async fn pause(&self, time: Duration) {
        self.pass(time);
    }

    fn now(&self) -> Duration {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
