use super::*;

fn file(name: &str, text: &str) -> (String, Result<String, String>) {
    (name.to_owned(), Ok(text.to_owned()))
}

#[test]
fn what_editors_leave_is_not_meant() {
    for (name, meant) in [
        ("web.yaml", true),
        ("web.yml", true),
        ("web.json", true),
        ("web.yaml~", false),
        (".web.yaml", false),
        (".web.yaml.swp", false),
        ("#web.yaml#", false),
        ("#web.yaml", false),
        ("~web.yaml", false),
        ("web.yaml.tmp", false),
        ("web", false),
    ] {
        assert_eq!(is_meant(name), meant, "{name}");
    }
}

#[test]
fn a_file_that_was_never_good_keeps_everything_and_one_that_was_keeps_its_own() {
    let (source, mut good) = ("files".parse().unwrap(), Good::new());
    let seen = observe(&source, &[file("a.yaml", "id: files-a\n"), file("b.yaml", "id: files-b\n")], &mut good);
    assert_eq!((seen.groups.len(), seen.problems.count), (2, 0));
    let seen = observe(&source, &[file("a.yaml", "id: ["), file("b.yaml", "id: files-b2\n")], &mut good);
    assert_eq!((seen.groups.len(), seen.problems.count, seen.problems.nameless), (2, 1, false));
    let seen = observe(&source, &[file("new.yaml", "id: [")], &mut good);
    assert!(seen.groups.is_empty() && seen.problems.nameless);
    let seen = observe(&source, &[("x.yaml".into(), Err("denied".into()))], &mut good);
    assert!(seen.problems.nameless && seen.problems.named[0].contains("x.yaml: denied"));
}
