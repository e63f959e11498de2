//! What a stamp does not vouch for, because it belongs to a flow and not to a packet: who sends an error about the flow, and which
//! interface a packet leaves by after its route was changed.

use groupcast_policy::rule::Direction;

use super::{accept, claimed, drop, held, is_related, line, not_held, not_in, test, unclaimed};
use crate::Name;
use crate::expression::{FAMILY_V4, FAMILY_V6, Field, Statement, Test, Verdict};
use crate::names;
use crate::ruleset::Desired;
use crate::ruleset::workloads::Keys;
use crate::settings::MarkBits;
use crate::table::{Hook, Rule};

/// An error is as good as its flow only if whoever sends it is on the flow's path: an end of it, or a router, which no workload is.
/// What comes in by a claimed interface is from an address of a workload there; so it must be from that address that the flow goes or
/// to that one. Like a spoofed packet another is dropped, audited or not: the flow is not its sender's. What is left is judged like the
/// flow.
pub fn related(desired: &mut Desired<'_>, keys: Keys) {
    let v4 = (FAMILY_V4, Field::Source4, [Field::CtSource4, Field::CtDestination4]);
    let v6 = (FAMILY_V6, Field::Source6, [Field::CtSource6, Field::CtDestination6]);
    let families =
        [(v4, names::same4(), keys.span4, names::source_span4()), (v6, names::same6(), keys.span6, names::source_span6())];
    let mut rules = Vec::new();
    for ((family, source, ends), same, has_spans, spans) in families {
        let family = Statement::is(Field::Family, family);
        for end in ends {
            rules.push(vec![family.clone(), Statement::in_set([source, end], &same), Statement::Verdict(Verdict::Return)]);
        }
        for end in ends.into_iter().filter(|_| has_spans) {
            let own = [source, end].map(|address| Statement::in_set([Field::InInterface, address], &spans));
            rules.push(line([vec![family.clone()], own.into(), vec![Statement::Verdict(Verdict::Return)]]));
        }
    }
    rules.push(line([vec![claimed(Field::InInterface)], drop().into()]));
    desired.put_chain(names::related(), rules);
    let judge = Statement::goto(&names::sided("j", Direction::Egress));
    desired.put_chain(names::unstamped_out(), vec![vec![is_related(), Statement::jump(&names::related())], vec![judge]]);
}

/// By which family a packet is, and whether its destination is an address of the interface it leaves by, in the sets that there are.
fn destinations(keys: Keys) -> [(Statement, Field, Vec<Name>); 2] {
    let sets = |hosts: Name, spans: Option<Name>| [Some(hosts), spans].into_iter().flatten().collect();
    [
        (
            Statement::is(Field::Family, FAMILY_V6),
            Field::Destination6,
            sets(names::source6(), keys.span6.then(names::source_span6)),
        ),
        (
            Statement::is(Field::Family, FAMILY_V4),
            Field::Destination4,
            sets(names::source4(), keys.span4.then(names::source_span4)),
        ),
    ]
}

/// What carries the current stamp and leaves by an interface that is nobody's, or by that of the workload whose address it goes to, is
/// where it was judged for. Anything else is judged, for whoever is there now.
pub fn bound(desired: &mut Desired<'_>, keys: Keys) {
    let mut rules = Vec::new();
    for (family, address, sets) in destinations(keys) {
        let own = sets.iter().map(|set| Statement::in_set([Field::OutInterface, address], set));
        rules.extend(own.map(|own| vec![family.clone(), own, accept()]));
        if address == Field::Destination6 {
            rules.push(vec![unclaimed(Field::OutInterface), not_held(Field::OutInterface), accept()]);
        }
    }
    rules.push(vec![Statement::goto(&names::sided("j", Direction::Egress))]);
    desired.put_chain(names::bound(), rules);
}

/// What begins or ends in the machine itself at an address that is also a workload's. Ranges are asked for as those behind no interface,
/// which the machine itself is.
fn shared(hook: Hook, keys: Keys) -> Vec<Vec<Statement>> {
    let (nowhere, v4, v6) = match hook {
        Hook::Input => (Field::OutInterface, Field::Destination4, Field::Destination6),
        _ => (Field::InInterface, Field::Source4, Field::Source6),
    };
    let families = [
        (FAMILY_V4, v4, names::same4(), keys.span4.then(names::source_span4)),
        (FAMILY_V6, v6, names::same6(), keys.span6.then(names::source_span6)),
    ];
    let mut tests = Vec::new();
    for (family, address, same, spans) in families {
        let family = Statement::is(Field::Family, family);
        tests.push(vec![family.clone(), Statement::in_set([address, address], &same)]);
        tests.extend(spans.map(|spans| vec![family, Statement::in_set([nowhere, address], &spans)]));
    }
    tests
}

/// Of what begins or ends in the machine itself, what a stamp does not vouch for: see [`stamp_rules`]. The machine itself is a router on
/// the path of whatever it sends errors about.
pub fn past_the_fast_path(hook: Hook, side: Direction, mark: MarkBits, keys: Keys) -> Vec<Rule> {
    let mut rules = Vec::new();
    let past = match hook {
        Hook::Input => Statement::goto(&names::unstamped_out()),
        _ => Statement::goto(&names::local_out()),
    };
    if side == Direction::Ingress {
        // No stamp for what is judged here at a workload's address: that could move there, and its flows with it. The judge of
        // receivers completes no stamp that is not half written.
        let is_marked = test(Field::CtMark, Test::MaskedNot { mask: mark.mask(), is_not: 0 });
        let clear = Statement::SetMark { keep: mark.foreign(), set: 0 };
        return shared(hook, keys)
            .into_iter()
            .map(|is_shared| line([vec![is_marked.clone()], is_shared, vec![clear.clone()]]))
            .collect();
    }
    if keys.host {
        // Nor does the workload's stamp speak for the machine.
        rules.extend(shared(hook, keys).into_iter().map(|is_shared| line([is_shared, vec![past.clone()]])));
    }
    match hook {
        Hook::Input => rules.push(vec![is_related(), Statement::jump(&names::related())]),
        _ => {
            for (family, address, sets) in destinations(keys) {
                let elsewhere: Vec<_> = sets.into_iter().map(|set| not_in([Field::OutInterface, address], set)).collect();
                for is_ours in [claimed(Field::OutInterface), held(Field::OutInterface)] {
                    rules.push(line([vec![family.clone()], elsewhere.clone(), vec![is_ours, past.clone()]]));
                }
            }
        }
    }
    rules
}
