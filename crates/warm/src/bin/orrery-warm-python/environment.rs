//! The environment variables of a request: in C, in Python, and what follows from them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char};

use pyo3_ffi as ffi;
use rustix::fs::FileType;

use crate::object::{Held, Object, Result, check};

/// Variables that `python3` obeys while it starts and that a started interpreter can no longer obey. A request must
/// agree with the server on them.
const SETTLED_AT_START: [&str; 20] = [
    "PYTHONCASEOK",
    "PYTHONDEBUG",
    "PYTHONDEVMODE",
    "PYTHONDUMPREFS",
    "PYTHONEXECUTABLE",
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
    /// None where the interpreter takes no packages of a user's own, or the same ones for all.
    packages: Option<UserPackages>,
    /// The strings and the array behind C's `environ`, kept alive while C uses them.
    current: RefCell<(Vec<u8>, Vec<*mut c_char>)>,
}

/// The packages of a user's own (PEP 370), as the interpreter was started with them.
#[derive(Debug)]
struct UserPackages {
    home: Vec<u8>,
    /// Where they are below a home.
    tail: Vec<u8>,
    were_there: bool,
}

/// What a request's environment asks of the interpreter.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Wishes<'a> {
    /// Error handler of standard input and output.
    pub(crate) errors: &'static str,
    pub(crate) safe_path: bool,
    pub(crate) no_bytecode: bool,
    pub(crate) unbuffered: bool,
    /// Whether UTF-8 mode is on (PEP 540).
    pub(crate) utf8_mode: bool,
    /// Whether the user's own directory of packages is another than when the interpreter was started, or has come or gone.
    pub(crate) another_home: bool,
    /// `PYTHONPYCACHEPREFIX`.
    pub(crate) cache: Option<&'a [u8]>,
    /// `PYTHONPATH`.
    pub(crate) search: Option<&'a [u8]>,
    /// `PYTHONWARNINGS`.
    pub(crate) warnings: Option<&'a [u8]>,
    /// `PYTHONIOENCODING`.
    pub(crate) encoding: Option<&'a [u8]>,
}

impl<'a> Wishes<'a> {
    fn read(block: &'a [u8], errors: &'static str) -> Self {
        let mut wishes = Self {
            errors,
            safe_path: false,
            no_bytecode: false,
            unbuffered: false,
            utf8_mode: false,
            another_home: false,
            cache: None,
            search: None,
            warnings: None,
            encoding: None,
        };
        for (name, value) in
            pairs(block).filter(|(name, value)| name.starts_with(b"PYTHON") && !value.is_empty())
        {
            match name {
                b"PYTHONSAFEPATH" => wishes.safe_path = true,
                b"PYTHONDONTWRITEBYTECODE" => wishes.no_bytecode = is_on(value),
                b"PYTHONUNBUFFERED" => wishes.unbuffered = is_on(value),
                b"PYTHONPYCACHEPREFIX" => wishes.cache = Some(value),
                b"PYTHONPATH" => wishes.search = Some(value),
                b"PYTHONWARNINGS" => wishes.warnings = Some(value),
                b"PYTHONIOENCODING" => wishes.encoding = Some(value),
                _ => {}
            }
        }
        wishes
    }
}

/// Flags among the variables are on by whatever they say, but for nothing and 0 (`_Py_get_env_flag`).
fn is_on(value: &[u8]) -> bool {
    std::str::from_utf8(value).ok().and_then(|text| text.trim().parse::<i64>().ok()) != Some(0)
}

unsafe extern "C" {
    static mut environ: *mut *mut c_char;
}

impl Settled {
    pub(crate) fn new(held: Held) -> Result<Self> {
        use std::os::unix::ffi::OsStringExt;
        let value = |name: &str| std::env::var_os(name).map(OsStringExt::into_vec);
        let values = SETTLED_AT_START.iter().filter_map(|name| Some((*name, value(name)?))).collect();
        let dict = Object::import(held, c"posix")?.attribute(held, c"environ")?;
        let tzset = Object::import(held, c"time")?.attribute(held, c"tzset")?;
        let site = Object::import(held, c"site")?;
        let packages = site
            .attribute(held, c"ENABLE_USER_SITE")?
            .is_true()
            .then(|| site.method(held, c"getusersitepackages", &[])?.encode())
            .transpose()?;
        // Below PYTHONUSERBASE it is the same for all.
        let home = value("HOME").unwrap_or_default();
        let tail = packages.and_then(|path| path.strip_prefix(home.as_slice()).map(<[u8]>::to_vec));
        let tail = tail.filter(|_| !home.is_empty() && value("PYTHONUSERBASE").is_none());
        let packages = tail.map(|tail| UserPackages { were_there: are_there(&home, &tail), home, tail });
        Ok(Self { values, time_zone: value("TZ"), dict, tzset, packages, current: RefCell::default() })
    }

    /// The variable in `block` that asks for what only a new interpreter could do, if there is one.
    pub(crate) fn objection(&self, block: &[u8]) -> Option<String> {
        let variables: HashMap<&[u8], &[u8]> =
            pairs(block).filter(|(name, _)| name.starts_with(b"PYTHON")).collect();
        let differs = |name: &&&str| {
            let theirs = variables.get(name.as_bytes()).filter(|value| !value.is_empty()).copied();
            theirs != self.values.get(**name).map(Vec::as_slice).filter(|value| !value.is_empty())
        };
        let utf8 = variables.get(&b"PYTHONUTF8"[..]).copied().filter(|value| !value.is_empty());
        if utf8.is_some_and(|value| value != b"0" && value != b"1") {
            return Some("PYTHONUTF8 is neither 0 nor 1, with which python3 does not start".to_owned());
        }
        if utf8 == Some(b"0") && Locale::of(block).settle() == Locale::ForcedC {
            return Some(
                "PYTHONUTF8=0 in the C locale makes ASCII the encoding of file names, which is UTF-8 in a warm \
                 interpreter: choose another locale, or run with --fallback"
                    .to_owned(),
            );
        }
        let name = SETTLED_AT_START.iter().find(differs)?;
        Some(format!(
            "{name} is not the same here as in the server's environment, and a warm interpreter obeys it only when \
             it starts: set it alike for both, or run with --fallback, which starts a python3 of your own then"
        ))
    }

    /// Makes `block`, zero-terminated `NAME=value` strings, the environment of this process.
    pub(crate) fn apply<'a>(&self, held: Held, block: &'a [u8]) -> Result<Wishes<'a>> {
        let mut strings = block.to_vec();
        let locale = Locale::of(&strings).settle();
        if locale == Locale::CoercedC {
            set_variable(&mut strings, b"LC_CTYPE", b"C.UTF-8");
        }
        let utf8_mode = match value_of(&strings, b"PYTHONUTF8") {
            Some(b"1") => true,
            Some(b"0") => false,
            _ => matches!(locale, Locale::CoercedC | Locale::ForcedC),
        };
        let another_home = self.packages.as_ref().is_some_and(|packages| {
            // Without HOME, python3 looks into the system's list of users; nobody runs scripts so.
            let home = value_of(&strings, b"HOME").unwrap_or_default();
            home != packages.home || are_there(home, &packages.tail) != packages.were_there
        });
        if locale == Locale::ForcedC {
            // SAFETY: a C string, and no other thread runs.
            unsafe { libc::setlocale(libc::LC_CTYPE, c"C".as_ptr()) };
        }
        self.fill_dict(held, &strings)?;
        let time_zone = value_of(&strings, b"TZ").map(<[u8]>::to_vec);
        self.install(strings);
        let errors = if locale == Locale::Other && !utf8_mode { "strict" } else { "surrogateescape" };
        if time_zone != self.time_zone {
            self.tzset.call(&[])?;
        }
        Ok(Wishes { utf8_mode, another_home, ..Wishes::read(block, errors) })
    }

    fn fill_dict(&self, held: Held, strings: &[u8]) -> Result<()> {
        // SAFETY: a living dictionary.
        unsafe { ffi::PyDict_Clear(self.dict.pointer()) };
        for (name, value) in pairs(strings) {
            let (name, value) = (Object::bytes(held, name)?, Object::bytes(held, value)?);
            // The first of two strings of one name counts, as for getenv(3).
            // SAFETY: living objects; the reference returned is borrowed.
            let stored =
                unsafe { ffi::PyDict_SetDefault(self.dict.pointer(), name.pointer(), value.pointer()) };
            check(if stored.is_null() { -1 } else { 0 })?;
        }
        Ok(())
    }

    fn install(&self, mut strings: Vec<u8>) {
        let mut array = Vec::with_capacity(memchr::memchr_iter(0, &strings).count() + 1);
        let mut rest = strings.as_mut_slice();
        while let Some(end) = memchr::memchr(0, rest) {
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

/// Returns whether a directory below `home` exists.
fn are_there(home: &[u8], tail: &[u8]) -> bool {
    let found = rustix::fs::stat([home, tail].concat().as_slice());
    found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Directory)
}

/// Sets a variable where it stands, or last, as setenv(3) does.
fn set_variable(block: &mut Vec<u8>, wanted: &[u8], value: &[u8]) {
    let string = [wanted, b"=", value, b"\0"].concat();
    let mut found = false;
    let mut changed: Vec<u8> = Vec::with_capacity(block.len() + string.len());
    for old in block.split_inclusive(|&byte| byte == 0) {
        if old.split(|&byte| byte == b'=').next() == Some(wanted) {
            found = true;
            changed.extend_from_slice(&string);
        } else {
            changed.extend_from_slice(old);
        }
    }
    if !found {
        changed.extend_from_slice(&string);
    }
    *block = changed;
}

fn pairs(block: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    let mut start = 0;
    let strings = memchr::memchr_iter(0, block).chain([block.len()]).map(move |end| {
        let string = &block[start..end.max(start)];
        start = end + 1;
        string
    });
    strings.filter_map(|string| {
        let equals = memchr::memchr(b'=', string)?;
        Some((&string[..equals], &string[equals + 1..]))
    })
}

fn value_of<'a>(block: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    pairs(block).find(|(name, _)| *name == wanted).map(|(_, value)| value)
}

/// Which character set a client's environment asks for. The worker itself runs in `C.UTF-8`.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Locale<'a> {
    /// The C locale, not insisted upon: python3 sets `LC_CTYPE=C.UTF-8` then (PEP 538).
    CoercedC,
    /// The C locale, insisted upon: python3 uses its UTF-8 mode then (PEP 540).
    ForcedC,
    /// What the worker has anyway.
    Ours,
    /// Another, by name and whether `LC_ALL` insists on it.
    Named { name: &'a [u8], forced: bool },
    /// Another locale that exists.
    Other,
}

impl<'a> Locale<'a> {
    fn of(block: &'a [u8]) -> Self {
        let set = |name: &[u8]| value_of(block, name).filter(|value| !value.is_empty());
        let forced = set(b"LC_ALL");
        match forced.or_else(|| set(b"LC_CTYPE")).or_else(|| set(b"LANG")) {
            None => Self::c(block, false),
            Some(b"C" | b"POSIX") => Self::c(block, forced.is_some()),
            Some(b"C.UTF-8" | b"C.utf8") => Self::Ours,
            Some(name) => Self::Named { name, forced: forced.is_some() },
        }
    }

    fn c(block: &[u8], forced: bool) -> Self {
        let insists = forced || value_of(block, b"PYTHONCOERCECLOCALE") == Some(b"0");
        if insists { Self::ForcedC } else { Self::CoercedC }
    }

    /// Sets the C library's character set as python3 would. A locale that does not exist is the C locale.
    fn settle(self) -> Locale<'static> {
        match self {
            Self::CoercedC => Locale::CoercedC,
            Self::ForcedC => Locale::ForcedC,
            Self::Ours => Locale::Ours,
            Self::Other => Locale::Other,
            Self::Named { name, forced } => {
                let known = CString::new(name).is_ok_and(|name| {
                    // SAFETY: a C string, and no other thread runs.
                    !unsafe { libc::setlocale(libc::LC_CTYPE, name.as_ptr()) }.is_null()
                });
                match (known, forced) {
                    (true, _) => {
                        keep_to_utf8();
                        Locale::Other
                    }
                    (false, true) => Locale::ForcedC,
                    (false, false) => Locale::CoercedC,
                }
            }
        }
    }
}

/// File names are UTF-8 in a warm interpreter, so the C library had better agree.
fn keep_to_utf8() {
    // SAFETY: no other thread runs; nl_langinfo answers with a C string, which is read before the next call.
    unsafe {
        if CStr::from_ptr(libc::nl_langinfo(libc::CODESET)) != c"UTF-8" {
            libc::setlocale(libc::LC_CTYPE, c"C.UTF-8".as_ptr());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_locale_is_chosen_as_the_c_library_chooses() {
        let german = |forced| Locale::Named { name: b"de_DE.UTF-8", forced };
        assert_eq!(Locale::of(b""), Locale::CoercedC);
        assert_eq!(Locale::of(b"LANG=C\0"), Locale::CoercedC);
        assert_eq!(Locale::of(b"LC_ALL=\0LANG=de_DE.UTF-8\0"), german(false));
        assert_eq!(Locale::of(b"LC_ALL=de_DE.UTF-8\0LANG=C\0"), german(true));
        assert_eq!(Locale::of(b"LC_ALL=POSIX\0LANG=de_DE.UTF-8\0"), Locale::ForcedC);
        assert_eq!(Locale::of(b"LANG=C\0LC_CTYPE=C.UTF-8\0"), Locale::Ours);
        let missing = |forced| Locale::Named { name: b"xx_YY.UTF-8", forced }.settle();
        assert_eq!((missing(false), missing(true)), (Locale::CoercedC, Locale::ForcedC));
    }

    #[test]
    fn a_variable_is_set_where_it_stands() {
        let mut block = b"A=1\0LC_CTYPE=x\0LC_CTYPE_NOT=y\0".to_vec();
        set_variable(&mut block, b"LC_CTYPE", b"z");
        assert_eq!(block, b"A=1\0LC_CTYPE=z\0LC_CTYPE_NOT=y\0");
        set_variable(&mut block, b"B", b"");
        assert_eq!(block, b"A=1\0LC_CTYPE=z\0LC_CTYPE_NOT=y\0B=\0");
    }
}
