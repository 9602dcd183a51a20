//! What a log may say beside a program's own output.

/// Leaves out what a log says of calls whose threads were ended with the process while they wrote their entries.
pub(crate) fn without_losses(errors: &str) -> String {
    let loses = |line: &&str| line.starts_with("orrery: ") && line.ends_with(" calls were lost\n");
    errors.split_inclusive('\n').filter(|line| !loses(line)).collect()
}
