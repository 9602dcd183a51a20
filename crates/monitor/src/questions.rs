//! Questions: what the policy does not allow is put to another program, which may allow it.
//!
//! The other program listens at a Unix socket, to which the monitor connects before the program starts. A question is a line of JSON,
//! and so is its answer:
//!
//! ```text
//! {"id":1,"time":1764345600.5,"process":4711,"thread":4711,"program":"python3","call":"openat","path":"/home/me/.netrc","missing":["read"]}
//! {"id":1,"answer":"once"}
//! ```
//!
//! The call waits for its answer, others go on. It is refused where there is none: the other program has closed its connection, does not
//! receive, sends what is no answer, or too many calls wait.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::Error;
use crate::log::{Event, names};
use crate::policy::Rights;

/// As many calls may wait for answers at one time. The monitor has twice as many threads.
const MOST: usize = 32;
/// As many different answers are remembered; what comes then is asked about each time.
const MOST_REMEMBERED: usize = 10_000;
/// How often it is looked whether a call still waits for its answer.
const PACE: Duration = Duration::from_millis(100);
/// How long the other program may not receive.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest answer in bytes.
const LONGEST: u64 = 4096;

/// Who asks, and about which call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AskedCall<'a> {
    pub(crate) process: i32,
    pub(crate) thread: i32,
    pub(crate) call: &'a str,
}

#[derive(Serialize)]
struct Question<'a> {
    id: u64,
    time: f64,
    process: i32,
    thread: i32,
    program: String,
    call: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    path: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    missing: Option<Vec<&'static str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    address: Option<&'a str>,
}

/// A question that needs no answer any more.
#[derive(Serialize)]
struct Withdrawal {
    id: u64,
    withdrawn: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Answer {
    id: u64,
    answer: Verdict,
}

/// What the other program says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// This call is allowed.
    Once,
    /// This call is allowed, and what would ask the same.
    Always,
    /// This call is refused.
    Deny,
    /// This call is refused, and what would ask the same.
    Never,
}

/// What a question is about, by which answers are remembered.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Subject {
    File(Vec<u8>),
    Address { call: String, text: String },
}

#[derive(Debug, Default)]
struct Known {
    next: u64,
    waiting: BTreeMap<u64, Option<Verdict>>,
    /// The rights that were allowed and refused for good; of an address, all or none.
    remembered: HashMap<Subject, (Rights, Rights)>,
    is_closed: bool,
}

/// The connection to the program that answers.
#[derive(Debug)]
pub(crate) struct Questions {
    socket: UnixStream,
    known: Mutex<Known>,
    answered: Condvar,
}

/// Connects to the program that answers.
///
/// # Errors
/// Those of connect(2).
pub(crate) fn connect(path: &Path) -> Result<UnixStream, Error> {
    let connected = UnixStream::connect(path).and_then(|socket| {
        socket.set_write_timeout(Some(SEND_TIMEOUT))?;
        Ok(socket)
    });
    connected.map_err(|source| Error::Ask { path: path.to_owned(), source })
}

impl Questions {
    /// Starts the thread that receives answers.
    ///
    /// # Errors
    /// Where no thread can be made.
    pub(crate) fn start(socket: UnixStream) -> std::io::Result<Arc<Self>> {
        let receiver = socket.try_clone()?;
        let this = Arc::new(Self { socket, known: Mutex::default(), answered: Condvar::new() });
        let receiving = Arc::clone(&this);
        std::thread::Builder::new().name("answers".into()).spawn(move || receiving.receive(receiver))?;
        Ok(this)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn receive(&self, socket: UnixStream) {
        let mut reader = BufReader::new(socket);
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
                Ok(0) => return self.close("the connection was closed"),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return self.close(&error.to_string()),
            }
            let Ok(Answer { id, answer }) = serde_json::from_slice(&line) else {
                return self.close("what was received is no answer");
            };
            let mut known = self.known();
            // One that was withdrawn meanwhile has none.
            if let Some(slot) = known.waiting.get_mut(&id) {
                *slot = Some(answer);
                self.answered.notify_all();
            }
        }
    }

    /// Refuses what is asked from now on.
    fn close(&self, why: &str) {
        self.known().is_closed = true;
        self.answered.notify_all();
        let _ = self.socket.shutdown(Shutdown::Both);
        let _ = writeln!(
            std::io::stderr(),
            "orrery guard: questions are not answered any more: {why}; what the policy does not allow is refused"
        );
    }

    fn send(&self, line: &impl Serialize) -> std::io::Result<()> {
        let mut bytes = serde_json::to_vec(line)?;
        bytes.push(b'\n');
        (&self.socket).write_all(&bytes)
    }

    /// Asks whether something is allowed that the policy does not allow, and waits for the answer, as long as the caller does.
    pub(crate) fn allow(
        &self,
        asked: AskedCall<'_>,
        event: &Event<'_>,
        still_waits: impl Fn() -> bool,
    ) -> bool {
        let (subject, rights) = match event {
            Event::File { path, missing } => (Subject::File(path.to_vec()), *missing),
            Event::Address { text } => {
                (Subject::Address { call: asked.call.to_owned(), text: text.clone() }, Rights::all())
            }
            // No answer makes these harmless.
            Event::Call { .. } | Event::Rule { .. } => return false,
        };
        let mut known = self.known();
        if let Some((allowed, refused)) = known.remembered.get(&subject) {
            if allowed.contains(rights) {
                return true;
            }
            if refused.intersects(rights) {
                return false;
            }
        }
        if known.is_closed || known.waiting.len() >= MOST {
            return false;
        }
        let id = known.next;
        known.next += 1;
        known.waiting.insert(id, None);
        // Under the lock: lines of two threads must not mix.
        if let Err(error) = self.send(&question(id, asked, event)) {
            known.waiting.remove(&id);
            drop(known);
            self.close(&error.to_string());
            return false;
        }
        let verdict = loop {
            (known, _) = self.answered.wait_timeout(known, PACE).unwrap_or_else(PoisonError::into_inner);
            if let Some(Some(verdict)) = known.waiting.get(&id) {
                break Some(*verdict);
            }
            if known.is_closed {
                break None;
            }
            if !still_waits() {
                let _ = self.send(&Withdrawal { id, withdrawn: true });
                break None;
            }
        };
        known.waiting.remove(&id);
        let is_allowed = matches!(verdict, Some(Verdict::Once | Verdict::Always));
        let is_for_good = matches!(verdict, Some(Verdict::Always | Verdict::Never));
        if is_for_good
            && (known.remembered.len() < MOST_REMEMBERED || known.remembered.contains_key(&subject))
        {
            let (allowed, refused) =
                known.remembered.entry(subject).or_insert((Rights::empty(), Rights::empty()));
            if is_allowed { allowed } else { refused }.insert(rights);
        }
        is_allowed
    }
}

fn question<'a>(id: u64, asked: AskedCall<'a>, event: &'a Event<'_>) -> Question<'a> {
    let AskedCall { process, thread, call } = asked;
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    let program = std::fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
    let program = program.trim_end_matches('\n').to_owned();
    let (path, missing, address) = match event {
        Event::File { path, missing } => {
            (Some(String::from_utf8_lossy(path).into_owned()), Some(names(*missing)), None)
        }
        Event::Address { text } => (None, None, Some(text.as_str())),
        Event::Call { .. } | Event::Rule { .. } => (None, None, None),
    };
    Question { id, time, process, thread, program, call, path, missing, address }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    const CALL: AskedCall<'_> = AskedCall { process: 1, thread: 1, call: "openat" };

    fn file(missing: Rights) -> Event<'static> {
        Event::File { path: b"/secret", missing }
    }

    /// Questions, and a program that gives these answers, one after the other, and then closes; it returns what it was asked.
    fn answering(
        answers: &'static [&'static str],
    ) -> (Arc<Questions>, std::thread::JoinHandle<Vec<serde_json::Value>>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let answerer = std::thread::spawn(move || {
            let mut reader = BufReader::new(theirs.try_clone().unwrap());
            let mut asked = Vec::new();
            for answer in answers {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                let question: serde_json::Value = serde_json::from_str(&line).unwrap();
                theirs.write_all(answer.replace("ID", &question["id"].to_string()).as_bytes()).unwrap();
                asked.push(question);
            }
            asked
        });
        (Questions::start(ours).unwrap(), answerer)
    }

    #[test]
    fn answers_are_kept_to_and_remembered() {
        let (questions, answerer) = answering(&[
            "{\"id\":ID,\"answer\":\"once\"}\n",
            "{\"id\":ID,\"answer\":\"deny\"}\n",
            "{\"id\":ID,\"answer\":\"always\"}\n",
            "{\"id\":ID,\"answer\":\"never\"}\n",
            "{\"id\":ID,\"answer\":\"once\"}\n",
        ]);
        let ask = |event: &Event<'_>| questions.allow(CALL, event, || true);
        assert!(ask(&file(Rights::READ)));
        assert!(!ask(&file(Rights::READ)));
        assert!(ask(&file(Rights::READ)), "always");
        assert!(ask(&file(Rights::READ)), "without a question");
        assert!(!ask(&file(Rights::READ | Rights::WRITE)), "more is another question: never");
        assert!(!ask(&file(Rights::WRITE)), "without a question");
        assert!(!ask(&Event::Call { reason: "it leads around" }), "never asked");
        assert!(ask(&file(Rights::CREATE)), "the next question");
        let asked = answerer.join().unwrap();
        let missing: Vec<_> = asked.iter().map(|question| question["missing"].to_string()).collect();
        assert_eq!(
            missing,
            ["[\"read\"]", "[\"read\"]", "[\"read\"]", "[\"read\",\"write\"]", "[\"create\"]"]
        );
        assert!(asked.iter().all(|question| question["path"] == "/secret" && question["call"] == "openat"));
        // It has closed its connection.
        assert!(!ask(&file(Rights::CREATE)));
    }

    #[test]
    fn what_is_no_answer_refuses() {
        for nonsense in [
            "\n",
            "once\n",
            "{\"id\":ID}\n",
            "{\"id\":ID,\"answer\":\"yes\"}\n",
            "{\"id\":ID,\"answer\":\"once\"",
        ] {
            let (questions, answerer) = answering(Box::leak(Box::new([nonsense])));
            assert!(!questions.allow(CALL, &file(Rights::READ), || true), "{nonsense:?}");
            answerer.join().unwrap();
        }
        let long: &'static str = Box::leak("x".repeat(1 << 16).into_boxed_str());
        let (questions, _answerer) = answering(Box::leak(Box::new([long])));
        assert!(!questions.allow(CALL, &file(Rights::READ), || true));
    }

    #[test]
    fn a_question_of_a_caller_that_has_gone_is_withdrawn() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let questions = Questions::start(ours).unwrap();
        let waits = AtomicBool::new(true);
        let asked = || waits.swap(false, Ordering::SeqCst);
        assert!(!questions.allow(CALL, &file(Rights::READ), asked));
        let mut lines = BufReader::new(&theirs).lines();
        assert!(lines.next().unwrap().unwrap().contains("\"id\":0"));
        assert_eq!(lines.next().unwrap().unwrap(), "{\"id\":0,\"withdrawn\":true}");
        // A late answer is no other question's.
        (&theirs).write_all(b"{\"id\":0,\"answer\":\"always\"}\n").unwrap();
        waits.store(true, Ordering::SeqCst);
        assert!(!questions.allow(CALL, &file(Rights::READ), asked));
    }

    #[test]
    fn one_that_does_not_receive_holds_nothing_up_for_long() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        ours.set_write_timeout(Some(Duration::from_millis(50))).unwrap();
        let questions = Questions::start(ours).unwrap();
        let path = vec![b'x'; 4000];
        let mut asked = 0;
        while !questions.known().is_closed {
            assert!(!questions.allow(CALL, &Event::File { path: &path, missing: Rights::READ }, || false));
            asked += 1;
            assert!(asked < 100_000);
        }
    }
}
