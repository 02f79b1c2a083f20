"""Names of models on a hub, as people write and paste them."""

from __future__ import annotations

import pytest

from streamkv.errors import ConfigError, ModelLoadError
from streamkv.weights.hub_ids import HubId, NotAHubId, parse_hub_id


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubId("Qwen/Qwen2.5-0.5B-Instruct")),
        ("_org_/a_b.c-d", HubId("_org_/a_b.c-d")),
        ("org/name:q4_k_m", HubId("org/name", quant="Q4_K_M")),
        ("org/name:ud-q4_k_xl", HubId("org/name", quant="UD-Q4_K_XL")),
        ("org/name:fp16", HubId("org/name", quant="F16")),
        ("org/name:latest", HubId("org/name")),
        ("org/name/a.gguf", HubId("org/name", file="a.gguf")),
        ("org/name/Q8_0/a b.gguf", HubId("org/name", file="Q8_0/a b.gguf")),
        ("hf.co/org/name:Q8_0", HubId("org/name", quant="Q8_0")),
        ("hf://org/name", HubId("org/name")),
        ("https://huggingface.co/org/name", HubId("org/name")),
        ("HTTPS://HuggingFace.co/org/name/", HubId("org/name")),
        ("https://huggingface.co/org/name?library=vllm#usage", HubId("org/name")),
        ("https://huggingface.co/org/name/tree/main", HubId("org/name", "main")),
        (
            "https://huggingface.co/org/name/resolve/v1.0/a%20b.gguf?download=true",
            HubId("org/name", "v1.0", file="a b.gguf"),
        ),
        (
            "https://huggingface.co/org/name/blob/refs%2Fpr%2F1/d/a.gguf",
            HubId("org/name", "refs/pr/1", file="d/a.gguf"),
        ),
    ],
)
def test_what_people_write_is_understood(text: str, expected: HubId) -> None:
    assert parse_hub_id(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "gpt2", "/", "a/", "/a", "./a/b", "../a", "~/a", "/a/b", "a//b", "a/b/", "a\\b/c"),
        *("org/na me", "org/nämé", "org/name\n", "org/..", "org/a..b", "org/a--b", "org/.a"),
        *("org/a.git", "org/-a", "org/a-", "o" * 50 + "/" + "n" * 50, "org/name.gguf"),
        *(
            "org/name/model.safetensors",
            "org/name/../a.gguf",
            "org/name//a.gguf",
            "org/name/.gguf/",
        ),
        *("org/name:Q4_K M", "org/name/a.gguf:Q4_K_M", "C:/models/name", "org/name/a\\b.gguf"),
        *("https://example.com/org/name", "https://huggingface.co/", "https://huggingface.co/org"),
        "https://huggingface.co/org/name/blob/main/config.json",
        "https://huggingface.co/org/name/blob/main/%2E%2E/a.gguf",
        "https://huggingface.co/datasets/org/name",
    ],
)
def test_anything_else_is_no_id(text: str) -> None:
    with pytest.raises(NotAHubId):
        parse_hub_id(text)


@pytest.mark.parametrize("quant", ["IQ4_XS", "Q3_K_M", "Q2_K", "Q4_0_4_4", "UD-IQ1_M", "MXFP4_MOE"])
def test_formats_that_are_not_read_are_refused(quant: str) -> None:
    with pytest.raises(ModelLoadError, match=f"got {quant}; give one of these"):
        parse_hub_id(f"org/name:{quant}")


def test_a_revision_is_checked_and_no_other_than_the_page_s() -> None:
    assert parse_hub_id("org/name", "refs/pr/1").revision == "refs/pr/1"
    page = "https://huggingface.co/org/name/tree/v1"
    assert parse_hub_id(page, "v1").revision == "v1"
    with pytest.raises(ConfigError, match="expected the page's own, 'v1'"):
        parse_hub_id(page, "v2")
    for revision in ("../x", "a b", "a\n", "/a", "a//b", "é"):
        with pytest.raises(ConfigError, match="expected a branch, tag or commit"):
            parse_hub_id("org/name", revision)
