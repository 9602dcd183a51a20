//! SQLite in instances of wasmtime, each of which has its own memory and reaches nothing else.
//!
//! The amalgamation that the native builds have is compiled once for wasm32, and that by Cranelift for each of two allocators: one that
//! maps 4 GiB of addresses for each instance when it is created, and a pool that has done so before. Memories are copied on write.

use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use orrery_orc_instance::{Instance, Library};
use orrery_sys::scheduling::thread_cpu_time;
use orrery_testing::cls::package_directory;
use orrery_testing::{root, target_directory};
use wasmtime::{
    Config, Engine, InstancePre, Linker, Memory, Module, OptLevel, PoolingAllocationConfig, Store, TypedFunc,
};

use super::fresh::{Taken, Way, each, private_memory};
use super::sqlite::{self, Statement};
use super::{DATABASES, calls, child, nanoseconds};
use crate::Skipped;

/// What is exported besides `row`, which the C source exports itself.
const EXPORTS: &str = "-Wl,--export=malloc,--export=free,--export=sqlite3_open,--export=sqlite3_exec,--export=sqlite3_prepare_v2,\
     --export=sqlite3_close,--export=sqlite3_memory_used";
/// How many instances of a pool there are at most.
const POOL: u32 = 10_000;
/// What the memory of one may grow to, in bytes.
const LARGEST: usize = 64 << 20;
const ROW: i32 = 100;

/// Compiles SQLite for wasm32 and for this processor, unless that was done; returns the files for [`Way::Wasm`] and [`Way::WasmPool`].
///
/// # Errors
/// [`Skipped`] where clang cannot compile for wasm32; otherwise wasmtime does not take the module.
pub fn compiled() -> Result<[PathBuf; 2]> {
    let directory = target_directory().join("cls");
    std::fs::create_dir_all(&directory)?;
    let module = directory.join("sqlite.wasm");
    let source = package_directory("libsqlite3-sys").join("sqlite3");
    let mut clang = Command::new("clang");
    clang.args(["--target=wasm32-wasi", "-O2", "-w", "-nostartfiles", "-Wl,--no-entry", EXPORTS]);
    clang.args(["-DSQLITE_THREADSAFE=0", "-DSQLITE_OMIT_LOAD_EXTENSION"]);
    // There are no files and no time zones, and so no imports.
    clang.args(["-DSQLITE_OS_OTHER", "-DSQLITE_OMIT_LOCALTIME", "-I"]).arg(&source);
    let own = root().join("bench/rivals/sqlite_wasm.c");
    clang.arg(source.join("sqlite3.c")).arg(&own).arg("-o").arg(&module);
    let line = format!("{clang:?}");
    let record = module.with_extension("command");
    let age = |path: &Path| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    if std::fs::read_to_string(&record).ok().as_ref() != Some(&line) || age(&module) < age(&own) {
        let output = clang.output().map_err(|error| Skipped(format!("there is no clang: {error}")))?;
        if !output.status.success() {
            let errors = String::from_utf8_lossy(&output.stderr);
            let first = errors.lines().find(|line| line.contains("error")).unwrap_or_default().to_owned();
            let reason =
                format!("clang cannot compile for wasm32 (wasi-libc, libclang-rt-dev-wasm32): {first}");
            bail!(Skipped(reason));
        }
        std::fs::write(&record, line)?;
    }
    let compile = |way: Way| -> Result<PathBuf> {
        let path = directory.join(if way == Way::WasmPool { "sqlite-pool.cwasm" } else { "sqlite.cwasm" });
        // SAFETY: an earlier run has written it here.
        let is_usable = |path: &Path| unsafe { Compiled::load(way, path) }.is_ok();
        // Of another version of wasmtime it cannot be loaded.
        if age(&path) < age(&module) || !is_usable(&path) {
            let compiled = Module::from_file(&engine(way)?, &module).and_then(|module| module.serialize());
            std::fs::write(&path, compiled.map_err(plain)?)?;
        }
        Ok(path)
    };
    Ok([compile(Way::Wasm)?, compile(Way::WasmPool)?])
}

/// Returns an error of wasmtime, whose type is none of the standard library's, as the others.
fn plain(error: wasmtime::Error) -> anyhow::Error {
    anyhow!("{error:#}")
}

fn engine(way: Way) -> Result<Engine> {
    let mut config = Config::new();
    config.cranelift_opt_level(OptLevel::Speed).memory_init_cow(true);
    if way == Way::WasmPool {
        let mut pool = PoolingAllocationConfig::new();
        pool.total_core_instances(POOL).total_memories(POOL).total_tables(POOL);
        pool.max_memory_size(LARGEST);
        config.allocation_strategy(pool);
    }
    Engine::new(&config).map_err(plain)
}

/// SQLite as a module, ready to be instantiated.
#[expect(missing_debug_implementations, reason = "wasmtime's types have none that says anything")]
pub struct Compiled {
    engine: Engine,
    ready: InstancePre<()>,
}

impl Compiled {
    /// Loads what [`compiled`] has compiled for this way.
    ///
    /// # Errors
    /// It is for another engine, or imports something.
    ///
    /// # Safety
    /// The file is of [`Module::serialize`], whole or of another version, and is not written while what is returned is used.
    pub unsafe fn load(way: Way, path: &Path) -> Result<Self> {
        let engine = engine(way)?;
        // SAFETY: the file is of `Module::serialize` and is not written (# Safety).
        let module = unsafe { Module::deserialize_file(&engine, path) }.map_err(plain)?;
        let ready = Linker::new(&engine).instantiate_pre(&module).map_err(plain)?;
        Ok(Self { engine, ready })
    }

    /// Makes an instance.
    ///
    /// # Errors
    /// There are no addresses, mappings or places in the pool for it.
    pub fn create(&self) -> Result<(Store<()>, wasmtime::Instance)> {
        let mut store = Store::new(&self.engine, ());
        let instance = self.ready.instantiate(&mut store).map_err(plain)?;
        Ok((store, instance))
    }
}

/// SQLite in an instance, by the functions that the benchmark calls.
#[expect(missing_debug_implementations, reason = "wasmtime's types have none that says anything")]
pub struct Sqlite {
    store: Store<()>,
    memory: Memory,
    malloc: TypedFunc<i32, i32>,
    free: TypedFunc<i32, ()>,
    open: TypedFunc<(i32, i32), i32>,
    exec: TypedFunc<(i32, i32, i32, i32, i32), i32>,
    prepare: TypedFunc<(i32, i32, i32, i32, i32), i32>,
    close: TypedFunc<i32, i32>,
    row: TypedFunc<i32, i32>,
    used: TypedFunc<(), i64>,
}

impl Sqlite {
    /// Finds the functions of an instance.
    ///
    /// # Errors
    /// One is not there.
    pub fn new((mut store, instance): (Store<()>, wasmtime::Instance)) -> Result<Self> {
        Ok(Self {
            memory: instance.get_memory(&mut store, "memory").context("the module has no memory")?,
            malloc: instance.get_typed_func(&mut store, "malloc").map_err(plain)?,
            free: instance.get_typed_func(&mut store, "free").map_err(plain)?,
            open: instance.get_typed_func(&mut store, "sqlite3_open").map_err(plain)?,
            exec: instance.get_typed_func(&mut store, "sqlite3_exec").map_err(plain)?,
            prepare: instance.get_typed_func(&mut store, "sqlite3_prepare_v2").map_err(plain)?,
            close: instance.get_typed_func(&mut store, "sqlite3_close").map_err(plain)?,
            row: instance.get_typed_func(&mut store, "row").map_err(plain)?,
            used: instance.get_typed_func(&mut store, "sqlite3_memory_used").map_err(plain)?,
            store,
        })
    }

    /// Calls with a copy of bytes in the instance's memory; returns what the call returned, and the bytes after it.
    fn with<const N: usize>(
        &mut self,
        bytes: [u8; N],
        text: &[u8],
        call: impl FnOnce(&mut Self, i32, i32) -> Result<i32>,
    ) -> Result<(i32, [u8; N])> {
        let at = self.malloc.call(&mut self.store, i32::try_from(N + text.len())?).map_err(plain)?;
        ensure!(at != 0, "the instance has no memory");
        let (place, behind) = (at.cast_unsigned() as usize, at + i32::try_from(N)?);
        self.memory.write(&mut self.store, place, &bytes)?;
        self.memory.write(&mut self.store, place + N, text)?;
        let code = call(self, at, behind)?;
        let mut after = [0; N];
        self.memory.read(&self.store, place, &mut after)?;
        self.free.call(&mut self.store, at).map_err(plain)?;
        Ok((code, after))
    }

    /// Opens a database in memory; returns its address in the instance.
    ///
    /// # Errors
    /// The instance has no memory, or traps.
    pub fn open(&mut self) -> Result<i32> {
        let (code, database) = self.with([0; 4], b":memory:\0", |own, out, name| {
            own.open.call(&mut own.store, (name, out)).map_err(plain)
        })?;
        ensure!(code == 0, "cannot open a database: {code}");
        Ok(i32::from_le_bytes(database))
    }

    fn exec(&mut self, database: i32, statements: &[u8]) -> Result<()> {
        let (code, []) = self.with([], statements, |own, _, text| {
            own.exec.call(&mut own.store, (database, text, 0, 0, 0)).map_err(plain)
        })?;
        ensure!(code == 0, "a statement failed: {code}");
        Ok(())
    }

    /// As [`sqlite::Sqlite::prepared`].
    ///
    /// # Errors
    /// The instance has no memory, or traps.
    pub fn prepared(&mut self) -> Result<i32> {
        let database = self.open()?;
        self.exec(database, sqlite::TABLE.to_bytes_with_nul())?;
        let (code, statement) = self.with([0; 4], sqlite::ROW.to_bytes_with_nul(), |own, out, text| {
            own.prepare.call(&mut own.store, (database, text, -1, out, 0)).map_err(plain)
        })?;
        ensure!(code == 0, "cannot prepare a statement: {code}");
        Ok(i32::from_le_bytes(statement))
    }

    /// Finds a row, by one call into the instance.
    ///
    /// # Panics
    /// Where there is none.
    #[inline]
    pub fn row(&mut self, statement: i32) {
        assert!(self.row.call(&mut self.store, statement).is_ok_and(|code| code == ROW));
    }

    /// As [`sqlite::Sqlite::work`].
    ///
    /// # Errors
    /// A statement failed, or the instance traps.
    pub fn work(&mut self) -> Result<()> {
        let database = self.open()?;
        self.exec(database, sqlite::WORK.to_bytes_with_nul())?;
        for _ in 0..sqlite::SMALL_STATEMENTS {
            self.exec(database, sqlite::SMALL.to_bytes_with_nul())?;
        }
        ensure!(self.close.call(&mut self.store, database).map_err(plain)? == 0, "cannot close a database");
        Ok(())
    }
}

/// As other ways of [`super::fresh`].
///
/// # Safety
/// As of [`Compiled::load`].
pub(super) unsafe fn taken(way: Way, compiled: &Path, count: usize) -> Result<Taken> {
    // SAFETY: the caller's promise.
    let library = unsafe { Compiled::load(way, compiled) }?;
    let mut instances = Vec::with_capacity(count);
    let (before, begin) = (private_memory("self")?, thread_cpu_time());
    while instances.len() < count {
        match library.create() {
            Ok(instance) => instances.push(instance),
            Err(error) if instances.is_empty() => return Err(error),
            Err(_) => break,
        }
    }
    let made = instances.len();
    let create = each(thread_cpu_time() - begin, made);
    let kib = (private_memory("self")? - before) / made as f64;
    let begin = thread_cpu_time();
    drop(instances);
    Ok(Taken { count: made as f64, kib, create, destroy: each(thread_cpu_time() - begin, made) })
}

/// The first argument of the process that measures instances that each have a database.
const MEASURE: &str = "measure-databases";

/// Measures instances with a database each, in a process of its own: KiB of each, and microseconds to make it.
///
/// # Errors
/// An instance cannot be made, or the process fails.
pub fn measure_databases(way: Way, count: usize, library: &Path) -> Result<(f64, f64)> {
    let [kib, create] = child::measure(MEASURE, [&way.to_string(), &count.to_string()], library)?;
    Ok((kib, create))
}

/// Does what [`measure_databases`] started this process for, and returns whether it did.
///
/// # Errors
/// An instance cannot be made.
pub fn serve() -> Result<bool> {
    let Some((way, count, path)) = child::arguments(MEASURE) else { return Ok(false) };
    let count = count.parse().context("no number of instances")?;
    let path = Path::new(&path);
    let way = [Way::Wasm, Way::WasmPool].into_iter().find(|known| known.to_string() == way);
    let (kib, create) = if let Some(way) = way {
        // SAFETY: `measure_databases` is given what `compiled` returned.
        let library = unsafe { Compiled::load(way, path) }?;
        with_databases(count, || {
            let mut own = Sqlite::new(library.create()?)?;
            own.prepared()?;
            Ok(own)
        })?
    } else {
        let library = Library::load(path)?;
        // SAFETY: `measure_databases` is given SQLite, built with the pass; it lives until this returns.
        let functions = unsafe { sqlite::Sqlite::of_instances(&library) }?;
        with_databases(count, || {
            let mut instance = library.create()?;
            instance.enter()?.run(|| functions.prepared())?;
            Ok(instance)
        })?
    };
    println!("{kib} {create}");
    Ok(true)
}

fn with_databases<T>(count: usize, mut create: impl FnMut() -> Result<T>) -> Result<(f64, f64)> {
    let mut instances = Vec::with_capacity(count);
    let (before, begin) = (private_memory("self")?, thread_cpu_time());
    for _ in 0..count {
        instances.push(create()?);
    }
    let create = each(thread_cpu_time() - begin, count);
    Ok(((private_memory("self")? - before) / count as f64, create))
}

/// What calls and work take in ours and in wasmtime's, in pairs.
#[derive(Clone, Debug, Default)]
pub struct Calls {
    /// Nanoseconds of a row, over 500 instances.
    pub many: Vec<(f64, f64)>,
    /// Nanoseconds of a row, in one instance.
    pub one: Vec<(f64, f64)>,
    /// Milliseconds of work of all kinds.
    pub work: Vec<(f64, f64)>,
    /// Nanoseconds of a call of `sqlite3_memory_used`, with entering and leaving.
    pub call: Vec<(f64, f64)>,
}

/// Measures calls over 500 instances, and in one, of ours and of wasmtime's.
///
/// # Errors
/// An instance cannot be made, or a statement fails.
///
/// # Safety
/// The functions are those of the library; `compiled` is what [`compiled`] returned for [`Way::Wasm`].
pub unsafe fn measure_calls(
    library: &Library,
    ours: sqlite::Sqlite,
    compiled: &Path,
    rounds: usize,
) -> Result<Calls> {
    const COUNT: usize = 1_000_000;
    // SAFETY: `compiled` has written the file (# Safety), and does not while this runs.
    let theirs = unsafe { Compiled::load(Way::Wasm, compiled) }?;
    let mut entered: Vec<(Instance, Statement)> = Vec::new();
    let mut others: Vec<(Sqlite, i32)> = Vec::new();
    for _ in 0..DATABASES {
        let mut instance = library.create()?;
        let statement = instance.enter()?.run(|| ours.prepared())?;
        entered.push((instance, statement));
        let mut other = Sqlite::new(theirs.create()?)?;
        let statement = other.prepared()?;
        others.push((other, statement));
    }
    let mut found = Calls::default();
    for _ in 0..rounds {
        let mut own = |at: usize| {
            let (instance, statement) = &mut entered[at];
            if let Ok(guard) = instance.enter() {
                // SAFETY: the statement is prepared, in this instance.
                unsafe { ours.row(*statement) };
                drop(guard);
            }
        };
        let mut other = |at: usize| {
            let (instance, statement) = &mut others[at];
            instance.row(*statement);
        };
        found.many.push((calls(DATABASES, &mut own), calls(DATABASES, &mut other)));
        found.one.push((calls(1, &mut own), calls(1, &mut other)));

        let begin = thread_cpu_time();
        entered[0].0.enter()?.run(|| ours.work())?;
        let own = nanoseconds(begin, 1_000_000);
        let begin = thread_cpu_time();
        others[0].0.work()?;
        found.work.push((own, nanoseconds(begin, 1_000_000)));

        let begin = thread_cpu_time();
        for _ in 0..COUNT {
            // SAFETY: the function takes nothing, and the library lives.
            black_box(entered[0].0.enter()?.run(|| unsafe { (ours.memory_used)() }));
        }
        let own = nanoseconds(begin, COUNT);
        let other = &mut others[0].0;
        let begin = thread_cpu_time();
        for _ in 0..COUNT {
            black_box(other.used.call(&mut other.store, ()).map_err(plain)?);
        }
        found.call.push((own, nanoseconds(begin, COUNT)));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_of_wasmtime_are_apart_on_demand_and_from_a_pool() {
        let text = r#"(module (memory (export "memory") 1) (data (i32.const 8) "\05")
            (func (export "next") (result i32)
                (i32.store (i32.const 8) (i32.add (i32.load (i32.const 8)) (i32.const 1)))
                (i32.load (i32.const 8))))"#;
        let file = tempfile::NamedTempFile::new().unwrap();
        for way in [Way::Wasm, Way::WasmPool] {
            let module = Module::new(&engine(way).unwrap(), wat::parse_str(text).unwrap()).unwrap();
            std::fs::write(file.path(), module.serialize().unwrap()).unwrap();
            // SAFETY: the module was serialized to this file, and is written again when nothing of it is left.
            let library = unsafe { Compiled::load(way, file.path()) }.unwrap();
            let mut instances: Vec<_> = (0..3).map(|_| library.create().unwrap()).collect();
            for expected in [6, 7] {
                for (store, instance) in &mut instances {
                    let next = instance.get_typed_func::<(), i32>(&mut *store, "next").unwrap();
                    assert_eq!(next.call(&mut *store, ()).unwrap(), expected, "{way}");
                }
            }
        }
    }
}
