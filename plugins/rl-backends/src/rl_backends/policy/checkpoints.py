"""The part of the base class of policy backends that writes and reads checkpoints."""

from __future__ import annotations

import json
from abc import abstractmethod
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_backends.policy.checkpoint_directory import (
    STATE_FILE,
    fingerprint,
    read_json,
    verified,
    write_directory,
    writing,
)
from rl_backends.policy.loop import checkpoint_path
from rl_backends.policy.model import MODEL, PolicyModel
from rl_core.errors import CheckpointError, LifecycleError

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_backends.changes import WeightChanges
    from rl_backends.policy.randomness import RandomStream
    from rl_backends.policy.ranks import RankGroup

__all__ = ["PolicyCheckpoints"]


class PolicyCheckpoints(PolicyModel):
    """Checkpoints that are whole or not there, of all ranks of a policy.

    Attributes:
        ranks: All workers of the policy.
        random: The numbers that training draws from.
        changes: Takes note that the weights change.
        steps: Optimizer steps taken.
        rows_rank: This worker's rank among those with different rows.
    """

    ranks: RankGroup
    random: RandomStream
    changes: WeightChanges
    steps: int
    rows_rank: int
    _closed = False

    @abstractmethod
    def ready(self, method: str) -> None:
        """Called as a method begins."""

    @abstractmethod
    def reported_values(self, value: Any) -> list[Any]:
        """The values of the workers that report results, by rank."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Writes weights, optimizer, schedule, random state and step to a directory, atomically.

        The directory is also a Hugging Face checkpoint. A checkpoint that stands there is
        replaced; it stays whole until the new one is. All workers call it with one path.

        Args:
            *args: The path; see :func:`~rl_backends.policy.loop.checkpoint_path`.
            **kwargs: Likewise.

        Raises:
            CheckpointError: Something that is not a checkpoint stands at the path, or it cannot be
                written, as on a full disk. What stood there before stays.
            ConfigError: No path is given, or two.
            LifecycleError: A rank's weights are torn, or of another state than rank 0's.
        """
        path = checkpoint_path(*args, **kwargs)
        self._check_open("save_checkpoint")
        self.ranks.check_weights(self.changes)
        reported = self.reported_values([self.rows_rank, self.random.state()])
        # By data-parallel rank: the ranks of one copy of the model draw the same numbers.
        random = [drawn for _, drawn in sorted(reported, key=lambda mine: mine[0])]
        state = {"steps": self.steps, "random": random}
        with writing(path):
            with self.ranks.all_or_none("saving a checkpoint"):
                self.ready("save_checkpoint")
            with self.written_by_all(path) as directory:
                with self.ranks.all_or_none("saving a checkpoint"):  # before any rank writes there
                    if self.ranks.rank == 0:
                        (directory / STATE_FILE).parent.mkdir(exist_ok=True)
                        (directory / STATE_FILE).write_text(json.dumps(state))
                self.write_checkpoint(directory)

    @contextmanager
    def written_by_all(self, path: str | Path) -> Generator[Path]:
        """A directory that all workers write into, which becomes ``path`` once all have.

        See :func:`~rl_backends.policy.checkpoint_directory.write_directory`; called on all workers.
        """
        with ExitStack() as stack:
            made = None
            with self.ranks.all_or_none("making a directory"):
                if self.ranks.rank == 0:
                    made = stack.enter_context(write_directory(path))
            directory = Path(self.ranks.gather(str(made))[0])
            with self.ranks.all_or_none(f"writing {path}"):
                yield directory
            with self.ranks.all_or_none(f"publishing {path}"):
                stack.close()

    def load_checkpoint(self, path: str | Path) -> None:
        """Continues where :meth:`save_checkpoint` was called; the reference stays as it was.

        Torch's global random state is restored too. Torn weights are whole again, and ranks that
        differed are of one state. What fails once all ranks have read leaves all of them torn.

        Raises:
            CheckpointError: It is missing, incomplete, altered, of another model, or not the same
                on all ranks; names the file, the tensors or the rank. The policy is as it was.
        """
        self._check_open("load_checkpoint")
        with self.ranks.all_or_none("reading a checkpoint"):
            self.on_wake(MODEL)
            directory = verified(path)
            state, found = read_json(directory / STATE_FILE), fingerprint(directory)
        everybody = self.ranks.gather([found, self.changes.state])
        for rank, (other, _) in enumerate(everybody):
            if other != everybody[0][0]:
                raise CheckpointError(
                    f"rank {rank} of {self.ranks.size} got another checkpoint than rank 0: the "
                    f"digests of their files are {other} and {everybody[0][0]}",
                    fix="give all ranks the same path, with the same files on all hosts",
                    rank=rank,
                )
        with self.ranks.all_or_none("reading a checkpoint"):
            put = self.read_checkpoint(directory)
            self.keep_reference()
        with self.changes.declared(), self.ranks.all_or_none("loading a checkpoint"):
            put()
        self.changes.agreed(max(before for _, before in everybody) + 1)
        self.steps = state["steps"]
        if self.rows_rank < len(state["random"]):
            self.random.set_state(state["random"][self.rows_rank])

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise LifecycleError(
                f"{type(self).__name__}.{method} was called after shutdown",
                fix="build a new policy",
            )
