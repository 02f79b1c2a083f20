"""BeamSearch beside an exhaustive search, a plain spelling of the rules, and transformers."""

from __future__ import annotations

import itertools
import math
import random
from array import array

import pytest
import torch
import transformers
from beams import generate, replay, tokens_of

from streamkv.core.beam import BeamSearch
from streamkv.protocol import FinishReason, RowLogprobs, pack_ints

NUM_PROMPT_TOKENS = 3


def row(logprobs, num_candidates=None):
    """The most likely tokens of log-probabilities by token id."""
    ids = sorted(range(len(logprobs)), key=lambda token_id: -logprobs[token_id])[:num_candidates]
    values = [logprobs[token_id] for token_id in ids]
    return RowLogprobs(values[0], 1, pack_ints(ids), array("f", values).tobytes())


def beam_search(width, *, num_return=None, max_tokens=8, end=(0,), penalty=1.0, early=False):
    return BeamSearch(
        width,
        num_return=num_return or width,
        length_penalty=penalty,
        early_stopping=early,
        end_token_ids=end,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        max_num_tokens=NUM_PROMPT_TOKENS + max_tokens,
    )


def search(model, width, *, num_candidates=None, **options):
    """Run it on a model: output so far -> log-probabilities by token id."""
    beams = beam_search(width, **options)
    outputs = [()]
    while not beams.is_done:
        rows = [row(model(output), num_candidates) for output in outputs]
        outputs = [(*outputs[parent], token_id) for parent, token_id in beams.advance(rows)]
    return beams.hypotheses()


def random_model(seed, vocab_size, end=(), bonus=0.0):
    """Log-probabilities that depend on the whole output; end tokens get a bonus."""

    def model(output):
        rng = random.Random(f"{seed} {output}")
        logits = [rng.gauss(0.0, 2.0) + bonus * (i in end) for i in range(vocab_size)]
        total = math.log(sum(map(math.exp, logits)))
        return array("f", [logit - total for logit in logits])

    return model


def all_answers(model, vocab_size, end, max_tokens):
    """Every output that ends, with the sum of its log-probabilities."""
    answers = {}
    for length in range(1, max_tokens + 1):
        for output in itertools.product(range(vocab_size), repeat=length):
            is_ended = output[-1] in end or length == max_tokens
            if is_ended and not any(token_id in end for token_id in output[:-1]):
                answers[output] = sum(model(output[:i])[output[i]] for i in range(length))
    return answers


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_beam_for_every_output_finds_the_best_of_all(penalty):
    for seed in range(5):
        model = random_model(seed, 4, end=(0,), bonus=1.0)
        answers = all_answers(model, 4, (0,), 4)
        scores = {output: total / len(output) ** penalty for output, total in answers.items()}
        best = sorted(scores, key=lambda output: -scores[output])
        found = search(model, len(best), max_tokens=4, penalty=penalty)
        assert [tokens_of(one) for one in found] == best
        assert [one.score for one in found] == pytest.approx([scores[one] for one in best])
        totals = [answers[one] for one in best]
        assert [one.cumulative_logprob for one in found] == pytest.approx(totals)


def plain_beam_search(model, width, *, max_tokens, end, penalty, early):
    """The rules, spelled out over the whole vocabulary."""
    beams, answers = [((), 0.0)], []
    for length in range(1, max_tokens + 1):
        continued = [
            ((*output, token_id), total + logprob)
            for output, total in beams
            for token_id, logprob in enumerate(model(output))
        ]
        continued.sort(key=lambda one: -one[1])
        is_last = length == max_tokens
        answers += [
            (total / length**penalty, output)
            for output, total in continued[:width]
            if is_last or output[-1] in end
        ]
        answers = sorted(answers, reverse=True)[:width]
        beams = [one for one in continued if one[0][-1] not in end][:width]
        if len(answers) == width:
            reach = max_tokens if early == "never" and penalty > 0 else length
            if early is True or beams[0][1] / reach**penalty <= answers[-1][0]:
                break
    return answers


OPTIONS = list(itertools.product((-1.0, 0.0, 0.5, 1.0, 2.0), (True, False, "never")))


@pytest.mark.parametrize(("penalty", "early"), OPTIONS)
def test_the_candidates_asked_for_are_enough(penalty, early):
    """`width` and one for each end token, of each beam, give what the whole vocabulary gives."""
    for seed, width, end in itertools.product(range(4), range(2, 7), [(), (0,), (3, 5, 11)]):
        model = random_model(seed, 24, end=end, bonus=seed)
        options = {"max_tokens": 7, "end": end, "penalty": penalty, "early": early}
        expected = plain_beam_search(model, width, **options)
        found = search(model, width, num_candidates=width + len(end), **options)
        assert [tokens_of(one) for one in found] == [output for _, output in expected]
        assert [one.score for one in found] == pytest.approx([score for score, _ in expected])


# --- transformers ----------------------------------------------------------------------------

VOCAB_SIZE = 48
END = [2]
ENDS = [2, 7, 30]


@pytest.fixture(scope="module")
def llama():
    """A tiny random model whose head has a bias, so that tests can make a token likely."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(20.0)
        head = torch.nn.Linear(16, VOCAB_SIZE)
        head.weight.normal_(0.0, 0.5)
        head.bias.zero_()
        model.lm_head = head
    return model.eval()


@pytest.mark.parametrize(("penalty", "early"), OPTIONS)
@pytest.mark.parametrize(
    ("end", "bias", "max_tokens"),
    [([], 0, 9), (END, 3, 1), (END, 2, 14), (END, 5, 14), (ENDS, 1, 9)],
)
def test_it_answers_like_transformers(llama, end, bias, max_tokens, penalty, early):
    with torch.no_grad():
        llama.lm_head.bias.zero_()
        llama.lm_head.bias[end] = bias
    reasons = set()
    for width in range(2, 7):
        options = {"max_tokens": max_tokens, "end": end, "penalty": penalty, "early": early}
        expected = generate(llama, [5 + width, 9, 4], width=width, **options)
        for num_return in range(1, width + 1):
            beams = beam_search(width, num_return=num_return, **options)
            chosen = replay(beams, expected.steps, width + len(end))
            assert beams.is_done and len(chosen) == 1 + len(expected.steps)
            found = beams.hypotheses()
            assert [tokens_of(one) for one in found] == expected.outputs[:num_return]
            # Rounded to float32 like transformers' they are equal, not only close.
            assert [one.score for one in found] == expected.scores[:num_return]
            reasons.update(one.finish_reason for one in found)
    assert (FinishReason.STOP in reasons) == bool(end)


def test_one_beam_is_greedy_as_in_transformers(llama):
    with torch.no_grad():
        llama.lm_head.bias.zero_()
        llama.lm_head.bias[END] = 2.0
    lengths = set()
    prompts = [[start, 9, start] for start in range(3, 15)]
    for prompt, early in itertools.product(prompts, (True, False, "never")):
        token_ids = torch.tensor([prompt])
        options = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        with torch.inference_mode():
            expected = llama.generate(
                token_ids, max_new_tokens=14, eos_token_id=END, pad_token_id=0, **options
            )
        beams = beam_search(1, max_tokens=14, end=END, early=early)
        replay(beams, [logits.log_softmax(-1) for logits in expected.scores], 2)
        assert beams.is_done
        output = expected.sequences[0, NUM_PROMPT_TOKENS:].tolist()
        assert [list(tokens_of(one)) for one in beams.hypotheses()] == [output]
        lengths.add(len(output))
    assert 1 < len(lengths) and min(lengths) < 14


# --- details ---------------------------------------------------------------------------------


def test_answers_tell_how_likely_each_token_was():
    model = random_model(1, 12, end=(0,), bonus=1.0)
    for one in search(model, 3, max_tokens=6):
        for place, link in enumerate(one.links()):
            expected, logprobs = model(tokens_of(one)[:place]), link.logprobs
            assert logprobs.logprob == expected[link.token_id]
            assert logprobs.rank == 1 + sum(value > logprobs.logprob for value in expected)
            assert logprobs.top_logprobs == row(expected).top_logprobs
        total = sum(link.logprobs.logprob for link in one.links())
        assert one.cumulative_logprob == pytest.approx(total)


def test_an_end_token_at_full_length_is_a_stop():
    model = random_model(1, 4, end=(0,), bonus=1.0)
    found = search(model, 4, max_tokens=1)
    assert {tokens_of(one): one.finish_reason for one in found} == {
        (0,): FinishReason.STOP,
        (1,): FinishReason.LENGTH,
        (2,): FinishReason.LENGTH,
        (3,): FinishReason.LENGTH,
    }


def test_an_end_token_behind_the_best_is_no_answer():
    """Only the best `width` continuations may become answers."""
    beams = beam_search(2)
    assert beams.advance([row([-3.0, -1.0, -2.0, -4.0])]) == [(0, 1), (0, 2)]
    first, second = row([-0.1, -9.0, -0.2, -5.0]), row([-2.0, -9.0, -9.0, -9.0])
    assert beams.advance([first, second]) == [(0, 2), (0, 3)]
    assert [tokens_of(one) for one in beams.hypotheses()] == [(1, 0)]


def test_of_equal_scores_the_better_beam_is_first():
    beams = beam_search(2)
    assert beams.advance([row([-9.0, -1.0, -1.0])]) == [(0, 1), (0, 2)]
    assert beams.advance([row([-9.0, -3.0, -2.0]), row([-9.0, -2.0, -2.0])]) == [(0, 2), (1, 1)]


def test_a_beam_as_good_as_the_worst_answer_is_no_reason_to_go_on():
    for logprob, is_done in ((-2.0, True), (-1.9999, False)):
        beams = beam_search(2, end=(0, 1), penalty=0.0)
        beams.advance([row([-1.5, -2.0, logprob, -3.0])])
        assert beams.is_done == is_done


@pytest.mark.parametrize("penalty", [-100.0, 100.0])
@pytest.mark.parametrize("early", [True, False, "never"])
def test_extreme_penalties_give_answers(penalty, early):
    model = random_model(1, 12, end=(0,), bonus=2.0)
    for num_tokens in (10, 40):
        found = search(model, 3, max_tokens=num_tokens, penalty=penalty, early=early)
        assert len(found) == 3
        scores = [one.score for one in found]
        assert scores == sorted(scores, reverse=True)


def test_each_beam_must_have_its_candidates():
    beams = beam_search(2)
    beams.advance([row([-9.0, -1.0, -2.0])])
    with pytest.raises(ValueError):
        beams.advance([row([-9.0, -1.0, -2.0])])


def test_long_histories_are_released():
    """Tokens are linked, one to the one before it."""
    beams = beam_search(1, max_tokens=1_000_000)
    candidates = [row([-9.0, -1.0])]
    for _ in range(50_000):
        beams.advance(candidates)
    del beams
