//! The guests' kernel: Debian's, as its package has it, unpacked into a cache. Nothing is installed on the host.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use object::{Object as _, ObjectSection as _};

use crate::command::{output_of, require, run};
use crate::error::{Error, Result, file};

/// The package that depends on the current kernel for virtual machines.
const META: &str = "linux-image-cloud-amd64";

/// A kernel, unpacked.
#[derive(Clone, Debug)]
pub struct KernelFiles {
    /// The image that boots.
    pub image: PathBuf,
    /// The directory of its modules.
    pub modules: PathBuf,
    /// Its release, as `uname -r` will say.
    pub release: String,
}

/// The directory where what was fetched or built is kept: `$ORRERY_CACHE`, or `orrery` in the user's cache.
#[must_use]
pub fn cache() -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("ORRERY_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|directory| directory.join("orrery")))
        .or_else(|| variable("HOME").map(|directory| directory.join(".cache/orrery")))
        .unwrap_or_else(|| PathBuf::from("/var/cache/orrery"))
}

impl KernelFiles {
    /// The kernel in the cache, fetched through apt if it is not there yet (25 MiB).
    ///
    /// # Errors
    ///
    /// [`Error::Missing`] and [`Error::Command`] where apt cannot fetch it, [`Error::File`] where the cache cannot be
    /// written.
    pub fn obtain(cache: &Path) -> Result<Self> {
        Self::obtain_package(cache, META)
    }

    /// Returns the kernel of the package on which the package `meta` depends, from the cache or by apt.
    ///
    /// # Errors
    ///
    /// Those of [`obtain`](Self::obtain).
    pub fn obtain_package(cache: &Path, meta: &str) -> Result<Self> {
        let place = cache.join("kernel");
        if let Ok(found) = Self::within(&place) {
            return Ok(found);
        }
        let (apt_get, apt_cache) = (require("apt-get", "apt")?, require("apt-cache", "apt")?);
        let dpkg = require("dpkg-deb", "dpkg")?;
        fs::create_dir_all(cache).map_err(file("create", cache))?;
        // Built aside and renamed, so that two builds at the same time do not meet half a kernel.
        let aside = tempfile::tempdir_in(cache).map_err(file("create a directory in", cache))?;
        let depends = run(&apt_cache, &["depends", "--important", meta], None)?;
        let mut dependencies = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let package = dependencies.find(|name| name.starts_with("linux-image-")).unwrap_or(meta);
        run(&apt_get, &["download", "-q", package], Some(aside.path()))?;
        let directory = fs::read_dir(aside.path()).map_err(file("list", aside.path()))?;
        let archive = directory
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|e| e == "deb"));
        let archive = archive
            .ok_or_else(|| Error::Package { package: package.to_owned(), what: "archive".to_owned() })?;
        let unpacked = aside.path().join("kernel");
        run(&dpkg, &[Path::new("-x"), &archive, &unpacked], None)?;
        Self::within(&unpacked)?;
        if let Err(error) = fs::rename(&unpacked, &place)
            && Self::within(&place).is_err()
        {
            return Err(file("rename the kernel to", &place)(error));
        }
        Self::within(&place)
    }

    /// The kernel that was unpacked into a directory.
    ///
    /// # Errors
    ///
    /// [`Error::Package`] where it is not there.
    pub fn within(directory: &Path) -> Result<Self> {
        let missing =
            |what: &str| Error::Package { package: directory.display().to_string(), what: what.to_owned() };
        let entries = fs::read_dir(directory.join("boot")).map_err(|_| missing("boot"))?;
        let mut images = entries.flatten().filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some((entry.path(), name.strip_prefix("vmlinuz-")?.to_owned()))
        });
        let (image, release) = images.next().ok_or_else(|| missing("boot/vmlinuz-*"))?;
        let modules = ["lib/modules", "usr/lib/modules"]
            .map(|base| directory.join(base).join(&release))
            .into_iter()
            .find(|path| path.is_dir())
            .ok_or_else(|| missing("lib/modules"))?;
        Ok(Self { image, modules, release })
    }

    /// Returns the contents of these modules and of those that they need, in the order in which to load them.
    ///
    /// A module that is built in, or that this kernel does not have, is passed over: the guest finds out what it lacks. Modules that are
    /// compressed (Debian's since 13) are decompressed.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where a module cannot be read, [`Error::Missing`] and [`Error::Command`] where it cannot be decompressed.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<Vec<u8>>> {
        let mut files = HashMap::new();
        collect(&self.modules.join("kernel"), &mut files)?;
        let mut order = Vec::new();
        let mut done = HashSet::new();
        for name in names {
            add(name, &files, &mut done, &mut order)?;
        }
        Ok(order)
    }
}

/// Adds all modules below a directory to `files`, by their names.
fn collect(directory: &Path, files: &mut HashMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).map_err(file("list", directory))?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

/// Returns the name of the module in a file, if that is what it has, with `_` for `-`: they are the same to modprobe(8).
fn module_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let stem = COMPRESSIONS.iter().find_map(|(ending, ..)| name.strip_suffix(ending)).unwrap_or(name);
    Some(stem.strip_suffix(".ko")?.replace('-', "_"))
}

/// How modules are compressed (the kernel's `CONFIG_MODULE_COMPRESS_*`): the ending of a file's name, the program that decompresses it, and
/// that one's package. apt has unpacked the kernel with a library of its own, so the program may be missing.
const COMPRESSIONS: &[(&str, &str, &str)] =
    &[(".xz", "xz", "xz-utils"), (".zst", "zstd", "zstd"), (".gz", "gzip", "gzip")];

/// Returns the contents of a module.
fn read_module(path: &Path) -> Result<Vec<u8>> {
    let name = path.as_os_str().as_bytes();
    match COMPRESSIONS.iter().find(|(ending, ..)| name.ends_with(ending.as_bytes())) {
        Some((_, program, package)) => {
            let words = [OsStr::new("-dcq"), path.as_os_str()];
            output_of(&require(program, package)?, &words, None)
        }
        None => fs::read(path).map_err(file("read", path)),
    }
}

fn add(
    name: &str,
    files: &HashMap<String, PathBuf>,
    done: &mut HashSet<String>,
    order: &mut Vec<Vec<u8>>,
) -> Result<()> {
    let name = name.replace('-', "_");
    if !done.insert(name.clone()) {
        return Ok(());
    }
    let Some(path) = files.get(&name) else { return Ok(()) };
    let bytes = read_module(path)?;
    let about = object::File::parse(&*bytes).ok().and_then(|module| {
        let section = module.section_by_name(".modinfo")?;
        section.data().ok().map(<[u8]>::to_vec)
    });
    for line in about.unwrap_or_default().split(|&byte| byte == 0) {
        if let Some(needed) = line.strip_prefix(b"depends=") {
            for needed in String::from_utf8_lossy(needed).split(',').filter(|name| !name.is_empty()) {
                add(needed, files, done, order)?;
            }
        }
    }
    order.push(bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// A kernel with the modules `first`, which needs `second-one`, and `second_one`, compressed by this program.
    fn kernel(directory: &Path, compressor: Option<&str>) -> Option<KernelFiles> {
        let modules = directory.join("kernel/drivers");
        fs::create_dir_all(&modules).unwrap();
        for (name, depends) in [("first", "second-one,built_in"), ("second_one", "")] {
            let (source, module) = (directory.join("module.c"), modules.join(format!("{name}.ko")));
            let text = format!(
                "__attribute__((section(\".modinfo\"))) const char info[] = \"license=GPL\\0depends={depends}\";\n"
            );
            fs::write(&source, text).unwrap();
            let status = Command::new("cc").arg("-c").arg(&source).arg("-o").arg(&module).status().unwrap();
            assert!(status.success());
            if let Some(compressor) = compressor {
                let status = Command::new(compressor).arg("-q").arg(&module).status().ok()?;
                assert!(status.success());
                let _removed_by_most = fs::remove_file(&module);
            }
        }
        Some(KernelFiles { image: PathBuf::new(), modules: directory.to_owned(), release: String::new() })
    }

    #[test]
    fn modules_come_after_those_that_they_need_however_they_are_compressed() {
        let plain = tempfile::tempdir().unwrap();
        let modules = kernel(plain.path(), None).unwrap().modules(&["first", "absent"]).unwrap();
        let contents = ["second_one", "first"]
            .map(|name| fs::read(plain.path().join(format!("kernel/drivers/{name}.ko"))).unwrap());
        assert_eq!(modules, contents);
        for (compressor, ending) in [("xz", "xz"), ("zstd", "zst"), ("gzip", "gz")] {
            let directory = tempfile::tempdir().unwrap();
            let Some(kernel) = kernel(directory.path(), Some(compressor)) else {
                orrery_testing::skipped!("{compressor} is not installed");
                continue;
            };
            assert_eq!(kernel.modules(&["first"]).unwrap(), contents, "{compressor}");

            let file = directory.path().join(format!("kernel/drivers/second_one.ko.{ending}"));
            let bytes = fs::read(&file).unwrap();
            fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
            let error = kernel.modules(&["first"]).unwrap_err().to_string();
            assert!(error.contains(compressor) && error.contains("second_one.ko"), "{compressor}: {error}");
        }
    }
}
