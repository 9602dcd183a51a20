//! Lays a policy out as executives read it.

use std::mem::offset_of;
use std::os::unix::ffi::OsStringExt;

use orrery_compiled_handler::Handler;
use orrery_hijack_image::glob;
use orrery_hijack_image::handler::Handler as HandlerEntry;
use orrery_hijack_image::nr::CALLS;
use orrery_hijack_image::policy::{Address, MAGIC, Mount, Rule, Shape, Span, Table, Text, action};

use super::compile::{Compiled, closing};
use super::{Policy, automaton};
use crate::archive::Mounted;
use crate::arg_types;
use crate::calls;
use crate::image::PAGE;

/// The code of each handler begins on such a multiple.
const CODE_ALIGNED: usize = 16;

/// Bytes that grow, and remember where things are.
struct Layout {
    bytes: Vec<u8>,
}

impl Layout {
    fn end(&self) -> u32 {
        u32::try_from(self.bytes.len()).unwrap_or(u32::MAX)
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
    }

    fn text(&mut self, text: &[u8]) -> Text {
        if text.is_empty() {
            return Text::default();
        }
        let start = self.end();
        self.bytes.extend(text);
        Text { start, length: u32::try_from(text.len()).unwrap_or(0) }
    }

    /// Adds handlers, whose entries begin at `entries`: what they load, and at the end, in pages of its own, their code.
    fn handlers(&mut self, handlers: &[&Handler], entries: u32) -> Text {
        if handlers.is_empty() {
            return Text::default();
        }
        let mut made = Vec::new();
        for handler in handlers {
            self.align();
            let constants: Vec<u8> = handler.constants.iter().flat_map(|word| word.to_ne_bytes()).collect();
            let constants = self.text(&constants);
            made.push((self.text(&handler.data), constants));
        }
        let page = usize::try_from(PAGE).unwrap_or(1);
        self.bytes.resize(self.bytes.len().next_multiple_of(page), 0);
        let start = self.end();
        for (index, (handler, (data, constants))) in handlers.iter().zip(made).enumerate() {
            // What is between is no instruction that does anything: int3.
            self.bytes.resize(self.bytes.len().next_multiple_of(CODE_ALIGNED), 0xcc);
            let entry = HandlerEntry {
                entry: self.end() + handler.entry,
                needs: handler.needs,
                data,
                constants,
                stack: handler.stack,
                globals: handler.globals,
            };
            self.bytes.extend(&handler.code);
            let at = usize::try_from(entries).unwrap_or(0) + index * size_of::<HandlerEntry>();
            self.put(at, bytes_of(&entry));
        }
        self.bytes.resize(self.bytes.len().next_multiple_of(page), 0xcc);
        Text { start, length: self.end() - start }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.bytes.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }
}

/// Returns the bytes of a structure of integers without padding.
fn bytes_of<T: Copy>(value: &T) -> &[u8] {
    // SAFETY: `T` is one of the table's structures, which have no padding; the slice borrows it.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// Returns where in a table the code of handlers is, and how long; zeros: there is none.
pub(crate) fn handlers_code(table: &[u8]) -> (u64, u64) {
    let half = |at: usize| {
        let bytes = table.get(offset_of!(Table, code) + at..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes).into())
    };
    (half(offset_of!(Text, start)), half(offset_of!(Text, length)))
}

/// What becomes of programs that a policy cannot follow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Strictness {
    /// They are refused, if the policy denies anything; else there is a warning.
    pub(crate) strict: bool,
    /// Device and inode of the file that messages about them go to, where a program has it as standard error.
    pub(crate) messages: [u64; 2],
}

impl Policy {
    /// Returns whether some rule keeps something from a program, and not only now and then.
    pub fn denies(&self) -> bool {
        self.rules.iter().any(Compiled::denies)
    }

    /// Returns whether anything depends on which program is executed, or from where it is called.
    pub(crate) fn asks_for_programs(&self) -> bool {
        self.rules.iter().any(|compiled| !compiled.programs.is_empty() || !compiled.callers.is_empty())
    }

    /// Returns which rules are about a program.
    pub(crate) fn concerned(&self, program: &[u8]) -> Vec<bool> {
        let concerns = |programs: &[u8]| programs.is_empty() || glob::any_matches(programs, program);
        self.rules.iter().map(|compiled| concerns(&compiled.programs)).collect()
    }

    /// The table for one program: without rules that are about others, with the mounts that this process holds. Empty where
    /// there are neither.
    pub(crate) fn table(&self, program: &[u8], mounted: &[Mounted], strictness: Strictness) -> Vec<u8> {
        let concerns = |programs: &[u8]| programs.is_empty() || glob::any_matches(programs, program);
        let closing = if strictness.strict { closing(&self.rules) } else { Vec::new() };
        let given = self.rules.iter().chain(&closing);
        let rules: Vec<_> = given.filter(|compiled| concerns(&compiled.programs)).collect();
        if rules.is_empty() && mounted.is_empty() {
            return Vec::new();
        }
        let mut layout = Layout { bytes: vec![0; size_of::<Table>()] };
        let start = layout.end();
        layout.bytes.resize(layout.bytes.len() + rules.len() * size_of::<Rule>(), 0);
        let count = |count: usize| u32::try_from(count).unwrap_or(0);
        let rule_texts = Text { start, length: count(rules.len()) };

        let mut spans = [Span::default(); CALLS + 1];
        let mut references: Vec<u16> = Vec::new();
        for (number, span) in spans.iter_mut().enumerate() {
            let first = references.len();
            let own = (0_u16..).zip(&rules).filter(|(_, compiled)| {
                compiled.calls.iter().any(|call| usize::try_from(*call) == Ok(number))
            });
            references.extend(own.map(|(index, _)| index));
            let narrow = |value: usize| u16::try_from(value).unwrap_or(u16::MAX);
            *span = Span { first: narrow(first), count: narrow(references.len() - first) };
        }
        let references_text = Text { start: layout.end(), length: count(references.len()) };
        layout.bytes.extend(references.iter().flat_map(|reference| reference.to_ne_bytes()));
        layout.align();

        let mut lists: Vec<&[u8]> = Vec::new();
        for list in rules.iter().map(|compiled| compiled.path.as_slice()).filter(|list| !list.is_empty()) {
            if !lists.contains(&list) {
                lists.push(list);
            }
        }
        let automaton = automaton::compile(&lists);
        let automaton_text = layout.text(automaton.as_deref().unwrap_or(&[]));
        layout.align();

        let mut handlers: Vec<&Handler> = Vec::new();
        for handler in rules.iter().filter_map(|compiled| compiled.handler.as_deref()) {
            if !handlers.contains(&handler) {
                handlers.push(handler);
            }
        }
        let handlers_text = Text { start: layout.end(), length: count(handlers.len()) };
        layout.bytes.resize(layout.bytes.len() + handlers.len() * size_of::<HandlerEntry>(), 0);

        // Their texts follow when all places are known.
        let callers: Vec<_> =
            rules.iter().map(|compiled| &compiled.callers).filter(|callers| !callers.is_empty()).collect();
        let callers_text = Text { start: layout.end(), length: count(callers.len()) };
        layout.bytes.resize(layout.bytes.len() + callers.len() * size_of::<Text>(), 0);
        let place =
            |start: u32, index: usize, size: usize| usize::try_from(start).unwrap_or(0) + index * size;
        let mut next_caller = 0;
        for (index, compiled) in rules.iter().enumerate() {
            let mut rule = compiled.rule;
            rule.path = layout.text(&compiled.path);
            let list = lists.iter().position(|list| *list == compiled.path);
            rule.fits = list.filter(|_| automaton.is_some()).map_or(0, |list| 1 << list);
            rule.descriptors = u32::from(compiled.descriptors);
            if let Some(own) = compiled.handler.as_deref() {
                let index = handlers.iter().position(|handler| *handler == own);
                rule.value = index.and_then(|index| i64::try_from(index).ok()).unwrap_or(i64::MAX);
            }
            rule.bare = u64::from(compiled.is_bare());
            rule.target = layout.text(&compiled.target);
            rule.address = Address { path: layout.text(&compiled.address_path), ..rule.address };
            if !compiled.callers.is_empty() {
                let text = layout.text(&compiled.callers);
                layout.put(place(callers_text.start, next_caller, size_of::<Text>()), bytes_of(&text));
                rule.callers = 1 << next_caller;
                next_caller += 1;
            }
            layout.put(place(rule_texts.start, index, size_of::<Rule>()), bytes_of(&rule));
        }
        layout.align();
        let mounts_text = Text { start: layout.end(), length: count(mounted.len()) };
        layout.bytes.resize(layout.bytes.len() + mounted.len() * size_of::<Mount>(), 0);
        for (index, mounted) in mounted.iter().enumerate() {
            let backing = mounted.path(std::process::id()).into_os_string().into_vec();
            let mount = Mount {
                prefix: layout.text(&mounted.prefix),
                backing: layout.text(&backing),
                device: mounted.device,
            };
            layout.put(place(mounts_text.start, index, size_of::<Mount>()), bytes_of(&mount));
        }
        let code_text = layout.handlers(&handlers, handlers_text.start);
        layout.align();
        let length = layout.bytes.len() as u64;
        let tells_only =
            |compiled: &&Compiled| compiled.rule.action == action::NONE && compiled.rule.delay == 0;
        let decides = u64::from(!rules.iter().all(tells_only));
        let unfollowed = self.treatment(strictness);
        let shapes: [Shape; CALLS + 1] = calls::shapes();
        for (at, bytes) in [
            (offset_of!(Table, magic), bytes_of(&MAGIC)),
            (offset_of!(Table, length), bytes_of(&length)),
            (offset_of!(Table, decides), bytes_of(&decides)),
            (offset_of!(Table, unfollowed), bytes_of(&unfollowed)),
            (offset_of!(Table, signals), bytes_of(&self.signals)),
            (offset_of!(Table, messages), bytes_of(&strictness.messages)),
            (offset_of!(Table, rules), bytes_of(&rule_texts)),
            (offset_of!(Table, references), bytes_of(&references_text)),
            (offset_of!(Table, callers), bytes_of(&callers_text)),
            (offset_of!(Table, mounts), bytes_of(&mounts_text)),
            (offset_of!(Table, handlers), bytes_of(&handlers_text)),
            (offset_of!(Table, code), bytes_of(&code_text)),
            (offset_of!(Table, automaton), bytes_of(&automaton_text)),
            (offset_of!(Table, calls), bytes_of(&spans)),
            (offset_of!(Table, shapes), bytes_of(&shapes)),
            (offset_of!(Table, captures), bytes_of(&arg_types::captures(self.detail))),
        ] {
            layout.put(at, bytes);
        }
        layout.bytes
    }

    /// Returns which patterns for callers a file matches, in this program.
    pub(crate) fn marks(&self, program: &[u8], file: &[u8]) -> u64 {
        let concerns = |programs: &[u8]| programs.is_empty() || glob::any_matches(programs, program);
        let callers = self.rules.iter().filter(|compiled| concerns(&compiled.programs));
        let callers = callers.map(|compiled| &compiled.callers).filter(|callers| !callers.is_empty());
        (0..u64::BITS)
            .zip(callers)
            .filter(|(_, callers)| glob::any_matches(callers, file))
            .fold(0, |marks, (bit, _)| marks | 1 << bit)
    }
}
