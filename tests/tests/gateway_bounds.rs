//! Everything that a gateway holds for clients is bounded: one more than the bound is told to come back, and one less is served.

use groupcast_tests::gateway::Desk;
use groupcast_tests::world::eventually;
use reqwest::Response;

/// As the gateway has them (`WATCHERS_MAX`, `WAITERS_MAX` in its API).
const WATCHERS_MAX: usize = 256;
const WAITERS_MAX: usize = 1_024;

async fn open(desk: &Desk, path: &str) -> Response {
    let request = desk.admin.http.get(format!("{}{path}", desk.admin.base)).bearer_auth(&desk.admin.token);
    request.send().await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn one_watcher_more_than_the_bound_is_told_to_come_back() {
    let desk = Desk::start().await;
    let mut watching = Vec::new();
    for number in 0..WATCHERS_MAX {
        let response = open(&desk, "/v1/watch").await;
        assert_eq!(response.status(), 200, "watcher {number}");
        watching.push(response);
    }
    let refused = desk.admin.get("/v1/watch").await;
    assert_eq!((refused.status, refused.retry_after.is_some()), (503, true), "{}", refused.text);
    // Reading goes on beside them.
    assert_eq!(desk.admin.get("/v1/groups").await.status, 200);
    drop(watching.pop());
    eventually("a place is free again", || async { open(&desk, "/v1/watch").await.status() == 200 }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_waiter_more_than_the_bound_is_told_to_come_back() {
    let desk = Desk::start().await;
    let change = desk.admin.change(&[groupcast_tests::gateway::group("web", &[])]).await;
    // Nobody publishes here, so all of them wait.
    let path = format!("/v1/changes/{change}?wait=enforced&timeout=60s");
    let waiting: Vec<_> = (0..WAITERS_MAX)
        .map(|_| {
            let request = desk.admin.http.get(format!("{}{path}", desk.admin.base)).bearer_auth(&desk.admin.token);
            tokio::spawn(request.send())
        })
        .collect();
    let short = format!("/v1/changes/{change}?wait=enforced&timeout=1ms");
    eventually("all places are taken", || async {
        let answer = desk.admin.get(&short).await;
        assert!([200, 503].contains(&answer.status), "{}", answer.text);
        answer.status == 503
    })
    .await;
    assert_eq!(desk.admin.get("/v1/groups").await.status, 200);
    assert_eq!(desk.admin.get(&format!("/v1/changes/{change}")).await.status, 200, "who does not wait needs no place");
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    eventually("places are free again", || async { desk.admin.get(&short).await.status == 200 }).await;
}
