//! The derive macro behind `orrery_orbit::Delegate`, which has the documentation.
//!
//! A derive cannot change the structure that it is written above. So that structure stays as the form in which values are
//! made, and the macro adds two more: the watched fields, and the object that has the other fields and leads to these.

mod names;
mod split;

use proc_macro::TokenStream;
use syn::{DeriveInput, parse_macro_input};

/// Implements `orrery_orbit::Delegate` for a structure: see there.
#[proc_macro_derive(Delegate, attributes(watched, delegate))]
pub fn delegate(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    split::expand(&input).unwrap_or_else(syn::Error::into_compile_error).into()
}
