"""The crash suite: real workers, Temporal and PostgreSQL, killed at random while runs of many shapes are in flight.

`fleet` starts, kills and revives processes; `shapes` says what is run; `endpoint` plays the provider and counts;
`invariants` judges the record afterwards; `suite` puts them together. `python -m tests.support.crash` is the long form.
"""
