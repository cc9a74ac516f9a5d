"""Model adapters: one request, one reply or one CallFailed. Nothing in here retries."""

from worker_pools.adapters.base import CallFailed, Message, ModelAdapter, ModelCall, ModelReply, Progress
from worker_pools.adapters.codes import CALL_CODES, CallCode
from worker_pools.adapters.verdict import Verdict, judge

__all__ = [
    "CALL_CODES",
    "CallCode",
    "CallFailed",
    "Message",
    "ModelAdapter",
    "ModelCall",
    "ModelReply",
    "Progress",
    "Verdict",
    "judge",
]
