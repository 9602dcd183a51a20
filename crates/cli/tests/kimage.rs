//! `orrery kimage` on a real kernel: Debian's, booted in QEMU, asked first what it says about itself and then, alive,
//! dumped and dead, read from outside. SKIPPED where QEMU or the kernel's package cannot be had.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use orrery_orthros_host::{Initramfs, KernelFiles, Machine, MachineConfig, command};
use serde_json::{Value, json};

const ORRERY: &str = env!("CARGO_BIN_EXE_orrery");
const BOOT: Duration = Duration::from_secs(600);

/// Prints what the guest says about its processes, waits for a file to be asked for, and crashes.
const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mkdir -p /proc /dev /tmp /data
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t tmpfs tmpfs /data
/bin/busybox --install -s /bin
export PATH=/bin
for module in /modules/*; do insmod $module; done
echo 0123456789 > /data/numbers
mkdir /two /one
mount -t cgroup2 two /two
mount -t cgroup -o none,name=mine one /one
mkdir -p /two/outer/inner /one/other
MARK=orrery-was-here-4711 sleep 10001 < /data/numbers > /tmp/out 2>&1 &
(echo hello; exec sleep 10002) | (read line; exec sleep 10003) &
( exec 7<> /data/gone; rm /data/gone; exec setsid sleep 10004 ) &
su -s /bin/sleep nobody 10005 &
echo $! > /two/outer/inner/cgroup.procs
echo $! > /one/other/cgroup.procs
sleep 2
for p in /proc/[0-9]*; do
    readlink $p/exe > /dev/null || continue
    [ "$(cat $p/comm)" = init ] && continue
    echo "P $(cut -d' ' -f1,4,5,6 $p/stat) $(awk '/^Uid/ {print $2}' $p/status) $(cat $p/comm)"
    sed "s|^|G ${p#/proc/} |" $p/cgroup
    for f in $p/fd/*; do
        i=$p/fdinfo/${f##*/}
        echo "F ${p#/proc/} ${f##*/} $(awk '/^pos/ {print $2}' $i) $(awk '/^flags/ {print $2}' $i) $(readlink $f)"
    done
    awk -v p=${p#/proc/} '/^[0-9a-f]+-/ {r=$1" "$2" "$3; n=$6} /^Rss/ {s=$2} /^Anonymous/ {print "M", p, r, s, $2, n}' $p/smaps
done
[ -e /crash.initramfs ] && /load-crash-kernel /vmlinuz /crash.initramfs "console=ttyS0 quiet no_timer_check nr_cpus=1 reset_devices"
# Opening the port empties its queue: what is sent before is lost.
exec 3< /dev/ttyS1
echo ALL-TOLD
read line <&3
echo c > /proc/sysrq-trigger
"#;

/// Copies the memory of the kernel that crashed to a disk, as kdump-tools does.
const CRASH_INIT: &str = r#"#!/bin/busybox sh
/bin/busybox mkdir -p /proc /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox --install -s /bin
export PATH=/bin
for module in /modules/*; do insmod $module; done
dd if=/proc/vmcore of=/dev/vda bs=1M && sync && echo ALL-COPIED
sleep 1000
"#;

/// Loads a kernel for the case of a crash: kexec_file_load(2).
const LOAD_CRASH_KERNEL: &str = r#"
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    int kernel = open(argv[1], O_RDONLY), initramfs = open(argv[2], O_RDONLY);
    long on_crash = 2;
    if (syscall(SYS_kexec_file_load, kernel, initramfs, strlen(argv[3]) + 1, argv[3], on_crash) != 0) {
        perror("kexec_file_load");
        return 1;
    }
    return 0;
}
"#;

fn skipped(why: &str) {
    orrery_testing::skipped!("{why}");
}

/// Returns the machine, started; nothing, with the reason printed, where it cannot be had. With a `crash_disk` it has
/// a crash kernel, which copies the memory there.
fn boot(directory: &Path, crash_disk: Option<&Path>) -> Option<Machine> {
    if let Err(error) = command::require("qemu-system-x86_64", "qemu-system-x86") {
        skipped(&error.to_string());
        return None;
    }
    let Some(busybox) = command::find("busybox") else {
        skipped("busybox is not installed");
        return None;
    };
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("orthros-cache");
    let kernel = match KernelFiles::obtain(&cache) {
        Ok(kernel) => kernel,
        Err(error) => {
            skipped(&format!("no kernel to boot: {error}"));
            return None;
        }
    };
    let initramfs = directory.join("initramfs");
    let mut archive = Initramfs::new();
    archive.copy(&busybox, "/bin/busybox").file("/init", INIT, 0o755);
    archive.file("/etc/passwd", "root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/:/bin/sleep\n", 0o644);
    for (index, module) in kernel.modules(&["pvpanic-pci"]).unwrap().into_iter().enumerate() {
        archive.file(&format!("/modules/{index}.ko"), module, 0o644);
    }
    let mut config = MachineConfig {
        name: "guest".to_owned(),
        memory_mib: 256,
        cpus: 2,
        append: String::new(),
        initramfs,
        peer: None,
        extra: Vec::new(),
    };
    if let Some(disk) = crash_disk {
        let crash_initramfs = directory.join("crash-initramfs");
        let mut crash = Initramfs::new();
        crash.copy(&busybox, "/bin/busybox").file("/init", CRASH_INIT, 0o755);
        for (index, module) in kernel.modules(&["virtio_pci", "virtio_blk"]).unwrap().into_iter().enumerate()
        {
            crash.file(&format!("/modules/{index}.ko"), module, 0o644);
        }
        crash.write(&crash_initramfs).unwrap();
        let source = directory.join("load.c");
        std::fs::write(&source, LOAD_CRASH_KERNEL).unwrap();
        let load = orrery_testing::Compiler::c().flag("-static").build(&[&source], directory.join("load"));
        archive.copy(&load, "/load-crash-kernel").copy(&kernel.image, "/vmlinuz");
        archive.copy(&crash_initramfs, "/crash.initramfs");
        config.memory_mib = 512;
        config.append = "crashkernel=192M".to_owned();
        config.extra = vec![
            "-drive".to_owned(),
            format!("if=none,id=disk,format=raw,file={}", disk.display()),
            "-device".to_owned(),
            "virtio-blk-pci,drive=disk".to_owned(),
        ];
    }
    archive.write(&config.initramfs).unwrap();
    Some(Machine::start(&config, &kernel, directory).unwrap())
}

fn kimage(arguments: &[&str], image: &Path, more: &[&str]) -> Output {
    Command::new(ORRERY).arg("kimage").args(arguments).arg(image).args(more).output().unwrap()
}

/// Runs it; it must have ended well and left nothing out.
fn rows(what: &str, image: &Path, more: &[&str]) -> Vec<Value> {
    let mut arguments = more.to_vec();
    arguments.push("--json");
    let output = kimage(&[what], image, &arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the guest's own lines of a kind, without the letter.
fn told<'c>(console: &'c str, letter: &str) -> Vec<&'c str> {
    console.lines().filter_map(|line| line.strip_prefix(letter)?.strip_prefix(' ')).collect()
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Compares what kimage finds in `image` with what the guest said.
fn compare(image: &Path, console: &str) {
    let all = rows("ps", image, &[]);
    let processes: BTreeSet<String> = told(console, "P")
        .iter()
        .map(|line| {
            let [pid, parent, _, _, uid, name] = line.splitn(6, ' ').collect::<Vec<_>>()[..] else {
                panic!("{line}")
            };
            [pid, parent, uid, name].join(" ")
        })
        .collect();
    assert!(processes.len() >= 5, "{processes:?}");
    let found: BTreeSet<String> = all
        .iter()
        .map(|row| ["pid", "parent", "uid", "name"].map(|key| text(&row[key])).join(" "))
        .filter(|row| row.ends_with(" sleep"))
        .collect();
    assert_eq!(found, processes);
    // Kernel threads are there as well, and init.
    assert!(all.len() > 30, "{}", all.len());
    assert_eq!((text(&all[0]["pid"]), text(&all[0]["name"])), ("1".to_owned(), "init".to_owned()));

    let groups: BTreeSet<String> = told(console, "G").iter().map(|&line| line.to_owned()).collect();
    assert!(groups.iter().any(|line| line.ends_with(" 0::/outer/inner")), "{groups:?}");
    assert!(groups.iter().any(|line| line.ends_with(":name=mine:/other")), "{groups:?}");
    let found: BTreeSet<String> = all
        .iter()
        .filter(|row| row["name"] == "sleep")
        .flat_map(|row| {
            row["control_groups"].as_array().unwrap().iter().map(|group| {
                let name = text(&group["name"]);
                let name = if name.is_empty() { name } else { format!("name={name}") };
                format!("{} {}:{name}:{}", row["pid"], group["hierarchy"], text(&group["path"]))
            })
        })
        .collect();
    assert_eq!(found, groups);

    let files: BTreeSet<String> = told(console, "F").iter().map(|&line| line.to_owned()).collect();
    let pids: BTreeSet<&str> = files.iter().map(|line| line.split(' ').next().unwrap()).collect();
    let found: BTreeSet<String> = rows("files", image, &[])
        .iter()
        .filter(|row| pids.contains(&*text(&row["pid"])))
        .map(|row| {
            // The kernel shows descriptors' flags in octal, O_CLOEXEC among them.
            let flags = format!("0{:o}", row["flags"].as_u64().unwrap());
            let fields = ["pid", "fd", "position"].map(|key| text(&row[key])).join(" ");
            format!("{fields} {flags} {}", text(&row["path"]))
        })
        .collect();
    let without_close_on_exec: BTreeSet<String> =
        files.iter().map(|line| line.replace(" 02100002 ", " 0100002 ")).collect();
    assert_eq!(found, without_close_on_exec);
    for path in ["/data/numbers", "/data/gone (deleted)", "pipe:["] {
        assert!(found.iter().any(|line| line.contains(path)), "{path} in {found:?}");
    }

    let mut mappings: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for line in told(console, "M") {
        let (pid, rest) = line.split_once(' ').unwrap();
        mappings.entry(pid).or_default().push(rest.trim_end().to_owned());
    }
    assert_eq!(mappings.len(), processes.len());
    for (pid, expected) in mappings {
        let found: Vec<String> = rows("mem", image, &[pid])
            .iter()
            .map(|row| {
                let place = format!(
                    "{}-{} {} {:08x}",
                    text(&row["start"]),
                    text(&row["end"]),
                    text(&row["permissions"]),
                    row["offset"].as_u64().unwrap()
                );
                let line = format!(
                    "{place} {} {} {}",
                    row["resident_kib"],
                    row["anonymous_kib"],
                    text(&row["name"])
                );
                line.trim_end().to_owned()
            })
            .collect();
        assert_eq!(found.len(), expected.len(), "{found:#?} {expected:#?}");
        for (found, expected) in found.iter().zip(&expected) {
            // The pages of the vDSO belong to the kernel: smaps counts them as resident, we as nobody's.
            if !expected.contains("[v") {
                assert_eq!(found, expected);
            }
        }
    }
}

#[test]
fn what_is_read_is_what_the_guest_says() {
    let directory = tempfile::tempdir().unwrap();
    let Some(mut machine) = boot(directory.path(), None) else { return };
    let console = machine.wait_for_console("ALL-TOLD", BOOT).unwrap();
    let memory = machine.file("ram");
    // Alive: the guest waits, and only its kernel's threads run.
    compare(&memory, &console);

    // As QEMU dumps it.
    let mut qmp = machine.qmp().unwrap();
    let dump = directory.path().join("vmcore");
    let protocol = format!("file:{}", dump.display());
    qmp.execute("dump-guest-memory", &json!({"paging": false, "protocol": protocol})).unwrap();
    compare(&dump, &console);

    // Dead.
    std::os::unix::net::UnixStream::connect(machine.file("control"))
        .and_then(|mut control| std::io::Write::write_all(&mut control, b"die\n"))
        .unwrap();
    while qmp.event(BOOT).unwrap().expect("the kernel dies and says so").name != "GUEST_PANICKED" {}
    compare(&memory, &console);

    // A core of one of its processes, with its environment in it.
    let core: PathBuf = directory.path().join("core");
    let all = rows("files", &memory, &[]);
    let pid = text(&all.iter().find(|row| row["path"] == "/data/numbers").unwrap()["pid"]);
    let output = kimage(&["gcore"], &memory, &[&pid, "-o", core.to_str().unwrap()]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let bytes = std::fs::read(&core).unwrap();
    let mark = b"MARK=orrery-was-here-4711";
    assert!(bytes.windows(mark.len()).any(|window| window == mark));
    use object::{Object as _, ObjectSegment as _};
    let parsed = object::File::parse(&*bytes).unwrap();
    assert!(parsed.segments().any(|segment| segment.address() == 0x40_0000 && segment.size() == 0x1000));
    let output = kimage(&["gcore"], &memory, &[&pid, "-o", core.to_str().unwrap()]);
    assert!(!output.status.success(), "a file that is there is not overwritten");
    let output = kimage(&["mem"], &memory, &["999999"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("no process 999999"));
}

/// kdump leaves the crash kernel's memory out, where the dying kernel's VMCOREINFO is; it has it as a note.
#[test]
fn what_kdump_copies_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let disk = directory.path().join("disk");
    std::fs::File::create(&disk).and_then(|file| file.set_len(640 << 20)).unwrap();
    let Some(mut machine) = boot(directory.path(), Some(&disk)) else { return };
    let console = machine.wait_for_console("ALL-TOLD", BOOT).unwrap();
    std::os::unix::net::UnixStream::connect(machine.file("control"))
        .and_then(|mut control| std::io::Write::write_all(&mut control, b"die\n"))
        .unwrap();
    machine.wait_for_console("ALL-COPIED", BOOT).unwrap();
    compare(&disk, &console);
}

#[test]
fn what_is_no_image_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let refused = |path: &Path| {
        let output = kimage(&["ps"], path, &[]);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&path).contains("No such file"));
    std::fs::write(&path, "").unwrap();
    assert!(refused(&path).contains("it is empty"));
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    assert!(refused(&path).contains("no Linux kernel found"));
    std::fs::copy("/bin/busybox", &path).or_else(|_| std::fs::copy("/bin/sh", &path)).unwrap();
    assert!(refused(&path).contains("not a core"));
}
