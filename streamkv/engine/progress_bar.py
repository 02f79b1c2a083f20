"""The bar that `LLM.generate` shows: prompts done, and tokens per second in and out.

Owns the bar's words. It must not know where outputs come from. Invariant: with no bar, tqdm isn't
imported and nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from .request_output import RequestOutput


class ProgressBar:
    """A context manager; `use_tqdm` says whether there is a bar, or is what makes one."""

    def __init__(self, use_tqdm: bool | Callable[..., Any], num_prompts: int) -> None:
        self._bar: Any = None
        self._began_s = time.monotonic()
        self._num_in = self._num_out = 0
        if not use_tqdm:
            return
        if use_tqdm is True:
            from tqdm.auto import tqdm

            use_tqdm = tqdm
        self._bar = use_tqdm(
            total=num_prompts, desc="Processed prompts", dynamic_ncols=True, postfix=self._speed()
        )

    def update(self, output: RequestOutput) -> None:
        """One more prompt is done."""
        if self._bar is None:
            return
        # As vLLM counts: the prompt once for each choice.
        self._num_in += len(output.prompt_token_ids) * len(output.outputs)
        self._num_out += sum(len(one.token_ids) for one in output.outputs)
        self._bar.postfix = self._speed()
        self._bar.update(1)

    def _speed(self) -> str:
        elapsed_s = max(time.monotonic() - self._began_s, 1e-9)
        speeds = (self._num_in / elapsed_s, self._num_out / elapsed_s)
        return "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*speeds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()
