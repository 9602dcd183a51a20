//! Values with units and names: sizes, durations, errors. Every command and every policy takes them in the same form.

use std::time::Duration;

/// Parses a duration with units (`2s`, `500ms`, `1.5m`, `1h 30m`); a number alone is in seconds.
///
/// # Errors
/// What is wrong with it.
pub fn duration(text: &str) -> Result<Duration, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let factor = match &text[digits.len()..] {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => {
            return humantime::parse_duration(text)
                .map_err(|error| format!("{text:?} is no duration: {error}"));
        }
    };
    match digits.parse::<f64>() {
        Ok(number) => Duration::try_from_secs_f64(number * factor)
            .map_err(|error| format!("{text:?} is no duration: {error}")),
        Err(_) => {
            humantime::parse_duration(text).map_err(|error| format!("{text:?} is no duration: {error}"))
        }
    }
}

/// Parses a size with a unit (`256M`, `1GiB`), in powers of 1024; a number alone is in bytes.
///
/// # Errors
/// What is wrong with it.
pub fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match text[digits.len()..].trim_end_matches(['B', 'b', 'i']) {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        unit => return Err(format!("{text:?} is no size: unknown unit `{unit}`; use KiB, MiB, GiB or TiB")),
    };
    let number: u64 =
        digits.parse().map_err(|_| format!("{text:?} is no size: `{digits}` is not a whole number"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text:?} is no size: it does not fit in 64 bits"))
}

/// Returns the number of an error by its name (`EACCES`).
///
/// # Errors
/// That there is none.
pub fn errno(name: &str) -> Result<i32, String> {
    const HIGHEST: i32 = 133;
    let known = match name {
        "EWOULDBLOCK" => "EAGAIN",
        "ENOTSUP" => "EOPNOTSUPP",
        name => name,
    };
    let named = |number: &i32| syscalls::Errno::new(*number).name() == Some(known);
    (1..=HIGHEST).find(named).ok_or_else(|| {
        format!("no error is called {name:?}: errno(3) names them, EACCES or ENOSPC for instance")
    })
}

/// Returns a size in the largest unit that keeps two digits.
#[must_use]
pub fn shown_size(bytes: u64) -> String {
    match bytes {
        0..0x400 => format!("{bytes} B"),
        0x400..0x10_0000 => format!("{} KiB", bytes >> 10),
        0x10_0000..0x2_8000_0000 => format!("{} MiB", bytes >> 20),
        _ => format!("{} GiB", bytes >> 30),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_and_sizes_are_read_with_their_units() {
        assert_eq!(duration("2s"), Ok(Duration::from_secs(2)));
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("100us"), Ok(Duration::from_micros(100)));
        assert_eq!(duration("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("1m 30s"), Ok(Duration::from_secs(90)));
        assert!(duration("2 fortnights").is_err() && duration("-1s").is_err() && duration("").is_err());
        assert_eq!(size("256M"), Ok(256 << 20));
        assert_eq!(size("1GiB"), Ok(1 << 30));
        assert_eq!(size("4096"), Ok(4096));
        assert!(size("99999999999T").is_err() && size("many").is_err() && size("12 apples").is_err());
    }

    #[test]
    fn errors_have_names() {
        assert_eq!(errno("ENOENT"), Ok(2));
        assert_eq!(errno("EWOULDBLOCK"), Ok(11));
        assert!(errno("ENOSUCHERROR").unwrap_err().contains("ENOSUCHERROR"));
        assert!(errno("").is_err());
    }
}
