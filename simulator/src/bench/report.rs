//! What a benchmark found: a JSON object for machines, a table for people.

use comfy_table::{Table, presets::UTF8_BORDERS_ONLY};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

/// Of the JSON object. Readers refuse any other.
const FORMAT_VERSION: &str = "1";

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Value {
    Count(u64),
    /// Rounded to a thousandth: more digits would claim a precision that timing on a shared machine does not have.
    Measure(f64),
}

impl From<u64> for Value {
    fn from(count: u64) -> Self {
        Self::Count(count)
    }
}

impl From<usize> for Value {
    fn from(count: usize) -> Self {
        Self::Count(count as u64)
    }
}

impl From<f64> for Value {
    fn from(measure: f64) -> Self {
        Self::Measure((measure * 1000.0).round() / 1000.0)
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Count(count) => write!(f, "{count}"),
            Self::Measure(measure) => write!(f, "{measure}"),
        }
    }
}

#[derive(Debug, Clone)]
struct Row {
    name: &'static str,
    value: Value,
    reach: Option<Reach>,
}

#[derive(Debug, Clone, Copy)]
enum Reach {
    AtMost(f64),
    AtLeast(f64),
}

impl std::fmt::Display for Reach {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rounded = |number: f64| Value::from(number);
        match self {
            Self::AtMost(number) => write!(f, "≤ {}", rounded(*number)),
            Self::AtLeast(number) => write!(f, "≥ {}", rounded(*number)),
        }
    }
}

/// Results in the order they were added.
#[derive(Debug, Clone)]
pub struct Report {
    bench: &'static str,
    rows: Vec<Row>,
}

impl Report {
    pub fn new(bench: &'static str) -> Self {
        Self { bench, rows: Vec::new() }
    }

    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.rows.push(Row { name, value: value.into(), reach: None });
        self
    }

    /// A figure that is not to exceed `at_most`; the table shows that beside it.
    pub fn with_goal(mut self, name: &'static str, value: impl Into<Value>, at_most: f64) -> Self {
        self.rows.push(Row { name, value: value.into(), reach: Some(Reach::AtMost(at_most)) });
        self
    }

    /// A figure that is to be at least `at_least`.
    pub fn with_floor(mut self, name: &'static str, value: impl Into<Value>, at_least: f64) -> Self {
        self.rows.push(Row { name, value: value.into(), reach: Some(Reach::AtLeast(at_least)) });
        self
    }

    pub fn json(&self) -> String {
        // Numbers and fixed names only: nothing here can fail to serialize.
        serde_json::to_string(self).unwrap_or_default()
    }

    pub fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_style(UTF8_BORDERS_ONLY).set_header([self.bench, "measured", "reach"]);
        for row in &self.rows {
            let reach = row.reach.map(|reach| reach.to_string()).unwrap_or_default();
            table.add_row([row.name.to_owned(), row.value.to_string(), reach]);
        }
        table
    }
}

impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Rows<'a>(&'a [Row]);
        impl Serialize for Rows<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.iter().map(|row| (row.name, &row.value)))
            }
        }
        let reach: Vec<(&str, String)> = self.rows.iter().filter_map(|row| Some((row.name, row.reach?.to_string()))).collect();
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("format_version", FORMAT_VERSION)?;
        map.serialize_entry("bench", self.bench)?;
        map.serialize_entry("results", &Rows(&self.rows))?;
        if !reach.is_empty() {
            map.serialize_entry("reach", &reach.into_iter().collect::<std::collections::BTreeMap<_, _>>())?;
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_their_order_and_their_precision() {
        let report = Report::new("some").with("z", 7u64).with_goal("a_ms", 1.23456, 1.3).with_floor("m", 2.0, 0.9);
        assert_eq!(
            report.json(),
            r#"{"format_version":"1","bench":"some","results":{"z":7,"a_ms":1.235,"m":2.0},"reach":{"a_ms":"≤ 1.3","m":"≥ 0.9"}}"#
        );
        let table = report.table().to_string();
        assert!(table.contains("a_ms") && table.contains("≤ 1.3") && table.contains("≥ 0.9"), "{table}");
    }
}
