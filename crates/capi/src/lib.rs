//! liborrery: the C interface to Orrery.
