"""What of a conversation fits in the context, and what is forgotten."""

from __future__ import annotations

import asyncio

import pytest
from fakes import FakeRunner
from tiny import tiny_tokenizer

from streamkv.commands.conversation import Conversation
from streamkv.engine.async_engine import AsyncEngine
from streamkv.errors import ContextLengthError, InvalidRequestError

CONTEXT = 256
TOKENIZER = tiny_tokenizer()


def prompt(conversation: Conversation, message: str, room: int | None = None):
    """The prompt's text, and how many turns were forgotten."""

    async def ask():
        runner = FakeRunner(vocab_size=TOKENIZER.vocab_size, max_model_len=CONTEXT)
        async with AsyncEngine("fake", runner=runner, tokenizer=TOKENIZER) as engine:
            return await conversation.prompt(engine, message, room)

    token_ids, num_forgotten = asyncio.run(ask())
    return TOKENIZER.decode(token_ids, skip_special_tokens=False), num_forgotten, len(token_ids)


def turns(num: int) -> Conversation:
    conversation = Conversation("be brief")
    for index in range(num):
        conversation.add(f"question {index}", f"answer {index}")
    return conversation


def test_all_is_told_while_it_fits():
    text, num_forgotten, _ = prompt(turns(2), "and now?")
    assert num_forgotten == 0
    assert text == "".join(
        f"<|im_start|>{role}\n{content}<|im_end|>\n"
        for role, content in [
            ("system", "be brief"),
            ("user", "question 0"),
            ("assistant", "answer 0"),
            ("user", "question 1"),
            ("assistant", "answer 1"),
            ("user", "and now?"),
        ]
    ) + ("<|im_start|>assistant\n")


def test_the_oldest_turns_go_and_the_next_ones_have_room_for_a_while():
    conversation = turns(12)
    text, num_forgotten, num_tokens = prompt(conversation, "and now?")
    assert 0 < num_forgotten < 12
    assert f"answer {num_forgotten - 1}<" not in text
    assert f"question {num_forgotten}<" in text
    assert text.startswith("<|im_start|>system\nbe brief")
    assert num_tokens <= CONTEXT // 2
    conversation.add("and now?", "answer")
    longer, num_forgotten, _ = prompt(conversation, "and then?")
    assert num_forgotten == 0
    assert longer.startswith(text.removesuffix("<|im_start|>assistant\n"))


def test_answers_that_were_asked_to_be_long_have_room():
    conversation = turns(4)
    _, num_forgotten, num_tokens = prompt(conversation, "and now?")
    assert num_forgotten == 0
    assert num_tokens > CONTEXT // 2
    _, num_forgotten, num_tokens = prompt(conversation, "and now?", CONTEXT)
    assert num_forgotten > 0
    assert num_tokens <= CONTEXT // 2


@pytest.mark.parametrize("message", ["z" * 300, "z" * 100_000])
def test_a_message_too_long_alone_is_refused_and_nothing_is_forgotten(message):
    conversation = turns(12)
    with pytest.raises(ContextLengthError, match="shorten"):
        prompt(conversation, message)
    text, _, _ = prompt(turns(12), "and now?")
    assert prompt(conversation, "and now?")[0] == text


def test_a_system_text_too_long_is_named():
    conversation = Conversation("z" * 250)
    with pytest.raises(ContextLengthError, match="message and system text: expected at most 255"):
        prompt(conversation, "hi")


def test_what_the_template_refuses_is_the_messages_error(monkeypatch):
    source = "{{ raise_exception('no system message') if messages[0].role == 'system' }}"
    tokenizer = tiny_tokenizer(**{"tokenizer.chat_template": source})
    monkeypatch.setitem(globals(), "TOKENIZER", tokenizer)
    with pytest.raises(InvalidRequestError, match="no system message"):
        prompt(turns(1), "and now?")
