//! One function of a module as the compiler's intermediate code.
//!
//! What a module's instructions do that could trap (memory, division, `unreachable`) is compared first here, and leads to where the
//! function returns; so the code has no trap that is reached. Calls say in the context that a handler has failed.

use std::collections::BTreeMap;
use std::mem::offset_of;

use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I16, I32, I64};
use cranelift_codegen::ir::{
    AbiParam, AtomicRmwOp, Block, BlockArg, ExtFuncData, ExternalName, FuncRef, Function, InstBuilder,
    JumpTableData, MemFlagsData, SigRef, Signature, Type, UserExternalName, UserFuncName, Value,
};
use cranelift_codegen::isa::{CallConv, TargetFrontendConfig};
use cranelift_frontend::{FunctionBuilder, FunctionBuilderContext, Variable};
use orrery_hijack_image::handler::{BLOCK, COUNTERS, Context, HOST_CALL, MEMORY, host, needs, trap};
use wasmparser::{BlockType, FuncType, MemArg, Operator, ValType};

use crate::error::Fault;
use crate::interface::Import;
use crate::module::{Function as Callee, Global, LOCALS, Module, instructions, name, weights};

/// What the functions of a handler have in common.
pub(crate) struct Shared {
    /// Numbers that the code loads: first how much stack each function needs, then what is not to stand in the code.
    pub(crate) constants: Vec<u64>,
    places: BTreeMap<u64, usize>,
    /// Whether numbers of more than a byte are loaded in place of standing in the code.
    outline: bool,
    /// A set of [`needs`].
    pub(crate) needs: u32,
}

impl Shared {
    pub(crate) fn new(functions: usize, outline: bool) -> Self {
        Self { constants: vec![0; functions], places: BTreeMap::new(), outline, needs: 0 }
    }

    /// Returns where a number is among the constants.
    fn place(&mut self, value: u64) -> usize {
        *self.places.entry(value).or_insert_with(|| {
            self.constants.push(value);
            self.constants.len() - 1
        })
    }
}

/// What a branch to it leads to.
struct Frame {
    kind: Kind,
    /// Where branches go on.
    target: Block,
    /// Where its end goes on.
    end: Block,
    /// Its result.
    result: Option<Type>,
    /// How many values were on the stack before it.
    height: usize,
    /// Whether its end is reached by a branch.
    reached: bool,
}

enum Kind {
    Block,
    Loop,
    /// Where the condition does not hold, and there is no `else` so far.
    If(Block),
}

struct Translator<'a, 'b> {
    module: &'a Module<'a>,
    shared: &'a mut Shared,
    builder: FunctionBuilder<'b>,
    context: Value,
    result: Option<Type>,
    locals: Vec<Variable>,
    stack: Vec<Value>,
    frames: Vec<Frame>,
    reachable: bool,
    /// How many blocks were begun where nothing is reached.
    skipped: usize,
    /// Says why the handler has failed, and leaves.
    trap: Block,
    /// Leaves, after a call that has failed.
    leave: Block,
    callees: BTreeMap<usize, FuncRef>,
    host: Option<SigRef>,
}

/// The compiler's type.
fn of(value: ValType) -> Type {
    if value == ValType::I32 { I32 } else { I64 }
}

/// Returns what is read and written without a look at whether it is there: the context, and memory behind a comparison.
fn present() -> MemFlagsData {
    MemFlagsData::trusted()
}

/// The same, of what does not change while the handler runs.
fn constant() -> MemFlagsData {
    MemFlagsData::trusted().with_readonly().with_can_move()
}

fn offset(offset: usize) -> i32 {
    i32::try_from(offset).unwrap_or(i32::MAX)
}

/// Returns the signature of a module's function as the code has it: the context comes first.
pub(crate) fn signature(of_module: &FuncType) -> Signature {
    let mut signature = Signature::new(CallConv::SystemV);
    signature.params.push(AbiParam::new(I64));
    signature.params.extend(of_module.params().iter().map(|value| AbiParam::new(of(*value))));
    signature.returns.extend(of_module.results().iter().map(|value| AbiParam::new(of(*value))));
    signature
}

/// Translates the module's own function `own`.
pub(crate) fn translate(
    module: &Module<'_>,
    own: usize,
    shared: &mut Shared,
    frontend: TargetFrontendConfig,
    scratch: &mut FunctionBuilderContext,
) -> Result<Function, Fault> {
    let body = &module.bodies[own];
    let (_, of_type) = module.functions[module.imports() + own];
    let Some(of_module) = module.signature(of_type) else { return Err(Fault::NoDecide) };
    let id = u32::try_from(own).unwrap_or(u32::MAX);
    let mut function = Function::with_name_signature(UserFuncName::user(0, id), signature(of_module));
    let mut builder = FunctionBuilder::new(&mut function, scratch);
    let entry = builder.create_block();
    builder.append_block_params_for_function_params(entry);
    builder.switch_to_block(entry);
    builder.seal_block(entry);
    let (trap, leave) = (builder.create_block(), builder.create_block());
    for cold in [trap, leave] {
        builder.set_cold_block(cold);
    }
    builder.append_block_param(trap, I64);
    let parameters = builder.block_params(entry).to_vec();
    let result = of_module.results().first().map(|value| of(*value));
    let mut locals = Vec::new();
    for (value, parameter) in of_module.params().iter().zip(&parameters[1..]) {
        let variable = builder.declare_var(of(*value));
        builder.def_var(variable, *parameter);
        locals.push(variable);
    }
    let too_many = |at| Err(Fault::refused(format!("more than {LOCALS} locals"), at, "keep them in memory"));
    if locals.len() > LOCALS as usize {
        return too_many(body.range().start);
    }
    let mut further = body.get_locals_reader()?;
    for _ in 0..further.get_count() {
        let at = further.original_position();
        let (count, value) = further.read()?;
        if locals.len() + usize::try_from(count).unwrap_or(usize::MAX) > LOCALS as usize {
            return too_many(at);
        }
        for _ in 0..count {
            let variable = builder.declare_var(of(value));
            let zero = builder.ins().iconst(of(value), 0);
            builder.def_var(variable, zero);
            locals.push(variable);
        }
    }
    let operators = instructions(body)?;
    let end = builder.create_block();
    if let Some(result) = result {
        builder.append_block_param(end, result);
    }
    let whole = Frame { kind: Kind::Block, target: end, end, result, height: 0, reached: false };
    let mut translator = Translator {
        module,
        shared,
        builder,
        context: parameters[0],
        result,
        locals,
        stack: Vec::new(),
        frames: vec![whole],
        reachable: true,
        skipped: 0,
        trap,
        leave,
        callees: BTreeMap::new(),
        host: None,
    };
    let (_, loops) = weights(&operators);
    for (index, (operator, at)) in operators.iter().enumerate() {
        translator.instruction(operator, *at, loops.get(&index).copied().unwrap_or(0))?;
    }
    translator.finish(frontend);
    Ok(function)
}

impl Translator<'_, '_> {
    /// Returns, and writes what trapping and failing lead to.
    fn finish(mut self, frontend: TargetFrontendConfig) {
        if self.reachable {
            let results: Vec<Value> = self.result.and_then(|_| self.stack.pop()).into_iter().collect();
            self.builder.ins().return_(&results);
        }
        self.builder.switch_to_block(self.trap);
        let why = self.builder.block_params(self.trap)[0];
        self.store_field(why, offset_of!(Context, trap));
        self.builder.ins().jump(self.leave, &[]);
        self.builder.switch_to_block(self.leave);
        let zeros: Vec<Value> = self.result.map(|of| self.builder.ins().iconst(of, 0)).into_iter().collect();
        self.builder.ins().return_(&zeros);
        self.builder.seal_all_blocks();
        self.builder.finalize(frontend);
    }

    fn load_field(&mut self, field: usize) -> Value {
        self.builder.ins().load(I64, present(), self.context, offset(field))
    }

    fn store_field(&mut self, value: Value, field: usize) {
        self.builder.ins().store(present(), value, self.context, offset(field));
    }

    fn pop(&mut self) -> Value {
        // A module that was validated pops what was pushed; where nothing is reached, nothing is translated.
        self.stack.pop().unwrap_or(self.context)
    }

    fn pop2(&mut self) -> (Value, Value) {
        let second = self.pop();
        (self.pop(), second)
    }

    fn push(&mut self, value: Value) {
        self.stack.push(value);
    }

    /// Returns a number, as an instruction's or as one that is loaded.
    fn number(&mut self, of: Type, value: i64) -> Value {
        if !self.shared.outline || i8::try_from(value).is_ok() {
            return self.builder.ins().iconst(of, if of == I32 { value & 0xffff_ffff } else { value });
        }
        let place = self.shared.place(value.cast_unsigned());
        self.load_constant(of, place)
    }

    fn load_constant(&mut self, of: Type, place: usize) -> Value {
        let constants =
            self.builder.ins().load(I64, constant(), self.context, offset(offset_of!(Context, constants)));
        self.builder.ins().load(of, constant(), constants, offset(8 * place))
    }

    /// Goes on in a new block where a condition does not hold, and in `other` where it does.
    fn branch_away(&mut self, condition: Value, other: Block, arguments: &[BlockArg]) {
        let next = self.builder.create_block();
        self.builder.ins().brif(condition, other, arguments, next, &[]);
        self.builder.switch_to_block(next);
        self.builder.seal_block(next);
    }

    fn trap_if(&mut self, condition: Value, why: u64) {
        let why = self.builder.ins().iconst(I64, why.cast_signed());
        let trap = self.trap;
        self.branch_away(condition, trap, &[BlockArg::Value(why)]);
    }

    fn trap(&mut self, why: u64) {
        let why = self.builder.ins().iconst(I64, why.cast_signed());
        self.builder.ins().jump(self.trap, &[BlockArg::Value(why)]);
        self.reachable = false;
    }

    /// Takes off fuel, or fails.
    fn charge(&mut self, amount: Value) {
        let fuel = self.load_field(offset_of!(Context, fuel));
        let left = self.builder.ins().isub(fuel, amount);
        self.store_field(left, offset_of!(Context, fuel));
        let none = self.builder.ins().icmp_imm_s(IntCC::SignedLessThan, left, 0);
        self.trap_if(none, trap::FUEL);
    }

    /// Returns the address of so many bytes of memory, or fails where that has not so many.
    fn address(&mut self, argument: MemArg, size: usize, writes: bool) -> Option<(Value, i32)> {
        self.shared.needs |= needs::MEMORY | if writes { needs::WRITES } else { 0 };
        let index = self.pop();
        let room = (MEMORY - size) as u64;
        let Some(limit) = room.checked_sub(argument.offset).filter(|_| self.module.has_memory) else {
            self.trap(trap::BOUNDS);
            return None;
        };
        let wide = self.builder.ins().uextend(I64, index);
        let limit = self.number(I64, limit.cast_signed());
        let beyond = self.builder.ins().icmp(IntCC::UnsignedGreaterThan, wide, limit);
        self.trap_if(beyond, trap::BOUNDS);
        let (place, rest) = if self.shared.outline && argument.offset > 127 {
            let more = self.number(I64, argument.offset.cast_signed());
            (self.builder.ins().iadd(wide, more), 0)
        } else {
            (wide, offset(usize::try_from(argument.offset).unwrap_or(usize::MAX)))
        };
        if writes {
            self.mark(place, rest, size);
        }
        let memory =
            self.builder.ins().load(I64, constant(), self.context, offset(offset_of!(Context, memory)));
        Some((self.builder.ins().iadd(memory, place), rest))
    }

    /// Notes that memory is written to.
    fn mark(&mut self, place: Value, rest: i32, size: usize) {
        let one = self.builder.ins().iconst(I64, 1);
        let mut dirty = self.load_field(offset_of!(Context, dirty));
        let last = i64::from(rest) + i64::try_from(size).unwrap_or(1) - 1;
        let ends: &[i64] = if size == 1 { &[last] } else { &[i64::from(rest), last] };
        for end in ends {
            let end = self.number(I64, *end);
            let at = self.builder.ins().iadd(place, end);
            let block = self.builder.ins().ushr_imm_u(at, i64::from(BLOCK.trailing_zeros()));
            let bit = self.builder.ins().ishl(one, block);
            dirty = self.builder.ins().bor(dirty, bit);
        }
        self.store_field(dirty, offset_of!(Context, dirty));
    }

    fn load(&mut self, argument: MemArg, of: Type, narrow: Type, signed: bool) {
        let size = narrow.bytes() as usize;
        let Some((base, rest)) = self.address(argument, size, false) else { return };
        let value = self.builder.ins().load(narrow, present(), base, rest);
        let value = match (narrow == of, signed) {
            (true, _) => value,
            (false, true) => self.builder.ins().sextend(of, value),
            (false, false) => self.builder.ins().uextend(of, value),
        };
        self.push(value);
    }

    fn store(&mut self, argument: MemArg, narrow: Type) {
        let value = self.pop();
        let size = narrow.bytes() as usize;
        let Some((base, rest)) = self.address(argument, size, true) else { return };
        let value = if self.builder.func.dfg.value_type(value) == narrow {
            value
        } else {
            self.builder.ins().ireduce(narrow, value)
        };
        self.builder.ins().store(present(), value, base, rest);
    }

    fn compare(&mut self, condition: IntCC) {
        let (left, right) = self.pop2();
        let holds = self.builder.ins().icmp(condition, left, right);
        let value = self.builder.ins().uextend(I32, holds);
        self.push(value);
    }

    fn is_zero(&mut self) {
        let value = self.pop();
        let holds = self.builder.ins().icmp_imm_u(IntCC::Equal, value, 0);
        let value = self.builder.ins().uextend(I32, holds);
        self.push(value);
    }

    fn two(&mut self, instruction: impl FnOnce(&mut FunctionBuilder<'_>, Value, Value) -> Value) {
        let (left, right) = self.pop2();
        let value = instruction(&mut self.builder, left, right);
        self.push(value);
    }

    fn one(&mut self, instruction: impl FnOnce(&mut FunctionBuilder<'_>, Value) -> Value) {
        let value = self.pop();
        let value = instruction(&mut self.builder, value);
        self.push(value);
    }

    fn extend(&mut self, from: Type) {
        self.one(|builder, value| {
            let of = builder.func.dfg.value_type(value);
            let value = builder.ins().ireduce(from, value);
            builder.ins().sextend(of, value)
        });
    }

    fn divide(&mut self, signed: bool, remainder: bool) {
        let (left, right) = self.pop2();
        let of = self.builder.func.dfg.value_type(left);
        let zero = self.builder.ins().icmp_imm_u(IntCC::Equal, right, 0);
        self.trap_if(zero, trap::DIVISION);
        if signed && !remainder {
            let one = self.builder.ins().iconst(of, 1);
            let least = self.builder.ins().ishl_imm_u(one, i64::from(of.bits()) - 1);
            let least = self.builder.ins().icmp(IntCC::Equal, left, least);
            let negative = self.builder.ins().icmp_imm_s(IntCC::Equal, right, -1);
            let both = self.builder.ins().band(least, negative);
            self.trap_if(both, trap::DIVISION);
        }
        let ins = self.builder.ins();
        let value = match (signed, remainder) {
            (true, false) => ins.sdiv(left, right),
            (true, true) => ins.srem(left, right),
            (false, false) => ins.udiv(left, right),
            (false, true) => ins.urem(left, right),
        };
        self.push(value);
    }

    fn block_result(&self, of_block: BlockType, at: usize) -> Result<Option<Type>, Fault> {
        match of_block {
            BlockType::Empty => Ok(None),
            BlockType::Type(value) => Ok(Some(of(value))),
            BlockType::FuncType(_) => {
                Err(Fault::refused("a block with parameters", at, "blocks have one result at most"))
            }
        }
    }

    fn begin(&mut self, kind: Kind, target: Option<Block>, result: Option<Type>) {
        let end = self.builder.create_block();
        if let Some(result) = result {
            self.builder.append_block_param(end, result);
        }
        let height = self.stack.len();
        self.frames.push(Frame { kind, target: target.unwrap_or(end), end, result, height, reached: false });
    }

    /// Goes to the end of the innermost block, with its result.
    fn leave_block(&mut self) {
        if !self.reachable {
            return;
        }
        let Some((end, result)) = self.frames.last().map(|frame| (frame.end, frame.result)) else { return };
        let values: Vec<BlockArg> =
            result.and_then(|_| self.stack.pop()).map(BlockArg::Value).into_iter().collect();
        self.builder.ins().jump(end, &values);
        if let Some(frame) = self.frames.last_mut() {
            frame.reached = true;
        }
    }

    fn end(&mut self) {
        self.leave_block();
        let Some(frame) = self.frames.pop() else { return };
        let mut reached = frame.reached;
        match frame.kind {
            Kind::Block => {}
            Kind::Loop => self.builder.seal_block(frame.target),
            Kind::If(otherwise) => {
                self.builder.seal_block(otherwise);
                self.builder.switch_to_block(otherwise);
                self.builder.ins().jump(frame.end, &[]);
                reached = true;
            }
        }
        self.stack.truncate(frame.height);
        self.builder.seal_block(frame.end);
        self.reachable = reached;
        if reached {
            self.builder.switch_to_block(frame.end);
            self.stack.extend(self.builder.block_params(frame.end).first().copied());
        }
    }

    /// Where a branch out of so many blocks goes on, and with what.
    fn target(&mut self, depth: u32) -> (Block, Vec<BlockArg>) {
        let index = self.frames.len() - 1 - depth as usize;
        let frame = &mut self.frames[index];
        let mut values = Vec::new();
        if !matches!(frame.kind, Kind::Loop) {
            frame.reached = true;
            if frame.result.is_some() {
                values.extend(self.stack.last().copied().map(BlockArg::Value));
            }
        }
        (frame.target, values)
    }

    /// A call of a function of the module's own.
    fn call(&mut self, index: usize, own: usize, of_type: u32) {
        let Some(of_module) = self.module.signature(of_type) else { return };
        let first = self.stack.len() - of_module.params().len();
        let mut arguments = vec![self.context];
        arguments.extend(self.stack.drain(first..));
        let callee = match self.callees.get(&index) {
            Some(callee) => *callee,
            None => {
                let signature = self.builder.import_signature(signature(of_module));
                let id = u32::try_from(own).unwrap_or(u32::MAX);
                let name = self.builder.func.declare_imported_user_function(UserExternalName::new(0, id));
                let data = ExtFuncData {
                    name: ExternalName::User(name),
                    signature,
                    colocated: true,
                    patchable: false,
                };
                let callee = self.builder.import_function(data);
                self.callees.insert(index, callee);
                callee
            }
        };
        let amount = self.number(I64, self.module.weights.get(own).map_or(1, |weight| weight + 1));
        self.charge(amount);
        let stack = self.load_field(offset_of!(Context, stack));
        let needed = self.load_constant(I64, own);
        let left = self.builder.ins().isub(stack, needed);
        let none = self.builder.ins().icmp_imm_s(IntCC::SignedLessThan, left, 0);
        self.trap_if(none, trap::STACK);
        self.store_field(left, offset_of!(Context, stack));
        let called = self.builder.ins().call(callee, &arguments);
        let result = self.builder.inst_results(called).first().copied();
        self.store_field(stack, offset_of!(Context, stack));
        self.leave_if_failed();
        self.stack.extend(result);
    }

    fn leave_if_failed(&mut self) {
        let failed = self.load_field(offset_of!(Context, trap));
        let leave = self.leave;
        self.branch_away(failed, leave, &[]);
    }

    /// The place of an argument, whose index is checked.
    fn argument_place(&mut self, index: Value, field: usize) -> Value {
        let beyond = self.builder.ins().icmp_imm_u(IntCC::UnsignedGreaterThan, index, 5);
        self.trap_if(beyond, trap::BOUNDS);
        let wide = self.builder.ins().uextend(I64, index);
        let bytes = self.builder.ins().ishl_imm_u(wide, 3);
        let base = self.builder.ins().iadd(self.context, bytes);
        self.builder.ins().iadd_imm_s(base, i64::from(offset(field)))
    }

    fn import(&mut self, import: Import) {
        match import {
            Import::Argument => {
                let index = self.pop();
                let place = self.argument_place(index, offset_of!(Context, given));
                let value = self.builder.ins().load(I64, present(), place, 0);
                self.push(value);
            }
            Import::SetArgument => {
                self.shared.needs |= needs::CHANGES;
                let (index, value) = self.pop2();
                let place = self.argument_place(index, offset_of!(Context, arguments));
                self.builder.ins().store(present(), value, place, 0);
            }
            Import::Answer => {
                self.shared.needs |= needs::CHANGES;
                let value = self.pop();
                self.store_field(value, offset_of!(Context, result));
            }
            Import::Delay => {
                self.shared.needs |= needs::CHANGES;
                let value = self.pop();
                self.store_field(value, offset_of!(Context, delay));
            }
            Import::Count => {
                self.shared.needs |= needs::COUNTS;
                let (counter, amount) = self.pop2();
                let last = i64::try_from(COUNTERS - 1).unwrap_or(0);
                let beyond = self.builder.ins().icmp_imm_u(IntCC::UnsignedGreaterThan, counter, last);
                self.trap_if(beyond, trap::BOUNDS);
                let wide = self.builder.ins().uextend(I64, counter);
                let bytes = self.builder.ins().ishl_imm_u(wide, 3);
                let counters = self.load_field(offset_of!(Context, counters));
                let place = self.builder.ins().iadd(counters, bytes);
                let before = self.builder.ins().atomic_rmw(I64, present(), AtomicRmwOp::Add, place, amount);
                let after = self.builder.ins().iadd(before, amount);
                self.push(after);
            }
            Import::CopyFrom => {
                self.shared.needs |= needs::MEMORY | needs::WRITES;
                self.host(host::COPY_FROM, 4, 3);
            }
            Import::Replace => {
                self.shared.needs |= needs::MEMORY | needs::REPLACES | needs::CHANGES;
                self.host(host::REPLACE, 3, 2);
            }
            Import::Emit => {
                self.shared.needs |= needs::MEMORY | needs::EMITS;
                self.host(host::EMIT, 2, 1);
            }
        }
    }

    /// A call of one of the executive's functions with so many arguments, one of which is a number of bytes.
    fn host(&mut self, which: usize, count: usize, length: usize) {
        let first = self.stack.len() - count;
        let mut arguments = vec![self.context];
        arguments.extend(self.stack.drain(first..));
        let bytes = self.builder.ins().uextend(I64, arguments[1 + length]);
        let amount = self.number(I64, HOST_CALL);
        let amount = self.builder.ins().iadd(bytes, amount);
        self.charge(amount);
        while arguments.len() < 5 {
            let zero = self.builder.ins().iconst(I32, 0);
            arguments.push(zero);
        }
        let signature = *self.host.get_or_insert_with(|| {
            let mut signature = Signature::new(CallConv::SystemV);
            signature.params.push(AbiParam::new(I64));
            signature.params.extend([AbiParam::new(I32); 4]);
            signature.returns.push(AbiParam::new(I32));
            self.builder.import_signature(signature)
        });
        let function = self.load_field(offset_of!(Context, functions) + 8 * which);
        let called = self.builder.ins().call_indirect(signature, function, &arguments);
        let result = self.builder.inst_results(called)[0];
        self.leave_if_failed();
        self.push(result);
    }

    fn instruction(&mut self, operator: &Operator<'_>, at: usize, weight: i64) -> Result<(), Fault> {
        if !self.reachable {
            return self.unreached(operator, at);
        }
        match *operator {
            Operator::Nop => {}
            Operator::Unreachable => self.trap(trap::UNREACHABLE),
            Operator::Drop => {
                self.pop();
            }
            Operator::Select => {
                let condition = self.pop();
                let (first, second) = self.pop2();
                let value = self.builder.ins().select(condition, first, second);
                self.push(value);
            }
            Operator::Block { blockty } => {
                let result = self.block_result(blockty, at)?;
                self.begin(Kind::Block, None, result);
            }
            Operator::Loop { blockty } => {
                let result = self.block_result(blockty, at)?;
                let head = self.builder.create_block();
                self.builder.ins().jump(head, &[]);
                self.builder.switch_to_block(head);
                self.begin(Kind::Loop, Some(head), result);
                let amount = self.number(I64, weight + 1);
                self.charge(amount);
            }
            Operator::If { blockty } => {
                let result = self.block_result(blockty, at)?;
                let condition = self.pop();
                let (then, otherwise) = (self.builder.create_block(), self.builder.create_block());
                self.builder.ins().brif(condition, then, &[], otherwise, &[]);
                self.builder.switch_to_block(then);
                self.builder.seal_block(then);
                self.begin(Kind::If(otherwise), None, result);
            }
            Operator::Else => self.otherwise(),
            Operator::End => self.end(),
            Operator::Br { relative_depth } => {
                let (target, values) = self.target(relative_depth);
                self.builder.ins().jump(target, &values);
                self.reachable = false;
            }
            Operator::BrIf { relative_depth } => {
                let condition = self.pop();
                let (target, values) = self.target(relative_depth);
                self.branch_away(condition, target, &values);
            }
            Operator::BrTable { ref targets } => {
                let index = self.pop();
                let mut calls = Vec::new();
                for depth in targets.targets().chain([Ok(targets.default())]) {
                    let (target, values) = self.target(depth?);
                    calls.push(self.builder.func.dfg.block_call(target, &values));
                }
                let Some(default) = calls.pop() else { return Ok(()) };
                let table = self.builder.create_jump_table(JumpTableData::new(default, &calls));
                self.builder.ins().br_table(index, table);
                self.reachable = false;
            }
            Operator::Return => {
                let results: Vec<Value> = self.result.and_then(|_| self.stack.pop()).into_iter().collect();
                self.builder.ins().return_(&results);
                self.reachable = false;
            }
            Operator::Call { function_index } => {
                let index = function_index as usize;
                let Some((callee, of_type)) = self.module.functions.get(index).cloned() else {
                    return Ok(());
                };
                match callee {
                    Callee::Import(import) => self.import(import),
                    Callee::Own(own) => self.call(index, own, of_type),
                }
            }
            Operator::LocalGet { local_index } => {
                let value = self.builder.use_var(self.locals[local_index as usize]);
                self.push(value);
            }
            Operator::LocalSet { local_index } => {
                let value = self.pop();
                self.builder.def_var(self.locals[local_index as usize], value);
            }
            Operator::LocalTee { local_index } => {
                let value = self.pop();
                self.builder.def_var(self.locals[local_index as usize], value);
                self.push(value);
            }
            Operator::GlobalGet { global_index } => {
                let value = match self.module.globals[global_index as usize] {
                    Global::Constant(value_type, value) => self.number(of(value_type), value),
                    Global::Variable(value_type, index) => {
                        self.shared.needs |= needs::VARIABLES;
                        let place = offset(offset_of!(Context, globals) + 8 * index);
                        self.builder.ins().load(of(value_type), present(), self.context, place)
                    }
                };
                self.push(value);
            }
            Operator::GlobalSet { global_index } => {
                let value = self.pop();
                if let Global::Variable(_, index) = self.module.globals[global_index as usize] {
                    self.shared.needs |= needs::VARIABLES;
                    let place = offset(offset_of!(Context, globals) + 8 * index);
                    self.builder.ins().store(present(), value, self.context, place);
                }
            }
            Operator::MemorySize { .. } => {
                let pages = self.builder.ins().iconst(I32, i64::from(self.module.has_memory));
                self.push(pages);
            }
            _ => return self.arithmetic(operator, at),
        }
        Ok(())
    }

    fn otherwise(&mut self) {
        self.leave_block();
        let Some(frame) = self.frames.last_mut() else { return };
        let Kind::If(otherwise) = frame.kind else { return };
        frame.kind = Kind::Block;
        self.stack.truncate(frame.height);
        self.builder.switch_to_block(otherwise);
        self.builder.seal_block(otherwise);
        self.reachable = true;
    }

    /// Where nothing is reached, only what ends that is looked at; but what cannot be had is refused there, too.
    fn unreached(&mut self, operator: &Operator<'_>, at: usize) -> Result<(), Fault> {
        match operator {
            Operator::Block { .. } | Operator::Loop { .. } | Operator::If { .. } => self.skipped += 1,
            Operator::End if self.skipped > 0 => self.skipped -= 1,
            Operator::End => self.end(),
            Operator::Else if self.skipped == 0 => self.otherwise(),
            Operator::CallIndirect { .. } | Operator::MemoryGrow { .. } => return Err(refused(operator, at)),
            _ => {}
        }
        Ok(())
    }

    fn arithmetic(&mut self, operator: &Operator<'_>, at: usize) -> Result<(), Fault> {
        use IntCC::{
            Equal, NotEqual, SignedGreaterThan, SignedGreaterThanOrEqual, SignedLessThan,
            SignedLessThanOrEqual, UnsignedGreaterThan, UnsignedGreaterThanOrEqual, UnsignedLessThan,
            UnsignedLessThanOrEqual,
        };
        match *operator {
            Operator::I32Const { value } => {
                let value = self.number(I32, i64::from(value));
                self.push(value);
            }
            Operator::I64Const { value } => {
                let value = self.number(I64, value);
                self.push(value);
            }
            Operator::I32Load { memarg } => self.load(memarg, I32, I32, false),
            Operator::I64Load { memarg } => self.load(memarg, I64, I64, false),
            Operator::I32Load8S { memarg } => self.load(memarg, I32, I8, true),
            Operator::I32Load8U { memarg } => self.load(memarg, I32, I8, false),
            Operator::I32Load16S { memarg } => self.load(memarg, I32, I16, true),
            Operator::I32Load16U { memarg } => self.load(memarg, I32, I16, false),
            Operator::I64Load8S { memarg } => self.load(memarg, I64, I8, true),
            Operator::I64Load8U { memarg } => self.load(memarg, I64, I8, false),
            Operator::I64Load16S { memarg } => self.load(memarg, I64, I16, true),
            Operator::I64Load16U { memarg } => self.load(memarg, I64, I16, false),
            Operator::I64Load32S { memarg } => self.load(memarg, I64, I32, true),
            Operator::I64Load32U { memarg } => self.load(memarg, I64, I32, false),
            Operator::I32Store { memarg } | Operator::I64Store32 { memarg } => self.store(memarg, I32),
            Operator::I64Store { memarg } => self.store(memarg, I64),
            Operator::I32Store8 { memarg } | Operator::I64Store8 { memarg } => self.store(memarg, I8),
            Operator::I32Store16 { memarg } | Operator::I64Store16 { memarg } => self.store(memarg, I16),
            Operator::I32Eqz | Operator::I64Eqz => self.is_zero(),
            Operator::I32Eq | Operator::I64Eq => self.compare(Equal),
            Operator::I32Ne | Operator::I64Ne => self.compare(NotEqual),
            Operator::I32LtS | Operator::I64LtS => self.compare(SignedLessThan),
            Operator::I32LtU | Operator::I64LtU => self.compare(UnsignedLessThan),
            Operator::I32GtS | Operator::I64GtS => self.compare(SignedGreaterThan),
            Operator::I32GtU | Operator::I64GtU => self.compare(UnsignedGreaterThan),
            Operator::I32LeS | Operator::I64LeS => self.compare(SignedLessThanOrEqual),
            Operator::I32LeU | Operator::I64LeU => self.compare(UnsignedLessThanOrEqual),
            Operator::I32GeS | Operator::I64GeS => self.compare(SignedGreaterThanOrEqual),
            Operator::I32GeU | Operator::I64GeU => self.compare(UnsignedGreaterThanOrEqual),
            Operator::I32Clz | Operator::I64Clz => self.one(|builder, value| builder.ins().clz(value)),
            Operator::I32Ctz | Operator::I64Ctz => self.one(|builder, value| builder.ins().ctz(value)),
            Operator::I32Popcnt | Operator::I64Popcnt => {
                self.one(|builder, value| builder.ins().popcnt(value))
            }
            Operator::I32Add | Operator::I64Add => self.two(|builder, a, b| builder.ins().iadd(a, b)),
            Operator::I32Sub | Operator::I64Sub => self.two(|builder, a, b| builder.ins().isub(a, b)),
            Operator::I32Mul | Operator::I64Mul => self.two(|builder, a, b| builder.ins().imul(a, b)),
            Operator::I32And | Operator::I64And => self.two(|builder, a, b| builder.ins().band(a, b)),
            Operator::I32Or | Operator::I64Or => self.two(|builder, a, b| builder.ins().bor(a, b)),
            Operator::I32Xor | Operator::I64Xor => self.two(|builder, a, b| builder.ins().bxor(a, b)),
            Operator::I32Shl | Operator::I64Shl => self.two(|builder, a, b| builder.ins().ishl(a, b)),
            Operator::I32ShrS | Operator::I64ShrS => self.two(|builder, a, b| builder.ins().sshr(a, b)),
            Operator::I32ShrU | Operator::I64ShrU => self.two(|builder, a, b| builder.ins().ushr(a, b)),
            Operator::I32Rotl | Operator::I64Rotl => self.two(|builder, a, b| builder.ins().rotl(a, b)),
            Operator::I32Rotr | Operator::I64Rotr => self.two(|builder, a, b| builder.ins().rotr(a, b)),
            Operator::I32DivS | Operator::I64DivS => self.divide(true, false),
            Operator::I32DivU | Operator::I64DivU => self.divide(false, false),
            Operator::I32RemS | Operator::I64RemS => self.divide(true, true),
            Operator::I32RemU | Operator::I64RemU => self.divide(false, true),
            Operator::I32WrapI64 => self.one(|builder, value| builder.ins().ireduce(I32, value)),
            Operator::I64ExtendI32S => self.one(|builder, value| builder.ins().sextend(I64, value)),
            Operator::I64ExtendI32U => self.one(|builder, value| builder.ins().uextend(I64, value)),
            Operator::I32Extend8S | Operator::I64Extend8S => self.extend(I8),
            Operator::I32Extend16S | Operator::I64Extend16S => self.extend(I16),
            Operator::I64Extend32S => self.extend(I32),
            _ => return Err(refused(operator, at)),
        }
        Ok(())
    }
}

fn refused(operator: &Operator<'_>, at: usize) -> Fault {
    let instead = match operator {
        Operator::CallIndirect { .. } => "functions are called by their names",
        Operator::MemoryGrow { .. } => "a handler has one page (64 KiB), from the beginning",
        _ => "handlers have integers, branches, calls and one memory",
    };
    Fault::refused(name(operator), at, instead)
}
