"""What every runner does, on tiny random models: tokens depend on the request alone; failures.

Three run the same tests: torch with the reference ops, the native program, and the native
operations one by one.
"""

from __future__ import annotations

import math

import pytest
import torch
from drive import build_scheduler, load_runner, request, run_requests
from msgspec import structs
from runner.support import (
    NUM_TOKENS,
    RUNNERS,
    VOCAB_SIZE,
    greedy,
    greedy_requests,
    prompts,
    resident_bytes,
    sampled_requests,
    step,
    tokens_of,
)
from safetensors.torch import load_file, save_file
from tiny import save_tiny_checkpoint

from streamkv.errors import ConfigError, ModelLoadError
from streamkv.protocol import Ask, CopyKind, FinishReason, unpack_ints
from streamkv.runner.kv_cache import MemoryBudget


@pytest.fixture(params=RUNNERS)
def kind(request) -> dict:
    """What `load_runner` builds this kind of runner from."""
    return RUNNERS[request.param]


@pytest.fixture(scope="module")
def expected(oracle) -> list[list[int]]:
    return [greedy(oracle, prompt, NUM_TOKENS) for prompt in prompts()]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        ({}, {}),
        ({}, {"depth": 0}),
        ({"block_size": 1}, {"max_num_batched_tokens": 7}),
        ({"block_size": 3, "threads": 3}, {"max_num_batched_tokens": 33}),
        ({"block_size": 64}, {"max_num_batched_tokens": 64}),
        ({"threads": 1}, {"max_num_seqs": 1}),
        ({}, {"max_num_seqs": 3, "enable_prefix_caching": False}),
    ],
)
def test_greedy_tokens_are_transformers_whatever_the_batch(folder, expected, kind, config, options):
    runner, info = load_runner(folder, **kind, **config)
    assert tokens_of(run_requests(runner, info, greedy_requests(), **options)) == expected


def test_tokens_survive_preemption_and_prefix_hits(folder, expected, kind):
    runner, info = load_runner(folder, num_gpu_blocks_override=10, block_size=8, **kind)
    scheduler = build_scheduler(info)
    for _ in range(2):  # the second time much of it is cached
        assert (
            tokens_of(run_requests(runner, info, greedy_requests(), scheduler=scheduler))
            == expected
        )
    assert scheduler.num_preemptions > 0 and scheduler.num_prefix_hit_tokens > 0


def test_sampled_tokens_depend_on_nothing_but_the_request(folder, kind):
    runner, info = load_runner(folder, **kind)
    base = run_requests(runner, info, sampled_requests(), eos_token_ids=frozenset((0, 2)))
    small, small_info = load_runner(folder, num_gpu_blocks_override=10, block_size=8, **kind)
    variants = [
        run_requests(runner, info, sampled_requests(), eos_token_ids=frozenset((0, 2)), **options)
        for options in (
            {"depth": 0},
            {"max_num_seqs": 2},
            {"max_num_batched_tokens": 9, "max_num_seqs": 5},
        )
    ]
    variants.append(
        run_requests(small, small_info, sampled_requests(), eos_token_ids=frozenset((0, 2)))
    )
    for variant in variants:
        assert tokens_of(variant) == tokens_of(base)
    assert len({tuple(choice.token_ids) for choice in base["1"]}) == 3, "choices differ"


def test_penalties_and_biases_equal_a_plain_computation(folder, oracle, kind):
    """Greedy under each edit, computed again from transformers' logits, token by token."""
    prompt = prompts()[4]
    edits = {
        "repetition": {"repetition_penalty": 1.8},
        "presence": {"presence_penalty": 2.0},
        "frequency": {"frequency_penalty": 1.5},
        "bias": {"logit_bias": {11: 30.0, 12: 29.0, 400: 100.0}},
        "stop": {"min_tokens": 5, "logit_bias": {2: 100.0}},
    }
    requests = [request(name, prompt, 10, **fields) for name, fields in edits.items()]
    runner, info = load_runner(folder, **kind)
    results = run_requests(runner, info, requests, eos_token_ids=frozenset((2,)))
    for name in edits:
        (choice,) = results[name]
        token_ids = list(prompt)
        for token_id in choice.token_ids:
            with torch.inference_mode():
                logits = oracle(torch.tensor([token_ids])).logits[0, -1]
            assert token_id == int(edited(logits, name, token_ids, len(prompt)).argmax()), name
            token_ids.append(token_id)
    assert len(results["stop"][0].token_ids) == 6
    assert results["stop"][0].finish_reason == FinishReason.STOP


def test_stop_ids_that_are_the_whole_vocabulary_leave_something_to_choose(folder, expected, kind):
    everything = request("all", prompts()[4], 4, min_tokens=4, stop_token_ids=[*range(VOCAB_SIZE)])
    runner, info = load_runner(folder, **kind)
    results = run_requests(runner, info, [everything, request("other", prompts()[5], 4)])
    assert results["other"][0].token_ids == expected[5][:4]
    assert results["all"][0].finish_reason != FinishReason.ERROR


def edited(logits: torch.Tensor, name: str, token_ids: list[int], prompt_len: int) -> torch.Tensor:
    """The definitions, written out."""
    logits, output = logits.clone(), token_ids[prompt_len:]
    if name == "repetition":
        for token_id in set(token_ids):
            logits[token_id] *= 1.8 if logits[token_id] < 0 else 1 / 1.8
    elif name == "presence":
        logits[list(set(output))] -= 2.0
    elif name == "frequency":
        for token_id in output:
            logits[token_id] -= 1.5
    elif name == "bias":
        logits[11] += 30.0
        logits[12] += 29.0
    elif name == "stop":
        logits[2] += 100.0 if len(output) >= 5 else -torch.inf
    return logits


def test_a_chunk_that_asks_for_nothing_stores_kv_and_a_sampled_token_is_kept(
    folder, expected, kind
):
    prompt = prompts()[8]
    runner, _ = load_runner(folder, **kind, block_size=16)
    first = runner.step(step(0, [(3, 0, 20, Ask.NONE)], added=[(3, prompt, [5, 9])]))
    assert (first.step_id, first.sampled, first.error) == (0, b"", "")
    tokens = [*unpack_ints(runner.step(step(1, [(3, 20, 11, Ask.SAMPLE)])).sampled)]
    for index in range(1, 4):  # positions 31, 32, 33: a block is appended for 32
        appended = [(3, 7)] if index == 2 else []
        output = runner.step(step(index + 1, [(3, 30 + index, 1, Ask.SAMPLE)], appended=appended))
        assert output.error == "" and output.duration_s > 0
        tokens += unpack_ints(output.sampled)
    assert tokens == expected[8][:4]
    assert runner.step(step(9, removed=[3])).error == ""


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (step(1, [(0, 0, 9, Ask.SAMPLE)]), "positions 0 to 9"),
        (step(1, [(0, 3, 0, Ask.SAMPLE)]), "positions 3 to 3"),
        (step(1, [(0, -1, 1, Ask.SAMPLE)]), "positions -1 to 0"),
        (step(1, [(99, 0, 1, Ask.SAMPLE)]), "scheduled rows"),
        (step(1, [(-1, 0, 1, Ask.SAMPLE)]), "scheduled rows"),
        (step(1, [(1, 0, 20, Ask.SAMPLE)], added=[(1, [4] * 20, [3])]), "in 1 blocks"),
        (step(1, added=[(1, [VOCAB_SIZE], [3])]), "token ids"),
        (step(1, added=[(1, [-1], [3])]), "token ids"),
        (step(1, added=[(1, [4], [512])]), "block ids"),
        (step(1, added=[(1, [4] * 300, [3])]), "don't fit"),
        (step(1, added=[(32, [4], [3])]), "added row 32"),
        (step(1, removed=[-1]), "removed rows"),
        (step(1, appended=[(-2, 1)]), "appended rows"),
        (step(1, appended=[(0, 512)]), "can't take block 512"),
        (step(1, copies=[(5, CopyKind.BLOCK, 3, 512)]), "target: expected a block below 512"),
        (step(1, copies=[(7, CopyKind.OUT, 3, 0)]), "copy 7: target: expected a host slot below 0"),
        (step(1, copies=[(7, 3, 3, 0)]), "copy 7: expected a kind of 0 to 2, got 3"),
    ],
)
def test_a_step_that_breaks_the_protocol_is_an_error_and_the_next_one_works(
    folder, expected, kind, bad, message
):
    runner, _ = load_runner(folder, **kind)
    prompt = prompts()[4]
    assert runner.step(step(0, added=[(0, prompt, [6])])).error == ""
    output = runner.step(bad)
    assert output.step_id == 1 and output.sampled == b""
    assert message in output.error and "\n" not in output.error
    after = runner.step(step(2, [(0, 0, len(prompt), Ask.SAMPLE)]))
    assert after.error == "" and [*unpack_ints(after.sampled)] == expected[4][:1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_embedding_fails_the_rows_that_read_it_and_no_others(tmp_path, temperature, kind):
    """A token whose embedding is NaN; the others share its steps, and later its blocks."""
    broken = save_tiny_checkpoint(tmp_path, head_dim=16, tie_word_embeddings=False)
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"][3] = float("nan")
    save_file(weights, broken / "model.safetensors")
    runner, info = load_runner(broken, num_gpu_blocks_override=8, block_size=4, **kind)
    options = {"temperature": temperature, "logprobs": 2, "logit_bias": {3: -100.0}}
    fine = [request(name, [5, index + 4, 8], 12, **options) for index, name in enumerate("abc")]
    alone = [run_requests(runner, info, [one]) for one in fine]
    scheduler = build_scheduler(info)
    for _ in range(2):
        lost = [request(name, [5, 3, 8], **options) for name in ("lost", "gone")]
        results = run_requests(runner, info, [lost[0], *fine, lost[1]], scheduler=scheduler)
        for name in ("lost", "gone"):
            assert results[name][0].finish_reason == FinishReason.ERROR
            assert results[name][0].token_ids == []
        for name, single in zip("abc", alone, strict=True):
            assert results[name][0].token_ids == single[name][0].token_ids
            assert all(math.isfinite(one.logprob) for one in results[name][0].logprobs)
            assert results[name][0].finish_reason == FinishReason.LENGTH
        assert scheduler.num_held_blocks == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tensor", ["layers.1.mlp.up_proj", "layers.0.self_attn.k_proj", "norm"])
def test_weights_that_are_no_numbers_are_refused_at_load(tmp_path, kind, value, tensor):
    broken = save_tiny_checkpoint(tmp_path, head_dim=16)
    weights = load_file(broken / "model.safetensors")
    weights[f"model.{tensor}.weight"][1] = value
    save_file(weights, broken / "model.safetensors")
    with pytest.raises(ModelLoadError, match="the weights are broken"):
        load_runner(broken, **kind)


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 100.0])
def test_no_repetition_penalty_unmasks_or_breaks_a_row(folder, expected, kind, penalty):
    """In float32 the first is zero. An end token in the prompt is masked and penalized at once."""
    prompts_ = [[*prompts()[4], 2, 0], prompts()[5]]
    odd = {"repetition_penalty": penalty, "min_tokens": 12, "logit_bias": {2: 100.0}}
    runner, info = load_runner(folder, **kind)
    for temperature in (0.0, 1.0):
        requests = [
            request("odd", prompts_[0], 12, temperature=temperature, **odd),
            request("plain", prompts_[1], 12),
        ]
        results = run_requests(runner, info, requests, eos_token_ids=frozenset((0, 2)))
        assert results["odd"][0].finish_reason == FinishReason.LENGTH
        assert not {0, 2} & set(results["odd"][0].token_ids)
        assert results["plain"][0].token_ids[:4] == expected[5][:4]


def test_a_runner_that_was_closed_or_never_loaded_answers_with_an_error(folder, kind):
    runner, _ = load_runner(folder, **kind)
    runner.close()
    runner.close()
    assert runner.step(step(0)).error == "no model is loaded"


def test_models_under_one_budget_take_and_give_back(folder, kind):
    budget = MemoryBudget(64 << 20)
    runners = []
    for name in ("a", "b"):
        base, _ = load_runner(folder, **kind, model=name)
        base.close()
        config = base._config
        runner = type(base)(config, base._checkpoint, budget)
        runner.load(lambda stage, fraction: None)
        runners.append(runner)
    taken = budget.free_bytes
    twin = type(base)(runners[0]._config, runners[0]._checkpoint, budget)
    with pytest.raises(ConfigError, match="a weights is reserved already"):
        twin.load(lambda stage, fraction: None)
    assert budget.free_bytes == taken, "a failed load takes nothing and frees nothing of others"
    runners[0].close()
    assert taken < budget.free_bytes < 64 << 20
    runners[1].close()
    assert budget.free_bytes == 64 << 20


def test_a_model_larger_than_the_budget_is_refused_with_numbers(folder, kind):
    base, _ = load_runner(folder, **kind)
    runner = type(base)(base._config, base._checkpoint, MemoryBudget(1000))
    with pytest.raises(ConfigError, match=r"test weights: [\d.]+ KiB needed, 1,000 bytes of"):
        runner.load(lambda stage, fraction: None)


def test_a_step_is_never_larger_than_what_can_run_at_once(folder, kind):
    """A budget of tokens that nobody can spend takes nothing from the KV cache."""
    base, _ = load_runner(folder, **kind)
    fields = {"num_gpu_blocks_override": 0, "max_num_seqs": 4}
    plans = []
    for num_tokens in (4 * 256, 10**9):
        config = structs.replace(base._config, max_num_batched_tokens=num_tokens, **fields)
        runner = type(base)(config, base._checkpoint, MemoryBudget(16 << 20))
        plans.append(runner.load(lambda stage, fraction: None))
        runner.close()
    assert plans[0].num_blocks == plans[1].num_blocks and plans[0].max_model_len == 256
    config = structs.replace(base._config, max_num_batched_tokens=10**9, num_gpu_blocks_override=0)
    with pytest.raises(ConfigError, match=r"lower --max-num-batched-tokens \(1000000000\)"):
        type(base)(config, base._checkpoint, MemoryBudget(16 << 20)).load(lambda *_: None)


def test_the_kv_cache_commits_no_memory_before_it_is_used(folder, kind):
    before = resident_bytes()
    runner, info = load_runner(folder, **kind, num_gpu_blocks_override=100_000)
    size = info.num_blocks * info.block_size * info.kv_bytes_per_token
    assert size > 500 << 20
    assert resident_bytes() - before < 100 << 20
    assert runner.step(step(0, [(0, 0, 1, Ask.SAMPLE)], added=[(0, [5], [99_999])])).error == ""
    runner.close()


def test_loading_tells_its_progress_and_its_facts(folder, kind):
    stages: list[tuple[str, float]] = []
    base, _ = load_runner(folder, **kind)
    runner = type(base)(base._config, base._checkpoint)
    info = runner.load(lambda stage, fraction: stages.append((stage, fraction)))
    expected = ["opening checkpoint", "loading weights", "allocating KV cache"]
    if kind.get("ops") == "native":
        expected += ["starting threads", "preparing steps"]
    assert [*dict(stages)] == expected
    assert ("loading weights", 1.0) in stages
    assert (info.device, info.dtype, info.vocab_size) == ("cpu", "float32", VOCAB_SIZE)
    assert (info.num_blocks, info.block_size, info.max_model_len) == (512, 16, 256)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # k and v, layers, heads, size, bytes
    names = {"torch": "reference (torch ", "program": "native (", "eager": "native, one by one ("}
    (name,) = [name for name, config in RUNNERS.items() if config == kind]
    assert info.ops.startswith(names[name])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"max_model_len": 257}, "at most 256, the positions"),
        ({"max_model_len": 1}, "at least 2"),
        ({"num_gpu_blocks_override": 10**20}, "at most 1048576 blocks"),
        ({"max_model_len": 256, "num_gpu_blocks_override": 15}, "there are 15"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(folder, config, message):
    for kind in RUNNERS.values():
        with pytest.raises(ConfigError, match=message):
            load_runner(folder, **kind, **config)


def test_blocks_are_copied_before_anything_is_computed(folder, expected, kind):
    """A second sequence gets copies of the first one's blocks, and computes only what follows."""
    runner, _ = load_runner(folder, block_size=16, **kind)
    prompt = prompts()[9]  # 40 tokens: two blocks and a half
    runner.step(step(0, [(0, 0, 40, Ask.NONE)], added=[(0, prompt, [3, 4, 5])]))
    copied = step(
        1,
        [(1, 39, 1, Ask.SAMPLE)],
        removed=[0],
        added=[(1, prompt, [8, 7, 6])],
        copies=[(4, 0, 5, 9), (3, 0, 4, 7), (2, 0, 3, 8), (8, 0, 9, 6)],
    )
    output = runner.step(copied)
    assert output.error == "" and [*unpack_ints(output.sampled)] == expected[9][:1]
    assert [*unpack_ints(output.copies_done)] == [4, 3, 2, 8] and output.copies_failed == b""
    assert 0 < output.copies_s < output.duration_s
