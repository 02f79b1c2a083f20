"""AsyncEngine: a language model behind an asyncio interface, to embed or to serve.

Owns the life of the engine (loading, ready, draining, failed, closed), its device thread and its
loop. It must not know HTTP, nor what is inside a runner. It belongs to the event loop that started
it; it installs no signal handler, starts no process and changes no process-wide setting.

Invariant: `start` and `generate` never block; whatever state the engine is in, `close` ends every
stream, joins the thread and frees the model's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from ..config import EngineConfig
from ..core.scheduler import Scheduler
from ..errors import (
    EngineDeadError,
    EngineNotReadyError,
    InvalidRequestError,
    StreamkvError,
    UnknownModelError,
)
from ..protocol import Runner, RunnerInfo, SamplingParams, StepOutput
from ..text.chat_messages import num_chars
from ..text.tokenizer import Tokenizer
from .admission import (
    build_request,
    check_name,
    check_num_messages,
    check_priority,
    check_prompt,
    check_text,
    check_unicode,
    seed_source,
)
from .device_thread import DeviceThread
from .engine_loop import EngineLoop, EngineStats
from .loading import build_model, resolve_config
from .mailbox import Mailbox
from .stream import Admission, TokenStream

__all__ = ["AsyncEngine", "EngineStats", "EngineStatus"]

logger = logging.getLogger(__name__)

LONG_TEXT_CHARS = 8192  # tokenizing more than this would hold up the loop: a thread does it
HUGE_TEXT_CHARS = 1 << 20  # more than this takes a second: one at a time, to leave others threads
MANY_MESSAGES = 256  # rendering more than this would hold up the loop


class EngineStatus(enum.StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # what runs goes on, nothing new is taken
    FAILED = "failed"  # it could not load, or it died
    CLOSED = "closed"


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
        self._status = EngineStatus.LOADING
        self._error: BaseException | None = None  # why the status is FAILED
        self._draw_seed = seed_source(self.config.seed)
        self._given_runner = runner
        self._tokenizer = tokenizer
        self._sampling_defaults: Mapping[str, Any] = {}
        self._info: RunnerInfo | None = None
        self._device: DeviceThread | None = None
        self._started = False  # by `start`, which is called once
        self._loop: EngineLoop | None = None  # from READY until CLOSED
        self._settled = asyncio.Event()  # set once the status is not LOADING
        self._draining = asyncio.Event()  # set once its end was asked for
        self._last_stats = EngineStats()
        self._huge_text = asyncio.Lock()

    # --- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to load, and return at once. `wait_ready` waits for the end of it."""
        if self._status is EngineStatus.CLOSED or self._started:
            raise RuntimeError("an AsyncEngine is started once: make a new one")
        self._started = True
        self._load()

    async def wait_ready(self) -> None:
        """Until the engine is ready. One that nobody has started yet begins to load.

        Raises what kept it from loading, or EngineDeadError.
        """
        if self._status is EngineStatus.LOADING:
            self._load()
        await self._settled.wait()
        if self._status is EngineStatus.FAILED and self._error is not None:
            raise self._error
        self._check_ready()

    def drain(self) -> None:
        """Take no request any more; those that were admitted go on. Idempotent."""
        if self._status in (EngineStatus.LOADING, EngineStatus.READY):
            self._set_status(EngineStatus.DRAINING)
        _set(self._draining)

    async def wait_draining(self) -> None:
        """Until somebody calls `drain` or `close`."""
        await self._draining.wait()

    def end_requests(self) -> None:
        """Raise EngineDeadError to the reader of every request that has not ended."""
        error = EngineDeadError("the server is shutting down: this answer was cut; send it again")
        if self._loop is not None:
            self._loop.fail_all(error)

    async def close(self) -> None:
        """End every stream with ABORT, join the device thread, free the memory. Idempotent."""
        self.drain()
        self._set_status(EngineStatus.CLOSED)
        if self._loop is not None:
            self._loop.stop()
            self._last_stats = self._loop.stats()
        self._loop = None
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
        return self._status

    @property
    def status_detail(self) -> str:
        """The status in words: what is being loaded and how far, or what went wrong."""
        if self._status is EngineStatus.FAILED:
            return str(self._error)
        if self._status is EngineStatus.LOADING:
            return str(self._device.progress) if self._device is not None else "not started"
        if self._status is EngineStatus.DRAINING:
            return "shutting down; it takes no new requests"
        return str(self._status)

    @property
    def info(self) -> RunnerInfo:
        """Facts and plan of the loaded model. EngineNotReadyError before."""
        if self._info is None:
            raise self._not_ready()
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. EngineNotReadyError before it is loaded."""
        if self._tokenizer is None:
            raise self._not_ready()
        return self._tokenizer

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """Fields of SamplingParams that the checkpoint recommends, for requests that don't say.
        EngineNotReadyError before it is loaded."""
        if self._info is None:
            raise self._not_ready()
        return self._sampling_defaults

    def stats(self) -> EngineStats:
        """Counters and gauges; zeros while loading, the last ones after the end."""
        return self._last_stats if self._loop is None else self._loop.stats()

    # --- requests ----------------------------------------------------------------------------

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, must_fit: bool = False
    ) -> list[int]:
        """Token ids of a text; a long one is tokenized in a thread. InvalidRequestError.

        With `must_fit`, ContextLengthError for a text that is too long for the context at first
        sight, before it is tokenized; one that is not may still be too long.
        """
        if must_fit:
            check_text(text, self.tokenizer, self.info.max_model_len)
        else:
            check_unicode(text)
        encode = functools.partial(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
        if len(text) <= LONG_TEXT_CHARS:
            return encode()
        if len(text) <= HUGE_TEXT_CHARS:
            return await asyncio.to_thread(encode)
        async with self._huge_text:
            return await asyncio.to_thread(encode)

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
        max_model_len = self.info.max_model_len
        check_num_messages(messages, max_model_len)
        render = functools.partial(
            self.tokenizer.apply_chat_template,
            messages,
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
        )
        is_long = (
            len(messages) > MANY_MESSAGES or num_chars(messages, LONG_TEXT_CHARS) > LONG_TEXT_CHARS
        )
        text = await asyncio.to_thread(render) if is_long else render()
        check_text(text, self.tokenizer, max_model_len, "messages")
        return await self.encode(text, add_special_tokens=False)  # the template has them

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        model: str = "",
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        queue_places: int | None = None,
    ) -> TokenStream:
        """A stream to enter with `async with`; nothing happens before, not even the checks (but
        those of a `sampling` that was changed after it was made, of which it takes a copy).

        `model` is one of `model_ids` (empty: the first). `priority`: lower runs first. Prefix
        blocks are shared only between equal `cache_salt`s. `queue_places`: for how many choices
        the queue must have room; None: its own. Of requests that belong together the first asks
        for all, the others for 0.
        """
        return TokenStream(
            request_id=request_id or f"req-{secrets.token_hex(12)}",
            model=model or self.model_ids[0],
            prompt=prompt,
            sampling=(sampling or SamplingParams()).clone(),
            priority=priority,
            cache_salt=cache_salt,
            queue_places=queue_places,
            admit=self._admit,
        )

    def check(self, prompt_token_ids: tuple[int, ...], sampling: SamplingParams) -> SamplingParams:
        """Raise what entering a stream of this would, and take nothing in.

        Returns the sampling with a seed: who checks several requests before the first one runs
        fixes which of them gets which of the engine's seeds.
        """
        loop = self._loop_of(self.model_ids[0])
        request = build_request(
            prompt_token_ids,
            sampling,
            self.info,
            self._draw_seed,
            request_id="",
            model=self.model_ids[0],
            arrival_s=0.0,
            priority=0,
            cache_salt="",
        )
        loop.scheduler.check_admissible(request)
        return sampling.clone(seed=request.seed)

    async def abort(self, request_id: str) -> None:
        """End a request with ABORT deltas; nothing happens if there is none of that id."""
        if self._loop is not None:
            self._loop.abort(request_id)

    async def _admit(self, stream: TokenStream) -> Admission:
        """Check a request and take it in; errors name what was wrong."""
        self._loop_of(stream.model)
        check_name("request_id", stream.request_id)
        check_name("cache_salt", stream.cache_salt)
        check_priority(stream.priority)
        prompt = check_prompt(stream.prompt, self.info.max_model_len)
        if isinstance(prompt, str):
            prompt = tuple(await self.encode(prompt, must_fit=True))
        loop = self._loop_of(stream.model)  # it may have ended while a thread was tokenizing
        request = build_request(
            prompt,
            stream.sampling,
            self.info,
            self._draw_seed,
            request_id=stream.request_id,
            model=stream.model,
            arrival_s=stream.arrival_s or 0.0,
            priority=stream.priority,
            cache_salt=stream.cache_salt,
        )
        loop.scheduler.check_admissible(request)
        loop.check_queue(stream.queue_places, self.config.max_num_queued_reqs)
        if request.request_id in loop:
            raise InvalidRequestError(
                f"request_id: expected one that is not in use, got {request.request_id!r}",
                param="request_id",
            )
        after = request.prompt_token_ids[-1]
        mailbox = Mailbox(request.sampling, self.tokenizer, after=after)
        loop.add(request, mailbox)
        abort = functools.partial(loop.abort, request.request_id)
        if stream.cancelled:
            abort()
        return Admission(prompt, mailbox, abort)

    def _loop_of(self, model: str) -> EngineLoop:
        self._check_ready()
        if model not in self.model_ids:
            known = ", ".join(self.model_ids)
            raise UnknownModelError(f"model: expected one of {known}, got {model!r}")
        assert self._loop is not None, "ready without a loop"
        return self._loop

    def _check_ready(self) -> None:
        if self._status is not EngineStatus.READY:
            raise self._not_ready()

    def _not_ready(self) -> StreamkvError:
        if self._status is EngineStatus.LOADING:
            return EngineNotReadyError(
                f"the model is loading ({self.status_detail}): try again in a few seconds"
            )
        return EngineDeadError(f"the engine serves nobody any more: {self.status_detail}")

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
        if self._status is not EngineStatus.LOADING:
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
        scheduler = Scheduler(
            num_blocks=info.num_blocks,
            block_size=info.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=info.max_model_len,
            eos_token_ids=self.tokenizer.eos_token_ids,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        self._loop = EngineLoop(
            scheduler,
            self._device.submit,
            self._fail,
            depth=1 if self.config.async_scheduling else 0,
            num_blocks=info.num_blocks,
        )
        self._info = info
        self._set_status(EngineStatus.READY)
        logger.info(
            "%s is ready on %s: %s, %d KV blocks of %d tokens (%d tokens), context %d, ops: %s",
            self.model_ids[0],
            info.device,
            info.formats,
            info.num_blocks,
            info.block_size,
            info.num_blocks * info.block_size,
            info.max_model_len,
            info.ops,
        )
        self._log_sampling_defaults()

    def _log_sampling_defaults(self) -> None:
        named = {name: f"{name} {value}" for name, value in self._sampling_defaults.items()}
        if "max_tokens" in named:
            named["max_tokens"] += " (chats and responses, not completions)"
        if named:
            logger.info(
                "requests that don't say get the checkpoint's %s; --generation-config vllm leaves "
                "that out",
                ", ".join(named.values()),
            )

    def _on_output(self, output: StepOutput) -> None:
        if self._loop is not None:
            self._loop.on_output(output)

    def _on_device_dead(self, error: EngineDeadError) -> None:
        if self._loop is not None:
            self._loop.die(error)
        if self._status is not EngineStatus.FAILED:  # no loop to tell of it
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The end, by itself: nothing is served any more, and the device's memory is given back."""
        self._error = error
        self._set_status(EngineStatus.FAILED)
        if self._device is not None:
            self._device.stop()

    def _set_status(self, status: EngineStatus) -> None:
        self._status = status
        if status is not EngineStatus.LOADING:
            _set(self._settled)


def _set(event: asyncio.Event) -> None:
    with contextlib.suppress(RuntimeError):  # its waiters were left behind by a loop that is closed
        event.set()
