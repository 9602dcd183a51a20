use super::*;
use orrery_sys::seccomp;
use orrery_testing::Random;

fn wrong(text: &str) -> String {
    SeccompProfile::parse(text, "p").unwrap_err().to_string()
}

/// What a filter does with a call, of which the program of it does the same.
fn action_of(
    profile: &SeccompProfile,
    capabilities: CapabilitySet,
    call: Sysno,
    arguments: [u64; 6],
) -> Action {
    let filter = profile.filter(capabilities, (6, 1));
    let action = filter.action(call.id(), &arguments);
    let number = call.id().unsigned_abs();
    assert_eq!(seccomp::simulate(&filter.program(), seccomp::NATIVE, number, arguments), action.value());
    action
}

#[test]
fn what_is_not_honoured_is_refused_by_name() {
    let with = |more: &str| format!("{{\"defaultAction\": \"SCMP_ACT_ALLOW\", {more}}}");
    let rule = |more: &str| with(&format!("\"syscalls\": [{{\"action\": \"SCMP_ACT_ERRNO\", {more}}}]"));
    let argument = |more: &str| rule(&format!("\"names\": [\"read\"], \"args\": [{{{more}}}]"));
    for (text, named) in [
        ("x".to_owned(), "p:1:1: cannot honour the seccomp profile: expected value"),
        ("{\n}".to_owned(), "p:2:1: cannot honour the seccomp profile: missing field `defaultAction`"),
        (
            "{\"defaultAction\": \"SCMP_ACT_TRACE\"}".to_owned(),
            "defaultAction \"SCMP_ACT_TRACE\": no debugger",
        ),
        ("{\"defaultAction\": \"ALLOW\"}".to_owned(), "defaultAction \"ALLOW\": no action"),
        (with("\"extra\": 1"), "unknown field `extra`"),
        (with("\"defaultErrnoRet\": 1"), "SCMP_ACT_ALLOW returns no error"),
        (with("\"flags\": [\"SECCOMP_FILTER_FLAG_LOG\"]"), "flags \"SECCOMP_FILTER_FLAG_LOG\""),
        (with("\"listenerPath\": \"/x\""), "listenerPath \"/x\""),
        (with("\"listenerMetadata\": \"x\""), "listenerMetadata \"x\""),
        (with("\"architectures\": [\"SCMP_ARCH_VAX\"]"), "architecture \"SCMP_ARCH_VAX\""),
        (
            with(
                "\"architectures\": [\"SCMP_ARCH_X86\"], \"archMap\": [{\"architecture\": \"SCMP_ARCH_X86\"}]",
            ),
            "archMap: architectures is there, too",
        ),
        (rule("\"names\": []"), "syscalls[0]: it names no system call"),
        (rule("\"names\": [\"read\"], \"name\": \"write\""), "syscalls[0].name: names is there"),
        (rule("\"names\": [\"opneat\"]"), "syscalls[0]: \"opneat\": no system call has this name here"),
        (rule("\"names\": [\"read\"], \"errnoRet\": 0"), "errnoRet 0"),
        (rule("\"names\": [\"read\"], \"errnoRet\": 4096"), "errnoRet 4096"),
        (rule("\"names\": [\"read\"], \"errno\": \"EFOO\""), "no error is called \"EFOO\""),
        (rule("\"names\": [\"read\"], \"errno\": \"EPERM\", \"errnoRet\": 2"), "errnoRet is another error"),
        (rule("\"names\": [\"read\"], \"includes\": {\"caps\": [\"CAP_FLY\"]}"), "caps \"CAP_FLY\""),
        (rule("\"names\": [\"read\"], \"excludes\": {\"arches\": [\"amd46\"]}"), "arches \"amd46\""),
        (rule("\"names\": [\"read\"], \"includes\": {\"minKernel\": \"4\"}"), "minKernel \"4\""),
        (rule("\"names\": [\"read\"], \"includes\": {\"maxKernel\": \"4.1\"}"), "unknown field `maxKernel`"),
        (argument("\"index\": 6, \"op\": \"SCMP_CMP_EQ\""), "syscalls[0].args[0].index 6"),
        (argument("\"index\": 0, \"op\": \"SCMP_CMP_LIKE\""), "args[0].op \"SCMP_CMP_LIKE\""),
        (
            argument("\"index\": 0, \"op\": \"SCMP_CMP_MASKED_EQ\", \"value\": 1, \"valueTwo\": 3"),
            "valueTwo 3",
        ),
        (argument("\"index\": 0, \"op\": \"SCMP_CMP_EQ\", \"value\": -1"), "invalid value"),
        (argument("\"index\": 0, \"op\": \"SCMP_CMP_EQ\", \"mask\": 1"), "unknown field `mask`"),
    ] {
        assert!(wrong(&text).contains(named), "{text}: {}", wrong(&text));
    }
    for action in ["SCMP_ACT_TRACE", "SCMP_ACT_NOTIFY", "SCMP_ACT_LOG", "SCMP_ACT_NONE"] {
        let text = with(&format!("\"syscalls\": [{{\"names\": [\"read\"], \"action\": \"{action}\"}}]"));
        assert!(wrong(&text).contains(&format!("syscalls[0].action \"{action}\"")), "{}", wrong(&text));
    }
}

/// Names of other architectures are in every engine's profile. They are refused only where a typing error would let a call pass.
#[test]
fn names_of_other_architectures_are_left_to_the_default() {
    let text = |default: &str, action: &str| {
        format!(
            "{{\"defaultAction\": \"{default}\", \"syscalls\": [{{\"names\": [\"_llseek\"], \"action\": \"{action}\"}}]}}"
        )
    };
    for (default, action) in [
        ("SCMP_ACT_ERRNO", "SCMP_ACT_ALLOW"),
        ("SCMP_ACT_ERRNO", "SCMP_ACT_ERRNO"),
        ("SCMP_ACT_KILL_PROCESS", "SCMP_ACT_TRAP"),
    ] {
        SeccompProfile::parse(&text(default, action), "p").unwrap();
    }
    for (default, action) in [("SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"), ("SCMP_ACT_ERRNO", "SCMP_ACT_KILL")] {
        assert!(wrong(&text(default, action)).contains("\"_llseek\""));
    }
}

#[test]
fn other_interfaces_are_the_guards_or_are_killed() {
    let of = |more: &str| {
        let text = format!("{{\"defaultAction\": \"SCMP_ACT_ALLOW\"{more}}}");
        let program =
            SeccompProfile::parse(&text, "p").unwrap().filter(CapabilitySet::empty(), (6, 1)).program();
        [
            seccomp::simulate(&program, 0x4000_0003, 1, [0; 6]),
            seccomp::simulate(&program, seccomp::NATIVE, 1 << 30, [0; 6]),
        ]
    };
    let (allow, kill) = (Action::Allow.value(), Action::KillProcess.value());
    assert_eq!(of(""), [kill, kill]);
    assert_eq!(of(", \"architectures\": [\"SCMP_ARCH_X86_64\", \"SCMP_ARCH_X86\"]"), [allow, kill]);
    let map = |native: &str| {
        let subs = "\"subArchitectures\": [\"SCMP_ARCH_X86\", \"SCMP_ARCH_X32\"]";
        of(&format!(", \"archMap\": [{{\"architecture\": \"{native}\", {subs}}}]"))
    };
    assert_eq!(map("SCMP_ARCH_X86_64"), [allow, allow]);
    assert_eq!(map("SCMP_ARCH_S390X"), [kill, kill]);
}

#[test]
fn rules_depend_on_capabilities_architectures_and_the_kernel() {
    let of = |more: &str| {
        let text = format!(
            "{{\"defaultAction\": \"SCMP_ACT_ERRNO\", \"defaultErrnoRet\": 38, \"syscalls\": [{{\"names\": [\"bpf\"], \
             \"action\": \"SCMP_ACT_ALLOW\", {more}}}]}}"
        );
        SeccompProfile::parse(&text, "p").unwrap()
    };
    let allows =
        |more: &str, capabilities| action_of(&of(more), capabilities, Sysno::bpf, [0; 6]) == Action::Allow;
    let (none, both) = (CapabilitySet::empty(), CapabilitySet::BPF | CapabilitySet::SYS_ADMIN);
    let caps = "{\"caps\": [\"CAP_BPF\", \"CAP_SYS_ADMIN\"]}";
    for (more, without, one, with) in [
        (format!("\"includes\": {caps}"), false, false, true),
        (format!("\"excludes\": {caps}"), true, false, false),
        ("\"includes\": {\"arches\": [\"s390\"]}".to_owned(), false, false, false),
        (format!("\"includes\": {{\"arches\": [\"s390\", \"{HERE}\"]}}"), true, true, true),
        (format!("\"excludes\": {{\"arches\": [\"{HERE}\"]}}"), false, false, false),
        ("\"includes\": {\"minKernel\": \"6.1\"}".to_owned(), true, true, true),
        ("\"includes\": {\"minKernel\": \"6.2\"}".to_owned(), false, false, false),
        ("\"excludes\": {\"minKernel\": \"5.19\"}".to_owned(), false, false, false),
        ("\"includes\": {}, \"excludes\": {\"caps\": []}".to_owned(), true, true, true),
    ] {
        let found = [none, CapabilitySet::BPF, both].map(|capabilities| allows(&more, capabilities));
        assert_eq!(found, [without, one, with], "{more}");
    }
    let refused = action_of(&of("\"includes\": {\"caps\": [\"CAP_BPF\"]}"), none, Sysno::bpf, [0; 6]);
    assert_eq!(refused, Action::Fail(Errno::NOSYS));
}

/// The words of a profile, as the model understands them.
#[derive(Debug)]
struct Line {
    call: Sysno,
    action: usize,
    compared: Vec<(usize, usize, u64, u64)>,
}

const ACTIONS: [(&str, Action); 5] = [
    ("SCMP_ACT_ALLOW", Action::Allow),
    ("SCMP_ACT_ERRNO", Action::Fail(Errno::PERM)),
    ("SCMP_ACT_TRAP", Action::Trap),
    ("SCMP_ACT_KILL_THREAD", Action::KillThread),
    ("SCMP_ACT_KILL_PROCESS", Action::KillProcess),
];
const OPERATORS: [&str; 7] = [
    "SCMP_CMP_NE",
    "SCMP_CMP_LT",
    "SCMP_CMP_LE",
    "SCMP_CMP_EQ",
    "SCMP_CMP_GE",
    "SCMP_CMP_GT",
    "SCMP_CMP_MASKED_EQ",
];

impl Line {
    fn json(&self) -> serde_json::Value {
        let args: Vec<_> = self
            .compared
            .iter()
            .map(|(index, op, value, two)| {
                serde_json::json!({"index": index, "op": OPERATORS[*op], "value": value, "valueTwo": two})
            })
            .collect();
        serde_json::json!({"names": [self.call.name()], "action": ACTIONS[self.action].0, "args": args})
    }

    /// Whether it holds, said once more.
    fn holds(&self, arguments: &[u64; 6]) -> bool {
        let each = |(index, op, value, two): &(usize, usize, u64, u64)| {
            let (argument, value) = (arguments[*index], *value);
            [
                argument != value,
                argument < value,
                argument <= value,
                argument == value,
                argument >= value,
                argument > value,
                argument & value == *two,
            ][*op]
        };
        let twice = (0..6).any(|index| self.compared.iter().filter(|one| one.0 == index).count() > 1);
        if twice { self.compared.iter().any(each) } else { self.compared.iter().all(each) }
    }
}

/// What a profile does with a call: the model.
fn expected(lines: &[Line], default: usize, call: Sysno, arguments: &[u64; 6]) -> Action {
    let about: Vec<&Line> = lines.iter().filter(|line| line.call == call && line.action != default).collect();
    if let Some(line) = about.iter().find(|line| line.compared.is_empty()) {
        return ACTIONS[line.action].1;
    }
    let held = about.iter().filter(|line| line.holds(arguments)).map(|line| line.action).max();
    ACTIONS[held.unwrap_or(default)].1
}

#[test]
fn profiles_do_what_the_model_does() {
    let calls = [Sysno::read, Sysno::write, Sysno::clone, Sysno::personality, Sysno::socket];
    let values = [0, 1, 2, 9, 16, 0xffff_ffff, 1 << 32, 1 << 32 | 9, 2_114_060_288, u64::MAX];
    let mut random = Random(7);
    for round in 0..3000 {
        let value = |random: &mut Random| values[random.below(values.len())];
        let lines: Vec<Line> = (0..random.below(6))
            .map(|_| {
                let compared = (0..random.below(4))
                    .map(|_| {
                        let (op, first) = (random.below(OPERATORS.len()), value(&mut random));
                        let second = if op == 6 { value(&mut random) & first } else { value(&mut random) };
                        (random.below(6), op, first, second)
                    })
                    .collect();
                Line { call: calls[random.below(calls.len())], action: random.below(ACTIONS.len()), compared }
            })
            .collect();
        let default = random.below(ACTIONS.len());
        let syscalls: Vec<_> = lines.iter().map(Line::json).collect();
        let text = serde_json::json!({"defaultAction": ACTIONS[default].0, "syscalls": syscalls}).to_string();
        let profile = SeccompProfile::parse(&text, "p").unwrap();
        let filter = profile.filter(CapabilitySet::empty(), (6, 1));
        let program = filter.program();
        for call in calls.into_iter().chain([Sysno::getpid]) {
            for _ in 0..8 {
                let arguments = [(); 6].map(|()| value(&mut random));
                let wanted = expected(&lines, default, call, &arguments);
                assert_eq!(
                    filter.action(call.id(), &arguments),
                    wanted,
                    "{round}: {text} {call} {arguments:?}"
                );
                let number = call.id().unsigned_abs();
                let done = seccomp::simulate(&program, seccomp::NATIVE, number, arguments);
                assert_eq!(done, wanted.value(), "{round}: {text} {call} {arguments:?}");
            }
        }
    }
}

#[test]
fn files_that_are_no_profiles_are_told() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("p");
    let told = |path: &Path| SeccompProfile::load(path).unwrap_err().to_string();
    assert!(told(&path).contains("reading the seccomp profile"));
    assert!(told(directory.path()).contains("it is no file"));
    assert!(told(Path::new("/dev/zero")).contains("it is no file"));
    std::fs::write(&path, vec![b' '; usize::try_from(LONGEST).unwrap() + 1]).unwrap();
    assert!(told(&path).contains("longer than a MiB"));
}
