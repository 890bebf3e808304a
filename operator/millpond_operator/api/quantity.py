"""Kubernetes quantities: `500m`, `2`, `4Gi`, `1e3`.

The grammar is that of k8s.io/apimachinery `resource.Quantity`: a decimal number, then either a binary
suffix (Ki … Ei), a decimal suffix (m, k, M … E) or an exponent.
"""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

from millpond_operator.api.errors import QuantityError

_FORM = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))([eE][+-]?[0-9]{1,2}|[numkMGTPE]|[KMGTPE]i)?")
_SUFFIXES = {
    "n": Decimal("1e-9"),
    "u": Decimal("1e-6"),
    "m": Decimal("1e-3"),
    **{letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", start=1)},
    **{f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)},
}


def parse_quantity(text: str | int) -> Decimal:
    """Value of a quantity in base units (cores, bytes, devices).

    Raises:
        QuantityError: when the text has another form.
    """
    found = _FORM.fullmatch(str(text))
    if found is None:
        raise QuantityError(f"{text!r} is no quantity; write a number with a unit, such as 500m, 2 or 4Gi")
    number, suffix = found.groups()
    if suffix is None:
        return Decimal(number)
    if suffix in _SUFFIXES:
        return Decimal(number) * _SUFFIXES[suffix]
    return Decimal(number + suffix)


def parse_bytes(text: str | int) -> int:
    """Value of a quantity in whole bytes, rounded up as Kubernetes does.

    Raises:
        QuantityError: when the text is no quantity.
    """
    return int(parse_quantity(text).to_integral_value(rounding=ROUND_CEILING))
