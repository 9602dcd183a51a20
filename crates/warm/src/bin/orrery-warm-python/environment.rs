//! The environment variables of a request: in C, in Python, and what follows from them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char};

use pyo3_ffi as ffi;

use crate::object::{Held, Object, Result, check};

/// Variables that `python3` obeys while it starts and that a started interpreter can no longer obey. A request must
/// agree with the server on them.
const SETTLED_AT_START: [&str; 19] = [
    "PYTHONCASEOK",
    "PYTHONDEBUG",
    "PYTHONDEVMODE",
    "PYTHONDUMPREFS",
    "PYTHONFAULTHANDLER",
    "PYTHONHASHSEED",
    "PYTHONHOME",
    "PYTHONINSPECT",
    "PYTHONINTMAXSTRDIGITS",
    "PYTHONMALLOC",
    "PYTHONMALLOCSTATS",
    "PYTHONNODEBUGRANGES",
    "PYTHONNOUSERSITE",
    "PYTHONOPTIMIZE",
    "PYTHONPLATLIBDIR",
    "PYTHONPROFILEIMPORTTIME",
    "PYTHONTRACEMALLOC",
    "PYTHONUSERBASE",
    "PYTHONVERBOSE",
];

/// Variables that belong to a request and must not shape the interpreter that all requests share.
pub(crate) const LEFT_TO_REQUESTS: [&str; 8] = [
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONIOENCODING",
    "PYTHONPATH",
    "PYTHONPYCACHEPREFIX",
    "PYTHONSAFEPATH",
    "PYTHONUNBUFFERED",
    "PYTHONUTF8",
    "PYTHONWARNINGS",
];

/// What the server's own environment settled.
#[derive(Debug)]
pub(crate) struct Settled {
    values: HashMap<&'static str, Vec<u8>>,
    time_zone: Option<Vec<u8>>,
    /// `posix.environ`, which is also what `os.environ` keeps its values in.
    dict: Object,
    tzset: Object,
    /// The strings and the array behind C's `environ`, kept alive while C uses them.
    current: RefCell<(Vec<u8>, Vec<*mut c_char>)>,
}

/// What a request's environment asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Wishes {
    /// Error handler of standard input and output.
    pub(crate) errors: &'static str,
    pub(crate) safe_path: bool,
}

unsafe extern "C" {
    static mut environ: *mut *mut c_char;
}

impl Settled {
    pub(crate) fn new(held: Held) -> Result<Self> {
        use std::os::unix::ffi::OsStringExt;
        let value = |name: &str| std::env::var_os(name).map(OsStringExt::into_vec);
        let values = SETTLED_AT_START
            .iter()
            .filter_map(|name| Some((*name, value(name)?)))
            .collect();
        let dict = Object::import(held, c"posix")?.attribute(c"environ")?;
        let tzset = Object::import(held, c"time")?.attribute(c"tzset")?;
        Ok(Self {
            values,
            time_zone: value("TZ"),
            dict,
            tzset,
            current: RefCell::default(),
        })
    }

    /// The variable in `block` that asks for what only a new interpreter could do, if there is one.
    pub(crate) fn objection(&self, block: &[u8]) -> Option<String> {
        let variables: HashMap<&[u8], &[u8]> = pairs(block)
            .filter(|(name, _)| name.starts_with(b"PYTHON"))
            .collect();
        let differs = |name: &&&str| {
            let theirs = variables
                .get(name.as_bytes())
                .filter(|value| !value.is_empty())
                .copied();
            theirs
                != self
                    .values
                    .get(**name)
                    .map(Vec::as_slice)
                    .filter(|value| !value.is_empty())
        };
        let name = SETTLED_AT_START.iter().find(differs)?;
        Some(format!(
            "{name} is not the same here as in the server's environment, and a warm interpreter obeys it only when \
             it starts: set it alike for both, or run with --fallback, which starts a python3 of your own then"
        ))
    }

    /// Makes `block`, zero-terminated `NAME=value` strings, the environment of this process.
    pub(crate) fn apply(&self, held: Held, block: &[u8]) -> Result<Wishes> {
        let mut strings = block.to_vec();
        let locale = Locale::of(&strings);
        if locale == Locale::CoercedC {
            strings.retain_variables(|name| name != b"LC_CTYPE");
            strings.extend_from_slice(b"LC_CTYPE=C.UTF-8\0");
        }
        self.fill_dict(held, &strings)?;
        let time_zone = value_of(&strings, b"TZ").map(<[u8]>::to_vec);
        let safe_path = value_of(&strings, b"PYTHONSAFEPATH").is_some_and(|value| !value.is_empty());
        self.install(strings);
        let errors = locale.settle();
        if time_zone != self.time_zone {
            self.tzset.call(&[])?;
        }
        Ok(Wishes { errors, safe_path })
    }

    fn fill_dict(&self, held: Held, strings: &[u8]) -> Result<()> {
        // SAFETY: a living dictionary.
        unsafe { ffi::PyDict_Clear(self.dict.pointer()) };
        for (name, value) in pairs(strings) {
            let (name, value) = (Object::bytes(held, name)?, Object::bytes(held, value)?);
            // The first of two strings of one name counts, as for getenv(3).
            // SAFETY: living objects; the reference given back is borrowed.
            let stored =
                unsafe { ffi::PyDict_SetDefault(self.dict.pointer(), name.pointer(), value.pointer()) };
            check(if stored.is_null() { -1 } else { 0 })?;
        }
        Ok(())
    }

    fn install(&self, mut strings: Vec<u8>) {
        let mut array = Vec::with_capacity(strings.iter().filter(|&&byte| byte == 0).count() + 1);
        let mut rest = strings.as_mut_slice();
        while let Some(end) = rest.iter().position(|&byte| byte == 0) {
            let (string, others) = rest.split_at_mut(end + 1);
            array.push(string.as_mut_ptr().cast::<c_char>());
            rest = others;
        }
        array.push(std::ptr::null_mut());
        // SAFETY: no other thread runs; the array is terminated by a null and points at terminated strings, and
        // both are kept in `self` until the next call replaces them in the same way.
        unsafe { environ = array.as_mut_ptr() };
        self.current.replace((strings, array));
    }
}

trait RetainVariables {
    fn retain_variables(&mut self, keep: impl Fn(&[u8]) -> bool);
}

impl RetainVariables for Vec<u8> {
    fn retain_variables(&mut self, keep: impl Fn(&[u8]) -> bool) {
        let kept = self.split_inclusive(|&byte| byte == 0).filter(|string| {
            let name = string.split(|&byte| byte == b'=').next().unwrap_or_default();
            keep(name)
        });
        *self = kept.flatten().copied().collect();
    }
}

fn pairs(block: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    block.split(|&byte| byte == 0).filter_map(|string| {
        let equals = string.iter().position(|&byte| byte == b'=')?;
        Some((&string[..equals], &string[equals + 1..]))
    })
}

fn value_of<'a>(block: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    pairs(block)
        .find(|(name, _)| *name == wanted)
        .map(|(_, value)| value)
}

/// Which character set a client's environment asks for. The worker itself runs in `C.UTF-8`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Locale {
    /// The C locale, not insisted upon: python3 sets `LC_CTYPE=C.UTF-8` then (PEP 538).
    CoercedC,
    /// The C locale by `LC_ALL`: python3 uses its UTF-8 mode then (PEP 540).
    ForcedC,
    /// What the worker has anyway.
    Ours,
    /// Another.
    Other,
}

impl Locale {
    fn of(block: &[u8]) -> Self {
        let set = |name: &[u8]| value_of(block, name).filter(|value| !value.is_empty());
        let forced = set(b"LC_ALL");
        match forced.or_else(|| set(b"LC_CTYPE")).or_else(|| set(b"LANG")) {
            None => Self::CoercedC,
            Some(b"C" | b"POSIX") if forced.is_some() => Self::ForcedC,
            Some(b"C" | b"POSIX") => Self::CoercedC,
            Some(b"C.UTF-8" | b"C.utf8") => Self::Ours,
            Some(_) => Self::Other,
        }
    }

    /// Sets the C library's character set as python3 would, and gives the error handler that python3 would choose.
    fn settle(&self) -> &'static str {
        if *self != Self::Other {
            return "surrogateescape";
        }
        // SAFETY: no other thread runs; the strings are C strings, and the answer is read before the next call.
        unsafe {
            if libc::setlocale(libc::LC_CTYPE, c"".as_ptr()).is_null() {
                return "surrogateescape";
            }
            let charset = CStr::from_ptr(libc::nl_langinfo(libc::CODESET));
            if charset != c"UTF-8" {
                // File names stay UTF-8 in a warm interpreter, so the rest had better agree with them.
                libc::setlocale(libc::LC_CTYPE, c"C.UTF-8".as_ptr());
            }
        }
        "strict"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_locale_is_chosen_as_the_c_library_chooses() {
        assert_eq!(Locale::of(b""), Locale::CoercedC);
        assert_eq!(Locale::of(b"LANG=C\0"), Locale::CoercedC);
        assert_eq!(Locale::of(b"LC_ALL=\0LANG=de_DE.UTF-8\0"), Locale::Other);
        assert_eq!(Locale::of(b"LC_ALL=POSIX\0LANG=de_DE.UTF-8\0"), Locale::ForcedC);
        assert_eq!(Locale::of(b"LANG=C\0LC_CTYPE=C.UTF-8\0"), Locale::Ours);
    }

    #[test]
    fn variables_are_dropped_by_name() {
        let mut block = b"A=1\0LC_CTYPE=x\0LC_CTYPE_NOT=y\0".to_vec();
        block.retain_variables(|name| name != b"LC_CTYPE");
        assert_eq!(block, b"A=1\0LC_CTYPE_NOT=y\0");
    }
}
