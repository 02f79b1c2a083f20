"""The fields that generating endpoints share: how to sample, how to be served, what was counted.

Owns their Structs, what of the known options isn't honoured, and how they become SamplingParams and
the engine's arguments. Knows nothing about any one endpoint. Invariant: a field may be absent or
null, which mean the same.

OpenAI's fields that mean nothing here are skipped, as unknown ones are: `user`, `metadata`,
`store`, `service_tier`, `safety_identifier`, `prompt_cache_key` and `prompt_cache_retention`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import HTTPConnection

from ..engine.admission import num_kept_tokens
from ..engine.async_engine import AsyncEngine
from ..engine.stream import TokenStream
from ..errors import InvalidRequestError
from ..protocol import SamplingParams
from ..sampling import StructuredOutputs
from .answer import OnDisconnect
from .bounds import at_most
from .wire import Advice, NotHonoured

MAX_LIST_BYTES = 1 << 18  # of what may have thousands of items at most

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], at_most(MAX_LIST_BYTES)]
Texts = Annotated[str | list[str], at_most(MAX_LIST_BYTES)]
Name = Annotated[str, Meta(max_length=256)]
MAX_SESSION_ID_LEN = 256
MAX_REQUEST_ID_LEN = 128
# It stands in paths and headers as it is.
REQUEST_ID_PATTERN = r"^(?!\.+\Z)[A-Za-z0-9._~:=+@-]+\Z"

# Known sampling and serving options of the OpenAI API and its extensions that are not honoured
# here, for the endpoints' own tables to build on.
# What vLLM, SGLang, TGI, llama.cpp and their clients call what would change an answer.
SAMPLING_NOT_HONOURED: NotHonoured = {
    "adapter_id": (),
    "custom_logit_processor": (),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "ebnf": (),
    "grammar": ("",),
    "input_embeds": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "lora": ([],),
    "lora_path": (),
    "max_thinking_tokens": (),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "no_stop_trim": (False,),
    "regex": (),
    "repeat_penalty": (1, 1.0),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "session_params": ({},),
    "smoothing_factor": (0, 0.0),
    "stop_regex": ([],),
    "stream_interval": (1,),
    "t_max_predict_ms": (0, -1),
    "tfs": (1, 1.0),
    "tfs_z": (1, 1.0),
    "thinking_budget_tokens": (-1,),
    "thinking_token_budget": (),
    "top_a": (0, 0.0),
    "top_n_sigma": (0, 0.0, -1, -1.0),
    "truncation_side": ("left",),
    "typical_p": (1, 1.0),
    "vllm_xargs": ({},),
    "watermark": (False,),
    "xtc_probability": (0, 0.0),
}

_STRUCTURED = "structured_outputs says what an answer is to match"
SAMPLING_ADVICE: Advice = {
    "ebnf": _STRUCTURED,
    "grammar": _STRUCTURED,
    "json_schema": _STRUCTURED,
    "n_predict": "send max_tokens",
    "n_probs": "send logprobs",
    "no_stop_trim": "send include_stop_str_in_output",
    "regex": _STRUCTURED,
    "repeat_penalty": "send repetition_penalty",
}

# Of the fields that chat and completions have: what other endpoints refuse.
COMPLETIONS_ONLY: NotHonoured = {
    "echo": (False,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "prompt_logprobs": (),
    "return_progress": (False,),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
}


RequestId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=MAX_REQUEST_ID_LEN,
        pattern=REQUEST_ID_PATTERN,
        extra_json_schema={"description": "letters, digits and any of . _ ~ : = + @ -"},
    ),
]


class SamplingFields(msgspec.Struct, kw_only=True):
    """How to sample, as clients write it: every field may be absent or null.

    Ranges are SamplingParams' own, which names the field at fault. `max_tokens`, `n` and
    `logprobs` differ by endpoint and come as arguments of `to_sampling_params`.
    """

    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], at_most(MAX_LIST_BYTES)] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: Texts | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    truncate_prompt_tokens: int | None = None

    def to_sampling_params(
        self,
        defaults: Mapping[str, Any],
        *,
        max_tokens: int | None = None,
        n: int | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        structured_outputs: StructuredOutputs | None = None,
    ) -> SamplingParams:
        """SamplingParams; what the client left out comes from `defaults`, the checkpoint's, or is
        its own default (always with beams, for which nothing is sampled). `max_tokens` isn't taken
        from there: see `limit_tokens`."""
        chosen: dict[str, Any] = {} if self.use_beam_search else {**defaults}
        chosen |= {"max_tokens": max_tokens, "logprobs": logprobs}
        chosen |= {"prompt_logprobs": prompt_logprobs, "structured_outputs": structured_outputs}
        for name in SamplingFields.__struct_fields__:
            value = getattr(self, name)
            if value is not None:
                chosen[name] = value
        if n is not None:
            chosen["n"] = n
        return SamplingParams(**chosen)


def limit_tokens(
    sampling: SamplingParams, engine: AsyncEngine, num_prompt_tokens: int
) -> SamplingParams:
    """With the checkpoint's max_tokens where the client gave none and the context has room for
    them."""
    if sampling.max_tokens is not None or "max_tokens" not in engine.sampling_defaults:
        return sampling
    limit = max(engine.sampling_defaults["max_tokens"], sampling.min_tokens)
    num_kept = num_kept_tokens(sampling, engine.info)
    if num_kept is not None:
        num_prompt_tokens = min(num_prompt_tokens, num_kept)
    if limit >= engine.info.max_model_len - num_prompt_tokens:
        return sampling
    return sampling.clone(max_tokens=limit)


class GenerationFields(SamplingFields, kw_only=True):
    """What each generating endpoint takes besides sampling."""

    model: Name | None = None  # absent or null: the model served
    stream: bool | None = None
    request_id: RequestId | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Name | None = None
    session_id: Annotated[str, Meta(min_length=1, max_length=MAX_SESSION_ID_LEN)] | None = None
    session_ttl: float | None = None  # seconds
    return_token_ids: bool | None = None
    on_disconnect: OnDisconnect | None = None

    def for_engine(self, connection: HTTPConnection) -> ForEngine:
        """What `AsyncEngine.generate` takes of it. The header X-Session-Id names the session of
        requests that name none. InvalidRequestError."""
        session_id = self.session_id
        if session_id is None:
            session_id = connection.headers.get("x-session-id", "")
            if len(session_id) > MAX_SESSION_ID_LEN:
                raise InvalidRequestError(
                    f"X-Session-Id: expected at most {MAX_SESSION_ID_LEN} characters, got "
                    f"{len(session_id)}",
                    param="session_id",
                )
        return ForEngine(
            model=self.model or "",
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            session_id=session_id,
            session_ttl_s=self.session_ttl,
        )


class ForEngine(TypedDict):
    """Arguments of `AsyncEngine.generate`."""

    model: str
    priority: int
    cache_salt: str
    session_id: str
    session_ttl_s: float | None


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's `include_obfuscation`, padding against traffic analysis, may be sent and is not
    done: tokens here are as long as they are."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # counts in every chunk
    resumable: bool | None = None  # its events are kept, for a reader that comes back

    @classmethod
    def checked(cls, options: StreamOptions | None, *, stream: bool) -> StreamOptions:
        """The options, or none of them; InvalidRequestError where nothing streams."""
        if options is not None and not stream:
            raise InvalidRequestError(
                "stream_options: only allowed with stream: true; leave it out",
                param="stream_options",
            )
        return options or cls()


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """OpenAI's token counts; prompts count once, however many choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(
        cls,
        *streams: TokenStream,
        generates: bool = True,
        reasoning_tokens: int | None = None,
    ) -> Usage:
        """The counts of these streams so far. `generates`: without it what is generated is nobody's
        answer. `reasoning_tokens`: None where reasoning is not told from the answer."""
        prompt = sum(stream.usage.num_prompt_tokens for stream in streams)
        completion = sum(stream.usage.num_generated_tokens for stream in streams) * generates
        cached = sum(stream.usage.num_cached_tokens for stream in streams)
        details: CompletionTokensDetails | UnsetType = UNSET
        if reasoning_tokens is not None:
            details = CompletionTokensDetails(reasoning_tokens)
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached), details)
