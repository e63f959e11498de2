//! Whether what is enrolled is still allowed: grants and templates are edited, and hosts are removed. Every controller keeps a
//! [`Review`]; while it leads, hosts that an edit concerns are looked at again, and what is no longer allowed is evicted.
//!
//! An enrolment may be judged by a template, or by a grant, that is edited before the enrolment is written. So a host is looked at
//! once more whenever its entry is written soon after an edit that concerns it.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::ids::{HostId, NetworkId, TemplateId, WorkloadId};
use groupcast_policy::model::{Template, Workload};

use super::admit::stands;
use super::grant::Grant;

/// Longer than any enrolment takes from being judged to being written.
pub const RACE_MS: u64 = 120_000;
/// Whoever removes a host takes away at once what it enrolled; after so long somebody has to do it instead.
pub const EXPEL_AFTER_MS: u64 = 5_000;
/// Hosts that are looked at, at the same time.
pub const AT_ONCE_MAX: usize = 16;
/// Hosts looked at in one sweep only because this controller begins to lead.
pub const BACKLOG_PER_SWEEP_MAX: usize = 50;

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Review {
    /// Hosts whose grant was deleted, or that are being removed.
    ungranted: BTreeSet<HostId>,
    /// When the grant was last edited, if not long ago.
    grants: BTreeMap<HostId, u64>,
    templates: BTreeMap<TemplateId, u64>,
    /// Hosts that were removed, and when to look whether that was finished.
    later: BTreeMap<HostId, u64>,
    /// Everything that was written before this controller listened was read: what comes now is an edit.
    loaded: bool,
    /// To be looked at.
    due: BTreeSet<HostId>,
    /// To be looked at when nothing else is: this controller begins to lead.
    backlog: BTreeSet<HostId>,
    /// Being looked at.
    busy: BTreeSet<HostId>,
}

impl Review {
    /// A grant was written; whether the host may enrol anything.
    pub fn grant(&mut self, host: HostId, granted: bool, now_ms: u64) {
        if self.loaded {
            self.grants.insert(host.clone(), now_ms);
        }
        if !granted {
            self.later.insert(host.clone(), now_ms.saturating_add(EXPEL_AFTER_MS));
            self.ungranted.insert(host);
            return;
        }
        self.ungranted.remove(&host);
        self.later.remove(&host);
        if self.loaded {
            self.due.insert(host);
        }
    }

    /// Grants and templates were read once. Until then [`Review::begin`] is enough.
    pub fn loaded(&mut self) {
        self.loaded = true;
    }

    /// A template was written; these hosts have enrolled with it.
    pub fn template<'a>(&mut self, template: TemplateId, hosts: impl Iterator<Item = &'a HostId>, now_ms: u64) {
        if self.loaded {
            self.due.extend(hosts.cloned());
            self.templates.insert(template, now_ms);
        }
    }

    /// A host's entry was written.
    pub fn entry<'a>(&mut self, host: &HostId, mut templates: impl Iterator<Item = &'a str>, now_ms: u64) {
        let is_recent = |since: Option<&u64>| since.is_some_and(|since| now_ms < since.saturating_add(RACE_MS));
        let is_edited = is_recent(self.grants.get(host))
            || templates.any(|id| TemplateId::new(id).is_ok_and(|id| is_recent(self.templates.get(&id))));
        if is_edited || self.ungranted.contains(host) {
            self.due.insert(host.clone());
        }
    }

    /// This controller begins to lead: whoever led before may not have looked.
    pub fn begin<'a>(&mut self, hosts: impl Iterator<Item = &'a HostId>) {
        self.backlog.extend(hosts.cloned());
    }

    /// Hosts that a leader looks at now. `is_enrolled`: whoever has no entry needs no look.
    pub fn take(&mut self, sweeps: bool, now_ms: u64, is_enrolled: impl Fn(&HostId) -> bool) -> Vec<HostId> {
        if sweeps {
            self.grants.retain(|_, since| now_ms < since.saturating_add(RACE_MS));
            self.templates.retain(|_, since| now_ms < since.saturating_add(RACE_MS));
        }
        let passed: Vec<HostId> = self.later.iter().filter(|(_, at)| now_ms >= **at).map(|(host, _)| host.clone()).collect();
        for host in passed {
            self.later.remove(&host);
            self.due.insert(host);
        }
        self.due.retain(&is_enrolled);
        let mut taken = self.next(|review| &mut review.due, usize::MAX);
        if sweeps && self.due.is_empty() {
            self.backlog.retain(is_enrolled);
            taken.extend(self.next(|review| &mut review.backlog, BACKLOG_PER_SWEEP_MAX));
        }
        taken
    }

    fn next(&mut self, of: impl Fn(&mut Self) -> &mut BTreeSet<HostId>, max: usize) -> Vec<HostId> {
        let (busy, room) = (self.busy.clone(), AT_ONCE_MAX.saturating_sub(self.busy.len()).min(max));
        let taken: Vec<HostId> = of(self).iter().filter(|host| !busy.contains(*host)).take(room).cloned().collect();
        for host in &taken {
            of(self).remove(host);
            self.busy.insert(host.clone());
        }
        taken
    }

    /// A look has ended; it is repeated if it could not be finished.
    pub fn done(&mut self, host: &HostId, again: bool) {
        self.busy.remove(host);
        if again {
            self.due.insert(host.clone());
        }
    }
}

/// What becomes of a host that is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Stays,
    /// The host was removed: everything goes.
    Expelled,
    /// These workloads go; why the first does.
    Evicted {
        workloads: Vec<(NetworkId, WorkloadId)>,
        why: String,
    },
}

/// Judges what a host has enrolled by what it is granted now. A template that is missing, or cannot be read, evicts nothing: nothing
/// new is enrolled with it, and what is there stays.
pub fn judge(grant: &Grant, templates: &BTreeMap<TemplateId, Template>, workloads: &[Workload]) -> Verdict {
    if grant.removing {
        return Verdict::Expelled;
    }
    let (mut evicted, mut first) = (Vec::new(), None);
    for workload in workloads {
        let Some(template) = workload.template.as_ref().and_then(|id| templates.get(id)) else { continue };
        if let Err(why) = stands(grant, template, workload) {
            evicted.push((workload.network.clone(), workload.id.clone()));
            first.get_or_insert(why);
        }
    }
    first.map_or(Verdict::Stays, |why| Verdict::Evicted { workloads: evicted, why })
}

#[cfg(test)]
mod tests {
    use groupcast_policy::net::Prefix;

    use super::*;

    fn host(text: &str) -> HostId {
        text.parse().unwrap()
    }

    fn vm() -> TemplateId {
        "vm".parse().unwrap()
    }

    fn all(_: &HostId) -> bool {
        true
    }

    fn loaded() -> Review {
        let mut review = Review::default();
        review.loaded();
        review
    }

    #[test]
    fn an_edit_concerns_its_hosts_and_what_they_write_soon_after() {
        let mut review = loaded();
        review.entry(&host("a"), ["vm"].into_iter(), 0);
        assert_eq!(review.take(true, 0, all), [], "nothing was edited");
        review.template(vm(), [host("a"), host("b")].iter(), 1_000);
        assert_eq!(review.take(false, 1_000, |id| *id != host("b")), [host("a")], "b has nothing enrolled by now");
        review.entry(&host("a"), ["vm"].into_iter(), 1_001);
        assert_eq!(review.take(false, 1_001, all), [], "it is being looked at");
        review.done(&host("a"), false);
        assert_eq!(review.take(false, 1_002, all), [host("a")], "and once more, because it was written meanwhile");
        review.done(&host("a"), true);
        assert_eq!(review.take(false, 1_003, all), [host("a")], "what could not be finished is repeated");
        review.done(&host("a"), false);
        review.entry(&host("c"), ["other", "vm"].into_iter(), 999 + RACE_MS);
        assert_eq!(review.take(true, 999 + RACE_MS, all), [host("c")], "judged before the edit and written after it");
        review.entry(&host("d"), ["vm"].into_iter(), 1_000 + RACE_MS);
        assert_eq!(review.take(true, 1_000 + RACE_MS, all), []);
        assert!(review.templates.is_empty(), "nothing is kept of old edits");
    }

    #[test]
    fn whoever_is_not_granted_anything_is_looked_at_however_late_it_writes() {
        let mut review = loaded();
        review.grant(host("a"), false, 0);
        assert_eq!(review.take(true, EXPEL_AFTER_MS - 1, all), [], "whoever removes it does so by himself");
        assert_eq!(review.take(true, EXPEL_AFTER_MS, all), [host("a")], "unless that was interrupted");
        review.done(&host("a"), false);
        review.entry(&host("a"), [].into_iter(), 10 * RACE_MS);
        assert_eq!(review.take(true, 10 * RACE_MS, all), [host("a")]);
        review.done(&host("a"), false);
        review.grant(host("a"), true, 20 * RACE_MS);
        assert_eq!(review.take(true, 20 * RACE_MS, all), [host("a")], "it may have been narrowed");
        review.done(&host("a"), false);
        review.entry(&host("a"), [].into_iter(), 30 * RACE_MS);
        assert_eq!(review.take(true, 30 * RACE_MS, all), []);
    }

    #[test]
    fn looks_are_bounded_and_edits_come_before_the_backlog() {
        let mut review = loaded();
        let many: Vec<HostId> = (0..200).map(|n| host(&format!("h{n:03}"))).collect();
        review.begin(many.iter());
        review.grant(host("z"), true, 0);
        assert_eq!(review.take(false, 0, all), [host("z")]);
        let first = review.take(true, 0, all);
        assert_eq!(first, many[..AT_ONCE_MAX - 1]);
        assert_eq!(review.take(true, 0, all), [], "so many at once");
        first.iter().for_each(|host| review.done(host, false));
        assert_eq!(review.take(true, 0, all)[0], many[AT_ONCE_MAX - 1]);
    }

    #[test]
    fn what_was_there_before_is_no_edit_but_a_removal_may_wait_to_be_finished() {
        let mut review = Review::default();
        review.grant(host("a"), true, 0);
        review.template(vm(), [host("a")].iter(), 0);
        review.grant(host("b"), false, 0);
        review.entry(&host("a"), ["vm"].into_iter(), 1);
        assert_eq!(review.take(true, 1, all), []);
        assert_eq!(review.take(true, EXPEL_AFTER_MS, all), [host("b")]);
    }

    #[test]
    fn what_is_no_longer_allowed_goes_and_nothing_else() {
        let prefix = |bits, len| Prefix::v4(bits, len).unwrap();
        let mut template = Template::new(vm(), "n".parse().unwrap());
        template.identities.insert(host("h"));
        template.prefixes.insert(prefix(0x0a00_0000, 8));
        let workload = |id: &str, bits| {
            let mut workload = Workload::new(id.parse().unwrap(), host("h"), "n".parse().unwrap());
            workload.addresses.insert(prefix(bits, 32));
            workload.template = Some(vm());
            workload
        };
        let workloads = [workload("a", 0x0a00_0001), workload("b", 0x0a01_0001)];
        let grant = |len| Grant::new(host("h"), vec![prefix(0x0a00_0000, len)]);
        let judged = |grant: &Grant, template: &Template| judge(grant, &[(vm(), template.clone())].into(), &workloads);
        assert_eq!(judged(&grant(8), &template), Verdict::Stays);
        let evicted = |verdict: Verdict| match verdict {
            Verdict::Evicted { workloads, why } => (workloads.iter().map(|(_, id)| id.to_string()).collect::<Vec<_>>(), why),
            other => panic!("{other:?}"),
        };
        let (gone, why) = evicted(judged(&grant(16), &template));
        assert!(gone == ["b"] && why.contains("10.1.0.1/32 is in no network granted"), "{why}");
        let mut narrowed = template.clone();
        narrowed.identities.clear();
        let (gone, why) = evicted(judged(&grant(8), &narrowed));
        assert!(gone == ["a", "b"] && why.contains("may not be used by host h"), "{why}");
        let elsewhere = Template { network: "m".parse().unwrap(), ..template.clone() };
        assert_eq!(evicted(judged(&grant(8), &elsewhere)).0.len(), 2);
        assert_eq!(judge(&grant(16), &BTreeMap::new(), &workloads), Verdict::Stays, "a template that was deleted evicts nothing");
        assert_eq!(judged(&grant(8).removed(0), &template), Verdict::Expelled);
    }
}
