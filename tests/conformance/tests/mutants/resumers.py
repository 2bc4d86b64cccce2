"""Mutants that save and resume, but not everything, not twice, or not when it fails."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mutants.mutant import breaks
from rl_backends.policy.randomness import RandomStream
from rl_conformance.reference.policy import ReferencePolicy
from rl_core.errors import CheckpointError


@breaks("P9", checks="P9 and (resumed_again or missing)")
class TheStepIsNotSaved(ReferencePolicy):
    """A resumed schedule begins anew."""

    def load_checkpoint(self, path: Any) -> None:
        super().load_checkpoint(path)
        self.steps = 0


@breaks("P9", checks="P9 and (resumed_again or missing)")
class DropoutDoesNotResume(ReferencePolicy):
    """The policy's random numbers start from the seed."""

    def load_checkpoint(self, path: Any) -> None:
        own = self.random
        self.random = RandomStream(0, torch.device("cpu"))
        super().load_checkpoint(path)
        self.random = own


@breaks("P9", checks="P9 and (resumed_again or missing)")
class MomentsOfVectorsAreLost(ReferencePolicy):
    """Biases and norms begin without moments."""

    def load_checkpoint(self, path: Any) -> None:
        super().load_checkpoint(path)
        for parameter in self.optimizer.param_groups[1]["params"]:
            self.optimizer.state.pop(parameter, None)


@breaks("P9", checks="P9 and (saving_again or missing)")
class TheFirstSaveStays(ReferencePolicy):
    """A second save to a path writes the model and keeps the older training state."""

    def save_checkpoint(self, path: Any = None, **names: Any) -> None:
        self.older = Path(path)
        super().save_checkpoint(path)

    def write_checkpoint(self, directory: Path) -> None:
        super().write_checkpoint(directory)
        older = self.older / "rl_training"
        if older.exists():
            shutil.copytree(older, directory / "rl_training", dirs_exist_ok=True)


@breaks("P9", checks="P9 and (saving_again or missing)")
class ANewSaveOverwritesTheOthers(ReferencePolicy):
    """Saving elsewhere makes the older checkpoint the newer one, too."""

    older: Path | None = None

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        path = Path(args[0] if args else kwargs["path"])
        super().save_checkpoint(path)
        if self.older is not None and self.older != path:
            super().save_checkpoint(self.older)
        self.older = path


@breaks("P9", checks="P9 and (failed_save or missing)")
class AFullDiskIsNoError(ReferencePolicy):
    """save_checkpoint returns as if it had written."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with suppress(CheckpointError):
            super().save_checkpoint(*args, **kwargs)


@breaks("P9", checks="P9 and (reference or missing)")
class AResumedPolicyIsItsOwnReference(ReferencePolicy):
    """What was resumed is taken for the start."""

    def load_checkpoint(self, path: Any) -> None:
        super().load_checkpoint(path)
        self.reference_model.load_state_dict(self.model.state_dict())


@breaks("P9", checks="P9 and (another_state or missing) or P1 and now")
class ScoresAreRememberedForAStep(ReferencePolicy):
    """Log-probs of a batch are computed once in each step, whichever weights are loaded."""

    def get_logprobs(self, data: Any, *args: Any, **options: Any) -> Any:
        seen = self.__dict__.setdefault("seen", {})
        key = self.steps, data["input_ids"].numpy().tobytes()
        if key not in seen:
            seen[key] = super().get_logprobs(data, *args, **options)
        return seen[key]


@breaks("P9", checks="P9 and (no_step or resum or refused_checkpoint)")
class SavingForgetsTheDropout(ReferencePolicy):
    """Random numbers of the policy start anew with every save."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        self.random = RandomStream(0, torch.device("cpu"))


@breaks("P9", checks="P9 and (no_step or resum or refused_checkpoint)")
class SavingMovesTheReference(ReferencePolicy):
    """The reference is what was saved last."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint(*args, **kwargs)
        self.reference_model.load_state_dict(self.model.state_dict())
