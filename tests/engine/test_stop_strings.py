"""Stop strings: found in the text, wherever the borders of the tokens lie."""

from __future__ import annotations

import pytest
from engine.support import (
    NOT_ASCII_IDS,
    TOKENIZER,
    check_nothing_is_held,
    greedy,
    make_engine,
    make_runner,
    oracle,
    read,
    run,
    until_idle,
)

from streamkv.protocol import FinishReason

NUM_TOKENS = 30
# Prompts whose answers are some text; each is cut by stop strings taken from its middle.
PROMPTS = [[first, 7, 9] for first in range(12)]


def answer_of(prompt: list[int]) -> list[int]:
    return oracle(make_runner(avoid=NOT_ASCII_IDS), prompt, NUM_TOKENS)


def tokens_up_to(token_ids: list[int], num_chars: int) -> list[int]:
    """The fewest tokens whose text has that many characters."""
    num = next(
        num
        for num in range(len(token_ids) + 1)
        if len(TOKENIZER.decode(token_ids[:num])) >= num_chars
    )
    return token_ids[:num]


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_text_ends_exactly_before_the_first_stop_string(async_scheduling, include, length):
    """Stop strings of several lengths cross one or more borders between tokens. What comes before
    is shown in full, nothing of the stop string leaks in any delta, and the token that was in
    flight when it was found is not seen."""
    runner = make_runner(avoid=NOT_ASCII_IDS)

    async def main() -> None:
        async with make_engine(runner, async_scheduling=async_scheduling) as engine:
            for prompt in PROMPTS:
                token_ids = answer_of(prompt)
                whole = TOKENIZER.decode(token_ids)
                stop = whole[len(whole) // 2 :][:length]
                begin = whole.index(stop)
                sampling = greedy(
                    max_tokens=NUM_TOKENS, stop=[stop], include_stop_str_in_output=include
                )
                async with engine.generate(prompt, sampling) as stream:
                    deltas = await read(stream)
                shown = whole[: begin + len(stop)] if include else whole[:begin]
                text = ""
                for delta in deltas:
                    text += delta.text
                    assert shown.startswith(text)
                assert text == shown
                got = [token_id for delta in deltas for token_id in delta.token_ids]
                assert got == tokens_up_to(token_ids, begin + len(stop))
                assert deltas[-1].finish_reason is FinishReason.STOP
                assert deltas[-1].stop_reason == stop
                assert stream.usage.num_generated_tokens == len(got)
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)


def test_text_held_back_for_a_stop_string_that_never_comes_is_shown_at_the_end():
    runner = make_runner(avoid=NOT_ASCII_IDS)

    async def main() -> None:
        async with make_engine(runner) as engine:
            for prompt in PROMPTS:
                whole = TOKENIZER.decode(answer_of(prompt))
                sampling = greedy(max_tokens=NUM_TOKENS, stop=[whole[-3:] + "\n"])
                (completion,) = await engine.generate(prompt, sampling).collect()
                assert completion.text == whole
                assert completion.finish_reason is FinishReason.LENGTH
                assert completion.stop_reason is None

    run(main)


def test_a_stop_string_in_the_last_token_wins_over_the_length():
    runner = make_runner(avoid=NOT_ASCII_IDS)

    async def main() -> None:
        async with make_engine(runner) as engine:
            token_ids = answer_of(PROMPTS[0])
            whole = TOKENIZER.decode(token_ids)
            last = TOKENIZER.decode(token_ids[-1:])
            stop = whole[-len(last) - 2 :]
            assert whole.index(stop) == len(whole) - len(stop)
            sampling = greedy(max_tokens=NUM_TOKENS, stop=[stop])
            (completion,) = await engine.generate(PROMPTS[0], sampling).collect()
            assert completion.text == whole[: -len(stop)]
            assert completion.finish_reason is FinishReason.STOP
            assert completion.stop_reason == stop

    run(main)


def test_stop_strings_count_only_after_min_tokens():
    runner = make_runner(avoid=NOT_ASCII_IDS)

    async def main() -> None:
        async with make_engine(runner) as engine:
            for prompt in PROMPTS:
                token_ids = answer_of(prompt)
                whole = TOKENIZER.decode(token_ids)
                stop = whole[0]
                first = len(TOKENIZER.decode(token_ids[:10]))
                found = whole.find(stop, first)
                sampling = greedy(max_tokens=NUM_TOKENS, stop=[stop], min_tokens=10)
                (completion,) = await engine.generate(prompt, sampling).collect()
                assert completion.text == (whole if found < 0 else whole[:found])

    run(main)


def test_each_choice_has_stop_strings_of_its_own():
    runner = make_runner(avoid=NOT_ASCII_IDS)

    async def main() -> None:
        async with make_engine(runner) as engine:
            answers = [
                TOKENIZER.decode(
                    oracle(runner, [5], NUM_TOKENS, temperature=1.0, seed=1, choice=choice)
                )
                for choice in range(3)
            ]
            stop = answers[1][10:13]
            sampling = greedy(n=3, seed=1, temperature=1.0, max_tokens=NUM_TOKENS, stop=[stop])
            completions = await engine.generate([5], sampling).collect()
            assert [c.text for c in completions] == [text.split(stop)[0] for text in answers]
            assert completions[1].finish_reason is FinishReason.STOP
            await until_idle(engine)
            check_nothing_is_held(engine, runner)

    run(main)
