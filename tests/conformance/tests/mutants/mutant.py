"""What a mutant is, and what comes of the suite's looking at it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, Literal

from rl_backends.tensors import NamedTensorSink, NamedTensorSource
from rl_conformance.catalogue import CLAUSES
from rl_conformance.outcome import RunReport
from rl_conformance.reference import reference_target
from rl_conformance.reference.adapters import ReferenceAdapters
from rl_conformance.reference.generation import ReferenceGeneration, ReferenceRows
from rl_conformance.reference.policy import ReferencePolicy
from rl_conformance.registry import Check
from rl_conformance.run import run, select
from rl_conformance.settings import Settings
from rl_conformance.target import Target

__all__ = ["QUICK", "Autopsy", "Mutant", "breaks", "examine", "quick", "registered", "target"]

#: Checks that go on for many calls, or through all options and edges: mutants that are about these
#: name the checks that they want.
_THOROUGH = """
    a_bad_global_batch_keeps_the_step_before a_call_has_a_deadline
    a_configured_seed_may_have_any_size a_copy_is_on_several_ranks a_disturbed_answer_never_commits
    a_failed_refit_leaves_the_old_adapter a_failed_save_raises a_failing_call_changes_no_step
    a_failing_reference_call_changes_no_step a_long_call_makes_progress_among_short_ones
    a_long_string_beside_a_short_one_ends_a_row a_loss_sees_the_same_data_whatever_the_split
    a_mask_that_is_left_out_is_all_ones a_mask_with_a_hole_is_refused a_masked_batch_is_no_step
    a_match_within_a_token_ends_the_row a_narrow_dtype_resumes_bit_equal
    a_refit_changes_only_its_own_engine a_refit_during_sleep_serves_after_waking
    a_refit_gets_its_turn a_refit_that_was_recorded_is_not_played_again
    a_refused_batch_changes_nothing a_refused_call_does_not_wake_the_engine
    a_refused_checkpoint_changes_nothing_else a_refused_step_leaves_no_trace
    a_repetition_penalty_is_of_the_rows_own_tokens a_repetition_penalty_moves_the_argmax
    a_repetition_penalty_shows_in_processed_logprobs a_replayed_hello_is_ignored
    a_resumed_run_can_be_resumed_again a_row_with_a_seed_does_not_depend_on_the_batch
    a_row_without_finite_logprobs_is_named a_short_call_does_not_wait_for_a_long_one
    a_shutdown_ends_a_refit a_skipped_step_leaves_no_trace a_sleep_keeps_the_refitted_weights
    a_stop_on_the_last_token_is_a_stop a_stop_token_of_the_prompt_stops_nothing
    a_stream_has_a_deadline a_stream_keeps_its_version a_ticket_is_for_one_refit
    a_tiny_temperature_is_greedy a_token_that_does_not_exist_is_refused
    a_trainer_changes_the_transport a_trainer_sends_refit_modes_in_any_order
    a_version_may_go_back_with_its_weights abandoned_streams_leave_nothing_behind
    adapters_are_merged_in_an_export_and_resumed_by_a_checkpoint adapters_arrive_beside_the_base
    adapters_of_a_module_arrive_merged_once adapters_of_a_policy_are_sent_alone
    adapters_of_a_policy_arrive_merged_once all_rows_carry_the_version
    an_engine_accepts_refit_modes_in_any_order an_engine_changes_the_transport
    an_output_can_be_the_next_prompts another_number_of_ranks_goes_on any_batch_is_scored
    any_of_several_stop_tokens_ends_a_row any_two_options_go_together calibrating_changes_no_step
    calls_draw_in_the_order_in_which_they_are_made calls_from_threads_do_not_mix_their_rows
    code_of_one_part_does_not_run committed_weights_are_the_trainers
    concurrent_calls_do_not_mix_their_stop_strings concurrent_streams_do_not_mix_their_rows
    digests_over_a_network_need_the_token dropout_is_drawn_anew_and_from_the_seed
    dropout_is_that_of_one_rank each_global_batch_has_its_own_plan each_layer_has_its_own_adapter
    each_mode_needs_a_token each_row_ends_at_the_first_of_its_strings earlier_calls_leave_no_trace
    empty_stop_strings_stop_nothing end_of_sequence_can_be_switched_off
    engines_of_one_process_are_apart engines_without_a_seed_differ evaluating_changes_no_step
    evaluating_changes_nothing every_call_uses_one_version every_column_is_repeated
    every_column_is_streamed every_draw_follows_the_declared_distribution
    every_end_of_sequence_token_ends_a_row every_family_serves_what_arrived
    every_family_steps_as_configured every_global_batch_is_a_step_of_its_own
    every_kind_of_loss_is_split every_pair_of_options_applies every_part_of_every_tensor_is_updated
    every_pattern_of_bits_arrives every_rank_draws_the_same every_step_has_its_rate
    every_step_is_the_one_configured far_positions_agree_with_the_reference
    frozen_parameters_of_a_module_arrive frozen_parameters_stay generating_changes_no_step
    handing_weights_over_changes_no_step impossible_scale_arguments_are_refused
    later_calls_do_not_change_an_output lifecycle_calls_are_legal_in_any_order
    loading_another_state_shows log_probs_are_those_of_the_weights_now
    long_rows_are_scored_completely many_rows_are_scored_as_few_are
    masked_data_has_no_influence_on_a_step max_new_tokens_may_be_1 merged_rows_are_padded_rows
    nan_and_infinity_do_not_agree no_call_waits_forever no_input_column_is_modified
    no_refit_unpickles no_two_refits_share_a_secret one_changed_tensor_is_enough
    one_engine_sleeps_while_another_serves only_a_full_refit_ends_a_torn_state
    other_adapters_are_refused_by_name output_is_as_wide_as_its_longest_row
    planned_shards_keep_every_row_and_bound
    policies_share_nothing prompts_up_to_the_context_are_accepted ranks_drop_different_units
    refused_descriptions_change_nothing refused_options_change_nothing
    refused_options_do_not_use_up_a_version refused_tickets_change_nothing
    row_operations_match_a_list row_stop_strings_do_not_change_the_configuration
    rows_agree_if_and_only_if_their_seeds_do rows_out_of_range_are_refused
    rows_that_are_given_up_are_freed_at_once rows_that_wait_for_their_reader_keep_their_version
    rows_use_all_of_max_new_tokens sample_k_draws_from_seed_plus_k samples_are_streamed
    samples_draw_as_repeated_rows_do saving_again_replaces_only_its_own_path saving_changes_no_step
    scales_are_of_the_weights_now scales_are_of_what_a_cache_holds scales_have_their_defaults
    scored_rows_keep_their_order scores_are_those_of_one_rank scores_belong_to_their_rows
    scoring_changes_no_step seeded_rows_are_streamed_as_they_are_drawn
    selections_do_not_share_memory shutting_one_engine_down_leaves_another_serving
    similar_prompts_are_not_confused sleep_and_refit_do_not_restart_the_seed
    special_tokens_are_scored_like_others splitting_works_after_training steps_are_those_of_one_rank
    stop_strings_are_of_the_generated_text stop_strings_ignore_the_prompt
    stray_tokens_are_found_wherever_they_are streamed_rows_draw_in_the_order_of_calls
    tasks_and_threads_do_not_mix_their_rows temperature_applies_to_every_call
    the_configured_logprobs_mode_applies the_configured_padding_is_used
    the_error_is_the_mean_of_the_exponentials the_evaluated_loss_is_of_the_weights_now
    the_global_random_state_is_not_reset the_ith_row_draws_from_the_ith_stream
    the_old_adapter_serves_meanwhile the_only_candidate_is_taken
    the_reference_changes_no_step_and_stays the_reference_is_where_the_policy_started
    the_reference_may_be_kept_anywhere the_reference_may_score_during_a_refit
    the_reference_resumes_too the_reference_stays the_sink_matches_its_description
    the_source_matches_its_description thousands_of_tokens_are_drawn tickets_never_mix_two_states
    top_k_above_the_vocabulary_is_off topk_changes_no_step topk_is_of_the_weights_now
    topk_is_that_of_one_rank topk_logits_have_the_temperature topk_rows_come_back_in_their_order
    topk_takes_any_k trainers_of_one_process_are_apart training_shows_only_after_the_next_refit
    two_engines_are_independent two_engines_keep_their_seeds unseeded_samples_differ
    very_unlikely_tokens_keep_their_logprob
    weights_that_are_dropped_meanwhile_stay_torn what_arrives_is_what_is_saved
    what_fails_midway_is_refused_until_a_load what_fails_midway_on_one_rank_is_refused_by_all
    what_is_generated_is_of_the_weights_now what_is_masked_reaches_no_rank
    what_is_refused_reaches_no_rank what_saves_memory_changes_no_step
    without_do_sample_every_call_is_greedy wrong_rows_are_refused
"""

#: Of the others, checks of each chapter that take no processes, thousands of
#: draws, or dozens of models.
QUICK = {
    "data": "not ray",
    "discovery": "D2 or D4",
    "generation": "not (G10 and not top_k) and not many_rows "
    "and not (mistral or gemma2 or phi3 or gpt_oss or deepseek_v3)",
    "policy": "not P9 and not two_ranks",
    "refit": "not killed and not crosses and not R6 and not odd_tensors and not pattern_of_bits "
    "and not R9 or meanwhile",
    "agreement": "A1",
    "security": "S1 or S3",
}

Verdict = Literal["killed", "survived", "strayed"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug.

    Attributes:
        name: After the bug.
        bug: What is wrong, in a sentence.
        breaks: Clauses that do not hold; the mutant is about the first.
        target: Makes the backend under test.
        patch: While the suite looks; breaks what is not the backend's own.
        checks: Expression of the checks that are run; None: the quick ones of the chapters.
        module: Where it is written.
    """

    name: str
    bug: str
    breaks: tuple[str, ...]
    target: Callable[[], Target]
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    checks: str | None = None
    module: str = ""

    @property
    def chapters(self) -> list[str]:
        """The chapters of the clauses that it breaks."""
        return sorted({CLAUSES[clause].kind for clause in self.breaks})


@dataclass(frozen=True, slots=True)
class Autopsy:
    """What the suite found.

    Attributes:
        mutant: The mutant.
        failed: Checks that failed, by clause.
        looked: How many checks were run.
        seconds: How long that took.
        messages: What each failed check said.
        dtype: Of the weights.
    """

    mutant: Mutant
    failed: dict[str, list[str]]
    looked: int
    seconds: float
    messages: dict[str, str]
    dtype: str = "float32"

    @property
    def verdict(self) -> Verdict:
        """Killed where it should be, not at all, or elsewhere."""
        if not self.failed:
            return "survived"
        return "killed" if set(self.failed) == set(self.mutant.breaks) else "strayed"


registered: list[Mutant] = []


def target(
    generation: Any = ReferenceGeneration, policy: Any = ReferencePolicy, name: str = "reference"
) -> Target:
    """The mutant as a backend under test."""
    return reference_target(
        name=name,
        make_generation=generation.from_config,
        make_policy=policy.from_config,
    )


def _of_tensors(part: Any) -> Any:
    return lambda backend: part(backend.model.state_dict(keep_vars=True))


#: Parts that can be broken alone: whose they are, under which name, and as what.
_PARTS: tuple[tuple[type, type, str, Callable[[Any], Any]], ...] = (
    (ReferenceRows, ReferenceGeneration, "row_engine", partialmethod),
    (ReferenceAdapters, ReferenceGeneration, "adapters_class", lambda part: part),
    (NamedTensorSink, ReferenceGeneration, "weight_sink", _of_tensors),
    (NamedTensorSource, ReferencePolicy, "weight_source", _of_tensors),
)


def breaks(
    *clauses: str, checks: str | None = None, of: Callable[[], Target] = target
) -> Callable[[Any], Any]:
    """Registers a mutant: a class of a backend or of a part, or a context in which all is broken.

    Args:
        *clauses: What does not hold any more; first what the mutant is about.
        checks: Expression of the checks to run, where the quick ones do not show it.
        of: What a context breaks, if not the reference.
    """

    def register(broken: Any) -> Any:
        bug = (inspect.getdoc(broken) or "").partition("\n")[0]
        name, module = broken.__name__, broken.__module__
        if not inspect.isclass(broken):
            registered.append(Mutant(name, bug, clauses, of, broken, checks, module))
            return broken
        backend = broken
        for part, owner, attribute, made in _PARTS:
            if issubclass(broken, part):
                backend = type(name, (owner,), {attribute: made(broken)})
        role = "policy" if issubclass(backend, ReferencePolicy) else "generation"

        def make() -> Target:
            return target(**{role: backend})  # type: ignore[arg-type]

        registered.append(Mutant(name, bug, clauses, make, checks=checks, module=module))
        return broken

    return register


def checks_for(mutant: Mutant) -> list[Check]:
    """What is run against a mutant."""
    if mutant.checks is not None:
        return select([], mutant.checks)
    return [check for chapter in mutant.chapters for check in quick(chapter)]


def quick(chapter: str) -> list[Check]:
    """The quick checks of a chapter."""
    found, thorough = select([chapter], QUICK[chapter]), _THOROUGH.split()
    return [c for c in found if c.function.__name__ not in thorough]


def examine(mutant: Mutant, dtype: str = "float32") -> Autopsy:
    """Runs the suite against a mutant whose weights are of that dtype."""
    started, checks = time.perf_counter(), checks_for(mutant)
    with mutant.patch():
        report: RunReport = run(
            mutant.target(), Settings(dtype=dtype), checks, selection=mutant.name
        )
    failed: dict[str, list[str]] = {}
    bad = [outcome for outcome in report.outcomes if outcome.status.bad]
    for outcome in bad:
        failed.setdefault(outcome.clause, []).append(outcome.check)
    messages = {outcome.check: outcome.message for outcome in bad}
    return Autopsy(mutant, failed, len(checks), time.perf_counter() - started, messages, dtype)
