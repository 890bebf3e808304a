"""A TCP relay that can swallow what its connections carry without closing them: a network that died unnoticed."""

from __future__ import annotations

import asyncio
import contextlib
import threading


class SilentProxy:
    """Relays to one address from a port of its own, in a thread."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="silent proxy", daemon=True)
        self._generation = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0
        self.num_silenced = 0

    def start(self) -> None:
        """Listen."""
        self._thread.start()
        starting = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        )
        self._server = starting.result(10)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def silence(self) -> None:
        """Swallow everything on the connections that exist; new ones work."""
        self._generation += 1

    def stop(self) -> None:
        """End the thread; connections break, silenced ones too, so that nobody waits on them."""
        asyncio.run_coroutine_threadsafe(self._break(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _break(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        born = self._generation
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, far_writer}
        await asyncio.gather(self._relay(reader, far_writer, born), self._relay(far_reader, writer, born))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, born: int) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if born != self._generation:
                    self.num_silenced += 1
                    continue
                writer.write(data)
                await writer.drain()
        if born == self._generation:
            writer.close()
