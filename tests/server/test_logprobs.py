"""Log-probabilities beside texts that hide some of their tokens, of prompts, and by the ids of
their tokens, in both shapes, streamed and not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import expected_scores, expected_tokens, fake_logprobs
from server.harness import (
    MAX_MODEL_LEN,
    MODEL,
    VOCAB_SIZE,
    ScriptedRunner,
    Server,
    fake_runner,
    read_events,
    serve,
)
from tiny import tiny_tokenizer

from streamkv.engine.stream import TokenLogprob, TopLogprob
from streamkv.protocol import RowLogprobs, unpack_ints
from streamkv.server.logprobs import LogprobWriter, content_logprobs, prompt_logprobs
from streamkv.server.wire import encode

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
    body: dict[str, Any] = {"max_tokens": 300, "n": 12, "ignore_eos": True}
    body |= {"temperature": 1, "seed": 1}
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


# --- prompts ----------------------------------------------------------------------------------

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
EMOJI = "naïve 🙂👩\u200d🚀 日本 <|im_end|> end"


def post(server: Server, path: str, **body: Any) -> list[dict[str, Any]]:
    """The answer, or the chunks of one that streams."""
    with server.client() as client:
        answer = client.post(path, json={"max_tokens": 4, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return read_events(answer.text)[:-1] if body.get("stream") else [answer.json()]


def position(score: RowLogprobs, token_id: int, num_top: int) -> dict[str, dict[str, Any]]:
    """A token of a prompt as vLLM writes it."""
    found = {str(token_id): (score.logprob, score.rank)}
    top = zip(unpack_ints(score.top_ids), memoryview(score.top_logprobs).cast("f"), strict=True)
    for rank, (top_id, logprob) in enumerate(list(top)[:num_top], start=1):
        found.setdefault(str(top_id), (logprob, rank))
    return {
        key: {"logprob": value, "rank": rank, "decoded_token": TOKENIZER.token_text(int(key))}
        for key, (value, rank) in found.items()
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_top", [0, 2])
def test_prompt_logprobs_have_vllms_shape(server: Server, num_top: int, stream: bool) -> None:
    ids = TOKENIZER.encode(EMOJI * 4)
    assert len(ids) > 128, "several steps' scores"
    expected: list[Any] = [None] + [
        position(score, token_id, num_top)
        for score, token_id in zip(expected_scores(ids, num_top, VOCAB_SIZE), ids[1:], strict=True)
    ]
    for _ in range(2):  # what is cached has no scores: it is computed again
        chunks = post(server, TEXT, prompt=[ids, ids[:1]], prompt_logprobs=num_top, stream=stream)
        got: list[list[Any]] = [[], []]
        texts = ["", ""]
        for chunk in chunks:
            for choice in chunk["choices"]:
                got[choice["index"]] += choice.get("prompt_logprobs") or []
                texts[choice["index"]] += choice["text"]
        assert got == [expected, [None]]
        assert texts == [server.text(server.answer(prompt, 4)) for prompt in (ids, ids[:1])]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chats_prompt_is_scored_too(server: Server, stream: bool) -> None:
    message = {"role": "user", "content": "naïve 🙂 日本"}
    ids = server.chat_prompt(message)
    chunks = post(server, CHAT, messages=[message], prompt_logprobs=1, n=2, stream=stream)
    got = [entry for chunk in chunks for entry in chunk.get("prompt_logprobs") or []]
    assert got == [None] + [
        position(score, token_id, 1)
        for score, token_id in zip(expected_scores(ids, 1, VOCAB_SIZE), ids[1:], strict=True)
    ]


def joined(chunks: list[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    """Of each choice its text, and its four lists."""
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    found = [{"text": "", **{name: [] for name in names}} for _ in range(num_choices)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            one = found[choice["index"]]
            one["text"] += choice["text"]
            for name in names:
                one[name] += (choice["logprobs"] or {name: []})[name]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_echoed_prompts_have_their_tokens_first(
    server: Server, as_ids: bool, n: int, stream: bool
) -> None:
    texts = [EMOJI * 3, "hi"]
    prompts = [TOKENIZER.encode(text) for text in texts]
    chunks = post(
        server, TEXT, prompt=prompts if as_ids else texts, echo=True, logprobs=1, n=n, stream=stream
    )
    for index, one in enumerate(joined(chunks, 2 * n)):
        prompt, text = prompts[index // n], texts[index // n]
        answer = server.answer(prompt, 4)
        assert one["text"] == text + server.text(answer)
        scores = expected_scores(prompt, 1, VOCAB_SIZE)
        generated = [fake_logprobs(token_id, 1, VOCAB_SIZE).logprob for token_id in answer]
        values = [score.logprob for score in scores] + generated
        assert one["token_logprobs"] == [None, *map(pytest.approx, values)]
        assert one["top_logprobs"][0] is None
        assert [set(map(type, one["top_logprobs"][1:]))] == [{dict}]
        data = [token_data(token) for token in one["tokens"]]
        assert data == [TOKENIZER.token_bytes(token_id) for token_id in [*prompt, *answer]]
        before = [b"".join(data[:i]).decode(errors="ignore") for i in range(len(prompt))]
        assert one["text_offset"][: len(prompt)] == list(map(len, before))
        assert one["text_offset"][len(prompt)] == len(text)
        assert one["text_offset"] == sorted(one["text_offset"])


def token_data(name: str) -> bytes:
    """The bytes of a token by its name."""
    if name.startswith("bytes:"):
        return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", ""))
    return name.encode()


@pytest.mark.parametrize("stream", [False, True])
def test_without_tokens_only_the_prompt_is_shown(server: Server, stream: bool) -> None:
    ids = TOKENIZER.encode(EMOJI)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    chunks = post(
        server,
        TEXT,
        prompt=EMOJI,
        echo=True,
        logprobs=0,
        max_tokens=0,
        return_token_ids=True,
        stream=stream,
        **options,
    )
    [one] = joined(chunks, 1)
    assert one["text"] == EMOJI
    assert len(one["tokens"]) == len(ids)
    scores = [score.logprob for score in expected_scores(ids, 0, VOCAB_SIZE)]
    assert one["token_logprobs"] == [None, *map(pytest.approx, scores)]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    assert all(choice.get("token_ids", []) == [] for choice in choices)
    assert chunks[-1]["usage"]["completion_tokens"] == 0
    assert chunks[-1]["usage"]["prompt_tokens"] == len(ids)


def test_how_many_of_the_most_likely_is_asked_for_by_each_field(server: Server) -> None:
    ids = TOKENIZER.encode("the fox")
    [answer] = post(server, TEXT, prompt=ids, echo=True, logprobs=1, prompt_logprobs=3)
    [choice] = answer["choices"]
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1 : len(ids)]} <= {1, 2}
    assert max(len(top) for top in choice["prompt_logprobs"][1:]) > 2


def test_scores_are_bounded_before_anything_runs(server: Server) -> None:
    with server.client() as client:
        body = {"prompt": [[5] * 400] * 400, "echo": True, "logprobs": 20, "max_tokens": 1}
        answer = client.post(TEXT, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
        assert "log-probabilities" in answer.json()["error"]["message"]
        text = {"prompt": ["x" * 100_000], "prompt_logprobs": 1}
        assert client.post(TEXT, json=text).json()["error"]["code"] == "context_length_exceeded"


def test_numbers_that_json_cant_say_are_written_as_the_lowest() -> None:
    inf, nan = float("inf"), float("nan")
    top = tuple(TopLogprob(i, f"b{i}", b"b", value) for i, value in enumerate((-inf, nan, -0.5)))
    items = [TokenLogprob(7, "a", b"a", nan, 1, top), TokenLogprob(8, "c", b"c", -inf, 2, ())]
    writer = LogprobWriter(20, as_ids=False)
    for written in (
        prompt_logprobs(items, 20),
        content_logprobs(items, as_ids=False),
        writer.write(items),
    ):
        text = encode(written).decode()
        assert text.count("-9999.0") == (6 if "token_logprobs" in text else 4), text
        assert not {"null", "NaN", "Infinity"} & set(re.findall(r"\w+", text))


# --- names of tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("streaming", [False, True])
def test_tokens_may_be_called_by_their_ids(server: Server, streaming: bool) -> None:
    ids = TOKENIZER.encode("the fox")
    answer = server.answer(ids, 4)
    fields = {"return_tokens_as_token_ids": True, "stream": streaming}
    chunks = post(server, TEXT, prompt=ids, echo=True, logprobs=1, prompt_logprobs=1, **fields)
    [one] = joined(chunks, 1)
    assert one["tokens"] == [f"token_id:{token_id}" for token_id in [*ids, *answer]]
    assert set(one["top_logprobs"][-1]) == {
        f"token_id:{answer[-1]}",
        *(f"token_id:{i}" for i in unpack_ints(fake_logprobs(answer[-1], 1, VOCAB_SIZE).top_ids)),
    }
    message = {"role": "user", "content": "hi"}
    asked = {"messages": [message], "logprobs": True, "top_logprobs": 2, **fields}
    entries = [
        entry
        for chunk in post(server, CHAT, **asked)
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    said = server.answer(server.chat_prompt(message), 4)
    assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in said]
    assert entries[0]["top_logprobs"][1]["token"] == f"token_id:{(said[0] + 1) % VOCAB_SIZE}"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("face", [TEXT, CHAT])
def test_characters_in_several_tokens_have_exact_bytes(face: str, streaming: bool) -> None:
    said = "naïve 🙂👩\u200d🚀 日本語 e\u0301"
    script = TOKENIZER.encode(said)
    prompt = (
        {"prompt": "hi", "logprobs": 20}
        if face == TEXT
        else {
            "messages": [{"role": "user", "content": "hi"}],
            "logprobs": True,
            "top_logprobs": 20,
        }
    )
    with serve(ScriptedRunner([*script, 2])) as running:
        chunks = post(running, face, **prompt, max_tokens=MAX_MODEL_LEN - 60, stream=streaming)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if face == TEXT:
        [one] = joined(chunks, 1)
        assert one["text"] == said
        assert b"".join(map(token_data, one["tokens"][:-1])) == said.encode()
        for i, offset in enumerate(one["text_offset"][:-1]):
            before = b"".join(map(TOKENIZER.token_bytes, script[:i]))
            assert offset == len(before.decode(errors="ignore"))
    else:
        entries = [e for c in choices for e in (c["logprobs"] or {"content": []})["content"]]
        assert [bytes(entry["bytes"]) for entry in entries] == [
            *(TOKENIZER.token_bytes(token_id) for token_id in script),
            b"",
        ]
        assert all(len(entry["top_logprobs"]) == 20 for entry in entries)
