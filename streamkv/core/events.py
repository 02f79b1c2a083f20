"""What the scheduler tells of sequences: their tokens and ends, and how far a prompt is computed.

Owns the events' shape and the rule where a token ends its sequence. Must not know where a token
came from. Invariant (I8): a sequence has one terminal event, or was ended from outside, and there
is none after it.
"""

from __future__ import annotations

from typing import NamedTuple

from ..protocol import FinishReason, RowLogprobs
from .roster import Roster
from .sequence import Sequence

NO_TOKEN = -1  # token_id of a terminal event that carries no token


class TokenEvent(NamedTuple):
    """One committed token, the end of a sequence, or both."""

    sequence: Sequence
    token_id: int  # NO_TOKEN if it failed; with STOP: a search had no answer for this choice
    logprobs: RowLogprobs | None
    finish_reason: FinishReason | None  # set in the last event of a sequence, in no other


# A NamedTuple's own way takes twice as long, and there is one for each token.
new_event = tuple.__new__


class PromptEvent(NamedTuple):
    """A chunk of a prompt is computed."""

    sequence: Sequence
    num_computed_tokens: int  # of the prompt; it never goes back
    scored: tuple[RowLogprobs, ...]  # of the prompt's next tokens; the very first has none


def append_token(
    roster: Roster, sequence: Sequence, token_id: int, logprobs: RowLogprobs | None
) -> TokenEvent:
    """The sequence's next token, which may be its last."""
    sequence.token_ids.append(token_id)
    reason = None
    if token_id in sequence.end_token_ids:
        reason = FinishReason.STOP
        sequence.stop_reason = sequence.group.stop_reason(token_id)
    elif len(sequence.token_ids) >= sequence.max_num_tokens:
        reason = FinishReason.LENGTH
    if reason is not None:
        roster.end(sequence, reason)
    return new_event(TokenEvent, (sequence, token_id, logprobs, reason))
