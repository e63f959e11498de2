//! What others would have sent to one host for the same changes on the same topology, by their own formulas.

/// The topology and what happened on it, per host.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub hosts: f64,
    pub groups: f64,
    pub groups_per_host: f64,
    pub members_per_group: f64,
    pub rules_per_group: f64,
    /// How often a group that a host uses changed.
    pub changes_per_host: f64,
    pub seconds: f64,
}

#[derive(Debug, Clone)]
pub struct Other {
    pub name: &'static str,
    pub how: String,
    pub bytes_per_host: f64,
}

/// Neutron before its groups were sent compactly: a rule for each member, 440 bytes each.
const EXPANDED_RULE_BYTES: f64 = 440.0;
/// Neutron's compact form: bytes of a rule and of an address; a device is taken for 300.
const COMPACT_RULE_BYTES: f64 = 220.0;
const COMPACT_ADDRESS_BYTES: f64 = 17.0;
const DEVICE_BYTES: f64 = 300.0;
/// Cloud Foundry polls twice in a row: a syncer all groups, and each host those of its spaces.
const POLL_S: f64 = 60.0;
/// JSON of a group, of a rule and of an address in its destination.
const POLLED_GROUP_BYTES: f64 = 250.0;
const POLLED_RULE_BYTES: f64 = 120.0;

pub fn others(shape: &Shape) -> Vec<Other> {
    let Shape { hosts, groups, groups_per_host, members_per_group, rules_per_group, changes_per_host, seconds } = *shape;
    let members = groups_per_host * members_per_group;
    let expanded = EXPANDED_RULE_BYTES * (members - 1.0).max(0.0);
    let compact = DEVICE_BYTES + COMPACT_RULE_BYTES * groups_per_host + COMPACT_ADDRESS_BYTES * members;
    let polled = POLLED_GROUP_BYTES + POLLED_RULE_BYTES * rules_per_group + COMPACT_ADDRESS_BYTES * members_per_group;
    vec![
        Other {
            name: "polling twice (Cloud Foundry)",
            how: format!(
                "every {POLL_S} s one syncer reads all groups and each host those it uses: {POLLED_GROUP_BYTES} B a group, \
                 {POLLED_RULE_BYTES} B a rule, {COMPACT_ADDRESS_BYTES} B an address; a change is up to {} s late",
                2.0 * POLL_S
            ),
            bytes_per_host: seconds / POLL_S * polled * (groups / hosts.max(1.0) + groups_per_host),
        },
        Other {
            name: "whole groups, compact (Neutron)",
            how: format!(
                "each change has each host that uses the group fetch all it has: {DEVICE_BYTES} B a device + \
                 {COMPACT_RULE_BYTES} B × groups + {COMPACT_ADDRESS_BYTES} B × addresses"
            ),
            bytes_per_host: changes_per_host * compact,
        },
        Other {
            name: "whole groups, expanded (Neutron)",
            how: format!("the same before it was compact: {EXPANDED_RULE_BYTES} B × devices × (addresses − 1)"),
            bytes_per_host: changes_per_host * expanded,
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_formulas_are_those_of_their_authors() {
        let shape = Shape {
            hosts: 10.0,
            groups: 20.0,
            groups_per_host: 2.0,
            members_per_group: 100.0,
            rules_per_group: 3.0,
            changes_per_host: 4.0,
            seconds: 120.0,
        };
        let bytes: Vec<f64> = others(&shape).iter().map(|other| other.bytes_per_host).collect();
        let polled = 250.0 + 360.0 + 1_700.0;
        assert_eq!(bytes, [2.0 * polled * 4.0, 4.0 * (300.0 + 440.0 + 3_400.0), 4.0 * 440.0 * 199.0]);
    }
}
