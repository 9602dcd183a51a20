//! What main gets when an orbit crashes, hangs, starves or lies, and that it comes back.

#![expect(clippy::unwrap_used, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod corruption;
mod crashes;
mod endings;
mod limits;
mod restarts;
mod support;

orrery_testing::cases![
    seconds = 120, trackers = orrery_testing::TRACKERS;
    crashes::a_bad_pointer_is_named,
    crashes::a_crash_has_module_symbol_and_memory,
    crashes::a_main_without_privileges_ends_its_orbits,
    crashes::existing_areas_are_there_before_any_call_names_them,
    crashes::every_crash_is_named,
    crashes::an_exhausted_stack_is_told,
    crashes::a_panic_is_quoted,
    crashes::an_exit_is_told,
    crashes::a_hang_ends_in_time,
    crashes::a_hang_that_nobody_waits_for_ends_in_time,
    crashes::a_call_may_have_its_own_limit,
    crashes::a_limit_that_is_kept_harms_nothing,
    crashes::an_outside_kill_is_told,
    crashes::a_kill_while_idle_is_told,
    crashes::updates_before_a_crash_arrive,
    limits::too_much_memory_is_told,
    limits::what_a_task_sees_is_not_memory_of_its_own,
    limits::a_limit_on_data_leaves_room_for_orbits,
    limits::too_much_processor_time_is_told,
    limits::no_room_for_files_is_an_error,
    limits::a_core_dump_stays_small,
    limits::many_orbits_live_side_by_side,
    limits::waiting_threads_all_learn_of_a_crash,
    limits::a_stopped_orbit_holds_up_no_call_without_a_value,
    limits::updates_that_nobody_receives_are_bounded,
    limits::dead_orbits_whose_handles_are_kept_take_no_addresses,
    restarts::a_dead_orbit_stays_dead_by_policy,
    restarts::queued_calls_of_a_dead_orbit_fail,
    restarts::a_crash_is_followed_by_a_fresh_instance,
    restarts::an_exit_is_followed_only_if_always,
    restarts::calls_that_wait_survive_a_restart,
    restarts::the_pages_of_a_crashed_call_are_not_lost,
    restarts::a_crash_of_a_thread_of_the_task_is_told,
    restarts::restarts_give_up,
    restarts::back_off_is_waited_for,
    restarts::a_crashing_init_fails_creation,
    restarts::a_hanging_init_fails_creation,
    restarts::an_init_that_crashes_later_ends_in_an_error,
    restarts::a_dead_spare_ends_in_an_error,
    restarts::no_process_for_a_restart_ends_in_an_error,
    corruption::corrupted_memory_is_noticed,
    corruption::a_corrupted_orbit_comes_back_clean,
    corruption::scribbling_over_all_shared_memory_makes_no_processes,
    corruption::an_orbit_cannot_write_to_the_memory_of_another,
    corruption::whichever_word_is_overwritten_no_call_waits_for_ever,
    endings::a_killed_orbit_leaves_nothing_behind,
    endings::a_fork_of_the_orbit_may_outlive_its_task,
    endings::a_child_that_returns_from_its_task_is_not_the_orbit,
    endings::what_a_task_forked_ends_with_the_orbit,
    endings::what_a_task_forked_ends_with_main,
    endings::an_exit_runs_nothing_and_prints_nothing_of_mains,
    endings::a_task_that_becomes_another_program_fails,
    endings::a_task_that_ends_its_thread_fails_at_its_limit,
    endings::a_task_that_closes_all_files_harms_the_orbit_alone,
    endings::a_main_that_closed_all_files_keeps_those_that_it_opens_then,
    endings::an_update_of_a_task_that_closed_all_files_is_an_error_or_arrives,
];
