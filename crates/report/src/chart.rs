//! Draws plots as SVG.

use anyhow::Result;
use plotters::coord::combinators::IntoLogRange as _;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::promise::Bound;
use crate::record::{Record, significant};
use crate::series::{Density, Failover};

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
    let drawn: Vec<&Record> =
        records.iter().filter(|record| record.ratio.is_finite() && record.ratio > 0.0).collect();
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

/// Returns the numbers of copies for which there is something to draw.
pub(crate) fn numbers_of_copies(density: &[Density]) -> Vec<usize> {
    let mut numbers: Vec<usize> =
        density.iter().filter(|series| series.points.len() > 1).map(|series| series.copies).collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

/// Draws the memory of so many copies over time, a line for each contender.
pub(crate) fn memory_over_time(density: &[Density], copies: usize) -> Result<String> {
    let lines: Vec<&Density> =
        density.iter().filter(|series| series.copies == copies && !series.points.is_empty()).collect();
    let points = || lines.iter().flat_map(|series| &series.points);
    let end = points().map(|point| point.second).fold(1.0, f64::max);
    let most = points().map(|point| point.memory_mib).fold(1.0, f64::max);
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, 360)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .margin(10)
            .margin_right(200)
            .set_label_area_size(LabelAreaPosition::Left, 70)
            .set_label_area_size(LabelAreaPosition::Bottom, 30)
            .build_cartesian_2d(0.0..end, 0.0..most * 1.05)?;
        chart
            .configure_mesh()
            .x_label_formatter(&|second| format!("{second} s"))
            .y_label_formatter(&|memory| format!("{memory} MiB"))
            .draw()?;
        let area = chart.plotting_area();
        let (right, top) = area.map_coordinate(&(end, most * 1.05));
        for (index, series) in lines.iter().enumerate() {
            let color = COLORS[index % COLORS.len()];
            let line: Vec<_> = series.points.iter().map(|point| (point.second, point.memory_mib)).collect();
            area.draw(&PathElement::new(line, color.stroke_width(2)))?;
            let y = top + 10 + i32::try_from(index).unwrap_or(i32::MAX / 64) * ROW.cast_signed();
            root.draw(&Rectangle::new([(right + 10, y - 6), (right + 22, y + 6)], color.filled()))?;
            root.draw(&Text::new(series.contender.clone(), (right + 28, y), font(HPos::Left)))?;
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
        assert!(!ratios(&[record]).unwrap().contains("the case"));
    }

    #[test]
    fn days_are_named_and_judged() {
        let bound = Bound::try_from("<= 10 us".to_owned()).unwrap();
        let svg = history(&[("2026-11-22".into(), 9.0), ("now".into(), 11.0)], &bound).unwrap();
        assert!(svg.contains("2026-11-22") && svg.contains("now"), "{svg}");
        let color = |color: RGBColor| format!("#{:02X}{:02X}{:02X}", color.0, color.1, color.2);
        assert!(svg.contains(&color(BETTER)) && svg.contains(&color(WORSE)), "{svg}");
    }
}
