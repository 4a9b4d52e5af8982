"""Digests: settings in labels of collectives as eight digits, and the settings that digests stand for, once ranks differ."""

import re
import zlib
from collections.abc import Iterable, Mapping

_KEPT = 1024
_texts: dict[str, str] = {}
"""By digest, the settings of this process's labels; of ranks that are threads, those of all of them."""


def digest(text: str, before: str = "") -> str:
    """Return eight digits that stand for settings, and remember the settings.

    Args:
        text: the settings, a field in each line as ``name=value``.
        before: the digest of what came before, which the new one depends on too.
    """
    found = f"{zlib.crc32(text.encode(), int(before or '0', 16)):08x}"
    _texts.pop(found, None)
    _texts[found] = text
    if len(_texts) > _KEPT:
        _texts.pop(next(iter(list(_texts))), None)
    return found


def meanings(labels: Iterable[str]) -> dict[str, str]:
    """Return the settings that this process knows, of all digests in labels."""
    found = dict.fromkeys(each for label in labels for each in re.findall(r"\b[0-9a-f]{8}\b", label))
    return {each: _texts[each] for each in found if each in _texts}


def differences(labels: Mapping[int, str], known: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the fields in which ranks differ whose labels have different digests, as rows of an error.

    Args:
        labels: by rank, that of one collective.
        known: settings by digest.
    """
    lines = {}
    for rank, label in labels.items():
        texts = [text for each, text in known.items() if each in label]
        lines[rank] = [line for text in texts for line in text.splitlines()]
    shared = set.intersection(*(set(each) for each in lines.values())) if lines else set()
    rows = {rank: [line for line in each if line not in shared] for rank, each in lines.items()}
    return [
        (f"rank {rank} has", "; ".join(each) or "(nothing more)") for rank, each in sorted(rows.items()) if any(rows.values())
    ]
