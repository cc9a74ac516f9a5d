"""The log: what the sequencer, the signer and an auditor need; the ledger is append-only for real.

Everything is added, nothing is taken away, so workers of the version before go on while the new ones start: what they
append gets its place in the log too, by a trigger.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

# What a provider said of a call. The entries say it too, so going back loses nothing that is on record.
PROVIDER_COLUMNS = ("provider_request_id", "provider_model")
APPEND_ONLY = ("ledger_entries", "log_leaves", "log_nodes", "log_checkpoints")

# With a fixed search path nobody can put a table or an operator of their own in the way of the owner's rights.
SECURED = "SECURITY DEFINER SET search_path = pg_catalog, {schema}, pg_temp"

# Appends entries to a chain: a run's, or the system chain whose id is the tenant's. Compares and swaps the head, and
# checks that each body says the tenant, the chain, the number, the previous hash and the time that its place demands.
LEDGER_APPEND = """
CREATE OR REPLACE FUNCTION ledger_append(p_run_id uuid, p_seq bigint, p_prev bytea, p_bodies bytea[])
RETURNS bytea LANGUAGE plpgsql {secured} AS $$
DECLARE
    v_tenant uuid;
    v_body bytea;
    v_doc jsonb;
    v_at timestamptz;
    v_hash bytea;
    v_seq bigint := p_seq;
    v_prev bytea := p_prev;
BEGIN
    SELECT tenant_id INTO v_tenant FROM runs WHERE id = p_run_id;
    IF NOT FOUND THEN
        v_tenant := p_run_id;
    END IF;
    FOREACH v_body IN ARRAY p_bodies LOOP
        v_doc := convert_from(v_body, 'UTF8')::jsonb;
        v_at := (v_doc->>'at')::timestamptz;
        v_seq := v_seq + 1;
        IF (v_doc->>'run') IS DISTINCT FROM p_run_id::text
            OR (v_doc->>'tenant') IS DISTINCT FROM v_tenant::text
            OR (v_doc->>'seq') IS DISTINCT FROM v_seq::text
            OR (v_doc->>'prev') IS DISTINCT FROM encode(v_prev, 'hex') THEN
            RAISE EXCEPTION 'ledger entry does not fit its place' USING ERRCODE = 'PD002';
        END IF;
        -- A minute is for clocks that are set; what happened before this transaction cannot be claimed.
        IF v_at IS NULL OR v_at < now() - interval '1 minute' OR v_at > clock_timestamp() + interval '1 minute' THEN
            RAISE EXCEPTION 'ledger entry does not fit its time' USING ERRCODE = 'PD002';
        END IF;
        v_hash := sha256(v_body);
        INSERT INTO ledger_entries (run_id, seq, tenant_id, prev, hash, body, type, at)
        VALUES (p_run_id, v_seq, v_tenant, v_prev, v_hash, v_body, v_doc->>'type', v_at);
        v_prev := v_hash;
    END LOOP;
    UPDATE ledger_heads SET seq = v_seq, hash = v_prev
    WHERE run_id = p_run_id AND seq = p_seq AND hash = p_prev;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'ledger head has moved' USING ERRCODE = 'PD001';
    END IF;
    RETURN v_prev;
END
$$
"""

# What it was, for going back; with the owner's rights all the same, so that roles which may not insert can append.
LEDGER_APPEND_BEFORE = """
CREATE OR REPLACE FUNCTION ledger_append(p_run_id uuid, p_seq bigint, p_prev bytea, p_bodies bytea[])
RETURNS bytea LANGUAGE plpgsql {secured} AS $$
DECLARE
    v_body bytea;
    v_doc jsonb;
    v_seq bigint := p_seq;
    v_prev bytea := p_prev;
BEGIN
    FOREACH v_body IN ARRAY p_bodies LOOP
        v_doc := convert_from(v_body, 'UTF8')::jsonb;
        v_seq := v_seq + 1;
        IF (v_doc->>'run') IS DISTINCT FROM p_run_id::text
            OR (v_doc->>'seq') IS DISTINCT FROM v_seq::text
            OR (v_doc->>'prev') IS DISTINCT FROM encode(v_prev, 'hex') THEN
            RAISE EXCEPTION 'ledger entry does not fit its place' USING ERRCODE = 'PD002';
        END IF;
        INSERT INTO ledger_entries (run_id, seq, tenant_id, prev, hash, body, type, at)
        VALUES (p_run_id, v_seq, (v_doc->>'tenant')::uuid, v_prev, sha256(v_body), v_body,
                v_doc->>'type', (v_doc->>'at')::timestamptz);
        v_prev := sha256(v_body);
    END LOOP;
    UPDATE ledger_heads SET seq = v_seq, hash = v_prev
    WHERE run_id = p_run_id AND seq = p_seq AND hash = p_prev;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'ledger head has moved' USING ERRCODE = 'PD001';
    END IF;
    RETURN v_prev;
END
$$
"""

# However an entry comes into the table, it waits for its leaf. A trigger and not the function above, because a session
# that runs the function's old text while this migration is under way must not leave an entry out.
ENQUEUE = """
CREATE FUNCTION ledger_enqueue() RETURNS trigger LANGUAGE plpgsql {path} AS $$
BEGIN
    INSERT INTO ledger_pending (tenant_id, run_id, seq) VALUES (NEW.tenant_id, NEW.run_id, NEW.seq);
    RETURN NULL;
END
$$
"""

# Gives up to p_limit waiting entries of a tenant their leaves, adds the nodes that this completes, says how many.
# All in one transaction: whoever is killed in the middle has done nothing. The lock makes a second sequencer wait, and
# each statement below sees what the first one committed. Waiting rows are looked up, never "those after the last id":
# a transaction that commits late would be passed over for ever.
LOG_EXTEND = """
CREATE FUNCTION log_extend(p_tenant_id uuid, p_limit integer) RETURNS bigint LANGUAGE plpgsql {secured} AS $$
DECLARE
    v_old bigint;
    v_new bigint;
    v_added bigint;
    v_level integer := 0;
    v_runs uuid[];
    v_seqs bigint[];
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('podium/log/' || p_tenant_id::text, 0));
    SELECT coalesce(max(index) + 1, 0) INTO v_old FROM log_leaves WHERE tenant_id = p_tenant_id;
    WITH claimed AS (
        SELECT run_id, seq FROM ledger_pending WHERE tenant_id = p_tenant_id ORDER BY run_id, seq LIMIT p_limit
    ), taken AS (
        DELETE FROM ledger_pending p USING claimed c
        WHERE p.tenant_id = p_tenant_id AND p.run_id = c.run_id AND p.seq = c.seq
        RETURNING p.run_id, p.seq
    )
    SELECT array_agg(run_id ORDER BY run_id, seq), array_agg(seq ORDER BY run_id, seq) INTO v_runs, v_seqs FROM taken;
    IF v_runs IS NULL THEN
        RETURN 0;
    END IF;
    INSERT INTO log_leaves (tenant_id, index, run_id, seq, leaf_hash)
    SELECT p_tenant_id, v_old + number - 1, e.run_id, e.seq, sha256('\\x00'::bytea || e.body)
    FROM unnest(v_runs, v_seqs) WITH ORDINALITY AS waiting (run_id, seq, number)
    JOIN ledger_entries e ON e.run_id = waiting.run_id AND e.seq = waiting.seq AND e.tenant_id = p_tenant_id;
    GET DIAGNOSTICS v_added = ROW_COUNT;
    IF v_added <> cardinality(v_runs) THEN
        RAISE EXCEPTION 'an entry that waits for its leaf is gone' USING ERRCODE = 'PD011';
    END IF;
    v_new := v_old + v_added;
    WHILE (v_old >> (v_level + 1)) < (v_new >> (v_level + 1)) LOOP
        -- Pairs of neighbours by one look through a range: never a join, whose plan could walk through the whole log.
        IF v_level = 0 THEN
            INSERT INTO log_nodes (tenant_id, level, index, hash)
            SELECT p_tenant_id, 1, index >> 1, sha256('\\x01'::bytea || string_agg(leaf_hash, ''::bytea ORDER BY index))
            FROM log_leaves
            WHERE tenant_id = p_tenant_id AND index >= (v_old >> 1) << 1 AND index < (v_new >> 1) << 1
            GROUP BY index >> 1 HAVING count(*) = 2;
        ELSE
            INSERT INTO log_nodes (tenant_id, level, index, hash)
            SELECT p_tenant_id, v_level + 1, index >> 1,
                   sha256('\\x01'::bytea || string_agg(hash, ''::bytea ORDER BY index))
            FROM log_nodes
            WHERE tenant_id = p_tenant_id AND level = v_level
                AND index >= (v_old >> (v_level + 1)) << 1 AND index < (v_new >> (v_level + 1)) << 1
            GROUP BY index >> 1 HAVING count(*) = 2;
        END IF;
        GET DIAGNOSTICS v_added = ROW_COUNT;
        v_level := v_level + 1;
        IF v_added <> (v_new >> v_level) - (v_old >> v_level) THEN
            RAISE EXCEPTION 'a node of the log is gone' USING ERRCODE = 'PD011';
        END IF;
    END LOOP;
    RETURN v_new - v_old;
END
$$
"""

REFUSE = """
CREATE FUNCTION ledger_refuse() RETURNS trigger LANGUAGE plpgsql {path} AS $$
BEGIN
    RAISE EXCEPTION 'the ledger and its log only grow: % of % is refused', lower(TG_OP), TG_TABLE_NAME
        USING ERRCODE = 'PD010';
END
$$
"""

GENESIS = "decode(repeat('00', 32), 'hex')"
# A checkpoint of leaves that are not there would stand in the way of all true ones.
CHECK_SIZE = """
CREATE FUNCTION log_check_size() RETURNS trigger LANGUAGE plpgsql {path} AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM log_leaves WHERE tenant_id = NEW.tenant_id AND index = NEW.size - 1) THEN
        RAISE EXCEPTION 'a checkpoint of leaves that are not there' USING ERRCODE = 'PD010';
    END IF;
    RETURN NEW;
END
$$
"""


def upgrade() -> None:
    """Tables, functions and triggers of the log; every entry there is waits for its leaf."""
    schema = op.get_bind().execute(sa.text("SELECT quote_ident(current_schema())")).scalar_one()
    secured = SECURED.format(schema=schema)
    path = secured.removeprefix("SECURITY DEFINER ")
    for table in ("ledger_entries", "ledger_heads"):
        # The system chain of a tenant belongs to no run.
        op.drop_constraint(op.f(f"fk_{table}_run_id"), table)
    _create_tables()
    for column in PROVIDER_COLUMNS:
        op.add_column("attempts", sa.Column(column, sa.Text(), nullable=True))
    for definition in (LEDGER_APPEND, ENQUEUE, LOG_EXTEND, REFUSE, CHECK_SIZE):
        op.execute(definition.format(secured=secured, path=path))
    for function in ("ledger_append(uuid, bigint, bytea, bytea[])", "log_extend(uuid, integer)"):
        # They act with the owner's rights: whoever may call them is named, see engine.store.roles.
        op.execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")
    op.execute("INSERT INTO ledger_pending (tenant_id, run_id, seq) SELECT tenant_id, run_id, seq FROM ledger_entries")
    _trigger("enqueue", "ledger_entries", "AFTER INSERT", "FOR EACH ROW EXECUTE FUNCTION ledger_enqueue()")
    for table in APPEND_ONLY:
        refuse = "FOR EACH STATEMENT EXECUTE FUNCTION ledger_refuse()"
        _trigger("append_only", table, "BEFORE UPDATE OR DELETE OR TRUNCATE", refuse)
    refuse_row = "EXECUTE FUNCTION ledger_refuse()"
    _trigger(
        "genesis",
        "ledger_heads",
        "BEFORE INSERT",
        f"FOR EACH ROW WHEN (NEW.seq <> 0 OR NEW.hash <> {GENESIS}) {refuse_row}",
    )
    _trigger(
        "forward",
        "ledger_heads",
        "BEFORE UPDATE",
        f"FOR EACH ROW WHEN (NEW.run_id <> OLD.run_id OR NEW.seq <= OLD.seq) {refuse_row}",
    )
    _trigger("keep", "ledger_heads", "BEFORE DELETE OR TRUNCATE", f"FOR EACH STATEMENT {refuse_row}")
    _trigger("size", "log_checkpoints", "BEFORE INSERT", "FOR EACH ROW EXECUTE FUNCTION log_check_size()")


def downgrade() -> None:
    """Takes the log away; refuses once a checkpoint was signed, or while there are chains that belong to no run."""
    connection = op.get_bind()
    for what, query in (
        ("signed checkpoints", "SELECT 1 FROM log_checkpoints"),
        ("a tenant's own entries", "SELECT 1 FROM ledger_heads WHERE run_id NOT IN (SELECT id FROM runs)"),
    ):
        if connection.execute(sa.text(f"{query} LIMIT 1")).first() is not None:
            raise RuntimeError(f"the database holds {what}, which schema 0002 cannot express")
    for name, table in (
        ("enqueue", "ledger_entries"),
        ("append_only", "ledger_entries"),
        *((name, "ledger_heads") for name in ("genesis", "forward", "keep")),
    ):
        op.execute(f"DROP TRIGGER {name} ON {table}")
    op.drop_index("ix_ledger_entries_keys", "ledger_entries")
    for table in ("log_checkpoints", "log_nodes", "log_leaves", "ledger_pending"):
        op.drop_table(table)
    for column in PROVIDER_COLUMNS:
        op.drop_column("attempts", column)
    for function in ("log_extend(uuid, integer)", "ledger_enqueue()", "ledger_refuse()", "log_check_size()"):
        op.execute(f"DROP FUNCTION {function}")
    schema = connection.execute(sa.text("SELECT quote_ident(current_schema())")).scalar_one()
    op.execute(LEDGER_APPEND_BEFORE.format(secured=SECURED.format(schema=schema)))
    for table in ("ledger_entries", "ledger_heads"):
        op.create_foreign_key(op.f(f"fk_{table}_run_id"), table, "runs", ["run_id"], ["id"])


def _trigger(name: str, table: str, when: str, what: str) -> None:
    """A trigger that also fires in sessions which say that they are replicas."""
    op.execute(f"CREATE TRIGGER {name} {when} ON {table} {what}")
    op.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {name}")


def _create_tables() -> None:
    op.create_table(
        "ledger_pending",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "run_id", "seq", name=op.f("pk_ledger_pending")),
    )
    op.create_table(
        "log_leaves",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("leaf_hash", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("index >= 0", name=op.f("ck_log_leaves_index")),
        sa.CheckConstraint("octet_length(leaf_hash) = 32", name=op.f("ck_log_leaves_leaf_hash")),
        sa.PrimaryKeyConstraint("tenant_id", "index", name=op.f("pk_log_leaves")),
        sa.UniqueConstraint("run_id", "seq", name=op.f("uq_log_leaves_run_id_seq")),
    )
    op.create_table(
        "log_nodes",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("index", sa.BigInteger(), nullable=False),
        sa.Column("hash", sa.LargeBinary(), nullable=False),
        sa.CheckConstraint("level >= 1 AND index >= 0", name=op.f("ck_log_nodes_place")),
        sa.CheckConstraint("octet_length(hash) = 32", name=op.f("ck_log_nodes_hash")),
        sa.PrimaryKeyConstraint("tenant_id", "level", "index", name=op.f("pk_log_nodes")),
    )
    op.create_table(
        "log_checkpoints",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("root", sa.LargeBinary(), nullable=False),
        sa.Column("note", sa.LargeBinary(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("signed_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("size >= 1", name=op.f("ck_log_checkpoints_size")),
        sa.CheckConstraint("octet_length(root) = 32", name=op.f("ck_log_checkpoints_root")),
        sa.PrimaryKeyConstraint("tenant_id", "size", name=op.f("pk_log_checkpoints")),
    )
    # The history of the signer's keys is asked for before every signature.
    op.create_index(
        "ix_ledger_entries_keys",
        "ledger_entries",
        ["run_id", "seq"],
        postgresql_where=sa.text("type IN ('key.created', 'key.rotated')"),
    )
