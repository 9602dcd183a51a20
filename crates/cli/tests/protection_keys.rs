//! Programs that use protection keys, under an executive: on this processor where it has them, and else on one that QEMU emulates.
//! SKIPPED where neither can be had.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use orrery_orthros_host::{Initramfs, KernelFiles, Machine, MachineConfig, command};
use orrery_testing::Compiler;

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");
const BOOT: Duration = Duration::from_secs(300);
/// The ways to run the program.
const WAYS: [&str; 5] = [
    "run --",
    "run --no-patch --",
    "run --policy /rules.toml --no-strict --log /dev/null --",
    "trace --output /dev/null --",
    "trace -c --output /dev/null --",
];
const RULES: &str = "[[rule]]\ncall = \"*\"\nlog = true\n";

fn program(directory: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/keys.c");
    Compiler::c().flag("-pthread").build(&[source], directory.join("keys"))
}

fn has_keys() -> bool {
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    processors.split_whitespace().any(|flag| flag == "ospke")
}

/// Boots Debian's kernel on a processor with everything that QEMU emulates, and returns what `keys` printed without an executive
/// and in each way.
fn emulated(directory: &Path, program: &Path) -> Result<Vec<String>, String> {
    command::require("qemu-system-x86_64", "qemu-system-x86").map_err(|error| error.to_string())?;
    let busybox = command::find("busybox").ok_or("busybox is not installed")?;
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("orthros-cache");
    let kernel = KernelFiles::obtain(&cache).map_err(|error| format!("no kernel to boot: {error}"))?;
    let mut script = "#!/bin/busybox sh\n\
        /bin/busybox mkdir -p /proc /dev /sys /tmp /run\n\
        /bin/busybox mount -t proc proc /proc\n\
        /bin/busybox mount -t devtmpfs dev /dev\n\
        /bin/busybox mount -t sysfs sysfs /sys\n\
        /bin/busybox mount -t tmpfs tmpfs /tmp\n\
        /bin/busybox --install -s /bin\n\
        export PATH=/bin:/usr/bin\n\
        /keys; echo \"=== $?\"\n"
        .to_owned();
    for way in WAYS {
        script.push_str(&format!("orrery {way} /keys; echo \"=== $?\"\n"));
    }
    script.push_str("echo ALL-DONE\nsleep 1000\n");
    let mut archive = Initramfs::new();
    archive.copy(&busybox, "/bin/busybox").file("/init", script, 0o755).file("/rules.toml", RULES, 0o644);
    archive
        .program(Path::new(ORRERY), "/usr/bin/orrery")
        .and_then(|it| it.program(program, "/keys"))
        .unwrap();
    let initramfs = directory.join("initramfs");
    archive.write(&initramfs).unwrap();
    let config = MachineConfig {
        name: "guest".to_owned(),
        memory_mib: 512,
        cpus: 1,
        append: String::new(),
        initramfs,
        peer: None,
        // The last one counts.
        extra: vec!["-cpu".to_owned(), "max".to_owned()],
    };
    let mut machine = Machine::start(&config, &kernel, directory).unwrap();
    let console = machine.wait_for_console("ALL-DONE", BOOT).unwrap().replace('\r', "");
    let mut parts: Vec<String> = Vec::new();
    for line in console.lines().filter(|line| !line.starts_with('[')) {
        if parts.is_empty() || parts.last().is_some_and(|part| part.contains("\n=== ")) {
            parts.push(String::new());
        }
        if let Some(part) = parts.last_mut() {
            part.push('\n');
            part.push_str(line);
        }
    }
    // What the end of all says.
    parts.pop();
    Ok(parts)
}

fn native(directory: &Path, program: &Path) -> Vec<String> {
    let rules = directory.join("rules.toml");
    std::fs::write(&rules, RULES).unwrap();
    let run = |mut command: Command| {
        let output = command.output().unwrap();
        format!("{}=== {}", String::from_utf8_lossy(&output.stdout), output.status)
    };
    let mut all = vec![run(Command::new(program))];
    for way in WAYS {
        let mut command = Command::new(ORRERY);
        command.args(way.replace("/rules.toml", rules.to_str().unwrap()).split(' ')).arg(program);
        all.push(run(command));
    }
    all
}

#[test]
fn programs_keep_their_protection_keys() {
    let directory = tempfile::tempdir().unwrap();
    let program = program(directory.path());
    let all = if has_keys() {
        native(directory.path(), &program)
    } else {
        match emulated(directory.path(), &program) {
            Ok(all) => all,
            Err(why) => {
                orrery_testing::skipped!("this processor has no protection keys, and {why}");
                return;
            }
        }
    };
    let expected = &all[0];
    for words in [
        "main: 60 reads into the page, 0 failed, rights 0",
        "access disabled: read Bad address",
        "main again: 60",
    ] {
        assert!(expected.contains(words), "{words}: {all:#?}");
    }
    assert_eq!(all.len(), 1 + WAYS.len(), "{all:#?}");
    for (way, found) in WAYS.iter().zip(&all[1..]) {
        assert_eq!(found, expected, "{way}");
    }
}
