//! Truth tables: one case a line, readable without Rust. The tables are in `tests/tables`; how they are written is said at the
//! top of each. Every packet case is asked twice: of the oracle, and of the host's policy as compiled and resolved.

mod dialects;
mod worlds;

macro_rules! tables {
    ($($name:ident: $run:path, $file:literal;)*) => {
        $(#[test]
        fn $name() {
            $run(include_str!(concat!("../tables/", $file)));
        })*
    };
}

tables! {
    semantics: worlds::run, "semantics.table";
    groups_as_remotes: worlds::run, "remotes.table";
    what_a_change_publishes: worlds::run, "edits.table";
    what_a_change_means: worlds::run, "meaning.table";
    why: worlds::run, "explain.table";
    neutron_compact_and_expanded: worlds::run_neutron_example, "neutron_example.json";
    cloud_foundry_rules: dialects::cloud_foundry, "cloud_foundry.table";
    cloud_foundry_groups: dialects::cloud_foundry_groups, "cloud_foundry_groups.table";
    neutron_rules: dialects::neutron, "neutron.table";
    documents: dialects::documents, "documents.table";
}

/// Numbered lines that are neither empty nor comments.
fn lines(table: &str) -> impl Iterator<Item = (usize, &str)> {
    let numbered = table.lines().enumerate().map(|(i, line)| (i + 1, line));
    numbered.filter(|(_, line)| !line.trim().is_empty() && !line.trim_start().starts_with('#'))
}
