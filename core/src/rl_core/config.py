"""Checks what users configure: a configuration against its TypedDict, and arguments that count.

The TypedDict is the only description: its keys, types, nesting and ``Annotated`` bounds are what
is checked, so a backend that extends :class:`~rl_core.interfaces.GenerationConfig` gets its own
keys checked by declaring them.
"""

from __future__ import annotations

import enum
import functools
import operator
import os
import reprlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from rl_core.errors import BrokenPluginError, ConfigError
from rl_core.interfaces.constraints import AlsoCalled, Range, Unsupported
from rl_core.interfaces.specs import GenerationConfig, PolicyConfig

__all__ = ["Range", "Unsupported", "check_config", "config_keys", "nearest", "as_int"]

#: Where else a key may belong.
_OTHERS = {"create_policy": PolicyConfig, "create_generation": GenerationConfig}


def check_config(
    spec: type, config: Mapping[str, Any], *, what: str, sections: Mapping[str, type] | None = None
) -> dict[str, Any]:
    """Checks keys, types and bounds, and returns a plain deep copy.

    An int passes where the type is float; a bool never passes for a number. Mappings become
    dicts, sequences the list or tuple that the type names, paths and torch's dtypes strings, and
    scalars of numpy and torch numbers.

    Args:
        spec: The TypedDict that describes the configuration.
        config: What the user wrote.
        what: The owner of the configuration, for messages, such as ``"generation backend 'hf'"``.
        sections: By key, the classes whose annotations are the keys of sections that another check
            covers. An unknown key is looked for there, too.

    Raises:
        ConfigError: One or more keys are unknown, missing, ill-typed or out of bounds; all of them
            are reported. ``details["key"]`` is the dotted path of the first, ``details["keys"]``
            of all.
        BrokenPluginError: The types of ``spec`` cannot be resolved.
    """
    problems: list[_Problem | _Unknown] = []
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{what}: the configuration is {_show(config)}, not a mapping",
            fix=f"pass a dict with the keys of {spec.__name__}",
            key="",
        )
    checked = _check_dict(spec, config, "", problems)
    if not problems:
        return checked
    known = [p.resolved(spec, sections or {}) if isinstance(p, _Unknown) else p for p in problems]
    meant = {path for problem in known for path in problem.meant}
    text = f"{what}: {known[0].text}"
    if len(known) > 1:
        text = "\n".join([f"{what}: {len(known)} problems", *(f"- {p.text}" for p in known)])
    fix = "; ".join(dict.fromkeys(p.fix for p in known if p.meant or p.path not in meant))
    raise ConfigError(text, fix=fix, key=known[0].path, keys=[p.path for p in known])


def config_keys(spec: type) -> dict[str, bool]:
    """The keys of a TypedDict, inherited ones included; True where a key is required."""
    return {key: required for key, (_, required) in _items(spec).items()}


def as_int(name: str, value: Any, least: int | None = None) -> int:
    """The value as an int; those of numpy and torch count too, bools and floats do not.

    Raises:
        ConfigError: It is not a whole number, or below ``least``; names the parameter.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ConfigError(
            f"{name} must be a whole number, got {value!r}",
            fix="give a whole number" + ("" if least is None else f", {least} or more"),
            key=name,
        )
    return number


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that the given one is most likely a misspelling of."""
    import difflib

    by_folded = {_fold(name): name for name in known}
    matches = difflib.get_close_matches(_fold(word), by_folded, n=1, cutoff=cutoff)
    return by_folded[matches[0]] if matches else None


def _fold(word: str) -> str:
    return word.lower().replace("-", "_").replace("/", ".")


@dataclass(frozen=True, slots=True)
class _Problem:
    path: str
    text: str
    fix: str
    meant: tuple[str, ...] = ()


class _Name(NamedTuple):
    """A name of a key, its own or another library's, and the section that the key is in."""

    name: str
    section: str
    key: str
    value: str
    refused: Unsupported | None

    @property
    def path(self) -> str:
        return f"{self.section}{self.key}"

    @property
    def setting(self) -> str:
        text = f"{self.key}: {self.value}"
        for section in reversed(self.section.split(".")[:-1]):
            text = f"{section}: {{{text}}}"
        return f"`{text}`"


def _names(spec: type, section: str = "") -> Iterator[_Name]:
    """All names of the keys of a TypedDict and of those nested in it."""
    for key, (hint, _) in _items(spec).items():
        markers = getattr(hint, "__metadata__", ())
        refused = next((m for m in markers if isinstance(m, Unsupported)), None)
        yield _Name(key, section, key, "...", refused)
        for also in (m for m in markers if isinstance(m, AlsoCalled)):
            yield from (
                _Name(name, section, key, also.value, refused) for name in also.names.split()
            )
        for member in (_bare(hint), *get_args(_bare(hint))):
            if is_typeddict(member):
                yield from _names(member, f"{section}{key}.")


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A key that its section does not have."""

    spec: type
    section: str
    key: str
    given: Any

    @property
    def path(self) -> str:
        return f"{self.section}{self.key}"

    def resolved(self, whole: type, sections: Mapping[str, type]) -> _Problem:
        """What to do: there is a key of that name elsewhere, one of another name, or none."""
        here = [n for n in _names(self.spec, self.section) if n.section == self.section]
        allowed = sorted(n.name for n in here if n.name == n.key and not n.refused)
        others = _OTHERS if "backend" in config_keys(whole) else {}  # a loss is not created
        calls = {n: call for call in others for n in self._named(_names(others[call]))}
        elsewhere = self._named(_names(whole))
        if not elsewhere:
            whole_section = isinstance(self.given, Mapping)  # and so none of the inner keys
            at = [n for s, keys in sections.items() for n in self._named(_names(keys, f"{s}."))]
            at = [n for n in at if not whole_section or n.section.count(".") == 1]
            elsewhere = [n for n in at if not n.refused] or at
        found = self._named(here) or [n for n in elsewhere if n.name == n.key]
        found = found or self._near(here, 0.85) or elsewhere
        if not found and not calls:
            found = self._near([n for n in here if n.name == n.key], 0.76)
        text, listed = f"unknown key '{self.path}'", f" allowed keys: {', '.join(allowed)}"
        if refused := next((n.refused for n in found or calls if n.refused), None):
            text = f"'{self.path}' is {_show(self.given)}, and {refused.why}"
            return _Problem(self.path, text, refused.fix)
        if found:
            several = found[0].name != found[0].key or found[0].section.split(".")[0] in sections
            join = (" and " if several else " or ").join
            beside = [n.section == self.section for n in found]
            nested = [n.setting if n.path == self.path else n.path for n in found]
            names = [n.key if b else at for n, b, at in zip(found, beside, nested, strict=True)]
            plain = all(beside) and found[0].value == "..."
            write = join(f"'{n.key}'" if plain else n.setting for n in found)
            text += f", did you mean {join(map(repr, names))}?{listed if all(beside) else ''}"
            fix = f"write {write} instead of '{self.key if plain else self.path}'"
            return _Problem(self.path, text, fix, tuple(n.path for n in found))
        if isinstance(self.given, Mapping) and self.given and self.given.keys() <= {*allowed}:
            fix = f"move {', '.join(self.given)} out of '{self.path}', one level up"
            return _Problem(self.path, f"{text}: its keys belong one level up", fix)
        inside = self.given.items() if isinstance(self.given, Mapping) else ()
        keys = [_Unknown(self.spec, f"{self.path}.", str(key), each) for key, each in inside]
        if fixes := [p for key in keys if (p := key.resolved(whole, sections)).meant]:
            meant = tuple(path for p in fixes for path in p.meant)
            return _Problem(self.path, text, "; ".join(p.fix for p in fixes), meant)
        for name, call in calls.items():
            fix = f"set {name.setting} in the configuration of {call}"
            return _Problem(self.path, f"{text}: {call} takes it", fix)
        return _Problem(self.path, f"{text};{listed}", f"remove '{self.path}'")

    def _near(self, names: list[_Name], cutoff: float) -> list[_Name]:
        near = nearest(self.key, (name.name for name in names), cutoff)
        return [name for name in names if name.name == near]

    def _named(self, names: Iterable[_Name]) -> list[_Name]:
        """Those of this name; keys before other libraries' names."""
        key = _fold(self.key)
        found = [name for name in names if key in (_fold(name.name), _fold(name.path))]
        first = {name.key: name for name in reversed(found)}  # a section may be there twice
        return [name for name in found if name.name == name.key] or list(first.values())[::-1]


@functools.cache
def _items(spec: type) -> dict[str, tuple[Any, bool]]:
    """For each key of a TypedDict its type, without qualifiers, and whether it is required.

    A dataclass will do, too: it requires no key.
    """
    items = {}
    required_keys: frozenset[str] = getattr(spec, "__required_keys__", frozenset())
    try:
        hints = get_type_hints(spec, include_extras=True)
    except NameError as error:
        raise BrokenPluginError(
            f"the types of {spec.__module__}.{spec.__qualname__} cannot be read: {error}",
            fix="its authors must import that name outside of TYPE_CHECKING",
        ) from error
    for key, declared in hints.items():
        if key.startswith("__"):
            continue
        # Postponed annotations hide NotRequired from __required_keys__, which then only knows
        # total=False; so the hint has the last word.
        hint, required = declared, key in required_keys
        while get_origin(hint) in (Required, NotRequired):
            required = get_origin(hint) is Required
            (hint,) = get_args(hint)
        items[key] = hint, required
    return items


def _check_dict(
    spec: type, value: Mapping[str, Any], path: str, problems: list[_Problem | _Unknown]
) -> dict[str, Any]:
    items = _items(spec)
    checked: dict[str, Any] = {}
    for key, given in value.items():
        if key in items:
            checked[key] = _check(items[key][0], given, f"{path}{key}", problems)
        else:
            problems.append(_Unknown(spec, path, str(key), given))
    for key, (hint, required) in items.items():
        if required and key not in value:
            text = f"the required key '{path}{key}' ({_describe(hint)}) is missing"
            problems.append(_Problem(f"{path}{key}", text, f"set '{path}{key}'"))
    return checked


def _mistyped(hint: Any, value: Any, at: str) -> _Problem:
    expected = _describe(hint)
    text, fix = f"'{at}' must be {expected}, got {_show(value)}", f"set '{at}' to {expected}"
    members = [_bare(member) for member in (hint, *get_args(_bare(hint)))]
    lists = [get_args(member)[0] for member in members if get_origin(member) is list]
    if isinstance(value, str) and get_origin(members[0]) is Literal:
        if near := nearest(value, map(str, members[1:])):
            fix = f"set '{at}' to {near!r}"
    elif any(_is_instance(m, value) for each in lists for m in (each, *get_args(each))):
        fix = f"set '{at}' to {[value]!r}"
    elif value == "None" and types.NoneType in members:
        fix = f"YAML reads None as text: set '{at}' to null"
    elif isinstance(value, str):
        number, written = _number(value)
        if number is not None and any(_is_instance(member, number) for member in members):
            fix = f"write {written} without quotes"
            if written != value:
                fix = f"YAML reads {value} as text: write {written}"
    return _Problem(at, text, fix)


def _number(text: str) -> tuple[float | None, str]:
    """The number that a text would be without quotes, and how YAML wants it."""
    mantissa, _, exponent = text.lower().partition("e")
    try:
        if text.lower() in ("true", "false"):
            return text.lower() == "true", text.lower()
        if mantissa == text:
            return (float(text) if "." in text else int(text)), text
        point = "" if "." in mantissa else ".0"
        return float(text), f"{mantissa}{point}e{int(exponent):+d}"
    except ValueError:
        return None, text


def _check(hint: Any, value: Any, at: str, problems: list[_Problem | _Unknown]) -> Any:
    """Returns the checked copy of ``value``; what is wrong with it is added to ``problems``."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        before, checked = len(problems), _check(args[0], value, at, problems)
        numeric = isinstance(checked, int | float)
        for bound in args[1:] if len(problems) == before else ():
            if isinstance(bound, Unsupported) and checked is not None:
                text = f"'{at}' is {_show(value)}, and {bound.why}"
                problems.append(_Problem(at, text, bound.fix))
            elif isinstance(bound, Range) and numeric and checked not in bound:
                fix = bound.fix or f"set '{at}' to a value {bound}"
                problems.append(_Problem(at, f"'{at}' must be {bound}, got {_show(value)}", fix))
        return checked
    if origin in (Union, types.UnionType):
        return _check_union(hint, args, value, at, problems)
    if is_typeddict(hint) and isinstance(value, Mapping):
        return _check_dict(hint, value, f"{at}.", problems)
    is_sequence = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if origin in (list, tuple, Sequence) and is_sequence:
        hints = args if origin is tuple and args[-1] is not Ellipsis else [args[0]] * len(value)
        if len(value) != len(hints):
            text = f"'{at}' must have {len(hints)} entries, got {len(value)}"
            problems.append(_Problem(at, text, f"give '{at}' {len(hints)} entries"))
            return value
        entries = enumerate(zip(hints, value, strict=True))
        checked = [_check(each, entry, f"{at}[{i}]", problems) for i, (each, entry) in entries]
        return tuple(checked) if origin is tuple else checked
    if origin in (dict, Mapping) and isinstance(value, Mapping):
        key_hint, value_hint = args
        return {
            _check(key_hint, k, f"{at}.{k}", problems): _check(value_hint, v, f"{at}.{k}", problems)
            for k, v in value.items()
        }
    plain = value if _is_instance(hint, value) else _plain(value)
    if not _is_instance(hint, plain):
        problems.append(_mistyped(hint, value, at))
    return plain


def _plain(value: Any) -> Any:
    """A path or a dtype of torch as a string, a scalar of numpy or torch as a number."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if type(value).__module__.split(".")[0] == "torch" and not hasattr(value, "item"):
        return str(value).removeprefix("torch.")
    return value.item() if hasattr(value, "item") and not getattr(value, "shape", (1,)) else value


def _check_union(
    hint: Any, members: Sequence[Any], value: Any, at: str, problems: list[_Problem | _Unknown]
) -> Any:
    attempts = []
    for member in members:
        found: list[_Problem | _Unknown] = []
        checked = _check(member, value, at, found)
        if not found:
            return checked
        attempts.append(found)
    # A member of the value's own shape (a nested dict, a list) knows best what is wrong inside.
    inside = [found for found in attempts if any(p.path != at for p in found)]
    bounded = [f for m, f in zip(members, attempts, strict=True) if _is_instance(_bare(m), value)]
    problems.extend((inside or bounded or [[_mistyped(hint, value, at)]])[0])
    return value


def _is_instance(hint: Any, value: Any) -> bool:
    """Whether the value is of a type without parts; False for one that has parts."""
    if hint is Any or hint is object:
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    if get_origin(hint) is Literal:
        return any(value == option and type(value) is type(option) for option in get_args(hint))
    if is_typeddict(hint) or not isinstance(hint, type) or get_origin(hint) is not None:
        return False
    number = not isinstance(value, bool) if hint in (int, float) else True
    return number and isinstance(value, int | float if hint is float else hint)


def _bare(hint: Any) -> Any:
    return _bare(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def _describe(hint: Any) -> str:
    """A type as a user reads it: ``int, list[int] or None``."""
    hint, origin, args = _bare(hint), get_origin(_bare(hint)), get_args(_bare(hint))
    if hint is None or hint is types.NoneType:
        return "None"
    if origin is Literal:
        return _alternatives([repr(option) for option in args])
    if origin in (Union, types.UnionType):
        return _alternatives([_describe(member) for member in args])
    if isinstance(hint, enum.EnumType):
        return _alternatives([f"{hint.__name__}.{name}" for name in hint.__members__])
    if is_typeddict(hint):
        return f"a dict ({', '.join(_items(hint))})"
    if args:
        inside = ", ".join("..." if arg is Ellipsis else _describe(arg) for arg in args)
        return f"{getattr(origin, '__name__', origin)}[{inside}]"
    return str(getattr(hint, "__name__", hint))


def _alternatives(words: Sequence[str]) -> str:
    *head, last = words
    return f"{', '.join(head)} or {last}" if head else last


_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


def _show(value: Any) -> str:
    return "None" if value is None else f"{_repr.repr(value)} ({type(value).__name__})"
