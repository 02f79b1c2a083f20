"""AsyncEngine: a language model behind an asyncio interface, to embed or to serve.

Owns the life of the engine (loading, ready, draining, failed, closed), its device thread and its
loop. It must not know HTTP, nor what is inside a runner. It belongs to the event loop that started
it; it installs no signal handler and changes no process-wide setting. Of processes it starts two at
most, when somebody asks for answers that follow grammars.

Invariant: `start` and `generate` never block; whatever state the engine is in, `close` ends every
stream, joins the thread and frees the model's memory.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ..config import EngineConfig
from ..errors import EngineDeadError, UnknownModelError
from ..protocol import Runner, RunnerInfo, SamplingParams, StepOutput
from ..text.tokenizer import Tokenizer
from .admission import seed_source
from .device_thread import DeviceThread
from .encoding import Encoder
from .engine_loop import EngineLoop
from .life import EngineStatus, Life
from .loading import build_loop, build_model, resolve_config
from .ready_log import log_ready
from .reception import Reception
from .stats import EngineStats
from .stream import Admission, TokenStream

__all__ = ["AsyncEngine", "EngineStats", "EngineStatus"]

logger = logging.getLogger(__name__)

SETTLE_S = 2.0  # for what is to be kept on disk to get there, when the engine is closed


class AsyncEngine:
    """Generates text with one model for many readers at once.

    async with AsyncEngine("smollm2-135m-instruct") as engine:
        async with engine.generate("Once upon a time") as stream:
            async for delta in stream:
                print(delta.text, end="")
    """

    def __init__(
        self,
        config: EngineConfig | str | None = None,
        *,
        runner: Runner | None = None,
        tokenizer: Tokenizer | str | None = None,
        **overrides: Any,
    ) -> None:
        """`overrides` are fields of EngineConfig. A runner or tokenizer that is given is used
        instead of the model's own (a tokenizer's name is the configuration's). ConfigError."""
        if isinstance(tokenizer, str):
            overrides, tokenizer = {**overrides, "tokenizer": tokenizer}, None
        self.config = resolve_config(config, overrides)
        self.created_s = int(time.time())
        self.model_ids = self.config.model_ids
        self._life = Life()
        self._draw_seed = seed_source(self.config.seed)
        self._given_runner = runner
        self._tokenizer = tokenizer
        self._sampling_defaults: Mapping[str, Any] = {}
        self._info: RunnerInfo | None = None
        self._device: DeviceThread | None = None
        self._started = False  # by `start`, which is called once
        self._loop: EngineLoop | None = None  # from READY until CLOSED
        self._last_stats = EngineStats()
        self._encoder = Encoder()
        self._reception: Reception | None = None  # once it was READY

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to load, and return at once. `wait_ready` waits for the end of it."""
        if self.status is EngineStatus.CLOSED or self._started:
            raise RuntimeError("an AsyncEngine is started once: make a new one")
        self._started = True
        self._load()

    async def wait_ready(self) -> None:
        """Until the engine is ready. One that nobody has started yet begins to load.

        Raises what kept it from loading, or EngineDeadError.
        """
        if self.status is EngineStatus.LOADING:
            self._load()
        await self._life.wait_settled()
        self._check_ready()

    def drain(self) -> None:
        """Take no request any more; those that were admitted go on. Idempotent."""
        self._life.drain()

    async def wait_draining(self) -> None:
        """Until somebody calls `drain` or `close`."""
        await self._life.wait_draining()

    def end_requests(self) -> None:
        """Raise EngineDeadError to the reader of every request that has not ended."""
        error = EngineDeadError("the server is shutting down: this answer was cut; send it again")
        if self._loop is not None:
            self._loop.fail_all(error)

    async def close(self) -> None:
        """End every stream with ABORT, join the device thread, free the memory. Idempotent.

        With `kv_cache_dir`, what was computed has SETTLE_S to get there before.
        """
        self.drain()
        self._life.become(EngineStatus.CLOSED)
        if self._reception is not None:
            self._reception.stop()
        try:
            if self._loop is not None:
                await self._loop.settle(SETTLE_S)
        finally:
            if self._loop is not None:
                self._loop.stop()
                self._last_stats = self._loop.stats()
            self._loop = None
        if self._reception is not None and self._reception.has_threads:
            await asyncio.to_thread(self._reception.close)  # before the masks' memory is gone
        if self._device is not None:
            await self._device.close()
        self._device = self._given_runner = None

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        try:
            await self.wait_ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    # --- facts -------------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        return self._life.status

    @property
    def status_detail(self) -> str:
        """The status in words: what is being loaded and how far, or what went wrong."""
        return self._life.detail(self._progress)

    @property
    def info(self) -> RunnerInfo:
        """Facts and plan of the loaded model. EngineNotReadyError before."""
        if self._info is None:
            raise self._life.not_ready(self._progress)
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. EngineNotReadyError before it is loaded."""
        if self._tokenizer is None:
            raise self._life.not_ready(self._progress)
        return self._tokenizer

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of SamplingParams that the checkpoint recommends, for requests that don't say.
        EngineNotReadyError before it is loaded."""
        if self._info is None:
            raise self._life.not_ready(self._progress)
        return self._sampling_defaults

    def stats(self) -> EngineStats:
        """Counters and gauges; zeros while loading, the last ones after the end."""
        return self._last_stats if self._loop is None else self._loop.stats()

    # --- requests ----------------------------------------------------------------------------

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, must_fit: bool = False
    ) -> list[int]:
        """Token ids of a text; a long one is tokenized in a thread. InvalidRequestError,
        ContextLengthError for one of too many characters (16 for each token of the context, or a
        million).

        With `must_fit`, ContextLengthError for a text that is too long for the context at first
        sight, before it is tokenized; one that is not may still be too long.
        """
        return await self._encoder.encode(
            self.tokenizer,
            text,
            self.info,
            add_special_tokens=add_special_tokens,
            must_fit=must_fit,
        )

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template. InvalidRequestError.

        A long one is rendered in a thread. ContextLengthError for one with more messages than the
        context has tokens, and for one whose text is too long at first sight.
        """
        return await self._encoder.encode_chat(
            self.tokenizer,
            messages,
            self.info,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        session_id: str = "",
        session_ttl_s: float | None = None,
        queue_places: int | None = None,
        wants_progress: bool = False,
    ) -> TokenStream:
        """A stream to enter with `async with`; nothing happens before, not even the checks (but
        those of a `sampling` that was changed after it was made, of which it takes a copy).

        `model` is one of `model_ids` (empty: the first). `priority`: lower runs first. Prefix
        blocks are shared only between equal `cache_salt`s. With a `session_id`, which is its
        `cache_salt`'s own, the blocks of prompt and answer are kept for `session_ttl_s` (an hour)
        after the end, or until the session's next request has ended. `queue_places`: for how many
        sequences the queue must have room; None: its own. Of requests that belong together the
        first asks for all, the others for 0. With `wants_progress` there are deltas without tokens
        that tell how far the prompt is computed.
        """
        return TokenStream(
            request_id=request_id or f"req-{secrets.token_hex(12)}",
            model=model or self.model_ids[0],
            prompt=prompt,
            sampling=(sampling or SamplingParams()).clone(),
            priority=priority,
            cache_salt=cache_salt,
            session_id=session_id,
            session_ttl_s=session_ttl_s,
            queue_places=queue_places,
            wants_progress=wants_progress,
            admit=self._admit,
        )

    async def check(
        self, prompt_token_ids: tuple[int, ...], sampling: SamplingParams
    ) -> SamplingParams:
        """Raise what entering a stream of this would, and take nothing in.

        Returns the sampling with a seed: who checks several requests before the first one runs
        fixes which of them gets which of the engine's seeds.
        """
        return await self._reception_of(self.model_ids[0]).check(prompt_token_ids, sampling)

    async def abort(self, request_id: str) -> None:
        """End a request with ABORT deltas; nothing happens if there is none of that id."""
        stream = self.find(request_id)
        if stream is not None:
            stream.cancel()

    def find(self, request_id: str) -> TokenStream | None:
        """The stream of that id whose context was entered and not left yet."""
        return None if self._reception is None else self._reception.find(request_id)

    async def _admit(self, stream: TokenStream) -> Admission:
        """Check a request and take it in; errors name what was wrong."""
        return await self._reception_of(stream.model).admit(stream)

    def _reception_of(self, model: str) -> Reception:
        self._check_ready()
        if model not in self.model_ids:
            known = ", ".join(self.model_ids)
            raise UnknownModelError(f"model: expected one of {known}, got {model!r}")
        assert self._reception is not None, "ready without a reception"
        return self._reception

    def _check_ready(self) -> None:
        if self.status is not EngineStatus.READY:
            raise self._life.not_ready(self._progress)

    @property
    def _progress(self) -> str:
        return "not started" if self._device is None else str(self._device.progress)

    # --- from the device ---------------------------------------------------------------------

    def _load(self) -> None:
        """Begin to load; nothing happens if that has begun."""
        if self._device is not None:
            return
        self._device = DeviceThread(
            self._build_runner,
            self._on_output,
            self._on_device_dead,
            name=f"streamkv-device-{self.model_ids[0]}",
        )
        self._device.loaded.add_done_callback(self._on_loaded)

    def _build_runner(self, progress: Callable[[str, float], None]) -> Runner:
        """On the device thread. Nobody reads what it sets before `loaded` is set."""
        model = build_model(self.config, self._given_runner, self._tokenizer, progress)
        self._tokenizer, self._sampling_defaults = model.text
        return model.runner

    def _on_loaded(self, loaded: asyncio.Future[RunnerInfo]) -> None:
        error = loaded.exception()
        if self.status is not EngineStatus.LOADING:
            return
        if error is not None:
            self._fail(error)
            return
        try:
            self._start_loop(loaded.result())
        except Exception as exc:
            logger.exception("starting the engine loop failed")
            self._fail(exc)

    def _start_loop(self, info: RunnerInfo) -> None:
        assert self._device is not None, "loaded without a device thread"
        store = self._device.store
        self._loop = build_loop(
            self.config,
            info,
            self.tokenizer.eos_token_ids,
            store,
            self._device.masks,
            self._device.submit,
            self._fail,
        )
        self._reception = Reception(
            self.config,
            info,
            self.tokenizer,
            self._encoder,
            self._loop,
            self._draw_seed,
            self._check_ready,
        )
        self._info = info
        self._life.become(EngineStatus.READY)
        log_ready(self.config, info, self._sampling_defaults, has_store=store is not None)

    def _on_output(self, output: StepOutput) -> None:
        if self._loop is not None:
            self._loop.on_output(output)

    def _on_device_dead(self, error: EngineDeadError) -> None:
        if self._loop is not None:
            self._loop.die(error)
        if self.status is not EngineStatus.FAILED:  # no loop to tell of it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The end, by itself: nothing is served any more, and the device's memory is given back."""
        self._life.fail(error)
        if self._reception is not None:
            self._reception.stop()
        if self._device is not None:
            self._device.stop()
