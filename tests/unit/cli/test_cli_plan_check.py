"""`podium plan check`: the contract for every form and for what is no plan; no server, no key, no home."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.support.command import Done, podium

SUBTASKS = ["List three facts.", "Explain „why“ it is so.", "Join both."]
ACCESS: list[object] = [[], [0], "all"]
FORMS = {
    "lists": f"I think so.\nmodel_id = [0, 1, 2]\nsubtasks = {json.dumps(SUBTASKS)}\naccess_list = [[], [0], ['all']]\n",
    "json": json.dumps({"model_id": [0, 1, 2], "subtasks": SUBTASKS, "access_list": [[], [0], ["all"]]}),
    "steps-json": json.dumps(
        {
            "steps": [
                {"agent": "writer", "instruction": SUBTASKS[0], "access_list": []},
                {"agent": "explainer", "instruction": SUBTASKS[1], "access_list": [1]},
                {"agent": "editor", "instruction": SUBTASKS[2], "access_list": ["all"]},
            ]
        }
    ),
    "steps-yaml": (
        f"steps:\n- agent: writer\n  instruction: {SUBTASKS[0]}\n  access_list: []\n"
        f"- agent: explainer\n  instruction: '{SUBTASKS[1]}'\n  access_list: [1]\n"
        f"- agent: editor\n  instruction: {SUBTASKS[2]}\n  access_list: [all]\n"
    ),
}
LATER = 'model_id = [0, 1]\nsubtasks = ["a", "b"]\naccess_list = [[1], []]\n'


def check(tmp_path: Path, text: str | bytes, *options: str) -> Done:
    stdin = text if isinstance(text, bytes) else text.encode()
    return podium("plan", "check", "-", *options, home=tmp_path / "home", stdin=stdin)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_object_and_the_same_digest(form: str, tmp_path: Path):
    done = check(tmp_path, FORMS[form], "--json")
    assert (done.code, done.err) == (0, "")
    found = done.valid_json("plan-check")
    assert (found["valid"], found["form"], found["errors"]) == (True, form, [])
    assert [step["access"] for step in found["steps"]] == [[], [0], [0, 1]]
    assert [step["worker"] for step in found["steps"]] == ["writer", "explainer", "editor"]
    assert [step["subtask"] for step in found["steps"]] == SUBTASKS
    steps = [
        {"access": access, "subtask": subtask, "worker": worker}
        for access, subtask, worker in zip(ACCESS, SUBTASKS, ["writer", "explainer", "editor"], strict=True)
    ]
    canonical = json.dumps({"steps": steps, "version": 1}, separators=(",", ":"), ensure_ascii=False)
    assert found["digest"] == hashlib.sha256(canonical.encode()).hexdigest()


def test_an_invalid_plan_ends_with_2_and_names_every_place(tmp_path: Path):
    done = check(tmp_path, 'model_id = [0, 9]\nsubtasks = ["a", "b"]\naccess_list = [[], [1]]\n', "--json")
    assert done.code == 2
    found = done.valid_json("plan-check")
    assert (found["valid"], found["form"], found["steps"], found["digest"]) == (False, "lists", [], None)
    places = {error["code"]: (error["field"], error["line"]) for error in found["errors"]}
    assert places == {"worker-unknown": ("model_id", 1), "access-self": ("access_list", 3)}


def test_people_get_a_line_for_each_error_and_no_traceback(tmp_path: Path):
    done = check(tmp_path, LATER)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: standard input:3:")
    assert "[access-later]" in done.err
    assert "Traceback" not in done.err


def test_people_get_the_graph_of_a_valid_plan(tmp_path: Path):
    done = check(tmp_path, FORMS["lists"])
    assert done.code == 0
    lines = done.out.splitlines()
    assert [line[4:11].rstrip() for line in lines[:3]] == ["○", "├─○", "└─┴─○"]
    assert lines[-1].startswith("valid: 3 steps, form lists, digest ")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"", "empty-text"),
        (b" \n\t", "empty-text"),
        (b"I would rather not.", "no-plan"),
        (b'model_id = [0]\nsubtasks = ["a"', "truncated"),
        (b"x" * (2**20 + 1), "text-too-large"),
    ],
)
def test_a_text_in_no_known_form_is_an_invalid_plan(text: bytes, code: str, tmp_path: Path):
    done = check(tmp_path, text, "--json")
    assert done.code == 2
    assert code in {error["code"] for error in done.valid_json("plan-check")["errors"]}


def test_the_finish_reason_length_makes_a_cut_yaml_plan_invalid(tmp_path: Path):
    cut = FORMS["steps-yaml"]
    assert check(tmp_path, cut, "--finish-reason", "stop").code == 0
    done = check(tmp_path, cut, "--finish-reason", "length", "--json")
    assert done.code == 2
    assert [error["code"] for error in done.valid_json("plan-check")["errors"]] == ["truncated"]


def test_lenient_accepts_a_guess_with_a_note_that_strict_rejects(tmp_path: Path):
    text = 'model_id = [0, 1]\nsubtasks = ["a"\n "b"]\naccess_list = [[], [0]]\n'
    assert check(tmp_path, text).code == 2
    found = check(tmp_path, text, "--lenient", "--json")
    assert found.code == 0
    assert [note["code"] for note in found.valid_json("plan-check")["notes"]] == ["missing-comma"]


def test_an_unread_step_is_noted(tmp_path: Path):
    text = 'model_id = [0, 1]\nsubtasks = ["a", "b"]\naccess_list = [[], []]\n'
    notes = check(tmp_path, text, "--json").valid_json("plan-check")["notes"]
    assert [(note["code"], note["position"]) for note in notes] == [("unread-step", 0)]


def test_a_plan_that_is_not_text_is_bad_input(tmp_path: Path):
    done = check(tmp_path, b"model_id = [0]\xff\xfe", "--json")
    assert (done.code, done.error_code) == (2, "plan-not-text")


def test_lone_surrogates_are_replaced_with_a_note(tmp_path: Path):
    surrogate = '"\ud800"'.encode("utf-8", "surrogatepass")
    done = check(tmp_path, b"model_id = [0]\nsubtasks = [" + surrogate + b"]\naccess_list = [[]]\n", "--json")
    found = done.valid_json("plan-check")
    assert found["steps"][0]["subtask"] == "\ufffd"
    assert [note["code"] for note in found["notes"]] == ["text-cleaned"]


def test_neither_a_missing_file_nor_a_folder_is_a_plan(tmp_path: Path):
    for name in ("nowhere.txt", "."):
        done = podium("plan", "check", name, "--json", home=tmp_path / "home")
        assert (done.code, done.error_code) == (2, "file-unreadable")


def test_nothing_is_made_and_no_key_is_asked_for(tmp_path: Path):
    pool = tmp_path / "pool.yaml"
    pool.write_text(
        "name: keyed\n"
        "conductor: {base_url: 'http://127.0.0.1:9/v1', model: m, api_key: {env: NOT_SET_ANYWHERE}}\n"
        "workers: [{name: w, description: d, base_url: 'http://127.0.0.1:9/v1', model: m, api_key: {env: NOT_SET}}]\n"
    )
    done = check(tmp_path, 'model_id = [0]\nsubtasks = ["a"]\naccess_list = [[]]\n', "--pool", str(pool), "--json")
    assert done.code == 0
    assert done.json["steps"][0]["worker"] == "w"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pool.yaml"]
