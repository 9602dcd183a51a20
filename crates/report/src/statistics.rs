//! Order statistics. Medians and quartiles, because a benchmark's noise is one-sided: interrupts and other
//! programs only ever make a run slower, and a mean would follow them.

/// Returns the value below which the fraction `q` (0 to 1) of `values` is, interpolated linearly; NaN without values.
fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let position = q.clamp(0.0, 1.0) * last as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 <= position <= last")]
    let below = position.floor() as usize;
    let share = position - position.floor();
    sorted[below] * (1.0 - share) + sorted[(below + 1).min(last)] * share
}

/// Returns the middle of `values`; NaN without values.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Returns the distance between the quartiles of `values`: half of them are within it.
pub fn interquartile_range(values: &[f64]) -> f64 {
    quantile(values, 0.75) - quantile(values, 0.25)
}

/// Returns the smallest of `values` that at least `percent` of them do not exceed (nearest rank: a value that was really
/// measured, never one in between); NaN without values.
pub fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    // A rank such as 999.0000000001 is 999.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 <= rank <= length")]
    let rank = (sorted.len() as f64 * percent.clamp(0.0, 100.0) / 100.0 - 1e-9).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_interpolated() {
        let values = [40.0, 10.0, 20.0, 30.0];
        assert_eq!(median(&values), 25.0);
        assert_eq!(quantile(&values, 0.0), 10.0);
        assert_eq!(quantile(&values, 1.0), 40.0);
        assert_eq!(quantile(&values, 0.25), 17.5);
        assert_eq!(interquartile_range(&values), 15.0);
    }

    #[test]
    fn one_value_is_every_quantile() {
        assert_eq!(median(&[7.0]), 7.0);
        assert_eq!(interquartile_range(&[7.0]), 0.0);
        assert_eq!(percentile(&[7.0], 99.0), 7.0);
    }

    #[test]
    fn no_value_has_no_quantile() {
        assert!(median(&[]).is_nan());
        assert!(percentile(&[], 50.0).is_nan());
    }

    #[test]
    fn a_percentile_is_a_measured_value() {
        let values: Vec<f64> = (1..=1000).map(f64::from).collect();
        for (percent, value) in [(99.0, 990.0), (50.0, 500.0), (99.9, 999.0), (100.0, 1000.0)] {
            assert_eq!(percentile(&values, percent), value);
        }
        assert_eq!(percentile(&[1.0, 2.0, 3.0], 99.0), 3.0);
    }
}
