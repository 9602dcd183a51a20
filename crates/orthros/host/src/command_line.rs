//! What QEMU is started with.

use std::fs;
use std::path::{Path, PathBuf};

use crate::kernel::KernelFiles;

/// What a machine is made of.
#[derive(Clone, Debug)]
pub struct MachineConfig {
    /// What it is called in messages and file names.
    pub name: String,
    /// Its memory, in MiB; a power of two where another machine is to see it.
    pub memory_mib: u64,
    /// The number of processors.
    pub cpus: u32,
    /// What is added to the kernel's command line.
    pub append: String,
    /// The archive to boot into.
    pub initramfs: PathBuf,
    /// The file of another machine's memory that its PCI device shows, read-only, and its size in MiB.
    pub peer: Option<(PathBuf, u64)>,
    /// More arguments for QEMU.
    pub extra: Vec<String>,
}

/// Ways to run a guest, the best first; QEMU takes the first that it can.
pub(crate) fn accelerators() -> &'static [&'static str] {
    let processors = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let opens = |device: &Path| fs::OpenOptions::new().read(true).write(true).open(device).is_ok();
    choose(&processors, opens(Path::new("/dev/kvm")))
}

/// KVM where the processor can run guests itself and the device is this user's. A `/dev/kvm` without these flags belongs to a
/// hypervisor that translates, and that not every guest survives.
fn choose(processors: &str, opens: bool) -> &'static [&'static str] {
    let virtualizes = processors.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    if virtualizes && opens { &["kvm", "tcg"] } else { &["tcg"] }
}

/// The arguments for a machine whose memory is the file `memory`; its other files are named by `at`.
pub(crate) fn arguments(
    config: &MachineConfig,
    kernel: &KernelFiles,
    accelerators: &[&str],
    memory: &str,
    at: impl Fn(&str) -> String,
) -> Vec<String> {
    let (size, path) = (config.memory_mib, |path: &Path| path.display().to_string());
    // Where a comma separates, two stand for one.
    let part = |text: String| text.replace(',', ",,");
    let mut words: Vec<String> =
        ["-nodefaults", "-no-user-config", "-display", "none", "-M", "q35,memory-backend=ram"]
            .map(str::to_owned)
            .to_vec();
    let mut add = |name: &str, value: String| words.extend([name.to_owned(), value]);
    for accelerator in accelerators {
        add("-accel", (*accelerator).to_owned());
    }
    // The plainest processor: no states of registers that a backup could lack, no fifth level of tables.
    add("-cpu", "qemu64".to_owned());
    add("-smp", config.cpus.to_string());
    add("-m", format!("{size}M"));
    add("-object", format!("memory-backend-file,id=ram,share=on,size={size}M,mem-path={memory}"));
    add("-kernel", path(&kernel.image));
    add("-initrd", path(&config.initramfs));
    // A kernel gives its timer a moment to show that it works, and stops for ever where its processor had no time in it.
    add("-append", format!("console=ttyS0 quiet no_timer_check {}", config.append));
    add("-serial", format!("file:{}", at("console")));
    add("-chardev", format!("socket,id=control,path={},server=on,wait=off", part(at("control"))));
    add("-serial", "chardev:control".to_owned());
    add("-qmp", format!("unix:{},server=on,wait=off", part(at("qmp"))));
    add("-device", "pvpanic-pci".to_owned());
    add("-action", "panic=pause,reboot=shutdown".to_owned());
    if let Some((peer, mib)) = &config.peer {
        let memory = part(path(peer));
        add(
            "-object",
            format!("memory-backend-file,id=peer,share=on,readonly=on,size={mib}M,mem-path={memory}"),
        );
        add("-device", "ivshmem-plain,memdev=peer".to_owned());
    }
    words.extend(config.extra.iter().cloned());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kvm_is_taken_where_the_processor_and_the_device_are_there() {
        for flag in ["vmx", "svm"] {
            let processors = format!("processor : 0\nflags\t\t: fpu {flag} sse2\n");
            assert_eq!(choose(&processors, true), ["kvm", "tcg"]);
            assert_eq!(choose(&processors, false), ["tcg"]);
        }
        assert_eq!(choose("flags\t\t: fpu sse2 vmx_like\n", true), ["tcg"]);
        assert_eq!(choose("", true), ["tcg"]);
    }

    #[test]
    fn both_machines_get_what_they_need() {
        let kernel = KernelFiles {
            image: "/k/vmlinuz".into(),
            modules: "/k/modules".into(),
            release: "6.1".to_owned(),
        };
        let mut config = MachineConfig {
            name: "guest0".to_owned(),
            memory_mib: 512,
            cpus: 2,
            append: "orrery.role=active".to_owned(),
            initramfs: "/i".into(),
            peer: None,
            extra: vec!["-more".to_owned()],
        };
        let line = |config: &MachineConfig| {
            arguments(config, &kernel, &["kvm", "tcg"], "/proc/1/fd/3", |kind| format!("/f/{kind}")).join(" ")
        };
        let active = line(&config);
        assert!(active.contains("-accel kvm -accel tcg -cpu qemu64 -smp 2 -m 512M"), "{active}");
        assert!(active.contains("share=on,size=512M,mem-path=/proc/1/fd/3"), "{active}");
        assert!(active.contains("no_timer_check orrery.role=active -serial file:/f/console"), "{active}");
        assert!(active.ends_with(" -more") && !active.contains("ivshmem"), "{active}");
        config.peer = Some(("/one,two".into(), 256));
        let backup = line(&config);
        assert!(
            backup.contains("readonly=on,size=256M,mem-path=/one,,two -device ivshmem-plain,memdev=peer"),
            "{backup}"
        );
    }
}
