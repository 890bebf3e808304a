"""Gateways that know one another by a key: strangers, recordings, other keys, former versions, rotation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.fixtures.gateway import MODEL, FakeEngine, MakeEngine, MakeGateway, RunningGateway, Script
from tests.gateway.wire import ask, make_request, talk
from tests.support.ports import find_port

from millpond_gateway.app import peer_keys, peers
from millpond_gateway.app.channel import Channel, PeerIdentity, PeerKey, make_key
from millpond_gateway.app.peers import PeerMesh
from millpond_gateway.routing.wire import Batch, Digest, Held, Reserve, encode_message

SECRET, OTHER = b"a key of the namespace's gateways", b"another key of some other gateways"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds so that nobody is bothered takes less."""
    monkeypatch.setattr(peer_keys, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(peers, "_HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(peers, "_PROOF_SECONDS", 0.5)
    monkeypatch.setattr(peers, "_MAX_REFUSED_PAUSE_SECONDS", 0.2)


def get_mesh(gateway: RunningGateway) -> PeerMesh:
    mesh = gateway.process.mesh
    assert mesh is not None
    return mesh


async def start_two(
    make_gateway: MakeGateway, engine: FakeEngine, *files: Path | None
) -> tuple[list[RunningGateway], list[int]]:
    ports = [find_port(), find_port()]
    gateways = [
        await make_gateway(
            engine,
            options={"peer_port": own, "peers": (f"127.0.0.1:{other}",), "peer_key_file": file},
        )
        for own, other, file in zip(ports, reversed(ports), files, strict=True)
    ]
    return gateways, ports


async def until_synced(*gateways: RunningGateway) -> None:
    async with asyncio.timeout(30):
        while any(not get_mesh(gateway).shared.num_synced_peers() for gateway in gateways):
            await asyncio.sleep(0.02)


def count_refused(gateway: RunningGateway, reason: str) -> float:
    start = f'millpond_gateway_peer_connections_refused_total{{reason="{reason}"}}'
    lines = gateway.process.make_metrics_text().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(start))


async def until_refused(gateway: RunningGateway, reason: str, more_than: float = 0) -> None:
    async with asyncio.timeout(30):
        while count_refused(gateway, reason) <= more_than:
            await asyncio.sleep(0.02)


def count_queued(gateway: RunningGateway, engine: FakeEngine) -> int:
    return gateway.process.fleet.pools[MODEL].router.replica_load(engine.address).queued_tokens


def pack(frame: bytes) -> bytes:
    return len(frame).to_bytes(4, "big") + frame


def make_lies(engine: FakeEngine, origin: str = "forger/1", epoch: int = 1) -> list[bytes]:
    """Messages that would book a load on the engine."""
    reserve = Reserve(MODEL, 1, engine.address, None, 9000, 0, 10, 10, None, "", 1.0, b"")
    held = Held(MODEL, 7, 9000, {})
    return [
        encode_message(m) for m in (Batch(origin, epoch, 0, (reserve, held)), Digest(origin, epoch, 2, ()))
    ]


class Forger:
    """Speaks to a peer port as the holder of some key, or of none."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def read(self) -> bytes:
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        return await self.reader.readexactly(size)

    async def prove(self, me: PeerIdentity, key: PeerKey) -> Channel:
        channel = Channel(me, [key])
        self.writer.write(pack(channel.greet()))
        for answer in channel.receive(await self.read())[1]:
            self.writer.write(pack(answer))
        return channel

    async def until_closed(self) -> None:
        async with asyncio.timeout(30):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(65536):
                    pass


@contextlib.asynccontextmanager
async def forge(port: int) -> AsyncIterator[Forger]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Forger(reader, writer)
    finally:
        writer.close()


async def test_gateways_with_one_key_share_their_decisions(
    make_engine: MakeEngine, make_gateway: MakeGateway, key_file: Path
) -> None:
    engine = await make_engine(script=Script(hang=True))
    (here, there), _ = await start_two(make_gateway, engine, key_file, key_file)
    await until_synced(here, there)
    task = asyncio.create_task(talk(here, make_request(), seconds=30))
    async with asyncio.timeout(30):
        while not count_queued(there, engine):
            await asyncio.sleep(0.005)
    await here.process.stop()
    await task


async def test_a_stranger_at_a_gateway_s_address_has_no_effect(
    make_engine: MakeEngine, make_gateway: MakeGateway, key_file: Path, hurried: None
) -> None:
    engine = await make_engine()
    (here, there), ports = await start_two(make_gateway, engine, key_file, key_file)
    await until_synced(here, there)
    async with forge(ports[0]) as forger:
        for lie in make_lies(engine):
            forger.writer.write(pack(lie))
        await forger.until_closed()
    assert count_refused(here, "NoProof") == 1
    async with forge(ports[0]) as forger:
        channel = await forger.prove(PeerIdentity("forger/1", 1), PeerKey(make_key(SECRET).id, b"guessed"))
        for lie in make_lies(engine):
            forger.writer.write(pack(channel.seal(lie)))
        await forger.until_closed()
    assert count_refused(here, "BadSeal") == 1
    assert count_queued(here, engine) == 0
    assert here.process.fleet.pools[MODEL].num_held == 0
    assert get_mesh(here).shared.num_live_peers() == 1


async def test_a_recorded_connection_of_a_gateway_has_no_effect_when_it_is_played_again(
    make_engine: MakeEngine, make_gateway: MakeGateway, key_file: Path, hurried: None
) -> None:
    engine = await make_engine(script=Script(first_seconds=0.3))
    ports = [find_port(), find_port(), find_port()]
    recorded: list[bytes] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", ports[1])

        async def copy(
            source: asyncio.StreamReader, sink: asyncio.StreamWriter, seen: list[bytes] | None
        ) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    if seen is not None:
                        seen.append(data)
                    sink.write(data)
            sink.close()

        await asyncio.gather(copy(reader, back_writer, recorded), copy(back_reader, writer, None))

    between = await asyncio.start_server(relay, "127.0.0.1", ports[2])
    here = await make_gateway(
        engine,
        options={"peer_port": ports[0], "peers": (f"127.0.0.1:{ports[2]}",), "peer_key_file": key_file},
    )
    there = await make_gateway(
        engine,
        options={"peer_port": ports[1], "peers": (f"127.0.0.1:{ports[0]}",), "peer_key_file": key_file},
    )
    await until_synced(here, there)
    assert (await ask(here, make_request())).status == 200
    await here.process.stop()
    between.close()
    async with asyncio.timeout(30):
        while get_mesh(there).shared.num_live_peers():
            await asyncio.sleep(0.02)
    whole = b"".join(recorded)
    assert here.process.mesh is not None
    assert here.process.mesh.shared.origin.encode() in whole
    async with forge(ports[1]) as forger:
        forger.writer.write(whole)
        await forger.until_closed()
    assert count_refused(there, "BadSeal") == 1
    assert get_mesh(there).shared.num_live_peers() == 0
    assert count_queued(there, engine) == 0


async def test_a_holder_of_the_key_speaks_as_itself_only(
    make_engine: MakeEngine, make_gateway: MakeGateway, key_file: Path, hurried: None
) -> None:
    engine = await make_engine()
    (here, there), ports = await start_two(make_gateway, engine, key_file, key_file)
    await until_synced(here, there)
    real = get_mesh(there).shared
    lies = [("forger/1", 2), (real.origin, real.epoch), (real.origin, real.epoch + 1)]
    for number, (origin, epoch) in enumerate(lies):
        async with forge(ports[0]) as forger:
            channel = await forger.prove(PeerIdentity("forger/1", 1), make_key(SECRET))
            forger.writer.write(pack(channel.seal(make_lies(engine, origin, epoch)[0])))
            await forger.until_closed()
        assert count_refused(here, "ForeignOrigin") == number + 1
    assert count_queued(here, engine) == 0
    assert get_mesh(here).shared.num_live_peers() == 1


@pytest.mark.parametrize(("second", "reason"), [(OTHER, "UnknownKey"), (None, "NoProof")])
async def test_with_another_key_or_a_former_version_gateways_serve_apart(
    make_engine: MakeEngine,
    make_gateway: MakeGateway,
    key_file: Path,
    tmp_path: Path,
    hurried: None,
    second: bytes | None,
    reason: str,
) -> None:
    """A gateway without keys sends what those before keys sent."""
    engine = await make_engine(script=Script(num_chunks=20, chunk_seconds=0.02))
    file = None
    if second is not None:
        file = tmp_path / "other"
        file.write_bytes(second)
    (here, there), _ = await start_two(make_gateway, engine, key_file, file)
    await until_refused(here, reason)
    async with asyncio.timeout(30):
        while not (get_mesh(here).num_missing and get_mesh(there).num_missing):
            await asyncio.sleep(0.05)
    assert get_mesh(here).shared.num_live_peers() == 0
    answers = await asyncio.gather(*(ask(gateway, make_request()) for gateway in (here, there)))
    assert [answer.status for answer in answers] == [200, 200]
    if file is not None:
        file.write_bytes(SECRET)  # the Secret arrives in the other pod as well
        await until_synced(here, there)


async def test_refused_peers_come_again_slowly(
    make_engine: MakeEngine, make_gateway: MakeGateway, key_file: Path
) -> None:
    """A gateway of a former version calls again at once when it is cut off: it is left hanging instead."""
    here = await make_gateway(
        await make_engine(),
        options={"peer_port": (port := find_port()), "peers": ("127.0.0.1:9",), "peer_key_file": key_file},
    )
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with forge(port) as forger:
        forger.writer.write(pack(encode_message(Digest("former/1", 1, 0, ()))))
        await forger.until_closed()
    assert loop.time() - began > 4
    assert count_refused(here, "NoProof") == 1


async def test_callers_without_end_do_not_keep_gateways_out(
    make_engine: MakeEngine, make_gateway: MakeGateway, key_file: Path
) -> None:
    engine = await make_engine()
    port = find_port()
    here = await make_gateway(
        engine, options={"peer_port": port, "peers": ("127.0.0.1:9",), "peer_key_file": key_file}
    )
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(300):
            await stack.enter_async_context(forge(port))
        forger = await stack.enter_async_context(forge(port))
        channel = await forger.prove(PeerIdentity("true/1", 1), make_key(SECRET))
        forger.writer.write(pack(channel.seal(make_lies(engine, "true/1", 1)[0])))
        async with asyncio.timeout(30):
            while not count_queued(here, engine):
                await asyncio.sleep(0.01)
        assert get_mesh(here).num_links < 100


async def test_keys_are_renewed_while_gateways_serve(
    make_engine: MakeEngine,
    make_gateway: MakeGateway,
    tmp_path: Path,
    hurried: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The Secret's new content arrives in one pod before the other; neither ever misses the other."""
    monkeypatch.setattr(peer_keys, "KEEP_SECONDS", 2.0)
    files = [tmp_path / "here", tmp_path / "there"]
    for file in files:
        file.write_bytes(SECRET)
    (here, there), _ = await start_two(make_gateway, await make_engine(), *files)
    await until_synced(here, there)
    new = make_key(OTHER)

    async def until_known(gateway: RunningGateway) -> None:
        keys = get_mesh(gateway)._keys
        assert keys is not None
        while keys.current[0] != new:
            assert get_mesh(gateway).shared.num_synced_peers() == 1
            await asyncio.sleep(0.02)

    async with asyncio.timeout(30):
        for file, gateway in zip(files, (here, there), strict=True):
            file.write_bytes(OTHER)
            await until_known(gateway)

        def count_former() -> int:
            links = [link for gateway in (here, there) for link in get_mesh(gateway)._links]
            return sum(link.channel is None or link.channel.key != new for link in links)

        while count_former():  # what is not begun anew ends with the former key's time
            for gateway in (here, there):
                assert get_mesh(gateway).num_missing == 0
            await asyncio.sleep(0.02)
    await until_synced(here, there)
