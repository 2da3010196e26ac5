"""The vLLM engine: a server started by soulkit and called with token ids, as in an episode.

This process does not need torch. The server's process group does the sampling; its processor time
and memory count together with those of this process.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from _processes import Json, forget_peak, serve
from _sampling_cases import Case, forget_group_peak, group_peak, replies, timed

from soulkit.models.codec import Codec
from soulkit.models.vllm.adapters import serve_adapter
from soulkit.models.vllm.capabilities import probe_ids, probe_servers
from soulkit.models.vllm.client import Address, VllmClient
from soulkit.models.vllm.command import ServerSpec
from soulkit.models.vllm.model import VllmModel
from soulkit.models.vllm.replicas import Replicas
from soulkit.models.vllm.server import VllmServer


class Served:
    """A server that this process starts; it ends with this process."""

    def __init__(self, spec: Json) -> None:
        folder = Path(spec["folder"])
        server = ServerSpec(
            model=str(folder / "model"), dtype=spec["dtype"], device=spec["device"],
            max_context=spec["context"], lora_rank=spec["rank"] if spec["lora"] else None,
            in_flight=spec["many"], args=spec["args"], python=spec["python"],
            threads=spec["threads"],
        )  # fmt: skip
        (self.server,) = VllmServer.start_all([server], folder, limit_s=600)
        client = VllmClient(Address(self.server.url, self.server.key))
        self.fleet = Replicas(
            [client], in_flight=spec["many"], checks={self.server.url: self.server.check}
        )
        self.overhead = spec["overhead"]
        self.model = asyncio.run(self._model(folder, spec["lora"]))

    async def _model(self, folder: Path, lora: bool) -> VllmModel:
        codec = Codec.load(folder / "model")
        try:
            abilities = await probe_servers(self.fleet, str(folder / "model"), codec)
            served, ids = abilities.served, probe_ids(codec)
            if lora:
                served = (await serve_adapter(self.fleet, served, folder / "adapter", ids)).name
            return VllmModel(self.fleet, codec, name="base", served=served, abilities=abilities)
        finally:
            await self.fleet.close()

    def run(self, request: Json) -> Json:
        if request.get("stop"):
            self.server.stop()
            return {}
        forget_peak()
        forget_group_peak(self.server.group)
        case = Case(**request["case"])
        spent = timed(case, request["round"], self.overhead, self.sample, self.server.group)
        return {**spent, "server_bytes": group_peak(self.server.group)}

    def sample(self, case: Case, texts: list[str]) -> list[list[int]]:
        return asyncio.run(self._wave(case, texts))

    async def _wave(self, case: Case, texts: list[str]) -> list[list[int]]:
        try:
            return await replies(self.model, case, texts)
        finally:
            await self.fleet.close()


class Versions:
    """The version of vLLM in its Python."""

    def __init__(self, spec: Json) -> None:
        self.python = spec["python"]

    def run(self, request: Json) -> Json:
        from soulkit.models.vllm.settings import vllm_version

        install = vllm_version(self.python)
        return {install.distribution: install.version} if install else {}


if __name__ == "__main__":
    import transformers  # noqa: F401 - import once, before forking

    serve({"vllm": Served, "versions": Versions})
