"""`python -m loadtest.kv`: its figures and verdicts, against servers whose memory is known."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.kv import restart as restart_files
from loadtest.kv.__main__ import SCENARIOS, build_parser, chosen
from loadtest.kv.chats import chats
from loadtest.kv.client import Prompts, lognormal
from loadtest.kv.fork import fork
from loadtest.kv.metrics import Metrics, Sampler, parse_metrics
from loadtest.kv.overload import overload
from loadtest.kv.prefix import prefix
from loadtest.kv.report import ONE_ROUND, Report
from loadtest.kv.restart import restart
from loadtest.kv.servers import Lab, Server
from loadtest.kv.waste import waste
from loadtest.stream import RequestFailed

ROOT = Path(__file__).parents[2]
FAKE = (sys.executable, str(Path(__file__).parent / "fake_server.py"))


def run(
    scenario: Callable[..., Awaitable[Report]], fault: str = "", num_rounds: int = 2, **sizes: Any
) -> Report:
    lab = Lab((*FAKE, "--fault", fault), rounds=num_rounds, seed="test", is_quiet=True)
    return asyncio.run(scenario(lab, **sizes))


def values(report: Report) -> dict[str, float]:
    return {row.what: row.value for row in report.rows}


def first(report: Report) -> Any:
    """The row with the target."""
    return report.rows[0]


# --- metrics -------------------------------------------------------------------------------------


def test_metrics_are_read_by_name_and_their_series_added_up():
    text = (
        "# HELP streamkv:a something\n# TYPE streamkv:a gauge\n"
        'streamkv:a{model_name="x"} 3.0\nstreamkv:a{model_name="y, z} 4"} 4\n'
        'streamkv:b 1e3 1700000000\nstreamkv:c_bucket{le="+Inf"} 7\nother NaN\n'
    )
    metrics = parse_metrics(text)
    assert metrics["a"] == 7 and metrics["b"] == 1000 and metrics["c_bucket"] == 7
    assert math.isnan(metrics["other"])
    with pytest.raises(RequestFailed, match="expected streamkv:kv_cache_blocks_held, which isn't"):
        metrics["kv_cache_blocks_held"]


def test_waste_counts_the_slots_of_all_samples_and_none_of_an_idle_server():
    sampler = Sampler(lambda: asyncio.sleep(0), 1.0)  # type: ignore[arg-type]
    sampler.samples = [
        Metrics(kv_cache_tokens_held=tokens, kv_cache_blocks_held=blocks, kv_cache_block_size=16)
        for tokens, blocks in ((0, 0), (16, 1), (24, 2), (33, 3))
    ]
    assert sampler.waste() == [0, 0.25, 1 - 33 / 48]
    assert sampler.mean_waste() == pytest.approx(1 - 73 / 96)
    assert sampler.peak("kv_cache_blocks_held") == 3


def test_a_reading_that_fails_is_an_error_of_the_sampling():
    async def read() -> Metrics:
        raise RequestFailed("no metrics")

    async def main() -> None:
        async with Sampler(read, 0.0):
            await asyncio.sleep(0.01)

    with pytest.raises(RequestFailed, match="no metrics"):
        asyncio.run(main())


# --- load ----------------------------------------------------------------------------------------


def test_lengths_have_the_median_and_the_mean_that_were_asked_for():
    mu, sigma = lognormal(200, 300)
    assert math.exp(mu) == pytest.approx(200)
    assert math.exp(mu + sigma**2 / 2) == pytest.approx(300)
    source = Prompts("seed", 20000)
    drawn = source.lengths(20000, median=200, mean=300, least=1, most=10**6)
    assert statistics.median(drawn) == pytest.approx(200, rel=0.05)
    assert statistics.mean(drawn) == pytest.approx(300, rel=0.05)
    cut = source.lengths(1000, median=200, mean=300, least=100, most=400)
    assert min(cut) == 100 and max(cut) == 400


def test_prompts_are_those_of_their_seed_and_within_the_vocabulary():
    one, same, other = (Prompts(seed, 300) for seed in ("a", "a", "b"))
    prompt = one.tokens(500)
    assert prompt == same.tokens(500) != other.tokens(500)
    assert 15 <= min(prompt) and max(prompt) < 300
    assert one.prompts(2, 5)[0] != one.prompts(2, 5)[1]


# --- verdicts ------------------------------------------------------------------------------------


def test_a_report_says_what_is_met_what_is_missed_and_what_is_wrong():
    report = Report("name", "what it did")
    report.add("a share", 0.031, "%", at_most=0.04)
    report.add("a ratio", 1.5, "x", at_least=2.0)
    report.add("a count", 12345)
    report.compare("answers", [[1], [2]], [[1], [3]])
    lines = report.text().splitlines()
    assert lines[0] == "name: what it did"
    assert [line.split() for line in lines[1:4]] == [
        ["a", "share", "3.1", "%", "<=", "4.0", "%", "met"],
        ["a", "ratio", "1.50", "x", ">=", "2", "x", "MISSED"],
        ["a", "count", "12,345"],
    ]
    assert lines[4:] == [
        "  2 answers compared, 1 WRONG",
        "  WRONG: answers, answer 1: expected [3], got [2]",
    ]
    assert report.num_missed == 1 and report.document()["rows"][0]["met"] is True


def test_scenarios_run_in_their_order_and_with_a_url_those_that_need_no_more():
    everything = ["waste", "prefix", "chats", "fork", "overload", "restart"]
    assert chosen(["all"], None) == everything
    assert chosen(["all"], "http://a") == ["waste", "prefix", "fork"]
    assert chosen(["fork", "waste", "fork"], None) == ["waste", "fork"]
    with pytest.raises(ValueError, match="--scenario chats: .* leave out --url"):
        chosen(["waste", "chats"], "http://a")


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--scenario", "nope", "invalid choice: 'nope'"),
        ("--rounds", "0", "expected a whole number >= 1, got '0'"),
        ("--serve", "", 'expected a command, got ""'),
        ("--url", "foo", "not a URL of a server: 'foo'"),
    ],
)
def test_wrong_options_say_what_was_expected(option, value, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([option, value])
    assert ended.value.code == 2
    assert f"argument {option}: {expected}" in capsys.readouterr().err.splitlines()[-1]


def test_help_gives_each_default_and_how_long_each_scenario_takes():
    said = " ".join(build_parser().format_help().split())
    for default in ("all", "none", "20000", "3", "left out", "new in each run"):
        assert f"(default: {default})" in said
    times = said.split("Seconds, with 3 rounds", 1)[1].split(".", 1)[0]
    assert all(f"{name} " in times for name in SCENARIOS)


# --- scenarios -----------------------------------------------------------------------------------


def test_waste_is_what_blocks_hold_besides_tokens():
    sizes = {"num_requests": 24, "concurrency": 8}
    report = run(waste, **sizes)
    assert 0.005 < first(report).value < 0.04 and values(report)["samples"] > 1
    assert not report.num_missed
    assert run(waste, "waste", **sizes).num_missed == 1


def test_a_prefix_that_is_found_saves_its_time():
    report = run(prefix, pairs=3)
    assert first(report).value < 0.25 and values(report)["tokens found of each hit"] == 512
    assert not report.num_missed and not report.wrong and report.num_compared == 3


@pytest.mark.parametrize(
    ("scenario", "sizes"), [(prefix, {"pairs": 2}), (chats, {"num_chats": 2, "num_turns": 2})]
)
def test_a_hit_with_a_wrong_answer_is_told(scenario, sizes):
    assert run(scenario, "cached", **sizes).wrong


def test_chats_are_the_same_work_with_caching_and_without():
    report = run(chats, num_chats=2, num_turns=4)
    assert report.num_compared == 2 * 2 * 4 and not report.wrong
    got = values(report)
    assert first(report).value == pytest.approx(
        got["output tokens a second, caching on"] / got["output tokens a second, caching off"]
    )
    assert first(report).value > 1
    # 128 in and 32 out: turn k finds 160 (k - 1) of its 128 + 160 (k - 1), but the last token
    asked = sum(128 + 160 * turn for turn in range(4))
    found = sum(max(0, (128 + 160 * turn - 160) // 16 * 16) for turn in range(1, 4))
    assert got["prompt tokens found, caching on"] == pytest.approx(found / asked, rel=0.15)


def test_forked_choices_share_their_prompt():
    report = run(fork)
    got = values(report)
    # 62 full blocks once, and a tail of 72 tokens for each choice
    assert got["held, forked"] == 62 + 8 * 5
    assert got["held, separate"] == got["separate, by count"] == 8 * 67
    assert first(report).value == pytest.approx(102 / 536) and not report.num_missed
    assert not report.wrong and report.num_compared == 2 * (1 + 8)


def test_overload_compares_answers_and_one_refusal_ends_the_run():
    sizes = {"num_requests": 20, "num_fitting": 4}
    report = run(overload, **sizes)
    assert report.num_compared == 2 * 2 * 20 and not report.wrong
    by_round = [note.split(", by round: ")[1].split(", ") for note in report.notes[:2]]
    for row, shares in zip(report.rows, by_round, strict=False):
        percents = [int(share.removesuffix("%")) for share in shares]
        assert len(percents) == 2 and abs(100 * row.value - statistics.median(percents)) <= 1
    wrong = run(overload, "swap", **sizes).wrong
    assert len(wrong) == 2 * 20 and all("with swap space" in one for one in wrong)
    with pytest.raises(ExceptionGroup) as raised:
        run(overload, "refuse", **sizes)
    assert "HTTP 429" in str(raised.value.exceptions[0])


def test_each_way_of_overload_goes_first_once_in_three_rounds(capsys):
    lab = Lab(FAKE, rounds=3, seed="test")
    asyncio.run(overload(lab, num_requests=4, num_fitting=2))
    turns = [line.split(", ")[1] for line in capsys.readouterr().err.splitlines()]
    assert [turns[at : at + 3] for at in (0, 3, 6)] == [
        ["all fit", "with swap space", "without"],
        ["with swap space", "without", "all fit"],
        ["without", "all fit", "with swap space"],
    ]


@pytest.mark.parametrize(
    ("scenario", "sizes"),
    [
        (chats, {"num_chats": 2, "num_turns": 2}),
        (overload, {"num_requests": 4, "num_fitting": 2}),
    ],
)
def test_times_of_one_round_are_said_to_be_so(scenario, sizes):
    assert ONE_ROUND not in run(scenario, **sizes).notes
    assert ONE_ROUND in run(scenario, num_rounds=1, **sizes).notes


def test_a_restart_finds_what_was_kept_and_damage_is_told(monkeypatch):
    monkeypatch.setattr(restart_files, "SETTLED_S", 0.2)
    report = run(restart, num_prompts=2, num_at_kill=4)
    assert not report.wrong and not report.num_missed
    got = values(report)
    assert got["tokens found by the first request"] == 592
    assert got["tokens still found, files cut"] < 2 * 592
    assert got["tokens still found, files changed"] < 2 * 592
    assert got["tokens still found, files foreign"] == 0
    assert len(report.notes) == 3 and "of another model" in report.notes[2]
    assert 0.5 <= got["found after it, of their tokens"] <= 4


def test_a_server_that_can_not_start_is_told_with_the_end_of_its_log():
    with pytest.raises(RequestFailed, match="ended with 1: no such model: nothing to serve"):
        run(waste, "start")


def test_no_process_is_left_behind():
    processes = []

    async def main() -> None:
        async with Lab(FAKE, is_quiet=True).server() as server:
            processes.append(server._process)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        asyncio.run(main())
    assert processes[0].poll() is not None


def test_a_server_that_is_stopped_starts_again_with_a_log_of_its_own(tmp_path):
    async def main() -> None:
        lab = Lab(FAKE, is_quiet=True)
        folder = tmp_path / "kept"
        async with lab.server("--kv-cache-dir", str(folder)) as server:
            assert isinstance(server, Server)
            await server.client.ask(list(range(40)), 2)
            await server.stop()
            restart_files.flip_bits(restart_files.files_of(folder)[0])
            await server.start()
            assert "damaged" in server.log() or "another model" in server.log()
            await server.stop()
            await server.start()
            assert server.log() == ""

    asyncio.run(main())


# --- the command ---------------------------------------------------------------------------------


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest.kv", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_the_command_prints_a_table_and_a_document_and_its_exit_code_is_about_answers():
    serve = " ".join(FAKE)
    done = run_command("--serve", serve, "--scenario", "prefix", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    *text, last = done.stdout.splitlines()
    assert text[0].startswith("prefix: prompts of 544 tokens")
    assert text[0].removeprefix("prefix: ") not in done.stderr  # once is enough
    assert text[-1] == "0 wrong answers, 0 targets missed"
    document = json.loads(last)
    assert document["config"]["rounds"] == 1 and "api_key" not in document["config"]
    assert document["scenarios"]["prefix"]["rows"][0]["at_most"] == 0.25
    done = run_command("--serve", f"{serve} --fault cached", "--scenario", "prefix")
    assert done.returncode == 1 and "12 wrong answers" in done.stdout


def test_a_server_that_is_not_there_is_one_line():
    done = run_command("--url", "http://127.0.0.1:9", "--scenario", "waste")
    assert done.returncode == 1
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("loadtest: waste: http://127.0.0.1:9: can't connect")
