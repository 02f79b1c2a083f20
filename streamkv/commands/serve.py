"""`streamkv serve`: the server, from a free port to the last answer.

Owns the process: its log, its event loop, its listening socket and its memory's collector.
Invariant: the port is bound before anything loads, so that a taken one fails at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from typing import TYPE_CHECKING

from .. import __version__
from ..config import EngineConfig, ServerConfig, http_url
from ..errors import ConfigError, EngineDeadError, StreamkvError
from .log import log_to_stderr

if TYPE_CHECKING:
    from ..engine.async_engine import AsyncEngine
    from ..server.serving import Server

# For --ops reference: torch's OpenMP threads spin for milliseconds after a matrix product. Where
# others want the same cores that halves the speed; a few microseconds cost little elsewhere.
OPENMP_SPINS = "4000"
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

logger = logging.getLogger("streamkv")


def serve(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Build engine and server and run them until a signal. Returns the exit code."""
    _check_key_variable(server_config)
    log_to_stderr(server_config.log_level)
    _warn_if_open(server_config)
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)
    with _listen(server_config) as listener:
        # Before there is a loop, as it takes long.
        from ..engine.async_engine import AsyncEngine
        from ..engine.background import new_event_loop
        from ..server.serving import Server

        engine = AsyncEngine(engine_config)
        server = Server(engine, server_config)
        port = listener.getsockname()[1]
        logger.info("streamkv %s: %s", __version__, http_url(server_config.bind_host, port))
        # The server's own handlers from the start: a Ctrl-C would cancel what has just begun.
        with server.capture_signals(), asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(run_server(server, engine, listener))


def _check_key_variable(config: ServerConfig) -> None:
    """Elsewhere an empty variable is an unset one; here that would open the server to all."""
    if not config.api_key and os.environ.get("STREAMKV_API_KEY") == "":
        raise ConfigError("STREAMKV_API_KEY: expected a key, got an empty string; set or unset it")


def _warn_if_open(config: ServerConfig) -> None:
    if config.bind_host not in LOOPBACK_HOSTS and not config.api_key:
        logger.warning(
            "listening on %s without --api-key: anyone who reaches this port can use the model",
            config.bind_host,
        )


def _listen(config: ServerConfig) -> socket.socket:
    """The bound socket."""
    family = socket.AF_INET6 if ":" in config.bind_host else socket.AF_INET
    try:
        return socket.create_server((config.bind_host, config.port), family=family, backlog=2048)
    except OSError as error:
        # socket.create_server appends the address, which the message has already
        reason = str(error.strerror or error).partition(" (while")[0]
        raise StreamkvError(
            f"can't listen on {config.bind_host}:{config.port}: {reason}; "
            "choose another --port or --host"
        ) from None


async def run_server(server: Server, engine: AsyncEngine, listener: socket.socket) -> int:
    """Serve until a signal, or raise what kept the model from loading. Returns the exit code."""
    loading = asyncio.create_task(_until_loaded(engine, server))
    try:
        await server.serve(sockets=[listener])
    finally:
        await engine.close()
    if error := await loading:
        raise error
    return 0


async def _until_loaded(engine: AsyncEngine, server: Server) -> Exception | None:
    """Wait for the model; if it can't be loaded, stop the server and return the reason."""
    try:
        await engine.wait_ready()
    except EngineDeadError:  # closed while loading
        return None
    except Exception as error:
        server.should_exit = True
        return error
    # What lives now lives as long as the process: keep the collector from walking it again.
    gc.collect()
    gc.freeze()
    return None
