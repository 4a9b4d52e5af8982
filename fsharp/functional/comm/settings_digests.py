"""Digests of settings, for labels of collectives. If labels of ranks differ, the error shows the settings by digest."""

import re
import zlib
from collections.abc import Iterable, Mapping

_MAX_KEPT_TEXTS = 1024
_text_by_digest: dict[str, str] = {}
"""Settings in labels of this process, by digest. Simulated ranks share this table, as they are threads."""


def settings_digest(text: str, earlier_digest: str = "") -> str:
    """Return a digest of settings, lines ``name=value``, after earlier ones; keep them for :func:`settings_by_digest`."""
    found = f"{zlib.crc32(text.encode(), int(earlier_digest or '0', 16)):08x}"
    _text_by_digest.pop(found, None)
    _text_by_digest[found] = text
    if len(_text_by_digest) > _MAX_KEPT_TEXTS:
        _text_by_digest.pop(next(iter(list(_text_by_digest))), None)
    return found


class SettingsHistory:
    """Settings that have to be equal on all ranks: a digest of those up to the last step, and the settings since then."""

    def __init__(self) -> None:
        self._earlier, self._lines = "", list[str]()
        self._before = self._earlier, self._lines  # at the begin of the last step

    @property
    def digest(self) -> str:
        """A digest of all settings so far; empty if there are none."""
        return settings_digest("\n".join(self._lines), self._earlier) if self._lines else self._earlier

    @property
    def text(self) -> str:
        """The digest and the later settings, a field in each line as ``name=value``."""
        return "\n".join([f"history={self._earlier}", *self._lines])

    def add_settings(self, text: str) -> None:
        """Add settings, a field in each line as ``name=value``."""
        self._lines.append(text)

    def begin_step(self) -> None:
        """Begin a step: all settings so far enter the digest."""
        self._before = self._earlier, self._lines
        self._earlier, self._lines = self.digest, []

    def undo_begin_step(self) -> None:
        """Undo :meth:`begin_step`, and keep the settings added since then."""
        self._earlier, lines = self._before
        self._lines = lines + self._lines


def settings_by_digest(labels: Iterable[str]) -> dict[str, str]:
    """Return the settings behind the digests in ``labels``, by digest, as far as this process knows them."""
    found = dict.fromkeys(each for label in labels for each in re.findall(r"\b[0-9a-f]{8}\b", label))
    return {each: _text_by_digest[each] for each in found if each in _text_by_digest}


def differing_settings(labels: Mapping[int, str], known: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the settings that not all ranks share, as a row for each rank. ``labels`` is by rank, ``known`` by digest."""
    lines = {}
    for rank, label in labels.items():
        texts = [text for each, text in known.items() if each in label]
        lines[rank] = [line for text in texts for line in text.splitlines()]
    shared = set.intersection(*(set(each) for each in lines.values())) if lines else set()
    rows = {rank: [line for line in each if line not in shared] for rank, each in lines.items()}
    return [
        (f"rank {rank} has", "; ".join(each) or "(nothing more)") for rank, each in sorted(rows.items()) if any(rows.values())
    ]
