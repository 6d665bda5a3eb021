"""Peeks at the changes of a slot."""

from __future__ import annotations

import pytest

from pgcdc_assets.postgres.connection import query_connection
from pgcdc_assets.postgres.slots.status import create_slot, read_slot_status
from pgcdc_assets.postgres.stream.slot_peeks import claim_slot, has_publication_gap
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.encoded import encoded_database

pytestmark = pytest.mark.postgres


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "WIN1252"])
def test_a_gap_behind_a_text_that_is_not_utf_8_is_found(database: Database, encoding: str) -> None:
    """Names that are not ASCII are those of a database of the encoding."""
    with encoded_database(database, encoding) as encoded:
        slot, publication = f"s_{encoded.name}", '"é"' if encoding == "WIN1252" else "pub"
        encoded.execute("create table t (v text)")
        encoded.execute(f"create publication {publication} for table t")
        with create_slot(encoded.settings(), slot):
            pass
        with query_connection(encoded.settings(), "test") as conn:
            for is_gap in (False, True):
                encoded.execute("insert into t values ('\\x81'::bytea::text)")
                encoded.execute(f"drop publication {publication}")
                if is_gap:
                    encoded.execute("insert into t values ('a')")
                encoded.transaction(
                    "set local synchronous_commit = on",
                    f"create publication {publication} for table t",
                )
                status = read_slot_status(conn, slot)
                assert status is not None
                found = has_publication_gap(
                    conn, encoded.settings(), status, publication.strip('"')
                )
                assert found == is_gap


def test_a_failed_claim_leaves_the_connection_usable(database: Database) -> None:
    with query_connection(database.settings(), "test") as conn:
        claim_slot(conn, "missing", "pub")
        assert read_slot_status(conn, "missing") is None
        conn.close()
        claim_slot(conn, "missing", "pub")
