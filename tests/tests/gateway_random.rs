//! Requests nobody would write by hand, for every operation of the OpenAPI document: no failure of the server's own, no status that
//! is not documented, and the gateway serves on.

use groupcast_tests::gateway::{Desk, group};
use groupcast_tests::world::{full, seed};
use serde_json::{Value, json};

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % n
    }

    fn pick<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }

    fn text(&mut self) -> String {
        let words = [
            "web",
            "",
            "a.b",
            "x",
            "%00",
            "%ff",
            "..",
            "-1",
            "0",
            "1",
            "18446744073709551615",
            "9e99",
            "null",
            "true",
            "ä",
            "%2F",
            "a b",
            "*",
            "\"",
            "<>",
        ];
        let word = self.pick(&words);
        if self.below(20) == 0 { word.repeat(500) } else { word.to_owned() }
    }

    fn value(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 6 } else { 9 }) {
            0 => Value::Null,
            1 => json!(self.below(3) == 0),
            2 => json!(self.below(100_000) as i64 - 50_000),
            3 => json!(1.5),
            4 => json!(u64::MAX),
            5 => json!(self.text()),
            6 => (0..self.below(4)).map(|_| self.value(depth - 1)).collect(),
            _ => {
                let keys = [
                    "kind",
                    "id",
                    "rules",
                    "bindings",
                    "members",
                    "put",
                    "delete",
                    "document",
                    "revision",
                    "dry_run",
                    "plan",
                    "reason",
                    "role",
                    "scope",
                    "life",
                    "network",
                    "labels",
                    "stateful",
                    "owner",
                    "name",
                    "internet_member",
                ];
                let mut map = serde_json::Map::new();
                for _ in 0..self.below(6) {
                    let key = self.pick(&keys).to_owned();
                    map.insert(key, self.value(depth - 1));
                }
                Value::Object(map)
            }
        }
    }

    /// Something like what the route takes, with something wrong in it more often than not.
    fn body(&mut self) -> Vec<u8> {
        let near = match self.below(4) {
            0 => group(self.pick(&["web", "db", "x"]), &["ingress tcp 1 from any"]),
            1 => json!({ "put": [{ "document": group("web", &[]), "revision": self.below(40) }], "dry_run": self.below(2) == 0 }),
            2 => json!({ "id": "t", "role": self.pick(&["viewer", "editor", "root"]), "life": self.text() }),
            _ => self.value(4),
        };
        let mut text = match near {
            Value::Object(mut map) if self.below(3) == 0 => {
                let key = map.keys().nth(self.below(map.len().max(1))).cloned().unwrap_or_default();
                map.insert(key, self.value(2));
                Value::Object(map).to_string()
            }
            near => near.to_string(),
        }
        .into_bytes();
        match self.below(10) {
            0 => text.truncate(text.len() / 2),
            1 => text.push(0xff),
            2 => text = Vec::new(),
            _ => {}
        }
        text
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_breaks_a_gateway() {
    let desk = Desk::start().await;
    desk.admin.change(&[group("web", &[]), group("db", &["ingress tcp 5432 from group:web"])]).await;
    let mut random = Random(seed());
    let routes: Vec<(String, String)> = desk
        .admin
        .described
        .routes()
        .map(|(method, path)| (method.to_owned(), path.to_owned()))
        .filter(|(_, path)| !["/v1/watch", "/v1/registrations-watch"].contains(&path.as_str()))
        .collect();
    let requests = if full() { 40_000 } else { 3_000 };
    let mut statuses = std::collections::BTreeMap::<u16, usize>::new();
    for _ in 0..requests {
        let (method, path) = &routes[random.below(routes.len())];
        let escape =
            |text: String| text.replace(' ', "%20").replace(['"', '<', '>'], "%22").replace('ä', "%C3%A4").replace('/', "%2F");
        let mut path = path.replace("{id}", &escape(random.text())).replace("{number}", &escape(random.text()));
        if random.below(3) == 0 {
            let name = random
                .pick(&["limit", "after", "prefix", "wait", "timeout", "before", "from", "to", "traffic", "replace", "host", "x"])
                .to_owned();
            path += &format!("?{name}={}", escape(random.text()));
        }
        // A revoked or replaced administrator would end the test.
        if path.starts_with("/v1/tokens/root") || path.contains("wait=enforced") {
            continue;
        }
        let values = [
            ("if-match", random.pick(&["\"3\"", "*", "x", "\"99999999999999999999\""])),
            ("if-none-match", random.pick(&["*", "\"3\"", "W/\"3\""])),
            ("idempotency-key", random.pick(&["k", "k2", "", "ö"])),
            ("content-type", random.pick(&["application/json", "application/yaml", "x"])),
            ("groupcast-reason", random.pick(&["because", "", "ö"])),
        ];
        let headers: Vec<(&str, &str)> = values.into_iter().filter(|_| random.below(3) == 0).collect();
        let body = (random.below(4) > 0).then(|| random.body());
        let Some(answer) = desk.admin.send(method, &path, &headers, body).await else {
            // The client itself refuses to send some.
            continue;
        };
        desk.admin.described.check(method, &path, &answer);
        assert!(answer.status < 500 || answer.status == 503, "{method} {path}: {}", answer.text);
        *statuses.entry(answer.status).or_default() += 1;
    }
    eprintln!("{statuses:?}");
    assert!(statuses.len() >= 5 && statuses.values().sum::<usize>() > requests / 2, "{statuses:?}");
    assert_eq!(desk.admin.get("/v1/groups").await.status, 200, "it serves on");
}
