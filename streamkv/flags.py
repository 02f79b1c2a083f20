"""Options on the command line, in the environment and in a file, made from the config Structs.

Owns how a field (`max_num_seqs`) is set in each place: `--max-num-seqs`, `STREAMKV_MAX_NUM_SEQS`,
`max-num-seqs = 8`; knows no particular option. A flag beats the environment, the environment beats
the file, the file beats the default.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from .config_file import ConfigFile
from .fields import Field, fields_of, flag_of, truth_of

Config = TypeVar("Config", bound=msgspec.Struct)


class Trailing(NamedTuple):
    """A command's own word (MODEL) that stood after a flag that takes several values."""

    word: str
    dest: str  # of a flag that takes any words: where they are stored, as it may be one; or ""


class TakeSeveral(argparse.Action):
    """`--flag 1 8 32`, and again: `--flag 64`. A last word that isn't a value is the operand, and
    so is one that may be a value, until the operand turns out to stand elsewhere."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        self._field: Field | None = kwargs.pop("field")  # None: of any words
        self._operand: str | None = kwargs.pop("operand")
        super().__init__(option_strings, dest, nargs="+", **kwargs)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        words = list(values or ())
        if self._operand is not None and len(words) > 1 and not hasattr(namespace, self._operand):
            one = self._field.item if self._field is not None else None
            if one is None or not _may_be(one, words[-1]):
                takes_any = one is None or not (one.choices or is_number(one))
                trailing = Trailing(words.pop(), self.dest if takes_any else "")
                setattr(namespace, self._operand, trailing)
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *words])


def _may_be(field: Field, word: str) -> bool:
    return word in field.choices or (is_number(field) and _reads_as_number(word))


def is_number(field: Field) -> bool:
    return field.type in (int, float)


def _reads_as_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def add_flags(
    parser: argparse.ArgumentParser,
    config_type: type[msgspec.Struct],
    *,
    operand: str | None = None,
    only: Container[str] | None = None,
) -> None:
    """Add the options of the Struct, those of the fields in `only` or all; unset ones stay absent
    from the parsed namespace. Values are checked when the Struct is built. What stands after
    several values and is none of them is stored as `operand`."""
    group = parser.add_argument_group(_group_title(config_type))
    for field in fields_of(config_type):
        if only is not None and field.name not in only:
            continue
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        options["help"] = _help(field)
        if field.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = _metavar(field)
            if field.repeats and (is_number(field.item) or operand is not None):
                options |= {"action": TakeSeveral, "field": field, "operand": operand}
            elif field.repeats:
                options["action"] = "append"
        group.add_argument(*field.flags, **options)


def add_hidden_flags(
    parser: argparse.ArgumentParser,
    kinds: Mapping[str, Literal["switch", "value", "list"]],
    shorts: Mapping[str, str],
    operand: str,
) -> None:
    """Add options that `--help` doesn't show, by name; what they are given is left as it is."""
    for name, kind in kinds.items():
        flags = [shorts[name]] if name in shorts else []
        options: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": argparse.SUPPRESS,
        }
        if kind == "switch":
            options["action"] = argparse.BooleanOptionalAction
        elif kind == "list":
            options |= {"action": TakeSeveral, "field": None, "operand": operand}
        parser.add_argument(*flags, flag_of(name), **options)


def with_bare_switches(
    arguments: Sequence[str], actions: Iterable[argparse.Action], *, alone_too: bool
) -> list[str]:
    """--flag=true as --flag and --flag=false as --no-flag, for those of the actions that are on or
    off; and --flag true, if such a word may stand alone."""
    opposites = {
        name: next(other for other in action.option_strings if _is_no(other) != _is_no(name))
        for action in actions
        if isinstance(action, argparse.BooleanOptionalAction)
        for name in action.option_strings
    }
    bare: list[str] = []
    for place, word in enumerate(arguments):
        if word == "--":
            return [*bare, *arguments[place:]]
        flag, _, value = word.partition("=")
        if alone_too and place and arguments[place - 1] in opposites and truth_of(word) is not None:
            flag, value = bare.pop(), word
        truth = truth_of(value) if flag in opposites else None
        bare.append(word if truth is None else flag if truth else opposites[flag])
    return bare


def _is_no(flag: str) -> bool:
    return flag.startswith("--no-")


def with_dashes(arguments: Sequence[str]) -> list[str]:
    """--max_num_seqs=8 as --max-num-seqs=8."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*map(_with_dashes, arguments[:end]), *arguments[end:]]


def _with_dashes(argument: str) -> str:
    if not argument.startswith("--"):
        return argument
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value


def _group_title(config_type: type[msgspec.Struct]) -> str:
    return config_type.__name__.removesuffix("Config").lower()


def _metavar(field: Field) -> str:
    one = field.item if field.repeats else field
    if one.choices:
        return "{" + ",".join(one.choices) + "}"
    return {int: "N", float: "X"}.get(one.type, field.name.split("_")[-1].upper())


def _help(field: Field) -> str:
    default = shown_default(field)
    text = f"{field.help} (default: {default})" if default else field.help
    return text.strip().replace("%", "%%")


def shown_default(field: Field) -> str:
    """The default in words, "" where the help says what it means."""
    if field.type is bool:
        return "on" if field.default else ""
    if field.repeats:
        return " ".join(map(str, field.default))
    return "" if field.default in ("", 0, None) else str(field.default)


def build_config(
    config_type: type[Config],
    given: Mapping[str, Any],
    environ: Mapping[str, str],
    file: ConfigFile | None = None,
) -> Config:
    """The Struct from parsed flags, environment and file. ConfigError names the source."""
    in_file = file.values if file is not None else {}
    values: dict[str, Any] = {}
    for field in fields_of(config_type):
        if field.name in given:
            values[field.name] = field.parse(given[field.name], field.flag, text=True)
        elif raw := environ.get(field.variable):
            words = re.split(r" *, *", raw) if field.repeats and not raw.startswith("[") else raw
            values[field.name] = field.parse(words, field.variable, text=True)
        elif field.name in in_file:
            values[field.name] = in_file[field.name]
    return config_type(**values)
