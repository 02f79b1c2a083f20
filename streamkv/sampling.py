"""SamplingParams: how to choose tokens, as a client asks for it.

Owns its fields, their ranges, and what makes no sense together. Knows no request. Invariant: a
SamplingParams that was constructed can be honoured, whatever the model. Standard library and
msgspec only.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import msgspec

from .errors import InvalidRequestError
from .plain import plain

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_CHOICES = 128
MAX_BEAM_WIDTH = 64


class OtherSamplingParams(msgspec.Struct, kw_only=True):
    """Fields of vLLM's SamplingParams that ask for what is not done here.

    They may be given as long as they ask for nothing: their default, None or empty.
    """

    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool | None = False
    detokenize: bool | None = True
    spaces_between_special_tokens: bool | None = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: Any = None
    guided_decoding: Any = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[Any] | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int | None = 0
    trace_decode_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, default in zip(_OTHER_NAMES, _OTHER_DEFAULTS, strict=True):
            value = getattr(self, name)
            if value is not default and value not in (default, None, [], (), {}):
                raise InvalidRequestError(
                    f"{name}: expected {default!r}, got {value!r:.100}; it is not supported here: "
                    "leave it out",
                    param=name,
                )


_OTHER_NAMES = OtherSamplingParams.__struct_fields__
_OTHER_DEFAULTS = OtherSamplingParams.__struct_defaults__


class SamplingParams(OtherSamplingParams, kw_only=True, repr_omit_defaults=True):
    """How to choose tokens. Names, meanings and defaults are vLLM's, which has them from OpenAI.

    Raises InvalidRequestError naming the field when a value is out of range (NaN included). None
    for a list is an empty one, and one text may be given as `stop`. Numbers may be numpy's. Fields
    may be set; a request gets a copy, whose values are checked again.
    """

    n: int = 1
    best_of: int | None = None  # sequences to compute, of which the n most likely are given
    use_beam_search: bool = False  # then best_of, or else n, is the width
    length_penalty: float = 1.0  # beams: log-probability / length ** length_penalty is the score
    early_stopping: bool | str = False  # beams: as in transformers, "never" included
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = no limit
    min_p: float = 0.0
    presence_penalty: float = 0.0  # subtracted once from each token already in the output
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    repetition_penalty: float = (
        1.0  # divides positive / multiplies negative logits, prompt + output
    )
    logit_bias: Mapping[int, float] = {}  # at most MAX_LOGIT_BIASES tokens
    seed: int | None = None  # None or -1 = the engine draws one
    max_tokens: int | None = 16  # None = as far as the context allows
    min_tokens: int = 0  # end tokens and stop ids are masked before that many tokens
    stop: Sequence[str] = ()  # at most MAX_STOP_STRINGS
    stop_token_ids: Sequence[int] = ()  # at most MAX_STOP_TOKEN_IDS
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None = off; 0 = the sampled token's only; k = top k besides

    # vLLM's, which change no answer: `LLM` gives whole ones, and a stream what is new.
    output_kind: Any = None
    stream_interval: int | None = None
    skip_clone: bool | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        OtherSamplingParams.__post_init__(self)
        self.use_beam_search = _truth("use_beam_search", self.use_beam_search)
        most, what = MAX_CHOICES, "a number"
        if self.use_beam_search:
            most, what = MAX_BEAM_WIDTH, "a number of beams"
        self.n = _whole("n", self.n, 1, most, what)
        if self.best_of is not None:
            self.best_of = _whole("best_of", self.best_of, 1, most, what)
            if self.best_of < self.n:
                raise InvalidRequestError(
                    f"best_of: expected at least n, {self.n}, as many as are given of them, got "
                    f"{self.best_of}; raise it, or lower n",
                    param="best_of",
                )
        self.temperature = _number("temperature", self.temperature, 0.0, 100.0)
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0, above=True)
        self.top_k = _whole("top_k", self.top_k, -1, 2**31 - 1)
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _number(
            "repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True
        )
        if self.seed is not None:
            seed = _whole("seed", self.seed, -(2**63), 2**63 - 1)
            self.seed = None if seed == -1 else seed
        if self.max_tokens is not None:
            self.max_tokens = _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self.min_tokens = _whole("min_tokens", self.min_tokens, 0, self.max_tokens or 2**31 - 1)
        if self.logprobs is not None:
            self.logprobs = _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        self._check_lists()
        self._check_beams()

    @property
    def num_sequences(self) -> int:
        """How many are computed for one prompt: choices, candidates of best_of, or beams."""
        return self.best_of or self.n

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Of vLLM's: None is a field's default, but of max_tokens, where it is no limit."""
        given = {name: value for name, value in fields.items() if value is not None}
        if "max_tokens" in fields:
            given["max_tokens"] = fields["max_tokens"]
        return cls(**given)

    def clone(self, **changes: Any) -> Self:
        """A copy that shares nothing that can be changed; `changes` are fields of it."""
        return msgspec.structs.replace(self, **changes)

    def _check_beams(self) -> None:
        """Beams are ranked by the model's own log-probabilities: nothing else may choose tokens."""
        if self.length_penalty is None:
            self.length_penalty = 1.0
        self.length_penalty = _number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping != "never":
            self.early_stopping = _truth("early_stopping", self.early_stopping, ' or "never"')
        for name, neutral in (_FOR_BEAMS if self.use_beam_search else _FOR_NO_BEAMS).items():
            value = getattr(self, name)
            if value not in neutral:
                default, *others = map(json.dumps, neutral)
                default = "none" if default in ("[]", "{}") else f"the default ({default})"
                with_beams, remedy = "with", "leave it out"
                if not self.use_beam_search:
                    with_beams, remedy = "without", "leave it out, or set use_beam_search: true"
                raise InvalidRequestError(
                    f"{name}: expected {' or '.join([default, *others])} {with_beams} "
                    f"use_beam_search, got {json.dumps(value):.100}; {remedy}",
                    param=name,
                )

    def _check_lists(self) -> None:
        """Check what has several items, and keep copies."""
        biases = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, Mapping):
            raise InvalidRequestError(
                f"logit_bias: expected a dict of token ids and numbers, got {biases!r:.100}",
                param="logit_bias",
            )
        self.logit_bias = {
            _whole("logit_bias", token_id, 0, 2**31 - 1): _number(
                "logit_bias", biases[token_id], -100.0, 100.0
            )
            for token_id in _few("logit_bias", biases, MAX_LOGIT_BIASES, "tokens")
        }
        self.stop_token_ids = tuple(
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)
            for token_id in _few(
                "stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS, "tokens"
            )
        )
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self.stop = _few("stop", stop, MAX_STOP_STRINGS, "strings")
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequestError("stop: expected non-empty strings", param="stop")


# What may be said of the others, by name: the default first.
_FOR_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1.0, 0.0),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop": ((),),
}
_FOR_NO_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "early_stopping": (False,),
}


def _truth(name: str, value: Any, others: str = "") -> bool:
    """Whether it is true; None is false."""
    value = plain(value)
    if value not in (None, True, False) or isinstance(value, float):
        raise InvalidRequestError(
            f"{name}: expected true or false{others}, got {value!r:.100}", param=name
        )
    return bool(value)


def _number(
    name: str,
    value: Any,
    low: float,
    high: float,
    what: str = "a number",
    *,
    above: bool = False,
) -> Any:
    """The number, if low <= value <= high (low < value with `above`); NaN never is."""
    if type(value) not in (int, float):
        value = plain(value)
    is_number = not isinstance(value, bool) and isinstance(value, (int, float))
    # NaN is in no range. A comparison takes integers that no float can hold.
    if not is_number or not (low <= value <= high) or (above and value == low):
        bracket = "(" if above else "["
        raise InvalidRequestError(
            f"{name}: expected {what} in {bracket}{low}, {high}], got {value!r:.100}", param=name
        )
    return value


def _whole(name: str, value: Any, low: int, high: int, what: str = "a number") -> int:
    """The number, if it is an int from low to high."""
    number = _number(name, value, low, high, what)
    if not isinstance(number, int):
        raise InvalidRequestError(f"{name}: expected a whole number, got {number!r}", param=name)
    return number


def _few(name: str, items: Any, limit: int, what: str) -> tuple[Any, ...]:
    """The items, at most `limit`: they are looked at one by one, while others wait."""
    if items is None:
        return ()
    if not isinstance(items, (tuple, list, dict)):
        items = plain(items)
        if not isinstance(items, Iterable) or isinstance(items, (str, bytes)):
            raise InvalidRequestError(
                f"{name}: expected a list of {what}, got {items!r:.100}", param=name
            )
        items = tuple(itertools.islice(items, limit + 1))
    if len(items) > limit:
        raise InvalidRequestError(f"{name}: expected at most {limit} {what}, got more", param=name)
    return tuple(items)
