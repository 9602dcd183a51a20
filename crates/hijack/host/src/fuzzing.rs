//! What fuzz targets call, and nobody else.

use orrery_hijack_image::request_slots::CODE;
use orrery_hijack_image::rewrite_plan::{RELOCATED, RewritePlan, SYSCALL};

use crate::rewrite_window::plan;

/// Plans how to rewrite a site whose code ends with these bytes before its `syscall`.
///
/// # Panics
/// If the plan does not survive being encoded, or does not fit its code.
pub fn rewriting(input: &[u8]) {
    let mut code = [0; CODE];
    let before = CODE - SYSCALL;
    let given = input.len().min(before);
    code[before - given..before].copy_from_slice(&input[input.len() - given..]);
    code[before..].copy_from_slice(&[0x0f, 0x05]);
    let Some(plan) = plan(&code) else { return };
    assert_eq!(RewritePlan::decode(&RewritePlan::encode(Some(&plan))), Some(plan));
    let window = &code[before - plan.length()..before];
    let from = 0x5000_0000_0000;
    for to in [from + 0x1234_5678, from - 0x7000_0000] {
        let mut out = [0; RELOCATED];
        let relocated = plan.relocate(window, from, to, &mut out);
        assert!(relocated.is_none_or(|moved| moved.length <= RELOCATED));
    }
    let (jump, changed) = plan.jump(0x1234_5678).unwrap_or_default();
    assert!(changed <= jump.len() && changed <= plan.length() + SYSCALL);
}
