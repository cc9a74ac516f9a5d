"""The failure converter and the data converter of every client and worker: what Temporal may see of an error.

Temporal's history must hold no text of people, models or providers. The SDK's own converter writes the message, the
stack trace with source lines, and the whole chain of causes and contexts of an exception. Ours writes our code and
nothing else, for activities, workflows and failed workflow tasks alike.
"""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

from temporalio.api.failure.v1 import Failure
from temporalio.converter import DataConverter, DefaultFailureConverter, PayloadConverter
from temporalio.exceptions import ApplicationError, FailureError

from engine.errors import PodiumError

CODE = re.compile(r"[a-z][a-z0-9-]{0,63}")
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def bug_code(error: BaseException) -> str:
    """The code of an exception that ends a run: our own code, or the name of its class; never its message."""
    name = error.code if isinstance(error, PodiumError) else type(error).__name__
    name = _WORD.sub("-", name).lower().strip("_").replace("_", "-")
    code = f"bug-{name}"
    return code if CODE.fullmatch(code) else "bug"


class CodeOnlyFailureConverter(DefaultFailureConverter):
    """Writes codes and numbers only. What the SDK reads back is an error whose message is the code."""

    MESSAGES: ClassVar[dict[str, str]] = {
        "timeout_failure_info": "timeout",
        "canceled_failure_info": "cancelled",
        "terminated_failure_info": "terminated",
        "server_failure_info": "server",
        "activity_failure_info": "activity",
        "child_workflow_execution_failure_info": "child-workflow",
    }

    def to_failure(self, exception: BaseException, payload_converter: PayloadConverter, failure: Failure) -> None:
        """Converts ``exception``; only failures of Temporal's own kinds keep their kind."""
        if isinstance(exception, ApplicationError):
            self._write_application(exception, failure)
        elif isinstance(exception, FailureError) and exception.failure:
            failure.CopyFrom(exception.failure)
            self._scrub(failure)
        elif isinstance(exception, FailureError):
            shell = type(exception).__new__(type(exception))
            shell.__dict__.update(exception.__dict__)
            # The copy carries neither traceback, cause nor context, so nothing of them is ever converted.
            shell.__suppress_context__ = True
            super().to_failure(shell, payload_converter, failure)
            self._scrub(failure)
        else:
            failure.message = bug_code(exception)
            failure.application_failure_info.type = failure.message

    @staticmethod
    def _write_application(error: ApplicationError, failure: Failure) -> None:
        code = error.type or ""
        failure.message = code if CODE.fullmatch(code) else "bug"
        info = failure.application_failure_info
        info.type = failure.message
        info.non_retryable = error.non_retryable
        if error.next_retry_delay:
            info.next_retry_delay.FromTimedelta(error.next_retry_delay)
        info.category = int(error.category)  # type: ignore[assignment]  # the enum of the SDK mirrors that of the API

    def _scrub(self, failure: Failure) -> None:
        kind = failure.WhichOneof("failure_info") or ""
        failure.stack_trace = ""
        failure.ClearField("encoded_attributes")
        if kind == "application_failure_info":
            info = failure.application_failure_info
            code = info.type if CODE.fullmatch(info.type) else "bug"
            failure.message = info.type = code
            info.ClearField("details")
            failure.ClearField("cause")
            return
        failure.message = self.MESSAGES.get(kind, "failure")
        if kind == "timeout_failure_info":
            failure.timeout_failure_info.ClearField("last_heartbeat_details")
        elif kind == "canceled_failure_info":
            failure.canceled_failure_info.ClearField("details")
        elif kind == "activity_failure_info":
            failure.activity_failure_info.identity = ""
        if failure.HasField("cause"):
            self._scrub(failure.cause)


DATA_CONVERTER = dataclasses.replace(DataConverter.default, failure_converter_class=CodeOnlyFailureConverter)
