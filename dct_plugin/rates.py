"""Rates of links, in the notation of ``tc``: ``100mbit``; ``100 Mbit/s`` and ``100Mbps`` are read, too."""

from __future__ import annotations

import re
from collections.abc import Sequence

import typer

_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
#: A small b in ``Gb/s`` stands for bits; bytes per second are not read.
_RATE = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kKmMgG])((?i:bits?)(/s|ps)?|b/s|bps)")


def check_rate(rate: str, *, also: str | None = None) -> str:
    """Return a rate in the notation of ``tc``, or the word ``also``.

    Raises:
        ValueError: It is neither; the message says what is allowed.
    """
    if rate == also:
        return rate
    if match := _RATE.fullmatch(rate.strip()):
        number, unit = match[1], f"{match[2].lower()}bit"
        if float(number) * _UNITS[unit] >= 1e5:
            return f"{number}{unit}"
    units = ", ".join(_UNITS)
    raise ValueError(
        f"{rate!r}: must be a number with one of {units}, at least 100kbit (such as 100mbit or 1Gbit/s)"
        + (f", or {also}" if also else "")
    )


def check_rates(rates: Sequence[str], *, also: str | None = None, option: str) -> list[str]:
    """Return the different ones of ``rates`` in the notation of ``tc``; a command's ``option`` gave them.

    Raises:
        typer.BadParameter: One is no rate.
    """
    try:
        return list(dict.fromkeys(check_rate(rate, also=also) for rate in rates))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def bits_per_second(rate: str) -> float:
    """Return the bits per second of a rate in the notation of ``tc``."""
    return float(rate[:-4]) * _UNITS[rate[-4:].lower()]


def rate_name(rate: str) -> str:
    """Return ``100 Mbit/s`` for ``100mbit``, and any other text as it is."""
    number, unit = rate[:-4], rate[-4:].lower()
    return f"{number} {unit.capitalize()}/s" if unit in _UNITS else rate
