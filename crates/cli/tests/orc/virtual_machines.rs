//! Virtual machines that share a tree by its image: Debian's kernel in QEMU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use orrery_orc_store::measure::{MappingUsage, mappings};
use orrery_orthros_host::{Initramfs, KernelFiles, Machine, MachineConfig, command::require};
use orrery_testing::guest::{INIT, MODULES, Shell};

use crate::bytes;
use crate::image::{make, missing};
use crate::rootfs::Trees;

/// How long a kernel may take to boot, and a command to run, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// A virtual machine with a shell.
struct Guest {
    machine: Machine,
    shell: Shell,
}

/// What all guests boot.
struct Boot {
    kernel: KernelFiles,
    initramfs: PathBuf,
    directory: PathBuf,
}

impl Boot {
    /// Prepares it, or returns what is missing.
    fn new(directory: PathBuf) -> Result<Self, String> {
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("orthros-cache");
        require("qemu-system-x86_64", "qemu-system-x86").map_err(|error| error.to_string())?;
        let busybox = require("busybox", "busybox-static").map_err(|error| error.to_string())?;
        let kernel = KernelFiles::obtain(&cache).map_err(|error| format!("no kernel to boot: {error}"))?;
        fs::create_dir_all(&directory).unwrap();
        let mut archive = Initramfs::new();
        archive.file("/init", INIT, 0o755).program(&busybox, "/bin/busybox").unwrap();
        for (index, module) in kernel.modules(&MODULES).unwrap().into_iter().enumerate() {
            archive.file(&format!("/modules/{index:03}.ko"), module, 0o644);
        }
        let initramfs = directory.join("initramfs");
        archive.write(&initramfs).unwrap();
        Ok(Self { kernel, initramfs, directory })
    }

    fn machine(&self, name: &str, options: &[String]) -> orrery_orthros_host::Result<Machine> {
        let memory = ["-m", "slots=1,maxmem=2G"].map(str::to_owned);
        let config = MachineConfig {
            name: name.to_owned(),
            memory_mib: 256,
            cpus: 1,
            append: "swiotlb=noforce".to_owned(),
            initramfs: self.initramfs.clone(),
            peer: None,
            extra: [&memory, options].concat(),
        };
        // Another machine of this name has been ready, and was killed.
        fs::write(self.directory.join(format!("{name}.console")), "READY\n").unwrap();
        Machine::start(&config, &self.kernel, &self.directory)
    }

    fn start(&self, name: &str, options: &[String]) -> Guest {
        let mut machine = self.machine(name, options).unwrap();
        machine.wait_for_console("READY", PATIENCE).unwrap();
        let shell = Shell::connect(&machine.file("control"), PATIENCE).unwrap();
        Guest { machine, shell }
    }
}

impl Guest {
    /// Runs a command that must succeed.
    fn succeed(&mut self, command: &str) -> String {
        let (status, output) = self.shell.run(command).unwrap();
        assert_eq!(status, 0, "{command}: {output}");
        output
    }

    /// Returns the size of the guest's page cache in KiB.
    fn cached(&mut self) -> u64 {
        let text = self.succeed("grep ^Cached: /proc/meminfo");
        text.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// Returns QEMU's mapping of the image.
    fn mapping(&self, image: &Path) -> MappingUsage {
        let all = mappings(i32::try_from(self.machine.pid()).unwrap()).unwrap();
        all.into_iter().find(|mapping| Path::new(&mapping.name) == image).unwrap()
    }
}

/// Lists every name below a directory with type, mode, owner and time, and of files size, hash and target.
const LIST: &str = "find . | sort | while read -r f; do stat -c '%n %f %u %g %Y' \"$f\"; done; find . -type l -exec readlink {} ';'; \
    find . -type f -exec sha256sum {} + | sort";

#[test]
fn virtual_machines_have_a_tree_in_memory_once() {
    if let Some(why) = missing() {
        orrery_testing::skipped!("{why}");
        return;
    }
    let trees = Trees::new();
    let tree = trees.plant("tree");
    for index in 0..8 {
        fs::write(tree.join(format!("data-{index}")), bytes(3 << 20, 10 + index)).unwrap();
    }
    let boot = match Boot::new(trees.path("machines")) {
        Ok(boot) => boot,
        Err(why) => return orrery_testing::skipped!("{why}"),
    };
    let made = make(&trees, "image", &[&tree]);
    let image = trees.path("images/image");
    let options: Vec<String> = serde_json::from_value(made["qemu"].clone()).unwrap();
    let mount = made["mount"].as_str().unwrap();
    let hash = || {
        let output = Command::new("sha256sum").arg(&image).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let before = hash();

    // As the image is immutable, nothing maps it for writing.
    let writable: Vec<String> = options.iter().map(|option| option.replace("readonly=on,", "")).collect();
    let refused = boot.machine("writable", &writable).and_then(|mut machine| machine.qmp().map(drop));
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("Operation not permitted"), "{refused}");

    // The second machine has the same image as a disk, too, as for hypervisors without virtio-pmem.
    let disk = ["-drive".to_owned(), format!("if=virtio,format=raw,readonly=on,file={}", image.display())];
    let mut guests = [boot.start("one", &options), boot.start("two", &[&options[..], &disk].concat())];
    let wanted =
        Command::new("sh").args(["-c", LIST]).env("LC_ALL", "C").current_dir(&tree).output().unwrap();
    let wanted = String::from_utf8(wanted.stdout).unwrap();
    let mut shown = Vec::new();
    for guest in &mut guests {
        guest.succeed(mount);
        let cached = guest.cached();
        assert_eq!(guest.succeed(&format!("cd /mnt; {LIST}")), wanted);
        let grown = guest.cached().saturating_sub(cached);
        assert!(grown < 4 << 10, "{grown} KiB were copied to the guest's memory");
        shown.push(guest.mapping(&image));
    }
    // One reads: all pages are its own. Both have read: each has half.
    let one_alone = shown.swap_remove(0);
    assert_eq!(&one_alone.access[..], "r--s");
    assert!(one_alone.resident > 24 << 20, "{one_alone:?}");
    for guest in &guests {
        let both = guest.mapping(&image);
        assert!(both.resident > 24 << 20 && both.private < 1 << 20, "{both:?}");
        assert!(both.proportional < both.resident * 11 / 20, "{both:?}");
    }

    let [one, two] = &mut guests;
    // What is written over it is each machine's own.
    let overlay = "mount -t tmpfs tmpfs /tmp; mkdir /tmp/upper /tmp/work /tmp/all; \
        mount -t overlay -o lowerdir=/mnt,upperdir=/tmp/upper,workdir=/tmp/work overlay /tmp/all";
    for guest in [&mut *one, &mut *two] {
        guest.succeed(overlay);
    }
    one.succeed("echo mine > /tmp/all/small; rm /tmp/all/own");
    assert_eq!(one.succeed("cat /tmp/all/small"), "mine\n");
    assert_eq!(two.succeed("cat /tmp/all/small /tmp/all/own"), "a line\nof tree");
    two.succeed("mkdir /disk; mount -t erofs -o ro /dev/vda /disk");
    assert_eq!(two.succeed(&format!("cd /disk; {LIST}")), wanted);
    // The root of a machine cannot write to the image either, by the file system or by the device.
    assert_ne!(one.shell.run("mount -o remount,rw /mnt; echo new > /mnt/new").unwrap().0, 0);
    one.shell.run("dd if=/dev/zero of=/dev/pmem0 bs=1M count=24 conv=fsync; sync").unwrap();
    assert_eq!(hash(), before);
    two.succeed("umount /disk; umount /tmp/all; echo 3 > /proc/sys/vm/drop_caches");
    assert_eq!(two.succeed(&format!("cd /mnt; {LIST}")), wanted);
}
