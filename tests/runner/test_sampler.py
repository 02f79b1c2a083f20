"""The sampler against plain-torch oracles, and its distribution against softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from runner.support import mask_words

from streamkv.runner.sampler import Edits, Masks, SamplingBatch, sample, score

VOCAB_SIZE = 60


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 2


def edits(*triples) -> Edits:
    rows, token_ids, values = zip(*triples, strict=True) if triples else ((), (), ())
    return Edits(
        np.array(rows, np.int64), np.array(token_ids, np.int64), np.array(values, np.float32)
    )


def masks(**allowed) -> Masks:
    """`row3=[5, 6]`: row 3 may get no other token."""
    words = [mask_words(token_ids, VOCAB_SIZE) for token_ids in allowed.values()]
    return Masks(np.array([int(name[3:]) for name in allowed]), np.stack(words))


def but(*token_ids: int) -> list[int]:
    return [token_id for token_id in range(VOCAB_SIZE) if token_id not in token_ids]


def sampling(num_rows: int, **columns) -> SamplingBatch:
    """Greedy and unlimited, but for `columns`: a number for all rows, or one each."""

    def column(name, default, dtype):
        return np.array(np.broadcast_to(columns.get(name, default), num_rows), dtype)

    return SamplingBatch(
        temperature=column("temperature", 0.0, np.float64),
        top_k=column("top_k", 0, np.int64),
        top_p=column("top_p", 1.0, np.float64),
        min_p=column("min_p", 0.0, np.float64),
        uniforms=column("uniforms", 0.0, np.float64),
        num_logprobs=column("num_logprobs", -1, np.int64),
        added=columns.get("added", Edits.none()),
        repeated=columns.get("repeated", Edits.none()),
        subtracted=columns.get("subtracted", Edits.none()),
        masks=columns.get("masks", Masks.none()),
    )


def support(logits: torch.Tensor, **columns) -> set[int]:
    """Every token that some uniform number draws from one row of logits."""
    num_draws = 4000
    batch = sampling(num_draws, uniforms=np.arange(num_draws) / num_draws, **columns)
    return set(sample(logits.expand(num_draws, -1), batch).token_ids.tolist())


def test_temperature_zero_takes_the_first_of_the_likeliest():
    logits = random_logits(5)
    logits[3, [7, 20]] = 50.0
    expected = logits.argmax(dim=-1)
    assert sample(logits, sampling(5)).token_ids.tolist() == expected.tolist()
    assert expected[3] == 7


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_distributed_as_softmax_says(temperature):
    logits = random_logits(1, 20)[0]
    num_draws = 30000
    uniforms = np.random.default_rng(3).random(num_draws)
    batch = sampling(num_draws, temperature=temperature, uniforms=uniforms)
    tokens = sample(logits.expand(num_draws, -1), batch).token_ids
    expected = (logits.double() / temperature).softmax(dim=-1).numpy() * num_draws
    observed = np.bincount(tokens, minlength=20)
    common = expected >= 5
    chi_square = ((observed - expected) ** 2 / expected)[common].sum()
    degrees = common.sum() - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def test_each_uniform_draws_the_token_whose_interval_holds_it():
    logits = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4]).log()
    batch = sampling(5, temperature=1.0, uniforms=[0.05, 0.15, 0.29999, 0.59, 0.9999999999999999])
    assert sample(logits.expand(5, -1), batch).token_ids.tolist() == [0, 1, 1, 3, 4]
    edges = sampling(2, temperature=1.0, uniforms=[0.0, 1 - 2**-53])
    padded = torch.tensor([0.0, 0.5, 0.5, 0.0]).log()
    assert sample(padded.expand(2, -1), edges).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("top_k", [1, 3, 59, 60, 1000])
def test_top_k_keeps_the_k_likeliest(top_k):
    logits = random_logits(1)[0] / 4
    expected = set(logits.topk(min(top_k, VOCAB_SIZE)).indices.tolist())
    assert support(logits, temperature=1.0, top_k=top_k) == expected


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999999])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p):
    logits = random_logits(1)[0] / 4
    probs, order = logits.double().softmax(dim=-1).sort(descending=True)
    before = probs.cumsum(dim=-1) - probs
    assert support(logits, temperature=1.0, top_p=top_p) == set(order[before < top_p].tolist())


@pytest.mark.parametrize("min_p", [0.05, 0.3, 1.0])
def test_min_p_is_relative_to_the_likeliest_and_applies_after_temperature(min_p):
    logits = random_logits(1)[0] / 4
    probs = (logits.double() / 0.7).softmax(dim=-1)
    expected = set(torch.nonzero(probs >= min_p * probs.max() - 1e-9)[:, 0].tolist())
    assert support(logits, temperature=0.7, min_p=min_p) == expected


def test_filters_combine_in_order_min_p_top_k_top_p():
    logits = random_logits(1)[0] / 4
    probs = logits.double().softmax(dim=-1)
    probs[probs < 0.2 * probs.max()] = 0
    probs[probs < probs.topk(12).values[-1]] = 0
    ordered, order = (probs / probs.sum()).sort(descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    expected = set(order[(before < 0.8) & (ordered > 0)].tolist())
    assert support(logits, temperature=1.0, min_p=0.2, top_k=12, top_p=0.8) == expected
    assert 3 < len(expected) < 12


def test_top_p_over_a_flat_distribution_needs_more_than_the_candidates():
    logits = torch.linspace(0.0, 0.1, 3000)
    tokens = support(logits, temperature=1.0, top_p=0.5)
    probs = logits.double().softmax(dim=-1).flip(0)
    num_kept = int((probs.cumsum(0) - probs < 0.5).sum())
    assert tokens == set(range(3000 - num_kept, 3000))


def test_tokens_that_tie_with_the_last_kept_one_are_kept():
    logits = torch.tensor([3.0, 1.0, 1.0, 1.0, 0.0])
    assert support(logits, temperature=1.0, top_k=2) == {0, 1, 2, 3}
    assert support(logits, temperature=1.0, top_p=0.8) == {0, 1, 2, 3}


def test_edits_are_biases_then_repetition_then_the_subtracted_penalties_then_masks():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 3.0]])
    batch = sampling(
        1,
        num_logprobs=5,
        added=edits((0, 2, 1.5), (0, 4, 9.0)),
        repeated=edits((0, 0, 2.0), (0, 1, 2.0), (0, 2, 2.0), (0, 4, 0.5)),
        subtracted=edits((0, 0, 0.25), (0, 4, -2.0)),
        masks=Masks(np.array([0]), mask_words([0, 1, 2, 3], 5)[None]),
    )
    # 2 / 2 - 0.25, -2 * 2, (1 + 1.5) / 2, 0.5, masked
    before = logits.clone()
    sampled = sample(logits, batch)
    assert sampled.token_ids.tolist() == [2]
    assert torch.equal(logits, before), "the model's logits stay as they are"
    (logprobs,) = sampled.logprobs
    raw = before.log_softmax(dim=-1)[0]
    assert logprobs.logprob == pytest.approx(float(raw[2])), "logprobs are of the raw logits"
    assert logprobs.rank == 3
    assert np.frombuffer(logprobs.top_ids, np.int32).tolist() == [4, 0, 2, 3, 1]


def test_logprobs_are_given_to_the_rows_that_asked():
    logits = random_logits(4, 500)
    sampled = sample(logits, sampling(4, num_logprobs=[-1, 0, 3, 20]))
    expected = logits.log_softmax(dim=-1)
    assert sampled.logprobs[0] is None
    for row, count in ((1, 0), (2, 3), (3, 20)):
        found = sampled.logprobs[row]
        top = expected[row].topk(count)
        assert np.frombuffer(found.top_ids, np.int32).tolist() == top.indices.tolist()
        values = np.frombuffer(found.top_logprobs, np.float32)
        np.testing.assert_allclose(values, top.values, atol=1e-6)
        assert found.rank == 1
        assert found.logprob == pytest.approx(float(expected[row].max()))
    assert sample(logits, sampling(4)).logprobs == ()


def test_a_row_gets_the_same_token_whatever_the_batch():
    logits = random_logits(64, 5000).bfloat16()
    generator = np.random.default_rng(0)
    columns = {
        "temperature": generator.choice([0.0, 0.7, 1.0, 1.5], 64),
        "top_k": generator.choice([0, 5, 700], 64),
        "top_p": generator.choice([0.3, 0.95, 1.0], 64),
        "min_p": generator.choice([0.0, 0.05], 64),
        "uniforms": generator.random(64),
        "num_logprobs": generator.choice([-1, 2], 64),
    }
    together = sample(logits, sampling(64, **columns))
    for row in range(64):
        alone = {name: values[row] for name, values in columns.items()}
        single = sample(logits[row : row + 1], sampling(1, **alone))
        assert single.token_ids[0] == together.token_ids[row]
        assert single.logprobs in ((), (together.logprobs[row],))


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 100.0])
@pytest.mark.parametrize("penalty", [1e-45, 1e-30, 100.0])
def test_no_legal_parameter_can_make_logits_look_broken(temperature, penalty):
    logits = random_logits(1)
    every = edits(*((0, token_id, penalty) for token_id in range(VOCAB_SIZE)))
    bias = edits((0, 5, 100.0), (0, 6, -100.0))
    batch = sampling(1, temperature=temperature, uniforms=0.999, repeated=every, added=bias)
    (token_id,) = sample(logits, batch).token_ids.tolist()
    assert 0 <= token_id < VOCAB_SIZE
    assert logits[0, token_id] > 0 or token_id == 5 or penalty == 100.0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("edited", [False, True])
def test_a_row_whose_logits_are_not_finite_fails_alone(temperature, value, edited):
    logits = random_logits(3)
    columns = {"temperature": temperature, "uniforms": 0.7, "top_p": 0.8, "num_logprobs": 2}
    if edited:
        columns["added"] = edits((0, 5, 2.0), (1, 5, 2.0), (2, 5, 2.0))
    healthy = sample(logits, sampling(3, **columns))
    logits[1, :] = value if value == -math.inf else logits[1]
    logits[1, 4] = value
    sampled = sample(logits, sampling(3, **columns))
    assert (healthy.failed.tolist(), sampled.failed.tolist()) == ([], [1])
    assert sampled.token_ids.tolist() == [healthy.token_ids[0], 0, healthy.token_ids[2]]
    assert sampled.logprobs == (healthy.logprobs[0], None, healthy.logprobs[2])


@pytest.mark.parametrize("penalty", [1e-38, 0.5, 100.0])
def test_a_masked_token_stays_masked_whatever_the_penalties(penalty):
    logits = random_logits(1)
    logits[0, 7] = 1e4
    batch = sampling(
        1,
        added=edits((0, 7, 100.0)),
        repeated=edits(*((0, token_id, penalty) for token_id in range(VOCAB_SIZE))),
        subtracted=edits((0, 7, -1e6)),
        masks=masks(row0=but(7)),
    )
    sampled = sample(logits, batch)
    assert sampled.failed.tolist() == [] and sampled.token_ids[0] != 7


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 40}]
)
def test_filters_see_what_masks_leave_and_nothing_else(filters):
    logits = random_logits(1)[0] / 4
    allowed = [3, 17, 31, 32, 33, 40, 59]
    expected = {allowed[index] for index in support(logits[allowed], temperature=1.0, **filters)}
    num_draws = 4000
    batch = sampling(num_draws, uniforms=np.arange(num_draws) / num_draws, temperature=1.0)
    words = np.broadcast_to(mask_words(allowed, VOCAB_SIZE), (num_draws, 2))
    batch = batch._replace(
        masks=Masks(np.arange(num_draws), np.ascontiguousarray(words)),
        **{name: np.full(num_draws, value) for name, value in filters.items()},
    )
    assert set(sample(logits.expand(num_draws, -1), batch).token_ids.tolist()) == expected


def test_masks_of_some_rows_leave_the_others_alone():
    logits = random_logits(4)
    columns = {"temperature": 1.0, "uniforms": [0.1, 0.4, 0.7, 0.9], "num_logprobs": 2}
    free = sample(logits, sampling(4, **columns))
    held = sample(logits, sampling(4, masks=masks(row1=[5], row3=[6, 7]), **columns))
    assert held.token_ids[[0, 2]].tolist() == free.token_ids[[0, 2]].tolist()
    assert held.token_ids[1] == 5 and held.token_ids[3] in (6, 7)
    assert (held.logprobs[0], held.logprobs[2]) == (free.logprobs[0], free.logprobs[2])
    raw = logits.log_softmax(dim=-1)
    assert held.logprobs[1].logprob == pytest.approx(float(raw[1, 5])), "of the raw logits"


def test_scores_are_log_probabilities_of_tokens_that_are_known():
    logits = random_logits(5)
    logits[3, 8] = math.nan
    token_ids, counts = np.array([0, 59, 7, 8, 20], np.int32), np.array([0, 3, 60, 2, 1])
    found = score(logits, token_ids, counts)
    expected = logits.double().log_softmax(dim=-1)
    for row in (0, 1, 2, 4):
        token_id, one = token_ids[row], found[row]
        assert one.logprob == pytest.approx(float(expected[row, token_id]), abs=1e-5)
        assert one.rank == 1 + int((expected[row] > expected[row, token_id]).sum())
        top = expected[row].topk(counts[row])
        assert np.frombuffer(one.top_ids, np.int32).tolist() == top.indices.tolist()
        np.testing.assert_allclose(
            np.frombuffer(one.top_logprobs, np.float32), top.values, atol=1e-5
        )
    assert (found[3].rank, found[3].logprob, found[3].top_ids) == (0, 0.0, b"")
    assert score(logits[:0], token_ids[:0], counts[:0]) == ()
