"""Every operator of generated mutants makes the change after which it is named."""

import ast

import pytest
from mutation_operators import replaced, sites

CHANGES = [
    ("condition", "if a: pass", "if (not a): pass"),
    ("last element", "for a in b: pass", "for a in list(b)[:-1]: pass"),
    ("dropped with", "with a.lock: pass", "with __import__('contextlib').nullcontext(): pass"),
    ("comparison", "a < b", "(a <= b)"),
    ("arithmetic", "a + b", "(a - b)"),
    ("and, or", "a and b", "(a or b)"),
    ("dropped not", "not a", "(a)"),
    ("flag", "f(True)", "f(False)"),
    ("constant", "a[1]", "a[2]"),
    ("constant", "a[1]", "a[0]"),
    ("constant", "0.5", "1.0"),
    ("bound", "a[1:]", "a[1 + 1:]"),
    ("bound", "a[1:n]", "a[1:n - 1]"),
    ("bound", "range(n)", "(range(n - 1))"),
    ("dtype", "torch.float32", "(torch.bfloat16)"),
    ("min, max", "min(a)", "(max(a))"),
    ("order", "sorted(a, key=b)", "(list(a))"),
    ("dropped copy", "a.clone()", "(a)"),
    ("default", "a.get(b, c)", "(a.get(b))"),
    ("swapped arguments", "f(a, b, c)", "(f(b, a, c))"),
    ("dropped argument", "f(a=b)", "(f())"),
    ("dropped call", "f()", "pass"),
    ("swallowed exception", "raise a", "pass"),
    ("dropped assignment", "a.b = c", "pass"),
    ("early return", "def f(): return a", "def f(): return None"),
    ("dropped statement", "del a", "pass"),
]


@pytest.mark.parametrize(("operator", "before", "after"), CHANGES)
def test_an_operator_changes_what_it_is_named_after(operator: str, before: str, after: str) -> None:
    found = [
        (site.operator, replaced(before, site.span, site.source))
        for site in sites(ast.parse(before))
    ]
    assert (operator, after) in found


@pytest.mark.parametrize(
    "source",
    [
        "'a docstring'",
        "def f(a: List[1]) -> int: pass",
        "raise ValueError(f'{a + 1}') from b",
        "error = ConfigError(a, n=1)",
        "log.info(a, n=1)",
        "if TYPE_CHECKING: a = 1",
        "__all__ = a + 1",
    ],
)
def test_messages_and_annotations_stay(source: str) -> None:
    operators = {site.operator for site in sites(ast.parse(source))}
    assert operators <= {"swallowed exception", "dropped call"}


def test_a_default_value_runs_with_its_function_and_a_constant_with_its_file() -> None:
    text = "a = 1\ndef f(\n    b=2,\n):\n    if b:\n        return b\n"
    lines = {(site.operator, site.source): site.lines for site in sites(ast.parse(text))}
    assert lines["constant", "0"] == (1, 10**6)
    assert lines["constant", "3"] == (5, 6)
    assert lines["condition", "(not b)"] == (5, 5)
