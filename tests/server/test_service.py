"""Everything that isn't generation: models, tokens, health, metrics, the page."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.harness import MAX_MODEL_LEN, MODEL, VOCAB_SIZE, Server, fake_runner, serve
from starlette.applications import Starlette
from starlette.testclient import TestClient

from streamkv import __version__
from streamkv.errors import ModelLoadError
from streamkv.server.json_list import PIECE_LEN
from streamkv.server.page import HEADERS, find_folder, page_routes
from streamkv.server.tokenize import MAX_DETOKENIZE_TOKENS

TEXT = "/v1/completions"
CSP = "content-security-policy"


def scrape(server: Server) -> dict[tuple[str, str], float]:
    """(sample name, finished_reason or le or "") -> value, of the one model there is."""
    with server.client() as client:
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == MODEL
            samples[sample.name, "".join(labels.values())] = sample.value
    return samples


NAMES = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "prefix_cache_hits_by_tier_total",
    "preemptions_by_mode_total",
    "kv_cache_blocks_total",
    "kv_cache_blocks_held",
    "kv_cache_tokens_held",
    "kv_cache_block_size",
    "kv_cache_blocks_pinned",
    "kv_cache_sessions",
    "kv_host_slots_total",
    "kv_host_slots_used",
    "kv_blocks_evicted_total",
    "kv_blocks_copied_total",
    "kv_blocks_swapped_out_total",
    "kv_blocks_swapped_in_total",
    "kv_copies_failed_total",
    "kv_store_reads_total",
    "kv_store_writes_total",
    "kv_store_failures_total",
    "num_requests_loading",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_count",
    "time_to_first_token_seconds_sum",
    "e2e_request_latency_seconds_bucket",
    "e2e_request_latency_seconds_count",
    "e2e_request_latency_seconds_sum",
}


def test_while_loading_the_port_is_open_and_says_how_far_it_is() -> None:
    gate = threading.Event()
    with serve(fake_runner(load_gate=gate), ready=False) as server, server.client() as client:
        server.wait_until(lambda: "loading weights" in server.engine.status_detail)
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        assert health.json()["detail"] == server.engine.status_detail
        assert int(health.headers["retry-after"]) >= 1
        for path, body in (
            (TEXT, {"prompt": "hi"}),
            (TEXT, {"prompt": "hi", "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/tokenize", {"prompt": "hi"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            answer = client.post(path, json=body)
            assert answer.status_code == 503, path
            assert answer.json()["error"]["code"] == "engine_not_ready"
            assert int(answer.headers["retry-after"]) >= 1
        assert client.get("/v1/models").json()["data"][0]["id"] == MODEL
        assert scrape(server).keys() >= {("streamkv:num_requests_running", "")}
        gate.set()
        server.wait_ready()
        assert client.get("/health").json()["status"] == "ok"
        assert client.post("/ping").status_code == 200
        assert client.post(TEXT, json={"prompt": "hi"}).status_code == 200


def test_a_model_that_fails_to_load_is_told_by_health_and_by_requests() -> None:
    broken = fake_runner(load_error=ModelLoadError("weights: expected 2 files, got 1"))
    with serve(broken, ready=False) as server, server.client() as client:
        server.wait_until(lambda: server.engine.status == "failed")
        health = client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "failed", "detail": "weights: expected 2 files, got 1"}
        answer = client.post(TEXT, json={"prompt": "hi"})
        assert answer.status_code == 503
        assert "expected 2 files" in answer.json()["error"]["message"]


def test_models_are_listed_and_found_by_ids_with_slashes(server: Server) -> None:
    models = server.openai().models
    [model] = models.list().data
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "streamkv")
    assert model.max_model_len == MAX_MODEL_LEN
    with server.client() as client:
        assert client.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
        assert client.get(f"/v1/models/{MODEL.replace('/', '%2F')}").json()["id"] == MODEL
        missing = client.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_a_served_model_name_replaces_the_path() -> None:
    with serve(engine={"served_model_name": "short"}) as server, server.client() as client:
        [model] = client.get("/v1/models").json()["data"]
        assert (model["id"], model["root"]) == ("short", MODEL)
        body = {"prompt": "hi", "max_tokens": 1}
        assert client.post(TEXT, json=body | {"model": "short"}).json()["model"] == "short"
        assert client.post(TEXT, json=body | {"model": MODEL}).status_code == 404


def test_a_model_answers_to_each_of_its_names() -> None:
    engine = {"served_model_name": ("one", "two")}
    with serve(engine=engine) as server, server.client() as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "two"]
        body = {"prompt": "hi", "max_tokens": 1}
        for name in ("one", "two"):
            assert client.post(TEXT, json=body | {"model": name}).json()["model"] == name
            assert client.get(f"/v1/models/{name}").json()["root"] == MODEL
        assert client.post(TEXT, json=body).json()["model"] == "one"


def test_tokenize_and_detokenize_are_inverses(server: Server) -> None:
    with server.client() as client:
        prompt = "naïve 🙂 日本<|im_end|>"
        body = {"model": MODEL, "prompt": prompt, "return_token_strs": True}
        answer = client.post("/tokenize", json=body).json()
        assert answer["tokens"] == server.tokenizer.encode(prompt)
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == MAX_MODEL_LEN
        assert answer["token_strs"][-1] == "<|im_end|>"
        assert len(answer["token_strs"]) == answer["count"]
        back = client.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": prompt}


def test_tokenize_takes_texts_of_any_length_in_any_number_of_pieces(server: Server) -> None:
    prompt = "the fox and 日本 <|im_end|> " * 3000
    with server.client() as client:
        body = {"prompt": prompt, "return_token_strs": True}
        answer = client.post("/tokenize", json=body).json()
        expected = server.tokenizer.encode(prompt)
        assert answer["tokens"] == expected and len(expected) > 3 * PIECE_LEN
        assert answer["count"] == len(expected)
        assert answer["token_strs"] == [server.tokenizer.token_text(i) for i in expected]
        back = client.post("/detokenize", json={"tokens": expected})
        assert back.json() == {"prompt": prompt}
        nothing = client.post("/tokenize", json={"prompt": "", "return_token_strs": True})
        assert nothing.json() == {
            "count": 0,
            "max_model_len": MAX_MODEL_LEN,
            "tokens": [],
            "token_strs": [],
        }


def test_tokenize_knows_messages(server: Server) -> None:
    message = {"role": "user", "content": "hi"}
    with server.client() as client:
        answer = client.post("/tokenize", json={"messages": [message]})
        assert answer.json()["tokens"] == server.chat_prompt(message)
        body = {"messages": [message], "add_generation_prompt": False}
        shorter = client.post("/tokenize", json=body).json()["tokens"]
    text = server.tokenizer.apply_chat_template([message], add_generation_prompt=False)
    assert shorter == server.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        (
            "/tokenize",
            {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
            400,
            "prompt",
        ),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, VOCAB_SIZE]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1] * (MAX_DETOKENIZE_TOKENS + 1)}, 400, "tokens"),
        ("/detokenize", {"tokens": [*([1] * 9000), VOCAB_SIZE]}, 400, "tokens[9000]"),
        ("/detokenize", {"tokens": [1], "model": "x"}, 404, "model"),
    ],
)
def test_bad_token_requests_name_the_field(
    server: Server, path: str, body: object, status: int, param: str
) -> None:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_metrics_count_what_happened() -> None:
    with serve() as server:
        before = scrape(server)
        assert {name.removeprefix("streamkv:") for name, _ in before} >= NAMES
        plan = {"streamkv:kv_cache_blocks_total": 1024, "streamkv:kv_cache_block_size": 16}
        counted = {name: value for (name, _), value in before.items() if "_created" not in name}
        assert {name: value for name, value in counted.items() if value} == plan
        prompt, expected = [5, 6, 7], server.answer([5, 6, 7], 9)
        with server.client() as client:
            for stream in (False, True):
                body = {"prompt": prompt, "max_tokens": 9, "temperature": 0, "stream": stream}
                assert client.post(TEXT, json=body).status_code == 200
        server.wait_idle()
        after = scrape(server)
        assert after["streamkv:prompt_tokens_total", ""] == 6
        assert after["streamkv:generation_tokens_total", ""] == 2 * len(expected)
        assert after["streamkv:time_to_first_token_seconds_count", ""] == 2
        assert after["streamkv:e2e_request_latency_seconds_count", ""] == 2
        reason = "length" if len(expected) == 9 else "stop"
        assert after["streamkv:request_success_total", reason] == 2
        assert after["streamkv:num_requests_running", ""] == 0
        assert after["streamkv:kv_cache_usage_perc", ""] == 0


def test_the_time_to_the_first_token_counts_before_the_answer_has_ended() -> None:
    gate = threading.Semaphore(3)
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "ignore_eos": True, "stream": True}
    count = ("streamkv:time_to_first_token_seconds_count", "")
    with serve(fake_runner(gate=gate)) as server, server.client() as client:
        with client.stream("POST", TEXT, json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running = scrape(server)
            gate.release(100)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        server.wait_idle()
        after = scrape(server)
    assert running["streamkv:num_requests_running", ""] == 1
    held = [running[f"streamkv:kv_cache_{what}_held", ""] for what in ("blocks", "tokens")]
    assert held[0] == 1 and 3 <= held[1] <= 8  # steps in flight included
    assert (running[count], after[count]) == (1, 1)


def test_the_version_is_the_packages(server: Server) -> None:
    with server.client() as client:
        assert client.get("/version").json() == {"version": __version__}


def test_the_page_is_served_with_a_strict_policy_and_revalidated(tmp_path: Path) -> None:
    (tmp_path / "vendor").mkdir()
    (tmp_path / "index.html").write_text("<!doctype html>hello")
    (tmp_path / "vendor" / "lib.js").write_text("export {}")
    (tmp_path / ".secret").write_text("no")
    client = TestClient(Starlette(routes=page_routes(tmp_path)))
    page = client.get("/")
    assert page.text == "<!doctype html>hello"
    assert page.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache"
    again = client.get("/", headers={"if-none-match": page.headers["etag"]})
    assert again.status_code == 304
    assert client.get("/vendor/lib.js").headers["content-type"].startswith("text/javascript")
    for path in ("/.secret", "/vendor", "/vendor/", "/vendor/../.secret", "/nothing.js"):
        assert client.get(path).status_code == 404
    assert client.post("/").status_code == 405


def test_the_application_serves_the_checkouts_page(server: Server) -> None:
    folder = find_folder()
    assert folder is not None
    with server.client() as client:
        assert client.get("/").text == (folder / "index.html").read_text()
        assert client.get("/").headers["content-security-policy"] == HEADERS[CSP]
        for path in ("style.css", "app.js"):
            assert client.get(f"/{path}").status_code == 200


def test_an_application_without_a_page_has_no_page_routes() -> None:
    assert page_routes(None) == []
