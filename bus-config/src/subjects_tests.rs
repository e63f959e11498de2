use super::*;

fn host(text: &str) -> HostId {
    HostId::new(text).unwrap()
}

#[test]
fn a_topic_is_written_and_read_under_its_token() {
    for token in ["scope.global", "scope.space.s1", "scope.app.a-1", "host.h1", "rules.web", "members.db_2"] {
        let topic = Topic::parse(token).unwrap();
        assert_eq!(write(&topic), format!("gc.w.{token}"));
        assert_eq!(read(&topic), format!("gc.t.{token}"));
        assert_eq!(parse_read(&read(&topic)), Some(topic.clone()));
        assert_eq!(parse_write(&write(&topic)), Some(topic.clone()));
        assert_eq!(parse_read(&write(&topic)), None);
        assert_eq!(parse_write(&read(&topic)), None);
    }
}

#[test]
fn what_is_no_topic_does_not_parse_as_one() {
    for bad in
        [LEAD_READ, LEAD_WRITE, READ_ALL, PROBE_WRITE, "", "gc.t.", "gc.t", "gc.t.host.*", "gc.t.rules.a.b", "gc.x.rules.a"]
    {
        assert_eq!(parse_read(bad), None, "{bad}");
    }
}

#[test]
fn the_host_of_a_request_is_the_last_token_of_a_known_service() {
    let h = host("h-1");
    for subject in services(&h).into_iter().chain([ctl(&h)]) {
        assert_eq!(host_of(&subject), Some(h.clone()), "{subject}");
    }
    for bad in ["gc.snap", "gc.snap.", "gc.snap.a.b", "gc.snap.*", "gc.other.h-1", "x.gc.snap.h-1", "h-1", "", "gc.t.host.h-1"] {
        assert_eq!(host_of(bad), None, "{bad}");
    }
}

#[test]
fn service_wildcards_match_the_services() {
    let h = host("h1");
    for (all, one) in SERVICES_ALL.iter().zip(services(&h)) {
        assert_eq!(all.replace('*', "h1"), one);
    }
    assert_eq!(CTL_ALL.replace('*', "h1"), ctl(&h));
}

#[test]
fn an_answer_goes_to_the_host_that_asked_whatever_its_token_says() {
    let h = host("h1");
    assert_eq!(answer_to(&snap(&h), "t1").as_deref(), Some("gc.answer.h1.t1"));
    assert_eq!(answer_token("gc.answer.h1.t1"), Some("t1"));
    assert_eq!(answers(&h), "gc.answer.h1.*");
    assert!(answer(&h, &"t".repeat(ANSWER_TOKEN_LEN_MAX)).is_some());
    for bad in ["", "a.b", "*", ">", "a b", "a\r\nPUB x 0", &"t".repeat(ANSWER_TOKEN_LEN_MAX + 1)] {
        assert_eq!(answer_to(&snap(&h), bad), None, "{bad}");
    }
    assert_eq!(answer_to("gc.w.leader", "t1"), None);
    for bad in ["gc.answer.h1", "gc.answer.h1.", "gc.answer..t", "gc.answer.h1.a.b", "gc.snap.h1"] {
        assert_eq!(answer_token(bad), None, "{bad}");
    }
}

#[test]
fn catalogue_subjects_parse_back() {
    for kind in CatalogKind::ALL {
        let subject = catalog(kind, "some-id").unwrap();
        assert_eq!(parse_catalog(&subject), Some((kind, "some-id")));
        assert_eq!(catalog_kind_all(kind).replace('*', "some-id"), subject);
    }
    assert_eq!(catalog(CatalogKind::Term, "leader").as_deref(), Ok(CATALOG_TERM));
    assert!(catalog(CatalogKind::Group, "a.b").unwrap_err().to_string().contains("group id"));
    for bad in ["gc.cat.group", "gc.cat.group.", "gc.cat.nothing.x", "gc.cat.group.a.b", "gc.reg.h.x", ""] {
        assert_eq!(parse_catalog(bad), None, "{bad}");
    }
}

#[test]
fn registry_subjects_parse_back() {
    let network = NetworkId::new("n1").unwrap();
    let (workload, former) = (WorkloadId::new("w1").unwrap(), WorkloadId::new("w1").unwrap());
    let v4 = RegistryKey::Address(network.clone(), "10.1.2.3".parse().unwrap());
    let v6 = RegistryKey::Address(network.clone(), "2001:db8::1".parse().unwrap());
    let rows = [
        (RegistryKey::Workload(workload), "gc.reg.w.w1"),
        (RegistryKey::FormerWorkload(network.clone(), former), "gc.reg.w.n1.w1"),
        (RegistryKey::Ranges(network.clone()), "gc.reg.p.n1"),
        (RegistryKey::RangesSeen(network.clone(), host("h1")), "gc.reg.f.n1.h1"),
        (v4, "gc.reg.a.n1.0a010203"),
        (v6, "gc.reg.a.n1.20010db8000000000000000000000001"),
        (RegistryKey::Host(host("h1")), "gc.reg.h.h1"),
        (RegistryKey::Refusal(host("h1")), "gc.reg.r.h1"),
        (RegistryKey::Guard(TemplateId::new("t1").unwrap()), "gc.reg.g.t1"),
        (RegistryKey::Fence, REGISTRY_FENCE),
        (RegistryKey::Fenced, REGISTRY_FENCED),
    ];
    for (key, subject) in rows {
        assert_eq!(key.subject(), subject);
        assert_eq!(parse_registry(subject), Some(key));
    }
    assert_eq!(registry_address(&network, "::ffff:10.1.2.3".parse().unwrap()), "gc.reg.a.n1.0a010203");
    for bad in [
        "gc.reg.a.n1.0A010203",
        "gc.reg.a.n1.+a010203",
        "gc.reg.a.n1.0a0102",
        "gc.reg.a.n1.00000000000000000000ffff0a010203",
        "gc.reg.a.n1",
        "gc.reg.h.a.b",
        "gc.reg.w.n1.w1.x",
        "gc.reg.w.",
        "gc.reg.p.n1.x",
        "gc.reg.f.n1",
        "gc.reg.x.y",
        "gc.cat.group.x",
        "",
    ] {
        assert_eq!(parse_registry(bad), None, "{bad}");
    }
}

#[test]
fn a_republished_message_has_the_same_tail_on_both_sides() {
    assert!(is_republished("gc.w.rules.web", "gc.t.rules.web"));
    for (written, read) in [
        ("gc.w.rules.web", "gc.t.rules.db"),
        ("gc.t.rules.web", "gc.t.rules.web"),
        ("gc.w.rules.web", "gc.w.rules.web"),
        ("", ""),
    ] {
        assert!(!is_republished(written, read), "{written} {read}");
    }
}

#[test]
fn what_was_imported_is_found_under_the_documents_own_name() {
    assert_eq!(audited("gc.cat.group.web").as_deref(), Some("gc.audit.cat.group.web"));
    assert_eq!(parse_audited("gc.audit.cat.group.web").as_deref(), Some("gc.cat.group.web"));
    for bad in ["gc.reg.h.h1", "gc.cat.group", "gc.cat.nonsense.web", "gc.cat.group.*", ""] {
        assert_eq!(audited(bad), None, "{bad}");
        assert_eq!(parse_audited(&format!("gc.audit.{bad}")), None, "{bad}");
    }
    let filters = |kind: Option<CatalogKind>, id: Option<&str>| catalog_filters(kind, id).unwrap();
    assert_eq!(filters(None, None), ["gc.cat.>", "gc.audit.cat.>"]);
    assert_eq!(filters(Some(CatalogKind::Group), None), ["gc.cat.group.*", "gc.audit.cat.group.*"]);
    assert_eq!(filters(Some(CatalogKind::Group), Some("web")), ["gc.cat.group.web", "gc.audit.cat.group.web"]);
    assert_eq!(filters(None, Some("web")), ["gc.cat.*.web", "gc.audit.cat.*.web"]);
    assert!(catalog_filters(None, Some("*")).is_err() && catalog_filters(None, Some("a.b")).is_err());
}
