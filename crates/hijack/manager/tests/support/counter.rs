//! An extension that adds one to an attribute at each tick, and others of the same shape.

/// A class of attributes for tests.
pub(crate) const CLASSES: &str = "[[class]]\nname = 'test.level'\nkind = 'integer'\nrange = [0, 1000000]\n";
/// What the extension asks for in its manifest.
pub(crate) const HANDLES: &str = "[handle]
level = { to = 'test.level', of = 'sleep', rights = ['get', 'set'] }
tick = { to = 'timer', rights = ['subscribe'] }
";
/// What it imports, and how it starts.
const IMPORTS: &str = r#"
    (import "orrery" "get_attribute" (func $get (param i32 i32) (result i32)))
    (import "orrery" "set_attribute" (func $set (param i32 i64) (result i32)))
    (import "orrery" "subscribe" (func $subscribe (param i32 i64) (result i32)))
    (import "handle" "level" (func $level (result i32)))
    (import "handle" "tick" (func $tick (result i32)))
    (memory (export "memory") 1)
    (func (export "start") (drop (call $subscribe (call $tick) (i64.const 0))))
"#;
/// Adds one to the level at each tick.
pub(crate) const COUNTS: &str = "(if (i32.eqz (call $get (call $level) (i32.const 0)))
    (then (drop (call $set (call $level) (i64.add (i64.load (i32.const 0)) (i64.const 1))))))";

/// Returns a module whose `event` has this body.
pub(crate) fn module(body: &str) -> Vec<u8> {
    let wat = format!("(module {IMPORTS} (func (export \"event\") (param i32 i64 i64 i64) {body}))");
    wat::parse_str(wat).unwrap()
}
