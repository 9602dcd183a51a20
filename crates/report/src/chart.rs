//! Draws plots as SVG.

use anyhow::Result;
use plotters::coord::combinators::IntoLogRange as _;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::promise::Bound;
use crate::record::{Record, significant};
use crate::series::{Density, DensityPoint, Failover};

const WIDTH: u32 = 960;
/// Pixels from one row of a plot to the next.
const ROW: u32 = 22;
/// Pixels for the names of rows.
const NAMES: u32 = 420;
const BETTER: RGBColor = RGBColor(0x1b, 0x7f, 0x4b);
const WORSE: RGBColor = RGBColor(0xb8, 0x3a, 0x2b);
/// Colors that are told apart by most who see few.
const COLORS: [RGBColor; 10] = [
    RGBColor(0x44, 0x77, 0xaa),
    RGBColor(0xee, 0x66, 0x77),
    RGBColor(0x22, 0x88, 0x33),
    RGBColor(0xcc, 0xbb, 0x44),
    RGBColor(0x66, 0xcc, 0xee),
    RGBColor(0xaa, 0x33, 0x77),
    RGBColor(0xbb, 0xbb, 0xbb),
    RGBColor(0xee, 0x88, 0x66),
    RGBColor(0x77, 0x55, 0x33),
    RGBColor(0x33, 0x33, 0x88),
];

fn font(horizontal: HPos) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", 13)).pos(Pos::new(horizontal, VPos::Center))
}

fn pixels(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX / (2 * ROW)) * ROW
}

fn position(index: usize) -> f64 {
    f64::from(u32::try_from(index).unwrap_or(u32::MAX))
}

/// Returns the powers of ten around what is positive among values and their bounds.
fn decades(values: impl Iterator<Item = f64>) -> std::ops::Range<f64> {
    let (mut low, mut high) = (1.0_f64, 1.0_f64);
    for value in values.filter(|value| value.is_finite() && *value > 0.0) {
        (low, high) = (low.min(value), high.max(value));
    }
    let (low, high) = (low.log10().floor(), high.log10().ceil());
    10_f64.powf(low)..10_f64.powf(if high > low { high } else { low + 1.0 })
}

/// Draws, for each record, how many times better ours is, on a logarithmic scale.
pub(crate) fn ratios(records: &[Record]) -> Result<String> {
    let drawn: Vec<&Record> = records
        .iter()
        .filter(|record| record.ratio.is_finite() && record.ratio > 0.0 && !record.is_count())
        .collect();
    let ends = |record: &Record| {
        let half = record.spread.max(0.0) / 2.0;
        // Of a logarithmic scale there is no point at zero.
        ((record.ratio - half).max(record.ratio / 10.0), record.ratio + half)
    };
    let range = decades(drawn.iter().flat_map(|record| {
        let (low, high) = ends(record);
        [low, high]
    }));
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, pixels(drawn.len()) + 50)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .margin_right(60)
            .set_label_area_size(LabelAreaPosition::Left, NAMES)
            .set_label_area_size(LabelAreaPosition::Bottom, 30)
            .build_cartesian_2d(range.clone().log_scale(), -0.5..position(drawn.len()) - 0.5)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .x_label_formatter(&|ratio| format!("{ratio}x"))
            .draw()?;
        let area = chart.plotting_area();
        let bottom = position(drawn.len()) - 0.5;
        area.draw(&PathElement::new(vec![(1.0, -0.5), (1.0, bottom)], BLACK.stroke_width(1)))?;
        for (index, record) in drawn.iter().enumerate() {
            let row = position(drawn.len() - 1 - index);
            let color = if record.ratio >= 1.0 { BETTER } else { WORSE };
            let (low, high) = ends(record);
            area.draw(&PathElement::new(vec![(low, row), (high, row)], color.stroke_width(2)))?;
            area.draw(&Circle::new((record.ratio, row), 4, color.filled()))?;
            let (_, y) = area.map_coordinate(&(record.ratio, row));
            let (right, _) = area.map_coordinate(&(range.end, row));
            let (left, _) = area.map_coordinate(&(range.start, row));
            let name = format!("{}, beside {}", record.case, record.rival_name);
            root.draw(&Text::new(name, (left - 8, y), font(HPos::Right)))?;
            root.draw(&Text::new(
                format!("{}x", significant(record.ratio)),
                (right + 6, y),
                font(HPos::Left).color(&color),
            ))?;
        }
        root.present()?;
    }
    Ok(svg)
}

/// Draws what the waits at failovers consist of, one bar for each case.
pub(crate) fn steps(failovers: &[Failover]) -> Result<String> {
    let parts: Vec<Vec<(&str, f64)>> = failovers
        .iter()
        .map(|failover| {
            let steps = failover.steps.iter().map(|(name, time)| (name.as_str(), *time));
            let all = [("noticed", failover.noticed)].into_iter().chain(steps);
            all.chain([("answer", failover.answer)]).collect()
        })
        .collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, time) in parts.iter().flatten() {
        // What takes no time anywhere needs no color.
        if *time > 0.0 && !names.contains(name) {
            names.push(name);
        }
    }
    let length = |parts: &Vec<(&str, f64)>| parts.iter().map(|(_, time)| time).sum::<f64>();
    let longest = parts.iter().map(length).fold(1.0, f64::max);
    let height = pixels(failovers.len());
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height + 50 + pixels(names.len().div_ceil(5))))
            .into_drawing_area();
        root.fill(&WHITE)?;
        let (plot, legend) = root.split_vertically(height + 50);
        let mut chart = ChartBuilder::on(&plot)
            .margin(10)
            .set_label_area_size(LabelAreaPosition::Left, 200)
            .set_label_area_size(LabelAreaPosition::Bottom, 30)
            .build_cartesian_2d(0.0..longest * 1.05, -0.5..position(failovers.len()) - 0.5)?;
        chart
            .configure_mesh()
            .disable_y_mesh()
            .disable_y_axis()
            .max_light_lines(1)
            .x_label_formatter(&|time| format!("{time} ms"))
            .draw()?;
        let area = chart.plotting_area();
        for (index, (failover, parts)) in failovers.iter().zip(&parts).enumerate() {
            let row = position(failovers.len() - 1 - index);
            let mut begin = 0.0;
            for (name, time) in parts {
                let color = color_of(&names, name);
                area.draw(&Rectangle::new(
                    [(begin, row - 0.35), (begin + time, row + 0.35)],
                    color.filled(),
                ))?;
                begin += time;
            }
            let (left, y) = area.map_coordinate(&(0.0, row));
            plot.draw(&Text::new(failover.case.clone(), (left - 8, y), font(HPos::Right)))?;
        }
        for (index, name) in names.iter().enumerate() {
            let index = i32::try_from(index).unwrap_or(i32::MAX);
            let (x, y) = (20 + index % 5 * 180, 10 + index / 5 * ROW.cast_signed());
            legend.draw(&Rectangle::new([(x, y - 6), (x + 12, y + 6)], color_of(&names, name).filled()))?;
            legend.draw(&Text::new(*name, (x + 18, y), font(HPos::Left)))?;
        }
        root.present()?;
    }
    Ok(svg)
}

fn color_of(names: &[&str], name: &str) -> RGBColor {
    let index = names.iter().position(|other| *other == name).unwrap_or(0);
    COLORS[index % COLORS.len()]
}

/// Returns programs and numbers of copies for which there is something to draw over time.
pub(crate) fn programs_and_copies(density: &[Density]) -> Vec<(&str, usize)> {
    let mut found: Vec<(&str, usize)> = density
        .iter()
        .filter(|series| series.points.len() > 1)
        .map(|series| (series.program.as_str(), series.copies))
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// What is drawn of copies.
#[derive(Clone, Copy)]
pub(crate) enum Measure {
    Memory,
    Throughput,
}

impl Measure {
    fn of(self, point: &DensityPoint) -> f64 {
        match self {
            Self::Memory => point.memory_mib,
            Self::Throughput => point.frames_per_second,
        }
    }

    /// Returns what so many copies have at the end: the last memory, the mean throughput.
    fn at_end(self, series: &Density) -> f64 {
        match self {
            Self::Memory => series.points.last().map_or(0.0, |point| point.memory_mib),
            Self::Throughput => {
                let sum: f64 = series.points.iter().map(|point| point.frames_per_second).sum();
                sum / position(series.points.len().max(1))
            }
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::Memory => "MiB",
            Self::Throughput => "frames/s",
        }
    }
}

/// A line of a plot, with its name.
type Line<'a> = (&'a str, Vec<(f64, f64)>);

/// Draws the memory or the throughput of so many copies of a program over time, a line for each contender.
pub(crate) fn over_time(density: &[Density], of: (&str, usize), measure: Measure) -> Result<String> {
    let lines: Vec<Line<'_>> = density
        .iter()
        .filter(|series| (series.program.as_str(), series.copies) == of && !series.points.is_empty())
        .map(|series| {
            let points = series.points.iter().map(|point| (point.second, measure.of(point)));
            (series.contender.as_str(), points.collect())
        })
        .collect();
    lines_of(&lines, "s", measure.unit())
}

/// Draws the memory or the throughput of a program over the number of its copies, a line for each contender that has several.
pub(crate) fn over_copies(density: &[Density], program: &str, measure: Measure) -> Result<Option<String>> {
    let mut lines: Vec<Line<'_>> = Vec::new();
    for series in density.iter().filter(|series| series.program == program && !series.points.is_empty()) {
        let point = (position(series.copies), measure.at_end(series));
        match lines.iter_mut().find(|(name, _)| *name == series.contender) {
            Some((_, points)) => points.push(point),
            None => lines.push((&series.contender, vec![point])),
        }
    }
    lines.retain(|(_, points)| points.len() > 1);
    for (_, points) in &mut lines {
        points.sort_by(|one, other| one.0.total_cmp(&other.0));
    }
    if lines.is_empty() { Ok(None) } else { lines_of(&lines, "copies", measure.unit()).map(Some) }
}

/// Draws lines from zero on, with their names beside them.
fn lines_of(lines: &[Line<'_>], across: &str, upwards: &str) -> Result<String> {
    let points = || lines.iter().flat_map(|(_, points)| points);
    let end = points().map(|point| point.0).fold(1.0, f64::max);
    let most = points().map(|point| point.1).fold(1.0, f64::max);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, 360)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .margin_right(200)
            .set_label_area_size(LabelAreaPosition::Left, 90)
            .set_label_area_size(LabelAreaPosition::Bottom, 30)
            .build_cartesian_2d(0.0..end, 0.0..most * 1.05)?;
        chart
            .configure_mesh()
            .x_label_formatter(&|value| format!("{value} {across}"))
            .y_label_formatter(&|value| format!("{value} {upwards}"))
            .draw()?;
        let area = chart.plotting_area();
        let (right, top) = area.map_coordinate(&(end, most * 1.05));
        for (index, (name, points)) in lines.iter().enumerate() {
            let color = COLORS[index % COLORS.len()];
            area.draw(&PathElement::new(points.clone(), color.stroke_width(2)))?;
            let y = top + 10 + i32::try_from(index).unwrap_or(i32::MAX / 64) * ROW.cast_signed();
            root.draw(&Rectangle::new([(right + 10, y - 6), (right + 22, y + 6)], color.filled()))?;
            root.draw(&Text::new((*name).to_owned(), (right + 28, y), font(HPos::Left)))?;
        }
        root.present()?;
    }
    Ok(svg)
}

/// Draws what was measured from day to day, and the bound.
pub(crate) fn history(values: &[(String, f64)], bound: &Bound) -> Result<String> {
    let most = values.iter().map(|(_, value)| *value).fold(bound.value(), f64::max);
    let last = position(values.len() - 1);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (480, 200)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .margin_right(40)
            .set_label_area_size(LabelAreaPosition::Left, 80)
            .set_label_area_size(LabelAreaPosition::Bottom, 30)
            .build_cartesian_2d(-0.25..last + 0.25, 0.0..most * 1.1)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .disable_x_axis()
            .max_light_lines(1)
            .y_label_formatter(&|value| bound.amount(*value))
            .draw()?;
        let area = chart.plotting_area();
        let limit = [(-0.25, bound.value()), (last + 0.25, bound.value())];
        area.draw(&PathElement::new(limit, BLACK.stroke_width(2)))?;
        let line: Vec<_> =
            values.iter().enumerate().map(|(day, (_, value))| (position(day), *value)).collect();
        area.draw(&PathElement::new(line.clone(), COLORS[0].stroke_width(2)))?;
        let (_, bottom) = area.map_coordinate(&(0.0, 0.0));
        for (point, (date, value)) in line.into_iter().zip(values) {
            let color = if bound.holds(*value) { BETTER } else { WORSE };
            area.draw(&Circle::new(point, 4, color.filled()))?;
            let (x, _) = area.map_coordinate(&point);
            root.draw(&Text::new(date.clone(), (x, bottom + 14), font(HPos::Center)))?;
        }
        root.present()?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scales_hold_every_value_and_one() {
        assert_eq!(decades([0.02, 35.0].into_iter()), 0.01..100.0);
        assert_eq!(decades([f64::NAN, 0.0, -1.0].into_iter()), 1.0..10.0);
        assert_eq!(decades([100.0].into_iter()), 1.0..100.0);
    }

    #[test]
    fn a_record_without_a_ratio_is_left_out() {
        let mut record = Record::new("b", "the case", "us", "the rival", vec![(1.0, 4.0)], false);
        assert!(ratios(&[record.clone()]).unwrap().contains("the case, beside the rival"));
        record.ratio = f64::NAN;
        assert!(!ratios(&[record.clone()]).unwrap().contains("the case"));
        (record.ratio, record.unit) = (4.0, "page faults".to_owned());
        assert!(!ratios(&[record]).unwrap().contains("the case"), "counts are in the table");
    }

    #[test]
    fn days_are_named_and_judged() {
        let bound = Bound::try_from("<= 10 us".to_owned()).unwrap();
        let svg = history(&[("2026-11-22".into(), 9.0), ("now".into(), 11.0)], &bound).unwrap();
        assert!(svg.contains("2026-11-22") && svg.contains("now"), "{svg}");
        let color = |color: RGBColor| format!("#{:02X}{:02X}{:02X}", color.0, color.1, color.2);
        assert!(svg.contains(&color(BETTER)) && svg.contains(&color(WORSE)), "{svg}");
    }

    fn density(contender: &str, copies: usize, memory: f64, frames: &[f64]) -> Density {
        let points = frames.iter().enumerate().map(|(second, &frames)| DensityPoint {
            second: position(second),
            memory_mib: memory,
            frames_per_second: frames,
            frames_per_processor_second: frames,
        });
        Density { program: "p".into(), contender: contender.into(), copies, points: points.collect() }
    }

    #[test]
    fn copies_are_drawn_over_time_and_over_their_number() {
        let all = [
            density("plain", 1, 100.0, &[7.0, 9.0]),
            density("plain", 4, 400.0, &[8.0]),
            density("alone", 4, 1.0, &[8.0, 8.0]),
        ];
        assert_eq!(programs_and_copies(&all), [("p", 1), ("p", 4)]);
        assert!((Measure::Throughput.at_end(&all[0]) - 8.0).abs() < 1e-9);
        let over = over_copies(&all, "p", Measure::Memory).unwrap().unwrap();
        assert!(over.contains("plain") && over.contains("MiB") && !over.contains("alone"), "{over}");
        assert!(over_copies(&all, "other", Measure::Memory).unwrap().is_none());
        let time = over_time(&all, ("p", 4), Measure::Throughput).unwrap();
        assert!(time.contains("alone") && time.contains("frames/s") && !time.contains("MiB"), "{time}");
    }
}
