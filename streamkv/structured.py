"""StructuredOutputs: which texts an answer may be, as a client asks for it.

Owns its fields and what makes no sense together. It must not know grammars: whether a schema can
be followed says who compiles it. Invariant: one that was constructed names exactly one kind, and is
bounded and hashable: what came as a dict is kept as the JSON text it makes. Standard library and
msgspec only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .checks import few, truth
from .errors import InvalidRequestError

MAX_GRAMMAR_CHARS = 1 << 17  # of a schema, regex or grammar, and of all choices together
MAX_GRAMMAR_CHOICES = 4096
MAX_PATTERN_CHARS = 256  # of whitespace_pattern

_NAME = "structured_outputs"
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag", "lark")


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """What the answer is to match: exactly one of the kinds. Names are vLLM's.

    A schema or structural tag is a dict, JSON text or msgspec.Raw; also a class of pydantic's.
    Raises InvalidRequestError whose `param` is structured_outputs, or a field of it:
    structured_outputs.regex.
    """

    json: Any = None  # a JSON schema
    regex: str | None = None  # of the whole answer
    choice: Sequence[str] | None = None  # one of these texts
    grammar: str | None = None  # Lark or GBNF
    json_object: bool | None = None  # any JSON object
    structural_tag: Any = None  # text in which tags begin what follows a schema each
    lark: str | None = None  # Lark as llguidance reads it, nothing translated

    # Of the kinds with JSON:
    disable_any_whitespace: bool = False  # compact: none between its parts
    disable_additional_properties: bool = False  # where a schema doesn't say that it wants some
    whitespace_pattern: str | None = None  # a regex: what may stand between the parts

    # Ours: Lark of llguidance's in which @answer stands for what the kind says.
    frame: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise _wrong("", f"exactly one of {', '.join(_KINDS)}", ", ".join(given) or "none")
        set_field = msgspec.structs.force_setattr
        for name in ("json", "structural_tag"):
            set_field(self, name, _json_text(name, getattr(self, name)))
        for name in ("regex", "grammar", "lark", "frame", "whitespace_pattern"):
            if (text := getattr(self, name)) is not None:
                limit = MAX_PATTERN_CHARS if name == "whitespace_pattern" else MAX_GRAMMAR_CHARS
                _check_text(name, text, limit)
        if self.choice is not None:
            set_field(self, "choice", _choices(self.choice))
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            set_field(self, name, truth(f"{_NAME}.{name}", getattr(self, name)))

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))


def _wrong(field: str, expected: str, got: str) -> InvalidRequestError:
    path = f"{_NAME}.{field}" if field else _NAME
    return InvalidRequestError(
        f"{path}: expected {expected}, got {got}", param=path.partition("[")[0]
    )


def _check_text(name: str, text: Any, limit: int) -> None:
    if not isinstance(text, str) or not text:
        got = repr(text) if isinstance(text, str) else type(text).__name__
        raise _wrong(name, "text that isn't empty", got)
    if len(text) > limit:
        raise _wrong(name, f"at most {limit} characters", str(len(text)))
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise _wrong(name, "Unicode", f"a lone surrogate at character {exc.start}") from None


def _json_text(name: str, value: Any) -> str | None:
    """The value as JSON text. Whether a text is JSON is looked at when it is compiled."""
    make_schema = getattr(value, "model_json_schema", None)  # a class of pydantic's
    if make_schema is not None:
        value = make_schema()
    if isinstance(value, msgspec.Raw):
        value = bytes(value).decode(errors="replace")
    if isinstance(value, Mapping | bool):
        try:
            value = msgspec.json.encode(value).decode()
        except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as exc:
            raise _wrong(name, "JSON", f"{exc!s:.100}") from None
    if value is not None:
        _check_text(name, value, MAX_GRAMMAR_CHARS)
    assert value is None or isinstance(value, str)
    return value


def _choices(items: Any) -> tuple[str, ...]:
    choices = few(f"{_NAME}.choice", items, MAX_GRAMMAR_CHOICES, "choices")
    if not choices:
        raise _wrong("choice", "at least one text", "an empty list")
    for place, text in enumerate(choices):
        _check_text(f"choice[{place}]", text, MAX_GRAMMAR_CHARS)
    num_chars = sum(map(len, choices))
    if num_chars > MAX_GRAMMAR_CHARS:
        raise _wrong("choice", f"at most {MAX_GRAMMAR_CHARS} characters in all", str(num_chars))
    return choices


class GuidedDecodingParams(StructuredOutputs, frozen=True, kw_only=True):
    """The same under vLLM's older name, with what it asked of backends: there is one here."""

    backend: str | None = None
    backend_was_auto: bool = False
    disable_fallback: bool = False

    @classmethod
    def from_optional(cls, **fields: Any) -> GuidedDecodingParams | None:
        """None if nothing is given."""
        given = {name: value for name, value in fields.items() if value is not None}
        return cls(**given) if any(name in given for name in _KINDS) else None


def read_structured_outputs(name: str, given: Any) -> StructuredOutputs | None:
    """What was given for that parameter: one of these, a dict of its fields, or None."""
    if given is None or isinstance(given, StructuredOutputs):
        return given
    fields = StructuredOutputs.__struct_fields__
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f"{name}: expected StructuredOutputs, got {type(given).__name__}", param=name
        )
    unknown = [str(key) for key in given if key not in fields]
    if unknown:
        raise InvalidRequestError(
            f"{name}: expected fields of {', '.join(fields)}, got {', '.join(unknown):.100}",
            param=name,
        )
    kept = {key: value for key, value in given.items() if value is not None}
    return StructuredOutputs(**kept) if kept else None
