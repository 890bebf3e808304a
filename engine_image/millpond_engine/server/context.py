"""What every handler needs, made once at start-up."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from aiohttp import web

from millpond_common.contract.engine_config import EngineConfig
from millpond_common.contract.openai import ErrorCode
from millpond_engine.grammar.service import GrammarService
from millpond_engine.loop.kv_publisher import KvPublisher
from millpond_engine.loop.thread import EngineThread
from millpond_engine.server.errors import make_error
from millpond_engine.server.lifecycle import Lifecycle
from millpond_engine.server.limits import ServerLimits
from millpond_engine.server.registry import RequestRegistry
from millpond_engine.text.tokenizer import Tokenizer, measure_longest_token


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Shared by all handlers of one process."""

    config: EngineConfig
    tokenizer: Tokenizer
    thread: EngineThread
    lifecycle: Lifecycle
    epoch: str
    version: str
    started_at: float
    """Monotonic."""
    created: int
    """Unix time of the start, for model cards."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    executor: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=2, thread_name_prefix="text")
    )
    """Templates and tokenization, off the event loop."""
    registry: RequestRegistry = field(default_factory=RequestRegistry)
    allow_request_template: bool = False
    """Clients may bring their own chat template."""

    model_root: str = ""
    """A name or path from which a client can load the tokenizer."""
    events: KvPublisher | None = None
    grammars: GrammarService | None = None
    """Absent where no grammar library is installed."""
    longest_token_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "longest_token_bytes", measure_longest_token(self.tokenizer))

    @property
    def events_sequence(self) -> int:
        """Number of the newest batch of KV events."""
        return self.events.sequence if self.events else 0

    @property
    def max_model_tokens(self) -> int:
        """Longest sequence the loaded model serves."""
        info = self.thread.snapshot.info
        return info.max_model_tokens if info else self.config.max_model_tokens

    @property
    def vocabulary_size(self) -> int:
        """Ids that both the tokenizer and the model's matrices have: tokens added to one alone cannot be asked for."""
        info, own = self.thread.snapshot.info, self.tokenizer.facts.vocabulary_size
        return min(own, info.vocabulary_size) if info else own

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens of the vocabulary that end a text: those of the model's configuration and of its tokenizer."""
        info = self.thread.snapshot.info
        known = (*(info.eos_token_ids if info else ()), *self.tokenizer.facts.eos_token_ids)
        return tuple(dict.fromkeys(token for token in known if token < self.vocabulary_size))

    def find_model(self, name: str | None) -> tuple[str, str]:
        """(served name, adapter) for the `model` field.

        Raises:
            RequestError: unknown model.
        """
        if name is None or name == self.config.model_name:
            return self.config.model_name, ""
        for adapter in self.config.adapters:
            if adapter.name == name:
                return name, adapter.name
        shown = name[:100].encode("ascii", "backslashreplace").decode()
        raise make_error(ErrorCode.MODEL_NOT_FOUND, f"the model {shown!r} is not served here", param="model")


REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
"""Of this HTTP request: the caller's, or one made here."""
CONTEXT: web.AppKey[ServerContext] = web.AppKey("context", ServerContext)
