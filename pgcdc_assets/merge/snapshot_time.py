"""The time of a snapshot in a history, by the source's clock."""

from __future__ import annotations

import datetime as dt

from pgcdc_assets.raw.snapshots import Snapshot
from pgcdc_assets.raw.zone import RawZone


def find_snapshot_time(
    zone: RawZone, snapshot: Snapshot, taken_at: dt.datetime | None, is_first: bool
) -> dt.datetime:
    """Return the time of a snapshot for a history, by the source's clock.

    Args:
        taken_at: right before the snapshot. Commits between this time and the snapshot, while the
            creation of a slot waits, are in the snapshot: a version that such a commit began must
            not end before it began.
        is_first: the table has no versions, and commits before the snapshot may not be captured
            yet.
    """
    if taken_at is None:
        return _last_commit(zone, snapshot)
    return taken_at if is_first else max(taken_at, _last_commit(zone, snapshot))


def _last_commit(zone: RawZone, snapshot: Snapshot) -> dt.datetime:
    """Return the time of the last landed commit before a snapshot.

    Without such a commit it is the creation of the epoch.
    """
    commits = [
        landed.last_commit_ts
        for landed in zone.changes.landed_windows(snapshot.epoch, until=snapshot.snapshot_lsn)
        if landed.window.end <= snapshot.snapshot_lsn and landed.last_commit_ts is not None
    ]
    if commits:
        return max(commits)
    return next(e.created_at for e in zone.epochs.all() if e.epoch == snapshot.epoch)
