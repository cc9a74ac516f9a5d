"""Conductor plans: what they are, how text becomes one, and their canonical form. Must never do I/O or evaluate text.

plan            Step, Plan and the results of reading       canonical   RFC 8785 form and digest
parse           text to plan                                render      plan to text
blocks          finds plans in a text (starts, labels,      template    plans written by people
                candidate, json_meaning)                    reasoning   marks of reasoning and answer
surroundings    what speaks against the plan found          comments    comments round plans
                (changes, later; torn: parts of plans)
scanner         lists and JSON to nodes                     clean       the one text boundary
yaml_steps      YAML to nodes (yaml_region)                 codes       every error and note
lists, objects  nodes to steps (workers, access)            limits      every bound
"""

from __future__ import annotations

from engine.plan.canonical import canonical_plan, plan_digest
from engine.plan.clean import CleanedText, clean_text
from engine.plan.codes import ERROR_CODES, NOTE_CODES
from engine.plan.parse import parse_plan
from engine.plan.plan import Access, Form, ParseOptions, ParseResult, Plan, PlanError, PlanNote, Step
from engine.plan.render import render_plan

__all__ = [
    "ERROR_CODES",
    "NOTE_CODES",
    "Access",
    "CleanedText",
    "Form",
    "ParseOptions",
    "ParseResult",
    "Plan",
    "PlanError",
    "PlanNote",
    "Step",
    "canonical_plan",
    "clean_text",
    "parse_plan",
    "plan_digest",
    "render_plan",
]
