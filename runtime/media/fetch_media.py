"""Fetches the media of requests over HTTP, from the hosts that the operator allows.

A URL comes from a client, so it must not reach services of the server's own network. A host must be
in `images.domains`. Its name is resolved once, and every address that it has must be public. The
connection goes to an address that was checked, so a second answer of the name server has no effect.
Redirects are not followed, and proxies of the environment are not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence

import httpx

from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.prompt_media import FetchWanted, MediaLimits
from ostinato.runtime.media_files.media_kinds import MediaKind, most_bytes
from ostinato.runtime.media_files.media_urls import FetchTarget, UrlWords, fetch_target, url_words

__all__ = ("MediaFetcher", "Resolve", "is_public", "resolve_host")

# Fetches at a time. Images do not wait for videos.
_AT_ONCE = {MediaKind.image: 8, MediaKind.video: 4, MediaKind.sound: 8}
# A request fetches at most so many times `max_mib` of each kind.
_LARGEST = {MediaKind.image: 4, MediaKind.video: 2, MediaKind.sound: 4}
_MAX_TRIES = 3  # addresses of a host to which a connection is tried
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_HEADERS = {"User-Agent": "ostinato", "Accept-Encoding": "identity"}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host and port; raises OSError if there are none."""


async def resolve_host(host: str, port: int) -> list[str]:
    """The addresses of a host, from the system's resolver. See `Resolve`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(one[4][0]) for one in found))


def is_public(address: Address) -> bool:
    """Whether an address is globally routable. An IPv4 address inside an IPv6 address counts."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast


class MediaFetcher:
    """Fetches media. All methods run on one event loop.

    Args:
        limits: the hosts and the time limit, which are those of images, and the largest sizes.
        resolve: finds the addresses of a host.
        is_allowed: whether a connection to an address may be made. An address that `domains` lists
            is always allowed.
    """

    def __init__(
        self,
        limits: MediaLimits,
        resolve: Resolve = resolve_host,
        is_allowed: Callable[[Address], bool] = is_public,
    ) -> None:
        self._limits = limits
        self._resolve = resolve
        self._is_allowed = is_allowed
        self._slots = {kind: asyncio.Semaphore(number) for kind, number in _AT_ONCE.items()}
        self._max_bytes = {
            MediaKind.image: most_bytes(limits.images),
            MediaKind.video: most_bytes(limits.video),
            MediaKind.sound: most_bytes(limits.audio),
        }
        self._tls: ssl.SSLContext | None = None

    async def fetch(self, wanted: Mapping[str, FetchWanted]) -> dict[str, bytes]:
        """The bodies of URLs. Cancelling the call ends all fetches.

        At most 8 images, 4 videos and 8 sounds are fetched at a time, those of other calls
        included.

        Args:
            wanted: by URL.

        Raises:
            InvalidRequestError: a URL is refused, or its content cannot be fetched. The text names
                the medium and the cause.
        """
        budgets = {
            kind: _Budget(url_words(kind), self._max_bytes[kind], times)
            for kind, times in _LARGEST.items()
        }
        targets = [
            fetch_target(url, self._limits.images.domains, one.name, one.kind)
            for url, one in wanted.items()
        ]
        tasks = [
            asyncio.ensure_future(
                self._one(target, one.name, budgets[one.kind], self._slots[one.kind])
            )
            for target, one in zip(targets, wanted.values(), strict=True)
        ]
        try:
            bodies = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return dict(zip(wanted, bodies, strict=True))

    async def _one(
        self, target: FetchTarget, name: str, budget: _Budget, slots: asyncio.Semaphore
    ) -> bytes:
        seconds = self._limits.images.fetch_timeout_s
        async with slots:
            try:
                async with asyncio.timeout(seconds):
                    addresses = await self._addresses(target, name, budget)
                    return await self._get(target, addresses, name, budget)
            except TimeoutError as error:
                problem = f"was not fetched in images.fetch_timeout_s={seconds:g} s"
                raise budget.refused(name, target, problem) from error
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
                problem = f"cannot be fetched: {str(error) or type(error).__name__}"
                raise budget.refused(name, target, problem) from error

    async def _addresses(self, target: FetchTarget, name: str, budget: _Budget) -> list[str]:
        """The addresses of the host, all of which were checked."""
        if target.is_literal:  # `fetch_target` has found it in `domains`
            return [target.host]
        addresses = await self._resolve(target.host, target.port)
        for text in addresses:
            if not self._is_allowed(ipaddress.ip_address(text.partition("%")[0])):
                problem = (
                    f"has the address {text}, which is not public; to allow it, write the address"
                    " into images.domains and into the URL"
                )
                raise budget.refused(name, target, problem)
        if not addresses:
            raise budget.refused(name, target, "has no address")
        return list(addresses[:_MAX_TRIES])

    async def _get(
        self, target: FetchTarget, addresses: Sequence[str], name: str, budget: _Budget
    ) -> bytes:
        """The body, from the first address that takes the connection."""
        for address in addresses[:-1]:
            try:
                return await self._get_from(target, address, name, budget)
            except httpx.ConnectError:
                continue
        return await self._get_from(target, addresses[-1], name, budget)

    async def _get_from(
        self, target: FetchTarget, address: str, name: str, budget: _Budget
    ) -> bytes:
        if self._tls is None and target.scheme == "https":
            # On a thread, because it reads a file of certificates.
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        # Each fetch has a client of its own: a kept connection was made for one host's certificate,
        # and another host can have the same address.
        client = httpx.AsyncClient(
            verify=self._tls or False,  # False has no effect on http
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # the whole fetch has a limit
        )
        url = httpx.URL(
            scheme=target.scheme,
            host=address,
            port=target.port,
            raw_path=target.target.encode("ascii"),
        )
        headers = {**_HEADERS, "Accept": budget.words.accepts, "Host": target.authority}
        extensions = {"sni_hostname": target.host}
        async with (
            client,
            client.stream("GET", url, headers=headers, extensions=extensions) as response,
        ):
            _check_head(response, target, name, budget)
            parts: list[bytes] = []
            size = 0
            async for part in response.aiter_raw():
                size += len(part)
                if size > budget.max_bytes:
                    raise budget.too_large(name, target)
                budget.add(len(part), name, target)
                parts.append(part)
        return b"".join(parts)


class _Budget:
    """Counts the bytes of all media of one kind in a request, and makes the errors for them.

    Args:
        words: for errors.
        max_bytes: the most bytes of one of them.
        times: all of them together have at most so many times `max_bytes`.
    """

    def __init__(self, words: UrlWords, max_bytes: int, times: int) -> None:
        self.words = words
        self.max_bytes = max_bytes
        self._times = times
        self._left = times * max_bytes

    def add(self, size: int, name: str, target: FetchTarget) -> None:
        self._left -= size
        if self._left < 0:
            most = self._times * self.max_bytes
            problem = (
                f"is too large: the fetched {self.words.noun}s of a request have at most {most}"
                f" bytes together ({self._times} times {self.words.setting})"
            )
            raise self.refused(name, target, problem, self.words.size_code)

    def too_large(
        self, name: str, target: FetchTarget, size: int | None = None
    ) -> InvalidRequestError:
        """The error for a size; None = it is not known."""
        found = f"more than {self.max_bytes}" if size is None else str(size)
        noun, setting = self.words.noun, self.words.setting
        problem = f"has {found} bytes, and {setting} allows {self.max_bytes}; send a smaller {noun}"
        return self.refused(name, target, problem, self.words.size_code)

    def refused(
        self, name: str, target: FetchTarget, problem: str, code: str = ""
    ) -> InvalidRequestError:
        """The error for one of them."""
        return InvalidRequestError(
            f"{name} from the host {target.host!r} {problem}",
            param=name.partition(":")[0],
            code=code or self.words.code,
        )


def _check_head(response: httpx.Response, target: FetchTarget, name: str, budget: _Budget) -> None:
    """Raises InvalidRequestError unless an answer has the medium itself."""
    status = response.status_code
    if 300 <= status < 400:
        problem = f"was answered with a redirect ({status}), which is not followed; send the"
        raise budget.refused(name, target, f"{problem} final URL")
    if status != 200:
        raise budget.refused(
            name, target, f"was answered with the status {status}, and 200 is needed"
        )
    coding = response.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise budget.refused(
            name, target, f"has the Content-Encoding {coding[:40]!r}; none is supported"
        )
    length = response.headers.get("content-length", "")
    if length.isdecimal() and int(length) > budget.max_bytes:
        raise budget.too_large(name, target, int(length))
