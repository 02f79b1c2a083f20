"""Emoji, CJK and combining characters through every face, whatever tokens they are cut into.

A scripted model says each text in tokens that split its bytes in another way, chosen by `seed`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from fakes import fake_logprobs
from server.harness import ScriptedRunner, Server, fake_runner, serve
from tiny import tiny_gguf_metadata, tiny_tokenizer
from websockets.sync.client import connect

from streamkv.protocol import RunnerInfo, StepInput, StepOutput, pack_ints, unpack_ints
from streamkv.text.token_bytes import byte_level_alphabet

TEXTS = (
    "👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇯🇵",
    "日本語の文字、한국어 중에서, 繁體字 𠮷野家",
    "e\u0301 o\u0308\u0323 q\u0307\u0323 Z\u0351\u036b\u0343 \u0928\u093f \u0e19\u0e49\u0e33",
    "مرحبا \u202bשלום\u202c \u200d\u200c\ufeff\u00ad",
    'quote " back \\ slash / tab \t new\nline \r nul \0 del \x7f \u2028\u2029 <b>&amp;</b>',
    "a\U0010ffff\ufffd\ufffe\uffff\ud7ff\ue000 z",
)
END = 2  # the tiny vocabulary's end token
PLAIN = {"max_tokens": 400, "temperature": 0}
ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def partitions(data: bytes) -> Iterator[list[bytes]]:
    """Cuts after every 1, 2, 3, 4 bytes from each beginning, and some without a rule."""
    for size in range(1, 5):
        for start in range(size):
            edges = [0, *range(start or size, len(data), size), len(data)]
            yield [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    rng = random.Random(1)
    for _ in range(3):
        edges = sorted({0, len(data), *rng.choices(range(len(data)), k=len(data) // 3)})
        yield [data[a:b] for a, b in zip(edges, edges[1:], strict=False)]


class Vocabulary:
    """The tiny one, with a token for each piece, and the scripts in its ids."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.scripts: list[list[int]] = []
        metadata = tiny_gguf_metadata()
        tokens = list(metadata["tokenizer.ggml.tokens"])
        alphabet = {byte: char for char, byte in byte_level_alphabet().items()}
        ids = {token: i for i, token in enumerate(tokens)}
        for text in TEXTS:
            for pieces in partitions(text.encode()):
                names = ["".join(alphabet[byte] for byte in piece) for piece in pieces]
                for name in names:
                    if name not in ids:
                        ids[name] = len(tokens)
                        tokens.append(name)
                self.texts.append(text)
                self.scripts.append([*(ids[name] for name in names), END])
        self.size = len(tokens)
        kinds = [3] * 3 + [1] * (len(tokens) - 3)
        self.tokenizer = tiny_tokenizer(
            **{"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
        )


class Speaker(ScriptedRunner):
    """Says the script that the row's seed chooses, with log-probabilities on request."""

    def __init__(self, scripts: Sequence[Sequence[int]], vocab_size: int) -> None:
        super().__init__(scripts[0])
        self._scripts = scripts
        self._vocab_size = vocab_size
        self._rows: dict[int, tuple[Sequence[int], int, int]] = {}

    def load(self, progress: Any) -> RunnerInfo:
        return fake_runner(vocab_size=self._vocab_size).info

    def step(self, step: StepInput) -> StepOutput:
        for added in step.added:
            script = self._scripts[added.sampling.seed]
            self._rows[added.row] = script, added.num_prompt_tokens, added.sampling.num_logprobs
        sampled: list[int] = []
        logprobs = []
        for row, start, count, ask in zip(*[iter(unpack_ints(step.scheduled))] * 4, strict=True):
            if ask:
                script, num_prompt, num_logprobs = self._rows[row]
                token_id = script[min(start + count - num_prompt, len(script) - 1)]
                wants = num_logprobs >= 0
                sampled.append(token_id)
                logprobs.append(
                    fake_logprobs(token_id, num_logprobs, self._vocab_size) if wants else None
                )
        return StepOutput(
            step_id=step.step_id,
            sampled=pack_ints(sampled),
            logprobs=tuple(logprobs) if any(logprobs) else (),
            copies_done=pack_ints(unpack_ints(step.copies)[::4]),
        )


@pytest.fixture(scope="module")
def spoken() -> Iterator[tuple[Server, Vocabulary]]:
    vocabulary = Vocabulary()
    runner = Speaker(vocabulary.scripts, vocabulary.size)
    with serve(runner, engine={"tokenizer": vocabulary.tokenizer}) as server:
        yield server, vocabulary


def read_sse(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream: its bytes are cut at their ends only, as no text is in between."""
    answer = client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for event in answer.content.split(b"\n\n")[:-1]:
        data = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        events += [json.loads(one) for one in data if one != b"[DONE]"]
    return events


def chat_of(delta: dict[str, Any]) -> str:
    return delta.get("content") or ""


CHAT = {"messages": [{"role": "user", "content": "hi"}], **PLAIN}
TEXT = {"prompt": "hi", **PLAIN}
RESPONSE = {"input": "hi", "max_output_tokens": 400, "temperature": 0, "store": False}


def test_every_cut_through_http_is_the_text(spoken: tuple[Server, Vocabulary]) -> None:
    server, vocabulary = spoken
    with server.client() as client:
        for seed, text in enumerate(vocabulary.texts):
            chat, completion, response = ({**body, "seed": seed} for body in (CHAT, TEXT, RESPONSE))
            whole = client.post("/v1/chat/completions", json=chat).json()["choices"][0]
            assert whole["message"]["content"] == text and whole["finish_reason"] == "stop"
            chunks = read_sse(client, "/v1/chat/completions", chat)
            assert "".join(chat_of(chunk["choices"][0]["delta"]) for chunk in chunks) == text
            whole = client.post("/v1/completions", json=completion).json()["choices"][0]
            assert whole["text"] == text
            chunks = read_sse(client, "/v1/completions", completion)
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
            answer = client.post("/v1/responses", json=response).json()
            assert answer["output"][0]["content"][0]["text"] == text
            check_response(read_sse(client, "/v1/responses", response), text)


def check_response(events: list[dict[str, Any]], text: str) -> None:
    deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
    assert "".join(deltas) == text
    (done,) = (one["text"] for one in events if one["type"] == "response.output_text.done")
    assert done == text == events[-1]["response"]["output"][0]["content"][0]["text"]


def test_every_cut_through_a_websocket_is_the_text(spoken: tuple[Server, Vocabulary]) -> None:
    server, vocabulary = spoken
    with connect(f"ws://{server.host}/v1/responses") as socket:
        for seed, text in enumerate(vocabulary.texts):
            create = {"type": "response.create", "seed": seed, **RESPONSE}
            socket.send(json.dumps(create))
            events: list[dict[str, Any]] = []
            while not events or events[-1]["type"] not in ENDS:
                events.append(json.loads(socket.recv(timeout=30)))
            check_response(events, text)


@pytest.mark.parametrize("streaming", [False, True])
def test_the_bytes_of_log_probabilities_joined_are_the_text(
    spoken: tuple[Server, Vocabulary], streaming: bool
) -> None:
    server, vocabulary = spoken
    with server.client() as client:
        for seed, text in enumerate(vocabulary.texts):
            body = {**CHAT, "seed": seed, "logprobs": True, "top_logprobs": 1}
            path = "/v1/chat/completions"
            answers = (
                read_sse(client, path, body) if streaming else [client.post(path, json=body).json()]
            )
            entries = [
                entry
                for answer in answers
                for choice in answer["choices"]
                for entry in (choice["logprobs"] or {}).get("content") or ()
            ]
            assert len(entries) in (
                len(vocabulary.scripts[seed]),
                len(vocabulary.scripts[seed]) - 1,
            )
            assert b"".join(bytes(entry["bytes"] or ()) for entry in entries) == text.encode()


@pytest.mark.parametrize("streaming", [False, True])
def test_offsets_of_log_probabilities_point_at_the_character_of_the_first_byte(
    spoken: tuple[Server, Vocabulary], streaming: bool
) -> None:
    server, vocabulary = spoken
    with server.client() as client:
        for seed, text in enumerate(vocabulary.texts):
            body = {**TEXT, "seed": seed, "logprobs": 1}
            path = "/v1/completions"
            answers = (
                read_sse(client, path, body) if streaming else [client.post(path, json=body).json()]
            )
            offsets = [
                offset
                for answer in answers
                for choice in answer["choices"]
                for offset in (choice["logprobs"] or {}).get("text_offset") or ()
            ]
            owners = [i for i, char in enumerate(text) for _ in char.encode()]
            begins, position = [], 0
            for token_id in vocabulary.scripts[seed][:-1]:
                begins.append(owners[position])
                position += len(vocabulary.tokenizer.token_bytes(token_id))
            assert offsets[: len(begins)] == begins


@pytest.mark.parametrize("escaped", [False, True])
def test_what_a_client_sends_arrives_byte_for_byte(server: Server, escaped: bool) -> None:
    """Prompts in raw UTF-8 and in escapes, through every face that reads one."""
    with server.client() as client:

        def post(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = client.post(path, content=json.dumps(body, ensure_ascii=escaped).encode())
            assert answer.status_code == 200, answer.text
            return answer.json()

        for text in TEXTS:
            ids = server.tokenizer.encode(text)
            tokens = post("/tokenize", {"prompt": text})["tokens"]
            assert tokens == ids and post("/detokenize", {"tokens": ids})["prompt"] == text
            body = {"prompt": text, "max_tokens": 1, "return_token_ids": True}
            assert post("/v1/completions", body)["choices"][0]["prompt_token_ids"] == ids
            message = {"role": "user", "content": text}
            asked = {"messages": [message], "max_tokens": 1, "return_token_ids": True}
            chat_ids = server.chat_prompt(message)
            assert post("/v1/chat/completions", asked)["prompt_token_ids"] == chat_ids
            stop = {**body, "stop": [text], "echo": True}
            assert post("/v1/completions", stop)["choices"][0]["text"].startswith(text)
            response = post("/v1/responses", {"input": text, "max_output_tokens": 1})
            assert response["usage"]["input_tokens"] == len(chat_ids)
