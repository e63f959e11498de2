//! Everything that a gateway holds for clients is bounded: one more than the bound is told to come back, and one less is served.

use groupcast_tests::gateway::{Desk, Gateway, User};
use groupcast_tests::world::eventually;
use reqwest::Response;

/// As the gateway has them (`WATCHERS`, `WAITERS` in its API): in all, and of one token and one address the most.
const WATCHERS_MAX: usize = 256;
const WATCHERS_EACH: usize = 64;
const WAITERS_MAX: usize = 1_024;
const WAITERS_EACH: usize = 256;

/// Users, as many as it takes to fill every place: one token has only so many. Each comes from an address of its own, as a proxy says.
struct Crowd {
    desk: Desk,
    gateway: Gateway,
    tokens: Vec<User>,
}

impl Crowd {
    async fn of(count: usize) -> Self {
        let desk = Desk::start().await;
        let gateway = Gateway::start(&desk.bus.url(0), &["--trusted-proxy", "127.0.0.1"]).await;
        let mut tokens = Vec::new();
        for number in 0..count {
            tokens.push(desk.known(desk.token(&format!("u{number}"), "viewer", &[])).await.at(&gateway));
        }
        desk.admin.at(&gateway).ready().await;
        for user in &tokens {
            eventually("the token is known", || async { user.get("/v1/whoami").await.status == 200 }).await;
        }
        Self { desk, gateway, tokens }
    }

    fn admin(&self) -> User {
        self.desk.admin.at(&self.gateway)
    }

    fn request(&self, number: usize, each: usize, path: &str) -> reqwest::RequestBuilder {
        let user = &self.tokens[number / each];
        let from = format!("198.51.100.{}", number / each);
        user.http.get(format!("{}{path}", user.base)).bearer_auth(&user.token).header("x-forwarded-for", from)
    }
}

async fn open(request: reqwest::RequestBuilder) -> Response {
    request.send().await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn one_watcher_more_than_the_bound_is_told_to_come_back() {
    let crowd = Crowd::of(WATCHERS_MAX / WATCHERS_EACH).await;
    let admin = crowd.admin();
    let mut watching = Vec::new();
    for number in 0..WATCHERS_MAX {
        let response = open(crowd.request(number, WATCHERS_EACH, "/v1/watch")).await;
        assert_eq!(response.status(), 200, "watcher {number}");
        watching.push(response);
        if number + 1 == WATCHERS_EACH {
            let beyond = open(crowd.request(number, WATCHERS_EACH, "/v1/watch")).await;
            assert_eq!(beyond.status(), 503, "one token takes no more than its share");
        }
    }
    let refused = admin.get("/v1/watch").await;
    assert_eq!((refused.status, refused.retry_after.is_some()), (503, true), "{}", refused.text);
    // Reading goes on beside them.
    assert_eq!(admin.get("/v1/groups").await.status, 200);
    drop(watching.pop());
    let last = || async { open(crowd.request(WATCHERS_MAX - 1, WATCHERS_EACH, "/v1/watch")).await.status() == 200 };
    eventually("a place is free again", last).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_waiter_more_than_the_bound_is_told_to_come_back() {
    let crowd = Crowd::of(WAITERS_MAX / WAITERS_EACH).await;
    let admin = crowd.admin();
    let change = admin.change(&[groupcast_tests::gateway::group("web", &[])]).await;
    // Nobody publishes here, so all of them wait.
    let path = format!("/v1/changes/{change}?wait=enforced&timeout=60s");
    let waiting: Vec<_> =
        (0..WAITERS_MAX).map(|number| tokio::spawn(crowd.request(number, WAITERS_EACH, &path).send())).collect();
    let short = format!("/v1/changes/{change}?wait=enforced&timeout=1ms");
    eventually("all places are taken", || async {
        let answer = admin.get(&short).await;
        assert!([200, 503].contains(&answer.status), "{}", answer.text);
        answer.status == 503
    })
    .await;
    assert_eq!(admin.get("/v1/groups").await.status, 200);
    assert_eq!(admin.get(&format!("/v1/changes/{change}")).await.status, 200, "who does not wait needs no place");
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    eventually("places are free again", || async { admin.get(&short).await.status == 200 }).await;
}
