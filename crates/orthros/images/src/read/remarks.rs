//! What is not carried over exactly.

/// Remarks about the process, as sentences.
#[derive(Debug, Default)]
pub(super) struct Remarks {
    all: Vec<String>,
    losses: Vec<String>,
}

impl Remarks {
    /// Adds a remark about a detail.
    pub(super) fn add(&mut self, remark: String) {
        self.all.push(remark);
    }

    /// Adds a remark about a detail, unless it was made before.
    pub(super) fn add_once(&mut self, remark: String) {
        if !self.all.contains(&remark) {
            self.all.push(remark);
        }
    }

    /// Adds a remark about something that is hung up, or counts as killed.
    pub(super) fn add_loss(&mut self, remark: String) {
        self.losses.push(remark.clone());
        self.all.push(remark);
    }

    /// Returns all remarks, and those about losses.
    pub(super) fn into_parts(self) -> (Vec<String>, Vec<String>) {
        (self.all, self.losses)
    }
}
