//! Images in a directory.

use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write as _};
use std::path::Path;

use anyhow::{Context as _, Result};
use orrery_kimage::Kernel;

use crate::encode::Images;
use crate::model::{PageSource, UnnamedFile};

/// Writes images into a directory, with the pages that are in the dead kernel's memory.
///
/// # Errors
///
/// The directory cannot be written, or the memory cannot be read.
pub fn write(images: &Images, kernel: &Kernel, directory: &Path) -> Result<()> {
    fs::create_dir_all(directory).with_context(|| format!("cannot create {}", directory.display()))?;
    for image in &images.files {
        let path = directory.join(format!("{}.img", image.name));
        fs::write(&path, &image.bytes).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let mut page = [0; 4096];
    for (number, ranges) in &images.pages {
        let path = directory.join(format!("pages-{number}.img"));
        let file = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        let mut out = BufWriter::with_capacity(1 << 20, file);
        for &(source, length) in ranges {
            for offset in (0..length).step_by(page.len()) {
                match source {
                    PageSource::Physical(address) => kernel.memory().read(address + offset, &mut page)?,
                    PageSource::Kernel(address) => kernel.read(address + offset, &mut page)?,
                }
                out.write_all(&page).with_context(|| format!("cannot write {}", path.display()))?;
            }
        }
        out.flush().with_context(|| format!("cannot write {}", path.display()))?;
    }
    images.restore_state.save(directory)
}

/// Completes the image of an unnamed file with its content.
///
/// # Errors
///
/// The image cannot be written.
pub fn fill_unnamed_file(file: UnnamedFile, directory: &Path, content: &[u8]) -> Result<()> {
    let path = directory.join(format!("{}.img", crate::encode::ghost_image(file.image)));
    let image = OpenOptions::new().append(true).open(&path);
    let written = image.and_then(|mut image| image.write_all(content));
    written.with_context(|| format!("cannot write {}", path.display()))
}
