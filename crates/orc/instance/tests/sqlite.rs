//! SQLite in many instances against SQLite in separate processes: the same statements, the same answers.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;

use common::function;
use orrery_orc_instance::{Instance, Library};
use orrery_testing::cls::Build;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

type Row = extern "C" fn(*mut c_void, c_int, *mut *mut c_char, *mut *mut c_char) -> c_int;

#[derive(Clone, Copy)]
struct Sqlite {
    open: extern "C" fn(*const c_char, *mut *mut c_void) -> c_int,
    exec: unsafe extern "C" fn(*mut c_void, *const c_char, Row, *mut c_void, *mut *mut c_char) -> c_int,
    free: unsafe extern "C" fn(*mut c_void),
    memory_used: extern "C" fn() -> i64,
    soft_limit: extern "C" fn(i64) -> i64,
}

fn library() -> Option<(Library, Sqlite)> {
    Some(load(built()?))
}

/// The library, which is looked for once.
fn built() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(|| orrery_testing::cls::sqlite("-O1", Build::of_instances())).as_deref()
}

fn load(path: &Path) -> (Library, Sqlite) {
    let library = Library::load(path).unwrap();
    assert_eq!(library.uses_gs(), Build::of_instances() == Build::Gs);
    // SAFETY: the functions have these types in SQLite's header.
    let sqlite = unsafe {
        Sqlite {
            open: function(&library, c"sqlite3_open"),
            exec: function(&library, c"sqlite3_exec"),
            free: function(&library, c"sqlite3_free"),
            memory_used: function(&library, c"sqlite3_memory_used"),
            soft_limit: function(&library, c"sqlite3_soft_heap_limit64"),
        }
    };
    (library, sqlite)
}

extern "C" fn row(lines: *mut c_void, count: c_int, values: *mut *mut c_char, _: *mut *mut c_char) -> c_int {
    // SAFETY: SQLite passes what it was given, and an array of C strings.
    unsafe {
        let lines = &mut *lines.cast::<String>();
        for at in 0..usize::try_from(count).unwrap() {
            let value = values.add(at).read();
            let text = if value.is_null() { c"NULL" } else { CStr::from_ptr(value) };
            lines.push_str(&text.to_string_lossy());
            lines.push('|');
        }
    }
    0
}

impl Sqlite {
    fn open(self) -> *mut c_void {
        let mut database = std::ptr::null_mut();
        assert_eq!((self.open)(c":memory:".as_ptr(), &raw mut database), 0);
        database
    }

    /// Returns what a statement returns, or its error.
    fn run(self, database: *mut c_void, statement: &str) -> String {
        let statement = CString::new(statement).unwrap();
        let (mut lines, mut error) = (String::new(), std::ptr::null_mut());
        // SAFETY: the database is open, and `lines` and `error` outlive the call, in which the row function
        // alone uses them.
        unsafe {
            let code =
                (self.exec)(database, statement.as_ptr(), row, (&raw mut lines).cast(), &raw mut error);
            if !error.is_null() {
                lines = format!("{code}: {}", CStr::from_ptr(error).to_string_lossy());
                (self.free)(error.cast());
            }
        }
        lines
    }
}

/// SQLite in a process: this test program again, which answers each line by a line.
struct Process {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

const SERVES: &str = "ORRERY_TEST_SERVES_SQLITE";

impl Process {
    fn start() -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "serves", "--nocapture", "--test-threads=1"]).env(SERVES, built().unwrap());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, input, output }
    }

    fn run(&mut self, statement: &str) -> String {
        writeln!(self.input, "{statement}").unwrap();
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "the process has ended");
            // The harness prints, too.
            if let Some((_, answer)) = line.split_once("ANSWER ") {
                return answer.trim_end_matches('\n').to_owned();
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What [`Process`] runs: the library without instances.
#[test]
fn serves() {
    let Some(path) = std::env::var_os(SERVES) else { return };
    let (_library, sqlite) = load(Path::new(&path));
    let database = sqlite.open();
    for line in std::io::stdin().lines() {
        println!("ANSWER {}", sqlite.run(database, &line.unwrap()));
    }
}

fn statement() -> impl Strategy<Value = String> {
    prop_oneof![
        (0..50_u32, "[a-z]{0,30}").prop_map(|(key, text)| format!("insert into t values({key}, '{text}')")),
        (0..50_u32, "[a-z]{0,300}")
            .prop_map(|(key, text)| format!("insert or replace into t values({key}, '{text}')")),
        (0..50_u32).prop_map(|key| format!("delete from t where a % 7 = {key} % 7")),
        Just("select a, length(b), b from t order by b, a limit 5".to_owned()),
        Just("select count(*), sum(a), max(b) from t".to_owned()),
        Just("begin".to_owned()),
        Just("commit".to_owned()),
        Just("rollback".to_owned()),
        (0..9_u32).prop_map(|n| format!("create table if not exists u{n}(x, y)")),
        (0..9_u32).prop_map(|n| format!("insert into u{n} select a, b from t; select count(*) from u{n}")),
        (0..9_u32).prop_map(|n| format!("select {n}/0, upper(hex({n})), printf('%05d', {n})")),
        Just("select nonsense from nowhere".to_owned()),
        Just("update t set b = b || a where a > 20; select changes(), last_insert_rowid()".to_owned()),
    ]
}

#[test]
fn interleaved_instances_answer_as_processes_do() {
    let Some((library, sqlite)) = library() else { return };
    const INSTANCES: usize = 4;
    let cases = std::env::var("ORRERY_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(40);
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let steps = prop::collection::vec((0..INSTANCES, statement(), 0..40_u32), 1..150);
    runner
        .run(&steps, |steps| {
            let table = "create table t(a integer primary key, b text); create index i on t(b)";
            let mut instances: Vec<(Instance, *mut c_void)> = Vec::new();
            let mut processes: Vec<Process> = Vec::new();
            // What each has run since it began: another process that runs it is a copy of the process.
            let mut run: Vec<Vec<String>> = Vec::new();
            for _ in 0..INSTANCES {
                let mut instance = library.create().unwrap();
                let database = instance.enter().unwrap().run(|| sqlite.open());
                instances.push((instance, database));
                processes.push(Process::start());
                run.push(vec![table.to_owned()]);
            }
            for (instance, process) in instances.iter_mut().zip(&mut processes) {
                let ours = instance.0.enter().unwrap().run(|| sqlite.run(instance.1, table));
                prop_assert_eq!(ours, process.run(table));
            }
            for (which, statement, event) in steps {
                let (instance, database) = &mut instances[which];
                let ours = instance.enter().unwrap().run(|| sqlite.run(*database, &statement));
                prop_assert_eq!(ours, processes[which].run(&statement), "{}", statement);
                run[which].push(statement);
                match event {
                    // A rollback to a snapshot is as if nothing happened since.
                    0 => {
                        let snapshot = instance.snapshot().unwrap();
                        instance.enter().unwrap().run(|| sqlite.run(*database, "drop table t; commit"));
                        instance.restore(&snapshot).unwrap();
                    }
                    1 => {
                        instance.reset().unwrap();
                        *database = instance.enter().unwrap().run(|| sqlite.open());
                        processes[which] = Process::start();
                        let ours = instance.enter().unwrap().run(|| sqlite.run(*database, table));
                        prop_assert_eq!(ours, processes[which].run(table));
                        run[which] = vec![table.to_owned()];
                    }
                    // A copy goes on where the first is, and both are apart from then on.
                    2 => {
                        let snapshot = instance.snapshot().unwrap();
                        // SAFETY: SQLite stores addresses as whole aligned words, and the test has no number
                        // that happens to be one.
                        let copy = unsafe { snapshot.create() }.unwrap();
                        let database = copy.copy_of(*database).unwrap().as_ptr();
                        let other = (which + 1) % INSTANCES;
                        instances[other] = (copy, database);
                        processes[other] = Process::start();
                        run[other] = run[which].clone();
                        for statement in &run[other] {
                            processes[other].run(statement);
                        }
                    }
                    _ => {}
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_thousand_instances_have_a_thousand_states() {
    let Some((library, sqlite)) = library() else { return };
    let mut instances: Vec<(Instance, *mut c_void)> = (0..1000_i64)
        .map(|number| {
            let mut instance = library.create().unwrap();
            let database = instance.enter().unwrap().run(|| {
                assert_eq!((sqlite.memory_used)(), 0);
                (sqlite.soft_limit)(1_000_000 + number);
                let database = sqlite.open();
                let filled = sqlite.run(
                    database,
                    &format!("create table t(a); insert into t values({number}), ({number} * 2)"),
                );
                assert_eq!(filled, "");
                database
            });
            (instance, database)
        })
        .collect();
    for (number, (instance, database)) in instances.iter_mut().enumerate().rev() {
        instance.enter().unwrap().run(|| {
            assert_eq!((sqlite.soft_limit)(-1), 1_000_000 + i64::try_from(number).unwrap());
            assert_eq!(sqlite.run(*database, "select sum(a) from t"), format!("{}|", 3 * number));
            assert!((sqlite.memory_used)() > 0);
        });
    }
    // The library's own state is one more, in which nothing happened.
    assert_eq!((sqlite.memory_used)(), 0);
}

#[test]
fn an_open_database_is_rolled_back() {
    let Some((library, sqlite)) = library() else { return };
    let mut one = library.create().unwrap();
    let database = one.enter().unwrap().run(|| {
        let database = sqlite.open();
        sqlite.run(database, "create table t(a, b); create index i on t(b)");
        for number in 0..200 {
            sqlite.run(database, &format!("insert into t values({number}, 'text {number}')"));
        }
        database
    });
    let snapshot = one.snapshot().unwrap();
    one.enter().unwrap().run(|| sqlite.run(database, "delete from t where a > 10"));
    assert_eq!(one.enter().unwrap().run(|| sqlite.run(database, "select count(*) from t")), "11|");
    one.restore(&snapshot).unwrap();
    assert_eq!(one.enter().unwrap().run(|| sqlite.run(database, "select count(*) from t")), "200|");
}

/// Each test of this program, with a library whose accesses are relative to GS.
#[test]
fn all_holds_relative_to_gs() {
    let cases = std::env::var("ORRERY_CASES").unwrap_or_else(|_| "15".to_owned());
    common::repeat_relative_to_gs(&["all_holds_relative_to_gs"], &[("ORRERY_CASES", &cases)]);
}
