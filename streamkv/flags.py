"""Command-line flags and environment names, made from the fields of the config Structs.

Owns the mapping between a field (`max_num_seqs`), its flag (`--max-num-seqs`), its environment
name (`STREAMKV_MAX_NUM_SEQS`) and its help text; knows no particular option. A flag beats the
environment, the environment beats the default.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Mapping
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


def flags_of(config_type: type[msgspec.Struct]) -> list[Flag]:
    """The options of a config Struct, in the order of its fields."""
    hints = typing.get_type_hints(config_type, include_extras=True)
    return [_flag(field, hints[field.name]) for field in msgspec.structs.fields(config_type)]


def _flag(field: msgspec.structs.FieldInfo, hint: Any) -> Flag:
    plain_type, description = hint, ""
    if typing.get_origin(hint) is typing.Annotated:
        plain_type, *metas = typing.get_args(hint)
        description = "".join(meta.description or "" for meta in metas)
    return Flag(
        field=field.name,
        name="--" + field.name.replace("_", "-"),
        env="STREAMKV_" + field.name.upper(),
        hint=hint,
        type=plain_type,
        default=field.default,
        help=description,
    )


def add_flags(parser: argparse.ArgumentParser, config_type: type[msgspec.Struct]) -> None:
    """Add every option of the Struct; unset ones stay absent from the parsed namespace."""
    group = parser.add_argument_group(_group_title(config_type))
    for flag in flags_of(config_type):
        options: dict[str, Any] = {"dest": flag.field, "default": argparse.SUPPRESS}
        options["help"] = _help(flag)
        if flag.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif flag.choices:
            options["choices"] = flag.choices
        else:
            options["metavar"] = _metavar(flag)
            if flag.repeats:
                options["action"] = "append"
        group.add_argument(flag.name, **options)


def _group_title(config_type: type[msgspec.Struct]) -> str:
    return config_type.__name__.removesuffix("Config").lower()


def _metavar(flag: Flag) -> str:
    return {int: "N", float: "X"}.get(flag.type, flag.field.split("_")[-1].upper())


def _help(flag: Flag) -> str:
    shown = flag.default not in ("", 0, ())
    default = ("on" if flag.default else "off") if flag.type is bool else flag.default
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
