"""Pre-flight check of replica identities (D9, D10, D11, D13).

The check reports causes of failing UPDATE and DELETE statements before the first failure.
"""

from __future__ import annotations

import re

import psycopg2
import pytest

from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.preflight import findings_of, problems_in

pytestmark = pytest.mark.postgres


def _need_filters(database: Database) -> None:
    if database.server.version < 15:
        pytest.skip("row filters and column lists are new in Postgres 15")


@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (
            "id int",
            "no primary key: .*UPDATE and DELETE on this table fail.*add primary key",
        ),
        (
            "id int primary key deferrable",
            'a deferrable primary key.*alter table "public"."t" replica identity full',
        ),
        (
            "id int primary key); alter table t replica identity nothing; select (1",
            "replica identity NOTHING.*replica identity default",
        ),
    ],
)
def test_a_table_without_a_key_is_refused_before_its_updates_fail(
    database: Database, table: str, sentence: str
) -> None:
    """D10."""
    database.execute(f"create table t ({table}); create publication pub for table t")
    problems = problems_in(findings_of(database.settings()))
    assert list(problems) == [("replica_identity", "public.t")]
    assert re.search(sentence, problems["replica_identity", "public.t"])
    database.execute("insert into t values (1)")
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState):
        database.execute("update t set id = 2")


@pytest.mark.every_pg
@pytest.mark.parametrize("columns", ["id int", ""])
def test_a_table_without_a_key_that_sends_whole_rows_is_a_bag(
    database: Database, columns: str
) -> None:
    """D11. The server accepts DELETE, also on a table without columns."""
    database.execute(f"create table t ({columns}); alter table t replica identity full")
    database.execute("create publication pub for table t")
    database.execute("insert into t default values; delete from t")
    problems = problems_in(findings_of(database.settings()))
    assert list(problems) == [("key", "public.t")]
    sentence = problems["key", "public.t"]
    assert re.match("warning: .*multiset.*add primary key.*without_key: log", sentence)
    if columns:
        database.execute("alter table t alter column id set not null")
        assert problems_in(findings_of(database.settings(), keys={("public", "t"): ("id",)})) == {}


def test_a_unique_index_as_identity_is_a_key(database: Database) -> None:
    """D9."""
    database.execute(
        "create table t (id int not null); create unique index i on t (id);"
        "alter table t replica identity using index i; create publication pub for table t"
    )
    assert problems_in(findings_of(database.settings())) == {}
    database.execute("drop index i")
    assert (
        "index that was dropped"
        in problems_in(findings_of(database.settings()))["replica_identity", "public.t"]
    )


def test_a_table_without_a_key_is_accepted_when_only_inserts_are_published(
    database: Database,
) -> None:
    """D10: the application's statements succeed, but the merge needs a key."""
    database.execute(
        "create table t (id int); create publication pub for table t with (publish = 'insert')"
    )
    assert list(problems_in(findings_of(database.settings()))) == [
        ("publish", None),
        ("key", "public.t"),
    ]


def test_a_column_list_without_the_identity_is_refused(database: Database) -> None:
    database.execute(
        "create table t (id int primary key, a text); create publication pub for table t (a)"
    )
    problem = problems_in(findings_of(database.settings()))["column_list", "public.t"]
    assert "omits id of the table's replica identity" in problem


@pytest.mark.every_pg
def test_a_row_filter_outside_the_identity_is_refused_before_updates_fail(
    database: Database,
) -> None:
    """D10, D13."""
    _need_filters(database)
    database.execute(
        """
        create table t (id int primary key, kind text, "Size" int, v text);
        insert into t values (1, 'a', 1, 'v');
        create publication pub for table t where (kind <> 'x' and id > 0 and "Size" is not null)
        """
    )
    problem = problems_in(findings_of(database.settings()))["row_filter", "public.t"]
    assert "uses Size, kind, which the replica identity of public.t does not have" in problem
    with pytest.raises(psycopg2.Error, match="replica identity"):
        database.execute("update t set v = 'w'")
    database.execute("alter table t replica identity full")
    assert not problems_in(findings_of(database.settings()))
    database.execute("update t set v = 'w'")


@pytest.mark.every_pg
def test_a_row_filter_is_compared_with_the_identity_of_each_partition(database: Database) -> None:
    """D10, D13: ALTER TABLE of the root does not change the partitions."""
    _need_filters(database)
    database.execute(
        """
        create table t (id int primary key, kind text) partition by range (id);
        create table t1 partition of t for values from (0) to (10);
        create table t2 partition of t default;
        alter table t1 replica identity full; alter table t replica identity full;
        insert into t values (1, 'a'), (20, 'a');
        create publication pub for table t where (kind <> 'x')
            with (publish_via_partition_root = true)
        """
    )
    problem = problems_in(findings_of(database.settings()))["row_filter", "public.t"]
    assert "uses kind, which the replica identity of public.t2 does not have" in problem
    database.execute("update t set kind = 'b' where id = 1")
    with pytest.raises(psycopg2.Error, match="replica identity"):
        database.execute("update t set kind = 'b' where id = 20")
    database.execute("alter table t2 replica identity full; alter table t replica identity default")
    assert not problems_in(findings_of(database.settings()))
    database.execute("update t set kind = 'b'")


@pytest.mark.every_pg
def test_partitions_without_an_identity_are_refused_by_name(database: Database) -> None:
    """D10, D13: the root's identity does not apply to partitions."""
    database.execute(
        """
        create table t (id int, kind text) partition by range (id);
        create table t1 partition of t for values from (0) to (10);
        create table t2 (id int, kind text) partition by range (id);
        create table t3 partition of t2 default; alter table t attach partition t2 default;
        alter table t replica identity full; alter table t1 replica identity full;
        insert into t values (1, 'a'), (20, 'a');
        create publication pub for table t with (publish_via_partition_root = true)
        """
    )
    problems = problems_in(findings_of(database.settings()))
    assert list(problems) == [("replica_identity", "public.t")]
    sentence = problems["replica_identity", "public.t"]
    assert "has partition public.t3 with no primary key: " in sentence
    assert 'alter table "public"."t3" replica identity full' in sentence
    database.execute("update t set kind = 'b' where id = 1")
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState):
        database.execute("update t set kind = 'b' where id = 20")
    database.execute('alter table "public"."t3" replica identity full')
    assert list(problems_in(findings_of(database.settings()))) == [("key", "public.t")]
    database.execute("update t set kind = 'b'")


def test_many_partitions_without_an_identity_are_not_all_named(database: Database) -> None:
    partitions = "; ".join(
        f"create table t{n} partition of t for values in ({n})" for n in range(7)
    )
    database.execute(
        f"create table t (id int) partition by list (id); {partitions};"
        "create publication pub for table t with (publish_via_partition_root = true)"
    )
    sentence = problems_in(findings_of(database.settings()))["replica_identity", "public.t"]
    assert "public.t4 with no primary key; and likewise for 2 more partitions" in sentence
    assert "public.t5" not in sentence


@pytest.mark.every_pg
def test_a_column_list_is_compared_with_the_identity_of_each_partition(database: Database) -> None:
    """D10, D13."""
    _need_filters(database)
    database.execute(
        """
        create table t (id int primary key, kind text) partition by range (id);
        create table t1 partition of t default; alter table t1 replica identity full;
        insert into t values (1, 'a');
        create publication pub for table t (id) with (publish_via_partition_root = true)
        """
    )
    problem = problems_in(findings_of(database.settings()))["column_list", "public.t"]
    assert "omits kind of the table's replica identity" in problem
    with pytest.raises(psycopg2.Error, match="Column list used by the publication"):
        database.execute("update t set kind = 'b'")


@pytest.mark.every_pg
def test_unpublished_generated_columns_cannot_be_part_of_an_identity(database: Database) -> None:
    """D10: PG 18 and newer refuse the application's UPDATE; older versions do not."""
    database.execute(
        """
        create table t (id int primary key, twice int generated always as (id * 2) stored);
        alter table t replica identity full; insert into t values (1);
        create publication pub for table t
        """
    )
    problems = problems_in(findings_of(database.settings()))
    if database.server.version < 18:
        assert list(problems) == [("generated", "public.t")]
        database.execute("update t set id = 2")
        return
    assert list(problems) == [("generated_column", "public.t")]
    with pytest.raises(psycopg2.Error, match="unpublished generated columns"):
        database.execute("update t set id = 2")
    (remedy,) = re.findall(r"alter publication .*? = stored\)", problems.popitem()[1])
    database.execute(remedy)
    assert problems_in(findings_of(database.settings())) == {}
    database.execute("update t set id = 2")


_BY_CODE = """
create table t (id int primary key, code text not null) partition by range (id);
create table t1 partition of t for values from (0) to (10);
create table t2 partition of t default;
create unique index i on t1 (code); alter table t1 replica identity using index i
"""
_KEY_OF_A_PARTITION = """
create table t (id int, code text) partition by range (id); alter table t replica identity full;
create table t1 partition of t for values from (0) to (10); alter table t1 add primary key (id);
create table t2 partition of t default; alter table t2 replica identity full
"""


@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("tables", "columns", "identity"),
    [(_BY_CODE, "id", "default"), (_KEY_OF_A_PARTITION, "code", "full")],
    ids=["another index", "no whole rows"],
)
def test_partitions_whose_old_rows_lack_the_key_of_the_root_are_refused(
    database: Database, tables: str, columns: str, identity: str
) -> None:
    """D9: Postgres accepts these updates and deletes, and does not say which row they are about."""
    database.execute(tables)
    database.execute("create publication pub for table t with (publish_via_partition_root = true)")
    problems = problems_in(findings_of(database.settings()))
    sentence = problems["replica_identity", "public.t"]
    assert f"error: Table public.t has partition public.t1 without {columns} in its" in sentence
    assert "public.t2" not in sentence
    (remedy,) = re.findall(r"alter table .* replica identity \w+", sentence)
    assert remedy == f'alter table "public"."t1" replica identity {identity}'
    database.execute(remedy)
    assert ("replica_identity", "public.t") not in problems_in(findings_of(database.settings()))
