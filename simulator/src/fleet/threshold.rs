//! What a run must reach: `enforced_p99<2s`.

use anyhow::{Context, bail};
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq)]
pub struct Threshold {
    pub text: String,
    name: String,
    less: bool,
    bound: f64,
}

impl Threshold {
    /// Times are compared in milliseconds, everything else as it is counted.
    pub fn parse(text: &str) -> anyhow::Result<Self> {
        let position =
            text.find(['<', '>']).with_context(|| format!("threshold {text:?}: it must be NAME<VALUE or NAME>VALUE"))?;
        let (name, rest) = text.split_at(position);
        let (less, value) = (rest.starts_with('<'), rest[1..].trim_start_matches('=').trim());
        let bound = match (value.parse::<f64>(), humantime::parse_duration(value)) {
            (Ok(number), _) => number,
            (_, Ok(duration)) => duration.as_secs_f64() * 1e3,
            _ => bail!("threshold {text:?}: {value:?} is neither a number nor a time"),
        };
        Ok(Self { text: text.to_owned(), name: name.trim().to_owned(), less, bound })
    }

    /// Why it is broken, if it is.
    pub fn broken(&self, measured: &BTreeMap<String, f64>) -> Option<String> {
        let names = || measured.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        match measured.get(&self.name) {
            None => Some(format!("{}: nothing of that name is measured; there are {}", self.text, names())),
            // Not a number is never within bounds.
            Some(value) if (self.less && *value <= self.bound) || (!self.less && *value >= self.bound) => None,
            Some(value) => Some(format!("{}: it is {value:.3}", self.text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thresholds_hold_or_are_broken() {
        let measured: BTreeMap<String, f64> = [("p99".to_owned(), 1500.0), ("ratio".to_owned(), 1.25)].into();
        for (text, holds) in [("p99<2s", true), ("p99<1500ms", true), ("p99<1s", false), ("ratio<=1.3", true), ("ratio>2", false)]
        {
            let threshold = Threshold::parse(text).unwrap();
            assert_eq!(threshold.broken(&measured).is_none(), holds, "{text}");
        }
        assert!(Threshold::parse("other<1").unwrap().broken(&measured).unwrap().contains("p99, ratio"));
        assert!(Threshold::parse("p99").is_err() && Threshold::parse("p99<soon").is_err());
        let nothing = BTreeMap::from([("p99".to_owned(), f64::NAN)]);
        assert!(Threshold::parse("p99<2s").unwrap().broken(&nothing).is_some());
    }
}
