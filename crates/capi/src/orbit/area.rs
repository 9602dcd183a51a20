//! Areas, and memory in them.
//!
//! C gives memory back without saying how much it was, so each block has a head before it, in the area: its size, its
//! alignment, and a seal that is only right at that address. It is broken when the block is returned.

use core::alloc::Layout;
use core::ffi::{c_int, c_void};
use core::ptr::NonNull;

use orrery_orbit::{Area, AreaOptions, Mode, is_orbit};

use super::{Handle, Refused, read_options, refuse, status};

/// Mirrors `struct orrery_area_options` of the header.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The size of this structure in bytes.
    pub size: usize,
    /// How pages reach orbits.
    pub mode: c_int,
    /// Up to which it can grow.
    pub capacity: usize,
    /// Where it is to be.
    pub address: *mut c_void,
}

const USUAL: Options =
    Options { size: size_of::<Options>(), mode: 0, capacity: 0, address: core::ptr::null_mut() };

/// Implements `orrery_area_create`.
#[unsafe(no_mangle)]
pub extern "C" fn orrery_area_create(size: usize) -> *mut Handle<Area> {
    // SAFETY: the null pointer stands for no options.
    unsafe { orrery_area_create_with(size, core::ptr::null()) }
}

/// Implements `orrery_area_create_with`.
///
/// # Safety
/// The options are null or a structure with its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_area_create_with(size: usize, options: *const Options) -> *mut Handle<Area> {
    // SAFETY: `options` is null or leads to a structure that begins with its size (# Safety).
    let made = unsafe { read_options(options, USUAL) }.and_then(|given| {
        let mut options = AreaOptions::default();
        options.mode = match given.mode {
            0 => Mode::Auto,
            1 => Mode::Copy,
            2 => Mode::Cow,
            other => {
                return Err(refuse(
                    libc::EINVAL,
                    &format!("{other} is no mode of an area (enum orrery_area_mode)"),
                ));
            }
        };
        options.capacity = given.capacity;
        options.address = (!given.address.is_null()).then(|| given.address.addr());
        Ok(Area::new(size, &options)?)
    });
    made.map_or(core::ptr::null_mut(), Handle::make)
}

/// Implements `orrery_area_destroy`.
///
/// # Safety
/// The handle is null or one that `orrery_area_create` gave, and neither it nor its memory is used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_area_destroy(area: *mut Handle<Area>) -> c_int {
    if is_orbit() {
        return status(Err(refuse(libc::EPERM, "an orbit cannot destroy main's areas")));
    }
    // SAFETY: the handle is null or was given by `orrery_area_create`, and nobody uses the area any more
    // (# Safety).
    status(unsafe { Handle::take(area, "area") }.map(drop))
}

/// What stands before a block.
#[repr(C)]
struct Head {
    seal: u64,
    /// The size as asked for, and in the upper byte the alignment's logarithm.
    shape: u64,
}

const HEAD: usize = size_of::<Head>();
const LARGEST: usize = 1 << 56;

impl Head {
    fn seal_at(address: usize) -> u64 {
        (address as u64 ^ 0x6f72_6269_7468_6561).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    /// The head of the block at `memory`, if there is one of this area.
    ///
    /// # Safety
    /// Nobody changes it meanwhile.
    unsafe fn of<'a>(area: &Area, memory: *mut c_void) -> Option<&'a mut Self> {
        let address = memory.addr();
        let place = address.checked_sub(HEAD).filter(|place| {
            place.is_multiple_of(align_of::<Self>())
                && *place >= area.base()
                && address <= area.base() + area.used()
        })?;
        // SAFETY: in the part of the area that is in use, and so mapped.
        let head = unsafe { &mut *core::ptr::with_exposed_provenance_mut::<Self>(place) };
        (head.seal == Self::seal_at(address)).then_some(head)
    }

    fn size(&self) -> usize {
        usize::try_from(self.shape & (LARGEST as u64 - 1)).unwrap_or(0)
    }

    fn alignment(&self) -> usize {
        1 << (self.shape >> 56)
    }
}

/// A block of `size` bytes with room for its head; the block proper begins at the alignment.
fn layout(size: usize, alignment: usize) -> Result<Layout, Refused> {
    let whole = size.checked_add(alignment).filter(|_| size < LARGEST);
    whole.and_then(|whole| Layout::from_size_align(whole, alignment).ok()).ok_or_else(|| {
        refuse(libc::ENOMEM, &format!("{size} bytes at multiples of {alignment} are too many"))
    })
}

/// Writes a block's head and gives its address.
///
/// # Safety
/// The block was allocated with `layout(size, alignment)`.
unsafe fn seal(block: NonNull<u8>, size: usize, alignment: usize) -> *mut c_void {
    // SAFETY: the block has the alignment's bytes before its own, of which the last are the head's.
    unsafe {
        let memory = block.add(alignment);
        let head = memory.sub(HEAD).cast::<Head>();
        let shape = size as u64 | u64::from(alignment.trailing_zeros()) << 56;
        head.write(Head { seal: Head::seal_at(memory.addr().get()), shape });
        memory.as_ptr().cast()
    }
}

/// Implements `orrery_area_alloc`.
///
/// # Safety
/// The handle is null or one that `orrery_area_create` gave, and nobody destroys the area meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_area_alloc(area: *mut Handle<Area>, size: usize) -> *mut c_void {
    // SAFETY: the handle is null or was given by `orrery_area_create` (# Safety).
    unsafe { orrery_area_alloc_aligned(area, HEAD, size) }
}

/// Implements `orrery_area_alloc_aligned`.
///
/// # Safety
/// As for [`orrery_area_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_area_alloc_aligned(
    area: *mut Handle<Area>,
    alignment: usize,
    size: usize,
) -> *mut c_void {
    // SAFETY: the handle is null or was given by `orrery_area_create`, and nobody destroys the area meanwhile
    // (# Safety).
    let made = unsafe { Handle::in_main(area, "area") }.and_then(|area| {
        if !alignment.is_power_of_two() {
            return Err(refuse(libc::EINVAL, &format!("an alignment of {alignment} is no power of two")));
        }
        let alignment = alignment.max(HEAD);
        let block = area.allocate(layout(size, alignment)?)?;
        // SAFETY: the block was allocated by the line above with `layout(size, alignment)`.
        Ok(unsafe { seal(block, size, alignment) })
    });
    made.unwrap_or(core::ptr::null_mut())
}

/// Implements `orrery_area_realloc`.
///
/// # Safety
/// As for [`orrery_area_alloc`]; the memory is null or a block of this area, used by nobody else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_area_realloc(
    area: *mut Handle<Area>,
    memory: *mut c_void,
    size: usize,
) -> *mut c_void {
    if memory.is_null() {
        // SAFETY: the handle is null or was given by `orrery_area_create` (# Safety).
        return unsafe { orrery_area_alloc(area, size) };
    }
    // SAFETY: the handle is null or valid by the caller's contract.
    let made = unsafe { Handle::in_main(area, "area") }.and_then(|area| {
        // SAFETY: the memory is a block of this area that nobody else uses, and so nobody changes its head
        // (# Safety).
        let head = unsafe { Head::of(area, memory) }.ok_or_else(|| foreign(memory))?;
        let (old, alignment) = (head.size(), head.alignment());
        let (before, after) = (layout(old, alignment)?, layout(size, alignment)?);
        let block = memory.cast::<u8>().wrapping_sub(alignment);
        let block = NonNull::new(block).ok_or_else(|| foreign(memory))?;
        // SAFETY: allocated with that layout, as its head says.
        let moved = unsafe { area.reallocate(block, before, after.size())? };
        if moved != block {
            // Where the block was no seal may stay that somebody could take for one.
            // SAFETY: an area's memory stays mapped, and nobody has been given the place since.
            head.seal = 0;
        }
        // SAFETY: the area's memory stays mapped, and the block has been given to nothing else.
        Ok(unsafe { seal(moved, size, alignment) })
    });
    made.unwrap_or(core::ptr::null_mut())
}

/// Implements `orrery_area_free`.
///
/// # Safety
/// As for [`orrery_area_realloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_area_free(area: *mut Handle<Area>, memory: *mut c_void) -> c_int {
    if memory.is_null() || is_orbit() {
        return 0;
    }
    // SAFETY: the handle is null or was given by `orrery_area_create`, and nobody destroys the area meanwhile
    // (# Safety).
    status(unsafe { Handle::get(area, "area") }.and_then(|area| {
        // SAFETY: the memory is null or a block of the area by the caller's contract.
        let head = unsafe { Head::of(area, memory) }.ok_or_else(|| foreign(memory))?;
        let (layout, alignment) = (layout(head.size(), head.alignment())?, head.alignment());
        head.seal = 0;
        if let Some(block) = NonNull::new(memory.cast::<u8>().wrapping_sub(alignment)) {
            // SAFETY: allocated with that layout, as its head said.
            unsafe { area.free(block, layout) };
        }
        Ok(())
    }))
}

fn foreign(memory: *mut c_void) -> Refused {
    refuse(libc::EINVAL, &format!("there is no block of this area at {memory:p}, or it was freed"))
}

/// Implements `orrery_area_contains`.
///
/// # Safety
/// As for [`orrery_area_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_area_contains(area: *mut Handle<Area>, address: *const c_void) -> c_int {
    // SAFETY: the handle is null or was given by `orrery_area_create`, and nobody destroys the area meanwhile
    // (# Safety).
    unsafe { Handle::get(area, "area") }.map_or(-1, |area| c_int::from(area.contains(address)))
}

/// Implements `orrery_area_base`.
///
/// # Safety
/// As for [`orrery_area_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_area_base(area: *mut Handle<Area>) -> *mut c_void {
    // SAFETY: the handle is null or was given by `orrery_area_create`, and nobody destroys the area meanwhile
    // (# Safety).
    let raw = unsafe { Handle::get(area, "area") }.and_then(|area| Ok(area.raw()?));
    raw.map_or(core::ptr::null_mut(), |(base, _)| base.as_ptr().cast())
}

/// Implements `orrery_area_use`.
///
/// # Safety
/// As for [`orrery_area_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_area_use(area: *mut Handle<Area>, used: usize) -> c_int {
    // SAFETY: the handle is null or was given by `orrery_area_create`, and nobody destroys the area meanwhile
    // (# Safety).
    status(unsafe { Handle::get(area, "area") }.and_then(|area| Ok(area.set_used(used)?)))
}

/// Implements `orrery_area_used`.
///
/// # Safety
/// As for [`orrery_area_alloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn orrery_area_used(area: *mut Handle<Area>) -> usize {
    // SAFETY: the handle is null or was given by `orrery_area_create`, and nobody destroys the area meanwhile
    // (# Safety).
    unsafe { Handle::get(area, "area") }.map_or(0, Area::used)
}
