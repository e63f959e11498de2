//! The report as one page: plots drawn here, nothing loaded from anywhere.

use std::fmt::Write as _;

use super::report::Run;
use super::threshold::Threshold;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 14.0;
const BOTTOM: f64 = 30.0;
const COLOURS: [&str; 4] = ["#2563eb", "#dc2626", "#059669", "#d97706"];

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:1020px;margin:2rem auto;padding:0 1rem;color:#1f2937}\
h1{font-size:1.5rem;margin-bottom:0}h2{font-size:1.1rem;margin:2rem 0 .3rem}p.about{color:#6b7280;margin-top:.2rem}\
table{border-collapse:collapse;margin:.5rem 0}td,th{padding:.15rem .8rem .15rem 0;text-align:left;border-bottom:1px solid #e5e7eb}\
td.n{text-align:right;font-variant-numeric:tabular-nums}.bad{color:#dc2626;font-weight:600}.good{color:#059669;font-weight:600}\
svg{display:block;width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#6b7280}.key span{margin-right:1.2rem}\
.key i{display:inline-block;width:.8rem;height:.2rem;margin-right:.35rem;vertical-align:middle}";

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// Round numbers that divide a range.
fn ticks(max: f64) -> Vec<f64> {
    let rough = (max / 4.0).max(1e-9);
    let unit = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * unit).find(|step| *step >= rough).unwrap_or(unit);
    (0..=(max / step).ceil() as usize).map(|n| n as f64 * step).collect()
}

fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        small if small < 1.0 => format!("{value:.2}"),
        middle if middle < 100.0 => format!("{:.1}", value).trim_end_matches(".0").to_owned(),
        thousands if thousands < 1e6 => format!("{value:.0}"),
        _ => format!("{:.1} M", value / 1e6),
    }
}

struct Line<'a> {
    name: &'a str,
    points: Vec<(f64, f64)>,
}

/// A band behind the lines.
struct Band {
    from: f64,
    to: f64,
    name: String,
}

fn plot(lines: &[Line<'_>], bands: &[Band], unit: &str) -> String {
    let points = || lines.iter().flat_map(|line| line.points.iter());
    let x_max = points().map(|(x, _)| *x).fold(1.0, f64::max);
    let y_ticks = ticks(points().map(|(_, y)| *y).filter(|y| y.is_finite()).fold(1e-3, f64::max));
    let y_max = y_ticks.last().copied().unwrap_or(1.0);
    let x = |value: f64| LEFT + value / x_max * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - value / y_max * (HEIGHT - TOP - BOTTOM);
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">");
    for band in bands {
        let (from, to) = (x(band.from.max(0.0)), x(band.to.min(x_max)));
        let (width, height, middle) = ((to - from).max(1.5), HEIGHT - TOP - BOTTOM, TOP + 90.0);
        let (name, words) = (escape(&band.name), from + 10.0);
        let _ = write!(
            svg,
            "<rect x=\"{from:.1}\" y=\"{TOP}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"#fde68a\" opacity=\"0.55\"><title>{name}</title></rect>\
             <text x=\"{words:.1}\" y=\"{middle:.1}\" transform=\"rotate(-90 {words:.1} {middle:.1})\">{name}</text>",
        );
    }
    for tick in &y_ticks {
        let at = y(*tick);
        let _ = write!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#e5e7eb\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            at + 4.0,
            number(*tick)
        );
    }
    for tick in ticks(x_max).into_iter().filter(|tick| *tick <= x_max) {
        let _ =
            write!(svg, "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{} s</text>", x(tick), HEIGHT - 10.0, number(tick));
    }
    let _ = write!(svg, "<text x=\"4\" y=\"{:.1}\">{unit}</text>", TOP - 3.0);
    for (line, colour) in lines.iter().zip(COLOURS) {
        let path: Vec<String> =
            line.points.iter().filter(|(_, y)| y.is_finite()).map(|(px, py)| format!("{:.1},{:.1}", x(*px), y(*py))).collect();
        let _ = write!(svg, "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\" points=\"{}\"/>", path.join(" "));
    }
    svg.push_str("</svg><p class=\"key\">");
    for (line, colour) in lines.iter().zip(COLOURS) {
        let _ = write!(svg, "<span><i style=\"background:{colour}\"></i>{}</span>", escape(line.name));
    }
    svg.push_str("</p>");
    svg
}

/// Bars from nothing, longest first where they are sorted so.
fn bars(rows: &[(String, f64, String)]) -> String {
    let most = rows.iter().map(|(_, value, _)| *value).fold(1e-9, f64::max);
    let mut svg = format!("<svg viewBox=\"0 0 {WIDTH} {}\" role=\"img\">", rows.len() as f64 * 34.0 + 6.0);
    for (index, (name, value, label)) in rows.iter().enumerate() {
        let top = index as f64 * 34.0 + 4.0;
        let _ = write!(
            svg,
            "<text x=\"0\" y=\"{:.1}\">{}</text><rect x=\"260\" y=\"{top:.1}\" height=\"20\" width=\"{:.1}\" fill=\"{}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\">{}</text>",
            top + 14.0,
            escape(name),
            (value / most * 560.0).max(1.0),
            if index == 0 { COLOURS[0] } else { "#9ca3af" },
            268.0 + (value / most * 560.0).max(1.0),
            top + 14.0,
            escape(label)
        );
    }
    svg.push_str("</svg>");
    svg
}

/// How many arrivals took how long, in bins that double.
fn distribution(run: &Run) -> String {
    let mut text = String::new();
    for phase in &run.phases {
        let mut rows = Vec::new();
        let (mut low, mut high) = (0u64, 1_000u64);
        let total = phase.latency.len();
        while low < phase.latency.max().max(1) && rows.len() < 20 {
            let count = phase.latency.count_between(low + 1, high);
            let share = count as f64 * 100.0 / total.max(1) as f64;
            rows.push((format!("{} to {} ms", low / 1_000, high / 1_000), share, format!("{share:.2} %")));
            (low, high) = (high, high * 2);
        }
        while rows.last().is_some_and(|(_, share, _)| *share == 0.0) {
            rows.pop();
        }
        let _ = write!(text, "<h3>{}: {} arrivals</h3>{}", escape(&phase.name), total, bars(&rows));
    }
    text
}

pub fn page(run: &Run, thresholds: &[Threshold], broken: &[String]) -> String {
    let at = |second: f64| (second - run.begun_s).max(0.0);
    let bands: Vec<Band> = run
        .happened
        .iter()
        .map(|fault| Band { from: at(fault.from_s), to: at(fault.to_s), name: fault.kind.name().to_owned() })
        .collect();
    let line = |name, of: &dyn Fn(&super::resources::Sample) -> f64| Line {
        name,
        points: run.samples.iter().map(|sample| (at(sample.second.at_s), of(sample))).collect(),
    };
    let latency = plot(
        &[line("p50", &|s| s.second.p50_ms), line("p99", &|s| s.second.p99_ms), line("max", &|s| s.second.max_ms)],
        &bands,
        "ms",
    );
    let rate = plot(
        &[
            line("changes a second", &|s| s.second.changes as f64),
            line("arrivals a second", &|s| s.second.arrivals as f64),
            line("hosts connected", &|s| f64::from(s.connected)),
        ],
        &bands,
        "",
    );
    let cpu = plot(&[line("server", &|s| s.server_cpu), line("controllers", &|s| s.controller_cpu)], &bands, "% of a core");
    let memory = plot(
        &[
            line("server", &|s| s.server_mb),
            line("largest controller", &|s| s.controller_mb),
            line("all simulated hosts", &|s| s.own_mb),
        ],
        &bands,
        "MB",
    );
    let ours = run.delivered_bytes as f64 / f64::from(run.scenario.hosts);
    let mut bytes = vec![("groupcast, measured".to_owned(), ours, format!("{} B", number(ours)))];
    bytes.extend(run.others().into_iter().map(|other| {
        (
            other.name.to_owned(),
            other.bytes_per_host,
            format!("{} B ({:.0} x)", number(other.bytes_per_host), other.bytes_per_host / ours.max(1.0)),
        )
    }));
    let how: String =
        run.others().iter().map(|other| format!("<li>{}: {}</li>", escape(other.name), escape(other.how))).collect();
    let measured: String = run
        .measured()
        .iter()
        .map(|(name, value)| {
            format!(
                "<tr><td>{name}</td><td class=\"n\">{}</td></tr>",
                if value.is_finite() { format!("{value:.3}") } else { "-".into() }
            )
        })
        .collect();
    let verdict = match (run.violations.is_empty(), broken.is_empty()) {
        (true, true) => format!(
            "<p class=\"good\">All {} hosts ended equal to a compile from scratch; every threshold was reached.</p>",
            run.equal
        ),
        _ => run.violations.iter().chain(broken).map(|words| format!("<p class=\"bad\">{}</p>", escape(words))).collect(),
    };
    let demanded: String = thresholds.iter().map(|threshold| format!("<li>{}</li>", escape(&threshold.text))).collect();
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>groupcast: {name}</title><style>{STYLE}</style>\
         <h1>{name}</h1><p class=\"about\">{about} Seed {seed}.</p>{verdict}<ul>{demanded}</ul>\
         <h2>From a change to its hosts' kernels</h2>{latency}\
         <h2>How long it took, by phase</h2>{distribution}\
         <h2>Bytes to one host</h2>{bytes}<ul>{how}</ul>\
         <h2>Load</h2>{rate}<h2>Processor</h2>{cpu}<h2>Memory</h2>{memory}\
         <h2>Everything measured</h2><p class=\"about\">Times in milliseconds.</p><table>{measured}</table></html>",
        name = escape(&run.scenario.name),
        about = escape(&run.scenario.about),
        seed = run.seed,
        distribution = distribution(run),
        bytes = bars(&bytes),
    )
}
