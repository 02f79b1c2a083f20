"""Sequence: one choice of one request, from its prompt to its last token.

Owns the token ids and the counters from which everything else about a sequence is derived. Must
not know the device, text or other sequences. Only the scheduler (and its KVManager, for the
block table) changes a Sequence; all others read.

    0         num_computed_tokens   len(token_ids)        num_tokens
    |  scheduled  |   to compute   |  pending: sampled, not committed  |

At `halt_at` tokens the last one isn't computed, so none is asked for: at the end, and before it
while something must come first.
"""

from __future__ import annotations

import enum
from array import array
from typing import TYPE_CHECKING

from ..protocol import FinishReason, Request, RowSampling
from .integrity import IntegrityError
from .kv.prefix_node import PrefixNode
from .kv.types import Keep

if TYPE_CHECKING:
    from .groups import SequenceGroup

NO_ROW = -1


class SequenceStatus(enum.Enum):
    WAITING = enum.auto()  # for admission, for its group, or to resume after preemption
    LOADING = enum.auto()  # waits for blocks of its prefix from host memory or disk
    RUNNING = enum.auto()  # has a row
    FINISHED = enum.auto()  # finish_reason says why


class Sequence:
    """State of one choice, candidate or beam. Identity is equality."""

    group: SequenceGroup  # it sets this itself

    __slots__ = (
        "block_table",
        "choice",
        "end_token_ids",
        "finish_reason",
        "group",
        "halt_at",
        "is_beam",
        "is_gated",
        "is_lost",
        "is_row_known",
        "keep",
        "last_step_id",
        "mask_position",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_forced_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scored_tokens",
        "num_slots",
        "num_told_tokens",
        "order",
        "prefix_node",
        "request",
        "row",
        "sampling",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request: Request,
        choice: int,
        *,
        arrival: int,
        token_ids: array[int],
        end_token_ids: frozenset[int],
        sampling: RowSampling,
    ) -> None:
        """`token_ids` is the prompt (int32); the request's choices share it until they are
        admitted, so that many choices of a long prompt can wait. `sampling` is any choice's."""
        self.request = request
        self.choice = choice
        self.order = (request.priority, arrival)  # of service: lower first, unique
        self.end_token_ids = end_token_ids  # sampling one of them ends the sequence
        self.sampling = sampling
        self.token_ids = token_ids  # prompt and committed output
        self.num_prompt_tokens = len(self.token_ids)
        # At the end; of a beam: once it waits for the others.
        self.max_num_tokens = self.num_prompt_tokens + request.max_tokens
        self.halt_at = self.max_num_tokens
        self.num_computed_tokens = 0  # KV written or in flight; 0 without blocks
        self.num_pending_tokens = 0  # sampled on the device, not committed
        # Prefix hit at the first admission; None before it.
        self.num_cached_tokens: int | None = None
        self.num_forced_tokens = 0  # of the committed output: no step gave them
        self.num_preemptions = 0
        self.block_table: list[int] = []
        self.num_slots = 0  # tokens that the table takes as it is; a forked one takes none
        self.prefix_node: PrefixNode | None = None  # deepest one found or published
        self.keep = Keep.CACHE  # what becomes of its blocks when they are given back
        self.row = NO_ROW
        self.is_row_known = False  # the device has the row, with this table and these tokens
        self.is_beam = False
        self.last_step_id = -1  # the latest step that names it
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.is_lost = False  # a step failed to compute its KV; so it ends, or has ended already
        self.stop_reason: int | None = None  # the stop token id, if one of the request's ended it
        self.mask_position = self.num_prompt_tokens  # of the latest mask that its grammar has made
        self.is_gated = False  # it isn't run ahead of its masks, since one came late
        # Of the prompt, from its beginning: they have a score, it is on its way, or needs none.
        self.num_scored_tokens = 1 if self.wants_scores else self.num_prompt_tokens
        self.num_told_tokens = 0  # of the prompt: computed, as its events say or will say

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.choice

    @property
    def mask_slot(self) -> int:
        """Where its grammar's masks are; -1 = it has none."""
        slots = self.request.mask_slots
        return slots[self.choice] if slots else -1

    @property
    def awaits_mask(self) -> bool:
        """It runs on only once its grammar has said which tokens may come next."""
        return self.is_gated and self.mask_position < len(self.token_ids) + self.num_pending_tokens

    @property
    def wants_scores(self) -> bool:
        """Of its prompt's tokens; those of all choices are the same, so it is the first's work."""
        return self.choice == 0 and self.sampling.num_prompt_logprobs >= 0

    @property
    def wants_prompt_events(self) -> bool:
        return self.choice == 0 and (self.request.wants_progress or self.wants_scores)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, the pending ones included."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        """Committed output."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def has_sampled(self) -> bool:
        """A step gave a token, so that all of the prompt was computed."""
        return self.num_output_tokens > self.num_forced_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to schedule: all but those scheduled, and never the last one of the answer."""
        num_tokens = len(self.token_ids) + self.num_pending_tokens
        if num_tokens == self.halt_at:
            num_tokens -= 1
        return num_tokens - self.num_computed_tokens

    def __repr__(self) -> str:
        request_id, choice = self.key
        return (
            f"<Sequence {request_id}/{choice} {self.status.name} row={self.row} "
            f"tokens={self.num_prompt_tokens}+{self.num_output_tokens}+{self.num_pending_tokens} "
            f"computed={self.num_computed_tokens} blocks={len(self.block_table)}>"
        )


def check_queue(queue: list[Sequence], status: SequenceStatus) -> None:
    """I3: a queue is sorted by order, and all in it have its status."""
    orders = [sequence.order for sequence in queue]
    if orders != sorted(set(orders)) or any(s.status is not status for s in queue):
        raise IntegrityError("I3", f"the {status.name} queue is not in order: {queue}")
