"""StructuredOutputs as a grammar of llguidance's, in its text form.

Owns what each kind becomes, and which of the library's options are chosen. It must not know tokens
but by name. Invariant: what a client sends can't change the options; a keyword of a schema that
isn't followed is an error, when the grammar is compiled.

Runs where time and memory are bounded (`grammar_checker.py`): nothing here is, by itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from decimal import Decimal
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher, gbnf_to_lark

from ..structured import StructuredOutputs
from .json_schema import prepare
from .structural_tags import structural_tag_lark

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

# Between the parts of JSON: a space, or up to two line breaks and indentation. A weak model that
# likes spaces best must come to something else.
WHITESPACE = r"( |\r?\n(\r?\n)?[ \t]{0,40})?"


class GrammarError(Exception):
    """What was sent is no grammar; the message says why."""


def grammar_source(structured: StructuredOutputs, special_tokens: Collection[str]) -> str:
    """GrammarError. What else is wrong with it is found when it is compiled."""
    try:
        source = _source(structured, special_tokens)
        return source if structured.frame is None else _framed(source, structured.frame)
    except msgspec.DecodeError as exc:
        raise GrammarError(f"it is no JSON: {exc}") from None
    except RecursionError:
        raise GrammarError("it is nested too deeply") from None
    except KeyError as exc:
        raise GrammarError(f"expected a field {exc}, got none") from None
    except Exception as exc:  # whatever the library makes of what was sent
        raise GrammarError(str(exc)) from None


def _source(structured: StructuredOutputs, special_tokens: Collection[str]) -> str:
    options = _json_options(structured)
    match structured.kind:
        case "json_object":
            return _json('{"type":"object"}', options)
        case "json":
            schema = structured.json
            if structured.disable_additional_properties:
                schema = _without_additional_properties(schema)
            return _json(schema, options)
        case "regex":
            return str(LLMatcher.grammar_from_regex(structured.regex or ""))
        case "choice":
            choices = map(re_literal, structured.choice or ())
            return str(LLMatcher.grammar_from_regex("|".join(choices)))
        case "grammar":
            return str(LLMatcher.grammar_from_lark(_lark(structured.grammar or "")))
        case "structural_tag":
            tag = msgspec.json.decode(structured.structural_tag)
            return str(
                LLMatcher.grammar_from_lark(structural_tag_lark(tag, special_tokens, options))
            )
    return str(LLMatcher.grammar_from_lark(structured.lark or ""))


def _lark(grammar: str) -> str:
    """GBNF defines by `::=`, Lark by a colon."""
    return gbnf_to_lark.gbnf_to_lark(grammar) if _GBNF_RULE.search(grammar) else grammar


_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def _framed(source: str, frame: str) -> str:
    """A grammar in which @answer is that one."""
    if not source.lstrip().startswith("{"):  # Lark as it is
        source = str(msgspec.json.encode({"grammars": [{"lark_grammar": source}]}), "utf-8")
    answer, *others = msgspec.json.decode(source)["grammars"]
    grammars = [{"lark_grammar": frame}, {**answer, "name": "answer"}, *others]
    return msgspec.json.encode({"grammars": grammars}).decode()


def re_literal(text: str) -> str:
    """A regex for just this text."""
    return re.sub(r"[^0-9A-Za-z_ ]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def _json_options(structured: StructuredOutputs) -> JsonCompileOptions:
    """All there are, so that the schema's own (x-guidance) count for nothing."""
    whitespace = structured.whitespace_pattern or WHITESPACE
    return {
        "item_separator": ",",
        "key_separator": ":",
        "whitespace_flexible": False,
        "whitespace_pattern": "" if structured.disable_any_whitespace else whitespace,
        "coerce_one_of": False,
        "lenient": False,
    }


def _json(schema: str, options: JsonCompileOptions) -> str:
    if schema.strip() == "true":
        schema = "{}"
    source = str(LLMatcher.grammar_from_json_schema(schema, overrides=options))
    decoded = _decode(schema)  # JSON, now that the library has read it
    if not prepare(decoded):
        return source
    return str(LLMatcher.grammar_from_json_schema(_encode(decoded).decode(), overrides=options))


_decode = msgspec.json.Decoder(float_hook=Decimal).decode
_encode = msgspec.json.Encoder(decimal_format="number").encode


def _without_additional_properties(schema: str) -> str:
    """Objects whose schema names properties have no others, unless it says so."""
    root = msgspec.json.decode(schema)
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if isinstance(one.get("properties"), dict):
                one.setdefault("additionalProperties", False)
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return msgspec.json.encode(root).decode()
