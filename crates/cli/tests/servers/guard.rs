//! The monitor of `orrery guard`.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};

use orrery_testing::faults::{Faults, MEMORY, Server};

use crate::usage::Usage;
use crate::{CLIENT, ORRERY, pid, times};

const POLICY: &str = r#"
[files]
read = ["/usr", "/etc", "/lib", "/lib64", "/bin", "/proc/self", "/dev", "WORK"]
write = ["/dev/null", "/dev/tty", "WORK"]
create = ["WORK"]
execute = ["/usr/bin"]
"#;

/// What a guarded shell is asked to do: calls that the monitor performs, decides and refuses, and one that waits in a thread of its own.
const WORK: &str = "echo one > a && read -r x < a && mv a b && rm b && mkdir d && rmdir d; \
    cat /root/secret 2> /dev/null; mkfifo p && (timeout 1 sh -c 'echo through > p' & timeout 1 cat p > /dev/null; wait); rm -f a b c p; rmdir d 2> /dev/null; true";

/// A shell under guard, which does what it is told.
struct Guarded {
    child: Child,
    input: Mutex<(ChildStdin, usize)>,
    answers: Mutex<Receiver<String>>,
    directory: tempfile::TempDir,
}

impl Guarded {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let work = directory.path().canonicalize().unwrap().join("work");
        std::fs::create_dir(&work).unwrap();
        let policy = directory.path().join("policy.toml");
        std::fs::write(&policy, POLICY.replace("WORK", work.to_str().unwrap())).unwrap();
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        let mut command = Command::new(ORRERY);
        command.args(["guard", "--policy"]).arg(&policy).current_dir(&work);
        // Each request is a line: a number, and what to do.
        let script = "while read -r number line; do eval \"$line\"; echo \"$number $?\"; done";
        command.args(["--", "sh", "-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        let input = Mutex::new((child.stdin.take().unwrap(), 0));
        let this = Self { child, input, answers: Mutex::new(answers), directory };
        this.serves();
        this
    }

    /// Asks the shell to do something; whether it has, within a time.
    fn does(&self, what: &str, limit: std::time::Duration) -> bool {
        let mut input = self.input.lock().unwrap();
        input.1 += 1;
        let number = input.1.to_string();
        writeln!(input.0, "{number} {what}").unwrap();
        let answers = self.answers.lock().unwrap();
        while let Ok(answer) = answers.recv_timeout(limit) {
            // Answers to what took too long come before.
            if let Some((of, status)) = answer.split_once(' ')
                && of == number
            {
                return status == "0";
            }
        }
        false
    }

    fn serves(&self) {
        let what = "echo one > a && test \"$(cat a)\" = one && mv a b && rm b && ! cat /root/secret";
        orrery_testing::eventually("the guarded shell works", || self.does(what, CLIENT));
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }

    /// Ends the shell, and returns whether the guard ends as it did.
    fn ends(mut self) -> bool {
        drop(self.input);
        self.child.wait().unwrap().success()
    }
}

#[test]
fn the_monitor_survives_each_failing_call() {
    let guarded = Guarded::start();
    let Some(faults) = Faults::attach(pid(&guarded.child)) else { return };
    let reached = Server {
        faults: &faults,
        work: &mut || {
            guarded.does(WORK, CLIENT);
        },
        serves: &mut || guarded.serves(),
        spared: &MEMORY,
        log: &|| guarded.log(),
    }
    .survives_each_failure();
    assert!(reached > 10, "{reached}");
    drop(faults);
    assert!(guarded.ends());
}

#[test]
fn requests_leave_nothing_behind() {
    let guarded = Guarded::start();
    let ask = |count| {
        for _ in 0..count {
            // Calls that the monitor decides about, of the shell and of a process that ends.
            let what =
                "echo one > a; (read -r x < a); test -e /etc/hostname; cd .; read -r x < /etc/hostname";
            assert!(guarded.does(what, orrery_testing::PATIENCE));
        }
    };
    // The monitor has all threads that it ever needs once it was busy.
    for _ in 0..4 {
        guarded.does(WORK, CLIENT);
    }
    ask(100);
    // One shell: hardly more than one thread takes its calls up at a time. Threads that have ended are looked for at 64.
    let before = Usage::of(pid(&guarded.child)).with(4, 80);
    ask(times("ORRERY_REQUESTS", 2000));
    before.assert_flat("requests");
    assert!(guarded.ends());
}
