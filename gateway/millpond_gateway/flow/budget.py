"""Tenants' concurrency and tokens per minute: reserved up front, settled on usage.

The budget is a bucket that refills evenly. A request reserves prompt + max output tokens before it starts, so a
limit holds for the request that would break it and not only for the next one; what was not used comes back.
Requests of other gateway processes are charged through the shared decisions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final

from millpond_gateway.flow.records import Action, FlowReason, TenantPolicy, Verdict

_ADMIT: Final = Verdict(Action.ADMIT, FlowReason.CAPACITY)
_MAX_TENANTS: Final = 65536
_MAX_RETRY_SECONDS: Final = 120


class _Account:
    __slots__ = ("level", "num_open", "num_remote_open", "updated_at")

    def __init__(self, level: float, now: float) -> None:
        self.level = level
        self.updated_at = now
        self.num_open = 0
        self.num_remote_open = 0


class Budgets:
    """Accounts of all tenants of one gateway process."""

    def __init__(self, policies: Iterable[TenantPolicy] = ()) -> None:
        self._policies: dict[str, TenantPolicy] = {}
        self._accounts: dict[str, _Account] = {}
        self._reserved: dict[str, tuple[str, int]] = {}
        self._remote_held: dict[str, dict[str, int]] = {}
        self.set_policies(policies)

    def set_policies(self, policies: Iterable[TenantPolicy]) -> None:
        """Follow changed limits; what is open stays accounted."""
        self._policies = {policy.name: policy for policy in policies}

    def reserve(self, request_id: str, tenant: str, tokens: int, now: float) -> Verdict:
        """Take one slot and `tokens` from the tenant, or say what is missing; a refusal takes nothing."""
        policy = self._policies.get(tenant)
        account = self._account(tenant, policy, now)
        if policy is not None:
            num_held = sum(tenants.get(tenant, 0) for tenants in self._remote_held.values())
            refusal = _find_refusal(policy, account, tokens, num_held)
            if refusal is not None:
                return refusal
            account.level -= tokens
        account.num_open += 1
        self._reserved[request_id] = (tenant, tokens)
        return _ADMIT

    def settle(self, request_id: str, used_tokens: int, now: float) -> bool:
        """Give back what was not used and the slot; False when it was settled before.

        Usage beyond the reservation is charged, and the debt delays the tenant's next request.
        """
        tenant, tokens = self._reserved.pop(request_id, (None, 0))
        if tenant is None:
            return False
        policy = self._policies.get(tenant)
        account = self._account(tenant, policy, now)
        account.num_open -= 1
        if policy is not None and policy.tokens_per_minute is not None:
            account.level = min(account.level + tokens - used_tokens, policy.tokens_per_minute)
        return True

    def charge_remote(self, tenant: str, tokens: int, now: float) -> None:
        """Account for a request that another gateway process admitted."""
        account = self._account(tenant, self._policies.get(tenant), now)
        account.num_remote_open += 1
        account.level -= tokens

    def release_remote(self, tenant: str, now: float, *, unused_tokens: int = 0) -> None:
        """A request of another gateway process ended; what it had reserved and did not use comes back.

        Negative: it used more than that.
        """
        policy = self._policies.get(tenant)
        account = self._account(tenant, policy, now)
        account.num_remote_open = max(account.num_remote_open - 1, 0)
        if policy is not None and policy.tokens_per_minute is not None:
            account.level = min(account.level + unused_tokens, policy.tokens_per_minute)

    def set_remote_held(self, origin: str, tenants: Mapping[str, int]) -> None:
        """Requests that another gateway process admitted and holds: they are bound to no replica yet, and open."""
        if tenants:
            self._remote_held[origin] = dict(tenants)
        else:
            self._remote_held.pop(origin, None)

    def num_open(self, tenant: str) -> int:
        """Requests of the tenant that this process has open."""
        account = self._accounts.get(tenant)
        return 0 if account is None else account.num_open

    def level(self, tenant: str, now: float) -> float | None:
        """Tokens the tenant may still reserve now; None without a limit."""
        policy = self._policies.get(tenant)
        if policy is None or policy.tokens_per_minute is None:
            return None
        return self._account(tenant, policy, now).level

    def _account(self, tenant: str, policy: TenantPolicy | None, now: float) -> _Account:
        limit = policy.tokens_per_minute if policy is not None else None
        account = self._accounts.get(tenant)
        if account is None:
            self._forget_idle()
            account = self._accounts[tenant] = _Account(float(limit or 0), now)
        if limit is not None:
            elapsed = max(now - account.updated_at, 0.0)
            account.level = min(account.level + elapsed * limit / 60.0, float(limit))
        account.updated_at = max(now, account.updated_at)
        return account

    def _forget_idle(self) -> None:
        """Keep memory bounded where tenants are unknown names: idle accounts without a limit go first."""
        if len(self._accounts) < _MAX_TENANTS:
            return
        self._accounts = {
            tenant: account
            for tenant, account in self._accounts.items()
            if account.num_open or account.num_remote_open or tenant in self._policies
        }


def _find_refusal(
    policy: TenantPolicy, account: _Account, tokens: int, num_remote_held: int
) -> Verdict | None:
    if policy.max_concurrency is not None:
        num_open = account.num_open + account.num_remote_open + num_remote_held
        if num_open >= policy.max_concurrency:
            return Verdict(Action.SHED, FlowReason.TENANT_CONCURRENCY, 1)
    limit = policy.tokens_per_minute
    if limit is None or tokens <= account.level:
        return None
    if tokens > limit:
        return Verdict(Action.SHED, FlowReason.TOKENS_NEVER_FIT)
    seconds = math.ceil((tokens - account.level) * 60.0 / limit)
    return Verdict(Action.SHED, FlowReason.TENANT_TOKENS, min(max(seconds, 1), _MAX_RETRY_SECONDS))
