//! Trackers, snapshots and deltas of a running process' memory.
