//! `bench packets`: packets a second through the policy of a full host, against connection tracking alone and against iptables.

use super::Report;
use super::agent::{Options, measure};

pub fn run(options: &Options) -> anyhow::Result<Report> {
    let found = measure(options, "packets")?;
    Ok(Report::new("packets")
        .with("none_pps", found.number("none_pps")?)
        .with("ours_pps", found.number("ours_pps")?)
        .with_floor("ratio", found.number("ratio")?, 0.9)
        .with_floor("judged_ratio", found.number("judged_ratio")?, 0.65)
        .with("iptables_ratio", found.number("iptables_ratio")?)
        .with("iptables_judged_ratio", found.number("iptables_judged_ratio")?)
        .with("rules_in_kernel", found.count("rules_in_kernel")?)
        .with("iptables_rules", found.count("iptables_rules")?))
}
