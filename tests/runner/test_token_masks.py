"""Which tokens masks leave, in numpy, in the extension and in the fake that the engine's tests use,
against the rules written with sets."""

from __future__ import annotations

import random
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from fake_rows import FakeRow
from runner.support import GREEDY, mask_words
from runner.test_native_sampler import row

from streamkv import _cpu
from streamkv.protocol import RowAdded, RowSampling, pack_ints
from streamkv.runner.token_masks import TokenMasks


class Case(NamedTuple):
    vocab_size: int
    grammar: set[int] | None
    allowed: list[int]
    words: list[tuple[int, ...]]
    stop_ids: list[int]
    min_tokens: int
    prompt: list[int]
    output: list[int]

    def expected(self) -> set[int]:
        """From the strongest to the weakest; one that would leave nothing isn't applied."""
        left = set(range(self.vocab_size))
        if self.grammar is not None:
            left = left & self.grammar or left
        if self.allowed:
            left = left & set(self.allowed) or left
        bad = {word[-1] for word in self.words if ends_with(self.output, word[:-1])}
        left = left - bad or left
        if len(self.output) < self.min_tokens:
            left = left - set(self.stop_ids) or left
        return left

    def sampling(self) -> RowSampling:
        return msgspec.structs.replace(
            GREEDY,
            allowed_ids=pack_ints(self.allowed),
            bad_words=pack_ints(self.packed_words()),
            min_tokens_stop_ids=pack_ints(self.stop_ids),
            min_tokens=self.min_tokens,
            mask_slot=-1 if self.grammar is None else 0,
        )

    def packed_words(self) -> list[int]:
        return [number for word in self.words for number in (len(word), *word)]

    def in_python(self) -> set[int]:
        masks = TokenMasks.build(self.sampling(), self.vocab_size)
        grammar = self.grammar
        words = None
        if masks is not None:
            bits = None if grammar is None else mask_words(grammar, self.vocab_size)
            words = masks.allowed_next(
                np.array(self.output, np.int32), None if bits is None else bits.view(np.uint32)
            )
        if words is None:
            return set(range(self.vocab_size))
        return {i for i in range(32 * len(words)) if int(words[i // 32]) >> i % 32 & 1}

    def in_the_extension(self) -> set[int]:
        """Each allowed token is the greatest of the allowed ones once; no other ever is."""
        found = set()
        fields = row(
            self.prompt + self.output,
            len(self.prompt),
            allowed_ids=self.allowed,
            bad_words=self.packed_words(),
            min_tokens_stop_ids=self.stop_ids,
            min_tokens=self.min_tokens,
            mask=[] if self.grammar is None else mask_words(self.grammar, self.vocab_size).tolist(),
        )
        logits = np.eye(self.vocab_size, dtype=np.float32)
        for token_id, *_ in _cpu.sample_rows(logits, [fields] * self.vocab_size):
            found.add(token_id)
        return found

    def in_the_fake(self) -> set[int]:
        """Each context chooses the first allowed token from another one on."""
        added = RowAdded(
            row=0,
            num_prompt_tokens=len(self.prompt),
            token_ids=pack_ints(self.prompt + self.output),
            block_ids=b"",
            sampling=self.sampling(),
        )
        row, found = FakeRow(added), set()
        for context_crc in range(self.vocab_size):
            mask = None if self.grammar is None else frozenset(self.grammar)
            found.add(row.sample(context_crc, self.vocab_size, (), mask))
            row.token_ids.pop()
        return found


def ends_with(output: list[int], before: tuple[int, ...]) -> bool:
    """Of the output alone: what the prompt ends with counts for nothing."""
    return not before or tuple(output[-len(before) :]) == before


def drawn(rng: random.Random) -> Case:
    vocab_size = rng.choice([1, 2, 31, 32, 33, 64, 100])

    def some(share: float) -> list[int]:
        return [token_id for token_id in range(vocab_size) if rng.random() < share]

    def text(longest: int) -> list[int]:
        return [rng.randrange(min(vocab_size, 3)) for _ in range(rng.randrange(longest + 1))]

    shares = (0.0, 0.03, 0.5, 0.97, 1.0)
    words = [(*text(3), rng.choice([*range(vocab_size)])) for _ in range(rng.choice([0, 0, 3, 60]))]
    return Case(
        vocab_size,
        set(some(rng.choice(shares))) if rng.random() < 0.6 else None,
        some(rng.choice(shares)) if rng.random() < 0.4 else [],
        words,
        some(rng.choice(shares)),
        rng.choice([0, 2, 100]),
        text(3),
        text(4),
    )


def test_what_is_left_is_what_the_rules_say():
    rng = random.Random(7)
    num_yielding = 0
    for number in range(1500):
        case = drawn(rng)
        expected = case.expected()
        assert case.in_python() == expected, case
        assert case.in_the_extension() == expected, case
        if number % 8 == 0:  # it takes its time
            assert case.in_the_fake() == expected, case
        strict = case._replace(grammar=None, allowed=[], words=[], min_tokens=0).expected()
        num_yielding += case.grammar is not None and not case.grammar & strict
    assert num_yielding > 50, "masks that would leave nothing"


NOTHING_ELSE = Case(8, None, [], [], [], 0, [1], [3])
LEFT_ALONE = {
    "an end token that the grammar wants": (
        NOTHING_ELSE._replace(grammar={2}, stop_ids=[2], min_tokens=5),
        {2},
    ),
    "a bad word that the grammar wants": (NOTHING_ELSE._replace(grammar={4}, words=[(3, 4)]), {4}),
    "allowed tokens that it excludes": (NOTHING_ELSE._replace(grammar={4, 5}, allowed=[6]), {4, 5}),
    "a bad word that alone is allowed": (NOTHING_ELSE._replace(allowed=[6], words=[(6,)]), {6}),
    "an end token that bad words leave": (
        NOTHING_ELSE._replace(allowed=[2, 6], words=[(6,)], stop_ids=[2], min_tokens=5),
        {2},
    ),
    "a grammar that allows nothing": (NOTHING_ELSE._replace(grammar=set(), allowed=[6]), {6}),
    "all of them": (
        Case(8, {2, 5}, [5, 6], [(5,)], [5], 9, [1], [3]),
        {5},
    ),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_a_mask_that_would_leave_nothing_is_not_applied(name):
    case, left = LEFT_ALONE[name]
    assert case.expected() == left
    assert case.in_python() == left
    assert case.in_the_extension() == left
    assert case.in_the_fake() == left


@pytest.mark.parametrize(
    ("output", "held"),
    [
        ([], set()),
        ([5], {6}),
        ([4, 5], {6, 9}),
        ([5, 4], set()),
        ([4, 4, 5], {6, 9}),
        ([4, 5, 6], set()),
    ],
)
def test_a_bad_word_holds_its_last_token_where_the_output_ends_with_the_others(output, held):
    words = [(5, 6), (4, 5, 9), (7,)]
    case = Case(12, None, [], words, [], 0, [4, 5], output)
    assert set(range(12)) - case.in_python() == held | {7}
    assert set(range(12)) - case.in_the_extension() == held | {7}


def test_bits_past_the_vocabulary_allow_nothing():
    """A grammar's mask may have them; a last word of ones is no token."""
    fields = row(mask=[0, 0, 0, -16])  # 100 .. 127, and there are 102
    tokens = [one[0] for one in _cpu.sample_rows(np.eye(102, dtype=np.float32), [fields] * 102)]
    assert set(tokens) == {100, 101}
    only_outside = [0, 0, 0, -64]  # 102 .. 127
    masks = TokenMasks.build(msgspec.structs.replace(GREEDY, mask_slot=0), 102)
    left = masks.allowed_next(np.zeros(0, np.int32), np.array(only_outside, np.int32).view("u4"))
    assert np.unpackbits(left.view(np.uint8)).sum() == 102
    tokens = [
        one[0]
        for one in _cpu.sample_rows(np.eye(102, dtype=np.float32), [row(mask=only_outside)] * 102)
    ]
    assert set(tokens) == set(range(102))


def test_words_and_tokens_that_the_vocabulary_lacks_hold_nothing():
    case = Case(10, None, [3, 4, 400, -1], [(4, 50), (60, 3), (-5,)], [], 0, [], [4])
    assert case.in_python() == {3, 4}
