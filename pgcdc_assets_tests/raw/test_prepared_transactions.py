"""Which stored transactions have ended."""

from __future__ import annotations

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.zone import RawZone


def test_a_maintenance_that_knows_an_earlier_epoch_removes_nothing_of_the_next(
    zone: RawZone,
) -> None:
    """`pgcdc renew` and a capture may run between its look at the epochs and the removal."""
    for epoch, gid in ((1, "first"), (2, "second")):
        zone.prepared.begin(epoch, Lsn(100 * epoch), [(700 + epoch, gid)])
    assert zone.prepared.remove_ended(1, Lsn(1000)) == 0
    assert [each.key.gid for each in zone.prepared.unfinished(2, Lsn(1000))] == ["second"]
    assert zone.prepared.remove_ended(2, Lsn(1000)) == 1
    assert [each.key.gid for each in zone.prepared.unfinished(2, Lsn(1000))] == ["second"]
    assert zone.prepared.unfinished(1, Lsn(1000)) == []
