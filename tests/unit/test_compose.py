"""docker-compose.yml is a Compose file, and what it tells Podium is what Podium understands. No engine is needed."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from engine.settings import load_settings
from tests.support.command_line import check_command_line
from worker_pools.process import GRACE_S

CHECKOUT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((CHECKOUT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
PODIUM = sorted(name for name, service in SERVICES.items() if service["image"].startswith("podium:"))
PACKAGES = ("engine", "activities", "worker_pools")


def settings_read() -> set[str]:
    """Every PODIUM_ variable that the program's source reads."""
    sources = (path for package in PACKAGES for path in (CHECKOUT / package).rglob("*.py"))
    return {name for path in sources for name in re.findall(r'"(PODIUM_[A-Z_]+)"', path.read_text())}


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)(s|m)", duration)
    assert match, duration
    return float(match[1]) * (60 if match[2] == "m" else 1)


def test_it_is_valid_by_the_compose_schema() -> None:
    schema = json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [error.message for error in validator.iter_errors(COMPOSE)] == []
    broken = {**COMPOSE, "services": {"x": {"image": 1}}}
    assert list(validator.iter_errors(broken)), "the schema lets anything through"


def test_there_is_all_that_a_run_needs() -> None:
    assert set(SERVICES) >= {"postgres", "temporal-schema", "temporal", "temporal-ui", "migrate", "worker", "podium"}


@pytest.mark.parametrize("name", PODIUM)
def test_each_command_of_our_image_is_one_that_podium_understands(name: str) -> None:
    # The service for the command line gets its arguments from the user.
    if name != "podium":
        check_command_line(SERVICES[name]["command"])
    assert "entrypoint" not in SERVICES[name]


@pytest.mark.parametrize("name", PODIUM)
def test_the_settings_of_our_image_are_read_and_make_sense(name: str) -> None:
    environment: dict[str, str] = SERVICES[name]["environment"]
    assert {key for key in environment if key.startswith("PODIUM_")} <= settings_read()
    filled = {key: re.sub(r"\$\{\w+(?::?[-?]([^}]*))?\}", "value", text) for key, text in environment.items()}
    settings = load_settings(filled)
    assert settings.database_url == "postgresql+psycopg://podium:value@postgres:5432/podium"
    assert settings.temporal is not None
    assert settings.temporal.namespace in SERVICES["temporal-namespace"]["command"][0]


def test_every_dependency_exists_and_can_be_waited_for() -> None:
    for name, service in SERVICES.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in SERVICES, f"{name} waits for {other}"
            if how["condition"] == "service_healthy":
                assert "healthcheck" in SERVICES[other], f"{name} waits for the health of {other}"
            else:
                assert SERVICES[other].get("restart", "").startswith("on-failure"), f"{other} must end"


def test_nothing_of_podium_starts_before_the_migrations_are_done() -> None:
    for name in set(PODIUM) - {"migrate"}:
        assert SERVICES[name]["depends_on"]["migrate"] == {"condition": "service_completed_successfully"}


def test_images_are_pinned_by_version() -> None:
    for service in SERVICES.values():
        _, _, tag = service["image"].partition(":")
        assert re.match(r"\d+(\.\d+)*", tag), service["image"]
    for line in re.findall(r"^FROM (\S+)", (CHECKOUT / "Dockerfile").read_text(), flags=re.MULTILINE):
        assert re.search(r":\d+\.\d+-", line), line
    assert SERVICES["temporal"]["image"].partition(":")[2] == SERVICES["temporal-schema"]["image"].partition(":")[2]
    assert f'version = "{SERVICES["worker"]["image"].partition(":")[2]}"' in (CHECKOUT / "pyproject.toml").read_text()


def test_a_worker_is_given_the_time_to_settle_its_calls() -> None:
    assert seconds(SERVICES["worker"]["stop_grace_period"]) >= GRACE_S + 20


def test_ports_are_on_loopback_only() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert ports
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in ports)


def test_postgres_and_temporal_have_no_way_out() -> None:
    assert COMPOSE["networks"]["data"]["internal"] is True
    assert SERVICES["postgres"]["networks"] == SERVICES["temporal"]["networks"] == ["data"]


def test_no_secret_has_a_value_in_the_file() -> None:
    for name, service in SERVICES.items():
        for key, value in service.get("environment", {}).items():
            if re.search(r"PASSWORD|PWD|KEY(?!_STORE)|TOKEN|SECRET", key):
                assert re.fullmatch(r"\$\{\w+:\?[^}]+\}", value), f"{name}: {key}"
    example = (CHECKOUT / "examples" / "compose.env").read_text()
    wanted = set(re.findall(r"\$\{(\w+):\?", (CHECKOUT / "docker-compose.yml").read_text()))
    assert wanted == set(re.findall(r"^(\w+)=$", example, flags=re.MULTILINE))


def test_the_image_copies_only_what_is_in_the_build_context() -> None:
    allowed = {line[1:] for line in (CHECKOUT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (CHECKOUT / "Dockerfile").read_text(), flags=re.MULTILINE)
    named = {word for line in copied for word in line.split()}
    assert named == allowed
    assert [name for name in sorted(named) if not (CHECKOUT / name).exists()] == []


def test_workers_and_commands_share_the_key_store_and_postgres_does_not_have_it() -> None:
    for name in ("worker", "podium"):
        assert "keys:/srv/podium/keys" in SERVICES[name]["volumes"]
        assert SERVICES[name]["environment"]["PODIUM_KEY_STORE"] == "file:///srv/podium/keys"
    assert [volume for volume in SERVICES["postgres"]["volumes"] if volume.startswith("keys")] == []
    assert "-m 700 -o podium" in (CHECKOUT / "Dockerfile").read_text()
