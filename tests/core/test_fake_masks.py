"""The board of masks, and the runner that reads it, see each kind of wrong use."""

import threading
import time
from array import array

import pytest
from core.test_fake_runner import PROMPT, VOCAB_SIZE, make_step, row_added
from fakes import FakeMaskBoard, FakeMatcher, FakeRunner, expected_scores, expected_tokens

from streamkv.protocol import MAX_SCORED, Ask, unpack_ints

EVEN = frozenset(range(0, VOCAB_SIZE, 2))


@pytest.fixture
def board() -> FakeMaskBoard:
    """Its slot 0 allows even tokens after the prompt."""
    board = FakeMaskBoard(VOCAB_SIZE)
    board.add()
    allow(board, EVEN, len(PROMPT))
    return board


def allow(board: FakeMaskBoard, token_ids: frozenset[int], position: int) -> None:
    bits = sum(1 << token_id for token_id in token_ids)
    board.words(0)[:] = array("i", bits.to_bytes(4 * board.num_words, "little"))
    board.publish(0, position)


@pytest.fixture
def runner(board) -> FakeRunner:
    """Row 0 has a mask, and asks for its first token in step 0."""
    runner = FakeRunner(num_blocks=4, block_size=4, vocab_size=VOCAB_SIZE, masks=board)
    output = runner.step(make_step(0, added=[masked_row(0)], scheduled=[0, 0, 3, Ask.SAMPLE]))
    assert list(unpack_ints(output.sampled)) == expected_tokens(PROMPT, 1, VOCAB_SIZE, allowed=EVEN)
    return runner


def masked_row(row: int, **sampling):
    return row_added(row, PROMPT, [2, 3], mask_slots=(0,), **sampling)


# --- the board -----------------------------------------------------------------------------------


def test_slots_are_given_again(board):
    assert [board.add(), board.add()] == [1, 2]
    board.remove(1)
    assert (board.add(), board.num_slots) == (1, 3)
    assert board.violations == []


def test_a_mask_is_there_for_its_position_alone(board):
    assert board.wait(0, 3, 0.0) == EVEN
    assert board.wait(0, 2, 0.0) is None
    assert board.wait(0, 4, 0.0) is None


def test_a_mask_is_waited_for(board):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(board.wait(0, 4, time.monotonic() + 30)))
    thread.start()
    allow(board, frozenset({5}), 4)
    thread.join(30)
    assert seen == [frozenset({5})]


def test_wrong_uses_are_seen(board):
    board.publish(0, 3)
    board.words(0)[0] = 1
    board.wait(0, 3, 0.0)
    board.remove(0)
    board.remove(0)
    assert board.violations == [
        "slot 0 has a mask for 3 after that for 3",
        "slot 0 was written while its mask was to be read",
        "slot 0 is removed but not there",
    ]


def test_a_vocabulary_of_several_words_has_all_its_tokens():
    board = FakeMaskBoard(100)
    board.add()
    allow(board, frozenset({0, 31, 32, 63, 64, 99}), 1)
    assert board.wait(0, 1, 0.0) == {0, 31, 32, 63, 64, 99}


# --- the grammar ---------------------------------------------------------------------------------


def test_a_grammar_leaves_a_choice_now_and_then_none():
    numbers = []
    for seed in range(50):
        matcher = FakeMatcher(seed, VOCAB_SIZE)
        for _ in range(20):
            numbers.append(len(matcher.allowed))
            assert len(matcher.allowed) == 1 or not matcher.forced
            assert matcher.forced[:1] in ([], list(matcher.allowed))
            matcher.consume(min(matcher.allowed))
    assert 100 < numbers.count(1) < 800


def test_a_grammar_goes_by_what_came():
    first, second = FakeMatcher(FREE_SEED, VOCAB_SIZE), FakeMatcher(FREE_SEED, VOCAB_SIZE)
    one, other, *_ = sorted(first.allowed)
    first.consume(one)
    second.consume(other)
    assert (first.allowed, first.forced) != (second.allowed, second.forced)
    (wrong, *_) = set(range(VOCAB_SIZE)) - first.allowed
    with pytest.raises(AssertionError, match="came, allowed were"):
        first.consume(wrong)


FREE_SEED = next(seed for seed in range(100) if not FakeMatcher(seed, VOCAB_SIZE).forced)


# --- rows with masks -----------------------------------------------------------------------------


def test_a_row_without_its_mask_is_deferred_until_it_asks_again(runner, board):
    """Whatever else was sent for it meanwhile."""
    for step_id in (1, 2):
        output = runner.step(make_step(step_id, scheduled=[0, 2 + step_id, 1, Ask.SAMPLE]))
        assert (list(unpack_ints(output.deferred)), unpack_ints(output.sampled)[0]) == ([0], 0)
    allow(board, frozenset({7}), 4)
    output = runner.step(make_step(3, scheduled=[0, 4, 1, Ask.SAMPLE]))
    assert list(unpack_ints(output.deferred)) == [0]  # it asks for the token after
    output = runner.step(make_step(4, scheduled=[0, 3, 1, Ask.SAMPLE]))
    assert (list(unpack_ints(output.sampled)), output.deferred) == ([7], b"")
    assert (runner.violations, runner.num_deferrals) == ([], 1)


def test_what_a_deferred_row_computes_meanwhile_is_no_kv(runner, board):
    runner.step(make_step(1, scheduled=[0, 3, 1, Ask.SAMPLE]))
    runner.step(make_step(2, scheduled=[0, 4, 1, Ask.SAMPLE]))
    context = runner.rows[0].token_ids.tolist()
    other = row_added(1, [*context, 0, 1], [2, 3])
    output = runner.step(make_step(3, added=[other], scheduled=[1, 5, 1, Ask.SAMPLE]))
    assert "hold [1, 2, 3, 12, -1, 1]" in output.error


@pytest.mark.parametrize("scheduled", [[0, 3, 1, 0], [0, 0, 3, Ask.SAMPLE], [0, 3, 9, Ask.SAMPLE]])
def test_a_deferred_row_must_ask_for_its_token_or_what_follows(runner, scheduled):
    runner.step(make_step(1, scheduled=[0, 3, 1, Ask.SAMPLE]))
    assert "row 0 has 4 tokens" in runner.step(make_step(2, scheduled=scheduled)).error


def test_a_row_is_deferred_once_when_the_test_says_so(runner, board):
    allow(board, EVEN, 4)
    runner.late_masks.add((0, 4))
    outputs = [
        runner.step(make_step(step_id, scheduled=[0, 3, 1, Ask.SAMPLE])) for step_id in (1, 2)
    ]
    assert [list(unpack_ints(output.deferred)) for output in outputs] == [[0], []]


def test_a_runner_waits_for_masks(runner, board):
    runner.mask_wait_s = 30.0
    outputs = []
    step = make_step(1, scheduled=[0, 3, 1, Ask.SAMPLE])
    thread = threading.Thread(target=lambda: outputs.append(runner.step(step)))
    thread.start()
    allow(board, frozenset({9}), 4)
    thread.join(30)
    assert list(unpack_ints(outputs[0].sampled)) == [9]


def test_a_mask_whose_slot_is_gone_is_seen(runner, board):
    board.remove(0)
    output = runner.step(make_step(1, scheduled=[0, 3, 1, Ask.SAMPLE]))
    assert "slot 0, which isn't there" in output.error


def test_what_would_leave_no_token_yields(board):
    """First the stop tokens, then bad words, then allowed tokens; the grammar never."""
    for sampling, left in [
        ({"allowed_token_ids": [1, 3]}, EVEN),
        ({"allowed_token_ids": [2, 3]}, {2}),
        ({"allowed_token_ids": [2, 4], "bad_words": [[2], [4]]}, {2, 4}),
        ({"allowed_token_ids": [2, 4], "bad_words": [[2]], "stop_token_ids": [4]}, {4}),
        ({"allowed_token_ids": [2, 4], "stop_token_ids": [4]}, {2}),
    ]:
        runner = FakeRunner(vocab_size=VOCAB_SIZE, masks=board)
        added = masked_row(0, min_tokens=1, **sampling)
        output = runner.step(make_step(0, added=[added], scheduled=[0, 0, 3, Ask.SAMPLE]))
        expected = expected_tokens(PROMPT, 1, VOCAB_SIZE, allowed=left)
        assert list(unpack_ints(output.sampled)) == expected


def test_a_token_to_avoid_comes_where_no_other_may(board):
    for allowed, token_id in (({3, 5}, 5), ({3}, 3)):
        runner = FakeRunner(vocab_size=VOCAB_SIZE, avoid=[3])
        added = row_added(0, PROMPT, [2], allowed_token_ids=allowed)
        output = runner.step(make_step(0, added=[added], scheduled=[0, 0, 3, Ask.SAMPLE]))
        assert list(unpack_ints(output.sampled)) == [token_id]


def test_only_allowed_tokens_come_and_never_a_bad_word():
    for first in range(10):
        prompt = [first, 2]
        plain = expected_tokens(prompt, 8, VOCAB_SIZE)
        words = [plain[:1], plain[2:4]]
        runner = FakeRunner(vocab_size=VOCAB_SIZE)
        allowed = [token_id for token_id in range(VOCAB_SIZE) if token_id != plain[1]]
        row = row_added(0, prompt, [0, 1, 2], bad_words=words, allowed_token_ids=allowed)
        runner.step(make_step(0, added=[row], scheduled=[0, 0, 2, Ask.SAMPLE]))
        for position in range(2, 9):
            runner.step(make_step(position - 1, scheduled=[0, position, 1, Ask.SAMPLE]))
        output = runner.rows[0].token_ids[2:].tolist()
        assert plain[0] not in output and plain[1] not in output
        assert not any(output[i : i + 2] == words[1] for i in range(7))
        assert output == expected_tokens(prompt, 8, VOCAB_SIZE, allowed=allowed, bad_words=words)


# --- scores --------------------------------------------------------------------------------------


def test_scores_come_of_what_is_cached_before_each_token():
    runner = FakeRunner(block_size=4, vocab_size=VOCAB_SIZE)
    prompt = list(range(6))
    added = [row_added(0, prompt, [3, 1], prompt_logprobs=2)]
    expected = expected_scores(prompt, 2, VOCAB_SIZE)
    output = runner.step(make_step(0, added=added, scheduled=[0, 0, 3, Ask.SCORE]))
    assert list(output.scored) == expected[:3] and output.sampled == b""
    output = runner.step(make_step(1, scheduled=[0, 3, 3, Ask.SCORE | Ask.SAMPLE]))
    assert list(output.scored) == expected[3:]
    assert list(unpack_ints(output.sampled)) == expected_tokens(prompt, 1, VOCAB_SIZE)
    assert len({score.logprob for score in expected}) == 5


@pytest.mark.parametrize(
    ("prompt_logprobs", "scheduled", "message"),
    [
        (None, [0, 0, 3, Ask.SCORE], "row 0 has no scores for 0"),
        (0, [0, 69, 1, Ask.SCORE], "row 0 has no scores for 69"),
        (0, [0, 0, MAX_SCORED + 1, Ask.SCORE], f"{MAX_SCORED + 1} tokens are to be scored"),
    ],
)
def test_scores_that_are_not_to_be_had_are_seen(prompt_logprobs, scheduled, message):
    runner = FakeRunner(block_size=128, vocab_size=VOCAB_SIZE)
    added = [row_added(0, [1] * 70, [0], prompt_logprobs=prompt_logprobs)]
    assert message in runner.step(make_step(0, added=added, scheduled=scheduled)).error
