//! C++: exceptions within an instance and between two, objects that are static and thread-local.

use std::ffi::c_int;

use orrery_orc_instance::{Error, MappedInstance, MappedLibrary, MappedOptions};

use crate::plain::{built, call, create, function};

type Take = extern "C" fn(c_int) -> c_int;

fn objects() -> MappedLibrary {
    MappedLibrary::load(built("mapped.cc", &[])).unwrap()
}

fn take(instance: &MappedInstance, name: &std::ffi::CStr) -> Take {
    // SAFETY: the tests name functions of this type.
    unsafe { function(instance, name) }
}

#[test]
fn exceptions_are_caught_in_the_instance() {
    let library = objects();
    assert!(library.unwinds());
    let (one, two) = (create(&library), create(&library));
    let (fails, also_fails) = (take(&one, c"fails"), take(&two, c"fails"));
    assert_eq!((fails(3), fails(4), fails(9), also_fails(4)), (4, -115, -215, -115));
    // A frame that an exception passed destroyed what it had.
    assert_eq!((call(&one, c"living"), call(&two, c"living")), (1, 1));
    one.destroy().unwrap();
    assert_eq!(also_fails(4), -215);
    // Frames of a mapping that has gone are forgotten: the next one may be where it was.
    let three = create(&library);
    assert_eq!((take(&three, c"fails")(4), also_fails(4)), (-115, -315));
}

#[test]
fn exceptions_pass_from_one_instance_to_another() {
    let library = objects();
    let (one, two) = (create(&library), create(&library));
    // SAFETY: the functions have these types in the library's source.
    let (catches, escapes): (extern "C-unwind" fn(extern "C-unwind" fn(c_int), c_int) -> c_int, _) =
        unsafe { (function(&one, c"catches"), function(&two, c"escapes")) };
    assert_eq!((catches(escapes, 4), catches(escapes, 3)), (1, 0));
    assert_eq!((call(&one, c"living"), call(&two, c"living")), (1, 1));
}

#[test]
fn a_hundred_instances_throw() {
    let library = objects();
    let instances: Vec<_> = (0..100).map(|_| create(&library)).collect();
    for round in 1..3 {
        for instance in instances.iter().rev() {
            assert_eq!(take(instance, c"fails")(4), -15 - round * 100);
        }
    }
}

#[test]
fn exceptions_pass_through_c_where_that_is_asked_for() {
    let path = built("mapped.c", &[]);
    assert!(!MappedLibrary::load(&path).unwrap().unwinds());
    let library = MappedLibrary::load_with(&path, MappedOptions { unwind: Some(true) }).unwrap();
    assert!(library.unwinds());
    let (c, cc) = (create(&library), create(&objects()));
    type Escapes = extern "C-unwind" fn(c_int);
    // SAFETY: the functions have these types in the libraries' sources.
    let (catches, escapes, set_passed, pass): (
        extern "C-unwind" fn(Escapes, c_int) -> c_int,
        Escapes,
        extern "C" fn(Escapes),
        Escapes,
    ) = unsafe {
        (
            function(&cc, c"catches"),
            function(&cc, c"escapes"),
            function(&c, c"set_passed"),
            function(&c, c"pass"),
        )
    };
    set_passed(escapes);
    assert_eq!((catches(pass, 4), call(&c, c"next")), (1, 12));
    assert_eq!((catches(pass, 3), call(&c, c"next")), (0, 123));
}

#[test]
fn objects_are_constructed_and_destroyed_in_each_instance() {
    let library = objects();
    let (one, two) = (create(&library), create(&library));
    let mut ended = 0;
    // SAFETY: the function has this type in the library's source, and the word outlives the instance.
    let note: unsafe extern "C" fn(*mut c_int) = unsafe { function(&one, c"note_end") };
    // SAFETY: the word outlives the instances, which write to it when they end.
    unsafe { note(&raw mut ended) };
    assert_eq!((call(&one, c"extend"), call(&one, c"extend"), call(&two, c"extend")), (6, 7, 6));
    assert_eq!((call(&one, c"living"), call(&two, c"living")), (2, 2));
    // A thread's object ends with the thread.
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            assert_eq!(call(&one, c"extend"), 6);
            assert_eq!(call(&one, c"living"), 3);
        });
        thread.join().unwrap();
    });
    assert_eq!((call(&one, c"living"), ended), (2, 1));
    // This thread's and the static one end with the instance.
    one.destroy().unwrap();
    assert_eq!(ended, 3);
    assert_eq!(call(&two, c"living"), 2);
}

#[test]
fn an_instance_with_objects_of_another_thread_is_not_destroyed() {
    let library = objects();
    let one = create(&library);
    let (begun, wait) = (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
    let extend = take(&one, c"extend") as usize;
    let thread = std::thread::spawn(move || {
        // SAFETY: the function has this type, and the instance is there as long as this thread.
        let extend: crate::plain::Number = unsafe { std::mem::transmute(extend) };
        begun.0.send(extend()).unwrap();
        let _ended = wait.1.recv();
    });
    assert_eq!(begun.1.recv().unwrap(), 6);
    let (one, error) = one.destroy().unwrap_err();
    assert!(matches!(error, Error::Threads { count: 1, .. }), "{error}");
    drop(wait.0);
    thread.join().unwrap();
    one.destroy().unwrap();
}

/// `std::call_once` uses a thread-local variable of libstdc++, which the process has.
#[test]
fn thread_locals_of_other_libraries_are_found() {
    let library = objects();
    let (one, two) = (create(&library), create(&library));
    let (once, other) = (take(&one, c"once"), take(&two, c"once"));
    assert_eq!((once(4), once(5), other(6)), (4, 4, 6));
}
