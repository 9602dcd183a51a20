//! A process' mappings and those of its pages that exist nowhere else.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{
    AddressSpace, Entry, FileKind, Kernel, Mapping, OpenFile, PageCensus, PageOwner, PageTables, Task,
};

use super::Context;
use super::messages::{Mm, Pagemap, PagemapHead, Vma};
use super::writer::{ImageFile, Kind};
use crate::later::{Outstanding, Run};

pub(crate) const PAGE: u64 = 4096;
/// CRIU `criu/include/image.h`.
const REGULAR: u32 = 1;
const VDSO: u32 = 1 << 3;
const HEAP: u32 = 1 << 5;
const FILE_PRIVATE: u32 = 1 << 6;
const FILE_SHARED: u32 = 1 << 7;
const ANONYMOUS_SHARED: u32 = 1 << 8;
const ANONYMOUS_PRIVATE: u32 = 1 << 9;
const VVAR: u32 = 1 << 12;
const MEMFD: u32 = 1 << 14;
/// `PE_PRESENT`: the pages follow in `pages-*.img`.
pub(super) const PRESENT: u32 = 1 << 2;
/// `PE_LAZY`: they come through a userfaultfd.
const LAZY: u32 = 1 << 1;
/// Fewer pages than these are copied sooner than they are asked for: 4 MiB.
const FEW: u64 = 1 << 10;
/// `VM_GROWSDOWN` and `VM_LOCKED` of `include/linux/mm.h`.
const GROWS_DOWN: u64 = 0x100;
const LOCKED: u64 = 0x2000;
/// `VM_UFFD_MISSING`.
const AWAITED: u64 = 0x200;
/// `VM_NORESERVE`.
const UNRESERVED: u64 = 0x20_0000;

pub(super) fn write<'k>(
    context: &mut Context<'k>,
    process: &Task<'k>,
    pid: u32,
    index: u32,
    folder: &Path,
) -> Result<()> {
    let space = process.address_space()?.context("it has no memory: a zombie, or a thread of the kernel")?;
    let mappings = space.mappings();
    if let Some(problem) = mappings.problems.first() {
        bail!("its mappings: {problem}");
    }
    let executable = process.executable()?.context("it has no program")?;
    let mut vmas = Vec::new();
    for mapping in &mappings.found {
        let vma = vma(context, mapping).with_context(|| format!("its mapping at {:#x}", mapping.start))?;
        vmas.push(vma);
    }
    let mm = space.object();
    let of = |path| mm.u64(path);
    let image = Mm {
        start_code: of("start_code")?,
        end_code: of("end_code")?,
        start_data: of("start_data")?,
        end_data: of("end_data")?,
        start_stack: of("start_stack")?,
        start_brk: of("start_brk")?,
        brk: of("brk")?,
        arg_start: of("arg_start")?,
        arg_end: of("arg_end")?,
        env_start: of("env_start")?,
        env_end: of("env_end")?,
        exe_file_id: context.files.regular(&executable)?,
        saved_auxv: auxiliary(&space)?,
        vmas,
        dumpable: Some(i32::try_from(of("flags")? & 3)?),
    };
    let mut file = ImageFile::create(folder, &format!("mm-{pid}"), Kind::Mm)?;
    file.put(&image)?;
    file.finish()?;
    let all = all_pages(context.kernel, process, &space, &mappings.found)?;
    pages(context, &all, pid, index, folder)
}

/// The auxiliary vector up to and with its end.
fn auxiliary(space: &AddressSpace<'_>) -> Result<Vec<u64>> {
    let bytes = space.object().bytes("saved_auxv")?;
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes)).collect();
    let pairs = words.chunks_exact(2).position(|pair| pair[0] == 0).unwrap_or(words.len() / 2 - 1);
    Ok(words[..(pairs + 1) * 2].to_vec())
}

fn vma<'k>(context: &mut Context<'k>, mapping: &Mapping<'k>) -> Result<Vma> {
    let shared = mapping.is_shared();
    let label = mapping.label()?;
    if mapping.flags & AWAITED != 0 {
        bail!("its pages come through a userfaultfd, and not all of them may have come");
    }
    let mut flags = (if shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE }).cast_unsigned();
    if mapping.flags & GROWS_DOWN != 0 {
        flags |= libc::MAP_GROWSDOWN.cast_unsigned();
    }
    if mapping.flags & UNRESERVED != 0 {
        // More addresses than there can be memory, which is refused otherwise.
        flags |= libc::MAP_NORESERVE.cast_unsigned();
    }
    if mapping.flags & LOCKED != 0 {
        flags |= libc::MAP_LOCKED.cast_unsigned();
    }
    let (mut shmid, mut pgoff, mut fdflags) = (0, 0, None);
    let status = match (mapping.file()?, label.as_deref()) {
        (Some(file), _) => {
            let file = OpenFile::check(file)?;
            let path = file.path()?;
            pgoff = mapping.page_offset * PAGE;
            if shared && super::shared::is_anonymous(&file)? {
                if super::shared::is_system_v(&file)? {
                    let remark = format!("System V memory at {:#x} has no number any more", mapping.start);
                    context.summary.remarks.push(remark);
                }
                flags |= libc::MAP_ANONYMOUS.cast_unsigned();
                let (start, end, prot) = (mapping.start, mapping.end, u32::try_from(mapping.flags & 7)?);
                let shmid = context.shared.add(&file)?;
                let status = REGULAR | ANONYMOUS_SHARED;
                return Ok(Vma {
                    start,
                    end,
                    pgoff,
                    shmid,
                    prot,
                    flags,
                    status,
                    fd: -1,
                    madv: None,
                    fdflags: None,
                });
            }
            let access = Some(file.flags()? & libc::O_ACCMODE.cast_unsigned());
            if let Some(id) = super::memfds::add(context, &file)? {
                let status = REGULAR | MEMFD | if shared { FILE_SHARED } else { FILE_PRIVATE };
                return Ok(Vma {
                    start: mapping.start,
                    end: mapping.end,
                    pgoff,
                    shmid: u64::from(id),
                    prot: u32::try_from(mapping.flags & 7)?,
                    flags,
                    status,
                    fd: -1,
                    madv: None,
                    fdflags: access,
                });
            }
            if file.kind()? != FileKind::Regular && path.bytes != b"/dev/zero" {
                bail!("it maps {}, which is no file", path.display());
            }
            if path.deleted {
                bail!("it maps {}, which cannot be opened again", path.display());
            }
            shmid = u64::from(context.files.mapped(&file)?);
            fdflags = access;
            REGULAR | if shared { FILE_SHARED } else { FILE_PRIVATE }
        }
        (None, _) if shared => bail!("it is shared memory of nothing that is known"),
        (None, label) => {
            flags |= libc::MAP_ANONYMOUS.cast_unsigned();
            match label {
                Some("[vdso]") => REGULAR | VDSO | ANONYMOUS_PRIVATE,
                Some("[vvar]") => REGULAR | VVAR | ANONYMOUS_PRIVATE,
                Some("[heap]") => REGULAR | HEAP | ANONYMOUS_PRIVATE,
                _ => REGULAR | ANONYMOUS_PRIVATE,
            }
        }
    };
    Ok(Vma {
        start: mapping.start,
        end: mapping.end,
        pgoff,
        shmid,
        prot: u32::try_from(mapping.flags & 7)?,
        flags,
        status,
        fd: -1,
        madv: None,
        fdflags,
    })
}

/// A list of pages in the making, where neighbours of one kind stand as one.
struct PageMap {
    file: ImageFile,
    run: Option<Pagemap>,
}

impl PageMap {
    fn add(&mut self, address: u64, pages: u64, flags: u32) -> Result<()> {
        let count = u32::try_from(pages)?;
        match &mut self.run {
            Some(run)
                if run.vaddr + u64::from(run.nr_pages) * PAGE == address && run.flags == Some(flags) =>
            {
                run.nr_pages += count;
            }
            other => {
                let next = Pagemap { vaddr: address, nr_pages: count, flags: Some(flags) };
                if let Some(done) = other.replace(next) {
                    self.file.put(&done)?;
                }
            }
        }
        Ok(())
    }

    fn finish(mut self) -> Result<()> {
        if let Some(done) = &self.run {
            self.file.put(done)?;
        }
        self.file.finish()
    }
}

/// Pages that follow each other, and where they come from.
pub(super) enum Pages {
    /// From the dead memory; whether the process can live without them for a while.
    Own(Run, bool),
    /// The kernel's vDSO, the same for all processes: it has it whole, the page tables only what was touched.
    Vdso(u64, u64),
}

/// Whether criu lets pages of a mapping come later: `vma_entry_can_be_lazy` of `criu/include/vma.h`.
fn can_wait(mapping: &Mapping<'_>) -> Result<bool> {
    Ok(mapping.file()?.is_none() && mapping.flags & LOCKED == 0)
}

/// The pages of a mapping that only processes had, by ascending address. What lies at one of the addresses `needed` cannot wait.
fn own_pages(
    census: &mut PageCensus<'_>,
    mapping: &Mapping<'_>,
    tables: &PageTables<'_>,
    needed: &[u64],
    found: &mut Vec<Pages>,
) -> Result<()> {
    let entries = mapping.pages(tables);
    if let Some(problem) = entries.problems.first() {
        bail!("its memory: {problem}");
    }
    let mapping_can = can_wait(mapping)?;
    for entry in entries.found {
        let leaf = match entry {
            Entry::Page(leaf) => leaf,
            Entry::Swap { address, .. } => bail!("its page at {address:#x} is in swap"),
        };
        let used = census.of(leaf.physical)?;
        if used.owner != PageOwner::Anonymous {
            continue;
        }
        let (start, end) = (leaf.address.max(mapping.start), (leaf.address + leaf.size).min(mapping.end));
        let run =
            Run { address: start, physical: leaf.physical + (start - leaf.address), length: end - start };
        let can = mapping_can && used.alone && !needed.iter().any(|at| (start..end).contains(at));
        match found.last_mut() {
            Some(Pages::Own(last, could)) if *could == can && last.is_followed_by(&run) => {
                last.length += run.length;
            }
            _ => found.push(Pages::Own(run, can)),
        }
    }
    Ok(())
}

/// All pages that only the process had, by ascending address.
pub(super) fn all_pages(
    kernel: &Kernel,
    process: &Task<'_>,
    space: &AddressSpace<'_>,
    mappings: &[Mapping<'_>],
) -> Result<Vec<Pages>> {
    let tables = space.tables()?;
    let mut census = kernel.page_census()?;
    // A thread needs the top of its stack at once.
    let threads = process.threads().found;
    let stacks: Vec<u64> = threads.iter().filter_map(|thread| Some(thread.registers().ok()?.sp)).collect();
    let mut found = Vec::new();
    for mapping in mappings.iter().filter(|mapping| !mapping.is_shared()) {
        match mapping.label()?.as_deref() {
            Some("[vvar]") => {}
            Some("[vdso]") => found.push(Pages::Vdso(mapping.start, mapping.end)),
            _ => own_pages(&mut census, mapping, &tables, &stacks, &mut found)?,
        }
    }
    Ok(found)
}

/// How many bytes of them can wait.
fn patient(all: &[Pages]) -> u64 {
    all.iter().map(|pages| if let Pages::Own(run, true) = pages { run.length } else { 0 }).sum()
}

/// Whether it is worth while to let those come later that can.
fn is_much(patient: u64) -> bool {
    patient >= FEW * PAGE
}

/// How much memory it takes to rebuild a process with these pages.
pub(super) fn weigh(all: &[Pages]) -> u64 {
    let bytes: u64 = all
        .iter()
        .map(|pages| match pages {
            Pages::Own(run, _) => run.length,
            Pages::Vdso(start, end) => end - start,
        })
        .sum();
    let patient = patient(all);
    2 * bytes - if is_much(patient) { patient } else { 0 }
}

/// Writes which pages only the process had, and those that cannot come later.
fn pages(context: &mut Context<'_>, all: &[Pages], pid: u32, index: u32, folder: &Path) -> Result<()> {
    let kernel = context.kernel;
    let mut file = ImageFile::create(folder, &format!("pagemap-{pid}"), Kind::Pagemap)?;
    file.put(&PagemapHead { pages_id: index })?;
    let mut map = PageMap { file, run: None };
    let path = folder.join(format!("pages-{index}.img"));
    let mut out = BufWriter::with_capacity(1 << 20, File::create(&path)?);
    let mut page = [0; 4096];
    let mut later = context.later.is_some() && is_much(patient(all));
    later = later && all.iter().all(|pages| pages.has_place(kernel));
    let mut outstanding = Outstanding::default();
    for pages in all {
        match *pages {
            Pages::Own(run, true) if later => {
                map.add(run.address, run.length / PAGE, LAZY)?;
                outstanding.add(run);
                context.summary.pages += run.length / PAGE;
            }
            Pages::Own(run, _) => {
                map.add(run.address, run.length / PAGE, PRESENT)?;
                for offset in (0..run.length).step_by(4096) {
                    kernel.memory().read(run.physical + offset, &mut page)?;
                    out.write_all(&page)?;
                }
                context.summary.pages += run.length / PAGE;
            }
            Pages::Vdso(start, end) => {
                let data = kernel.variable("vdso_image_64", "vdso_image")?.u64("data")?;
                map.add(start, (end - start) / PAGE, PRESENT)?;
                for address in (start..end).step_by(4096) {
                    kernel.read(data + (address - start), &mut page)?;
                    out.write_all(&page)?;
                }
                context.summary.pages += (end - start) / PAGE;
            }
        }
    }
    out.flush()?;
    map.finish()?;
    if let Some(into) = &mut context.later {
        into.add(pid.cast_signed(), outstanding);
    }
    Ok(())
}

impl Pages {
    /// Whether they can be brought from where they lie by a system call.
    fn has_place(&self, kernel: &Kernel) -> bool {
        let Self::Own(run, true) = self else { return true };
        usize::try_from(run.length).is_ok_and(|length| kernel.memory().place(run.physical, length).is_some())
    }
}
