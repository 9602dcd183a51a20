//! A process of a dead kernel as the core file that it would have left had it died itself: for gdb, and for what
//! else reads cores. Source: core(5), elf(5), Linux `fs/binfmt_elf.c`, `include/linux/elfcore.h`.

use std::io::{Seek, SeekFrom, Write};

use object::elf::{NT_AUXV, NT_FPREGSET, NT_PRPSINFO, NT_PRSTATUS};

use crate::error::{Error, Result, Walk};
use crate::file::OpenFile;
use crate::mapping::{AddressSpace, Mapping};
use crate::paging::Entry;
use crate::registers::Registers;
use crate::task::{IdKind, Task};

const PAGE: u64 = 4096;
const HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;
const MOST_SEGMENTS: usize = 0xfff0;
/// "FILE", in the order of the machine.
const NT_FILE: u32 = 0x4649_4c45;

/// What became of a process' core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// How many threads' registers it holds.
    pub threads: usize,
    /// How many bytes of memory it holds.
    pub memory: u64,
}

/// A run of pages that are all in memory, or all not.
struct Run {
    address: u64,
    length: u64,
    flags: u32,
    /// Where each page is; empty for a run that is not in memory.
    pages: Vec<u64>,
}

/// Bytes in the order of the machine.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Bytes {
    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }
    /// Text in a field of fixed length.
    fn text(&mut self, text: &[u8], length: usize) -> &mut Self {
        let text = &text[..text.len().min(length - 1)];
        self.0.extend_from_slice(text);
        self.0.resize(self.0.len() + length - text.len(), 0);
        self
    }
    fn align(&mut self, to: usize) -> &mut Self {
        self.0.resize(self.0.len().next_multiple_of(to), 0);
        self
    }
    fn note(&mut self, kind: u32, content: &[u8]) {
        self.u32(5).u32(u32::try_from(content.len()).unwrap_or(u32::MAX)).u32(kind).text(b"CORE", 8);
        self.0.extend_from_slice(content);
        self.align(4);
    }
}

impl Task<'_> {
    /// Writes its process as an ELF core. Pages that were not in memory are left out; what could not be read is
    /// reported, and left out too.
    ///
    /// # Errors
    ///
    /// [`Error::Write`], or those of reading what a core cannot do without: a kernel thread has no core.
    pub fn write_core<W: Write + Seek>(&self, into: &mut W) -> Result<Walk<Written>> {
        let mut walk = Walk::default();
        let Some(space) = self.address_space()? else {
            return Err(self.object().corrupt("it is a thread of the kernel or a zombie: it has no memory"));
        };
        let mappings = space.mappings();
        walk.problems.extend(mappings.problems);
        let (notes, threads) = self.notes(&space, &mappings.found, &mut walk)?;
        let mut runs = Vec::new();
        let tables = space.tables()?;
        for mapping in &mappings.found {
            let pages = mapping.pages(&tables);
            walk.problems.extend(pages.problems);
            push_runs(mapping, &pages.found, &mut runs);
        }
        if runs.len() > MOST_SEGMENTS {
            return Err(self.object().corrupt(format!("{} runs of pages do not fit a core", runs.len())));
        }
        let pages: usize = runs.iter().map(|run| run.pages.len()).sum();
        let there: u64 =
            self.object().kernel().memory().segments().iter().map(|segment| segment.length).sum();
        // Some pages are mapped several times, but not all of them over and over.
        if pages as u64 > 4 * there / PAGE {
            return Err(self.object().corrupt(format!("it would have {pages} pages, more than the machine")));
        }
        let memory = write(into, &notes, &runs, |physical, page| {
            self.object().kernel().memory().read(physical, page)
        })?;
        walk.found.push(Written { threads, memory });
        Ok(walk)
    }

    fn notes(
        &self,
        space: &AddressSpace<'_>,
        mappings: &[Mapping<'_>],
        walk: &mut Walk<Written>,
    ) -> Result<(Vec<u8>, usize)> {
        let mut notes = Bytes::default();
        let mut count = 0;
        let threads = self.threads();
        walk.problems.extend(threads.problems);
        for thread in &threads.found {
            let registers = match thread.registers() {
                Ok(registers) => registers,
                Err(error) => {
                    walk.note(format!("the registers of thread {}", thread.tid()?), error);
                    continue;
                }
            };
            notes.note(NT_PRSTATUS, &status(thread, &registers)?);
            if count == 0 {
                notes.note(NT_PRPSINFO, &self.info(space)?);
                notes.note(NT_AUXV, &space.object().bytes("saved_auxv")?);
                notes.note(NT_FILE, &files(mappings, walk));
            }
            match thread.float_state() {
                Ok(state) => notes.note(NT_FPREGSET, &state.bytes[..512]),
                Err(error) => {
                    walk.note(format!("the floating-point state of thread {}", thread.tid()?), error)
                }
            }
            count += 1;
        }
        Ok((notes.0, count))
    }

    /// `struct elf_prpsinfo`.
    fn info(&self, space: &AddressSpace<'_>) -> Result<Vec<u8>> {
        let credentials = self.credentials()?;
        let state = self.state()?;
        let (group, session) = (last(self, IdKind::Group), last(self, IdKind::Session));
        let arguments = (|| -> Result<Vec<u8>> {
            let (start, end) = (space.object().u64("arg_start")?, space.object().u64("arg_end")?);
            let mut bytes = vec![0; usize::try_from(end.saturating_sub(start).min(79)).unwrap_or(0)];
            space.read(start, &mut bytes)?;
            bytes.iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b' ');
            Ok(bytes)
        })();
        let mut bytes = Bytes::default();
        let letter = u32::from(state.letter());
        bytes.u32(letter << 8).u32(0).u64(self.object().u64("flags")?);
        bytes.u32(credentials.uid).u32(credentials.gid);
        bytes.u32(self.pid()?.cast_unsigned()).u32(self.parent()?.cast_unsigned()).u32(group).u32(session);
        // Arguments that were swapped out are no reason to do without a core.
        bytes.text(self.name()?.as_bytes(), 16).text(&arguments.unwrap_or_default(), 80);
        Ok(bytes.0)
    }
}

/// A number of a task in its own PID namespace; 0 where it is unknown.
fn last(task: &Task<'_>, kind: IdKind) -> u32 {
    task.ids(kind).ok().and_then(|ids| ids.first().copied()).unwrap_or(0).cast_unsigned()
}

/// `struct elf_prstatus`.
fn status(thread: &Task<'_>, registers: &Registers) -> Result<Vec<u8>> {
    let mut bytes = Bytes::default();
    // siginfo (3 words), cursig, padding, pending, held.
    bytes.u32(0).u32(0).u32(0).u16(0).u16(0).u64(0).u64(thread.object().u64("blocked")?);
    bytes.u32(thread.tid()?.cast_unsigned()).u32(thread.parent()?.cast_unsigned());
    bytes.u32(last(thread, IdKind::Group)).u32(last(thread, IdKind::Session));
    // Four times of two words each.
    for _ in 0..8 {
        bytes.u64(0);
    }
    let r = registers;
    for value in [
        r.r15, r.r14, r.r13, r.r12, r.bp, r.bx, r.r11, r.r10, r.r9, r.r8, r.ax, r.cx, r.dx, r.si, r.di,
        r.orig_ax, r.ip, r.cs, r.flags, r.sp, r.ss, r.fs_base, r.gs_base, r.ds, r.es, r.fs, r.gs,
    ] {
        bytes.u64(value);
    }
    bytes.u32(1).u32(0);
    Ok(bytes.0)
}

/// The note that says which file is mapped where.
fn files(mappings: &[Mapping<'_>], walk: &mut Walk<Written>) -> Vec<u8> {
    let mut places = Bytes::default();
    let mut names = Vec::new();
    let mut count = 0;
    for mapping in mappings {
        let path = match mapping.file().and_then(|file| file.map(OpenFile::check).transpose()) {
            Ok(None) => continue,
            Ok(Some(file)) => file.path(),
            Err(error) => Err(error),
        };
        match path {
            Ok(path) => {
                places.u64(mapping.start).u64(mapping.end).u64(mapping.page_offset);
                names.extend_from_slice(&path.bytes);
                names.push(0);
                count += 1;
            }
            Err(error) => walk.note(format!("the file mapped at {:#x}", mapping.start), error),
        }
    }
    let mut bytes = Bytes::default();
    bytes.u64(count).u64(PAGE);
    bytes.0.extend_from_slice(&places.0);
    bytes.0.extend_from_slice(&names);
    bytes.0
}

/// Splits a mapping where pages in memory meet pages that are not.
fn push_runs(mapping: &Mapping<'_>, pages: &[Entry], runs: &mut Vec<Run>) {
    let (read, write, execute) = (mapping.flags & 1 != 0, mapping.flags & 2 != 0, mapping.flags & 4 != 0);
    let flags = u32::from(read) << 2 | u32::from(write) << 1 | u32::from(execute);
    let mut at = mapping.start;
    let absent = |from: u64, to: u64, runs: &mut Vec<Run>| {
        if from < to {
            runs.push(Run { address: from, length: to - from, flags, pages: Vec::new() });
        }
    };
    let mut open: Option<Run> = None;
    for leaf in pages.iter().filter_map(|entry| if let Entry::Page(leaf) = entry { Some(leaf) } else { None })
    {
        let (from, to) = (leaf.address.max(mapping.start), (leaf.address + leaf.size).min(mapping.end));
        if from >= to {
            continue;
        }
        if from > at {
            runs.extend(open.take());
            absent(at, from, runs);
        }
        let run = open.get_or_insert_with(|| Run { address: from, length: 0, flags, pages: Vec::new() });
        for page in (from..to).step_by(4096) {
            run.pages.push(leaf.physical + (page - leaf.address));
        }
        run.length += to - from;
        at = to;
    }
    runs.extend(open);
    absent(at, mapping.end, runs);
}

fn write<W: Write + Seek>(
    into: &mut W,
    notes: &[u8],
    runs: &[Run],
    mut read: impl FnMut(u64, &mut [u8]) -> Result<()>,
) -> Result<u64, Error> {
    let count = runs.len() as u64 + 1;
    let notes_at = HEADER + count * PROGRAM_HEADER;
    let mut data_at = (notes_at + notes.len() as u64).next_multiple_of(PAGE);
    let mut head = Bytes::default();
    head.0.extend_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    let (core, x86_64) = (4, 62);
    head.u16(core).u16(x86_64).u32(1).u64(0).u64(HEADER).u64(0).u32(0);
    head.u16(64).u16(56).u16(u16::try_from(count).unwrap_or(u16::MAX)).u16(0).u16(0).u16(0);
    let (load, note) = (1, 4);
    let length = notes.len() as u64;
    head.u32(note).u32(0).u64(notes_at).u64(0).u64(0).u64(length).u64(0).u64(4);
    for run in runs {
        let in_file = run.pages.len() as u64 * PAGE;
        head.u32(load).u32(run.flags).u64(data_at).u64(run.address).u64(0);
        head.u64(in_file).u64(run.length).u64(PAGE);
        data_at += in_file;
    }
    into.write_all(&head.0)?;
    into.write_all(notes)?;
    into.seek(SeekFrom::Start((notes_at + length).next_multiple_of(PAGE)))?;
    let mut memory = 0;
    let mut page = [0; 4096];
    for physical in runs.iter().flat_map(|run| &run.pages) {
        // A page outside the image (a device's) is written as zeros, so that all others stay in their places.
        if read(*physical, &mut page).is_err() {
            page.fill(0);
        }
        into.write_all(&page)?;
        memory += PAGE;
    }
    into.flush()?;
    Ok(memory)
}
