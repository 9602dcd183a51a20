//! Lua, by the functions that the benchmark calls.

use std::ffi::{CStr, c_char, c_int, c_void};

use anyhow::{Result, ensure};
use orrery_orc_instance::Library;

use super::sqlite::function;

/// Stands for `lua_State *`.
pub type State = *mut c_void;

/// Lua's functions, as far as they are called.
#[derive(Clone, Copy, Debug)]
pub struct Lua {
    new: unsafe extern "C" fn() -> State,
    open_libraries: unsafe extern "C" fn(State),
    load: unsafe extern "C" fn(State, *const c_char) -> c_int,
    call: unsafe extern "C" fn(State, c_int, c_int, c_int, isize, *mut c_void) -> c_int,
    close: unsafe extern "C" fn(State),
}

impl Lua {
    /// Finds the functions.
    ///
    /// # Errors
    /// A function is not there.
    ///
    /// # Safety
    /// `find` returns addresses of functions of Lua 5.4, which stays loaded while what is returned is used.
    pub unsafe fn new(find: impl Fn(&CStr) -> Result<*mut c_void>) -> Result<Self> {
        // SAFETY: they are Lua's (# Safety); these are the types that lua.h and lauxlib.h declare.
        unsafe {
            Ok(Self {
                new: function(find(c"luaL_newstate")?),
                open_libraries: function(find(c"luaL_openlibs")?),
                load: function(find(c"luaL_loadstring")?),
                call: function(find(c"lua_pcallk")?),
                close: function(find(c"lua_close")?),
            })
        }
    }

    /// Finds the functions in a library that has instances.
    ///
    /// # Errors
    /// A function is not there.
    ///
    /// # Safety
    /// The library is Lua 5.4, and stays loaded while what is returned is used.
    pub unsafe fn of_instances(library: &Library) -> Result<Self> {
        // SAFETY: the library is Lua (# Safety).
        unsafe { Self::new(|name| Ok(library.symbol(name)?.as_ptr())) }
    }

    /// Makes a state without Lua's standard libraries.
    ///
    /// # Errors
    /// There is no memory.
    pub fn open(self) -> Result<State> {
        // SAFETY: the function takes nothing.
        let state = unsafe { (self.new)() };
        ensure!(!state.is_null(), "Lua has no memory");
        Ok(state)
    }

    /// Compiles and runs a chunk.
    ///
    /// # Errors
    /// It fails.
    ///
    /// # Safety
    /// [`open`](Self::open) returned the state, in the instance that this thread is in.
    pub unsafe fn run(self, state: State, chunk: &CStr) -> Result<()> {
        // SAFETY: the state is Lua's (# Safety), the chunk is a C string; the function that one pushes the other takes.
        let code = unsafe {
            match (self.load)(state, chunk.as_ptr()) {
                0 => (self.call)(state, 0, 0, 0, 0, std::ptr::null_mut()),
                code => code,
            }
        };
        ensure!(code == 0, "a Lua chunk failed: {code}");
        Ok(())
    }

    /// Runs a program that calls, concatenates, sorts and collects garbage.
    ///
    /// # Errors
    /// It fails.
    pub fn work(self) -> Result<()> {
        let program = c"local function fib(n) if n < 2 then return n end return fib(n - 1) + fib(n - 2) end \
            local t = {} for i = 1, 20000 do t[i] = (i * 7919) % 10007 end table.sort(t) \
            local s = {} for i = 1, 5000 do s[i] = ('%d %s'):format(t[i], tostring(i):rep(3)) end \
            collectgarbage() assert(fib(22) == 17711 and #table.concat(s) > 5000)";
        let state = self.open()?;
        // SAFETY: the state is this function's.
        unsafe {
            (self.open_libraries)(state);
            let result = self.run(state, program);
            (self.close)(state);
            result
        }
    }
}
