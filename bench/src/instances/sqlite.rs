//! SQLite, plain or with instances, by the functions that the benchmark calls.

use std::ffi::{CStr, c_char, c_int, c_void};

use anyhow::{Result, ensure};
use orrery_orc_instance::{Library, MappedInstance};

/// Makes a table with a row.
pub(super) const TABLE: &CStr = c"create table t(a integer primary key, b); insert into t values(1, 'text')";
/// Finds that row.
pub(super) const ROW: &CStr = c"select b from t where a = 1";
/// Work of the kinds that SQLite does.
pub(super) const WORK: &CStr = c"create table t(a integer primary key, b text); \
    with recursive c(x) as (select 1 union all select x + 1 from c where x < 20000) \
    insert into t select x, 'text' || x from c; create index i on t(b); \
    select count(*) from t where b like '%77%'; select sum(length(b)) from t; \
    update t set b = b || 'x' where a % 3 = 0; delete from t where a % 7 = 0";
/// Small statements that follow on [`WORK`].
pub(super) const SMALL: &CStr =
    c"insert into t(b) values('hello'); select b from t where a = last_insert_rowid()";
/// How often [`SMALL`] follows.
pub(super) const SMALL_STATEMENTS: usize = 2000;

/// `sqlite3 *`.
pub type Database = *mut c_void;
/// Stands for `sqlite3_stmt *`.
pub type Statement = *mut c_void;

/// SQLite's functions, as far as they are called.
#[derive(Clone, Copy, Debug)]
pub struct Sqlite {
    open: unsafe extern "C" fn(*const c_char, *mut Database) -> c_int,
    exec:
        unsafe extern "C" fn(Database, *const c_char, *const c_void, *mut c_void, *mut *mut c_char) -> c_int,
    prepare:
        unsafe extern "C" fn(Database, *const c_char, c_int, *mut Statement, *mut *const c_char) -> c_int,
    step: unsafe extern "C" fn(Statement) -> c_int,
    reset: unsafe extern "C" fn(Statement) -> c_int,
    close: unsafe extern "C" fn(Database) -> c_int,
    /// `sqlite3_memory_used`, which reads a variable.
    pub memory_used: unsafe extern "C" fn() -> i64,
}

/// Returns a function pointer of what the symbol table has as an address.
///
/// # Safety
/// `F` is the type of a pointer to the function that is there.
pub(super) unsafe fn function<F: Copy>(address: *mut c_void) -> F {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: the caller's promise; both are as large.
    unsafe { std::mem::transmute_copy(&address) }
}

impl Sqlite {
    /// # Safety
    /// `find` returns addresses of SQLite's functions.
    unsafe fn new(find: impl Fn(&CStr) -> Result<*mut c_void>) -> Result<Self> {
        // SAFETY: these are the types that sqlite3.h declares.
        unsafe {
            Ok(Self {
                open: function(find(c"sqlite3_open")?),
                exec: function(find(c"sqlite3_exec")?),
                prepare: function(find(c"sqlite3_prepare_v2")?),
                step: function(find(c"sqlite3_step")?),
                reset: function(find(c"sqlite3_reset")?),
                close: function(find(c"sqlite3_close")?),
                memory_used: function(find(c"sqlite3_memory_used")?),
            })
        }
    }

    /// Finds the functions in a library that has instances.
    ///
    /// # Errors
    /// A function is not there.
    ///
    /// # Safety
    /// The library is SQLite, and stays loaded while what is returned is used.
    pub unsafe fn of_instances(library: &Library) -> Result<Self> {
        // SAFETY: the library is SQLite (# Safety), so that what `symbol` finds under these names has the types of sqlite3.h.
        unsafe { Self::new(|name| Ok(library.symbol(name)?.as_ptr())) }
    }

    /// Finds the functions of an instance that is a mapping of the plain library.
    ///
    /// # Errors
    /// A function is not there.
    ///
    /// # Safety
    /// The library is SQLite, and the instance is there while what is returned is used.
    pub unsafe fn of_mapped(instance: &MappedInstance) -> Result<Self> {
        // SAFETY: the library is SQLite (# Safety), so that what `symbol` finds under these names has the types of sqlite3.h.
        unsafe { Self::new(|name| Ok(instance.symbol(name)?.as_ptr())) }
    }

    /// Finds the functions in a library that dlopen(3) loaded.
    ///
    /// # Errors
    /// A function is not there.
    ///
    /// # Safety
    /// The handle is that of SQLite, which stays loaded while what is returned is used.
    pub unsafe fn of_handle(handle: *mut c_void) -> Result<Self> {
        // SAFETY: the handle is that of SQLite, which stays loaded (# Safety).
        unsafe {
            Self::new(|name| {
                let address = libc::dlsym(handle, name.as_ptr());
                ensure!(!address.is_null(), "SQLite has no {}", name.to_string_lossy());
                Ok(address)
            })
        }
    }

    /// Opens a database in memory.
    ///
    /// # Errors
    /// SQLite has no memory.
    pub fn open(self) -> Result<Database> {
        let mut database = std::ptr::null_mut();
        // SAFETY: the name is a C string, the place is the caller's.
        let code = unsafe { (self.open)(c":memory:".as_ptr(), &raw mut database) };
        ensure!(code == 0, "cannot open a database: {code}");
        Ok(database)
    }

    fn exec(self, database: Database, statements: &CStr) -> Result<()> {
        let (none, null) = (std::ptr::null(), std::ptr::null_mut());
        // SAFETY: the database is open, the statements are a C string, and the null pointers stand for no
        // function and no error text.
        let code = unsafe { (self.exec)(database, statements.as_ptr(), none, null, std::ptr::null_mut()) };
        ensure!(code == 0, "a statement failed: {code}");
        Ok(())
    }

    /// Returns a statement that finds a row of a table.
    ///
    /// # Errors
    /// SQLite has no memory.
    pub fn prepared(self) -> Result<Statement> {
        let database = self.open()?;
        self.exec(database, TABLE)?;
        let (mut statement, text) = (std::ptr::null_mut(), ROW);
        // SAFETY: the database is open, and the places are the caller's.
        let code =
            unsafe { (self.prepare)(database, text.as_ptr(), -1, &raw mut statement, std::ptr::null_mut()) };
        ensure!(code == 0, "cannot prepare a statement: {code}");
        Ok(statement)
    }

    /// One call: a row of a table.
    ///
    /// # Panics
    /// Where there is none.
    ///
    /// # Safety
    /// [`Sqlite::prepared`] returned the statement; the instance that it is of is entered.
    #[inline]
    pub unsafe fn row(self, statement: Statement) {
        const ROW: c_int = 100;
        // SAFETY: `prepared` returned the statement, and its instance is entered (# Safety).
        unsafe {
            assert_eq!((self.step)(statement), ROW);
            (self.reset)(statement);
        }
    }

    /// Does work of the kinds that SQLite does: inserts, an index, searches, updates, deletions, small statements.
    ///
    /// # Errors
    /// A statement failed.
    pub fn work(self) -> Result<()> {
        let database = self.open()?;
        self.exec(database, WORK)?;
        for _ in 0..SMALL_STATEMENTS {
            self.exec(database, SMALL)?;
        }
        // SAFETY: the database is open, no statement of it is left, and it is not used any more.
        ensure!(unsafe { (self.close)(database) } == 0, "cannot close a database");
        Ok(())
    }
}
