"""Errors: lookup by name, typed facts, and pickling."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgcdc_assets import errors
from pgcdc_assets.errors import (
    ConfigurationError,
    ConnectionLost,
    DefiniteError,
    MergeConflict,
    PgcdcError,
    ReplicaIdentityError,
    SchemaChangeError,
    SlotLost,
    SnapshotNeeded,
    TableRefused,
    TransientError,
    WindowUnavailable,
    error_named,
    rebuild_command,
    resnapshot_command,
)
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.copy.errors import reading_failure
from pgcdc_assets.postgres.stream.errors import stream_failure
from pgcdc_assets.postgres.stream.transport import ServerError, check_notice
from pgcdc_assets.protocol.relation import Relation, ReplicaIdentity
from pgcdc_assets_tests.support.captures import Capturing


def test_the_documented_tree_is_that_of_the_classes() -> None:
    def branches(kind: type[PgcdcError], depth: int) -> Iterator[tuple[int, str]]:
        for each in kind.__subclasses__():
            # A class with two bases is shown below the first one.
            if each.__bases__[0] is kind and each.__name__ in errors.__all__:
                yield depth, each.__name__
                yield from branches(each, depth + 1)

    text = (errors.__doc__ or "").partition("PgcdcError\n")[2].partition("\n\n")[0]
    shown = re.findall(r"^    ([│ ]*)[├└]── (\w+)", text, re.MULTILINE)
    described = {(len(indent) // 4, name) for indent, name in shown}
    assert described == set(branches(PgcdcError, 0))


def test_a_table_altered_during_its_copy_is_a_transient_error() -> None:
    """The event of a run names the class, and a sync ends with the exit status of the class."""
    kind = error_named("TableChanged")
    assert kind is not None
    assert kind.exit_status == TransientError.exit_status == 3
    assert error_named("ValueError") is None


def test_the_error_of_a_slot_lost_in_the_stream_has_no_lsn() -> None:
    said = 'can no longer get changes from replication slot "s"'
    error = stream_failure("a server", "s", "pub", ServerError("55000", said))
    assert isinstance(error, SlotLost)
    assert error.restart_lsn is None
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert "can no longer get changes" in str(each)
        assert "None" not in str(each)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        # Postgres 14 and 15.
        (ServerError("55000", 'cannot read from logical replication slot "s"'), SlotLost),
        (ServerError("55000", "verloren", function="StartLogicalReplication"), SlotLost),
        (ServerError("55000", "verloren", function="ReplicationSlotAcquire"), SlotLost),
        (
            ServerError("55000", "verloren", function="CreateDecodingContext", has_detail=True),
            SlotLost,
        ),
        # Of another database, and the copy of a slot on a standby.
        (ServerError("55000", "falsch", function="CreateDecodingContext"), DefiniteError),
        (
            ServerError(
                "55000", "falsch", function="CreateDecodingContext", has_detail=True, has_hint=True
            ),
            DefiniteError,
        ),
        (ServerError("55000", "wal_level", function="CheckLogicalDecoding"), DefiniteError),
        (
            ServerError("58P01", "das WAL-Segment 0000000100000000000000A2 wurde entfernt"),
            SlotLost,
        ),
        (ServerError("58P01", 'could not access file "pgoutput": No such file'), DefiniteError),
    ],
)
def test_a_lost_slot_is_known_in_each_version_and_language(
    error: ServerError, kind: type[PgcdcError]
) -> None:
    found = stream_failure("a server", "s", "pub", error)
    assert type(found) is kind
    assert ("pgcdc renew" in str(found)) == (kind is SlotLost)


@pytest.mark.parametrize(
    ("context", "lsn"),
    [
        ('slot "s", output plugin "pgoutput", in the change callback, associated LSN {}', "0/1A2B"),
        ('slot "s", output plugin "pgoutput", in the stream_change callback, associated LSN {}',
         "0/1A2B"),
        ("Slot »s«, Ausgabe-Plugin »pgoutput«, im Callback change, zugehörige LSN {}", "1/F"),
        ('スロット"s", 出力プラグイン"pgoutput", changeコールバックの処理中, 関連LSN {}', "0/1A2B"),
        ("Funktion »f«\nSlot »s«, Ausgabe-Plugin »pgoutput«, im Callback change, LSN {}", "0/1"),
        # Other callbacks have no row.
        ("Slot »change«, Ausgabe-Plugin »pgoutput«, im Callback commit, zugehörige LSN {}", ""),
        ("Slot »s«, Ausgabe-Plugin »pgoutput«, im Callback stream_truncate, zugehörige LSN {}", ""),
        ("Slot »s«, Ausgabe-Plugin »pgoutput«, im Callback startup", ""),
    ],
)  # fmt: skip
def test_the_error_of_a_row_in_the_stream_has_no_value_in_any_language(
    context: str, lsn: str
) -> None:
    said = ServerError("22023", "Zeichenkette zu lang: »geheim«", context.format(lsn or "0/1A2B"))
    error = stream_failure("a server", "s", "pub", said)
    assert isinstance(error, DefiniteError)
    assert "geheim" not in str(error)
    assert "SQLSTATE 22023" in str(error)
    assert (f"a row that was written at {lsn} " in str(error)) == bool(lsn)


@pytest.mark.parametrize(
    ("name", "said", "context", "is_gap"),
    [
        ("pub été", 'publication "pub \ufffdt\ufffd" does not exist', "pgoutput", True),
        (
            "pub",
            'publication "pub" does not exist',
            'slot "s", output plugin "pgoutput", in the …',
            True,
        ),
        (
            "pub",
            "Publikation »pub« existiert nicht",
            "Slot »s«, Ausgabe-Plugin »pgoutput«, im …",
            True,
        ),
        (
            "pub",
            "la publication « pub » n'existe pas",
            "slot « s », plugin de sortie « pgoutput »",
            True,
        ),
        (
            "pub",
            'type "pub_type" does not exist',
            'slot "s", output plugin "pgoutput", in the …',
            False,
        ),
        ("pub", 'replication slot "pub" does not exist', "", False),
    ],
)
def test_a_missing_publication_is_recognised_in_any_language(
    name: str, said: str, context: str, is_gap: bool
) -> None:
    error = stream_failure("a server", "s", name, ServerError("42704", said, context))
    assert (f"publication {name} was dropped and re-created" in str(error)) == is_gap


def test_the_warning_of_a_missing_publication_has_the_callback_in_any_language() -> None:
    """Postgres 18 and newer."""
    fields = {
        b"S": "WARNUNG",
        b"V": "WARNING",
        b"C": "55000",
        b"M": "Publikation »pub« wurde übersprungen",
        b"W": "Slot »s«, Ausgabe-Plugin »pgoutput«, im Callback change, zugehörige LSN 0/1A2B",
    }
    with pytest.raises(ServerError) as raised:
        check_notice(fields)
    error = stream_failure("a server", "s", "pub", raised.value, "pgcdc renew --name shop")
    assert "publication pub was dropped and re-created" in str(error)
    assert str(error).endswith("pgcdc renew --name shop.")


@pytest.mark.postgres
def test_the_error_of_a_window_with_missing_rows_has_the_slot_s_position(
    capturing: Capturing,
) -> None:
    window = capturing.begin_with_one_insert()
    capturing.capture(window)
    table = capturing.zone.changes.table.load()
    assert table is not None
    for uri in table.file_uris():
        Path(uri).unlink()
    with pytest.raises(WindowUnavailable) as raised:
        capturing.capture(window)
    assert isinstance(raised.value.confirmed_flush_lsn, Lsn)


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (
            ServerError("42501", "gefiltert", function="check_enable_rls"),
            ConfigurationError,
            "bypassrls",
        ),
        (
            ServerError("42501", "verboten", function="aclcheck_error"),
            ConfigurationError,
            "grant select",
        ),
        (ServerError("22P02", 'invalid: "row-level security"'), DefiniteError, "SQLSTATE 22P02"),
        (ConnectionResetError("row-level security"), ConnectionLost, "reading s.t"),
    ],
)
def test_the_error_of_a_policy_is_known_by_its_source(
    error: ServerError | OSError, kind: type[PgcdcError], said: str
) -> None:
    relation = Relation(1, "s", "t", ReplicaIdentity.DEFAULT, ())
    found = reading_failure(ConnectionSettings("host=h user=u"), relation, error)
    assert type(found) is kind
    assert said in str(found)


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (
            MergeConflict(table="public.new", reason="b. Rebuild", command=rebuild_command),
            "Rebuild: pgcdc rebuild shop public.old",
        ),
        (
            TableRefused(table="public.new", reason="it differs. Run", command=resnapshot_command),
            "Run: pgcdc resnapshot shop public.old",
        ),
        (
            ReplicaIdentityError(
                relation="public.new",
                identity="NOTHING",
                reason="a key is missing",
                remedy="ALTER TABLE ...",
                command=resnapshot_command,
            ),
            "with: ALTER TABLE ...; then pgcdc resnapshot shop public.old",
        ),
        (
            SchemaChangeError(relation="public.new", column="v", reason="its type changed"),
            "with: pgcdc resnapshot shop public.old",
        ),
        (
            SnapshotNeeded(table="public.new", reason="its file is missing"),
            "with: pgcdc resnapshot shop public.old",
        ),
        (MergeConflict(table="public.new", reason="it differs."), "differs."),
    ],
)
def test_a_command_has_the_capture_and_the_table_s_name_in_the_settings(
    error: PgcdcError, ending: str
) -> None:
    """The merge knows the name that the source gave to the table."""
    for each in (error, pickle.loads(pickle.dumps(error))):
        named = each.in_capture("shop", "public.old")
        assert type(named) is type(error)
        assert str(named).startswith("Table public.new")
        assert str(named).endswith(ending)
        assert str(named.in_capture("other", "public.other")) == str(named)
    with_relation = str(error.in_capture("shop"))
    assert with_relation.endswith(ending.replace("public.old", "public.new"))
