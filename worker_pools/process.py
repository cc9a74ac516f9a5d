"""The worker process: polls Temporal for workflows and model calls, reconciles, and gives its lease back at the end.

One process serves the bookkeeping queue and any number of pool queues; queues can be added while it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import select
from temporalio.client import Client
from temporalio.common import VersioningBehavior, WorkerDeploymentVersion
from temporalio.exceptions import ApplicationError
from temporalio.worker import Worker, WorkerDeploymentConfig
from temporalio.worker.workflow_sandbox import SandboxedWorkflowRunner, SandboxRestrictions

from activities.bookkeeping import BookkeepingActivities
from activities.children import ChildActivities
from activities.context import ActivityContext, LocalEndpoint
from activities.executions import end_overdue_reviews, reconcile
from activities.planning import PlanActivities
from activities.progress import ProgressBoard
from activities.sequencing import keep_log
from activities.steps import StepActivities
from activities.succession import fail_orphans, release_begun
from engine import contracts
from engine.errors import PodiumError, UnavailableError
from engine.keystore import PLAIN, open_keyring
from engine.settings import TemporalSettings, WorkerBuild
from engine.signing import AuditSettings, log_keeper
from engine.store.cluster import remember_cluster
from engine.store.database import Database
from engine.store.erasure_journal import ready
from engine.store.processes import ProcessIdentity, end_process, register_process, this_process
from engine.store.retention import forget_orphans, sweep
from engine.store.states import RUN_LIVE
from engine.store.tables import DEFAULT_TENANT, Run
from engine.temporal_client import cluster_id, connect_temporal
from engine.workflow import RunWorkflow
from worker_pools.local_model import LocalModelServer
from worker_pools.secrets import SecretStore

RECONCILE_INTERVAL_S = 30.0
REVIEW_EXPIRY_INTERVAL_S = 2.0
RETENTION_INTERVAL_S = 3600.0
QUEUE_WATCH_INTERVAL_S = 1.0
CALLS_MAX = 1000
GRACE_S = 10.0
THREADS_MAX = 64
GIVE_BACK_S = 3.0
_log = logging.getLogger(__name__)

# Our pure modules are passed through by name: the sandbox would import them anew for every run.
_PASSED_THROUGH = (
    "engine.contracts",
    "engine.converter",
    "engine.graph",
    "engine.plan",
    "engine.errors",
)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How a worker process behaves. ``queues`` are pool queue names; with ``all_queues`` it follows the live runs."""

    database_url: str
    temporal: TemporalSettings
    queues: tuple[str, ...] = ()
    all_queues: bool = False
    adopt_cluster: bool = False
    calls_max: int = CALLS_MAX
    database_connections: int = 10
    grace_s: float = GRACE_S
    model_log: Path | None = None
    # Where the keys of stored texts are; see `engine.keystore`.
    key_store: str = PLAIN
    # Where a run's pool says nothing, see `engine.store.retention`.
    retention_days: int | None = None
    # Where the log's checkpoints are signed and anchored, if this process does that.
    audit: AuditSettings = field(default_factory=AuditSettings)


@dataclass(slots=True)
class WorkerProcess:
    """A running worker. ``start``, then ``run`` until ``stop``; ``ensure_queues`` may be called at any time."""

    options: WorkerOptions
    secrets: SecretStore
    identity: ProcessIdentity = field(default_factory=this_process)
    client: Client = field(init=False)
    database: Database = field(init=False)
    context: ActivityContext = field(init=False)
    _workers: dict[str, Worker] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _model: LocalModelServer | None = None
    _model_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _closed: bool = False
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _stirred: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        """Connects, checks that the two stores belong together, takes over from dead predecessors, starts polling.

        Raises UnavailableError when a service does not answer or belongs to another database; nothing stays open then.
        """
        try:
            await self._start()
        except BaseException:
            await self.shut_down()
            raise

    async def _start(self) -> None:
        logging.getLogger("temporalio.activity").addFilter(_without_traceback)
        # The default is a few threads for each core. Slow look-ups of host names would fill them, and new calls wait.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS_MAX, "podium"))
        keys = await asyncio.to_thread(open_keyring, self.options.key_store)
        self.database = Database(self.options.database_url, pool_size=self.options.database_connections, keys=keys)
        self.client = await connect_temporal(self.options.temporal, identity=self.identity.id)
        await remember_cluster(
            self.database,
            await cluster_id(self.client),
            self.options.temporal.namespace,
            adopt=self.options.adopt_cluster,
        )
        # What was erased must not come back with a restored database: before anything is read or called.
        await ready(self.database)
        self.context = ActivityContext(
            database=self.database,
            secrets=self.secrets,
            process_id=self.identity.id,
            progress=ProgressBoard(self.database),
            local_endpoint=self.local_endpoint,
        )
        inherited = await register_process(self.database, self.identity)
        # Before anything else, so that no other successor has time to make one of these calls again.
        await fail_orphans(self.client, inherited.orphans)
        await release_begun(self.database, self.client, inherited.dead)
        # What is imported by now stays; the collector need not look through it again and again.
        gc.collect()
        gc.freeze()
        self._start_worker(contracts.WORKFLOW_QUEUE)
        self.ensure_queues(self.options.queues)
        if self.options.all_queues:
            await self._follow_live_runs()
        self._keep(self.context.progress.run())
        self._keep(self._reconcile_forever())
        self._keep(self._expire_forever())
        self._keep(self._retain_forever())
        self._keep(keep_log(log_keeper(self.database, self.options.audit)))
        if self.options.all_queues:
            self._keep(self._follow_forever())

    def ensure_queues(self, queues: Iterable[str]) -> None:
        """Polls these pool queues too."""
        for queue in queues:
            name = contracts.pool_queue(queue)
            if name not in self._workers:
                self._start_worker(name)

    async def local_endpoint(self) -> LocalEndpoint:
        """The embedded model server, started when it is first needed or has died."""
        async with self._model_lock:
            if self._model is None or not self._model.is_running:
                self._model = LocalModelServer(log_path=self.options.model_log)
                await self._model.start()
            return LocalEndpoint(self._model.base_url, self._model.api_key)

    async def run(self) -> None:
        """Returns when ``stop`` was asked for; raises what a poller died of."""
        try:
            while not self._stopping.is_set():
                # Woken by every task that ends, those of queues that were added meanwhile included.
                self._stirred.clear()
                for task in [task for task in self._tasks if task.done()]:
                    task.result()
                    self._tasks.remove(task)
                await self._stirred.wait()
        finally:
            await self.shut_down()

    def stop(self) -> None:
        """Asks ``run`` to end: calls in flight get the grace period, then they are handed back."""
        self._stopping.set()
        self._stirred.set()

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._stirred.set())
        self._tasks.append(task)

    def _start_worker(self, queue: str) -> None:
        bookkeeping, children = BookkeepingActivities(self.context), ChildActivities(self.context)
        worker = Worker(
            self.client,
            task_queue=queue,
            workflows=[RunWorkflow],
            activities=[bookkeeping.settle_run, bookkeeping.note_waiting, children.begin_child, children.finish_child]
            if queue == contracts.WORKFLOW_QUEUE
            else [StepActivities(self.context).perform_step, PlanActivities(self.context).plan_task],
            workflow_runner=workflow_runner(),
            max_concurrent_activities=self.options.calls_max,
            # How often a call beats is decided by our own pace; the SDK would hold beats back for 8 s.
            max_heartbeat_throttle_interval=timedelta(seconds=contracts.HEARTBEAT_INTERVAL_MIN_S / 2),
            graceful_shutdown_timeout=timedelta(seconds=self.options.grace_s),
            sticky_queue_schedule_to_start_timeout=contracts.STICKY_QUEUE_TIMEOUT,
            identity=contracts.worker_identity(self.identity.id),
            deployment_config=_deployment(self.options.temporal.build),
        )
        self._workers[queue] = worker
        self._keep(worker.run())

    async def _reconcile_forever(self) -> None:
        while True:
            try:
                await reconcile(self.database, self.client)
            except PodiumError:
                _log.warning("the reconciler could not reach a service; it tries again")
            except Exception:  # noqa: BLE001  # logged with its trace
                # The model calls of this process are worth more than one pass of the reconciler.
                _log.exception("the reconciler failed; it tries again")
            await asyncio.sleep(RECONCILE_INTERVAL_S)

    async def _expire_forever(self) -> None:
        """Ends reviews within `REVIEW_EXPIRY_INTERVAL_S` of their deadline, and the time that it takes to say so.

        What cannot be done now (a service is away) is done when it is back: a deadline is kept late, never dropped.
        """
        while True:
            await asyncio.sleep(REVIEW_EXPIRY_INTERVAL_S)
            try:
                await end_overdue_reviews(self.database, self.client)
            except PodiumError:
                # The reconciler says so in the log, at its slower pace.
                pass
            except Exception:  # noqa: BLE001  # logged with its trace
                _log.exception("overdue reviews could not be ended; it is tried again")

    async def _retain_forever(self) -> None:
        """Finishes erasures that somebody has begun, and erases what has been kept long enough."""
        sweep_at = 0.0
        while True:
            try:
                await ready(self.database)
                if self.database.keys is not None:
                    self.database.keys.forget_expired()
                if time.monotonic() >= sweep_at:
                    await sweep(self.database, UUID(DEFAULT_TENANT), self.options.retention_days)
                    await forget_orphans(self.database)
                    sweep_at = time.monotonic() + RETENTION_INTERVAL_S
            except PodiumError as error:
                _log.warning("erasing has to wait: %s: %s", error.code, error.message)
            except Exception:  # noqa: BLE001  # logged with its trace
                _log.exception("the retention sweep failed; it tries again")
            await asyncio.sleep(RECONCILE_INTERVAL_S)

    async def _follow_forever(self) -> None:
        while True:
            await asyncio.sleep(QUEUE_WATCH_INTERVAL_S)
            with contextlib.suppress(PodiumError):
                await self._follow_live_runs()

    async def _follow_live_runs(self) -> None:
        async with self.database.read() as connection:
            digests = (
                await connection.scalars(select(Run.pool_digest).where(Run.state.in_(RUN_LIVE)).distinct())
            ).all()
        for digest in digests:
            try:
                self.ensure_queues((await self.context.pool(digest)).queues)
            except UnavailableError:
                raise
            except Exception:  # noqa: BLE001  # logged with its trace
                # A pool that this version cannot read is the trouble of its runs, not of all others.
                _log.exception("the queues of a pool could not be found out")

    async def has_live_runs(self) -> bool:
        """Whether any run has not ended."""
        async with self.database.read() as connection:
            return await connection.scalar(select(Run.id).where(Run.state.in_(RUN_LIVE)).limit(1)) is not None

    async def shut_down(self) -> None:
        """Hands calls in flight back after the grace period and closes everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if not hasattr(self, "context"):
            # The start did not get far enough for anything else to be there.
            if hasattr(self, "database"):
                await self.database.close()
            return
        await asyncio.gather(*(worker.shutdown() for worker in self._workers.values()), return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.context.close()
        if self._model is not None:
            await self._model.stop()
        # A courtesy: a successor finds out anyway, so a database that is away must not hold up the end.
        with contextlib.suppress(PodiumError, TimeoutError):
            async with asyncio.timeout(GIVE_BACK_S):
                await end_process(self.database, self.identity)
        await self.database.close()


def _without_traceback(record: logging.LogRecord) -> bool:
    """Makes one line of a failure that our activities raised; anything else keeps its traceback.

    Ours fail on purpose, for instance to be asked again once a key is there.
    """
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ApplicationError):
        record.msg, record.args = f"{error.type}: {record.getMessage()}", ()
        record.exc_info = record.exc_text = None
    return True


def workflow_runner(*, watched: bool = False) -> SandboxedWorkflowRunner:
    """The sandbox in which the workflow runs.

    A ``watched`` one imports the workflow's own module anew for every run, which takes 5 ms of a core, so that it can
    refuse what is not deterministic in it. Tests replay all saved histories in that; workers go without, and
    import-linter keeps I/O out of the module.
    """
    own = () if watched else (RunWorkflow.__module__,)
    restrictions = SandboxRestrictions.default.with_passthrough_modules(*_PASSED_THROUGH, *own)
    return SandboxedWorkflowRunner(restrictions=restrictions)


def _deployment(build: WorkerBuild | None) -> WorkerDeploymentConfig | None:
    """How a versioned worker presents itself. None for others: a server refuses a behaviour from them.

    Runs go on with the version that is current: they may wait for weeks, and pinned ones would keep old workers alive.
    """
    if build is None:
        return None
    return WorkerDeploymentConfig(
        version=WorkerDeploymentVersion(build.deployment, build.build_id),
        use_worker_versioning=True,
        default_versioning_behavior=VersioningBehavior.AUTO_UPGRADE,
    )
