"""What a refit reads of the model that a trainer trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_core.backends.tensors import NamedTensorSource, module_tensors
from rl_core.errors import CapabilityError
from rl_core.refit import RefitSender

if TYPE_CHECKING:
    import concurrent.futures

    from rl_core.interfaces import WeightSource

__all__ = ["ModelSender"]


class ModelSender:
    """The part of a policy that :func:`rl_core.refit.refit` uses, of a bare model.

    Args:
        model: A transformers model, with adapters of peft or without.
        temperature: At which the trainer scores it.
    """

    def __init__(self, model: Any, temperature: float) -> None:
        self.config = {"temperature": temperature}
        self._sender = RefitSender(lambda: _source(model), name=type(model).__name__)

    def prepare_refit_info(self) -> dict[str, Any]:
        """Describes the tensors, and says where the engine fetches them."""
        return self._sender.prepare()

    def stream_weights_via_ipc_zmq(
        self, **options: Any
    ) -> list[concurrent.futures.Future[dict[str, Any]]]:
        """Sends them."""
        return [self._sender.send(**options)]

    def init_collective(
        self, ip: str, port: int, world_size: int
    ) -> list[concurrent.futures.Future[None]]:
        """Listens for engines of other hosts."""
        receivers, deadline_s = world_size - 1, 120.0
        how = {"ip": ip, "port": port, "receivers": receivers}
        return [self._sender.open("collective", deadline_s, **how)]


class _ModelSource(NamedTensorSource):
    """The model's tensors, copied: its memory stays where trainer and optimizer know it."""

    def persistent(self) -> None:
        """None, so that nothing is moved."""


def _source(model: Any) -> WeightSource:
    """The weights under the names of the checkpoint; adapters are merged into a copy.

    Raises:
        CapabilityError: Adapters are of a kind that this cannot merge.
    """
    if not hasattr(model, "peft_config"):
        return _ModelSource(module_tensors(model))
    for name in model.active_adapters:
        config = model.peft_config[name]
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        reasons = {
            f"is of the kind {kind}": kind != "LORA",
            "is not named 'default'": name != "default",
            "has use_dora": getattr(config, "use_dora", False),
            "trains biases": getattr(config, "bias", "none") != "none",
            "has modules_to_save": bool(getattr(config, "modules_to_save", None)),
        }
        for why, so in reasons.items():
            if so:
                raise CapabilityError(
                    f"the engine takes merged weights, and the adapter {name!r} {why}",
                    fix="use one peft.LoraConfig without it, or train all weights",
                    adapter=name,
                )
    try:
        from rl_hf.lora import MergedWeightSource
    except ImportError as error:
        raise CapabilityError(
            "adapters are merged by rl-hf, which is not installed",
            fix='pip install "./plugins/rl-trl[lora]" ./plugins/rl-hf ./plugins/rl-torch',
        ) from error
    return MergedWeightSource(model)
