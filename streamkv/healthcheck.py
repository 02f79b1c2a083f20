"""Whether a container's server is well: `python -m streamkv.healthcheck`, for HEALTHCHECK.

Owns nothing: it asks the first process that is a server, where that one's flags, variables and file
say that it listens. The exit code is 0 if GET /health answers 200, else 1.
"""

from __future__ import annotations

import http.client
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from .call import Call
from .cli import parse
from .config import http_url
from .errors import ConfigError

PROCESSES = Path("/proc")
TIMEOUT_S = 4.0
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main() -> int:
    """Ask, and say what is wrong on stderr. Returns the exit code."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine
    try:
        with direct.open(health_url(server_flags()), timeout=TIMEOUT_S):
            return 0
    except (ConfigError, OSError, http.client.HTTPException) as error:  # any other status too
        print(f"healthcheck: {error}", file=sys.stderr)
    except SystemExit:  # the parser's, which has said what is wrong
        pass
    return 1


def server_flags() -> Sequence[str]:
    """Of the server that was started first; none without one."""
    for folder in sorted(PROCESSES.glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            command_line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        words = command_line.split("\0")[:-1]
        for place, word in enumerate(words):
            is_command = word == "serve" and Path(words[place - 1]).name == "streamkv"
            if is_command or word == "streamkv.entrypoints.openai.api_server":
                return words[place + 1 :]
    return []


def health_url(flags: Sequence[str]) -> str:
    """Where a server with these flags listens. ConfigError, SystemExit."""
    config = Call.of(parse(["serve", *flags])).server_config()
    host = ANY_ADDRESS.get(config.bind_host, config.bind_host)
    return f"{http_url(host, config.port)}/health"


if __name__ == "__main__":
    sys.exit(main())
