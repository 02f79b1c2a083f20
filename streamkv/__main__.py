"""`python -m streamkv` is the `streamkv` command."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
