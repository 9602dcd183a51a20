//! The benchmark harness.
//!
//! A number means something only beside what its reader would otherwise use. So everything here is a comparison: a
//! [`Group`] puts *ours* beside its rivals, each a [`Contender`]; a [`Case`] is one thing that all of them do; and
//! [`Bench::run`] measures them interleaved in one run, prints a table and leaves `target/bench/NAME.json`, which
//! [`promise`](orrery_report::promise) compares with `bench/promises.toml`.
//!
//! ```no_run
//! use orrery_bench::{Bench, Case, Group, Unit, batched};
//!
//! fn main() -> anyhow::Result<std::process::ExitCode> {
//!     let mut bench = Bench::new("sorting", "Unstable sorting beside stable sorting");
//!     let pin = bench.options().pin()?;
//!     let numbers = |work: &str| -> anyhow::Result<Vec<u32>> { Ok((0..work.parse()?).rev().collect()) };
//!     let ours = bench.process("unstable", pin, || Ok(batched(|work| Ok(numbers(work)?.sort_unstable()))));
//!     let rival = bench.process("stable", pin, || Ok(batched(|work| Ok(numbers(work)?.sort()))));
//!     bench.group(Group::new("reversed", ours, [rival]).case(Case::mean("1000", "reversed/1000", Unit::Microseconds)));
//!     bench.run()
//! }
//! ```

mod bench;
mod c_example;
mod contender;
mod counts;
mod group;
mod options;
mod process;
mod round;
mod work;

pub mod changed_pages;
pub mod content_store;
pub mod copies;
pub mod documents;
pub mod examples;
pub mod ffmpeg;
pub mod footprint;
pub mod guests;
pub mod instances;
pub mod key_value;
pub mod lock_manager;
pub mod machine;
pub mod ours;
pub mod packets;
pub mod pairs;
pub mod plugins;
pub mod programs;
pub mod report;
pub mod resp;
pub mod rival;
pub mod roots;
pub mod script;
pub mod tls;
pub mod transcoding;
pub mod trees;
pub mod working_set;

pub use bench::Bench;
pub use contender::{Contender, Sample, Skipped, batched, single};
pub use group::{Case, Entry, Group, Quantity, Unit};
pub use options::{Options, Pin};
pub use process::{Worker, serve};
pub use work::Work;
