"""Which settings can reach code, files or servers; the list covers every setting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from soulkit.distill.config import DistillConfig
from soulkit.eval.config import EvalConfig
from soulkit.models.players.settings import RoleSettings
from soulkit.runs.folder import state_folder
from soulkit.train.config import TrainConfig
from soulkit.trust import DEFAULT_KEY, DEFAULT_SERVER, SERVERS_KEY, SHOWN, reach_of

INERT = """
    refine iteration_steps preference_beta stop_gap
    api_version accept_from activation_checkpointing advantage_std aggregation allow_overflow
    allow_private max_exposure
    attention assistant aux_weight backoff_s batch batch_judges batch_poll_s
    by_batch batch_size beta2 canary_every canary_margin
    checkpoint_every checkpoint_minutes
    clip_ratio_c coach_sees_gold concurrency denominator deterministic dev_by dev_limit dev_share
    device distill_centred distill_clip distill_weight divergence divergence_tail
    divergence_temperature divergence_top_k down_after_s dtype ema_tau engine entropy_coef
    eps_high eps_low estimator estimator_discount estimator_window eval_every example
    feedback_for full fused gpus group_size jsd_beta judge_combine judge_order judge_samples
    keep_best keep_last kind kl_coef lambda_fb ledger limit lora lr lr_schedule mask_truncated
    controls hack_penalty leak_check max_prompt playable rows_per_task threads
    max_attempts max_context max_cost max_grad_norm max_tokens max_unscored method
    mini_batch_prompts norm_length only_copy opd_form packing price_in price_out
    prompts_per_step protocol quantize rate_limit_wait_s ratio reasoning_effort repeats
    prompt_mode
    requests_per_minute retention retention_tokens eval_task probe_every probe_lr probe_method
    probe_steps sampler_cap sampler_gpus shaping_gamma shard launcher
    mix_lambda mix_samples mix_tokens objective split vllm_start_s vllm_sleep
    verify_weights lesson_tokens preset seed side strip_system turns validation_limit window
    sft_batch sft_feedback sft_feedback_always sft_prompt_weight show_draft
    shuffle_feedback show_samples steps stop_flat suite tasks teacher temperature thinking timeout_s
    tokens_per_batch
    tokens_per_minute top_k top_p min_p warmup_steps weight_decay where worked_examples yes
    actor_kind samples keep_top min_reward quota near exclude_overlap by epochs gate held_out_limit
"""
"""Settings that reach nothing outside: numbers, choices, and names of declared tasks."""

BY_TASK = ("data", "eval_data", "held_out", "experts", "teacher_adapters")
"""Settings that name a place for each task."""


@pytest.mark.parametrize("kind", [EvalConfig, TrainConfig, DistillConfig, RoleSettings])
def test_every_setting_is_inert_or_shown(kind: Any) -> None:
    """A new setting that names an address, a key, code or a file must be shown by `reach_of`."""
    player = {"model": "m", "base_url": "http://probe.example", "api_key_env": "PROBE"}
    for name in kind.model_fields.keys() - set(INERT.split()):
        probe: Any = (
            {"tomi": "/probe"} if name in (*BY_TASK, "option", "vllm_arg", "args") else "/probe"
        )
        if name in ("partner", "environment", "judge", "auditor", "coach", "blind_reader",
                    "dev_judge"):  # fmt: skip
            probe = player
        if name == "task_players":
            probe = {"tomi": {"auditor": [player]}}
        assert "probe" in reach_of({name: probe}).words().lower(), name


def test_options_of_tasks_that_name_places_are_shown() -> None:
    reach = words("option: {runtime_url: 'http://probe.example', human_file: people.json}")
    assert "http://probe.example" in reach and "people.json" in reach
    assert words("option: {assistant: live, max_turns: 4}") == ""


def words(text: str) -> str:
    return reach_of(yaml.safe_load(text)).words()


def test_what_is_left_out_is_shown_too() -> None:
    assert DEFAULT_KEY in words("judge: [{model: j, base_url: 'http://a.example'}]")
    assert DEFAULT_SERVER in words("judge: [{model: j, api_key_env: HOME}]")
    assert DEFAULT_KEY in words("judge: [{model: j}]")
    assert DEFAULT_SERVER in words("{kind: api, model: m, base_url: null, api_key_env: HOME}")
    assert "/w" in words("{kind: local, model: /w, base_url: null}")
    assert words("judge: [{kind: actor}]") == words("data: {tomi: 'synth:3'}") == ""
    assert words("judge: [{kind: scripted, model: /etc/passwd}]") == "files: '/etc/passwd'"
    served = words("experts: {tomi: 'endpoint:m@http://e.example'}")
    assert "http://e.example" in served and DEFAULT_KEY in served
    attached = words("engine: 'vllm@http://e.example,http://f.example'")
    assert "http://e.example,http://f.example" in attached and SERVERS_KEY in attached
    assert words("engine: vllm") == words("engine: auto") == ""
    assert "code: 'evil.Middleware'" in words("vllm_arg: {middleware: evil.Middleware}")
    assert "code: '/x'" in words("judge: [{kind: vllm, model: m, args: {tool-parser-plugin: /x}}]")
    assert words("judge: 'vllm:/w'") == "files: '/w'"
    assert words("coach: symbolic\ntrack: none") == ""
    assert "wandb" in words("track: wandb")


def test_an_alias_means_another_thing_in_another_place() -> None:
    assert "/etc/passwd" in words("where: &a {tomi: /etc/passwd}\ndata: *a")
    assert "api.example" in words("sft_feedback_always: &a {a: 'http://api.example'}\npartner: *a")


def test_look_alikes_and_long_lists_do_not_deceive() -> None:
    assert "\\u0430pi.example" in words("base_url: 'http://\u0430pi.example/v1'")
    listed = words(yaml.safe_dump({"judge": [f"endpoint:j@http://{i}.example" for i in range(99)]}))
    assert f"and {99 - SHOWN} more" in listed and "http://0.example" in listed


def test_tasks_files_show_their_classes_and_services(tmp_path: Path) -> None:
    task = {
        "module": "evil:Task", "url": "https://paper.example",
        "options": {"detector_url": "http://d.example", "detector_key_env": "HOME"},
    }  # fmt: skip
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"tasks": {"t": task}}))
    shown = words(f"tasks_file: {tmp_path / 'tasks.yaml'}")
    for part in ("evil:Task", "http://d.example", "'HOME'", "tasks.yaml"):
        assert part in shown
    assert "paper.example" not in shown
    for odd in ("/dev/zero", str(tmp_path), str(tmp_path / "nothing"), "\\0"):
        assert re.search("code: ", words(f'tasks_file: "{odd}"'))


def test_where_the_key_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOULKIT_STATE", "/s")
    assert state_folder() == Path("/s")
    monkeypatch.delenv("SOULKIT_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", "/x")
    assert state_folder() == Path("/x/soulkit")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # ignored, as its standard says
    monkeypatch.setenv("HOME", "/h")
    assert state_folder() == Path("/h/.local/state/soulkit")
    monkeypatch.setenv("SOULKIT_STATE", "relative")
    with pytest.raises(OSError, match="not an absolute path"):
        state_folder()
