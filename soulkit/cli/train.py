"""`soul train sft|grpo|ditto`: parse, call, print."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soulkit.cli.console import Bar, console, duration, err, print_json, progress
from soulkit.cli.options import pairs, ratios
from soulkit.errors import ConfigError
from soulkit.runs import default_run_path

if TYPE_CHECKING:
    from soulkit.train.config import TrainConfig

app = typer.Typer(rich_markup_mode=None)


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help)


Task = Annotated[str, _option("Tasks with mixing ratios: hitom,paratomi:0.5", "--task")]
Data = Annotated[list[str] | None, _option("TASK=FILE or TASK=synth:N, for each task.", "--data")]
TasksFile = Annotated[Path | None, _option("A YAML file with your own tasks.", "--tasks")]
Limit = Annotated[int | None, _option("Use at most so many rows of a task.")]
Model = Annotated[str, _option("Hugging Face folder or hub id; 'tiny' for sft.", "--model")]
Adapter = Annotated[str | None, _option("Start from this LoRA adapter.")]
Out = Annotated[Path | None, _option("Run folder; the same command resumes it.", "--out")]
Config = Annotated[Path | None, _option("YAML file with settings; flags win over it.", "--config")]
Steps = Annotated[int | None, _option("Optimizer steps (sft) or rollout steps.")]
Seed = Annotated[int | None, _option("Keys every random choice of the run.")]
Track = Annotated[str | None, _option("tensorboard, wandb or trackio, beside metrics.jsonl.")]
Every = Annotated[int | None, _option("Steps between checkpoints.", "--checkpoint-every")]
EvalEvery = Annotated[int | None, _option("Steps between greedy dev scores.", "--eval-every")]
Json = Annotated[bool, _option("Print summary.json and nothing else on stdout.", "--json")]
Lr = Annotated[float | None, _option("Learning rate.")]
Rank = Annotated[int | None, _option("Rank of the adapter; alpha is twice that.", "--lora-r")]
Set = Annotated[list[str] | None, _option("Any other setting: NAME=VALUE.", "--set")]
Prompts = Annotated[int | None, _option("Prompts per step.", "--prompts")]
Group = Annotated[int | None, _option("Drafts per prompt (G).", "--group-size")]
Temperature = Annotated[float | None, _option("Sampling temperature of the drafts.")]
MaxTokens = Annotated[int | None, _option("Response limit.", "--max-tokens")]
Partner = Annotated[str | None, _option("Model that plays the partner.", "--partner")]
PartnerUrl = Annotated[str | None, _option("Where it is served.", "--partner-base-url")]
PartnerKey = Annotated[str | None, _option("NAME of its key's variable.", "--partner-api-key-env")]
Coach = Annotated[str | None, _option("symbolic, terse, self or model.", "--coach")]
CoachModel = Annotated[str | None, _option("Model that writes feedback.", "--coach-model")]
CoachUrl = Annotated[str | None, _option("Where it is served.", "--coach-base-url")]
CoachKey = Annotated[str | None, _option("NAME of its key's variable.", "--coach-api-key-env")]
Reader = Annotated[str | None, _option("Model that checks for leaks.", "--blind-reader")]
ReaderUrl = Annotated[str | None, _option("Where it is served.", "--blind-reader-base-url")]
FeedbackFor = Annotated[str | None, _option("all, imperfect or task.", "--feedback-for")]
ProtocolFlag = Annotated[str | None, _option("paper or reference.", "--protocol")]
Full = Annotated[bool | None, _option("Train all weights, or an adapter.", "--full/--lora")]
Lessons = Annotated[float | None, _option("Share of prompts with feedback.", "--feedback")]
Batch = Annotated[int | None, _option("Examples per step.", "--batch")]
LambdaFb = Annotated[float | None, _option("Weight of the fed-back loss.", "--lambda-fb")]
OnlyCopy = Annotated[bool | None, _option("Ablation: train copies alone.", "--only-copy")]
Shuffle = Annotated[bool | None, _option("Control: others' feedback.", "--shuffle-feedback")]


@app.command()
def sft(
    task: Task, model: Model, data: Data = None, tasks: TasksFile = None, limit: Limit = None,
    full: Full = None, feedback: Lessons = None, coach: Coach = None, batch: Batch = None,
    adapter: Adapter = None, out: Out = None, config: Config = None, steps: Steps = None,
    seed: Seed = None, lr: Lr = None, lora_r: Rank = None, track: Track = None,
    every: Every = None, options: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Imitate the tasks' gold episodes (negative log-likelihood)."""
    flags = {
        "method": "sft", "tasks": ratios(task), "model": model, "data": pairs(data, task),
        "tasks_file": tasks and str(tasks), "limit": limit, "full": full, "sft_feedback": feedback,
        "coach": coach, "sft_batch": batch, "adapter": adapter, "steps": steps, "seed": seed,
        "lr": lr, **_lora(lora_r), "track": track, "checkpoint_every": every, **_set(options),
    }  # fmt: skip
    _run(config, flags, out, as_json)


@app.command()
def grpo(
    task: Task, model: Model, data: Data = None, tasks: TasksFile = None, limit: Limit = None,
    prompts: Prompts = None, group_size: Group = None, temperature: Temperature = None,
    max_tokens: MaxTokens = None, partner: Partner = None, partner_base_url: PartnerUrl = None,
    partner_api_key_env: PartnerKey = None, protocol: ProtocolFlag = None, adapter: Adapter = None,
    out: Out = None, config: Config = None, steps: Steps = None, seed: Seed = None, lr: Lr = None,
    lora_r: Rank = None, track: Track = None, every: Every = None, eval_every: EvalEvery = None,
    options: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Reinforce a scalar reward (GRPO)."""
    flags = {
        "method": "grpo", "tasks": ratios(task), "model": model, "data": pairs(data, task),
        "tasks_file": tasks and str(tasks), "limit": limit, "prompts_per_step": prompts,
        "group_size": group_size, "temperature": temperature, "max_tokens": max_tokens,
        **_endpoint("partner", partner, partner_base_url, partner_api_key_env),
        "protocol": protocol, "adapter": adapter, "steps": steps, "seed": seed, "lr": lr,
        **_lora(lora_r), "track": track, "checkpoint_every": every, "eval_every": eval_every,
        **_set(options),
    }  # fmt: skip
    _run(config, flags, out, as_json)


@app.command()
def ditto(
    task: Task, model: Model, data: Data = None, tasks: TasksFile = None, limit: Limit = None,
    prompts: Prompts = None, group_size: Group = None, temperature: Temperature = None,
    max_tokens: MaxTokens = None, partner: Partner = None, partner_base_url: PartnerUrl = None,
    partner_api_key_env: PartnerKey = None, coach: Coach = None, coach_model: CoachModel = None,
    coach_base_url: CoachUrl = None, coach_api_key_env: CoachKey = None,
    feedback_for: FeedbackFor = None, blind_reader: Reader = None,
    blind_reader_base_url: ReaderUrl = None,
    lambda_fb: LambdaFb = None,
    only_copy: OnlyCopy = None,
    shuffle_feedback: Shuffle = None,
    protocol: ProtocolFlag = None, adapter: Adapter = None, out: Out = None, config: Config = None,
    steps: Steps = None, seed: Seed = None, lr: Lr = None, lora_r: Rank = None, track: Track = None,
    every: Every = None, eval_every: EvalEvery = None, options: Set = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Learn from verbal feedback (Ditto)."""
    coach = "model" if coach_model and coach is None else coach
    flags = {
        "method": "ditto", "tasks": ratios(task), "model": model, "data": pairs(data, task),
        "tasks_file": tasks and str(tasks), "limit": limit, "prompts_per_step": prompts,
        "group_size": group_size, "temperature": temperature, "max_tokens": max_tokens,
        **_endpoint("partner", partner, partner_base_url, partner_api_key_env),
        **_endpoint("coach_model", coach_model, coach_base_url, coach_api_key_env),
        **_endpoint("blind_reader", blind_reader, blind_reader_base_url, None),
        "coach": coach, "feedback_for": feedback_for, "lambda_fb": lambda_fb,
        "only_copy": only_copy, "shuffle_feedback": shuffle_feedback, "protocol": protocol,
        "adapter": adapter, "steps": steps, "seed": seed, "lr": lr, **_lora(lora_r),
        "track": track, "checkpoint_every": every, "eval_every": eval_every, **_set(options),
    }  # fmt: skip
    _run(config, flags, out, as_json)


def _lora(rank: int | None) -> dict[str, Any]:
    return {} if rank is None else {"lora.r": rank, "lora.alpha": 2 * rank}


def _endpoint(name: str, model: str | None, url: str | None, key: str | None) -> dict[str, Any]:
    if model is None and (url or key):
        raise ConfigError(
            f"An address was given for the {name.removesuffix('_model')}, but no model.",
            "The server has to be told which model to use.",
            f"Add --{name.replace('_', '-')} MODEL.",
        )
    parts = {"model": model, "base_url": url, "api_key_env": key}
    return {f"{name}.{key}": value for key, value in parts.items() if value is not None}


def _set(options: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE settings, values read as YAML."""
    import yaml

    found: dict[str, Any] = {}
    for option in options or ():
        name, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(
                f"'{option}' is no setting.",
                "Settings are given as NAME=VALUE.",
                "Write --set kl_coef=0.01, for example.",
            )
        found[name.strip()] = yaml.safe_load(value)
    return found


def _run(file: Path | None, flags: dict[str, Any], out: Path | None, as_json: bool) -> None:
    from soulkit.train.config import TrainConfig
    from soulkit.train.run import train

    config = TrainConfig.load(file, flags=flags)
    out = out or default_run_path(f"train-{config.method}", list(config.tasks))
    with progress(config.steps, f"train {config.method}") as bar:
        summary = train(config, out, step_shower(bar))
    if as_json:
        print_json(summary)
    else:
        _print(config, out, summary)


def step_shower(bar: Bar) -> Callable[[dict[str, Any]], None]:
    """Moves `bar` to each step that is shown to it; a resumed run begins in the middle."""
    shown = 0

    def show(line: dict[str, Any]) -> None:
        nonlocal shown
        bar.advance(line["step"] + 1 - shown, one_line_summary(line))
        shown = line["step"] + 1

    return show


def one_line_summary(line: dict[str, Any]) -> str:
    """A step in a few words: what a person watches."""
    shown = {
        "draft": line.get("draft_reward"), "refined": line.get("refined_reward"),
        "gap": line.get("loo_gap"), "loss": line.get("loss"), "kl": line.get("kl"),
    }  # fmt: skip
    parts = [f"{name} {value:.3f}" for name, value in shown.items() if value is not None]
    dev = [
        f"{task} {mean:.3f}" for task, mean in (line.get("eval") or {}).items() if mean is not None
    ]
    return " ".join(parts + (["dev", *dev] if dev else []))


def _print(config: TrainConfig, out: Path, summary: dict[str, Any]) -> None:
    from soulkit.report.table import feedback_text

    rewards = summary.get("rewards") or {}
    print_line = console().print
    steps = summary["steps"]
    print_line(f"{steps} step{'s' * (steps != 1)} in {duration(summary['seconds'])}")
    for name in ("draft_reward", "refined_reward"):
        if rewards.get(name) is not None:
            print_line(f"  {name.replace('_', ' '):18} {rewards[name]:.3f}")
    if rewards.get("loo_gap") is not None:
        print_line(f"  leave-one-out gap  {_with_interval(rewards, 'loo_gap')}")
    told = feedback_text(summary)
    if told:
        print_line(f"  feedback           {told}", markup=False, soft_wrap=True)
    unscored = summary.get("n", 0) - summary.get("n_scored", 0)
    if unscored:
        last = summary["summary_steps"]
        print_line(f"  unscored           {unscored} of {summary['n']} in the last {last} steps")
    err.print(
        f"run folder {out}; weights {out / 'model'}; look closer with: soul report {out}",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def _with_interval(values: dict[str, Any], name: str) -> str:
    low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
    interval = "" if low is None or high is None else f" [{low:+.3f}, {high:+.3f}]"
    return f"{values[name]:+.3f}{interval}"
