//! An installation whose groups come from sources only: who says that its bus is new, and what keeps a bus that lost its data from being
//! taken for one.

use std::time::Duration;

use groupcast_bus_config::lab::Up;
use groupcast_tests::control::{Plane, binary, workload};
use groupcast_tests::gateway::{Folder, Gateway, User, groupcast, token};
use groupcast_tests::world::eventually;

const LEASE: Duration = Duration::from_millis(600);
const ADVICE: &str = "groupcast init";

fn configured(folder: &Folder) -> String {
    let groups = folder.0.join("groups.d");
    std::fs::create_dir_all(&groups).expect("made");
    std::fs::write(groups.join("web.yaml"), "kind: group\nid: files-web\nrules: [egress tcp 443 to any]\n").expect("written");
    let path = folder.0.join("groupcast.toml");
    let text = format!("[[source]]\nid = 'files'\nkind = 'directory'\npath = '{}'\npoll_interval = '200ms'\n", groups.display());
    std::fs::write(&path, text).expect("written");
    path.display().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_alone_begin_when_an_operator_says_that_the_bus_is_new() {
    let folder = Folder::new("begin");
    let config = configured(&folder);
    let mut plane = Plane::start(0, LEASE).await;
    plane.add_controller_with(&["--config", &config]);
    let gateway = Gateway::start(&plane.url(), &[]).await;
    let admin = token(&plane.url(), "root", "admin", &[]);
    let user = User::new(&gateway, &admin).await;
    let environment = [("GROUPCAST_GATEWAY", gateway.url()), ("GROUPCAST_TOKEN", admin.clone())];
    let environment: Vec<(&str, &str)> = environment.iter().map(|(name, value)| (*name, value.as_str())).collect();

    // A token is no reason to lead. Whoever looks is told what to do, wherever he looks.
    plane.controllers[0]
        .wait_for("blank", |controller| controller.status().is_some_and(|status| status["advice"].is_string()))
        .await;
    let status = plane.controllers[0].status().expect("it answers");
    assert!(status["blank"] == true && status["advice"].as_str().is_some_and(|words| words.contains(ADVICE)), "{status}");
    plane.controllers[0].wait_for("told in its log", |controller| controller.log().contains(ADVICE)).await;
    let listed = user.get("/v1/sources").await;
    assert!(listed.status == 503 && listed.text.contains(ADVICE) && listed.text.contains("groupcast import"), "{listed:?}");
    let ran = groupcast(&["doctor"], &environment);
    assert!(ran.code == 1 && ran.stdout.contains(ADVICE), "{ran:?}");

    // Not everybody may say so.
    let editor = user.with_token(&token(&plane.url(), "eve", "editor", &[]));
    eventually("the token is known", || async { editor.get("/v1/whoami").await.status == 200 }).await;
    assert_eq!(editor.ask("POST", "/v1/init", &[], None).await.status, 403);
    let ran = groupcast(&["init"], &environment);
    assert!(ran.code == 0 && ran.stderr.contains("sources are read"), "{ran:?}");
    plane.ready().await;
    plane.leader().await;
    eventually("the source is read", || async { user.get("/v1/groups/files-web").await.status == 200 }).await;
    let ran = groupcast(&["init"], &environment);
    assert!(ran.code == 0 && ran.stderr.contains("there is nothing to do"), "{ran:?}");
    let ran = groupcast(&["doctor"], &environment);
    assert!(!ran.stdout.contains(ADVICE), "{ran:?}");

    // The bus loses its catalogue, and the controller what it knew: nobody leads, and no source fills it in place of an import.
    plane.register(vec![workload("h1", "web", 1, &[])]).await;
    plane.controllers[0].kill();
    let observer = plane.bus.observer("destroys").await;
    let catalog = async_nats::jetstream::new(observer.clone()).get_stream_no_info("CATALOG").await.expect("the stream");
    catalog.purge().await.expect("purged");
    plane.controllers.clear();
    plane.add_controller_with(&["--config", &config]);
    plane.controllers[0]
        .wait_for("blank", |controller| controller.status().is_some_and(|status| status["advice"].is_string()))
        .await;
    let ran = groupcast(&["init", "--on-bus", "--server", &plane.url()], &[]);
    assert!(ran.code == 3 && ran.stderr.contains("is registered, but CATALOG is empty"), "{ran:?}");
    assert!(ran.stderr.contains("groupcast import"), "{ran:?}");
    // Longer than a lease and many polls.
    tokio::time::sleep(LEASE * 4).await;
    let status = plane.controllers[0].status().expect("it answers");
    assert!(status["blank"] == true && status["publishing"] == false, "{status}");
    let groups = groupcast_control::log::Log::catalog(observer).all("gc.cat.group.*").await.expect("the bus answers");
    assert!(groups.is_empty(), "{groups:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_on_one_machine_knows_that_its_bus_is_new() {
    let folder = Folder::new("begin-up");
    let api = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    let mut up = Up::start(binary(), &folder.0, api).expect("groupcast up");
    let user = User::of(up.addresses.gateway.clone(), &up.token().expect("a token")).await;
    eventually("it leads", || async { user.get("/v1/sources").await.status == 200 }).await;
    // Its bus is lost and the rest is not: that is not new.
    up.kill();
    std::fs::remove_dir_all(folder.0.join("up/bus")).expect("removed");
    let again = Up::start(binary(), &folder.0, api).expect("groupcast up");
    let said = groupcast(&["init", "--on-bus", "--server", &again.addresses.bus, "--credentials", "/nonexistent"], &[]);
    assert_ne!(said.code, 0, "a bus with accounts asks who it is");
    let log = || again.log();
    eventually("it says what to do", || async { log().contains(ADVICE) }).await;
    again.end();
}
