"""The JSON schema of pool files, for editors and for people: `docs/schemas/pool.schema.json` is its output.

`python -m worker_pools.pool.schema` prints it; a test holds the file to it.
"""

from __future__ import annotations

import json
import sys

from worker_pools.pool.model import PoolFile


def pool_schema() -> str:
    """The schema as indented JSON text with a final newline."""
    schema = PoolFile.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    return json.dumps(schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(pool_schema())
