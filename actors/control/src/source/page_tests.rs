use super::*;
use proptest::prelude::*;

/// A body that comes in pieces of so many bytes.
struct Pieces<'a>(&'a [u8], usize);

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.1.min(self.0.len()).min(buffer.len());
        buffer[..count].copy_from_slice(&self.0[..count]);
        self.0 = &self.0[count..];
        Ok(count)
    }
}

fn read_in(text: &str, piece: usize) -> Result<(Vec<Node>, Option<Node>), String> {
    let (mut nodes, mut numbers) = (Vec::new(), Vec::new());
    let beside = read(&mut Pieces(text.as_bytes(), piece), "resources", &["pagination"], &mut |index, bytes| {
        nodes.push(bytes.map_or(Ok(Node::Null), node)?);
        numbers.push(index);
        Ok(())
    })?;
    assert_eq!(numbers, (0..nodes.len()).collect::<Vec<_>>());
    Ok((nodes, beside.get("pagination").cloned()))
}

fn items(text: &str) -> Result<(usize, Option<Node>), String> {
    let whole = read_in(text, usize::MAX).map(|(nodes, beside)| (nodes.len(), beside));
    for piece in [1, 2, 3, 7] {
        assert_eq!(
            read_in(text, piece).map(|(nodes, beside)| (nodes.len(), beside)).ok(),
            whole.clone().ok(),
            "{text} by {piece}"
        );
    }
    whole
}

#[test]
fn items_come_one_by_one_wherever_the_list_stands() {
    assert_eq!(items(r#"{"resources":[{},{"a":[1]}],"x":{"y":1},"pagination":7}"#), Ok((2, Some(Node::Int(7)))));
    assert_eq!(items(r#"{"pagination":null,"resources":[]}"#), Ok((0, Some(Node::Null))));
    assert_eq!(
        items(r#" { "x" : {"resources":[1,2]} , "resources" : [ {"a":"]}\"\\"} , 1 , null,"s,]", [ [] ] ] } "#),
        Ok((5, None))
    );
    assert_eq!(items(r#"{"x":["resources",[1]],"y":"resources","resources":[true]}"#), Ok((1, None)));
}

#[test]
fn nothing_is_never_taken_for_no_items() {
    for text in [
        r#"{"resources":null}"#,
        r#"{"pagination":{}}"#,
        "{}",
        "[]",
        "null",
        "",
        r#"{"resources":[{}"#,
        r#"{"resources":[{}]"#,
        r#"{"resources":{}}"#,
        r#"{"resources":[]} x"#,
        r#"{"resources":[{}}"#,
        r#"{"resources":[{} {}]}"#,
        r#"{"resources":[{},]}"#,
        r#"{"resources":[,{}]}"#,
        r#"{"resources":[1 2]}"#,
        r#"{"resources":[1"a"]}"#,
        r#"{"resources":[{"a":}]}"#,
        r#"{"resources":["a]}"#,
        r#"{"resources":[nul]}"#,
        r#"{"resources":[],"resources":[{}]}"#,
        r#"{"resourc\u0065s":[{}]}"#,
        r#"{"resources" [{}]}"#,
        r#"["resources":[{}]]"#,
    ] {
        assert!(items(text).is_err(), "{text}");
    }
}

#[test]
fn a_page_is_bounded() {
    let page = |count: usize| format!(r#"{{"resources":[{}0]}}"#, "0,".repeat(count - 1));
    let count = |text: String| read_in(&text, usize::MAX).map(|(nodes, _)| nodes.len());
    assert_eq!(count(page(ITEMS_MAX)), Ok(ITEMS_MAX));
    assert!(count(page(ITEMS_MAX + 1)).is_err());
    let beside = |bytes: usize| format!(r#"{{"x":"{}","resources":[]}}"#, "x".repeat(bytes - 24));
    assert_eq!(beside(100).len(), 99);
    assert_eq!(count(beside(BESIDE_BYTES_MAX + 1)), Ok(0));
    assert!(count(beside(BESIDE_BYTES_MAX + 2)).is_err());
}

/// A page with one endless item took several times its size in memory; now its beginning is kept and the others are read.
#[test]
fn an_item_is_bounded_and_spoils_only_itself() {
    let page = |bytes: usize| format!(r#"{{"resources":[{{}},{{"a":"{}"}},[1],{}]}}"#, "x".repeat(bytes - 8), "1".repeat(9));
    for (bytes, fits) in [(ITEM_BYTES_MAX, true), (ITEM_BYTES_MAX + 1, false), (3 * ITEM_BYTES_MAX, false)] {
        let mut kept = Vec::new();
        let text = page(bytes);
        let each = &mut |index, item: Result<&[u8], TooLong<'_>>| {
            kept.push((index, item.map(<[u8]>::len).map_err(|too_long| too_long.begins.len())));
            Ok(())
        };
        read(&mut Pieces(text.as_bytes(), usize::MAX), "resources", &[], each).expect("a page");
        let second = if fits { Ok(bytes) } else { Err(ITEM_BYTES_MAX) };
        assert_eq!(kept, [(0, Ok(2)), (1, second), (2, Ok(3)), (3, Ok(9))]);
    }
}

fn value() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i32>().prop_map(Into::into),
        "[a-z\"\\\\\\[\\]{}:, \n\u{e4}]{0,12}".prop_map(Into::into),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::btree_map("[a-z\"\\\\:]{0,6}|resources", inner, 0..4).prop_map(|map| serde_json::json!(map)),
        ]
    })
}

proptest! {
    /// Whatever a page holds, its items are those that a reader of the whole would find.
    #[test]
    fn what_is_cut_out_is_what_the_list_holds(list in prop::collection::vec(value(), 0..6), beside in value(), other in value(), piece in 1..40usize, pretty: bool) {
        let page = serde_json::json!({"a": other, "pagination": beside, "resources": list, "z": 1});
        let text = if pretty { serde_json::to_string_pretty(&page).unwrap() } else { page.to_string() };
        let (nodes, found) = read_in(&text, piece).expect("a page");
        let whole = |value: &serde_json::Value| node(value.to_string().as_bytes()).unwrap();
        prop_assert_eq!(nodes, list.iter().map(whole).collect::<Vec<_>>());
        prop_assert_eq!(found, Some(whole(&beside)));
    }

    /// Cut off anywhere, it is no page.
    #[test]
    fn a_part_of_a_page_is_no_page(list in prop::collection::vec(value(), 0..4), at in 0.0..1.0f64) {
        let text = serde_json::json!({"pagination": 1, "resources": list}).to_string();
        let mut cut = (text.len() as f64 * at) as usize;
        while !text.is_char_boundary(cut) {
            cut -= 1;
        }
        prop_assert!(read_in(&text[..cut], usize::MAX).is_err());
    }
}
