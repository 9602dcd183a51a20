//! A process' mappings and those of its pages that exist nowhere else.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use orrery_kimage::{AddressSpace, Entry, FileKind, Mapping, OpenFile, PageOwner, Task};

use super::Context;
use super::messages::{Mm, Pagemap, PagemapHead, Vma};
use super::writer::{ImageFile, Kind};

pub(super) const PAGE: u64 = 4096;
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
/// `VM_GROWSDOWN` and `VM_LOCKED` of `include/linux/mm.h`.
const GROWS_DOWN: u64 = 0x100;
const LOCKED: u64 = 0x2000;
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
    pages(context, &space, &mappings.found, pid, index, folder)
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

/// Writes the pages that only the process had, and which they are.
fn pages(
    context: &mut Context<'_>,
    space: &AddressSpace<'_>,
    mappings: &[Mapping<'_>],
    pid: u32,
    index: u32,
    folder: &Path,
) -> Result<()> {
    let tables = space.tables()?;
    let mut map = ImageFile::create(folder, &format!("pagemap-{pid}"), Kind::Pagemap)?;
    map.put(&PagemapHead { pages_id: index })?;
    let path = folder.join(format!("pages-{index}.img"));
    let mut out = BufWriter::with_capacity(1 << 20, File::create(&path)?);
    let mut run: Option<Pagemap> = None;
    let mut page = [0; 4096];
    for mapping in mappings.iter().filter(|mapping| !mapping.is_shared()) {
        let label = mapping.label()?;
        if label.as_deref() == Some("[vvar]") {
            continue;
        }
        let is_vdso = label.as_deref() == Some("[vdso]");
        let entries = mapping.pages(&tables);
        if let Some(problem) = entries.problems.first() {
            bail!("its memory: {problem}");
        }
        let mut put = |address: u64, page: &[u8]| -> Result<()> {
            out.write_all(page)?;
            context.summary.pages += 1;
            match &mut run {
                Some(run) if run.vaddr + u64::from(run.nr_pages) * PAGE == address => run.nr_pages += 1,
                other => {
                    let next = Pagemap { vaddr: address, nr_pages: 1, flags: Some(PRESENT) };
                    if let Some(done) = other.replace(next) {
                        map.put(&done)?;
                    }
                }
            }
            Ok(())
        };
        if is_vdso {
            // The same for all processes; the kernel has it whole, the page tables only what was touched.
            let image = context.kernel.variable("vdso_image_64", "vdso_image")?;
            let data = image.u64("data")?;
            for address in (mapping.start..mapping.end).step_by(4096) {
                context.kernel.read(data + (address - mapping.start), &mut page)?;
                put(address, &page)?;
            }
            continue;
        }
        for entry in entries.found {
            let leaf = match entry {
                Entry::Page(leaf) => leaf,
                Entry::Swap { address, .. } => bail!("its page at {address:#x} is in swap"),
            };
            if context.kernel.page_owner(leaf.physical)? != PageOwner::Anonymous {
                continue;
            }
            let end = (leaf.address + leaf.size).min(mapping.end);
            for address in (leaf.address.max(mapping.start)..end).step_by(4096) {
                context.kernel.memory().read(leaf.physical + (address - leaf.address), &mut page)?;
                put(address, &page)?;
            }
        }
    }
    if let Some(done) = run {
        map.put(&done)?;
    }
    out.flush()?;
    map.finish()
}
