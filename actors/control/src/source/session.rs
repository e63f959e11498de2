//! Calls with a token: made when there is none or it is about to end, made anew once when a call is refused in the middle, and every call
//! repeated a few times before it fails.

use std::io::Read;
use std::time::Duration;

use super::Failed;
use super::transport::{Endpoint, Head, Method, Request, Transport};

/// Attempts of one call.
pub const CALL_ATTEMPTS_MAX: u32 = 4;
/// Pause before the second attempt; it doubles.
pub const CALL_PAUSE: Duration = Duration::from_millis(200);
/// A server that asks for a longer pause ends the poll: the next one waits for it.
pub const CALL_PAUSE_MAX: Duration = Duration::from_secs(5);
/// A token that ends sooner is replaced before it is used.
pub const TOKEN_LEFT_MIN: Duration = Duration::from_secs(10);
/// A token that says that it lasts longer is replaced after this long all the same.
pub const TOKEN_LASTS_MAX: Duration = Duration::from_secs(24 * 3_600);
/// Longest answer with a token, in bytes.
const TOKEN_BYTES_MAX: u64 = 1024 * 1024;
/// What is shown of an answer that says what is wrong, in bytes.
const ERROR_BYTES_MAX: u64 = 300;

/// How a kind of server gives out tokens.
pub trait Login: Send + Sync {
    fn request(&self) -> Result<Request, String>;
    /// The token and how long it lasts.
    fn token(&self, head: &Head, body: &[u8]) -> Result<(String, Duration), String>;
    fn header(&self, token: &str) -> (&'static str, String);
}

pub struct Session<L> {
    login: L,
    token: Option<(String, Duration)>,
}

enum Said<T> {
    Good(T),
    /// Answered, but no more than this can be made of it.
    Unreadable(String),
    Refused(Head, String),
}

/// Why there is no token, and whether asking again may help.
struct NoToken {
    failed: Failed,
    again: bool,
}

/// A status that may be another in a moment.
const fn is_passing(status: u16) -> bool {
    status == 429 || status >= 500
}

/// What came of a call that the server understood.
#[derive(Debug)]
pub enum Reply<T> {
    Good(T),
    NotFound,
}

impl<L: Login> Session<L> {
    pub fn new(login: L) -> Self {
        Self { login, token: None }
    }

    /// Makes sure of a token.
    pub async fn log_in<X: Transport>(&mut self, transport: &X) -> Result<String, Failed> {
        if let Some((token, ends)) = &self.token
            && transport.now() + TOKEN_LEFT_MIN < *ends
        {
            return Ok(token.clone());
        }
        self.token = None;
        let mut pause = CALL_PAUSE;
        for attempt in 1.. {
            let (why, wait) = match self.ask_for_token(transport).await {
                Ok((token, lasts)) => {
                    self.token = Some((token.clone(), transport.now().saturating_add(lasts.min(TOKEN_LASTS_MAX))));
                    return Ok(token);
                }
                Err(refused) if !refused.again => return Err(refused.failed),
                Err(NoToken { failed, .. }) if attempt == CALL_ATTEMPTS_MAX => return Err(failed),
                Err(NoToken { failed, .. }) => (failed.message, failed.retry_after.unwrap_or(pause)),
            };
            tracing::debug!(why, "asking for a token again");
            transport.pause(wait).await;
            pause *= 2;
        }
        Err(Failed::new("no token"))
    }

    async fn ask_for_token<X: Transport>(&self, transport: &X) -> Result<(String, Duration), NoToken> {
        let refused = |why: String| NoToken { failed: Failed::new(format!("no token: {why}")), again: false };
        let passing = |why: String| NoToken { again: true, ..refused(why) };
        let request = self.login.request().map_err(|why| NoToken { failed: Failed::new(why), again: false })?;
        let read = |head: Head, body: &mut dyn Read| {
            let mut bytes = Vec::new();
            let whole = body.take(TOKEN_BYTES_MAX).read_to_end(&mut bytes).map_err(|error| error.to_string());
            (head, whole.map(|_| bytes))
        };
        let (head, body) = transport.exchange(request, read).await.map_err(passing)?;
        let body = body.map_err(passing)?;
        if !(200..300).contains(&head.status) {
            let words = format!("{} {}", head.status, shown(&mut body.as_slice()));
            let again = is_passing(head.status);
            let hint = if again { "" } else { ": are the credentials right?" };
            let failed = Failed { retry_after: head.retry_after, ..refused(format!("{}{hint}", words.trim_end())).failed };
            // A server that asks for a longer pause ends the poll: the next one waits for it.
            return Err(NoToken { again: again && head.retry_after.is_none_or(|asked| asked <= CALL_PAUSE_MAX), failed });
        }
        self.login.token(&head, &body).map_err(refused)
    }

    /// A GET whose answer is read by `parse`. `Internal` calls carry no token.
    pub async fn get<X: Transport, T: Send + 'static>(
        &mut self,
        transport: &X,
        endpoint: Endpoint,
        path: &str,
        parse: impl Fn(&mut dyn Read) -> Result<T, String> + Clone + Send + 'static,
    ) -> Result<Reply<T>, Failed> {
        let (mut pause, mut renewed, mut attempt) = (CALL_PAUSE, false, 0);
        loop {
            let mut request = Request::get(endpoint, path.to_owned());
            if endpoint != Endpoint::Internal {
                let token = self.log_in(transport).await?;
                request.headers.push(self.login.header(&token));
            }
            let parse = parse.clone();
            let said = transport.exchange(request, move |head, body| match head.status {
                200 => parse(body).map_or_else(Said::Unreadable, Said::Good),
                _ => {
                    let words = shown(body);
                    Said::Refused(head, words)
                }
            });
            let (why, wait) = match said.await {
                Ok(Said::Good(value)) => return Ok(Reply::Good(value)),
                Ok(Said::Refused(head, _)) if head.status == 404 => return Ok(Reply::NotFound),
                Ok(Said::Refused(head, _)) if head.status == 401 && endpoint != Endpoint::Internal && !renewed => {
                    // A token may end, or be taken back, at any time. A second refusal is meant.
                    (renewed, self.token) = (true, None);
                    continue;
                }
                Ok(Said::Refused(head, words)) => {
                    let why = format!("{path} answered {} {words}", head.status);
                    if !is_passing(head.status) || head.retry_after.is_some_and(|asked| asked > CALL_PAUSE_MAX) {
                        return Err(Failed { message: why.trim_end().to_owned(), retry_after: head.retry_after });
                    }
                    (why, head.retry_after.unwrap_or(pause))
                }
                Ok(Said::Unreadable(why)) => (format!("{path}: {why}"), pause),
                Err(why) => (format!("{path}: {why}"), pause),
            };
            attempt += 1;
            if attempt == CALL_ATTEMPTS_MAX {
                return Err(Failed::new(why.trim_end()));
            }
            transport.pause(wait).await;
            pause *= 2;
        }
    }
}

/// The beginning of an answer, on one line.
fn shown(body: &mut dyn Read) -> String {
    let mut bytes = Vec::new();
    let _ = body.take(ERROR_BYTES_MAX).read_to_end(&mut bytes); // whatever came of it
    let text = String::from_utf8_lossy(&bytes);
    text.chars().map(|c| if groupcast_policy::text::is_deceptive(c) { ' ' } else { c }).collect::<String>().trim().to_owned()
}

/// UAA, with a client's credentials.
pub struct Uaa {
    pub client_id: String,
    /// Read for every token, so that it can be changed while this runs.
    pub secret: Secret,
}

/// Where a secret comes from.
pub type Secret = std::sync::Arc<dyn Fn() -> Result<String, String> + Send + Sync>;

/// The content of a file, without the line's end.
pub fn secret_file(path: std::path::PathBuf) -> Secret {
    std::sync::Arc::new(move || {
        let read = std::fs::read_to_string(&path);
        read.map(|text| text.trim_end_matches(['\r', '\n']).to_owned()).map_err(|error| format!("{}: {error}", path.display()))
    })
}

impl Login for Uaa {
    fn request(&self) -> Result<Request, String> {
        let basic = format!("{}:{}", self.client_id, (self.secret)()?);
        let basic = format!("Basic {}", data_encoding::BASE64.encode(basic.as_bytes()));
        Ok(Request {
            endpoint: Endpoint::Login,
            method: Method::Post,
            path: "/oauth/token".to_owned(),
            headers: vec![("authorization", basic), ("accept", "application/json".to_owned())],
            body: Some(("application/x-www-form-urlencoded", "grant_type=client_credentials".to_owned())),
        })
    }

    fn token(&self, _: &Head, body: &[u8]) -> Result<(String, Duration), String> {
        #[derive(serde::Deserialize)]
        struct Answer {
            access_token: String,
            expires_in: u64,
        }
        let answer: Answer = serde_json::from_slice(body).map_err(|error| format!("the answer cannot be read: {error}"))?;
        Ok((answer.access_token, Duration::from_secs(answer.expires_in)))
    }

    fn header(&self, token: &str) -> (&'static str, String) {
        ("authorization", format!("bearer {token}"))
    }
}

/// Keystone v3.
pub struct Keystone {
    pub credential: Credential,
}

pub enum Credential {
    Application { id: String, secret: Secret },
    Password { username: String, user_domain: String, password: Secret, project: String, project_domain: String },
}

/// A token whose answer does not say when it ends is used this long.
const TOKEN_LASTS: Duration = Duration::from_secs(300);

impl Login for Keystone {
    fn request(&self) -> Result<Request, String> {
        let auth = match &self.credential {
            Credential::Application { id, secret } => serde_json::json!({
                "identity": {"methods": ["application_credential"], "application_credential": {"id": id, "secret": secret()?}},
            }),
            Credential::Password { username, user_domain, password, project, project_domain } => serde_json::json!({
                "identity": {"methods": ["password"], "password": {"user": {
                    "name": username, "domain": {"name": user_domain}, "password": password()?,
                }}},
                "scope": {"project": {"name": project, "domain": {"name": project_domain}}},
            }),
        };
        Ok(Request {
            endpoint: Endpoint::Login,
            method: Method::Post,
            path: "/v3/auth/tokens".to_owned(),
            headers: vec![("accept", "application/json".to_owned())],
            body: Some(("application/json", serde_json::json!({ "auth": auth }).to_string())),
        })
    }

    fn token(&self, head: &Head, body: &[u8]) -> Result<(String, Duration), String> {
        #[derive(serde::Deserialize)]
        struct Answer {
            token: Token,
        }
        #[derive(serde::Deserialize)]
        struct Token {
            expires_at: Option<String>,
            issued_at: Option<String>,
        }
        let token = head.subject_token.clone().ok_or("the answer has no X-Subject-Token")?;
        let answer: Answer = serde_json::from_slice(body).map_err(|error| format!("the answer cannot be read: {error}"))?;
        // Both by the server's clock, which need not be ours.
        let time = |text: Option<String>| text.and_then(|text| humantime::parse_rfc3339_weak(&text).ok());
        let lasts = match (time(answer.token.issued_at), time(answer.token.expires_at)) {
            (Some(issued), Some(expires)) => expires.duration_since(issued).unwrap_or_default(),
            _ => TOKEN_LASTS,
        };
        Ok((token, lasts))
    }

    fn header(&self, token: &str) -> (&'static str, String) {
        ("x-auth-token", token.to_owned())
    }
}
