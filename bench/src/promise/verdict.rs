//! Holds promises against records.

use super::{Promise, Quantity};
use crate::record::Record;

/// What became of a promise.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// The measured value is within the bound.
    Held(f64),
    /// The measured value is not.
    Broken(f64),
    /// There is no such value, because of this.
    Unmeasured(String),
}

/// Judges `promise` by the records of its benchmark.
pub fn judge(promise: &Promise, records: &[Record]) -> Verdict {
    let of_case: Vec<_> = records
        .iter()
        .filter(|record| record.bench == promise.bench && record.case == promise.case)
        .collect();
    if of_case.is_empty() {
        return Verdict::Unmeasured(format!("no record of case {:?}", promise.case));
    }
    let value = match &promise.quantity {
        Quantity::Ours => {
            if let Some(record) = of_case.iter().find(|record| record.unit != promise.unit) {
                return Verdict::Unmeasured(format!(
                    "the case is measured in {}, promised in {}",
                    record.unit, promise.unit
                ));
            }
            // Ours was measured once beside each rival that did not fit into memory with the others: the
            // value farthest on the wrong side of the bound decides.
            of_case
                .iter()
                .map(|record| record.ours)
                .reduce(|one, other| if promise.comparison.holds(one, other) { other } else { one })
        }
        Quantity::RatioVs(rival) => {
            of_case.iter().find(|record| record.rival_name == *rival).map(|record| record.ratio)
        }
    };
    match value {
        Some(value) if value.is_nan() => Verdict::Unmeasured("the record holds no number".to_owned()),
        Some(value) if promise.comparison.holds(value, promise.bound) => Verdict::Held(value),
        Some(value) => Verdict::Broken(value),
        None => Verdict::Unmeasured(format!("no record beside {:?}", promise.quantity)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::promise::parse;

    fn promise(quantity: &str, bound: &str) -> Promise {
        let text = format!(
            "| promise | bench | case | quantity | bound | measured | command |\n|-|-|-|-|-|-|-|\n\
             | p | b | c | {quantity} | {bound} | - | B=b |\n"
        );
        parse(&text).unwrap().remove(0)
    }

    fn record(rival: &str, ours: f64, ratio: f64) -> Record {
        Record {
            bench: "b".into(),
            case: "c".into(),
            unit: "us".into(),
            ours,
            rival_name: rival.into(),
            rival: ours * ratio,
            ratio,
            spread: 0.0,
            runs: 3,
        }
    }

    #[test]
    fn bounds_hold_up_to_themselves() {
        let records = [record("fork", 25.0, 50.0)];
        assert_eq!(judge(&promise("ours", "<= 25 us"), &records), Verdict::Held(25.0));
        assert_eq!(judge(&promise("ours", "<= 24.9 us"), &records), Verdict::Broken(25.0));
        assert_eq!(judge(&promise("ratio vs fork", ">= 50x"), &records), Verdict::Held(50.0));
        assert_eq!(judge(&promise("ratio vs fork", ">= 51x"), &records), Verdict::Broken(50.0));
    }

    #[test]
    fn the_worst_of_several_own_values_decides() {
        let records = [record("fork", 20.0, 2.0), record("server", 30.0, 2.0), record("madvise", 10.0, 2.0)];
        assert_eq!(judge(&promise("ours", "<= 25 us"), &records), Verdict::Broken(30.0));
        assert_eq!(judge(&promise("ours", ">= 15 us"), &records), Verdict::Broken(10.0));
    }

    #[test]
    fn what_was_not_measured_is_neither_held_nor_broken() {
        let other = Record { case: "other".into(), ..record("fork", 1.0, 1.0) };
        let elsewhere = Record { bench: "elsewhere".into(), ..record("fork", 1.0, 1.0) };
        let unmeasured = |verdict| matches!(verdict, Verdict::Unmeasured(_));
        assert!(unmeasured(judge(&promise("ours", "<= 25 us"), &[other, elsewhere])));
        assert!(unmeasured(judge(&promise("ratio vs spoon", ">= 1x"), &[record("fork", 1.0, 1.0)])));
        assert!(unmeasured(judge(&promise("ours", "<= 25 ms"), &[record("fork", 1.0, 1.0)])));
        assert!(unmeasured(judge(&promise("ours", "<= 25 us"), &[record("fork", f64::NAN, 1.0)])));
    }
}
