"""Harness: a Scheduler, a FakeRunner and perhaps a FakeStore, stepped by hand or to the end.

It checks what must hold at any time: `check_integrity` after each command, no event after a
sequence's last one, steps that survive their wire format, no violation seen by runner or store.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence as Tokens

from core.grammars import FakeGrammars
from fakes import (
    FakeMaskBoard,
    FakeRunner,
    FakeStore,
    expected_beams,
    expected_scores,
    expected_tokens,
)

from streamkv.core.scheduler import (
    NO_TOKEN,
    PromptEvent,
    Scheduler,
    SchedulerOutput,
    TokenEvent,
)
from streamkv.core.sequence import Sequence
from streamkv.protocol import (
    CopyKind,
    FinishReason,
    Request,
    RowLogprobs,
    SamplingParams,
    StepInput,
    unpack_ints,
)
from streamkv.step_bytes import decode_step, encode_step

VOCAB_SIZE = 31
EOS = 3
MAX_STEPS = 10_000  # of one `run`


class Harness:
    """Steps are run by the device when they are committed, at most `depth` + 1 are in flight."""

    def __init__(
        self,
        *,
        depth: int = 0,
        vocab_size: int = VOCAB_SIZE,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 256,
        eos_token_ids: frozenset[int] = frozenset(),
        enable_prefix_caching: bool = True,
        num_host_slots: int = 0,
        copy_delay: int = 0,
        store: FakeStore | None = None,
        max_copies: int = 32,
        max_session_blocks: int = 0,
        preemption_mode: str = "auto",
        copy_block_s: float = 0.0,
        min_lookahead: int = 0,  # pools are full, and sequences preempted, as often as can be
        token_s: float = 0.0,
        answers_at_once: int = 1000,
        forced_at_once: int = 1000,
        masks_are_late: bool = False,
        forces: str = "never",
        check_every: int = 1,
    ) -> None:
        """`answers_at_once`: events of beams that are taken after each commit, at most;
        `forced_at_once`: forced tokens, likewise, and after masks were made. Masks that are late
        are made by `make_masks` only, or when nothing else is left to do. `forces`: how often
        tokens that a grammar leaves no choice for are forced; "never", "sometimes" or "always".
        """
        self.depth = depth
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.max_copies = max_copies
        self.runner = FakeRunner(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            num_host_slots=num_host_slots,
            copy_delay=copy_delay,
            store=store,
            masks=FakeMaskBoard(vocab_size),
        )
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            enable_prefix_caching=enable_prefix_caching,
            num_host_slots=num_host_slots,
            has_store=store is not None,
            max_copies=max_copies,
            max_session_blocks=max_session_blocks,
            preemption_mode=preemption_mode,
            copy_block_s=copy_block_s,
            token_s=token_s,
            min_lookahead=min_lookahead,
        )
        self.store = store
        if store is not None:
            store.on_result(self.scheduler.on_store_result)
            self.scheduler.insert_stored(store.index())
        self.in_flight: deque[StepInput] = deque()
        self.live: dict[Sequence, None] = {}  # ordered: those without a terminal event
        self.grammars = FakeGrammars(
            self.scheduler, self.runner.masks, are_late=masks_are_late, forces=forces
        )
        self.scores: dict[Sequence, list[RowLogprobs]] = {}
        self.progress: dict[Sequence, list[int]] = {}
        self.num_scheduled = 0  # steps
        self._ids = itertools.count()
        self._num_commands = 0
        self._answers_at_once = answers_at_once
        self._forced_at_once = forced_at_once
        self.num_forced = 0  # tokens that came without a step
        self._check_every = check_every

    # --- commands ----------------------------------------------------------------------------

    def add(
        self,
        prompt_token_ids: Tokens[int],
        max_tokens: int = 8,
        *,
        seed: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        session_id: str = "",
        session_ttl_s: float = 10.0,
        grammar: int | None = None,
        wants_progress: bool = False,
        **sampling: object,
    ) -> list[Sequence]:
        """Those that will have events. `grammar`: the seed of the first choice's."""
        params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        slots: tuple[int, ...] = ()
        if grammar is not None:
            slots = self.grammars.open(grammar, params.num_sequences, len(prompt_token_ids))
        sequences = self.scheduler.add(
            Request(
                request_id=f"r{next(self._ids)}",
                model="fake",
                prompt_token_ids=tuple(prompt_token_ids),
                sampling=params,
                seed=seed,
                max_tokens=max_tokens,
                priority=priority,
                cache_salt=cache_salt,
                session_id=session_id,
                session_ttl_s=session_ttl_s,
                mask_slots=slots,
                wants_progress=wants_progress,
            )
        )
        if params.use_beam_search:
            sequences = sequences[: params.n]
        self.live.update(dict.fromkeys(sequences))
        if grammar is not None:
            self.grammars.bind(sequences, grammar)
            self.take_forced()
        self.check()
        return sequences

    def add_one(self, prompt_token_ids: Tokens[int], max_tokens: int = 8, **rest: int) -> Sequence:
        (sequence,) = self.add(prompt_token_ids, max_tokens, **rest)
        return sequence

    def schedule(self) -> SchedulerOutput | None:
        output = self.scheduler.schedule()
        if output is not None:
            message = encode_step(output.step)
            step = decode_step(message)
            assert step == output.step
            assert (
                len([c for c in output.copies if c.kind is not CopyKind.BLOCK]) <= self.max_copies
            )
            self.in_flight.append(step)
            self.num_scheduled += 1
        if self.store is not None:
            for op in self.scheduler.take_store_ops():
                self.store.submit(op)
        self.check()
        return output

    def commit(self) -> list[TokenEvent]:
        """Run the oldest step on the device and take in its result."""
        events = self.scheduler.commit(self.runner.step(self.in_flight.popleft()))
        assert self.runner.violations == [], self.runner.violations
        self._note_prompts(self.scheduler.take_prompt_events())
        self._note(events)
        events += self.take_forced()
        self.check()
        return events + self.take_answers()

    def make_masks(self, num: int | None = None) -> list[TokenEvent]:
        """Some that are due. Returns what is forced then."""
        self.grammars.make_masks(num)
        events = self.take_forced()
        self.check()
        return events

    def pause(self, sequence: Sequence) -> None:
        self.scheduler.pause(sequence)
        self.check()

    def resume(self, sequence: Sequence) -> None:
        self.scheduler.resume(sequence)
        self.check()

    def take_answers(self) -> list[TokenEvent]:
        """Events of beams: they come once these have ended."""
        events = self.scheduler.take_answers(self._answers_at_once)
        assert len(events) <= self._answers_at_once
        assert all(sequence.is_beam for sequence, *_ in events)
        self._note(events)
        return events

    def take_forced(self) -> list[TokenEvent]:
        """Some tokens that come without steps, and those that grammars force after them."""
        forced: list[TokenEvent] = []
        while len(forced) < self._forced_at_once:
            events = self.scheduler.take_forced(self._forced_at_once - len(forced))
            if not events:
                break
            self._note(events)
            forced += events
        assert len(forced) <= self._forced_at_once
        self.num_forced += len(forced)
        return forced

    def _note(self, events: list[TokenEvent]) -> None:
        for event in events:
            self._note_one(event)
            if event.finish_reason is None:
                self.grammars.consume(event.sequence, event.token_id)
        if not self.grammars.are_late:
            self.grammars.make_masks()

    def _note_one(self, event: TokenEvent) -> None:
        sequence, token_id, _, reason = event
        assert sequence in self.live, f"{sequence} has an event after its last one"
        if token_id == NO_TOKEN and reason is FinishReason.STOP:
            assert self.oracle(sequence) is None
        else:
            assert (token_id == NO_TOKEN) == (reason is FinishReason.ERROR)
        if reason is not None:
            assert reason == sequence.finish_reason
            del self.live[sequence]

    def _note_prompts(self, events: list[PromptEvent]) -> None:
        for sequence, num_computed, scored in events:
            assert sequence in self.live and sequence.choice == 0
            told = self.progress.setdefault(sequence, [])
            assert scored or num_computed > max(told, default=0), "it tells nothing"
            assert max(told, default=0) <= num_computed <= sequence.num_prompt_tokens
            told.append(num_computed)
            self.scores.setdefault(sequence, []).extend(scored)

    def finish(self, sequence: Sequence, reason: FinishReason = FinishReason.ABORT) -> None:
        """Beams end together."""
        for one in sequence.group.sequences if sequence.is_beam else [sequence]:
            self.live.pop(one, None)
        self.scheduler.finish(sequence, reason)
        self.check()

    def deliver(self, num: int | None = None) -> None:
        """Results of the store."""
        assert self.store is not None
        self.store.deliver(num)
        assert self.store.violations == [], self.store.violations
        self.check()

    # --- to the end --------------------------------------------------------------------------

    def fill(self) -> None:
        """Send as many steps as the depth allows."""
        while len(self.in_flight) <= self.depth and self.schedule() is not None:
            pass

    def advance(self) -> list[TokenEvent]:
        """Fill, then commit one step. There must be one, or news of the store, whenever there is
        work (I5)."""
        self.fill()
        if self.in_flight:
            return self.commit()
        if self.store is not None and self.store.num_pending:
            self.deliver()
        elif self.scheduler.has_answers:
            return self.take_answers()
        elif self.scheduler.has_forced:
            return self.take_forced()
        elif self.grammars.due:
            return self.make_masks()
        else:
            waiting = self.going_on
            assert not waiting, f"nothing is in flight, scheduled or expected, but {waiting} wait"
        return []

    def run_while_paused(self) -> list[TokenEvent]:
        """Advance until only paused ones are left."""
        events: list[TokenEvent] = []
        for _ in range(MAX_STEPS):
            if not (self.scheduler.has_work or self.scheduler.is_busy):
                break
            events += self.advance()
        self.scheduler.check_integrity()
        return events

    def run(self) -> list[TokenEvent]:
        """Advance until all is done and everything is free."""
        events = self.run_while_paused()
        assert self.scheduler.num_held_blocks == 0
        assert self.live == {}
        assert self.runner.masks.num_slots == 0
        return events

    # --- checks ------------------------------------------------------------------------------

    @property
    def going_on(self) -> list[Sequence]:
        """Those that are not paused."""
        paused = self.scheduler._roster.paused
        return [sequence for sequence in self.live if sequence.group not in paused]

    def check(self) -> None:
        self._num_commands += 1
        self.grammars.remove_slots()
        if self._num_commands % self._check_every == 0:
            self.scheduler.check_integrity()

    def oracle(self, sequence: Sequence) -> list[int] | None:
        """What it would answer alone; None if a search has fewer answers than that."""
        request, params = sequence.request, sequence.request.sampling
        end_token_ids = {
            *params.stop_token_ids,
            *(() if params.ignore_eos else self.eos_token_ids),
        }
        if params.use_beam_search:
            answers = expected_beams(
                request.prompt_token_ids,
                request.max_tokens,
                self.vocab_size,
                width=params.num_sequences,
                num_return=params.n,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                end_token_ids=end_token_ids,
            )
            return answers[sequence.choice] if sequence.choice < len(answers) else None
        return expected_tokens(
            request.prompt_token_ids,
            request.max_tokens,
            self.vocab_size,
            end_token_ids=end_token_ids,
            min_tokens=params.min_tokens,
            grammar=self.grammars.seeds.get(sequence),
            temperature=params.temperature,
            seed=request.seed,
            choice=sequence.choice,
        )

    def check_answer(self, sequence: Sequence) -> None:
        """A sequence that ended by itself has the oracle's answer; else the beginning of it."""
        self._check_prompt(sequence)
        expected, output = self.oracle(sequence) or [], sequence.output_token_ids
        if sequence.is_beam and sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return  # it never had an answer
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert output == expected, sequence
        else:
            assert output == expected[: len(output)], sequence

    def _check_prompt(self, sequence: Sequence) -> None:
        """Scores and progress are whole if it ended by itself, else a beginning."""
        is_whole = sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        scores, told = self.scores.get(sequence, []), self.progress.get(sequence, [])
        prompt, num_logprobs = (
            sequence.request.prompt_token_ids,
            sequence.sampling.num_prompt_logprobs,
        )
        expected: list[RowLogprobs] = []
        if sequence.wants_scores:
            expected = expected_scores(prompt, num_logprobs, self.vocab_size)
        assert scores == (expected if is_whole else expected[: len(scores)]), sequence
        if is_whole and sequence.wants_prompt_events and sequence not in self.grammars.seeds:
            assert told[-1] == len(prompt), sequence


def rows(step: StepInput) -> list[tuple[int, int, int, int]]:
    """(row, start, count, ask) of each scheduled row."""
    values = iter(unpack_ints(step.scheduled))
    return list(zip(*[values] * 4, strict=True))
