"""`python -m streamkv.entrypoints.openai.api_server` is `streamkv serve`, with the same flags."""

from __future__ import annotations

import sys

from ...__main__ import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
