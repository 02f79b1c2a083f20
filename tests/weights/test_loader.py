"""Loading both formats: equal tensors, and one line for every way a checkpoint can be wrong."""

from __future__ import annotations

import json
import os
import struct
import weakref
from pathlib import Path

import gguf
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_checkpoint
from transformers import LlamaForCausalLM
from weights.gguf_files import finish, save_gguf
from weights.loading import CPU, assert_equal, change_tensors, load, unpacked

from streamkv.errors import ModelLoadError
from streamkv.models import build_model, read_config
from streamkv.models.rope import LinearScaling, NoScaling, PairScaling
from streamkv.ops.extension import load_extension
from streamkv.weights import gguf_checkpoint, reading
from streamkv.weights.hub import Checkpoint
from streamkv.weights.loader import load_packed, open_checkpoint
from streamkv.weights.torch_loader import load_parameters


def refusal(path: Path) -> str:
    """The message of the one-line error that loading `path` gives."""
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_fused_weights_hold_their_parts_in_order(tmp_path):
    weights = load(save_tiny_checkpoint(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    attention = "model.layers.1.self_attn"
    parts = [tensors[f"{attention}.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(weights[f"{attention}.qkv_proj.weight"], torch.cat(parts))
    parts = [tensors[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(weights["model.layers.1.mlp.gate_up_proj.weight"], torch.cat(parts))


class Watched:
    """A source that knows whether what it gave out is still alive."""

    def __init__(self, source):
        self.source, self.config, self.shapes = source, source.config, source.shapes
        self.given: list[weakref.ref] = []

    def chunks(self, name):
        for values in self.source.chunks(name):
            chunk = values.copy()
            del values
            self.given.append(weakref.ref(chunk))
            yield chunk
            del chunk
            assert self.given[-1]() is None, name

    def check_unchanged(self):
        self.source.check_unchanged()


def test_a_few_rows_at_a_time_are_in_memory_besides_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "CHUNK_VALUES", 64 * 32)
    folder = save_tiny_checkpoint(tmp_path)
    source = Watched(open_checkpoint(Checkpoint(folder, "huggingface")))
    parameters = list(build_model(read_config(source.config)).parameters())
    load_parameters(
        source, parameters, dtype=torch.bfloat16, device=CPU, progress=lambda fraction: None
    )
    assert len(source.given) == len(source.shapes) + 5  # the embedding of 339 rows came in six


@pytest.mark.parametrize("kind", ["huggingface", "gguf"])
def test_tensors_read_in_chunks_are_those_read_at_once(tmp_path, monkeypatch, kind):
    """GGUF's row order is restored head by head, whatever a chunk is."""
    folder = save_tiny_checkpoint(tmp_path, head_dim=12, attention_bias=True)
    path = save_gguf(folder, tmp_path / "model.gguf") if kind == "gguf" else folder
    expected = load(path)
    monkeypatch.setattr(reading, "CHUNK_VALUES", 1)
    monkeypatch.setattr(reading.row_ranges, "__defaults__", (5, None))
    monkeypatch.setattr(gguf_checkpoint, "ROW_MULTIPLE", 1)
    assert_equal(load(path), expected)
    assert_equal(expected, load(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_weights_hold_the_tensors_rounded_once(tmp_path, dtype, stored):
    folder = save_tiny_checkpoint(tmp_path, mlp_bias=True, tie_word_embeddings=False)
    change_tensors(
        folder, lambda tensors: tensors.update({k: v.to(stored) for k, v in tensors.items()})
    )
    expected = load(folder)
    rounded = {
        name: tensor.to(getattr(torch, dtype)).float() if tensor.ndim == 2 else tensor
        for name, tensor in expected.items()
    }
    assert_equal(unpacked(folder, dtype, 1), rounded)
    assert_equal(unpacked(folder, dtype, 3), rounded)


def test_packed_weights_of_a_gguf_file_are_those_of_the_folder(tmp_path, monkeypatch):
    folder = save_tiny_checkpoint(tmp_path, attention_bias=True)
    path = save_gguf(folder, tmp_path / "model.gguf")
    monkeypatch.setattr(reading, "CHUNK_VALUES", 1000)
    assert_equal(unpacked(path, "float32", 2), load(folder))


def test_packing_stops_when_nobody_waits_for_it(tmp_path):
    class Stopped(Exception):
        pass

    def stop(fraction):
        raise Stopped

    source = open_checkpoint(Checkpoint(save_tiny_checkpoint(tmp_path), "huggingface"))
    parameters = list(build_model(read_config(source.config)).parameters())
    with pytest.raises(Stopped):
        load_packed(
            load_extension(), source, parameters, dtype="float32", num_threads=2, progress=stop
        )


def spoiled(tmp_path: Path, kind: str, spoil) -> list[str]:
    """Load a checkpoint that is spoiled once the first of its tensors is there, packed by a thread
    and as torch tensors: the errors."""
    folder = save_tiny_checkpoint(tmp_path, vocab_size=5000)
    weights = folder / "model.safetensors"
    path = weights.parent
    if kind == "gguf":
        path = weights = save_gguf(folder, tmp_path / "model.gguf")
    messages = []
    for packs in (True, False):
        whole, stat = weights.read_bytes(), weights.stat()
        source = open_checkpoint(Checkpoint(path, kind))
        parameters = list(build_model(read_config(source.config)).parameters())

        def progress(fraction):
            spoil(weights)

        with pytest.raises(ModelLoadError) as caught:
            if packs:
                load_packed(
                    load_extension(),
                    source,
                    parameters,
                    dtype="float32",
                    num_threads=1,
                    progress=progress,
                )
            else:
                load_parameters(
                    source, parameters, dtype=torch.float32, device=CPU, progress=progress
                )
        source.close()
        weights.write_bytes(whole)
        os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert str(weights) in caught.value.message and "\n" not in caught.value.message
        messages.append(caught.value.message)
    return messages


KINDS = ("huggingface", "gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_while_it_loads_is_an_error_and_not_a_signal(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(reading, "CHUNK_VALUES", 64 * 32)
    packed, tensors = spoiled(tmp_path, kind, lambda path: os.truncate(path, 4096))
    assert "truncated while it was read: tensor" in tensors
    assert "while it was read" in packed  # truncated, or changed if the thread was faster


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_cut_off_between_two_of_its_chunks_is_named(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(reading, "CHUNK_VALUES", 64 * 32)
    path = save_tiny_checkpoint(tmp_path)
    if kind == "gguf":
        path = save_gguf(path, tmp_path / "model.gguf")
    source = open_checkpoint(Checkpoint(path, kind))
    chunks = source.chunks("model.embed_tokens.weight")
    assert len(next(chunks)) == 64
    weights = path if kind == "gguf" else path / "model.safetensors"
    os.truncate(weights, 1000)
    with pytest.raises(ModelLoadError) as caught:
        next(chunks)
    own = "token_embd.weight" if kind == "gguf" else "model.embed_tokens.weight"
    assert f"{weights}: truncated while it was read: tensor {own!r}" in caught.value.message
    assert "get it again" in caught.value.message and "\n" not in caught.value.message
    source.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_written_to_while_it_loads_is_an_error(tmp_path, kind):
    def overwrite(path: Path) -> None:
        with path.open("r+b") as file:  # in place: at no time is it shorter
            file.seek(-64, os.SEEK_END)
            file.write(bytes(64))
        os.utime(path, ns=(0, 10**18))

    for message in spoiled(tmp_path, kind, overwrite):
        assert "changed while it was read" in message

    def append(path: Path) -> None:
        with path.open("ab") as file:
            file.write(bytes(64))

    for message in spoiled(tmp_path, kind, append):
        assert "changed while it was read" in message


@pytest.mark.parametrize("kind", KINDS)
def test_another_file_put_in_its_place_does_not_matter(tmp_path, kind):
    path = save_tiny_checkpoint(tmp_path)
    expected = load(path)
    if kind == "gguf":
        path = save_gguf(path, tmp_path / "model.gguf")
    source = open_checkpoint(Checkpoint(path, kind))
    (tmp_path / "other").write_bytes(b"another")
    os.replace(tmp_path / "other", path if kind == "gguf" else path / "model.safetensors")
    parameters = list(build_model(read_config(source.config)).parameters())
    found = load_parameters(
        source, parameters, dtype=torch.float32, device=CPU, progress=lambda fraction: None
    )
    source.close()
    assert_equal(found, expected)


def test_tensors_that_the_file_has_not_aligned_are_read(tmp_path):
    """The format asks for no alignment: here the data begins at an odd offset."""
    folder = save_tiny_checkpoint(tmp_path)
    expected = load(folder)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", whole)
    padded = struct.pack("<Q", header_bytes + 1) + whole[8 : 8 + header_bytes] + b" "
    path.write_bytes(padded + whole[8 + header_bytes :])
    assert_equal(load(folder), expected)
    assert_equal(unpacked(folder, "float32", 2), expected)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_narrow_types_are_widened_exactly_and_cast_once(tmp_path, stored):
    save_tiny_checkpoint(tmp_path)
    exact = load(tmp_path)
    change_tensors(
        tmp_path, lambda tensors: tensors.update({k: v.to(stored) for k, v in tensors.items()})
    )
    assert_equal(
        load(tmp_path), {name: tensor.to(stored).float() for name, tensor in exact.items()}
    )
    expected = {name: tensor.to(stored).to(torch.bfloat16) for name, tensor in exact.items()}
    assert_equal(load(tmp_path, torch.bfloat16), expected)


def test_a_sharded_checkpoint_equals_a_single_file(tmp_path):
    folder = save_tiny_checkpoint(tmp_path / "single", tie_word_embeddings=False)
    model = LlamaForCausalLM.from_pretrained(folder)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert_equal(load(tmp_path / "sharded"), load(folder))


def test_of_a_tensor_in_two_shards_the_one_that_the_index_names_counts(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    expected = load(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    others = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    others["not of the model"] = torch.ones(3)
    save_file(others, folder / "b.safetensors")
    weight_map = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    expected["model.norm.weight"] = torch.zeros(32)
    assert_equal(load(folder), expected)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "model.safetensors.index.json", "a.safetensors"]
)
def test_a_pipe_among_the_files_is_refused_and_not_waited_for(tmp_path, name):
    folder = save_tiny_checkpoint(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    if name == "a.safetensors":
        index = {"weight_map": {"model.norm.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"{name}: expected a regular file" in refusal(folder)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("LlamaForCausalLM", {}),
        (
            "LlamaForCausalLM",
            {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        ),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": False}),
        ("Qwen3ForCausalLM", {"attention_bias": True}),
    ],
)
def test_a_gguf_file_loads_as_the_folder_it_was_made_from(tmp_path, architecture, fields):
    folder = save_tiny_checkpoint(
        tmp_path, architecture=architecture, head_dim=12, num_key_value_heads=2, **fields
    )
    path = save_gguf(folder, tmp_path / "model.gguf")
    assert_equal(load(path), load(folder))
    configs = [
        read_config(open_checkpoint(Checkpoint(where, kind)).config)
        for where, kind in ((path, "gguf"), (folder, "huggingface"))
    ]
    eps = np.float32(configs[1].rms_norm_eps).item()  # GGUF stores it in 32 bits
    assert configs[0] == msgspec.structs.replace(configs[1], rms_norm_eps=eps)


def test_rotary_leftovers_and_a_tied_head_are_harmless(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    expected = load(folder)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    change_tensors(folder, add)
    assert_equal(load(folder), expected)


def test_a_missing_tensor_is_named(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    message = refusal(folder)
    assert "'model.layers.1.mlp.up_proj.weight' is missing: expected shape [64, 32]" in message


def test_an_unexpected_tensor_is_named(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    change_tensors(folder, lambda tensors: tensors.update(extra=torch.ones(2, 3)))
    assert "tensor 'extra' of shape [2, 3] is unexpected" in refusal(folder)


def test_control_characters_of_a_name_are_not_shown(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({"\x1b[2J\n": torch.ones(2)}))
    assert refusal(folder).isprintable()
    weight_map = {"t": "\x1b[2J.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert refusal(folder).isprintable()


def test_an_untied_model_without_a_head_is_refused(tmp_path):
    folder = save_tiny_checkpoint(tmp_path, tie_word_embeddings=False)
    change_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "'lm_head.weight' is missing" in refusal(folder)


def test_a_wrong_shape_says_expected_and_got(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    assert "'model.norm.weight': expected shape [32], got [31]" in refusal(folder)


def test_a_type_that_is_not_supported_is_named(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    change_tensors(
        folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32).long()})
    )
    assert "'model.norm.weight' has type I64" in refusal(folder)


def test_a_safetensors_file_cut_anywhere_is_refused(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", whole)
    for length in (0, 7, 8, 9, header_bytes, 8 + header_bytes, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(folder)


def safetensors_bytes(header: object) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


@pytest.mark.parametrize(
    "content",
    [
        b"not a safetensors file at all",
        safetensors_bytes(b"{"),
        safetensors_bytes(b"\xff\xfe"),
        safetensors_bytes([]),
        safetensors_bytes({"t": []}),
        safetensors_bytes({"t": {"dtype": "F32", "shape": [2]}}),
        safetensors_bytes({"t": {"dtype": "F32", "shape": "x", "data_offsets": [0, 8]}}),
        safetensors_bytes({"t": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}),
        safetensors_bytes({"t": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}),
        safetensors_bytes({"t": {"dtype": "F32", "shape": [2], "data_offsets": [60, 68]}}),
        safetensors_bytes({"t": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}),
        safetensors_bytes({"t": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}),
        safetensors_bytes(b'{"a":' * 100_000),
    ],
)
def test_a_broken_safetensors_header_is_refused(tmp_path, content):
    folder = save_tiny_checkpoint(tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refusal(folder)


def test_a_broken_folder_is_refused_by_file(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)
    weights = folder / "model.safetensors"
    weights.rename(folder / "other.safetensors")
    assert "expected model.safetensors" in refusal(folder)
    index = folder / "model.safetensors.index.json"
    for content in ("{", "[]", '{"weight_map": 3}', '{"weight_map": {"t": "../secret"}}'):
        index.write_text(content)
        assert "index.json" in refusal(folder)
    index.write_text('{"weight_map": {"t": "gone.safetensors"}}')
    assert "gone.safetensors: cannot be read" in refusal(folder)
    index.write_text('{"weight_map": {"t": "other.safetensors"}}')
    assert "tensor 't' is missing" in refusal(folder)
    (folder / "config.json").write_text("[1]")
    assert "config.json: expected a JSON object, got list" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json: cannot be read" in refusal(folder)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
        ({"llama__rope__scaling__factor": "1"}, "expected factor to be a"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "llama.rope.scaling.attn_factor is 2.0"),
        ({"tensors": {"model.norm.weight": np.ones(32, np.float32)}}, "'model.norm.weight'"),
        ({"tensors": {"blk.00.attn_norm.weight": np.ones(32, np.float32)}}, "layers.00."),
        ({"tensors": {"a\x1b\n": np.ones(4, np.float32)}}, r"'a\x1b\n' is unexpected"),
        ({"llama__expert_count": "8"}, "mixture-of-experts"),
        ({"llama__rope__dimension_count": "4"}, "llama.rope.dimension_count"),
        ({"llama__attention__sliding_window": "8"}, "llama.attention.sliding_window is '8'"),
        ({"tensors": {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}}, "attn_q_norm"),
    ],
)
def test_gguf_variants_of_llama_are_refused(tmp_path, metadata, message):
    folder = save_tiny_checkpoint(tmp_path)
    assert message in refusal(save_gguf(folder, tmp_path / "model.gguf", **metadata))


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama__rope__scaling__type": "none"},
        {"llama__rope__scaling__factor": 1.0, "llama__rope__scale_linear": 0.0},
    ],
)
def test_gguf_rotary_embeddings_that_are_said_to_be_plain_are(tmp_path, metadata):
    folder = save_tiny_checkpoint(tmp_path)
    path = save_gguf(folder, tmp_path / "model.gguf", **metadata)
    assert_equal(load(path), load(folder))
    config = open_checkpoint(Checkpoint(path, "gguf")).config
    assert read_config(config).rope.scaling == NoScaling()


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"llama__rope__scaling__factor": 8.0}, LinearScaling(8.0)),
        (
            {"tensors": {"rope_freqs.weight": np.array([1, 2, 4, 8], np.float32)}},
            PairScaling((1.0, 2.0, 4.0, 8.0), 1.0),
        ),
    ],
)
def test_gguf_rotary_embeddings_that_are_scaled_are_read(tmp_path, metadata, scaling):
    folder = save_tiny_checkpoint(tmp_path)
    path = save_gguf(folder, tmp_path / "model.gguf", **metadata)
    assert_equal(load(path), load(folder))
    config = open_checkpoint(Checkpoint(path, "gguf")).config
    assert read_config(config).rope.scaling == scaling


def test_gguf_files_of_other_families_or_without_facts_are_refused(tmp_path):
    for name, expected in (
        ("mamba", "one of llama, qwen2, qwen3, got 'mamba'"),
        ("llama", "hidden_size"),
        ("qwen3", "num_hidden_layers"),
    ):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", name)
        writer.add_token_list(["a", "b"])
        finish(writer, tmp_path / "a.gguf")
        assert expected in refusal(tmp_path / "a.gguf")
