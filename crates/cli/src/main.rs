//! The `orrery` command.

fn main() {}
