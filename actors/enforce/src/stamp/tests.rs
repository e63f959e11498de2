use groupcast_policy::doc::RuleKey;
use groupcast_policy::ids::GroupId;
use groupcast_policy::net::Family;
use groupcast_policy::rule::{Action, Direction};

use super::*;
use crate::names::View;
use crate::settings::{Mode, STAMPS_PROVIDED};
use crate::table::{Chain, Data, SetKind};

/// Every row: what is done, and whether flows that were accepted may have to stop.
#[test]
fn only_growth_of_allows_keeps_the_stamp() {
    let id = GroupId::new("web").unwrap();
    let view = View::Connection;
    let chain = |action| names::group(view, action, Direction::Egress, &id);
    let profile = names::profile(9, Direction::Egress, false);
    let jump = |action| vec![Statement::jump(&chain(action))];
    let mut table = Table::default();
    table.chains.insert(profile.clone(), Chain { base: None, rules: vec![jump(Action::Deny), jump(Action::Allow)] });
    let add_rule = |chain: Name, rule| Op::AddRule { chain, at: 0, rule };
    let delete_rule = |chain: Name, at| Op::DeleteRule { chain, at };
    let one = Elements::V4([1].into_iter().collect());
    let add = |set: Name| Op::AddElements { set, kind: SetKind::V4, elements: one.clone() };
    let delete = |set: Name| Op::DeleteElements { set, kind: SetKind::V4, elements: one.clone() };
    let members = names::members(&id, Family::V4);
    let dispatch = names::dispatch(Direction::Egress, false, names::Keyed::Interface);
    let refusal = names::refusal(view, Direction::Egress, &id, RuleKey(1));
    let (allows, denies) = (Uses { allows: true, denies: false }, Uses { allows: false, denies: true });
    let none = Uses::default();
    let rows = [
        ("a rule allows more", vec![add_rule(chain(Action::Allow), Rule::new())], none, false),
        ("a rule allows less", vec![delete_rule(chain(Action::Allow), 0)], none, true),
        ("a rule denies more", vec![add_rule(chain(Action::Deny), Rule::new())], none, true),
        ("a rule denies less", vec![delete_rule(chain(Action::Deny), 0)], none, false),
        ("a member joins whom an allow names", vec![add(members.clone())], allows, false),
        ("a member joins whom a deny names", vec![add(members.clone())], denies, true),
        ("a member leaves whom an allow names", vec![delete(members.clone())], allows, true),
        ("a member leaves whom only a deny names", vec![delete(members.clone())], denies, false),
        ("a binding allows", vec![add_rule(profile.clone(), jump(Action::Allow))], none, false),
        ("a binding denies", vec![add_rule(profile.clone(), jump(Action::Deny))], none, true),
        ("an allowing binding goes", vec![delete_rule(profile.clone(), 1)], none, true),
        ("a denying binding goes", vec![delete_rule(profile.clone(), 0)], none, false),
        ("both go, one after the other", vec![delete_rule(profile.clone(), 0), delete_rule(profile.clone(), 0)], none, true),
        ("a workload comes", vec![add(dispatch.clone())], none, true),
        ("a workload goes", vec![delete(dispatch)], none, true),
        ("a workload's address comes", vec![add(names::source4())], none, true),
        ("audit begins", vec![add(names::audited())], none, false),
        ("audit ends", vec![delete(names::audited())], none, true),
        ("a claim comes", vec![add(names::claims())], none, true),
        ("a log line", vec![add_rule(refusal, Rule::new())], none, false),
        ("the frame", vec![add_rule(names::sided("j", Direction::Egress), Rule::new())], none, true),
        ("nothing", vec![], none, false),
    ];
    for (what, ops, uses, bump) in rows {
        assert_eq!(needs_bump(&table, &ops, |_| uses), bump, "{what}");
    }
}

/// A table with nothing but the chains that know the stamp.
fn carrying(settings: &Settings, stamp: Stamp) -> Table {
    let chains = stamp_chains(settings, stamp).into_iter();
    Table { chains: chains.map(|(name, rules)| (name, Chain { base: None, rules })).collect(), ..Table::default() }
}

#[test]
fn the_rules_of_one_stamp_are_as_many_as_is_said() {
    let last = Stamp::new(STAMPS_PROVIDED * 2 - 1).unwrap();
    for mode in [Mode::Enforce, Mode::Audit, Mode::Bypass, Mode::Lockdown] {
        let settings = Settings { mode, ..Settings::default() };
        let counts = stamp_chains(&settings, last).into_iter().map(|(name, rules)| (name, rules.len()));
        assert_eq!(counts.collect::<Vec<_>>(), stamp_rule_counts(&settings));
    }
    assert_eq!(last.provision().count(), 1);
    assert_eq!(Stamp::FIRST.provision().count() as u32, STAMPS_PROVIDED - 1);
    assert_eq!(Stamp::MAX.provision().collect::<Vec<_>>(), [Stamp::MAX]);
}

/// One step deletes the rules of the stamp that was; at the end of what is provided, and for whatever is further away, all are
/// written anew. Either way the table is the one that the new stamp alone leads to.
#[test]
fn a_new_stamp_replaces_the_old_one_everywhere() {
    let settings = Settings::default();
    assert!(ops(&Table::default(), &settings, Stamp::FIRST).is_empty() && !has_stamp(&settings, &Table::default()));
    let (first, last) = (STAMPS_PROVIDED, STAMPS_PROVIDED * 2 - 1);
    let max = Stamp::MAX.number();
    let rows = [
        (first, first + 1, true),
        (first, first + 3, true),
        (last - 1, last, true),
        (last, last + 1, false),
        (first, first + 1_000, false),
        (first + 1, first, false),
        (max, 1, false),
    ];
    for (old, new, deletes_only) in rows {
        let (old, new) = (Stamp::new(old).unwrap(), Stamp::new(new).unwrap());
        let mut table = carrying(&settings, old);
        assert!(has_stamp(&settings, &table));
        assert_eq!(stamp_of(&settings, &table), Some(old));
        assert_eq!(ops(&table, &settings, old), []);
        let step = exchange(&settings, old, new);
        assert_eq!(step, ops(&table, &settings, new), "{old} to {new}");
        assert_eq!(step.iter().all(|op| matches!(op, Op::DeleteRule { .. })), deletes_only, "{old} to {new}");
        table.apply(&crate::delta::Transaction { anew: false, ops: step }).unwrap();
        assert_eq!(table, carrying(&settings, new), "{old} to {new}");
    }
}

/// What an agent of before left in the kernel: the current stamp in a map, and no rules for others.
#[test]
fn the_stamp_of_an_earlier_table_goes_on_and_the_table_is_made_anew() {
    let settings = Settings::default();
    let stamp = Stamp::new(7).unwrap();
    let mut table = carrying(&settings, stamp);
    table.chains.remove(&names::fast());
    table.chains.values_mut().for_each(|chain| chain.rules.truncate(1));
    let key = Key::Number(settings.mark.judged(Stamp::new(9).unwrap()));
    let current = crate::table::Set::keyed(SetKind::MarkToVerdict, [(key, Data::Verdict(Verdict::Accept))]);
    table.sets.insert(names::current(), current);
    assert!(!has_stamp(&settings, &table));
    assert_eq!(stamp_of(&settings, &table), Stamp::new(9));
}
