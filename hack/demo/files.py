"""Serve one folder over HTTP, with byte ranges, beside the cluster: python -m demo.files FOLDER HOST PORT.

Stands where a model store stands in production. It ends with its parent.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel for a signal when the parent goes, so that no server outlives a demo that was killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == 1:
        sys.exit(1)


async def serve(folder: Path, host: str, port: int) -> None:
    """Serve until cancelled; print the port that was taken."""
    app = web.Application()
    app.router.add_static("/", folder)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    assert runner.addresses
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
