"""Reading and packing in threads: what is to be done, and how much of it is done.

Owns the order and the end: the first error ends what hasn't begun and is raised, and so is what the
watcher of the progress raises. Owns how progress looks. Knows neither files nor weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple, NoReturn

from tqdm import tqdm

BAR_DELAY_S = 1.0  # what is done sooner needs no bar


class Job(NamedTuple):
    num_bytes: int  # its share of the progress
    run: Callable[[], object]


def progress_bar(total_bytes: int, what: str) -> tqdm[NoReturn]:
    """On stderr; none where nobody watches. It goes when it is done."""
    return tqdm(
        total=total_bytes,
        desc=what,
        unit="B",
        unit_scale=True,
        disable=None,
        leave=False,
        delay=BAR_DELAY_S,
    )


class Progress:
    """Turns bytes done into a fraction of the total that never falls."""

    def __init__(self, total_bytes: int, watch: Callable[[float], None]) -> None:
        self._total_bytes, self._done_bytes = total_bytes, 0
        self._shown = 0.0
        self._watch = watch

    def advance(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._show(self._done_bytes / self._total_bytes)

    def restart(self, total_bytes: int) -> None:
        """What was done was for nothing."""
        self._total_bytes, self._done_bytes = total_bytes, 0

    def finish(self) -> None:
        """Nothing more will be done."""
        self._show(1.0)

    def _show(self, fraction: float) -> None:
        fraction = min(1.0, fraction)
        if fraction > self._shown:
            self._shown = fraction
            self._watch(fraction)


def run_jobs(jobs: Sequence[Job], num_threads: int, progress: Progress) -> None:
    """The largest first, so that no thread is left with one at the end."""
    with ThreadPoolExecutor(num_threads, "loading") as pool:
        in_order = sorted(jobs, key=lambda job: -job.num_bytes)
        futures = {pool.submit(job.run): job for job in in_order}
        try:
            for future in as_completed(futures):
                future.result()
                progress.advance(futures[future].num_bytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
