"""A predicate over the rows of a table, as a user writes it: checked, and then part of a query.

The text becomes part of a SELECT, in parentheses. A text such as `true) or (true` would leave them,
and a text with a semicolon would add a statement. So the server first analyses two statements
without executing them: one has the text in parentheses, the other one in brackets. In a statement
that Postgres accepts, parentheses and brackets are balanced and nested. A text that closes what it
did not open closes either a parenthesis or a bracket, so one of the statements is refused.

An error of the server may quote the text, and the text may contain values of rows. The errors here
quote neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from psycopg import pq
from psycopg.errors import lookup

from pgcdc_assets.errors import ConfigurationError, ConnectionLost, PgcdcError, TransientError
from pgcdc_assets.postgres.catalog.relations import PublishedTable
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.libpq import execute, open_session, prepare_statement
from pgcdc_assets.table_name import quoted

_PARENTHESES = ("(\n", "\n)")
_BRACKETS = ("((array[\n", "\n])[1])")
_ANSWER_SECONDS = 30.0

# A lock timeout, a canceled statement, a server that shuts down.
_TRANSIENT = ("55P03", "57")


def predicate_sql(predicate: str) -> str:
    """Write a checked predicate as a condition. Its last line may end with a comment."""
    return predicate.join(_PARENTHESES)


def check_predicate(settings: ConnectionSettings, table: PublishedTable, predicate: str) -> None:
    """Check that a predicate is one expression of type boolean over the rows of a table.

    Raises:
        ConfigurationError: Postgres refuses the predicate.
        TransientError: the server is not available, or has no answer within its time limits.
    """
    relation = table.relation
    try:
        predicate.encode()
    except UnicodeEncodeError:
        raise _refused(relation.qualified_name, "it is not valid UTF-8") from None
    source = quoted(relation.schema, relation.table)
    start = f"select 1 from {'' if table.is_partitioned else 'only '}{source} where "
    with _session(settings, relation.qualified_name) as conn:
        for run, (opening, end) in (
            (prepare_statement, _PARENTHESES),
            (prepare_statement, _BRACKETS),
            # EXPLAIN refuses parameters such as $1, which a prepared statement may have.
            (execute, _PARENTHESES),
        ):
            before = f"{'explain ' if run is execute else ''}{start}{opening}"
            result = run(conn, f"{before}{predicate}{end}".encode(), _ANSWER_SECONDS)
            if result.status not in (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK):
                raise _error(settings, relation.qualified_name, result, len(before), predicate)


@contextmanager
def _session(settings: ConnectionSettings, table: str) -> Iterator[pq.abc.PGconn]:
    server, doing = settings.describe(), f"checking the predicate for {table}"
    conn = open_session(
        settings,
        "predicate",
        statement_timeout_ms=settings.statement_timeout_ms,
        lock_timeout_ms=settings.lock_timeout_ms,
    )
    try:
        yield conn
    except OSError as error:
        raise ConnectionLost(server=server, doing=doing, reason=str(error)) from error
    finally:
        conn.finish()


def _error(
    settings: ConnectionSettings,
    table: str,
    result: pq.abc.PGresult,
    skipped: int,
    predicate: str,
) -> PgcdcError:
    """Return the error for a refused predicate, without the server's sentence.

    Args:
        skipped: number of characters of the statement before the predicate.
    """
    code = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    if code.startswith(_TRANSIENT):
        return TransientError(
            reason=f"{settings.describe()} did not check the predicate for {table} (SQLSTATE "
            f"{code}). Run it again."
        )
    try:
        kind = lookup(code).__name__
    except KeyError:
        kind = "an error"
    place = int(result.error_field(pq.DiagnosticField.STATEMENT_POSITION) or 0) - skipped
    where = f" at character {place}" if 0 < place <= len(predicate) else ""
    return _refused(table, f"Postgres reports {kind} (SQLSTATE {code}){where}")


def _refused(table: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        reason=f"The predicate of --where for {table} was refused: {reason}. Nothing was read. "
        "Write one SQL condition over the columns of the table, with the schema of each name that "
        "is not in pg_catalog."
    )
