//! What the generated structures are called.

use quote::format_ident;
use syn::{DeriveInput, Ident, Result};

/// The names of both structures.
pub(crate) struct Names {
    /// That of the object: `DelegatedTransaction`, unless the user says `#[delegate(object = Name)]`.
    pub(crate) object: Ident,
    /// That of its watched fields: `TransactionWatched`, or `#[delegate(watched = Name)]`.
    pub(crate) watched: Ident,
}

impl Names {
    pub(crate) fn of(input: &DeriveInput) -> Result<Self> {
        let name = &input.ident;
        let mut names =
            Self { object: format_ident!("Delegated{name}"), watched: format_ident!("{name}Watched") };
        for attribute in input.attrs.iter().filter(|attribute| attribute.path().is_ident("delegate")) {
            attribute.parse_nested_meta(|meta| {
                let place = if meta.path.is_ident("object") {
                    &mut names.object
                } else if meta.path.is_ident("watched") {
                    &mut names.watched
                } else {
                    return Err(meta.error("only `object = Name` and `watched = Name` can be said here"));
                };
                *place = meta.value()?.parse()?;
                Ok(())
            })?;
        }
        Ok(names)
    }
}
