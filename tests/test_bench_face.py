"""`bench face`: its processes start, are measured and end; the runner without a model."""

from __future__ import annotations

import json
import time

import pytest

from streamkv.bench import face
from streamkv.bench.fake_runner import FakeRunner
from streamkv.cli import main
from streamkv.errors import ConfigError
from streamkv.protocol import StepInput, pack_ints, unpack_ints


def test_the_face_is_measured_beside_the_bare_sockets(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--streams", "8", "--output-len", "60", "--step-ms", "2", "--rounds", "1"]
    assert main(["bench", "face", *flags, "--api", "responses-ws"]) == 0
    *table, document = capsys.readouterr().out.splitlines()
    assert "8 streams, a step takes 2 ms" in table[0]
    report = json.loads(document)
    figures = report["medians"].pop("responses-ws")
    assert not report["medians"]
    assert figures["us_per_token"] > 0 and figures["bare_us"] > 0
    python_us = figures["us_per_token"] - figures["bare_us"]
    assert figures["python_us"] == pytest.approx(python_us, abs=0.01)
    assert 0.3 < figures["tokens_per_event"] < 4


def test_it_says_where_it_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(face.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="checkout"):
        face.bench_face(None, None)  # type: ignore[arg-type]


def test_a_server_that_can_not_start_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "face", "/no/such/model", "--rounds", "1", "--api", "chat"]) == 1
    assert "the server without a model ended with" in capfd.readouterr().err


def step_input(step_id: int, scheduled: bytes) -> StepInput:
    return StepInput(
        step_id=step_id, removed=b"", added=(), appended=b"", copies=b"", scheduled=scheduled
    )


def test_the_fake_device_takes_its_time_and_gives_its_text_in_order() -> None:
    runner = FakeRunner(range(7), vocab_size=9, step_s=0.01, max_num_seqs=4)
    runner.load(lambda stage, fraction: None)
    rows = [(row, 5, 1, ask) for row, ask in ((0, 1), (1, 0), (2, 1), (3, 1))]
    scheduled = pack_ints([number for row in rows for number in row])
    began_s = time.monotonic()
    outputs = [runner.step(step_input(i, scheduled)) for i in (5, 6, 7)]
    assert time.monotonic() - began_s >= 0.02
    assert [list(unpack_ints(one.sampled)) for one in outputs] == [[5, 6, 0], [6, 0, 1], [0, 1, 2]]
