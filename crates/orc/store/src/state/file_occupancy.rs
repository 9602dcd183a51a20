//! Which objects are in which backing file.

use std::collections::HashMap;

use orrery_orc_wire::ObjectId;

use crate::trust_domain::TrustDomain;

/// Counts the objects of each backing file.
#[derive(Debug, Default)]
pub(crate) struct FileOccupancy {
    objects_in: HashMap<u64, usize>,
    file_of: HashMap<(TrustDomain, ObjectId), u64>,
}

impl FileOccupancy {
    /// Returns whether an object is in the file.
    pub(super) fn is_occupied(&self, file: u64) -> bool {
        self.objects_in.contains_key(&file)
    }

    /// Enters an object; returns whether it is the first one in its file.
    pub(super) fn enter(&mut self, domain: &TrustDomain, id: ObjectId, file: u64) -> bool {
        self.file_of.insert((domain.clone(), id), file);
        let count = self.objects_in.entry(file).or_insert(0);
        *count += 1;
        *count == 1
    }

    /// Removes an object; returns its file if no object is there any more.
    pub(super) fn remove(&mut self, domain: &TrustDomain, id: ObjectId) -> Option<u64> {
        let file = self.file_of.remove(&(domain.clone(), id))?;
        let count = self.objects_in.get_mut(&file)?;
        *count -= 1;
        if *count > 0 {
            return None;
        }
        self.objects_in.remove(&file);
        Some(file)
    }
}
