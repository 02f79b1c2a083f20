"""What the fields of a config Struct say, and values of them: types, ranges, choices, spellings.

Knows no particular option. A field may name other spellings of its values, a short flag and other
names of itself, in `Meta(extra={"same": {"float": "float32"}, "short": "-tp", "also": ("tp",)})`;
its "advice" is what to do instead of giving another choice. Invariant: what `parse` returns has the
field's type and lies in its range.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from .errors import ConfigError
from .plain import plain

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_IN_THOUSANDS = re.compile(r"(\d+)(?:\.(\d+))?([kKmMgG])")
_POWERS = {"k": 1, "m": 2, "g": 3}


class Field(NamedTuple):
    """One option, wherever it is set."""

    name: str  # max_num_seqs
    hint: Any  # the field's type with its ranges
    type: Any  # the same without them; of one that may be None, the other
    default: Any
    help: str
    same: Mapping[str, Any]  # other spellings of a value
    short: str  # -tp
    advice: str  # what to do instead of giving another choice
    also: tuple[str, ...]  # its other names: kv_offloading_size

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @property
    def flags(self) -> list[str]:
        """All that set it, the short one first."""
        return [*filter(None, (self.short,)), self.flag, *map(flag_of, self.also)]

    @property
    def variable(self) -> str:
        return variable_of(self.name)

    @property
    def key(self) -> str:
        """Its name in a file."""
        return self.name.replace("_", "-")

    @property
    def both_names(self) -> str:
        """For messages to people who may have set it in Python or by a flag."""
        return f"{self.name} ({self.flag})"

    @property
    def counts_bytes(self) -> bool:
        return self.type is int and self.name.endswith("_bytes")

    @property
    def choices(self) -> tuple[str, ...]:
        is_literal = typing.get_origin(self.type) is Literal
        return typing.get_args(self.type) if is_literal else ()

    @property
    def bounds(self) -> str:
        """What a number has to be: ">= 0 and <= 65535"."""
        metas = getattr(self.hint, "__metadata__", ())
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        return " and ".join(
            f"{sign} {bound}"
            for meta in metas
            for name, sign in signs.items()
            if (bound := getattr(meta, name)) is not None
        )

    @property
    def repeats(self) -> bool:
        return typing.get_origin(self.type) is tuple

    @property
    def item(self) -> Field:
        """The same option with one of its values."""
        (hint, *_) = typing.get_args(self.type)
        return self._replace(hint=hint, type=_without_ranges(hint))

    def parse(self, value: Any, source: str, *, text: bool = False) -> Any:
        """The value that was meant, of the field's type. Where all values are `text`, "8" is a
        number. ConfigError names the source."""
        given = value = plain(value)
        if self.repeats:
            listed = value if isinstance(value, list | tuple) else [value]
            values = [one for word in listed for one in _listed(word, text=text)]
            return tuple(self.item.parse(one, source, text=text) for one in values)
        if isinstance(value, str | int) and not isinstance(value, bool):
            value = self.same.get(str(value), value)
        if isinstance(value, str):
            value = self._read(value, text=text)
        elif isinstance(value, os.PathLike):
            value = os.fspath(value)
        try:
            return msgspec.convert(value, self.hint, strict=not text)
        except msgspec.ValidationError:
            advice = f"; {self.advice}" if self.advice else ""
            raise ConfigError(
                f"{source}: expected {self._expected()}, got {given!r}{advice}"
            ) from None

    def _read(self, value: str, *, text: bool) -> Any:
        """A value of the field's type, if that is what the words say."""
        if self.type is bool and text:
            truth = truth_of(value)
            return value if truth is None else truth
        if self.type is int and (matched := _IN_THOUSANDS.fullmatch(value)):
            whole, fraction, unit = matched.groups()
            base = 1000 if unit.islower() else 1024
            if fraction is None or unit.islower() or self.counts_bytes:
                return round(float(f"{whole}.{fraction or 0}") * base ** _POWERS[unit.lower()])
        if self.type in (int, float) and text:  # ".9" and "+3" too
            with contextlib.suppress(ValueError):
                return self.type(value)
        return value

    def _expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.counts_bytes:
            return f"bytes {self.bounds}, as 8G or 0.5G"
        kinds: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false"}
        return f"{kinds.get(self.type, 'text')} {self.bounds}".strip()


def flag_of(name: str) -> str:
    """The flag of an option."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of an option."""
    return "STREAMKV_" + name.upper()


@functools.cache
def fields_of(config_type: type[msgspec.Struct]) -> tuple[Field, ...]:
    """The options of a config Struct, in the order of its fields."""
    hints = typing.get_type_hints(config_type, include_extras=True)
    return tuple(_field(one, hints[one.name]) for one in msgspec.structs.fields(config_type))


def by_all_names(config_type: type[msgspec.Struct]) -> dict[str, Field]:
    """The options of a config Struct by their names, the other ones included."""
    return {name: field for field in fields_of(config_type) for name in (field.name, *field.also)}


def check_fields(config: msgspec.Struct) -> None:
    """Give every field the value that was meant. To be called when the Struct is constructed.
    ConfigError names the field and its flag."""
    for field in fields_of(type(config)):
        given = getattr(config, field.name)
        if given is not field.default:
            meant = field.parse(given, field.both_names)
            msgspec.structs.force_setattr(config, field.name, meant)


def truth_of(word: str) -> bool | None:
    """What a word for true or false means; None: it isn't one."""
    if word.lower() in _TRUE + _FALSE:
        return word.lower() in _TRUE
    return None


def guess(name: str, known: Iterable[str]) -> str:
    """ "did you mean NAME?", or nothing where none is near."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f"did you mean {near[0]}?" if near else ""


def _field(field: msgspec.structs.FieldInfo, hint: Any) -> Field:
    metas: list[Meta] = []
    if typing.get_origin(hint) is typing.Annotated:
        _, *metas = typing.get_args(hint)
    extra = {key: value for meta in metas for key, value in (meta.extra or {}).items()}
    return Field(
        name=field.name,
        hint=hint,
        type=_without_ranges(hint),
        default=field.default,
        help="".join(meta.description or "" for meta in metas),
        same=extra.get("same", {}),
        short=extra.get("short", ""),
        advice=extra.get("advice", ""),
        also=extra.get("also", ()),
    )


def _listed(word: Any, *, text: bool) -> Sequence[Any]:
    """The values that one word stands for: a list in JSON, or itself."""
    if text and isinstance(word, str) and word.startswith("["):
        try:
            return msgspec.json.decode(word, type=list[str])
        except msgspec.DecodeError:
            pass
    return [word]


def _without_ranges(hint: Any) -> Any:
    """The type itself; of one that may be None, the other."""
    hint = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint
    (first, *others) = typing.get_args(hint) or (hint,)
    return first if others == [type(None)] else hint
