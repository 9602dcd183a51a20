//! Draws the live view: kinds above, items on the left, the selected item on the right, keys below.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, List, ListItem, ListState, Paragraph, Wrap};

use super::view::{Entry, View};
use crate::status::model::{Figure, Figures, Item, Unreadable};
use crate::status::table::name;
use crate::status::text::{age, label, printable, value};

/// The columns of labels in the details.
const LABELS: usize = 26;

const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
const SELECTED: Style = Style::new().add_modifier(Modifier::REVERSED);
const WARNING: Style = Style::new().fg(Color::Red);

const KEYS: [(&str, &str); 6] = [
    ("up, down, k, j", "select an item"),
    ("Home, End", "select the first, the last"),
    ("Tab, Shift+Tab", "show the next kind, the one before"),
    ("p", "pause, and go on"),
    ("?", "show the keys, or hide them"),
    ("q, Esc", "quit"),
];

pub(super) fn draw(frame: &mut Frame<'_>, view: &View) {
    let rows = [Constraint::Length(1), Constraint::Min(3), Constraint::Length(1)];
    let [above, middle, below] = Layout::vertical(rows).areas(frame.area());
    let [left, right] =
        Layout::horizontal([Constraint::Percentage(45), Constraint::Percentage(55)]).areas(middle);
    frame.render_widget(kinds(view), above);
    draw_list(frame, view, left);
    let entries = view.entries();
    let details = match entries.get(view.selected()) {
        Some(Entry::Item(item)) => item_lines(view, item),
        Some(Entry::Unreadable(one)) => unreadable_lines(one),
        None => Vec::new(),
    };
    let details =
        Paragraph::new(details).wrap(Wrap { trim: false }).block(Block::bordered().title("Details"));
    frame.render_widget(details, right);
    frame.render_widget(keys(view), below);
    if view.shows_help() {
        draw_help(frame);
    }
}

fn kinds(view: &View) -> Line<'static> {
    let count =
        |kind| view.status().map_or(0, |status| status.items.iter().filter(|item| item.kind == kind).count());
    let all = view.status().map_or(0, |status| status.items.len());
    let style = |is_selected| if is_selected { SELECTED } else { Style::new() };
    let mut spans = vec![Span::styled(format!(" all {all} "), style(view.kind().is_none()))];
    spans.extend(view.kinds().iter().map(|kind| {
        Span::styled(format!(" {} {} ", kind.word(), count(*kind)), style(view.kind() == Some(*kind)))
    }));
    Line::from(spans)
}

fn draw_list(frame: &mut Frame<'_>, view: &View, area: Rect) {
    let entries = view.entries();
    let block = Block::bordered().title("Running");
    if entries.is_empty() {
        let text = if view.status().is_none() { "Looking ..." } else { "Nothing of Orrery's runs." };
        return frame.render_widget(Paragraph::new(text).block(block), area);
    }
    let lines = entries.iter().map(|entry| match entry {
        Entry::Item(item) => {
            let head = format!("{:<8}{:<9}{}", item.kind.word(), item.state, name(item));
            ListItem::new(head)
        }
        Entry::Unreadable(one) => {
            ListItem::new(format!("{:<8}{:<9}{}", one.kind.word(), "no reply", printable(&one.name)))
                .style(WARNING)
        }
    });
    let list = List::new(lines).block(block).highlight_style(SELECTED);
    let mut state = ListState::default().with_selected(Some(view.selected()));
    frame.render_stateful_widget(list, area, &mut state);
}

fn fact(label: &str, value: String) -> Line<'static> {
    Line::from(format!("{label:<LABELS$}{value}"))
}

fn item_lines(view: &View, item: &Item) -> Vec<Line<'static>> {
    let mut lines = vec![Line::styled(format!("{} {}", item.kind.word(), name(item)), BOLD)];
    lines.push(fact("state", item.state.to_owned()));
    if let Some(remark) = &item.remark {
        lines.push(Line::styled(printable(remark), WARNING));
    }
    lines.extend(item.pid.map(|pid| fact("pid", pid.to_string())));
    lines.extend(item.user.as_deref().map(|user| fact("user", printable(user))));
    let now = view.status().map(|status| status.taken_at_unix_seconds);
    let since = item.started_at_unix_seconds.zip(now).map(|(started, now)| age(now - started));
    lines.extend(since.map(|since| fact("since", since)));
    lines.extend(
        item.figures.iter().map(|figure| fact(&label(figure), with_rate(figure, view.rate(item, figure)))),
    );
    for (index, part) in item.parts.iter().enumerate() {
        lines.push(Line::from(""));
        let pid = part.pid.map(|pid| format!(", pid {pid}")).unwrap_or_default();
        let role = part.role.replace('_', " ");
        lines.push(Line::styled(format!("{role} {}: {}{pid}", printable(&part.name), part.state), BOLD));
        lines.extend(part_lines(&part.figures, |figure| view.part_rate(item, index, figure)));
    }
    if let Some(words) = &item.command_line {
        lines.push(Line::from(""));
        lines.push(Line::from(printable(&words.join(" "))));
    }
    lines
}

fn part_lines(figures: &Figures, rate: impl Fn(&Figure) -> Option<f64>) -> Vec<Line<'static>> {
    figures.iter().map(|figure| fact(&label(figure), with_rate(figure, rate(figure)))).collect()
}

/// Returns a value, and by how much it grows in a second: of time, that is a part of one CPU.
fn with_rate(figure: &Figure, rate: Option<f64>) -> String {
    let value = value(figure);
    match rate {
        None => value,
        Some(rate) if figure.name.ends_with("_seconds_total") => format!("{value}, {:.1}%", rate * 100.0),
        Some(rate) => format!("{value}, {rate:.1}/s"),
    }
}

fn unreadable_lines(one: &Unreadable) -> Vec<Line<'static>> {
    vec![
        Line::styled(format!("{} {}", one.kind.word(), printable(&one.name)), BOLD),
        Line::styled(format!("could not be asked: {}", printable(&one.reason)), WARNING),
    ]
}

fn keys(view: &View) -> Line<'static> {
    let silent = view.status().map_or(0, |status| status.unreadable.len());
    let mut spans = vec![Span::raw("q quit  arrows select  Tab kind  p pause  ? help")];
    if silent > 0 {
        spans.push(Span::styled(format!("  {silent} could not be asked"), WARNING));
    }
    if view.is_paused() {
        spans.push(Span::styled("  paused", BOLD));
    }
    Line::from(spans)
}

fn draw_help(frame: &mut Frame<'_>) {
    let whole = frame.area();
    let (width, height) = (60.min(whole.width), 8.min(whole.height));
    let area = Rect {
        x: whole.x + (whole.width - width) / 2,
        y: whole.y + (whole.height - height) / 2,
        width,
        height,
    };
    let lines: Vec<Line<'_>> =
        KEYS.iter().map(|(keys, what)| Line::from(format!(" {keys:<18}{what}"))).collect();
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("Keys")), area);
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

    use super::*;
    use crate::status::model::Kind;
    use crate::status::samples;

    fn screen(view: &View, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, view)).unwrap();
        terminal.backend().to_string()
    }

    fn press(view: &mut View, code: KeyCode) {
        view.press(KeyEvent::new(code, KeyModifiers::NONE));
    }

    #[test]
    fn items_and_details_are_drawn() {
        let mut view = View::new(Kind::ALL.to_vec());
        assert!(screen(&view, 120, 30).contains("Looking ..."));
        view.update(samples::status());
        let text = screen(&view, 120, 30);
        for shown in [
            "all 2",
            "warm 1",
            "guard 0",
            "checker of 89 kv",
            "orc     no reply",
            "requests",
            "17",
            "worker 72: busy, pid 72",
            "\\u{1b}[31mred",
            "1 could not be asked",
            "uptime",
            "1 min 1 s",
        ] {
            assert!(text.contains(shown), "{shown}:\n{text}");
        }
        press(&mut view, KeyCode::End);
        assert!(screen(&view, 120, 30).contains("could not be asked: no answer within 1 s"));
        press(&mut view, KeyCode::Char('p'));
        press(&mut view, KeyCode::Char('?'));
        let text = screen(&view, 120, 30);
        assert!(text.contains("paused") && text.contains("Shift+Tab"), "{text}");
    }

    #[test]
    fn a_tiny_terminal_is_no_error() {
        let mut view = View::new(Kind::ALL.to_vec());
        view.update(samples::status());
        press(&mut view, KeyCode::Char('?'));
        for (width, height) in [(1, 1), (5, 2), (20, 4), (300, 3)] {
            screen(&view, width, height);
        }
    }
}
