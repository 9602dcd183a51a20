//! What contexts are to each other, and how they end.
//!
//! Contexts belong to a process, and end with it, so each case is a process of its own: this program runs itself once
//! for each case.
//!
//! A room of this directory is one idea each.

#![expect(clippy::unwrap_used, reason = "tests of system calls")]

mod adversary;
mod bad_input;
mod calls;
mod control;
mod credentials;
mod crowds;
mod deaths;
mod descriptors;
mod forks;
mod isolation;
mod lifetimes;
mod masks;
mod memory;
mod moments;
mod names;
mod overlays;
mod pages;
mod placing;
mod questions;
mod signals;
mod support;
mod threads;
mod underneath;

use adversary::*;
use bad_input::*;
use calls::*;
use control::*;
use credentials::*;
use crowds::*;
use deaths::*;
use descriptors::*;
use forks::*;
use isolation::*;
use lifetimes::*;
use masks::*;
use memory::*;
use moments::*;
use names::*;
use overlays::*;
use placing::*;
use questions::*;
use signals::*;
use threads::*;
use underneath::*;

orrery_testing::cases![
    seconds = crowds::seconds(), trackers = &[];
    control_goes_back_and_forth,
    a_switch_carries_bytes,
    create_returns_in_both,
    callers_are_known,
    contexts_nest,
    many_come_and_go,
    time_limits_hold,
    a_handler_may_not_switch_from_within,
    a_context_is_as_urgent_as_its_caller,
    a_switch_on_one_cpu_needs_no_sleep,
    switches_go_on_among_hogs,
    who_is_called_keeps_what_is_more_than_the_callers,
    switches_go_on_when_they_are_moved,
    switches_go_on_in_a_set_of_cpus_that_shrinks,
    memory_is_a_copy,
    shared_memory_is_one,
    unmapped_memory_is_gone,
    other_memory_takes_the_place_of_what_was_unmapped,
    shared_memory_stays_from_other_contexts,
    senseless_specifications_are_refused,
    descriptors_are_copies,
    descriptors_may_be_withheld,
    a_descriptor_is_passed,
    a_passed_descriptor_waits_while_a_stranger_calls,
    a_table_of_descriptors_is_shared,
    a_shared_table_is_left_in_order,
    a_shared_table_keeps_others_out,
    copies_of_a_shared_table_are_apart,
    shared_tables_have_conditions,
    credentials_are_its_own,
    credentials_are_shared,
    what_one_gives_up_all_have_given_up,
    copies_of_shared_credentials_are_apart,
    threads_share_credentials,
    an_ordinary_user_shares_what_there_is,
    closed_names_are_refused,
    without_descriptors_nothing_is_made,
    descriptors_are_overlaid,
    the_root_is_known_to_all,
    nobody_switches_to_itself,
    a_copy_of_a_name_names_the_same,
    names_travel_by_sockets,
    a_name_under_way_keeps_its_context,
    a_name_that_comes_late_is_told,
    a_forked_process_holds_names,
    hundreds_live_at_a_time,
    without_processes_nothing_is_made,
    a_closed_context_ends,
    a_plain_close_ends_it,
    it_lives_while_anybody_holds_it,
    the_root_may_be_closed,
    snapshots_in_a_row_do_not_add_up,
    an_unnamed_root_holds_nobody,
    a_named_root_keeps_its_names,
    exit_ends_the_program,
    exit_of_a_nested_context_ends_the_program,
    the_roots_death_ends_all,
    wait_sees_no_context,
    a_context_is_a_process_underneath,
    locks_that_know_their_owner_know_a_context,
    record_locks_are_not_inherited,
    a_killed_context_is_an_error,
    a_fault_is_an_error,
    contexts_die_at_any_moment,
    nested_contexts_die_at_any_moment,
    a_killed_caller_leaves_control_to_the_root,
    another_program_is_an_error,
    who_asked_its_caller_may_end,
    who_is_trapped_and_asked_its_caller_may_end,
    who_asked_its_caller_may_end_far_from_the_root,
    who_asked_its_caller_may_end_on_each_thread,
    a_caller_that_answered_sleeps,
    a_stopped_context_holds_nobody_up,
    orphans_are_told_of,
    orphans_are_told_to_the_next_in_the_row,
    a_slow_context_in_the_row_learns_of_a_death_first,
    a_killed_context_goes_on_from_a_good_state,
    ordinary_programs_go_on_from_good_states,
    a_good_state_outlives_many_deaths,
    a_good_state_is_the_newest_one,
    good_states_end_with_their_contexts,
    good_states_need_rights,
    signals_go_to_the_root,
    signals_to_the_program_are_shared,
    a_stopped_program_stops_in_whichever_context,
    a_program_that_handles_stops_goes_on,
    what_a_deaf_context_creates_is_deaf,
    a_fault_is_handled_where_it_is_made,
    a_forked_process_has_its_own,
    a_forked_program_has_copies,
    a_plain_fork_has_copies_when_it_asks,
    nested_contexts_are_forked,
    each_program_ends_for_itself,
    ordinary_programs_end_for_themselves,
    filtered_contexts_stay_behind,
    isolated_contexts_are_forked,
    contexts_with_fewer_calls_are_forked,
    a_trapped_process_has_one_listener_for_good,
    workers_have_contexts_of_their_own,
    forks_of_forks_have_copies,
    a_thread_forks_what_it_has,
    memory_is_overlaid_by_copy,
    memory_is_overlaid_by_sharing,
    overlays_of_varying_sizes_are_shared,
    overlays_need_rights,
    rights_only_narrow,
    a_context_is_closed_to_its_like,
    contexts_do_not_reach_the_root,
    rights_do_not_come_by_other_ways,
    privileges_that_were_given_up_stay_nowhere,
    attack_by_pointer,
    attack_by_process_vm,
    attack_by_ptrace,
    attack_by_proc,
    attack_by_descriptors_of_others,
    attack_by_descriptors_of_its_own,
    attack_by_signals,
    attack_by_stopping,
    attack_by_signals_to_a_group,
    attack_by_io_uring,
    attack_by_advice_and_events,
    attack_by_limits_and_priorities,
    attack_by_another_program,
    what_names_no_context_is_refused,
    a_context_of_another_program_is_refused,
    a_context_gets_no_name_of_itself,
    contexts_end_when_the_root_becomes_another_program,
    a_context_that_closes_everything_holds_nobody_up,
    withheld_calls_fail,
    calls_are_trapped,
    a_trapped_open_is_performed_by_the_parent,
    a_dead_context_is_no_longer_heard,
    only_the_parent_answers,
    calls_of_others_it_made_are_refused,
    a_flood_of_traps_is_answered,
    an_asked_context_cannot_trap,
    calls_are_made_for_a_parked_context,
    a_parked_contexts_part_of_a_call_is_any,
    a_stopped_contexts_part_of_a_call_is_any,
    numbers_that_name_no_descriptor_are_errors,
    calls_need_rights,
    files_out_of_reach_are_read_and_written_for_it,
    a_monitor_makes_the_calls_it_allows,
    a_monitor_needs_no_privilege,
    a_new_thread_is_refused,
    a_thread_resumes_where_it_was,
    a_parked_thread_returns_from_its_switch,
    threads_are_copied_at_whatever_moment,
    copies_of_threads_are_copied_at_whatever_moment,
    threads_that_ask_are_copied_at_whatever_moment,
    threads_meet_in_one_context,
    threads_switch_at_random,
    a_death_is_told_to_each_thread_inside,
    a_good_state_outlives_all_who_mourn,
    a_thread_that_ends_inside_is_told_of,
    counterparts_end_with_their_thread,
    limits_are_a_threads_own,
    threads_are_trapped_one_by_one,
    a_thread_without_counterpart_is_not_answered,
    a_busy_program_has_contexts,
    deaths_among_threads_at_any_moment,
];
