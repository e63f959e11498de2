//! What happened in the story, step by step: words for people, or JSON lines for programs.

use std::time::Duration;

use serde_json::{Value, json};

/// What came of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    pub name: &'static str,
    /// What was done.
    pub about: String,
    /// Whether the outcome is the one that it must be.
    pub ok: bool,
    /// What came of it.
    pub outcome: String,
    /// Of what is worth timing.
    pub took: Option<Duration>,
    /// What a command printed.
    pub shown: String,
}

impl Step {
    pub fn new(name: &'static str, about: impl Into<String>, ok: bool, outcome: impl Into<String>) -> Self {
        Self { name, about: about.into(), ok, outcome: outcome.into(), took: None, shown: String::new() }
    }

    pub fn took(mut self, time: Duration) -> Self {
        self.took = Some(time);
        self
    }

    pub fn shown(mut self, text: impl Into<String>) -> Self {
        self.shown = text.into();
        self
    }

    fn json(&self, number: usize) -> Value {
        let mut value = json!({
            "format_version": "1", "number": number, "step": self.name, "about": self.about, "ok": self.ok, "outcome": self.outcome,
        });
        if let Some(time) = self.took {
            value["ms"] = milliseconds(time).into();
        }
        if !self.shown.is_empty() {
            value["shown"] = self.shown.clone().into();
        }
        value
    }

    fn words(&self, number: usize) -> String {
        let mark = if self.ok { "ok" } else { "NOT AS EXPECTED" };
        let time = self.took.map_or(String::new(), |time| format!(" ({:.1} ms)", milliseconds(time)));
        let mut text = format!("\n{number}. {}\n", self.about);
        self.shown.lines().for_each(|line| text += &format!("   | {line}\n"));
        text + &format!("   {mark}: {}{time}\n", self.outcome)
    }
}

fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 100.0
}

/// Says each step as it happens.
#[derive(Debug)]
pub struct Teller {
    json: bool,
    number: usize,
    failed: usize,
}

impl Teller {
    pub fn new(json: bool) -> Self {
        Self { json, number: 0, failed: 0 }
    }

    /// Only for people.
    pub fn words(&self, text: &str) {
        if !self.json {
            println!("{text}");
        }
    }

    pub fn step(&mut self, step: &Step) {
        self.number += 1;
        self.failed += usize::from(!step.ok);
        match self.json {
            true => println!("{}", step.json(self.number)),
            false => print!("{}", step.words(self.number)),
        }
    }

    /// Whether everything was as it should be.
    pub fn end(&self, packets: bool) -> bool {
        let Self { number, failed, .. } = self;
        if self.json {
            println!(
                "{}",
                json!({ "format_version": "1", "step": "end", "ok": *failed == 0, "steps": number, "failed": failed, "packets": packets })
            );
        } else {
            let by = if packets { "by real packets" } else { "in a dry run, without packets" };
            println!("\n{number} steps, {failed} not as expected; judged {by}");
        }
        *failed == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_told_to_people_and_to_programs() {
        let step =
            Step::new("apply", "apply shop.yaml", true, "enforced on 2 hosts").took(Duration::from_micros(6_254)).shown("a\nb");
        assert_eq!(step.words(3), "\n3. apply shop.yaml\n   | a\n   | b\n   ok: enforced on 2 hosts (6.2 ms)\n");
        let value = step.json(3);
        assert_eq!((&value["step"], &value["ok"], &value["ms"]), (&json!("apply"), &json!(true), &json!(6.25)));
        let mut teller = Teller::new(false);
        teller.step(&step);
        assert!(teller.end(true));
        teller.step(&Step { ok: false, ..step });
        assert!(!teller.end(true));
    }
}
