//! `make bench B=orc-guests`: the memory of virtual machines that read the same tree of files: from its image by virtio-pmem with DAX, and
//! from the same file as a disk (virtio-blk).
//!
//! Machines of both kinds are started in turns, and each reads the whole tree and returns its free memory to the host before the next one
//! starts. What they take is the kernel's count (PSS) of the guests' memory and of the image's pages that their QEMU processes map. A
//! disk's pages are in the host's page cache besides, once, which no process maps and which is not counted.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use orrery_bench::guests::{Boot, Guest, Image};
use orrery_bench::report::Report;
use orrery_bench::{Options, machine};
use orrery_report::record::Record;
use orrery_testing::Random;

const BENCH: &str = "orc-guests";
const RIVAL: &str = "virtio-blk";
/// Files of the tree, and the bytes of each.
const FILES: usize = 256;
const LENGTH: usize = 256 << 10;
/// The memory of each guest in MiB: room for the tree, twice.
const MEMORY: u64 = 256;
/// What guests differ by that do the same.
const NOISE: u64 = 1 << 20;
/// Reads all files of the tree.
const READ: &str = "cd /mnt && find . -type f | sort | xargs cat | md5sum";

/// How the guests have the tree.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Pmem,
    Disk,
}

/// What the guests of one way take.
#[derive(Debug, Default)]
struct Taken {
    /// The bytes of the first guest, of the first two and so on, when all of them have read the tree.
    total: Vec<u64>,
    /// What the tree takes of them: the difference to the sum of what each took before it read.
    tree: Vec<u64>,
}

fn plant(tree: &Path) -> Result<()> {
    let mut random = Random(1);
    fs::create_dir(tree)?;
    for index in 0..FILES {
        fs::write(tree.join(format!("{index:03}")), random.bytes(LENGTH))?;
    }
    Ok(())
}

fn start(way: Way, boot: &Boot, image: &Image, name: &str) -> Result<Guest> {
    let (options, mount) = match way {
        Way::Pmem => {
            let mut options = ["-m", "slots=1,maxmem=2G"].map(str::to_owned).to_vec();
            options.extend(image.made.qemu.iter().cloned());
            (options, image.made.mount.as_str())
        }
        Way::Disk => {
            let drive = format!("if=virtio,format=raw,readonly=on,file={}", image.path.display());
            (vec!["-drive".to_owned(), drive], "mount -t erofs -o ro /dev/vda /mnt")
        }
    };
    let mut guest = boot.start(name, MEMORY, &options)?;
    guest.run(mount)?;
    Ok(guest)
}

/// Starts so many guests of each way, ours first.
fn measure(boot: &Boot, image: &Image, most: usize) -> Result<[Taken; 2]> {
    let mut taken: [Taken; 2] = Default::default();
    let mut guests: [Vec<Guest>; 2] = Default::default();
    let mut before = [0; 2];
    let mut sums = Vec::new();
    for count in 1..=most {
        for (index, way) in [Way::Pmem, Way::Disk].into_iter().enumerate() {
            let mut guest = start(way, boot, image, &format!("{way:?}-{count}"))?;
            before[index] += guest.rested()?;
            sums.push(guest.run(READ)?);
            guest.rested()?;
            guests[index].push(guest);
            let total = guests[index].iter().map(Guest::proportional).sum::<Result<u64>>()?;
            taken[index].total.push(total);
            taken[index].tree.push(total.saturating_sub(before[index]));
        }
    }
    ensure!(sums.iter().all(|sum| *sum == sums[0]), "guests have read other bytes than others");
    Ok(taken)
}

fn main() -> Result<ExitCode> {
    let options =
        Options::from_command_line("Virtual machines that share a tree of files, and that have it as a disk");
    let (rounds, most) = if options.quick() { (1, 4) } else { (3, 8) };
    let mut report = Report::default();
    let directory = tempfile::tempdir_in(machine::program_directory()?)?;
    let tree = directory.path().join("tree");
    plant(&tree)?;
    let prepared = Boot::new(directory.path())
        .and_then(|boot| Ok((boot, Image::make(&tree, &directory.path().join("image"))?)));
    let Some((boot, image)) = report.present("all", prepared) else {
        return report.finish(BENCH, options.all());
    };
    let measured: Vec<[Taken; 2]> =
        (0..rounds).map(|_| measure(&boot, &image, most)).collect::<Result<_>>()?;
    let mut add = |case: String, unit: (&str, u32), value: &dyn Fn(&Taken) -> u64| {
        let number = |taken: &Taken| value(taken) as f64 / f64::from(unit.1);
        let pairs = measured.iter().map(|[ours, disk]| (number(ours), number(disk))).collect();
        report.records.push(Record::new(BENCH, case, unit.0, RIVAL, pairs, false));
    };
    for count in [1, 2, 4, 8].into_iter().filter(|&count| count <= most) {
        add(
            format!("{count} guest{}/memory", if count == 1 { "" } else { "s" }),
            ("MiB", 1 << 20),
            &|taken| taken.total[count - 1],
        );
    }
    let further = most as u64 - 1;
    add("64 MiB tree/each further guest".to_owned(), ("MiB", 1 << 20), &|taken| {
        (taken.tree[most - 1].saturating_sub(taken.tree[0]) / further).max(NOISE)
    });
    report.finish(BENCH, options.all())
}
