"""vLLM servers for the runs of one stage: experts of one base share one, each with its adapter.

They are gone before the generalist is trained, which needs their memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from soulkit.distill.config import DistillConfig
from soulkit.errors import ModelLoadError
from soulkit.eval.actor import eval_needs, on_vllm
from soulkit.eval.config import EvalConfig
from soulkit.models.vllm.engine import interpreter, resolve_engine
from soulkit.models.vllm.pool import Servers, Starts, terms_of


@contextmanager
def shared_servers(
    config: DistillConfig, configs: Sequence[EvalConfig], out: Path, say: Callable[[str], None],
    starts: Starts | None,
) -> Iterator[Servers | None]:  # fmt: skip
    """Within it servers for the evaluations `configs`, started when one of these needs them; None
    where none is sampled by vLLM. Servers that run already are each evaluation's own business."""
    engine = resolve_engine(
        config.engine_choice, python=interpreter(config.vllm_python), device=config.device
    )
    here = [one for one in configs if one.kind == "local"]
    if not here or not on_vllm(engine) or engine.attached:
        yield None
        return
    with Servers(out, terms_of(here[0]), say=say, starts=starts) as servers:
        for one in here:
            with suppress(ModelLoadError):  # an adapter that is not there: its own run says so
                servers.expect(eval_needs(one, engine))
        yield servers
