"""``python -m tests.faults``: injects every fault of the table and says whether what has to hold does.

``--short`` takes a few of each kind; numbers select rows. The last line is one JSON object.
"""

import argparse
import importlib
import json
import logging
import pkgutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import tests.faults
from tests.faults.registry import ROWS, NotTried, Outcome

for module in pkgutil.iter_modules(tests.faults.__path__):
    if not module.name.startswith(("__main__", "test_", "conftest")):
        importlib.import_module(f"tests.faults.{module.name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rows; 0 if all that were tried hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few faults of each kind")
    parser.add_argument("rows", nargs="*", type=int, help="numbers of rows; all by default")
    options = parser.parse_args(arguments)
    outcomes: list[Outcome] = []
    chosen, num_tried, num_held = options.rows or sorted(ROWS), 0, 0
    for number in chosen:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="fsharp-faults-") as folder:
            num_tried += 1
            try:
                outcomes.append(ROWS[number].run(Path(folder), options.short))
                num_held += not outcomes[-1].lost
                word, text = "NOT HELD" if outcomes[-1].lost else "held", outcomes[-1].text
            except NotTried as reason:
                num_tried -= 1
                word, text = "not tried", str(reason)
            except Exception:
                traceback.print_exc()
                word, text = "NOT HELD", "see the traceback"
        seconds = time.perf_counter() - start
        print(f"{number:>3}  {ROWS[number].fault:<50}  {text:<70}  {word}  {seconds:.1f} s", flush=True)
    sums = {name: sum(getattr(each, name) for each in outcomes) for name in Outcome._fields[1:]}
    print(json.dumps({"rows": num_tried, "held": num_held, **sums}))
    return 0 if num_held == num_tried else 1


if __name__ == "__main__":
    logging.getLogger("fsharp").setLevel(logging.ERROR)  # what is incomplete is meant to be
    sys.exit(main())
