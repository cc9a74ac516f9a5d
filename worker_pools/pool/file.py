"""Pool files: reading, checking, and saying all that is wrong with one, by line.

The only module of the pool that reads files. No message quotes a value from the file unless our own check did so on
purpose, because a value in the wrong place may be a secret.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.errors import InputError
from worker_pools.pool.agreement import disagreements
from worker_pools.pool.model import Pool, PoolFile, Templates
from worker_pools.pool.template import (
    CONDUCTOR_PLACES,
    REPAIR_PLACES,
    REVISE_PLACES,
    TEMPLATE_BYTES_MAX,
    WORKER_PLACES,
    check_template,
)
from worker_pools.pool.yaml_tree import POOL_BYTES_MAX, Problem, Tree, read_tree

PROBLEMS_SHOWN_MAX = 50


def packaged_pool_names() -> list[str]:
    """The names of the pools that come with Podium, sorted."""
    folder = files("worker_pools") / "pools"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_pool(name_or_path: str, *, search: Sequence[Path] = ()) -> Pool:
    """The pool of a packaged name (`local`), of a name in one of the `search` folders, or of a file's path.

    Whatever holds a slash or ends in .yaml or .yml is a path. A folder of `search` wins over a packaged name.
    Raises InputError: `pool-not-found`, `pool-unreadable` or `pool-invalid` (every problem on its own line, with file,
    line and key path).
    """
    source = _locate(name_or_path, search)
    text = _read_text(source, POOL_BYTES_MAX, what="pool file", code="pool-unreadable")
    return parse_pool(text, label=str(source) if isinstance(source, Path) else source.name, folder=source)


def parse_pool(text: str, *, label: str, folder: Path | Traversable | None = None) -> Pool:
    """The pool written in `text`. `label` stands for the file in messages; templates are looked for beside `folder`."""
    tree = read_tree(text)
    if not isinstance(tree.data, dict):
        problems = tree.problems or [Problem(1, (), "a pool is a mapping with `name`, `conductor` and `workers`")]
        raise _invalid(label, problems)
    found = [Problem(tree.line(path), path, text) for path, text in disagreements(tree.data)]
    try:
        pool_file = PoolFile.model_validate(tree.data)
    except ValidationError as error:
        raise _invalid(label, _causes(tree.problems, found + _findings(error, tree))) from None
    problems = tree.problems + found
    templates = _read_templates(pool_file, tree, folder, problems)
    if problems:
        raise _invalid(label, problems)
    return _complete(pool_file, templates)


def _complete(pool_file: PoolFile, templates: Templates) -> Pool:
    def queued(model: Any) -> Any:
        if model.kind == "conductor":
            # Such a step is planned where the Conductor is called; a queue of its own would be polled for nothing.
            return model.model_copy(update={"queue": conductor.queue})
        return model if model.queue else model.model_copy(update={"queue": pool_file.name})

    conductor = queued(pool_file.conductor)
    return Pool(
        name=pool_file.name,
        conductor=conductor,
        workers=tuple(queued(worker) for worker in pool_file.workers),
        worker_prompt=pool_file.worker_prompt,
        policy=pool_file.policy,
        templates=templates,
    )


def _locate(name_or_path: str, search: Sequence[Path]) -> Path | Traversable:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        if path.is_file():
            return path
        raise InputError(
            "pool-not-found",
            f"there is no pool file {name_or_path}",
            hint=f"packaged pools: {', '.join(packaged_pool_names())}",
        )
    for folder in search:
        path = folder / f"{name_or_path}.yaml"
        if path.is_file():
            return path
    names = packaged_pool_names()
    if name_or_path in names:
        return files("worker_pools") / "pools" / f"{name_or_path}.yaml"
    raise InputError(
        "pool-not-found",
        f"there is no pool called {name_or_path[:80]!r}",
        hint=f"packaged pools: {', '.join(names)}; a file is named by its path, for example ./pool.yaml",
    )


def _read_text(source: Path | Traversable, limit_bytes: int, *, what: str, code: str) -> str:
    try:
        with source.open("rb") as handle:
            content = handle.read(limit_bytes + 1)
    except OSError as error:
        raise InputError(
            code,
            f"the {what} {source.name} cannot be read: {(error.strerror or 'unknown error').lower()}",
            hint="give a file that you may read",
        ) from None
    if len(content) > limit_bytes:
        raise InputError(
            code, f"the {what} {source.name} is larger than {limit_bytes:,} bytes", hint=f"is it really a {what}?"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            code, f"the {what} {source.name} is not UTF-8 text (byte {error.start})", hint="save it as UTF-8"
        ) from None


# What pydantic says in its own words, in words for the author of a file.
_WORDS = {
    "extra_forbidden": "unknown key",
    "missing": "is missing",
    "int_type": "must be a whole number, without quotes",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number, without quotes",
    "bool_type": "must be true or false, without quotes",
    "string_type": "must be text; a number or a word like `true` needs quotes",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping of names and values",
    "model_type": "must be a mapping of names and values",
}


def _findings(error: ValidationError, tree: Tree) -> list[Problem]:
    found = []
    for item in error.errors(include_input=False, include_url=False, include_context=False):
        path = tuple(part for part in item["loc"] if not _is_branch(part))
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "too_short" and path == ("workers",):
            # pydantic also says this when a worker is there and wrong, and then its own problem says it better.
            if tree.data["workers"]:
                continue
            text = "a pool needs at least one worker"
        found.append(Problem(tree.line(path), path, _WORDS.get(item["type"], text)))
    return found


def _causes(read: list[Problem], found: list[Problem]) -> list[Problem]:
    """All problems without those that only follow from another: what stands at or around a place that was not read."""
    unread = {problem.path for problem in read}

    def follows(problem: Problem) -> bool:
        missing = problem.text == _WORDS["missing"] and problem.path[:-1] in unread
        return missing or any(path[: len(problem.path)] == problem.path for path in unread)

    return read + [problem for problem in found if not follows(problem)]


def _is_branch(part: str | int) -> bool:
    # pydantic names the branch of a union in the location; the author of the file knows no such thing.
    return isinstance(part, str) and ("[" in part or part in {"constrained-str", "function-before"})


def _read_templates(
    pool_file: PoolFile, tree: Tree, folder: Path | Traversable | None, problems: list[Problem]
) -> Templates:
    def read(name: str, path: tuple[str, ...], allowed: frozenset[str], required: frozenset[str]) -> str:
        try:
            text = _template_text(name, folder)
            check_template(text, allowed=allowed, required=required)
        except InputError as error:
            problems.append(Problem(tree.line(path), path, error.message))
        except ValueError as error:
            problems.append(Problem(tree.line(path), path, f"template {name}: {error}"))
        else:
            return text
        return ""

    conductor = pool_file.conductor
    return Templates(
        conductor=read(
            conductor.prompt_name, ("conductor", "prompt"), CONDUCTOR_PLACES, frozenset({"task", "workers"})
        ),
        repair=read(conductor.repair_prompt, ("conductor", "repair_prompt"), REPAIR_PLACES, frozenset({"errors"})),
        revise=read(conductor.revise_prompt, ("conductor", "revise_prompt"), REVISE_PLACES, frozenset({"answer"}))
        if pool_file.policy.rounds_max > 1
        else "",
        worker=read(pool_file.worker_prompt, ("worker_prompt",), WORKER_PLACES, frozenset({"subtask"})),
    )


def _template_text(name: str, folder: Path | Traversable | None) -> str:
    """A template beside the pool file, else the packaged one of this name."""
    if isinstance(folder, Path):
        beside = folder.parent / name
        if beside.is_file():
            return _read_text(beside, TEMPLATE_BYTES_MAX, what="template", code="pool-invalid")
    packaged = files("worker_pools") / "prompts" / name
    if "/" not in name and packaged.is_file():
        return _read_text(packaged, TEMPLATE_BYTES_MAX, what="template", code="pool-invalid")
    raise InputError(
        "pool-invalid",
        f"there is no template {name!r}, neither beside the pool file nor packaged",
        hint="put the template beside the pool file",
    )


def _invalid(label: str, problems: list[Problem]) -> InputError:
    shown = sorted(problems, key=lambda problem: problem.line)[:PROBLEMS_SHOWN_MAX]
    lines = [f"{label}:{problem.line}: {_spell(problem.path)}{problem.text}" for problem in shown]
    return InputError(
        "pool-invalid",
        "\n".join(lines),
        hint="docs/schemas/pool.schema.json describes every key; `podium pool check` tries a file",
    )


def _spell(path: tuple[str | int, ...]) -> str:
    """`workers[0].price: ` for ("workers", 0, "price"); nothing for the whole file."""
    spelled = ""
    for part in path:
        spelled += f"[{part}]" if isinstance(part, int) else f".{part}" if spelled else str(part)
    return f"{spelled}: " if spelled else ""
