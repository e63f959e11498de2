use proptest::prelude::*;

use super::*;
use crate::expression::{Field, Statement};

fn rule(number: u8) -> Rule {
    vec![Statement::is(Field::Protocol, number)]
}

proptest! {
    #[test]
    fn edits_of_rules_lead_from_any_list_to_any_other(have in prop::collection::vec(0..6u8, 0..12), want in prop::collection::vec(0..6u8, 0..12)) {
        let chain = Name::from("c");
        let list = |numbers: &[u8]| numbers.iter().map(|n| rule(*n)).collect::<Vec<Rule>>();
        let mut table = Table::default();
        table.chains.insert(chain.clone(), Chain { base: None, rules: list(&have) });
        let mut ops = Vec::new();
        rules::edits(&chain, &list(&have), &list(&want), &mut ops);
        table.apply(&Transaction { anew: false, ops }).unwrap();
        prop_assert_eq!(&table.chains[&chain].rules, &list(&want));
    }

    #[test]
    fn of_distinct_rules_none_is_touched_that_need_not_be(have in prop::collection::btree_set(0..40u8, 0..20), more in 0..40u8) {
        let chain = Name::from("c");
        let mut want = have.clone();
        let expected = usize::from(want.insert(more));
        let list = |numbers: &std::collections::BTreeSet<u8>| numbers.iter().map(|n| rule(*n)).collect::<Vec<Rule>>();
        for (from, to) in [(&have, &want), (&want, &have)] {
            let mut ops = Vec::new();
            rules::edits(&chain, &list(from), &list(to), &mut ops);
            prop_assert_eq!(ops.len(), expected);
        }
    }
}

fn any_op() -> impl Strategy<Value = Op> {
    let name = |number: u8| Name::from(format!("n{number}"));
    let elements = |four: bool, number: u32| match four {
        true => Elements::V4([number].into_iter().collect()),
        false => Elements::V6([u128::from(number)].into()),
    };
    prop_oneof![
        1 => (0..3u8).prop_map(move |n| Op::AddSet { set: name(n), kind: SetKind::V4 }),
        1 => (0..3u8).prop_map(move |n| Op::DeleteSet { set: name(n) }),
        6 => (0..3u8, any::<bool>(), 0..4u32).prop_map(move |(n, four, e)| Op::AddElements { set: name(n), kind: SetKind::V4, elements: elements(four || e > 0, e) }),
        3 => (0..3u8, 0..4u32).prop_map(move |(n, e)| Op::DeleteElements { set: name(n), kind: SetKind::V4, elements: elements(true, e) }),
        3 => (0..3u8, 0..2usize).prop_map(move |(n, at)| Op::AddRule { chain: name(n), at, rule: rule(n) }),
        1 => (0..3u8).prop_map(move |n| Op::AddChain { chain: name(n), base: None }),
        1 => (0..3u8, 0..2usize).prop_map(move |(n, at)| Op::DeleteRule { chain: name(n), at }),
        1 => (0..3u8).prop_map(move |n| Op::FlushChain { chain: name(n) }),
        1 => (0..3u8).prop_map(move |n| Op::DeleteChain { chain: name(n) }),
    ]
}

proptest! {
    /// What the kernel does, and what it leaves alone when it does not.
    #[test]
    fn a_commit_is_all_or_nothing(transactions in prop::collection::vec(prop::collection::vec(any_op(), 1..5), 1..20)) {
        let mut table = Table::default();
        for ops in transactions {
            let transaction = Transaction { anew: false, ops };
            let mut expected = table.clone();
            let outcome = expected.apply(&transaction).map(|()| expected);
            let before = table.clone();
            let found = table.commit(&transaction);
            prop_assert_eq!(found.is_ok(), outcome.is_ok());
            prop_assert_eq!(&table, &outcome.unwrap_or(before));
        }
    }
}

#[test]
fn what_is_not_there_is_named() {
    let mut table = Table::default();
    let name = Name::from("x");
    let rows = [
        Op::DeleteSet { set: name.clone() },
        Op::DeleteChain { chain: name.clone() },
        Op::FlushChain { chain: name.clone() },
        Op::AddRule { chain: name.clone(), at: 0, rule: rule(1) },
        Op::DeleteRule { chain: name.clone(), at: 0 },
        Op::AddElements { set: name.clone(), kind: SetKind::V4, elements: Elements::V4([1].into_iter().collect()) },
        Op::DeleteElements { set: name.clone(), kind: SetKind::V4, elements: Elements::V4([1].into_iter().collect()) },
    ];
    for op in rows {
        let error = table.apply(&Transaction { anew: false, ops: vec![op] }).unwrap_err();
        assert!(error.to_string().contains("\"x\""), "{error}");
    }
}
