//! Order statistics. Medians and quartiles, because a benchmark's noise is one-sided: interrupts and
//! neighbours only ever make a run slower, and a mean would follow them.

/// The value below which the fraction `q` (0 to 1) of `values` lies, interpolated linearly between
/// neighbours; NaN when there are none.
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = q.clamp(0.0, 1.0) * last as f64;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 <= place <= last")]
    let below = place.floor() as usize;
    let above = (below + 1).min(last);
    let share = place - place.floor();
    sorted[below] * (1.0 - share) + sorted[above] * share
}

/// The middle of `values`; NaN when there are none.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The distance between the quartiles of `values`: half of them lie within it.
pub fn interquartile_range(values: &[f64]) -> f64 {
    quantile(values, 0.75) - quantile(values, 0.25)
}

/// The smallest of `values` that at least `percent` of them do not exceed (nearest rank: a value that was
/// really met, never one in between); NaN when there are none.
pub fn percentile(values: &[f64], percent: u8) -> f64 {
    per_mille(values, u16::from(percent) * 10)
}

/// Like [`percentile`], in thousandths.
pub fn per_mille(values: &[f64], part: u16) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * usize::from(part.min(1000))).div_ceil(1000);
    sorted.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate_between_neighbours() {
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
        assert_eq!(percentile(&[7.0], 99), 7.0);
    }

    #[test]
    fn no_value_gives_no_number() {
        assert!(median(&[]).is_nan());
        assert!(percentile(&[], 50).is_nan());
    }

    #[test]
    fn a_percentile_is_a_value_that_was_met() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&values, 99), 99.0);
        assert_eq!(percentile(&values, 50), 50.0);
        assert_eq!(percentile(&values, 100), 100.0);
        assert_eq!(percentile(&[1.0, 2.0, 3.0], 99), 3.0);
    }
}
