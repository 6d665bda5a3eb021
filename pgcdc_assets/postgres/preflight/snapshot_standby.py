"""The checks of the standby that copies read from."""

from __future__ import annotations

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.lsn import Lsn
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.postgres.managed_services import MANAGED_BY_SQL, setting_remedy
from pgcdc_assets.postgres.preflight.finding import Finding
from pgcdc_assets.postgres.snapshots.standby import check_standby
from pgcdc_assets.postgres.wal.positions import read_current_lsn
from pgcdc_assets.postgres.wal.stream import read_wal

_CODE = "snapshot_standby"
_SAMPLE_BYTES = 64

_STATE = f"""
select pg_last_wal_replay_lsn()::text, pg_is_wal_replay_paused(),
       current_setting('hot_standby_feedback')::bool,
       current_setting('max_standby_streaming_delay'),
       {MANAGED_BY_SQL}
"""


def examine_snapshot_standby(
    primary: ConnectionSettings, standby: ConnectionSettings
) -> list[Finding]:
    """Return the findings about a standby that copies read from (`snapshot.dsn_env`)."""
    try:
        timeline = check_standby(primary, standby)
        with query_connection(standby, "check") as conn, conn.cursor() as cursor:
            cursor.execute(_STATE)
            row = cursor.fetchone()
        assert row is not None
        replayed, is_paused, has_feedback, delay, managed_by = row
        with query_connection(primary, "check") as conn:
            behind = max(0, read_current_lsn(conn) - Lsn.parse(replayed))
        end = Lsn.parse(replayed)
        start = Lsn(end - _SAMPLE_BYTES)
        if read_wal(primary, timeline, start, end) != read_wal(standby, timeline, start, end):
            raise ConfigurationError(
                reason=f"snapshot.dsn_env names {standby.describe()}, whose WAL before {end} is "
                f"not that of {primary.describe()}. Name a standby of the capture's server."
            )
    except (ConfigurationError, TransientError) as error:
        return [Finding(_CODE, "error", str(error))]
    name = f"Copies read from {standby.describe()}, which"
    findings = [Finding(_CODE, "ok", f"{name} is {behind:,} bytes behind.")]
    if is_paused:
        findings.append(
            Finding(
                _CODE,
                "warning",
                f"{name} does not replay: its replay is paused, and copies wait.",
                "on the standby: select pg_wal_replay_resume()",
            )
        )
    if not has_feedback:
        findings.append(
            Finding(
                _CODE,
                "warning",
                f"{name} has hot_standby_feedback = off: after a conflict with the replay of WAL, "
                f"for example of a VACUUM, it ends copies within {delay} "
                "(max_standby_streaming_delay).",
                f"on the standby: {setting_remedy(managed_by, 'hot_standby_feedback', 'on')}",
            )
        )
    return findings
