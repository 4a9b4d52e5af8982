"""Results as they are found: a benchmark that was interrupted goes on where it ended."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Record:
    """A file of JSON lines, each a result with all that the result depends on.

    Args:
        path: of the file, which need not exist; None keeps results in memory alone.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._found: dict[str, Any] = {}
        if path is not None and path.exists():
            whole, _, torn = path.read_text().rpartition("\n")
            if torn:  # by a process that was killed while it wrote
                path.write_text(f"{whole}\n" if whole else "")
            self._found = {_key(line["of"]): line["result"] for line in map(json.loads, whole.splitlines())}

    def __contains__(self, of: Any) -> bool:
        return _key(of) in self._found

    def once(self, of: Any, measure: Callable[[], Any]) -> Any:
        """Return the result of ``of`` in the file; if there is none, measure it and add a line."""
        if of not in self:
            self._found[_key(of)] = result = measure()
            if self._path is not None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with self._path.open("a") as file:
                    file.write(json.dumps({"of": of, "result": result}) + "\n")
        return self._found[_key(of)]


def _key(of: Any) -> str:
    return json.dumps(of, sort_keys=True)
