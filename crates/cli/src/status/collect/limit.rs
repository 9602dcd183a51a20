//! Work in threads, which is waited for until a limit.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use crate::status::model::Kind;

/// How long an answer may take.
pub(super) const LIMIT: Duration = Duration::from_secs(1);

/// What is asked, and where.
pub(super) type Task = (Kind, PathBuf);
/// How it is asked.
pub(super) type Work<T> = Box<dyn FnOnce() -> T + Send>;

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Silent {
    /// It takes longer than so.
    Late(Duration),
    /// No thread could be started, or it has panicked.
    Failed,
}

impl fmt::Display for Silent {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Late(waited) => write!(out, "no answer within {} s", waited.as_secs().max(1)),
            Self::Failed => out.write_str("the thread that asks could not be started, or has panicked"),
        }
    }
}

/// Work that has not ended in time, and goes on.
pub(super) struct Limited<T> {
    late: BTreeMap<Task, (Instant, Receiver<T>)>,
}

impl<T> Default for Limited<T> {
    fn default() -> Self {
        Self { late: BTreeMap::new() }
    }
}

impl<T: Send + 'static> Limited<T> {
    /// Does all tasks at once. One that is late from before is not begun again: its answer is awaited.
    pub(super) fn run(
        &mut self,
        tasks: Vec<(Task, Work<T>)>,
        limit: Duration,
    ) -> Vec<(Task, Result<T, Silent>)> {
        let begin = Instant::now();
        let begun: Vec<_> = tasks
            .into_iter()
            .map(|(task, work)| {
                let late = self.late.remove(&task);
                let is_new = late.is_none();
                let running = late.or_else(|| start(work).map(|answer| (begin, answer)));
                (task, is_new, running)
            })
            .collect();
        let mut answers = Vec::new();
        for (task, is_new, running) in begun {
            let answer = match running {
                None => Err(Silent::Failed),
                Some((since, receiver)) => {
                    match receiver.recv_timeout(limit.saturating_sub(begin.elapsed())) {
                        Ok(answer) => Ok(answer),
                        Err(RecvTimeoutError::Disconnected) => Err(Silent::Failed),
                        Err(RecvTimeoutError::Timeout) => {
                            self.late.insert(task.clone(), (since, receiver));
                            Err(Silent::Late(if is_new { limit } else { since.elapsed() }))
                        }
                    }
                }
            };
            answers.push((task, answer));
        }
        answers
    }
}

fn start<T: Send + 'static>(work: Work<T>) -> Option<Receiver<T>> {
    let (sender, receiver) = channel();
    // The receiver is gone where the command has ended.
    let thread = std::thread::Builder::new().spawn(move || drop(sender.send(work())));
    thread.ok().map(|_| receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(name: &str) -> Task {
        (Kind::Warm, name.into())
    }

    #[test]
    fn late_work_is_begun_once_and_its_answer_is_taken() {
        let mut limited = Limited::default();
        let (release, held) = channel::<()>();
        let work: Work<u32> = Box::new(move || {
            let _ = held.recv();
            1
        });
        let quick = || -> Work<u32> { Box::new(|| 2) };
        let patience = Duration::from_secs(60);
        let panics: Work<u32> = Box::new(|| panic!("on purpose"));
        assert_eq!(
            limited.run(vec![(task("panics"), panics)], patience),
            [(task("panics"), Err(Silent::Failed))]
        );
        let limit = Duration::from_millis(100);
        assert_eq!(
            limited.run(vec![(task("slow"), work)], limit),
            [(task("slow"), Err(Silent::Late(limit)))]
        );
        let answers = limited.run(vec![(task("slow"), quick())], limit);
        assert!(matches!(answers[0].1, Err(Silent::Late(waited)) if waited > limit), "{answers:?}");
        drop(release);
        let answers = limited.run(vec![(task("slow"), quick()), (task("quick"), quick())], patience);
        assert_eq!(answers, [(task("slow"), Ok(1)), (task("quick"), Ok(2))]);
        assert_eq!(limited.run(vec![(task("slow"), quick())], patience), [(task("slow"), Ok(2))]);
    }
}
