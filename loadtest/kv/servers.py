"""Servers for scenarios: processes of their own on free ports, or one that runs already.

Owns the processes and their logs. Invariant: whatever happens, a process that was started here is
gone when its block is left.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ..sse_client import get
from ..stream import RequestFailed
from .client import Client, Prompts

READY_S = 180.0
STOP_S = 30.0
_POLL_S = 0.05


@dataclass
class Lab:
    """What all scenarios of a run share."""

    command: Sequence[str]  # starts a server; flags are added
    url: str = ""  # of a server that runs already, for scenarios that need no more
    api_key: str = "none"
    model: str | None = None
    vocab_size: int = 20000
    rounds: int = 3
    seed: str = ""
    is_quiet: bool = False

    def prompts(self, name: str) -> Prompts:
        return Prompts(f"{self.seed} {name}", self.vocab_size)

    def client(self, url: str) -> Client:
        return Client(url, api_key=self.api_key, model=self.model)

    def say(self, text: str) -> None:
        """Progress, for who waits."""
        if not self.is_quiet:
            print(f"loadtest: {text}", file=sys.stderr, flush=True)

    @asynccontextmanager
    async def one_server(self, *flags: str) -> AsyncIterator[Client]:
        """The one that runs, as it is; else a new one with these flags."""
        if self.url:
            yield self.client(self.url)
            return
        async with self.server(*flags) as server:
            yield server.client

    @asynccontextmanager
    async def server(self, *flags: str) -> AsyncIterator[Server]:
        """A new one, ready."""
        with TemporaryDirectory(prefix="loadtest-kv-") as folder:
            server = Server(self, flags, Path(folder) / "log")
            try:
                await server.start()
                yield server
            finally:
                server.kill()


class Server:
    """A process that can be stopped, killed and started again; its log goes on in one file."""

    def __init__(self, lab: Lab, flags: Sequence[str], log: Path) -> None:
        self._lab = lab
        self._flags = flags
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    async def start(self) -> None:
        """Until it is ready. RequestFailed, with the end of its log."""
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        self.client = self._lab.client(url)
        command = [*self._lab.command, *self._flags]
        self._log_start = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [*command, "--port", str(port)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            except OSError as error:
                raise RequestFailed(f"--serve {' '.join(command)}: {error}") from None
        for _ in range(int(READY_S / _POLL_S)):
            if self._process.poll() is not None:
                break
            if await is_ready(url):
                return
            await asyncio.sleep(_POLL_S)
        ended = self._process.poll()
        said = "isn't ready" if ended is None else f"ended with {ended}"
        raise RequestFailed(f"{' '.join(command)}: {said}: {self.log()[-600:]}")

    async def stop(self) -> None:
        """As an operator does, by SIGTERM, until it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RequestFailed(f"still there {STOP_S:.0f} s after SIGTERM") from None

    def kill(self) -> None:
        """As a crash does, by SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def log(self) -> str:
        """What it wrote since its latest start."""
        with self._log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")


async def is_ready(url: str) -> bool:
    try:
        return (await get(url, "/health"))[0] == 200
    except (OSError, EOFError, RequestFailed):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
