//! A host registers its workloads with the controllers, over the bus: what its template allows is claimed, and becomes policy.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use groupcast_bus_config::accounts::Role;
use groupcast_bus_config::subjects;
use groupcast_control::change::{Change, Expected, Write};
use groupcast_control::document::Document;
use groupcast_messages::{Register, RegisterAnswer, RegisterWorkload};
use groupcast_policy::doc::Phase;
use groupcast_policy::ids::HostId;
use groupcast_policy::model::Template;
use groupcast_policy::net::Prefix;
use groupcast_policy::topic::Topic;
use groupcast_tests::control::{Plane, address, group};
use groupcast_tests::world::{DEADLINE, eventually};
use groupcast_topics::reader;

const LEASE: Duration = Duration::from_millis(600);

/// Asks as a host does, and waits for the answer.
async fn register(plane: &Plane, host: &HostId, template: &str, number: u32) -> RegisterAnswer {
    let (client, _events) = plane.bus.connect(0, Role::Host, host.as_str()).await;
    let mut answers = client.subscribe(subjects::answers(host)).await.expect("subscribed");
    client.flush().await.expect("the server answers");
    let asked = RegisterWorkload {
        workload: format!("w-{host}").parse().unwrap(),
        network: "net".parse().unwrap(),
        addresses: BTreeSet::from([address(number)]),
        labels: BTreeMap::new(),
        space: Some("shop".parse().unwrap()),
        app: None,
        phase: Phase::Running,
        incarnation: None,
    };
    let request = Register { boot: 1, template: Some(template.to_owned()), workloads: vec![asked] };
    let mut headers = async_nats::HeaderMap::new();
    headers.insert(subjects::ANSWER_TOKEN, "t1");
    client.publish_with_headers(subjects::register(host), headers, request.encode().into()).await.expect("sent");
    let answer = tokio::time::timeout(DEADLINE, answers.next()).await.expect("in time").expect("subscribed");
    RegisterAnswer::decode(&answer.payload).expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_template_allows_is_claimed_and_becomes_policy() {
    let mut plane = Plane::start(2, LEASE).await;
    plane.put_groups(vec![group("web", &["web"], &[1])]).await;
    plane.ready().await;
    plane.leader().await;
    let (h1, h2): (HostId, HostId) = ("h1".parse().unwrap(), "h2".parse().unwrap());
    groupcast_tests::enrolled::grant(&plane, &["h1", "h2"]).await;
    let refused = register(&plane, &h1, "shop", 5).await;
    assert!(
        matches!(&refused, RegisterAnswer::Refused { retryable: true, reason } if reason.contains("create it")),
        "{refused:?}"
    );
    let mut template = Template::new("shop".parse().unwrap(), "net".parse().unwrap());
    template.identities.extend([h1.clone(), h2.clone()]);
    template.prefixes.insert(Prefix::v4(0x0a00_0000, 24).unwrap());
    template.spaces.insert("shop".parse().unwrap());
    let writes = vec![Write::put(Document::Template(Arc::new(template)), Expected::Absent)];
    let change = Change { author: "test".into(), reason: String::new(), key: None, writes };
    plane.catalog.write(&change, None).await.expect("written");
    let answer = register(&plane, &h1, "shop", 5).await;
    assert!(matches!(&answer, RegisterAnswer::Registered { incarnations, .. } if incarnations[0].1 == 1), "{answer:?}");
    // The address is taken; one outside of what the template allows is nobody's.
    let taken = register(&plane, &h2, "shop", 5).await;
    assert!(matches!(&taken, RegisterAnswer::Refused { retryable: true, .. }), "{taken:?}");
    let outside = register(&plane, &h2, "shop", 0x0001_0000).await;
    assert!(matches!(&outside, RegisterAnswer::Refused { retryable: false, .. }), "{outside:?}");
    let host = plane.host("h1", reader::Settings::default(), Box::new(|_, _| true)).await;
    eventually("the host knows its workload", || async {
        let documents = host.documents().await;
        documents.contains_key(&Topic::Host(h1.clone())) && documents.keys().any(|topic| topic.to_string().contains("shop"))
    })
    .await;
}
