"""Plans written by people, with a place for the task. Must never put a task into text that is still to be parsed.

A template is a plan in the YAML form (workers counted from 0, steps from 1) whose instructions hold `{task}`. It is
parsed first; the task then goes into the parsed strings, so no task can change the plan. They take the same path as
plans by a Conductor.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

from engine.errors import BugError, InputError
from engine.plan.clean import clean_text
from engine.plan.limits import STEPS_SCANNED_MAX
from engine.plan.parse import parse_plan
from engine.plan.plan import ParseOptions, Plan, PlanNote, Step

_PLACE: Final = "{task}"
_SUFFIX: Final = ".yaml"


def template_names() -> tuple[str, ...]:
    """The names of the templates that ship with Podium, in alphabetical order."""
    folder = resources.files("engine.plan").joinpath("templates")
    return tuple(sorted(item.name.removesuffix(_SUFFIX) for item in folder.iterdir() if item.name.endswith(_SUFFIX)))


def load_template(name: str) -> str:
    """The raw text of a template; raises InputError `unknown-template`, which lists the names there are."""
    names = template_names()
    if name not in names:
        shown = ascii(name[:80])
        raise InputError("unknown-template", f"there is no template {shown}", hint=f"templates: {', '.join(names)}")
    return resources.files("engine.plan").joinpath("templates", name + _SUFFIX).read_text(encoding="utf-8")


def fill_template(name: str, task: str, workers: tuple[str, ...], steps_max: int) -> Plan:
    """The plan of a template for a task and a pool.

    Worker numbers beyond the pool wrap round, each with the note `template-worker-wrapped`. Raises InputError:
    `unknown-template`; `template-too-many-steps` if the pool allows fewer steps; `no-workers` for an empty pool.
    """
    text = load_template(name)
    if not workers:
        raise InputError("no-workers", "the pool has no workers", hint="add a worker to the pool file")
    # Stand-ins by number, so that the template is read without knowing the pool.
    numbers = {f"worker {number}": number for number in range(STEPS_SCANNED_MAX)}
    plan = parse_plan(text, ParseOptions(tuple(numbers), steps_max=STEPS_SCANNED_MAX)).plan
    if plan is None:
        raise BugError("template-invalid", f"the template {name} is no valid plan")
    if len(plan.steps) > steps_max:
        raise InputError(
            "template-too-many-steps",
            f"the template {name} has {len(plan.steps)} steps; the pool allows {steps_max}",
            hint="raise steps_max in the pool file, or use a shorter template",
        )
    cleaned = clean_text(task)
    notes = list(plan.notes)
    if cleaned.changed:
        notes.append(PlanNote("text-cleaned", "instruction", None, f"in the task: {cleaned.describe()}"))
    steps = []
    for step in plan.steps:
        number = numbers[step.worker]
        worker = workers[number % len(workers)]
        if number >= len(workers):
            said = f"worker {number} is {worker}: the pool has {len(workers)} worker(s)"
            notes.append(PlanNote("template-worker-wrapped", "agent", step.position, said))
        # One pass over the template's own text: a task that holds {task} itself is not filled again.
        steps.append(Step(step.position, worker, step.subtask.replace(_PLACE, cleaned.text), step.access))
    return Plan(tuple(steps), tuple(notes), plan.form)
