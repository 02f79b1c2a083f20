"""Reasoning before an answer, in any pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text.answers import Joined, Reasoning, cut, cuts, read, tokenizer_with

from streamkv.text.answer_parts import AnswerParser, ContentPart, ReasoningPart
from streamkv.text.reasoning import MAX_NEWLINES, ReasoningFormat, Stage

THINK = ReasoningFormat("<think>", "</think>", False)


def parse(pieces: list[str], *, is_open: bool = False) -> Joined:
    return read(AnswerParser([THINK.step(is_open)]), pieces)


@settings(max_examples=200, deadline=None)
@given(
    st.text("a<\n", max_size=20),
    st.text("a<\n", max_size=20),
    st.integers(0, 3),
    st.sampled_from(["", "<think>", "\n<think>\n\n"]),
    cuts(),
)
def test_thoughts_and_answer_are_told_apart_and_lose_only_newlines_at_the_marks(
    thought: str, answer: str, num_newlines: int, opening: str, places: list[int]
) -> None:
    text = opening + thought + "</think>" + "\n" * num_newlines + answer
    expected: Joined = []
    if shown := thought.strip("\n"):
        expected.append(Reasoning(shown))
    if shown := answer.lstrip("\n"):
        expected.append(shown)
    assert parse(cut(text, places), is_open=True) == expected
    if opening:
        assert parse(cut(text, places)) == expected
    elif not thought.startswith("<think>"):
        assert parse(cut(text, places)) == ([text] if text else [])


def test_thoughts_go_out_as_they_come() -> None:
    parser = AnswerParser([THINK.step(False)])
    pushed = [
        parser.push(text) for text in ("<thi", "nk>\na", "\n", "b</", "x\n</th", "ink>\n", "\nc")
    ]
    assert pushed == [
        *([], [ReasoningPart("a")], [], [ReasoningPart("\nb")], [ReasoningPart("</x")], []),
        [ContentPart("c")],
    ]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>cut off </thi", [Reasoning("cut off </thi")]),
        ("<think>cut off\n\n", [Reasoning("cut off\n\n")]),
        ("<think>", []),
        ("<think></think>", []),
        ("<thin", ["<thin"]),
        ("  <think>a</think>b</think>c", [Reasoning("a"), "b</think>c"]),
        ("so <think>a</think>", ["so <think>a</think>"]),
        ("<think>a" + "\n" * (MAX_NEWLINES + 2) + "</think>", [Reasoning("a\n\n")]),
    ],
)
def test_only_what_stands_first_is_reasoning(text: str, expected: Joined) -> None:
    assert parse([text]) == expected
    assert parse(list(text)) == expected


@pytest.mark.parametrize(
    ("template", "special", "opening", "shows"),
    [
        ("<think> </think>", (), "<think>", False),
        ("x.split('</think>')", ("<think>", "</think>"), "<think>", True),
        ("[THINK] [/THINK]", ("[THINK]", "[/THINK]"), "[THINK]", True),
        ("x.split('</think>')", (), None, False),
        ("nothing of it", ("<think>", "</think>"), None, False),
    ],
)
def test_the_template_and_the_vocabulary_tell_the_marks(
    template: str, special: tuple[str, ...], opening: str | None, shows: bool
) -> None:
    found = tokenizer_with(template, special).reasoning_format
    assert (found and found.opening) == opening
    assert found is None or found.shows_special_tokens is shows


@pytest.mark.parametrize(
    ("tail", "continued", "stage"),
    [
        ("<|assistant|>\n<think>\n", "", Stage.OPEN),
        ("<|assistant|>\n<think>\n\n</think>\n\n", "", Stage.OVER),
        ("<|assistant|>\n", "", Stage.NOT_BEGUN),
        ("what is <think> for?\n<|assistant|>", "", Stage.NOT_BEGUN),
        ("what is </think> for?\n<|assistant|>", "", Stage.NOT_BEGUN),
        ("<|assistant|>\n<think>\nHm, so", "<think>\nHm, so", Stage.OPEN),
        ("<|assistant|>\n<think>\nHm, so", "Hm, so ", Stage.OPEN),
        ("<|assistant|>\n<think>\nHm</think> So", "<think>\nHm</think> So", Stage.OVER),
        ("<|assistant|>\n<think>\nHm</think>", "<think>\nHm</think>", Stage.OVER),
        ("<|assistant|>\n<think>\n\n</think>\n\nHm, so", "Hm, so", Stage.OVER),
        ("<|assistant|>\nHm, so", "Hm, so", Stage.OVER),
        ("what is <think> for?\n<|assistant|>\nHm, so", "Hm, so", Stage.OVER),
        ("<|assistant|>\nThe mark <think> means", "The mark <think> means", Stage.OVER),
    ],
)
def test_the_prompts_end_tells_how_far_reasoning_has_gone(
    tail: str, continued: str, stage: Stage
) -> None:
    assert THINK.stage(tail, continued=continued) is stage
