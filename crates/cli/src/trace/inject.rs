//! What `-e inject=` and `-e fault=` ask for, as rules of a policy. Source: strace(1), "Tampering".

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, bail};
use orrery_hijack::Policy;

use super::select::{Injection, names};

/// strace counts from 1 to this.
const MOST: u32 = 65535;

/// Which calls of the set are tampered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct When {
    /// The first, counted from 1.
    first: u32,
    /// The last, if there is one.
    last: Option<u32>,
    /// Each so many-th from the first on.
    step: u32,
}

/// Returns the rules that injections mean, for a run whose policy denies nothing else.
///
/// # Errors
/// What means nothing, or cannot be had here, by its name.
pub(super) fn rules(injections: &[Injection]) -> anyhow::Result<Policy> {
    let mut all = Policy::default();
    for injection in injections {
        let text = &injection.text;
        let shown = format!("-e {}={text}", if injection.fails { "fault" } else { "inject" });
        let rules = translated(injection).with_context(|| shown.clone())?;
        all = all.then(Policy::parse(&rules, &shown)?);
    }
    Ok(all)
}

/// Returns the rules as text.
fn translated(injection: &Injection) -> anyhow::Result<String> {
    let (set, settings) = injection.text.split_once(':').unwrap_or((&injection.text, ""));
    let calls = names(set)?;
    let mut answer = None;
    let mut delay = None;
    let mut when = When { first: 1, last: None, step: 1 };
    for setting in settings.split(':').filter(|setting| !setting.is_empty()) {
        let (name, value) = setting.split_once('=').unwrap_or((setting, ""));
        let new = match name {
            "error" => Some(format!("deny = {value:?}\n")),
            "retval" if !injection.fails => {
                let value: i64 = value.parse().ok().filter(|value| *value >= 0).with_context(|| {
                    format!("{name}={value}: it is no number from 0 on; error= has calls fail")
                })?;
                Some(format!("return = {value}\n"))
            }
            "delay_enter" if !injection.fails => {
                delay = Some(duration(value).with_context(|| format!("{name}={value}"))?);
                None
            }
            "when" => {
                when = When::parse(value).with_context(|| format!("{name}={value}"))?;
                None
            }
            "delay_exit" | "signal" | "syscall" | "poke_enter" | "poke_exit" if !injection.fails => bail!(
                "{name}= cannot be had here: there are error=, retval=, delay_enter= and when=; use strace for it"
            ),
            _ => bail!("{setting:?} is no setting; there are error=, retval=, delay_enter= and when="),
        };
        if answer.is_some() && new.is_some() {
            bail!("{name}= is one answer too many: choose one error= or retval=");
        }
        answer = answer.or(new);
    }
    if answer.is_none() && injection.fails {
        answer = Some("deny = \"ENOSYS\"\n".to_owned());
    }
    let decides = answer.is_some();
    let mut actions = answer.unwrap_or_default();
    if let Some(delay) = delay {
        let _ = writeln!(actions, "delay = \"{}ns\"", delay.as_nanos());
    }
    if actions.is_empty() {
        bail!("it says nothing to do: add error=, retval= or delay_enter=");
    }
    let rule = |limits: String| format!("[[rule]]\ncall = {calls:?}\n{actions}{limits}\n");
    Ok(when.limits(decides).into_iter().map(rule).collect())
}

impl When {
    /// Reads `F`, `F+`, `F+S`, `F..L` and `F..L+S`.
    fn parse(text: &str) -> anyhow::Result<Self> {
        let number = |text: &str| {
            let number = text.parse().ok().filter(|number| (1..=MOST).contains(number));
            number.with_context(|| format!("{text:?} is no number from 1 to {MOST}"))
        };
        let (range, step) = match text.split_once('+') {
            Some((range, "")) => (range, Some(1)),
            Some((range, step)) => (range, Some(number(step)?)),
            None => (text, None),
        };
        let (first, last) = match range.split_once("..") {
            Some((first, last)) => (number(first)?, Some(number(last)?)),
            // Alone, it is that call.
            None => (number(range)?, step.is_none().then(|| number(range)).transpose()?),
        };
        if last.is_some_and(|last| last < first) {
            bail!("the last call comes before the first");
        }
        Ok(Self { first, last, step: step.unwrap_or(1) })
    }

    /// Returns the conditions of the rules: one, or one for the first call and one for those after it. The second one does not see the call
    /// about which the first one `decides`.
    fn limits(self, decides: bool) -> Vec<String> {
        let before = self.first - 1;
        let count = self.last.map(|last| (last - self.first) / self.step + 1);
        let limits = |before: u32, every: u32, times: Option<u32>| {
            let mut text = format!("after = {before}\nevery = {every}\n");
            if let Some(times) = times {
                let _ = writeln!(text, "times = {times}");
            }
            text
        };
        if self.step == 1 {
            return vec![limits(before, 1, count)];
        }
        let mut all = vec![limits(before, 1, Some(1))];
        if count != Some(1) {
            let seen = if decides { before } else { self.first };
            all.push(limits(seen, self.step, count.map(|count| count - 1)));
        }
        all
    }
}

/// Reads a duration as strace has it: microseconds, unless a unit is given.
fn duration(text: &str) -> anyhow::Result<Duration> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Ok(Duration::from_micros(text.parse()?));
    }
    Ok(humantime::parse_duration(text)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn injection(fails: bool, text: &str) -> Injection {
        Injection { fails, text: text.to_owned() }
    }

    /// Which of the calls 1 to 12 rules with these limits act on, as the executive counts.
    fn acted_on(when: &str, decides: bool) -> Vec<u32> {
        let limits = When::parse(when).unwrap().limits(decides);
        let value = |text: &str, name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} = ")));
            line.map_or(0, |value| value.parse::<u32>().unwrap())
        };
        let rules: Vec<_> =
            limits.iter().map(|text| ["after", "every", "times"].map(|name| value(text, name))).collect();
        let mut counts = vec![(0_u32, 0_u32); rules.len()];
        let mut acts = |_: &u32| {
            let mut any = false;
            for ([after, every, times], (hits, acted)) in rules.iter().zip(&mut counts) {
                *hits += 1;
                let is_due = *hits > *after
                    && (*hits - after).is_multiple_of(*every)
                    && (*times == 0 || *acted < *times);
                *acted += u32::from(is_due);
                any |= is_due;
                if is_due && decides {
                    break;
                }
            }
            any
        };
        (1..=12).filter(|call| acts(call)).collect()
    }

    #[test]
    fn calls_are_counted_as_strace_does() {
        for decides in [true, false] {
            let acted_on = |when: &str| acted_on(when, decides);
            assert_eq!(acted_on("3"), [3]);
            assert_eq!(acted_on("10+"), [10, 11, 12]);
            assert_eq!(acted_on("1+5"), [1, 6, 11]);
            assert_eq!(acted_on("4+3"), [4, 7, 10]);
            assert_eq!(acted_on("2..4"), [2, 3, 4]);
            assert_eq!(acted_on("2..9+3"), [2, 5, 8]);
            assert_eq!(acted_on("2..3+4"), [2]);
        }
        for wrong in ["", "0", "x", "3..2", "1+0", "1+x", "65536", "1..", "..2"] {
            assert!(When::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn injections_are_rules() {
        let text = translated(&injection(false, "read,write:error=EIO:delay_enter=5ms:when=2+")).unwrap();
        let expected = "[[rule]]\ncall = [\"read\", \"write\"]\ndeny = \"EIO\"\ndelay = \"5000000ns\"\nafter = 1\nevery = 1\n\n";
        assert_eq!(text, expected);
        assert!(translated(&injection(true, "read")).unwrap().contains("deny = \"ENOSYS\""));
        assert!(translated(&injection(false, "read:retval=0")).unwrap().contains("return = 0"));
        let all =
            ["read:error=EIO", "/^f?stat$/:delay_enter=10", "!%signal,exit*,%descriptor:retval=3:when=1+2"];
        rules(&all.map(|text| injection(false, text))).unwrap();
    }

    #[test]
    fn what_cannot_be_had_is_refused_by_name() {
        for (fails, text, part) in [
            (false, "read", "it says nothing to do"),
            (false, "nonsense:error=EIO", "no system call is called \"nonsense\""),
            (false, "read:signal=SIGINT", "signal= cannot be had here"),
            (false, "read:delay_exit=3", "delay_exit= cannot be had here"),
            (false, "read:error=EIO:retval=3", "retval= is one answer too many"),
            (false, "read:error=NONSENSE", "NONSENSE"),
            (false, "read:retval=-1", "it is no number from 0 on"),
            (false, "read:delay_enter=soon", "delay_enter=soon"),
            (true, "read:retval=3", "\"retval=3\" is no setting"),
            (true, "read:when=0", "\"0\" is no number from 1 to 65535"),
        ] {
            let error = format!("{:#}", rules(&[injection(fails, text)]).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
            assert!(error.starts_with("-e "), "{error}");
        }
    }
}
