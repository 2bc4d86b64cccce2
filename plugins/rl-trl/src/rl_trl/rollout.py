"""A ``rollout_func`` for TRL: refits the engine, generates, and compares log-probs."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.nn.utils.rnn import pad_sequence

from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError, DataError, RemoteError
from rl_core.weights import refit
from rl_trl.agreement import check_agreement
from rl_trl.settings import check_settings, check_trainer, check_trl

if TYPE_CHECKING:
    from rl_core.interfaces import GenerationInterface

__all__ = ["Rollout", "rollout"]

#: What reward functions get of each row.
_OF_ROWS = ("truncated", "weights_version", "weights_origin")


def rollout(
    generation: GenerationInterface | None, *, threshold: float = 1.05, **refit_options: Any
) -> Rollout:
    """What generates for a ``GRPOTrainer``: ``GRPOTrainer(..., rollout_func=rollout(generation))``.

    Args:
        generation: The engine, embedded or in workers. With several processes of accelerate, the
            main one has it and it serves the rows of all; the others pass None.
        threshold: What the mean over generated tokens of ``exp(|engine - trainer|)`` of their
            log-probs must stay below, in every rollout.
        **refit_options: For :func:`rl_core.weights.refit`, such as ``verify="installed"`` or
            ``transport="collective"``.

    Raises:
        CapabilityError: The installed TRL is not one that this was tried with.
    """
    check_trl()
    return Rollout(generation, threshold, refit_options)


class Rollout:
    """What :func:`rollout` makes, and a trainer calls; no error of it changes the trainer."""

    def __init__(
        self,
        generation: GenerationInterface | None,
        threshold: float,
        refit_options: dict[str, Any],
    ) -> None:
        self._generation = generation
        self._threshold = threshold
        self._refit_options = refit_options
        self._served: tuple[Any, int, int] | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Completes each prompt once: TRL has repeated them ``num_generations`` times.

        Args:
            prompts: This process's texts or conversations.
            trainer: The ``GRPOTrainer``.

        Returns:
            Row for row ``prompt_ids``, ``completion_ids`` and ``logprobs`` as TRL asks for them
            and, for reward functions, ``truncated``, ``weights_version`` and ``weights_origin``.

        Raises:
            ConfigError: Trainer and engine have different settings; both are named.
            CapabilityError: The trainer does what this does not offer.
            DataError: A prompt leaves no room for a completion.
            DisagreementError: Log-probs are further apart than ``threshold``.
            RLError: What the refit and the engine raise.
        """
        check_trainer(trainer)
        ids = trainer._tokenize_prompts(prompts)[0]
        parts = gather_object([ids])
        error: Exception | None = None
        sent: list[Any] = [None]
        if trainer.accelerator.is_main_process:
            try:
                sent = [self._serve([row for part in parts for row in part], trainer)]
            except Exception as raised:
                raised.add_note(f"rl_trl: in the rollout at step {trainer.state.global_step}")
                error, sent = raised, [f"{type(raised).__name__}: {raised}"]
        broadcast_object_list(sent)
        if error is not None:
            raise error
        if isinstance(sent[0], str):
            raise RemoteError(
                f"the rollout failed in the main process: {sent[0]}",
                fix="correct the error of the main process; this process only waited for it",
            )
        columns, sampling = sent[0]
        begin = sum(len(part) for part in parts[: trainer.accelerator.process_index])
        own = {key: rows[begin : begin + len(ids)] for key, rows in columns.items()}
        output = {"prompt_ids": ids, **own}
        check_agreement(trainer, output, sampling, self._threshold)
        return output

    def _serve(self, rows: list[list[int]], trainer: Any) -> tuple[dict[str, list[Any]], Any]:
        """Brings the engine to the trainer's weights, and generates for all processes."""
        generation = cast("Any", self._generation)
        if generation is None:
            raise ConfigError(
                "rl_trl.rollout got no engine in the main process",
                fix="pass it an engine there, and None in the other processes",
                key="generation",
            )
        check_settings(trainer, generation)
        model = trainer.model
        # A step changes the weights, and so does what loads a checkpoint between two steps.
        changes = sum(t._version for t in chain(model.parameters(), model.buffers()))
        state = (model, trainer.state.global_step, changes)
        if state != self._served:
            refit(model, generation, **self._refit_options)
            self._served = state
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        generation.prepare_for_generation()
        batch = BatchedDataDict[Any]({"input_ids": ids, "input_lengths": lengths})
        output = generation.generate(batch)
        generation.finish_generation()
        if not output["generation_lengths"].all():
            row = int(output["generation_lengths"].argmin())
            raise DataError(
                f"row {row}: the prompt has {len(rows[row])} tokens, which leaves no room for a "
                "completion in the engine's context",
                fix="remove such prompts from the data, or raise the engine's max_model_len",
                row=row,
            )
        ends = output["unpadded_sequence_lengths"].tolist()
        spans = [slice(len(row), end) for row, end in zip(rows, ends, strict=True)]
        columns: dict[str, list[Any]] = {
            "completion_ids": [output["output_ids"][i, s].tolist() for i, s in enumerate(spans)],
            "logprobs": [output["logprobs"][i, s].tolist() for i, s in enumerate(spans)],
            **{key: output[key].tolist() for key in _OF_ROWS if key in output},
        }
        return columns, generation.sampling
