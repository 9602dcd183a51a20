//! What the live view shows: the last status, the selected kind and item, and what keys do.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::status::model::{Figure, Figures, Item, Kind, Status, Unreadable};

/// What to do after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    GoOn,
    Quit,
}

/// A line of the list.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Entry<'a> {
    Item(&'a Item),
    Unreadable(&'a Unreadable),
}

/// What an entry is known by in the next status.
type Identity = (Kind, String, Option<u32>);

impl Entry<'_> {
    fn kind(&self) -> Kind {
        match self {
            Self::Item(item) => item.kind,
            Self::Unreadable(one) => one.kind,
        }
    }

    fn identity(&self) -> Identity {
        match self {
            Self::Item(item) => (item.kind, item.name.clone(), item.pid),
            Self::Unreadable(one) => (one.kind, one.name.clone(), None),
        }
    }
}

/// The state of the view.
pub(super) struct View {
    kinds: Vec<Kind>,
    /// The kind that is shown; `None` for all.
    kind: Option<Kind>,
    status: Option<Status>,
    /// The status before, for rates.
    before: Option<Status>,
    selected: usize,
    is_paused: bool,
    shows_help: bool,
}

impl View {
    pub(super) fn new(kinds: Vec<Kind>) -> Self {
        Self {
            kinds,
            kind: None,
            status: None,
            before: None,
            selected: 0,
            is_paused: false,
            shows_help: false,
        }
    }

    pub(super) fn kinds(&self) -> &[Kind] {
        &self.kinds
    }

    pub(super) fn kind(&self) -> Option<Kind> {
        self.kind
    }

    pub(super) fn status(&self) -> Option<&Status> {
        self.status.as_ref()
    }

    pub(super) fn is_paused(&self) -> bool {
        self.is_paused
    }

    pub(super) fn shows_help(&self) -> bool {
        self.shows_help
    }

    pub(super) fn selected(&self) -> usize {
        self.selected
    }

    /// Returns the entries of a kind, or of all: what could not be asked comes last.
    pub(super) fn entries(&self) -> Vec<Entry<'_>> {
        let Some(status) = &self.status else { return Vec::new() };
        let items = status.items.iter().map(Entry::Item);
        let all = items.chain(status.unreadable.iter().map(Entry::Unreadable));
        all.filter(|entry| self.kind.is_none_or(|kind| entry.kind() == kind)).collect()
    }

    /// Takes a new status; the same item stays selected. A status that was on its way when the view was paused is dropped.
    pub(super) fn update(&mut self, status: Status) {
        if self.is_paused {
            return;
        }
        let selected = self.entries().get(self.selected).map(Entry::identity);
        self.before = self.status.replace(status);
        let same = self.entries().iter().position(|entry| Some(entry.identity()) == selected);
        self.select(same.unwrap_or(self.selected));
    }

    fn select(&mut self, index: usize) {
        self.selected = index.min(self.entries().len().saturating_sub(1));
    }

    /// Does what a key is for.
    pub(super) fn press(&mut self, key: KeyEvent) -> Next {
        if key.kind == KeyEventKind::Release {
            return Next::GoOn;
        }
        // The terminal sends no signal while each key is read.
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Next::Quit;
        }
        match key.code {
            KeyCode::Char('q') => return Next::Quit,
            KeyCode::Esc if self.shows_help => self.shows_help = false,
            KeyCode::Esc => return Next::Quit,
            KeyCode::Char('?') => self.shows_help = !self.shows_help,
            KeyCode::Char('p') => self.is_paused = !self.is_paused,
            KeyCode::Down | KeyCode::Char('j') => self.select(self.selected.saturating_add(1)),
            KeyCode::Up | KeyCode::Char('k') => self.select(self.selected.saturating_sub(1)),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(usize::MAX),
            KeyCode::Tab => self.turn(1),
            KeyCode::BackTab => self.turn(self.kinds.len()),
            _ => {}
        }
        Next::GoOn
    }

    /// Selects another kind: the one so many further, where all of them together are one, too.
    fn turn(&mut self, by: usize) {
        let now = self.kind.and_then(|kind| self.kinds.iter().position(|other| *other == kind));
        let places = self.kinds.len() + 1;
        let next = (now.map_or(0, |index| index + 1) + by) % places;
        self.kind = next.checked_sub(1).and_then(|index| self.kinds.get(index).copied());
        self.select(0);
    }

    /// Returns by how much a counter of an item grows in a second.
    pub(super) fn rate(&self, item: &Item, figure: &Figure) -> Option<f64> {
        self.rate_of(item, figure, |before| Some(&before.figures))
    }

    /// Returns the same for a counter of the part with this index.
    pub(super) fn part_rate(&self, item: &Item, index: usize, figure: &Figure) -> Option<f64> {
        let part = item.parts.get(index)?;
        self.rate_of(item, figure, |before| {
            let same = before.parts.iter().find(|other| (&other.name, other.pid) == (&part.name, part.pid));
            same.map(|part| &part.figures)
        })
    }

    fn rate_of<'a>(
        &'a self,
        item: &Item,
        figure: &Figure,
        figures: impl FnOnce(&'a Item) -> Option<&'a Figures>,
    ) -> Option<f64> {
        let (now, before) = (self.status.as_ref()?, self.before.as_ref()?);
        let seconds = now.taken_at_unix_seconds - before.taken_at_unix_seconds;
        if !figure.is_counter() || seconds <= 0.0 {
            return None;
        }
        let identity = Entry::Item(item).identity();
        let same = before.items.iter().find(|other| Entry::Item(other).identity() == identity)?;
        let difference = figure.value.to_f64() - figures(same)?.get(figure.name)?.to_f64();
        // A server that was started again counts from zero.
        Some(difference / seconds).filter(|rate| *rate >= 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::samples;

    fn press(view: &mut View, code: KeyCode) -> Next {
        view.press(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn view() -> View {
        let mut view = View::new(Kind::ALL.to_vec());
        view.update(samples::status());
        view
    }

    #[test]
    fn keys_move_within_the_list() {
        let mut view = view();
        assert_eq!(view.entries().len(), 3);
        for (code, selected) in [
            (KeyCode::Up, 0),
            (KeyCode::Down, 1),
            (KeyCode::Char('j'), 2),
            (KeyCode::Down, 2),
            (KeyCode::Char('k'), 1),
            (KeyCode::End, 2),
            (KeyCode::Home, 0),
        ] {
            assert_eq!(press(&mut view, code), Next::GoOn);
            assert_eq!(view.selected(), selected, "{code:?}");
        }
    }

    #[test]
    fn tab_goes_round_the_kinds() {
        let mut view = view();
        press(&mut view, KeyCode::Tab);
        assert_eq!(view.kind(), Some(Kind::Warm));
        assert_eq!(view.entries().len(), 1);
        press(&mut view, KeyCode::BackTab);
        assert_eq!(view.kind(), None);
        press(&mut view, KeyCode::BackTab);
        assert_eq!(view.kind(), Some(Kind::Guard));
        press(&mut view, KeyCode::Down);
        assert_eq!((view.entries().len(), view.selected()), (0, 0));
        press(&mut view, KeyCode::Tab);
        assert_eq!(view.kind(), None);
    }

    #[test]
    fn q_escape_and_control_c_quit() {
        let mut view = view();
        assert_eq!(press(&mut view, KeyCode::Char('q')), Next::Quit);
        press(&mut view, KeyCode::Char('?'));
        assert!(view.shows_help());
        assert_eq!(press(&mut view, KeyCode::Esc), Next::GoOn, "it closes the help");
        assert_eq!(press(&mut view, KeyCode::Esc), Next::Quit);
        assert_eq!(press(&mut view, KeyCode::Char('c')), Next::GoOn);
        assert_eq!(view.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)), Next::Quit);
    }

    #[test]
    fn the_same_item_stays_selected_and_a_pause_holds_everything() {
        let mut view = view();
        press(&mut view, KeyCode::Down);
        let mut next = samples::status();
        next.items.remove(0);
        view.update(next.clone());
        assert_eq!(view.selected(), 0);
        assert!(matches!(view.entries()[0], Entry::Item(item) if item.kind == Kind::Orbit));
        press(&mut view, KeyCode::Char('p'));
        view.update(samples::status());
        assert_eq!(view.status(), Some(&next));
        press(&mut view, KeyCode::Char('p'));
        view.update(samples::status());
        assert_eq!(view.entries().len(), 3);
    }

    #[test]
    fn counters_have_rates() {
        let mut view = view();
        let mut next = samples::status();
        next.taken_at_unix_seconds = view.status().unwrap().taken_at_unix_seconds + 2.0;
        let requests = |item: &Item| *item.figures.iter().find(|one| one.name == "requests_total").unwrap();
        assert_eq!(view.rate(&next.items[0], &requests(&next.items[0])), None, "there is one status only");
        view.update(next);
        let item = view.status().unwrap().items[0].clone();
        let more = Figure { value: 27_u64.into(), ..requests(&item) };
        assert_eq!(view.rate(&item, &more), Some(5.0));
        assert_eq!(view.rate(&item, &Figure { value: 1_u64.into(), ..more }), None, "it counts anew");
        assert_eq!(view.rate(&item, &Figure { name: "workers", ..more }), None, "it is no counter");
        let part = *item.parts[1].figures.iter().next().unwrap();
        assert_eq!(view.part_rate(&item, 1, &Figure { value: 75_u64.into(), ..part }), Some(1.0));
    }
}
