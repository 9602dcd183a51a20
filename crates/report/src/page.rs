//! The page, which has everything in it.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::promise::{Promise, Verdict};
use crate::record::{Record, significant};
use crate::report::{Bench, Plot, Report};

const STYLE: &str = "\
body { font: 15px/1.5 sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; width: 100%; margin: 1rem 0; font-size: 14px }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #ddd; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.held { color: #1b7f4b } .broken { color: #b83a2b; font-weight: bold } .unmeasured { color: #777 }
figure { margin: 1rem 0 } figcaption { color: #555; font-size: 14px }
svg { max-width: 100%; height: auto }
.days { display: flex; flex-wrap: wrap; gap: 1rem } .days figure { width: 480px; margin: 0 }
nav a { margin-right: .8rem }";

/// Returns the page.
pub(crate) fn html(report: &Report) -> String {
    let (held, broken, unmeasured) = report.verdicts();
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { "Orrery: what was measured" }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { "Orrery: what was measured" }
                p {
                    "Ours and each rival were measured in turn, in the same run. A ratio above 1 says that ours is better."
                    @if !report.promises.is_empty() {
                        " Of " (report.promises.len()) " promises " (held) " are held, " (broken) " are broken, and " (unmeasured)
                        " were not measured."
                    }
                }
                nav { @for bench in &report.benches { a href={ "#" (bench.name) } { (bench.name) } } }
                @if !report.promises.is_empty() { (promises(report)) }
                @for bench in &report.benches { (section(bench, report)) }
            }
        }
    }
    .into_string()
}

fn promises(report: &Report) -> Markup {
    html! {
        h2 { "Promises" }
        @if !report.history.is_empty() {
            p { "Measured before on: " (report.history.iter().map(|day| day.date.as_str()).collect::<Vec<_>>().join(", ")) "." }
        }
        table {
            tr { th { "promise" } th { "benchmark" } th.number { "bound" } th.number { "measured" } th { "verdict" } }
            @for (promise, verdict) in &report.promises { (promised(promise, verdict)) }
        }
    }
}

fn promised(promise: &Promise, verdict: &Verdict) -> Markup {
    let (class, measured, reason) = match verdict {
        Verdict::Held(value) => ("held", promise.bound.amount(*value), None),
        Verdict::Broken(value) => ("broken", promise.bound.amount(*value), None),
        Verdict::Unmeasured(reason) => ("unmeasured", String::new(), Some(reason)),
    };
    html! {
        tr {
            td { (promise.sentence) @if let Some(rival) = &promise.rival { ", beside " (rival) } }
            td { (promise.bench) }
            td.number { (promise.bound.to_string()) }
            td.number { (measured) }
            td class=(class) { (class) @if let Some(reason) = reason { ": " (reason) } }
        }
    }
}

fn section(bench: &Bench, report: &Report) -> Markup {
    let plots = report.plots.iter().filter(|plot| plot.bench == bench.name);
    let (days, plots): (Vec<&Plot>, Vec<&Plot>) = plots.partition(|plot| plot.is_history);
    html! {
        h2 id=(bench.name) { (bench.name) }
        p { "Recorded at " (humantime::format_rfc3339_seconds(bench.written)) ". Again: " code { "make bench B=" (bench.name) } }
        @for plot in plots { (figure(plot)) }
        details {
            summary { "All " (bench.records.len()) " values" }
            table {
                tr {
                    th { "case" } th { "rival" } th.number { "ours" } th.number { "its value" } th { "unit" } th.number { "ratio" }
                    th.number { "spread" } th.number { "runs" }
                }
                @for record in &bench.records { (row(record)) }
            }
        }
        @if !days.is_empty() {
            details {
                summary { "From day to day" }
                div class="days" { @for plot in days { (figure(plot)) } }
            }
        }
    }
}

fn figure(plot: &Plot) -> Markup {
    html! { figure { (PreEscaped(&plot.svg)) figcaption { (plot.caption) } } }
}

fn row(record: &Record) -> Markup {
    html! {
        tr {
            td { (record.case) }
            td { (record.rival_name) }
            td.number { (significant(record.ours)) }
            td.number { (significant(record.rival)) }
            td { (record.unit) }
            td.number { (significant(record.ratio)) "x" }
            td.number { (significant(record.spread)) }
            td.number { (record.runs) }
        }
    }
}
