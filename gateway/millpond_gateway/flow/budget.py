"""Tenants' concurrency and tokens per minute: reserved up front, settled on usage.

The budget is a bucket that refills evenly. A request reserves prompt + max output tokens before it starts, so a
limit holds for the request that would break it and not only for the next one; what was not used comes back.
Requests of other gateway processes are charged through the shared decisions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from millpond_gateway.flow.records import Action, FlowReason, RemoteHolds, TenantPolicy, Verdict

CLAIM_SECONDS: Final = 0.1
"""By then every gateway knows what all others decided, on a busy machine as well."""
_ADMIT: Final = Verdict(Action.ADMIT, FlowReason.CAPACITY)
_CLAIM: Final = Verdict(Action.HOLD, FlowReason.TENANT_SHARE)
_MAX_TENANTS: Final = 65536
_MAX_RETRY_SECONDS: Final = 120


class _Account:
    __slots__ = ("level", "num_open", "num_remote_open", "recent", "updated_at")

    def __init__(self, level: float, now: float) -> None:
        self.level = level
        self.updated_at = now
        self.num_open = 0
        self.num_remote_open = 0
        self.recent: deque[tuple[float, int]] = deque()
        """When, and how many tokens, this process admitted that others may not know of yet."""


class Budgets:
    """Accounts of all tenants of one gateway process."""

    def __init__(self, policies: Iterable[TenantPolicy] = ()) -> None:
        self._policies: dict[str, TenantPolicy] = {}
        self._accounts: dict[str, _Account] = {}
        self._reserved: dict[str, tuple[str, int]] = {}
        self._remote_held: dict[str, RemoteHolds] = {}
        self.set_policies(policies)

    def set_policies(self, policies: Iterable[TenantPolicy]) -> None:
        """Follow changed limits; what is open stays accounted."""
        self._policies = {policy.name: policy for policy in policies}

    def reserve(
        self,
        request_id: str,
        tenant: str,
        tokens: int,
        now: float,
        *,
        num_sharers: int = 1,
        claimed_as: str | None = None,
    ) -> Verdict:
        """Take one slot and `tokens` from the tenant, or say what is missing; a refusal takes nothing.

        Args:
            request_id: names it until it is settled.
            tenant: who pays.
            tokens: most that it may use.
            now: seconds.
            num_sharers: gateway processes that admit requests of the tenant, this one included. What each admits is
                known to the others a moment later, so at once each takes its share of what is left; the answer HOLD
                asks for more: tell the others, and come again after CLAIM_SECONDS.
            claimed_as: this process's origin, at the second coming: then what is left goes to the claims in the order
                of their origins, which all gateways know.
        """
        policy = self._policies.get(tenant)
        account = self._account(tenant, policy, now)
        if policy is not None:
            first = claimed_as is None
            held = self._sum_remote(tenant, before=claimed_as) if self._remote_held else _NOTHING_HELD
            refusal = _find_refusal(policy, account, tokens, held, with_claims=not first)
            if refusal is not None:
                return refusal
            if (
                first
                and num_sharers > 1
                and not _is_within_share(policy, account, tokens, held, num_sharers, now)
            ):
                return _CLAIM
            account.level -= tokens
            if num_sharers > 1:
                account.recent.append((now, tokens))
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

    def set_remote_held(
        self,
        origin: str,
        requests: Mapping[str, int],
        tokens: Mapping[str, int] | None = None,
        claims: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """What another gateway process admitted and holds: bound to no replica yet, and open; and what it claims."""
        if requests or claims:
            self._remote_held[origin] = RemoteHolds(dict(requests), dict(tokens or {}), dict(claims or {}))
        else:
            self._remote_held.pop(origin, None)

    def _sum_remote(self, tenant: str, *, before: str | None) -> tuple[int, int, int, int]:
        """Requests and tokens that others hold, then those they claim, all or of origins before this one."""
        num = tokens = num_claimed = claimed = 0
        for origin, holds in self._remote_held.items():
            num += holds.requests.get(tenant, 0)
            tokens += holds.tokens.get(tenant, 0)
            if before is None or origin < before:
                count, amount = holds.claims.get(tenant, _NO_CLAIM)
                num_claimed += count
                claimed += amount
        return num, tokens, num_claimed, claimed

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


_NOTHING_HELD: Final = (0, 0, 0, 0)
_NO_CLAIM: Final = (0, 0)


def _find_refusal(
    policy: TenantPolicy,
    account: _Account,
    tokens: int,
    held: tuple[int, int, int, int],
    *,
    with_claims: bool,
) -> Verdict | None:
    num_held, held_tokens, num_claimed, claimed_tokens = held
    if policy.max_concurrency is not None:
        num_open = account.num_open + account.num_remote_open + num_held + (num_claimed if with_claims else 0)
        if num_open >= policy.max_concurrency:
            return Verdict(Action.SHED, FlowReason.TENANT_CONCURRENCY, 1)
    limit = policy.tokens_per_minute
    if limit is None:
        return None
    level = account.level - held_tokens
    if tokens <= level - (claimed_tokens if with_claims else 0):
        return None
    if tokens > limit:
        return Verdict(Action.SHED, FlowReason.TOKENS_NEVER_FIT)
    seconds = math.ceil((tokens - level) * 60.0 / limit)  # claims may yet come to nothing
    return Verdict(Action.SHED, FlowReason.TENANT_TOKENS, min(max(seconds, 1), _MAX_RETRY_SECONDS))


def _is_within_share(
    policy: TenantPolicy,
    account: _Account,
    tokens: int,
    held: tuple[int, int, int, int],
    num_sharers: int,
    now: float,
) -> bool:
    """Whether all gateways may admit as much as this one in the same moment without passing a limit together."""
    recent = account.recent
    while recent and recent[0][0] <= now - CLAIM_SECONDS:
        recent.popleft()
    num_held, held_tokens, num_claimed, claimed_tokens = held
    if policy.max_concurrency is not None:
        num_known = account.num_open + account.num_remote_open + num_held + num_claimed
        free = policy.max_concurrency - num_known + len(recent)
        if (len(recent) + 1) * num_sharers > free:
            return False
    if policy.tokens_per_minute is None:
        return True
    taken = sum(amount for _, amount in recent)
    free_tokens = account.level - held_tokens - claimed_tokens + taken
    return (taken + tokens) * num_sharers <= free_tokens
