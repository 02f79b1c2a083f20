"""Which files of a repository are fetched, from listings as repositories have them."""

from __future__ import annotations

import pytest

from streamkv.errors import ModelLoadError
from streamkv.weights.formats import QUANTIZED
from streamkv.weights.hub_files import choose_files, is_read, quant_of

BASE = ["README.md", "config.json", "tokenizer.json", "tokenizer_config.json"]
SHARDED = ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]
QUANTS = ["m-IQ4_XS.gguf", "m-Q2_K.gguf", "m-Q4_K_S.gguf", "m-Q6_K.gguf", "m-Q8_0.gguf"]


def chosen(names: list[str], **wanted: str) -> list[str]:
    return choose_files(names, **wanted).weights


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([*BASE, "model.safetensors", "pytorch_model.bin"], "model.safetensors"),
        ([*BASE, "model.safetensors", *SHARDED], "model.safetensors.index.json"),
        ([*BASE, "model.safetensors", "m-Q4_K_M.gguf"], "model.safetensors"),
        ([*BASE, "consolidated.safetensors", "m-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
        (QUANTS, "m-Q4_K_S.gguf"),
        ([*QUANTS, "m-Q4_K_M.gguf", "m-UD-Q4_K_XL.gguf"], "m-Q4_K_M.gguf"),
        (["m-IQ4_XS.gguf", "m-BF16.gguf", "m-UD-Q4_K_XL.gguf"], "m-BF16.gguf"),
        (["model.gguf"], "model.gguf"),
        (["model.gguf", "m-Q8_0.gguf"], "m-Q8_0.gguf"),
        (["mmproj-m-BF16.gguf", "m.imatrix.gguf", "m.F32.gguf"], "m.F32.gguf"),
        (["m-Q4_K_M-00001-of-00002.gguf", "m-Q4_K_M-00002-of-00002.gguf", *QUANTS], QUANTS[2]),
        (["m-Q4_K_M-00001-of-00001.gguf", *QUANTS], "m-Q4_K_M-00001-of-00001.gguf"),
        (["m-Q4_K_M.gguf", "draft/m-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
        (["qwen2.5-0.5b-instruct-q5_k_m.gguf", "qwen2.5-0.5b-instruct-fp16.gguf"],
         "qwen2.5-0.5b-instruct-q5_k_m.gguf"),
    ],
)  # fmt: skip
def test_the_best_that_is_read_is_chosen(names: list[str], expected: str) -> None:
    assert chosen(names) == [expected]
    assert chosen(names[::-1]) == [expected]


@pytest.mark.parametrize(
    ("quant", "expected"),
    [("Q8_0", "m-Q8_0.gguf"), ("Q4_K_XL", "m-UD-Q4_K_XL.gguf"), ("BF16", "BF16/m-BF16.gguf")],
)
def test_a_format_names_one_file(quant: str, expected: str) -> None:
    names = [*BASE, "model.safetensors", *QUANTS, "m-UD-Q4_K_XL.gguf", "BF16/m-BF16.gguf"]
    assert chosen(names, quant=quant) == [expected]


@pytest.mark.parametrize(
    ("names", "quant", "file", "named"),
    [
        (QUANTS, "Q5_K_M", "", r"no \.gguf file of Q5_K_M; it has m-IQ4_XS.gguf, m-Q2_K.gguf"),
        (["m-IQ4_XS.gguf", "m-Q3_K_L.gguf"], "", "", "format that is read here.*m-Q3_K_L.gguf"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "", "", "several files of Q8_0: a-Q8_0.gguf, b-Q8_0.gguf"),
        (["a.gguf", "b.gguf"], "", "", "several files of no format.*org/name/file.gguf"),
        (["m-Q8_0-00001-of-00002.gguf"], "", "", "several files, .*llama-gguf-split --merge"),
        (["m-Q8_0-00001-of-00002.gguf"], "Q8_0", "", "several files, .*llama-gguf-split"),
        (["m-00001-of-00002.gguf"], "", "m-00001-of-00002.gguf", "several files"),
        (QUANTS, "", "other.gguf", "no file other.gguf; it has"),
        ([*BASE, "pytorch_model.bin"], "", "", "PyTorch pickles"),
        ([*BASE, "adapter_config.json", "adapter_model.safetensors"], "", "", "an adapter"),
        ([*BASE, "consolidated.safetensors"], "", "", "got consolidated.safetensors; find"),
        (["README.md"], "", "", "got README.md; it is no language model"),
        ([], "", "", "got none"),
        ([f"part{i}.txt" for i in range(99)], "", "", "and 91 more"),
    ],
)
def test_what_is_not_read_is_refused_by_what_is_there(
    names: list[str], quant: str, file: str, named: str
) -> None:
    with pytest.raises(ModelLoadError, match=named) as caught:
        choose_files(names, quant=quant, file=file)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "Q4_1"),
        ("Llama-3.2-1B-Instruct-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("ggml-model-f16.gguf", "F16"),
        ("d/Qwen3-0.6B-BF16-00001-of-00002.gguf", "BF16"),
        ("Q6_K.gguf", "Q6_K"),
        ("Qwen2.gguf", ""),
        ("phi-2.gguf", ""),
    ],
)
def test_a_file_s_name_tells_its_format(name: str, quant: str) -> None:
    assert quant_of(name) == quant


def test_every_format_that_products_take_is_read() -> None:
    assert all(is_read(name) for name in QUANTIZED)
