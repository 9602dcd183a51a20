//! Sessions: what one leaves behind, how it ends, and what a pool bears.
//!
//! Contexts belong to a process, and end with it, so each case is a process of its own: this program runs itself once for
//! each case.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::undocumented_unsafe_blocks,
    reason = "tests of system calls"
)]

use std::ops::ControlFlow;
use std::process::Command;

use libtest_mimic::{Arguments, Failed, Trial};
use orrery_lwc::context::{Spec, create};
use orrery_lwc::rollback::{Outcome, Rollback};

const CASE: &str = "ORRERY_TEST_CASE";

type Case = (&'static str, fn());

fn main() {
    if let Ok(name) = std::env::var(CASE) {
        let (_, run) = CASES.iter().find(|(case, _)| *case == name).expect("a case of that name");
        run();
        println!("case done");
        return;
    }
    let arguments = Arguments::from_args();
    let trials = CASES.iter().map(|(name, _)| Trial::test(*name, move || run_case(name))).collect::<Vec<_>>();
    libtest_mimic::run(&arguments, trials).exit();
}

fn run_case(name: &str) -> Result<(), Failed> {
    // A case that hangs fails.
    let output = Command::new("timeout")
        .args(["--signal=KILL", "60"])
        .arg(std::env::current_exe()?)
        .env(CASE, name)
        .env_remove("RUST_BACKTRACE")
        .output()?;
    let text = format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    if output.status.success() && text.contains("case done") { Ok(()) } else { Err(text.into()) }
}

macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        const CASES: &[Case] = &[$((stringify!($name), $name)),*];
    };
}

cases![rollback_works_in_a_context, rollback_works_in_a_context_of_an_ordinary_user];

/// Becomes an ordinary user.
fn drop_privileges() {
    unsafe {
        assert_eq!(libc::setgroups(0, core::ptr::null()), 0);
        assert_eq!(libc::setresgid(65_534, 65_534, 65_534), 0);
        assert_eq!(libc::setresuid(65_534, 65_534, 65_534), 0);
        // What changing the user took away.
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 1), 0);
    }
}

fn is_superuser() -> bool {
    unsafe { libc::geteuid() == 0 }
}

fn rollback_works_in_a_context() {
    rolls_back_in_a_context();
}

fn rollback_works_in_a_context_of_an_ordinary_user() {
    if is_superuser() {
        drop_privileges();
    }
    rolls_back_in_a_context();
}

/// A context that adds its arguments up in a closure that is rolled back gives back each alone, however often control
/// went back and forth meanwhile.
fn rolls_back_in_a_context() {
    let ballast = vec![7_u8; 40 << 20];
    let adder = create(&Spec::new(), move |start| {
        let root = start.creator;
        let sum = std::cell::Cell::new(start.arrival.word);
        let result = Rollback::builder().build().unwrap().serve(
            |last| {
                assert!(matches!(last, None | Some(Outcome::Returned | Outcome::Exited(3))), "{last:?}");
                ControlFlow::Continue(root.switch(sum.get(), &[]).unwrap().word)
            },
            |word| {
                sum.set(sum.get() + word);
                let mut memory = ballast.clone();
                memory[0] = 1;
                std::thread::spawn(|| std::thread::sleep(std::time::Duration::from_secs(1000)));
                let file = std::fs::File::open("/dev/null").unwrap();
                core::mem::forget(file);
                for round in 0..5 {
                    sum.set(sum.get() + root.switch(sum.get() + round, &[]).unwrap().word);
                }
                if word % 2 == 0 {
                    std::process::exit(3);
                }
            },
        );
        panic!("{result:?}")
    })
    .unwrap();
    assert_eq!(adder.switch(100, &[]).unwrap().word, 100);
    for round in 1..20 {
        for step in 0..5 {
            assert_eq!(adder.switch(round, &[]).unwrap().word, 100 + round * (1 + step) + step);
        }
        assert_eq!(adder.switch(round, &[]).unwrap().word, 100);
    }
    adder.close().unwrap();
}
