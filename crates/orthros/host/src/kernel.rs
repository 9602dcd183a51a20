//! The guests' kernel: Debian's, as its package has it, unpacked into a cache. Nothing is installed on the host.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use object::{Object as _, ObjectSection as _};

use crate::command::{require, run};
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
        let place = cache.join("kernel");
        if let Ok(found) = Self::within(&place) {
            return Ok(found);
        }
        let (apt_get, apt_cache) = (require("apt-get", "apt")?, require("apt-cache", "apt")?);
        let dpkg = require("dpkg-deb", "dpkg")?;
        fs::create_dir_all(cache).map_err(file("create", cache))?;
        // Built aside and renamed, so that two builds at the same time do not meet half a kernel.
        let aside = tempfile::tempdir_in(cache).map_err(file("create a directory in", cache))?;
        let depends = run(&apt_cache, &["depends", "--important", META], None)?;
        let mut dependencies = depends.lines().filter_map(|line| line.trim().strip_prefix("Depends: "));
        let package = dependencies.find(|name| name.starts_with("linux-image-")).unwrap_or(META);
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

    /// Returns the files of these modules and of those that they need, in the order in which to load them.
    ///
    /// A module that is built in, or that this kernel does not have, is passed over: the guest finds out what it lacks.
    ///
    /// # Errors
    ///
    /// [`Error::File`] where a module cannot be read.
    pub fn modules(&self, names: &[&str]) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        collect(&self.modules.join("kernel"), &mut files)?;
        let mut order = Vec::new();
        let mut done = HashSet::new();
        for name in names {
            add(name, &files, &mut done, &mut order)?;
        }
        Ok(order)
    }
}

/// All files below a directory whose name says that they are modules.
fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).map_err(file("list", directory))?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "ko") {
            files.push(path);
        }
    }
    Ok(())
}

fn add(name: &str, files: &[PathBuf], done: &mut HashSet<String>, order: &mut Vec<PathBuf>) -> Result<()> {
    // `-` and `_` are the same to modprobe.
    let name = name.replace('-', "_");
    if !done.insert(name.clone()) {
        return Ok(());
    }
    let stem = |path: &Path| path.file_stem().map(|stem| stem.to_string_lossy().replace('-', "_"));
    let Some(path) = files.iter().find(|path| stem(path).is_some_and(|stem| stem == name)) else {
        return Ok(());
    };
    let bytes = fs::read(path).map_err(file("read", path))?;
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
    order.push(path.clone());
    Ok(())
}
