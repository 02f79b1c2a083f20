"""SamplingParams: how to choose tokens, as a client asks for it.

Owns its fields, their ranges, and what makes no sense together. Knows no request. Invariant: a
SamplingParams that was constructed can be honoured, whatever the model. Standard library and
msgspec only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from .checks import few, number, texts, token_ids, truth, whole
from .errors import InvalidRequestError
from .structured import StructuredOutputs, read_structured_outputs

__all__ = ["MAX_LOGPROBS", "SamplingParams", "StructuredOutputs"]

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORDS_CHARS = 4096  # of all together
MAX_CHOICES = 128
MAX_BEAM_WIDTH = 64


class OtherSamplingParams(msgspec.Struct, kw_only=True):
    """Fields of vLLM's SamplingParams that ask for what is not done here.

    They may be given as long as they ask for nothing: their default, None or empty.
    """

    prompt_logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool | None = False
    detokenize: bool | None = True
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
    spaces_between_special_tokens: bool = True  # no tokenizer here ever puts any there
    logprobs: int | None = None  # None = off; 0 = the sampled token's only; k = top k besides
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    truncate_prompt_tokens: int | None = None  # keep the last k; -1 = as many as leave room
    allowed_token_ids: Sequence[int] | None = None  # no others; at most MAX_ALLOWED_TOKEN_IDS
    bad_words: Sequence[str] = ()  # never written; at most MAX_BAD_WORDS
    structured_outputs: StructuredOutputs | None = None  # what the answer is to match
    guided_decoding: Any = None  # vLLM's older name for it

    # vLLM's, which change no answer: `LLM` gives whole ones, and a stream what is new.
    output_kind: Any = None
    stream_interval: int | None = None
    skip_clone: bool | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        OtherSamplingParams.__post_init__(self)
        self.use_beam_search = truth("use_beam_search", self.use_beam_search)
        most, what = MAX_CHOICES, "a number"
        if self.use_beam_search:
            most, what = MAX_BEAM_WIDTH, "a number of beams"
        self.n = whole("n", self.n, 1, most, what)
        if self.best_of is not None:
            self.best_of = whole("best_of", self.best_of, 1, most, what)
            if self.best_of < self.n:
                raise InvalidRequestError(
                    f"best_of: expected at least n, {self.n}, as many as are given of them, got "
                    f"{self.best_of}; raise it, or lower n",
                    param="best_of",
                )
        self.temperature = number("temperature", self.temperature, 0.0, 100.0)
        self.top_p = number("top_p", self.top_p, 0.0, 1.0, above=True)
        self.top_k = whole("top_k", self.top_k, -1, 2**31 - 1)
        self.min_p = number("min_p", self.min_p, 0.0, 1.0)
        self.presence_penalty = number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = number(
            "repetition_penalty", self.repetition_penalty, 0.0, 100.0, above=True
        )
        if self.seed is not None:
            seed = whole("seed", self.seed, -(2**63), 2**63 - 1)
            self.seed = None if seed == -1 else seed
        if self.max_tokens is not None:
            self.max_tokens = whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        self.min_tokens = whole("min_tokens", self.min_tokens, 0, self.max_tokens or 2**31 - 1)
        if self.logprobs is not None:
            self.logprobs = whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.truncate_prompt_tokens is not None:
            self.truncate_prompt_tokens = _truncation(self.truncate_prompt_tokens)
        self.spaces_between_special_tokens = truth(
            "spaces_between_special_tokens",
            True
            if self.spaces_between_special_tokens is None
            else self.spaces_between_special_tokens,
        )
        self._check_lists()
        self._check_structure()
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
        self.length_penalty = number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping != "never":
            self.early_stopping = truth("early_stopping", self.early_stopping, ' or "never"')
        for name, neutral in (_FOR_BEAMS if self.use_beam_search else _FOR_NO_BEAMS).items():
            value = getattr(self, name)
            if value not in neutral:
                default, *others = map(json.dumps, neutral)
                default = "none" if default in ("[]", "{}", "null") else f"the default ({default})"
                with_beams, remedy = "with", "leave it out"
                if not self.use_beam_search:
                    with_beams, remedy = "without", "leave it out, or set use_beam_search: true"
                is_structure = isinstance(value, StructuredOutputs)
                shown = value.kind if is_structure else json.dumps(value)
                raise InvalidRequestError(
                    f"{name}: expected {' or '.join([default, *others])} {with_beams} "
                    f"use_beam_search, got {shown:.100}; {remedy}",
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
            whole("logit_bias", token_id, 0, 2**31 - 1): number(
                "logit_bias", biases[token_id], -100.0, 100.0
            )
            for token_id in few("logit_bias", biases, MAX_LOGIT_BIASES, "tokens")
        }
        self.stop_token_ids = token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self.stop = texts("stop", stop, MAX_STOP_STRINGS)
        bad_words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        self.bad_words = texts("bad_words", bad_words, MAX_BAD_WORDS, MAX_BAD_WORDS_CHARS)
        if self.allowed_token_ids is not None:
            name = "allowed_token_ids"
            self.allowed_token_ids = token_ids(name, self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise InvalidRequestError(
                    f"{name}: expected at least one token, got none; leave it out to allow all",
                    param=name,
                )

    def _check_structure(self) -> None:
        """Of both names one is kept."""
        given = read_structured_outputs("structured_outputs", self.structured_outputs)
        older = read_structured_outputs("guided_decoding", self.guided_decoding)
        if given is not None and older is not None:
            raise InvalidRequestError(
                "guided_decoding: expected none beside structured_outputs, its newer name",
                param="guided_decoding",
            )
        self.structured_outputs, self.guided_decoding = given or older, None


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
    "allowed_token_ids": (None,),
    "bad_words": ((),),
    "structured_outputs": (None,),
}
_FOR_NO_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "early_stopping": (False,),
}


def _truncation(given: Any) -> int:
    """To how many tokens; -1 is left to the model."""
    num_tokens = whole("truncate_prompt_tokens", given, -1, 2**31 - 1)
    if num_tokens == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens: expected -1 or at least 1, got 0; a prompt needs a token",
            param="truncate_prompt_tokens",
        )
    return num_tokens
