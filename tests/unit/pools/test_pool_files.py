"""Pool files: what is accepted, and that everything wrong is said with its line and without a secret."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import BugError, InputError
from worker_pools.pool import load_pool, pool_digest, pool_document, pool_from_document, required_secrets
from worker_pools.pool.file import packaged_pool_names, parse_pool
from worker_pools.pool.schema import pool_schema

ROOT = Path(__file__).parents[3]
GOOD = """\
name: example
conductor:
  base_url: http://127.0.0.1:8000/v1
  model: planner
workers:
  - name: writer
    description: writes
    base_url: https://host.example/v1
    model: m1
    api_key: {env: WRITER_KEY}
    queue: fast
    price: {input_usd_per_mtok: 1.25, output_usd_per_mtok: "10"}
  - name: checker
    description: checks
    base_url: http://127.0.0.1:8000/v1/
    model: m2
"""


def refused(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        parse_pool(text, label="pool.yaml")
    return caught.value


def lines_of(error: InputError) -> list[str]:
    assert error.code == "pool-invalid"
    assert error.hint
    return error.message.splitlines()


def test_a_good_file_is_read_completely():
    pool = parse_pool(GOOD, label="pool.yaml")
    writer = pool.worker("writer")
    assert pool.worker_names == ("writer", "checker")
    assert writer.price.input_usd_per_mtok == Decimal("1.25")
    assert (writer.queue, pool.worker("checker").queue, pool.queues) == ("fast", "example", ("example", "fast"))
    assert pool.worker("checker").base_url == "http://127.0.0.1:8000/v1"
    assert pool.worker("checker").price is None
    assert [ref.name for ref in required_secrets(pool)] == ["WRITER_KEY"]
    assert "{{task}}" in pool.templates.conductor
    with pytest.raises(KeyError):
        pool.worker("nobody")


@pytest.mark.parametrize("name", packaged_pool_names())
def test_every_packaged_pool_loads_and_fits_the_schema(name):
    pool = load_pool(name)
    assert pool_from_document(pool_document(pool)) == pool
    text = (ROOT / "worker_pools" / "pools" / f"{name}.yaml").read_text()
    jsonschema.validate(yaml.safe_load(text), json.loads(pool_schema()))


def test_the_published_schema_is_the_one_of_the_program():
    assert (ROOT / "docs" / "schemas" / "pool.schema.json").read_text() == pool_schema()


def test_the_paper_has_its_seven_workers():
    pool = load_pool("paper")
    assert len(pool.workers) == 7
    assert sum("127.0.0.1" in (worker.base_url or "") for worker in pool.workers) == 4
    assert {worker.price is None for worker in pool.workers if "127.0.0.1" in (worker.base_url or "")} == {True}


def test_the_document_is_stable_and_names_secrets_without_reading_them(monkeypatch):
    monkeypatch.setenv("WRITER_KEY", "canary")
    first, second = (pool_document(parse_pool(GOOD, label=label)) for label in ("a.yaml", "b.yaml"))
    assert first == second
    assert b"canary" not in first
    assert b"WRITER_KEY" in first
    assert len(pool_digest(first)) == 64
    assert pool_digest(first) != pool_digest(pool_document(parse_pool(GOOD.replace("m1", "m3"), label="a.yaml")))


@pytest.mark.parametrize("document", [b"", b"{}", b"[]", b'{"format":"podium-pool/9","pool":{}}', b"\xff"])
def test_a_document_of_another_kind_is_a_bug_and_not_a_guess(document):
    with pytest.raises(BugError, match="stored pool"):
        pool_from_document(document)


def test_an_unknown_key_on_line_7_is_named_with_its_line_and_path():
    error = refused(GOOD.replace("    description: writes\n", "    descripton: writes\n"))
    assert lines_of(error) == [
        "pool.yaml:6: workers[0].description: is missing",
        "pool.yaml:7: workers[0].descripton: unknown key",
    ]


def test_all_problems_are_listed_and_not_only_the_first():
    text = GOOD.replace("name: example", "name: Not A Slug").replace("model: m2", "model: m2\n    attempts_max: 0")
    found = lines_of(refused(text))
    assert len(found) == 2
    assert found[0].startswith("pool.yaml:1: name: ")
    assert found[1].startswith("pool.yaml:17: workers[1].attempts_max: ")


def test_a_key_that_stands_twice_is_refused():
    assert lines_of(refused(GOOD + "name: again\n")) == ["pool.yaml:17: name: stands twice (first on line 1)"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("{env: WRITER_KEY}", "sk-canary-1234567890"),
        ("{env: WRITER_KEY}", "{env: sk-canary-1234567890}"),
        ("{env: WRITER_KEY}", "{value: sk-canary-1234567890}"),
        ("queue: fast", "queue: sk-canary-1234567890-sk-canary-1234567890"),
        ("https://host.example/v1", "https://user:sk-canary-1234567890@host.example/v1"),
        ("https://host.example/v1", "https://host.example/v1?key=sk-canary-1234567890"),
        ("https://host.example/v1", "http://[sk-canary-1234567890"),
        ("queue: fast", "parameters: {api_key: sk-canary-1234567890}"),
        ("queue: fast", 'queue: "sk-canary-1234567890'),
        ("queue: fast", "queue: !!python/object:sk-canary-1234567890 x"),
    ],
)
def test_a_secret_in_the_wrong_place_is_refused_and_never_repeated(old, new):
    error = refused(GOOD.replace(old, new))
    assert "sk-canary" not in error.message
    assert lines_of(error)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: checker", "name: WRITER", "two workers are called"),
        ("name: checker", "name: '42'", "digits only"),
        ("name: checker", "name: ' x'", "white space"),
        ("model: m2", "", "`model` is missing"),
        ("base_url: https://host.example/v1", "", "needs a `base_url`"),
        ("model: m2", "model: m2\n    description: ' '", "stands twice"),
        ("description: checks", "description: ' '", "what the worker is good at"),
        ("model: m2", "model: gpt-5\n    parameters: {temperature: 0.2}", "refuses `temperature`"),
        ("model: m2", "model: o3-mini\n    parameters: {top_p: 0.2}", "refuses `top_p`"),
        ("model: m2", "model: m2\n    context_tokens: 100", "larger than `context_tokens`"),
        ("model: m2", "model: m2\n    timeouts: {call_s: .inf}", "timeouts.call_s"),
        ("model: m2", "model: m2\n    price: {input_usd_per_mtok: -1, output_usd_per_mtok: 1}", "price.input"),
        ("model: m2", "model: m2\n    price: {input_usd_per_mtok: .nan, output_usd_per_mtok: 1}", "price.input"),
        ("model: m2", "model: m2\n    price: {input_usd_per_mtok: true, output_usd_per_mtok: 1}", "decimal number"),
        ("model: m2", "model: m2\n    price: {input_usd_per_mtok: '1_0', output_usd_per_mtok: 1}", "decimal number"),
        (
            "model: m2",
            "model: claude-x\n    parameters: {thinking: {type: enabled}, temperature: 0.2}",
            "while it thinks",
        ),
        ("model: m2", "model: gpt-5.2\n    parameters: {temperature: 0.2}", "refuses `temperature`"),
        ("model: m2", "model: m2\n    price: {input_usd_per_mtok: 1}", "output_usd_per_mtok: is missing"),
        ("model: m2", "model: m2\n    parameters: {seed: 9007199254740993}", "parameters.seed: a number"),
        ("model: m2", "model: m2\n    parameters: {top_p: .inf}", "parameters.top_p: a number"),
        ("model: m2", 'model: "m\\ud83d"', "not readable as YAML"),
        ("model: m2", 'model: "m\\0"', "workers[1].model: a number or a character"),
        ("model: m2", "model: !!timestamp x", "safe rules"),
        ("model: m2", "model: m2\n    parameters: {n: 3}", "set by Podium itself"),
        ("model: m2", "model: m2\n    adapter: grpc", "adapter"),
        ("model: planner", "model: planner\n  prompt: nowhere.txt", "no template 'nowhere.txt'"),
        ("model: planner", "model: planner\n  prompt: worker.txt", "unknown place"),
        ("name: example", "name: &x example\nworker_prompt: *x", "aliases"),
        ("name: example", "name: example\npolicy: {steps_max: 65}", "policy.steps_max"),
        ("name: example", "name: example\npolicy: {unread_steps: drop}", "policy.unread_steps"),
        ("name: example", "name: [", "not readable as YAML"),
        ("name: example", "name: a\x01b", "not readable as YAML"),
    ],
)
def test_each_mistake_has_a_message_that_names_it(old, new, said):
    (line,) = [one for one in lines_of(refused(GOOD.replace(old, new, 1))) if said in one]
    assert line.startswith("pool.yaml:")


@pytest.mark.parametrize("model", ["gpt-5-chat-latest", "gpt-4o", "openai/gpt-oss-120b", "o", "olmo-2"])
def test_models_that_take_a_temperature_may_have_one(model):
    parse_pool(GOOD.replace("model: m2", f"model: {model}\n    parameters: {{temperature: 0.2}}"), label="x")


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("gpt-5.1", "{temperature: 0.2, reasoning_effort: none}"),
        ("claude-sonnet-4", "{temperature: 1, thinking: {type: enabled}}"),
        ("claude-sonnet-4", "{temperature: 0.2, thinking: {type: disabled}}"),
    ],
)
def test_a_temperature_is_allowed_while_the_model_does_not_reason(model, parameters):
    """G2-10."""
    parse_pool(GOOD.replace("model: m2", f"model: {model}\n    parameters: {parameters}"), label="x")


@pytest.mark.parametrize(
    "text", ["", "just words", "- a\n- b", "null", "%", "a: b: c", "[" * 250_000, "{a: " * 60_000, "- " * 120_000]
)
def test_a_file_that_is_no_pool_says_so(text):
    assert lines_of(refused(text))


def test_missing_and_unreadable_files_are_told_apart(tmp_path):
    for name in ("nowhere", "./nowhere.yaml", str(tmp_path)):
        with pytest.raises(InputError) as caught:
            load_pool(name)
        assert caught.value.code == "pool-not-found"
    for content in (b"\xff\xfe", b"#" * 300_000):
        path = tmp_path / "pool.yaml"
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            load_pool(str(path))
        assert caught.value.code == "pool-unreadable"


def test_a_pool_of_ones_own_comes_from_a_path_or_a_searched_folder(tmp_path):
    (tmp_path / "local.yaml").write_text(GOOD)
    assert load_pool(str(tmp_path / "local.yaml")).name == "example"
    assert load_pool("local", search=[tmp_path]).name == "example"
    assert load_pool("local").name == "local"


def test_a_template_beside_the_pool_file_replaces_the_packaged_one(tmp_path):
    (tmp_path / "mine.txt").write_text("Plan with {{workers}} for {{task}}")
    (tmp_path / "pool.yaml").write_text(GOOD.replace("model: planner", "model: planner\n  prompt: mine.txt"))
    pool = load_pool(str(tmp_path / "pool.yaml"))
    assert pool.templates.conductor == "Plan with {{workers}} for {{task}}"
    assert b"Plan with" in pool_document(pool)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_no_text_makes_the_reader_crash(text):
    for candidate in (text, GOOD + text, GOOD.replace("m1", text)):
        try:
            pool = parse_pool(candidate, label="pool.yaml")
        except InputError:
            continue
        assert pool_from_document(pool_document(pool)) == pool
