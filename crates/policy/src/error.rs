//! What is wrong with a policy, and where.

use std::ops::Range;

/// An error in a policy, with its position.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name}:{line}:{column}: {message}")]
#[non_exhaustive]
pub struct PolicyError {
    /// The name of the text, usually its path.
    pub name: String,
    /// The line, counted from 1.
    pub line: usize,
    /// The column in characters, counted from 1.
    pub column: usize,
    /// What is wrong, and what would be right.
    pub message: String,
}

impl PolicyError {
    /// Creates an error about the byte at `offset` of `text`.
    #[must_use]
    pub fn at(name: &str, text: &str, offset: usize, message: String) -> Self {
        let (line, column) = position(text, offset);
        Self { name: name.to_owned(), line, column, message }
    }
}

/// An error about a part of a text, before it is known which line that is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The bytes that are wrong.
    pub span: Range<usize>,
    /// What is wrong, and what would be right.
    pub message: String,
}

/// Returns line and column of a byte, counted from 1.
pub(crate) fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or(before).chars().count() + 1;
    (line, column)
}
