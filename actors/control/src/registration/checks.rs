//! How templates say that health is checked, and which hosts are to be told that it is another way. Hosts learn it when they enrol and
//! refresh; what changes in between the leading controller tells them. Every controller keeps one of these.

use std::collections::BTreeMap;

use groupcast_policy::ids::TemplateId;
use groupcast_policy::model::HealthCheck;

/// Hosts are told a second time after so long: a message may be lost, and a host may have enrolled with what the template said before.
pub const AGAIN_MS: u64 = 10_000;
/// Whoever begins to lead tells what changed within this time: whoever led before may not have. What is older, a refresh brings.
pub const NEWS_MS: u64 = 60_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct News {
    since_ms: u64,
    /// How often this controller has told it.
    told: u32,
}

#[derive(Debug, Default)]
pub struct Checks {
    templates: BTreeMap<TemplateId, Option<HealthCheck>>,
    /// At most one for each template.
    news: BTreeMap<TemplateId, News>,
    loaded: bool,
}

impl Checks {
    /// A template as CATALOG has it.
    pub fn template(&mut self, template: TemplateId, health: Option<HealthCheck>, now_ms: u64) {
        let before = self.templates.insert(template.clone(), health.clone());
        if self.loaded && before != Some(health) {
            self.news.insert(template, News { since_ms: now_ms, told: 0 });
        }
    }

    /// Who has it goes on as before: nobody says how else.
    pub fn gone(&mut self, template: &TemplateId) {
        self.templates.remove(template);
        self.news.remove(template);
    }

    /// Every template was read once: what comes from now on is news.
    pub fn loaded(&mut self) {
        self.loaded = true;
    }

    /// What the hosts of a template are to be told now, by a controller that leads.
    pub fn due(&mut self, leads: bool, now_ms: u64) -> Vec<(TemplateId, Option<HealthCheck>)> {
        let mut due = Vec::new();
        self.news.retain(|template, news| {
            let age_ms = now_ms.saturating_sub(news.since_ms);
            if !leads {
                return age_ms < NEWS_MS;
            }
            if news.told == 0 || age_ms >= AGAIN_MS {
                news.told += 1;
                due.extend(self.templates.get(template).map(|health| (template.clone(), health.clone())));
            }
            news.told < 2 && age_ms < NEWS_MS
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use groupcast_policy::model::Probe;

    use super::*;

    fn id(text: &str) -> TemplateId {
        text.parse().unwrap()
    }

    fn tcp(port: u16) -> Option<HealthCheck> {
        Some(HealthCheck { probe: Probe::Tcp { port }, interval_seconds: 5 })
    }

    #[test]
    fn what_changes_is_told_twice_by_whoever_leads_and_nothing_else_is() {
        let mut checks = Checks::default();
        checks.template(id("a"), tcp(80), 0);
        checks.template(id("b"), None, 0);
        checks.loaded();
        assert_eq!(checks.due(true, 1), [], "what was there before is known to everybody");
        checks.template(id("a"), tcp(80), 2);
        assert_eq!(checks.due(true, 2), [], "an edit of something else");
        checks.template(id("a"), tcp(81), 1_000);
        assert_eq!(checks.due(true, 1_000), [(id("a"), tcp(81))]);
        assert_eq!(checks.due(true, 999 + AGAIN_MS), []);
        assert_eq!(checks.due(true, 1_000 + AGAIN_MS), [(id("a"), tcp(81))], "it may have been lost");
        assert_eq!(checks.due(true, 5_000 + 2 * AGAIN_MS), []);
        checks.template(id("a"), None, 90_000);
        assert_eq!(checks.due(true, 90_000), [(id("a"), None)], "no check any more");
        checks.template(id("c"), tcp(1), 90_001);
        assert_eq!(checks.due(true, 90_001), [(id("c"), tcp(1))], "one that was deleted and is back may have hosts");
        checks.gone(&id("a"));
        assert_eq!(checks.due(true, 90_000 + AGAIN_MS), [], "nobody says how else");
    }

    #[test]
    fn whoever_takes_over_tells_what_is_new_and_not_what_is_old() {
        let mut checks = Checks::default();
        checks.loaded();
        checks.template(id("a"), tcp(80), 0);
        checks.template(id("b"), tcp(80), 30_000);
        assert_eq!(checks.due(false, 30_001), []);
        assert_eq!(checks.due(false, NEWS_MS), [], "a is old by now");
        assert_eq!(checks.due(true, NEWS_MS + 1), [(id("b"), tcp(80))]);
        assert_eq!(checks.due(true, NEWS_MS + 2), [(id("b"), tcp(80))], "and once more: it was old enough for both");
        assert_eq!(checks.due(true, NEWS_MS + 3), []);
        assert!(checks.news.is_empty(), "nothing is kept of what was told");
    }
}
