"""Masks of grammars through real steps: in time, late, never; and steps that were sent ahead."""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from drive import load_runner
from msgspec import structs
from runner.support import RUNNERS, VOCAB_SIZE, mask_words, prompts, row_added, step

from streamkv.protocol import Ask, StepOutput, unpack_ints
from streamkv.runner import cpu_model, torch_runner

PROMPT = prompts()[4]
NUM_TOKENS = 10
SHORT, LONG = 0.05, 60.0  # how long runners wait for masks


@pytest.fixture(params=RUNNERS)
def kind(request) -> dict:
    """What `load_runner` builds this kind of runner from."""
    return RUNNERS[request.param]


@pytest.fixture
def patient(monkeypatch):
    """Sets how long the runners that are loaded from now on wait for masks."""

    def wait(seconds: float) -> None:
        monkeypatch.setattr(cpu_model, "MASK_WAIT_S", seconds)
        monkeypatch.setattr(torch_runner, "MASK_WAIT_S", seconds)

    return wait


def mask_at(position: int, seed: int = 0) -> list[int]:
    """What a made-up grammar allows there: one token, a few, half, all."""
    rng = random.Random(1000 * seed + position)
    return rng.sample(range(VOCAB_SIZE), rng.choice([1, 3, VOCAB_SIZE // 2, VOCAB_SIZE]))


def publish(runner: Any, slot: int, position: int, seed: int = 0) -> None:
    words = mask_words(mask_at(position, seed), VOCAB_SIZE)
    runner.masks.words(slot)[:] = memoryview(words)
    runner.masks.publish(slot, position)


def masked_greedy(oracle: Any, prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = oracle(torch.tensor([token_ids])).logits[0, -1]
            allowed = sorted(mask_at(len(token_ids), seed))
            token_ids.append(allowed[int(logits[allowed].argmax())])
    return token_ids[len(prompt) :]


def numbers(data: bytes) -> list[int]:
    return [*unpack_ints(data)]


def first_step(slot: int, *others: Any) -> Any:
    row = row_added(0, PROMPT, [0, 1], len(PROMPT), mask_slot=slot)
    scheduled = [(one.row, 0, one.num_prompt_tokens, Ask.SAMPLE) for one in (row, *others)]
    return step(0, scheduled, added=[row, *others])


def test_a_board_is_there_from_load_till_close(folder, kind):
    runner, info = load_runner(folder, **kind)
    assert runner.masks.num_words == -(-info.vocab_size // 32)
    runner.close()
    assert runner.masks is None


def test_a_row_gets_what_its_masks_allow(folder, oracle, kind):
    runner, _ = load_runner(folder, **kind)
    slot = runner.masks.add()
    publish(runner, slot, len(PROMPT))
    tokens = numbers(runner.step(first_step(slot)).sampled)
    for position in range(len(PROMPT) + 1, len(PROMPT) + NUM_TOKENS):
        publish(runner, slot, position)
        output = runner.step(step(position, [(0, position - 1, 1, Ask.SAMPLE)]))
        assert (output.error, output.deferred) == ("", b"")
        tokens += unpack_ints(output.sampled)
    assert tokens == masked_greedy(oracle, PROMPT, NUM_TOKENS)


def test_a_row_whose_mask_is_not_there_is_deferred_and_the_others_are_not(
    folder, oracle, kind, patient
):
    patient(SHORT)
    runner, _ = load_runner(folder, **kind)
    slot, other_slot = runner.masks.add(), runner.masks.add()
    publish(runner, slot, len(PROMPT) - 1)  # of another token
    other = prompts()[5]
    publish(runner, other_slot, len(other), seed=1)
    plain = row_added(1, prompts()[6], [2, 3], len(prompts()[6]), num_logprobs=1)
    masked = row_added(2, other, [4, 5], len(other), mask_slot=other_slot, num_logprobs=0)
    output = runner.step(first_step(slot, plain, masked))
    assert output.error == "" and numbers(output.deferred) == [0] and output.failed == b""
    assert output.duration_s >= SHORT
    expected = [0, *masked_greedy_or_not(oracle)]
    assert numbers(output.sampled) == expected
    assert output.logprobs[0] is None and output.logprobs[1] and output.logprobs[2]

    publish(runner, slot, len(PROMPT))
    again = runner.step(step(1, [(0, len(PROMPT) - 1, 1, Ask.SAMPLE)]))
    assert (again.deferred, numbers(again.sampled)) == (b"", masked_greedy(oracle, PROMPT, 1))


def masked_greedy_or_not(oracle: Any) -> list[int]:
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompts()[6]])).logits[0, -1]
    return [int(logits.argmax()), *masked_greedy(oracle, prompts()[5], 1, seed=1)]


def test_steps_that_were_sent_ahead_wait_for_nothing_and_leave_the_row_as_it_was(
    folder, oracle, kind, patient
):
    patient(LONG)
    runner, _ = load_runner(folder, **kind)
    slot, position = runner.masks.add(), len(PROMPT)
    first = first_step(slot)
    assert runner.step(structs.replace(first, scheduled=b"")).error == ""
    runner.masks.remove(slot)  # nobody waits for a slot that is gone
    assert numbers(runner.step(structs.replace(first, added=())).deferred) == [0]
    assert runner.masks.add() == slot
    for ahead in (1, 2, 3):
        if ahead == 3:  # a mask that comes now is of no use: the tokens before are unknown
            publish(runner, slot, position + ahead)
        output = runner.step(step(ahead, [(0, position + ahead - 1, 1, Ask.SAMPLE)]))
        assert (numbers(output.sampled), numbers(output.deferred)) == ([0], [0])
        assert output.error == "" and output.duration_s < LONG
    runner.masks.remove(slot)  # of a slot's masks none comes before one that was there
    assert runner.masks.add() == slot
    tokens = []
    for index in range(NUM_TOKENS):
        publish(runner, slot, position + index)
        output = runner.step(step(5 + index, [(0, position + index - 1, 1, Ask.SAMPLE)]))
        tokens += unpack_ints(output.sampled)
    assert tokens == masked_greedy(oracle, PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("removed", [(0,), ()])
def test_a_deferred_row_can_be_given_up_and_its_place_taken(folder, oracle, kind, removed):
    runner, _ = load_runner(folder, **kind)
    slot = runner.masks.add()
    assert numbers(runner.step(first_step(slot)).deferred) == [0]
    assert runner.step(step(1, [(0, len(PROMPT), 1, Ask.SAMPLE)])).error == ""
    known = masked_greedy(oracle, PROMPT, 3)
    publish(runner, slot, len(PROMPT) + 2)
    added = row_added(0, [*PROMPT, *known[:2]], [0, 1], len(PROMPT), mask_slot=slot)
    scheduled = [(0, len(PROMPT) - 1, 3, Ask.SAMPLE)]  # tokens that were forced, as a chunk
    output = runner.step(step(2, scheduled, removed=removed, added=[added]))
    assert (output.deferred, numbers(output.sampled)) == (b"", known[2:])


def test_a_mask_that_comes_while_it_is_waited_for_is_in_time(folder, oracle, kind, patient):
    patient(LONG)
    runner, _ = load_runner(folder, **kind)
    slot = runner.masks.add()
    positions: queue.SimpleQueue[int] = queue.SimpleQueue()

    def match() -> None:
        for _ in range(NUM_TOKENS):
            publish(runner, slot, positions.get())

    thread = threading.Thread(target=match, daemon=True)
    thread.start()
    positions.put(len(PROMPT))
    tokens = numbers(runner.step(first_step(slot)).sampled)
    for position in range(len(PROMPT) + 1, len(PROMPT) + NUM_TOKENS):
        positions.put(position)
        output = runner.step(step(position, [(0, position - 1, 1, Ask.SAMPLE)]))
        assert output.deferred == b""
        tokens += unpack_ints(output.sampled)
    thread.join()
    assert tokens == masked_greedy(oracle, PROMPT, NUM_TOKENS)


@pytest.mark.parametrize(
    ("name", "depth", "temperature"),
    [
        ("program", 0, 0.0),
        ("program", 0, 1.0),
        ("program", 1, 0.0),
        ("program", 1, 1.0),
        ("program", 2, 1.0),
        ("eager", 1, 1.0),
        ("torch", 2, 1.0),
    ],
)
def test_tokens_are_the_same_whichever_rows_are_deferred(folder, patient, name, depth, temperature):
    """Three rows, each with a grammar; `depth` steps are sent before an answer is looked at."""
    patient(0.0)
    runner, _ = load_runner(folder, block_size=64, **RUNNERS[name])
    expected = generate(runner, random.Random(0), 0, temperature, never_late=True)
    rng = random.Random(depth)
    for _ in range(2):
        assert generate(runner, rng, depth, temperature) == expected


def generate(
    runner: Any, rng: random.Random, depth: int, temperature: float, never_late: bool = False
) -> list[list[int]]:
    """Tokens of the rows; a mask is late or not by chance."""
    texts = [list(prompts()[index]) for index in (4, 5, 8)]
    lengths = [len(text) for text in texts]
    slots = [runner.masks.add() for _ in texts]
    added = [
        row_added(
            row, text, [row], len(text), mask_slot=slots[row], temperature=temperature, seed=row
        )
        for row, text in enumerate(texts)
    ]
    pending = deque()  # (output, its rows and positions)
    asked = dict.fromkeys(range(3), 0)  # rows that may be run ahead, and by how much
    num_deferred = step_id = 0
    ends = [length + NUM_TOKENS for length in lengths]
    while pending or any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        scheduled = []
        for row, text in enumerate(texts):
            position = len(text) + asked[row]
            if position < ends[row] and asked[row] >= 0:
                start = 0 if step_id == 0 else position - 1
                scheduled.append((row, start, position - start, Ask.SAMPLE))
                if asked[row] == 0 and (never_late or rng.random() < 0.7):
                    publish(runner, slots[row], position, seed=row)
                asked[row] += 1
        if scheduled:
            output = runner.step(step(step_id, scheduled, added=added if step_id == 0 else ()))
            pending.append((output, [(one[0], one[1] + one[2]) for one in scheduled]))
            step_id += 1
        if len(pending) > depth or not scheduled:
            num_deferred += commit(*pending.popleft(), texts, asked)
        held = {row for _, places in pending for row, _ in places}
        for row in asked.keys() - held:  # a deferred row: nothing of it is on its way
            asked[row] = 0
    assert never_late == (num_deferred == 0)
    runner.step(step(step_id, removed=[0, 1, 2]))
    for slot in slots:
        runner.masks.remove(slot)
    return [text[length:] for text, length in zip(texts, lengths, strict=True)]


def commit(
    output: StepOutput, places: list[tuple[int, int]], texts: list[list[int]], asked: dict[int, int]
) -> int:
    """Append what was sampled; returns how many were deferred."""
    assert (output.error, output.failed) == ("", b"")
    deferred = set(unpack_ints(output.deferred))
    for index, ((row, position), token_id) in enumerate(
        zip(places, unpack_ints(output.sampled), strict=True)
    ):
        if index in deferred or position != len(texts[row]):
            assert index in deferred, "nothing follows a token that isn't there"
            asked[row] = -1  # not run ahead any more
        else:
            texts[row].append(token_id)
            asked[row] -= 1
    return len(deferred)


@pytest.mark.parametrize("kind", [RUNNERS["program"], RUNNERS["eager"]])
def test_masks_and_scores_of_others_change_no_bit_of_a_row(folder, kind):
    """Its log-probabilities, and those of its prompt, alone and among others."""
    runner, _ = load_runner(folder, block_size=64, threads=2, **kind)
    prompt = prompts()[9]
    own = {"temperature": 1.0, "seed": 5, "num_logprobs": 20, "num_prompt_logprobs": 5}
    slot = runner.masks.add()
    publish(runner, slot, len(prompts()[7]))
    publish_all(runner, other := runner.masks.add(), len(prompt))
    others = [
        row_added(1, prompts()[7], [1], len(prompts()[7]), mask_slot=slot, num_logprobs=3),
        row_added(2, prompts()[5], [2], len(prompts()[5]), num_prompt_logprobs=339),
        row_added(3, prompts()[6], [3], len(prompts()[6]), mask_slot=runner.masks.add()),
    ]
    answers = []
    for company, mask_slot in (([], -1), (others, -1), (others[::-1], other)):
        row = row_added(0, prompt, [0], len(prompt), mask_slot=mask_slot, **own)
        asks = {0: Ask.SAMPLE | Ask.SCORE, 2: Ask.SCORE}
        rows = [*company, row]
        scheduled = [
            (one.row, 0, one.num_prompt_tokens, asks.get(one.row, Ask.SAMPLE)) for one in rows
        ]
        output = runner.step(step(0, scheduled, removed=[0, 1, 2, 3], added=rows))
        assert output.error == ""
        scored = [s for s in output.scored if len(s.top_ids) == 20]
        answers.append((output.sampled[-4:], output.logprobs[-1], scored))
        assert len(scored) == len(prompt) - 1
    assert answers[0] == answers[1] == answers[2]


def publish_all(runner: Any, slot: int, position: int) -> None:
    runner.masks.words(slot)[:] = memoryview(np.full(runner.masks.num_words, -1, np.int32))
    runner.masks.publish(slot, position)
