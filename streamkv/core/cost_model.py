"""CostModel: whether it is quicker to move a preempted sequence's KV or to compute it again.

Owns two numbers, the seconds that a block's copy and a token's computation take. They begin with
what the runner measured at load and follow what steps report. Must not know sequences or blocks.
"""

from __future__ import annotations

WEIGHT = 0.1  # of the latest step


class CostModel:
    """Zero means unknown; what isn't known to be quicker isn't done."""

    __slots__ = ("_min_num_tokens", "copy_block_s", "token_s")

    def __init__(self, copy_block_s: float, token_s: float, *, min_num_tokens: int) -> None:
        """`min_num_tokens`: steps with fewer say nothing of what a token of a prompt takes."""
        self.copy_block_s = copy_block_s
        self.token_s = token_s
        self._min_num_tokens = min_num_tokens

    def is_swap_quicker(self, num_blocks: int, num_tokens: int) -> bool:
        """Out and in again, or all computed once more?"""
        return 2 * num_blocks * self.copy_block_s < num_tokens * self.token_s

    def learn(
        self, num_tokens: int, num_copies: int, *, duration_s: float, copies_s: float
    ) -> None:
        """From one step."""
        if num_copies and copies_s > 0.0:
            self.copy_block_s = _follow(self.copy_block_s, copies_s / num_copies)
        compute_s = duration_s - copies_s
        if num_tokens >= self._min_num_tokens and compute_s > 0.0:
            self.token_s = _follow(self.token_s, compute_s / num_tokens)


def _follow(old: float, new: float) -> float:
    return old + WEIGHT * (new - old) if old else new
