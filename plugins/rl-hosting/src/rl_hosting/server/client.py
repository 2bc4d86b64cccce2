"""HTTP to one server: a thread with an event loop, requests with deadlines, typed errors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp

from rl_core.errors import ConfigError, DeadlineError, PluginError, WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine

__all__ = ["ServerClient"]

_T = TypeVar("_T")
#: Bytes of one answer, or one event of a stream, at most.
_MOST = 256 << 20
#: Characters of an answer that an error shows.
_SHOWN = 300
#: Seconds that the thread gets for what hangs, beyond the deadline of the request itself.
_GRACE_S = 5.0


class ServerClient:
    """Talks to one server. All requests run in one thread, which ends with :meth:`close`.

    Every request has a connection of its own: a connection that the server closed just then would
    otherwise fail a row, and a row cannot be sent twice.

    Args:
        engine: Of the server, for errors: ``"vLLM"``.
        url: Of the server.
        api_key: Sent with every request, and in no error.
        connect_timeout_s: Seconds for a connection.

    Attributes:
        who: The engine and its address, for errors.
    """

    def __init__(
        self, engine: str, url: str, *, api_key: str | None, connect_timeout_s: float
    ) -> None:
        self.engine = engine
        self.url = url.rstrip("/")
        self.who = f"the {engine} server at {self.url}"
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._connect_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="server-client", daemon=True
        )
        self._thread.start()

    def run(self, asked: Coroutine[Any, Any, _T], timeout_s: float, what: str) -> _T:
        """Runs a coroutine in the client's thread, and waits for it.

        Args:
            asked: The coroutine.
            timeout_s: Seconds that it may take.
            what: It does, for an error.

        Raises:
            DeadlineError: It took longer.
        """
        found = asyncio.run_coroutine_threadsafe(asyncio.wait_for(asked, timeout_s), self.loop)
        try:
            return found.result(timeout_s + _GRACE_S)
        except (TimeoutError, concurrent.futures.CancelledError) as error:
            found.cancel()
            if isinstance(error, DeadlineError):
                raise
            raise self._late(what, timeout_s) from None

    async def get(self, path: str, timeout_s: float) -> dict[str, Any]:
        """The JSON object behind a path.

        Raises:
            ConfigError: The server refuses the key, or redirects.
            DeadlineError: It does not answer in time.
            PluginError: It answers something else.
            WorkerDiedError: There is no server, or it went away.
        """
        status, body = await self._request("GET", path, None, timeout_s)
        if status != 200:
            raise self._refused(path, status, body)
        return self._object(path, body)

    async def post(self, path: str, body: dict[str, Any], timeout_s: float) -> tuple[int, Any]:
        """What the server answers, with its status; an empty dict for what is no JSON.

        Raises:
            ConfigError: The server refuses the key, or redirects.
            DeadlineError: It does not answer in time.
            PluginError: It has no such route.
            WorkerDiedError: There is no server, or it went away.
        """
        status, found = await self._request("POST", path, body, timeout_s)
        if status in (401, 403, 404):
            raise self._refused(path, status, found)
        try:
            return status, json.loads(found) if found.strip() else {}
        except ValueError:
            return status, {"message": _short(found)}

    async def ask(self, path: str, timeout_s: float) -> tuple[int, bytes]:
        """The status and the body with which the server answers.

        Raises:
            DeadlineError: It does not answer in time.
            WorkerDiedError: There is no server, or it went away.
        """
        return await self._request("GET", path, None, timeout_s)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of a stream, as they come; it has no deadline of its own.

        Raises:
            ConfigError: The server refuses the key, or redirects.
            PluginError: It refuses the request, or sends what is no event.
            WorkerDiedError: There is no server, or it went away before the end of the stream.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s)
        rest = b""
        try:
            async with self._opened().post(
                self.url + path, json=body, timeout=timeout, allow_redirects=False
            ) as answer:
                self._check_redirect(path, answer)
                if answer.status != 200:
                    raise self._refused(path, answer.status, await answer.content.read(1 << 16))
                async for chunk in answer.content.iter_any():
                    *whole, rest = (rest + chunk).split(b"\n\n")
                    if len(rest) > _MOST:
                        raise self._nonsense(path, rest)
                    for event in whole:
                        if not event.startswith(b"data:"):
                            raise self._nonsense(path, event)
                        if (text := event[5:].strip()) == b"[DONE]":
                            return
                        yield self._object(path, text)
        except (aiohttp.ClientError, OSError) as error:
            raise self.gone(error) from error
        if rest.strip():
            raise self._nonsense(path, rest)
        raise self.gone(None)

    def gone(self, error: BaseException | None) -> WorkerDiedError:
        """The error for a server that is not there, or that hung up."""
        why = "it closed the connection" if error is None else f"{type(error).__name__}: {error}"
        return WorkerDiedError(
            f"{self.who} has ended or cannot be reached: {why}",
            fix="look at its log, start it again at this address, and repeat the call",
            url=self.url,
        )

    def close(self, timeout_s: float) -> None:
        """Ends all connections and the thread. Idempotent."""
        if self.loop.is_closed():
            return

        async def end() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            if self._session is not None:
                await self._session.close()

        concurrent.futures.wait([asyncio.run_coroutine_threadsafe(end(), self.loop)], timeout_s)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self.loop.close()

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_s)
        where = self.url + path
        try:
            async with self._opened().request(
                method, where, json=body, timeout=timeout, allow_redirects=False
            ) as answer:
                self._check_redirect(path, answer)
                found = bytearray()
                async for chunk in answer.content.iter_any():
                    found += chunk
                    if len(found) > _MOST:
                        raise self._nonsense(path, bytes(found[:_SHOWN]))
                return answer.status, bytes(found)
        except aiohttp.ClientConnectorError as error:  # also one that took too long
            raise self.gone(error) from error
        except TimeoutError:
            raise self._late(f"{method} {path}", timeout_s) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self.gone(error) from error

    def _check_redirect(self, path: str, answer: aiohttp.ClientResponse) -> None:
        """Follows no redirect: it would lose the key, and the body of the request."""
        if 300 <= answer.status < 400:
            to = answer.headers.get("Location", "")
            raise ConfigError(
                f"{self.who} redirects {path} to {_short(to.encode())} ({answer.status})",
                fix=f"set url to the address at which the server of {self.engine} itself answers",
                key="url",
            )

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                trust_env=False,
            )
        return self._session

    def _object(self, path: str, found: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(found)
        except ValueError:
            raise self._nonsense(path, found) from None
        if not isinstance(answer, dict):
            raise self._nonsense(path, found)
        return answer

    def _refused(self, path: str, status: int, found: bytes) -> ConfigError | PluginError:
        if status in (401, 403):
            return ConfigError(
                f"{self.who} refuses {path} ({status}): "
                + ("api_key is not valid" if status == 401 else _short(found)),
                fix="set api_key to the server's key, and start it with all routes that are needed",
                key="api_key",
            )
        if status == 404:
            return PluginError(
                f"{self.who} has no {path}",
                fix=f"check that url is the address of a server of {self.engine}, started with the "
                "routes that its backend needs",
                url=self.url,
            )
        return PluginError(
            f"{self.who} answered {path} with {status}: {_short(found)}",
            fix="look at its log",
            url=self.url,
            status=status,
        )

    def _nonsense(self, path: str, found: bytes) -> PluginError:
        return PluginError(
            f"{self.who} answered {path} as {self.engine} never does: {_short(found)}",
            fix=f"check that url is the address of a server of {self.engine}; look at its log",
            url=self.url,
        )

    def _late(self, what: str, seconds: float) -> DeadlineError:
        return DeadlineError(
            f"{self.who} did not answer {what} within {seconds:g} s",
            fix="check whether it hangs; or raise connect_timeout_s",
            url=self.url,
            seconds=seconds,
        )


def _short(found: bytes) -> str:
    text = found[:_SHOWN].decode("utf-8", "replace").strip()
    return repr(text + ("..." if len(found) > _SHOWN else ""))
