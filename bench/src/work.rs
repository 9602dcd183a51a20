//! What a rollback case asks of its contenders.

use std::fmt;
use std::str::FromStr;

/// So many pages to write to, after reading from so many others. Written as `100` or `100+1000`, and where the pages
/// differ each time `100*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// How many pages are written to, and must be restored.
    pub dirty: u32,
    /// How many pages are read. Costs nothing where restoring leaves clean pages mapped.
    pub read: u32,
    /// Whether other pages are written each time, rather than the same ones.
    pub moving: bool,
}

impl fmt::Display for Work {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self { dirty, read: 0, .. } => write!(out, "{dirty}")?,
            Self { dirty, read, .. } => write!(out, "{dirty}+{read}")?,
        }
        if self.moving { out.write_str("*") } else { Ok(()) }
    }
}

impl FromStr for Work {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self, anyhow::Error> {
        let moving = text.ends_with('*');
        let (dirty, read) =
            text.trim_end_matches('*').split_once('+').unwrap_or((text.trim_end_matches('*'), "0"));
        let number = |text: &str| text.parse().ok();
        match (number(dirty), number(read)) {
            (Some(dirty), Some(read)) => Ok(Self { dirty, read, moving }),
            _ => Err(anyhow::anyhow!(
                "{text:?} is no work: a number of pages to dirty, DIRTY+READ or DIRTY*, is"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_is_written_as_it_is_read() {
        for (text, dirty, read, moving) in
            [("0", 0, 0, false), ("100", 100, 0, false), ("1+1000", 1, 1000, false), ("7*", 7, 0, true)]
        {
            let work: Work = text.parse().unwrap();
            assert_eq!((work, work.to_string()), (Work { dirty, read, moving }, text.to_owned()));
        }
        for text in ["", "many", "1+", "-1", "1+2+3"] {
            assert!(text.parse::<Work>().unwrap_err().to_string().contains("is no work"), "{text}");
        }
    }
}
