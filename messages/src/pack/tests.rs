use super::*;

fn varint(value: u128) -> Vec<u8> {
    let mut out = Vec::new();
    put_varint(&mut out, value);
    out
}

fn read_varint(bytes: &[u8], bits: u32) -> Result<u128, DecodeError> {
    let mut rest = bytes;
    let value = take_varint(&mut rest, bits, "n")?;
    assert!(rest.is_empty());
    Ok(value)
}

const MALFORMED: DecodeError = DecodeError::Malformed { item: "n" };
const TRUNCATED: DecodeError = DecodeError::Truncated { item: "n" };

#[test]
fn varints_come_back_at_every_width() {
    for bits in [16, 32, 64, 128] {
        let max = u128::MAX >> (128 - bits);
        for shift in 0..bits {
            for value in [max >> shift, (max >> shift) - 1, 1 << shift] {
                assert_eq!(read_varint(&varint(value), bits), Ok(value));
            }
        }
        assert_eq!(read_varint(&varint(0), bits), Ok(0));
    }
}

#[test]
fn a_varint_has_one_encoding_and_a_width() {
    for (bytes, bits, why) in [
        (&[0x80, 0x00][..], 32, "a needless byte"),
        (&[0xff, 0x80, 0x00], 32, "a needless byte"),
        (&[0xff, 0xff, 0x04], 16, "a bit beyond the width"),
        (&[0xff, 0xff, 0xff, 0xff, 0x10], 32, "a bit beyond the width"),
        (&[0x80, 0x80, 0x80, 0x80, 0x80, 0x01], 32, "a byte beyond the width"),
        (&[0xff; 40], 128, "no end"),
    ] {
        assert_eq!(read_varint(bytes, bits), Err(MALFORMED), "{why}");
    }
    assert_eq!(read_varint(&[], 32), Err(TRUNCATED));
    assert_eq!(read_varint(&[0x80], 32), Err(TRUNCATED));
}

#[test]
fn gaps_reach_the_ends_and_never_wrap() {
    let mut out = Vec::new();
    let values = [0, 1, 200, u32::MAX - 1, u32::MAX];
    let mut previous = None;
    for value in values {
        put_gap(&mut out, previous.replace(value), value);
    }
    let mut rest = out.as_slice();
    let mut previous = None;
    for value in values {
        assert_eq!(take_gap(&mut rest, previous.replace(value), "n"), Ok(value));
    }
    assert_eq!(take_gap(&mut [0].as_slice(), Some(u32::MAX), "n"), Err(MALFORMED), "nothing is behind the last address");
    assert_eq!(take_gap(&mut [0].as_slice(), Some(u128::MAX), "n"), Err(MALFORMED));
    assert_eq!(take_gap(&mut varint(1).as_slice(), Some(u32::MAX - 1), "n"), Err(MALFORMED));
    assert_eq!(take_gap(&mut varint(u128::MAX).as_slice(), Some(0u128), "n"), Err(MALFORMED));
}

fn spans(pairs: &[(u16, u16)]) -> SpanSet<u16> {
    pairs.iter().map(|(first, last)| Span::new(*first, *last).unwrap()).collect()
}

#[test]
fn ranges_come_back() {
    for set in [
        spans(&[]),
        spans(&[(0, u16::MAX)]),
        spans(&[(0, 0), (2, 2), (u16::MAX, u16::MAX)]),
        spans(&[(5, 9), (u16::MAX - 1, u16::MAX)]),
    ] {
        let mut out = Vec::new();
        put_spans(&mut out, set.spans());
        assert_eq!(take_spans(&out, 3, "n"), Ok(set));
    }
    let all = [Span::new(0, u128::MAX).unwrap()].into_iter().collect::<SpanSet<u128>>();
    let mut out = Vec::new();
    put_spans(&mut out, all.spans());
    assert_eq!(take_spans(&out, 1, "n"), Ok(all));
}

#[test]
fn ranges_outside_the_width_are_refused() {
    let packed = |numbers: &[u128]| numbers.iter().flat_map(|n| varint(*n)).collect::<Vec<u8>>();
    let take = |numbers: &[u128]| take_spans::<u16>(&packed(numbers), 9, "n");
    assert_eq!(take(&[65_535, 1]), Err(MALFORMED), "it ends beyond the last port");
    assert_eq!(take(&[0, 65_535, 0, 0]), Err(MALFORMED), "nothing is behind the last port");
    assert_eq!(take(&[0, 65_534, 0, 0]), Err(MALFORMED), "nor next but one to the last but one");
    assert_eq!(take(&[0, 0, 65_534, 0]), Err(MALFORMED), "a gap that leaves the ports");
    assert_eq!(take(&[0]), Err(TRUNCATED));
}

#[test]
fn a_prefix_has_one_encoding() {
    let fixed = |bytes: &[u8], form| {
        let mut members = Vec::new();
        take_fixed(bytes, form, &mut members, "n").map(|()| members)
    };
    assert_eq!(fixed(&[10, 0, 0, 0, 8], Form::PrefixesV4), Ok(vec![Prefix::v4(0x0a00_0000, 8).unwrap()]));
    for (bytes, why) in [
        (&[10, 0, 0, 1, 8][..], "host bits"),
        (&[10, 0, 0, 1, 32], "a single address belongs elsewhere"),
        (&[10, 0, 0, 0, 33], "no length of IPv4"),
        (&[10, 0, 0, 0], "cut"),
        (&[10, 0, 0, 0, 8, 10], "cut"),
    ] {
        assert_eq!(fixed(bytes, Form::PrefixesV4), Err(MALFORMED), "{why}");
    }
    let mut address = [0; 17];
    for (len, refused) in [(0, false), (127, false), (128, true), (129, true), (255, true)] {
        address[16] = len;
        assert_eq!(fixed(&address, Form::PrefixesV6).is_err(), refused, "{len}");
    }
    assert_eq!(fixed(&[10, 0, 0], Form::V4), Err(MALFORMED));
    assert_eq!(fixed(&[0; 15], Form::V6), Err(MALFORMED));
}

#[test]
fn a_topic_stands_once_and_has_one_revision() {
    let (one, two) = (TopicHash(1), TopicHash(2));
    let (topics, revisions) = put_revisions(&[(one, 0), (two, u64::MAX)]);
    assert_eq!(take_revisions(&topics, &revisions, 2, "n"), Ok(vec![(one, 0), (two, u64::MAX)]));
    assert_eq!(take_revisions(&topics, &revisions[..1], 2, "n"), Err(DecodeError::Contradiction { item: "n" }));
    assert_eq!(take_revisions(&topics[..8], &revisions, 2, "n"), Err(DecodeError::Contradiction { item: "n" }));
    assert_eq!(take_revisions(&topics[..9], &revisions, 2, "n"), Err(MALFORMED));
    assert_eq!(take_revisions(&topics, &revisions, 1, "n"), Err(DecodeError::TooMany { item: "n", found: 2, max: 1 }));
    let (topics, revisions) = put_revisions(&[(one, 1), (one, 2)]);
    assert_eq!(take_revisions(&topics, &revisions, 2, "n"), Err(DecodeError::Duplicate { item: "n" }));
}
