"""The errors of a copy's statements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg2

from pgcdc_assets.errors import (
    ConfigurationError,
    ConnectionLost,
    DefiniteError,
    PgcdcError,
)
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.encodings import UNCONVERTIBLE
from pgcdc_assets.postgres.errors import reported_failure, statement_failure
from pgcdc_assets.postgres.recovery_conflicts import CONFLICTS, conflict_error
from pgcdc_assets.postgres.stream.transport import ServerError
from pgcdc_assets.table_name import quoted

if TYPE_CHECKING:
    from pgcdc_assets.protocol.relation import Relation

_INSUFFICIENT_PRIVILEGE = "42501"

# The server's function that refuses a query which a policy would filter. Messages are translated,
# and the message of another error may quote any text (src/backend/utils/misc/rls.c).
_POLICY_CHECK = "check_enable_rls"


def opening_failure(settings: ConnectionSettings, error: psycopg2.Error | OSError) -> PgcdcError:
    """Return the error for a connection that cannot begin to read as of a snapshot."""
    server, doing = settings.describe(), "opening a connection for a copy"
    if isinstance(error, OSError):
        return ConnectionLost(server=server, doing=doing, reason=str(error))
    return statement_failure(server, doing, error) or DefiniteError(
        reason=f"No table can be copied: Postgres reports {type(error).__name__} (SQLSTATE "
        f"{error.pgcode}) while {doing}. Read the full message in the server's log."
    )


def reading_failure(
    settings: ConnectionSettings,
    relation: Relation,
    error: psycopg2.Error | ServerError | OSError,
    *,
    is_standby: bool = False,
) -> PgcdcError:
    """Return the error for rows that cannot be read, without the server's sentence.

    The server's sentence may contain a value of a row.

    Args:
        is_standby: the server is a standby.
    """
    name, doing = relation.qualified_name, f"reading {relation.qualified_name}"
    server = settings.describe()
    role = quoted(settings.role)
    code: str | None
    function: str | None
    match error:
        case OSError():
            return ConnectionLost(server=server, doing=doing, reason=str(error))
        case ServerError():
            code, function, kind = error.sqlstate, error.function, "an error"
            failure = reported_failure(server, doing, error.sqlstate, error.message)
        case _:
            code, kind = error.pgcode, type(error).__name__
            function = error.diag.source_function
            failure = statement_failure(server, doing, error)
    if is_standby and code in CONFLICTS:
        return conflict_error(server, f"the copy of {name}")
    if (code, function) == (_INSUFFICIENT_PRIVILEGE, _POLICY_CHECK):
        return ConfigurationError(
            reason=f"Table {name} has row-level security, which would hide rows. Allow "
            f"this role to read all rows with: alter role {role} bypassrls"
        )
    if code == _INSUFFICIENT_PRIVILEGE:
        return ConfigurationError(
            reason=f"Table {name} cannot be read by this role. Grant it with: "
            f"grant usage on schema {quoted(relation.schema)} to {role}; grant select on "
            f"{quoted(relation.schema, relation.table)} to {role}"
        )
    if code in UNCONVERTIBLE:
        return DefiniteError(
            reason=f"Table {name} has a text that Postgres cannot convert to UTF-8, so the server "
            "cannot compare its rows. Captures and snapshots store such a text as hex. Correct "
            "the text, and run it again."
        )
    # The server's sentence may contain a value: name the class of the error only.
    return failure or DefiniteError(
        reason=f"Table {name} cannot be read: Postgres reports {kind} (SQLSTATE {code}). "
        "Read the full message in the server's log."
    )
