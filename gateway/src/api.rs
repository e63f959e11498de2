//! The HTTP API: one file for each family of routes, all of them documented where they are written. The OpenAPI document is made from
//! the same annotations that make the routes, so neither can be without the other.

pub mod access;
pub mod audit;
pub mod body;
pub mod changes;
pub mod credentials;
pub mod documents;
pub mod explain;
pub mod health;
pub mod host;
pub mod init;
pub mod registrations;
pub mod registry;
pub mod sources;
pub mod tokens;
pub mod transfer;
pub mod watch;

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use async_nats::Client;
use axum::Router;
use axum::http::StatusCode;
use groupcast_bus_config::alive::Login;
use groupcast_bus_config::credentials::HostSigner;
use groupcast_control::catalog::Catalog;
use groupcast_control::pressure::Pressure;
use groupcast_control::registration::admission::{Admission, Rate};
use metrics_exporter_prometheus::PrometheusHandle;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;
use utoipa::openapi::OpenApi as Document;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{IntoParams, OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::attempts::Attempts;
use crate::bounds::Bounds;
use crate::checks::Checks;
use crate::confirm;
use crate::doors::{Doors, Proxies};
use crate::expiry::Expiring;
use crate::follow::Followed;
use crate::heavy::Heavy;
use crate::problem::Problem;
use crate::progress::Watcher;
use crate::registrations::Registrations;
use crate::shares::{Limits, Shares};

/// Of every answer that has a body of ours.
pub const FORMAT_VERSION: &str = "1";
/// Watchers at once; further ones are asked to come back.
pub const WATCHERS: Limits = Limits { total: 256, token: 64, address: 128 };
/// Requests that wait for a change at once.
pub const WAITERS: Limits = Limits { total: 1_024, token: 256, address: 512 };
/// Bodies above [`body::SMALL_BYTES_MAX`] at once, from the first byte to the answer, which bounds memory.
pub const LARGE_BODIES: Limits = Limits { total: 4, token: 2, address: 3 };
/// Joins that are looked up on the bus at once.
pub const JOINS_MAX: usize = 8;
/// What one host may ask to be renewed: agents do so once in half a credential's life, and again after a failure.
pub const RENEWALS: Rate = Rate { at_once: 10, per_second: 1 };
/// Items of one page.
pub const PAGE_MAX: usize = 1_000;
const PAGE_DEFAULT: usize = 100;

/// What every request can reach.
pub struct Shared {
    pub client: Client,
    pub catalog: Catalog,
    pub followed: Arc<Followed>,
    pub progress: Watcher,
    pub registrations: Registrations,
    /// Signs credentials of hosts that join, if this gateway may.
    pub host_signer: Option<HostSigner>,
    pub attempts: Mutex<Attempts>,
    pub clock: Instant,
    pub metrics: Option<PrometheusHandle>,
    pub checks: Checks,
    /// What of its own expires.
    pub expiring: OnceLock<Vec<Expiring>>,
    /// Where the servers of the bus say how they store.
    pub monitors: OnceLock<Vec<String>>,
    /// Whether the bus lets the gateway in; nothing where nobody watches the connection.
    pub login: OnceLock<Login>,
    pub watchers: Arc<Shares>,
    pub waiters: Arc<Shares>,
    pub large_bodies: Arc<Shares>,
    pub heavy: Heavy,
    pub joins: Semaphore,
    /// How often each host has its credential signed anew.
    pub renewals: Mutex<Admission>,
    /// Who is believed about where a request comes from.
    pub proxies: Proxies,
    pub openapi: String,
}

pub type App = Arc<Shared>;

impl Shared {
    pub fn start(client: Client, metrics: Option<PrometheusHandle>, host_signer: Option<HostSigner>, proxies: Proxies) -> App {
        let followed = Followed::start(&client);
        let pressure = Pressure::default();
        let published = (pressure.clone(), client.clone());
        tokio::spawn(async move {
            let (pressure, client) = published;
            // Subscriptions outlive lost connections; without one nobody is held up.
            if let Err(error) = pressure.follow(client).await {
                tracing::warn!(%error, "it is not known how far changes are published");
            }
        });
        let catalog = Catalog::new(client.clone()).with_estimate(Arc::new(Bounds(followed.clone()))).with_pressure(pressure);
        let progress = Watcher::start(&client, followed.catalog_stream());
        let app = Arc::new(Self {
            catalog,
            followed,
            progress,
            registrations: Registrations::new(client.clone()),
            host_signer,
            client,
            attempts: Mutex::default(),
            clock: Instant::now(),
            metrics,
            checks: Checks::default(),
            expiring: OnceLock::new(),
            monitors: OnceLock::new(),
            login: OnceLock::new(),
            watchers: Shares::new(WATCHERS),
            waiters: Shares::new(WAITERS),
            large_bodies: Shares::new(LARGE_BODIES),
            heavy: Heavy::default(),
            joins: Semaphore::new(JOINS_MAX),
            renewals: Mutex::new(Admission::new(RENEWALS)),
            proxies,
            openapi: openapi().to_pretty_json().unwrap_or_default(),
        });
        tokio::spawn(confirm::watch(app.clone()));
        app
    }

    /// Until both streams were read there is nothing to judge anything by.
    pub fn loaded(&self) -> Result<(), Problem> {
        if self.followed.local().is_loaded() {
            return Ok(());
        }
        Err(Problem::reading("still reading CATALOG and REGISTRY: is the bus up, and does a controller run?"))
    }
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "groupcast",
        version = "1",
        description = "Security groups, from the place where they are written to the kernel of every host that uses them. Errors are \
                       problem details (RFC 9457) that list everything that is wrong with a request.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    components(schemas(Problem)),
    tags(
        (name = "groups", description = "Security groups"),
        (name = "templates", description = "What workloads that register themselves may be"),
        (name = "changes", description = "Atomic changes of many documents, plans, waiting and undo"),
        (name = "reading", description = "Workloads, hosts, explanations, and what happens"),
        (name = "administration", description = "Tokens, export and import"),
        (name = "health", description = "For machines")
    )
)]
struct Description;

fn router() -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(documents::list_groups))
        .routes(routes!(documents::get_group, documents::put_group, documents::delete_group))
        .routes(routes!(documents::list_templates))
        .routes(routes!(documents::get_template, documents::put_template, documents::delete_template))
        .routes(routes!(changes::list_changes, changes::post_change))
        .routes(routes!(changes::get_change))
        .routes(routes!(changes::undo_change))
        .routes(routes!(changes::confirm_change))
        .routes(routes!(watch::watch))
        .routes(routes!(explain::explain))
        .routes(routes!(registry::list_workloads))
        .routes(routes!(registry::get_workload))
        .routes(routes!(registry::list_hosts))
        .routes(routes!(sources::list_sources))
        .routes(routes!(sources::get_source))
        .routes(routes!(sources::poll_source))
        .routes(routes!(sources::confirm_source))
        .routes(routes!(registry::get_host, host::put_host, host::delete_host))
        .routes(routes!(host::make_join_token))
        .routes(routes!(host::join))
        .routes(routes!(credentials::list_credentials))
        .routes(routes!(credentials::revoked_credentials))
        .routes(routes!(credentials::renew))
        .routes(routes!(registrations::list_registrations))
        .routes(routes!(registrations::get_registration))
        .routes(routes!(registrations::list_frozen, registrations::confirm_frozen))
        .routes(routes!(registrations::watch_registrations))
        .routes(routes!(tokens::list_tokens, tokens::create_token))
        .routes(routes!(tokens::revoke_token))
        .routes(routes!(access::whoami))
        .routes(routes!(init::init))
        .routes(routes!(audit::list_audit))
        .routes(routes!(transfer::export))
        .routes(routes!(transfer::import))
        .routes(routes!(health::livez))
        .routes(routes!(health::readyz))
        .routes(routes!(health::metrics))
        .routes(routes!(health::openapi))
        .routes(routes!(health::status))
        .routes(routes!(health::checks))
}

/// The description of every route, made from the routes.
pub fn openapi() -> Document {
    let (_, mut document) = router().split_for_parts();
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).bearer_format("gct.<id>.<secret>").build();
    let components = document.components.get_or_insert_default();
    components.add_security_scheme("token", SecurityScheme::Http(bearer));
    document
}

/// All routes, for requests that come through these doors.
pub fn routes_of(app: App, doors: Doors) -> Router {
    let (router, _) = router().split_for_parts();
    router
        .fallback(async || Problem::not_found("there is no such route: see /openapi.json"))
        .method_not_allowed_fallback(async || {
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method", "this route does not take that method: see /openapi.json")
        })
        .layer(axum::middleware::from_fn_with_state(Arc::new(doors), crate::doors::through))
        .layer(axum::middleware::from_fn(health::measured))
        .with_state(app)
}

/// Which part of a list.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Page {
    /// How many, at most 1000; 100 if not said.
    #[param(maximum = 1000, minimum = 1)]
    pub limit: Option<usize>,
    /// Those after this id: what `next` of the page before says.
    pub after: Option<String>,
    /// Those whose id begins so.
    pub prefix: Option<String>,
}

impl Page {
    pub fn limit(&self) -> Result<usize, Problem> {
        match self.limit.unwrap_or(PAGE_DEFAULT) {
            limit @ 1..=PAGE_MAX => Ok(limit),
            _ => Err(Problem::bad_request(format!("limit is a number from 1 to {PAGE_MAX}"))),
        }
    }

    /// The items of the page, and after which id the next one begins.
    pub fn cut<T, U>(
        &self,
        items: impl Iterator<Item = T>,
        id: impl Fn(&T) -> &str,
        show: impl Fn(T) -> U,
    ) -> Result<(Vec<U>, Option<String>), Problem> {
        let limit = self.limit()?;
        let after = self.after.as_deref().unwrap_or("");
        let prefix = self.prefix.as_deref().unwrap_or("");
        let mut rest = items.filter(|item| id(item) > after && id(item).starts_with(prefix)).peekable();
        let (mut page, mut last) = (Vec::new(), String::new());
        while page.len() < limit {
            let Some(item) = rest.next() else { break };
            last = id(&item).to_owned();
            page.push(show(item));
        }
        Ok((page, rest.peek().is_some().then_some(last)))
    }
}

/// A part of a list.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
pub struct Listed<T> {
    pub format_version: String,
    pub items: Vec<T>,
    /// Ask with `after` set to this for what follows; nothing when this is the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

impl<T> Listed<T> {
    pub fn new((items, next): (Vec<T>, Option<String>)) -> Self {
        Self { format_version: FORMAT_VERSION.to_owned(), items, next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The description beside the documentation is the one that the code makes; `GROUPCAST_UPDATE=1` writes it anew.
    #[test]
    fn the_description_is_what_the_code_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
        let made = openapi().to_pretty_json().expect("JSON") + "\n";
        if std::env::var_os("GROUPCAST_UPDATE").is_some() {
            std::fs::write(path, &made).expect("written");
        }
        let kept = std::fs::read_to_string(path).unwrap_or_default();
        assert!(made == kept, "docs/openapi.json is not what the code says: run this test again with GROUPCAST_UPDATE=1");
    }

    #[test]
    fn pages_are_bounded_and_follow_each_other() {
        let ids: Vec<String> = (0..25).map(|i| format!("g{i:02}")).collect();
        let page = |limit: usize, after: &str| Page { limit: Some(limit), after: Some(after.to_owned()), prefix: None };
        let cut = |page: Page| page.cut(ids.iter(), |id| id.as_str(), Clone::clone);
        assert_eq!(cut(page(10, "g09")).map(|(items, next)| (items[0].clone(), next)), Ok(("g10".into(), Some("g19".into()))));
        assert_eq!(cut(page(10, "g19")).map(|(items, next)| (items.len(), next)), Ok((5, None)));
        assert_eq!(cut(page(25, "")).map(|(items, next)| (items.len(), next)), Ok((25, None)));
        assert!(cut(page(PAGE_MAX, "")).is_ok() && cut(page(PAGE_MAX + 1, "")).is_err() && cut(page(0, "")).is_err());
    }
}
