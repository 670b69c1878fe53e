"""Fetching images: from a local server, with the addresses of host names given by the tests."""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trustme

from ostinato.conf.sections.audio_schema import AudioConfig
from ostinato.conf.sections.images_schema import ImagesConfig
from ostinato.conf.sections.video_schema import VideoConfig
from ostinato.runtime.errors import InvalidRequestError
from ostinato.runtime.media.fetch_media import MediaFetcher, is_public
from ostinato.runtime.media.prompt_media import FetchWanted, MediaLimits
from ostinato.runtime.media_files.media_kinds import MediaKind

IMAGE = FetchWanted("messages: image 1", MediaKind.image)
VIDEO = FetchWanted("messages: video 1", MediaKind.video)
SOUND = FetchWanted("messages: sound 1", MediaKind.sound)
BODY = b"the bytes of an image"
Serve = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes = BODY, *, status: str = "200 OK", headers: Sequence[str] = ()) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def always(data: bytes) -> Serve:
    async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return serve


class Server:
    """A server on 127.0.0.1, and the heads of the requests that it got."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.heads: list[str] = []


@asynccontextmanager
async def serving(serve: Serve, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    state = Server(0)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            state.heads.append(head.decode())
            await serve(head, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(connected, "127.0.0.1", 0, ssl=tls)
    state.port = listening.sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        listening.close()


def resolver(*answers: Sequence[str]) -> Callable[[str, int], Awaitable[Sequence[str]]]:
    """Gives the next answer at each call, and the last one forever."""
    left = list(answers)

    async def resolve(host: str, port: int) -> Sequence[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return resolve


def is_local(address: Any) -> bool:
    return address == ipaddress.ip_address("127.0.0.1")


def fetcher(
    *answers: Sequence[str], is_allowed: Callable[[Any], bool] = is_local, **config: Any
) -> MediaFetcher:
    values = {"domains": ["images.test"], **config}
    return MediaFetcher(limits(**values), resolver(*answers or (["127.0.0.1"],)), is_allowed)


def limits(**images: Any) -> MediaLimits:
    return MediaLimits(ImagesConfig(**images), VideoConfig(max_mib=1.0), AudioConfig(max_mib=1.5))


async def refusal(
    fetching: MediaFetcher, url: str, wanted: FetchWanted = IMAGE, code: str = ""
) -> str:
    with pytest.raises(InvalidRequestError) as refused:
        await fetching.fetch({url: wanted})
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert refused.value.code == (code or f"invalid_{wanted.kind.value}_url")
    assert str(refused.value).startswith(f"{wanted.name} ")
    return str(refused.value)


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def test_the_bytes_of_every_url():
    async def main() -> None:
        async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(answer(head.split()[1]))

        async with serving(serve) as server:
            base = f"http://images.test:{server.port}"
            urls = [f"{base}/{number}?a=b" for number in range(20)]
            bodies = await fetcher().fetch(dict.fromkeys(urls, IMAGE))
            assert bodies == {url: url.removeprefix(base).encode() for url in urls}
            assert f"Host: images.test:{server.port}\r\n" in server.heads[0]

    run(main())


def test_a_path_is_encoded_once():
    async def main() -> None:
        async with serving(always(answer())) as server:
            await fetcher().fetch({f"http://IMAGES.test:{server.port}/ä%20b?q=ü#part": IMAGE})
            assert server.heads[0].startswith("GET /%C3%A4%20b?q=%C3%BC HTTP/1.1\r\n")

    run(main())


def test_https_checks_the_certificate_of_the_name_not_of_the_address(monkeypatch):
    async def main() -> None:
        authority = trustme.CA()
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("images.test").configure_cert(tls)
        with authority.cert_pem.tempfile() as file:
            monkeypatch.setenv("SSL_CERT_FILE", file)
            async with serving(always(answer()), tls) as server:
                fetching = fetcher(domains=["images.test", "other.test"])
                url = f"https://images.test:{server.port}/a.png"
                assert await fetching.fetch({url: IMAGE}) == {url: BODY}
                other = f"https://other.test:{server.port}/a.png"
                assert "certificate" in await refusal(fetching, other)

    run(main())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            answer(status="302 Found", headers=["Location: http://127.0.0.1/secret"]),
            "redirect (302), which is not followed",
        ),
        (answer(status="404 Not Found"), "the status 404, and 200 is needed"),
        (answer(status="503 Busy"), "the status 503, and 200 is needed"),
        (answer(headers=["Content-Encoding: gzip"]), "the Content-Encoding 'gzip'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", "has 99999999 bytes, and images"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(1 << 20), "has more than 524288 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort", "cannot be fetched"),
        (b"not HTTP\r\n\r\n", "cannot be fetched"),
        (b"", "cannot be fetched"),
    ],
)
def test_answers_that_are_no_image(data, text):
    async def main() -> None:
        async with serving(always(data)) as server:
            url = f"http://images.test:{server.port}/"
            assert text in await refusal(fetcher(max_mib=0.5), url)

    run(main())


def test_a_slow_server():
    async def main() -> None:
        async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1")
            await asyncio.Event().wait()

        async with serving(serve) as server:
            url = f"http://images.test:{server.port}/"
            text = await refusal(fetcher(fetch_timeout_s=0.2), url)
            assert "not fetched in images.fetch_timeout_s=0.2 s" in text

    run(main())


def test_all_images_of_a_request_have_a_limit_together():
    async def main() -> None:
        async with serving(always(answer(bytes(400_000)))) as server:
            base = f"http://images.test:{server.port}"
            fetching = fetcher(max_mib=0.5)
            urls = [f"{base}/{number}" for number in range(6)]
            assert len(await fetching.fetch(dict.fromkeys(urls[:5], IMAGE))) == 5
            with pytest.raises(InvalidRequestError, match=r"4 times images\.max_mib"):
                await fetching.fetch(dict.fromkeys(urls, IMAGE))

    run(main())


def test_images_and_videos_have_limits_of_their_own():
    async def main() -> None:
        async with serving(always(answer(bytes(1_000_000)))) as server:
            base = f"http://images.test:{server.port}"
            fetching = fetcher(max_mib=0.5)
            assert len(await fetching.fetch({f"{base}/a": VIDEO, f"{base}/b": VIDEO})) == 2
            assert all("\r\nAccept: video/*\r\n" in head for head in server.heads)
            text = await refusal(fetching, f"{base}/a")
            assert "has 1000000 bytes, and images.max_mib allows 524288" in text
            assert "\r\nAccept: image/*\r\n" in server.heads[-1]
            with pytest.raises(
                InvalidRequestError, match=r"2097152 bytes together .2 times video\.max_mib"
            ):
                await fetching.fetch({f"{base}/{number}": VIDEO for number in range(3)})
        async with serving(always(answer(bytes(1_100_000)))) as server:
            text = await refusal(fetching, f"http://images.test:{server.port}/", VIDEO)
            assert "has 1100000 bytes, and video.max_mib allows 1048576; send a smaller" in text

    run(main())


def test_sounds_have_limits_of_their_own():
    async def main() -> None:
        async with serving(always(answer(bytes(1_500_000)))) as server:
            base = f"http://images.test:{server.port}"
            assert len(await fetcher().fetch({f"{base}/a": SOUND, f"{base}/b": SOUND})) == 2
            assert all("\r\nAccept: audio/*\r\n" in head for head in server.heads)
            with pytest.raises(
                InvalidRequestError, match=r"6291456 bytes together .4 times audio\.max_mib"
            ) as refused:
                await fetcher().fetch({f"{base}/{number}": SOUND for number in range(5)})
        async with serving(always(answer(bytes(1_600_000)))) as server:
            assert refused.value.code == "audio_too_large"
            url = f"http://images.test:{server.port}/"
            text = await refusal(fetcher(), url, SOUND, "audio_too_large")
            assert "has 1600000 bytes, and audio.max_mib allows 1572864; send a smaller" in text

    run(main())


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "127.0.0.1", "10.0.0.1", "::1", "fe80::1%eth0", "::ffff:10.0.0.1"],
)
def test_a_name_with_an_address_that_is_not_public(address):
    async def main() -> None:
        # The first address is public. One that is not is enough.
        fetching = fetcher(["93.184.216.34", address], is_allowed=is_public)
        text = await refusal(fetching, "http://images.test/a.png")
        assert f"has the address {address}, which is not public" in text

    run(main())


def test_a_second_answer_of_the_name_server_has_no_effect():
    """DNS rebinding: the connection goes to the address that was checked."""

    async def main() -> None:
        asked: list[str] = []

        async def resolve(host: str, port: int) -> Sequence[str]:
            asked.append(host)
            return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]

        async with serving(always(answer())) as server:
            fetching = MediaFetcher(limits(domains=["images.test"]), resolve, is_local)
            url = f"http://images.test:{server.port}/"
            assert await fetching.fetch({url: IMAGE}) == {url: BODY}
            assert asked == ["images.test"]
            assert "10.0.0.1, which is not public" in await refusal(fetching, url)
            assert len(server.heads) == 1

    run(main())


def test_the_next_address_is_tried_if_a_connection_fails():
    async def main() -> None:
        async with serving(always(answer())) as server:
            fetching = fetcher(["127.0.0.2", "127.0.0.1"], is_allowed=lambda address: True)
            url = f"http://images.test:{server.port}/"
            assert await fetching.fetch({url: IMAGE}) == {url: BODY}

    run(main())


def test_an_address_that_the_operator_lists_is_allowed():
    async def main() -> None:
        async with serving(always(answer())) as server:
            fetching = fetcher(domains=["127.0.0.1"], is_allowed=is_public)
            url = f"http://127.0.0.1:{server.port}/"
            assert await fetching.fetch({url: IMAGE}) == {url: BODY}

    run(main())


@pytest.mark.parametrize(
    "failure", [OSError("no such host"), UnicodeError("label too long"), ["not an address"], []]
)
def test_a_name_that_cannot_be_resolved(failure):
    async def main() -> None:
        async def resolve(host: str, port: int) -> Sequence[str]:
            if isinstance(failure, Exception):
                raise failure
            return failure

        fetching = MediaFetcher(limits(domains=["images.test"]), resolve, is_local)
        assert "from the host 'images.test'" in await refusal(fetching, "http://images.test/")

    run(main())


def test_no_proxy_of_the_environment_is_used(monkeypatch):
    async def main() -> None:
        async with (
            serving(always(answer(b"of the proxy"))) as proxy,
            serving(always(answer())) as server,
        ):
            monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
            url = f"http://images.test:{server.port}/"
            assert await fetcher().fetch({url: IMAGE}) == {url: BODY}

    run(main())


def test_images_do_not_wait_for_videos():
    async def main() -> None:
        began, goes_on = asyncio.Semaphore(0), asyncio.Event()
        at_once = most = 0

        async def serve(head: bytes, writer: asyncio.StreamWriter) -> None:
            nonlocal at_once, most
            if b"/video" in head:
                at_once += 1
                most = max(most, at_once)
                began.release()
                await goes_on.wait()
                at_once -= 1
            writer.write(answer())
            await writer.drain()

        async with serving(serve) as server:
            base = f"http://images.test:{server.port}"
            fetching = fetcher()
            videos = {f"{base}/video{number}": VIDEO for number in range(12)}
            work = asyncio.ensure_future(fetching.fetch(videos))
            for _ in range(4):
                await began.acquire()
            images = {f"{base}/image{number}": IMAGE for number in range(12)}
            assert await fetching.fetch(images) == dict.fromkeys(images, BODY)
            assert not work.done()
            goes_on.set()
            assert await work == dict.fromkeys(videos, BODY)
            assert most == 4

    run(main())


def test_a_cancelled_fetch_closes_its_connections():
    async def main() -> None:
        began, ended = asyncio.Event(), asyncio.Event()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            began.set()
            await reader.read()  # returns when the client closes
            ended.set()
            writer.close()

        listening = await asyncio.start_server(connected, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        work = asyncio.ensure_future(fetcher().fetch({f"http://images.test:{port}/": IMAGE}))
        await began.wait()
        work.cancel()
        await ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await work
        listening.close()

    run(main())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("0.0.0.0", False),
        ("100.64.0.1", False),
        ("192.168.1.1", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("fc00::1", False),
        ("ff0e::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:93.184.216.34", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::5db8:d822", True),
        ("2002:7f00:1::", False),
    ],
)
def test_public_addresses(address, expected):
    assert is_public(ipaddress.ip_address(address)) is expected
