"""Checking the judge of a stranger's run asks nobody and hides nothing, however it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.evaluation import soul, three_lines
from tests.support.judged import judge
from tests.support.servers.openai_server import ScriptedServer
from tests.support.trust import KEY_NAME, SECRET, Received, check, refused


def test_a_received_folder_is_shown_and_asks_nobody(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    for more in ((), ("--dry-run",), ("--dry-run", "--json"), ("--json",)):
        _, why, _ = refused(foreign, capfd, *check(foreign, tmp_path / "check", *more))
        assert foreign.url in why and KEY_NAME in why
        assert str(foreign.home / "task" / "tasks.yaml") in why and "essay:Essay" in why
        assert str(foreign.home / "rows.jsonl") in why
    assert not (tmp_path / "check").exists()


def test_trusted_for_one_command_and_not_longer(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    assert soul(*check(foreign, tmp_path / "check", "--trust")) == 0
    assert foreign.marker.exists() and len(foreign.server.requests) == 4
    assert set(foreign.server.authorizations) == {f"Bearer {SECRET}"}
    foreign.server.requests.clear()
    foreign.marker.unlink()
    refused(foreign, capfd, *check(foreign, tmp_path / "again"))


def test_the_users_own_run_needs_no_trust(native: Received, tmp_path: Path) -> None:
    assert soul(*check(native, tmp_path / "check")) == 0
    assert len(native.server.requests) == 4
    moved = native.run.rename(native.home / "renamed")
    assert soul("judge", "check", moved, "--out", tmp_path / "again", "--no-pairs") == 0


def test_a_check_by_a_judge_of_ones_own_names_only_what_is_taken(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    with ScriptedServer(answer=judge()) as helper:
        judged = check(foreign, tmp_path / "check", "--judge", f"endpoint:j@{helper.base_url}")
        _, why, _ = refused(foreign, capfd, *judged)
        assert "essay:Essay" in why and foreign.url not in why and KEY_NAME not in why
        assert soul(*judged, "--trust") == 0
        assert not foreign.server.requests and len(helper.requests) == 4


# -- other ways to write it ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "judged",
    [
        "judge: ['endpoint:j@{url}#{key}']",
        "judge: 'endpoint:j@{url}#{key}'",
        "judge: [{{model: j, base_url: '{url}', api_key_env: {key}}}]",
        "judge: [&a {{model: j, base_url: '{url}', api_key_env: {key}}}]\npartner: *a",
        "judge: [&a {{model: i, base_url: '{url}', api_key_env: {key}}}, {{<<: *a, model: j}}]",
        "judge: [{{model: j, base_url: !!binary {url64}, api_key_env: {key}}}]",
        "endpoints: {file}",
    ],
)
def test_no_way_of_writing_hides_an_address_or_a_key(
    foreign: Received, tmp_path: Path, capfd: Any, judged: str
) -> None:
    import base64

    book = tmp_path / "book.yaml"
    player = {"model": "j", "base_url": foreign.url, "api_key_env": KEY_NAME}
    book.write_text(yaml.safe_dump({"endpoints": {"n": player}, "roles": {"judge": "n"}}))
    foreign.edit(lambda settings: [settings.pop(name) for name in ("judge", "partner")] and None)
    line = judged.format(
        url=foreign.url, key=KEY_NAME, file=book,
        url64=base64.b64encode(foreign.url.encode()).decode(),
    )  # fmt: skip
    foreign.config.write_text(f"{foreign.config.read_text()}\n{line}\n")
    _, why, _ = refused(foreign, capfd, *check(foreign, tmp_path / "check"))
    assert foreign.url in why and KEY_NAME in why


def test_a_setting_that_stands_twice_hides_nothing(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    foreign.config.write_text(f"{foreign.config.read_text()}\njudge: []\n")
    assert soul(*check(foreign, tmp_path / "check")) == 2
    assert "'judge' stands here twice" in capfd.readouterr().err and foreign.untouched()


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system ['touch {m}']", "a: &a [*a", ""])
def test_yaml_runs_nothing(foreign: Received, tmp_path: Path, text: str) -> None:
    foreign.config.write_text(text.format(m=foreign.marker))
    assert soul(*check(foreign, tmp_path / "check")) == 2
    assert foreign.untouched()


def test_aliases_neither_hang_nor_hide(foreign: Received, tmp_path: Path, capfd: Any) -> None:
    bomb = "judge: [&a [x], &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]"
    for one, two in zip("bcdefghi", "cdefghij", strict=True):
        bomb += f", &{two} [{','.join([f'*{one}'] * 9)}]"
    foreign.edit(lambda settings: settings.pop("judge") and None)
    foreign.config.write_text(foreign.config.read_text() + bomb + "]\n")
    refused(foreign, capfd, *check(foreign, tmp_path / "check"))
    foreign.config.write_text(foreign.config.read_text().split("judge:")[0] + "judge: &a [*a]\n")
    refused(foreign, capfd, *check(foreign, tmp_path / "check"))


def test_what_is_shown_cannot_write_on_the_terminal(
    foreign: Received, tmp_path: Path, capfd: Any
) -> None:
    def change(settings: dict[str, Any]) -> None:
        settings["judge"][0]["base_url"] = "http://ev\x1b[2K\x1b[1Ail\u202e.example\n/v1"
        settings["judge"][0]["api_key_env"] = "A\rB\x07"
        settings["data"]["essay"] = "rows\nfix: nothing.jsonl"

    foreign.edit(change)
    capfd.readouterr()
    assert soul(*check(foreign, tmp_path / "check")) == 2
    err = capfd.readouterr().err
    three_lines(err)
    assert not set("\x1b\r\x07\u202e") & set(err) and ".example" in err
