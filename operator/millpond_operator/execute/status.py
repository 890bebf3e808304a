"""The one status write of a reconcile."""

from __future__ import annotations

from millpond_common.contract.labels import STATUS_MANAGER
from millpond_operator.api.pool import PoolMetadata
from millpond_operator.api.status import PoolStatus, dump_status
from millpond_operator.clients.kube import KubeClient
from millpond_operator.desired.kinds import POOL
from millpond_operator.execute.executor import Fence, Remember


class StatusWriter:
    """Applies whole statuses under a field manager of their own."""

    def __init__(self, kube: KubeClient, *, fence: Fence, remember: Remember) -> None:
        self._kube = kube
        self._fence = fence
        self._remember = remember

    async def write(self, pool: PoolMetadata, status: PoolStatus) -> None:
        """Replace the status.

        Raises:
            KubeError: the write was refused.
            NotLeaderError: another instance leads by now.
        """
        body = {
            "apiVersion": POOL.api_version,
            "kind": POOL.name,
            "metadata": {"name": pool.name, "uid": pool.uid},
            "status": dump_status(status),
        }
        self._fence()
        answer = await self._kube.apply(
            POOL, pool.namespace, pool.name, body, manager=STATUS_MANAGER, force=True, subresource="status"
        )
        self._remember(POOL, answer)
