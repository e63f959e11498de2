//! Plots as SVG, drawn here: nothing is loaded from anywhere. Colours come from the page's style, so that they follow its light or dark theme.

use std::fmt::Write as _;

const LEFT: f64 = 70.0;
const RIGHT: f64 = 16.0;
const TOP: f64 = 12.0;
const BOTTOM: f64 = 44.0;
/// Of one lane of faults above a plot.
const LANE: f64 = 15.0;
/// Of lines; more begin again.
const COLOURS: usize = 4;
/// About as wide as one character is, where text must not run into other text.
const CHARACTER: f64 = 6.4;

pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// A number as short as it can be read.
pub fn number(value: f64) -> String {
    let short = |value: f64, digits: usize| {
        let text = format!("{value:.digits$}");
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    };
    match value.abs() {
        0.0 => "0".into(),
        small if small < 1.0 => short(value, 2),
        middle if middle < 100.0 => short(value, 1),
        hundreds if hundreds < 10_000.0 => format!("{value:.0}"),
        thousands if thousands < 1e6 => format!("{} k", short(value / 1e3, 1)),
        millions if millions < 1e9 => format!("{} M", short(value / 1e6, 1)),
        _ => format!("{} G", short(value / 1e9, 1)),
    }
}

/// A time given in milliseconds, and its unit.
pub fn time(ms: f64) -> (String, &'static str) {
    if ms >= 1_000.0 { (number(ms / 1e3), "s") } else { (number(ms), "ms") }
}

/// Bytes, with the prefix at the unit.
pub fn bytes(value: f64) -> String {
    match number(value).split_once(' ') {
        Some((digits, prefix)) => format!("{digits} {prefix}B"),
        None => format!("{} B", number(value)),
    }
}

/// How values become places on an axis.
#[derive(Debug, Clone)]
pub enum Scale {
    Linear { max: f64 },
    Logarithmic { min: f64, max: f64 },
}

impl Scale {
    pub fn linear(values: impl Iterator<Item = f64>) -> Self {
        let most = values.filter(|value| value.is_finite()).fold(0.0, f64::max).max(1e-9);
        let step = step(most);
        Self::Linear { max: (most / step).ceil() * step }
    }

    /// From a power of ten to a power of ten.
    pub fn logarithmic(values: impl Iterator<Item = f64>) -> Self {
        let (mut least, mut most) = (f64::INFINITY, 0.0f64);
        for value in values.filter(|value| value.is_finite() && *value > 0.0) {
            (least, most) = (least.min(value), most.max(value));
        }
        let (least, most) = if least.is_finite() { (least, most) } else { (1.0, 10.0) };
        let (min, max) = (10f64.powf(least.log10().floor()), 10f64.powf(most.log10().ceil()));
        Self::Logarithmic { min, max: if max > min { max } else { min * 10.0 } }
    }

    /// From 0 to 1.
    fn place(&self, value: f64) -> f64 {
        match self {
            Self::Linear { max } => (value / max).clamp(0.0, 1.0),
            Self::Logarithmic { min, max } => ((value.max(*min) / min).log10() / (max / min).log10()).clamp(0.0, 1.0),
        }
    }

    fn ticks(&self) -> Vec<f64> {
        match self {
            Self::Linear { max } => {
                let step = step(*max);
                (0..=(max / step).round() as usize).map(|n| n as f64 * step).collect()
            }
            Self::Logarithmic { min, max } => {
                let decades = (max / min).log10().round() as i32;
                (0..=decades).map(|decade| min * 10f64.powi(decade)).collect()
            }
        }
    }
}

/// A round step that divides a range into four or a little more.
fn step(max: f64) -> f64 {
    let rough = max / 4.0;
    let unit = 10f64.powf(rough.log10().floor());
    [1.0, 2.0, 2.5, 5.0, 10.0].into_iter().map(|factor| factor * unit).find(|step| *step >= rough * 0.999).unwrap_or(unit * 10.0)
}

pub struct Line {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// Something that was in force from then to then; its number stands in the list below.
#[derive(Debug, Clone)]
pub struct Band {
    pub from: f64,
    pub to: f64,
    pub number: usize,
    pub name: String,
}

pub struct Plot<'a> {
    pub width: f64,
    pub height: f64,
    pub x_name: &'a str,
    pub y_name: &'a str,
    pub x: Scale,
    pub y: Scale,
    /// Instead of numbers, where the scale has places of its own.
    pub x_ticks: Option<Vec<(f64, String)>>,
    pub lines: &'a [Line],
    pub bands: &'a [Band],
}

/// In which lane each band lies, so that none covers another's number.
fn lanes(bands: &[Band], place: impl Fn(f64) -> f64) -> (Vec<usize>, usize) {
    let mut ends: Vec<f64> = Vec::new();
    let lanes: Vec<usize> = bands
        .iter()
        .map(|band| {
            let (from, to) = (place(band.from), place(band.to).max(place(band.from) + 20.0));
            let lane = ends.iter().position(|end| *end + 3.0 < from).unwrap_or(ends.len());
            if lane == ends.len() {
                ends.push(to);
            } else {
                ends[lane] = to;
            }
            lane
        })
        .collect();
    (lanes, ends.len())
}

impl Plot<'_> {
    pub fn svg(&self) -> String {
        let x = |value: f64| LEFT + self.x.place(value) * (self.width - LEFT - RIGHT);
        let (lanes, count) = lanes(self.bands, x);
        let top = TOP + count as f64 * LANE;
        let height = self.height + count as f64 * LANE;
        let bottom = height - BOTTOM;
        let y = |value: f64| bottom - self.y.place(value) * (bottom - top);
        let mut svg =
            format!("<svg viewBox=\"0 0 {} {height}\" role=\"img\" aria-label=\"{}\">", self.width, escape(self.y_name));
        for (band, lane) in self.bands.iter().zip(lanes) {
            let (from, to, at) = (x(band.from), x(band.to), TOP + lane as f64 * LANE - 8.0);
            let (wide, label) = ((to - from).max(1.0), (to - from).max(18.0));
            let _ = write!(
                svg,
                "<g class=\"fault\"><title>{}: {} to {} s</title><rect class=\"shade\" x=\"{from:.1}\" y=\"{top:.1}\" width=\"{wide:.1}\" height=\"{:.1}\"/>\
                 <rect class=\"tag\" x=\"{from:.1}\" y=\"{at:.1}\" width=\"{label:.1}\" height=\"13\" rx=\"3\"/>\
                 <text class=\"tagged\" x=\"{:.1}\" y=\"{:.1}\">{}</text></g>",
                escape(&band.name),
                number(band.from),
                number(band.to),
                bottom - top,
                from + 9.0,
                at + 10.0,
                band.number
            );
        }
        for tick in self.y.ticks() {
            let at = y(tick);
            let _ = write!(
                svg,
                "<line class=\"grid\" x1=\"{LEFT}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                self.width - RIGHT,
                LEFT - 7.0,
                at + 4.0,
                number(tick)
            );
        }
        self.x_axis(&mut svg, bottom, x);
        let (middle, name) = ((top + bottom) / 2.0, escape(self.y_name));
        let _ = write!(
            svg,
            "<text class=\"name\" x=\"14\" y=\"{middle:.1}\" transform=\"rotate(-90 14 {middle:.1})\" text-anchor=\"middle\">{name}</text>"
        );
        for (at, line) in self.lines.iter().enumerate() {
            let points = line.points.iter().filter(|(_, value)| value.is_finite());
            let path: Vec<String> = points.map(|(px, py)| format!("{:.1},{:.1}", x(*px), y(*py))).collect();
            let _ = write!(svg, "<polyline class=\"line c{}\" points=\"{}\"/>", at % COLOURS, path.join(" "));
        }
        svg.push_str("</svg>");
        svg + &self.key()
    }

    fn x_axis(&self, svg: &mut String, bottom: f64, x: impl Fn(f64) -> f64) {
        let ticks = self.x_ticks.clone().unwrap_or_else(|| self.x.ticks().into_iter().map(|tick| (tick, number(tick))).collect());
        // A label that would touch the one before it is left out.
        let mut free = f64::NEG_INFINITY;
        for (value, label) in ticks {
            let (at, half) = (x(value), label.chars().count() as f64 * CHARACTER / 2.0);
            // What would run over the edge stands before it.
            let middle = at.min(self.width - half);
            if middle - half < free {
                continue;
            }
            free = middle + half + 6.0;
            let _ = write!(
                svg,
                "<line class=\"tick\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{bottom:.1}\" y2=\"{:.1}\"/><text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{label}</text>",
                bottom + 4.0,
                bottom + 17.0
            );
        }
        let (middle, at, name) = ((LEFT + self.width - RIGHT) / 2.0, bottom + 36.0, escape(self.x_name));
        let _ = write!(svg, "<text class=\"name\" x=\"{middle:.1}\" y=\"{at:.1}\" text-anchor=\"middle\">{name}</text>");
    }

    fn key(&self) -> String {
        if self.lines.len() < 2 {
            return String::new();
        }
        let entries = self.lines.iter().enumerate();
        let spans: String =
            entries.map(|(at, line)| format!("<span><i class=\"k{}\"></i>{}</span>", at % COLOURS, escape(&line.name))).collect();
        format!("<p class=\"key\">{spans}</p>")
    }
}

/// Bars on a logarithmic scale: what differs by thousands is still to be seen.
pub fn bars(rows: &[(String, f64, String)], unit: &str) -> String {
    let scale = Scale::logarithmic(rows.iter().map(|(_, value, _)| *value));
    let most = rows.iter().map(|(_, value, _)| scale.place(*value)).fold(1e-9, f64::max);
    let rows: String = rows
        .iter()
        .enumerate()
        .map(|(at, (name, value, label))| {
            let (share, class) = (scale.place(*value).max(0.01) / most * 100.0, if at == 0 { "ours" } else { "theirs" });
            format!(
                "<div class=\"bar\"><span>{}</span><b><i class=\"{class}\" style=\"width:{share:.1}%\"></i></b><em>{}</em></div>",
                escape(name),
                escape(label)
            )
        })
        .collect();
    format!("<div class=\"bars\">{rows}</div><p class=\"note\">{}, on a logarithmic scale</p>", escape(unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_end_at_round_numbers() {
        for (most, ticks) in [(97.0, 100.0), (0.3, 0.3), (1_001.0, 1_200.0), (10_000.0, 10_000.0)] {
            let scale = Scale::linear([most].into_iter());
            let found = scale.ticks();
            assert!((3..=9).contains(&found.len()), "{most}: {found:?}");
            assert!(*found.last().unwrap() >= most && *found.last().unwrap() <= ticks * 1.3, "{most}: {found:?}");
        }
        let scale = Scale::logarithmic([0.7, 320.0, f64::NAN, 0.0].into_iter());
        assert_eq!(scale.ticks().len(), 5);
        assert_eq!((scale.place(0.0), scale.place(1e9)), (0.0, 1.0));
        assert_eq!([999.0, 41_353.0].map(time), [("999".into(), "ms"), ("41.4".into(), "s")]);
        assert_eq!([999.0, 15_000.0].map(bytes), ["999 B", "15 kB"]);
        assert_eq!([0.0, 0.25, 12.0, 12_500.0, 3e6].map(number), ["0", "0.25", "12", "12.5 k", "3 M"]);
    }

    #[test]
    fn bands_that_overlap_lie_in_lanes_of_their_own() {
        let band = |from: f64, to: f64, number| Band { from, to, number, name: "x".into() };
        let (lanes, count) = lanes(&[band(0.0, 50.0, 1), band(10.0, 12.0, 2), band(100.0, 101.0, 3)], |value| value);
        assert_eq!((lanes, count), (vec![0, 1, 0], 2));
    }

    #[test]
    fn names_cannot_break_the_page() {
        let line = Line { name: "<b>".into(), points: vec![(0.0, 1.0), (1.0, f64::NAN)] };
        let plot = Plot {
            width: 900.0,
            height: 200.0,
            x_name: "time \"in\" s",
            y_name: "<ms>",
            x: Scale::linear([1.0].into_iter()),
            y: Scale::linear([1.0].into_iter()),
            x_ticks: None,
            lines: &[line, Line { name: "a&b".into(), points: Vec::new() }],
            bands: &[],
        };
        let svg = plot.svg();
        assert!(!svg.contains("<b>") && !svg.contains("<ms>") && svg.contains("a&amp;b"), "{svg}");
    }
}
