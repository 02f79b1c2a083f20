"""What there is to send: endpoints, the fields of each, and values that are meant to work.

Owns tables, and how a body is put together from one. Knows nothing of how it is sent. Invariant:
a body made without changes is a short request that any server of this API answers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .values import altered, strange

Table = Mapping[str, Sequence[Any]]

TEXTS = ("hi", "the dog", "日本語 🏳️‍🌈 e\u0301", "a" * 300, "\0", "<|im_start|>system\nx<|im_end|>")
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "é"]}},
    "required": ["a"],
    "additionalProperties": False,
}
_SCHEMAS: Sequence[dict[str, Any]] = (
    *(_SCHEMA, {}, {"type": "string", "maxLength": 3}, {"enum": []}, {"type": "nothing"}),
    *({"$ref": "#"}, {"$ref": "http://127.0.0.1:9/x"}, {"not": {}}, {"allOf": [False]}),
    {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"},
    {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    {"type": "string", "pattern": "(a|aa){1,900}$"},
    {"enum": [f"value {i}" for i in range(2000)]},
    {"type": "number", "multipleOf": 1e-9, "minimum": -1e300},
)
_REGEXES = ("[a-c]{1,3}", "", "(", "(?=a)b", "\\", "(a*)*b", "((a{1,90}){1,90}){1,90}", "\\p{L}+")
_GRAMMARS = ('start: "a" | "b"', 'root ::= "a"+', "start: start", "start: ", "?", "root ::= root")
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_PART = {"type": "text", "text": "hi"}
_IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
_FLAGS = (True, False, None)
_FORMATS = (
    *({"type": "text"}, {"type": "json_object"}, None),
    *({"type": "json_schema", "json_schema": {"name": "n", "schema": one}} for one in _SCHEMAS),
)
_STRUCTURED = (
    *({"json": one} for one in _SCHEMAS),
    *({"regex": one} for one in _REGEXES),
    *({"grammar": one} for one in _GRAMMARS),
    *({"choice": ["a", "b"]}, {"choice": []}, {"choice": ["x"] * 5000}, {"json_object": True}),
    {"regex": "a", "choice": ["a"]},
    {"structural_tag": {"type": "structural_tag", "structures": [], "triggers": ["<"]}},
)

SAMPLING: Table = {
    "temperature": (0, 0.7, 1, 2),
    "top_p": (1, 0.5, 1e-9),
    "top_k": (0, -1, 3, 10**6),
    "min_p": (0, 0.3, 1),
    "presence_penalty": (-2, 0, 2),
    "frequency_penalty": (-2, 0.1, 2),
    "repetition_penalty": (0.5, 1, 1.3),
    "logit_bias": ({}, {"5": -100, "7": 100}, {"5": 0.5}),
    "seed": (0, 1, -1, 2**63 - 1),
    "min_tokens": (0, 1, 2),
    "stop": ("a", ["a", "the"], [], "\n", "🙂"),
    "stop_token_ids": ([], [5, 6]),
    "ignore_eos": _FLAGS,
    "include_stop_str_in_output": _FLAGS,
    "skip_special_tokens": _FLAGS,
    "spaces_between_special_tokens": _FLAGS,
    "allowed_token_ids": (None, [5], [5, 6, 7, 300], []),
    "bad_words": ([], ["the"], ["a", " dog"], [""]),
    "prompt_logprobs": (None, 0, 2, -1, 20),
    "truncate_prompt_tokens": (None, 1, 4, -1),
    "structured_outputs": _STRUCTURED,
    "guided_json": _SCHEMAS,
    "guided_regex": _REGEXES,
    "guided_choice": (["a", "b"], []),
    "guided_grammar": _GRAMMARS,
    "guided_json_object": _FLAGS,
    "guided_decoding_backend": ("auto", None),
    "guided_whitespace_pattern": (" ?", "("),
    "kv_transfer_params": (None, {}),
    "logits_processors": ([], ["x"]),
    "logprob_token_ids": (None, [5]),
    "repetition_detection": (None, {}),
    "stream_interval": (1, 5),
    "thinking_token_budget": (None, 5),
    "truncation_side": (None, "left"),
    "vllm_xargs": ({}, {"a": 1}),
}
SERVING: Table = {
    "model": (None, "nothing/like-it", ""),
    "user": ("u", None),
    "metadata": ({}, {"a": "b"}, {"k" * 65: "v"}),
    "store": _FLAGS,
    "service_tier": ("auto", "default", None),
    "priority": (0, -5, 7),
    "cache_salt": ("salt", ""),
    "session_id": ("session", "s" * 256),
    "session_ttl": (1, 0.5, None),
    "return_token_ids": _FLAGS,
    "on_disconnect": ("abort", "continue", "pause", "never"),
    "an_unknown_field": (1, None),
}
_CHOICES: Table = {
    "n": (1, 2, 3),
    "best_of": (1, 2),
    "use_beam_search": _FLAGS,
    "length_penalty": (1.0, 0.5),
    "early_stopping": (True, False, "never"),
    "response_format": _FORMATS,
    "stream_options": (
        *(None, {}, {"include_usage": True}, {"continuous_usage_stats": True}),
        *({"include_usage": True, "resumable": True}, {"resumable": 1}, {"progress": True}),
    ),
    "max_tokens": (1, 2, 4),
    "echo": _FLAGS,
    "add_special_tokens": _FLAGS,
    "return_progress": _FLAGS,
    "return_tokens_as_token_ids": _FLAGS,
}
_TEMPLATE: Table = {
    "add_generation_prompt": _FLAGS,
    "continue_final_message": _FLAGS,
    "chat_template": (None, "{{ messages[0].content }}", "{% for", "{{ 1 / 0 }}", "x"),
    "chat_template_kwargs": ({}, {"enable_thinking": False}, {"messages": []}),
    "documents": ([], [{"title": "t", "text": "x"}]),
}
CHAT: Table = {
    **SAMPLING,
    **SERVING,
    **_CHOICES,
    **_TEMPLATE,
    "messages": (
        *([{"role": "user", "content": text}] for text in TEXTS),
        [{"role": "system", "content": "x"}, {"role": "user", "content": [_PART, _PART]}],
        [{"role": "user", "content": [_IMAGE]}],
        [{"role": "assistant", "content": "hi"}],
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "{}"},
        ],
        [{"role": "developer", "content": "x", "name": "n"}, {"role": "user", "content": ""}],
    ),
    "max_completion_tokens": (1, 3, None),
    "logprobs": _FLAGS,
    "top_logprobs": (0, 3, 20),
    "tools": ([], [_TOOL], [_TOOL] * 2, [{"type": "web_search"}]),
    "tool_choice": (
        *("auto", "none", "required", None),
        {"type": "function", "function": {"name": "f"}},
        {"type": "function", "function": {"name": "g"}},
    ),
    "parallel_tool_calls": _FLAGS,
    "reasoning_effort": ("none", "low", "high", None),
    "functions": ([], [{"name": "f"}]),
    "function_call": ("none", "auto"),
    "modalities": (["text"], ["audio"]),
    "audio": (None, {"voice": "x", "format": "wav"}),
    "prediction": (None, {"type": "content", "content": "x"}),
    "verbosity": ("low", "medium"),
    "web_search_options": (None, {}),
    "include_reasoning": _FLAGS,
    "media_io_kwargs": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "moderation": (None, {}),
    "prompt_cache_options": (None, {}),
}
TEXT: Table = {
    **SAMPLING,
    **SERVING,
    **_CHOICES,
    "prompt": (*TEXTS, *(["a", "b"], [5, 6, 7], [[5, 6], [7]], [5] * 600, ["a"] * 20, "x" * 9000)),
    "logprobs": (None, 0, 3, 20),
    "suffix": (None, "end"),
    "prompt_embeds": (None, "AA=="),
}
_ITEMS = (
    *TEXTS,
    [{"role": "user", "content": "hi"}],
    [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
    ],
    [{"type": "item_reference", "id": "msg_1"}],
    [{"type": "reasoning", "summary": [], "id": "rs_1"}, {"role": "user", "content": "hi"}],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}],
)
RESPONSES: Table = {
    **SAMPLING,
    **SERVING,
    "input": _ITEMS,
    "instructions": ("be brief", "", None),
    "max_output_tokens": (1, 2, 4),
    "top_logprobs": (0, 3),
    "include": ([], ["message.output_text.logprobs"], ["reasoning.encrypted_content"]),
    "previous_response_id": (None, "resp_none", ""),
    "text": (
        *({}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}),
        *({"format": {"type": "json_schema", "name": "n", "schema": one}} for one in _SCHEMAS),
        {"verbosity": "low"},
    ),
    "reasoning": ({}, {"effort": "none"}, {"effort": "low", "summary": "auto"}),
    "tools": (
        *([], [{"type": "function", "name": "f", "parameters": _SCHEMA, "strict": True}]),
        [{"type": "web_search"}],
    ),
    "tool_choice": ("auto", "none", "required", {"type": "function", "name": "f"}),
    "parallel_tool_calls": _FLAGS,
    "max_tool_calls": (1, None),
    "truncation": ("disabled", "auto"),
    "background": (False, True),
    "background_options": (None, {"completion_window": "soonest"}, {"completion_window": "8h"}),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "prompt_cache_options": ({}, {"prewarm": True}, {"ttl": "30m", "mode": "explicit"}),
    "response_format": _FORMATS,
    "best_of": (1, 2),
    "use_beam_search": _FLAGS,
    "length_penalty": (1.0,),
    "early_stopping": (True,),
    "conversation": (None, "conv_1"),
    "prompt": (None, {"id": "p"}),
    "prompt_cache_key": ("k",),
    "prompt_cache_retention": ("in_memory", "24h"),
    "safety_identifier": ("s",),
    "stream_options": (None, {"include_obfuscation": False}, {"resumable": True}),
}
EVENT: Table = {  # what a socket takes besides
    **RESPONSES,
    "stream_id": ("lane", "", "l" * 300),
    "generate": (True, False),
    "credits": (0, 3, 10**6),
    "starting_after": (0, 5, -1),
    "response_id": ("resp_none", ""),
    "stream": (True, False),
    "event_id": ("e1",),
}
TOKENIZE: Table = {
    **_TEMPLATE,
    "prompt": TEXTS,
    "messages": CHAT["messages"],
    "model": SERVING["model"],
    "add_special_tokens": _FLAGS,
    "return_token_strs": _FLAGS,
    "reasoning_effort": ("low", "none"),
    "mm_processor_kwargs": (None, {}),
    "tools": CHAT["tools"],
}
DETOKENIZE: Table = {"tokens": ([], [5, 6], [5] * 9000, [10**6]), "model": SERVING["model"]}

_SHORT = {"role": "user", "content": "hi"}


@dataclass(frozen=True)
class Endpoint:
    path: str
    table: Table
    base: Mapping[str, Any] = field(default_factory=dict)
    limit: str = ""  # the field that bounds an answer; endpoints that generate have one


ENDPOINTS: Sequence[Endpoint] = (
    Endpoint("/v1/chat/completions", CHAT, {"messages": [_SHORT]}, "max_tokens"),
    Endpoint("/v1/completions", TEXT, {"prompt": "hi"}, "max_tokens"),
    Endpoint("/v1/responses", RESPONSES, {"input": "hi"}, "max_output_tokens"),
    Endpoint("/v1/responses/input_tokens", RESPONSES, {"input": "hi"}),
    Endpoint("/tokenize", TOKENIZE, {"prompt": "hi"}),
    Endpoint("/detokenize", DETOKENIZE, {"tokens": [5]}),
)
GENERATING = ENDPOINTS[:3]
_WEIGHTS = (30, 25, 25, 5, 8, 5)
_BINDING = ("response_format", "structured_outputs", "guided_json", "guided_regex", "text", "tools")


def any_endpoint(rng: random.Random) -> Endpoint:
    return rng.choices(ENDPOINTS, _WEIGHTS)[0]


def body_of(rng: random.Random, endpoint: Endpoint, *, request_id: str) -> dict[str, Any]:
    """A body with up to four fields that are usual, near the usual, or anything."""
    body: dict[str, Any] = dict(endpoint.base)
    if endpoint.limit:
        body |= {endpoint.limit: rng.randint(1, 3), "request_id": request_id}
        body["stream"] = rng.random() < 0.5
    table = endpoint.table
    for name in rng.sample(sorted(table), min(rng.choice((0, 1, 1, 1, 2, 2, 3, 4)), len(table))):
        usual = rng.choice(table[name])
        how = rng.random()
        body[name] = usual if how < 0.45 else altered(rng, usual) if how < 0.65 else strange(rng)
    return body


def bound_body(rng: random.Random, endpoint: Endpoint, *, request_id: str) -> dict[str, Any]:
    """A body whose answer has to obey a grammar, sound or not."""
    body = {
        **endpoint.base,
        "request_id": request_id,
        "stream": rng.random() < 0.5,
        endpoint.limit: rng.choice((1, 4, 20)),
    }
    name = rng.choice([name for name in _BINDING if name in endpoint.table])
    value = rng.choice(endpoint.table[name])
    body[name] = value if rng.random() < 0.8 else altered(rng, value)
    if name == "tools":
        body["tool_choice"] = rng.choice(("required", "auto", {"type": "function", "name": "f"}))
    return body
