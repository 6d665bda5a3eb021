"""Writers that are open while their table joins the publication, or is altered (C1, C9).

The stream sends a row as of the catalog at the time of the write, and its transaction may commit
long after. Only a snapshot after the end of the transaction has such a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from pgcdc_assets.capture.snapshots.pool import SnapshotFailure, SnapshotReport
from pgcdc_assets.capture.snapshots.run import snapshot_each_table, snapshot_tables
from pgcdc_assets.errors import TransientError
from pgcdc_assets.postgres import open_writers
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.policies import SnapshotPolicy
from pgcdc_assets.table_name import TableName
from pgcdc_assets_tests.capture.test_partitions import replayed
from pgcdc_assets_tests.support.captures import Capturing
from pgcdc_assets_tests.support.handover import copied_rows, replay
from pgcdc_assets_tests.support.standby import Source

pytestmark = pytest.mark.postgres

_U = TableName("public", "u")
_IMPATIENT = SnapshotPolicy(lock_timeout_seconds=0.3)
_TABLE = "create table u (id int primary key, note text); insert into u values (1, 'old')"


def _begin(capturing: Capturing, publish_u: str = "") -> Capturing:
    execute = capturing.database.execute
    execute("create table t (id int primary key); create type mood as enum ('a', 'b')")
    execute(f"{_TABLE}; create publication pub for table t{publish_u}")
    snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub")
    return capturing


def _copy_u(capturing: Capturing, policy: SnapshotPolicy = _IMPATIENT) -> SnapshotReport:
    arguments = (capturing.settings, capturing.zone, capturing.slot, "pub", [_U])
    [report] = snapshot_tables(*arguments, policy=policy)
    return report


def _assert_complete(capturing: Capturing, report: SnapshotReport) -> None:
    """Check that the snapshot and the later changes result in the source's rows."""
    capturing.database.execute("update u set note = note where id = 1")
    capturing.capture()
    copied = copied_rows(capturing.zone, "u", report.snapshot_lsn)
    found = replayed(capturing, copied, "u", (0,), int(report.snapshot_lsn))
    rows = capturing.database.query("select id::text, note::text from u")
    assert found == sorted(map(list, rows), key=repr)


@pytest.mark.every_pg
@pytest.mark.parametrize("ending", ["commit", "prepare"])
def test_the_snapshot_of_an_added_table_waits_for_the_writers_from_before(
    capturing: Capturing, ending: str
) -> None:
    """C9: the publication does not send what they have written, whenever they commit."""
    _begin(capturing)
    with capturing.database.connect(autocommit=False) as late, late.cursor() as cursor:
        cursor.execute("savepoint a; insert into u values (2, 'before'); release a")
        capturing.database.execute("alter publication pub add table u")
        cursor.execute("insert into u values (3, 'after')")
        whose = f"process {late.get_backend_pid()}"
        if ending == "prepare":
            name = f"p {capturing.database.name}"
            cursor.execute("prepare transaction %s", (name,))
            whose = f"the prepared transaction '{name}'"
        with pytest.raises(TransientError, match=rf"Table public\.u: .*{whose}.*has written to"):
            _copy_u(capturing)
        if ending == "prepare":
            capturing.database.execute("commit prepared %s", (name,))
        late.commit()
    report = _copy_u(capturing)
    assert report.row_count == 3
    _assert_complete(capturing, report)


def test_the_wait_ends_with_the_writer_and_not_with_later_ones(
    capturing: Capturing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C9: a later writer writes to a table that the publication has."""
    _begin(capturing)
    database = capturing.database
    with (
        database.connect(autocommit=False) as early,
        database.connect(autocommit=False) as later,
        early.cursor() as cursor,
        later.cursor() as other,
    ):
        cursor.execute("insert into u values (2, 'before')")
        database.execute("alter publication pub add table u")

        def sleep(seconds: float) -> None:
            other.execute("insert into u values (4, 'later') on conflict do nothing")
            early.commit()

        clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
        monkeypatch.setattr(open_writers, "time", clock)
        report = _copy_u(capturing)
        monkeypatch.undo()
        later.commit()
    assert report.row_count == 2
    _assert_complete(capturing, report)


@pytest.mark.every_pg
@pytest.mark.parametrize(
    ("publish", "make", "alteration"),
    [
        pytest.param(
            ", u", "", "alter publication pub set (publish = 'insert, update')", id="options"
        ),
        pytest.param(
            ", u where (id > 100)", "", "alter publication pub set table t, u", id="row filter"
        ),
        pytest.param(", u (id)", "", "alter publication pub set table t, u", id="column list"),
        pytest.param(
            ", u",
            "alter table u alter note type mood using 'a'::mood",
            "alter type mood rename value 'b' to 'c'",
            id="enum value",
        ),
    ],
)
def test_the_snapshot_after_an_alteration_waits_for_the_writers_from_before(
    capturing: Capturing, publish: str, make: str, alteration: str
) -> None:
    """D13, F10: the stream has their rows as of the former catalog, or not at all."""
    if "(" in publish and int(capturing.database.value("show server_version_num")) < 150000:
        pytest.skip("row filters and column lists are of Postgres 15")
    database = capturing.database
    if make:
        database.execute("create table t (id int primary key); create type mood as enum ('a', 'b')")
        database.execute(f"{_TABLE}; {make}; create publication pub for table t, u")
        snapshot_tables(capturing.settings, capturing.zone, capturing.slot, "pub")
    else:
        _begin(capturing, publish)
    with database.connect(autocommit=False) as late, late.cursor() as cursor:
        cursor.execute("insert into u values (2, 'b')")
        database.execute(alteration)
        capturing.capture()
        with pytest.raises(TransientError, match="has written to the table"):
            _copy_u(capturing)
        late.commit()
    _assert_complete(capturing, _copy_u(capturing))


def test_a_blocked_table_does_not_delay_the_snapshots_of_others(capturing: Capturing) -> None:
    """C9: it fails alone, and a table without a change needs no wait."""
    _begin(capturing)
    database, names = capturing.database, ["t", "u", "v"]
    database.execute("create table v (id int primary key); insert into v values (1)")
    with database.connect(autocommit=False) as late, late.cursor() as cursor:
        cursor.execute("insert into u values (2, 'before'); insert into t values (5)")
        database.execute("alter publication pub add table u, v")
        outcomes = list(
            snapshot_each_table(
                *(capturing.settings, capturing.zone, capturing.slot, "pub"),
                [TableName("public", name) for name in names],
                policy=_IMPATIENT,
            )
        )
        late.commit()
    kinds: dict[str, Callable[..., object]] = {o.table: type(o) for o in outcomes}
    assert kinds == {"t": SnapshotReport, "u": SnapshotFailure, "v": SnapshotReport}


@pytest.mark.slow
def test_a_copy_from_a_standby_waits_for_the_writers_of_the_primary(
    source: Source, zone: RawZone
) -> None:
    """C9: the standby shows neither the writer nor its locks."""
    primary = source.primary
    slot = f"s_{primary.name}"
    primary.execute("create table o (id int primary key); create publication pub for table o")
    primary.execute("create table t (id int primary key, n int); insert into t values (1, 0)")
    standby = source.standby.settings()
    snapshot_tables(primary.settings(), zone, slot, "pub", standby=standby)
    with primary.connect(autocommit=False) as late, late.cursor() as cursor:
        cursor.execute("insert into t values (2, 0)")
        primary.execute("alter publication pub add table t")
        arguments = (primary.settings(), zone, slot, "pub", [TableName("public", "t")])
        with pytest.raises(TransientError, match="has written to the table"):
            snapshot_tables(*arguments, policy=_IMPATIENT, standby=standby)
        late.commit()
    [report] = snapshot_tables(*arguments, standby=standby)
    primary.execute("update t set n = 1 where id = 1")
    rows = copied_rows(zone, "t", report.snapshot_lsn)
    assert replay(primary, slot, rows, report.snapshot_lsn) == {"1": ["1", "1"], "2": ["2", "0"]}
