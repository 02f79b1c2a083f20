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
from array import array
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

import msgspec

from .sampling import MAX_LOGPROBS, SamplingParams

__all__ = [
    "MAX_LOGPROBS",
    "Ask",
    "BlockStore",
    "CopyKind",
    "MASK_WAIT_S",
    "MAX_SCORED",
    "NO_MORE_MASKS",
    "FinishReason",
    "MaskBoard",
    "Request",
    "RowAdded",
    "RowLogprobs",
    "RowSampling",
    "Runner",
    "RunnerInfo",
    "SamplingParams",
    "StepInput",
    "StepOutput",
    "StoreOp",
    "StoreResult",
    "StoredBlock",
    "pack_ints",
    "unpack_ints",
]


MAX_SCORED = 64  # positions of prompts that one step scores: each takes a row of logits
MASK_WAIT_S = 0.010  # for how long a step waits for the masks of all its rows together
NO_MORE_MASKS = 2**31 - 1  # in place of a position: none will be published for the slot any more


class FinishReason(enum.StrEnum):
    STOP = "stop"  # end token, stop token id or stop string
    LENGTH = "length"  # max_tokens or the context length reached
    ABORT = "abort"  # cancelled by the client or by shutdown
    ERROR = "error"  # failed on the device


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
    bad_words: tuple[tuple[int, ...], ...] = ()  # sampling.bad_words, each way to write one
    mask_slots: tuple[int, ...] = ()  # of the MaskBoard, one per choice: a grammar's; () = none
    wants_progress: bool = False  # to be told how far the prompt is computed


# --- the device border -----------------------------------------------------------------------


class Ask(enum.IntFlag):
    """What a scheduled row wants from a step."""

    NONE = 0  # compute KV only
    SAMPLE = 1  # sample the token after the last position
    SCORE = 2  # log-probabilities of the prompt's tokens that follow the positions computed


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
    allowed_ids: bytes = b""  # int32 [n], ascending: no other token is sampled; b"" = any is
    bad_words: bytes = b""  # int32: for each its length, then its tokens: never sampled in a row
    mask_slot: int = -1  # of the MaskBoard: its mask holds for the next token; -1 = none
    num_prompt_logprobs: int = -1  # with Ask.SCORE: of the most likely tokens besides; -1 = off

    @classmethod
    def build(cls, request: Request, end_token_ids: Collection[int]) -> RowSampling:
        """Of its first choice, without a grammar. `end_token_ids` end an answer of it."""
        params = request.sampling
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        if params.use_beam_search:  # the most likely tokens are all that is wanted of the device
            width = params.num_sequences  # besides an end token for each beam, if there are so many
            num_logprobs = max(num_logprobs, width + max(width, len(end_token_ids)))
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
            choice=0,
            min_tokens=params.min_tokens,
            num_logprobs=num_logprobs,
            min_tokens_stop_ids=pack_ints(sorted(end_token_ids) if params.min_tokens else ()),
            bias_ids=pack_ints(params.logit_bias),
            bias_values=array("f", params.logit_bias.values()).tobytes(),
            allowed_ids=pack_ints(sorted(params.allowed_token_ids or ())),
            bad_words=pack_ints(
                number for word in request.bad_words for number in (len(word), *word)
            ),
            num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        )

    def of_choice(self, choice: int, mask_slot: int = -1) -> RowSampling:
        """The same for any choice of the request, the packed arrays shared."""
        return msgspec.structs.replace(self, choice=choice, mask_slot=mask_slot)


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

    A row whose mask for that position is not on the board in time is deferred: it gets no token,
    nor from any later step, until one asks for the same position again; it then has as many tokens
    as before. (Steps that were sent ahead may name it meanwhile: what they compute of it is void.)

    Masks are applied after biases and penalties, the strongest first: a grammar's, the allowed
    tokens, bad words, the stop tokens while min_tokens aren't reached. One that would leave no
    token isn't applied, so there is always something to choose.

    A row that asks for scores gets one of each token at start+1 .. start+count that belongs to its
    prompt; a step has at most MAX_SCORED of them.
    """

    step_id: int
    removed: bytes  # int32 [n]: rows whose sequence ended or was preempted
    added: tuple[RowAdded, ...]
    appended: bytes  # int32 [n, 2]: (row, block_id), appended to the row's table in this order
    scheduled: bytes  # int32 [n, 4]: (row, start, count, Ask), batch order; count >= 1
    copies: bytes = b""  # int32 [n, 4]: (number, CopyKind, source, target), made in this order


class RowLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities under the model's own distribution (no penalty, temperature 1)."""

    logprob: float  # of the sampled token, or of a prompt's
    rank: int  # of that token, 1 = most likely; 0: of a prompt's whose logits were not finite
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
    deferred: bytes = b""  # int32 [n]: places in `sampled` without a token: no mask in time
    scored: tuple[RowLogprobs, ...] = ()  # in `scheduled`'s order, then by position


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
    full_model_len: int = 0  # what max_model_len would be with enough KV memory
    kv_bound: str = ""  # why there is no more KV memory and what gives more, where it matters


class StoredBlock(NamedTuple):
    """A block on disk: KV of `token_ids` after the prefix that `parent` stands for."""

    record: int  # where it lies; the store knows
    digest: bytes  # of the prefix that ends with it (core.kv.prefix_tree)
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
    # Of a read: the slot holds what was asked for, compared and checksummed. Of a write: it didn't
    # fail; without a record it wasn't tried.
    ok: bool
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


class MaskBoard(Protocol):
    """Which tokens grammars allow next, where the device finds it: one bitmask for each slot.

    A mask is written by one thread at a time, the one that has its matcher, and read by the device
    once it was published; until the token that it is for has come, nobody writes it again.
    Positions of a slot only grow: for one that has been passed nobody waits. Any thread may call
    these.
    """

    @property
    def num_words(self) -> int:
        """Of a mask: token i is bit i % 32 of word i // 32."""

    def add(self) -> int:
        """A slot, nothing published."""

    def remove(self, slot: int) -> None:
        """Give it back; the caller knows that no row has it any more."""

    def words(self, slot: int) -> memoryview:
        """Its mask, to be written: int32 [num_words], valid until it is removed."""

    def publish(self, slot: int, position: int) -> None:
        """What was written holds for the token at that position of the sequence; NO_MORE_MASKS:
        for none. Wakes the device if it waits for that or an earlier one. Nothing happens if a
        later one was published."""


class Runner(Protocol):
    """The device side. Every method is called on the device thread."""

    store: BlockStore | None  # over the host slots, from `load` until `close`; any thread
    masks: MaskBoard | None  # from `load` until `close`; any thread. None: grammars can't be had

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
