//! The journal of a file system (jbd2): which blocks it holds back.
//!
//! A block that a transaction changes hangs on one of that transaction's lists until the transaction is committed, and
//! cannot be dropped from memory before. So these lists name every block of which the disk, once its journal is
//! replayed, has an older state, though memory holds nothing else of the files in it. Source: Linux
//! `include/linux/jbd2.h`, `fs/jbd2/commit.c`.

use std::collections::BTreeSet;

use crate::error::{Error, Result};
use crate::object::Object;

/// The transactions that the disk does not have: one takes changes, another may be on its way to the disk.
const TRANSACTIONS: [&str; 2] = ["j_running_transaction", "j_committing_transaction"];
/// Where a transaction's blocks are; not all kernels have all of them. Blocks that wait for a checkpoint are committed.
const LISTS: [&str; 6] =
    ["t_reserved_list", "t_buffers", "t_forget", "t_shadow_list", "t_iobuf_list", "t_log_list"];
/// More than a journal has room for.
const MOST: usize = 1 << 20;

/// The numbers of all blocks that a transaction which was not committed has changed, or was about to.
pub(crate) fn uncommitted(journal: Object<'_>) -> Result<BTreeSet<u64>> {
    let mut blocks = BTreeSet::new();
    for transaction in TRANSACTIONS {
        let Some(transaction) = journal.pointer(transaction, "transaction_s")? else { continue };
        for list in LISTS.into_iter().filter(|list| transaction.has(list)) {
            ring(transaction, list, &mut blocks)?;
        }
    }
    Ok(blocks)
}

/// Adds the blocks of one list, which is a ring.
fn ring(transaction: Object<'_>, list: &'static str, blocks: &mut BTreeSet<u64>) -> Result<()> {
    let Some(first) = transaction.pointer(list, "journal_head")? else { return Ok(()) };
    let mut at = first;
    for _ in 0..MOST {
        blocks.insert(at.required("b_bh", "buffer_head")?.u64("b_blocknr")?);
        at = at.required("b_tnext", "journal_head")?;
        if at.address() == first.address() {
            return Ok(());
        }
    }
    Err(Error::Corrupt {
        kind: "transaction_s",
        address: transaction.address(),
        why: format!("{list} never comes round"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::{Machine, Maker};

    /// A ring of blocks, and where it begins.
    fn list(m: &mut Maker, blocks: &[u64]) -> u64 {
        let heads: Vec<u64> = blocks.iter().map(|_| m.make("journal_head")).collect();
        for (index, (&head, &block)) in heads.iter().zip(blocks).enumerate() {
            let buffer = m.make("buffer_head");
            m.set(buffer, "buffer_head", "b_blocknr", block);
            m.set(head, "journal_head", "b_bh", buffer);
            m.set(head, "journal_head", "b_tnext", heads[(index + 1) % heads.len()]);
        }
        heads.first().copied().unwrap_or(0)
    }

    /// Returns a journal with two transactions, and its address.
    fn journal(m: &mut Maker) -> (u64, u64) {
        let (journal, running, committing) =
            (m.make("journal_s"), m.make("transaction_s"), m.make("transaction_s"));
        m.set(journal, "journal_s", "j_running_transaction", running);
        m.set(journal, "journal_s", "j_committing_transaction", committing);
        for (transaction, path, blocks) in [
            (running, "t_buffers", &[7, 9, 11][..]),
            (running, "t_reserved_list", &[12]),
            (committing, "t_forget", &[7, 20]),
            (committing, "t_checkpoint_list", &[99]),
        ] {
            let first = list(m, blocks);
            m.set(transaction, "transaction_s", path, first);
        }
        (journal, running)
    }

    #[test]
    fn blocks_of_both_transactions_are_found_and_committed_ones_are_not() {
        let mut m = Maker::new();
        let (journal, _) = journal(&mut m);
        let machine = Machine::of(m);
        let kernel = machine.kernel();
        let found = uncommitted(kernel.object("journal_s", journal).unwrap()).unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [7, 9, 11, 12, 20]);
    }

    #[test]
    fn a_list_that_leads_elsewhere_is_told() {
        let mut m = Maker::new();
        let (journal, running) = journal(&mut m);
        m.set(running, "transaction_s", "t_buffers", 4711);
        let machine = Machine::of(m);
        let kernel = machine.kernel();
        assert!(uncommitted(kernel.object("journal_s", journal).unwrap()).is_err());
    }
}
