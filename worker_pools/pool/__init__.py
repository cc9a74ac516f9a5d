"""Pools: the models of a run, where they are, what they cost, and what happens when they fail."""

from worker_pools.pool.document import pool_digest, pool_document, pool_from_document
from worker_pools.pool.file import load_pool
from worker_pools.pool.model import (
    LOCAL_BASE_URL,
    Conductor,
    Pool,
    PoolFile,
    Templates,
    Timeouts,
    Worker,
    required_secrets,
)
from worker_pools.pool.policy import Budget, Policy
from worker_pools.pool.reviews import ReviewRule

__all__ = [
    "LOCAL_BASE_URL",
    "Budget",
    "Conductor",
    "Policy",
    "Pool",
    "PoolFile",
    "ReviewRule",
    "Templates",
    "Timeouts",
    "Worker",
    "load_pool",
    "pool_digest",
    "pool_document",
    "pool_from_document",
    "required_secrets",
]
