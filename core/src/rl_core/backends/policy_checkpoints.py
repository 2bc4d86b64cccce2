"""The part of the base class of policy backends that writes and reads checkpoints."""

from __future__ import annotations

import json
from abc import abstractmethod
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.backends.checkpoint import STATE_FILE, read_json, verified, write_directory
from rl_core.backends.loop import checkpoint_path
from rl_core.backends.policy_model import PolicyModel

if TYPE_CHECKING:
    from rl_core.backends._randomness import RandomStream
    from rl_core.backends.ranks import RankGroup
    from rl_core.refit._sources import WeightChanges

__all__ = ["PolicyCheckpoints"]


class PolicyCheckpoints(PolicyModel):
    """Checkpoints that are whole or not there, of all ranks of a policy.

    Attributes:
        ranks: All workers of the policy.
        random: The numbers that training draws from.
        changes: Takes note that the weights change.
        steps: Optimizer steps taken.
        rows_rank: This worker's rank among those with rows of their own.
    """

    ranks: RankGroup
    random: RandomStream
    changes: WeightChanges
    steps: int
    rows_rank: int

    @abstractmethod
    def ready(self, method: str) -> None:
        """Called as a method begins."""

    @abstractmethod
    def spoken(self, value: Any) -> list[Any]:
        """The values of the workers whose results are taken, by rank."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Writes weights, optimizer, schedule, random state and step to a directory, atomically.

        The directory is also a Hugging Face checkpoint. A checkpoint that stands there is
        replaced; it stays whole until the new one is. All workers call it with one path.

        Args:
            *args: The path; see :func:`~rl_core.backends.loop.checkpoint_path`.
            **kwargs: Likewise.

        Raises:
            CheckpointError: Something that is not a checkpoint stands at the path.
            ConfigError: No path is given, or two.
        """
        path = checkpoint_path(*args, **kwargs)
        self.ready("save_checkpoint")
        state = {"steps": self.steps, "random": self._random_states()}
        with ExitStack() as stack:
            written = None
            with self.ranks.all_or_none("saving a checkpoint"):
                if self.ranks.rank == 0:
                    written = stack.enter_context(write_directory(path))
                    (written / STATE_FILE).parent.mkdir()
                    (written / STATE_FILE).write_text(json.dumps(state))
            directory = Path(self.ranks.gather(str(written))[0])
            with self.ranks.all_or_none("saving a checkpoint"):
                self.write_checkpoint(directory)
            with self.ranks.all_or_none("publishing a checkpoint"):
                stack.close()

    def load_checkpoint(self, path: str | Path) -> None:
        """Continues where :meth:`save_checkpoint` was called; the reference stays as it was.

        Torch's global random state is restored too.

        Raises:
            CheckpointError: It is missing, incomplete, altered or of another model; names the
                file or the tensors. The policy is as it was.
        """
        self.ready("load_checkpoint")
        with self.ranks.all_or_none("reading a checkpoint"):
            directory = verified(path)
            state = read_json(directory / STATE_FILE)
        with self.changes.declared():
            self.read_checkpoint(directory)
        self.steps = state["steps"]
        if self.rows_rank < len(state["random"]):
            self.random.set_state(state["random"][self.rows_rank])

    def _random_states(self) -> list[Any]:
        """Where the random numbers are, by data-parallel rank: a copy's ranks draw alike."""
        told = self.spoken([self.rows_rank, self.random.state()])
        return [state for _, state in sorted(told, key=lambda mine: mine[0])]
