//! The names of all metrics, and what they mean, in one place.

use metrics::Unit;

pub const FOLLOW_CHANGES: &str = "groupcast_follow_changes_total";
pub const FOLLOW_SEQUENCE: &str = "groupcast_follow_sequence";
pub const FOLLOW_RESTARTS: &str = "groupcast_follow_restarts_total";
pub const FOLLOW_HELD_SECONDS: &str = "groupcast_follow_held_seconds";
pub const COMPILE_SECONDS: &str = "groupcast_compile_seconds";
pub const COMPILE_WAITING_CHANGES: &str = "groupcast_compile_waiting_changes";
pub const COMPILE_TOPICS: &str = "groupcast_compile_topics";
pub const COMPILE_REFUSED: &str = "groupcast_compile_refused_documents";
pub const REFUSED_TOTAL: &str = "groupcast_refused_documents_total";
pub const PUBLISH_SECONDS: &str = "groupcast_publish_seconds";
pub const PUBLISH_CHANGES: &str = "groupcast_publish_changes";
pub const PUBLISH_TOPICS: &str = "groupcast_publish_topics";
pub const PUBLISH_BYTES: &str = "groupcast_publish_bytes";
pub const PUBLISH_REFUSED: &str = "groupcast_publish_refused_total";
pub const PUBLISH_TORN: &str = "groupcast_publish_torn_total";
pub const PUBLISHED_BATCHES: &str = "groupcast_published_batches_total";
pub const PUBLISHED_TOPICS_TOTAL: &str = "groupcast_published_topics_total";
pub const PUBLISHED_TOPICS: &str = "groupcast_published_topics";
pub const CHANGE_SECONDS: &str = "groupcast_change_seconds";
pub const SPAN_HOSTS: &str = "groupcast_span_hosts";
pub const ENFORCED_SECONDS: &str = "groupcast_enforced_seconds";
pub const HOSTS_BEHIND: &str = "groupcast_hosts_behind";
pub const CHANGES_UNFINISHED: &str = "groupcast_changes_unfinished";
pub const LEADING: &str = "groupcast_leading";
pub const TERM: &str = "groupcast_term";
pub const REGISTRATIONS_REFUSED: &str = "groupcast_registrations_refused_total";
pub const SOURCE_POLLS: &str = "groupcast_source_polls_total";
pub const SOURCE_POLL_SECONDS: &str = "groupcast_source_poll_seconds";
pub const SOURCE_LAG_SECONDS: &str = "groupcast_source_lag_seconds";
pub const SOURCE_GROUPS: &str = "groupcast_source_groups";
pub const SOURCE_WORKLOADS: &str = "groupcast_source_workloads";
pub const SOURCE_MALFORMED: &str = "groupcast_source_malformed_items";
pub const SOURCE_HELD_BACK: &str = "groupcast_source_held_back_deletions";
pub const SOURCE_WITHHELD: &str = "groupcast_source_withheld_items";
pub const REGISTRATIONS: &str = "groupcast_registrations_total";
pub const REGISTRATIONS_ENDED: &str = "groupcast_registrations_ended_total";
pub const REGISTER_SECONDS: &str = "groupcast_register_seconds";
pub const REGISTER_WAITING: &str = "groupcast_register_waiting";
pub const REGISTER_WAITING_PEAK: &str = "groupcast_register_waiting_peak";
pub const REGISTER_REPEATED: &str = "groupcast_register_repeated_total";
pub const HEARD: &str = "groupcast_heard_total";
pub const UNHEARD: &str = "groupcast_unheard_total";
pub const REGISTER_TURNED_AWAY: &str = "groupcast_register_turned_away_total";
pub const REGISTERED_HOSTS: &str = "groupcast_registered_hosts";
pub const SUSPECT_HOSTS: &str = "groupcast_suspect_hosts";
pub const FROZEN_TEMPLATES: &str = "groupcast_registrations_frozen_templates";
pub const FROZEN_TOTAL: &str = "groupcast_registrations_frozen_total";
pub const HEALTH_CHANGES: &str = "groupcast_health_changes_total";
pub const BEATS: &str = "groupcast_beats_total";
pub const AUDIT_MISSING: &str = "groupcast_audit_missing_total";
pub const AUDIT_MISSING_REGISTRY: &str = "groupcast_audit_missing_registry_total";
pub const AUDIT_BEHIND: &str = "groupcast_audit_behind_messages";
pub const BUS_SENT_BYTES: &str = "groupcast_bus_sent_bytes_total";
pub const BUS_RECEIVED_BYTES: &str = "groupcast_bus_received_bytes_total";

enum Kind {
    Counter,
    Gauge,
    Histogram,
}

use Kind::{Counter, Gauge, Histogram};

const ALL: &[(&str, Kind, Unit, &str)] = &[
    (FOLLOW_CHANGES, Counter, Unit::Count, "Changes read from a stream"),
    (FOLLOW_SEQUENCE, Gauge, Unit::Count, "The last sequence of a stream that was handed on"),
    (FOLLOW_RESTARTS, Counter, Unit::Count, "How often a stream had to be read from the beginning"),
    (FOLLOW_HELD_SECONDS, Histogram, Unit::Seconds, "How long what was read waited until the compiler took it: back-pressure"),
    (COMPILE_SECONDS, Histogram, Unit::Seconds, "Time to compile what arrived at once"),
    (COMPILE_WAITING_CHANGES, Gauge, Unit::Count, "Changes compiled that wait to be published"),
    (COMPILE_TOPICS, Gauge, Unit::Count, "Topics that the desired state makes"),
    (COMPILE_REFUSED, Gauge, Unit::Count, "Documents that cannot be read; their last good version is in force"),
    (REFUSED_TOTAL, Counter, Unit::Count, "Documents that were refused"),
    (PUBLISH_SECONDS, Histogram, Unit::Seconds, "Time from handing a batch to the bus to its commit"),
    (PUBLISH_CHANGES, Histogram, Unit::Count, "Changes merged into one batch"),
    (PUBLISH_TOPICS, Histogram, Unit::Count, "Topics edited by one batch"),
    (PUBLISH_BYTES, Histogram, Unit::Bytes, "Payload of one batch"),
    (PUBLISH_REFUSED, Counter, Unit::Count, "Batches that were not published"),
    (PUBLISH_TORN, Counter, Unit::Count, "Changes that no batch could hold and that were published in parts"),
    (PUBLISHED_BATCHES, Counter, Unit::Count, "Batches published"),
    (PUBLISHED_TOPICS_TOTAL, Counter, Unit::Count, "Topics edited by all batches"),
    (PUBLISHED_TOPICS, Gauge, Unit::Count, "Topics that are published"),
    (CHANGE_SECONDS, Histogram, Unit::Seconds, "Time from reading a change to its commit"),
    (SPAN_HOSTS, Histogram, Unit::Count, "Hosts that one batch concerns"),
    (ENFORCED_SECONDS, Histogram, Unit::Seconds, "Time from commit to enforcement, for each host and batch"),
    (HOSTS_BEHIND, Gauge, Unit::Count, "Hosts that have not got everything"),
    (CHANGES_UNFINISHED, Gauge, Unit::Count, "Batches that are not in force everywhere"),
    (LEADING, Gauge, Unit::Count, "1 while this controller leads"),
    (TERM, Gauge, Unit::Count, "The last term in which this controller led"),
    (REGISTRATIONS_REFUSED, Counter, Unit::Count, "Registrations that were refused"),
    (SOURCE_POLLS, Counter, Unit::Count, "Polls of a source, by what came of them"),
    (SOURCE_POLL_SECONDS, Histogram, Unit::Seconds, "Time from the beginning of a poll until what it found is written"),
    (SOURCE_LAG_SECONDS, Gauge, Unit::Seconds, "How long ago the last successful poll began; -1 before the first"),
    (SOURCE_GROUPS, Gauge, Unit::Count, "Groups that a source owns"),
    (SOURCE_WORKLOADS, Gauge, Unit::Count, "Workloads that a source has placed"),
    (SOURCE_MALFORMED, Gauge, Unit::Count, "Items of a source that cannot be read; their last good version is in force"),
    (SOURCE_HELD_BACK, Gauge, Unit::Count, "Deletions of a source that are held back"),
    (SOURCE_WITHHELD, Gauge, Unit::Count, "What a source says and is not done because of what others say"),
    (REGISTRATIONS, Counter, Unit::Count, "Registrations that were taken"),
    (REGISTRATIONS_ENDED, Counter, Unit::Count, "Registrations that ended, by cause"),
    (REGISTER_SECONDS, Histogram, Unit::Seconds, "Time to answer a host that registers"),
    (REGISTER_WAITING, Gauge, Unit::Count, "Requests of hosts that wait for the registrar"),
    (REGISTER_WAITING_PEAK, Gauge, Unit::Count, "The most of them that ever waited"),
    (
        REGISTER_REPEATED,
        Counter,
        Unit::Count,
        "Requests of hosts that were waiting or being answered already: they share one answer",
    ),
    (HEARD, Counter, Unit::Count, "Messages of hosts that were looked at, by kind"),
    (UNHEARD, Counter, Unit::Count, "Messages of hosts beyond what one host may send, by kind: dropped unread"),
    (REGISTER_TURNED_AWAY, Counter, Unit::Count, "Requests of hosts that were told to come back: too many waited"),
    (REGISTERED_HOSTS, Gauge, Unit::Count, "Hosts that have enrolled themselves"),
    (SUSPECT_HOSTS, Gauge, Unit::Count, "Hosts that have been silent for a lease"),
    (FROZEN_TEMPLATES, Gauge, Unit::Count, "Templates of which nothing is deleted because too many hosts are silent at once"),
    (FROZEN_TOTAL, Counter, Unit::Count, "How often deletions were frozen"),
    (HEALTH_CHANGES, Counter, Unit::Count, "Workloads that became well or unwell"),
    (BEATS, Counter, Unit::Count, "Beats of hosts that were heard"),
    (AUDIT_MISSING, Counter, Unit::Count, "Messages of CATALOG that AUDIT never got"),
    (AUDIT_MISSING_REGISTRY, Counter, Unit::Count, "Messages of REGISTRY that AUDIT never got"),
    (AUDIT_BEHIND, Gauge, Unit::Count, "Messages of CATALOG that AUDIT has not got yet"),
    (BUS_SENT_BYTES, Counter, Unit::Bytes, "Sent to the bus"),
    (BUS_RECEIVED_BYTES, Counter, Unit::Bytes, "Received from the bus"),
];

/// Tells the recorder what each is. What happens seldom is shown as 0 from the start.
pub fn describe() {
    for (name, kind, unit, words) in ALL {
        match kind {
            Counter => metrics::describe_counter!(*name, *unit, *words),
            Gauge => metrics::describe_gauge!(*name, *unit, *words),
            Histogram => metrics::describe_histogram!(*name, *unit, *words),
        }
    }
    for seldom in
        [REFUSED_TOTAL, PUBLISH_REFUSED, PUBLISH_TORN, REGISTRATIONS_REFUSED, FROZEN_TOTAL, AUDIT_MISSING, AUDIT_MISSING_REGISTRY]
    {
        metrics::counter!(seldom).absolute(0);
    }
}

/// A change's number in a span: collectors of traces know signed numbers, and anything else would become text.
pub(crate) fn traced(change: impl Into<Option<u64>>) -> Option<i64> {
    change.into().and_then(|change| i64::try_from(change).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_whose_they_are_and_are_unique() {
        let names: std::collections::BTreeSet<&str> = ALL.iter().map(|(name, ..)| *name).collect();
        assert_eq!(names.len(), ALL.len());
        for (name, kind, ..) in ALL {
            assert!(name.starts_with("groupcast_"), "{name}");
            assert_eq!(name.ends_with("_total"), matches!(kind, Counter), "{name}: counters and only they end with _total");
        }
    }
}
