"""What crosses the borders: requests going in, steps going to the device, results coming back.

Everything here is made of numbers, strings and bytes, so that the device side can live in another
thread, process or host, and in another language: steps and outputs cross as bytes, laid out as
described at `encode_step` and `encode_output` (cuda_ext/src/cpu/step.cpp reads and writes the
same). All of it is frozen but SamplingParams, of which each request has a copy of its own. Arrays
are `bytes` of native-endian int32 or float32; the shape stands beside each field. Standard library
and msgspec only.
"""

from __future__ import annotations

import enum
import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

import msgspec

from .errors import InvalidRequestError
from .plain import plain

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_CHOICES = 128
MAX_BEAM_WIDTH = 64


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the context length reached
    ABORT = "abort"  # cancelled by the client or by shutdown
    ERROR = "error"  # failed on the device


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
    use_beam_search: bool = False  # then best_of, or n, is the width
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
        self.n = _whole("n", self.n, 1, MAX_CHOICES)
        if self.best_of is not None:
            self.best_of = _whole("best_of", self.best_of, self.n, MAX_CHOICES)
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
        self.use_beam_search = bool(self.use_beam_search)
        if self.length_penalty is None:
            self.length_penalty = 1.0
        if self.early_stopping is None:
            self.early_stopping = False
        self.length_penalty = _number("length_penalty", self.length_penalty, -100.0, 100.0)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidRequestError(
                f'early_stopping: expected true, false or "never", got {self.early_stopping!r:.100}',
                param="early_stopping",
            )
        if not self.use_beam_search:
            return
        _whole("best_of", self.num_sequences, 1, MAX_BEAM_WIDTH)
        for name, neutral in _NEUTRAL_FOR_BEAMS.items():
            if getattr(self, name) not in neutral:
                raise InvalidRequestError(
                    f"{name}: expected {neutral[0]!r} with use_beam_search, which takes the most "
                    f"likely tokens, got {getattr(self, name)!r:.100}; leave it out",
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


_NEUTRAL_FOR_BEAMS: Mapping[str, tuple[Any, ...]] = {
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


def _number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> Any:
    """The number, if low <= value <= high (low < value with `above`); NaN never is."""
    if type(value) not in (int, float):
        value = plain(value)
    is_number = not isinstance(value, bool) and isinstance(value, (int, float))
    # NaN is in no range. A comparison takes integers that no float can hold.
    if not is_number or not (low <= value <= high) or (above and value == low):
        bracket = "(" if above else "["
        raise InvalidRequestError(
            f"{name}: expected a number in {bracket}{low}, {high}], got {value!r:.100}", param=name
        )
    return value


def _whole(name: str, value: Any, low: int, high: int) -> int:
    """The number, if it is an int from low to high."""
    number = _number(name, value, low, high)
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


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted prompt, computed as `sampling.num_sequences` Sequences."""

    request_id: str
    model: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # sampling.seed, or drawn at admission: randomness has no other state
    max_tokens: int  # resolved: prompt + max_tokens fit in the context
    arrival_s: float = 0.0  # the engine's monotonic clock
    priority: int = 0  # lower runs first; ties by arrival
    cache_salt: str = ""  # prefix blocks are shared only between equal salts
    session_id: str = ""  # whose blocks to keep when it ends; "" = nobody's
    session_ttl_s: float = 0.0  # for how long


# --- the device border -----------------------------------------------------------------------


class Ask(enum.IntEnum):
    """What a scheduled row wants from a step."""

    NONE = 0  # compute KV only
    SAMPLE = 1  # sample the token after the last position


class CopyKind(enum.IntEnum):
    """From where to where a copy goes; each moves one whole block, all layers."""

    BLOCK = 0  # block to block
    OUT = 1  # block to host slot
    IN = 2  # host slot to block


class RowSampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """SamplingParams as the device reads them: numbers only, fixed while the row lives."""

    temperature: float
    top_p: float
    top_k: int  # 0 = no limit
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int  # Philox key with `choice`; the counter is the sampled token's position
    choice: int
    min_tokens: int
    num_logprobs: int  # -1 = off
    min_tokens_stop_ids: bytes  # int32 [n]: masked while fewer than min_tokens were sampled
    bias_ids: bytes  # int32 [m]
    bias_values: bytes  # float32 [m]

    @classmethod
    def build(cls, request: Request, choice: int, eos_token_ids: Iterable[int]) -> RowSampling:
        params = request.sampling
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(eos_token_ids)
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        if params.use_beam_search:  # the most likely tokens are all that is wanted of the device
            num_logprobs = max(num_logprobs, 2 * params.num_sequences)
        elif params.num_sequences > params.n:  # candidates are ranked by their log-probabilities
            num_logprobs = max(num_logprobs, 0)
        return cls(
            temperature=0.0 if params.use_beam_search else params.temperature,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            seed=request.seed,
            choice=choice,
            min_tokens=params.min_tokens,
            num_logprobs=num_logprobs,
            min_tokens_stop_ids=pack_ints(sorted(stop_ids) if params.min_tokens else ()),
            bias_ids=pack_ints(params.logit_bias),
            bias_values=array("f", params.logit_bias.values()).tobytes(),
        )

    def of_choice(self, choice: int) -> RowSampling:
        """The same for another choice of the request, the packed arrays shared."""
        return msgspec.structs.replace(self, choice=choice)


class RowAdded(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sequence takes a row: at admission, or when it resumes after preemption."""

    row: int
    num_prompt_tokens: int  # tokens after it are output (penalties, min_tokens count them)
    token_ids: bytes  # int32 [num_tokens]: prompt and output so far
    block_ids: bytes  # int32 [num_blocks]: its whole block table at this moment
    sampling: RowSampling


class StepInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One step, as changes: apply removed, then added, then appended, then make the copies, then
    run `scheduled`. One without `scheduled` makes its copies only.

    A copy's number is in `copies_done` or `copies_failed` of exactly one output: this step's or a
    later one's. If this step's output has an `error`, those of its copies that are in neither have
    failed.

    A row scheduled with (start, count) computes the KV of positions start .. start+count-1 from
    its token ids; positions past what the host sent are tokens the device sampled itself. A row
    that asks for a sample gets it at position start+count, and keeps it.
    """

    step_id: int
    removed: bytes  # int32 [n]: rows whose sequence ended or was preempted
    added: tuple[RowAdded, ...]
    appended: bytes  # int32 [n, 2]: (row, block_id), appended to the row's table in this order
    scheduled: bytes  # int32 [n, 4]: (row, start, count, Ask), batch order; count >= 1
    copies: bytes = b""  # int32 [n, 4]: (number, CopyKind, source, target), made in this order


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities under the model's own distribution (no penalty, temperature 1)."""

    logprob: float  # of the sampled token
    rank: int  # of the sampled token, 1 = most likely
    top_ids: bytes  # int32 [k], most likely first
    top_logprobs: bytes  # float32 [k]


class StepOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of the StepInput with the same step_id; steps finish in the order sent."""

    step_id: int
    sampled: bytes  # int32 [num_asking]: a token per row that asked, in `scheduled`'s order
    logprobs: tuple[RowLogprobs | None, ...] = ()  # () or one per sampled token
    failed: bytes = b""  # int32 [n]: places in `sampled` whose logits were not finite; no tokens
    error: str = ""  # not empty: nothing was sampled; the rows of this step are lost
    duration_s: float = 0.0
    copies_done: bytes = b""  # int32 [n]: numbers of copies that are made
    copies_failed: bytes = b""  # int32 [n]: of copies that never will be
    copies_s: float = 0.0  # what the copies took of duration_s


class RunnerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a runner tells the engine once it has loaded: facts and plan, for all to see."""

    device: str  # "cpu", "cuda:0"
    dtype: str  # "bfloat16" | "float32": of weights that aren't quantized
    formats: str  # of all numbers, one line: "Q4_1 + Q8_0 weights, int8 inputs, bfloat16 KV"
    max_model_len: int
    vocab_size: int
    block_size: int
    num_blocks: int  # usable blocks; ids are 0 .. num_blocks-1
    kv_bytes_per_token: int
    weight_bytes: int
    ops: str  # which implementation serves each op, one line
    num_host_slots: int = 0  # blocks that host memory holds besides; ids are 0 .. num_host_slots-1
    block_bytes: int = 0  # what one copy moves
    copy_block_s: float = 0.0  # measured at load: one block to host memory or back
    token_s: float = 0.0  # measured at load: computing one token of a long prompt


class StoredBlock(NamedTuple):
    """A block on disk: KV of `token_ids` after the prefix that `parent` stands for."""

    record: int  # where it lies; the store knows
    digest: bytes  # of the prefix that ends with it (core.prefix_tree)
    parent: bytes  # of the prefix before it
    token_ids: bytes  # int32 [block_size]


class StoreOp(NamedTuple):
    """One block to write from a host slot to disk, or to read back."""

    number: int
    slot: int
    block: StoredBlock  # of a write, `record` is -1
    is_write: bool


class StoreResult(NamedTuple):
    """The end of a StoreOp. `record` is where a written block lies; -1 if it isn't written."""

    number: int
    ok: bool  # of a read: the slot holds what was asked for, compared and checksummed
    record: int = -1
    dropped: tuple[int, ...] = ()  # records that are gone, to make room


class BlockStore(Protocol):
    """Blocks on disk. No method but `close` waits for the disk."""

    def index(self) -> Iterable[StoredBlock]:
        """What was there when it was opened, parents first."""

    def submit(self, op: StoreOp) -> None:
        """Begin; its result comes in the order submitted."""

    def on_result(self, callback: Callable[[StoreResult], None]) -> None:
        """Call this with each result, on the store's own thread. Before the first `submit`."""

    def close(self) -> None:
        """Finish the writes that were submitted, drop the reads. Idempotent."""


class Runner(Protocol):
    """The device side. Every method is called on the device thread."""

    store: BlockStore | None  # over the host slots, from `load` until `close`; any thread

    def load(self, progress: Callable[[str, float], None]) -> RunnerInfo:
        """Load weights, plan and take KV memory. `progress(stage, fraction)`. ModelLoadError."""

    def step(self, step: StepInput) -> StepOutput:
        """Run one step. A failure is a StepOutput with `error`, never an exception."""

    def close(self) -> None:
        """Give back all memory."""


def pack_ints(values: Iterable[int]) -> bytes:
    """int32, native endian."""
    return array("i", values).tobytes()


def unpack_ints(data: bytes) -> array[int]:
    """The inverse of `pack_ints`."""
    values = array("i")
    values.frombytes(data)
    return values
