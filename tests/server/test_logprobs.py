"""Log-probabilities beside texts that hide some of their tokens, on both faces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fakes import expected_tokens
from server.harness import MODEL, VOCAB_SIZE, Server, fake_runner, serve
from tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SPECIAL_IDS = TOKENIZER.special_token_ids
# Nothing but special tokens, of which 2 is the end, and whole characters.
SAID_IDS = [
    i
    for i in range(VOCAB_SIZE)
    if i in SPECIAL_IDS
    or (i % 20 == 0 and all(32 <= byte < 127 for byte in TOKENIZER.token_bytes(i)))
]


@pytest.fixture(scope="module")
def hiding() -> Iterator[Server]:
    with serve(fake_runner(avoid=[i for i in range(VOCAB_SIZE) if i not in SAID_IDS])) as server:
        yield server


def answers(create: Any, streaming: bool, **arguments: Any) -> list[Any]:
    asked = {"model": MODEL, "max_tokens": 40, "temperature": 0} | arguments
    return list(create(**asked, stream=True)) if streaming else [create(**asked)]


@pytest.mark.parametrize("streaming", [False, True])
def test_the_bytes_of_a_chats_tokens_are_its_text(hiding: Server, streaming: bool) -> None:
    ends = set()
    for i in range(20):
        create = hiding.openai().chat.completions.create
        message = {"role": "user", "content": f"question {i}"}
        got = answers(
            create,
            streaming,
            messages=[message],
            logprobs=True,
            top_logprobs=1,
            stream_options={"include_usage": True} if streaming else None,
        )
        choices = [choice for answer in got for choice in answer.choices]
        text = "".join(
            (choice.delta if streaming else choice.message).content or "" for choice in choices
        )
        entries = [
            entry
            for choice in choices
            if choice.logprobs is not None
            for entry in choice.logprobs.content
        ]
        ids = hiding.answer(hiding.chat_prompt(message), 40, avoid=hiding.runner.avoid)
        assert text == hiding.text(ids)
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text
        assert [entry.token for entry in entries] == [TOKENIZER.token_text(i) for i in ids]
        assert [not entry.bytes for entry in entries] == [i in SPECIAL_IDS for i in ids]
        assert all(entry.top_logprobs[0].bytes == entry.bytes for entry in entries)
        assert got[-1].usage.completion_tokens == len(entries)
        ends.add(choices[-1].finish_reason)
    assert ends == {"stop", "length"}


@pytest.mark.parametrize("streaming", [False, True])
def test_text_offsets_say_where_each_token_begins(hiding: Server, streaming: bool) -> None:
    num_hidden = 0
    for i in range(20):
        prompt = f"question {i}"
        got = answers(hiding.openai().completions.create, streaming, prompt=prompt, logprobs=1)
        choices = [answer.choices[0] for answer in got]
        text = "".join(choice.text for choice in choices)
        tokens = [token for choice in choices for token in choice.logprobs.tokens]
        offsets = [offset for choice in choices for offset in choice.logprobs.text_offset]
        ids = hiding.answer(TOKENIZER.encode(prompt), 40, avoid=hiding.runner.avoid)
        assert tokens == [TOKENIZER.token_text(token_id) for token_id in ids]
        assert offsets == [len(hiding.text(ids[:k])) for k in range(len(ids))]
        for token_id, token, offset in zip(ids, tokens, offsets, strict=True):
            if token_id not in SPECIAL_IDS:
                assert text[offset:].startswith(token)
        num_hidden += sum(token_id in SPECIAL_IDS for token_id in ids)
    assert num_hidden > 20


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_large_answer_is_whole(path: str) -> None:
    """More than one piece of JSON and of body; and what it says is the oracle's."""
    body: dict[str, Any] = {"max_tokens": 300, "n": 12, "seed": 1, "ignore_eos": True}
    if path.endswith("chat/completions"):
        prompt = TOKENIZER.encode(
            TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}]),
            add_special_tokens=False,
        )
        body |= {"messages": [{"role": "user", "content": "hi"}]}
        body |= {"logprobs": True, "top_logprobs": 20}
    else:
        prompt = TOKENIZER.encode("hi")
        body |= {"prompt": "hi", "logprobs": 20}
    with serve() as server, server.client() as client:
        answer = client.post(path, json=body)
        assert int(answer.headers["content-length"]) == len(answer.content) > 1 << 20
        for choice in answer.json()["choices"]:
            logprobs = choice["logprobs"]
            tokens = logprobs.get("tokens") or [entry["token"] for entry in logprobs["content"]]
            expected = expected_tokens(
                prompt, 300, VOCAB_SIZE, temperature=1, seed=1, choice=choice["index"]
            )
            said = choice["text"] if "text" in choice else choice["message"]["content"]
            assert said == server.text(expected)
            assert len(tokens) == 300
            if "content" in logprobs:  # the other face writes half characters as bytes
                assert tokens == [TOKENIZER.token_text(token_id) for token_id in expected]
