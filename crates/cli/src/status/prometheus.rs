//! The text exposition format of Prometheus, version 0.0.4.
//!
//! The crates `prometheus-client` and `prometheus` are registries of counters that a program changes while it runs, and the former writes
//! OpenMetrics instead. Here a model is written once, in lines of four forms.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::model::{Figure, Item, Kind, Number, Status};

/// One metric: all its samples stand together.
struct Metric {
    help: String,
    is_counter: bool,
    samples: Vec<String>,
    /// The labels of `samples`: a reader refuses the whole text if two are equal.
    labels: BTreeSet<String>,
}

/// Metrics by name.
#[derive(Default)]
struct Metrics(BTreeMap<String, Metric>);

impl Metrics {
    fn add(&mut self, name: &str, help: &str, is_counter: bool, labels: &[(&str, &str)], value: Number) {
        let metric = self.0.entry(name.to_owned()).or_insert_with(|| Metric {
            help: help.to_owned(),
            is_counter,
            samples: Vec::new(),
            labels: BTreeSet::new(),
        });
        let labels: Vec<String> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escape_label(value))).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let value = match value {
            Number::Count(count) => count.to_string(),
            Number::Real(value) => value.to_string(),
        };
        if metric.labels.insert(labels.clone()) {
            metric.samples.push(format!("{name}{labels} {value}"));
        }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (name, metric) in &self.0 {
            let kind = if metric.is_counter { "counter" } else { "gauge" };
            // Writing to a string cannot fail.
            let _ = writeln!(text, "# HELP {name} {}\n# TYPE {name} {kind}", escape_help(&metric.help));
            for sample in &metric.samples {
                let _ = writeln!(text, "{sample}");
            }
        }
        text
    }
}

/// Returns the metrics of a status. Of each selected kind there is a count, also where none runs.
pub(crate) fn of(status: &Status, kinds: &[Kind]) -> String {
    let mut metrics = Metrics::default();
    let taken = Number::Real(status.taken_at_unix_seconds);
    metrics.add("orrery_status_taken_at_seconds", "Time of this status, since the epoch.", false, &[], taken);
    for kind in kinds {
        let labels = [("kind", kind.word())];
        let items = status.items.iter().filter(|item| item.kind == *kind).count();
        metrics.add("orrery_items", "What runs, by kind.", false, &labels, items.into());
        let unreadable = status.unreadable.iter().filter(|one| one.kind == *kind).count();
        let help = "What could not be asked, by kind.";
        metrics.add("orrery_unreadable", help, false, &labels, unreadable.into());
    }
    for item in &status.items {
        add_item(&mut metrics, item);
    }
    metrics.text()
}

fn add_item(metrics: &mut Metrics, item: &Item) {
    let kind = item.kind.word();
    let number = |pid: Option<u32>| pid.map(|pid| pid.to_string()).unwrap_or_default();
    let pid = number(item.pid);
    let main_pid = number(item.main.as_ref().map(|main| main.pid));
    let mut labels = vec![("name", item.name.as_str()), ("pid", pid.as_str())];
    if let Some(main) = &item.main {
        labels.extend([("main", main.name.as_str()), ("main_pid", main_pid.as_str())]);
    }
    let user = item.user.as_deref().unwrap_or_default();
    let info = [&labels[..], &[("user", user), ("state", item.state)]].concat();
    let help = "User and state; the value is always 1.";
    metrics.add(&format!("orrery_{kind}_info"), help, false, &info, Number::Count(1));
    if let Some(started) = item.started_at_unix_seconds {
        let help = "Time at which the process started, since the epoch.";
        metrics.add(&format!("orrery_{kind}_start_time_seconds"), help, false, &labels, started.into());
    }
    let add = |metrics: &mut Metrics, name: String, figure: &Figure, labels: &[(&str, &str)]| {
        metrics.add(&name, figure.help, figure.is_counter(), labels, figure.value);
    };
    for figure in item.figures.iter() {
        add(metrics, format!("orrery_{kind}_{}", figure.name), figure, &labels);
    }
    for part in &item.parts {
        let part_pid = number(part.pid);
        let mut labels = [&labels[..], &[(part.role, part.name.as_str())]].concat();
        if part.pid.is_some() {
            labels.push(("part_pid", part_pid.as_str()));
        }
        for figure in part.figures.iter() {
            add(metrics, format!("orrery_{kind}_{}_{}", part.role, figure.name), figure, &labels);
        }
    }
}

fn escape_help(text: &str) -> String {
    text.replace('\\', "\\\\").replace('\n', "\\n")
}

fn escape_label(text: &str) -> String {
    escape_help(text).replace('"', "\\\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::samples;

    #[test]
    fn labels_are_escaped_and_metrics_stand_together() {
        let text = of(&samples::status(), &Kind::ALL);
        let lines: Vec<&str> = text.lines().collect();
        let name = r#"name="/run/a \"b\"\\\nc",pid="71""#;
        let requests = [
            "# HELP orrery_warm_requests_total Requests that workers have finished.".to_owned(),
            "# TYPE orrery_warm_requests_total counter".to_owned(),
            format!("orrery_warm_requests_total{{{name}}} 17"),
        ];
        assert!(lines.windows(3).any(|three| three == requests), "{text}");
        let worker = format!(r#"orrery_warm_worker_requests_total{{{name},worker="72",part_pid="72"}} 72"#);
        assert!(lines.contains(&worker.as_str()), "{text}");
        assert!(lines.contains(&format!("orrery_warm_uptime_seconds{{{name}}} 61.5").as_str()), "{text}");
        assert!(lines.contains(&"# TYPE orrery_warm_workers gauge"), "{text}");
        let main = r#"orrery_orbit_calls_total{name="checker",pid="90",main="kv",main_pid="89"} 1000"#;
        assert!(lines.contains(&main), "{text}");
        let info = format!(r#"orrery_warm_info{{{name},user="alice",state="busy"}} 1"#);
        assert!(lines.contains(&info.as_str()), "{text}");
        assert!(lines.contains(&r#"orrery_unreadable{kind="orc"} 1"#), "{text}");
        assert!(lines.contains(&r#"orrery_items{kind="guard"} 0"#), "{text}");
        assert!(text.ends_with('\n'));
    }

    /// What the format's description demands of every text.
    #[test]
    fn the_text_is_well_formed() {
        let text = of(&samples::status(), &Kind::ALL);
        let (mut seen, mut current, mut samples) = (BTreeSet::new(), String::new(), BTreeSet::new());
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                current = rest.split(' ').next().unwrap().to_owned();
                assert!(seen.insert(current.clone()), "{current} twice");
                continue;
            }
            if line.starts_with('#') {
                assert!(line.starts_with(&format!("# TYPE {current} ")), "{line}");
                continue;
            }
            let name = line.split(['{', ' ']).next().unwrap();
            assert_eq!(name, current, "a sample stands under its metric");
            assert!(
                name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
            );
            let (labels, value) = line.rsplit_once(' ').unwrap();
            assert!(samples.insert(labels.to_owned()), "{labels} twice");
            assert!(value.parse::<f64>().unwrap().is_finite());
        }
        assert!(seen.len() > 8, "{text}");
    }

    #[test]
    fn equal_labels_are_written_once() {
        let mut status = samples::status();
        status.items.push(status.items[0].clone());
        let text = of(&status, &[]);
        assert_eq!(text.matches("orrery_warm_workers{").count(), 1);
    }
}
