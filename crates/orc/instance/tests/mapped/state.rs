//! State of C libraries: variables, constructors and destructors, thread-local variables, threads.

use std::ffi::{CStr, CString, c_char, c_int};
use std::process::Command;

use orrery_orc_instance::{Error, MappedInstance, MappedLibrary};

use crate::plain::{build, built, call, create, function, mappings};

fn state() -> MappedLibrary {
    MappedLibrary::load(built("mapped.c", &[])).unwrap()
}

#[test]
fn state_and_addresses_are_apart() {
    let library = state();
    let (one, two) = (create(&library), create(&library));
    for round in 0..10 {
        assert_eq!((call(&one, c"next"), call(&two, c"next")), (2 + round, 2 + round));
    }
    call(&one, c"next");
    assert_eq!((call(&one, c"in_table"), call(&two, c"in_table")), (11, 10));
    assert_ne!(one.symbol(c"next").unwrap(), two.symbol(c"next").unwrap());
    // SAFETY: the variable is an `int` of each instance.
    let read = |one: &MappedInstance| unsafe { one.symbol(c"counter").unwrap().cast::<i32>().read() };
    assert_eq!((read(&one), read(&two)), (12, 11));
    for instance in [&one, &two] {
        // SAFETY: the functions have these types in the library's source.
        let (operate, name, sort): (
            extern "C" fn(c_int) -> c_int,
            extern "C" fn(c_int) -> *const c_char,
            unsafe extern "C" fn(*mut c_int, c_int) -> c_int,
        ) = unsafe {
            (function(instance, c"operate"), function(instance, c"name"), function(instance, c"sort"))
        };
        let counter = read(instance);
        assert_eq!(operate(5), 5 + counter);
        // SAFETY: it is a constant of the library.
        assert_eq!(unsafe { CStr::from_ptr(name(2)) }, c"two");
        let mut values = [3, 1, 2];
        // SAFETY: the array has three numbers.
        let compared = unsafe { sort(values.as_mut_ptr(), 3) };
        assert!(values == [1, 2, 3] && compared > counter, "{compared}");
    }
    assert_eq!(
        one.symbol(c"nothing").unwrap_err().to_string(),
        "cannot find symbol nothing: the library has none of this name"
    );
    assert!(library.relocations() > 10 && library.mapped_len() > 40_000, "{library:?}");
}

#[test]
fn functions_that_are_chosen_are_the_instances_own() {
    let library = state();
    let (one, two) = (create(&library), create(&library));
    call(&one, c"next");
    assert_eq!((call(&one, c"indirect"), call(&one, c"call_indirect")), (42, 42));
    assert_eq!((call(&two, c"indirect"), call(&two, c"call_indirect")), (41, 41));
}

#[test]
fn libraries_that_it_needs_are_the_process_s() {
    let one = create(&state());
    // SAFETY: the function has this type in the library's source.
    let set_errno: extern "C" fn(c_int) -> c_int = unsafe { function(&one, c"set_errno") };
    set_errno(libc::EXDEV);
    assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EXDEV));
}

#[test]
fn constructors_and_destructors_run_in_each_mapping() {
    let library = state();
    let mut ends = [0; 2];
    let (one, two) = (create(&library), create(&library));
    assert_eq!((call(&one, c"times_constructed"), call(&two, c"times_constructed")), (1, 1));
    for (instance, end) in [(&one, &raw mut ends[0]), (&two, &raw mut ends[1])] {
        // SAFETY: the function has this type in the library's source; the word outlives the instance.
        let note: unsafe extern "C" fn(*mut c_int) -> c_int = unsafe { function(instance, c"note_end") };
        // SAFETY: the word outlives the instance, which writes to it when it ends.
        assert_eq!(unsafe { note(end) }, 0);
    }
    one.destroy().unwrap();
    assert!(ends[0] != 0 && ends[1] == 0, "{ends:?}");
    drop(two);
    // What atexit(3) registered and the destructor, in the order of dlclose(3).
    let path = CString::new(built("mapped.c", &[]).to_str().unwrap()).unwrap();
    let mut end = 0;
    // SAFETY: the library is loaded and closed as any other, and its function has this type in its source.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        let note: unsafe extern "C" fn(*mut c_int) -> c_int =
            std::mem::transmute(libc::dlsym(handle, c"note_end".as_ptr()));
        assert_eq!(note(&raw mut end), 0);
        assert_eq!(libc::dlclose(handle), 0);
    }
    assert_eq!(ends, [end, end]);
    assert!([12, 21].contains(&end), "{end}");
}

/// By both ways in which compilers find them.
#[test]
fn thread_locals_are_found_by_both_dialects() {
    for dialect in ["-mtls-dialect=gnu", "-mtls-dialect=gnu2"] {
        let library = MappedLibrary::load(built("mapped.c", &[dialect])).unwrap();
        let (one, two) = (create(&library), create(&library));
        assert_eq!((call(&one, c"next_local"), call(&one, c"next_local")), (5, 6), "{dialect}");
        assert_eq!(call(&two, c"next_local"), 5);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!((call(&one, c"next_local"), call(&two, c"next_local")), (5, 5));
                assert_eq!(call(&one, c"local_zeros"), 1);
            });
        });
        assert_eq!((call(&one, c"next_local"), call(&one, c"local_zeros")), (7, 3), "{dialect}");
        // Their initial values are addresses in the instance.
        // SAFETY: the variable is an `int` of each instance.
        let counter = |one: &MappedInstance| unsafe { one.symbol(c"counter").unwrap().cast::<i32>().read() };
        assert_eq!((counter(&one), counter(&two)), (5, 3), "{dialect}");
        // SAFETY: the variable is an `int`, of this thread.
        assert_eq!(unsafe { one.symbol(c"local").unwrap().cast::<i32>().read() }, 8);
        // An instance that has the place of another does not get its variables.
        one.destroy().unwrap();
        assert_eq!(call(&create(&library), c"next_local"), 5);
    }
}

/// A function that takes numbers in registers of all kinds, around the use of a thread-local variable.
#[test]
fn tls_descriptors_leave_registers_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (source, library) = (directory.path().join("a.c"), directory.path().join("a.so"));
    let text = "static __thread double sum; static __thread long count;
        double add(double a, double b, double c, double d, long e, long f, long g, long h, long i, long j) {
            sum += a * 1 + b * 2 + c * 3 + d * 4; count += e + f * 2 + g * 3 + h * 4 + i * 5 + j * 6;
            return sum + (a + b + c + d) + count * 1000 + e + f + g + h + i + j; }";
    std::fs::write(&source, text).unwrap();
    build("cc", &source, &["-mtls-dialect=gnu2"], &library);
    let library = MappedLibrary::load(&library).unwrap();
    let one = create(&library);
    type Add = extern "C" fn(f64, f64, f64, f64, i64, i64, i64, i64, i64, i64) -> f64;
    // SAFETY: the function has this type in the source above.
    let add: Add = unsafe { function(&one, c"add") };
    let second = 30.0 + 10.0 + 91_000.0 + 21.0;
    assert_eq!(add(1.0, 2.0, 3.0, 4.0, 1, 2, 3, 4, 5, 6), second);
    assert_eq!(add(1.0, 2.0, 3.0, 4.0, 1, 2, 3, 4, 5, 6), second + 30.0 + 91_000.0);
}

#[test]
fn threads_of_an_instance_keep_it() {
    let library = state();
    let one = create(&library);
    assert_eq!((call(&one, c"run_thread"), call(&one, c"run_thread")), (6, 6));
    assert_eq!(call(&one, c"run_exiting_thread"), 1);
    assert_eq!(call(&one, c"start_waiting"), 0);
    let (one, error) = one.destroy().unwrap_err();
    assert_eq!(error.to_string(), "cannot destroy an instance: 1 of its threads run; end or join them first");
    assert_eq!(call(&one, c"end_waiting"), 0);
    assert_eq!(call(&one, c"next"), 2004);
    one.destroy().unwrap();
}

#[test]
fn an_instance_is_dropped_once_its_threads_have_ended() {
    let library = state();
    let one = create(&library);
    assert_eq!(call(&one, c"start_waiting"), 0);
    // SAFETY: the function has this type; the instance is leaked, as a thread runs in it.
    let end: crate::plain::Number = unsafe { function(&one, c"end_waiting") };
    drop(one);
    assert_eq!(end(), 0);
}

/// dlmopen(3) stops at a dozen.
#[test]
fn a_thousand_mappings_have_a_thousand_states() {
    let library = state();
    let instances: Vec<MappedInstance> = (0..1000).map(|_| create(&library)).collect();
    for round in 0..3 {
        for (number, instance) in instances.iter().enumerate() {
            let number = i32::try_from(number).unwrap();
            let mut result = call(instance, c"next");
            for _ in 0..number % 7 {
                result = call(instance, c"next");
            }
            assert_eq!(result, 1 + (round + 1) * (1 + number % 7));
        }
    }
    assert_eq!(instances.iter().map(|instance| call(instance, c"next_local")).max(), Some(5));
    drop(instances);
    assert_eq!(call(&create(&library), c"next"), 2);
}

const LACKS_MAPPINGS: &str = "ORRERY_TEST_LACKS_MAPPINGS";

/// What the next test runs in a process of its own.
#[test]
fn lacks_mappings() {
    if std::env::var_os(LACKS_MAPPINGS).is_none() {
        return;
    }
    let library = MappedLibrary::load(built("mapped.c", &[])).unwrap();
    let mut instances = vec![create(&library)];
    assert_eq!(call(&instances[0], c"next"), 2);
    // What the process may have for its next instances, and no more.
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    let limit = pages * 4096 + 40 * library.mapped_len() as u64;
    let limit = libc::rlimit { rlim_cur: limit, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the kernel reads one `rlimit`, which outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &raw const limit) }, 0);
    let error = loop {
        // SAFETY: nothing uses an instance once it is dropped.
        match unsafe { library.create() } {
            Ok(instance) => instances.push(instance),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, Error::AddressSpace { .. }), "{error}");
    assert!(instances.len() > 20, "{}", instances.len());
    assert_eq!(call(&instances[0], c"next"), 3);
    assert!(instances[1..].iter().all(|instance| call(instance, c"next") == 2));
    instances.pop().unwrap().destroy().unwrap();
    assert_eq!(call(&create(&library), c"next"), 2);
    println!("LACKED");
}

#[test]
fn where_addresses_end_mapped_instances_go_on() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "state::lacks_mappings", "--nocapture", "--test-threads=1"])
        .env(LACKS_MAPPINGS, "1");
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("LACKED"), "{text}");
}

#[test]
fn code_and_constants_are_shared_and_relocated_ones_are_read_only() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("shared.so");
    std::fs::copy(built("mapped.c", &[]), &path).unwrap();
    let library = MappedLibrary::load(&path).unwrap();
    let instances = [create(&library), create(&library), create(&library)];
    for instance in &instances {
        call(instance, c"next");
    }
    let field = |mapping: &str, name: &str| {
        let line = mapping.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let all = mappings("smaps", &path);
    let code: Vec<_> = all.iter().filter(|mapping| mapping.contains(" r-xp ")).collect();
    assert_eq!(code.len(), 3, "{all:?}");
    for mapping in &code {
        // The pages of the file are in memory once, and each mapping has a share.
        assert!(field(mapping, "Private_Dirty:") == 0 && field(mapping, "Rss:") > 0, "{mapping}");
        assert!(field(mapping, "Pss:") * 2 <= field(mapping, "Rss:"), "{mapping}");
    }
    let place = instances[0].symbol(c"names").unwrap().as_ptr().addr();
    let within = |mapping: &&String| {
        let range = mapping.split_whitespace().next().unwrap().split_once('-').unwrap();
        let bound = |text| usize::from_str_radix(text, 16).unwrap();
        (bound(range.0)..bound(range.1)).contains(&place)
    };
    let relocated = all.iter().find(within).unwrap();
    assert!(relocated.contains(" r--p ") && field(relocated, "Private_Dirty:") > 0, "{relocated}");
    drop(instances);
    assert_eq!(mappings("maps", &path), Vec::<String>::new());
}

/// A program that has the library itself, under its name, is not in the way, nor is its state.
#[test]
fn the_process_s_own_copy_is_one_more() {
    let path = built("mapped.c", &["-Wl,-soname,libown.so"]);
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the name is a C string; the constructor of the library changes nothing else.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!handle.is_null());
    // SAFETY: the handle is open, and the name a C string.
    let next = unsafe { libc::dlsym(handle, c"next".as_ptr()) };
    // SAFETY: the function has this type in the library's source.
    let next: crate::plain::Number = unsafe { std::mem::transmute(next) };
    let library = MappedLibrary::load(&path).unwrap();
    let one = create(&library);
    assert_eq!((next(), next(), call(&one, c"next"), next()), (2, 3, 2, 4));
    assert_eq!(call(&one, c"call_indirect"), 42);
    // SAFETY: the handle is open, and nothing of the library is used any more.
    unsafe { libc::dlclose(handle) };
    assert!(matches!(one.symbol(c"construct"), Err(Error::Symbol { .. })));
}
