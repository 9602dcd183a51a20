use core::alloc::Layout;
use orrery_orbit::{Area, AreaOptions, Call, Orbit, Task};
fn main() -> Result<(), orrery_orbit::Error> {
    let area = Area::new(1 << 20, &AreaOptions::default())?;
    let number = area.allocate(Layout::new::<i64>())?.cast::<i64>().as_ptr();
    eprintln!("area");
    let doubler = Orbit::builder("doubler")
        .entry(|task: &mut Task<'_>| {
            let number = unsafe { &mut *task.argument::<*mut i64>().unwrap() };
            *number *= 2;
            *number
        })
        .create()?;
    eprintln!("created");
    let address = number.expose_provenance().to_ne_bytes();
    let areas = [&area];
    let call = Call::new().areas(&areas).arguments(&address);
    unsafe { number.write(21) };
    let future = doubler.call_async(&call)?;
    eprintln!("called");
    unsafe { number.write(50) };
    assert_eq!(future.get()?, 42);
    assert_eq!(doubler.call(&call)?, 100);
    assert_eq!(unsafe { number.read() }, 50);
    Ok(())
}
