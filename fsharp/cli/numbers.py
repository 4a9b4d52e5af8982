"""Checks of the numbers that options of the command have."""

import math

from fsharp.errors import OptionError


def check_number(option: str, value: float, least: float, most: float = math.inf, *, why: str = "") -> None:
    """Raise an OptionError, which names ``option``, unless ``least <= value <= most``. ``why``: the reason, for the message."""
    if not least <= value <= most:
        expected = f"at least {least:,}" if math.isinf(most) else f"{least:,} to {most:,}"
        raise OptionError(f"{option} is {value:,}, expected {expected}{f': {why}' * bool(why)}.")
