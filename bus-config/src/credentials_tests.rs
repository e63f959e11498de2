use std::os::unix::fs::PermissionsExt;

use super::*;

fn name(text: &str) -> HostId {
    HostId::new(text).unwrap()
}

fn at(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)
}

/// A folder of this test that goes away with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new(label: &str) -> Self {
        let path = std::env::temp_dir().join(format!("groupcast-{label}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn an_authority_is_the_same_after_saving_and_loading() {
    let scratch = Scratch::new("authority");
    let path = scratch.0.join("authority.json");
    let mut authority = Authority::new();
    let credential = authority.mint(Role::Host, &name("h1"), None, at(1_000)).unwrap();
    authority.revoke_key(&credential.public_key, at(2_000)).unwrap();
    authority.mint(Role::Gateway, &name("g1"), Some(Duration::from_secs(60)), at(3_000)).unwrap();
    authority.save(&path).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

    let loaded = Authority::load(&path).unwrap();
    assert_eq!(loaded.issued, authority.issued);
    assert_eq!(loaded.revoked, authority.revoked);
    assert_eq!(loaded.operator.public_key(), authority.operator.public_key());
    for role in Role::ALL {
        assert_eq!(loaded.signer(role).public_key(), authority.signer(role).public_key());
    }
}

#[test]
fn what_is_no_authority_is_refused_by_name() {
    let scratch = Scratch::new("no-authority");
    let path = scratch.0.join("authority.json");
    Authority::new().save(&path).unwrap();
    let good: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let broken = |pointer: &str, value: serde_json::Value| {
        let mut text = good.clone();
        *text.pointer_mut(pointer).unwrap() = value;
        Authority::parse(&text.to_string()).unwrap_err()
    };
    assert!(broken("/format_version", "2".into()).contains("format_version"));
    assert!(broken("/operator", "SOAnonsense".into()).contains("operator"));
    assert!(broken("/system", good["operator"].clone()).contains("another kind"));
    assert!(broken("/accounts", serde_json::json!({})).contains("CTL"));
    assert!(broken("/signers/host", "".into()).contains("host"));
    assert!(Authority::parse("").is_err());
    assert!(Authority::load(&scratch.0.join("gone")).unwrap_err().to_string().contains("gone"));
}

#[test]
fn rotation_keeps_the_new_credential_and_voids_the_old() {
    let mut authority = Authority::new();
    let old = authority.mint(Role::Host, &name("h1"), None, at(100)).unwrap();
    let other = authority.mint(Role::Host, &name("h2"), None, at(100)).unwrap();
    let same_name_other_role = authority.mint(Role::Gateway, &name("h1"), None, at(100)).unwrap();
    let new = authority.mint(Role::Host, &name("h1"), None, at(200)).unwrap();
    assert_eq!(authority.revoke_others(&new, at(300)).unwrap(), 1);
    let valid: Vec<&str> = authority.issued().iter().map(|issued| issued.public_key.as_str()).collect();
    assert_eq!(valid, [&other.public_key, &same_name_other_role.public_key, &new.public_key]);
    assert_eq!(authority.revoked, BTreeMap::from([(old.public_key.clone(), FOR_EVER)]));
    assert_eq!(authority.revoke(Role::Host, &name("h1"), at(400)).unwrap(), 1);
    assert!(!authority.revoke_key(&old.public_key, at(500)).unwrap());
}

#[test]
fn a_clock_that_went_back_revokes_all_the_same() {
    let mut authority = Authority::new();
    let credential = authority.mint(Role::Host, &name("h1"), None, at(1_000)).unwrap();
    authority.revoke(Role::Host, &name("h1"), at(10)).unwrap();
    assert_eq!(authority.revoked[&credential.public_key], FOR_EVER);
}

#[test]
fn the_expired_are_forgotten_at_the_second() {
    let mut authority = Authority::new();
    authority.mint(Role::Host, &name("h1"), Some(Duration::from_secs(60)), at(100)).unwrap();
    authority.forget_expired(at(159)).unwrap();
    assert_eq!(authority.issued().len(), 1);
    authority.forget_expired(at(160)).unwrap();
    assert!(authority.issued().is_empty());
}

#[test]
fn nothing_printed_for_debugging_is_secret() {
    let mut authority = Authority::new();
    let credential = authority.mint(Role::Host, &name("h1"), None, at(1_000)).unwrap();
    let text = format!("{authority:?} {credential:?}");
    assert!(!text.contains(&credential.seed) && !text.contains(&credential.token), "{text}");
    assert!(credential.file_text().contains(&credential.seed));
}

#[test]
fn a_hosts_credential_always_expires_and_within_bounds() {
    let mut authority = Authority::new();
    let mut life = |lifetime| authority.mint(Role::Host, &name("h1"), lifetime, at(100)).map(|_| ());
    assert!(life(None).is_ok() && life(Some(Duration::from_secs(1))).is_ok() && life(Some(HOST_LIFE_MAX)).is_ok());
    for wrong in [Duration::ZERO, Duration::from_millis(999), HOST_LIFE_MAX + Duration::from_secs(1), Duration::MAX] {
        assert!(matches!(life(Some(wrong)), Err(Error::Life(_))), "{wrong:?}");
    }
    let expires: Vec<Option<u64>> = authority.issued().iter().map(|issued| issued.expires_at).collect();
    let after = |life: Duration| Some(100 + life.as_secs());
    assert_eq!(expires, [after(HOST_LIFE), Some(101), after(HOST_LIFE_MAX)]);
    authority.mint(Role::Gateway, &name("g1"), None, at(100)).unwrap();
    assert_eq!(authority.issued()[3].expires_at, None, "the servers' own side is renewed by whoever holds the authority");
}

#[test]
fn what_the_servers_were_not_told_is_remembered() {
    let scratch = Scratch::new("unpublished");
    let path = scratch.0.join("authority.json");
    let mut authority = Authority::new();
    authority.mint(Role::Host, &name("h1"), None, at(100)).unwrap();
    assert!(!authority.is_unpublished());
    authority.revoke(Role::Host, &name("h1"), at(200)).unwrap();
    authority.save(&path).unwrap();
    let mut again = Authority::load(&path).unwrap();
    assert!(again.is_unpublished(), "also after a restart");
    again.published();
    again.save(&path).unwrap();
    assert!(!Authority::load(&path).unwrap().is_unpublished());
}

/// Each read it, added one and wrote it: most were lost.
#[test]
fn whoever_adds_to_an_authority_keeps_what_others_add() {
    const WRITERS: usize = 16;
    let scratch = Scratch::new("locked-authority");
    let path = scratch.0.join("authority.json");
    assert!(Authority::lock(&path).is_err() && std::fs::read_dir(&scratch.0).unwrap().next().is_none(), "nothing is left behind");
    Authority::new().save(&path).unwrap();
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let path = &path;
            scope.spawn(move || {
                let mut authority = Authority::lock(path).unwrap();
                authority.mint(Role::Controller, &name(&format!("c{writer}")), None, at(1_000)).unwrap();
                authority.save().unwrap();
            });
        }
    });
    let held = Authority::lock(&path).unwrap();
    assert_eq!(held.issued().len(), WRITERS);
    // Whoever cannot have it says so, after a time; when it is let go, it can be had.
    let words = Authority::lock_within(&path, Duration::from_millis(50)).map(drop).unwrap_err().to_string();
    assert!(words.contains("another command") && words.contains("authority.json"), "{words}");
    assert_eq!(held.release().issued().len(), WRITERS);
    assert!(Authority::lock_within(&path, Duration::ZERO).is_ok());
}
