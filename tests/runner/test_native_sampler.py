"""Sampling in the extension against the torch sampler, fed through Rows as a step would be."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from isas import distinct_isas
from runner.support import mask_words

from streamkv import _cpu
from streamkv.protocol import Ask, RowAdded, RowSampling, StepInput
from streamkv.runner.philox import uniforms
from streamkv.runner.rows import Rows
from streamkv.runner.sampler import SamplingBatch, sample

NEGATIVE_NAN = np.array([-1], np.int32).view(np.float32)[0]
NUDGE = 2e-6  # what float32 rounding may move a boundary by, as a share of the probability


@pytest.fixture(params=distinct_isas(), autouse=True)
def isa(request) -> Iterator[str]:
    before = _cpu.isa()
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(before)


def row(token_ids=(0,), num_prompt_tokens=None, **fields) -> dict:
    """Greedy and unlimited, but for `fields`."""
    prompt = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    return {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": 0,
        "choice": 0,
        "min_tokens": 0,
        "num_logprobs": -1,
        "min_tokens_stop_ids": [],
        "bias_ids": [],
        "bias_values": [],
        "allowed_ids": [],
        "bad_words": [],
        "mask": [],  # the words of a grammar's, or none
        "token_ids": list(token_ids),
        "num_prompt_tokens": prompt,
    } | fields


def native(logits: np.ndarray, rows: list[dict]) -> list[tuple]:
    return _cpu.sample_rows(np.ascontiguousarray(logits, np.float32), rows)


def tokens(logits: np.ndarray, rows: list[dict]) -> list[int]:
    return [token_id for token_id, *_ in native(logits, rows)]


def sampling_batch(rows: list[dict], vocab_size: int) -> SamplingBatch:
    """What Rows makes of the same rows."""
    longest = max(len(fields["token_ids"]) for fields in rows)
    device_rows = Rows(
        num_rows=len(rows),
        max_model_len=longest,
        block_size=longest,
        num_blocks=1,
        vocab_size=vocab_size,
        has_mask=lambda slot: True,
    )
    added = []
    for index, fields in enumerate(rows):
        slot = index if len(fields["mask"]) else -1
        named = fields | {"mask_slot": slot, "num_prompt_logprobs": -1}
        values = {name: named[name] for name in RowSampling.__struct_fields__}
        for name, dtype in (
            ("min_tokens_stop_ids", np.int32),
            ("bias_ids", np.int32),
            ("bias_values", np.float32),
            ("allowed_ids", np.int32),
            ("bad_words", np.int32),
        ):
            values[name] = np.array(values[name], dtype).tobytes()
        tokens = np.array(fields["token_ids"], np.int32).tobytes()
        block = np.zeros(1, np.int32).tobytes()
        sampling = RowSampling(**values)
        added.append(RowAdded(index, fields["num_prompt_tokens"], tokens, block, sampling))
    device_rows.apply(
        StepInput(step_id=0, removed=b"", added=tuple(added), appended=b"", scheduled=b"")
    )
    scheduled = [
        (index, 0, len(fields["token_ids"]), Ask.SAMPLE) for index, fields in enumerate(rows)
    ]
    device_rows.batch(np.array(scheduled, np.int32))
    return device_rows.sampling_batch(
        device_rows.asking, lambda slot: np.array(rows[slot]["mask"], np.int32).view(np.uint32)
    )


def neighbours(logits: np.ndarray, fields: dict) -> set[int]:
    """Tokens of the torch sampler if each boundary moves by a rounding error."""
    batch = sampling_batch([fields], len(logits))
    found = set()
    for draw in (-NUDGE, 0.0, NUDGE):
        for share in (-NUDGE, 0.0, NUDGE):
            moved = batch._replace(
                uniforms=np.clip(batch.uniforms + draw, 0, 1 - 2**-53),
                top_p=batch.top_p + share * (batch.top_p < 1),
                min_p=np.minimum(batch.min_p * (1 + share), 1.0),
            )
            found.add(int(sample(torch.from_numpy(logits)[None], moved).token_ids[0]))
    return found


def check_against_torch(logits: np.ndarray, rows: list[dict]) -> int:
    """Compares all rows; returns how many tokens differ within rounding."""
    before = logits.copy()
    found = native(logits, rows)
    assert np.array_equal(logits.view(np.int32), before.view(np.int32)), "logits were changed"
    expected = sample(torch.from_numpy(logits), sampling_batch(rows, logits.shape[1]))
    failed = [index for index, result in enumerate(found) if result[1]]
    assert failed == expected.failed.tolist()
    num_moved = 0
    for index, (token_id, is_failed, logprob, rank, top_ids, top_logprobs) in enumerate(found):
        if token_id != expected.token_ids[index]:
            assert token_id in neighbours(logits[index], rows[index]), rows[index]
            num_moved += 1
            continue
        count = rows[index]["num_logprobs"]
        if is_failed or count < 0:
            assert (top_ids, top_logprobs) == ([], [])
            continue
        exact = torch.from_numpy(logits[index]).double().log_softmax(dim=-1).numpy()
        assert logprob == pytest.approx(exact[token_id], abs=1e-6, rel=1e-6)
        np.testing.assert_allclose(top_logprobs, exact[top_ids], atol=1e-6, rtol=1e-6)
        # Log-probabilities a rounding error apart may be equal.
        assert (exact > logprob + 4e-6).sum() < rank <= (exact > logprob - 4e-6).sum() + 1
        check_order(logits[index], top_ids, min(count, logits.shape[1]))
    return num_moved


def check_order(logits: np.ndarray, top_ids: list[int], count: int) -> None:
    """The likeliest first, equal ones by id; logits a rounding error apart may be equal."""
    exact = np.lexsort((np.arange(len(logits)), -logits))[:count]
    differing = exact != top_ids
    with np.errstate(invalid="ignore"):
        apart = np.abs(logits[exact] - logits[top_ids])[differing]
    assert len(top_ids) == count and (apart <= 4e-6).all()


def random_logits(generator: np.random.Generator, vocab_size: int) -> np.ndarray:
    """Flat to peaked, with ties, with gaps of -infinity."""
    spread = generator.choice([0.0, 0.1, 1.0, 2.5, 8.0])
    logits = generator.normal(generator.choice([-30.0, 0.0, 20.0]), spread, vocab_size)
    kind = generator.integers(5)
    if kind == 0:
        logits = np.round(logits * 4) / 4
    elif kind == 1:
        logits.sort()
    elif kind == 2:
        logits[generator.random(vocab_size) < 0.5] = -np.inf
        logits[generator.integers(vocab_size)] = 1.0
    elif kind == 3:
        peaks = generator.integers(vocab_size, size=3)
        logits[peaks] += generator.random(3) * 15
    return logits.astype(np.float32)


def random_row(generator: np.random.Generator, vocab_size: int) -> dict:
    def maybe(value, default):
        return value if generator.random() < 0.4 else default

    length = int(generator.integers(1, 40))
    num_edits = min(4, vocab_size - 1)
    tokens = generator.integers(0, min(vocab_size, 30), length).tolist()
    bias_ids = generator.choice(vocab_size, num_edits, replace=False).tolist()
    stop_ids = generator.choice(vocab_size, num_edits, replace=False).tolist()
    return row(
        token_ids=tokens,
        num_prompt_tokens=int(generator.integers(0, length + 1)),
        temperature=float(generator.choice([0.0, 1e-5, 0.01, 0.7, 1.0, 1.5, 100.0])),
        top_p=maybe(float(generator.choice([1e-9, 0.1, 0.5, 0.9, 0.999])), 1.0),
        top_k=maybe(int(generator.choice([1, 2, 50, 700, vocab_size - 1, vocab_size, 10**9])), 0),
        min_p=maybe(float(generator.choice([1e-30, 0.01, 0.5, 1.0])), 0.0),
        presence_penalty=maybe(float(generator.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(generator.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(generator.choice([1e-42, 0.5, 1.3, 100.0])), 1.0),
        seed=int(generator.integers(-(2**63), 2**63)),
        choice=int(generator.integers(0, 5)),
        min_tokens=maybe(int(generator.integers(0, 40)), 0),
        num_logprobs=maybe(int(generator.choice([0, 1, 5, 20, 128, 1088])), -1),
        min_tokens_stop_ids=stop_ids,
        bias_ids=maybe(bias_ids, []),
        bias_values=generator.uniform(-100, 100, num_edits).tolist(),
        allowed_ids=maybe(some_tokens(generator, vocab_size), []),
        bad_words=maybe(some_words(generator, vocab_size, tokens), []),
        mask=maybe(mask_words(some_tokens(generator, vocab_size), vocab_size).tolist(), []),
    )


def some_tokens(generator: np.random.Generator, vocab_size: int) -> list[int]:
    """None, a few, most, all but a few, all."""
    share = generator.choice([0.0, 3 / vocab_size, 0.05, 0.5, 0.999, 1.0])
    return np.flatnonzero(generator.random(vocab_size) < share).tolist()


def some_words(generator: np.random.Generator, vocab_size: int, token_ids: list[int]) -> list[int]:
    """Words that the text ends with all but their last token of, and others."""
    packed: list[int] = []
    for _ in range(6):
        length = int(generator.integers(0, 4))
        before = token_ids[len(token_ids) - length :] if generator.random() < 0.7 else [0] * length
        packed += [len(before) + 1, *before, int(generator.integers(vocab_size))]
    return packed


def matching_biases(fields: dict) -> dict:
    return fields | {"bias_values": fields["bias_values"][: len(fields["bias_ids"])]}


@pytest.mark.parametrize(
    ("vocab_size", "num_rows"),
    [(3, 400), (17, 300), (64, 300), (517, 200), (4096, 100), (50000, 40)],
)
def test_random_rows_get_the_tokens_of_the_torch_sampler(vocab_size, num_rows):
    generator = np.random.default_rng(vocab_size)
    logits = np.stack([random_logits(generator, vocab_size) for _ in range(num_rows)])
    rows = [matching_biases(random_row(generator, vocab_size)) for _ in range(num_rows)]
    num_moved = check_against_torch(logits, rows)
    assert num_moved <= 2 + num_rows // 50


def test_philox_gives_the_numbers_of_the_numpy_one():
    generator = np.random.default_rng(0)
    seeds = generator.integers(-(2**63), 2**63, 300)
    seeds[:4] = [0, -1, 2**63 - 1, -(2**63)]
    positions = generator.integers(0, 2**31, 300).astype(np.int32)
    choices = generator.integers(0, 2**31, 300).astype(np.int32)
    lanes = zip(seeds.tolist(), positions.tolist(), choices.tolist(), strict=True)
    found = [_cpu.philox_uniform(*lane) for lane in lanes]
    assert found == uniforms(seeds, positions, choices).tolist()


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 33, 600, 2049])
def test_greedy_takes_the_first_of_the_greatest_wherever_they_stand(vocab_size):
    generator = np.random.default_rng(vocab_size)
    for first in {0, vocab_size // 3, vocab_size // 2, vocab_size - 1}:
        logits = generator.normal(size=(1, vocab_size)).astype(np.float32) - 5
        logits[0, first:] = np.where(generator.random(vocab_size - first) < 0.3, 9.0, -1.0)
        logits[0, first] = 9.0
        assert tokens(logits, [row()]) == [first]


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_whose_logits_are_not_finite_fails_alone(temperature, edited):
    generator = np.random.default_rng(1)
    fields = row(temperature=temperature, top_p=0.8, num_logprobs=2)
    if edited:
        fields |= {"bias_ids": [5, 40], "bias_values": [2.0, -3.0], "repetition_penalty": 1.2}
    healthy = generator.normal(size=700).astype(np.float32)
    for value in (math.nan, NEGATIVE_NAN, math.inf):
        for at in (0, 5, 15, 16, 40, 511, 512, 640, 698, 699):
            logits = np.stack([healthy, healthy, healthy])
            logits[1, at] = value
            first, broken, last = native(logits, [fields] * 3)
            assert first == last and not first[1] and len(first[4]) == 2
            assert (broken[0], broken[1], broken[4]) == (0, True, [])
    nothing = np.full((1, 700), -np.inf, np.float32)
    assert native(nothing, [fields])[0][:2] == (0, True)


def test_infinities_below_are_no_failure():
    logits = np.full((1, 300), -np.inf, np.float32)
    logits[0, 123] = -5.0
    for fields in (row(), row(temperature=1.0), row(temperature=1.0, top_k=7, top_p=0.5)):
        ((token_id, failed, logprob, rank, top_ids, _),) = native(
            logits, [fields | {"num_logprobs": 3}]
        )
        assert (token_id, failed, logprob, rank, top_ids) == (123, False, 0.0, 1, [123, 0, 1])


def support(logits: np.ndarray, **fields) -> set[int]:
    """Every token that some of 3000 numbers draws."""
    rows = [row(temperature=1.0, seed=seed, **fields) for seed in range(3000)]
    return set(tokens(np.broadcast_to(logits, (3000, len(logits))), rows))


@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 12},
        {"top_p": 0.7},
        {"min_p": 0.3},
        {"min_p": 0.2, "top_k": 12, "top_p": 0.8},
        {"top_k": 59, "top_p": 0.999},
    ],
)
def test_filters_keep_what_their_definition_says(filters):
    logits = (np.random.default_rng(4).normal(size=60) / 2).astype(np.float32)
    probs = np.exp(logits.astype(np.float64))
    probs[probs < filters.get("min_p", 0) * probs.max()] = 0
    probs[probs < np.sort(probs)[-filters.get("top_k", 60)]] = 0
    order = np.argsort(-probs, kind="stable")
    ordered = probs[order] / probs.sum()
    before = np.cumsum(ordered) - ordered
    kept = order[(before < filters.get("top_p", 2)) & (ordered > 0)].tolist()
    assert support(logits, **filters) == set(kept)
    assert 3 < len(kept) < 60


def test_tokens_that_tie_with_the_last_kept_one_are_kept():
    logits = np.array([3.0, 1.0, 1.0, 1.0, 0.0], np.float32)
    assert support(logits, top_k=2) == {0, 1, 2, 3}
    assert support(logits, top_p=0.8) == {0, 1, 2, 3}
    flat = np.zeros(2000, np.float32)
    flat[:1000] = -1.0
    assert min(support(flat, top_k=1)) >= 1000
    assert len(support(flat, top_p=0.3)) > 600, "a draw among a thousand"


@pytest.mark.parametrize("vocab_size", [20, 1000])
def test_tokens_are_distributed_as_softmax_says(vocab_size):
    num_draws = 20000
    logits = np.random.default_rng(5).normal(size=vocab_size).astype(np.float32)
    rows = [row(temperature=0.8, seed=seed) for seed in range(num_draws)]
    found = tokens(np.broadcast_to(logits, (num_draws, vocab_size)), rows)
    weights = np.exp(logits.astype(np.float64) / 0.8)
    expected = weights / weights.sum() * num_draws
    common = expected >= 5
    observed = np.bincount(found, minlength=vocab_size)
    chi_square = ((observed - expected) ** 2 / expected)[common].sum()
    assert chi_square < common.sum() + 5 * math.sqrt(2 * common.sum())


def test_the_last_interval_ends_at_the_last_token_with_a_probability():
    seeds = np.arange(3_000_000)
    numbers = uniforms(seeds, np.ones(len(seeds), np.int32), np.zeros(len(seeds), np.int32))
    low, high = int(numbers.argmin()), int(numbers.argmax())
    logits = np.full((2, 3000), -200.0, np.float32)
    logits[:, 1000:2000] = np.random.default_rng(6).normal(size=1000)
    logits[:, [1000, 1999]] = 5.0
    rows = [row(temperature=1.0, seed=low), row(temperature=1.0, seed=high)]
    assert tokens(logits, rows) == [1000, 1999]
    assert tokens(logits, [fields | {"top_p": 0.99} for fields in rows]) == [1000, 1999]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 100.0])
@pytest.mark.parametrize("penalty", [1e-45, 1e-30, 100.0])
def test_no_legal_parameter_can_make_logits_look_broken(temperature, penalty):
    logits = np.random.default_rng(7).normal(size=(1, 60)).astype(np.float32) * 3e37
    logits[0, 5] = 2e38
    biases = {"bias_ids": [5, 6], "bias_values": [100.0, -100.0]}
    fields = row(range(60), repetition_penalty=penalty, temperature=temperature, **biases)
    check_against_torch(logits, [fields])
    check_against_torch(logits, [row(bias_ids=[5], bias_values=[3e38], temperature=temperature)])
    ((token_id, failed, *_),) = native(logits, [fields | {"top_p": 0.5, "top_k": 20}])
    assert not failed and 0 <= token_id < 60


@pytest.mark.parametrize("penalty", [1e-38, 0.5, 100.0])
def test_a_masked_token_stays_masked_whatever_the_penalties(penalty):
    logits = np.random.default_rng(8).normal(size=(1, 60)).astype(np.float32)
    logits[0, 7] = 1e4
    fields = row(
        range(60),
        num_prompt_tokens=0,
        bias_ids=[7],
        bias_values=[100.0],
        repetition_penalty=penalty,
        frequency_penalty=-2.0,
        presence_penalty=-2.0,
        min_tokens=61,
        min_tokens_stop_ids=[7],
    )
    assert tokens(logits, [fields]) != [7]
    assert tokens(logits, [fields | {"min_tokens": 60, "repetition_penalty": 1.0}]) == [7]


def test_a_row_leaves_nothing_behind_for_the_next():
    generator = np.random.default_rng(9)
    logits = np.stack([random_logits(generator, 500) for _ in range(60)])
    rows = [matching_biases(random_row(generator, 500)) for _ in range(60)]
    together = native(logits, rows)
    for index in range(60):
        assert native(logits[index : index + 1], [rows[index]]) == [together[index]]


def test_equal_log_probabilities_stand_in_the_order_of_their_ids():
    logits = np.zeros((1, 3000), np.float32)
    logits[0, [2000, 70]] = 1.0
    ((*_, top_ids, top_logprobs),) = native(logits, [row(num_logprobs=20)])
    assert top_ids == [70, 2000, *range(18)]
    assert top_logprobs[2:] == [top_logprobs[2]] * 18
    biased = row(num_logprobs=0, bias_ids=[500], bias_values=[9.0])
    ((token_id, _, logprob, rank, *_),) = native(logits, [biased])
    assert (token_id, logprob, rank) == (500, top_logprobs[2], 3), "two are likelier"


def test_wrong_rows_are_refused():
    logits = np.zeros((1, 10), np.float32)
    for fields, message in (
        (row(token_ids=[10]), "token_ids: expected 0 .. 9, got 10"),
        (row(bias_ids=[-1], bias_values=[1.0]), "bias_ids: expected 0 .. 9, got -1"),
        (row(bias_ids=[1]), "a bias value for each id"),
        (row(num_prompt_tokens=2), "num_prompt_tokens: expected 0 .. 1, got 2"),
        (row(bad_words=[1, 10]), "bad_words: expected 0 .. 9, got 10"),
        (row(bad_words=[2, 1]), "bad_words: expected 1 to 1 tokens, got 2"),
        (row(bad_words=[0]), "bad_words: expected 1 to 0 tokens, got 0"),
        (row(mask=[1, 2]), "mask: expected 1 words, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            native(logits, [fields])
    with pytest.raises(ValueError, match=r"expected logits \[2, vocabulary\], got \[1, 10\]"):
        native(logits, [row(), row()])
