"""Several vLLM servers with the same weights, used as one.

    request ──▶ a place at the least loaded server ──▶ reply
                     └─ connection breaks or server is busy ─▶ is the server alive?
                             ├─ yes: the request is repeated
                             └─ no: the server is dropped, its requests go to the others

Each server has at most `in_flight` requests; others wait in order of arrival. A server is dropped
if its `/health` does not answer after a connection breaks, if it is silent three times in a row
while requests wait, or if its process has ended. It is not used again in this run, since it would
lack the adapters. With no server left, `NoServerLeft` ends the run, which can be resumed.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

from soulkit.errors import ProviderError, UserError
from soulkit.models.api.transport import PerLoop
from soulkit.models.vllm.client import ServerBusy, ServerGone, ServerRefused, VllmClient
from soulkit.reporting import SILENT, Reporter
from soulkit.text import counted

HEALTH_S = 5.0
"""Seconds between health checks, and timeout of a check."""
SILENCES = 3
"""Failed checks in a row after which a server counts as dead."""
TRIES = 6
"""Maximum attempts of one request at servers that are alive."""
PAUSE_S = 0.2
"""Seconds before a request is repeated at a living server, doubled each time."""
CAUSE_S = 3.0
"""Seconds to wait for the exit of our own server process after its connections broke."""

Body = dict[str, Any]


class ServerReply(dict[str, Any]):
    """A server's JSON reply; `server` is the server's address."""

    def __init__(self, body: Mapping[str, Any], server: str) -> None:
        super().__init__(body)
        self.server = server


class NoServerLeft(UserError):
    """Every vLLM server of the run is dead, so nothing more can be sampled."""

    def __init__(self, endings: Mapping[str, str]) -> None:
        last = "; ".join(f"{url} ({why})" for url, why in endings.items())
        super().__init__(
            "All vLLM servers of this run have failed.",
            f"Last errors: {last}. Finished work is kept.",
            "Restart the servers (soulkit restarts its own), then run the same command again to "
            "resume.",
        )  # fmt: skip


@dataclass(eq=False)
class _Replica:
    """One server; `ending` says why it was dropped."""

    client: VllmClient
    check: Callable[[], None] | None
    ending: str = ""
    silences: int = 0

    @property
    def url(self) -> str:
        return self.client.address.url

    def ended(self) -> str:
        """Why our own process ended; empty while it runs, and for attached servers."""
        try:
            if self.check is not None:
                self.check()
        except UserError as error:
            return f"{error.what} {error.why}"
        return ""


@dataclass(eq=False)
class _Session:
    """State of one event loop."""

    load: Counter[_Replica] = field(default_factory=Counter)
    tasks: defaultdict[_Replica, set[asyncio.Task[Body]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """Requests in flight, which are cancelled if their server dies."""
    queue: deque[asyncio.Future[_Replica]] = field(default_factory=deque)
    """Requests that wait for a place."""
    names: Counter[str] = field(default_factory=Counter)
    """Model name → number of unanswered requests."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a model has no more requests."""
    looks: defaultdict[_Replica, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    watch: asyncio.Task[None] | None = None


class Replicas:
    """Servers with the same weights. `checks` maps addresses of servers that soulkit started to a
    function that raises UserError once they have ended; `reporter` gets a line per dropped
    server."""

    def __init__(
        self, clients: Sequence[VllmClient], *, in_flight: int,
        checks: Mapping[str, Callable[[], None]] | None = None,
        health_s: float = HEALTH_S, pause_s: float = PAUSE_S, reporter: Reporter = SILENT,
    ) -> None:  # fmt: skip
        if not clients or in_flight < 1:
            raise ValueError("a fleet needs at least one server and one request in flight")
        own_checks = checks or {}
        self._members = [_Replica(c, own_checks.get(c.address.url)) for c in clients]
        self.in_flight, self.health_s, self.pause_s = in_flight, health_s, pause_s
        self.adapters: set[str] = set()
        """Names of adapters on every living server, maintained by `adapters.py`."""
        self._reporter = reporter
        self._sessions = PerLoop(_Session)

    @property
    def urls(self) -> tuple[str, ...]:
        """Addresses of the living servers."""
        return tuple(member.url for member in self._members if not member.ending)

    async def silent(self) -> tuple[str, ...]:
        """Addresses of living servers whose /health does not answer after a few attempts. Drops no
        server."""
        living = [member for member in self._members if not member.ending]
        alive = await asyncio.gather(*(self._answers(member) for member in living))
        return tuple(member.url for member, well in zip(living, alive, strict=True) if not well)

    async def ask(self, path: str, body: Body) -> ServerReply:
        """POST to the least loaded server and return its reply. Waits for a place and survives the
        death of servers.

        NoServerLeft if all have failed; ServerRefused if a server rejects the request;
        ProviderError if connections to living servers break repeatedly.
        """
        session, name = self._sessions.get(), str(body.get("model", ""))
        session.names[name] += 1
        try:
            return await self._answer(session, path, body)
        finally:
            session.names[name] -= 1
            if not session.names[name]:
                session.idle.set()

    async def idle(self, name: str) -> None:
        """Wait until no request for this model is waiting or in flight."""
        session = self._sessions.get()
        while session.names[name]:
            session.idle.clear()
            await session.idle.wait()

    async def each(self, path: str, body: Body | None = None) -> dict[str, Body | ServerRefused]:
        """Address → answer of each living server to a POST of `body`, or to a GET without one.

        Takes no place from generation. A server that dies is dropped and has no entry. NoServerLeft
        if all are gone; ProviderError as in `ask`.
        """
        session = self._sessions.get()
        living = [member for member in self._members if not member.ending]
        answers = await asyncio.gather(
            *(self._stubborn(session, member, path, body) for member in living),
            return_exceptions=True,
        )
        replies: dict[str, Body | ServerRefused] = {}
        for member, answer in zip(living, answers, strict=True):
            if isinstance(answer, dict | ServerRefused):
                replies[member.url] = answer
            elif not isinstance(answer, ServerGone):
                raise answer
        if not self.urls:
            self._give_up()
        return replies

    async def everywhere(self, path: str, body: Body) -> dict[str, Body]:
        """Address → reply of each living server, as in `each`; then raises the first refusal as
        ServerRefused."""
        replies = await self.each(path, body)
        for reply in replies.values():
            if isinstance(reply, ServerRefused):
                raise reply
        return {url: reply for url, reply in replies.items() if isinstance(reply, dict)}

    async def close(self) -> None:
        """Close every connection; the servers keep running."""
        session = self._sessions.pop()
        if session is not None and session.watch is not None:
            session.watch.cancel()
        for member in self._members:
            await member.client.close()

    # -- places ------------------------------------------------------------------------------------

    def _free(self, session: _Session) -> _Replica | None:
        living = [member for member in self._members if not member.ending]
        if not living:
            self._give_up()
        least = min(living, key=lambda member: session.load[member])
        return least if session.load[least] < self.in_flight else None

    async def _enter(self, session: _Session) -> _Replica:
        """Wait for a place and return its server."""
        member = self._free(session)
        if member is not None:  # free places go to the queue first, so nobody waits
            session.load[member] += 1
            return member
        turn: asyncio.Future[_Replica] = asyncio.get_running_loop().create_future()
        session.queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(session, turn.result())  # a place arrived as the caller was cancelled
            raise

    def _leave(self, session: _Session, member: _Replica) -> None:
        session.load[member] -= 1
        self._hand_out(session)

    def _hand_out(self, session: _Session) -> None:
        """Give free places to waiting requests, or raise NoServerLeft in them."""
        while session.queue:
            try:
                member = self._free(session)
            except NoServerLeft as error:
                turn = session.queue.popleft()
                if not turn.done():
                    turn.set_exception(error)
                continue
            if member is None:
                return
            turn = session.queue.popleft()
            if not turn.done():
                session.load[member] += 1
                turn.set_result(member)

    # -- requests ----------------------------------------------------------------------------------

    async def _answer(self, session: _Session, path: str, body: Body) -> ServerReply:
        tries = 0
        while True:
            member = await self._enter(session)
            try:
                if not member.ending:
                    return ServerReply(await self._send(session, member, path, body), member.url)
            except (ServerGone, ServerBusy) as error:
                if await self._lives(session, member, error):
                    tries += 1
                    await self._again(member, tries, error)
            except ServerRefused as refusal:
                if refusal.status != 404 or body.get("model") not in self.adapters:
                    raise
                self._drop(session, member, "it was restarted and has lost its adapter")
            finally:
                self._leave(session, member)

    async def _stubborn(
        self, session: _Session, member: _Replica, path: str, body: Body | None
    ) -> Body | ServerRefused:
        """The reply of this server; ServerGone if it is dead."""
        tries = 0
        while True:
            try:
                return await self._send(session, member, path, body)
            except (ServerGone, ServerBusy) as error:
                if not await self._lives(session, member, error):
                    raise ServerGone(member.ending) from error
                tries += 1
                try:
                    await self._again(member, tries, error)
                except ServerRefused as refusal:
                    return refusal
            except ServerRefused as refusal:
                return refusal

    async def _again(self, member: _Replica, tries: int, error: ServerGone | ServerBusy) -> None:
        """Wait before a retry; ServerRefused or ProviderError after TRIES."""
        if tries < TRIES:
            await asyncio.sleep(self.pause_s * 2 ** (tries - 1))
        elif isinstance(error, ServerBusy):
            raise error
        else:
            raise ProviderError(
                f"{member.url}: the connection broke {tries} times for one request, although the "
                f"server answers /health: {error}"
            )

    async def _send(
        self, session: _Session, member: _Replica, path: str, body: Body | None
    ) -> Body:
        task = asyncio.ensure_future(member.client.ask(path, body))
        session.tasks[member].add(task)
        if session.watch is None or session.watch.done():
            session.watch = asyncio.ensure_future(self._look_after(session))
        try:
            await asyncio.wait({task})
        finally:
            session.tasks[member].discard(task)
            if not task.done():  # the caller was cancelled: close the connection
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            raise ServerGone(member.ending or "its request was cancelled")
        if not isinstance(task.exception(), ServerGone):
            member.silences = 0
        return task.result()

    # -- health checks -----------------------------------------------------------------------------

    async def _look_after(self, session: _Session) -> None:
        while any(session.tasks.values()):
            await asyncio.sleep(self.health_s)
            busy = [member for member, tasks in session.tasks.items() if tasks]
            await asyncio.gather(*(self._look(session, m) for m in busy if not m.ending))

    async def _look(self, session: _Session, member: _Replica) -> None:
        """Check a busy server; replies between two checks also count as signs of life."""
        ended = member.ended()
        if ended:
            self._drop(session, member, ended)
        elif await member.client.alive(self.health_s):
            member.silences = 0
        else:
            member.silences += 1
            if member.silences >= SILENCES:
                why = f"its /health did not answer {SILENCES} times in a row"
                self._drop(session, member, await self._cause(member) or why)

    async def _lives(self, session: _Session, member: _Replica, error: Exception) -> bool:
        """Whether a server is alive; drops it if not. One caller checks, the others wait."""
        async with session.looks[member]:
            if member.ending:
                return False
            ended = member.ended()
            if not ended and await self._answers(member):
                return True
            self._drop(session, member, ended or await self._cause(member) or str(error))
            return False

    async def _answers(self, member: _Replica) -> bool:
        for look in range(SILENCES):
            await asyncio.sleep(self.pause_s * look)
            if await member.client.alive(self.health_s):
                return True
        return False

    async def _cause(self, member: _Replica) -> str:
        """Why our own process ended; waits, since the exit may show later than the silence."""
        pause = 0.1
        for _ in range(int(CAUSE_S / pause) if member.check is not None else 0):
            if ended := member.ended():
                return ended
            await asyncio.sleep(pause)
        return ""

    def _drop(self, session: _Session, member: _Replica, why: str) -> None:
        if member.ending:
            return
        # Shorten the client's sentence, since it is shown in brackets.
        why = re.sub(r"^The vLLM server at \S+ is gone: ", "", why).rstrip(". ")
        member.ending = why
        again, left = session.load[member], len(self.urls)
        if left:
            self._reporter.warn(
                f"vLLM server {member.url} was dropped ({why}): "
                f"{counted(again, 'request')} to repeat, {counted(left, 'server')} left"
            )
        for task in session.tasks[member]:
            task.cancel()
        self._hand_out(session)

    def _give_up(self) -> Never:
        raise NoServerLeft({member.url: member.ending for member in self._members})
