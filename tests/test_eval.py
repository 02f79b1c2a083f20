"""Evaluations against numpy and transformers: what is predicted, from what, and the figures."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny import save_tiny_checkpoint, tiny_tokenizer
from weights.loading import change_tensors

from streamkv.cli import main
from streamkv.config import EngineConfig
from streamkv.errors import StreamkvError
from streamkv.eval.options import EvalConfig
from streamkv.eval.score import Predictions, Score, log_probs, same_beginning
from streamkv.eval.text import STEP_TOKENS, EvalText, Window, help_texts, read_text
from streamkv.eval.ways import reference_of, ways_of
from streamkv.ops.extension import load_extension

TEXT = "the quick brown fox jumps over the lazy dog and the server sends tokens to the client "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "tiny"
    return save_tiny_checkpoint(path, hidden_size=64)  # heads of 16


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "text.txt"
    path.write_text(TEXT * 20, encoding="utf-8")
    return path


def random_log_probs(seed: int, num_rows: int = 5, vocab_size: int = 50) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return log_probs(rng.normal(0, 4, (num_rows, vocab_size)).astype(np.float32))


# --- windows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [2, 9, 10, 11, 15, 16, 97])
@pytest.mark.parametrize("context", [2, 3, 10, 64])
def test_every_token_but_the_first_is_predicted_once_from_its_own_past(num_tokens, context):
    text = EvalText(list(range(100, 100 + num_tokens)), None, "")
    predicted = []
    windows = list(text.windows(context))
    for index, window in enumerate(windows):
        assert len(window.token_ids) <= context
        assert list(window.token_ids) == list(
            range(window.token_ids[0], window.token_ids[0] + len(window.token_ids))
        )
        assert window.first_scored >= (1 if index == 0 else context // 2)
        predicted += window.token_ids[window.first_scored :]
    assert predicted == text.token_ids[1:]
    assert len(windows) == text.num_windows(context)


@pytest.mark.parametrize("length", [2, 255, 256, 257, 258, 1024])
@pytest.mark.parametrize("first_scored", [1, 2, 128, 256, 257, 512])
def test_pieces_cover_a_window_and_want_what_predicts_it(length, first_scored):
    if first_scored >= length:
        return
    window = Window(range(length), first_scored)
    computed, wanted = [], []
    for piece in window.pieces():
        assert piece.start == len(computed) and 0 < len(piece.token_ids) <= STEP_TOKENS
        computed += piece.token_ids
        wanted += piece.token_ids[len(piece.token_ids) - piece.num_wanted :]
    assert computed == list(range(length - 1))
    assert wanted == list(range(first_scored - 1, length - 1))


def test_a_beginning_token_begins_every_window_and_prompt():
    text = EvalText([1, *range(10, 200)], 1, "")
    for window in list(text.windows(16))[1:]:
        assert window.token_ids[0] == 1 and window.token_ids[1] > 10
    prompts = text.prompts()
    assert len(prompts) == 16 and {len(prompt) for prompt in prompts} == {32}
    ends = [prompt[-1] for prompt in prompts]
    assert all(prompt[0] == 1 for prompt in prompts) and ends == sorted(set(ends))


def test_a_text_has_one_token_more_than_is_predicted(text_file):
    tokenizer = tiny_tokenizer()
    text = read_text(str(text_file), tokenizer, 40)
    assert text.token_ids == tokenizer.encode(text_file.read_text())[:41] and text.bos is None
    assert tokenizer.encode(help_texts()[:4000])[:41] == read_text("", tokenizer, 40).token_ids


@pytest.mark.parametrize(("content", "why"), [(b"", "at least 2 tokens"), (b"\xff\xfe", "UTF-8")])
def test_a_text_that_is_none_is_wrong_usage(content, why, tmp_path, checkpoint, capsys):
    path = tmp_path / "text"
    path.write_bytes(content)
    assert main(["eval", str(checkpoint), "--text", str(path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--text" in line and why in line


# --- figures -------------------------------------------------------------------------------------


def test_log_probabilities_are_torchs():
    logits = np.random.default_rng(0).normal(0, 30, (7, 1000)).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1).numpy()
    np.testing.assert_allclose(log_probs(logits.copy()), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_logit_that_is_no_number_is_an_error(bad):
    logits = np.zeros((3, 9), np.float32)
    logits[1, 4] = bad
    with pytest.raises(StreamkvError, match="finite"):
        log_probs(logits)


def test_predictions_come_back_as_distributions_within_half_a_step():
    kept = Predictions()
    values = [random_log_probs(seed, num_rows) for seed, num_rows in ((0, 3), (1, 1), (2, 8))]
    for one in values:
        kept.append(one)
    for index in (2, 0, 1):
        got = kept.chunk(index)
        half_step = np.ptp(values[index], axis=1).max() / 65535 / 2
        np.testing.assert_allclose(got, values[index], atol=2 * half_step + 1e-5)
        np.testing.assert_allclose(np.exp(got.astype(np.float64)).sum(axis=1), 1, rtol=1e-5)
    assert kept.num_bytes < sum(one.nbytes for one in values) * 0.6


def test_figures_are_those_of_the_formulas():
    reference, got, kept = Score(), Score(), Predictions()
    tokens = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]]
    p = [random_log_probs(seed) for seed in (0, 1)]
    # nearly the same, but for one row, whose likeliest token is another
    q = [log_probs(one + 0.01 * random_log_probs(9)) for one in p]
    q[1][2] = q[1][2][::-1].copy()
    for values, token_ids in zip(p, tokens, strict=True):
        reference.add(values, token_ids, None)
        kept.append(values)
    for values, token_ids in zip(q, tokens, strict=True):
        got.add(values, token_ids, kept)
    p64, q64 = (np.concatenate(one).astype(np.float64) for one in (p, q))
    at = np.arange(10), np.concatenate(tokens)
    figures = got.figures(reference)
    assert figures["perplexity"] == pytest.approx(math.exp(-q64[at].mean()))
    assert figures["ratio"] == pytest.approx(math.exp((p64 - q64)[at].mean()))
    kl = (np.exp(p64) * (p64 - q64)).sum(axis=1).mean()
    assert kl > 0.01 and figures["kl_nats"] == pytest.approx(kl, rel=1e-3)
    same = (p64.argmax(axis=1) == q64.argmax(axis=1)).mean()
    assert figures["same_top"] == same and 0 < same < 1
    assert reference.figures(None) == {
        "perplexity": pytest.approx(math.exp(-p64[at].mean())),
        **dict.fromkeys(("ratio", "kl_nats", "same_top", "same_greedy")),
    }


def test_a_perplexity_beyond_all_floats_is_infinite_and_its_ratio_is_not():
    values = log_probs(np.array([[0, -800], [0, -900]], np.float32))
    reference, got = Score(), Score()
    reference.add(values, [1, 1], None)
    got.add(values, [1, 0], None)
    assert reference.perplexity == math.inf
    assert reference.figures(reference)["ratio"] == 1
    assert got.figures(reference)["ratio"] == pytest.approx(math.exp(-450), rel=1e-6)
    assert reference.figures(got)["ratio"] == pytest.approx(math.exp(450), rel=1e-6)


def test_greedy_tokens_count_until_the_first_difference():
    expected = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]], np.int32)
    got = np.array([[1, 2, 3, 4], [5, 0, 7, 8], [0, 9, 9, 9]], np.int32)
    assert same_beginning(expected, got) == 5 / 12
    assert same_beginning(expected, expected) == 1


# --- ways ----------------------------------------------------------------------------------------


def test_ways_are_all_combinations_of_what_was_asked_and_others_as_they_are():
    config = EngineConfig(model="a", kv_cache_dtype="int8")
    options = EvalConfig(quantization=("int8", "none"), also=("b",))
    found = [(way.model, way.quantization, way.kv_cache_dtype) for way in ways_of(config, options)]
    assert found == [
        ("a", "int8", "int8"),
        ("a", "none", "int8"),
        ("b", "auto", "int8"),
    ]
    every = ways_of(EngineConfig(model="a"), EvalConfig(compare=True))
    assert len(every) == 8 and len({(way.quantization, way.kv_cache_dtype) for way in every}) == 8


def test_the_reference_is_float32_throughout_whatever_was_asked():
    config = EngineConfig(model="a", quantization="int4", kv_cache_dtype="int8", dtype="bfloat16")
    plain = EngineConfig(model="a", dtype="float32")
    assert reference_of(config, EvalConfig()) == plain
    assert reference_of(config, EvalConfig(against="b")).model == "b"
    assert reference_of(config, EvalConfig(against="none")) is None


# --- a whole evaluation --------------------------------------------------------------------------


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: Any) -> dict[str, Any]:
    assert main(["eval", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def transformers_nats(checkpoint: Path, windows: list[Window]) -> list[float]:
    """Of each predicted token, by transformers in float32."""
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found: list[float] = []
    for window in windows:
        token_ids = torch.tensor([list(window.token_ids)])
        with torch.inference_mode():
            values = torch.log_softmax(model(token_ids).logits[0].double(), dim=-1)
        targets = token_ids[0, window.first_scored :]
        rows = values[window.first_scored - 1 : -1]
        found += (-rows.gather(1, targets[:, None])[:, 0]).tolist()
    return found


def test_perplexity_is_transformers(checkpoint, text_file, capsys):
    asked = ["--text", text_file, "--max-tokens", 300, "--context", 64, "--dtype", "float32"]
    got = evaluated(capsys, checkpoint, *asked)
    text = read_text(str(text_file), tiny_tokenizer(), 300)
    nats = transformers_nats(checkpoint, list(text.windows(64)))
    (row,) = got["rows"]  # asked for what the reference is: computed once
    assert len(nats) == row["tokens"] == 300
    assert row["perplexity"] == pytest.approx(math.exp(np.mean(nats)), rel=1e-4)
    assert row["ratio"] == 1 and row["same_greedy"] == 1
    assert (row["weights"], row["inputs"], row["kv"]) == ("float32",) * 3


def test_every_way_is_beside_the_reference(checkpoint, text_file, capsys):
    asked = ["--text", text_file, "--max-tokens", 200, "--context", 64, "--greedy-tokens", 8]
    got = evaluated(capsys, checkpoint, *asked, "--dtype", "bfloat16", "--transformers")
    reference, rounded, oracle = got["rows"]
    assert reference["weights"] == "float32" and rounded["weights"] == "bfloat16"
    assert oracle["by"] == "transformers" and oracle["weights"] == "bfloat16"
    for row in (rounded, oracle):
        assert row["ratio"] == pytest.approx(row["perplexity"] / reference["perplexity"], rel=1e-4)
        assert 0 < row["kl_nats"] < 0.1 and row["same_top"] > 0.9
    # on the same weights only inputs, keys and values are rounded
    assert oracle["perplexity"] == pytest.approx(rounded["perplexity"], rel=0.02)
    assert rounded["weight_bytes"] * 2 == reference["weight_bytes"]


def test_transformers_on_the_weights_of_float32_is_the_reference(checkpoint, text_file, capsys):
    asked = ["--text", text_file, "--max-tokens", 150, "--context", 100, "--greedy-tokens", 8]
    got = evaluated(capsys, checkpoint, *asked, "--dtype", "float32", "--transformers")
    reference, oracle = got["rows"]
    assert oracle["by"] == "transformers" and oracle["ratio"] == pytest.approx(1, abs=1e-4)
    assert oracle["kl_nats"] < 1e-6 and oracle["same_top"] > 0.99
    assert oracle["same_greedy"] > 0.9


def test_without_a_reference_there_is_only_perplexity(checkpoint, text_file, capsys):
    asked = ["--text", text_file, "--max-tokens", 20, "--greedy-tokens", 0, "--against", "none"]
    got = evaluated(capsys, checkpoint, *asked)
    (row,) = got["rows"]
    assert row["perplexity"] > 1 and got["has_reference"] is False
    assert [row[name] for name in ("ratio", "kl_nats", "same_top", "same_greedy")] == [None] * 4


def test_the_default_context_fits_the_model_and_the_table_is_for_people(
    checkpoint, text_file, capsys
):
    assert main(["eval", str(checkpoint), "--text", str(text_file), "--max-tokens", "20"]) == 0
    said = capsys.readouterr()
    assert "20 tokens" in said.out and "windows of 256" in said.out
    assert said.out.count("tiny ") == 2 and "{" not in said.out and said.err == ""


def test_a_context_beyond_the_models_is_wrong_usage(checkpoint, capsys):
    assert main(["eval", str(checkpoint), "--context", "257"]) == 2
    assert "at most the 256 positions" in capsys.readouterr().err


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("eval") / "short"
    return save_tiny_checkpoint(path, hidden_size=64, max_position_embeddings=20)


def test_what_is_not_asked_for_fits_a_short_model(short_model, checkpoint, text_file, capsys):
    got = evaluated(capsys, short_model, "--text", text_file, "--max-tokens", 60)
    assert got["context"] == 20
    assert [row["same_greedy"] is None for row in got["rows"]] == [False] * 2
    wish = ["--text", text_file, "--max-tokens", 20]
    got = evaluated(capsys, short_model, *wish, "--greedy-tokens", 19)  # prompts of one token
    assert got["rows"][0]["same_greedy"] == 1
    got = evaluated(capsys, checkpoint, *wish, "--also", short_model)  # as the shortest allows
    assert got["context"] == 20 and len(got["rows"]) == 3


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (["--context", "21"], "--context: expected at most the 20 positions"),
        (["--greedy-tokens", "20"], "--greedy-tokens: expected fewer than the 20 positions"),
    ],
)
def test_lengths_beyond_a_models_name_their_flags(
    wish, said, short_model, checkpoint, text_file, capsys
):
    for models in ([short_model], [checkpoint, "--also", short_model]):
        assert main(["eval", *map(str, models), "--text", str(text_file), *wish]) == 2
        err = capsys.readouterr().err
        assert said in err and str(short_model) in err


def refuse_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("streamkv.eval.run.NativeModel", load)


@pytest.mark.parametrize("flag", ["--also", "--against"])
def test_another_vocabulary_is_refused_before_any_work(
    flag, checkpoint, text_file, tmp_path, capsys, monkeypatch
):
    padded = save_tiny_checkpoint(tmp_path / "padded", vocab_size=352)
    refuse_loading(monkeypatch)
    capsys.readouterr()
    assert main(["eval", str(checkpoint), "--text", str(text_file), flag, str(padded)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(padded) in line and "vocab_size is 339, got a vocab_size of 352" in line


def test_a_token_that_the_model_lacks_is_named_before_any_work(
    text_file, tmp_path, capsys, monkeypatch
):
    small = save_tiny_checkpoint(tmp_path / "small", vocab_size=300)
    refuse_loading(monkeypatch)
    capsys.readouterr()
    assert main(["eval", str(small), "--text", str(text_file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    text = read_text(str(text_file), tiny_tokenizer(), 4096)
    greatest = max(text.token_ids)
    assert f"got token {greatest} ({tiny_tokenizer().decode([greatest])!r})" in line
    assert str(small) in line and "vocab_size, 300" in line


def test_a_logit_that_is_no_number_names_the_model_and_a_remedy(text_file, tmp_path, capsys):
    broken = save_tiny_checkpoint(tmp_path / "broken", hidden_size=64, tie_word_embeddings=False)
    token_id = read_text(str(text_file), tiny_tokenizer(), 9).token_ids[5]
    assert token_id != 0  # which loading tries

    def spoil(tensors):
        tensors["model.embed_tokens.weight"][token_id] = float("nan")

    change_tensors(broken, spoil)
    capsys.readouterr()
    wish = ["--text", str(text_file), "--max-tokens", "20", "--against", "none"]
    for greedy in ("0", "4"):
        assert main(["eval", str(broken), *wish, "--greedy-tokens", greedy]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert str(broken) in line and "NaN" in line and "--dtype float32" in line


def test_a_text_is_read_once_for_all_models(checkpoint, text_file, tmp_path, capsys):
    other = save_tiny_checkpoint(tmp_path / "other", hidden_size=64)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(text_file.read_bytes()))
    writer.start()
    asked = ["--text", pipe, "--max-tokens", 20, "--also", other, "--against", "none"]
    assert len(evaluated(capsys, checkpoint, *asked)["rows"]) == 2
    writer.join()


def test_a_text_in_nobodys_home_is_wrong_usage(checkpoint, capsys):
    assert main(["eval", str(checkpoint), "--text", "~no-such-user/text"]) == 2
    assert "--text ~no-such-user/text: expected a UTF-8 file" in capsys.readouterr().err


def test_checkpoints_of_other_tokens_are_refused(checkpoint, default_checkpoint, capsys):
    wish = ["--also", str(default_checkpoint.path), "--max-tokens", "8"]
    assert main(["eval", str(checkpoint), *wish]) == 2
    assert "the same tokens" in capsys.readouterr().err


def test_a_list_names_its_flag_where_a_word_is_wrong(checkpoint, capsys):
    assert main(["eval", str(checkpoint), "--quantization", "int3"]) == 2
    assert "--quantization: expected one of" in capsys.readouterr().err
    assert main(["eval", str(checkpoint), "--kv-cache-dtype", "int4"]) == 2
    assert "--kv-cache-dtype: expected one of" in capsys.readouterr().err


# --- quantized -----------------------------------------------------------------------------------


def formats(rows: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    return [(row["weights"], row["inputs"], row["kv"]) for row in rows]


def test_fewer_bits_are_further_from_the_reference(checkpoint, text_file, capsys):
    asked = ["--text", text_file, "--max-tokens", 200, "--context", 64, "--greedy-tokens", 4]
    got = evaluated(capsys, checkpoint, *asked, "--compare")
    floats = load_extension().PackedWeight("bfloat16", 1, 2).input_dtype
    assert formats(got["rows"]) == [
        ("float32", "float32", "float32"),
        ("bfloat16", floats, "bfloat16"),
        ("bfloat16", floats, "int8"),
        ("int8", "int8", "bfloat16"),
        ("int8", "int8", "int8"),
        ("Q4_1 + int8", "int8", "bfloat16"),
        ("Q4_1 + int8", "int8", "int8"),
    ]
    kl = [row["kl_nats"] for row in got["rows"][1:]]
    assert kl[0] < kl[2] < kl[4] and kl[0] < kl[1] < kl[5] and kl[3] < kl[5]
    num_bytes = [row["weight_bytes"] for row in got["rows"]]
    assert num_bytes == sorted(num_bytes, reverse=True) and got["left_out"] == []


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_transformers_on_quantized_weights_misses_only_what_inputs_lose(
    quantization, checkpoint, text_file, capsys
):
    asked = ["--text", text_file, "--max-tokens", 200, "--context", 64, "--greedy-tokens", 0]
    wish = ["--quantization", quantization, "--kv-cache-dtype", "float32", "--transformers"]
    _, row, oracle = evaluated(capsys, checkpoint, *asked, *wish)["rows"]
    assert oracle["by"] == "transformers" and oracle["weights"] == row["weights"]
    assert (oracle["inputs"], oracle["kv"]) == ("float32", "float32")
    assert oracle["perplexity"] == pytest.approx(row["perplexity"], rel=0.05)
    if quantization == "int4":  # most is lost by the weights, which both share
        assert abs(math.log(row["ratio"] / oracle["ratio"])) < oracle["kl_nats"]


def test_what_the_checkpoint_does_not_allow_is_left_out_of_a_comparison(default_checkpoint, capsys):
    asked = ["--max-tokens", 24, "--context", 32, "--greedy-tokens", 0, "--against", "none"]
    wish = ["--quantization", "int8", "--quantization", "auto", "--kv-cache-dtype", "int8"]
    got = evaluated(capsys, default_checkpoint.path, *asked, *wish, "--compare")
    assert formats(got["rows"]) == [("Q4_1 + Q8_0", "int8", "int8")]
    (reason,) = got["left_out"]
    assert reason.startswith("--quantization int8: expected a checkpoint of floats")
    assert (
        main(["eval", str(default_checkpoint.path), "--quantization", "int8", *map(str, asked)])
        == 2
    )
    assert capsys.readouterr().err == f"streamkv: {reason}\n"
