//! `make bench B=orc-instances`: many instances of SQLite, Lua and libcrypto in one process.
//!
//! The library is built twice from one source: plainly, and with the pass that moves its state to compartment-local storage. Of
//! the plain one, instances are mappings of its file.
//! What an instance takes and what making one takes is compared with dlmopen(3), which loads the library and the C library
//! again until it has no more namespaces, and with a forked process each; each number of copies is measured in a process
//! that had none before. What a call takes is compared with the plain library, which has all databases in one state. Instances of
//! wasmtime are compared in both. Times are of the processor.

use std::ffi::CString;
use std::hint::black_box;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use orrery_bench::instances::fresh::{self, Taken, Way};
use orrery_bench::instances::libraries::{self, Fresh, Known};
use orrery_bench::instances::lua::Lua;
use orrery_bench::instances::sqlite::{Sqlite, Statement};
use orrery_bench::instances::{DATABASES, calls, nanoseconds, wasm};
use orrery_bench::report::Report;
use orrery_bench::{Options, Skipped};
use orrery_orc_instance::{Instance, Library, MappedLibrary};
use orrery_report::record::Record;
use orrery_sys::scheduling::thread_cpu_time;
use orrery_testing::cls::{self, Build};

const BENCH: &str = "orc-instances";
/// How many instances there are at a time.
const COUNTS: [usize; 4] = [1, 100, 1000, 10_000];
/// How many instances there are at a time that have a database each.
const WITH_DATABASES: [usize; 2] = [100, 10_000];
/// How many processes there are at a time.
const PROCESSES: usize = 20;
/// How many mapped instances there are at a time; the kernel's limit of mappings allows some ten times as many.
const MAPPINGS: usize = 1000;

struct Bench {
    report: Report,
    rounds: usize,
    options: Options,
}

impl Bench {
    fn record(&mut self, case: &str, unit: &str, rival: &str, pairs: Vec<(f64, f64)>) {
        if !pairs.is_empty() && self.options.chosen(case) {
            self.report.records.push(Record::new(BENCH, case, unit, rival, pairs, unit == "1"));
        }
    }

    /// Returns whether the user chose any of a library's cases: those of these names, and of numbers of copies.
    fn any(&self, library: &str, cases: &[&str]) -> bool {
        let each = ["memory of each", "create", "destroy"];
        let mut counted =
            COUNTS.iter().flat_map(|count| each.map(|what| format!("{library}/{count}/{what}")));
        cases.iter().any(|case| self.options.chosen(case)) || counted.any(|case| self.options.chosen(&case))
    }

    /// What one of many takes: of a library as instances, and of one in another way.
    fn taken(&mut self, library: &str, ours: (Way, &Path), theirs: (Way, &Path)) {
        // What one of a rival takes does not depend on the number, which is as large as it can be.
        let largest = |way| match way {
            Way::Processes => PROCESSES,
            Way::Mapped => MAPPINGS,
            Way::Instances | Way::Namespaces | Way::Wasm | Way::WasmPool => COUNTS[3],
        };
        let (way, rivals) = (theirs.0, largest(theirs.0));
        let rival = way.to_string();
        let most = format!("{library}/copies in a process");
        let mut counts = Vec::new();
        for count in COUNTS.into_iter().filter(|count| *count <= largest(ours.0)) {
            let case = |what: &str| format!("{library}/{count}/{what}");
            if !["memory of each", "create", "destroy"].iter().any(|what| self.options.chosen(&case(what)))
                && !self.options.chosen(&most)
            {
                continue;
            }
            let mut pairs: [Vec<(f64, f64)>; 3] = Default::default();
            for _ in 0..self.rounds {
                let other = fresh::measure(way, rivals, theirs.1);
                let Some(other): Option<Taken> = self.report.present(&rival, other) else { return };
                let own = fresh::measure(ours.0, count, ours.1);
                let Some(own): Option<Taken> = self.report.present(&ours.0.to_string(), own) else { return };
                pairs[0].push((own.kib, other.kib));
                pairs[1].push((own.create, other.create));
                pairs[2].push((own.destroy, other.destroy));
                if count == COUNTS[3] {
                    counts.push((own.count, other.count));
                }
            }
            let [memory, create, destroy] = pairs;
            self.record(&case("memory of each"), "KiB", &rival, memory);
            self.record(&case("create"), "us", &rival, create);
            self.record(&case("destroy"), "us", &rival, destroy);
        }
        if way == Way::Namespaces && ours.0 == Way::Instances {
            if let Some((_, last)) = counts.last() {
                println!("{library}: dlmopen stops after {last} namespaces in this process");
            }
            self.record(&most, "1", &rival, counts);
        }
    }
}

/// Entering and leaving, by the guard of Rust and without one as C does it, beside a call that reads a variable.
fn switches(bench: &mut Bench, instance: &mut Instance, theirs: Sqlite) {
    const COUNT: usize = 4_000_000;
    let (mut guarded, mut unguarded) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds {
        let begin = thread_cpu_time();
        for _ in 0..COUNT {
            drop(black_box(&mut *instance).enter());
        }
        let ours = nanoseconds(begin, COUNT);
        let begin = thread_cpu_time();
        for _ in 0..COUNT {
            let instance = black_box(&*instance);
            // SAFETY: the instance lives, and this thread leaves it.
            drop(unsafe { instance.enter_unguarded() }.and_then(|()| instance.leave()));
        }
        let ours_unguarded = nanoseconds(begin, COUNT);
        let begin = thread_cpu_time();
        for _ in 0..COUNT {
            // SAFETY: the function takes nothing, and the plain library that it is of stays loaded.
            black_box(unsafe { (theirs.memory_used)() });
        }
        let call = nanoseconds(begin, COUNT);
        guarded.push((ours, call));
        unguarded.push((ours_unguarded, call));
    }
    bench.record("enter and leave", "ns", "a call of sqlite3_memory_used", guarded);
    bench.record("enter and leave, unguarded", "ns", "a call of sqlite3_memory_used", unguarded);
}

/// Resetting an instance that has a database, beside what has the same effect otherwise.
fn resets(bench: &mut Bench, library: &Library, instance: &mut Instance, ours: Sqlite) -> Result<()> {
    const COUNT: usize = 500;
    let mut pairs = Vec::new();
    for _ in 0..bench.rounds {
        let begin = thread_cpu_time();
        for _ in 0..COUNT {
            instance.enter()?.run(|| ours.open())?;
            instance.reset()?;
        }
        let reset = nanoseconds(begin, COUNT) / 1e3;
        let begin = thread_cpu_time();
        for _ in 0..COUNT {
            let mut other = library.create()?;
            other.enter()?.run(|| ours.open())?;
            drop(other);
        }
        pairs.push((reset, nanoseconds(begin, COUNT) / 1e3));
    }
    bench.record("sqlite/open a database and reset", "us", "create, open and destroy", pairs);
    Ok(())
}

/// Calls over many instances, and in one, beside the plain library.
fn throughput(bench: &mut Bench, library: &Library, ours: Sqlite, theirs: Sqlite) -> Result<()> {
    let mut entered: Vec<(Instance, Statement)> = Vec::new();
    let mut statements = Vec::new();
    for _ in 0..DATABASES {
        let mut instance = library.create()?;
        let statement = instance.enter()?.run(|| ours.prepared())?;
        entered.push((instance, statement));
        statements.push(theirs.prepared()?);
    }
    let (mut many, mut one) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds * 3 {
        // SAFETY: `theirs.prepared` returned the statement, and the plain library has no instance that would
        // have to be entered.
        let mut plain = |at: usize| unsafe { theirs.row(statements[at]) };
        let mut call = |at: usize| {
            let (instance, statement) = &mut entered[at];
            if let Ok(guard) = instance.enter() {
                // SAFETY: the statement is prepared, in this instance.
                unsafe { ours.row(*statement) };
                drop(guard);
            }
        };
        let all = calls(DATABASES, &mut call);
        many.push((all, calls(DATABASES, &mut plain)));
        let single = calls(1, &mut call);
        one.push((single, calls(1, &mut plain)));
    }
    bench.record("sqlite/a row, over 500 instances", "ns", "500 databases in one library", many);
    bench.record("sqlite/a row, in one instance", "ns", "plain", one);

    let mut pairs = Vec::new();
    for _ in 0..bench.rounds * 3 {
        let begin = thread_cpu_time();
        entered[0].0.enter()?.run(|| ours.work())?;
        let own = nanoseconds(begin, 1_000_000);
        let begin = thread_cpu_time();
        theirs.work()?;
        pairs.push((own, nanoseconds(begin, 1_000_000)));
    }
    bench.record("sqlite/work of all kinds", "ms", "plain", pairs);
    Ok(())
}

/// Calls over many mappings of the plain library, which have their code at different addresses, and in one.
fn mapped_throughput(bench: &mut Bench, plain: &Path, theirs: Sqlite) -> Result<()> {
    let library = MappedLibrary::load(plain)?;
    // Dropped when nothing of them is used any more, as all else of this function.
    let mut instances = Vec::new();
    let (mut mapped, mut statements) = (Vec::new(), Vec::new());
    for _ in 0..DATABASES {
        // SAFETY: the functions of the instance are used in this function alone, and not by destructors.
        let instance = unsafe { library.create() }?;
        // SAFETY: the library is SQLite, and the instance lives as long as `instances`.
        let own = unsafe { Sqlite::of_mapped(&instance) }?;
        mapped.push((own, own.prepared()?));
        statements.push(theirs.prepared()?);
        instances.push(instance);
    }
    let (mut many, mut one) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds * 3 {
        // SAFETY: `theirs.prepared` returned the statement.
        let mut plain = |at: usize| unsafe { theirs.row(statements[at]) };
        // SAFETY: the statement is prepared by the functions of the same instance.
        let mut call = |at: usize| unsafe { mapped[at].0.row(mapped[at].1) };
        let all = calls(DATABASES, &mut call);
        many.push((all, calls(DATABASES, &mut plain)));
        let single = calls(1, &mut call);
        one.push((single, calls(1, &mut plain)));
    }
    bench.record("sqlite mapped/a row, over 500 instances", "ns", "500 databases in one library", many);
    bench.record("sqlite mapped/a row, in one instance", "ns", "plain", one);
    Ok(())
}

/// An instance, and a statement of a database in it.
type Prepared = (Instance, Statement);

fn prepared(library: &Library, functions: Sqlite, count: usize) -> Result<Vec<Prepared>> {
    let one = || {
        let mut instance = library.create()?;
        let statement = instance.enter()?.run(|| functions.prepared())?;
        Ok((instance, statement))
    };
    (0..count).map(|_| one()).collect()
}

/// Nanoseconds of a row, over instances in turn.
fn rows(functions: Sqlite, instances: &mut [Prepared]) -> f64 {
    calls(instances.len(), |at| {
        let (instance, statement) = &mut instances[at];
        if let Ok(guard) = instance.enter() {
            // SAFETY: the statement is prepared, in this instance.
            unsafe { functions.row(*statement) };
            drop(guard);
        }
    })
}

/// Nanoseconds of entering and leaving, and of a call that reads a variable.
fn switch_and_read(functions: Sqlite, instance: &mut Instance) -> Result<(f64, f64)> {
    const COUNT: usize = 2_000_000;
    let begin = thread_cpu_time();
    for _ in 0..COUNT {
        drop(black_box(&mut *instance).enter());
    }
    let switch = nanoseconds(begin, COUNT);
    let _within = instance.enter()?;
    let begin = thread_cpu_time();
    for _ in 0..COUNT {
        // SAFETY: the function takes nothing, and its library stays loaded.
        black_box(unsafe { (functions.memory_used)() });
    }
    Ok((switch, nanoseconds(begin, COUNT)))
}

/// Accesses relative to GS beside those by the thread-local word, of the same sources.
fn bases(bench: &mut Bench, word: &Library, gs: &Path) -> Result<()> {
    const RIVAL: &str = "by the word";
    let gs = Library::load(gs)?;
    // SAFETY: both libraries are SQLite, built with the pass, and live until this returns.
    let functions = unsafe { [Sqlite::of_instances(&gs)?, Sqlite::of_instances(word)?] };
    let mut instances = [prepared(&gs, functions[0], DATABASES)?, prepared(word, functions[1], DATABASES)?];
    let mut pairs: [Vec<(f64, f64)>; 5] = Default::default();
    for round in 0..bench.rounds * 3 {
        let mut found = [[0.0; 2]; 5];
        // Each goes first as often as the other.
        for way in [round % 2, (round + 1) % 2] {
            let (functions, instances) = (functions[way], &mut *instances[way]);
            let (switch, read) = switch_and_read(functions, &mut instances[0].0)?;
            found[0][way] = switch;
            found[1][way] = read;
            found[2][way] = rows(functions, instances);
            found[3][way] = rows(functions, &mut instances[..1]);
            let begin = thread_cpu_time();
            instances[0].0.enter()?.run(|| functions.work())?;
            found[4][way] = nanoseconds(begin, 1_000_000);
        }
        for (pairs, [gs, word]) in pairs.iter_mut().zip(found) {
            pairs.push((gs, word));
        }
    }
    let [switch, read, many, one, work] = pairs;
    bench.record("gs/enter and leave", "ns", RIVAL, switch);
    bench.record("gs/a call of sqlite3_memory_used", "ns", RIVAL, read);
    bench.record("gs/sqlite, a row, over 500 instances", "ns", RIVAL, many);
    bench.record("gs/sqlite, a row, in one instance", "ns", RIVAL, one);
    bench.record("gs/sqlite, work of all kinds", "ms", RIVAL, work);
    Ok(())
}

/// As [`bases`], with Lua; one library of a process uses GS at a time.
fn bases_of_lua(bench: &mut Bench, word: &Path, gs: &Path) -> Result<()> {
    let libraries = [Library::load(gs)?, Library::load(word)?];
    // SAFETY: both libraries are Lua, built with the pass, and live until this returns.
    let functions = unsafe { [Lua::of_instances(&libraries[0])?, Lua::of_instances(&libraries[1])?] };
    let mut instances = [libraries[0].create()?, libraries[1].create()?];
    let mut pairs = Vec::new();
    for round in 0..bench.rounds * 3 {
        let mut found = [0.0; 2];
        for way in [round % 2, (round + 1) % 2] {
            let begin = thread_cpu_time();
            instances[way].enter()?.run(|| functions[way].work())?;
            found[way] = nanoseconds(begin, 1_000_000);
        }
        pairs.push((found[0], found[1]));
    }
    bench.record("gs/lua, work of all kinds", "ms", "by the word", pairs);
    Ok(())
}

/// Instances of wasmtime, beside ours: what they take, with and without a database, and their calls.
///
/// # Safety
/// The functions are those of the library.
unsafe fn wasmtime(bench: &mut Bench, library: &Library, functions: Sqlite, with_pass: &Path) -> Result<()> {
    const CASES: [&str; 4] = [
        "sqlite/a row, over 500 instances",
        "sqlite/a row, in one instance",
        "sqlite/work of all kinds",
        "enter, call sqlite3_memory_used, leave",
    ];
    let with_database = |count: &usize| {
        [
            format!("sqlite/{count}/memory of each, with a database"),
            format!("sqlite/{count}/create and open a database"),
        ]
    };
    let chosen = |bench: &Bench, cases: &[String]| cases.iter().any(|case| bench.options.chosen(case));
    if !bench.any("sqlite", &CASES)
        && !WITH_DATABASES.iter().any(|count| chosen(bench, &with_database(count)))
    {
        return Ok(());
    }
    let Some([on_demand, pool]) = bench.report.present("wasmtime", wasm::compiled()) else { return Ok(()) };
    if CASES.iter().any(|case| bench.options.chosen(case)) {
        // SAFETY: the caller's promise; the file is what `compiled` returned.
        let found = unsafe { wasm::measure_calls(library, functions, &on_demand, bench.rounds) }?;
        for (case, pairs) in CASES.into_iter().zip([found.many, found.one, found.work, found.call]) {
            let unit = if case.contains("work") { "ms" } else { "ns" };
            bench.record(case, unit, &Way::Wasm.to_string(), pairs);
        }
    }
    for (way, compiled) in [(Way::Wasm, &on_demand), (Way::WasmPool, &pool)] {
        bench.taken("sqlite", (Way::Instances, with_pass), (way, compiled));
        for count in WITH_DATABASES {
            let [memory_case, create_case] = with_database(&count);
            if !chosen(bench, &[memory_case.clone(), create_case.clone()]) {
                continue;
            }
            let (mut memory, mut create) = (Vec::new(), Vec::new());
            for _ in 0..bench.rounds {
                let theirs = wasm::measure_databases(way, count, compiled);
                let Some(theirs) = bench.report.present(&way.to_string(), theirs) else { break };
                let ours = wasm::measure_databases(Way::Instances, count, with_pass)?;
                memory.push((ours.0, theirs.0));
                create.push((ours.1, theirs.1));
            }
            let rival = way.to_string();
            bench.record(&memory_case, "KiB", &rival, memory);
            bench.record(&create_case, "us", &rival, create);
        }
    }
    Ok(())
}

/// What instances of Lua or libcrypto take, what a call takes, and one in a state that is as new.
///
/// # Safety
/// Both files are `known`, the first built with the pass.
unsafe fn library(bench: &mut Bench, known: Known, with_pass: &Path, plain: &Path) -> Result<()> {
    for way in [Way::Namespaces, Way::Processes] {
        bench.taken(&known.to_string(), (Way::Instances, with_pass), (way, plain));
    }
    let (case, rival) = match known {
        Known::Lua => ("lua/a chunk", "plain"),
        Known::Crypto => ("libcrypto/a digest", "Debian's, with assembly"),
    };
    let (mut outside, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..bench.rounds {
        // SAFETY: the caller's promise.
        let [own, same, plain] = unsafe { libraries::measure_call(known, with_pass, plain) }?;
        outside.push((own, same));
        theirs.push((own, plain));
    }
    bench.record(case, "ns", "in no instance", outside);
    bench.record(case, "ns", rival, theirs);
    for (fresh, file) in [(Fresh::Create, with_pass), (Fresh::Process, plain)] {
        let mut pairs = Vec::new();
        for _ in 0..bench.rounds {
            let own = libraries::measure_fresh(known, Fresh::Reset, with_pass)?;
            pairs.push((own, libraries::measure_fresh(known, fresh, file)?));
        }
        bench.record(&format!("{case} and reset"), "us", &fresh.to_string(), pairs);
    }
    Ok(())
}

fn main() -> Result<ExitCode> {
    if fresh::serve()? || wasm::serve()? || libraries::serve()? {
        return Ok(ExitCode::SUCCESS);
    }
    let options = Options::from_command_line(
        "Many instances of libraries beside namespaces, processes, wasmtime and plain libraries",
    );
    options.pin()?.bind()?;
    let rounds = if options.quick() { 3 } else { 11 };
    let mut bench = Bench { report: Report::default(), rounds, options };
    let (Some(with_pass), Some(plain)) = (cls::sqlite("-O2", Build::Word), cls::sqlite("-O2", Build::Plain))
    else {
        bench.report.absent("instances", &Skipped("there is no LLVM for the pass".to_owned()).into());
        return bench.report.finish(BENCH, false);
    };
    let path = CString::new(plain.as_os_str().as_bytes())?;
    // SAFETY: loading a library that has no constructors.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    ensure!(!handle.is_null(), "cannot load the plain library");
    // SAFETY: the library is SQLite, and stays loaded.
    let theirs = unsafe { Sqlite::of_handle(handle) }?;
    let library = Library::load(&with_pass)?;
    // SAFETY: the library is SQLite, built with the pass, and lives until this returns.
    let ours = unsafe { Sqlite::of_instances(&library) }?;
    let (bytes, words) = (library.state_len(), library.relocations());
    println!("sqlite: {bytes} bytes of state, {words} of its words are addresses in it");

    let mut instance = library.create()?;
    switches(&mut bench, &mut instance, theirs);
    resets(&mut bench, &library, &mut instance, ours)?;
    throughput(&mut bench, &library, ours, theirs)?;
    mapped_throughput(&mut bench, &plain, theirs)?;
    if let Some(gs) = cls::sqlite("-O2", Build::Gs) {
        bases(&mut bench, &library, &gs)?;
    }
    if let (Some(word), Some(gs)) = (cls::lua("-O2", Build::Word), cls::lua("-O2", Build::Gs)) {
        bases_of_lua(&mut bench, &word, &gs)?;
    }
    // SAFETY: `ours` are the functions of `library`.
    unsafe { wasmtime(&mut bench, &library, ours, &with_pass) }?;
    let ours = (Way::Instances, &*with_pass);
    for way in [Way::Namespaces, Way::Processes, Way::Mapped] {
        bench.taken("sqlite", ours, (way, &plain));
    }
    bench.taken("sqlite mapped", (Way::Mapped, &plain), (Way::Namespaces, &plain));
    if let (Some(with_pass), Some(plain)) = (cls::lua("-O2", Build::Word), cls::lua("-O2", Build::Plain)) {
        // SAFETY: both are Lua, the first built with the pass.
        unsafe { self::library(&mut bench, Known::Lua, &with_pass, &plain) }?;
    }
    if bench.any("libcrypto", &["libcrypto/a digest and reset"]) {
        let files = libraries::libcrypto(!bench.options.quick())
            .and_then(|with_pass| Ok((with_pass, libraries::plain_libcrypto()?)));
        if let Some((with_pass, plain)) = bench.report.present("libcrypto", files) {
            // SAFETY: both are libcrypto, the first built with the pass.
            unsafe { self::library(&mut bench, Known::Crypto, &with_pass, &plain) }?;
        }
    }
    let whole = bench.options.all();
    bench.report.finish(BENCH, whole)
}
