"""Steps as bytes in C++: what is a message for protocol.py is one there, and nothing else is."""

from __future__ import annotations

import random

import numpy as np
from runner.native_steps import VOCAB_SIZE, RandomSteps, make_step, native_runner

from streamkv.protocol import CopyKind, RowAdded, StepInput, pack_ints
from streamkv.step_bytes import decode_output, decode_step, encode_step


def busy_step() -> StepInput:
    steps = RandomSteps(random.Random(3))
    rows = [
        RowAdded(row, 3, pack_ints([1, 2, 3]), pack_ints([row]), steps.sampling())
        for row in range(4)
    ]
    return make_step(
        77,
        [(row, 0, 3, 1) for row in range(4)],
        removed=[5],
        added=rows,
        appended=[(0, 17), (2, 18)],
        copies=[(5, CopyKind.BLOCK, 17, 3), (6, CopyKind.OUT, 3, 11)],
    )


def is_one_message(data: bytes) -> bool:
    try:
        decode_step(data)
    except ValueError:
        return False
    return True


def test_a_message_cut_anywhere_or_too_long_is_an_error_with_its_step():
    """Nothing is applied before all of it was read."""
    message, native = encode_step(busy_step()), native_runner()
    assert len(message) > 500
    for end in range(len(message)):
        output = decode_output(native.step(message[:end]))
        assert output.error.startswith("step message: expected"), end
        assert output.step_id == (77 if end >= 16 else -1)
        assert not is_one_message(message[:end])
    output = decode_output(native.step(message + b"\0"))
    size = len(message)
    assert output.error == f"step message: expected its end at {size}, got {size + 1} bytes"
    assert decode_output(native.step(message)).error == "this runner has no program"


def test_a_message_with_wrong_bytes_is_an_error_or_another_step_but_never_a_crash():
    """Both sides agree on what is a message."""
    message, rng = encode_step(busy_step()), random.Random(1)
    native = native_runner()
    num_broken = num_refused = 0
    for _ in range(20_000):
        changed = bytearray(message)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(changed))] = rng.choice([0, 1, 127, 128, 255])
        data = bytes(changed)
        try:
            batch = native.prepare(data)
        except ValueError as exc:
            is_broken = str(exc).startswith("step message:")
            num_broken += is_broken
            num_refused += not is_broken
            assert is_broken == (not is_one_message(data))
            native.fail(str(exc))
        else:
            assert is_one_message(data)
            num_asking = 0 if batch is None else batch.num_logit_rows
            native.sample(np.zeros((num_asking, VOCAB_SIZE), np.float32))
    assert num_broken > 1000 and num_refused > 1000
