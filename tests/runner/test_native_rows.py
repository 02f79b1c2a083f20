"""The rows in C++ against runner/rows.py and runner/sampler.py."""

from __future__ import annotations

import math
import random
from array import array

import msgspec
import numpy as np
import pytest
import torch
from runner.native_steps import (
    BLOCK_SIZE,
    GREEDY,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    NUM_ROWS,
    NUM_SLOTS,
    VOCAB_SIZE,
    RandomSteps,
    make_step,
    mask_board,
    native_runner,
)
from runner.support import mask_words

from streamkv.protocol import (
    RowAdded,
    StepInput,
    StepOutput,
    pack_ints,
    unpack_ints,
)
from streamkv.runner.asks import Asking
from streamkv.runner.rows import Rows
from streamkv.runner.sampler import score
from streamkv.runner.torch_sampling import SampledRows, sample_rows
from streamkv.step_bytes import decode_output, encode_step

BATCH_FIELDS = (
    "token_ids",
    "positions",
    "slots",
    "query_start",
    "context_lens",
    "block_tables",
    "logit_rows",
)


def python_rows(has_mask=lambda slot: False) -> Rows:
    return Rows(
        num_rows=NUM_ROWS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        vocab_size=VOCAB_SIZE,
        num_host_slots=NUM_SLOTS,
        has_mask=has_mask,
    )


def random_logits(num_rows: int, rng: random.Random) -> np.ndarray:
    logits = np.random.default_rng(rng.randrange(2**32)).normal(size=(num_rows, VOCAB_SIZE)) * 3
    logits = logits.astype(np.float32)
    for row in range(num_rows):
        if rng.random() < 0.05:
            logits[row, rng.randrange(VOCAB_SIZE)] = rng.choice([math.nan, math.inf])
    return logits


# --- the oracle: the same step by step ----------------------------------------------------------


class Pair:
    """A native runner and the rows in Python, given the same steps and the same masks."""

    def __init__(self) -> None:
        self.masks = mask_board()
        self.native = native_runner(masks=self.masks)
        self.python = python_rows(self.masks.has)

    def run(self, step: StepInput, rng: random.Random, *, fails: bool = False) -> StepOutput:
        """`fails`: the forward pass does."""
        batch = self.native.prepare(encode_step(step))
        self.python.apply(step)
        scheduled = np.frombuffer(step.scheduled, np.int32).reshape(-1, 4)
        if not len(scheduled):
            assert batch is None
            return decode_output(self.native.sample(random_logits(0, rng)))
        expected = self.python.batch(scheduled)
        asking, scoring = self.python.asking, self.python.scoring
        for name in BATCH_FIELDS:
            got = np.asarray(getattr(batch, name))
            assert got.dtype == np.int32
            np.testing.assert_array_equal(got, getattr(expected, name), err_msg=name)
        num_asking = len(asking.rows)
        logits = random_logits(num_asking + len(scoring.token_ids), rng)
        if fails:
            self.python.keep(asking, np.zeros(num_asking, np.int32), np.zeros(0, np.int32))
            return decode_output(self.native.fail("told to fail"))
        self.publish_some(asking, rng)
        output = decode_output(self.native.sample(logits))
        sampled = sample_rows(torch.from_numpy(logits[:num_asking]), self.python, self.masks, 0.0)
        self.python.keep(asking, sampled.token_ids, sampled.deferred)
        check_sampled(output, sampled)
        scored = torch.from_numpy(logits[num_asking:])
        check_logprobs(output.scored, score(scored, scoring.token_ids, scoring.num_logprobs))
        return output

    def publish_some(self, asking: Asking, rng: random.Random) -> None:
        """Nearly all masks, some of them of another token's."""
        for position, slot in zip(
            asking.positions.tolist(), asking.mask_slots.tolist(), strict=True
        ):
            if slot >= 0 and rng.random() < 0.85:
                allowed = rng.sample(range(VOCAB_SIZE), rng.choice([1, 5, VOCAB_SIZE]))
                self.masks.remove(slot)  # another sequence may have had it, with more tokens
                assert self.masks.add() == slot
                self.masks.words(slot)[:] = memoryview(mask_words(allowed, VOCAB_SIZE))
                self.masks.publish(slot, position - (rng.random() < 0.1))


def check_sampled(output: StepOutput, expected: SampledRows) -> None:
    assert output.error == ""
    assert [*unpack_ints(output.sampled)] == expected.token_ids.tolist()
    assert [*unpack_ints(output.failed)] == expected.failed.tolist()
    assert [*unpack_ints(output.deferred)] == expected.deferred.tolist()
    check_logprobs(output.logprobs, expected.logprobs)


def check_logprobs(found, expected) -> None:
    assert len(found) == len(expected)
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert (got.rank, got.top_ids) == (wanted.rank, wanted.top_ids)
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-5)
            np.testing.assert_allclose(
                np.frombuffer(got.top_logprobs, np.float32),
                np.frombuffer(wanted.top_logprobs, np.float32),
                atol=1e-5,
            )


@pytest.mark.parametrize("seed", range(5))
def test_batches_and_tokens_are_those_of_the_rows_in_python(seed):
    rng = random.Random(seed)
    pair, steps = Pair(), RandomSteps(rng, has_masks=True)
    num_sampled = num_scored = num_deferred = num_void = 0
    for _ in range(150):
        step = steps.next()
        output = pair.run(step, rng, fails=rng.random() < 0.03)
        assert output.step_id == step.step_id
        asking = pair.python.asking
        for place in unpack_ints(output.deferred):
            steps.defer(int(asking.rows[place]), int(asking.positions[place]))
            num_void += bool(asking.is_void[place])
        num_deferred += len(output.deferred) // 4
        num_sampled += len(output.sampled) // 4
        num_scored += len(output.scored)
    assert num_sampled - num_deferred > 50 and num_scored > 100
    assert num_deferred > num_void > 5


def test_what_one_step_samples_the_next_one_reads_also_after_a_failure():
    pair, rng = Pair(), random.Random(0)
    pair.run(make_step(0, [(0, 0, 3, 1), (1, 0, 2, 0)], added=[(0, [5, 6, 7], [9]),
             (1, [8, 9, 1], [3])]), rng)  # fmt: skip
    failed = pair.run(make_step(1, [(0, 3, 1, 1), (1, 2, 1, 1)]), rng, fails=True)
    assert (failed.step_id, failed.sampled, failed.error) == (1, b"", "told to fail")
    pair.run(make_step(2, [(1, 3, 1, 1), (0, 4, 1, 1)], appended=[(0, 10)]), rng)


# --- what breaks the protocol -------------------------------------------------------------------


def row_with(**fields) -> RowAdded:
    sampling = msgspec.structs.replace(GREEDY, **fields)
    return RowAdded(1, 1, pack_ints([1]), pack_ints([0]), sampling)


def scored_row(row: int, num_tokens: int) -> RowAdded:
    sampling = msgspec.structs.replace(GREEDY, num_prompt_logprobs=0)
    return RowAdded(row, num_tokens, pack_ints([4] * num_tokens), pack_ints(range(10)), sampling)


FIRST = make_step(0, added=[(0, [1, 2, 3], [6])])
BAD_STEPS = [
    (make_step(1, [(0, 0, 9, 1)]), "positions 0 to 9 are scheduled, known are 3 tokens in 1"),
    (make_step(1, [(0, 3, 0, 1)]), "positions 3 to 3"),
    (make_step(1, [(0, -1, 1, 1)]), "positions -1 to 0"),
    (make_step(1, [(5, 0, 1, 1)]), "known are 0 tokens in 0 blocks"),
    (make_step(1, [(0, 0, 1, 0), (6, 0, 1, 1)]), "scheduled rows: expected 0 .. 5, got 0 .. 6"),
    (make_step(1, [(-1, 0, 1, 1)]), "scheduled rows"),
    (make_step(1, [(1, 0, 5, 1)], added=[(1, [4] * 5, [3])]), "5 tokens in 1 blocks"),
    (make_step(1, added=[(1, [VOCAB_SIZE], [3])]), "row 1: token ids: expected 0 .. 63"),
    (make_step(1, added=[(1, [5, -1], [3])]), "token ids: expected 0 .. 63, got -1 .. 5"),
    (make_step(1, added=[(1, [4], [NUM_BLOCKS])]), "block ids: expected 0 .. 199"),
    (make_step(1, added=[(1, [4] * 52, [3])]), "row 1: 52 tokens in 1 blocks don't fit"),
    (make_step(1, added=[(1, [4], [3] * 14)]), "1 tokens in 14 blocks don't fit"),
    (make_step(1, added=[(6, [4], [3])]), "added row 6: expected 0 .. 5"),
    (make_step(1, removed=[-1]), "removed rows: expected 0 .. 5, got -1 .. -1"),
    (make_step(1, appended=[(-2, 1)]), "appended rows"),
    (make_step(1, appended=[(0, NUM_BLOCKS)]), "row 0 can't take block 200 as its number 1"),
    (make_step(1, appended=[(0, 7)] * 13), "row 0 can't take block 7 as its number 13"),
    (make_step(1, copies=[(0, 0, 0, 3), (4, 0, 200, 1)]), "copy 4: source: expected a block below"),
    (make_step(1, copies=[(9, 0, 0, -1)]), "copy 9: target: expected a block below 200, got -1"),
    (make_step(1, copies=[(9, 1, 0, 12)]), "copy 9: target: expected a host slot below 12, got 12"),
    (make_step(1, copies=[(9, 1, 200, 0)]), "copy 9: source: expected a block below 200, got 200"),
    (make_step(1, copies=[(9, 2, 12, 0)]), "copy 9: source: expected a host slot below 12, got 12"),
    (make_step(1, copies=[(9, 2, -1, 0)]), "copy 9: source: expected a host slot below 12, got -1"),
    (make_step(1, copies=[(9, 2, 0, 200)]), "copy 9: target: expected a block below 200, got 200"),
    (make_step(1, [(0, 0, 3, 4)]), "row 0: expected to ask 0 to 3, got 4"),
    (make_step(1, [(0, 0, 3, -1)]), "row 0: expected to ask 0 to 3, got -1"),
    (make_step(1, [(0, 0, 3, 2)]), "row 0 asks for scores: expected num_prompt_logprobs from 0"),
    (
        make_step(1, [(1, 0, 40, 2), (2, 0, 30, 3)], added=[scored_row(1, 40), scored_row(2, 30)]),
        "expected at most 64 tokens of prompts to score in a step, got 68",
    ),
    (make_step(1, added=[row_with(mask_slot=0)]), "row 1: expected a slot that is on the mask boa"),
    (make_step(1, added=[row_with(mask_slot=-2)]), "is on the mask board, got -2"),
    (
        make_step(1, added=[row_with(bad_words=pack_ints([1, 5, 3, 6, 7]))]),
        "row 1: bad words: expected 1 to 2 tokens at 2, got 3",
    ),
    (
        make_step(1, added=[row_with(bad_words=pack_ints([1, 5, 0]))]),
        "row 1: bad words: expected 1 to 0 tokens at 2, got 0",
    ),
    (make_step(1, copies=[(-1, 0, 0, 0)]), "copies: expected numbers from 0, got -1"),
    (make_step(1, copies=[(9, 3, 0, 0)]), "copy 9: expected a kind of 0 to 2, got 3"),
    (make_step(1, copies=[(9, -1, 0, 0)]), "copy 9: expected a kind of 0 to 2, got -1"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_STEPS)
def test_a_step_that_breaks_the_protocol_is_told_as_the_rows_in_python_tell_it(bad, message):
    native, python = native_runner(), python_rows()
    assert native.prepare(encode_step(FIRST)) is None
    python.apply(FIRST)
    with pytest.raises(ValueError) as expected:
        python.apply(bad)
        python.batch(np.frombuffer(bad.scheduled, np.int32).reshape(-1, 4))
    assert message in str(expected.value)
    output = decode_output(native.step(encode_step(bad)))
    assert output.error == str(expected.value)
    assert (output.step_id, output.sampled) == (1, b"")
    with pytest.raises(ValueError) as raised:
        native.prepare(encode_step(bad))
    assert str(raised.value) == str(expected.value)
    assert native.prepare(encode_step(make_step(2, [(0, 0, 3, 1)]))) is not None


def full_row(num_tokens: int = MAX_MODEL_LEN + 1) -> tuple[int, list[int], range]:
    return 1, [4] * num_tokens, range(-(-MAX_MODEL_LEN // BLOCK_SIZE))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (make_step(1, [(1, 50, 1, 1)], added=[full_row()]), "the context ends at 50"),
        (make_step(1, [(0, 2**31 - 1, 2, 1)]), "positions 2147483647 to 2147483649"),
        (make_step(1, [(0, 0, 2, 1), (0, 2, 1, 1)]), "row 0 is scheduled twice"),
        (
            make_step(
                1, [(1, 0, 50, 1), (2, 0, 31, 1)], added=[full_row(), (2, [4] * 31, range(8))]
            ),  # fmt: skip
            "expected at most 80 tokens in a step, got 81",
        ),
        (
            make_step(1, added=[RowAdded(1, 2, pack_ints([1]), b"", GREEDY)]),
            "row 1: expected at most 1 prompt tokens, got 2",
        ),
    ],
)
def test_what_would_be_a_wild_read_in_native_code_is_an_error(bad, message):
    native = native_runner()
    assert native.prepare(encode_step(FIRST)) is None
    output = decode_output(native.step(encode_step(bad)))
    assert message in output.error
    assert output.step_id == 1
    assert native.prepare(encode_step(make_step(2, [(0, 0, 3, 1)]))) is not None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("temperature", 101.0),
        ("top_p", 0.0),
        ("top_p", math.inf),
        ("min_p", -0.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("top_k", -1),
        ("min_tokens", -1),
        ("num_logprobs", -2),
        ("num_prompt_logprobs", -2),
        ("bias_values", array("f", [math.nan]).tobytes()),
    ],
)
def test_sampling_parameters_that_no_request_can_have_are_refused(name, value):
    sampling = msgspec.structs.replace(GREEDY, bias_ids=pack_ints([1]), bias_values=bytes(4))
    native = native_runner()
    added = RowAdded(1, 1, pack_ints([1]), pack_ints([0]), sampling)
    assert native.prepare(encode_step(make_step(0, [(1, 0, 1, 1)], added=[added]))) is not None
    native.fail("not computed")
    bad = RowAdded(
        1, 1, pack_ints([1]), pack_ints([0]), msgspec.structs.replace(sampling, **{name: value})
    )
    output = decode_output(native.step(encode_step(make_step(1, added=[bad]))))
    assert output.error == "row 1: expected sampling parameters in the ranges of SamplingParams"


def test_sampling_wants_the_logits_of_the_rows_that_asked():
    native = native_runner()
    native.prepare(encode_step(make_step(0, [(0, 0, 3, 1)], added=[(0, [1, 2, 3], [6])])))
    for shape in [(2, VOCAB_SIZE), (0, VOCAB_SIZE), (1, VOCAB_SIZE - 1)]:
        with pytest.raises(ValueError, match="sample: expected logits of"):
            native.sample(np.zeros(shape, np.float32))
    output = decode_output(native.sample(np.eye(1, VOCAB_SIZE, 9, dtype=np.float32)))
    assert [*unpack_ints(output.sampled)] == [9]
    assert output.duration_s > 0
