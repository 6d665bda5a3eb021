"""A source whose slot is missing."""

from __future__ import annotations

import pytest

from pgcdc_assets_tests.support.database import Database


@pytest.fixture
def slot(database: Database) -> str:
    """Create a published table with two rows, and return the name of a missing slot."""
    database.execute("create table t (id int primary key); create publication pub for table t")
    database.execute("insert into t values (1), (2)")
    return f"s_{database.name}"
