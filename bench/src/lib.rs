//! The benchmark harness.
//!
//! A number means something only beside what its reader would otherwise have used. So everything here is a
//! comparison: a [`Group`] puts *ours* beside its rivals, each a [`Contender`]; a [`Case`] is one thing that
//! all of them do; and [`Bench::run`] measures them interleaved in one run, prints a table and leaves
//! `target/bench/NAME.json`, which [`promise`] holds SPECIFICATION.md against.
//!
//! ```no_run
//! use clap::Parser;
//! use orrery_bench::{Bench, Case, Entry, Group, Options, Quantity, Unit, batched};
//!
//! #[derive(Parser)]
//! struct Arguments {
//!     #[command(flatten)]
//!     options: Options,
//! }
//!
//! fn main() -> anyhow::Result<std::process::ExitCode> {
//!     let mut bench = Bench::new("sorting", Arguments::parse().options);
//!     let numbers = |work: &str| -> anyhow::Result<Vec<u32>> { Ok((0..work.parse()?).rev().collect()) };
//!     let ours = Entry::new("unstable", move || Ok(batched(move |work| Ok(numbers(work)?.sort_unstable()))));
//!     let rival = Entry::new("stable", move || Ok(batched(move |work| Ok(numbers(work)?.sort()))));
//!     bench.group(
//!         Group::new("reversed", ours)
//!             .against(rival)
//!             .case(Case::new("1000").quantity("reversed/1000", Quantity::Mean(Unit::Microseconds))),
//!     );
//!     bench.run()
//! }
//! ```

mod c_program;
mod contender;
mod field;
mod options;
mod part;
mod plan;
mod report;
mod runner;
mod sitting;
mod work;
mod worker;

pub mod content_store;
pub mod copies;
pub mod documents;
pub mod examined;
pub mod examples;
pub mod footprint;
pub mod key_value;
pub mod lock_manager;
pub mod machine;
pub mod ours;
pub mod pairs;
pub mod promise;
pub mod record;
pub mod rival;
pub mod script;
pub mod stats;
pub mod tls;

pub use contender::{Contender, Sample, Skipped, batched, single};
pub use options::{Options, Pin};
pub use part::{CommandLine, Part};
pub use plan::{Case, Entry, Group, Quantity, Unit};
pub use report::significant;
pub use runner::Bench;
pub use work::Work;
pub use worker::{Worker, serve};
