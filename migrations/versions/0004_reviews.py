"""Reviews: what people were asked to decide, and what they decided.

Who may decide is enforced here, by person, whichever program writes: a decision by somebody whose run it is, or by
one person twice, is refused, and a review is approved only by as many decisions as it asks for.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Functions find Podium's tables and no others: a session may make tables of its own with the same names, and a look
# without a path finds those first.
PATH = "SET search_path = pg_catalog, {schema}, pg_temp"

# Whose a run is: who submitted it or a run above it, and on whose behalf; who wrote or edited the plan of its source.
RUN_AUTHORS = """
CREATE FUNCTION run_authors(p_run_id uuid) RETURNS SETOF text LANGUAGE sql STABLE <path> AS $$
    WITH RECURSIVE line AS (
        SELECT id, parent_run_id, source_run_id, actor_id, on_behalf_of, true AS counts FROM runs WHERE id = p_run_id
        UNION
        SELECT up.id, up.parent_run_id, up.source_run_id, up.actor_id, up.on_behalf_of,
               up.id IS NOT DISTINCT FROM line.parent_run_id OR up.origin IN ('file', 'fork')
        FROM runs up JOIN line ON up.id IN (line.parent_run_id, line.source_run_id)
    )
    SELECT DISTINCT account FROM line, unnest(ARRAY[actor_id, on_behalf_of]) AS account
    WHERE counts AND account IS NOT NULL AND account <> 'podium-engine'
$$
"""
PERSON_OF = """
CREATE FUNCTION person_of(p_tenant_id uuid, p_actor_id text) RETURNS text LANGUAGE sql STABLE <path> AS $$
    SELECT coalesce((SELECT person FROM persons WHERE tenant_id = p_tenant_id AND actor_id = p_actor_id), p_actor_id)
$$
"""
CHECK_DECISION = """
CREATE FUNCTION check_review_decision() RETURNS trigger LANGUAGE plpgsql <path> AS $$
DECLARE
    v_review reviews%ROWTYPE;
    v_account text;
    v_person text;
BEGIN
    SELECT * INTO v_review FROM reviews WHERE id = NEW.review_id FOR NO KEY UPDATE;
    IF NOT FOUND OR v_review.state <> 'open' THEN
        RAISE EXCEPTION 'the review is not open' USING ERRCODE = 'PD010';
    END IF;
    IF v_review.expires_at <= clock_timestamp() THEN
        RAISE EXCEPTION 'the review has expired' USING ERRCODE = 'PD011';
    END IF;
    IF NEW.subject <> v_review.subject OR NEW.shown <> v_review.shown THEN
        RAISE EXCEPTION 'the decision is about something else' USING ERRCODE = 'PD012';
    END IF;
    IF NEW.decision = 'bypass' AND v_review.bypass = 'never' THEN
        RAISE EXCEPTION 'the review may not be bypassed' USING ERRCODE = 'PD017';
    END IF;
    IF NEW.person <> person_of(v_review.tenant_id, NEW.actor_id) THEN
        RAISE EXCEPTION 'the account is of another person' USING ERRCODE = 'PD013';
    END IF;
    FOREACH v_account IN ARRAY array_remove(ARRAY[NEW.actor_id, NEW.on_behalf_of], NULL) LOOP
        v_person := person_of(v_review.tenant_id, v_account);
        IF v_review.four_eyes AND NOT (NEW.decision = 'bypass' AND v_review.bypass = 'anyone') AND EXISTS (
            SELECT FROM (SELECT run_authors(v_review.run_id) UNION SELECT unnest(v_review.excluded)) AS own (account)
            WHERE person_of(v_review.tenant_id, own.account) = v_person
        ) THEN
            RAISE EXCEPTION 'nobody reviews what is their own' USING ERRCODE = 'PD014';
        END IF;
        IF EXISTS (
            SELECT FROM review_decisions AS before, unnest(ARRAY[before.actor_id, before.on_behalf_of]) AS account
            WHERE before.review_id = NEW.review_id AND account IS NOT NULL
                AND v_person IN (before.person, person_of(v_review.tenant_id, account))
        ) THEN
            RAISE EXCEPTION 'this person has decided before' USING ERRCODE = 'PD015';
        END IF;
    END LOOP;
    IF cardinality(v_review.reviewers) > 0 AND NOT v_review.reviewers && ARRAY[NEW.actor_id, NEW.person]
        AND NOT (NEW.decision = 'bypass' AND v_review.bypass = 'anyone') THEN
        RAISE EXCEPTION 'this person is not asked' USING ERRCODE = 'PD016';
    END IF;
    RETURN NEW;
END
$$
"""
CHECK_REVIEW = """
CREATE FUNCTION check_review_change() RETURNS trigger LANGUAGE plpgsql <path> AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        IF NEW.state <> 'open' OR NEW.sent_back THEN
            RAISE EXCEPTION 'a review begins open' USING ERRCODE = 'PD018';
        END IF;
        RETURN NEW;
    END IF;
    IF (to_jsonb(NEW) - '{state,closed_at,sent_back}'::text[])
        IS DISTINCT FROM (to_jsonb(OLD) - '{state,closed_at,sent_back}'::text[]) THEN
        RAISE EXCEPTION 'what a review is about never changes' USING ERRCODE = 'PD018';
    END IF;
    IF NOT (OLD.state = 'open' OR (OLD.state IN ('approved', 'expired', 'bypassed') AND NEW.state = 'stale')) THEN
        RAISE EXCEPTION 'a review cannot go from % to %', OLD.state, NEW.state USING ERRCODE = 'PD018';
    END IF;
    IF NEW.state = 'approved' AND (
        -- By whose accounts they are by now: accounts may have been linked since, to each other or to an author.
        SELECT count(DISTINCT person_of(NEW.tenant_id, decided.actor_id)) FROM review_decisions AS decided
        WHERE decided.review_id = NEW.id AND decided.decision = 'approve' AND NOT (NEW.four_eyes AND EXISTS (
            SELECT FROM (SELECT run_authors(NEW.run_id) UNION SELECT unnest(NEW.excluded)) AS own (account)
            WHERE person_of(NEW.tenant_id, own.account) IN (
                person_of(NEW.tenant_id, decided.actor_id), person_of(NEW.tenant_id, decided.on_behalf_of)
            )
        ))
    ) < NEW.approvals THEN
        RAISE EXCEPTION 'a review is approved by people' USING ERRCODE = 'PD018';
    END IF;
    IF NEW.state = 'bypassed' AND NOT EXISTS (
        SELECT FROM review_decisions WHERE review_id = NEW.id AND decision = 'bypass'
    ) THEN
        RAISE EXCEPTION 'a review is bypassed by somebody' USING ERRCODE = 'PD018';
    END IF;
    IF NEW.state = 'expired' AND (OLD.expires_at IS NULL OR OLD.expires_at > clock_timestamp()) THEN
        RAISE EXCEPTION 'a review expires at its time' USING ERRCODE = 'PD018';
    END IF;
    RETURN NEW;
END
$$
"""
# As `engine.store.persons` refuses it: by two links in a row one person would be two.
CHECK_LINK = """
CREATE FUNCTION check_person_link() RETURNS trigger LANGUAGE plpgsql <path> AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('podium/system/' || NEW.tenant_id::text, 0));
    IF NEW.actor_id = NEW.person OR EXISTS (
        SELECT FROM persons WHERE tenant_id = NEW.tenant_id AND (actor_id = NEW.person OR person = NEW.actor_id)
    ) THEN
        RAISE EXCEPTION 'a link leads to a person and no further' USING ERRCODE = 'PD020';
    END IF;
    RETURN NEW;
END
$$
"""
REFUSE_CHANGE = """
CREATE FUNCTION refuse_review_change() RETURNS trigger LANGUAGE plpgsql <path> AS $$
BEGIN
    RAISE EXCEPTION 'the record of reviews is only ever added to' USING ERRCODE = 'PD019';
END
$$
"""
# Name, what sets it off, the table, and how often, with the function.
TRIGGERS = (
    ("check_decision", "BEFORE INSERT", "review_decisions", "FOR EACH ROW EXECUTE FUNCTION check_review_decision()"),
    ("check_change", "BEFORE INSERT OR UPDATE", "reviews", "FOR EACH ROW EXECUTE FUNCTION check_review_change()"),
    ("check_link", "BEFORE INSERT", "persons", "FOR EACH ROW EXECUTE FUNCTION check_person_link()"),
    *(
        ("keep_rows", f"BEFORE {event}", table, "FOR EACH ROW EXECUTE FUNCTION refuse_review_change()")
        for event, table in (
            ("DELETE", "reviews"),
            ("UPDATE OR DELETE", "review_decisions"),
            ("UPDATE OR DELETE", "review_openings"),
            ("UPDATE OR DELETE", "persons"),
            ("UPDATE OR DELETE", "sampling_salts"),
        )
    ),
    *(
        ("keep_table", "BEFORE TRUNCATE", table, "FOR EACH STATEMENT EXECUTE FUNCTION refuse_review_change()")
        for table in ("reviews", "review_decisions", "review_openings", "persons", "sampling_salts")
    ),
)
FUNCTIONS = (
    "refuse_review_change()",
    "check_person_link()",
    "check_review_change()",
    "check_review_decision()",
    "person_of(uuid, text)",
    "run_authors(uuid)",
)


def upgrade() -> None:
    """Adds tables, two columns and the functions that watch over them; takes nothing away."""
    op.add_column("steps", sa.Column("candidate_attempt_id", sa.Uuid(), nullable=True))
    op.add_column("steps", sa.Column("sent_back", sa.Integer(), server_default="0", nullable=False))
    op.create_check_constraint(
        op.f("ck_steps_candidate"), "steps", "candidate_attempt_id IS NULL OR accepted_attempt_id IS NULL"
    )
    _create_reviews()
    _create_beside()
    path = PATH.format(schema=op.get_bind().execute(sa.text("SELECT quote_ident(current_schema())")).scalar_one())
    for function in (RUN_AUTHORS, PERSON_OF, CHECK_DECISION, CHECK_REVIEW, CHECK_LINK, REFUSE_CHANGE):
        op.execute(function.replace("<path>", path))
    op.execute(f"ALTER FUNCTION check_transition() {path}")
    for name, event, table, action in TRIGGERS:
        op.execute(f"CREATE TRIGGER {name} {event} ON {table} {action}")
        op.execute(f"ALTER TABLE {table} ENABLE ALWAYS TRIGGER {name}")


def _create_reviews() -> None:
    op.create_table(
        "reviews",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("gate", sa.Text(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=True),
        sa.Column("holds", sa.Boolean(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("attempt_id", sa.Uuid(), nullable=True),
        sa.Column("basis", sa.LargeBinary(), nullable=True),
        sa.Column("execution", sa.Integer(), nullable=False),
        sa.Column("subject", sa.LargeBinary(), nullable=False),
        sa.Column("plan", sa.LargeBinary(), nullable=False),
        sa.Column("policy", sa.LargeBinary(), nullable=False),
        sa.Column("shown", sa.LargeBinary(), nullable=False),
        sa.Column("rule", sa.LargeBinary(), nullable=False),
        sa.Column("level", sa.Integer(), server_default="0", nullable=False),
        sa.Column("approvals", sa.Integer(), nullable=False),
        sa.Column("four_eyes", sa.Boolean(), nullable=False),
        sa.Column("reviewers", sa.ARRAY(sa.Text()), server_default="{}", nullable=False),
        sa.Column("excluded", sa.ARRAY(sa.Text()), server_default="{}", nullable=False),
        sa.Column("bypass", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("on_expiry", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), server_default="open", nullable=False),
        sa.Column("sent_back", sa.Boolean(), server_default="false", nullable=False),
        sa.Column(
            "requested_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.Column("closed_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("gate IN ('plan', 'before', 'after', 'answer')", name=op.f("ck_reviews_gate")),
        sa.CheckConstraint(
            "state IN ('open', 'approved', 'rejected', 'expired', 'stale', 'withdrawn', 'bypassed')",
            name=op.f("ck_reviews_state"),
        ),
        sa.CheckConstraint(
            "reason IN ('policy', 'label', 'sample', 'order', 'break-glass')", name=op.f("ck_reviews_reason")
        ),
        sa.CheckConstraint("bypass IN ('never', 'others', 'anyone')", name=op.f("ck_reviews_bypass")),
        sa.CheckConstraint("on_expiry IN ('reject', 'escalate', 'approve')", name=op.f("ck_reviews_on_expiry")),
        sa.CheckConstraint("(expires_at IS NULL) = (on_expiry IS NULL)", name=op.f("ck_reviews_expiry")),
        sa.CheckConstraint("(state = 'open') = (closed_at IS NULL)", name=op.f("ck_reviews_closed")),
        sa.CheckConstraint("(gate = 'plan') = (position IS NULL)", name=op.f("ck_reviews_position")),
        sa.CheckConstraint("basis IS NULL OR gate = 'before'", name=op.f("ck_reviews_basis")),
        sa.CheckConstraint("approvals >= 1 AND level >= 0", name=op.f("ck_reviews_approvals")),
        sa.CheckConstraint(
            "octet_length(subject) = 32 AND octet_length(plan) = 32 AND octet_length(policy) = 32"
            " AND octet_length(shown) = 32",
            name=op.f("ck_reviews_hashes"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_reviews_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_reviews")),
        sa.UniqueConstraint("run_id", "seq", name=op.f("uq_reviews_run_id_seq")),
    )
    op.create_index(
        "ix_reviews_open", "reviews", ["tenant_id", "requested_at"], postgresql_where=sa.text("state = 'open'")
    )
    op.create_index(
        "ix_reviews_expires_at",
        "reviews",
        ["expires_at"],
        postgresql_where=sa.text("state = 'open' AND expires_at IS NOT NULL"),
    )


def _create_beside() -> None:
    op.create_table(
        "review_decisions",
        sa.Column("id", sa.Uuid(), nullable=False),
        sa.Column("review_id", sa.Uuid(), nullable=False),
        sa.Column("decision", sa.Text(), nullable=False),
        sa.Column("meaning", sa.Text(), nullable=False),
        sa.Column("actor_id", sa.Text(), nullable=False),
        sa.Column("on_behalf_of", sa.Text(), nullable=True),
        sa.Column("person", sa.Text(), nullable=False),
        sa.Column("subject", sa.LargeBinary(), nullable=False),
        sa.Column("shown", sa.LargeBinary(), nullable=False),
        sa.Column("decided_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("decision IN ('approve', 'reject', 'bypass')", name=op.f("ck_review_decisions_decision")),
        sa.ForeignKeyConstraint(["review_id"], ["reviews.id"], name=op.f("fk_review_decisions_review_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_review_decisions")),
        sa.UniqueConstraint("review_id", "person", name=op.f("uq_review_decisions_review_id_person")),
    )
    op.create_table(
        "review_openings",
        sa.Column("review_id", sa.Uuid(), nullable=False),
        sa.Column("person", sa.Text(), nullable=False),
        sa.Column("actor_id", sa.Text(), nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["review_id"], ["reviews.id"], name=op.f("fk_review_openings_review_id")),
        sa.PrimaryKeyConstraint("review_id", "person", name=op.f("pk_review_openings")),
    )
    op.create_table(
        "persons",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("actor_id", sa.Text(), nullable=False),
        sa.Column("person", sa.Text(), nullable=False),
        sa.Column("linked_by", sa.Text(), nullable=False),
        sa.Column("linked_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", "actor_id", name=op.f("pk_persons")),
    )
    op.create_index("ix_persons_person", "persons", ["tenant_id", "person"])
    op.create_table(
        "sampling_salts",
        sa.Column("tenant_id", sa.Uuid(), nullable=False),
        sa.Column("salt", sa.LargeBinary(), nullable=False),
        sa.Column("made_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.CheckConstraint("octet_length(salt) = 32", name=op.f("ck_sampling_salts_salt")),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_sampling_salts")),
    )


def downgrade() -> None:
    """Takes away what this version added; refuses while the record holds anything that only it can express."""
    connection = op.get_bind()
    for what, query in (
        ("reviews", "SELECT 1 FROM reviews"),
        ("accounts linked to persons", "SELECT 1 FROM persons"),
        ("draws of samples", "SELECT 1 FROM sampling_salts"),
        ("outputs that wait for a review", "SELECT 1 FROM steps WHERE candidate_attempt_id IS NOT NULL"),
    ):
        if connection.execute(sa.text(f"{query} LIMIT 1")).first() is not None:  # the words above
            raise RuntimeError(f"the database holds {what}, which schema 0003 cannot express")
    for table in ("review_decisions", "review_openings", "reviews", "persons", "sampling_salts"):
        op.drop_table(table)
    for function in FUNCTIONS:
        op.execute(f"DROP FUNCTION {function}")
    op.execute("ALTER FUNCTION check_transition() RESET search_path")
    op.drop_constraint(op.f("ck_steps_candidate"), "steps")
    op.drop_column("steps", "sent_back")
    op.drop_column("steps", "candidate_attempt_id")
