//! Lua with instances, by the functions that the benchmark calls.

use std::ffi::{c_char, c_int, c_void};

use anyhow::{Result, ensure};
use orrery_orc_instance::Library;

use super::sqlite::function;

/// Stands for `lua_State *`.
type State = *mut c_void;

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
    /// Finds the functions in a library that has instances.
    ///
    /// # Errors
    /// A function is not there.
    ///
    /// # Safety
    /// The library is Lua 5.4, and stays loaded while what is returned is used.
    pub unsafe fn of_instances(library: &Library) -> Result<Self> {
        // SAFETY: the library is Lua (# Safety); these are the types that lua.h and lauxlib.h declare.
        unsafe {
            Ok(Self {
                new: function(library.symbol(c"luaL_newstate")?.as_ptr()),
                open_libraries: function(library.symbol(c"luaL_openlibs")?.as_ptr()),
                load: function(library.symbol(c"luaL_loadstring")?.as_ptr()),
                call: function(library.symbol(c"lua_pcallk")?.as_ptr()),
                close: function(library.symbol(c"lua_close")?.as_ptr()),
            })
        }
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
        // SAFETY: the functions are Lua's, the program is a C string, and the state is this function's.
        let code = unsafe {
            let state = (self.new)();
            ensure!(!state.is_null(), "Lua has no memory");
            (self.open_libraries)(state);
            let code = match (self.load)(state, program.as_ptr()) {
                0 => (self.call)(state, 0, 0, 0, 0, std::ptr::null_mut()),
                code => code,
            };
            (self.close)(state);
            code
        };
        ensure!(code == 0, "a Lua program failed: {code}");
        Ok(())
    }
}
