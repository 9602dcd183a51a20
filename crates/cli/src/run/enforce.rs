//! `orrery run --enforce`: a policy as a boundary against hostile code.
//!
//! Two of them look at each call then. The executive, in the program's own address space, is the fast path: what it denies
//! costs a jump. But a program can call past it. So the program, its executive and its supervisor all run under a guard: a
//! filter in the kernel, and a monitor that nobody among them can reach, which decides again about all that is security
//! relevant. Here a policy's rules become the monitor's; which ones can, and which cannot, is told by `--check`.
//!
//! Each rule acts in one place. What the monitor rewrites and redirects, the executive leaves alone; what it answers, both answer.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use anyhow::bail;
use orrery_hijack::policy::{self, Effect, RuleView};
use orrery_hijack::{Hijack, Options, Policy, calls};
use orrery_monitor::{Destination, End, Executions, Guard, Log, Rules, Verdict, block_signals, can_enforce};

use super::Arguments;
use crate::trace::{self, Logger, Style};

/// What the executive, its supervisor and the loader of programs call for their own ends. A rule that answers these without a condition
/// would answer them, too.
const NEEDED: &[&str] = &[
    "arch_prctl",
    "brk",
    "clock_gettime",
    "clock_nanosleep",
    "clone",
    "close",
    "close_range",
    "exit",
    "exit_group",
    "fork",
    "fstat",
    "futex",
    "getpid",
    "gettid",
    "mmap",
    "mprotect",
    "mremap",
    "mseal",
    "munmap",
    "nanosleep",
    "open",
    "openat",
    "prctl",
    "process_vm_readv",
    "process_vm_writev",
    "ptrace",
    "read",
    "readlink",
    "readlinkat",
    "restart_syscall",
    "rseq",
    "rt_sigaction",
    "rt_sigprocmask",
    "rt_sigreturn",
    "rt_tgsigqueueinfo",
    "sched_yield",
    "set_robust_list",
    "set_tid_address",
    "setsid",
    "shmat",
    "shmctl",
    "shmdt",
    "sigaltstack",
    "tgkill",
    "vfork",
    "wait4",
    "write",
];

/// Rules as the monitor is asked about them.
struct Held {
    policy: Policy,
    /// For each call, the rules about it that are held, in their order.
    by_call: HashMap<&'static str, Vec<usize>>,
}

/// Calls for which a rule is not held, by the reason.
type Reasons<'n> = BTreeMap<String, Vec<&'n str>>;

/// What of a policy is held, and what is not.
struct Translation {
    held: Held,
    /// What is left to executives.
    executive: Policy,
    /// What to tell of each rule.
    told: Vec<String>,
}

/// Runs the program, and ends this process as it ended.
pub(super) fn run(arguments: &Arguments, policy: Policy) -> anyhow::Result<()> {
    let translation = Translation::of(policy)?;
    if arguments.check {
        let mut out = io::stdout().lock();
        translation.told.iter().try_for_each(|line| writeln!(out, "{line}"))?;
        return Ok(());
    }
    crate::guard::end_as("run", supervised(arguments, translation))
}

fn supervised(arguments: &Arguments, translation: Translation) -> anyhow::Result<End> {
    let Some((program, rest)) = arguments.command.split_first() else { bail!("no program given") };
    let log = super::open_log(arguments)?;
    let Translation { held, executive, .. } = translation;
    let tells = executive.tells();
    let options = Options::default().counted(false).patch(!arguments.no_patch).policy(executive);
    let options = options.strict(!arguments.no_strict);
    let hijack = Hijack::prepare()?;
    let logger = tells.then(|| Logger::prepare(&hijack, log, Style::default()));
    crate::pipes::restore();
    block_signals();
    let execute = || {
        let error = match hijack.attend(options) {
            Ok(()) => hijack.execute(program, rest),
            Err(error) => error,
        };
        match error {
            orrery_hijack::Error::NotFound(_) => io::Error::from_raw_os_error(libc::ENOENT),
            orrery_hijack::Error::NotExecutable { source, .. } => source,
            // What is said here says more than an error's number, which is all that goes to the monitor.
            error => {
                eprintln!("orrery: {:#}", anyhow::Error::new(error));
                io::Error::from_raw_os_error(libc::ENOEXEC)
            }
        }
    };
    let guard = Guard::new(orrery_monitor::Policy::of_rules(held)).log(Log::Words);
    let guarded = guard.start_by(program, execute)?;
    let telling = logger.map(Logger::start);
    let supervisor = hijack.supervisor();
    // The supervisor goes when nobody but itself has the shared memory.
    let part = || {
        if let Some(Err(error)) = telling.map(trace::RunningLogger::finish) {
            eprintln!("orrery: {error:#}");
        }
        trace::report_unfollowed(&hijack);
        drop(hijack);
    };
    Ok(guarded.supervise_until(part, || children() == [supervisor])?)
}

/// The processes of which this one is the parent. One that is none of ours can make up which is the supervisor; it then loses
/// its monitor, and can do nothing any more.
fn children() -> Vec<i32> {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|line| line.split_whitespace().filter_map(|number| number.parse().ok()).collect::<Vec<_>>())
        .collect()
}

fn name_of(call: u32) -> &'static str {
    calls::numbered(call).map_or("unknown", |signature| signature.name)
}

/// Returns whether the monitor can hold a rule for one of its calls; if not, why.
fn holdable(rule: RuleView<'_>, call: &str) -> Result<(), String> {
    if let Some(condition) = rule.forgeable().first() {
        return Err(match *condition {
            "every, after or times" => "it counts calls".to_owned(),
            condition => format!("`{condition}` can be made up"),
        });
    }
    let conditional = rule.paths().next().is_some() || rule.has_address();
    match rule.effect() {
        Effect::None => Err("it only waits or reports".to_owned()),
        Effect::Short => Err("how much is transferred is no boundary".to_owned()),
        Effect::Handler => Err("a handler runs within the program".to_owned()),
        Effect::Redirect if call != "connect" => Err("only connections are redirected".to_owned()),
        Effect::Rewrite if call.starts_with("execve") => {
            Err("nobody can execute in another's place".to_owned())
        }
        _ if conditional && !can_enforce(call) => Err("the kernel alone performs it".to_owned()),
        Effect::Answer(_) if !conditional && NEEDED.contains(&call) => {
            Err("executives need it themselves".to_owned())
        }
        _ => Ok(()),
    }
}

impl Translation {
    /// Sorts a policy's rules.
    ///
    /// # Errors
    /// A rule that cannot be held exempts calls from one that can.
    fn of(policy: Policy) -> anyhow::Result<Self> {
        let mut held: HashMap<&'static str, Vec<usize>> = HashMap::new();
        // By rule: the calls for which it is held, and those for which it is not, by the reason.
        let mut sorted: Vec<(Vec<&str>, Reasons<'_>)> = Vec::new();
        let exact = executions_are_exact(&policy);
        for (index, rule) in policy.rules().enumerate() {
            let (mut yes, mut no) = (Vec::new(), Reasons::new());
            for call in rule.calls().iter().map(|call| name_of(*call)) {
                let execution = call.starts_with("execve") && !exact;
                let verdict = holdable(rule, call).and_then(|()| match rule.effect() {
                    Effect::Answer(_) if execution => {
                        Err("Landlock knows no such patterns, and programs can be \
                         exchanged between the look and the execution"
                            .to_owned())
                    }
                    _ => Ok(()),
                });
                match verdict {
                    Ok(()) => {
                        held.entry(call).or_default().push(index);
                        yes.push(call);
                    }
                    Err(reason) => no.entry(reason).or_default().push(call),
                }
            }
            sorted.push((yes, no));
        }
        let rules: Vec<_> = policy.rules().collect();
        for (index, rule) in rules.iter().enumerate().filter(|(_, rule)| rule.effect() == Effect::Allow) {
            let Some((reason, calls)) = sorted.get(index).and_then(|(_, no)| no.iter().next()) else {
                continue;
            };
            let exempted = |later: &&RuleView<'_>| {
                let at = rules.iter().position(|other| other.line() == later.line());
                let held =
                    at.and_then(|at| sorted.get(at)).map(|(yes, _)| yes.as_slice()).unwrap_or_default();
                later.effect() != Effect::Allow && calls.iter().any(|call| held.contains(call))
            };
            if let Some(later) = rules.iter().skip(index + 1).find(exempted) {
                bail!(
                    "line {}: this rule exempts calls from the one in line {}, and cannot be enforced ({reason}): put another \
                     condition, or leave --enforce",
                    rule.line(),
                    later.line(),
                );
            }
        }
        let mut told: Vec<_> =
            rules.iter().zip(&sorted).map(|(rule, (yes, no))| describe(*rule, yes, no)).collect();
        let services = policy.services();
        if services.sleep.is_some() || services.poll_receive.is_some() || !services.remember.is_empty() {
            told.push(
                "services: the executive's alone: they answer the program about itself, and allow nothing"
                    .to_owned(),
            );
        }
        let executive = policy.clone().retain(|rule, call| {
            !matches!(rule.effect(), Effect::Rewrite | Effect::Redirect)
                || holdable(rule, name_of(call)).is_err()
        });
        Ok(Self { held: Held { policy, by_call: held }, executive, told })
    }
}

/// Returns a few names, and how many more.
fn some(names: &[&str]) -> String {
    const FEW: usize = 4;
    let shown = names.iter().take(FEW).copied().collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(FEW) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}

fn describe(rule: RuleView<'_>, yes: &[&str], no: &Reasons<'_>) -> String {
    let mut parts = Vec::new();
    if !yes.is_empty() {
        parts.push(format!("enforced for {}", some(yes)));
    }
    parts.extend(no.iter().map(|(reason, calls)| format!("advisory for {} ({reason})", some(calls))));
    let opens = yes.contains(&"openat") && rule.paths().next().is_some();
    if opens
        && matches!(rule.effect(), Effect::Answer(_))
        && !(yes.contains(&"openat2") && yes.contains(&"link"))
    {
        parts.push("other calls reach the same files: call = \"%file\" names them all".to_owned());
    }
    format!("line {}: {}", rule.line(), parts.join("; "))
}

/// Returns whether what the rules say of executions can be said by lists of files and directories.
fn executions_are_exact(policy: &Policy) -> bool {
    executions(policy).is_some()
}

/// Returns what may be executed. Files that are allowed one by one and then denied as a whole, or denied one by one:
/// else `None`.
fn executions(policy: &Policy) -> Option<Executions> {
    let number = calls::named("execve")?.number;
    let paths = |rule: RuleView<'_>| -> Option<Vec<PathBuf>> {
        let literal = rule.literal_paths()?;
        let real = |path: &[u8]| {
            let path = PathBuf::from(OsStr::from_bytes(path));
            path.canonicalize().unwrap_or(path)
        };
        Some(literal.into_iter().map(real).collect())
    };
    let (mut allowed, mut denied) = (Vec::new(), Vec::new());
    let about = |rule: &RuleView<'_>| rule.calls().contains(&number) && rule.forgeable().is_empty();
    for rule in policy.rules().filter(about) {
        match rule.effect() {
            Effect::Answer(_) if rule.is_about_every_path() => {
                return denied.is_empty().then_some(Executions::Only(allowed));
            }
            Effect::Answer(_) if allowed.is_empty() => denied.extend(paths(rule)?),
            Effect::Allow => allowed.extend(paths(rule)?),
            Effect::Answer(_) => return None,
            _ => (),
        }
    }
    Some(Executions::AllBut(denied))
}

impl Held {
    fn rules(&self, call: &str) -> impl Iterator<Item = RuleView<'_>> {
        // A message's address is that of what it is sent to, however it is sent.
        let names = if matches!(call, "sendmsg" | "sendmmsg") { vec![call, "sendto"] } else { vec![call] };
        let of = |call: &str| self.by_call.get(call).into_iter().flatten().copied();
        let mut held: BTreeSet<usize> = names.into_iter().flat_map(of).collect();
        // Whoever listens without being bound is bound by that, to an address of the kernel's choice.
        if call == "listen" {
            let addressed =
                |index: &usize| self.policy.rules().nth(*index).is_some_and(|rule| rule.has_address());
            held.extend(of("bind").filter(addressed));
        }
        held.into_iter().filter_map(|index| self.policy.rules().nth(index))
    }

    /// Returns what becomes of a call, by the rules that `fits` says are about it.
    fn ruling(
        &self,
        call: &str,
        fits: impl Fn(RuleView<'_>) -> bool,
        change: impl Fn(RuleView<'_>) -> Option<Verdict>,
    ) -> Verdict {
        let mut changed = None;
        for rule in self.rules(call).filter(|rule| fits(*rule)) {
            match rule.effect() {
                Effect::Allow => break,
                Effect::Answer(value) => return answer(value),
                _ => changed = changed.or_else(|| change(rule)),
            }
        }
        changed.unwrap_or(Verdict::Pass)
    }
}

fn answer(value: i64) -> Verdict {
    match i32::try_from(value) {
        Ok(error @ -4095..0) => Verdict::Fails(-error),
        _ => Verdict::Returns(value),
    }
}

fn conditional(rule: RuleView<'_>) -> bool {
    rule.paths().next().is_some() || rule.has_address()
}

impl Rules for Held {
    fn call(&self, call: &str) -> Option<Verdict> {
        let first = self.rules(call).next().filter(|rule| !conditional(*rule))?;
        match first.effect() {
            Effect::Allow => Some(Verdict::Pass),
            Effect::Answer(value) => Some(answer(value)),
            _ => None,
        }
    }

    fn asks(&self, call: &str) -> bool {
        self.rules(call).any(conditional)
    }

    fn path(&self, call: &str, path: &[u8]) -> Verdict {
        let fits = |rule: RuleView<'_>| {
            !rule.has_address() && (rule.paths().next().is_none() || rule.is_about_path(path))
        };
        self.ruling(call, fits, |rule| Some(Verdict::Path(rule.rewritten(path))))
    }

    fn address(&self, call: &str, address: Destination<'_>) -> Verdict {
        let address = match address {
            Destination::Internet(address) => Some(policy::Destination::Internet(address)),
            Destination::Unix(path) => Some(policy::Destination::Unix(path)),
            Destination::Other => None,
        };
        // A Unix socket is at a path, and so something that rules about paths are about.
        let fits_path = |rule: RuleView<'_>| {
            let path = match address {
                Some(policy::Destination::Unix(path)) if path.first() != Some(&0) => path,
                _ => b"",
            };
            rule.paths().next().is_none() || !path.is_empty() && rule.is_about_path(path)
        };
        let fits = |rule: RuleView<'_>| {
            fits_path(rule)
                && (!rule.has_address() || address.is_some_and(|address| rule.is_about_address(address)))
        };
        self.ruling(call, fits, |rule| Some(Verdict::Address(rule.target_address().to_vec())))
    }

    fn keeps_names(&self, path: &[u8]) -> bool {
        self.by_call
            .values()
            .flatten()
            .filter_map(|index| self.policy.rules().nth(*index))
            .any(|rule| rule.effect() != Effect::Allow && rule.is_about_names_beneath(path))
    }

    fn executions(&self) -> Executions {
        executions(&self.policy).unwrap_or(Executions::AllBut(Vec::new()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(text: &str) -> anyhow::Result<Translation> {
        Translation::of(Policy::parse(text, "p").unwrap())
    }

    fn held(text: &str) -> Held {
        translated(text).unwrap().held
    }

    #[test]
    fn rules_are_asked_in_their_order() {
        let held = held(
            "[[rule]]\ncall = '%file'\npath = '/a/open/**'\nallow = true\n[[rule]]\ncall = '%file'\npath = '/a/**'\ndeny = 'ENOENT'\n\
             [[rule]]\ncall = 'openat'\npath = '/b/**'\nrewrite = '/c'\n[[rule]]\ncall = 'openat'\npath = '/b/x'\nreturn = 7\n",
        );
        assert_eq!(held.path("openat", b"/a/open/x"), Verdict::Pass);
        assert_eq!(held.path("openat", b"/a/x"), Verdict::Fails(libc::ENOENT));
        assert_eq!(held.path("openat", b"/b/y"), Verdict::Path(b"/c/y".to_vec()));
        assert_eq!(held.path("openat", b"/b/x"), Verdict::Returns(7));
        assert_eq!(held.path("stat", b"/b/x"), Verdict::Pass);
        assert!(
            held.asks("stat") && !held.asks("getpid") && held.keeps_names(b"/a") && !held.keeps_names(b"/d")
        );
    }

    #[test]
    fn calls_without_conditions_are_the_filters() {
        let held = held(
            "[[rule]]\ncall = ['mount', 'sethostname']\ndeny = 'EPERM'\n[[rule]]\ncall = 'getppid'\nreturn = 1\n",
        );
        assert_eq!(held.call("mount"), Some(Verdict::Fails(libc::EPERM)));
        assert_eq!((held.call("getppid"), held.call("getuid")), (Some(Verdict::Returns(1)), None));
    }

    #[test]
    fn addresses_and_messages() {
        let held = held(
            "[[rule]]\ncall = '%network'\naddress = '10.0.0.0/8'\ndeny = 'EACCES'\n[[rule]]\ncall = 'connect'\n\
             address = '*:443'\nredirect = '127.0.0.1:8443'\n",
        );
        let to = |text: &str| Destination::Internet(text.parse().unwrap());
        assert_eq!(held.address("connect", to("10.1.1.1:443")), Verdict::Fails(libc::EACCES));
        assert_eq!(held.address("sendmsg", to("10.1.1.1:9")), Verdict::Fails(libc::EACCES));
        assert!(matches!(held.address("connect", to("[::1]:443")), Verdict::Address(_)));
        let held = self::held("[[rule]]\ncall = '%file'\npath = '/run/x/**'\ndeny = 'EACCES'\n");
        for call in ["connect", "bind", "sendto", "sendmsg", "sendmmsg"] {
            let at = |path: &'static [u8]| held.address(call, Destination::Unix(path));
            assert_eq!(at(b"/run/x/socket"), Verdict::Fails(libc::EACCES), "{call}");
            assert_eq!((at(b"/run/y"), at(b"\0/run/x/y")), (Verdict::Pass, Verdict::Pass), "{call}");
            assert_eq!(held.address(call, to("10.1.1.1:443")), Verdict::Pass, "{call}");
        }
        assert_eq!(held.address("connect", Destination::Other), Verdict::Pass);
    }

    #[test]
    fn what_cannot_be_held_is_told() {
        let told = translated(
            "[[rule]]\ncall = '*'\npath = '/x/**'\ndeny = 'EACCES'\n[[rule]]\ncall = 'write'\nevery = 3\ndeny = 'ENOSPC'\n\
             [[rule]]\ncall = 'ptrace'\ndeny = 'EPERM'\n[[rule]]\ncall = 'openat'\npath = '/y'\ndeny = 'EACCES'\n",
        )
        .unwrap()
        .told;
        assert!(told[0].contains("enforced for open") && told[0].contains("the kernel alone performs it"));
        assert_eq!(told[1], "line 5: advisory for write (it counts calls)");
        assert_eq!(told[2], "line 9: advisory for ptrace (executives need it themselves)");
        assert!(told[3].contains("call = \"%file\" names them all"), "{}", told[3]);
        let error = translated(
            "[[rule]]\ncall = 'openat'\ncaller = 'libc.so*'\nallow = true\n[[rule]]\ncall = 'openat'\ndeny = 'EPERM'\npath = '/x'\n",
        );
        let error = error.err().unwrap().to_string();
        assert!(error.starts_with("line 1: this rule exempts calls from the one in line 5"), "{error}");
    }

    #[test]
    fn executions_are_lists() {
        let of = |text: &str| executions(&Policy::parse(text, "p").unwrap());
        let allow = "[[rule]]\ncall = 'execve'\npath = ['/usr/**', '/opt/x']\nallow = true\n";
        let rest = "[[rule]]\ncall = 'execve'\npath = '**'\ndeny = 'EACCES'\n";
        let only = Some(Executions::Only(vec!["/usr".into(), "/opt/x".into()]));
        assert_eq!(of(&format!("{allow}{rest}")), only);
        assert_eq!(of(&rest.replace("**", "/opt/y")), Some(Executions::AllBut(vec!["/opt/y".into()])));
        assert_eq!(of(&rest.replace("**", "/opt/*.sh")), None);
    }
}
