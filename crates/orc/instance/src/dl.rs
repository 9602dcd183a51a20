//! The dynamic loader's functions: dlopen(3), dlsym(3) and their relatives.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::NonNull;

/// A handle of dlopen(3).
#[derive(Debug)]
pub(crate) struct Handle(NonNull<c_void>);

// SAFETY: a handle may be used from any thread.
unsafe impl Send for Handle {}
// SAFETY: a handle may be used from any thread.
unsafe impl Sync for Handle {}

impl Handle {
    pub(crate) fn as_ptr(&self) -> *mut c_void {
        self.0.as_ptr()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: it is open, and its last use is this.
        unsafe { libc::dlclose(self.0.as_ptr()) };
    }
}

fn error() -> String {
    // SAFETY: the text, if there is one, is valid until the next call of this thread.
    let text = unsafe {
        let text = libc::dlerror();
        if text.is_null() { None } else { Some(CStr::from_ptr(text).to_string_lossy().into_owned()) }
    };
    text.unwrap_or_else(|| "the dynamic loader gives no reason".to_owned())
}

/// Returns a library that the process has already.
pub(crate) fn loaded(name: &CStr) -> Option<Handle> {
    // SAFETY: the name is a C string; nothing is loaded.
    NonNull::new(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) }).map(Handle)
}

/// Loads a library; the error is the text of dlerror(3).
pub(crate) fn open(name: &CStr) -> Result<Handle, String> {
    // SAFETY: loading runs the library's constructors, which is what the caller asks for.
    let handle = NonNull::new(unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) });
    handle.map(Handle).ok_or_else(error)
}

fn raw(scope: Option<&Handle>) -> *mut c_void {
    scope.map_or(libc::RTLD_DEFAULT, Handle::as_ptr)
}

/// Finds a symbol in a library and what it needs, or in the program and what that was linked to.
pub(crate) fn symbol(scope: Option<&Handle>, name: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the handle is open, and the name a C string.
    NonNull::new(unsafe { libc::dlsym(raw(scope), name.as_ptr()) })
}

/// As [`symbol`], a version of it.
pub(crate) fn versioned(scope: Option<&Handle>, name: &CStr, version: &CStr) -> Option<NonNull<c_void>> {
    // SAFETY: the handle is open, name and version are C strings.
    NonNull::new(unsafe { libc::dlvsym(raw(scope), name.as_ptr(), version.as_ptr()) })
}

/// A loaded object, as the dynamic loader describes it (`struct link_map`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Object {
    /// Where it is loaded.
    pub(crate) base: usize,
    name: *const c_char,
    dynamic: *const [usize; 2],
}

impl Object {
    /// Returns the object of a handle.
    pub(crate) fn of_handle(handle: &Handle) -> Option<Self> {
        let mut map: *const Self = std::ptr::null();
        // SAFETY: the handle is open, and what is stored is the pointer to its link map, which is there as long as that.
        unsafe {
            let done = libc::dlinfo(handle.as_ptr(), libc::RTLD_DI_LINKMAP, (&raw mut map).cast());
            if done == 0 { map.as_ref().copied() } else { None }
        }
    }

    /// Returns the object that has an address, and the address of the entry of its symbol table for that.
    pub(crate) fn of_symbol(address: NonNull<c_void>) -> Option<(Self, usize)> {
        const RTLD_DL_SYMENT: c_int = 1;
        const RTLD_DL_LINKMAP: c_int = 2;
        unsafe extern "C" {
            fn dladdr1(
                at: *const c_void,
                info: *mut libc::Dl_info,
                extra: *mut *mut c_void,
                flags: c_int,
            ) -> c_int;
        }
        // SAFETY: a `Dl_info` consists of pointers, which may be null.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        let (mut symbol, mut map): (*mut c_void, *mut c_void) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: both calls write to the variables that they are given, and take any address; the link map is a structure
        // of the dynamic loader's, which is there as long as the object.
        unsafe {
            let found = dladdr1(address.as_ptr(), &raw mut info, &raw mut symbol, RTLD_DL_SYMENT) != 0
                && dladdr1(address.as_ptr(), &raw mut info, &raw mut map, RTLD_DL_LINKMAP) != 0;
            let object = if found { map.cast::<Self>().as_ref().copied() } else { None };
            object.filter(|_| !symbol.is_null()).map(|object| (object, symbol.addr()))
        }
    }

    /// Returns the tags of the dynamic section and their values, of which the loader has made addresses of what are offsets
    /// in the file.
    ///
    /// # Safety
    /// The object stays loaded meanwhile.
    pub(crate) unsafe fn entries(self) -> impl Iterator<Item = [usize; 2]> {
        let mut at = self.dynamic;
        std::iter::from_fn(move || {
            // SAFETY: the object is loaded (# Safety), and its dynamic section ends with DT_NULL, past which nothing is read.
            let entry = unsafe { at.read() };
            at = at.wrapping_add(1);
            (entry[0] != 0).then_some(entry)
        })
    }
}

/// Returns where the object is loaded that has an address.
pub(crate) fn base(address: NonNull<c_void>) -> Option<usize> {
    // SAFETY: a `Dl_info` consists of pointers, which may be null.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: dladdr writes to `info`, and takes any address.
    let found = unsafe { libc::dladdr(address.as_ptr(), &raw mut info) } != 0;
    found.then(|| info.dli_fbase.addr())
}
