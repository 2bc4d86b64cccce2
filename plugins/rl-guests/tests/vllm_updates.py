"""vLLM, in this process, and updates through its own weight-transfer API: a program.

``python -m vllm_updates MODEL OTHER_MODEL`` prints, as JSON, what each scenario came to.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from rl_conformance.faults import a_bit_changes, at_the_first_bucket
from rl_core.weights.sending.share import Share

if TYPE_CHECKING:
    from collections.abc import Callable

DEADLINE_S = 20.0
PROMPT = list(range(5, 45))  # more than a block of the prefix cache


class Local:
    """A client of vLLM's API for an engine in this process; notes what is called."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.called: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.called.append("init")
        self.llm.init_weight_transfer_engine({"init_info": json.loads(json.dumps(init_info))})

    def start_weight_update(self) -> None:
        self.called.append("start")
        self.llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.called.append("update")
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.called.append("finish")
        self.llm.finish_weight_update(weight_version)


class Distant:
    """The same for a trainer in another process."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def __getattr__(self, method: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self._pipe.send((method, args))
            if error := self._pipe.recv():
                raise RuntimeError(error)

        return call


def trainer_of(model: torch.nn.Module, client: Any, source: Any = None, **options: Any) -> Any:
    """As a script of vLLM's makes one."""
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

    from rl_guests.vllm import TrainerInitInfo

    given = {"deadline_s": DEADLINE_S, "bucket_bytes": 1 << 16, **options}
    return WeightTransferTrainerFactory.trainer_init(
        TrainerInitInfo(rank=0, receivers=1, options=given),
        client=client,
        source=source or ModuleSource(model),
    )


def load(path: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def change(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def trainer_that_is_killed(path: str, pipe: Any) -> None:
    """Its process ends by SIGKILL when a part of its weights is written."""
    model, put = load(path), Share.put
    change(model, 7)

    def last(self: Share, index: int) -> bytes:
        if index == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return put(self, index)

    with mock.patch.object(Share, "put", last):
        trainer_of(model, Distant(pipe), mode="packed").send_weights()


class Engine:
    """The engine and its trainer's model."""

    def __init__(self, path: str) -> None:
        from vllm import LLM

        self.path = path
        self.llm = LLM(
            path,
            dtype="float32",
            weight_transfer_config={"backend": "rl_core"},
            enforce_eager=True,
            max_model_len=64,
            kv_cache_memory_bytes=32 << 20,
            max_num_seqs=4,
            block_size=32,
            disable_log_stats=True,
        )
        self.client = Local(self.llm)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.model = load(path)

    def generate(self) -> tuple[list[int], list[float]]:
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=8, logprobs=0, ignore_eos=True)
        [row] = self.llm.generate([{"prompt_token_ids": PROMPT}], how, use_tqdm=False)
        [done] = row.outputs
        return list(done.token_ids), [next(iter(d.values())).logprob for d in done.logprobs]

    def difference(self) -> float:
        """Between the log-probs of the engine and those of the trainer's model."""
        tokens, logprobs = self.generate()
        with torch.no_grad():
            logits = self.model(torch.tensor([PROMPT + tokens])).logits[0].float()
        ours = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
        ours = ours.gather(1, torch.tensor(tokens)[:, None]).flatten()
        return float((ours - torch.tensor(logprobs)).abs().max())

    def paused(self) -> bool:
        return bool(self.core.is_scheduler_paused())


def text_of(call: Callable[[], Any]) -> str:
    """The class and the text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def updates(engine: Engine) -> dict[str, Any]:
    """Each brings the engine to the trainer's weights."""
    trainer, differences, before = trainer_of(engine.model, engine.client), [], engine.generate()
    for seed, verify in enumerate(("none", "wire", "installed"), 1):
        change(engine.model, seed)
        trainer._options["verify"] = verify
        trainer.send_weights()
        differences.append(engine.difference())
    return {
        "differences": differences,
        "changed": engine.generate() != before,
        "called": engine.client.called[-4:],
        "report": str(trainer.report),
        "paused": engine.paused(),
    }


def a_pause_of_the_user_lasts(engine: Engine) -> dict[str, Any]:
    """The API's own pause is as it was, before and after an update."""
    engine.core.pause_scheduler("keep", False)
    trainer_of(engine.model, engine.client).send_weights()
    paused = engine.paused()
    engine.core.resume_scheduler()
    return {"paused": paused, "difference": engine.difference()}


def after_failing(engine: Engine, trainer: Any, fault: Any = None) -> dict[str, Any]:
    """What the engine does after an update that fails, and after the next one."""
    with fault or nullcontext():
        error = text_of(trainer.send_weights)
    found = {
        "error": error,
        "paused": engine.paused(),
        "request": text_of(engine.generate),
        "resume": text_of(engine.core.resume_scheduler),
    }
    trainer_of(engine.model, engine.client, verify="installed").send_weights()
    return {**found, "paused_after": engine.paused(), "difference": engine.difference()}


def flipped_bytes(engine: Engine) -> dict[str, Any]:
    """A bit changes in a buffer after it was hashed."""
    trainer = trainer_of(engine.model, engine.client, mode="packed")
    with a_bit_changes():
        return after_failing(engine, trainer)


def a_step_meanwhile(engine: Engine) -> dict[str, Any]:
    """The trainer takes a step while its weights travel."""
    trainer = trainer_of(engine.model, engine.client, mode="packed")
    return after_failing(engine, trainer, at_the_first_bucket(lambda: change(engine.model, 11)))


def a_killed_trainer(engine: Engine) -> dict[str, Any]:
    """Its process ends in the midst of the transfer; another one takes its place."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=trainer_that_is_killed, args=(engine.path, theirs))
    process.start()
    theirs.close()
    errors: list[str] = []
    while True:
        try:
            method, args = ours.recv()
            errors.append(text_of(partial(getattr(engine.client, method), *args)))
            ours.send(errors[-1])
        except (EOFError, OSError):
            break
    process.join(DEADLINE_S)
    found = after_failing(engine, mock.Mock())
    return {**found, "exit": process.exitcode, "error": next(filter(None, errors), "")}


def another_model(engine: Engine) -> dict[str, Any]:
    """A trainer of another model is refused, and the engine goes on."""
    before = engine.generate()
    error = text_of(trainer_of(load(sys.argv[2]), engine.client).send_weights)
    return {"error": error, "same": engine.generate() == before, "paused": engine.paused()}


def calls_out_of_order(engine: Engine) -> dict[str, Any]:
    """No call is taken for another one, and the next update works."""
    client = engine.client
    errors = {
        "finish": text_of(client.finish_weight_update),
        "update": text_of(lambda: client.update_weights({})),
    }
    trainer = trainer_of(engine.model, client)
    update = client.update_weights
    client.update_weights = lambda _: None  # type: ignore[method-assign]
    errors["no_update"] = text_of(trainer.send_weights)
    client.update_weights = update  # type: ignore[method-assign]
    trainer_of(engine.model, client).send_weights()
    return {**errors, "difference": engine.difference(), "paused": engine.paused()}


def a_stream(engine: Engine) -> dict[str, Any]:
    """A source that yields tensors one after another, and not the module."""
    from vllm.distributed.weight_transfer import ModuleSource

    class Source(ModuleSource):
        pass

    change(engine.model, 21)
    trainer_of(engine.model, engine.client, source=Source(engine.model)).send_weights()
    return {"difference": engine.difference()}


def left_before_finish(engine: Engine) -> dict[str, Any]:
    """A trainer ends when its update is committed; nothing that was cached is used again."""
    client = Local(engine.llm)
    client.finish_weight_update = mock.Mock(side_effect=OSError("ended"))  # type: ignore[method-assign]
    engine.generate()
    change(engine.model, 31)
    error = text_of(trainer_of(engine.model, client).send_weights)
    paused = engine.paused()
    text_of(trainer_of(load(sys.argv[2]), engine.client).send_weights)  # another one is refused
    return {"error": error, "paused": paused, "difference": engine.difference()}


def two_trainers(engine: Engine) -> dict[str, Any]:
    """One is refused between two calls of the other: no weight is torn, and all goes on."""
    client = Local(engine.llm)
    start = client.start_weight_update

    def start_and_wait() -> None:
        start()
        text_of(lambda: engine.client.init_weight_transfer_engine({"trainer": "", "deadline_s": 1}))

    client.start_weight_update = start_and_wait  # type: ignore[method-assign]
    change(engine.model, 32)
    error = text_of(trainer_of(engine.model, client).send_weights)
    return {"error": error, "difference": engine.difference()}


def a_trainer_that_stops(engine: Engine) -> dict[str, Any]:
    """A trainer ends after its start: the next one needs no second try."""
    client = Local(engine.llm)
    client.update_weights = mock.Mock(side_effect=OSError("ended"))  # type: ignore[method-assign]
    text_of(trainer_of(engine.model, client).send_weights)
    change(engine.model, 33)
    paused = engine.paused()
    error = text_of(trainer_of(engine.model, engine.client).send_weights)
    return {"error": error, "paused": paused, "difference": engine.difference()}


def tried_again(engine: Engine) -> dict[str, Any]:
    """A refit that fails once is tried again."""
    put, failures = Share.put, [OSError("once")]

    def once(self: Share, index: int) -> bytes:
        if index == 4 and failures:
            raise failures.pop()
        return put(self, index)

    change(engine.model, 34)
    trainer = trainer_of(engine.model, engine.client, mode="packed", retries=1)
    with mock.patch.object(Share, "put", once):
        error = text_of(trainer.send_weights)
    return {"error": error, "paused": engine.paused(), "difference": engine.difference()}


def no_trainer(engine: Engine) -> dict[str, Any]:
    """An update without a trainer that sends fails at its deadline, and changes nothing."""
    trainer = trainer_of(engine.model, engine.client, deadline_s=2.0)
    info = engine.model and trainer._engine
    from rl_backends.modules import ModuleSender

    sender = ModuleSender(engine.model)
    info.prepare_refit_info(sender.prepare_refit_info())
    error = text_of(engine.client.start_weight_update)
    sender.shutdown()
    before = engine.difference()
    trainer_of(engine.model, engine.client).send_weights()
    return {"error": error, "difference": max(before, engine.difference())}


SCENARIOS = [
    updates,
    a_stream,
    a_pause_of_the_user_lasts,
    flipped_bytes,
    a_step_meanwhile,
    a_killed_trainer,
    another_model,
    calls_out_of_order,
    left_before_finish,
    two_trainers,
    a_trainer_that_stops,
    tried_again,
    no_trainer,
]


def main() -> None:
    engine = Engine(sys.argv[1])
    found = {}
    for scenario in [s for s in SCENARIOS if s.__name__ in sys.argv[3:] or not sys.argv[3:]]:
        print(scenario.__name__, file=sys.stderr, flush=True)
        found[scenario.__name__] = scenario(engine)
    print(json.dumps(found), flush=True)
    os._exit(0)  # vLLM's own end takes seconds


if __name__ == "__main__":
    main()
