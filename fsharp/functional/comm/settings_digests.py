"""Digests of settings in labels of collectives, which ranks compare. If labels differ, the error shows the settings."""

import re
import zlib
from collections.abc import Iterable, Mapping

_MAX_KEPT_TEXTS = 1024
_text_by_digest: dict[str, str] = {}
"""By digest, the settings from which it was made. Simulated ranks share this table, as they are threads."""


def settings_digest(text: str, earlier_digest: str = "") -> str:
    """Return a digest of ``earlier_digest`` and of ``text``, which has lines ``name=value``: see :class:`SettingsHistory`.

    ``text`` is kept for :func:`settings_texts_by_digest`, with the texts of the newest 1,024 digests.
    """
    found = f"{zlib.crc32(text.encode(), int(earlier_digest or '0', 16)):08x}"
    _text_by_digest.pop(found, None)
    _text_by_digest[found] = text
    if len(_text_by_digest) > _MAX_KEPT_TEXTS:
        _text_by_digest.pop(next(iter(list(_text_by_digest))), None)
    return found


class SettingsHistory:
    """All settings so far that have to be equal on all ranks, such as ``lr=0.1``: as text, and as a digest.

    Labels of collectives have the digest. So if settings differ, labels differ, and ranks get an error. In
    :attr:`text_to_compare` a digest stands for all settings from before the last :meth:`compact_to_digest`.
    """

    def __init__(self) -> None:
        self._earlier, self._lines = "", list[str]()
        self._before = self._earlier, self._lines  # at the begin of the last step

    @property
    def digest(self) -> str:
        """A digest of all settings so far; empty if there are none."""
        return settings_digest("\n".join(self._lines), self._earlier) if self._lines else self._earlier

    @property
    def text_to_compare(self) -> str:
        """The digest of all settings before the last :meth:`compact_to_digest`, and later settings, as lines ``name=value``."""
        return "\n".join([f"history={self._earlier}", *self._lines])

    def add_settings(self, text: str) -> None:
        """Add settings, as lines ``name=value``."""
        self._lines.append(text)

    def compact_to_digest(self) -> None:
        """Replace the text of all settings so far by their digest. Each step begins with this call."""
        self._before = self._earlier, self._lines
        self._earlier, self._lines = self.digest, []

    def undo_compact_to_digest(self) -> None:
        """Undo the last :meth:`compact_to_digest`, for a step without collectives. Settings that were added since stay."""
        self._earlier, lines = self._before
        self._lines = lines + self._lines


def settings_texts_by_digest(labels: Iterable[str]) -> dict[str, str]:
    """Return the texts from which the digests in ``labels`` were made, by digest, as far as this process has kept them."""
    found = dict.fromkeys(each for label in labels for each in re.findall(r"\b[0-9a-f]{8}\b", label))
    return {each: _text_by_digest[each] for each in found if each in _text_by_digest}


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
