"""Rows of data: where they come from, and in which order they are taken."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib
import importlib.util
import json
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rl_core.config import check_config, nearest
from rl_core.errors import ConfigError, DataError
from rl_train.encoding import FOUND, DataConfig, Encoder, problem_of

__all__ = ["Order", "Rows", "import_function", "load_rows"]

_FORMATS = {".json": "", ".jsonl": "", ".ndjson": "", ".parquet": "parquet", ".csv": "csv"}
_FUNCTION = re.compile(r"[^:]+\.py:\w+|[\w.]+:\w+")


class Rows(Sequence[dict[str, Any]]):
    """Rows by number, without those that were left out.

    Attributes:
        columns: Names of all columns, in the order in which they appear.
        dropped: How many rows were left out because they are too long.
        digest: Of all values; the same for the same data.
    """

    def __init__(self, rows: Sequence[Any], places: Sequence[str], answer: str | None) -> None:
        self._rows, self._places, self._answer = rows, places, answer
        self._kept: Sequence[int] = range(len(rows))
        self.columns = columns_of(rows)
        self.dropped, self.digest = 0, ""

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        row = dict(self._rows[self._kept[index]])
        return {**row, "answer": row.get(self._answer)} if self._answer else row

    def place(self, index: int) -> str:
        """Where a row comes from, for messages: its file and line where they are known."""
        number = self._kept[index]
        return self._places[number] if self._places else f"row {number}"

    def drop(self, indices: Mapping[int, Any]) -> None:
        """Leaves out these rows."""
        self.dropped += len(indices)
        self._kept = [kept for index, kept in enumerate(self._kept) if index not in indices]


def columns_of(rows: Any) -> list[str]:
    """Names of all columns of some rows, in the order in which they appear."""
    named = getattr(rows, "columns", None) or getattr(rows, "column_names", None)
    return list(named or dict.fromkeys(key for row in rows for key in row))


def import_function(path: str, *, key: str) -> Callable[..., Any]:
    """The function that ``module:name`` or ``file.py:name`` is; modules may lie in the directory.

    Raises:
        ConfigError: There is no such module or function, or the module fails; names ``key``.
    """
    source, _, name = path.rpartition(":")
    here = os.getcwd()
    if here not in sys.path:  # the command rl has its own directory there
        sys.path.insert(0, here)
    try:
        if source.endswith(".py"):
            file = Path(source).resolve(strict=True)
            source = f"_file_{file.stem}_{abs(hash(str(file)))}"
            spec: Any = importlib.util.spec_from_file_location(source, file)
            if source not in sys.modules:
                sys.modules[source] = importlib.util.module_from_spec(spec)
                try:
                    spec.loader.exec_module(sys.modules[source])
                except BaseException:
                    del sys.modules[source]
                    raise
        module = importlib.import_module(source)
    except Exception as error:
        named = path.rpartition(":")[0]
        lacks = (isinstance(error, ModuleNotFoundError) and error.name) or ":"
        there = Path(named).exists() if named.endswith(".py") else not named.startswith(lacks)
        raise ConfigError(
            f"{key}: {path!r} cannot be imported: {type(error).__name__}: {error}",
            fix=f"correct {named}; what it imports must be installed, or in the directory {here}"
            if there
            else "write module:function, with a module that Python finds, or file.py:function",
            key=key,
        ) from error
    found = getattr(module, name, None)
    if not callable(found):
        match = nearest(name, [n for n, v in vars(module).items() if callable(v)])
        raise ConfigError(
            f"{key}: {path!r}: there is no function {name!r}",
            fix=f"write {match!r}" if match else "name a function of that module",
            key=key,
        )
    function: Callable[..., Any] = found
    return function


def load_rows(
    config: Mapping[str, Any],
    tokenizer: Any = None,
    *,
    rows: Sequence[Mapping[str, Any]] | None = None,
    context: int | None = None,
    method: str = "grpo",
) -> Rows:
    """All rows, checked one by one.

    JSON is read here, so that rows stay as they are written; ``datasets`` reads the rest. What it
    derives from local files is not kept: a changed file is read anew.

    Args:
        config: See :class:`DataConfig`.
        tokenizer: Counts the tokens of rows; without it no row is too long.
        rows: The rows, instead of those of ``data.path``.
        context: Tokens of a row at most, for the model.
        method: What the rows are for.

    Raises:
        ConfigError: The path, a name or a column is wrong; says which there are.
        DataError: A file or a row is broken; says where.
    """
    checked = check_config(DataConfig, config, what="data")
    if rows is None and not checked.get("path"):
        raise ConfigError("data: 'path' is missing", fix="set data.path", key="path")
    source, places = _read(checked) if rows is None else (rows, [])
    found, name = Rows(source, places, checked.get("answer")), checked.get("path", "the data")
    if not found:
        raise DataError(f"data: {name} has no rows", fix="give data with rows")
    columns = _columns(found.columns, checked, name)
    if checked.get("answer") and "answer" not in found.columns:
        found.columns.append("answer")  # as each row has it
    digest = hashlib.blake2b(digest_size=16)
    texts = {columns["prompt"], columns["chosen"], columns["rejected"], checked.get("completion")}
    for index, row in enumerate(found):
        digest.update(json.dumps(row, default=lambda value: type(value).__name__).encode())
        for column in filter(None, texts):
            if problem := problem_of(row.get(column)):
                text = f"data: {found.place(index)}: {column!r} {problem}"
                fix = (
                    "give the row a text or messages like {role: user, content: ...}, or remove it"
                )
                raise DataError(text, fix=fix, key=column, row=index)
    answer = checked.get("answer") or (columns["answer"] if method == "grpo" else None)
    if answer and (without := [index for index, row in enumerate(found) if answer not in row]):
        raise DataError(
            f"data: {found.place(without[0])}: there is no {answer!r}, the column of answers; "
            f"{len(without)} of {len(found)} rows have none",
            fix="give these rows an answer (null if there is none), or remove them",
            row=without[0],
        )
    found.digest = digest.hexdigest()
    most, long = checked.get("max_prompt_tokens"), checked.get("long_prompts", "drop")
    if tokenizer is None:
        return found
    encoder = Encoder(tokenizer, {**checked, "max_prompt_tokens": None})
    too_long: dict[int, str] = {}
    counted = most is not None and columns["prompt"] and long != "cut"
    for index, row in enumerate(found):
        tokens = len(encoder.prompt(row)) if counted else 0
        if most is not None and tokens > most:
            too_long[index] = f"the prompt has {tokens} tokens, and the limit is {most}"
        # A token has a byte or more, and what a template adds should be less than half.
        if context is not None and 2 * len(str(row).encode()) > context and index not in too_long:
            tokens = encoder.tokens(row, method)
            if tokens > context and (method != "grpo" or long != "cut"):
                too_long[index] = f"the row needs {tokens} tokens, the model's context is {context}"
    if len(too_long) == len(found) or (long == "error" and too_long):
        index, problem = next(iter(too_long.items()))
        raise DataError(
            f"data: {found.place(index)}: {problem} ({len(too_long)} of {len(found)} prompts are "
            "too long)",
            fix="raise data.max_prompt_tokens, or set data.long_prompts to "
            + ("cut" if len(too_long) == len(found) else "drop or cut"),
            row=index,
        )
    found.drop(too_long)
    return found


def _columns(there: Sequence[str], config: Mapping[str, Any], name: Any) -> dict[str, str | None]:
    """The column of each part of a row; None if there is none."""
    named = {key: config.get(key) for key in FOUND}
    tools, columns = config.get("tools"), f"the columns are {', '.join(there)}"
    if isinstance(tools, str) and not tools.endswith(".json"):
        named["tools"] = tools
    for key, column in named.items():
        if column is not None and column not in there:
            match = nearest(column, there)
            raise ConfigError(
                f"data.{key}: {name} has no column {column!r}; {columns}",
                fix=f"write {match!r}" if match else f"set data.{key} to one of these",
                key=key,
            )
        named[key] = column or next((c for c in FOUND[key] if c in there), None)
    if not (named["prompt"] or named["chosen"] or config.get("completion")):
        raise ConfigError(
            f"data: {name} has no column of prompts; {columns}",
            fix="set data.prompt to one of these",
            key="prompt",
        )
    return named


def is_function(path: str) -> bool:
    """Whether ``data.path`` names a function that makes the rows."""
    return _FUNCTION.fullmatch(path) is not None


def files_of(path: str | Sequence[str]) -> list[str]:
    """The files that ``data.path`` names; none if it names a dataset or a directory.

    Raises:
        ConfigError: A file is not there.
    """
    patterns = [path] if isinstance(path, str) else path
    files = [name for each in patterns for name in sorted(glob.glob(each)) or [each]]
    is_file = [Path(name).suffix in _FORMATS or os.path.isfile(name) for name in files]
    if not all(is_file) and len(files) == 1:
        return []
    if missing := [name for name in files if not os.path.isfile(name)]:
        beside = Path(missing[0]).parent
        there = sorted(str(p) for p in beside.glob("*")) if beside.is_dir() else []
        match = nearest(missing[0], there)
        raise ConfigError(
            f"data: there is no file {missing[0]!r} in {os.getcwd()}",
            fix=f"write {match!r}" if match else "correct data.path; relative ones begin there",
            key="path",
        )
    return files


def _read(config: Mapping[str, Any]) -> tuple[Sequence[Any], list[str]]:
    """Rows, and for each its place; places are empty where rows have only numbers."""
    path, limit = config["path"], config.get("limit")
    if isinstance(path, str) and is_function(path):
        made = import_function(path, key="data.path")(**config.get("options", {}))
        rows = list(islice(made, limit)) if isinstance(made, Iterable) else [made]
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                text = f"data: {path}: row {number} is {row!r:.80}, not a dict"
                raise DataError(text, fix="return a list of dicts", row=number)
        return rows, [f"{path}, row {number}" for number in range(len(rows))]
    files = files_of(path)
    if not files:
        return _load(path if isinstance(path, str) else path[0], config), []
    formats = {_FORMATS.get(Path(name).suffix, name) for name in files}
    if len(formats) != 1 or not formats <= set(_FORMATS.values()):
        raise ConfigError(
            f"data: {', '.join(files)} are not of one known format",
            fix=f"give files of one kind: {', '.join(_FORMATS)}",
            key="path",
        )
    if unused := {"name", "split"} & config.keys():
        raise ConfigError(
            f"data: the file {files[0]} has no {min(unused)}: datasets of the hub have",
            fix=f"set data.path to a file with the rows of the {min(unused)}, and remove that key",
            key=min(unused),
        )
    if kind := formats.pop():
        return _load(kind, config, files), []
    read = list(islice((found for name in files for found in _read_json(name)), limit))
    return [row for row, _ in read], [place for _, place in read]


def _read_json(name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Objects with their places: one in each line, or those of one list."""
    with open(name, encoding="utf-8-sig") as file:
        whole, line = False, 1
        try:
            whole = file.read(1) == "["
            file.seek(0)
            found: Iterable[tuple[int, Any]]
            if whole:
                found = enumerate(json.load(file))
            else:
                found = ((n, text) for n, text in enumerate(file, 1) if text.strip())
            for line, value in found:
                row = value if whole else json.loads(value)
                place = f"{name}, {'entry' if whole else 'line'} {line}"
                if not isinstance(row, dict):
                    text = f"data: {place}: {row!r:.80} is not an object"
                    raise DataError(text, fix="write objects with a key for each column", row=line)
                yield row, place
        except UnicodeDecodeError as error:
            text = f"data: {name}, about line {line}: {error}"
            raise DataError(text, fix="save the file in the encoding UTF-8", line=line) from error
        except json.JSONDecodeError as error:
            at = error.lineno if whole else line
            raise DataError(
                f"data: {name}, line {at}: not valid JSON: {error}",
                fix="correct that line; in JSONL, each line is one object",
                line=at,
            ) from error


def _load(path: str, config: Mapping[str, Any], files: Sequence[str] = ()) -> Any:
    """What ``datasets.load_dataset`` reads: a format with files, a directory, or the hub."""
    import datasets
    from datasets.utils.logging import get_verbosity, set_verbosity

    split = config.get("split", "train")
    how: dict[str, Any] = {"split": "train", "data_files": files} if files else {"split": split}
    shown, bars = get_verbosity(), not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    set_verbosity(datasets.logging.CRITICAL)
    try:
        with contextlib.ExitStack() as stack:
            if files or os.path.isdir(path):
                # The library's own cache would keep a copy of each version of a file.
                how["cache_dir"] = stack.enter_context(tempfile.TemporaryDirectory())
                how["keep_in_memory"] = True
            rows = datasets.load_dataset(path, config.get("name"), **how)
    except Exception as error:
        reason = f"{type(error).__name__}: {error.__cause__ or error}"
        if files:
            raise DataError(f"data: {', '.join(files)}: {reason}", fix="correct it") from error
        raise ConfigError(
            f"data: {path!r} (split {split!r}) is not a file, and it cannot be loaded from the "
            f"Hugging Face hub: {reason}",
            fix="correct the name, or check the network; or download the files elsewhere (hf "
            "download --repo-type dataset NAME) and set data.path to them",
            key="path",
        ) from error
    finally:
        set_verbosity(shown)
        if bars:
            datasets.enable_progress_bars()
    limit = config.get("limit")
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


class Order:
    """Numbers of rows, epoch after epoch, each with another order; within an epoch none twice."""

    def __init__(self, size: int, seed: int, shuffle: bool = True) -> None:
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._taken = 0

    @property
    def epoch(self) -> float:
        """Passes over the rows so far: 1.5 is the middle of the second one."""
        return self._taken / self._size

    def take(self, n: int) -> list[int]:
        """The next numbers; more than an epoch has are of several."""
        taken: list[int] = []
        while len(taken) < n:
            epoch, begin = divmod(self._taken, self._size)
            order = list(range(self._size))
            if self._shuffle:
                random.Random(f"{self._seed} {epoch}").shuffle(order)
            part = order[begin : begin + n - len(taken)]
            taken += part
            self._taken += len(part)
        return taken

    def state(self) -> dict[str, int]:
        """What :meth:`load` goes on from."""
        shuffle = int(self._shuffle)
        return {"size": self._size, "seed": self._seed, "shuffle": shuffle, "taken": self._taken}

    def load(self, state: Mapping[str, int]) -> None:
        """Goes on where another order was, with its seed.

        Raises:
            ConfigError: It had another number of rows.
        """
        if state["size"] != self._size:
            raise ConfigError(
                f"the number of rows of data was {state['size']} when the checkpoint was saved, "
                f"and is {self._size} now",
                fix="resume with the same data, or start a new run with another output",
                key="size",
            )
        self._seed, self._shuffle = state["seed"], bool(state["shuffle"])
        self._taken = state["taken"]
