//! Threads of other PID namespaces: by which number this process knows them.
//!
//! The kernel lists, for each thread that this process can see, its numbers in all namespaces that it is in, down to its own (`NSpid` in
//! proc_pid_status(5)). Several threads may have the same number, in different namespaces; who asks finds out which it means.

use std::fs;

/// The numbers here of threads that have this number in another PID namespace, below this process's own.
pub(super) fn numbers_here(number: libc::pid_t) -> impl Iterator<Item = libc::pid_t> {
    let listed = |path: String| fs::read_dir(path).into_iter().flatten().flatten();
    let is_number = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let processes = listed("/proc".to_owned())
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(move |name| is_number(name));
    processes
        .flat_map(move |process| listed(format!("/proc/{process}/task")))
        .filter_map(|task| fs::read_to_string(task.path().join("status")).ok())
        .filter_map(move |status| number_here(&status, number))
}

/// The first of a thread's numbers, if it has several of which the last is this one.
fn number_here(status: &str, number: libc::pid_t) -> Option<libc::pid_t> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    let numbers: Vec<libc::pid_t> =
        line.split_ascii_whitespace().map_while(|word| word.parse().ok()).collect();
    match numbers.as_slice() {
        [here, .., last] if *last == number => Some(*here),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_last_number_is_its_own() {
        assert_eq!(number_here("Name:\tx\nNSpid:\t4711\t1\nVmPeak: 1\n", 1), Some(4711));
        assert_eq!(number_here("NSpid:\t4711\t20\t1\n", 1), Some(4711));
        assert_eq!(number_here("NSpid:\t4711\t20\t1\n", 20), None);
        assert_eq!(number_here("NSpid:\t1\n", 1), None);
        assert_eq!(number_here("", 1), None);
    }
}
