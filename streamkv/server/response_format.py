"""Which texts an answer may be, as clients say it: `response_format`, `structured_outputs` and
vLLM's older `guided_*`.

Owns these fields and how they become StructuredOutputs. Knows no grammar: whether a schema can be
followed says the engine, when the request is admitted. Invariants: a schema is never decoded here;
it is handed on as the JSON that the client sent; what several fields say is the same, or an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from ..errors import InvalidRequestError
from ..sampling import StructuredOutputs
from .bounds import at_most
from .request_fields import GenerationFields
from .wire import decode_body, renaming_fields

T = TypeVar("T")

NULL = msgspec.Raw(b"null")  # what a field is that may be anything and isn't there
_ANY_OBJECT = msgspec.Raw(b'{"type":"object"}')
MAX_STRUCTURE_BYTES = 1 << 20  # of one field's JSON
_WITH_JSON = ("json", "json_object", "structural_tag")

AnyJson: TypeAlias = Annotated[msgspec.Raw, at_most(MAX_STRUCTURE_BYTES)]
Choices: TypeAlias = Annotated[list[str], at_most(MAX_STRUCTURE_BYTES)]


class Structure(NamedTuple):
    """What an answer is to match, and the client's field that says so."""

    outputs: StructuredOutputs
    field: str


def agreed(found: Sequence[Structure]) -> Structure | None:
    """The first of what several fields say; None of none. InvalidRequestError for one that says
    something else."""
    for other in found[1:]:
        if other.outputs != found[0].outputs:
            raise InvalidRequestError(
                f"{other.field}: expected nothing else beside {found[0].field}, which says already "
                "what the answer is to match; leave one out",
                param=other.field,
            )
    return found[0] if found else None


class _JsonSchema(msgspec.Struct):
    """OpenAI's. With or without `strict`, the answer matches the schema."""

    schema: msgspec.Raw = NULL
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: _JsonSchema | None = None
    schema: msgspec.Raw = NULL  # llama.cpp's, beside json_object or in json_schema's place


class _StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's, and `lark`, a grammar as llguidance reads it."""

    json: msgspec.Raw = NULL
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: msgspec.Raw = NULL
    lark: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # of vLLM's: there is one backend here
    whitespace_pattern: str | None = None


class StructureFields(GenerationFields, kw_only=True):
    """Fields of a request that say what the answer is to match: the same, where several do."""

    response_format: AnyJson = NULL
    structured_outputs: AnyJson = NULL
    guided_json: AnyJson = NULL
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None  # a hint: there is one backend here

    def structure(self) -> Structure | None:
        """What they say; None where the answer is free. InvalidRequestError."""
        found = [
            Structure(outputs, field)
            for field, outputs in (
                ("response_format", _of_response_format(self.response_format)),
                ("structured_outputs", _of_structured_outputs(self.structured_outputs)),
                *self._guided(),
            )
            if outputs is not None
        ]
        return agreed(found)

    def _guided(self) -> list[tuple[str, StructuredOutputs]]:
        given: list[tuple[str, str, Any]] = [
            ("guided_json", "json", _json_value(self.guided_json)),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "grammar", self.guided_grammar),
            ("guided_json_object", "json_object", self.guided_json_object or None),
        ]
        pattern = "whitespace_pattern"
        return [
            (
                field,
                _structured(
                    {kind: value, pattern: self.guided_whitespace_pattern},
                    {kind: field, pattern: f"guided_{pattern}"},
                ),
            )
            for field, kind, value in given
            if value is not None
        ]


def _decode(raw: msgspec.Raw, decoder: msgspec.json.Decoder[T], field: str) -> T:
    """The field's JSON as a Struct. InvalidRequestError names what of it is wrong."""
    try:
        return decode_body(bytes(raw), decoder)
    except InvalidRequestError as exc:
        param = field if exc.param is None else f"{field}.{exc.param}"
        reason = exc.message.partition(": ")[2]
        raise InvalidRequestError(f"{param}: {reason}", param=param) from None


_response_format_decoder = msgspec.json.Decoder(_ResponseFormat)
_structured_outputs_decoder = msgspec.json.Decoder(_StructuredOutputs)


def _of_response_format(raw: msgspec.Raw) -> StructuredOutputs | None:
    if raw == NULL:
        return None
    name = "response_format"
    given = _decode(raw, _response_format_decoder, name)
    match given.type:
        case "text":
            _expect_alone(given, "json_schema", "schema")
            return None
        case "json_object":
            _expect_alone(given, "json_schema")
            if given.schema == NULL:
                return _structured({"json_object": True})
            return _of_schema(given.schema, f"{name}.schema")
        case "json_schema" if given.json_schema is not None:
            _expect_alone(given, "schema")
            schema = given.json_schema.schema
            return _of_schema(
                _ANY_OBJECT if schema == NULL else schema, f"{name}.json_schema.schema"
            )
        case "json_schema" if given.schema != NULL:
            return _of_schema(given.schema, f"{name}.schema")
        case "json_schema":
            raise InvalidRequestError(
                f"{name}.json_schema: required field is missing", param=f"{name}.json_schema"
            )
        case "structural_tag":
            return _structured({"structural_tag": _json_value(raw)}, {"structural_tag": name})
    raise InvalidRequestError(
        f"{name}.type: expected text, json_object, json_schema or structural_tag, got "
        f"{given.type!r:.100}",
        param=f"{name}.type",
    )


def _expect_alone(given: _ResponseFormat, *others: str) -> None:
    """InvalidRequestError for a schema in a field that the type doesn't read."""
    for other in others:
        if getattr(given, other) not in (None, NULL):
            param = f"response_format.{other}"
            raise InvalidRequestError(
                f"{param}: expected none with the type {given.type!r}, which doesn't read it; "
                "send the type json_schema, or leave it out",
                param=param,
            )


def _of_structured_outputs(raw: msgspec.Raw) -> StructuredOutputs | None:
    if raw == NULL:
        return None
    given = _decode(raw, _structured_outputs_decoder, "structured_outputs")
    fields = msgspec.structs.asdict(given)
    del fields["disable_fallback"]
    fields |= {name: _json_value(fields[name]) for name in ("json", "structural_tag")}
    return _structured(fields)


def _of_schema(schema: msgspec.Raw, field: str) -> StructuredOutputs:
    return _structured({"json": _json_value(schema)}, {"json": field})


def _structured(
    fields: Mapping[str, Any], names: Mapping[str, str] = MappingProxyType({})
) -> StructuredOutputs:
    """Of the engine's fields. Its errors name the client's, which are called so by `names`."""
    given = {name: value for name, value in fields.items() if value is not None}
    with renaming_fields({f"structured_outputs.{name}": field for name, field in names.items()}):
        if "whitespace_pattern" in given and given.keys().isdisjoint(_WITH_JSON):
            param = "structured_outputs.whitespace_pattern"
            raise InvalidRequestError(
                f"{param}: expected none without JSON or a schema, since it says what may stand "
                "between the parts of JSON; leave it out",
                param=param,
            )
        return StructuredOutputs(**given)


def _json_value(raw: msgspec.Raw) -> str | msgspec.Raw | None:
    """A schema as JSON text: the client's JSON, or the text in the string that it sent."""
    if raw == NULL:
        return None
    if bytes(memoryview(raw)[:1]) == b'"':
        return msgspec.json.decode(raw, type=str)
    return raw
