//! Values that are no text: yes and no, permissions, limits.

/// Names of limits, their numbers in `getrlimit(2)`, and what they count.
const LIMITS: [(&str, libc::__rlimit_resource_t, Count); 16] = [
    ("LimitCPU", libc::RLIMIT_CPU, Count::Seconds),
    ("LimitFSIZE", libc::RLIMIT_FSIZE, Count::Bytes),
    ("LimitDATA", libc::RLIMIT_DATA, Count::Bytes),
    ("LimitSTACK", libc::RLIMIT_STACK, Count::Bytes),
    ("LimitCORE", libc::RLIMIT_CORE, Count::Bytes),
    ("LimitRSS", libc::RLIMIT_RSS, Count::Bytes),
    ("LimitNOFILE", libc::RLIMIT_NOFILE, Count::Plain),
    ("LimitAS", libc::RLIMIT_AS, Count::Bytes),
    ("LimitNPROC", libc::RLIMIT_NPROC, Count::Plain),
    ("LimitMEMLOCK", libc::RLIMIT_MEMLOCK, Count::Bytes),
    ("LimitLOCKS", libc::RLIMIT_LOCKS, Count::Plain),
    ("LimitSIGPENDING", libc::RLIMIT_SIGPENDING, Count::Plain),
    ("LimitMSGQUEUE", libc::RLIMIT_MSGQUEUE, Count::Bytes),
    ("LimitNICE", libc::RLIMIT_NICE, Count::Niceness),
    ("LimitRTPRIO", libc::RLIMIT_RTPRIO, Count::Plain),
    ("LimitRTTIME", libc::RLIMIT_RTTIME, Count::Microseconds),
];

/// What systemd gives a service that says nothing: few for programs that know no better, and many for those that ask.
pub(super) const FILES: (u32, u64, u64) = (libc::RLIMIT_NOFILE, 1024, 512 << 10);

#[derive(Clone, Copy)]
enum Count {
    Plain,
    Bytes,
    Seconds,
    Microseconds,
    Niceness,
}

/// Returns whether a key is that of a limit.
pub(super) fn is_limit(key: &str) -> bool {
    LIMITS.iter().any(|(name, ..)| *name == key)
}

/// The number of a limit, and what it is: `SOFT:HARD`, or one for both.
pub(super) fn limit(key: &str, value: &str) -> Result<(u32, u64, u64), String> {
    let (_, number, count) = LIMITS.iter().find(|(name, ..)| *name == key).ok_or("there is no such limit")?;
    let (soft, hard) = value.split_once(':').unwrap_or((value, value));
    let (soft, hard) = (count.read(soft.trim())?, count.read(hard.trim())?);
    if soft > hard {
        return Err("the first one, which holds, is above the second, which it may be raised to".to_owned());
    }
    Ok((*number, soft, hard))
}

impl Count {
    fn read(self, text: &str) -> Result<u64, String> {
        if text == "infinity" {
            return Ok(libc::RLIM_INFINITY);
        }
        match self {
            Self::Plain => {
                text.parse().map_err(|_| "write a number, SOFT:HARD, or infinity, as in 65536".to_owned())
            }
            Self::Bytes => bytes(text),
            Self::Microseconds => microseconds(text, 1),
            // Whole ones, and none too few.
            Self::Seconds => Ok(microseconds(text, 1_000_000)?.div_ceil(1_000_000)),
            Self::Niceness => niceness(text),
        }
    }
}

/// Returns a number of bytes: `8M`, `1.5G`.
fn bytes(text: &str) -> Result<u64, String> {
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (digits, unit) = text.split_at(at);
    let shift = "KMGTPE".find(unit.trim()).map(|place| 10 * (place + 1));
    let scale = match (unit.trim(), shift) {
        ("" | "B", _) => Some(1_u64),
        (unit, Some(shift)) if unit.len() == 1 => Some(1 << shift),
        _ => None,
    };
    let (whole, part) = digits.split_once('.').unwrap_or((digits, "0"));
    let number = || {
        let part = format!("0.{part}").parse::<f64>().ok()?;
        let scale = scale?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a part of one unit, rounded down"
        )]
        let part = (part * scale as f64) as u64;
        whole.parse::<u64>().ok()?.checked_mul(scale)?.checked_add(part)
    };
    number().ok_or_else(|| "write a number of bytes, or infinity, as in 64M".to_owned())
}

/// Returns a time, systemd.time(7), in microseconds; a number without a unit has this one.
fn microseconds(text: &str, unit: u64) -> Result<u64, String> {
    let wrong = || "write a time, or infinity, as in 5min 20s".to_owned();
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(wrong());
    }
    let mut sum = 0_u64;
    while !rest.is_empty() {
        let at = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (digits, tail) = rest.split_at(at);
        let tail = tail.trim_start();
        let at = tail.find(|c: char| !c.is_alphabetic()).unwrap_or(tail.len());
        let (name, tail) = tail.split_at(at);
        let scale = match name {
            "" => unit,
            "us" | "usec" | "µs" | "μs" => 1,
            "ms" | "msec" => 1_000,
            "s" | "sec" | "second" | "seconds" => 1_000_000,
            "m" | "min" | "minute" | "minutes" => 60_000_000,
            "h" | "hr" | "hour" | "hours" => 3_600_000_000,
            "d" | "day" | "days" => 86_400_000_000,
            "w" | "week" | "weeks" => 604_800_000_000,
            _ => return Err(wrong()),
        };
        let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(scale));
        sum = number.and_then(|number| sum.checked_add(number)).ok_or_else(wrong)?;
        rest = tail.trim_start();
    }
    Ok(sum)
}

/// Returns how nice a process may make itself: `+5`, `-5`, or as getrlimit(2) has it.
fn niceness(text: &str) -> Result<u64, String> {
    let wrong = || "write a niceness with its sign, as in -5, or a number from 1 to 40".to_owned();
    let number: i64 = text.parse().map_err(|_| wrong())?;
    let number = if text.starts_with(['+', '-']) { 20 - number } else { number };
    u64::try_from(number).ok().filter(|number| (1..=40).contains(number)).ok_or_else(wrong)
}

/// Yes or no, systemd.syntax(7).
pub(super) fn boolean(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "yes" | "y" | "true" | "t" | "on" => Ok(true),
        "0" | "no" | "n" | "false" | "f" | "off" => Ok(false),
        _ => Err("write yes or no".to_owned()),
    }
}

/// Parses permissions in octal.
pub(super) fn mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|&mode| mode <= 0o7777 && !text.starts_with('+'));
    mode.ok_or_else(|| "write permissions in octal, as in 0755".to_owned())
}

/// Returns how nice a service is.
pub(super) fn nice(text: &str) -> Result<i32, String> {
    let nice = text.parse().ok().filter(|nice| (-20..=19).contains(nice));
    nice.ok_or_else(|| "write a number from -20 to 19".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read() {
        let both = |key, value| limit(key, value).map(|(_, soft, hard)| (soft, hard));
        assert_eq!(limit("LimitNOFILE", "65535"), Ok((libc::RLIMIT_NOFILE, 65535, 65535)));
        assert_eq!(both("LimitNOFILE", "1024:524288"), Ok((1024, 524_288)));
        assert_eq!(both("LimitCORE", "0:infinity"), Ok((0, libc::RLIM_INFINITY)));
        assert_eq!(both("LimitMEMLOCK", "64M"), Ok((64 << 20, 64 << 20)));
        assert_eq!(
            both("LimitAS", "1.5G:16E"),
            Err("write a number of bytes, or infinity, as in 64M".into())
        );
        assert_eq!(both("LimitAS", "1.5G:2 G"), Ok((3 << 29, 2 << 30)));
        assert_eq!(both("LimitCPU", "1min 20s"), Ok((80, 80)));
        assert_eq!(both("LimitCPU", "1500ms"), Ok((2, 2)));
        assert_eq!(both("LimitRTTIME", "5"), Ok((5, 5)));
        assert_eq!(both("LimitNICE", "-5:40"), Ok((25, 40)));
        for (key, value) in [
            ("LimitNOFILE", "many"),
            ("LimitNOFILE", "2:1"),
            ("LimitNOFILE", ""),
            ("LimitCORE", "5X"),
            ("LimitCORE", "KM"),
            ("LimitCPU", "5 parsecs"),
            ("LimitCPU", "99999999999999999w"),
            ("LimitNICE", "-30"),
        ] {
            assert!(limit(key, value).is_err(), "{key}={value}");
        }
    }

    #[test]
    fn the_rest_is_read() {
        assert_eq!((boolean("On"), boolean("0")), (Ok(true), Ok(false)));
        assert_eq!((mode("2755"), mode("007")), (Ok(0o2755), Ok(7)));
        assert_eq!((nice("-20"), nice("19")), (Ok(-20), Ok(19)));
        assert!(
            boolean("maybe").is_err() && mode("8").is_err() && mode("17777").is_err() && nice("20").is_err()
        );
    }
}
