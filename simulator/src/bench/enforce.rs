//! `bench enforce`: from a delta's bytes to the committed kernel transaction, against bare netlink and against `nft`.

use super::Report;
use super::agent::{Options, measure};

pub fn run(options: &Options) -> anyhow::Result<Report> {
    let found = measure(options, "enforce")?;
    let raw = found.number("raw_us_p50")?;
    Ok(Report::new("enforce")
        .with("raw_us_p50", raw)
        .with_goal("ours_us_p50", found.number("ours_us_p50")?, raw * 5.0)
        .with_goal("ratio", found.number("ratio")?, 5.0)
        .with_goal("ours_100k_us_p50", found.number("ours_100k_us_p50")?, raw * 5.0)
        .with_goal("leave_us_p50", found.number("leave_us_p50")?, raw * 5.0)
        .with("workload_add_us_p50", found.number("workload_add_us_p50")?)
        .with("nft_cli_us_p50", found.number("nft_cli_us_p50")?)
        .with("full_load_ms", found.number("full_load_ms")?)
        .with_goal("rss_mb", found.number("rss_mb")?, 60.0))
}
