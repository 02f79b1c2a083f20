"""Restart: what a server with --kv-cache-dir still knows after it was stopped, and after damage.

Whatever lies in the folder, answers must be those of a server that never had it. Files are handled
as bytes: all are cut, or changed in the middle, or get the content of another server's.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from ..stream import RequestFailed, Stream
from .client import Client, Prompt, answer_of
from .report import Report
from .servers import Lab, Server

OUTPUT_LEN = 8
SETTLED_S = 1.0
WRITTEN_S = 60.0
WRITES = "kv_store_writes_total"
FLAGS = ("--num-gpu-blocks-override", "1024", "--max-model-len", "2048")
OTHER_FORMAT = ("--kv-cache-dtype", "int8")


async def restart(
    lab: Lab, *, num_prompts: int = 4, input_len: int = 600, num_at_kill: int = 24
) -> Report:
    report = Report(
        "restart",
        f"{num_prompts} prompts of {input_len} tokens, kept in a folder, {lab.rounds} restarts",
    )
    with TemporaryDirectory(prefix="loadtest-kv-") as name:
        kept = Path(name) / "kept"
        prompts = lab.prompts("restart").prompts(num_prompts, input_len)
        flags = (*FLAGS, "--kv-cache-dir", str(kept))
        async with lab.server(*flags) as server:
            lab.say("restart: prompts are kept")
            expected = await ask_each(server.client, prompts)
            await written(server.client)
            await after_stop(lab, server, prompts, expected, report)
            await server.stop()
            foreign = Path(name) / "foreign"
            await keep_elsewhere(lab, prompts, foreign)
            damages: dict[str, Callable[[Path], None]] = {
                "cut": cut,
                "changed": flip_bits,
                "foreign": lambda path: path.write_bytes(files_of(foreign)[0].read_bytes()),
            }
            for what, damage in damages.items():
                await after_damage(lab, server, kept, what, damage, prompts, expected, report)
        await after_kill(lab, Path(name) / "killed", num_at_kill, input_len, report)
    return report


async def after_stop(
    lab: Lab, server: Server, prompts: list[Prompt], expected: list[Stream], report: Report
) -> None:
    """The first request of a start finds what was kept; beside it a new prompt, for its time."""
    of_kept, of_new, found = [], [], []
    source = lab.prompts("restart, new")
    warm = min(64, len(prompts[0]))
    for number in range(lab.rounds):
        lab.say(f"restart: round {number + 1}")
        await server.stop()
        await server.start()
        at = number % len(prompts)
        stream = await server.client.ask(prompts[at], OUTPUT_LEN)
        report.compare("after a restart", answer_of(stream), answer_of(expected[at]))
        found.append(stream.cached_tokens)
        of_kept.append(stream.first_event_s)
        await server.client.ask(source.tokens(warm), OUTPUT_LEN)
        new = await server.client.ask(source.tokens(len(prompts[at])), OUTPUT_LEN)
        of_new.append(new.first_event_s)
    block_size = await server.client.block_size()
    full = (len(prompts[0]) - 1) // block_size * block_size
    report.add("tokens found by the first request", min(found), at_least=full)
    ratio = statistics.median(of_kept) / statistics.median(of_new)
    report.add("its first token / that of a new prompt", ratio, "%")
    report.add("its first token", 1e3 * statistics.median(of_kept), "ms")


async def after_damage(
    lab: Lab,
    server: Server,
    kept: Path,
    what: str,
    damage: Callable[[Path], None],
    prompts: list[Prompt],
    expected: list[Stream],
    report: Report,
) -> None:
    """Damage the files, start, ask; then let it write what it lost again, for the next damage."""
    lab.say(f"restart: {what}")
    damaged = files_of(kept)
    for path in damaged:
        damage(path)
    await server.start()
    answers = await ask_each(server.client, prompts)
    report.compare(f"with files {what}", [*map(answer_of, answers)], [*map(answer_of, expected)])
    said = [
        line for line in server.log().splitlines() if any(path.name in line for path in damaged)
    ]
    report.add(f"log lines about files {what}", len(said), at_least=1)
    report.notes += [f"log, {what}: {line[:160]}" for line in said[-1:]]
    cached = sum(stream.cached_tokens for stream in answers)
    report.add(f"tokens still found, files {what}", cached)
    await written(server.client)
    await server.stop()


async def after_kill(
    lab: Lab, folder: Path, num_prompts: int, input_len: int, report: Report
) -> None:
    """SIGKILL while blocks are written: what was written is found, and is right."""
    lab.say("restart: killed while it writes")
    prompts = lab.prompts("restart, killed").prompts(num_prompts, input_len)
    async with lab.server(*FLAGS, "--kv-cache-dir", str(folder)) as server:
        asked = [asyncio.ensure_future(server.client.ask(one, OUTPUT_LEN)) for one in prompts]
        block_size = await server.client.block_size()
        least = num_prompts * (input_len // block_size) // 4
        for _ in range(int(WRITTEN_S / 0.005)):
            num_written = (await server.client.metrics())[WRITES]
            if num_written >= least:
                break
            await asyncio.sleep(0.005)
        else:
            raise RequestFailed(f"expected {least} blocks written in {WRITTEN_S:.0f} s")
        server.kill()
        await asyncio.gather(*asked, return_exceptions=True)
        await server.start()
        answers = await ask_each(server.client, prompts)
        right = [await server.client.ask_afresh(prompt, OUTPUT_LEN) for prompt in prompts]
    report.compare("after SIGKILL", [*map(answer_of, answers)], [*map(answer_of, right)])
    found = sum(stream.cached_tokens for stream in answers)
    report.add("blocks written at SIGKILL", num_written)
    share = found / (num_written * block_size)
    report.add("found after it, of their tokens", share, "%", at_least=0.5)


async def keep_elsewhere(lab: Lab, prompts: list[Prompt], folder: Path) -> None:
    """The same prompts' blocks in another format."""
    async with lab.server(*FLAGS, *OTHER_FORMAT, "--kv-cache-dir", str(folder)) as server:
        await ask_each(server.client, prompts)
        await written(server.client)
        await server.stop()


async def ask_each(client: Client, prompts: list[Prompt]) -> list[Stream]:
    return [await client.ask(prompt, OUTPUT_LEN) for prompt in prompts]


async def written(client: Client) -> float:
    """Until nothing more is written for a while; how many blocks were."""
    before, since_s = -1.0, 0.0
    for _ in range(int(WRITTEN_S / 0.1)):
        now = (await client.metrics())[WRITES]
        since_s = since_s + 0.1 if now == before else 0.0
        if since_s >= SETTLED_S:
            return now
        before = now
        await asyncio.sleep(0.1)
    raise RequestFailed(f"blocks are still written after {WRITTEN_S:.0f} s")


def files_of(folder: Path) -> list[Path]:
    """Those with something in them. RequestFailed if there is none."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    if not files:
        raise RequestFailed(f"expected files in {folder}, found none: nothing was kept")
    return files


def cut(path: Path) -> None:
    """To a third, as a full disk or a crash leaves it."""
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)


def flip_bits(path: Path) -> None:
    """One bit in the middle of each of 16 parts: a file's head is left as it is."""
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 32, len(data), max(1, len(data) // 16)):
        data[place] ^= 0x10
    path.write_bytes(data)
