//! From a module to code: each function is compiled, they are laid one behind the other, and what comes out is looked through.

use cranelift_codegen::binemit::Reloc;
use cranelift_codegen::control::ControlPlane;
use cranelift_codegen::ir::ExternalName;
use cranelift_codegen::isa::{self, OwnedTargetIsa};
use cranelift_codegen::settings::{self, Configurable};
use cranelift_codegen::{Context, FinalizedRelocTarget};
use cranelift_frontend::FunctionBuilderContext;
use orrery_compiled_handler::{Handler, LARGEST_CODE, forbidden};
use orrery_hijack_image::handler::STACK;

use crate::error::Fault;
use crate::module::Module;
use crate::translate::{Shared, translate};

/// Functions begin on such multiples.
const ALIGNED: usize = 16;
/// What is on the stack above the frame pointer's place: that, and the return address.
const LINK: u64 = 16;

/// A way to compile: where the code has forbidden bytes, the next one is tried.
struct Way {
    /// Numbers of more than a byte are loaded, not in the code.
    outline: bool,
    level: &'static str,
    registers: &'static str,
}

const WAYS: [Way; 5] = [
    Way { outline: false, level: "speed", registers: "backtracking" },
    Way { outline: true, level: "speed", registers: "backtracking" },
    Way { outline: true, level: "none", registers: "backtracking" },
    Way { outline: true, level: "speed", registers: "single_pass" },
    Way { outline: true, level: "none", registers: "single_pass" },
];

pub(crate) fn emit(module: &Module<'_>) -> Result<Handler, Fault> {
    let mut found = None;
    for way in WAYS {
        let handler = compile(module, &way)?;
        match forbidden::find(&handler.code) {
            None => return Ok(handler),
            Some(place) => found = Some(place),
        }
    }
    let (offset, instruction) = found.unwrap_or((0, ""));
    Err(Fault::Forbidden { instruction, offset })
}

fn target(way: &Way) -> Result<OwnedTargetIsa, String> {
    let mut flags = settings::builder();
    for (name, value) in [
        ("is_pic", "true"),
        ("opt_level", way.level),
        ("regalloc_algorithm", way.registers),
        // Who is interrupted here is found by the frames: see `signals::registers` of the executive.
        ("preserve_frame_pointers", "true"),
        ("enable_probestack", "false"),
        ("unwind_info", "false"),
        ("enable_verifier", "true"),
    ] {
        flags.set(name, value).map_err(|error| error.to_string())?;
    }
    // What each x86-64 processor has, and no vectors: a program's registers are not all saved around a handler.
    let builder = isa::lookup_by_name("x86_64-unknown-linux").map_err(|error| error.to_string())?;
    builder.finish(settings::Flags::new(flags)).map_err(|error| error.to_string())
}

fn compile(module: &Module<'_>, way: &Way) -> Result<Handler, Fault> {
    let imports = u32::try_from(module.imports()).unwrap_or(u32::MAX);
    let failed = |own: usize, message: String| Fault::Compiler {
        index: imports.saturating_add(u32::try_from(own).unwrap_or(u32::MAX)),
        message,
    };
    let isa = target(way).map_err(|message| failed(0, message))?;
    let mut shared = Shared::new(module.bodies.len(), way.outline);
    let mut scratch = FunctionBuilderContext::new();
    let mut code = Vec::new();
    let (mut starts, mut calls) = (Vec::new(), Vec::new());
    for own in 0..module.bodies.len() {
        let function = translate(module, own, &mut shared, isa.frontend_config(), &mut scratch)?;
        let mut context = Context::for_function(function);
        if let Err(error) = context.compile(&*isa, &mut ControlPlane::default()) {
            return Err(failed(own, format!("{:?}", error.inner)));
        }
        let Some(compiled) = context.compiled_code() else {
            return Err(failed(own, "there is no code".to_owned()));
        };
        code.resize(code.len().next_multiple_of(ALIGNED), 0xcc);
        let start = code.len();
        starts.push(start);
        code.extend_from_slice(compiled.code_buffer());
        if code.len() > LARGEST_CODE {
            return Err(Fault::Code { size: code.len(), limit: LARGEST_CODE });
        }
        let frame = compiled.buffer.frame_layout().map(|layout| u64::from(layout.frame_to_fp_offset));
        let size = frame.ok_or_else(|| failed(own, "its frame is not known".to_owned()))? + LINK;
        if size > STACK {
            return Err(Fault::Stack {
                index: imports + u32::try_from(own).unwrap_or(0),
                size,
                limit: STACK,
            });
        }
        shared.constants[own] = size;
        for reloc in compiled.buffer.relocs() {
            let FinalizedRelocTarget::ExternalName(ExternalName::User(name)) = &reloc.target else {
                return Err(failed(own, format!("it names {:?}", reloc.target)));
            };
            if reloc.kind != Reloc::X86CallPCRel4 {
                return Err(failed(own, format!("it has a relocation {:?}", reloc.kind)));
            }
            let callee = context.func.params.user_named_funcs()[*name].index;
            calls.push((start + usize::try_from(reloc.offset).unwrap_or(0), callee, reloc.addend));
        }
    }
    for (at, callee, addend) in calls {
        let target = usize::try_from(callee).ok().and_then(|callee| starts.get(callee)).copied();
        let place = code.get_mut(at..at + 4);
        let (Some(target), Some(place)) = (target, place) else {
            return Err(failed(0, format!("it calls {callee}, which there is not")));
        };
        // Both are within the code, whose length has fewer than 32 bits.
        let distance = target.cast_signed() as i64 + addend - at.cast_signed() as i64;
        place.copy_from_slice(&i32::try_from(distance).unwrap_or(0).to_le_bytes());
    }
    let needed = shared.constants[module.decide];
    let entry = u32::try_from(starts[module.decide]).unwrap_or(u32::MAX);
    let mut data = module.data.clone();
    data.truncate(data.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1));
    Ok(Handler {
        code,
        entry,
        data,
        constants: shared.constants,
        globals: module.initial,
        stack: (STACK - needed).cast_signed(),
        needs: shared.needs,
    })
}
