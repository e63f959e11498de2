//! The report as one page that needs nothing else: plots drawn here, light or dark as its reader's system is.

use std::fmt::Write as _;

use super::plot::{self, Band, Line, Plot, Scale, bars, escape, number};
use super::report::{PhaseReport, Run};
use super::resources::Sample;
use super::threshold::Threshold;

const WIDE: f64 = 1_040.0;
const NARROW: f64 = 510.0;
/// The percentiles that distributions are drawn at; how many of a million are slower.
const SLOWER: [f64; 9] = [500_000.0, 250_000.0, 100_000.0, 30_000.0, 10_000.0, 3_000.0, 1_000.0, 100.0, 10.0];

const STYLE: &str = include_str!("page.css");

fn line(name: &str, run: &Run, of: impl Fn(&Sample) -> f64) -> Line {
    let points = run.samples.iter().map(|sample| ((sample.second.at_s - run.begun_s).max(0.0), of(sample)));
    Line { name: name.to_owned(), points: points.collect() }
}

struct Over<'a> {
    run: &'a Run,
    seconds: f64,
    bands: Vec<Band>,
}

impl<'a> Over<'a> {
    fn new(run: &'a Run) -> Self {
        let at = |second: f64| (second - run.begun_s).max(0.0);
        let seconds = run.samples.last().map_or(1.0, |sample| at(sample.second.at_s)).max(1.0);
        let bands = run.happened.iter().enumerate().map(|(index, fault)| Band {
            from: at(fault.from_s),
            to: at(fault.to_s).min(seconds),
            number: index + 1,
            name: fault.kind.name().to_owned(),
        });
        Self { run, seconds, bands: bands.collect() }
    }

    /// Against time, with the faults.
    fn time(&self, (width, height): (f64, f64), y_name: &str, logarithmic: bool, lines: &[Line]) -> String {
        let values = || lines.iter().flat_map(|line| line.points.iter().map(|(_, value)| *value));
        let y = if logarithmic { Scale::logarithmic(values()) } else { Scale::linear(values()) };
        // Numbers of faults need room; the small plots only shade.
        let bands: Vec<Band> = if width > NARROW { self.bands.clone() } else { Vec::new() };
        let x = Scale::Linear { max: self.seconds };
        Plot {
            width,
            height,
            x_name: "seconds after the first phase began",
            y_name,
            x,
            y,
            x_ticks: Some(seconds(self.seconds)),
            lines,
            bands: &bands,
        }
        .svg()
    }

    fn faults(&self) -> String {
        if self.bands.is_empty() {
            return String::new();
        }
        let mut rows = String::new();
        for (band, fault) in self.bands.iter().zip(&self.run.happened) {
            let back = fault.back_ms.map_or_else(
                || if fault.kind.cuts_off() { "never".into() } else { "–".into() },
                |ms| {
                    let (digits, unit) = plot::time(ms);
                    format!("{digits} {unit}")
                },
            );
            let _ = write!(
                rows,
                "<tr><td class=\"n\">{}</td><td>{}</td><td class=\"n\">{:.1}</td><td class=\"n\">{:.1}</td><td class=\"n\">{back}</td></tr>",
                band.number,
                escape(&band.name),
                band.from,
                band.to
            );
        }
        format!(
            "<table><tr><th>no.</th><th>fault</th><th class=\"n\">from s</th><th class=\"n\">to s</th><th class=\"n\">all hosts back after</th></tr>{rows}</table>"
        )
    }
}

/// Round times.
fn seconds(max: f64) -> Vec<(f64, String)> {
    let steps = [1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0];
    let step = steps.into_iter().find(|step| max / step <= 12.0).unwrap_or(max / 10.0);
    (0..=(max / step) as usize).map(|n| (n as f64 * step, number(n as f64 * step))).collect()
}

/// How many arrivals took how long: by percentile, further to the right the rarer.
fn distribution(run: &Run) -> String {
    let rare = |slower: f64| (1e6 / slower).log10();
    let drawn = |phase: &PhaseReport| {
        let points =
            SLOWER.iter().map(|slower| (rare(*slower), phase.latency.value_at_quantile(1.0 - slower / 1e6) as f64 / 1e3));
        Line { name: phase.name.clone(), points: points.collect() }
    };
    let lines: Vec<Line> = run.phases.iter().filter(|phase| !phase.latency.is_empty()).map(drawn).collect();
    let y = Scale::logarithmic(lines.iter().flat_map(|line| line.points.iter().map(|(_, value)| *value)));
    let names = [
        (500_000.0, "50 %"),
        (100_000.0, "90 %"),
        (10_000.0, "99 %"),
        (1_000.0, "99.9 %"),
        (100.0, "99.99 %"),
        (10.0, "99.999 %"),
    ];
    let ticks = names.iter().map(|(slower, name)| (rare(*slower), (*name).to_owned())).collect();
    let plot = Plot {
        width: WIDE,
        height: 260.0,
        x_name: "of all arrivals so many were faster",
        y_name: "milliseconds",
        x: Scale::Linear { max: rare(10.0) },
        y,
        x_ticks: Some(ticks),
        lines: &lines,
        bands: &[],
    };
    let mut rows = String::new();
    for phase in &run.phases {
        let at = |quantile: f64| number(phase.latency.value_at_quantile(quantile) as f64 / 1e3);
        let _ = write!(
            rows,
            "<tr><td>{}{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td></tr>",
            escape(&phase.name),
            if phase.warm_up { " <small>(warm-up)</small>" } else { "" },
            number(phase.changes as f64),
            number(phase.latency.len() as f64),
            at(0.5),
            at(0.99),
            at(0.999),
            number(phase.latency.max() as f64 / 1e3)
        );
    }
    format!(
        "{}<table><tr><th>phase</th><th class=\"n\">changes</th><th class=\"n\">arrivals</th><th class=\"n\">p50 ms</th><th class=\"n\">p99 ms</th>\
         <th class=\"n\">p99.9 ms</th><th class=\"n\">max ms</th></tr>{rows}</table>",
        plot.svg()
    )
}

fn bytes(run: &Run) -> String {
    let ours = run.measured()["bytes_per_host"];
    let mut rows = vec![("groupcast, measured".to_owned(), ours, plot::bytes(ours))];
    rows.extend(run.others().into_iter().map(|other| {
        let times = other.bytes_per_host / ours.max(1.0);
        (other.name.to_owned(), other.bytes_per_host, format!("{} ({} ×)", plot::bytes(other.bytes_per_host), number(times)))
    }));
    let how: String =
        run.others().iter().map(|other| format!("<li><b>{}</b>: {}</li>", escape(other.name), escape(&other.how))).collect();
    format!(
        "{}<ul class=\"note\">{how}</ul>",
        bars(&rows, "bytes to one host during the whole run, headers and protocol included")
    )
}

/// What one looks at first.
fn tiles(run: &Run) -> String {
    let measured = run.measured();
    let mut tiles = String::new();
    for (name, words, unit) in [
        ("hosts", "hosts", ""),
        ("topics_per_host", "topics on each", ""),
        ("changes", "changes", ""),
        ("enforced_p50", "enforced, median", "ms"),
        ("enforced_p99", "enforced, 99 %", "ms"),
        ("enforced_max", "enforced, slowest", "ms"),
        ("ratio", "of raw NATS", "×"),
        ("back_max", "all back after", "ms"),
        ("bytes_unneeded", "bytes not needed", "B"),
        ("fleet_and_server_mb", "hosts and server", "MB"),
    ] {
        if let Some(value) = measured.get(name) {
            let (shown, unit) = match unit {
                "ms" => plot::time(*value),
                other => (number(*value), other),
            };
            let (shown, unit) = if value.is_finite() { (shown, unit) } else { ("never".into(), "") };
            let _ = write!(tiles, "<div class=\"tile\"><b>{shown}<small>{unit}</small></b>{words}</div>");
        }
    }
    format!("<div class=\"tiles\">{tiles}</div>")
}

fn verdict(run: &Run, thresholds: &[Threshold], broken: &[String]) -> String {
    let mut text = String::new();
    if run.violated == 0 {
        let _ = write!(
            text,
            "<p class=\"good\">✓ All {} hosts ended equal to a compile from scratch; no checker objected.</p>",
            run.scenario.hosts
        );
    } else {
        let _ =
            write!(text, "<p class=\"bad\">✗ {} times something happened that must not (seed {}):</p>", run.violated, run.seed);
    }
    run.violations.iter().for_each(|words| text += &format!("<p class=\"bad\">{}</p>", escape(words)));
    for threshold in thresholds {
        let words = broken.iter().find(|words| words.starts_with(&threshold.text));
        text += &match words {
            Some(words) => format!("<p class=\"bad\">✗ {}</p>", escape(words)),
            None => format!("<p class=\"good\">✓ {}</p>", escape(&threshold.text)),
        };
    }
    text
}

pub fn page(run: &Run, thresholds: &[Threshold], broken: &[String]) -> String {
    let over = Over::new(run);
    let latency = over.time(
        (WIDE, 300.0),
        "milliseconds until enforced",
        true,
        &[
            line("p50", run, |s| if s.second.arrivals > 0 { s.second.p50_ms } else { f64::NAN }),
            line("p99", run, |s| if s.second.arrivals > 0 { s.second.p99_ms } else { f64::NAN }),
            line("slowest", run, |s| if s.second.arrivals > 0 { s.second.max_ms } else { f64::NAN }),
        ],
    );
    let small = |name: &str, lines: &[Line]| over.time((NARROW, 210.0), name, false, lines);
    let changes = small("changes a second", &[line("changes", run, |s| s.second.changes as f64)]);
    let connected = small("hosts connected", &[line("connected", run, |s| f64::from(s.connected))]);
    let cpu = small("% of one core", &[line("server", run, |s| s.server_cpu), line("controllers", run, |s| s.controller_cpu)]);
    let memory = small(
        "MB",
        &[
            line("server", run, |s| s.server_mb),
            line("largest controller", run, |s| s.controller_mb),
            line("all simulated hosts", run, |s| s.own_mb),
        ],
    );
    let measured: String = run
        .measured()
        .iter()
        .map(|(name, value)| {
            let shown = if value.is_finite() { format!("{value:.3}") } else { "–".into() };
            format!("<tr><td>{name}</td><td class=\"n\">{shown}</td></tr>")
        })
        .collect();
    format!(
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>groupcast: {name}</title><style>{STYLE}</style></head><body>\
         <h1>{name}</h1><p class=\"about\">{about} Seed {seed}.</p>{tiles}{verdict}\
         <h2>From a change to its hosts’ kernels</h2>{latency}{faults}\
         <h2>How long it took, by phase</h2>{distribution}\
         <h2>Bytes to one host</h2>{bytes}\
         <h2>Load, processor and memory</h2><div class=\"pairs\"><div>{changes}</div><div>{connected}</div><div>{cpu}</div><div>{memory}</div></div>\
         <details><summary>Everything measured</summary><p class=\"note\">Times in milliseconds, memory in MB, processor in percent of one core.</p>\
         <table>{measured}</table></details></body></html>",
        name = escape(&run.scenario.name),
        about = escape(&run.scenario.about),
        seed = run.seed,
        tiles = tiles(run),
        verdict = verdict(run, thresholds, broken),
        faults = over.faults(),
        distribution = distribution(run),
        bytes = bytes(run),
    )
}
