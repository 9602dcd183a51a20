//! Pictures of shares of CPU time: bars for a terminal, and a figure as SVG.

use std::fmt::Write as _;

const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// One line of a picture.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    /// What it is called.
    pub name: String,
    /// What it should be, in percent of a CPU, if it has a target.
    pub target: Option<f64>,
    /// What it was in each second, in percent.
    pub points: Vec<f64>,
}

/// Returns the last `width` points as bars of one line each, of which a full one is `most` percent.
#[must_use]
pub fn bars(points: &[f64], width: usize, most: f64) -> String {
    let start = points.len().saturating_sub(width);
    let bar = |point: &f64| {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 8")]
        let eighths = (point / most * 8.0).ceil().clamp(0.0, 8.0) as usize;
        EIGHTHS.get(eighths).copied().unwrap_or(' ')
    };
    points[start..].iter().map(bar).collect()
}

const COLORS: [&str; 6] = ["#0072b2", "#d55e00", "#009e73", "#7f7f7f", "#cc79a7", "#e69f00"];
const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 50.0;
const TOP: f64 = 30.0;

/// Returns a figure: time in seconds across, percent of a CPU upwards, a line for each series, a dashed one for its target.
#[must_use]
pub fn svg(title: &str, series: &[Series]) -> String {
    let longest = series.iter().map(|line| line.points.len()).max().unwrap_or(0).max(2);
    let highest = series.iter().flat_map(|line| line.points.iter().copied().chain(line.target));
    let highest = (highest.fold(10.0, f64::max) / 10.0).ceil() * 10.0;
    let x = |index: usize| LEFT + WIDTH * number(index) / number(longest - 1);
    let y = |percent: f64| TOP + HEIGHT * (1.0 - percent / highest);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {:.0} {:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n",
        LEFT + WIDTH + 130.0,
        TOP + HEIGHT + 45.0
    );
    // Writing to a string cannot fail.
    let _ = writeln!(out, "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>");
    let _ = writeln!(out, "<text x=\"{LEFT}\" y=\"18\" font-size=\"14\">{}</text>", escape(title));
    for step in 0..=5_u8 {
        let percent = highest * f64::from(step) / 5.0;
        let (right, line) = (LEFT + WIDTH, y(percent));
        let _ = writeln!(out, "<path d=\"M{LEFT} {line:.1}H{right}\" stroke=\"#ddd\"/>");
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{percent:.0}%</text>",
            LEFT - 6.0,
            line + 4.0
        );
        let index = (longest - 1) * usize::from(step) / 5;
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{index} s</text>",
            x(index),
            TOP + HEIGHT + 20.0
        );
    }
    for (place, line) in series.iter().enumerate() {
        let color = COLORS[place % COLORS.len()];
        let mut path = String::new();
        for (index, point) in line.points.iter().enumerate() {
            let _ = write!(path, "{}{:.1} {:.1}", if index == 0 { "M" } else { "L" }, x(index), y(*point));
        }
        let _ = writeln!(out, "<path d=\"{path}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"1.8\"/>");
        if let Some(target) = line.target {
            let (height, right) = (y(target), LEFT + WIDTH);
            let _ = writeln!(
                out,
                "<path d=\"M{LEFT} {height:.1}H{right}\" stroke=\"{color}\" stroke-dasharray=\"5 4\"/>"
            );
        }
        let height = TOP + 16.0 + 18.0 * number(place);
        let _ = writeln!(
            out,
            "<text x=\"{}\" y=\"{height}\" fill=\"{color}\">{}</text>",
            LEFT + WIDTH + 10.0,
            escape(&line.name)
        );
    }
    out.push_str("</svg>\n");
    out
}

fn number(count: usize) -> f64 {
    u32::try_from(count).map_or(f64::from(u32::MAX), f64::from)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_high_as_their_points() {
        assert_eq!(bars(&[0.0, 1.0, 50.0, 100.0, 400.0], 8, 100.0), " ▁▄██");
        assert_eq!(bars(&[0.0, 0.0, 100.0], 2, 100.0), " █");
    }

    #[test]
    fn a_figure_has_a_line_and_a_target_for_each_series() {
        let points = vec![0.0, 20.0, 10.0];
        let series = [
            Series { name: "P1 <x>".into(), target: Some(10.0), points: points.clone() },
            Series { name: "hog".into(), target: None, points },
        ];
        let text = svg("A & B", &series);
        assert_eq!((text.matches("stroke-width").count(), text.matches("dasharray").count()), (2, 1));
        assert!(text.contains("P1 &lt;x&gt;") && text.contains("A &amp; B") && text.ends_with("</svg>\n"));
        // The highest value is on top: 20% of 20%.
        assert!(text.contains("M50.0 330.0L410.0 30.0L770.0 180.0"), "{text}");
        assert!(svg("empty", &[]).contains("<svg"));
    }
}
