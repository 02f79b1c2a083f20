"""Command-line flags and environment names, made from the fields of the config Structs.

Owns the mapping between a field (`max_num_seqs`), its flag (`--max-num-seqs`), its environment
name (`STREAMKV_MAX_NUM_SEQS`) and its help text; knows no particular option. A flag beats the
environment, the environment beats the default.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from .errors import ConfigError

Config = TypeVar("Config", bound=msgspec.Struct)

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


class Flag(NamedTuple):
    """One option, wherever it is set."""

    field: str
    name: str  # --max-num-seqs
    env: str  # STREAMKV_MAX_NUM_SEQS
    hint: Any  # the field's type with its ranges
    type: Any  # the same without them
    default: Any
    help: str

    @property
    def choices(self) -> tuple[str, ...]:
        is_literal = typing.get_origin(self.type) is Literal
        return typing.get_args(self.type) if is_literal else ()

    @property
    def repeats(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def item(self) -> Flag:
        """The same option with one of its values."""
        (hint, *_) = typing.get_args(self.type)
        return self._replace(hint=hint, type=_without_ranges(hint))

    @property
    def is_numbers(self) -> bool:
        """Takes several values at once. Words don't: they could be the command's own."""
        return self.repeats and self.item.type in (int, float)


class TakeNumbers(argparse.Action):
    """`--flag 1 8 32`, and again: `--flag 64`. Where the command has an operand (`bench throughput
    --concurrency 1 8 MODEL`), a word after the numbers is that; it is stored as `operand`."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        operand: str | None = kwargs.pop("operand")
        super().__init__(option_strings, dest, nargs="+", **kwargs)
        self._operand = operand

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        numbers = list(values or ())
        has_operand = self._operand is None or hasattr(namespace, self._operand)
        if not has_operand and len(numbers) > 1 and not _is_number(numbers[-1]):
            setattr(namespace, str(self._operand), numbers.pop())
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *numbers])


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def flags_of(config_type: type[msgspec.Struct]) -> list[Flag]:
    """The options of a config Struct, in the order of its fields."""
    hints = typing.get_type_hints(config_type, include_extras=True)
    return [_flag(field, hints[field.name]) for field in msgspec.structs.fields(config_type)]


def _without_ranges(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _flag(field: msgspec.structs.FieldInfo, hint: Any) -> Flag:
    description = ""
    if typing.get_origin(hint) is typing.Annotated:
        _, *metas = typing.get_args(hint)
        description = "".join(meta.description or "" for meta in metas)
    return Flag(
        field=field.name,
        name="--" + field.name.replace("_", "-"),
        env="STREAMKV_" + field.name.upper(),
        hint=hint,
        type=_without_ranges(hint),
        default=field.default,
        help=description,
    )


def add_flags(
    parser: argparse.ArgumentParser,
    config_type: type[msgspec.Struct],
    *,
    operand: str | None = None,
    only: Container[str] | None = None,
) -> None:
    """Add the options of the Struct, those of the fields in `only` or all; unset ones stay absent
    from the parsed namespace. A word after a list of numbers is stored as `operand`; None: it is
    refused."""
    group = parser.add_argument_group(_group_title(config_type))
    for flag in flags_of(config_type):
        if only is not None and flag.field not in only:
            continue
        options: dict[str, Any] = {"dest": flag.field, "default": argparse.SUPPRESS}
        options["help"] = _help(flag)
        if flag.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif flag.choices:
            options["choices"] = flag.choices
        else:
            options["metavar"] = _metavar(flag)
            if flag.is_numbers:
                options |= {"action": TakeNumbers, "operand": operand}
            elif flag.repeats:
                options["action"] = "append"
        group.add_argument(flag.name, **options)


def _group_title(config_type: type[msgspec.Struct]) -> str:
    return config_type.__name__.removesuffix("Config").lower()


def _metavar(flag: Flag) -> str:
    number = flag.item.type if flag.is_numbers else flag.type
    return {int: "N", float: "X"}.get(number, flag.field.split("_")[-1].upper())


def _help(flag: Flag) -> str:
    shown = flag.default not in ("", 0, ())
    default = ("on" if flag.default else "off") if flag.type is bool else flag.default
    if flag.repeats:
        default = " ".join(map(str, flag.default))
    text = f"{flag.help} (default: {default})" if shown else flag.help
    return text.strip().replace("%", "%%")


def build_config(
    config_type: type[Config], given: Mapping[str, Any], environ: Mapping[str, str]
) -> Config:
    """The Struct from parsed flags and environment. ConfigError names the flag or variable."""
    values: dict[str, Any] = {}
    for flag in flags_of(config_type):
        if flag.field in given:
            values[flag.field] = _parse(flag, given[flag.field], flag.name)
        elif environ.get(flag.env):
            raw = environ[flag.env]
            values[flag.field] = _parse(flag, raw.split(",") if flag.repeats else raw, flag.env)
    return config_type(**values)


def _parse(flag: Flag, value: Any, source: str) -> Any:
    if flag.type is bool and isinstance(value, str):
        if value.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{source}: expected true or false, got {value!r}")
        return value.lower() in _TRUE
    if flag.repeats:
        return tuple(_parse(flag.item, one, source) for one in value)
    try:
        return msgspec.convert(value, flag.hint, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: expected {_expected(flag, error)}, got {value!r}") from None


def _expected(flag: Flag, error: msgspec.ValidationError) -> str:
    if flag.choices:
        return "one of " + ", ".join(flag.choices)
    kind = {int: "a whole number", float: "a number"}.get(flag.type, flag.type.__name__)
    _, _, bound = str(error).partition("` ")  # "Expected `int` >= 1", or of a wrong type
    return f"{kind} {bound}" if bound[:1] in ("<", ">") else kind
