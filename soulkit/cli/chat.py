"""`soul chat`: talk to a simulated person at the terminal."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soulkit.cli.console import ConsoleReporter, out, print_next, print_note
from soulkit.cli.options import COMPLETERS, Adapter, Device, MaxContext
from soulkit.errors import CallError
from soulkit.report.episode_search import shell_path
from soulkit.text import sanitise
from soulkit.types import Feedback

if TYPE_CHECKING:
    from soulkit.serving.chat import LiveChat
    from soulkit.types import Score

COMMANDS = {
    "feedback": "what the coach says about the last message (needs --coach)",
    "again": "the last message again, with the coach's feedback; or /again YOUR FEEDBACK",
    "why": "how the judge rates the person so far (needs --judge)",
    "end": "save the chat and leave, as Ctrl-D and Ctrl-C do",
    "help": "this list",
}
"""Command, a method of _Terminal → what it does."""
MISSING = "There is no {0}. Start with --{0} PLAYER, such as --{0} endpoint:MODEL@URL."
WIDTH = 10
"""Columns for the name of who speaks."""
STYLES = {"person": "bold cyan", "you": "bold green", "note": "yellow"}


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL|URL",
        help="Training run, folder with weights, or Hub model; tiny for a random one; or the "
        "address of a server (key in VLLM_API_KEY).")],
    persona: Annotated[Path | None, typer.Option("--persona", metavar="FILE", exists=True,
        help="Personas, one JSON object a line; --seed draws one.")] = None,
    scenario: Annotated[Path | None, typer.Option("--scenario", metavar="FILE", exists=True,
        help="Scenarios, one JSON object a line; --seed draws one.")] = None,
    judge: Annotated[list[str] | None, typer.Option("--judge", metavar="PLAYER",
        help="Model that /why asks, and that scores the chat. Repeatable.")] = None,
    coach: Annotated[str | None, typer.Option("--coach", metavar="PLAYER",
        help="Model that /feedback asks.")] = None,
    endpoints: Annotated[str | None, typer.Option("--endpoints", metavar="FILE",
        help="YAML file with named models.")] = None,
    adapter: Adapter = None,
    temperature: Annotated[float, typer.Option("--temperature", metavar="X", min=0,
        help="Sampling temperature; 0 is greedy.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", metavar="N", min=1,
        help="Maximum tokens of a message. [default: 512]")] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N",
        help="Random seed of the person and of the messages.")] = 0,
    engine: Annotated[str, typer.Option("--engine", metavar="auto|local|vllm",
        help="Engine of the model; auto: vLLM if it is installed and there is a GPU.",
        autocompletion=COMPLETERS["engines"])] = "auto",
    device: Device = "auto",
    max_context: MaxContext = None,
    folder: Annotated[Path | None, typer.Option("--out", metavar="FOLDER",
        help="Run folder to write. [default: a new folder under runs/]")] = None,
) -> None:  # fmt: skip
    """Talk to a model that plays a person; you are the agent.

    The person writes first. /feedback, /again and /why show what coach and judge say; /help lists
    the commands. The chat is saved as a run with one episode that soul show prints and soul
    rescore --ask scores. Lines can also come from a pipe.
    """
    from soulkit.runs.folder import default_run_path
    from soulkit.serving.certificate import certificate_lines, find_certificate
    from soulkit.serving.chat import opened_chat
    from soulkit.tasks.kit.person.brief import draw, read_briefs

    brief = draw(read_briefs(persona, scenario), str(seed))
    settings = {"judge": judge, "endpoints": endpoints, "temperature": temperature,
                "max_tokens": max_tokens, "seed": seed}  # fmt: skip
    printer = _Printer()
    with opened_chat(
        model, settings, brief, folder or default_run_path("chat", []), printer.show,
        adapter=adapter, coach=coach, engine=engine, device=device,
        max_context=max_context, reporter=ConsoleReporter("chat"),
    ) as chat:  # fmt: skip
        for line in certificate_lines(find_certificate(model, adapter)):
            print_note(line)
        print_note(f"{chat.cast.actor.model.name} plays {brief.name}; you are the agent. "
                   "/help lists the commands.")  # fmt: skip
        _Terminal(chat, printer).run()


class _Printer:
    """Prints a message of the person while it arrives."""

    text = ""

    def begin(self) -> None:
        """Start a message."""
        self.text = ""
        _say("person", "", end="")

    def show(self, text: str) -> None:
        """Print what is new in the message so far."""
        # Text that is not continued was thinking, of which only the end shows that.
        if not text.startswith(self.text):
            out.print()
            self.begin()
        out.print(_block(text)[len(_block(self.text)) :], end="", markup=False, soft_wrap=True)
        out.file.flush()
        self.text = text


class _Terminal:
    """Reads the user's lines and commands until the chat ends."""

    def __init__(self, chat: LiveChat, printer: _Printer) -> None:
        self.chat, self.printer = chat, printer
        self.advice: Feedback | None = None
        """What the coach said about the last message."""

    def run(self) -> None:
        """Chat, and save the chat whatever ends it; raises the error of a failed message."""
        with asyncio.Runner() as runner:
            self.wait = runner.run
            try:
                with suppress(KeyboardInterrupt, EOFError):
                    self.hear()
                    while True:
                        self.obey(_read_line())
            finally:
                out.print()
                self._report(self.wait(self.chat.save()))

    def obey(self, line: str) -> None:
        """A line of the user: a command, or an answer to the person."""
        name, _, words = line.partition(" ")
        if name[:1] == "/" and name[1:] in COMMANDS:
            try:
                getattr(self, name[1:])(words.strip())
            except CallError as error:
                _say("note", error.detail)
        elif name[:1] == "/":
            _say("note", f"There is no command {name}. /help lists them.")
        elif line and self.chat.stop:
            _say("note", "The person has left. /again plays the last message again, /end ends.")
        elif line:
            self.chat.answer(line)
            self.hear()

    def hear(self, advice: Feedback | None = None) -> None:
        """Print the person's message while it arrives."""
        self.advice = None
        self.printer.begin()
        try:
            self.wait(self.chat.person(advice))
        finally:
            out.print()
        if stop := self.chat.stop:
            ended = "wrote nothing, which ends" if stop == "empty" else "ended"
            _say("note", f"The person {ended} the chat.")

    def feedback(self, words: str) -> None:
        if not self.chat.cast.coach:
            _say("note", f"{MISSING.format('coach')} Or give it yourself: /again YOUR FEEDBACK")
            return
        self.advice = self.wait(self.chat.feedback())
        _say("coach", self.advice.text if self.advice else "(nothing)")

    def again(self, words: str) -> None:
        if words:
            self.advice = Feedback(text=words, author="user")
        elif self.advice is None:
            self.feedback("")
        if self.advice is not None:
            self.hear(self.advice)

    def why(self, words: str) -> None:
        if not self.chat.cast.judges:
            _say("note", MISSING.format("judge"))
            return
        score = self.wait(self.chat.judged())
        _say("judge", f"{_number(score)}\n{score.words}")

    def end(self, words: str) -> None:
        raise EOFError

    def help(self, words: str) -> None:
        for name, text in COMMANDS.items():
            _say(f"/{name}", text)

    def _report(self, score: Score | None) -> None:
        if score is None:
            print_note("nothing was said, so no run was written")
            return
        run = shell_path(self.chat.run.path)
        print_note(f"saved in {run}; score {_number(score)}")
        asked = () if score.scored else (f"soul rescore {run} --ask --judge PLAYER",)
        print_next(f"soul show {run}", *asked)


def _number(score: Score) -> str:
    return f"unscored ({score.reason})" if score.value is None else f"{score.value:.2f}"


def _say(who: str, text: str, end: str = "\n") -> None:
    out.print(f"{who:{WIDTH}}", style=STYLES.get(who, "magenta"), end="")
    out.print(_block(text), markup=False, soft_wrap=True, end=end)


def _block(text: str) -> str:
    """Safe text whose lines start below its first one."""
    return sanitise(text).replace("\n", f"\n{' ' * WIDTH}")


def _read_line() -> str:
    """The user's next line, stripped; EOFError at the end of the input."""
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401 - input() then has line editing
        return input(f"{'you':{WIDTH}}").strip()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    _say("you", line.strip())
    return line.strip()
