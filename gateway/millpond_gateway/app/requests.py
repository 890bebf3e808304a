"""What a request looks like to routing: its prompt's keys under the right scope, its class, its expected output."""

from __future__ import annotations

from typing import Final

import msgspec
import xxhash

from millpond_common.contract.blockkey import KeyScope, make_namespace
from millpond_gateway.app.judgement import compute_capacity
from millpond_gateway.app.prompt import make_prompt_keys
from millpond_gateway.proxy.dispatch import Call
from millpond_gateway.routing.keys import TokenEstimator
from millpond_gateway.routing.records import EndpointView, PromptKeys, RequestView
from millpond_gateway.world.records import PoolView as PoolSpec

_DEFAULT_OUTPUT_TOKENS: Final = 256
_MAX_SCOPES: Final = 4096


class RequestMaker:
    """Makes the requests of one pool and learns how long its prompts are."""

    def __init__(self, spec: PoolSpec) -> None:
        self._estimator = TokenEstimator()
        self._scopes: dict[tuple[str, str], tuple[KeyScope, int]] = {}
        self._block_tokens = spec.block_tokens
        self._capacity: int | None = None
        """Tokens of the largest request that some ready replica takes; None while unknown."""
        self.set_spec(spec)

    def set_spec(self, spec: PoolSpec) -> None:
        """Follow a changed pool."""
        self._spec = spec
        self._classes = {entry.name for entry in spec.classes}
        self._scopes.clear()

    def set_endpoints(self, endpoints: tuple[EndpointView, ...]) -> None:
        """Follow changed replicas: what fits, and of how many tokens a block is."""
        capacities = [compute_capacity(view) for view in endpoints if view.ready]
        self._capacity = (
            None if None in capacities else max(capacities, key=lambda entry: entry or 0, default=None)
        )
        block_tokens = endpoints[0].block_tokens if endpoints else self._spec.block_tokens
        if block_tokens != self._block_tokens:
            self._block_tokens = block_tokens
            self._scopes.clear()

    def learn(self, call: Call, prompt_tokens: int) -> None:
        """An engine counted a prompt."""
        self._estimator.observe(num_bytes=call.body.num_prompt_bytes, prompt_tokens=prompt_tokens)

    def make(self, call: Call, adapter: str) -> RequestView:
        """The request as routing sees it."""
        body, tenant = call.body, call.caller.tenant
        scope, root = self._find_scope(adapter, make_namespace(tenant, body.cache_salt))
        limit = body.max_output_tokens
        expected = _DEFAULT_OUTPUT_TOKENS if limit is None else min(limit, _DEFAULT_OUTPUT_TOKENS)
        known = body.service_tier in self._classes
        prompt = self._fit(make_prompt_keys(body, scope, root, self._estimator.bytes_per_token))
        return RequestView(
            request_id=call.id,
            prompt=prompt,
            max_output_tokens=limit,
            expected_output_tokens=expected * body.num_choices,
            budget_tokens=prompt.num_tokens + (limit or expected) * body.num_choices,
            traffic_class=body.service_tier if known else self._spec.default_class,
            tenant=tenant,
            session=xxhash.xxh3_64_intdigest(call.session) if call.session else None,
            adapter=adapter,
        )

    def _find_scope(self, adapter: str, namespace: str) -> tuple[KeyScope, int]:
        """A scope and its root."""
        found = self._scopes.get((adapter, namespace))
        if found is None:
            if len(self._scopes) >= _MAX_SCOPES:
                self._scopes.clear()  # salts are the clients' to choose
            scope = KeyScope(
                model=self._spec.model,
                block_tokens=self._block_tokens,
                adapter=adapter,
                namespace=namespace,
            )
            found = self._scopes[adapter, namespace] = (scope, scope.compute_root())
        return found

    def _fit(self, prompt: PromptKeys) -> PromptKeys:
        """A prompt that seems too long for every replica goes to the largest, which knows and says so exactly."""
        if self._capacity is None or prompt.num_tokens < self._capacity:
            return prompt
        return msgspec.structs.replace(prompt, num_tokens=max(1, self._capacity - 1))
