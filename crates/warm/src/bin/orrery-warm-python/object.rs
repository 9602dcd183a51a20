//! The little of CPython's C interface that a worker needs, made safe.
//!
//! An [`Object`] is one owned reference. It is neither `Send` nor `Sync`, is made only on the worker's one thread,
//! after the interpreter was started there and took the interpreter lock for good; so wherever an `Object` or a
//! [`Held`] is at hand, the lock is held and the interpreter is alive. All the `SAFETY` comments below build on that
//! and speak of nothing but what else a call needs.

use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_int};
use std::marker::PhantomData;
use std::ptr::NonNull;

use pyo3_ffi as ffi;

/// Proof that this thread holds the interpreter lock, and what is needed everywhere besides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    words: &'static Words,
    not_send: PhantomData<*mut ()>,
}

/// Strings and a dictionary that are looked up again and again. To make a string for every look-up would write to memory,
/// and every page that a request writes to has to be restored.
#[derive(Debug)]
struct Words {
    sys: Object,
    strings: Vec<(&'static CStr, Object)>,
}

/// The words.
const WORDS: [&CStr; 37] = [
    c"_",
    c"__annotations__",
    c"__builtins__",
    c"__cached__",
    c"__dict__",
    c"__file__",
    c"__loader__",
    c"__main__",
    c"__stderr__",
    c"__stdin__",
    c"__stdout__",
    c"_active",
    c"_shutdown",
    c"_shutdown_locks",
    c"_threading_atexits",
    c"argv",
    c"buffer",
    c"close",
    c"closed",
    c"excepthook",
    c"flush",
    c"last_traceback",
    c"last_type",
    c"last_value",
    c"meta_path",
    c"modules",
    c"orig_argv",
    c"path",
    c"path_hooks",
    c"path_importer_cache",
    c"ps1",
    c"ps2",
    c"stderr",
    c"stdin",
    c"stdout",
    c"threading",
    c"__interactivehook__",
];

impl Held {
    /// # Safety
    /// The calling thread holds the interpreter lock, and keeps it whenever Rust code of this program runs.
    pub(crate) unsafe fn new() -> Result<Self> {
        // SAFETY: the lock is held, by the connection's promise; gives a borrowed reference or null.
        let sys = unsafe { Object::borrow(ffi::PyImport_AddModule(c"sys".as_ptr())) }.ok_or(Raised)?;
        // SAFETY: a module, whose dictionary is borrowed.
        let sys = unsafe { Object::borrow(ffi::PyModule_GetDict(sys.pointer())) }.ok_or(Raised)?;
        let strings = WORDS.iter().map(|&word| Ok((word, intern(word)?))).collect::<Result<_>>()?;
        Ok(Self { words: Box::leak(Box::new(Words { sys, strings })), not_send: PhantomData })
    }

    /// Returns a word as a string object. One that is not in the table is made, for good.
    fn word(self, name: &CStr) -> Result<&'static Object> {
        match self.words.strings.iter().find(|(known, _)| *known == name) {
            Some((_, object)) => Ok(object),
            None => Ok(Box::leak(Box::new(intern(name)?))),
        }
    }
}

fn intern(word: &CStr) -> Result<Object> {
    // SAFETY: a C string; gives a new reference or null. Called where the lock is held.
    unsafe { Object::own(ffi::PyUnicode_InternFromString(word.as_ptr())) }
}

/// A Python exception is set in the thread state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Raised;

pub(crate) type Result<T> = std::result::Result<T, Raised>;

/// An owned reference to a Python object.
#[derive(Debug)]
pub(crate) struct Object(NonNull<ffi::PyObject>);

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: `self` owns one reference.
        unsafe { ffi::Py_DECREF(self.0.as_ptr()) }
    }
}

impl Clone for Object {
    fn clone(&self) -> Self {
        // SAFETY: `self` keeps the object alive meanwhile.
        unsafe { ffi::Py_INCREF(self.0.as_ptr()) }
        Self(self.0)
    }
}

impl Object {
    /// Takes over a new reference as C functions return it: null means that an exception is set.
    ///
    /// # Safety
    /// `pointer` is null or a reference that the connection owns.
    pub(crate) unsafe fn own(pointer: *mut ffi::PyObject) -> Result<Self> {
        NonNull::new(pointer).map(Self).ok_or(Raised)
    }

    /// Makes an own reference of a borrowed one; `None` for null.
    ///
    /// # Safety
    /// `pointer` is null or points to a living object.
    pub(crate) unsafe fn borrow(pointer: *mut ffi::PyObject) -> Option<Self> {
        let pointer = NonNull::new(pointer)?;
        // SAFETY: living, by the connection's promise.
        unsafe { ffi::Py_INCREF(pointer.as_ptr()) }
        Some(Self(pointer))
    }

    /// Returns the bare pointer, borrowed.
    pub(crate) fn pointer(&self) -> *mut ffi::PyObject {
        self.0.as_ptr()
    }

    pub(crate) fn none(_: Held) -> Self {
        // SAFETY: None lives for ever.
        let none = unsafe { Self::borrow(ffi::Py_None()) };
        none.unwrap_or_else(|| unreachable!("None is not null"))
    }

    pub(crate) fn boolean(_: Held, value: bool) -> Self {
        // SAFETY: the two booleans live for ever.
        let object = unsafe { Self::borrow(if value { ffi::Py_True() } else { ffi::Py_False() }) };
        object.unwrap_or_else(|| unreachable!("a boolean is not null"))
    }

    pub(crate) fn integer(_: Held, value: u64) -> Result<Self> {
        // SAFETY: gives a new reference or null.
        unsafe { Self::own(ffi::PyLong_FromUnsignedLongLong(value)) }
    }

    /// Returns a `str` from a file name, argument or such, as Python decodes them (`os.fsdecode`).
    pub(crate) fn decode(_: Held, bytes: &[u8]) -> Result<Self> {
        // SAFETY: pointer and length are a slice's; gives a new reference or null.
        unsafe {
            Self::own(ffi::PyUnicode_DecodeFSDefaultAndSize(bytes.as_ptr().cast(), signed(bytes.len())))
        }
    }

    pub(crate) fn bytes(_: Held, bytes: &[u8]) -> Result<Self> {
        // SAFETY: pointer and length are a slice's; gives a new reference or null.
        unsafe { Self::own(ffi::PyBytes_FromStringAndSize(bytes.as_ptr().cast(), signed(bytes.len()))) }
    }

    pub(crate) fn list(_: Held, items: impl IntoIterator<Item = Result<Self>>) -> Result<Self> {
        // SAFETY: gives a new reference or null.
        let list = unsafe { Self::own(ffi::PyList_New(0))? };
        for item in items {
            // SAFETY: both are living objects, the first a list.
            check(unsafe { ffi::PyList_Append(list.pointer(), item?.pointer()) })?;
        }
        Ok(list)
    }

    pub(crate) fn dict(_: Held) -> Result<Self> {
        // SAFETY: gives a new reference or null.
        unsafe { Self::own(ffi::PyDict_New()) }
    }

    /// Imports a module, or finds it imported.
    pub(crate) fn import(_: Held, name: &CStr) -> Result<Self> {
        // SAFETY: `name` is a C string; gives a new reference or null.
        unsafe { Self::own(ffi::PyImport_ImportModule(name.as_ptr())) }
    }

    pub(crate) fn attribute(&self, held: Held, name: &CStr) -> Result<Self> {
        // SAFETY: living objects; gives a new reference or null.
        unsafe { Self::own(ffi::PyObject_GetAttr(self.pointer(), held.word(name)?.pointer())) }
    }

    pub(crate) fn set_attribute(&self, held: Held, name: &CStr, value: &Self) -> Result<()> {
        // SAFETY: the objects are held meanwhile, and so is the interpreter.
        check(unsafe { ffi::PyObject_SetAttr(self.pointer(), held.word(name)?.pointer(), value.pointer()) })
    }

    /// The value under `key` of a dictionary, untouched: null if there is none.
    pub(crate) fn peek(&self, held: Held, key: &CStr) -> *mut ffi::PyObject {
        // SAFETY: living objects; gives a borrowed reference or null, and leaves no exception.
        held.word(key)
            .map_or(std::ptr::null_mut(), |key| unsafe { ffi::PyDict_GetItem(self.pointer(), key.pointer()) })
    }

    /// The value under `key`, if there is one and `self` is a dictionary.
    pub(crate) fn item(&self, held: Held, key: &CStr) -> Option<Self> {
        let key = held.word(key).ok()?;
        // SAFETY: living objects; gives a borrowed reference or null, and leaves no exception.
        unsafe { Self::borrow(ffi::PyDict_GetItem(self.pointer(), key.pointer())) }
    }

    /// Sets an item of a dictionary.
    pub(crate) fn set_item(&self, held: Held, key: &CStr, value: &Self) -> Result<()> {
        // SAFETY: the objects are held meanwhile, and so is the interpreter.
        check(unsafe { ffi::PyDict_SetItem(self.pointer(), held.word(key)?.pointer(), value.pointer()) })
    }

    /// Removes an item of a dictionary, if it is there.
    pub(crate) fn remove_item(&self, held: Held, key: &CStr) {
        // SAFETY: the objects are held meanwhile, and so is the interpreter.
        let removed = held
            .word(key)
            .is_ok_and(|key| unsafe { ffi::PyDict_DelItem(self.pointer(), key.pointer()) } == 0);
        if !removed {
            clear();
        }
    }

    pub(crate) fn call(&self, arguments: &[&Self]) -> Result<Self> {
        let pointers: Vec<_> = arguments.iter().map(|argument| argument.pointer()).collect();
        // SAFETY: `pointers` holds as many living objects as is said; gives a new reference or null.
        unsafe {
            Self::own(ffi::PyObject_Vectorcall(
                self.pointer(),
                pointers.as_ptr(),
                pointers.len(),
                std::ptr::null_mut(),
            ))
        }
    }

    pub(crate) fn method(&self, held: Held, name: &CStr, arguments: &[&Self]) -> Result<Self> {
        self.attribute(held, name)?.call(arguments)
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    pub(crate) fn is_none(&self) -> bool {
        // SAFETY: only the address is taken.
        self.pointer() == unsafe { ffi::Py_None() }
    }

    /// Returns whether the object's type is `class` or derived from it: asks neither object anything.
    pub(crate) fn has_type_below(&self, class: &Self) -> bool {
        // SAFETY: living objects, the second a class.
        unsafe { ffi::PyType_IsSubtype(ffi::Py_TYPE(self.pointer()), class.pointer().cast()) != 0 }
    }

    pub(crate) fn is_true(&self) -> bool {
        // SAFETY: a living object.
        let answer = unsafe { ffi::PyObject_IsTrue(self.pointer()) };
        if answer == -1 {
            clear();
        }
        answer == 1
    }

    /// The entries of a dictionary, as they are now.
    pub(crate) fn entries(&self) -> Vec<(Self, Self)> {
        let (mut position, mut key, mut value) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        let mut entries = Vec::new();
        // SAFETY: the pointers are to live locals; nothing changes the dictionary meanwhile, as no Python code runs.
        while unsafe { ffi::PyDict_Next(self.pointer(), &raw mut position, &raw mut key, &raw mut value) }
            != 0
        {
            // SAFETY: borrowed from the living dictionary.
            if let (Some(key), Some(value)) = unsafe { (Self::borrow(key), Self::borrow(value)) } {
                entries.push((key, value));
            }
        }
        entries
    }

    /// The entries of a dictionary whose addresses are not in `known`; touches no others, so that nothing is
    /// written to them.
    pub(crate) fn entries_not_in(&self, known: &HashSet<(usize, usize)>) -> Vec<(Self, Self)> {
        let (mut position, mut key, mut value) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        let mut entries = Vec::new();
        // SAFETY: as in `entries`.
        while unsafe { ffi::PyDict_Next(self.pointer(), &raw mut position, &raw mut key, &raw mut value) }
            != 0
        {
            if known.contains(&(key.addr(), value.addr())) {
                continue;
            }
            // SAFETY: as in `entries`.
            if let (Some(key), Some(value)) = unsafe { (Self::borrow(key), Self::borrow(value)) } {
                entries.push((key, value));
            }
        }
        entries
    }

    /// Returns the items of a tuple.
    pub(crate) fn parts(&self) -> Result<Vec<Self>> {
        // SAFETY: a living object; -1 and an exception for what is no tuple.
        let length = unsafe { ffi::PyTuple_Size(self.pointer()) };
        if length == -1 {
            return Err(Raised);
        }
        // SAFETY: gives a borrowed reference to a living item, or null.
        let part = |index| unsafe { Self::borrow(ffi::PyTuple_GetItem(self.pointer(), index)) }.ok_or(Raised);
        (0..length).map(part).collect()
    }

    /// Returns an integer's value.
    pub(crate) fn number(&self) -> Result<i64> {
        // SAFETY: a living object.
        let value = unsafe { ffi::PyLong_AsLongLong(self.pointer()) };
        // SAFETY: the lock is held wherever an object is at hand.
        if value == -1 && unsafe { !ffi::PyErr_Occurred().is_null() } { Err(Raised) } else { Ok(value) }
    }

    /// Inserts an item at the beginning of a list.
    pub(crate) fn prepend(&self, item: &Self) -> Result<()> {
        // SAFETY: living objects; -1 and an exception if the first is no list.
        check(unsafe { ffi::PyList_Insert(self.pointer(), 0, item.pointer()) })
    }

    /// Returns a string's text in UTF-8.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let mut length = 0;
        // SAFETY: a living object and a pointer to a live local; null for what is no string or has lone surrogates.
        let text = unsafe { ffi::PyUnicode_AsUTF8AndSize(self.pointer(), &raw mut length) };
        if text.is_null() {
            return Err(Raised);
        }
        // SAFETY: the text belongs to the living string and is as long as said.
        Ok(unsafe { std::slice::from_raw_parts(text.cast::<u8>(), usize::try_from(length).unwrap_or(0)) }
            .to_vec())
    }

    /// Returns how many entries a dictionary has.
    pub(crate) fn length(&self) -> usize {
        // SAFETY: a living object; -1 for what is no dictionary.
        usize::try_from(unsafe { ffi::PyDict_Size(self.pointer()) }).unwrap_or(0)
    }

    /// The items of a list, as they are now.
    pub(crate) fn items(&self) -> Vec<Self> {
        let mut items = Vec::new();
        // SAFETY: a living object; -1 for what is no list, and then the loop does not run.
        let length = unsafe { ffi::PyList_Size(self.pointer()) };
        for index in 0..length {
            // SAFETY: gives a borrowed reference to a living item, or null.
            items.extend(unsafe { Self::borrow(ffi::PyList_GetItem(self.pointer(), index)) });
        }
        items
    }
}

/// Returns a length as CPython counts.
pub(crate) fn signed(length: usize) -> ffi::Py_ssize_t {
    ffi::Py_ssize_t::try_from(length).unwrap_or(ffi::Py_ssize_t::MAX)
}

pub(crate) fn check(status: c_int) -> Result<()> {
    if status == -1 { Err(Raised) } else { Ok(()) }
}

/// Forgets the exception that is set.
pub(crate) fn clear() {
    // SAFETY: called where a `Raised` or an `Object` is at hand.
    unsafe { ffi::PyErr_Clear() }
}

/// Reports the exception that is set as one that nobody could catch.
pub(crate) fn unraisable(context: Option<&Object>) {
    let context = context.map_or(std::ptr::null_mut(), Object::pointer);
    // SAFETY: null or a living object.
    unsafe { ffi::PyErr_WriteUnraisable(context) }
}

/// An attribute of `sys`, as C code gets it: without running Python code.
pub(crate) fn sys(held: Held, name: &CStr) -> Option<Object> {
    held.words.sys.item(held, name)
}

/// Sets an attribute of `sys`.
pub(crate) fn set_sys(held: Held, name: &CStr, value: &Object) -> Result<()> {
    held.words.sys.set_item(held, name, value)
}

/// Writes a line to `sys.stderr`, as far as that goes.
pub(crate) fn complain(_: Held, line: &[u8]) {
    for piece in line.split(|&byte| byte == 0) {
        let text = [piece, b"\0"].concat();
        // SAFETY: both are C strings, and the format takes one. It prints at most 1,000 bytes.
        unsafe { crate::cpython::PySys_WriteStderr(c"%s".as_ptr(), text.as_ptr().cast::<c_char>()) }
    }
}
