"""Reading over HTTP: resumable, with stalls and refusals told apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from millpond_engine.fetch.errors import ChangedError, FetchReason, RefusedError, UnreachableError
from millpond_engine.fetch.sources import Opened, Reader

CONNECT_SECONDS = 15.0
_RETRYABLE = frozenset({408, 425, 429})


def make_client(stall_seconds: float) -> httpx.Client:
    """A client that follows redirects and gives up on a connection that is silent for `stall_seconds`."""
    timeout = httpx.Timeout(stall_seconds, connect=CONNECT_SECONDS)
    return httpx.Client(timeout=timeout, follow_redirects=True, headers={"Accept-Encoding": "identity"})


def make_reader(client: httpx.Client, url: str, headers: dict[str, str] | None = None) -> Reader:
    """Read one URL; credentials in `headers` go to its own host only, never along a redirect."""

    @contextmanager
    def read(offset: int, etag: str) -> Iterator[Opened]:
        sent = dict(headers or {})
        if offset:
            sent |= {"Range": f"bytes={offset}-", **({"If-Range": etag} if etag else {})}
        with translate_errors(url), client.stream("GET", url, headers=sent) as response:
            check_status(response, url)
            resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
            yield Opened(
                offset=_range_start(response) if resumed else 0,
                total_bytes=_total(response, resumed=resumed),
                etag=_validator(response),
                chunks=_guarded_chunks(response, url),
            )

    return read


@contextmanager
def translate_errors(url: str) -> Iterator[None]:
    """Turn the client's exceptions into ours."""
    try:
        yield
    except httpx.ReadTimeout as error:
        raise UnreachableError(
            FetchReason.STALLED,
            f"{public_url(url)} sent nothing for {error.request.extensions['timeout']['read']:g} s",
        ) from error
    except (httpx.TransportError, httpx.TooManyRedirects) as error:
        raise UnreachableError(
            FetchReason.UNREACHABLE, f"{public_url(url)}: {type(error).__name__}: {error}"
        ) from error
    except httpx.InvalidURL as error:
        raise RefusedError(FetchReason.INVALID_SOURCE, f"{public_url(url)} is not a URL: {error}") from error


def check_status(response: httpx.Response, url: str) -> None:
    """Let 2xx pass.

    Raises:
        RefusedError: for good; ChangedError: not the content it was; UnreachableError: worth another try.
    """
    code, where = response.status_code, public_url(url)
    if code in (200, 206):
        return
    if code in (401, 403):
        message = (
            f"{where} answered {code}: the model is private or gated; check the token in spec.model.secretRef"
        )
        raise RefusedError(FetchReason.UNAUTHORIZED, message)
    if code in (404, 410):
        raise RefusedError(
            FetchReason.NOT_FOUND, f"{where} answered {code}: check the source and the revision"
        )
    if code == 416:
        raise ChangedError(
            FetchReason.CHECKSUM_MISMATCH, f"{where} is shorter than what was fetched of it before"
        )
    if code in _RETRYABLE or code >= 500:
        raise UnreachableError(FetchReason.UNREACHABLE, f"{where} answered {code}", _retry_after(response))
    raise RefusedError(FetchReason.REFUSED, f"{where} answered {code}, which is not a file")


def public_url(url: str) -> str:
    """The URL without credentials and query, which may be signed."""
    parsed = httpx.URL(url)
    return str(parsed.copy_with(username=None, password=None, query=None, fragment=None))


def _guarded_chunks(response: httpx.Response, url: str) -> Iterator[bytes]:
    with translate_errors(url):
        yield from response.iter_raw()


def _range_start(response: httpx.Response) -> int:
    text = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("-")[0]
    return int(text) if text.isdigit() else 0


def _total(response: httpx.Response, *, resumed: bool) -> int | None:
    text = (
        response.headers.get("Content-Range", "").rpartition("/")[2]
        if resumed
        else response.headers.get("Content-Length", "")
    )
    return int(text) if text.isdigit() else None


def _validator(response: httpx.Response) -> str:
    """What If-Range takes: a strong entity tag, else the date."""
    etag = str(response.headers.get("ETag", ""))
    return etag if etag and not etag.startswith("W/") else str(response.headers.get("Last-Modified", ""))


def _retry_after(response: httpx.Response) -> float:
    text = response.headers.get("Retry-After", "")
    return float(text) if text.isdigit() else 0.0
