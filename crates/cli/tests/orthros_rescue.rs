//! What of a service survives, and what keeps it where it is, with real kernels that really die. SKIPPED where QEMU, criu, a
//! kernel, root or the service are absent.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

#[path = "orthros/pairs.rs"]
mod pairs;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use orrery_testing::{mariadb, sources};
use pairs::{Client, ONE_PAIR, Up, connect, missing};

/// A failover by hand is for maintenance: what would lose something is refused, and nothing has happened. A death is another
/// matter, and so is the next one: what the first rescue made is as good as what it read.
#[test]
fn what_would_be_lost_keeps_a_service_where_it_is_and_it_survives_two_deaths() {
    if let Some(why) = missing(&[]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let mut up = Up::start(&[], &["orrery-orthros-load", "kernel-objects"]);
    up.expect("help");
    up.say("failover");
    let stays = up.expect_failure();
    assert!(stays.contains("stays where it is") && stays.contains("hung up"), "{stays}");
    let confined = "control group /confined";
    assert!(stays.contains(confined), "{stays}");
    up.say("status");
    let status = up.expect("status");
    assert_eq!(status["status"]["failovers"], 0, "{status}");
    for (crash, is_confined) in [("crash oops", true), ("crash hang", false)] {
        up.say(crash);
        let survived = up.expect("survived");
        let remarks = survived["failover"]["summary"]["remarks"].to_string();
        assert_eq!(remarks.contains(confined), is_confined, "{survived}");
        assert!(survived["failover"]["summary"]["processes"].as_u64().unwrap() >= 4, "{survived}");
        assert_eq!(up.verdict(), "right");
        up.expect("renewed");
    }
    up.say("quit");
    up.expect("end");
}

/// In place of criu: counts restores in the disk's first byte, which ext4 leaves alone. When all processes are there and have not run
/// yet, the first restore ends with its kernel, and the third one by criu's death.
const INTERRUPTED: &str = r##"#!/bin/busybox sh
[ "$1" = restore ] || exec /usr/sbin/criu "$@"
count=$(busybox dd if=/dev/vda bs=1 count=1 2> /dev/null)
printf "$((count + 1))" | busybox dd of=/dev/vda bs=1 conv=notrunc,fsync 2> /dev/null
case "$count" in
    "") end="echo c > /proc/sysrq-trigger" ;;
    2) end='kill -9 $PPID' ;;
    *) exec /usr/sbin/criu "$@" ;;
esac
echo "#!/bin/busybox sh
[ \$CRTOOLS_SCRIPT_ACTION != post-restore ] || $end" > /run/orrery/end
busybox chmod 755 /run/orrery/end
exec /usr/sbin/criu "$@" --action-script /run/orrery/end
"##;

/// Makes the disk that such a program counts on, and gives what puts the program into the image.
fn counted_disk(directory: &Path, image: &Path, program: &str) -> String {
    let criu = directory.join("criu");
    std::fs::write(&criu, program).unwrap();
    std::fs::set_permissions(&criu, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::File::create(image).unwrap().set_len(16 << 20).unwrap();
    // Blocks of 1 KiB: the first one is nobody's.
    assert!(Command::new("mkfs.ext4").args(["-q", "-b", "1024"]).arg(image).status().unwrap().success());
    format!("{}:/usr/local/bin/criu", criu.display())
}

/// A rescue only reads the dead memory. What it was doing when it was interrupted, most of the service's memory still to come, is
/// no loss: it is noticed at once, told, and done again.
#[test]
fn a_rescue_that_is_interrupted_begins_again_from_the_same_memory() {
    if let Some(why) = missing(&[("mkfs.ext4", "e2fsprogs"), ("ip", "iproute2")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    let criu = counted_disk(directory.path(), &image, INTERRUPTED);
    let network = format!("orrery-again-{}", std::process::id());
    let options =
        ["--network", &network, "--disk", image.to_str().unwrap(), "--file", &criu, "--silence", "60"];
    let mut up = Up::start(&options, &["orrery-orthros-load", "ballast", "64", "0", "2"]);
    up.expect("help");
    let mut client = Client::of(connect(&network, 7));
    assert_eq!(client.ask(""), "1");
    for (count, why) in [("2", "its kernel has panicked"), ("3", "SIGKILL")] {
        up.say("crash panic");
        let again = up.expect("again");
        // Noticed by what happened, and not because an answer stayed away.
        assert!(again["text"].as_str().unwrap().contains(why), "{again}");
        let survived = up.expect("survived");
        let failover = &survived["failover"];
        assert_eq!(failover["steps"][0]["name"], "new backup", "{survived}");
        assert!(failover["summary"]["lazy_pages"].as_u64().unwrap() >= 64 << 8, "{survived}");
        assert_eq!(client.ask(""), count);
        assert_eq!(client.ask("all"), "16384 of 16384 pages are right");
        up.expect("renewed");
    }
    up.say("status");
    let status = up.expect("status");
    assert_eq!(status["status"]["lost"].as_array().unwrap().len(), 2, "{status}");
    up.say("quit");
    up.expect("end");
}

/// In place of criu: counts restores as above. When all processes are there and have not run yet, the first restore ends with a
/// processor that runs nothing else any more, the third one says that it is there and waits, and the fifth one waits.
const HANGING: &str = r##"#!/bin/busybox sh
[ "$1" = restore ] || exec /usr/sbin/criu "$@"
count=$(busybox dd if=/dev/vda bs=1 count=1 2> /dev/null)
printf "$((count + 1))" | busybox dd of=/dev/vda bs=1 conv=notrunc,fsync 2> /dev/null
case "$count" in
    "") hang="echo -1 > /proc/sys/kernel/sched_rt_runtime_us
        busybox taskset 2 chrt -f 99 busybox sh -c 'while :; do :; done' &" ;;
    2) hang="echo in the middle > /dev/console" ;;
    4) hang= ;;
    *) exec /usr/sbin/criu "$@" ;;
esac
echo "#!/bin/busybox sh
[ \$CRTOOLS_SCRIPT_ACTION = post-restore ] || exit 0
$hang
busybox sleep 1000" > /run/orrery/hang
busybox chmod 755 /run/orrery/hang
exec /usr/sbin/criu "$@" --action-script /run/orrery/hang
"##;

/// A rescue may take long, and is judged by its signs of life: a processor that hangs, a machine that stands still, and a program
/// that waits for ever are found out, each by what it does not do, and another backup begins again from the same memory.
#[test]
fn a_rescue_that_hangs_begins_again_from_the_same_memory() {
    use rustix::process::{Pid, Signal, kill_process};
    if let Some(why) = missing(&[("mkfs.ext4", "e2fsprogs"), ("ip", "iproute2"), ("chrt", "util-linux")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let (image, pair) = (directory.path().join("image"), directory.path().join("pair"));
    let criu = counted_disk(directory.path(), &image, HANGING);
    let network = format!("orrery-hang-{}", std::process::id());
    let mut options = vec!["--network", &network, "--disk", image.to_str().unwrap(), "--file", &criu];
    options.extend(["--cpus", "2", "--program", "chrt", "--silence", "60"]);
    options.extend(["--directory", pair.to_str().unwrap()]);
    let mut up = Up::start(&options, &["orrery-orthros-load", "ballast", "16", "0", "2"]);
    up.expect("help");
    let mut client = Client::of(connect(&network, 7));
    assert_eq!(client.ask(""), "1");
    // Where the kernel gives a share of each processor to other programs than real-time ones (Linux 6.8), this one is not silent.
    up.say("run busybox awk /dl_server_start/{n=1}END{print+n} /proc/kallsyms");
    let has_fair_server = up.expect("ran")["text"].as_str().unwrap().contains('1');
    let first = if has_fair_server { "its kernel lives" } else { "has been silent for 15 s" };
    let ways = [
        ("2", first),
        ("3", "has been silent for 15 s"),
        ("4", "its kernel lives, but it has got no further"),
    ];
    for (count, why) in ways {
        up.say("status");
        let status = up.expect("status");
        let backup = &status["status"]["backup"];
        up.say("crash panic");
        let died = Instant::now();
        if count == "3" {
            let console = pair.join(format!("{}.console", backup["name"].as_str().unwrap()));
            while !std::fs::read_to_string(&console).unwrap().contains("in the middle") {
                assert!(died.elapsed() < Duration::from_secs(120), "it does not get there");
                std::thread::sleep(Duration::from_millis(50));
            }
            let pid = i32::try_from(backup["pid"].as_i64().unwrap()).unwrap();
            kill_process(Pid::from_raw(pid).unwrap(), Signal::STOP).unwrap();
        }
        let again = up.expect("again");
        assert!(again["text"].as_str().unwrap().contains(why), "{again}");
        // Before, a rescue was given up when it had taken this long.
        assert!(died.elapsed() < Duration::from_secs(170), "{:?}", died.elapsed());
        let survived = up.expect("survived");
        assert_eq!(survived["failover"]["steps"][0]["name"], "new backup", "{survived}");
        assert_eq!(client.ask(""), count);
        up.expect("renewed");
    }
    assert_eq!(client.ask("all"), "4096 of 4096 pages are right");
    up.say("status");
    let status = up.expect("status");
    assert_eq!(status["status"]["lost"].as_array().unwrap().len(), 3, "{status}");
    up.say("quit");
    up.expect("end");
}

/// A directory with a file system in memory, of so much room.
struct Room(tempfile::TempDir);

impl Room {
    fn mount(&self, options: &str) -> bool {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "none"]).arg(self.0.path());
        command.status().is_ok_and(|status| status.success())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// The disk's image has holes, and this host no room to fill them. QEMU stops the machine then: what looks like a kernel that has fallen
/// silent is none, and a rescue would fare no better. When there is no way but a rescue, it is refused with the reason.
#[test]
fn a_service_waits_for_room_on_its_host_and_a_rescue_without_room_is_refused_with_the_memory_kept() {
    const SCRIPT: &str = "for file in one two; do until [ -e /run/$file ]; do sleep 0.1; done; \
        dd if=/dev/zero of=/data/$file bs=1M count=16; [ $file = two ] || sync; echo $file > /run/done; done; sleep 1000";
    if let Some(why) = missing(&[("mkfs.ext4", "e2fsprogs"), ("mount", "mount"), ("umount", "mount")]) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let directory = tempfile::tempdir().unwrap();
    let room = Room(tempfile::tempdir().unwrap());
    if !room.mount("size=16M") {
        orrery_testing::skipped!("a host without room: tmpfs cannot be mounted");
        return;
    }
    let image = room.0.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
    assert!(Command::new("mkfs.ext4").arg("-q").arg(&image).status().unwrap().success());
    let at = directory.path().to_str().unwrap();
    let options = ["--disk", image.to_str().unwrap(), "--directory", at, "--keep", "--silence", "5"];
    let mut up = Up::start(&options, &["busybox", "sh", "-c", SCRIPT]);
    up.expect("help");
    up.say("run busybox touch /run/one");
    up.expect("ran");
    let full = up.expect("full")["text"].as_str().unwrap().to_owned();
    assert!(full.contains(image.to_str().unwrap()) && full.contains("no room"), "{full}");
    // Longer than a kernel may be silent.
    std::thread::sleep(Duration::from_secs(6));
    up.say("status");
    let status = up.expect("status");
    assert_eq!(status["status"]["failovers"], 0, "{status}");
    assert_eq!(status["status"]["full"], image.to_str().unwrap(), "{status}");
    assert!(room.mount("remount,size=64M"));
    up.expect("room");
    let done = |up: &mut Up, file: &str| {
        let deadline = Instant::now() + Duration::from_secs(120);
        loop {
            up.say("run busybox find /run/done -exec cat {} ;");
            if up.expect("ran")["text"] == *file {
                return;
            }
            assert!(Instant::now() < deadline, "{file} is not done");
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    done(&mut up, "one");
    // Now somebody else takes what is left of it, and the kernel dies with bytes that its disk does not have.
    let mut filler = std::fs::File::create(room.0.path().join("filler")).unwrap();
    while filler.write_all(&[1; 1 << 16]).is_ok() {}
    up.say("run busybox touch /run/two");
    up.expect("ran");
    done(&mut up, "two");
    up.say("crash panic");
    let again = up.expect("again");
    assert!(again["text"].as_str().unwrap().contains("this host has no room"), "{again}");
    let failed = up.expect_failure();
    assert!(failed.contains("this host has no room") && failed.contains("the dead memory is"), "{failed}");
    assert!(!up.child.wait().unwrap().success());
    let kept: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().flatten().map(|file| file.path()).collect();
    let memory = kept.iter().find(|path| path.extension().is_some_and(|kind| kind == "ram"));
    assert_eq!(std::fs::metadata(memory.unwrap()).unwrap().len(), 256 << 20, "{kept:?}");
}

/// The database's own client, in the network of a pair.
struct Sql {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Sql {
    const DONE: &str = "that was all";

    fn connect(network: &str) -> Self {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", network, "mariadb", "--no-defaults", "--user=root", "--skip-ssl"]);
        command.args(["--unbuffered", "--skip-column-names", "--batch", "--host=10.77.0.2"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    /// Returns what statements answer; nothing where the client has ended, as it does if one fails.
    fn ask(&mut self, statements: &str) -> Option<String> {
        writeln!(self.input, "{statements} select '{}';", Self::DONE).ok()?;
        let mut answer = String::new();
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            if line.trim_end() == Self::DONE {
                return Some(answer.trim_end().to_owned());
            }
            answer.push_str(&line);
        }
    }

    fn insert(&mut self, rows: Range<u32>) {
        for row in rows {
            let done = self.ask(&format!("insert into d.t values ({row});"));
            assert!(done.is_some(), "row {row} is refused, or the connection is gone");
        }
    }
}

impl Drop for Sql {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An unmodified MariaDB whose kernel dies while a client is in the middle of a transaction: the client inserts on, commits,
/// and finds every row. Then the next kernel dies, and what was committed is there for the next client.
#[test]
fn a_database_goes_on_in_the_middle_of_a_transaction() {
    if std::env::var_os("ORRERY_DATABASE").is_none() {
        orrery_testing::skipped!(
            "a database in a transaction: ORRERY_DATABASE=1 runs it, as `make soak` does"
        );
        return;
    }
    let programs = [
        ("mariadbd", "mariadb-server-core"),
        ("mariadb-install-db", "mariadb-server-core"),
        ("mariadb", "mariadb-client-core"),
        ("mkfs.ext4", "e2fsprogs"),
        ("ip", "iproute2"),
    ];
    if let Some(why) = missing(&programs) {
        orrery_testing::skipped!("{why}");
        return;
    }
    let _one = ONE_PAIR.lock();
    let content = tempfile::tempdir().unwrap();
    let install = Command::new("mariadb-install-db")
        .args(mariadb::INSTALL)
        .arg(format!("--datadir={}/db", content.path().display()))
        .output()
        .unwrap();
    assert!(install.status.success(), "{}", String::from_utf8_lossy(&install.stderr));
    let network = format!("orrery-sql-{}", std::process::id());
    let files = mariadb::FILES.map(|path| format!("{path}:{path}"));
    let mut options = vec!["--network", &network, "--memory", "512", "--disk", "256M", "--silence", "60"];
    options.extend(["--content", content.path().to_str().unwrap()]);
    options.extend(files.iter().flat_map(|file| ["--file", file]));
    let mut up = Up::start(&options, &mariadb::SERVER);
    up.expect("help");
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut client = loop {
        let mut client = Sql::connect(&network);
        if client.ask("create database d; create table d.t (a int primary key) engine=innodb;").is_some() {
            break client;
        }
        assert!(Instant::now() < deadline, "the database does not come up");
        std::thread::sleep(Duration::from_millis(500));
    };
    client.ask("begin;").unwrap();
    client.insert(0..100);
    up.say("crash panic");
    client.insert(100..200);
    let survived = up.expect("survived");
    assert_eq!(survived["failover"]["summary"]["connections"], 1, "{survived}");
    // Nobody else sees what is not committed.
    let mut other = Sql::connect(&network);
    assert_eq!(other.ask("select count(*) from d.t;").unwrap(), "0");
    client.ask("commit;").unwrap();
    let sum = "select concat(count(*), ' ', sum(a)) from d.t;";
    assert_eq!(client.ask(sum).unwrap(), "200 19900");
    up.expect("renewed");
    client.ask("begin;").unwrap();
    client.insert(200..250);
    up.say("crash oops");
    client.ask("rollback;").unwrap();
    up.expect("survived");
    assert_eq!((client.ask(sum).unwrap(), other.ask(sum).unwrap()), ("200 19900".into(), "200 19900".into()));
    assert_eq!(other.ask("check table d.t;").unwrap().split('\t').next_back(), Some("OK"));
    up.expect("renewed");
    up.say("quit");
    up.expect("end");
}

/// The page that goes through all that was promised names tests that are there, and all that boot kernels.
#[test]
fn every_sentence_has_its_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/src/orthros-audit.md")).unwrap();
    let crates = ["kimage", "orthros", "cli/src"];
    let text: String = crates.iter().map(|name| sources::below(&root.join("crates").join(name))).collect();
    let mut with_kernels = String::new();
    for file in std::fs::read_dir(root.join("crates/cli/tests")).unwrap() {
        let file = file.unwrap().path();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        if name.ends_with(".rs") && (name.starts_with("orthros") || name == "kimage.rs") {
            with_kernels.push_str(&std::fs::read_to_string(file).unwrap());
        }
    }
    let (all, with_kernels) = (sources::tests(&text), sources::tests(&with_kernels));
    let (mut rows, mut named) = (0, BTreeSet::new());
    for sources::Promise { row, held, tests } in sources::promises(&page) {
        for test in &tests {
            assert!(all.contains(test) || with_kernels.contains(test), "there is no test {test}: {row}");
        }
        let told = ["difference", "by construction", "the same"].iter().any(|word| held.contains(word));
        assert!(told || !tests.is_empty(), "neither a test nor a difference: {row}");
        named.extend(tests);
        rows += 1;
    }
    assert!(rows > 45, "only {rows} rows were found");
    let own = "every_sentence_has_its_test";
    let unnamed: Vec<_> =
        with_kernels.iter().filter(|test| **test != own && !named.contains(*test)).collect();
    assert!(unnamed.is_empty(), "the page does not tell of {unnamed:?}");
}
