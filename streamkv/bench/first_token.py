"""What `bench startup` starts: a process that loads a model and generates one token.

Reads a JSON line from stdin ({"config": fields of EngineConfig, "input_len": n}) and writes one:
moments on the monotonic clock, which processes of a machine share, and the peak of its memory.
"""

import time

BEGAN_S = time.monotonic()

import asyncio  # noqa: E402
import json  # noqa: E402
import resource  # noqa: E402
import sys  # noqa: E402

from ..engine.async_engine import AsyncEngine  # noqa: E402
from ..errors import StreamkvError  # noqa: E402
from ..protocol import SamplingParams  # noqa: E402


async def first_token(config: dict[str, object], input_len: int) -> dict[str, float]:
    imported_s = time.monotonic()
    async with AsyncEngine(**config) as engine:  # type: ignore[arg-type]
        ready_s = time.monotonic()
        prompt = [(7 * i + 11) % engine.info.vocab_size for i in range(input_len)]
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
        await engine.generate(prompt, sampling).collect()
        moments = {
            "began_s": BEGAN_S,
            "imported_s": imported_s,
            "ready_s": ready_s,
            "first_token_s": time.monotonic(),
            "cpu_s": time.process_time(),
            "weight_bytes": engine.info.weight_bytes,
        }
    return moments


def peak_rss_bytes() -> int:
    """Of this process alone: `ru_maxrss` counts what its parent had at the fork."""
    try:
        with open("/proc/self/status") as file:
            (line,) = (line for line in file if line.startswith("VmHWM"))
            return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    try:
        moments = asyncio.run(first_token(asked["config"], asked["input_len"]))
    except StreamkvError as error:  # its reader takes the last line
        sys.exit(" ".join(str(error).split()))
    print(json.dumps({**moments, "peak_rss_bytes": peak_rss_bytes()}))


if __name__ == "__main__":
    main()
