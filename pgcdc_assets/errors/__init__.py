"""The exceptions of the package, by the action that an error requires.

    PgcdcError
    ├── ConfigurationError      correct the settings: no retry          exit status 2
    ├── TransientError          retry                                   exit status 3
    │   ├── ConnectionLost
    │   ├── SlotBusy
    │   ├── SnapshotEnded
    │   └── TableChanged
    ├── DefiniteError           a person must act: no retry             exit status 4
    │   ├── SlotUnusable
    │   │   ├── SlotLost
    │   │   ├── SlotMissing
    │   │   └── SlotAdvanced
    │   ├── SlotTaken
    │   ├── SnapshotError       a new snapshot resolves it
    │   │   ├── WindowUnavailable
    │   │   ├── SchemaChangeError
    │   │   ├── TableMoved
    │   │   ├── SnapshotNeeded  also a MergeConflict
    │   │   └── WatermarkGap
    │   ├── RawExpired
    │   ├── ReplicaIdentityError
    │   ├── ProtocolError
    │   ├── RawZoneError
    │   ├── TableDamaged
    │   │   └── TableRestored
    │   └── MergeConflict
    │       └── TableRefused
    ├── CaptureCancelled        the caller ended the capture: no retry  exit status 130
    ├── DifferenceFound         a comparison found differing contents   exit status 1
    └── FailedRun               a Dagster run failed                    that of the run's error

Each class is a dataclass: its fields are the facts of the error, keyword arguments of the
constructor, and the message is built from them. A message names the object and the remedy, and
contains neither a row value nor a secret. All errors can be pickled, because Dagster's multiprocess
executor sends errors between processes.
"""

from __future__ import annotations

from pgcdc_assets.errors.base import (
    UNKNOWN_CAPTURE,
    CaptureCancelled,
    ConfigurationError,
    ConnectionLost,
    DefiniteError,
    DifferenceFound,
    FailedRun,
    PgcdcError,
    ProtocolError,
    SnapshotError,
    TransientError,
    local_write_error,
    rebuild_command,
    renewal_command,
    resnapshot_command,
    resnapshot_remedy,
)
from pgcdc_assets.errors.slots import (
    SlotAdvanced,
    SlotBusy,
    SlotLost,
    SlotMissing,
    SlotTaken,
    SlotUnusable,
)
from pgcdc_assets.errors.tables import (
    MergeConflict,
    RawExpired,
    RawZoneError,
    ReplicaIdentityError,
    SchemaChangeError,
    SnapshotEnded,
    SnapshotNeeded,
    TableChanged,
    TableDamaged,
    TableMoved,
    TableRefused,
    TableRestored,
    WatermarkGap,
    WindowUnavailable,
)

__all__ = [
    "UNKNOWN_CAPTURE",
    "CaptureCancelled",
    "ConfigurationError",
    "ConnectionLost",
    "DefiniteError",
    "DifferenceFound",
    "FailedRun",
    "MergeConflict",
    "PgcdcError",
    "ProtocolError",
    "RawExpired",
    "RawZoneError",
    "ReplicaIdentityError",
    "SchemaChangeError",
    "SlotAdvanced",
    "SlotBusy",
    "SlotLost",
    "SlotMissing",
    "SlotTaken",
    "SlotUnusable",
    "SnapshotEnded",
    "SnapshotError",
    "SnapshotNeeded",
    "TableChanged",
    "TableDamaged",
    "TableMoved",
    "TableRefused",
    "TableRestored",
    "TransientError",
    "WatermarkGap",
    "WindowUnavailable",
    "error_named",
    "local_write_error",
    "rebuild_command",
    "renewal_command",
    "resnapshot_command",
    "resnapshot_remedy",
]


def error_named(name: str) -> type[PgcdcError] | None:
    """Return the error class with this name, or None."""
    found = [PgcdcError]
    for kind in found:
        if kind.__name__ == name:
            return kind
        found += kind.__subclasses__()
    return None
