//! Sessions: what one leaves behind, how it ends, and what a pool bears.
//!
//! Contexts belong to a process, and end with it, so each case is a process of its own: this program runs itself once
//! for each case.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

mod client;
mod composition;
mod endings;
mod isolation;
mod obedient;
mod scribble;
mod secret;
mod server;

orrery_testing::cases![
    seconds = 120, trackers = &[];
    composition::rollback_works_in_a_context,
    composition::rollback_works_in_a_context_of_an_ordinary_user,
    composition::contexts_outlive_rollbacks_of_the_root,
    isolation::a_session_serves,
    isolation::sessions_work_for_an_ordinary_user,
    isolation::sessions_reach_nothing_of_the_root,
    isolation::each_session_has_its_own_memory,
    isolation::what_sessions_have_in_common_is_there_once,
    isolation::a_session_commits_what_it_uses,
    isolation::nothing_is_left_behind,
    isolation::sessions_have_no_other_descriptors,
    isolation::any_order_of_events_leaves_the_captured_state,
    endings::every_end_is_told,
    endings::a_session_that_keeps_control_is_killed,
    endings::a_session_can_be_ended,
    endings::killed_sessions_are_replaced,
    endings::a_killed_template_ends_growth_only,
    endings::a_full_pool_says_so,
    endings::used_up_descriptors_harm_nobody,
    server::the_server_serves_more_than_there_are_sessions,
    server::greeting_sessions_speak_first,
];
