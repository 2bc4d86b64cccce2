"""Memory that sleeps is given back, and what was in it is there again."""

from __future__ import annotations

import torch

from rl_core.weights.sending.shared_tensors import Memory
from rl_megatron.memory import Sleeper


def test_what_sleeps_has_no_memory_and_wakes_as_it_was():
    parameter = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
    view = parameter.detach()[1:]
    sleeper = Sleeper(lambda: [parameter, view])
    for _ in range(2):
        sleeper.sleep()
        sleeper.sleep()
        assert parameter.untyped_storage().nbytes() == 0
        sleeper.wake()
        sleeper.wake()
        assert parameter.equal(torch.arange(12.0).view(3, 4))
        assert view.equal(torch.arange(4.0, 12.0).view(2, 4))


def test_what_a_refit_has_moved_gets_memory_of_its_own_before_it_sleeps():
    """A storage that is a part of memory which engines read can neither shrink nor grow."""
    memory = bytearray(48)
    parameter = torch.nn.Parameter(torch.arange(12.0).view(3, 4))
    view = parameter.detach()[1:]
    sleeper = Sleeper(lambda: [parameter, view])
    for held in Memory.of([parameter, view]).values():
        held.move(torch.frombuffer(memory, dtype=torch.uint8))
    sleeper.sleep()
    assert parameter.untyped_storage().nbytes() == 0
    sleeper.wake()
    with torch.no_grad():
        parameter.add_(1)
    assert view.equal(torch.arange(5.0, 13.0).view(2, 4))
    assert bytes(memory) == torch.arange(12.0).numpy().tobytes()


def test_hooks_stay():
    parameter = torch.nn.Parameter(torch.ones(3))
    seen = []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    sleeper = Sleeper(lambda: [parameter])
    sleeper.sleep()
    sleeper.wake()
    (parameter * 2).sum().backward()
    assert seen[0].equal(torch.full((3,), 2.0))


def test_what_is_not_kept_wakes_as_zeros():
    gradients = torch.ones(5)
    sleeper = Sleeper(lambda: [gradients], keeps=False)
    sleeper.sleep()
    sleeper.wake()
    assert gradients.equal(torch.zeros(5))
