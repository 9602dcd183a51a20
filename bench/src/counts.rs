//! What the kernel and the processor count while a contender works: system calls, page faults, instructions, misses of the TLB.
//!
//! These hold still where times do not: on a machine that has other things to do. perf(1) counts, in a pass of its own after a
//! case has been measured, because to count costs the contenders time, each of them another amount.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use orrery_report::record::COUNTS;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use tempfile::TempDir;

use crate::Skipped;
use crate::report::Report;

/// An event, as perf(1) calls it and as records do; the second is the unit, too.
pub(crate) type Event = (&'static str, &'static str);

const EVENTS: [Event; 4] = [
    ("raw_syscalls:sys_enter", COUNTS[0]),
    ("page-faults", COUNTS[1]),
    ("instructions", COUNTS[2]),
    ("dTLB-load-misses", COUNTS[3]),
];

/// Counts below this for an operation are taken as this, so that ratios are numbers: nothing, beside something.
pub(crate) const LEAST: f64 = 0.01;

/// Returns the events that can be counted here, and notes the others in `report`: all, without perf(1) or permission; the processor's, in most
/// virtual machines.
pub(crate) fn available(report: &mut Report) -> Vec<Event> {
    let can_count = |event: &Event| {
        let output = Command::new("perf").args(["stat", "--json-output", "-e", event.0, "true"]).output();
        let output = output.context("cannot start perf")?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "perf ended: {}", output.status);
        parse(&text, &[*event])
    };
    EVENTS
        .into_iter()
        .filter(|event| {
            let counted = can_count(event).map_err(|error| Skipped(format!("{error:#}")).into());
            report.present(&format!("counts of {}", event.1), counted).is_some()
        })
        .collect()
}

/// Returns how often each of `events` happens in all threads of `processes`, of those that they have started, and of those
/// that any of them starts, while `work` is done.
///
/// # Errors
/// [`Skipped`] where perf(1) does not begin to count; fails where `work` does.
pub(crate) fn count<T>(
    events: &[Event],
    processes: &[u32],
    work: impl FnOnce() -> Result<T>,
) -> Result<(Vec<f64>, T)> {
    let mut attempts = 1;
    let mut perf = loop {
        match Perf::start(events, processes) {
            Ok(perf) => break perf,
            // Perhaps a process has ended since it was found.
            Err(_) if attempts < ATTEMPTS => attempts += 1,
            Err(error) => return Err(Skipped(format!("{error:#}")).into()),
        }
    };
    let done = work();
    perf.say("disable")?;
    Ok((parse(&perf.interrupt()?, events)?, done?))
}

/// How often perf(1) is started before it is given up.
const ATTEMPTS: u32 = 30;

/// A perf(1) that counts, and takes orders over a pair of FIFOs.
struct Perf {
    process: Child,
    orders: File,
    answers: BufReader<File>,
    _directory: TempDir,
}

impl Perf {
    fn start(events: &[Event], processes: &[u32]) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let [orders, answers] = ["orders", "answers"].map(|name| directory.path().join(name));
        for path in [&orders, &answers] {
            mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
                .with_context(|| format!("cannot make {}", path.display()))?;
        }
        let names: Vec<&str> = events.iter().map(|event| event.0).collect();
        let processes: Vec<String> = with_descendants(processes).iter().map(u32::to_string).collect();
        let mut command = Command::new("perf");
        command.args(["stat", "--json-output", "--delay=-1"]);
        command.args(["-e", &names.join(","), "-p", &processes.join(",")]);
        command.arg(format!("--control=fifo:{},{}", orders.display(), answers.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        // Opened for both, a FIFO waits for nobody.
        let open = |path| File::options().read(true).write(true).open(path);
        let (orders, answers) = (open(orders)?, BufReader::new(open(answers)?));
        let process = command.spawn().context("cannot start perf")?;
        let mut perf = Self { process, orders, answers, _directory: directory };
        perf.say("enable")?;
        Ok(perf)
    }

    /// Gives an order, and waits until it is carried out.
    fn say(&mut self, order: &str) -> Result<()> {
        writeln!(self.orders, "{order}").context("cannot ask perf")?;
        let turn = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        while poll(&mut [PollFd::new(self.answers.get_ref(), PollFlags::IN)], Some(&turn))? == 0 {
            if let Some(status) = self.process.try_wait()? {
                let errors = self.process.stderr.take().map(io::read_to_string).transpose()?;
                bail!("perf ended: {status}: {}", errors.unwrap_or_default().trim());
            }
        }
        let mut line = String::new();
        self.answers.read_line(&mut line).context("cannot read what perf answers")?;
        // Each line ends with a zero byte.
        ensure!(line.trim_matches(['\0', '\n']) == "ack", "perf answered {line:?} to {order:?}");
        Ok(())
    }

    /// Interrupts it, and returns what it prints.
    fn interrupt(&mut self) -> Result<String> {
        let pid = i32::try_from(self.process.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.context("a process without an id")?, Signal::INT)
            .context("cannot interrupt perf")?;
        let errors = self.process.stderr.take().context("perf has no standard error")?;
        Ok(io::read_to_string(errors)?)
    }
}

impl Drop for Perf {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// Returns these processes and what they have started that still runs.
fn with_descendants(processes: &[u32]) -> Vec<u32> {
    let mut all: Vec<u32> = processes.to_vec();
    let mut at = 0;
    while let Some(process) = all.get(at) {
        let threads = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
        let children: Vec<u32> = threads
            .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok())
            .flat_map(|text| {
                text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()
            })
            .collect();
        all.extend(children);
        at += 1;
    }
    all
}

/// Reads what perf(1) prints in JSON, one event to a line, in the order of `events`.
fn parse(text: &str, events: &[Event]) -> Result<Vec<f64>> {
    #[derive(Deserialize)]
    #[serde(rename_all = "kebab-case")]
    struct Line {
        counter_value: String,
        event: String,
    }
    let lines: Vec<Line> = text
        .lines()
        .filter(|line| line.starts_with('{'))
        .map(|line| serde_json::from_str(line).with_context(|| format!("perf printed {line:?}")))
        .collect::<Result<_>>()?;
    let value = |(name, _): &Event| {
        // With `:u` at its end where only what user space does may be counted, which is no count of ours.
        let line = lines.iter().find(|line| line.event == *name);
        let line = line.with_context(|| format!("perf did not count {name}"))?;
        ensure!(!line.counter_value.starts_with('<'), "perf says of {name}: {}", line.counter_value);
        line.counter_value.parse().with_context(|| format!("perf counted {:?} of {name}", line.counter_value))
    };
    events.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;

    use super::*;

    const CALLS: Event = EVENTS[0];
    const FAULTS: Event = EVENTS[1];

    #[test]
    fn what_perf_prints_is_read_and_what_it_cannot_count_is_no_number() {
        let text = "\n{\"counter-value\" : \"29.000000\", \"unit\" : \"\", \"event\" : \"raw_syscalls:sys_enter\", \"pcnt-running\" : 100.00}\n\
                    {\"counter-value\" : \"<not supported>\", \"unit\" : \"\", \"event\" : \"page-faults\"}\n";
        assert_eq!(parse(text, &[CALLS]).unwrap(), [29.0]);
        assert!(format!("{:#}", parse(text, &[FAULTS]).unwrap_err()).contains("<not supported>"));
        assert!(format!("{:#}", parse("", &[CALLS]).unwrap_err()).contains("did not count"));
        assert!(parse("{not JSON", &[CALLS]).is_err());
        assert!(parse(&text.replace("enter\"", "enter:u\""), &[CALLS]).is_err());
    }

    #[test]
    fn calls_of_this_process_and_of_what_it_starts_are_counted() {
        let events = available(&mut Report::default());
        if !events.contains(&CALLS) {
            orrery_testing::skipped!("perf cannot count system calls here");
            return;
        }
        let own = [std::process::id()];
        let call = || (0..1000).for_each(|_| _ = rustix::thread::gettid());
        let ours = |work: &dyn Fn()| {
            let (counts, ()) = count(&events, &own, || {
                work();
                Ok(())
            })
            .unwrap();
            counts[events.iter().position(|event| *event == CALLS).unwrap()]
        };
        // Other tests run beside this one, in threads of the same process.
        assert!(ours(&call) >= 1000.0);
        let shell = || {
            let status = Command::new("sh")
                .args(["-c", "i=0; while [ $i -lt 1000 ]; do cd /; i=$((i + 1)); done"])
                .status();
            assert!(status.unwrap().success());
        };
        assert!(ours(&shell) >= 1000.0);
    }

    #[test]
    fn work_that_fails_is_an_error_and_leaves_no_perf() {
        let events = available(&mut Report::default());
        if events.is_empty() {
            orrery_testing::skipped!("perf can count nothing here");
            return;
        }
        let error =
            count(&events, &[std::process::id()], || -> Result<()> { anyhow::bail!("broke") }).unwrap_err();
        assert_eq!(error.to_string(), "broke");
        let error = count(&events, &[u32::MAX >> 1], || Ok(())).unwrap_err();
        let reason = &error.downcast_ref::<Skipped>().unwrap().0;
        assert!(reason.starts_with("perf ended"), "there is no such process: {reason}");
    }

    #[test]
    fn a_process_has_descendants() {
        let mut child = Command::new("sh")
            .args(["-c", "sleep 60 & echo; wait"])
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let all = with_descendants(&[child.id()]);
        let group = Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
        rustix::process::kill_process_group(group, Signal::KILL).unwrap();
        child.wait().unwrap();
        assert_eq!((all.len(), all[0]), (2, child.id()));
    }
}
