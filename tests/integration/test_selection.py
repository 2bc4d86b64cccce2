"""Which tests a change concerns, in a project of two distributions."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from selection import Selection, changed_since, newest_passed

LAZY = 'def __getattr__(name):\n    return import_module("rl_core.late")\n'
FILES = {
    ".gitignore": "ignored\n",
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["core/tests/support"]\n',
    "core/pyproject.toml": '[project]\nname = "rl-core"\n',
    "core/src/rl_core/__init__.py": LAZY,
    "core/src/rl_core/errors.py": "",
    "core/src/rl_core/batch.py": "import rl_core.errors\n",
    "core/src/rl_core/late.py": "",
    "core/tests/support/doubles.py": "from rl_core import batch\n",
    "core/tests/test_doubles.py": "import doubles\n",
    "core/tests/test_lazy.py": "from rl_core import refit\n",
    "core/tests/test_types.py": "if TYPE_CHECKING:\n    from rl_core import batch\n",
    "core/tests/test_page.py": 'PAGE = "docs/refit.md"\n',
    "plugins/rl-hf/pyproject.toml": '[project.entry-points."rl_core.backends"]\nhf = "rl_hf:HF"\n',
    "plugins/rl-hf/src/rl_hf/__init__.py": "",
    "plugins/rl-hf/src/rl_hf/policy.py": "",
    "core/tests/test_by_name.py": 'create_policy({"backend": "hf"})\n',
    "core/tests/test_in_a_string.py": 'load("rl_hf.policy:Policy")\n',
    "tests/integration/test_all.py": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path)
    return tmp_path


def git(root: Path, *command: str) -> str:
    who = ["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *who, *command], cwd=root, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(root: Path, message: str = "a change") -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", message)
    return git(root, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ("core/src/rl_core/errors.py", "all doubles lazy"),
        ("core/src/rl_core/late.py", "all lazy"),
        ("core/src/rl_core/template.txt", "all doubles lazy"),
        ("core/src/rl_core/deleted.py", "all doubles lazy"),
        ("core/tests/support/doubles.py", "doubles"),
        ("core/tests/test_types.py", "types"),
        ("core/tests/conftest.py", "by_name doubles in_a_string lazy page types"),
        ("plugins/rl-hf/src/rl_hf/policy.py", "all by_name in_a_string"),
        ("docs/refit.md", "page"),
        ("docs/other.md", "page"),
        ("plugins/rl-hf/README.md", ""),
        ("core/pyproject.toml", "all by_name doubles in_a_string lazy page types"),
    ],
)
def test_a_change_concerns_the_tests_that_reach_it(root: Path, changed: str, names: str) -> None:
    selection = Selection(root, (changed,))
    tests = [path for path in root.glob("**/test_*.py") if selection.concerns_test(path)]
    assert " ".join(sorted(path.stem.removeprefix("test_") for path in tests)) == names


def test_a_backend_is_concerned_by_what_its_sources_reach(root: Path) -> None:
    core = Selection(root, ("core/src/rl_core/errors.py",))
    assert not core.concerns_packages("rl_hf")
    assert core.concerns_packages("rl_hf", "rl_core")
    assert Selection(root, ("constraints.txt",)).concerns_packages("rl_hf")


def test_only_an_ancestor_that_passed_is_a_base(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = git(root, "rev-parse", "HEAD")
    assert newest_passed(root) is None
    git(root, "switch", "-q", "-c", "other")
    elsewhere = commit(root, "on another branch")
    git(root, "switch", "-q", "main")
    second = commit(root)
    git(root, "notes", "--ref=ci", "add", "-m", "failed", second)
    git(root, "notes", "--ref=ci", "add", "-m", "passed", elsewhere)
    assert newest_passed(root) is None
    git(root, "notes", "--ref=ci", "add", "-m", "passed", first)
    assert newest_passed(root) == first
    (tmp_path / "ignored").write_text(f"{elsewhere}\n{second}\n")
    monkeypatch.setenv("RL_CI_PASSED", str(tmp_path / "ignored"))
    assert newest_passed(root) == first  # what is checked out is no base for itself
    commit(root)
    assert newest_passed(root) == second


def test_a_change_has_its_commits_and_what_is_not_committed_yet(root: Path) -> None:
    first = git(root, "rev-parse", "HEAD")
    (root / "core/src/rl_core/late.py").write_text("late = True\n")
    commit(root)
    (root / "core/src/rl_core/errors.py").write_text("errors = True\n")
    (root / "new.py").write_text("")
    changed = changed_since(root, first)
    assert changed == ["core/src/rl_core/errors.py", "core/src/rl_core/late.py", "new.py"]


def test_without_git_nothing_is_known_to_have_passed(tmp_path: Path) -> None:
    assert newest_passed(tmp_path) is None
