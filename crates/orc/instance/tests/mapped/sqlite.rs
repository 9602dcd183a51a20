//! Libraries of the distribution, as they are installed.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;

use orrery_orc_instance::{Error, MappedInstance, MappedLibrary};

use crate::plain::{create, function};

/// Returns an installed library.
fn installed(name: &str) -> Option<PathBuf> {
    let found = ["/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib"]
        .into_iter()
        .map(|directory| PathBuf::from(directory).join(name))
        .find(|path| path.exists());
    if found.is_none() {
        orrery_testing::skipped!("there is no {name}");
    }
    found
}

type Row = extern "C" fn(*mut c_void, c_int, *mut *mut c_char, *mut *mut c_char) -> c_int;

/// SQLite's functions in an instance, and a database of it.
struct Sqlite {
    exec: unsafe extern "C" fn(*mut c_void, *const c_char, Row, *mut c_void, *mut *mut c_char) -> c_int,
    close: unsafe extern "C" fn(*mut c_void) -> c_int,
    memory_used: extern "C" fn() -> i64,
    soft_limit: extern "C" fn(i64) -> i64,
    database: *mut c_void,
    _instance: MappedInstance,
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
    fn open(library: &MappedLibrary) -> Self {
        let instance = create(library);
        // SAFETY: the functions have these types in SQLite's header.
        unsafe {
            let open: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int =
                function(&instance, c"sqlite3_open");
            let mut database = std::ptr::null_mut();
            assert_eq!(open(c":memory:".as_ptr(), &raw mut database), 0);
            Self {
                exec: function(&instance, c"sqlite3_exec"),
                close: function(&instance, c"sqlite3_close"),
                memory_used: function(&instance, c"sqlite3_memory_used"),
                soft_limit: function(&instance, c"sqlite3_soft_heap_limit64"),
                database,
                _instance: instance,
            }
        }
    }

    fn run(&self, statement: &str) -> String {
        let statement = CString::new(statement).unwrap();
        let mut lines = String::new();
        let (none, text) = (std::ptr::null_mut(), statement.as_ptr());
        // SAFETY: the database is open, and `lines` outlives the call, in which the row function alone uses it.
        let code = unsafe { (self.exec)(self.database, text, row, (&raw mut lines).cast(), none) };
        assert_eq!(code, 0, "{statement:?}");
        lines
    }
}

impl Drop for Sqlite {
    fn drop(&mut self) {
        // SAFETY: the database is open, and used no more.
        assert_eq!(unsafe { (self.close)(self.database) }, 0);
        assert_eq!((self.memory_used)(), 0);
    }
}

#[test]
fn a_hundred_of_the_distribution_s_sqlites_are_apart() {
    let Some(path) = installed("libsqlite3.so.0") else { return };
    let library = MappedLibrary::load(path).unwrap();
    let all: Vec<Sqlite> = (0..100).map(|_| Sqlite::open(&library)).collect();
    for (number, one) in all.iter().enumerate() {
        (one.soft_limit)(1_000_000 + i64::try_from(number).unwrap());
        assert_eq!(one.run("create table t(a integer primary key, b text); create index i on t(b)"), "");
    }
    // Statement by statement, each in all of them: whatever one keeps in variables is in the way of the next.
    for step in 0..20 {
        for (number, one) in all.iter().enumerate() {
            let value = number * 1000 + step;
            one.run(&format!("insert into t(b) values(printf('%06d', {value})), ('{value}')"));
            let (rows, last) = (2 * (step + 1), format!("{value:06}"));
            assert_eq!(one.run("select count(*), last_insert_rowid() from t"), format!("{rows}|{rows}|"));
            assert_eq!(one.run(&format!("select a from t where b = '{last}'")), format!("{}|", rows - 1));
        }
    }
    for (number, one) in all.iter().enumerate().rev() {
        assert_eq!((one.soft_limit)(-1), 1_000_000 + i64::try_from(number).unwrap());
        let expected: usize = (0..20).map(|step| 2 * (number * 1000 + step)).sum();
        assert_eq!(one.run("select sum(b), sqlite_version() >= '3' from t"), format!("{expected}|1|"));
        assert!((one.memory_used)() > 10_000);
    }
    // Half of them end, and the others are as they were.
    let (_ended, left): (Vec<_>, Vec<_>) =
        all.into_iter().enumerate().partition(|(number, _)| number % 2 == 0);
    drop(_ended);
    for (number, one) in &left {
        assert_eq!(one.run("select min(b), count(*) from t"), format!("{:06}|40|", number * 1000));
    }
}

/// Threads work in instances of their own at a time.
#[test]
fn threads_have_a_sqlite_each() {
    let Some(path) = installed("libsqlite3.so.0") else { return };
    let library = MappedLibrary::load(path).unwrap();
    std::thread::scope(|scope| {
        for number in 0..4_usize {
            let library = &library;
            scope.spawn(move || {
                for round in 0..20 {
                    let one = Sqlite::open(library);
                    one.run("create table t(a)");
                    for row in 0..20 {
                        one.run(&format!("insert into t values({})", row * number + round));
                    }
                    let expected = 190 * number + 20 * round;
                    assert_eq!(one.run("select sum(a) from t"), format!("{expected}|"));
                }
            });
        }
    });
}

/// Others, some with versions of their own symbols, many relocations, or thread-local variables.
#[test]
fn libraries_of_the_distribution_have_instances() {
    let numbers: [(&str, &CStr); 5] = [
        ("libz.so.1", c"zlibVersion"),
        ("libexpat.so.1", c"XML_ExpatVersion"),
        ("libxml2.so.2", c"xmlCheckVersion"),
        ("libcrypto.so.3", c"OpenSSL_version_num"),
        ("libstdc++.so.6", c"_ZSt9terminatev"),
    ];
    for (name, symbol) in numbers {
        let Some(path) = installed(name) else { continue };
        let library = MappedLibrary::load(&path).unwrap();
        let (one, two) = (create(&library), create(&library));
        assert_ne!(one.symbol(symbol).unwrap(), two.symbol(symbol).unwrap(), "{name}");
        one.destroy().unwrap();
        two.destroy().unwrap();
    }
    // The mathematical functions set the C library's errno at its fixed offset.
    let Some(path) = installed("libm.so.6") else { return };
    assert!(matches!(MappedLibrary::load(path), Err(Error::InitialExec { .. })));
}

#[test]
fn crypto_digests_in_instances() {
    let Some(path) = installed("libcrypto.so.3") else { return };
    let library = MappedLibrary::load(path).unwrap();
    type Digest = unsafe extern "C" fn(*const u8, usize, *mut u8) -> *mut u8;
    let expected = [0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea];
    for _ in 0..3 {
        let instances = [create(&library), create(&library)];
        for instance in &instances {
            // SAFETY: the function has this type in OpenSSL's header.
            let sha256: Digest = unsafe { function(instance, c"SHA256") };
            let mut digest = [0; 32];
            // SAFETY: the input has three bytes, and the digest 32.
            unsafe { sha256(b"abc".as_ptr(), 3, digest.as_mut_ptr()) };
            assert_eq!(digest[..8], expected);
        }
    }
}
