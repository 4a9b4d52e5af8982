"""``python -m fsharp``: the command ``fsharp``."""

import sys

from fsharp.cli import main

if __name__ == "__main__":
    sys.exit(main())
