//! What a pair takes of this host, looked for before anything is made.

use std::path::Path;

use crate::command::require;
use crate::config::PairConfig;
use crate::error::{Error, Result, file};
use crate::net::NetworkConfig;

/// What QEMU needs beside its guest's memory, in MiB.
const OWN_MIB: u64 = 64;
/// Programs, and the packages that have them.
const PROGRAMS: [(&str, &str); 4] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("criu", "criu"),
    ("busybox", "busybox-static"),
    ("ldd", "libc-bin"),
];

/// Makes sure that a pair can be had.
///
/// # Errors
///
/// [`Error::Missing`], [`Error::Rights`], [`Error::Room`].
pub(crate) fn check(config: &PairConfig) -> Result<()> {
    for (program, package) in PROGRAMS {
        require(program, package)?;
    }
    if let Some(network) = &config.network {
        require("ip", "iproute2")?;
        if !rustix::process::geteuid().is_root() {
            let way = "without a network the service runs all the same, for itself".to_owned();
            let operation = match network {
                NetworkConfig::Own(_) => "making a network",
                NetworkConfig::Bridge(_) => "having a port of a bridge",
            };
            return Err(Error::Rights { operation, way });
        }
    }
    if config.disk.is_some() {
        require("mkfs.ext4", "e2fsprogs")?;
    }
    let needs = 2 * (config.memory_mib + OWN_MIB);
    match available(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default()) {
        Some(has) if has < needs => Err(Error::Room { needs, has }),
        _ => Ok(()),
    }
}

/// What a guest needs beside its image, in MiB: with less its kernel fails to unpack the image.
const KERNEL_MIB: u64 = 112;

/// Makes sure that guests of `memory_mib` can boot from an image, of which they have two copies while they unpack it.
///
/// # Errors
///
/// [`Error::ImageTooLarge`], [`Error::File`].
pub(crate) fn check_image(image: &Path, memory_mib: u64) -> Result<()> {
    let image_mib = std::fs::metadata(image).map_err(file("look at", image))?.len().div_ceil(1 << 20);
    let needed_mib = 2 * image_mib + KERNEL_MIB;
    if needed_mib <= memory_mib {
        return Ok(());
    }
    // The size of a machine's memory is a power of two.
    Err(Error::ImageTooLarge { image_mib, memory_mib, needed_mib: needed_mib.next_power_of_two() })
}

/// MiB that can be had without swapping, by proc_meminfo(5).
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_takes_its_size_twice() {
        let image = tempfile::NamedTempFile::new().unwrap();
        image.as_file().set_len(72 << 20).unwrap();
        check_image(image.path(), 256).unwrap();
        image.as_file().set_len((72 << 20) + 1).unwrap();
        let message = check_image(image.path(), 256).unwrap_err().to_string();
        assert!(message.contains("73 MiB") && message.contains("--memory 512"), "{message}");
    }

    #[test]
    fn available_memory_is_read() {
        assert_eq!(available("MemTotal: 1 kB\nMemAvailable:    2097152 kB\n"), Some(2048));
        assert_eq!(available("MemTotal: 1 kB\n"), None);
    }
}
