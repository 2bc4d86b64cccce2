"""Reward functions are called as TRL calls them, and end at their deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from patience import enough_for

from rl_core.errors import ConfigError, LifecycleError
from rl_train.rewards import RewardError, Rewards

SOURCE = """
import asyncio, os, re, time

def length(completions, **kwargs):
    return [float(len(c)) for c in completions]

def some(completions, answer, none=True, **kwargs):
    return [None if none and a is None else float(c == a) for c, a in zip(completions, answer)]

def hangs(completions, how):
    for c in completions:
        if "hang" in c and how == "sleep":
            time.sleep(1000)
        if "hang" in c and how == "holds the lock":
            re.match(r"(a+)+$", "a" * 60 + "b")
    return [1.0] * len(completions)

async def awaits(completions, prompts):
    await asyncio.sleep(1000 if "hang" in completions[0] else 0.2)
    return [1.0] * len(completions)

begun = {}

async def together(completions, run):
    begun[run] = begun.get(run, 0) + len(completions)
    while begun[run] < 50:  # for ever, unless it is called for all before a call has ended
        await asyncio.sleep(0.01)
    return [1.0] * len(completions)

def bad(completions, what):
    return {"few": [1.0][:0], "text": "1", "nan": [float("nan")] * len(completions),
            "type": [["x"]] * len(completions), "none": None}[what]

def dies(completions):
    os._exit(3)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(SOURCE, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def several(source: str) -> Iterator[Rewards]:
    class Counts:
        def __call__(self, completion_ids: list[list[int]], **_: Any) -> list[int]:
            return [len(ids) for ids in completion_ids]

    def pid(prompts: list[str]) -> list[int]:
        return [os.getpid()] * len(prompts)

    functions = [
        {"function": f"{source}:length", "weight": 0.5},
        {"function": f"{source}:some", "name": "right", "columns": {"answer": "solution"}},
        Counts(),
        pid,
        lambda prompts, completions, **_: [len(set(prompts))] * len(prompts),
    ]
    with Rewards(functions, [0.5, 1, 0, 0, 0], workers=2) as made:
        yield made


def test_rewards_are_added_up_row_by_row(several: Rewards) -> None:
    assert several.names == ["length", "right", "Counts", "pid", "<lambda>"]
    prompts = ["p", "p", "q", "q", "r"]
    completions = ["a", "bb", "cc", "d", "eee"]
    columns = {"solution": ["a", "x", "cc", None, "e"], "prompt": prompts}
    grades = several.grade(prompts, completions, [[1], [1, 2], [], [1], [1]], columns)
    assert grades.each["length"].tolist() == [1, 2, 2, 1, 3]
    assert grades.each["right"][[0, 1, 2, 4]].tolist() == [1, 0, 1, 0]
    assert grades.each["right"].isnan().tolist() == [False, False, False, True, False]
    assert grades.total.tolist() == [1.5, 1.0, 2.0, 0.5, 1.5]
    assert grades.total.dtype == torch.float32
    assert grades.each["Counts"].tolist() == [1, 2, 0, 1, 1]
    assert grades.each["<lambda>"].tolist() == [1] * 5  # the rows of one prompt are one call
    assert os.getpid() not in grades.each["pid"].tolist()
    assert grades.timed_out == dict.fromkeys(several.names, 0)
    assert len(several.grade([], [], [], {"solution": []}).total) == 0


def test_a_process_that_calls_functions_starts_without_torch() -> None:
    script = "import sys, rl_train.rewards; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "False\n"


def test_a_column_that_is_missing_is_named(several: Rewards) -> None:
    with pytest.raises(
        ConfigError, match=r"'right' needs 'solution'.*\n.*columns: {solution: solutions}"
    ):
        several.grade(["p"], ["a"], [[1]], {"solutions": ["a"]})
    with pytest.raises(ConfigError, match="number of prompts is 1, but that of solution is 2"):
        several.grade(["p"], ["a"], [[1]], {"solution": ["a", "b"]})


def test_a_conversation_gets_messages() -> None:
    def role(completions: list[Any], **_: Any) -> list[float]:
        return [float(each[0]["role"] == "assistant") for each in completions]

    with Rewards([role, "exact"], workers=0) as rewards:
        prompt = [{"role": "user", "content": "a"}]
        grades = rewards.grade(
            [prompt] * 2, ["b", [{"role": "x", "content": "c"}]], None, {"answer": ["B.", "c"]}
        )
    assert grades.each["role"].tolist() == [1, 0]
    assert grades.each["exact"].tolist() == [1, 1]


@pytest.mark.parametrize("how", ["sleep", "holds the lock"])
def test_a_function_that_hangs_costs_the_rows_of_its_prompt(source: str, how: str) -> None:
    configs = [
        {"function": f"{source}:hangs", "options": {"how": how}},
        f"{source}:awaits",
        f"{source}:length",
    ]
    before = workers_of(os.getpid())
    with Rewards(configs, workers=2, deadline_s=60.0) as rewards:
        rewards.grade(["p"], ["a"])
        seconds = enough_for(lambda: rewards.grade(["p", "p", "q", "r"], [*"abcd"]), least=1.0)
    with Rewards(configs, workers=2, deadline_s=seconds) as rewards:
        for _ in range(2 if how == "sleep" else 1):
            grades = rewards.grade(["p", "p", "q", "r"], ["hang", "a", "b", "c"])
            assert grades.timed_out == {"hangs": 2, "awaits": 2, "length": 0}
            for name in ("hangs", "awaits"):
                assert grades.each[name].isnan().tolist() == [True, True, False, False]
            assert grades.total.tolist() == [4, 1, 3, 3]
    assert workers_of(os.getpid()) == before


def test_async_calls_run_at_the_same_time(source: str) -> None:
    for workers in (0, 1):
        configs = [{"function": f"{source}:together", "options": {"run": workers}}]
        with Rewards(configs, workers=workers, deadline_s=60.0) as rewards:
            grades = rewards.grade([str(n) for n in range(50)], ["a"] * 50)
        assert grades.total.sum() == 50


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_fails_is_named_with_its_rows(source: str, workers: int) -> None:
    def fails(completions: list[str], **_: Any) -> list[float]:
        return [1.0 / len(each) for each in completions]

    with (
        Rewards([fails], workers=workers) as rewards,
        pytest.raises(RewardError, match=r"'fails', .*ZeroDivisionError[^$]*1\.0 / len") as caught,
    ):
        rewards.grade(["p", "q", "q"], ["a", "b", ""])
    assert caught.value.details["rows"] == ([1, 2] if workers else [0, 1, 2])


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("few", "returned a list of 0, but the completions are 1"),
        ("text", "returned '1' .str., not a list"),
        ("nan", "returned nan .float. as reward 0 of 1, not a finite number"),
        ("type", r"returned \['x'\] .list. as reward 0"),
        ("none", "returned None"),
    ],
)
def test_what_is_no_reward_is_an_error(source: str, what: str, match: str) -> None:
    bad = {"function": f"{source}:bad", "options": {"what": what}}
    with (
        Rewards([bad], workers=0) as rewards,
        pytest.raises(RewardError, match=f"'bad', .*{match}"),
    ):
        rewards.grade(["p"], ["a"])


def test_a_process_that_dies_is_an_error_and_is_replaced(source: str) -> None:
    with Rewards([f"{source}:dies", f"{source}:length"], workers=1) as rewards:
        for _ in range(2):
            with pytest.raises(RewardError, match=r"'dies', row 0 .*its process has ended"):
                rewards.grade(["p"], ["a"])
    before = workers_of(os.getpid())
    with Rewards([f"{source}:length"], workers=1) as rewards:
        assert rewards.grade(["p"], ["a"]).total.tolist() == [1]
        (worker,) = set(workers_of(os.getpid())) - set(before)
        worker.kill()
        while rewards._pool is not None and rewards._pool.active:
            time.sleep(0.01)
        assert rewards.grade(["p"], ["a"]).total.tolist() == [1]
    with pytest.raises(LifecycleError, match="closed"):
        rewards.grade(["p"], ["a"])


def test_processes_that_are_killed_once_cost_no_reward(tmp_path: Path) -> None:
    """As by a system without memory; the calls of the other processes go on."""

    def killed(prompts: list[str], where: list[str]) -> list[float]:
        try:
            (Path(where[0]) / prompts[0]).touch(exist_ok=False)
        except FileExistsError:
            return [1.0]
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    prompts = list("abcdef")
    with Rewards([killed], workers=2) as rewards:
        grades = rewards.grade(prompts, prompts, None, {"where": [str(tmp_path)] * 6})
    assert grades.total.tolist() == [1] * 6


PARENT = """
import sys
from rl_train.rewards import Rewards
if __name__ == "__main__":
    function = sys.argv[1] + ":hangs"
    ways = ["sleep", "holds the lock"]
    configs = [{"function": function, "name": w, "options": {"how": w}} for w in ways]
    rewards = Rewards(configs, workers=3)
    rewards.grade(["p"], ["a"])
    print("ready", flush=True)
    rewards.grade(["p"], ["hang"])
"""


def test_no_process_outlives_a_parent_that_is_killed(source: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    with subprocess.Popen(
        [sys.executable, str(script), source], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        children = workers_of(parent.pid)
        assert len(children) == 3
        while sum(child.status() == psutil.STATUS_RUNNING for child in children) == 0:
            time.sleep(0.01)  # one works without end, one sleeps, one waits for a call
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert not psutil.wait_procs(children, timeout=60)[1]


def workers_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [each for each in children if "spawn_main" in " ".join(each.cmdline())]


def test_what_cannot_be_used_is_refused_at_once(source: str) -> None:
    with pytest.raises(ConfigError, match=r"no function 'maths'.*\nFix: write 'math'"):
        Rewards(["maths"])
    with pytest.raises(ConfigError, match="takes no 'patternn'"):
        Rewards([{"function": "exact", "options": {"patternn": "x"}}])
    with pytest.raises(ConfigError, match="name 'exact'"):
        Rewards(["exact", "exact"])
    with pytest.raises(ConfigError, match="write 'length'"):
        Rewards([f"{source}:lengtth"])
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="set workers to 0"):
        Rewards([lambda completions: [lock.locked()]])
    with pytest.raises(ConfigError, match="number of functions is 1, that of weights is 2"):
        Rewards(["exact"], [1, 2])


def test_shipped_functions() -> None:
    shipped = [
        "math",
        "gsm8k",
        {"function": "exact", "options": {"pattern": r"\\boxed{(.*)}"}},
        "format",
        {"function": "overlong", "options": {"max_tokens": 10, "buffer_tokens": 4}},
    ]
    completions = [
        r"<think>hm</think> so \boxed{\frac{1}{2}}",
        r"\boxed{5} is wrong, it is \boxed{0.5}",
        "It is 1,234 in all.",
        "#### 7 or so",
        "no idea",
    ]
    answer = [r"\frac{1}{2}", "1/2", "so #### 1234", "7", ""]
    ids = [[0] * n for n in (6, 8, 10, 50, 0)]
    for workers in (0, 1):
        with Rewards(shipped, workers=workers) as rewards:
            grades = rewards.grade(list("abcde"), completions, ids, {"answer": answer})
        each = {name: values.tolist() for name, values in grades.each.items()}
        assert each["math"][:4] == [1, 1, 1, 1]
        assert each["gsm8k"][2:] == [1, 1, 0]
        assert each["exact"] == [1, 0, 0, 0, 0]
        assert each["format"] == [1, 0, 0, 0, 0]
        assert each["overlong"] == [0, -0.5, -1, -1, 0]


def test_the_functions_of_trl_work_unchanged() -> None:
    from trl.rewards import accuracy_reward, get_soft_overlong_punishment, think_format_reward

    functions = [accuracy_reward, think_format_reward, get_soft_overlong_punishment(10, 4)]
    prompt = [{"role": "user", "content": "?"}]
    with Rewards(functions, workers=0) as rewards:
        grades = rewards.grade(
            [prompt] * 2, [r"\boxed{3}", "3"], [[0] * 8, []], {"solution": ["3", "3"]}
        )
    assert [values.tolist() for values in grades.each.values()] == [[1, 0], [0, 0], [-0.5, 0]]
