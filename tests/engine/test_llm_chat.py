"""LLM.chat: conversations become prompts."""

from __future__ import annotations

import msgspec
import pytest
from engine.llm_support import CHAT, STRIPPING, make_llm, texts
from engine.support import TOKENIZER, greedy, make_runner, oracle
from tiny import save_tiny_checkpoint, tiny_tokenizer
from transformers import AutoTokenizer

from streamkv.errors import InvalidRequestError, ModelLoadError
from streamkv.server.messages import Messages

STARTED = [*CHAT, {"role": "assistant", "content": "it is the "}]


def test_conversations_become_prompts_by_the_models_template():
    runner = make_runner()
    with make_llm(runner) as llm:
        one = llm.chat(CHAT, greedy(max_tokens=5), use_tqdm=False)
        two = llm.chat([CHAT, STARTED], greedy(max_tokens=5), use_tqdm=False)
        assert [output.prompt for output in two] == [
            TOKENIZER.apply_chat_template(chat) for chat in (CHAT, STARTED)
        ]
        assert texts(one) == texts(two[:1])
        for output in two:
            assert output.prompt_token_ids == TOKENIZER.encode(output.prompt)
            assert output.outputs[0].token_ids == oracle(runner, output.prompt_token_ids, 5)


@pytest.mark.parametrize("template", [None, STRIPPING])
def test_the_last_message_is_continued_as_by_transformers(template, tmp_path):
    save_tiny_checkpoint(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(
        STARTED, tokenize=False, continue_final_message=True, chat_template=template
    )
    with make_llm(make_runner()) as llm:
        options = {"add_generation_prompt": False, "continue_final_message": True}
        (output,) = llm.chat(STARTED, use_tqdm=False, chat_template=template, **options)
        assert output.prompt == expected
        parts = [*CHAT, {"role": "assistant", "content": [{"type": "text", "text": "it is the "}]}]
        (output,) = llm.chat(parts, use_tqdm=False, chat_template=template, **options)
        assert output.prompt == expected


def test_a_conversation_makes_the_prompt_that_the_server_makes_of_it():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    tokenizer = tiny_tokenizer(**{"tokenizer.chat_template": template})
    with make_llm(make_runner(), tokenizer=tokenizer) as llm:
        (output,) = llm.chat(chat, use_tqdm=False)
        assert output.prompt == '<system>be brief<user>a\nb<assistant>{"a": 1}<tool>7'
        body = msgspec.json.Decoder(Messages).decode(msgspec.json.encode(chat))
        served = llm._background.call(llm._background.engine.encode_chat(body)).result(20)
        assert served == output.prompt_token_ids


def test_another_template_gets_the_tools_and_variables():
    with make_llm(make_runner()) as llm:
        (output,) = llm.chat(
            CHAT,
            use_tqdm=False,
            chat_template=STRIPPING,
            tools=[{"name": "search"}],
            chat_template_kwargs={"tone": "!"},
        )
        assert output.prompt == "[user] what is the answer\nsearch!"
        with pytest.raises(ModelLoadError, match="chat template: expected valid Jinja"):
            llm.chat(CHAT, chat_template="{% for")


@pytest.mark.parametrize(
    ("messages", "options", "match"),
    [
        ("hello", {}, "^messages: expected a list of messages.* got str"),
        ([CHAT, []], {}, r"^messages\[1\]: expected a list of messages, got none"),
        ([CHAT, ["hi"]], {}, r"^messages\[1\]\[0\]: expected a dict with role and content"),
        ([CHAT, [{"role": "user", "content": [{"type": "image_url"}]}]], {},
         r"^messages\[1\]\[0\].content\[0\]: expected .*text only"),
        (CHAT * 200, {}, "^messages: expected at most 128 messages"),
        ([CHAT, [{"role": "user", "content": "the fox " * 500}]], {},
         r"^messages\[1\]: expected at most 127 tokens"),
        (CHAT, {"continue_final_message": True}, "^continue_final_message: expected add_gener"),
        ([{"role": "user"}], {"continue_final_message": True, "add_generation_prompt": False},
         r"^messages\[0\].content: expected .*text"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": False,
                "chat_template": "nothing"}, "^messages: the chat template leaves the last one"),
    ],
)  # fmt: skip
def test_a_bad_conversation_is_named_before_anything_runs(messages, options, match):
    runner = make_runner()
    with make_llm(runner) as llm:
        with pytest.raises(InvalidRequestError, match=match):
            llm.chat(messages, use_tqdm=False, **options)
        assert runner.num_steps == 0
