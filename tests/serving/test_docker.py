"""The files in docker/: they name files that exist, and commands that parse. Nothing is built."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from soulkit.cli.app import load

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text("utf-8")
COMPOSE = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text("utf-8"))


def instructions(name: str) -> list[str]:
    """The arguments of these instructions, continued lines joined."""
    joined = re.sub(r"\\\n\s*", "", DOCKERFILE)
    return re.findall(rf"^(?:HEALTHCHECK .*)?{name} (.*)$", joined, re.MULTILINE)


def parsed(words: list[str], tmp_path: Path) -> dict[str, Any]:
    """The options of a `soul serve` command line in a container."""
    file = tmp_path / "personas.jsonl"
    file.touch()
    here = [str(file) if word == "/personas.jsonl" else word for word in words]
    context = load("serve").make_context("serve", here)
    return dict(context.params)


def test_the_dockerfile_copies_what_exists_and_serves_safely(tmp_path: Path) -> None:
    sources = [word for line in instructions("COPY") for word in line.split()[:-1]]
    assert [name for name in sources if not (ROOT / name).exists()] == []
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    included = re.findall(r'^"([\w/.]+)" = "soulkit/', project, re.MULTILINE)
    assert {name.partition("/")[0] for name in included} <= set(sources)
    soul, serve, *always = json.loads(instructions("ENTRYPOINT")[0])
    usual = json.loads(instructions("CMD")[-1])
    options = parsed([*always, *usual], tmp_path)
    assert (soul, serve, options["host"], options["port"]) == ("soul", "serve", "0.0.0.0", 8000)
    assert options["api_key_env"] == "SERVER_KEY" and options["model"] == "/model"
    assert instructions("USER") == ["soul"] and instructions("EXPOSE") == ["8000"]


def test_the_compose_file_puts_a_person_before_vllm(tmp_path: Path) -> None:
    vllm, person = (COMPOSE["services"][name] for name in ("vllm", "person"))
    flags = dict(zip(vllm["command"][::2], vllm["command"][1::2], strict=True))
    options = parsed(person["command"], tmp_path)
    assert flags["--served-model-name"] == options["model"]
    assert options["engine"] == "vllm@http://vllm:8000" and options["persona"]
    assert flags["--generation-config"] == "vllm" and "ports" not in vllm
    assert all(port.startswith("127.0.0.1:") for port in person["ports"])
    assert (ROOT / "docker" / person["build"]["context"] / person["build"]["dockerfile"]).is_file()
    required = re.findall(r"\$\{(\w+):\?", json.dumps(COMPOSE))
    page = (ROOT / "docs" / "guides" / "serve.md").read_text("utf-8")
    assert required and all(f"{name}=" in page for name in required)
