"""Values of command line flags: what cannot work is refused before anything starts, with what can.

Every function raises `argparse.ArgumentTypeError`; the flag's name is added by the parser.
"""

from __future__ import annotations

import argparse
import math

from millpond_common.contract.ports import MAX_GATEWAY_WORKERS
from millpond_gateway.proxy.connections import split_address


def parse_port(text: str) -> int:
    """A TCP port; 0 lets the system choose."""
    port = parse_count(text)
    if port > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r}: ports are 0 to 65535")
    return port


def parse_count(text: str) -> int:
    """A whole number, zero or more."""
    try:
        count = int(text)
    except ValueError:
        count = -1
    if count < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, 0 or more")
    return count


def parse_positive_count(text: str) -> int:
    """A whole number above zero."""
    count = parse_count(text)
    if count == 0:
        raise argparse.ArgumentTypeError("0: write a whole number above 0")
    return count


def parse_workers(text: str) -> int:
    """Worker processes."""
    count = parse_positive_count(text)
    if count > MAX_GATEWAY_WORKERS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: at most {MAX_GATEWAY_WORKERS} workers; add gateways instead"
        )
    return count


def parse_seconds(text: str) -> float:
    """A finite number, zero or more."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write a number, 0 or more")
    return seconds


def parse_positive_seconds(text: str) -> float:
    """A finite number above zero."""
    seconds = parse_seconds(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError("0: write a number above 0")
    return seconds


def parse_address(text: str) -> str:
    """`HOST:PORT`, an IPv6 host in brackets."""
    try:
        host, port = split_address(text)
    except ValueError:
        host, port = "", 0
    bare = text.rpartition(":")[0]
    if not host or not 0 < port <= 65_535 or (":" in bare and not bare.startswith("[")):
        raise argparse.ArgumentTypeError(f"{text!r}: write HOST:PORT, for example 10.0.0.7:8082")
    return text
