//! The part of the lifecycle that holds deletions back when too many are silent, and knows what an operator has said about them. What
//! REGISTRY says of it is compared with what should be there and written when it differs: so whoever leads next finds the operator's
//! word, and a freeze that is over does not stay on record because whoever had frozen is gone.

use std::collections::{BTreeMap, BTreeSet};

use groupcast_policy::ids::{HostId, TemplateId};

use super::{Effect, Lifecycle};
use crate::document::GuardRecord;
use crate::registration::guard::Counts;

/// Confirmed hosts of one template that are written down; about the rest a new leader asks again. What a document can hold.
pub const CONFIRMED_MAX: usize = 10_000;

impl Lifecycle {
    /// Templates of which nothing is deleted, and why.
    pub fn frozen(&self) -> impl Iterator<Item = GuardRecord> + '_ {
        self.frozen.iter().map(|(template, counts)| record(template, *counts, Vec::new()))
    }

    /// Whether REGISTRY says that an operator knows that this host is gone.
    pub(super) fn was_confirmed(&self, host: &HostId, templates: &BTreeSet<TemplateId>) -> bool {
        let is_listed = |record: &GuardRecord| record.confirmed.binary_search_by(|name| name.as_str().cmp(host.as_str())).is_ok();
        templates.iter().any(|template| self.told.get(template).is_some_and(is_listed))
    }

    /// The silent hosts of the template are gone. Written at once: an operator says it once.
    pub(super) fn confirm(&mut self, template: TemplateId, now_ms: u64) -> Vec<Effect> {
        if !self.acts() {
            return Vec::new();
        }
        let (lease_ms, floor_ms) = (self.settings.lease.as_millis() as u64, self.floor_ms);
        for host in self.hosts.values_mut().filter(|host| host.templates.contains(&template)) {
            host.confirmed |= now_ms.saturating_sub(host.heard_ms.max(floor_ms)) >= lease_ms;
        }
        self.tell(template).into_iter().collect()
    }

    /// What REGISTRY says. Who leads has written it and knows better.
    pub(super) fn guarded(&mut self, template: TemplateId, record: Option<GuardRecord>) {
        if self.acts() {
            return;
        }
        match record {
            Some(record) => _ = self.told.insert(template.clone(), record),
            None => _ = self.told.remove(&template),
        }
        let told = &self.told;
        for (id, host) in self.hosts.iter_mut().filter(|(_, host)| host.templates.contains(&template)) {
            let is_listed = |template: &TemplateId| {
                told.get(template).is_some_and(|record| record.confirmed.binary_search(&id.to_string()).is_ok())
            };
            host.confirmed = host.templates.iter().any(is_listed);
        }
    }

    /// How the hosts of every template are, from scratch.
    fn counts(&self, now_ms: u64) -> BTreeMap<TemplateId, Counts> {
        let lease_ms = self.settings.lease.as_millis() as u64;
        let mut counts: BTreeMap<TemplateId, Counts> = BTreeMap::new();
        for host in self.hosts.values().filter(|host| !host.confirmed) {
            let missing = u64::from(self.silent_ms(host, now_ms) >= lease_ms);
            for template in &host.templates {
                let of = counts.entry(template.clone()).or_default();
                of.hosts += 1;
                of.missing += missing;
            }
        }
        for template in self.deleted.iter().flat_map(|(_, templates)| templates) {
            let of = counts.entry(template.clone()).or_default();
            of.hosts += 1;
            of.missing += 1;
        }
        counts
    }

    /// Freezes and thaws; what has to be written of it.
    pub(super) fn guard(&mut self, now_ms: u64) -> Vec<Effect> {
        let window_ms = self.settings.guard_window.as_millis() as u64;
        while self.deleted.front().is_some_and(|(at_ms, _)| now_ms.saturating_sub(*at_ms) > window_ms) {
            self.deleted.pop_front();
        }
        let counts = self.counts(now_ms);
        let frozen: BTreeMap<TemplateId, Counts> =
            counts.into_iter().filter(|(_, counts)| counts.is_too_many(&self.settings)).collect();
        let before = std::mem::replace(&mut self.frozen, frozen);
        for template in before.keys().filter(|id| !self.frozen.contains_key(*id)) {
            // Those still missing are given a grace of their own: they may be about to return like the others.
            let until_ms = now_ms + self.settings.grace.as_millis() as u64;
            for host in self.hosts.values_mut().filter(|host| !host.confirmed && host.templates.contains(template)) {
                host.spared_until_ms = until_ms;
            }
        }
        let confirmed = self.hosts.values().filter(|host| host.confirmed).flat_map(|host| host.templates.iter());
        let mut concerned: BTreeSet<TemplateId> = self.frozen.keys().chain(confirmed).cloned().collect();
        // Whoever has just begun to listen has missed nobody yet: what an earlier leader has frozen is not thawed by that.
        if now_ms >= self.floor_ms + self.settings.lease.as_millis() as u64 {
            concerned.extend(self.told.keys().cloned());
        }
        concerned.into_iter().filter_map(|template| self.tell(template)).collect()
    }

    /// What REGISTRY should say of the template, if that is another thing than it does. Counts alone are no news.
    fn tell(&mut self, template: TemplateId) -> Option<Effect> {
        let of =
            |(id, host): (&HostId, &super::Host)| (host.confirmed && host.templates.contains(&template)).then(|| id.to_string());
        let mut confirmed: Vec<String> = self.hosts.iter().filter_map(of).take(CONFIRMED_MAX).collect();
        confirmed.sort();
        let counts = self.frozen.get(&template).copied();
        let should =
            (counts.is_some() || !confirmed.is_empty()).then(|| record(&template, counts.unwrap_or_default(), confirmed));
        let news = |record: &GuardRecord| (record.is_frozen(), record.confirmed.clone());
        if self.told.get(&template).map(news) == should.as_ref().map(news) {
            return None;
        }
        match &should {
            Some(record) => _ = self.told.insert(template.clone(), record.clone()),
            None => _ = self.told.remove(&template),
        }
        Some(Effect::Guard { template, record: should })
    }
}

fn record(template: &TemplateId, counts: Counts, confirmed: Vec<String>) -> GuardRecord {
    GuardRecord { template: template.to_string(), missing: counts.missing, hosts: counts.hosts, confirmed }
}
