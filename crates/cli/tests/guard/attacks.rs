//! Programs that try to get out: see `attack.c`.

use crate::scene::attack;

macro_rules! attacks {
    ($($test:ident $name:literal,)*) => {
        $(
            #[test]
            fn $test() {
                attack($name, &[]);
            }
        )*
    };
}

attacks! {
    exchanged_paths_lead_nowhere "race-path",
    exchanged_links_lead_nowhere "race-link",
    exchanged_directories_lead_nowhere "race-directory",
    no_name_leads_to_what_is_refused "names",
    no_call_leads_around_the_monitor "around",
    exchanged_programs_are_not_executed "execution",
    floods_harm_nobody "flood",
    sudden_deaths_harm_nobody "death",
    interrupted_calls_happen_once "interrupted",
    unlisted_addresses_are_not_reached "sockets",
}

#[test]
fn without_landlock_the_first_wall_holds() {
    for name in ["race-path", "race-link", "names", "around"] {
        attack(name, &["--no-landlock"]);
    }
}

#[test]
fn the_monitor_is_out_of_reach() {
    attack("monitor", &[]);
}
