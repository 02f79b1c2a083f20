"""The GGUF reader against the gguf package, and against broken files."""

from __future__ import annotations

import os
import struct
import time

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from weights.gguf_files import MADE_BY_GGUF, QUANTIZED, RANDOM, finish, stored, write_gguf

from streamkv.errors import ModelLoadError
from streamkv.weights import gguf as gguf_module
from streamkv.weights import reading
from streamkv.weights.gguf import GGUFFile
from streamkv.weights.reading import RowRange


def random_values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


@pytest.mark.parametrize("type_name", (*MADE_BY_GGUF, *RANDOM))
@pytest.mark.parametrize("shape", [(3, 512), (2, 3, 256), (5_000, 256)])
def test_values_are_bit_identical_to_the_gguf_packages(tmp_path, type_name, shape):
    values = random_values(*shape)
    path = write_gguf(tmp_path / "a.gguf", tensors={"t": (values, type_name)})
    expected = dequantize(stored(values, type_name), gguf.GGMLQuantizationType[type_name])
    file = GGUFFile(path)
    found = file.read("t")
    chunks = [chunk.copy() for chunk in file.chunks("t")]
    file.close()
    assert file.tensors["t"].shape == shape and file.tensors["t"].type == type_name
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.uint32), expected.reshape(shape).view(np.uint32))
    if type_name != "BF16":  # in chunks its bits
        assert np.array_equal(np.concatenate(chunks), found)


@pytest.mark.parametrize("type_name", QUANTIZED)
def test_blocks_are_the_files_bytes_for_any_range_of_rows(tmp_path, monkeypatch, type_name):
    monkeypatch.setattr(reading, "CHUNK_VALUES", 7 * 512)
    values = random_values(41, 512)
    tensors = {"other": (values, "F32"), "t": (values, type_name)}
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", tensors=tensors))
    expected = stored(values, type_name)
    for rows in (None, (0, 41), (6, 20), (39, 41), (5, 5)):
        found = [chunk.copy() for chunk in file.blocks("t", 3, RowRange(*rows) if rows else None)]
        assert all(len(chunk) % 3 == 0 for chunk in found[:-1])
        first, end = rows or (0, 41)
        assert np.array_equal(np.concatenate([expected[:0], *found]), expected[first:end])


def test_extreme_scales_are_values_and_not_warnings(tmp_path):
    block = np.zeros(1, np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    block["d"], block["q"] = np.inf, 0
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    raw = block.view(np.uint8).reshape(1, 34)
    writer.add_tensor("t", raw, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer, tmp_path / "a.gguf")
    assert np.isnan(GGUFFile(tmp_path / "a.gguf").read("t")).all()


METADATA = {
    "u8": (200, "UINT8"),
    "i8": (-100, "INT8"),
    "u16": (60000, "UINT16"),
    "i16": (-30000, "INT16"),
    "u32": (4_000_000_000, "UINT32"),
    "i32": (-2_000_000_000, "INT32"),
    "u64": (2**63 + 1, "UINT64"),
    "i64": (-(2**62), "INT64"),
    "f32": (0.5, "FLOAT32"),
    "f64": (0.1, "FLOAT64"),
    "yes": (True, "BOOL"),
    "no": (False, "BOOL"),
    "text": ("naïve 🙂", "STRING"),
    "empty": ("", "STRING"),
    "numbers": ([1, -2, 3], "ARRAY"),
    "floats": ([0.5, 0.25], "ARRAY"),
    "flags": ([True, False], "ARRAY"),
    "strings": (["a", "", "ünï"], "ARRAY"),
    "nested": ([[1, 2], [3]], "ARRAY"),
}


def test_every_metadata_type_is_read(tmp_path):
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", metadata=METADATA))
    expected = {key: value for key, (value, _) in METADATA.items()}
    assert {key: file.metadata[key] for key in expected} == expected
    assert file.metadata["yes"] is True and file.metadata["flags"] == [True, False]
    assert file.metadata["general.architecture"] == "llama"


@pytest.mark.parametrize("header_bytes", [*range(1, 12), 61])
def test_a_header_is_read_in_pieces_wherever_they_end(tmp_path, monkeypatch, header_bytes):
    monkeypatch.setattr(gguf_module, "HEADER_BYTES", header_bytes)
    tensors = {"a": (random_values(1, 5), "F32"), "b": (random_values(1, 3), "F32")}
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", metadata=METADATA, tensors=tensors))
    assert {key: file.metadata[key] for key in METADATA} == {
        key: value for key, (value, _) in METADATA.items()
    }
    assert np.array_equal(file.read("b"), tensors["b"][0])


def test_a_vocabulary_is_parsed_fast(tmp_path):
    tokens = [f"token{index}" for index in range(49_152)]
    path = write_gguf(tmp_path / "a.gguf", metadata={"tokens": (tokens, "ARRAY")})
    started = time.process_time()
    assert GGUFFile(path).metadata["tokens"] == tokens
    assert time.process_time() - started < 0.3


def test_data_begins_at_the_files_own_alignment(tmp_path):
    tensors = {"a": (random_values(1, 5), "F32"), "b": (random_values(1, 3), "F32")}
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", tensors=tensors, alignment=128))
    assert np.array_equal(file.read("b"), tensors["b"][0])
    assert all(tensor.offset % 128 == 0 for tensor in file.tensors.values())


def test_a_file_cut_anywhere_is_one_readable_line(tmp_path):
    metadata = {key: METADATA[key] for key in ("text", "strings", "nested", "u64")}
    tensors = {"t": (random_values(2, 32), "Q4_1"), "u": (random_values(1, 8), "F32")}
    whole = write_gguf(tmp_path / "whole.gguf", metadata=metadata, tensors=tensors).read_bytes()
    end_of_data = GGUFFile(tmp_path / "whole.gguf").tensors["u"].offset + 32
    cut = tmp_path / "cut.gguf"
    for length in range(end_of_data):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError) as caught:
            GGUFFile(cut)
        assert str(cut) in caught.value.message and "\n" not in caught.value.message


def test_no_flipped_byte_crashes_the_reader(tmp_path):
    """Broken in the middle: a ModelLoadError, or a file that still makes sense and can be read."""
    metadata = {key: METADATA[key] for key in ("text", "strings", "numbers")}
    tensors = {"t": (random_values(1, 32), "Q8_0")}
    whole = write_gguf(tmp_path / "whole.gguf", metadata=metadata, tensors=tensors).read_bytes()
    broken = tmp_path / "broken.gguf"
    refused = 0
    for place in range(GGUFFile(tmp_path / "whole.gguf").tensors["t"].offset):
        for value in (0, 0xFF, whole[place] ^ 1):
            broken.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                file = GGUFFile(broken)
                for name in file.tensors:
                    file.read(name)
            except ModelLoadError as error:
                refused += 1
                assert "\n" not in error.message
    assert refused > 100


def raw_gguf(*, magic=b"GGUF", version=3, tensors=(), metadata=b"", num_keys=0) -> bytes:
    """A file built by hand: `tensors` are (name, shape innermost first, type, offset)."""
    data = magic + struct.pack("<IQQ", version, len(tensors), num_keys) + metadata
    for name, shape, tensor_type, offset in tensors:
        data += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        data += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", tensor_type, offset)
    return data + bytes(-len(data) % 32) + bytes(256)


def key_value(key: bytes, value_type: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", value_type) + value


DEEP_ARRAY = b"".join(struct.pack("<IQ", 9, 1) for _ in range(50))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04 something else", "expected a GGUF file, got a zip archive; get it again"),
        (raw_gguf(version=1), "expected GGUF version 2 or 3"),
        (raw_gguf(version=0x03000000), "little-endian"),
        (raw_gguf(tensors=[("t", (256,), 10, 0)]), "tensor 't' has type Q2_K"),
        (raw_gguf(tensors=[("t", (256,), 99, 0)]), "tensor 't' has type number 99"),
        (raw_gguf(tensors=[("t", (33,), 8, 0)]), "multiple of 32"),
        (raw_gguf(tensors=[("\x1b[2J\n", (33,), 8, 0)]), r"'\x1b[2J\n'"),
        (raw_gguf(metadata=key_value(b"\x1b\n", 77, b""), num_keys=1), r"'\x1b\n'"),
        (raw_gguf(tensors=[("t", (1,) * 5, 0, 0)]), "5 dimensions"),
        (raw_gguf(tensors=[("t", (2**62, 8), 0, 0)]), "tensor 't' needs bytes"),
        (raw_gguf(tensors=[("t", (4,), 0, 2**40)]), "tensor 't' needs bytes"),
        (raw_gguf(tensors=[("t", (4,), 0, 4)]), "not aligned"),
        (raw_gguf(tensors=[("t", (4,), 0, 0)] * 2), "listed twice"),
        (raw_gguf(metadata=key_value(b"k", 77, b""), num_keys=1), "'k' has unknown type 77"),
        (raw_gguf(metadata=key_value(b"\xff", 0, b"a"), num_keys=1), "not UTF-8"),
        (raw_gguf(metadata=key_value(b"k", 9, DEEP_ARRAY), num_keys=1), "nests arrays"),
        (
            raw_gguf(metadata=key_value(b"k", 9, struct.pack("<IQ", 8, 2**60)), num_keys=1),
            "'k' needs",
        ),
        (
            raw_gguf(
                metadata=key_value(b"general.alignment", 4, struct.pack("<I", 24)), num_keys=1
            ),
            "power of two",
        ),
    ],
)
def test_a_broken_file_is_one_readable_line(tmp_path, content, message):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        GGUFFile(path)
    assert message in caught.value.message and "\n" not in caught.value.message


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(ModelLoadError, match="regular file"):
        GGUFFile(tmp_path / "a.gguf")


def test_a_missing_file_is_one_readable_line(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be read"):
        GGUFFile(tmp_path / "nowhere.gguf")
