//! One experiment: network, tasks, steering, sender.

use std::env;
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::UdpSocket;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use orrery_hijack::{Hijack, Policy, Services};
use orrery_packets::{Steering, Stream};
use serde::{Deserialize, Serialize};

use super::network::{RECEIVERS, connect, leave};
use super::task::{READY, Statistics, compute};
use super::{PACKET, RATE, STREAMS, Scheduling, WINDOW, WINDOWS};
use crate::{Skipped, machine};

/// How much processing a packet takes. Four streams take 1.6 processors then; the two that matter, 0.8.
const WORK: Duration = Duration::from_micros(8);
/// How often drop rates are decided.
const STEP: Duration = Duration::from_millis(10);
/// The shares: highest, intermediate, best effort twice.
const SHARES: [u32; STREAMS] = [100, 50, 1, 1];
/// What goes with them of the CPU: real-time priorities for the first two.
const PRIORITIES: [Scheduling; STREAMS] =
    [Scheduling::Fifo(40), Scheduling::Fifo(30), Scheduling::Ordinary, Scheduling::Ordinary];
/// The same where tasks look for packets: those of one priority give the CPU to one another, the second after each packet.
const POLLING: [Scheduling; STREAMS] =
    [Scheduling::Fifo(40), Scheduling::RoundRobin(40), Scheduling::Ordinary, Scheduling::Ordinary];
/// For how long they look. A packet of a stream is due each 22.7 us.
const POLL: Duration = Duration::from_micros(100);
/// How many bytes may wait of a stream with a share: what arrives while the kernel runs ordinary programs that real-time threads have kept
/// waiting, 50 ms, where a packet of 64 bytes takes 768.
const ROOM: u32 = 4 << 20;

/// How packets are delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    /// Early drop by shares, and CPU shares.
    Shares,
    /// Early drop alone: what needs no privilege.
    EarlyDrop,
    /// Priorities alone.
    Fifo,
    /// Neither priorities nor shares.
    Native,
    /// Nothing for the others; the first task has the highest priority that there is, and only receives.
    Floor,
}

impl Way {
    /// All ways that share a processor among four tasks, ours first.
    pub const ALL: [Self; 4] = [Self::Shares, Self::EarlyDrop, Self::Fifo, Self::Native];

    /// Returns the way of this name, if there is one.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().chain([Self::Floor]).find(|way| way.name() == name)
    }

    /// Returns the name in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Shares => "shares",
            Self::EarlyDrop => "shares, unprivileged",
            Self::Fifo => "native, SCHED_FIFO",
            Self::Native => "native",
            Self::Floor => "floor: SCHED_FIFO 99, only receives",
        }
    }
}

/// What a task computed: the means over the windows.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Packets that did not come, of 30,000.
    pub lost: f64,
    /// The jitter in microseconds.
    pub jitter: f64,
}

/// Runs an experiment in a process of its own; the program must pass `experiment NAME` on to [`run_experiment`].
///
/// # Errors
/// [`Skipped`] where this machine has no namespaces or priorities; what else failed.
pub fn measure(way: Way) -> Result<Vec<Outcome>> {
    let output = Command::new(env::current_exe()?).args(["experiment", way.name()]).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if let Some(reason) = errors.lines().find_map(|line| line.strip_prefix("SKIPPED: ")) {
        return Err(Skipped(reason.to_owned()).into());
    }
    ensure!(output.status.success(), "the experiment failed: {}", errors.trim());
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Runs an experiment and prints its outcomes as JSON.
///
/// # Errors
/// What failed; what this machine lacks is printed as `SKIPPED: REASON` and is none.
pub fn run_experiment(name: &str) -> Result<()> {
    let way = Way::named(name).context("no such way")?;
    match experiment(way) {
        Ok(outcomes) => println!("{}", serde_json::to_string(&outcomes)?),
        Err(error) if error.is::<Skipped>() => eprintln!("{error}"),
        Err(error) => return Err(error),
    }
    Ok(())
}

/// What the program must pass on to [`run_polling_task`], with its arguments.
pub const POLLING_TASK: &str = "polling-task";

/// Runs a task under an executive that has it look for packets before it blocks.
///
/// # Errors
/// The executive cannot be had.
pub fn run_polling_task(scheduling: &str, work: &str) -> Result<()> {
    let services = Services { poll_receive: Some(POLL), ..Services::default() };
    let policy = Policy::default().with_services(services);
    let hijack = Hijack::start(orrery_hijack::Options::default().counted(false).policy(policy))?;
    let program = env::current_exe()?;
    Err(hijack.execute(program.as_os_str(), &["task".into(), scheduling.into(), work.into()]).into())
}

/// A process that is killed with its owner.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _reaped = self.0.wait();
    }
}

/// A task, and what it prints.
struct Task {
    process: Killed,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Task {
    fn start(command: &mut Command) -> Result<Self> {
        let mut process = Killed(command.stdout(Stdio::piped()).spawn()?);
        let output = process.0.stdout.take().context("no pipe")?;
        Ok(Self { process, lines: BufReader::new(output).lines() })
    }

    /// Waits until it receives: an executive takes longer to start where it has no CPU.
    fn await_start(&mut self) -> Result<()> {
        let line = self.line()?;
        ensure!(line == READY, "a task printed {line:?} in place of {READY:?}");
        Ok(())
    }

    fn line(&mut self) -> Result<String> {
        Ok(self.lines.next().context("a task has ended early")??)
    }

    fn outcome(mut self) -> Result<Outcome> {
        let windows: Vec<Statistics> = serde_json::from_str(&self.line()?)?;
        #[expect(clippy::cast_precision_loss, reason = "three numbers of at most 30,000")]
        let mean = |value: fn(&Statistics) -> f64| {
            windows.iter().map(value).sum::<f64>() / windows.len().max(1) as f64
        };
        #[expect(clippy::cast_precision_loss, reason = "at most 30,000")]
        let lost = mean(|window| window.lost as f64);
        Ok(Outcome { lost, jitter: mean(|window| window.jitter / 1e3) })
    }
}

fn experiment(way: Way) -> Result<Vec<Outcome>> {
    leave()?;
    let rounds = calibrate();
    let program = env::current_exe()?;
    let mut sender = Command::new(&program);
    let mut sender = Killed(sender.arg("send").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
    let mut from_sender = BufReader::new(sender.0.stdout.take().context("no pipe")?).lines();
    ensure!(
        from_sender.next().is_some_and(|line| line.is_ok_and(|line| line == "ready")),
        "the sender has ended"
    );
    connect(sender.0.id())?;
    let sockets = (0..STREAMS).map(|_| UdpSocket::bind((RECEIVERS, 0))).collect::<Result<Vec<_>, _>>()?;
    let ports: Vec<String> =
        sockets.iter().map(|socket| Ok(socket.local_addr()?.port().to_string())).collect::<Result<_>>()?;
    let mut tasks = Vec::new();
    for (index, (socket, priority)) in sockets.into_iter().zip(PRIORITIES).enumerate() {
        let (priority, rounds) = match way {
            Way::Shares => (POLLING[index], rounds),
            Way::Fifo => (priority, rounds),
            Way::Floor if index == 0 => (Scheduling::Fifo(99), 0),
            Way::EarlyDrop | Way::Native | Way::Floor => (Scheduling::Ordinary, rounds),
        };
        let mut task = Command::new(&program);
        let polls = way == Way::Shares && priority != Scheduling::Ordinary;
        let start = if polls { POLLING_TASK } else { "task" };
        task.args([start.to_owned(), priority.word(), rounds.to_string()]);
        let task = task.stdin(Stdio::from(std::os::fd::OwnedFd::from(socket)));
        tasks.push(Task::start(task)?);
    }
    tasks.iter_mut().try_for_each(Task::await_start)?;
    let mut streams = Vec::new();
    if [Way::Shares, Way::EarlyDrop].contains(&way) {
        for (task, share) in tasks.iter().zip(SHARES) {
            let mut stream = Stream::of_process(i32::try_from(task.process.0.id())?, 0)?;
            if share > 1 {
                stream.raise_limit(ROOM)?;
            }
            streams.push(stream);
        }
    }
    let mut to_sender = sender.0.stdin.take().context("no pipe")?;
    writeln!(to_sender, "{}", ports.join(" "))?;
    let over = AtomicBool::new(false);
    let (steered, taken) = std::thread::scope(|scope| {
        let steering = scope.spawn(|| steer(way, streams, &over));
        let taken = from_sender.next();
        over.store(true, Ordering::Relaxed);
        (steering.join(), taken)
    });
    let Ok(steered) = steered else { bail!("the steering thread panicked") };
    steered?;
    let taken: u64 = taken.context("the sender has ended")??.parse()?;
    let expected = (WINDOWS + 1) * WINDOW * 1_000_000_000 / RATE;
    ensure!(taken < expected * 5 / 4, "the sender was too slow: {taken} ns in place of {expected}");
    tasks.into_iter().map(Task::outcome).collect()
}

/// Decides drop rates each 10 ms, until it is over.
fn steer(way: Way, mut streams: Vec<Stream>, over: &AtomicBool) -> Result<()> {
    if way == Way::Shares {
        Scheduling::Fifo(50).apply()?;
    }
    let mut steering = Steering::new(&SHARES);
    while !streams.is_empty() && !over.load(Ordering::Relaxed) {
        let begin = Instant::now();
        let loads = streams.iter().map(Stream::look).collect::<Result<Vec<_>, _>>()?;
        for index in steering.step(&loads) {
            streams[index].drop_part(steering.rate(index))?;
        }
        std::thread::sleep(STEP.saturating_sub(begin.elapsed()));
    }
    Ok(())
}

/// Returns how many rounds of computing take [`WORK`].
fn calibrate() -> u32 {
    const ROUNDS: u32 = 2_000;
    let _anywhere = machine::last_cpu().map(machine::pin);
    let once = |_| {
        let begin = Instant::now();
        compute(&[7; PACKET], ROUNDS);
        begin.elapsed()
    };
    let fastest = (0..50).map(once).min().unwrap_or(WORK);
    let rounds = WORK.as_nanos() * u128::from(ROUNDS) / fastest.as_nanos().max(1);
    u32::try_from(rounds).unwrap_or(1).max(1)
}
