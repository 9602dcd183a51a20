//! Structures of which orbits see a part.

use core::alloc::Layout;
use core::ops::DerefMut;
use core::ptr::NonNull;

use orrery_memory::area::{Area, AreaBox, Error as AreaError};

/// A structure that can be split: its *watched* fields go to an area, and the others stay where the object is.
///
/// Pages are copied whole. Of a large structure that is in an area, of which the task reads two words, main pays for the
/// rest, too, whenever the rest is written (Section 4.6.3 of the paper). `#[derive(Delegate)]` splits it:
///
/// ```
/// use orrery_orbit::{Area, AreaOptions, Call, Delegate, Orbit, Task};
///
/// #[derive(Delegate)]
/// struct Transaction {
///     #[watched]
///     version: u64,
///     #[watched]
///     waits: bool,
///     undo: [u8; 4000],
/// }
///
/// let area = Area::new(0, &AreaOptions::default())?;
/// // Made as always, then split.
/// let mut transaction = Transaction { version: 1, waits: false, undo: [0; 4000] }.delegate(&area).map_err(|(error, _)| error)?;
/// // Used as always.
/// transaction.version += 1;
/// transaction.undo[17] = 4;
/// assert!(!transaction.waits);
///
/// let watcher = Orbit::builder("watcher")
///     .entry(|task: &mut Task<'_>| {
///         // SAFETY: main passes the address of the watched fields of one.
///         let transaction = unsafe { &*task.pointer::<TransactionWatched>().unwrap() };
///         transaction.version.cast_signed()
///     })
///     .create()?;
/// let address = DelegatedTransaction::watched(&transaction).expose_provenance().to_ne_bytes();
/// assert_eq!(watcher.call(&Call::new().areas(&[&area]).arguments(&address))?, 2);
/// # Ok::<_, orrery_orbit::Error>(())
/// ```
///
/// The derive adds two structures, with the visibility of the one that it is written above:
///
/// - `TransactionWatched` has the fields that are marked `#[watched]`;
/// - `DelegatedTransaction` has the others, and dereferences to the watched ones. So `transaction.version` is what it always
///   was, for reading, writing and borrowing; only two watched fields cannot be borrowed mutably at the same time through the
///   object (borrow `&mut *object` once instead). `DelegatedTransaction::watched` tells where they are.
///
/// `#[delegate(object = Name, watched = Name)]` gives them other names. Parameters of types, lifetimes and constants are
/// passed on, and so are documentation, `cfg` and lint attributes of fields. A structure that implements `Drop` cannot be
/// taken apart: put that on the object.
pub trait Delegate: Sized {
    /// The watched fields.
    type Watched;
    /// What has the other fields, and leads to the watched ones.
    type Object: DerefMut<Target = Self::Watched>;

    /// Splits a value.
    ///
    /// # Errors
    /// Those of [`Area::allocate`], with the value as it was.
    fn delegate(self, area: &Area) -> Result<Self::Object, (AreaError, Self)>;

    /// Puts it together again; its place in the area is free then.
    fn join(object: Self::Object) -> Self;
}

/// Room for one value in an area: what can fail about putting a value there is over before the value is touched.
#[derive(Debug)]
pub struct DelegateSlot<T> {
    start: NonNull<T>,
    area: Area,
}

impl<T> DelegateSlot<T> {
    /// Allocates room in `area`.
    ///
    /// # Errors
    /// Those of [`Area::allocate`].
    pub fn new(area: &Area) -> Result<Self, AreaError> {
        Ok(Self { start: area.allocate(Layout::new::<T>())?.cast(), area: area.clone() })
    }

    /// Puts a value there.
    pub fn fill(self, value: T) -> AreaBox<T> {
        let this = core::mem::ManuallyDrop::new(self);
        // SAFETY: the place has room for one, is the area's, and is given to nobody else; nothing is dropped here.
        unsafe {
            this.start.write(value);
            AreaBox::from_raw_in(this.start.as_ptr(), core::ptr::read(&raw const this.area))
        }
    }
}

impl<T> Drop for DelegateSlot<T> {
    fn drop(&mut self) {
        // SAFETY: allocated so by `new`, and not filled.
        unsafe { self.area.free(self.start.cast(), Layout::new::<T>()) };
    }
}

/// What the derive refuses: fields without names,
///
/// ```compile_fail
/// #[derive(orrery_orbit::Delegate)]
/// struct Pair(#[watched] u32, u32);
/// ```
///
/// nothing to watch,
///
/// ```compile_fail
/// #[derive(orrery_orbit::Delegate)]
/// struct Unwatched { number: u32 }
/// ```
///
/// and structures that cannot be taken apart.
///
/// ```compile_fail,E0509
/// #[derive(orrery_orbit::Delegate)]
/// struct Guard { #[watched] held: Box<bool>, name: String }
/// impl Drop for Guard {
///     fn drop(&mut self) {}
/// }
/// ```
#[cfg(doctest)]
struct Refused;
