"""SequenceGroup: the sequences that are computed for one request, and what they are to each other.

Owns who computes the prompt for all (the leader), who waits for that, and which sequence is which
beam. Must not know rows, blocks or steps. Invariant: of the sequences that have not ended, each is
the leader, aside, spare, or on its own way; only beams are ever spare.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from ..protocol import Request, RowLogprobs, RowSampling
from .beam import BeamSearch, Hypothesis
from .sequence import NO_ROW, Sequence, SequenceStatus


class Heir(NamedTuple):
    """A sequence that goes on with a beam."""

    sequence: Sequence
    parent: Sequence  # whose tokens and blocks it begins with; itself, where it stays in place
    token_id: int
    is_sampled: bool  # the parent's row on the device has just this token


class SequenceGroup:
    """Of a request with one choice, a group of one."""

    __slots__ = (
        "_candidates",
        "_eos_token_ids",
        "aside",
        "beams",
        "leader",
        "request",
        "search",
        "sequences",
        "spare",
    )

    def __init__(
        self,
        request: Request,
        *,
        first_arrival: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        params = request.sampling
        self._eos_token_ids = frozenset() if params.ignore_eos else eos_token_ids
        end_token_ids = self._eos_token_ids.union(params.stop_token_ids)
        token_ids = array("i", request.prompt_token_ids)
        sampling = RowSampling.build(request, end_token_ids)
        self.request = request
        self.sequences = [
            Sequence(
                request,
                choice,
                arrival=first_arrival + choice,
                token_ids=token_ids,
                end_token_ids=end_token_ids,
                sampling=sampling,
            )
            for choice in range(params.num_sequences)
        ]
        # Computes the prompt; None once it is cached, so that each can go on by itself.
        self.leader: Sequence | None = self.sequences[0]
        self.aside: list[Sequence] = self.sequences[1:]  # wait for the leader, in order
        self.search: BeamSearch | None = None
        self.beams: list[Sequence] = []  # the best first
        self.spare: list[Sequence] = []  # not a beam now
        self._candidates: dict[Sequence, tuple[int, RowLogprobs]] = {}
        if params.use_beam_search:
            self._begin_search(end_token_ids)
        for sequence in self.sequences:
            sequence.group = self

    def _begin_search(self, end_token_ids: frozenset[int]) -> None:
        request, first = self.request, self.sequences[0]
        self.search = BeamSearch(
            len(self.sequences),
            num_return=request.sampling.n,
            length_penalty=request.sampling.length_penalty,
            early_stopping=request.sampling.early_stopping,
            end_token_ids=end_token_ids,
            num_prompt_tokens=first.num_prompt_tokens,
            max_num_tokens=first.max_num_tokens,
        )
        self.beams = [first]
        self.spare, self.aside = self.aside, []
        for sequence in self.sequences:
            sequence.is_beam = True
            sequence.end_token_ids = frozenset()  # the search sees to it
            sequence.max_num_tokens = sequence.halt_at = sequence.num_prompt_tokens + 1

    @property
    def num_held_back(self) -> int:
        """Sequences for which rows and blocks are kept."""
        return len(self.aside) + len(self.spare)

    @property
    def is_over(self) -> bool:
        """All have ended, and hold nothing."""
        return all(s.finish_reason is not None and s.row == NO_ROW for s in self.sequences)

    def stop_reason(self, token_id: int) -> int | None:
        """The token that ended a sequence, if it was one of the request's own."""
        return None if token_id in self._eos_token_ids else token_id

    def gather(self) -> Sequence | None:
        """Begin anew: the first of those that wait leads, the others are aside. None: no one."""
        waiting = [
            sequence
            for sequence in self.sequences
            if sequence.status is SequenceStatus.WAITING and sequence not in self.spare
        ]
        self.leader, self.aside = (waiting[0], waiting[1:]) if waiting else (None, [])
        return self.leader

    def let_go(self) -> list[Sequence]:
        """The prompt is cached: those who waited for it, in order."""
        aside, self.leader, self.aside = self.aside, None, []
        return aside

    def drop(self, sequence: Sequence) -> bool:
        """It ends. Whether it was aside or spare."""
        for held_back in (self.aside, self.spare):
            if sequence in held_back:
                held_back.remove(sequence)
                return True
        return False

    # --- beams -------------------------------------------------------------------------------

    def take_candidates(self, beam: Sequence, token_id: int, logprobs: RowLogprobs) -> bool:
        """What could continue a beam, and what the device took. Whether all beams have theirs."""
        self._candidates[beam] = token_id, logprobs
        return len(self._candidates) == len(self.beams)

    def drop_candidates(self) -> None:
        self._candidates.clear()

    def advance(self) -> list[Heir]:
        """The next beams, the best first; none: it is over. The first child of a beam stays in its
        place, others take the places of those that have no child."""
        assert self.search is not None, "only beams advance"
        parents = self.beams
        sampled = [self._candidates[beam] for beam in parents]
        self._candidates.clear()
        chosen = self.search.advance([logprobs for _, logprobs in sampled])
        if self.search.is_done:
            return []
        childless = set(range(len(parents))).difference(index for index, _ in chosen)
        free = [*(parents[index] for index in sorted(childless)), *self.spare][::-1]
        heirs: list[Heir] = []
        placed: set[int] = set()
        for index, token_id in chosen:
            sequence = free.pop() if index in placed else parents[index]
            placed.add(index)
            heirs.append(Heir(sequence, parents[index], token_id, token_id == sampled[index][0]))
        self.beams = [heir.sequence for heir in heirs]
        self.spare = free[::-1]
        return heirs

    def hypotheses(self) -> list[Hypothesis]:
        assert self.search is not None, "only beams have hypotheses"
        return self.search.hypotheses()

    def holds_session(self, sequence: Sequence) -> bool:
        """Whether it is the one whose blocks are kept for the session's next request."""
        return sequence is (self.beams or self.sequences)[0]
