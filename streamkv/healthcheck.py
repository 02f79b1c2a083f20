"""Whether a container's server is well: `python -m streamkv.healthcheck`, for HEALTHCHECK.

Owns nothing: it asks the server that is process 1, where that one's flags, variables and file say
that it listens. The exit code is 0 if GET /health answers 200.
"""

from __future__ import annotations

import http.client
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from .cli import Call, build_parser
from .errors import ConfigError
from .flags import with_dashes

SERVER_COMMAND_LINE = Path("/proc/1/cmdline")
TIMEOUT_S = 4.0
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main() -> int:
    """Ask, and say what is wrong on stderr. Returns the exit code."""
    words = SERVER_COMMAND_LINE.read_bytes().decode(errors="replace").split("\0")[:-1]
    try:
        url = health_url(words)
        with urllib.request.urlopen(url, timeout=TIMEOUT_S):
            return 0
    except (ConfigError, OSError, http.client.HTTPException) as error:  # any other status too
        print(f"healthcheck: {error}", file=sys.stderr)
        return 1


def health_url(command_line: Sequence[str]) -> str:
    """Of `… streamkv serve FLAGS`; a command line without `serve` has no flags. ConfigError."""
    start = command_line.index("serve") if "serve" in command_line else len(command_line)
    given = ["serve", *with_dashes(command_line[start + 1 :])]
    config = Call.of(vars(build_parser().parse_args(given))).server_config()
    host = ANY_ADDRESS.get(config.bind_host, config.bind_host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.port}/health"


if __name__ == "__main__":
    sys.exit(main())
