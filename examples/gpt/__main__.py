"""The launcher: checks the options, then starts the processes as torchrun does."""

import sys

from examples.gpt.options import parse
from examples.launch_example import start

if __name__ == "__main__":
    argv = sys.argv[1:]
    status = start(parse(argv).nproc, "-m", "examples.gpt.worker", *argv)
    if status and sys.stdout.isatty():
        print("\x1b[?25h", end="", flush=True)  # show the cursor: a worker that was killed could not
    sys.exit(status)
