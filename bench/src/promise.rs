//! SPECIFICATION.md's numeric promises, held against what was measured.

mod parse;
mod verdict;

pub use parse::{Comparison, ParseError, Promise, Quantity, parse};
pub use verdict::{Verdict, judge};
