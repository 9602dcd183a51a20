//! What a run undoes, and how it ends.
//!
//! Rollback belongs to one thread of one process, so each case is a process of its own: this program runs itself once
//! for each case and tracker.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot look")]

mod attributes;
mod common;
mod companions;
mod descriptors;
mod endings;
mod helpers;
mod leftovers;
mod mappings;
mod memory;
mod refusals;
mod rounds;

orrery_testing::cases![
    seconds = 120, trackers = orrery_testing::TRACKERS;
    memory::memory_comes_back,
    memory::what_the_program_does_between_runs_stays,
    memory::dropped_memory_comes_back,
    memory::huge_pages_come_back,
    memory::a_large_process_is_held,
    memory::hidden_images_work,
    memory::a_first_snapshot_commits_what_it_uses,
    memory::scattered_pages_come_back,
    memory::freed_pages_come_back,
    memory::swapped_pages_come_back,
    memory::merged_pages_come_back,
    mappings::mappings_come_back,
    mappings::a_replaced_mapping_comes_back,
    mappings::the_break_comes_back,
    mappings::deep_recursion_leaves_no_stack,
    mappings::a_loaded_library_goes,
    endings::a_panic_ends_a_run,
    endings::exit_ends_a_run,
    endings::exit_of_a_thread_ends_a_run,
    endings::a_null_pointer_ends_a_run,
    endings::abort_ends_a_run,
    endings::a_division_ends_a_run,
    endings::an_exhausted_stack_ends_a_run,
    endings::a_fault_of_a_thread_ends_a_run,
    endings::an_endless_loop_ends_in_time,
    endings::a_sleeping_closure_ends_in_time,
    endings::hunger_ends_a_run,
    endings::an_exit_handler_runs_once,
    endings::a_signal_handler_may_abandon,
    descriptors::descriptors_come_back,
    descriptors::what_numbers_share_comes_back,
    descriptors::what_is_inherited_comes_back,
    descriptors::a_lookalike_goes_where_nobody_may_look,
    descriptors::closing_everything_comes_back,
    descriptors::as_many_others_do_not_stay,
    descriptors::lookalikes_of_the_engines_files_do_no_harm,
    descriptors::offsets_come_back,
    descriptors::output_stays_written,
    descriptors::an_exempt_descriptor_stays,
    attributes::dispositions_and_masks_come_back,
    attributes::each_disposition_comes_back_alone,
    attributes::what_the_program_changes_between_runs_comes_back,
    attributes::each_limit_umask_and_name_come_back_alone,
    attributes::blocked_signals_do_not_leak,
    attributes::timers_come_back,
    attributes::directory_umask_and_limits_come_back,
    attributes::names_and_priorities_come_back,
    attributes::floating_point_control_comes_back,
    attributes::the_cpu_number_stays_live,
    leftovers::what_is_not_undone_is_known,
    companions::children_are_killed,
    companions::orphans_of_later_closures_are_killed,
    companions::children_may_be_left,
    companions::a_forked_child_leaves_normally,
    companions::threads_end,
    companions::threads_that_block_signals_end,
    companions::threads_of_timers_end,
    companions::users_change_in_all_threads_of_a_closure,
    companions::a_deaf_thread_is_fatal,
    companions::parked_threads_go_on,
    companions::running_threads_are_refused,
    companions::limits_apply_to_work_alone,
    companions::one_of_racing_threads_gets_the_engine,
    refusals::nesting_is_refused,
    refusals::another_thread_is_refused,
    refusals::a_forked_process_is_refused,
    refusals::a_signal_handler_is_refused,
    refusals::kept_memory_stays,
    refusals::the_stack_cannot_be_kept,
    refusals::a_full_buffer_says_so,
    refusals::no_address_space_is_an_error,
    refusals::a_full_store_is_an_error,
    refusals::no_descriptors_is_an_error,
    helpers::a_killed_keeper_is_survived,
    helpers::a_killed_holder_is_fatal,
    helpers::without_userfaultfd_it_compares,
    helpers::without_perf_it_reads_the_layout,
    rounds::rounds_begin_alike,
    rounds::registers_hold_nothing_of_the_round_before,
    rounds::rounds_end_in_every_way,
    rounds::runs_leave_nothing_behind,
];
