//! Durations and sizes with units, as options of all commands take them.

use std::time::Duration;

/// Parses a duration with a unit (`2s`, `500ms`, `1.5m`, `1h`); a number alone is in seconds.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        unit => return Err(format!("unknown unit `{unit}`: use ms, s, m or h")),
    };
    let number: f64 = digits.parse().map_err(|_| format!("`{digits}` is not a number"))?;
    Duration::try_from_secs_f64(number * factor).map_err(|error| error.to_string())
}

/// Parses a size with a unit (`256M`, `1GiB`), in powers of 1024; a number alone is in bytes.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text[digits.len()..].trim_end_matches(['B', 'b', 'i']) {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        unit => return Err(format!("unknown unit `{unit}`: use K, M, G or T")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("`{digits}` is not a whole number"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} does not fit in 64 bits"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_are_read_with_their_units() {
        assert_eq!(duration("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1.5"), Ok(Duration::from_millis(1500)));
        assert!(duration("2 fortnights").is_err() && duration("-1s").is_err());
        assert_eq!(size("256M"), Ok(256 << 20));
        assert_eq!(size("1GiB"), Ok(1 << 30));
        assert_eq!(size("4096"), Ok(4096));
        assert!(size("99999999999T").is_err() && size("many").is_err());
    }
}
