from __future__ import annotations

from decimal import Decimal

import pytest

from millpond_operator.api import QuantityError, parse_bytes, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", "0"),
        (2, "2"),
        ("500m", "0.5"),
        ("1.5", "1.5"),
        (".5Gi", "536870912"),
        ("1e3", "1000"),
        ("12E-1", "1.2"),
        ("2E", "2e18"),
        ("4Gi", "4294967296"),
        ("4G", "4000000000"),
        ("100n", "1e-7"),
        ("+1Ki", "1024"),
        ("1Ei", "1152921504606846976"),
    ],
)
def test_reads_the_forms_of_kubernetes(text: str | int, value: str) -> None:
    assert parse_quantity(text) == Decimal(value)


@pytest.mark.parametrize(
    "text", ["", "Gi", "1gi", "1 Gi", "one", "1e", "1KiB", "--1", "1e3Gi", "NaN", "1_000"]
)
def test_refuses_what_kubernetes_refuses(text: str) -> None:
    with pytest.raises(QuantityError, match="write a number with a unit"):
        parse_quantity(text)


def test_part_of_a_byte_rounds_up() -> None:
    assert parse_bytes("1500m") == 2
    assert parse_bytes("1.5Ki") == 1536
