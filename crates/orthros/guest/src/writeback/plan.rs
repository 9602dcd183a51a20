//! Which files the disk lacks something of, and what.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};
use orrery_kimage::{Attributes, CachedPage, Ext4, Ext4File, ExtendedAttribute, Extent, Kernel, Name, Pages};
use orrery_orthros_images::{MAX_UNNAMED_FILE, UnnamedFile};
use rustix::fs::{AtFlags, OFlags};

use super::extents::{self, Run};
use super::handle::{self, Mounted};

/// The directory at the top of every ext4.
pub(super) const TOP: u64 = 2;
const PAGE: u64 = 4096;
/// Contents that are neither in the dead memory nor in place are kept in this one's until they are written: so many bytes
/// at least, and half of what is free if that is more.
const MOST_KEPT: usize = 64 << 20;

/// All that is to be done.
pub(super) struct Plan<'k> {
    /// By the number that the dead kernel gave them.
    pub(super) files: BTreeMap<u64, Planned<'k>>,
    /// What was in these directories.
    pub(super) names: BTreeMap<u64, Vec<Name>>,
    /// What files hold that have no name any more, and that the disk has parts of.
    pub(super) unnamed: Vec<(UnnamedFile, Vec<u8>)>,
    /// The dead kernel's last moment: by it another try knows that this is the same death.
    pub(super) death: u64,
}

impl Plan<'_> {
    /// Returns whether contents were read from places of the disk that it takes for free, and that writing may take.
    pub(super) fn reads_free_blocks(&self) -> bool {
        !self.unnamed.is_empty() || self.files.values().any(|file| !file.contents.kept.is_empty())
    }
}

/// A file that the disk lacks something of, or that something has to be put beside or beneath.
pub(super) struct Planned<'k> {
    pub(super) attributes: Attributes,
    /// The same file on the disk, if that has it.
    pub(super) found: Option<OwnedFd>,
    /// Whether contents and attributes are to be written.
    pub(super) changed: bool,
    /// Its extended attributes, where they may have changed.
    pub(super) extended: Option<Vec<ExtendedAttribute>>,
    /// What it holds, in the order in which it is to be written.
    pub(super) contents: Contents<'k>,
}

#[derive(Default)]
pub(super) struct Contents<'k> {
    /// Bytes to make zero: where they begin, and how many.
    pub(super) holes: Vec<(u64, u64)>,
    /// Bytes that were on the disk, where nothing leads to them any more.
    pub(super) kept: Vec<(u64, Vec<u8>)>,
    /// Pages in the dead memory.
    pub(super) pages: Vec<CachedPage<'k>>,
    /// Where a symbolic link leads.
    pub(super) link: Option<Vec<u8>>,
}

impl<'k> Plan<'k> {
    pub(super) fn make(
        kernel: &'k Kernel,
        device: &Path,
        mounted: &Mounted,
        unnamed: &[UnnamedFile],
        death: u64,
    ) -> Result<Self> {
        let disk = File::open(device).with_context(|| format!("cannot open {}", device.display()))?;
        let name = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let volume = kernel
            .volumes()
            .found
            .into_iter()
            .find(|volume| {
                volume.kind().is_ok_and(|kind| kind == "ext4") && volume.disk().is_ok_and(|disk| disk == name)
            })
            .with_context(|| format!("the dead kernel had no ext4 on {name}"))?;
        let block_size = volume.object().u64("s_blocksize")?;
        let read = |block: u64, into: &mut [u8]| disk.read_exact_at(into, block * block_size);
        let ext4 = Ext4::open(volume, &read)?;
        let (files, names) = (BTreeMap::new(), BTreeMap::new());
        let plan = Self { files, names, unnamed: Vec::new(), death };
        Maker { ext4, disk: &disk, mounted, plan, kept: 0, most: most_kept() }.make(unnamed)
    }
}

struct Maker<'k, 'm, 'r> {
    ext4: Ext4<'k, 'r>,
    disk: &'m File,
    mounted: &'m Mounted,
    plan: Plan<'k>,
    kept: usize,
    most: usize,
}

/// Returns how much may be kept in memory.
fn most_kept() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let free = line.and_then(|line| line.split_whitespace().next()?.parse::<usize>().ok()).unwrap_or(0) << 10;
    MOST_KEPT.max(free / 2)
}

impl<'k> Maker<'k, '_, '_> {
    fn make(mut self, unnamed: &[UnnamedFile]) -> Result<Plan<'k>> {
        let files = self.ext4.files();
        if let Some(problem) = files.problems.first() {
            bail!("{problem}");
        }
        let first = self.ext4.first_number()?;
        let mut files: BTreeMap<u64, Ext4File<'k>> =
            files.found.into_iter().map(|file| (file.attributes.number, file)).collect();
        // Files that were changed, and dropped from memory before that was committed: their blocks are kept.
        let dropped = self.ext4.dropped(|number| files.contains_key(&number))?;
        files.extend(dropped.into_iter().map(|file| (file.attributes.number, file)));
        // What has no name lives as long as who has it open; what is below the first number is the file system's own.
        let carried: BTreeMap<u64, &Ext4File<'k>> = files
            .iter()
            .filter(|&(&number, file)| file.attributes.links > 0 && (number >= first || number == TOP))
            .map(|(&number, file)| (number, file))
            .collect();
        let named = self.read_directories(&carried)?;
        for (number, file) in carried {
            self.add(file, &named).with_context(|| format!("file {number}"))?;
        }
        // A file that a directory names must be known, whether it has changed or not.
        for number in self.plan.names.values().flatten().map(|name| name.number).collect::<BTreeSet<_>>() {
            if self.plan.files.contains_key(&number) {
                continue;
            }
            let attributes = match files.get(&number) {
                Some(file) => file.attributes.clone(),
                None => self.ext4.file_on_disk(number)?.attributes,
            };
            let found = self.mounted.find(&attributes)?;
            ensure!(found.is_some(), "file {number} is older than the last commit, and not on the disk");
            let contents = Contents::default();
            let planned = Planned { attributes, found, changed: false, extended: None, contents };
            self.plan.files.insert(number, planned);
        }
        for &one in unnamed {
            let file = self.ext4.file_at(one.inode)?;
            let content = self.ext4.content(&file, MAX_UNNAMED_FILE).context("a file without a name")?;
            self.keep(content.len())?;
            self.plan.unnamed.push((one, content));
        }
        Ok(self.plan)
    }

    /// Reads what is in the changed directories, and returns the numbers of the files that they name.
    ///
    /// A directory that the disk does not have is read when another one names it. One that nothing names was being made
    /// when the kernel died, and may be in any state.
    fn read_directories(&mut self, files: &BTreeMap<u64, &Ext4File<'k>>) -> Result<BTreeSet<u64>> {
        let changed = |number: &u64| {
            let &file = files.get(number)?;
            let is_directory = file.attributes.mode & libc::S_IFMT == libc::S_IFDIR;
            (is_directory && file.uncommitted).then_some(file)
        };
        let mut unread = Vec::new();
        for number in files.keys() {
            if let Some(file) = changed(number)
                && self.mounted.find(&file.attributes)?.is_some()
            {
                unread.push(*number);
            }
        }
        self.plan.names = named_from(unread, |number| {
            let Some(file) = changed(&number) else { return Ok(None) };
            Ok(Some(self.ext4.names(file).with_context(|| format!("file {number}"))?))
        })?;
        Ok(self.plan.names.values().flatten().map(|name| name.number).collect())
    }

    fn add(&mut self, file: &Ext4File<'k>, named: &BTreeSet<u64>) -> Result<()> {
        let attributes = &file.attributes;
        let kind = attributes.mode & libc::S_IFMT;
        let unwritten = if kind == libc::S_IFREG { file.pages(Pages::Unwritten)? } else { Vec::new() };
        if !file.uncommitted && unwritten.is_empty() && attributes.number != TOP {
            return Ok(());
        }
        let found = self.mounted.find(attributes)?;
        // The call that was making it had not named it yet, and fails: no one has seen the file, and it may be half made.
        if found.is_none() && !named.contains(&attributes.number) {
            return Ok(());
        }
        let changed = file.uncommitted || !unwritten.is_empty();
        let mut contents = Contents::default();
        match kind {
            libc::S_IFREG if file.uncommitted || Self::grows(file, found.as_ref())? => {
                contents = self.contents(file, found.as_ref())?;
            }
            libc::S_IFREG => contents.pages = unwritten,
            libc::S_IFLNK if found.is_none() => contents.link = Some(self.link(file)?),
            _ => {}
        }
        let extended = file.uncommitted.then(|| self.ext4.extended_attributes(file)).transpose()?;
        let attributes = attributes.clone();
        self.plan.files.insert(attributes.number, Planned { attributes, found, changed, extended, contents });
        Ok(())
    }

    /// Returns whether a file is longer than its inode on the disk says. One that was written to has not changed by its own account until it is
    /// given blocks.
    fn grows(file: &Ext4File<'k>, found: Option<&OwnedFd>) -> Result<bool> {
        let on_disk = found.map(|found| rustix::fs::statat(found, "", AtFlags::EMPTY_PATH)).transpose()?;
        Ok(on_disk.is_some_and(|on_disk| on_disk.st_size.cast_unsigned() < file.attributes.size))
    }

    /// Everything that a file holds and that the disk may not have: pages in memory; what is on the disk where the disk's
    /// own inode does not look for it, or does not look that far; and zeros where that still sees something.
    fn contents(&mut self, file: &Ext4File<'k>, found: Option<&OwnedFd>) -> Result<Contents<'k>> {
        let size = file.attributes.size;
        let pages = file.pages(Pages::All)?;
        let cached = cached_blocks(&pages, self.ext4.block_size())?;
        let there = match found {
            Some(found) => OnDisk::of(&handle::open(found, OFlags::RDONLY)?)?,
            None => OnDisk::default(),
        };
        let block = self.ext4.block_size();
        let extents = self.ext4.extents(file)?;
        let in_place = |page: &CachedPage<'_>| {
            let mut blocks =
                (page.index * PAGE..(page.index + 1) * PAGE).step_by(usize::try_from(block).unwrap_or(4096));
            !page.unwritten
                && blocks.all(|offset| {
                    place_of(&extents, offset, block).is_some_and(|p| there.has(offset, block, p))
                })
        };
        let pages = pages.into_iter().filter(|page| !in_place(page)).collect();
        let mut contents = Contents { pages, ..Contents::default() };
        for extent in extents.iter().filter(|extent| extent.written) {
            for step in 0..extent.count {
                let (offset, place) = ((extent.logical + step) * block, (extent.physical + step) * block);
                if offset >= size || cached.contains(&(offset / block)) || there.has(offset, block, place) {
                    continue;
                }
                let mut bytes = vec![0; usize::try_from(block)?];
                self.disk.read_exact_at(&mut bytes, place).context("cannot read the disk")?;
                self.keep(bytes.len())?;
                contents.kept.push((offset, bytes));
            }
        }
        for run in there.runs.iter().filter(|run| run.written) {
            for offset in (run.logical..(run.logical + run.length).min(size)).step_by(usize::try_from(block)?)
            {
                if !cached.contains(&(offset / block)) && place_of(&extents, offset, block).is_none() {
                    contents.holes.push((offset, block));
                }
            }
        }
        Ok(contents)
    }

    /// Makes sure that there is room for so many bytes more.
    fn keep(&mut self, bytes: usize) -> Result<()> {
        self.kept += bytes;
        ensure!(
            self.kept <= self.most,
            "more than {} MiB were dropped from memory before they were committed; there is no room for them here",
            self.most >> 20
        );
        Ok(())
    }

    /// Returns where a symbolic link leads.
    fn link(&self, file: &Ext4File<'k>) -> Result<Vec<u8>> {
        if let Some(short) = self.ext4.short_link(file) {
            return Ok(short);
        }
        let extents = self.ext4.extents(file)?;
        let first = extents.iter().find(|extent| extent.logical == 0);
        let length = usize::try_from(file.attributes.size)?;
        // A link's text is written with its name, in one block.
        let mut text = match (file.pages(Pages::All)?.first(), first) {
            (Some(page), _) if page.is_valid()? => {
                let mut bytes = vec![0; usize::try_from(PAGE)?];
                self.ext4.kernel().memory().read(page.physical, &mut bytes)?;
                bytes
            }
            (_, Some(extent)) => self.ext4.block(extent.physical)?,
            _ => bail!("it is a symbolic link without a text"),
        };
        text.truncate(length);
        Ok(text)
    }
}

/// Returns the names in some directories, and in those that they name; `names_of` returns none for what need not be read.
fn named_from(
    mut unread: Vec<u64>,
    mut names_of: impl FnMut(u64) -> Result<Option<Vec<Name>>>,
) -> Result<BTreeMap<u64, Vec<Name>>> {
    let mut read: BTreeMap<u64, Vec<Name>> = BTreeMap::new();
    while let Some(number) = unread.pop() {
        if read.contains_key(&number) {
            continue;
        }
        if let Some(names) = names_of(number)? {
            unread.extend(names.iter().map(|name| name.number));
            read.insert(number, names);
        }
    }
    Ok(read)
}

/// The blocks of a file whose bytes memory has.
fn cached_blocks(pages: &[CachedPage<'_>], block_size: u64) -> Result<BTreeSet<u64>> {
    let per_page = PAGE / block_size;
    let mut found = BTreeSet::new();
    for page in pages {
        let first = page.index * per_page;
        if page.is_valid()? {
            found.extend(first..first + per_page);
        } else {
            // A page may be there of which only some blocks were ever read or written.
            let buffers = page.buffers()?;
            found.extend((first..).zip(&buffers).filter(|(_, buffer)| buffer.valid).map(|(block, _)| block));
        }
    }
    Ok(found)
}

/// Returns where the dead kernel had put a byte of a file on the disk, if it had.
fn place_of(extents: &[Extent], offset: u64, block_size: u64) -> Option<u64> {
    let block = offset / block_size;
    let before = extents.partition_point(|extent| extent.logical <= block).checked_sub(1)?;
    let extent =
        extents.get(before).filter(|extent| extent.written && block < extent.logical + extent.count)?;
    Some((extent.physical + (block - extent.logical)) * block_size + offset % block_size)
}

/// A file as the disk's inode has it.
#[derive(Default)]
struct OnDisk {
    /// Where its bytes are.
    runs: Vec<Run>,
    size: u64,
}

impl OnDisk {
    fn of(file: &File) -> Result<Self> {
        Ok(Self { runs: extents::of(file)?, size: file.metadata()?.len() })
    }

    /// Returns whether a block of the file is at that place for the disk's inode, too, and is read from there. What is behind the end that this
    /// inode knows is not: when the file grows, the kernel may put zeros there.
    fn has(&self, offset: u64, length: u64, place: u64) -> bool {
        let before = self.runs.partition_point(|run| run.logical <= offset).checked_sub(1);
        offset + length <= self.size
            && before.is_some_and(|index| {
                let run = self.runs[index];
                run.written
                    && offset < run.logical + run.length
                    && run.physical + (offset - run.logical) == place
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel zeroes when a file grows has to be written again.
    #[test]
    fn what_is_behind_the_end_on_the_disk_is_not_in_place() {
        let runs = vec![
            Run { logical: 0, physical: 0x5000, length: 4096, written: true },
            Run { logical: 8192, physical: 0x9000, length: 2048, written: false },
        ];
        let there = OnDisk { runs, size: 2500 };
        assert!(there.has(0, 1024, 0x5000) && there.has(1024, 1024, 0x5400));
        assert!(!there.has(0, 1024, 0x5400), "it is elsewhere");
        assert!(!there.has(2048, 1024, 0x5800), "the end is within it");
        assert!(!there.has(3072, 1024, 0x5c00), "it is behind the end");
        let there = OnDisk { size: 20_000, ..there };
        assert!(there.has(3072, 1024, 0x5c00));
        assert!(!there.has(4096, 1024, 0x6000), "there is a hole");
        assert!(!there.has(8192, 1024, 0x9000), "it was never written");
        assert!(!OnDisk::default().has(0, 1024, 0x5000));
    }

    #[test]
    fn a_directory_that_nothing_names_is_not_read() {
        let name = |name: &str, number| Name { name: name.into(), number };
        // 2 is on the disk, 20 was made in it, and 30 was being made: its blocks may hold anything.
        let names_of = |number| match number {
            TOP => Ok(Some(vec![name("new", 20), name("file", 12), name("again", TOP)])),
            20 => Ok(Some(vec![name("deep", 21)])),
            30 => bail!("it is half made"),
            _ => Ok(None),
        };
        let read = named_from(vec![TOP], names_of).unwrap();
        assert_eq!(read.keys().copied().collect::<Vec<_>>(), [TOP, 20]);
        assert_eq!(read[&20], [name("deep", 21)]);
        assert!(named_from(vec![TOP, 30], names_of).is_err());
    }
}
