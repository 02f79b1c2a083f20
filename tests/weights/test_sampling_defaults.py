"""What a checkpoint recommends is what transformers and the gguf package read, or is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import GenerationConfig
from weights.gguf_files import finish

from streamkv.errors import ModelLoadError
from streamkv.weights.gguf import GGUFFile
from streamkv.weights.sampling_defaults import folder_sampling_defaults, gguf_sampling_defaults

QWEN = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}


def of_folder(folder: Path, config: Any) -> dict[str, Any]:
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return dict(folder_sampling_defaults(folder))


def test_a_folder_recommends_what_transformers_reads_in_it(tmp_path: Path) -> None:
    found = of_folder(tmp_path, QWEN | {"max_new_tokens": 2048, "min_p": None})
    theirs = GenerationConfig.from_pretrained(tmp_path).to_diff_dict()
    assert found.pop("max_tokens") == theirs["max_new_tokens"] == 2048
    assert found == {name: theirs[name] for name in found}
    assert found.keys() == {"repetition_penalty", "temperature", "top_p", "top_k"}


def test_greedy_decoding_is_no_recommendation(tmp_path: Path) -> None:
    """`do_sample` is about transformers' own `generate`; an API's temperature stays its own."""
    assert of_folder(tmp_path, {"do_sample": False}) == {}
    assert of_folder(tmp_path, {"do_sample": False, "temperature": 0.6}) == {"temperature": 0.6}


def test_a_folder_without_the_file_recommends_nothing(tmp_path: Path) -> None:
    assert folder_sampling_defaults(tmp_path) == {}


def test_a_gguf_file_recommends_the_numbers_that_were_written(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_sampling_temp(0.6)
    writer.add_sampling_top_k(20)
    writer.add_sampling_top_p(0.95)
    writer.add_sampling_min_p(0.0)
    writer.add_sampling_penalty_repeat(1.05)
    writer.add_sampling_mirostat(0)
    path = finish(writer, tmp_path / "a.gguf")
    assert gguf_sampling_defaults(GGUFFile(path).metadata, path) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.6"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", [0.9]),
        ("top_k", 20.5),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("max_new_tokens", 0),
        ("max_new_tokens", 10**30),
    ],
)
def test_a_value_that_no_request_could_have_is_refused_by_name(
    tmp_path: Path, key: str, value: Any
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        of_folder(tmp_path, {key: value})
    message = caught.value.message
    assert message.startswith(f"{tmp_path / 'generation_config.json'}: {key}: expected ")
    assert "--generation-config vllm" in message and message.isprintable()
