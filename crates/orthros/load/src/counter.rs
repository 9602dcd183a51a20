//! The smallest service there is: a counter in a file.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Counts, a hundred times a second, and leaves the count in a file.
pub(crate) fn run(path: &Path) -> Result<()> {
    let aside = path.with_extension("new");
    for count in 1_u64.. {
        fs::write(&aside, format!("{count}\n"))
            .with_context(|| format!("cannot write {}", aside.display()))?;
        fs::rename(&aside, path).with_context(|| format!("cannot write {}", path.display()))?;
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}
