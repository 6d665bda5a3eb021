"""The transaction that the creation of a slot waits for."""

from __future__ import annotations

import pytest

from pgcdc_assets.postgres.blocking_transactions import (
    BlockingTransaction,
    oldest_blocking_transaction,
)
from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.waits import wait_until


@pytest.mark.postgres
@pytest.mark.parametrize("name", ["it's", "a\\b"])
def test_a_prepared_transaction_can_be_ended_as_the_remedy_says(
    database: Database, name: str
) -> None:
    """Statements in another database than that of the transaction are an error."""
    gid = f"{name} {database.name}"
    database.execute("create table t (id int)")
    database.prepare(gid, "insert into t values (1)")
    with query_connection(Database(database.server, "postgres").settings(), "test") as conn:

        def find() -> BlockingTransaction | None:
            found = oldest_blocking_transaction(conn)
            return found if found is not None and found.gid == gid else None

        blocker = wait_until(find, "the other transactions to end")
    assert blocker is not None
    where, _, statements = blocker.remedy().partition(" with: ")
    assert where == f'end it in database "{database.name}"'
    commit, _, rollback = statements.partition(", or: ")
    assert commit.replace("commit", "rollback") == rollback
    assert blocker.describe().startswith(f"the prepared transaction {commit.partition('ed ')[2]} ")
    database.execute(commit)
    assert database.value("select count(*) from t") == 1
