//! The report for programs. Keys and words stay as they are; new keys may join them.

use orrery_probe::{Facility, System};
use serde::Serialize;

use super::plan::{Plan, Role};
use super::tasks::Verdict;

#[derive(Serialize)]
struct Report<'a> {
    /// Grows when a key changes its meaning or goes.
    schema: u32,
    tasks: Vec<Judged<'a>>,
    facilities: Vec<Row<'a>>,
    mechanisms: Vec<Mechanism<'a>>,
    /// The value of `ORRERY_TRACKER`, if it is set.
    orrery_tracker: Option<&'a str>,
}

#[derive(Serialize)]
struct Judged<'a> {
    name: &'a str,
    /// `ready`, `limited` or `needs`.
    state: &'a str,
    /// The facilities that are absent.
    reasons: &'a [String],
}

#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    group: &'a str,
    /// `available`, `missing` or `denied`.
    state: &'a str,
    /// The name of the kernel's error, if there was one.
    errno: Option<&'a str>,
    /// What was seen, or the step that failed.
    detail: &'a str,
    purpose: &'a str,
    systems: Vec<&'a str>,
    fallback: &'a str,
}

#[derive(Serialize)]
struct Mechanism<'a> {
    system: &'a str,
    role: &'a str,
    mechanism: &'a str,
}

pub(super) fn of(verdicts: &[Verdict], facilities: &[&Facility], plan: &Plan) -> serde_json::Result<String> {
    let report = Report {
        schema: 1,
        tasks: verdicts
            .iter()
            .map(|verdict| Judged {
                name: verdict.task.name,
                state: verdict.state.word(),
                reasons: &verdict.reasons,
            })
            .collect(),
        facilities: facilities.iter().map(|facility| row(facility)).collect(),
        mechanisms: plan.roles.iter().map(mechanism).collect(),
        orrery_tracker: plan.forced_tracker.as_deref(),
    };
    serde_json::to_string_pretty(&report)
}

fn row(facility: &Facility) -> Row<'_> {
    Row {
        name: facility.name,
        group: facility.group.word(),
        state: facility.state.word(),
        errno: facility.state.errno(),
        detail: facility.state.detail(),
        purpose: facility.purpose,
        systems: facility.systems.iter().copied().map(System::word).collect(),
        fallback: facility.fallback,
    }
}

fn mechanism(role: &Role) -> Mechanism<'_> {
    Mechanism { system: role.system.word(), role: role.name, mechanism: &role.mechanism }
}
