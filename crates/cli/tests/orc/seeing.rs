//! `orrery orc stat` and `orrery orc explain`.

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use orrery_orc_client::Flags;
use orrery_testing::Killed;
use serde_json::Value;

use crate::unmodified::{code, run_by};
use crate::{Store, bytes, eventually};

fn orc(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_orrery")).arg("orc").args(arguments).output().unwrap()
}

fn text(output: &Output) -> &str {
    assert!(output.status.success(), "{output:?}");
    std::str::from_utf8(&output.stdout).unwrap()
}

#[test]
fn a_watch_shows_what_comes_and_goes() {
    let store = Store::new(&["--keep", "0"]);
    let client = store.client();
    let mut command = Command::new(env!("CARGO_BIN_EXE_orrery"));
    command.args(["orc", "stat", "--watch", "--every", "0.1", "--json", "--directory"]).arg(store.path());
    let mut watch = Killed(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(watch.0.stdout.take().unwrap()).lines();
    // Ten looks a second: what it does not see in so many it never will.
    let mut sees = |count: usize| {
        let looks =
            lines.by_ref().take(300).map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        looks.map(|look| look["objects"].as_array().unwrap().len()).any(|objects| objects == count)
    };
    assert!(sees(0));
    let object = client.register(&bytes(1 << 20, 1), Flags::none()).unwrap();
    assert!(sees(1), "it is held");
    drop(object);
    assert!(sees(0), "nobody holds it");
}

#[test]
fn what_is_shared_is_counted() {
    let store = Store::new(&[]);
    let directory = store.path().to_str().unwrap();
    let client = store.client();
    assert!(text(&orc(&["stat", "--directory", directory])).contains("No objects"));
    let object = client.register(&bytes(1 << 20, 1), Flags::none()).unwrap();
    // Two mappings of every page count twice.
    let (one, two) = (object.map().unwrap(), object.map().unwrap());
    let sum: u64 = one.iter().chain(&*two).map(|byte| u64::from(*byte)).sum();
    assert!(sum > 0);
    let stat = || -> Value {
        serde_json::from_str(text(&orc(&["stat", "--directory", directory, "--json"]))).unwrap()
    };
    // Children that other tests are forking just now have the mappings, too, for a moment.
    let processes = |look: &Value| {
        let programs = look["programs"].as_object().unwrap().values();
        programs.map(|program| program["processes"].as_u64().unwrap()).sum::<u64>()
    };
    let look = (0..50).map(|_| stat()).find(|look| processes(look) == 1).unwrap();
    assert_eq!(look["schema"], 1);
    let domain = &look["trust_domains"].as_object().unwrap().values().next().unwrap();
    assert_eq!((&domain["objects"], &domain["stored"]), (&1.into(), &(1 << 20).into()));
    assert_eq!((&domain["mapped"], &domain["saved"]), (&(2 << 20).into(), &(1 << 20).into()));
    let program = look["programs"].as_object().unwrap().values().next().unwrap();
    assert_eq!((&program["processes"], &program["mapped"]), (&1.into(), &(2 << 20).into()));
    let held = &look["objects"][0];
    assert_eq!(held["id"], object.id().to_string());
    assert!(held["holders"].as_object().unwrap().contains_key(&std::process::id().to_string()));
    let table = text(&orc(&["stat", "--directory", directory, "--objects"])).to_owned();
    assert!(
        table.contains("TRUST DOMAIN") && table.contains("1 MiB") && table.contains(&object.id().to_string())
    );

    let own = std::process::id().to_string();
    let sums = text(&orc(&["explain", &own])).to_owned();
    assert!(
        sums.contains("one copy for all") && sums.contains("all together") && sums.contains("the stack"),
        "{sums}"
    );
    let rows: Value = serde_json::from_str(text(&orc(&["explain", &own, "--json"]))).unwrap();
    let rows = rows.as_array().unwrap();
    let shared: u64 = rows
        .iter()
        .filter(|row| row["name"].as_str().unwrap().starts_with("/memfd:orc:"))
        .map(|row| row["resident"].as_u64().unwrap())
        .sum();
    assert!(shared >= 2 << 20);
    assert!(text(&orc(&["explain", &own, "--all"])).contains("ADDRESSES"));
}

/// A program that waits, when its code is an object.
fn waiting(store: &Store, program: &Path, arguments: &[&str], uid: u32) -> Killed {
    let public = orrery_testing::PublicDirectory::new();
    let orrery = public.copy(env!("CARGO_BIN_EXE_orrery"));
    let mut command = run_by(&orrery, store, &[&[program.to_str().unwrap()], arguments].concat());
    command.uid(uid).gid(uid).stderr(Stdio::null());
    let running = Killed(command.spawn().unwrap());
    let name = program.file_name().unwrap().to_str().unwrap();
    eventually("the exchange", || code(running.0.id(), name).is_some_and(|(_, object)| object));
    running
}

#[test]
fn programs_are_told_apart_and_so_are_their_trust_domains() {
    let own = rustix::process::geteuid().as_raw();
    let other = if own == 0 { 65_528 } else { own };
    let store = Store::new(&[]);
    let _ = store.client();
    let tree = tempfile::tempdir().unwrap();
    std::fs::set_permissions(tree.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let programs = ["snoozer", "slumberer"].map(|name| tree.path().join(name));
    orrery_testing::copy_program("/bin/sleep", &programs[0]);
    orrery_testing::copy_program("/usr/bin/tail", &programs[1]);
    let snoozer = |uid| waiting(&store, &programs[0], &["1000"], uid);
    let slumberer = |uid| waiting(&store, &programs[1], &["-f", "/dev/null"], uid);
    let _running = [snoozer(own), snoozer(own), slumberer(own), slumberer(other)];
    let directory = store.path().to_str().unwrap();
    // The loader goes on exchanging behind the first code that is seen.
    let mut look = Value::Null;
    eventually("all are told of", || {
        look = serde_json::from_str(text(&orc(&["stat", "--directory", directory, "--json"]))).unwrap();
        let objects = |name: &str| look["programs"][name]["objects"].as_u64().unwrap_or(0);
        objects("snoozer") >= 3 && objects("slumberer") >= 3
    });
    let [of_own, of_other] = [own, other].map(|uid| format!("user {uid}"));
    let (first, second) = (&look["programs"]["snoozer"], &look["programs"]["slumberer"]);
    let number = |of: &Value, key: &str| of[key].as_u64().unwrap();
    assert_eq!((number(first, "processes"), number(second, "processes")), (2, 2));
    assert_eq!(number(&first["trust_domains"][&of_own], "processes"), 2);
    assert!(own != 0 || first["trust_domains"].as_object().unwrap().len() == 1, "{first}");
    for program in [first, second] {
        for key in ["objects", "mapped", "saved"] {
            let sum: u64 = program["trust_domains"]
                .as_object()
                .unwrap()
                .values()
                .map(|domain| number(domain, key))
                .sum();
            assert_eq!(sum, number(program, key), "{key}: {program}");
        }
        assert!(number(program, "saved") < number(program, "mapped"), "a part is its own: {program}");
    }
    // Two run one program's code, and three of the user's one C library; nobody helps the other user's.
    assert!(number(first, "saved") * 2 >= number(first, "mapped"), "{first}");
    if own == 0 {
        let (helped, alone) = (&second["trust_domains"][&of_own], &second["trust_domains"][&of_other]);
        assert!(number(helped, "saved") > 0, "{second}");
        // But for what is rounded, and pages that one process maps twice.
        assert!(number(alone, "saved") * 5 < number(alone, "mapped"), "{second}");
    }
    let table = text(&orc(&["stat", "--directory", directory])).to_owned();
    let row = |program: &str, domain: &str| {
        table.lines().any(|line| line.trim_start().starts_with(program) && line.contains(domain))
    };
    assert!(row("snoozer", &of_own) && row("slumberer", &of_other), "{table}");
}

/// The page frame behind each page of a mapping that is in memory (`/proc/PID/pagemap` in proc(5)).
fn frames(pid: i32, range: &str) -> Vec<u64> {
    let bound = |text: &str| usize::from_str_radix(text, 16).unwrap() / 4096;
    let (start, end) = range.split_once('-').unwrap();
    let (start, count) = (bound(start), bound(end) - bound(start));
    let file = std::fs::File::open(format!("/proc/{pid}/pagemap")).unwrap();
    let mut entries = vec![0; count * 8];
    file.read_exact_at(&mut entries, start as u64 * 8).unwrap();
    let entries = entries.chunks(8).map(|entry| u64::from_le_bytes(entry.try_into().unwrap()));
    entries.filter(|entry| entry >> 63 == 1).map(|entry| entry & ((1 << 55) - 1)).collect()
}

#[test]
fn what_is_counted_is_what_the_kernel_counts_for_each_page() {
    let Ok(counts) = std::fs::File::open("/proc/kpagecount") else {
        orrery_testing::skipped!("/proc/kpagecount is not to be read here");
        return;
    };
    if !std::path::Path::new(crate::unmodified::PYTHON).exists() {
        orrery_testing::skipped!("there is no {}", crate::unmodified::PYTHON);
        return;
    }
    let store = Store::new(&[]);
    let _ = store.client();
    let mut programs: Vec<_> = (0..3).map(|_| crate::unmodified::Python::start(&store)).collect();
    let import = "import ssl, _json; print(1)";
    assert!(programs.iter_mut().all(|program| program.ask(import) == "1"));
    // All that the three map of objects, and how often the kernel says that each of these pages is mapped.
    let (mut mapped, mut seen) = (0, Vec::new());
    let mut pages = std::collections::BTreeSet::new();
    for program in &programs {
        let pid = i32::try_from(program.pid()).unwrap();
        for area in orrery_orc_store::measure::mappings(pid).unwrap().iter().filter(|area| area.is_object()) {
            mapped += area.resident - area.anonymous;
            seen.push(area.clone());
            if area.anonymous == 0 {
                pages.extend(frames(pid, &area.range));
            }
        }
    }
    let count = |frame: &u64| {
        let mut count = [0; 8];
        counts.read_exact_at(&mut count, frame * 8).unwrap();
        u64::from_le_bytes(count)
    };
    let counted: u64 = pages.iter().map(count).sum();
    // Those of mappings with copied pages are left out above: few, as most data are read-only.
    let stat: Value =
        serde_json::from_str(text(&orc(&["stat", "--directory", store.path().to_str().unwrap(), "--json"])))
            .unwrap();
    let told: u64 = stat["trust_domains"]
        .as_object()
        .unwrap()
        .values()
        .map(|domain| domain["mapped"].as_u64().unwrap())
        .sum();
    let known = |area: &orrery_orc_store::measure::MappingUsage| {
        stat["objects"].as_array().unwrap().iter().any(|object| object["inode"] == area.inode)
    };
    let unknown: Vec<_> = seen.iter().filter(|area| !known(area)).collect();
    assert_eq!(told, mapped, "what is told is what the three map, but for {unknown:#?}");
    let difference = mapped.abs_diff(counted * 4096);
    assert!(difference * 20 <= mapped, "{mapped} bytes, the kernel counts {counted} pages");
    assert!(pages.len() as u64 * 4096 * 2 < counted * 4096, "and nearly each page three times");
}

#[test]
fn programs_with_files_that_were_replaced_are_listed() {
    let store = Store::new(&[]);
    let _ = store.client();
    let tree = tempfile::tempdir().unwrap();
    let path = tree.path().join("oldster");
    orrery_testing::copy_program("/bin/sleep", &path);
    let running = waiting(&store, &path, &["1000"], rustix::process::geteuid().as_raw());
    let directory = store.path().to_str().unwrap();
    let stale = || -> Vec<Value> {
        let look = orc(&["stat", "--directory", directory, "--stale", "--json"]);
        let look: Value = serde_json::from_str(text(&look)).unwrap();
        assert_eq!(look["schema"], 1);
        look["stale"].as_array().unwrap().clone()
    };
    assert!(stale().is_empty(), "{:?}", stale());
    // The same bytes again are no other ones.
    let other = tree.path().join("other");
    orrery_testing::copy_program("/bin/sleep", &other);
    std::fs::rename(&other, &path).unwrap();
    assert!(stale().is_empty(), "{:?}", stale());
    orrery_testing::copy_program("/bin/true", &other);
    std::fs::rename(&other, &path).unwrap();
    let found = stale();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0]["pid"], &found[0]["is_gone"]), (&running.0.id().into(), &false.into()));
    assert!(found[0]["file"].as_str().unwrap().ends_with("/oldster"));
    std::fs::remove_file(&path).unwrap();
    assert_eq!(stale()[0]["is_gone"], true);
    assert!(text(&orc(&["stat", "--directory", directory, "--stale"])).contains("gone"));
}

/// What is saved is what programs would take that do not share: of one file they have one copy anyway.
#[test]
fn what_is_saved_is_what_plain_programs_would_take_more() {
    let store = Store::new(&[]);
    let _ = store.client();
    let trees = orrery_testing::PublicDirectory::new();
    let uid = rustix::process::geteuid().as_raw();
    let directory = store.path().to_str().unwrap();
    let saved = || {
        let look: Value =
            serde_json::from_str(text(&orc(&["stat", "--directory", directory, "--json"]))).unwrap();
        let domains = look["trust_domains"].as_object().unwrap().values();
        domains.map(|domain| domain["saved"].as_i64().unwrap()).sum::<i64>()
    };
    let plant = |name: &str| {
        let program = trees.path().join(name).join("viper");
        std::fs::create_dir(trees.path().join(name)).unwrap();
        orrery_testing::copy_program(crate::unmodified::PYTHON, &program);
        program
    };
    let start = |program: &Path| waiting(&store, program, &["-Sc", "import time; time.sleep(1000)"], uid);
    let first = plant("first");
    let mut running = vec![start(&first), start(&first), start(&first)];
    assert!(saved() <= 0, "three programs of one file: {}", saved());
    running.extend(["second", "third"].map(|name| start(&plant(name))));
    eventually("two more files of a program are saved", || saved() > 1 << 20);
}

#[test]
fn nonsense_is_refused() {
    let failed = |arguments: &[&str], part: &str| {
        let output = orc(arguments);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(part), "{arguments:?}: {said}");
    };
    failed(&["stat", "--directory", "/nonexistent"], "orrery orc serve");
    failed(&["stat", "--every", "0", "--watch"], "choose 0.05 to 86400 seconds");
    failed(&["explain", "2147483647"], "process 2147483647");
    failed(&["serve", "--quota", "0"], "too little");
    failed(&["serve", "--trust-domain", "x"], "NAME=SOCKET");
    failed(&["serve", "--trust-domain", "x=/tmp/1", "--trust-domain", "x=/tmp/2"], "twice");
    let store = Store::new(&[]);
    let _ = store.client();
    failed(&["serve", "--directory", store.path().to_str().unwrap()], "another store");
    failed(&["serve", "--directory", "/proc/nowhere"], "/proc/nowhere");
}
