"""Several vLLM servers that serve the same weights, asked as one.

    request ──▶ a place at the least loaded server ──▶ reply
                     └─ it breaks, or the server is busy ─▶ does the server live?
                             ├─ it does: the request is put again
                             └─ it does not: the server is dropped, its requests go to the others

Each server has at most `in_flight` requests under way; others wait, the first to come first. A
server is dropped when its `/health` does not answer after a connection broke, is silent three times
in a row while requests wait, or its process has ended. It is not taken up again within a run: it
would lack the adapters. With no server left `NoServerLeft` ends the run, which resumes.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

from soulkit.errors import ProviderError, UserError
from soulkit.models.api.transport import PerLoop
from soulkit.models.vllm.client import ServerBusy, ServerGone, ServerRefused, VllmClient
from soulkit.reporting import SILENT, Reporter
from soulkit.text import counted

HEALTH_S = 5.0
"""Between two looks at a server's health, and how long it may take to answer one."""
SILENCES = 3
"""Looks in a row that find nobody, after which a server is taken to be dead."""
TRIES = 6
"""How often one request is put to servers that live, until it fails."""
PAUSE_S = 0.2
"""Before a request is put again to a server that lives; twice as long each time."""
CAUSE_S = 3.0
"""How long the end of a process of our own may take to be noticed after its connections broke."""

Body = dict[str, Any]


class ServerReply(dict[str, Any]):
    """A server's JSON reply; `server` is the address that it came from."""

    def __init__(self, body: Mapping[str, Any], server: str) -> None:
        super().__init__(body)
        self.server = server


class NoServerLeft(UserError):
    """Every vLLM server of the run is dead: nothing can be sampled any more."""

    def __init__(self, endings: Mapping[str, str]) -> None:
        last = "; ".join(f"{url} ({why})" for url, why in endings.items())
        super().__init__(
            "No vLLM server is left to sample from.",
            f"The last that was heard: {last}. What has been played is kept.",
            "Start it again (a server that soulkit starts itself comes with the run) and give the "
            "same command: it goes on where it stopped.",
        )  # fmt: skip


@dataclass(eq=False)
class _Replica:
    """One server; `ending` says why it is none any more."""

    client: VllmClient
    check: Callable[[], None] | None
    ending: str = ""
    silences: int = 0

    @property
    def url(self) -> str:
        return self.client.address.url

    def ended(self) -> str:
        """Why our own process is no more; empty while it runs, and for a server of others."""
        try:
            if self.check is not None:
                self.check()
        except UserError as error:
            return f"{error.what} {error.why}"
        return ""


@dataclass(eq=False)
class _Session:
    """What belongs to one event loop."""

    load: Counter[_Replica] = field(default_factory=Counter)
    tasks: defaultdict[_Replica, set[asyncio.Task[Body]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    """Requests on the wire, which the death of their server ends."""
    queue: deque[asyncio.Future[_Replica]] = field(default_factory=deque)
    """Who waits for a place."""
    names: Counter[str] = field(default_factory=Counter)
    """Model's name → requests that are not answered yet."""
    leaving: defaultdict[str, list[asyncio.Future[None]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Model's name → who waits until it is idle."""
    looks: defaultdict[_Replica, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    watch: asyncio.Task[None] | None = None


class Replicas:
    """Servers of the same weights. `checks` maps addresses of servers that soulkit started to what
    raises a UserError once they have ended; `reporter` gets a line on every server that is
    dropped."""

    def __init__(
        self, clients: Sequence[VllmClient], *, in_flight: int,
        checks: Mapping[str, Callable[[], None]] | None = None,
        health_s: float = HEALTH_S, pause_s: float = PAUSE_S, reporter: Reporter = SILENT,
    ) -> None:  # fmt: skip
        if not clients or in_flight < 1:
            raise ValueError("a fleet is at least one server with one request in flight")
        own_checks = checks or {}
        self._members = [_Replica(c, own_checks.get(c.address.url)) for c in clients]
        self.in_flight, self.health_s, self.pause_s = in_flight, health_s, pause_s
        self.adapters: set[str] = set()
        """Names of adapters that every living server has; `adapters.py` keeps them."""
        self._reporter = reporter
        self._sessions = PerLoop(_Session)

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the servers that live."""
        return tuple(member.url for member in self._members if not member.ending)

    async def silent(self) -> tuple[str, ...]:
        """The addresses of those living servers that do not answer their /health now, although they
        are asked a few times; nobody is dropped for it."""
        living = [member for member in self._members if not member.ending]
        alive = await asyncio.gather(*(self._answers(member) for member in living))
        return tuple(member.url for member, well in zip(living, alive, strict=True) if not well)

    async def ask(self, path: str, body: Body) -> ServerReply:
        """The reply to a POST at the least loaded server; it waits for a place and outlives the
        death of servers.

        Raises NoServerLeft, ServerRefused for what a server answers with a refusal, and
        ProviderError where connections break again and again at servers that live.
        """
        session, name = self._sessions.get(), str(body.get("model", ""))
        session.names[name] += 1
        try:
            return await self._answer(session, path, body)
        finally:
            session.names[name] -= 1
            if not session.names[name]:
                for turn in session.leaving.pop(name, ()):
                    if not turn.done():
                        turn.set_result(None)

    async def idle(self, name: str) -> None:
        """Returns when no request for the model of this name is waiting or under way."""
        session = self._sessions.get()
        while session.names[name]:
            turn = asyncio.get_running_loop().create_future()
            session.leaving[name].append(turn)
            await turn

    async def each(self, path: str, body: Body | None = None) -> dict[str, Body | ServerRefused]:
        """Address → what each living server answers to a POST of `body`, or to a GET without one.

        Takes no place from generation. A server that dies over it is dropped and has no entry;
        raises NoServerLeft when all have gone, ProviderError as `ask` does.
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
        """Address → reply to a POST at each living server, as `each`; all have answered before the
        first refusal is raised as ServerRefused."""
        replies = await self.each(path, body)
        for reply in replies.values():
            if isinstance(reply, ServerRefused):
                raise reply
        return {url: reply for url, reply in replies.items() if isinstance(reply, dict)}

    async def close(self) -> None:
        """Close every connection; the servers are left as they are."""
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
        """A server in which a place is taken for the caller."""
        member = self._free(session)
        if member is not None:  # then nobody waits: places go to the queue first
            session.load[member] += 1
            return member
        turn: asyncio.Future[_Replica] = asyncio.get_running_loop().create_future()
        session.queue.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(session, turn.result())  # the place came together with the end
            raise

    def _leave(self, session: _Session, member: _Replica) -> None:
        session.load[member] -= 1
        self._hand_out(session)

    def _hand_out(self, session: _Session) -> None:
        """Places that are free to those who wait, or the news that there will be none."""
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
                self._drop(session, member, "it was started anew and has lost its adapter")
            finally:
                self._leave(session, member)

    async def _stubborn(
        self, session: _Session, member: _Replica, path: str, body: Body | None
    ) -> Body | ServerRefused:
        """The reply of this one server; ServerGone when it is dead."""
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
        """Wait before a request is put again; ServerRefused or ProviderError after TRIES."""
        if tries < TRIES:
            await asyncio.sleep(self.pause_s * 2 ** (tries - 1))
        elif isinstance(error, ServerBusy):
            raise error
        else:
            raise ProviderError(
                f"{member.url}: the connection broke {tries} times over one request although the "
                f"server answers its /health: {error}"
            )

    async def _send(
        self, session: _Session, member: _Replica, path: str, body: Body | None
    ) -> Body:
        client = member.client
        request: Coroutine[Any, Any, Body] = (
            client.get(path) if body is None else client.post(path, body)
        )
        task = asyncio.ensure_future(request)
        session.tasks[member].add(task)
        if session.watch is None or session.watch.done():
            session.watch = asyncio.ensure_future(self._look_after(session))
        try:
            await asyncio.wait({task})
        finally:
            session.tasks[member].discard(task)
            if not task.done():  # the caller was cancelled: the server must hear of it
                task.cancel()
                await asyncio.wait({task})
        if task.cancelled():
            raise ServerGone(member.ending or "it was given up")
        if not isinstance(task.exception(), ServerGone):
            member.silences = 0
        return task.result()

    # -- life and death ----------------------------------------------------------------------------

    async def _look_after(self, session: _Session) -> None:
        while any(session.tasks.values()):
            await asyncio.sleep(self.health_s)
            busy = [member for member, tasks in session.tasks.items() if tasks]
            await asyncio.gather(*(self._look(session, m) for m in busy if not m.ending))

    async def _look(self, session: _Session, member: _Replica) -> None:
        """A look at a busy server; replies that come between two looks are signs of life, too."""
        ended = member.ended()
        if ended:
            self._drop(session, member, ended)
        elif await self._alive(member):
            member.silences = 0
        else:
            member.silences += 1
            if member.silences >= SILENCES:
                why = f"its /health was silent {SILENCES} times in a row"
                self._drop(session, member, await self._cause(member) or why)

    async def _alive(self, member: _Replica) -> bool:
        try:
            async with asyncio.timeout(self.health_s):
                return await member.client.alive()
        except TimeoutError:
            return False

    async def _lives(self, session: _Session, member: _Replica, error: Exception) -> bool:
        """Whether a server lives; a dead one is dropped. One caller looks, the others wait."""
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
            if await self._alive(member):
                return True
        return False

    async def _cause(self, member: _Replica) -> str:
        """What our own process left as its last words; they may come later than the silence."""
        pause = 0.1
        for _ in range(int(CAUSE_S / pause) if member.check is not None else 0):
            if ended := member.ended():
                return ended
            await asyncio.sleep(pause)
        return ""

    def _drop(self, session: _Session, member: _Replica, why: str) -> None:
        if member.ending:
            return
        # As it stands between brackets; the client writes whole sentences.
        why = re.sub(r"^The vLLM server at \S+ is gone: ", "", why).rstrip(". ")
        member.ending = why
        again, left = session.load[member], len(self.urls)
        if left:
            self._reporter.warn(
                f"vLLM server {member.url} is dropped ({why}): {counted(again, 'request')} put "
                f"again, {counted(left, 'server')} left"
            )
        for task in session.tasks[member]:
            task.cancel()
        self._hand_out(session)

    def _give_up(self) -> Never:
        raise NoServerLeft({member.url: member.ending for member in self._members})
