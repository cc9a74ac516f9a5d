"""Writes a plan in any of the forms that the parser reads. Must never write what the parser would read differently."""

from __future__ import annotations

import json

from engine.plan.escapes import encode_escapes
from engine.plan.plan import Access, Form, Plan


def render_plan(plan: Plan, form: Form, workers: tuple[str, ...]) -> str:
    """The text of a plan in a form, workers by number where the pool has the name.

    Steps are counted from 0 in the lists and the JSON object, and from 1 in step objects. Workers that are not in
    `workers` are written by name. What comes out is plain ASCII punctuation with the plan's own characters inside the
    quotes; the JSON forms are valid JSON, the YAML form is valid YAML.
    """
    numbers = {name: str(number) for number, name in reversed(list(enumerate(workers)))}
    models = [numbers.get(step.worker, _quote(step.worker)) for step in plan.steps]
    if form in ("lists", "json"):
        subtasks = [_quote(step.subtask) for step in plan.steps]
        access = [_access(step.access, 0) for step in plan.steps]
        values = {"model_id": models, "subtasks": subtasks, "access_list": access}
        if form == "lists":
            return "".join(f"{name} = [{', '.join(items)}]\n" for name, items in values.items())
        members = [f'  "{name}": [{", ".join(items)}]' for name, items in values.items()]
        return "{\n" + ",\n".join(members) + "\n}\n"
    if form == "steps-json":
        objects = [
            f'    {{"agent": {model}, "instruction": {_quote(step.subtask)}, "access_list": {_access(step.access, 1)}}}'
            for model, step in zip(models, plan.steps, strict=True)
        ]
        return '{\n  "steps": [\n' + ",\n".join(objects) + "\n  ]\n}\n"
    if not plan.steps:
        return "steps: []\n"
    lines = []
    for model, step in zip(models, plan.steps, strict=True):
        instruction = _quote(step.subtask, yaml=True)
        lines.append(
            f"  - agent: {model}\n    instruction: {instruction}\n    access_list: {_access(step.access, 1)}\n"
        )
    return "steps:\n" + "".join(lines)


def _quote(text: str, *, yaml: bool = False) -> str:
    return '"' + encode_escapes(text, only_ascii_line=yaml) + '"'


def _access(access: Access, first: int) -> str:
    return '["all"]' if access == "all" else json.dumps([position + first for position in access])
