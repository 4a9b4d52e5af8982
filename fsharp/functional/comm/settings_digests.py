"""Digests of settings in labels of collectives, which ranks compare. If labels differ, the error shows the settings."""

import re
import zlib
from collections import deque
from collections.abc import Iterable, Mapping

_MAX_KEPT_DIGESTS = 1024
_MAX_KEPT_LINES = 512
_lines_by_digest: dict[str, tuple[str, ...]] = {}
"""By digest, the settings from which it was made. Simulated ranks share this table, as they are threads."""


def settings_digest(text: str) -> str:
    """Return a digest of ``text``, which has lines ``name=value``.

    ``text`` is kept for :func:`settings_texts_by_digest`, with the texts of the newest 1,024 digests.
    """
    return _keep_lines(_extend_digest("", text), (text,))


def _extend_digest(earlier_digest: str, text: str) -> str:
    data = f"{text}\n".encode()
    return f"{zlib.crc32(data, int(earlier_digest or '0', 16)):08x}"


def _keep_lines(digest: str, lines: tuple[str, ...]) -> str:
    if not lines:
        return digest
    _lines_by_digest.pop(digest, None)
    _lines_by_digest[digest] = lines
    if len(_lines_by_digest) > _MAX_KEPT_DIGESTS:
        _lines_by_digest.pop(next(iter(list(_lines_by_digest))), None)
    return digest


class SettingsHistory:
    """A digest of all settings that were added so far, for labels of collectives, and the newest settings as text.

    Settings have to be equal on all ranks. The digest does not depend on where steps begin, as one rank alone may run steps
    that have no collectives. :attr:`text_to_compare` has at most the newest 512 settings.
    """

    def __init__(self) -> None:
        self._digest = ""
        self._before_step, self._newest = deque[str](maxlen=_MAX_KEPT_LINES), deque[str](maxlen=_MAX_KEPT_LINES)

    @property
    def digest(self) -> str:
        """A digest of all settings so far; empty if there are none. If digests of ranks differ, the kept texts show where."""
        return _keep_lines(self._digest, tuple(self._newest or self._before_step)) if self._digest else ""

    @property
    def label_suffix(self) -> str:
        """Text with the digest, for the end of a label; empty if there are no settings."""
        return f" of history {digest}" if (digest := self.digest) else ""

    @property
    def text_to_compare(self) -> str:
        """The settings that are kept as text, as lines ``name=value``, and the digest of all settings."""
        return "\n".join([*self._newest, f"history={self._digest}"])

    def add_settings(self, text: str) -> None:
        """Add settings, as lines ``name=value``."""
        self._digest = _extend_digest(self._digest, text)
        self._newest.append(text)

    def begin_step(self) -> None:
        """Record that a step begins: its first labels compare all settings so far, and later labels only those added since."""
        self._before_step, self._newest = self._newest, deque[str](maxlen=_MAX_KEPT_LINES)

    def undo_begin_step(self) -> None:
        """Undo the last :meth:`begin_step`, for a step without collectives, which has compared nothing."""
        self._before_step.extend(self._newest)
        self._newest, self._before_step = self._before_step, deque[str](maxlen=_MAX_KEPT_LINES)


def settings_texts_by_digest(labels: Iterable[str]) -> dict[str, str]:
    """Return the texts from which the digests in ``labels`` were made, by digest, as far as this process has kept them."""
    found = dict.fromkeys(each for label in labels for each in re.findall(r"\b[0-9a-f]{8}\b", label))
    return {each: "\n".join(_lines_by_digest[each]) for each in found if each in _lines_by_digest}


def differing_settings_rows(label_by_rank: Mapping[int, str], text_by_digest: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return a row ``("rank 3 has", settings)`` for each rank, with the settings that not all ranks have.

    If all ranks have equal settings, there are no rows. ``label_by_rank``: for each rank the label of its collective, which has
    digests of settings. ``text_by_digest``: result of :func:`settings_texts_by_digest`.
    """
    lines = {
        rank: [line for each, text in text_by_digest.items() if each in label for line in text.splitlines()]
        for rank, label in label_by_rank.items()
    }
    shared = set.intersection(*(set(each) for each in lines.values())) if lines else set()
    rows = {rank: [line for line in each if line not in shared] for rank, each in lines.items()}
    return [
        (f"rank {rank} has", "; ".join(each) or "(nothing more)") for rank, each in sorted(rows.items()) if any(rows.values())
    ]
