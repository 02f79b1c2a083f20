"""Structural tags as a Lark grammar of llguidance's: free text in which tags begin what must match.

Owns both forms that clients send: `structures` with `triggers`, and `format` with its parts. Knows
no tokens but the names of special ones. Invariant: a part that isn't known is an error that names
it; nothing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .json_schema import prepare

ANY_TEXT = "/(?s:.*)/"


def structural_tag_lark(
    tag: Any, special_tokens: Collection[str], json_options: Mapping[str, Any]
) -> str:
    """ValueError, KeyError and TypeError for what is none."""
    if not isinstance(tag, Mapping):
        raise ValueError("structural_tag: expected an object")
    writer = _Writer(special_tokens, json_options)
    if "format" in tag:
        writer.rules["start"] = writer.part(tag["format"])
    else:
        tags = [
            {"begin": one["begin"], "content": _schema(one), "end": one.get("end", "")}
            for one in tag["structures"]
        ]
        writer.rules["start"] = writer.triggered({"triggers": tag["triggers"], "tags": tags})
    rules = (f"{name}: {body}" for name, body in writer.rules.items())
    return "%llguidance {}\n" + "\n".join(rules) + "\n"


def _schema(structure: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": structure["schema"]}


class _Writer:
    """Collects rules; its methods return what stands for a part in a rule."""

    def __init__(self, special_tokens: Collection[str], json_options: Mapping[str, Any]) -> None:
        self.rules: dict[str, str] = {}
        self._special_tokens = special_tokens
        self._json_options = json_options
        self._parts: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
            "any_text": lambda part: ANY_TEXT,
            "const_string": lambda part: self._literal(part["value"]),
            "json_schema": self._json,
            "or": lambda part: self._choice(map(self.part, part["elements"])),
            "regex": lambda part: "/" + part["pattern"].replace("/", "\\/") + "/",
            "sequence": lambda part: self._group(" ".join(map(self.part, part["elements"]))),
            "tag": self._tag,
            "tags_with_separator": self._separated,
            "triggered_tags": self.triggered,
        }

    def part(self, part: Mapping[str, Any]) -> str:
        """Any of them."""
        kind = part["type"]
        if kind not in self._parts:
            raise ValueError(
                f"structural_tag: expected a format of {', '.join(self._parts)}, got {kind!r:.100}"
            )
        return self._rule(self._parts[kind](part))

    def triggered(self, part: Mapping[str, Any]) -> str:
        """Free text; a tag must follow a trigger that begins it."""
        triggers, tags = part["triggers"], part["tags"]
        if not tags or not triggers:
            raise ValueError("structural_tag: expected at least one tag and one trigger")
        begun: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            trigger = next((one for one in triggers if tag["begin"].startswith(one)), None)
            if not trigger:
                raise ValueError(
                    f"structural_tag: expected a trigger that begins {tag['begin']!r:.100}, got "
                    f"{', '.join(triggers):.100}"
                )
            begun[trigger].append(self._tag(tag, after=trigger))
        one = self._rule(
            self._choice(
                f"{self._up_to(trigger)} {self._choice(bodies)}"
                for trigger, bodies in begun.items()
                if bodies
            )
        )
        if part.get("stop_after_first"):
            return one if part.get("at_least_one") else f"({one} | {ANY_TEXT})"
        return f"{one}{'+' if part.get('at_least_one') else '*'} {ANY_TEXT}"

    def _up_to(self, trigger: str) -> str:
        """Text that ends with the trigger, which isn't in it before."""
        if trigger in self._special_tokens:
            return f"{ANY_TEXT} {self._literal(trigger)}"
        return self._rule(f"{ANY_TEXT} {self._literal(trigger)}", "[lazy]")

    def _separated(self, part: Mapping[str, Any]) -> str:
        one = self._rule(self._choice(map(self._tag, part["tags"])))
        if part.get("stop_after_first"):
            all_of_them = one
        else:
            all_of_them = f"{one} ({self._literal(part['separator'])} {one})*"
        return f"({all_of_them})" if part.get("at_least_one") else f"({all_of_them})?"

    def _tag(self, tag: Mapping[str, Any], after: str = "") -> str:
        begin = self._literal(tag["begin"].removeprefix(after))
        ends = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
        content = tag["content"]
        if content["type"] == "any_text" and all(ends):
            if any(end in self._special_tokens for end in ends):
                return self._group(f"{begin} {ANY_TEXT} {self._choice(map(self._literal, ends))}")
            return self._group(f"{begin} {self._choice(map(self._up_to, ends))}")
        return self._group(f"{begin} {self.part(content)} {self._choice(map(self._literal, ends))}")

    def _json(self, part: Mapping[str, Any]) -> str:
        schema = part["json_schema"]
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise ValueError("structural_tag: expected a JSON schema to be an object")
        prepare(schema)
        return "%json " + json.dumps({**schema, "x-guidance": dict(self._json_options)})

    def _literal(self, text: str) -> str:
        if not isinstance(text, str):
            raise ValueError(f"structural_tag: expected text, got {text!r:.100}")
        if text in self._special_tokens and text.startswith("<") and text.endswith(">"):
            return text
        return json.dumps(text, ensure_ascii=False)

    def _choice(self, parts: Any) -> str:
        found: Sequence[str] = list(parts)
        return self._group(" | ".join(found))

    def _group(self, body: str) -> str:
        return f"({body})"

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part{len(self.rules)}"
        self.rules[name + attributes] = body
        return name
