"""Exports a model to a folder that other programs load: merged weights, or an adapter.

    base in float32 + adapter ──▶ merged ──▶ number format of the base ──▶ .DIR.part ──▶ DIR
                        └──▶ logits before        compared with        logits of the files

Both logits are computed in float32; above `LIMITS` nothing is written. An adapter that was trained
on an nf4 base corrects its rounding, so it is merged into the unpacked nf4 weights. No sampling
settings of the base are exported: `generation_config.json` has only ids.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from soulkit.api_keys import remember
from soulkit.distill.experts import Base, base_of_adapter, base_of_note, named_base, same_base
from soulkit.distill.generalist import generalist_folder
from soulkit.errors import ConfigError, DataError, ModelLoadError
from soulkit.models.codec import Codec
from soulkit.models.local import loading
from soulkit.models.local.loading import ADAPTER_CONFIG, NOTE
from soulkit.models.local.quantize import is_quantised
from soulkit.models.local.weights import (
    check_adapter_weights,
    stored_types,
    unusable,
    weights_hash,
)
from soulkit.models.vllm.command import RANKS
from soulkit.people.continuations import models_of
from soulkit.reporting import SILENT, Reporter
from soulkit.runs.folder import is_run
from soulkit.runs.jsonl import read_object, write_aside, write_json
from soulkit.serving import certificate
from soulkit.types import Segment
from soulkit.version import __version__

Form = Literal["merged", "adapter"]
LIMITS = {"float32": 1e-4, "bfloat16": 1e-3, "float16": 1e-3}
"""Of float32 weights: largest change of a logit. Of the others: mean KL divergence, in nats."""
PROBES = (
    "I ordered two lamps last week and only one arrived. What can you do about it?",
    "1. Yes  2. No  3. I am not sure. Answer with one number, and say why.",
    "You are Ana, 34, a nurse, and you make typing errors. Was kostet das? 为什么这么贵？ 🙂",
)
"""Prompts whose logits are compared."""
CODE = ("*.bin", "*.pt", "*.pth")
"""Weights that can run code when they are loaded."""
PROCESSOR = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
"""Files with which a server reads images."""


class Source(NamedTuple):
    """The weights to export, and their base."""

    folder: Path
    adapter: bool
    base: Base
    note: Mapping[str, Any]


def find_source(name: str, base: str | None = None) -> Source:
    """The last weights of a run, or those of a checkpoint, an adapter or a model.

    `base` replaces the recorded base of an adapter, whose folder may have been moved.
    """
    from soulkit.train.state.checkpoint import POSITION, DamagedCheckpoint, damage

    generalist = generalist_folder(Path(name))
    model = models_of(str(generalist) if is_run(generalist) else name, {})[-1]
    folder = loading.adapter_folder(model.adapter or model.player.model)
    if (folder / POSITION).is_file() and (fault := damage(folder)):
        raise DamagedCheckpoint(folder, fault)
    note, settings = read_object(folder / NOTE), read_object(folder / ADAPTER_CONFIG)
    if not settings:
        loading.locate(folder)  # names what a model lacks
    recorded = base_of_note(note) if note.get("base") else base_of_adapter(settings)
    used = named_base(base) if base else Base(where=recorded.where, revision=recorded.revision)
    if settings and same_base(recorded, used) is False:
        raise ModelLoadError(
            f"'{used.name}' is not the base of the adapter '{folder}'.",
            "Its weights differ from those that the adapter was trained on.",
            "Name the folder or Hub revision with these weights: --base MODEL",
        )
    return Source(folder, bool(settings), used, note)


def export_model(
    source: Source, out: Path, form: Form, *, device: str = "cpu", reporter: Reporter = SILENT
) -> dict[str, Any]:
    """Write the export to `out`, and return its record; the same export is not repeated.

    ConfigError if `out` contains anything else. ModelLoadError if the weights cannot be merged, or
    if that would change the model.
    """
    from soulkit.train.state.checkpoint import replace_folder

    if form == "adapter" and not source.adapter:
        raise ConfigError(
            f"'{source.folder}' contains all weights of a model, not an adapter.",
            "Only an adapter can be exported as one.",
            "Use --merge, which copies full weights.",
        )
    out, folder = out.expanduser().resolve(), source.folder
    weights = loading.adapter_hash(folder) if source.adapter else weights_hash(folder)
    record = {"form": form, "weights": weights, "base": source.base.proof}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        before: dict[str, Any] = read_object(out / NOTE).get("export", {})
        if not record.items() <= before.items():
            raise ConfigError(
                f"'{out}' already exists and is not empty.",
                "An export never overwrites other files.",
                "Choose another --out, or delete it.",
            )
        return before

    def fill(aside: Path) -> None:
        write = _merge if source.adapter and form == "merged" else _copy
        record.update(write(source, aside, device, reporter))
        write_json(aside / NOTE, _note(source, form) | {"export": record})
        certificate.copy_certificate(str(source.folder), aside)
        lines = certificate.certificate_lines(certificate.find_certificate(str(aside)))
        write_aside(aside / "README.md", _card(source, record, out.name, lines).encode())

    try:
        replace_folder(out, fill)
    except BaseException:
        shutil.rmtree(out.with_name(f".{out.name}.part"), ignore_errors=True)
        raise
    return record


def _copy(source: Source, aside: Path, device: str, reporter: Reporter) -> dict[str, Any]:
    """Copy an adapter, or a model, which is loaded once."""
    if source.adapter:
        check_adapter_weights(source.folder)
    with reporter.working("copying the weights"):
        shutil.copytree(source.folder, aside, dirs_exist_ok=True, ignore=not_copied)
        if source.adapter:
            return {}
        place = loading.pick_device(device)
        model, tokenizer = loading.load_base(loading.locate(aside), place, "auto")
        _settle(model, tokenizer, source.base, aside)
        model.generation_config.save_pretrained(aside)
    return {"dtype": _stored(model)}


def not_copied(folder: str, names: list[str]) -> set[str]:
    """The names that are not copied: states of trainings, and files that can run code.

    ModelLoadError for what is no regular file of this folder. The Hub's cache consists of links to
    files beside its snapshots.
    """
    from soulkit.train.state.checkpoint import STATE

    skipped = {*shutil.ignore_patterns(*STATE, certificate.FILE, ".*", *CODE)(folder, names)}
    above = [one.parent for one in Path(folder).resolve().parents if one.name == "snapshots"]
    blobs = above[0] / "blobs" if above else None
    for path in (Path(folder, name) for name in names if name not in skipped):
        within = not path.is_symlink() or path.resolve().parent == blobs
        if not (within and (path.is_file() or path.is_dir())):
            raise unusable(path, "it is a link, pipe, device or socket, which is not exported")
    return skipped


def _merge(source: Source, aside: Path, device: str, reporter: Reporter) -> dict[str, Any]:
    """Merge the adapter into its base and compare the logits; one copy of the weights at a time."""
    import torch

    place, quantize = loading.pick_device(device), source.note.get("base", {}).get("quantize")
    with reporter.working("loading the base", alone=True):
        base = loading.locate(source.base.name)
        model, tokenizer = loading.load_base(base, place, "float32", quantize or "none")
        dtype = _stored(model)
        if quantize:
            model = model.dequantize(dtype=torch.float32)
        elif kind := is_quantised(model):
            raise ModelLoadError(
                f"The base '{base}' is quantised ({kind}).",
                "The merged weights would be rounded to that format again.",
                "Use --adapter, and serve the adapter with its base.",
            )
        model = loading.load_adapter(model.to(place), source.folder).eval()
    with reporter.working("merging"):
        before = _logits(model, tokenizer)
        model = model.merge_and_unload().to(getattr(torch, dtype))
        _settle(model, tokenizer, source.base, aside)
        loading.save_model(model, tokenizer, aside)
        del model
    with reporter.working("comparing the logits"):
        saved, _ = loading.load_base(loading.locate(aside), place, "float32")
        after = _logits(saved.to(place).eval(), tokenizer)
    old, new = before.log_softmax(-1), after.log_softmax(-1)
    change = float((before - after).abs().max())
    kl = float((old.exp() * (old - new)).sum(-1).mean())
    if not (change if dtype == "float32" else kl) <= LIMITS[dtype]:  # also for NaN
        raise ModelLoadError(
            f"The merged model differs: logits by up to {change:.2g}, mean KL {kl:.2g} nats.",
            f"Its weights are in {dtype}, like the base, where the limit is {LIMITS[dtype]} "
            f"({'logits' if dtype == 'float32' else 'KL'}). Nothing was written.",
            "Use --adapter, and serve the adapter with its base.",
        )
    return {"dtype": dtype, "logit_change": change, "kl": kl}


def _stored(model: Any) -> str:
    """The number format of the model's files; of several, that of 16 bits."""
    kinds = stored_types(model.config._name_or_path, model.config._commit_hash)
    return "bfloat16" if "BF16" in kinds else "float16" if "F16" in kinds else "float32"


def _settle(model: Any, tokenizer: Any, base: Base, aside: Path) -> None:
    """Remove the model's sampling settings, and write the files with which it reads images."""
    from transformers import GenerationConfig

    before = model.generation_config
    ends = before.eos_token_id if isinstance(before.eos_token_id, list) else [before.eos_token_id]
    ends = sorted(Codec(tokenizer, end_ids=ends).end_ids)
    model.generation_config = GenerationConfig(
        bos_token_id=before.bos_token_id, pad_token_id=before.pad_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends,
    )  # fmt: skip
    if base.where and "Image" in loading.auto_class(model.config).__name__:
        for name in PROCESSOR:
            if settings := loading.checkpoint_json(base.where, name, base.revision or None):
                write_json(aside / name, settings)


def _logits(model: Any, tokenizer: Any) -> Any:
    """float32 logits [tokens of all prompts, vocabulary]."""
    import torch

    rows, codec = [], Codec(tokenizer)
    for text in PROBES:
        ids = torch.tensor([codec.prompt_ids([Segment("user", text)])], device=model.device)
        with torch.no_grad():
            rows.append(model(input_ids=ids).logits[0].float().cpu())
    return torch.cat(rows)


def _note(source: Source, form: Form) -> dict[str, Any]:
    """The note of the weights, without folders that merged weights do not need."""
    from soulkit.train.state.model_card import SCHEMA

    kind = "model" if form == "merged" else "adapter"
    note = {"schema": SCHEMA, "soulkit": __version__, **source.note, "kind": kind}
    for part in ("adapter", "base") if form == "merged" else ("adapter",):
        if Path(place := note.get(part, {}).get("model", "")).is_absolute():
            note[part] = {**note[part], "model": Path(place).name}
    return note


def _card(source: Source, record: Mapping[str, Any], name: str, lines: Sequence[str]) -> str:
    """How to serve the export, and the part on training of the weights' own card."""
    import yaml
    from jinja2 import Environment, PackageLoader

    base, card, merged = source.base, source.folder / "README.md", record["form"] == "merged"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    front = {"tags": ["soulkit"], **loading.base_licence(base.where, base.revision),
             **loading.front_matter(card), "pipeline_tag": "text-generation",
             "library_name": "transformers" if merged else "peft"}  # fmt: skip
    front["tags"] = [one for one in front["tags"] if one != "lora" or not merged]
    front.pop("base_model", None)
    if base.where and not base.is_folder:  # the Hub only knows ids
        relation = "finetune" if merged else "adapter"
        front |= {"base_model": base.where, "base_model_relation": relation}
    rank = read_object(source.folder / ADAPTER_CONFIG).get("r", 1)
    loader = Environment(loader=PackageLoader("soulkit", "serving"), trim_blocks=True,
                         lstrip_blocks=True, keep_trailing_newline=True)  # fmt: skip
    return loader.get_template("export_card.md.j2").render(
        front=yaml.safe_dump(front, sort_keys=False, allow_unicode=True).rstrip(), name=name,
        merged=merged, source=source, base=base, record=record, version=__version__, lines=lines,
        base_name=Path(base.where).name if base.is_folder else base.name, prompts=len(PROBES),
        rank=next((one for one in RANKS if one >= rank), RANKS[-1]),
        training=re.sub(r"(?s)\n## Loading\n.*?(?=\n## |\Z)", "", text.partition("\n# ")[2]),
    )  # fmt: skip


def hub_token(source: Source, form: Form) -> str:
    """The token of HF_TOKEN; ConfigError without one, and if others could not load the export."""
    if form == "adapter" and source.base.is_folder:
        raise ConfigError(
            "An adapter whose base is a local folder cannot be pushed.",
            f"Others do not have '{source.base.where}'.",
            "Use --merge, or train on a model of the Hub.",
        )
    if not (token := os.environ.get("HF_TOKEN", "")):
        raise ConfigError(
            "--push-to-hub needs a token in the environment variable HF_TOKEN.",
            "It is not set, and a token that the Hub's client has stored is not used.",
            "Create a token with write access on the Hub, and set HF_TOKEN.",
        )
    remember(token)
    return token


def push_export(folder: Path, repo: str, token: str) -> str:
    """Upload an export to a private repository, made if it is missing; returns its address.

    ConfigError for a public repository; DataError if the Hub refuses.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)
    try:
        url = api.create_repo(repo, private=True, exist_ok=True)
        if not api.model_info(repo).private:
            raise ConfigError(
                f"The repository '{repo}' is public.",
                "Weights that learned from people's chats may contain private data.",
                "Name a new repository. You can make it public later, on its page.",
            )
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"soulkit {__version__}")
    except (OSError, ValueError) as error:  # errors of the Hub's client are OSErrors
        raise DataError(
            f"The export is in '{folder}', but was not pushed to '{repo}'.",
            f"The Hub client says: {loading.first_line(error)}",
            "Check the name, the token and the network; then run the same command again.",
        ) from error
    return str(url)
