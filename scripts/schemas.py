"""Generate the JSON Schemas in soulkit/schemas/ from the types of the files that a run writes.

    .venv/bin/python scripts/schemas.py            # write
    .venv/bin/python scripts/schemas.py --check    # exit 1 if a schema is stale

A change that older versions of soulkit would misread needs a new version in the schema's name
(`soulkit/runs/jsonl.py`); a new field that they can ignore does not.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter

from soulkit.data import rows as rows_module
from soulkit.distill.report import Distillation
from soulkit.doctor.checks import Checkup
from soulkit.eval.results.summary import Summary
from soulkit.runs.jsonl import (
    CERTIFICATE_SCHEMA,
    CONTROLS_SCHEMA,
    DISTILLATION_SCHEMA,
    DOCTOR_SCHEMA,
    EPISODES_SCHEMA,
    METRICS_SCHEMA,
    SCHEMA,
    SUMMARY_SCHEMA,
    TASKS_SCHEMA,
    schema_file,
)
from soulkit.runs.record_lines import ControlLine, RecordLine
from soulkit.serving.certificate import Certificate
from soulkit.tasks.kit import spec as spec_module
from soulkit.tasks.kit.declared import keys as keys_module
from soulkit.tasks.kit.declared.keys import KIND_KEYS
from soulkit.tasks.kit.spec import RegistryFile
from soulkit.train.state.metrics import StepLine

Schema = dict[str, Any]
DIALECT = "https://json-schema.org/draft/2020-12/schema"
NUMBER: Schema = {"type": ["number", "null"]}
TRAINING: dict[str, Schema] = {
    "steps": {"type": "integer"}, "summary_steps": {"type": "integer"},
    "rewards": {"type": "object", "additionalProperties": NUMBER},
    "feedback": {"type": "object"}, "calls": {"type": "object"}, "canaries": {"type": "object"},
    "retention": {"type": "object"}, "probes": {"type": "object"},
    "dev_steps": {"type": "integer"}, "best_step": {"type": "integer"}, "best_dev": NUMBER,
    "best_valid": NUMBER, "best_checkpoint": {"type": "string"}, "validation": {"type": "object"},
    "lessons": {"type": "object"}, "unusable": {"type": "object"}, "written": {"type": "object"},
}  # fmt: skip
"""Fields that only the summary of a training has."""


def schemas() -> dict[str, Schema]:
    """Name → schema, for every schema."""
    return {
        EPISODES_SCHEMA: _of_type(RecordLine, "A line of episodes.jsonl or dev.jsonl"),
        CONTROLS_SCHEMA: _of_type(ControlLine, "A line of controls.jsonl"),
        METRICS_SCHEMA: metrics_schema(),
        SUMMARY_SCHEMA: summary_schema(),
        DISTILLATION_SCHEMA: distillation_schema(),
        DOCTOR_SCHEMA: doctor_schema(),
        CERTIFICATE_SCHEMA: certificate_schema(),
        TASKS_SCHEMA: tasks_schema(),
    }


def _of_type(kind: Any, title: str) -> Schema:
    return {"$schema": DIALECT, **TypeAdapter(kind).json_schema(), "title": title}


def metrics_schema() -> Schema:
    """The schema of a line of metrics.jsonl: its names are fixed or begin with a fixed prefix."""
    properties, patterns = _named(StepLine)
    return {
        "$schema": DIALECT, "title": "A line of metrics.jsonl", "type": "object",
        "properties": {SCHEMA: {"const": METRICS_SCHEMA}, **properties},
        "patternProperties": patterns, "required": [SCHEMA, "step"],
    }  # fmt: skip


def _named(kind: Any) -> tuple[dict[str, Schema], dict[str, Schema]]:
    """(name → schema, name pattern → schema) of the fields of a metrics section."""
    properties: dict[str, Schema] = {}
    patterns: dict[str, Schema] = {}
    types = TypeAdapter(kind).json_schema()["properties"]
    for one in fields(kind):
        if "section" in one.metadata:
            inner, others = _named(one.default_factory)
            properties, patterns = properties | inner, patterns | others
        elif "prefix" in one.metadata:
            patterns[f"^{one.metadata['prefix']}"] = NUMBER
        else:
            kind_of_value = types[one.name].get("type")
            properties[one.metadata["name"]] = {"type": kind_of_value} if kind_of_value else NUMBER
    return properties, patterns


def summary_schema() -> Schema:
    """The schema of summary.json, of an evaluation or a training."""
    schema = _of_type(Summary, "summary.json")
    provenance = {"type": "object", "description": "Models, rows and settings of the run."}
    schema["properties"] = {
        SCHEMA: {"const": SUMMARY_SCHEMA}, **schema["properties"], **TRAINING,
        "distillation": {"type": "object", "description": "See distillation-2.json."},
        "provenance": provenance,
    }  # fmt: skip
    return {**schema, "required": [SCHEMA, "tasks", "provenance"]}


def distillation_schema() -> Schema:
    """The schema of distillation.json and of `distillation` in a summary."""
    schema = _of_type(Distillation, "distillation.json")
    schema["properties"] = {SCHEMA: {"const": DISTILLATION_SCHEMA}, **schema["properties"]}
    return {**schema, "required": [SCHEMA, *schema.get("required", ())]}


def doctor_schema() -> Schema:
    """The schema of the output of `soul doctor --json`."""
    schema = _of_type(Checkup, "What soul doctor --json prints")
    schema["properties"] = {
        SCHEMA: {"const": DOCTOR_SCHEMA},
        "problems": {
            "type": "integer",
            "description": "Number of lines and players with a problem.",
        },
        **schema["properties"],
    }
    return {**schema, "required": [SCHEMA, "problems", "lines", "players"]}


def certificate_schema() -> Schema:
    """The schema of certificate.json."""
    schema = _of_type(Certificate, "certificate.json")
    schema["properties"] = {SCHEMA: {"const": CERTIFICATE_SCHEMA}, **schema["properties"]}
    return {**schema, "required": [SCHEMA, *schema["required"]]}


TEXT: Schema = {"type": "string"}
TEXTS: Schema = {"type": "array", "items": TEXT}
SHORT_FORMS: dict[str, list[Schema]] = {
    "metric": [TEXT], "tags": [TEXTS], "options": [TEXT, TEXTS], "judge": [TEXT],
}  # fmt: skip
"""Keys of tasks without code that take simpler values, too; `expand` writes them in full."""


def tasks_schema() -> Schema:
    """The schema of a tasks file. A task has the keys of its kind, or those of a Python task."""
    schema = RegistryFile.model_json_schema()
    defs = schema["$defs"]
    for name, docs in field_docs().items():
        for field, part in defs.get(name, {}).get("properties", {}).items():
            part.pop("title", None)
            part |= {"description": docs[field]} if field in docs else {}
    python, keys = defs["TaskSpec"], defs.pop("Declaration")["properties"]
    del python["properties"]["declaration"], keys["feedback"]
    shared = {
        name: {"$ref": f"#/$defs/TaskSpec/properties/{name}"} for name in python["properties"]
    }
    feedback = {**defs["FeedbackSpec"]["properties"], **defs["FeedbackKeys"]["properties"]}
    defs["Feedback"] = {**defs["FeedbackSpec"], "properties": feedback}
    defs["ColumnChange"] = {k: v for k, v in defs["Column"].items() if k != "required"}
    dimension = {"anyOf": [TEXT, {"$ref": "#/$defs/RubricDimension"}]}
    dimensions = defs["JudgeKeys"]["properties"]["dimensions"]
    for key in ("additionalProperties", "patternProperties"):
        if isinstance(dimensions.get(key), dict):
            named = dimensions[key]
            dimensions[key] = dict.fromkeys(named, dimension) if key[0] == "p" else dimension
    scorers = [defs["Scorer"]["properties"]["kind"], {"$ref": "#/$defs/Scorer"}]
    keys["scorer"] = {"anyOf": [*scorers, {"type": "array", "items": {"anyOf": scorers}}]}
    shared["columns"] = {
        "type": "object",
        "additionalProperties": {"anyOf": [TEXT, {"$ref": "#/$defs/ColumnChange"}]},
    }
    shared |= {"feedback": {"$ref": "#/$defs/Feedback"}, **keys}
    defs["Declaration"] = {
        "type": "object", "required": ["prompt"], "additionalProperties": False,
        "properties": {name: with_short_forms(name, part) for name, part in shared.items()},
        "allOf": [{"if": kind_is(kind), "then": kind_rule(kind)} for kind in KIND_KEYS],
    }  # fmt: skip
    python["properties"]["kind"] = False
    defs["Task"] = {
        "type": "object",
        "allOf": [
            {"if": {"properties": {"kind": False}}, "then": {"$ref": "#/$defs/TaskSpec"}},
            {"if": {"required": ["kind"]}, "then": {"$ref": "#/$defs/Declaration"}},
        ],
    }
    schema["properties"]["tasks"]["additionalProperties"] = {"$ref": "#/$defs/Task"}
    schema["properties"]["suites"]["additionalProperties"] = {
        "anyOf": [TEXTS, {"$ref": "#/$defs/Suite"}]
    }
    return {"$schema": DIALECT, **schema, "title": "A tasks file of soulkit"}


def kind_is(kind: str) -> Schema:
    return {"required": ["kind"], "properties": {"kind": {"const": kind}}}


def kind_rule(kind: str) -> Schema:
    """The keys that a task of this kind needs, and those that it cannot have."""
    required, others = KIND_KEYS[kind]
    special = {key for keys in KIND_KEYS.values() for part in keys for key in part}
    excluded = sorted(special - {*required, *others})
    return {"required": [*required], "properties": dict.fromkeys(excluded, False)}


def with_short_forms(key: str, schema: Schema) -> Schema:
    """The schema of a key's value, or of its short forms."""
    about = {k: v for k, v in schema.items() if k == "description"}
    full = {k: v for k, v in schema.items() if k != "description"}
    return {**about, "anyOf": [*SHORT_FORMS[key], full]} if key in SHORT_FORMS else schema


def field_docs() -> dict[str, dict[str, str]]:
    """Class → field → the docstring below it, of the classes of declarations."""
    docs: dict[str, dict[str, str]] = {}
    for module in (keys_module, spec_module, rows_module):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                pairs = zip(node.body, node.body[1:], strict=False)
                docs[node.name] = {
                    one.target.id: " ".join(after.value.value.split())
                    for one, after in pairs
                    if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
                    and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                }  # fmt: skip
    return docs


def text_of(schema: Schema) -> str:
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> int:
    stale = []
    for name, schema in schemas().items():
        file = schema_file(name)
        if not file.is_file() or file.read_text(encoding="utf-8") != text_of(schema):
            stale.append(file.name)
            if "--check" not in sys.argv:
                file.parent.mkdir(exist_ok=True)
                file.write_text(text_of(schema), encoding="utf-8")
    print(f"{', '.join(stale) or 'nothing'}: {'stale' if '--check' in sys.argv else 'written'}")
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())
