"""Goes through a tutorial as its reader would; the first line that is not so ends it.

::

    python tests/tutorial.py docs/write-a-backend.md --directory EMPTY --environment VENV

- ``console``: each ``$`` line is run by bash, with what the lines before it left (directory,
  variables). What stands below it must come out in that order; other lines may come between, and
  ``...`` stands for anything.
- ``diff title="FILE"``: is applied to the file.
- any other block with a title: is a part of that file, word for word.

A comment above a block changes that: ``<!-- tutorial: skip, REASON -->`` leaves it out,
``<!-- tutorial: write -->`` makes the file, ``<!-- tutorial: long -->`` leaves it out of a run with
``--short``.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

#: Seconds that one command may take.
DEADLINE_S = 900.0

_BLOCK = re.compile(
    r"(?:^<!-- tutorial: (?P<how>\w+)[^\n]*-->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


class TutorialError(Exception):
    """The tutorial says what is not so."""


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands, how it is meant, and what is in it."""

    line: int
    how: str
    language: str
    title: str
    text: str


def blocks(tutorial: str) -> list[Block]:
    """All fenced blocks of a page.

    Raises:
        TutorialError: A fence was not understood.
    """
    found = [
        Block(
            tutorial.count("\n", 0, match.start("text")),
            match["how"] or "",
            match["language"],
            match["title"] or "",
            match["text"],
        )
        for match in _BLOCK.finditer(tutorial)
    ]
    fences = len(re.findall(r"^```", tutorial, re.MULTILINE))
    if fences != 2 * len(found):
        raise TutorialError(f"{fences} fences, but {len(found)} blocks were understood")
    return found


class Reader:
    """Does what the blocks say.

    Args:
        directory: Where it begins.
        state: A file that carries directory and variables from command to command.
        environment: A virtual environment that is active, or None.
        short: What takes minutes is left out.
    """

    def __init__(
        self,
        directory: Path,
        state: Path,
        environment: Path | None = None,
        *,
        short: bool = False,
    ) -> None:
        self._state = state
        self._left_out = {"skip", "long"} if short else {"skip"}
        activate = f"source {shlex.quote(f'{environment}/bin/activate')}\n" if environment else ""
        state.write_text(f"{activate}cd {shlex.quote(str(directory))}\n")

    def follow(self, block: Block) -> None:
        """Runs, applies, writes or compares one block."""
        if block.how in self._left_out:
            print(f"line {block.line}: skipped", flush=True)
        elif block.language == "console":
            for command, expected in commands(block.text):
                self._run(command, expected)
        elif block.language == "diff":
            file = self._directory() / block.title
            file.write_text(patched(file.read_text(), block.text))
        elif block.how == "write":
            (self._directory() / block.title).write_text(block.text)
        elif block.title and block.text not in (self._directory() / block.title).read_text():
            raise TutorialError(f"this is not in {block.title}:\n{block.text}")

    def _directory(self) -> Path:
        shown = subprocess.run(
            ["bash", "-c", f"source {self._state}; pwd"],
            capture_output=True,
            text=True,
            check=True,
            timeout=DEADLINE_S,
        )
        return Path(shown.stdout.strip())

    def _run(self, command: str, expected: list[str]) -> None:
        print(f"$ {command}", flush=True)
        started = time.perf_counter()
        keep = f"{{ export -p; printf 'cd %q\\n' \"$PWD\"; }} > {self._state}"
        output, code = _bash(f"set -eo pipefail\nsource {self._state}\n{command}\n{keep}\n")
        print(f"  ({time.perf_counter() - started:.1f} s)", flush=True)
        if code:
            raise TutorialError(f"{command!r} exited with {code}:\n{output}")
        if missing := first_missing(expected, output):
            raise TutorialError(f"{command!r} did not print {missing!r} in its place:\n{output}")


def _bash(script: str) -> tuple[str, int]:
    """What a script printed and exited with; it is ended, with all it started, at the deadline."""
    with subprocess.Popen(
        ["bash", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise TutorialError(f"not done after {DEADLINE_S:.0f} s:\n{output}") from None
        return output, process.returncode


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Each command of a console block with the lines that stand below it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif found:
            found[-1][1].append(line)
        else:
            raise TutorialError(f"a console block begins with a command, not with {line!r}")
    return found


def first_missing(expected: list[str], output: str) -> str:
    """The first expected line that does not come after those before it, or ""."""
    lines = iter(" ".join(line.split()) for line in output.splitlines())
    for line in expected:
        words = " ".join(line.split())
        pattern = ".*".join(map(re.escape, words.split("...")))
        if not any(re.search(pattern, other) for other in lines):
            return line
    return ""


def patched(text: str, diff: str) -> str:
    """The text after a diff whose lines begin with a blank, a minus or a plus.

    Raises:
        TutorialError: What the diff begins from is not there, or more than once.
    """
    lines = [(line[:1], line[1:] + "\n") for line in diff.splitlines()]
    before = "".join(line for sign, line in lines if sign != "+")
    after = "".join(line for sign, line in lines if sign != "-")
    if text.count(before) != 1:
        raise TutorialError(f"this is there {text.count(before)} times, not once:\n{before}")
    return text.replace(before, after)


def main() -> None:
    """Follows one tutorial."""
    parser = argparse.ArgumentParser(description="Go through a tutorial as its reader would.")
    parser.add_argument("tutorial", type=Path)
    parser.add_argument("--directory", type=Path, required=True, help="where it begins")
    parser.add_argument("--environment", type=Path, help="a virtual environment that is active")
    parser.add_argument("--short", action="store_true", help="without what takes minutes")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile(suffix=".sh") as state:
        where = options.directory.resolve(), Path(state.name), options.environment
        reader = Reader(*where, short=options.short)
        for block in blocks(options.tutorial.read_text(encoding="utf-8")):
            try:
                reader.follow(block)
            except (TutorialError, OSError) as error:
                raise SystemExit(f"{options.tutorial}, line {block.line}: {error}") from error


if __name__ == "__main__":
    main()
