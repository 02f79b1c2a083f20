"""What copying a block and computing a token cost here: what the scheduler weighs swapping by.

Owns the steps that are timed, in milliseconds and once, when a model has been loaded and nobody has
a row yet. Knows a runner by its steps alone. Invariant: afterwards no row is taken, and what blocks
and slots hold means nothing, as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..errors import ModelLoadError
from ..protocol import Ask, CopyKind, RowAdded, RowSampling, StepInput, StepOutput, pack_ints
from .kv_plan import KVCachePlan

COPY_BYTES = 4 << 20  # copied each way in a round: more than a core's own cache has, if there is
MAX_COPIES = 8
COPY_ROUNDS = 3  # the first commits memory
PROMPT_LENS = (8, 32, 128)  # the longer, the less a step's fixed cost counts
PROMPTS_S = 0.05  # not begun if they would take longer together

_GREEDY = RowSampling(0.0, 1.0, 0, 0.0, 0.0, 0.0, 1.0, 0, 0, 0, -1, b"", b"", b"")


class StepCosts(NamedTuple):
    """Seconds; 0.0 where there is nothing to measure."""

    copy_block_s: float
    token_s: float


def measure_costs(
    run: Callable[[StepInput], StepOutput], plan: KVCachePlan, max_tokens: int
) -> StepCosts:
    """`max_tokens`: the most that a step may have. ModelLoadError if a step fails."""

    def run_sound(step: StepInput) -> StepOutput:
        output = run(step)
        if output.error:
            raise ModelLoadError(f"a first step has failed: {output.error}")
        return output

    return StepCosts(_copy_block_s(run_sound, plan), _token_s(run_sound, plan, max_tokens))


def _copy_block_s(run: Callable[[StepInput], StepOutput], plan: KVCachePlan) -> float:
    """Of one copy, to host memory or back."""
    num_copies = min(
        MAX_COPIES, max(1, COPY_BYTES // plan.block_bytes), plan.num_blocks, plan.num_host_slots
    )
    if num_copies == 0:
        return 0.0
    copies = [
        (number, kind, number % num_copies, number % num_copies)
        for number, kind in enumerate([CopyKind.OUT] * num_copies + [CopyKind.IN] * num_copies)
    ]
    packed = pack_ints(value for copy in copies for value in copy)
    step = StepInput(0, b"", (), b"", b"", packed)
    return min(run(step).copies_s for _ in range(COPY_ROUNDS)) / len(copies)


def _token_s(run: Callable[[StepInput], StepOutput], plan: KVCachePlan, max_tokens: int) -> float:
    """Of a token of the longest prompt that is computed in time."""
    longest = min(max_tokens, plan.max_model_len)
    spent_s = token_s = 0.0
    removed = b""
    for length in sorted({min(length, longest) for length in PROMPT_LENS}):
        if spent_s + token_s * length > PROMPTS_S:
            break
        blocks = pack_ints(range(-(-length // plan.block_size)))
        row = RowAdded(0, length, bytes(4 * length), blocks, _GREEDY)
        scheduled = pack_ints((0, 0, length, Ask.NONE))
        duration_s = run(StepInput(0, removed, (row,), b"", scheduled)).duration_s
        spent_s, token_s, removed = spent_s + duration_s, duration_s / length, pack_ints((0,))
    run(StepInput(0, removed, (), b"", b""))
    return token_s
