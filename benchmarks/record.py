"""Results as they are found: a benchmark that was interrupted goes on where it ended."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Record:
    """A file of JSON lines, each a result with all that the result depends on, but for the code. The file need not exist.

    ``commit``: of the code that measures. ``commits``: those that results asked for were measured at.
    """

    def __init__(self, path: Path, commit: str) -> None:
        self._path, self._commit = path, commit
        self._found: dict[str, Any] = {}
        self.commits: set[str] = set()
        if path.exists():
            whole, _, torn = path.read_text().rpartition("\n")
            if torn:  # by a process that was killed while it wrote
                path.write_text(f"{whole}\n" if whole else "")
            self._found = {_key(line["of"]): line for line in map(json.loads, whole.splitlines())}

    def __contains__(self, of: Any) -> bool:
        return _key(of) in self._found

    def once(self, of: Any, measure: Callable[[], Any]) -> Any:
        """Return the result of ``of`` in the file; if there is none, measure it and add a line."""
        if of not in self:
            line = {"of": of, "commit": self._commit, "result": measure()}
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            self._found[_key(of)] = line
        line = self._found[_key(of)]
        self.commits.add(line["commit"])
        return line["result"]


def _key(of: Any) -> str:
    return json.dumps(of, sort_keys=True)
