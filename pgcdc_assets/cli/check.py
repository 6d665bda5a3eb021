"""`pgcdc check`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pgcdc_assets.errors import ConfigurationError, DefiniteError, TransientError
from pgcdc_assets.orchestration import defaults
from pgcdc_assets.orchestration.settings import CdcCapture
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets.postgres.preflight import Finding, run_preflight
from pgcdc_assets.postgres.timelines import check_timeline, server_timeline
from pgcdc_assets.raw.zone import RawZone

_MARKS = {"ok": "ok     ", "warning": "warning", "error": "ERROR  "}


def run(options: argparse.Namespace) -> int:
    """Check the named publication, or every declared capture's.

    Raises:
        ConfigurationError: something is missing.
    """
    if options.publication is not None:
        name = options.name or ""
        settings = ConnectionSettings(defaults.conninfo(), name=name)
        slot = options.slot or f"pgcdc_{name or options.publication}"
        report(settings, options.publication, run_preflight(settings, options.publication, slot))
        return 0
    from pgcdc_assets.orchestration.loading import load_location

    for loaded in load_location(options.module).select(options.name):
        settings = loaded.postgres.settings()
        zone = loaded.lake.zone(loaded.capture.name)
        findings = check_capture(settings, loaded.capture, zone)
        report(settings, loaded.capture.publication, findings)
        loaded.lake.lake().check_writable()
    return 0


def check_capture(
    settings: ConnectionSettings, capture: CdcCapture, zone: RawZone
) -> list[Finding]:
    """Check what a declared capture needs of its server, and that it fits what is captured."""
    epoch = zone.epochs.latest()
    keys = {(table.schema, table.table): table.key for table in capture.tables if table.key}
    findings = run_preflight(
        settings,
        capture.publication,
        capture.slot,
        capture.table_names,
        keys=keys,
        is_slot_ours=capture.adopt_slot or epoch is not None,
    )
    if epoch is not None:
        through, timeline = zone.captured_on(epoch)
        try:
            with server_timeline(settings) as server:
                check_timeline(zone.changes.table.uri, timeline, through, server)
        except DefiniteError as error:
            findings.append(Finding("timeline", "error", str(error)))
        except (ConfigurationError, TransientError):
            # Why there is no replication connection is among the findings.
            pass
    return findings


def report(settings: ConnectionSettings, publication: str, findings: Sequence[Finding]) -> None:
    """Print findings with what mends them.

    Raises:
        ConfigurationError: there are errors among them.
    """
    print(f"Publication {publication}, {settings.describe()}")
    for finding in findings:
        print(f"  {_MARKS[finding.severity]}  {finding.message}")
        if finding.remedy:
            print(f"           mend it: {finding.remedy}")
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        what = "thing is" if len(errors) == 1 else "things are"
        raise ConfigurationError(
            reason=f"{len(errors)} {what} wrong or missing for publication {publication}: "
            f"{', '.join(dict.fromkeys(_place(finding) for finding in errors))}. See above for "
            "what mends it."
        )


def _place(finding: Finding) -> str:
    return finding.code if finding.table is None else f"{finding.code} of {finding.table}"
