use groupcast_policy::doc::RuleKey;
use groupcast_policy::ids::GroupId;
use groupcast_policy::net::Family;
use groupcast_policy::rule::Action;

use super::*;
use crate::names::View;
use crate::table::Chain;

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
    let one = Elements::V4([1].into());
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

#[test]
fn a_new_stamp_replaces_the_old_one_everywhere() {
    let settings = Settings::default();
    let (old, new) = (Stamp::new(7).unwrap(), Stamp::new(8).unwrap());
    let mut table = Table::default();
    assert!(ops(&table, &settings, new).is_empty() && !has_stamp(&table));
    for side in [Direction::Egress, Direction::Ingress] {
        let (chain, rules) = stamp_rules(&settings, old, side);
        table.chains.insert(chain, Chain { base: None, rules });
    }
    let current = crate::table::Set::keyed(
        SetKind::MarkToVerdict,
        [(Key::Number(settings.mark.judged(old)), Data::Verdict(Verdict::Accept))],
    );
    table.sets.insert(names::current(), current);
    assert!(has_stamp(&table));
    assert_eq!(ops(&table, &settings, old), []);
    let transaction = crate::delta::Transaction { anew: false, ops: ops(&table, &settings, new) };
    assert_eq!(transaction.ops.len(), 6);
    table.apply(&transaction).unwrap();
    assert_eq!(stamp_of(&settings, &table), Some(new));
    assert_eq!(ops(&table, &settings, new), []);
}
