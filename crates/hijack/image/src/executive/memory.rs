//! The program's code: which memory it is, and what rewriting puts there.

pub(crate) mod code_page;
pub(crate) mod code_ranges;
pub(crate) mod jump_pads;
pub(crate) mod saved_code;
pub(crate) mod stub_pages;
