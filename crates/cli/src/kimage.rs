//! `orrery kimage`: what a machine's memory holds, read from outside: its processes, their files, their memory.

use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand, ValueEnum};
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use orrery_kimage::{
    ControlGroup, Entry, FileKind, IdKind, Kernel, Layout, Mapping, OpenFile, PageOwner, Problem, Task, Walk,
};
use serde::Serialize;

/// Look into a Linux machine's memory, dead or alive: a hypervisor's memory file or an ELF core of the machine.
///
/// No symbol file is needed, and no help from the machine: kernels from 6.0 on that describe their types (BTF) explain
/// themselves. Damaged structures cost only what they describe; what was left out is told on standard error.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
#[command(defer = true)]
enum Command {
    /// List the processes
    Ps(Image),
    /// List the open files of all processes, or of one
    Files {
        #[command(flatten)]
        image: Image,
        /// The process whose files to list
        pid: Option<i32>,
    },
    /// Show what a process' memory consists of, and how much of it is there
    Mem {
        #[command(flatten)]
        image: Image,
        /// The process
        pid: i32,
    },
    /// Write a process' memory and registers as an ELF core, for gdb
    Gcore {
        #[command(flatten)]
        image: Image,
        /// The process
        pid: i32,
        /// Where to write it
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
    },
}

#[derive(Args)]
struct Image {
    /// A memory file, such as QEMU's memory-backend-file, or an ELF core, as from dump-guest-memory
    image: PathBuf,
    /// How plain memory is laid out; ELF cores say it themselves
    #[arg(long, value_enum, default_value_t = Machine::Q35)]
    machine: Machine,
    /// Print JSON, whose keys stay the same from release to release
    #[arg(long)]
    json: bool,
}

/// Where a machine puts the memory that does not fit below its devices.
#[derive(Clone, Copy, ValueEnum)]
enum Machine {
    /// QEMU's q35
    Q35,
    /// QEMU's pc (i440fx)
    Pc,
    /// Without holes
    Linear,
}

impl Image {
    fn open(&self) -> Result<Kernel> {
        let layout = match self.machine {
            Machine::Q35 => Layout::Q35,
            Machine::Pc => Layout::Pc,
            Machine::Linear => Layout::Linear,
        };
        let memory = orrery_kimage::open_memory(&self.image, layout)?;
        Kernel::open(Box::new(memory)).with_context(|| format!("cannot read {}", self.image.display()))
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    match &arguments.command {
        Command::Ps(image) => processes(image),
        Command::Files { image, pid } => files(image, *pid),
        Command::Mem { image, pid } => memory(image, *pid),
        Command::Gcore { image, pid, output } => core(image, *pid, output),
    }
}

/// Prints what was left out.
fn report_omitted(problems: &[Problem], whose: &str) {
    for problem in problems {
        eprintln!("orrery kimage: {whose}left out {problem}");
    }
}

fn found<T>(walk: Walk<T>, whose: &str) -> Vec<T> {
    report_omitted(&walk.problems, whose);
    walk.found
}

/// Returns a table without lines whose numbers stand to the right.
fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING).set_header(header.iter().copied());
    for &index in right {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Prints rows as JSON or as a table.
fn show<R: Serialize>(
    json: bool,
    rows: &[R],
    mut table: Table,
    cells: impl Fn(&R) -> Vec<String>,
) -> Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, rows).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        for row in rows {
            table.add_row(cells(row));
        }
        writeln!(out, "{}", table.trim_fmt())?;
    }
    Ok(())
}

#[derive(Serialize)]
struct ProcessRow {
    pid: i32,
    parent: i32,
    /// The numbers it has in nested PID namespaces, the innermost last; one where it is in none.
    pids: Vec<i32>,
    uid: u32,
    state: char,
    threads: usize,
    name: String,
    /// One for each hierarchy that it is in, as `/proc/PID/cgroup` has them.
    control_groups: Vec<GroupRow>,
}

#[derive(Serialize)]
struct GroupRow {
    /// 0 is the unified one, of version 2.
    hierarchy: u32,
    name: String,
    path: String,
}

impl From<ControlGroup> for GroupRow {
    fn from(ControlGroup { hierarchy, name, path, .. }: ControlGroup) -> Self {
        Self { hierarchy, name, path: String::from_utf8_lossy(&path).into_owned() }
    }
}

fn process_row(task: &Task<'_>) -> orrery_kimage::Result<ProcessRow> {
    let pid = task.pid()?;
    Ok(ProcessRow {
        pid,
        parent: task.parent()?,
        pids: task.ids(IdKind::Thread)?,
        uid: task.credentials()?.uid,
        state: task.state()?.letter(),
        threads: task.threads().found.len(),
        name: task.name()?,
        control_groups: found(task.control_groups(), &format!("process {pid}: "))
            .into_iter()
            .map(GroupRow::from)
            .collect(),
    })
}

fn processes(image: &Image) -> Result<()> {
    let kernel = image.open()?;
    let mut rows = Vec::new();
    for task in found(kernel.processes(), "") {
        match process_row(&task) {
            Ok(row) => rows.push(row),
            Err(error) => eprintln!("orrery kimage: left out {}: {error}", task.object()),
        }
    }
    let table = table(&["PID", "PPID", "UID", "S", "THREADS", "NAME"], &[0, 1, 2, 4]);
    show(image.json, &rows, table, |row| {
        let numbers = [row.pid.to_string(), row.parent.to_string(), row.uid.to_string()];
        numbers
            .into_iter()
            .chain([row.state.to_string(), row.threads.to_string(), row.name.clone()])
            .collect()
    })
}

#[derive(Serialize)]
struct FileRow {
    pid: i32,
    fd: u32,
    kind: &'static str,
    flags: u32,
    position: u64,
    path: String,
}

fn file_row(pid: i32, number: u32, file: &OpenFile<'_>) -> orrery_kimage::Result<FileRow> {
    let kind = match file.kind()? {
        FileKind::Regular => "file",
        FileKind::Directory => "directory",
        FileKind::CharacterDevice => "character device",
        FileKind::BlockDevice => "block device",
        FileKind::Pipe => "pipe",
        FileKind::Socket => "socket",
        FileKind::Anonymous => "anonymous",
        FileKind::Link => "link",
    };
    let path = file.path()?.display();
    Ok(FileRow { pid, fd: number, kind, flags: file.flags()?, position: file.position()?, path })
}

fn files(image: &Image, pid: Option<i32>) -> Result<()> {
    let kernel = image.open()?;
    let tasks = match pid {
        Some(pid) => vec![kernel.process(pid)?],
        None => found(kernel.processes(), ""),
    };
    let mut rows = Vec::new();
    for task in tasks {
        let pid = task.pid()?;
        let whose = format!("process {pid}: ");
        for descriptor in found(task.descriptors(), &whose) {
            match file_row(pid, descriptor.number, &descriptor.file) {
                Ok(row) => rows.push(row),
                Err(error) => {
                    eprintln!("orrery kimage: {whose}left out descriptor {}: {error}", descriptor.number)
                }
            }
        }
    }
    let table = table(&["PID", "FD", "KIND", "FLAGS", "POSITION", "PATH"], &[0, 1, 4]);
    show(image.json, &rows, table, |row| {
        let flags = format!("{:#o}", row.flags);
        let numbers = [row.pid.to_string(), row.fd.to_string(), row.kind.to_owned(), flags];
        numbers.into_iter().chain([row.position.to_string(), row.path.clone()]).collect()
    })
}

#[derive(Serialize)]
struct MappingRow {
    start: String,
    end: String,
    permissions: String,
    offset: u64,
    kib: u64,
    resident_kib: u64,
    anonymous_kib: u64,
    swapped_kib: u64,
    name: String,
}

fn mapping_row(kernel: &Kernel, task: &Task<'_>, mapping: &Mapping<'_>) -> orrery_kimage::Result<MappingRow> {
    let space = task.address_space()?.ok_or(orrery_kimage::Error::NoProcess(task.pid()?))?;
    let pages = found(mapping.pages(&space.tables()?), &format!("mapping {:#x}: ", mapping.start));
    let (mut resident, mut anonymous, mut swapped) = (0, 0, 0);
    let mut census = kernel.page_census()?;
    for entry in pages {
        match entry {
            Entry::Swap { .. } => swapped += 4096,
            Entry::Page(leaf) => match census.of(leaf.physical)?.owner {
                PageOwner::Anonymous => {
                    resident += leaf.size;
                    anonymous += leaf.size;
                }
                PageOwner::File => resident += leaf.size,
                PageOwner::Zero | PageOwner::Other => {}
            },
        }
    }
    let name = match (mapping.label()?, mapping.file()?) {
        (Some(label), _) => label,
        (None, Some(file)) => OpenFile::check(file)?.path()?.display(),
        (None, None) => String::new(),
    };
    Ok(MappingRow {
        start: format!("{:08x}", mapping.start),
        end: format!("{:08x}", mapping.end),
        permissions: mapping.permissions(),
        offset: if mapping.file()?.is_some() { mapping.page_offset * 4096 } else { 0 },
        kib: (mapping.end - mapping.start) / 1024,
        resident_kib: resident / 1024,
        anonymous_kib: anonymous / 1024,
        swapped_kib: swapped / 1024,
        name,
    })
}

fn memory(image: &Image, pid: i32) -> Result<()> {
    let kernel = image.open()?;
    let task = kernel.process(pid)?;
    let mut rows = Vec::new();
    if let Some(space) = task.address_space()? {
        for mapping in found(space.mappings(), "") {
            match mapping_row(&kernel, &task, &mapping) {
                Ok(row) => rows.push(row),
                Err(error) => eprintln!("orrery kimage: left out mapping {:#x}: {error}", mapping.start),
            }
        }
    }
    let header = ["START", "END", "PERM", "OFFSET", "KIB", "RESIDENT", "ANONYMOUS", "SWAPPED", "NAME"];
    let table = table(&header, &[0, 1, 3, 4, 5, 6, 7]);
    show(image.json, &rows, table, |row| {
        let place =
            [row.start.clone(), row.end.clone(), row.permissions.clone(), format!("{:x}", row.offset)];
        let sizes =
            [row.kib, row.resident_kib, row.anonymous_kib, row.swapped_kib].map(|size| size.to_string());
        place.into_iter().chain(sizes).chain([row.name.clone()]).collect()
    })
}

#[derive(Serialize)]
struct CoreRow {
    pid: i32,
    threads: usize,
    memory_bytes: u64,
    path: PathBuf,
}

fn core(image: &Image, pid: i32, output: &Path) -> Result<()> {
    let kernel = image.open()?;
    let task = kernel.process(pid)?;
    if task.address_space()?.is_none() {
        anyhow::bail!(
            "process {pid} is a thread of the kernel or a zombie: it has no memory to write a core of"
        );
    }
    let file = File::create_new(output).with_context(|| format!("cannot create {}", output.display()))?;
    let written = found(task.write_core(&mut BufWriter::new(file))?, "");
    let rows: Vec<CoreRow> = written
        .into_iter()
        .map(|written| CoreRow {
            pid,
            threads: written.threads,
            memory_bytes: written.memory,
            path: output.to_owned(),
        })
        .collect();
    let table = table(&["PID", "THREADS", "BYTES", "CORE"], &[0, 1, 2]);
    show(image.json, &rows, table, |row| {
        let path = row.path.display().to_string();
        vec![row.pid.to_string(), row.threads.to_string(), row.memory_bytes.to_string(), path]
    })
}
