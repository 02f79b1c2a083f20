"""Conversations to token ids: what the template is told, what stays text, and what runs where."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from engine.support import TOKENIZER, make_engine, make_runner, run
from tiny import tiny_tokenizer

from streamkv.engine import encoding
from streamkv.errors import ContextLengthError, InvalidRequestError
from streamkv.protocol import SamplingParams
from streamkv.text import chat_template
from streamkv.text.control_text import ControlText

HI = {"role": "user", "content": "hi"}
END = "<|im_end|>"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ALL = "{{ tools | tojson }}{{ documents | tojson }}{{ mood }}{{ messages[-1].content }}"


def test_the_template_gets_tools_documents_and_variables():
    tokenizer = tiny_tokenizer(**{"tokenizer.chat_template": ALL})
    documents = [{"title": "a", "text": "b"}]

    async def main() -> None:
        async with make_engine(make_runner(max_model_len=2000), tokenizer=tokenizer) as engine:
            token_ids = await engine.encode_chat(
                [HI], tools=TOOLS, documents=documents, mood="good", chat_template=None
            )
            assert tokenizer.decode(token_ids) == (
                '[{"type": "function", "function": {"name": "f", "parameters": '
                '{"type": "object"}}}][{"title": "a", "text": "b"}]goodhi'
            )

    run(main)


def test_text_of_control_tokens_stays_text_and_special_tokens_are_added_when_asked_for():
    around = {"tokenizer.ggml.add_bos_token": True}
    tokenizer = tiny_tokenizer(**around)

    async def main() -> None:
        async with make_engine(make_runner(), tokenizer=tokenizer) as engine:
            for content, specials in (("hi", [1, 2, 1]), (f"hi{END}", [1, 2, 1])):
                message = {"role": "user", "content": content}
                token_ids = await engine.encode_chat([message])
                assert [i for i in token_ids if i in tokenizer.special_token_ids] == specials
                added = await engine.encode_chat([message], add_special_tokens=True)
                assert added == [1, *token_ids]

    run(main)


def test_the_last_message_is_continued():
    async def main() -> None:
        async with make_engine(make_runner()) as engine:
            token_ids = await engine.encode_chat(
                [HI, {"role": "assistant", "content": "it is"}],
                add_generation_prompt=False,
                continue_final_message=True,
            )
            assert TOKENIZER.decode(token_ids).endswith("assistant\nit is")
            with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
                await engine.encode_chat([HI], continue_final_message=True)

    run(main)


def test_templates_of_requests_are_rendered_one_at_a_time_off_the_loop(monkeypatch):
    idents, running, most = [], 0, 0
    render = chat_template.ChatTemplate.render

    def noting(self: Any, *args: Any, **kwargs: Any) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        idents.append(threading.get_ident())
        text = render(self, *args, **kwargs)
        running -= 1
        return text

    monkeypatch.setattr(chat_template.ChatTemplate, "render", noting)
    source = "{% for i in range(20000) %}{% endfor %}{{ messages[0].content }}"

    async def main() -> None:
        async with make_engine(make_runner()) as engine:
            asked = [engine.encode_chat([HI], chat_template=source) for _ in range(4)]
            assert await asyncio.gather(*asked) == [TOKENIZER.encode("hi")] * 4
            with pytest.raises(InvalidRequestError) as caught:
                await engine.encode_chat([HI], chat_template="{% if %}")
            assert caught.value.param == "chat_template"

    run(main)
    assert len(idents) == 4 and threading.get_ident() not in idents and most == 1


def test_what_takes_long_is_done_off_the_loop():
    """Long tools, and the second tokenizer when it is needed first."""
    idents = []

    class NotingControls(ControlText):
        def guard(self, *values):
            idents.append(("guard", threading.get_ident()))
            return super().guard(*values)

        def encode(self, *args, **kwargs):
            idents.append(("encode", threading.get_ident()))
            return super().encode(*args, **kwargs)

    tokenizer = tiny_tokenizer()
    tokenizer.controls = NotingControls(tokenizer._backend)

    async def main() -> None:
        async with make_engine(make_runner(max_model_len=30_000), tokenizer=tokenizer) as engine:
            await engine.encode_chat([HI], tools=[{"description": "x" * 9000}])
            await engine.encode_chat([HI], mood={"x" * 9000: ""})
            await engine.encode_chat([{"role": "user", "content": END}])
            await engine.encode_chat([{"role": "user", "content": END}])

    run(main)
    on_the_loop = [(name, ident == threading.get_ident()) for name, ident in idents]
    assert on_the_loop == [
        *(("guard", False), ("guard", False), ("guard", True), ("encode", False)),
        *(("guard", True), ("encode", True)),
    ]


def test_a_conversation_that_will_be_truncated_may_have_any_number_of_messages():
    async def main() -> None:
        async with make_engine(make_runner(max_model_len=100)) as engine:
            messages = [HI] * 101
            with pytest.raises(ContextLengthError):
                await engine.encode_chat(messages)
            token_ids = await engine.encode_chat(messages, must_fit=False)
            assert token_ids == TOKENIZER.encode(TOKENIZER.apply_chat_template(messages))

    run(main)


def test_a_prompt_too_long_at_first_sight_is_measured_without_marks():
    async def main() -> None:
        async with make_engine(make_runner(max_model_len=10_000)) as engine:
            longest = max(len(TOKENIZER.token_bytes(i)) for i in range(TOKENIZER.vocab_size))
            content = END * (9_900 * longest // len(END))
            message = {"role": "user", "content": content}
            assert len(await engine.encode_chat([message])) > 10_000
            with pytest.raises(ContextLengthError):
                await engine.encode_chat([{"role": "user", "content": content * 2}])

    run(main)


def test_a_text_of_too_many_characters_is_refused_untokenized_also_if_its_end_is_all_that_is_wanted(
    monkeypatch,
):
    monkeypatch.setattr(encoding, "HUGE_TEXT_CHARS", 100)
    tokenizer = tiny_tokenizer()

    async def main() -> None:
        async with make_engine(make_runner(max_model_len=50), tokenizer=tokenizer) as engine:
            longest = 16 * 50
            assert len(await engine.encode("7" * longest)) == longest
            monkeypatch.setattr(tokenizer, "encode", None)
            last = SamplingParams(truncate_prompt_tokens=5, max_tokens=1)
            with pytest.raises(ContextLengthError, match=f"prompt: .*{longest} characters"):
                await engine.encode("7" * (longest + 1))
            with pytest.raises(ContextLengthError, match=f"prompt: .*{longest} characters"):
                async with engine.generate("7" * (longest + 1), last):
                    pass
            with pytest.raises(ContextLengthError, match=f"messages: .*{longest} characters"):
                message = {"role": "user", "content": "7" * longest}
                await engine.encode_chat([message], must_fit=False)

    run(main)
