"""litellm as it is used here: imported late, with everything off that we do ourselves.

litellm takes seconds and 200 MB to import and would fetch a price list over the network, so nothing may import it but
`import_litellm`. It must never repeat a request, follow a redirect (which would hand prompt and key to another host),
or log what it sends.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from worker_pools.adapters.base import CallFailed


def is_installed() -> bool:
    """Whether litellm can be imported, found out without importing it."""
    return importlib.util.find_spec("litellm") is not None


def import_litellm() -> Any:
    """The library with everything off that we do ourselves. Raises CallFailed `adapter-unavailable`."""
    # Read at import time: without it litellm downloads its price list, with three attempts.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    # Likewise: without it a connection on which an answer is long in coming is forgotten by routers (see clients.py).
    os.environ.setdefault("AIOHTTP_SO_KEEPALIVE", "True")
    try:
        litellm: Any = importlib.import_module("litellm")
        _refuse_redirects()
    except (ImportError, AttributeError):
        # AttributeError: a version in which redirects are switched off elsewhere. Better no call than one that strays.
        raise CallFailed("adapter-unavailable", sent=False) from None
    litellm.suppress_debug_info = True
    litellm.num_retries = 0
    litellm.drop_params = False
    litellm.telemetry = False
    # Its log lines quote prompts and provider messages, which belong in the artifact store only.
    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    return litellm


def knows_model(model: str) -> bool:
    """Whether litellm can tell the provider of this model. Imports litellm: seconds the first time."""
    litellm = import_litellm()
    try:
        litellm.get_llm_provider(model)
    except Exception:  # noqa: BLE001  # litellm raises many kinds for one thing
        return False
    return True


def _refuse_redirects() -> None:
    """Makes both of the library's factories give HTTP clients that follow nothing; it has no setting for that."""
    handler = importlib.import_module("litellm.llms.custom_httpx.http_handler").AsyncHTTPHandler
    openai = importlib.import_module("litellm.llms.openai.common_utils").BaseOpenAILLM
    handler.create_client = _staying(handler.create_client)
    openai._get_async_http_client = staticmethod(_staying(openai._get_async_http_client))  # noqa: SLF001  # see above


def _staying(make: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(make, "stays", False):
        return make

    @wraps(make)
    def made(*arguments: Any, **named: Any) -> Any:
        client = make(*arguments, **named)
        if client is not None:
            client.follow_redirects = False
        return client

    made.stays = True  # type: ignore[attr-defined]  # a mark on our own function, so that it is not wrapped twice
    return made
