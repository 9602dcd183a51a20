//! Calls as lines of text or JSON, in the order in which they ended.

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, SystemTime};

use orrery_hijack::decode::{Described, Form, error_name, signal_name};
use orrery_hijack::{Event, State};
use serde_json::json;

use super::callers::Callers;
use super::clock::{self, Clock};
use super::pending::{Pending, Unfinished};
use super::thread_files::ThreadFiles;

/// How many bytes are written at a time, about.
const ENOUGH: usize = 64 << 10;

/// What is written of a call, and of which.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Style {
    /// Not at all; the time of day, or two: with microseconds; or three: seconds since 1970.
    pub(crate) time: u8,
    /// The time since the call before.
    pub(crate) relative: bool,
    pub(crate) duration: bool,
    pub(crate) json: bool,
    /// How arguments are put into words.
    pub(crate) form: Form,
    /// Only what fails.
    pub(crate) failed: bool,
    /// Only what succeeds.
    pub(crate) successful: bool,
    /// Only what takes so long.
    pub(crate) slower: Option<Duration>,
    /// From where it was called.
    pub(crate) stack: bool,
    /// How the program ended, behind all calls.
    pub(crate) end: bool,
    /// The number of each call.
    pub(crate) number: bool,
    /// Where the program is when it calls.
    pub(crate) address: bool,
    /// The column in which results begin, if there is room.
    pub(crate) column: usize,
}

/// Writes lines.
pub(crate) struct Writer {
    output: Box<dyn Write + Send>,
    /// Whole lines: others may write to the same place.
    lines: Vec<u8>,
    style: Style,
    clock: Clock,
    /// Calls that have begun, by thread.
    begun: HashMap<u32, Event>,
    /// When the call of the line before began.
    last: Option<u64>,
    callers: Callers,
    /// Where calls that have not returned are looked for.
    pending: Option<Pending>,
    /// Where lines go, if each thread has a file of its own.
    files: Option<ThreadFiles>,
    /// Calls that only say how threads end, which nobody wants to see.
    unseen: Vec<u32>,
    /// The program's first process, the end of which is written last.
    program: Option<u32>,
}

/// The calls by which threads end.
pub(super) const ENDS: [&str; 2] = ["exit", "exit_group"];

impl Writer {
    pub(crate) fn new(output: Box<dyn Write + Send>, style: Style, clock: Clock) -> Self {
        Self {
            output,
            lines: Vec::new(),
            style,
            clock,
            begun: HashMap::new(),
            last: None,
            callers: Callers::default(),
            pending: None,
            files: None,
            unseen: Vec::new(),
            program: None,
        }
    }

    /// Writes no lines about these calls, but how threads end by them.
    pub(super) fn hide(&mut self, calls: Vec<u32>) {
        self.unseen = calls;
    }

    /// Says which process is the program's first, of which [`Writer::end`] writes how it ended.
    pub(super) fn expect(&mut self, program: i32) {
        self.program = u32::try_from(program).ok();
    }

    /// From now on writes calls that have not returned when a thread ends, and where [`Writer::show_pending`] asks for it.
    pub(super) fn watch(&mut self, pending: Pending) {
        self.pending = Some(pending);
    }

    /// Writes lines of each thread to a file of its own.
    pub(super) fn separate(&mut self, files: ThreadFiles) {
        self.files = Some(files);
    }

    /// Takes an event, and writes what is known by it.
    pub(crate) fn event(&mut self, event: Event) -> io::Result<()> {
        if let Some((name, information)) = event.signal() {
            // It says nothing about the call that its thread is in.
            return self.signal(&event, &name, &information);
        }
        if let Some(report) = event.report() {
            return self.report(&event, report);
        }
        if let Some(pending) = &mut self.pending {
            pending.heard(&event);
        }
        let before = self.begun.remove(&event.thread());
        match event.state() {
            State::Entered => {
                if let Some(before) = before {
                    self.line(&before, &before, None)?;
                }
                if self.style.end && ENDS.contains(&event.name().as_str()) {
                    return self.exit(&event);
                }
                self.begun.insert(event.thread(), event);
                Ok(())
            }
            State::Resumed => match before {
                Some(before) if before.number() == event.number() => {
                    let ticks = event.start().wrapping_sub(before.start());
                    self.line(&before, &event, Some(ticks))
                }
                Some(before) => self.line(&before, &before, None),
                None => Ok(()),
            },
            // What it says cannot be read.
            State::Signal | State::Report => Ok(()),
            State::Done | State::Answered => {
                if let Some(before) = before.filter(|before| before.start() != event.start()) {
                    self.line(&before, &before, None)?;
                }
                self.line(&event, &event, Some(event.ticks()))
            }
        }
    }

    /// Writes that a thread ends, by a call that does not return.
    fn exit(&mut self, event: &Event) -> io::Result<()> {
        if !self.unseen.contains(&event.number()) {
            self.line(event, event, None)?;
        }
        if self.style.json || self.program == Some(event.thread()) {
            return Ok(());
        }
        // As wait4(2) reports it.
        let status = event.arguments()[0] & 0xff;
        self.prefix(event, self.clock.time(event.start()), event.start())?;
        writeln!(self.lines, "+++ exited with {status} +++")?;
        self.line_ends(event.thread())
    }

    /// Writes that a handler got a signal.
    fn signal(&mut self, event: &Event, name: &str, information: &str) -> io::Result<()> {
        let time = self.clock.time(event.start());
        if self.style.json {
            let object = json!({
                "thread": event.thread(),
                "time": humantime::format_rfc3339_nanos(time).to_string(),
                "signal": name,
                "information": information,
            });
            serde_json::to_writer(&mut self.lines, &object)?;
            self.lines.push(b'\n');
        } else {
            self.prefix(event, time, event.start())?;
            writeln!(self.lines, "--- {name} {information} ---")?;
        }
        self.line_ends(event.thread())
    }

    /// Writes what a rule's handler reports about a call.
    fn report(&mut self, event: &Event, report: &[u8]) -> io::Result<()> {
        let time = self.clock.time(event.start());
        let text: String = String::from_utf8_lossy(report)
            .chars()
            .map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c })
            .collect();
        if self.style.json {
            let object = json!({
                "thread": event.thread(),
                "time": humantime::format_rfc3339_nanos(time).to_string(),
                "call": event.name(),
                "report": text,
            });
            serde_json::to_writer(&mut self.lines, &object)?;
            self.lines.push(b'\n');
        } else {
            self.prefix(event, time, event.start())?;
            writeln!(self.lines, "*** {}: {text} ***", event.name())?;
        }
        self.line_ends(event.thread())
    }

    /// Looks at what threads wait in; writes what those were in that have ended. There must be no more events by now.
    pub(super) fn look(&mut self) -> io::Result<()> {
        let found = self.pending.as_mut().map(Pending::look).unwrap_or_default();
        self.unfinished(found)
    }

    /// Writes what threads wait in.
    pub(super) fn show_pending(&mut self) -> io::Result<()> {
        let found = self.pending.as_mut().map(Pending::all).unwrap_or_default();
        self.unfinished(found)
    }

    fn unfinished(&mut self, found: Vec<Unfinished>) -> io::Result<()> {
        let Style { failed, successful, slower, json, .. } = self.style;
        for Unfinished { call, since } in found {
            let waited = self.clock.duration(clock::ticks().saturating_sub(since));
            // A thread within a call of which there is an event already is shown by that.
            if failed
                || successful
                || slower.is_some_and(|least| waited < least)
                || self.begun.contains_key(&call.thread())
            {
                continue;
            }
            let time = self.clock.time(since);
            if json {
                serde_json::to_writer(&mut self.lines, &object(&call, &call, None, time))?;
                self.lines.push(b'\n');
                self.line_ends(call.thread())?;
                continue;
            }
            self.prefix(&call, time, since)?;
            self.place(&call)?;
            let given: Vec<String> =
                call.describe_given(self.style.form).into_iter().map(|argument| argument.text).collect();
            let more = if given.len() < call.describe(self.style.form).len() && !given.is_empty() {
                ","
            } else {
                ""
            };
            let space = if given.is_empty() { "" } else { " " };
            writeln!(self.lines, "{}({}{more}{space}<unfinished ...>", call.name(), given.join(", "))?;
            self.line_ends(call.thread())?;
        }
        Ok(())
    }

    /// Writes what never returned, and what was lost.
    pub(crate) fn finish(&mut self, lost: u64) -> io::Result<()> {
        self.show_pending()?;
        let mut left: Vec<Event> = self.begun.drain().map(|(_, event)| event).collect();
        left.retain(|event| !self.unseen.contains(&event.number()));
        left.sort_by_key(Event::start);
        for event in left {
            self.line(&event, &event, None)?;
        }
        if lost > 0 {
            eprintln!("orrery: {lost} calls were lost");
        }
        self.flush()
    }

    /// Writes how the program ended, if that is asked for.
    pub(crate) fn end(&mut self, pid: i32, status: ExitStatus) -> io::Result<()> {
        if !self.style.end || self.style.json {
            return Ok(());
        }
        if self.files.is_none() {
            write!(self.lines, "{pid:>7} ")?;
        }
        match status.signal() {
            Some(signal) => writeln!(self.lines, "+++ killed by {} +++", signal_name(signal))?,
            None => writeln!(self.lines, "+++ exited with {} +++", status.code().unwrap_or(0))?,
        }
        self.line_ends(u32::try_from(pid).unwrap_or(0))?;
        self.flush()
    }

    pub(crate) fn flush(&mut self) -> io::Result<()> {
        let written = self.output.write_all(&self.lines).and_then(|()| self.output.flush());
        self.lines.clear();
        written
    }

    fn line(&mut self, call: &Event, result: &Event, ticks: Option<u64>) -> io::Result<()> {
        let duration = ticks.map(|ticks| self.clock.duration(ticks));
        let Style { failed, successful, slower, .. } = self.style;
        if failed && result.error().is_none()
            || successful && (result.error().is_some() || result.state() == State::Entered)
            || slower.is_some_and(|least| duration.is_none_or(|took| took < least))
        {
            return Ok(());
        }
        let time = self.clock.time(call.start());
        if self.style.json {
            let object = object(call, result, duration, time);
            serde_json::to_writer(&mut self.lines, &object)?;
            self.lines.push(b'\n');
            return self.line_ends(call.thread());
        }
        let begin = self.lines.len();
        self.prefix(call, time, call.start())?;
        self.place(call)?;
        let arguments: Vec<String> =
            call.describe(self.style.form).into_iter().map(|argument| argument.text).collect();
        write!(self.lines, "{}({}) ", call.name(), arguments.join(", "))?;
        let written = self.lines.get(begin..).map_or(0, |line| String::from_utf8_lossy(line).chars().count());
        let room = self.style.column.saturating_sub(written);
        write!(self.lines, "{:room$}= {}", "", result.outcome(self.style.form))?;
        if result.state() == State::Answered {
            write!(self.lines, " (by policy)")?;
        }
        if let Some(duration) = duration.filter(|_| self.style.duration) {
            write!(self.lines, " <{:.6}>", duration.as_secs_f64())?;
        }
        writeln!(self.lines)?;
        if self.style.stack {
            self.callers(call)?;
        }
        self.line_ends(call.thread())
    }

    /// Writes what stands before a call: its thread, and times.
    fn prefix(&mut self, call: &Event, time: SystemTime, start: u64) -> io::Result<()> {
        if self.files.is_none() {
            write!(self.lines, "{:>7} ", call.thread())?;
        }
        match self.style.time {
            0 => {}
            1 => write!(self.lines, "{} ", clock::time_of_day(time))?,
            2 => {
                let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                write!(self.lines, "{}.{:06} ", clock::time_of_day(time), since.subsec_micros())?;
            }
            _ => {
                let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                write!(self.lines, "{}.{:06} ", since.as_secs(), since.subsec_micros())?;
            }
        }
        if self.style.relative {
            // They are printed as they end: one that began earlier may come later.
            let since = self.last.map_or(0, |last| start.saturating_sub(last));
            write!(self.lines, "{:>12.6} ", self.clock.duration(since).as_secs_f64())?;
            self.last = Some(start);
        }
        Ok(())
    }

    /// Writes which call it is, and from where.
    fn place(&mut self, call: &Event) -> io::Result<()> {
        if self.style.number {
            write!(self.lines, "[{:4}] ", call.number())?;
        }
        match call.callers()[0] {
            _ if !self.style.address => {}
            // It has not returned.
            0 => write!(self.lines, "[????????????????] ")?,
            address => write!(self.lines, "[{address:016x}] ")?,
        }
        Ok(())
    }

    fn callers(&mut self, call: &Event) -> io::Result<()> {
        for caller in self.callers.describe(call) {
            writeln!(self.lines, "{:>7}  > {caller}", "")?;
        }
        if matches!(call.name().as_str(), "execve" | "execveat" | "exit" | "exit_group") {
            self.callers.forget(call.thread());
        }
        Ok(())
    }

    /// Has a thread's line written, now or with others.
    fn line_ends(&mut self, thread: u32) -> io::Result<()> {
        match &mut self.files {
            Some(files) => {
                let written = files.write(thread, &self.lines);
                self.lines.clear();
                written
            }
            None if self.lines.len() > ENOUGH => self.flush(),
            None => Ok(()),
        }
    }
}

fn object(call: &Event, result: &Event, duration: Option<Duration>, time: SystemTime) -> serde_json::Value {
    let named = |Described { name, text }| json!({"name": name, "value": text});
    let arguments: Vec<_> =
        call.describe(Form { whole: true, ..Form::default() }).into_iter().map(named).collect();
    let returned = (result.state() != State::Entered).then(|| result.result());
    json!({
        "thread": call.thread(),
        "time": humantime::format_rfc3339_nanos(time).to_string(),
        "call": call.name(),
        "number": call.number(),
        "arguments": arguments,
        "result": returned,
        "error": result.error().map(error_name),
        "by_policy": result.state() == State::Answered,
        "duration_ns": duration.map(|duration| duration.as_nanos()),
    })
}
