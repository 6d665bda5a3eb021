"""The resources find their servers in the environment."""

from __future__ import annotations

import pytest

from pgcdc_assets.cli.check import check_snapshot_source
from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.resources import PostgresResource
from pgcdc_assets.policies import SnapshotPolicy


def test_a_standby_for_copies_is_named_by_an_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    primary = "host=127.0.0.1 port=1"
    postgres = PostgresResource(capture="shop", conninfo=primary, lock_timeout_ms=7)
    assert postgres.standby_settings(SnapshotPolicy()) is None
    assert check_snapshot_source(postgres, SnapshotPolicy()) == []
    policy = SnapshotPolicy(dsn_env="SHOP_STANDBY")
    with pytest.raises(ConfigurationError, match="SHOP_STANDBY, which is not set"):
        postgres.standby_settings(policy)
    [finding] = check_snapshot_source(postgres, policy)
    assert (finding.code, finding.severity) == ("snapshot_standby", "error")
    assert (
        "snapshot.dsn_env names the environment variable SHOP_STANDBY, which is not set"
        in finding.message
    )
    for value in (" ", "postgresql://bob:secret@[host", "host='secret"):
        monkeypatch.setenv("SHOP_STANDBY", value)
        [finding] = check_snapshot_source(postgres, policy)
        assert (finding.code, finding.severity) == ("snapshot_standby", "error")
        assert "SHOP_STANDBY" in finding.message
        assert "secret" not in finding.message
    monkeypatch.setenv("SHOP_STANDBY", "host=standby")
    standby = postgres.standby_settings(policy)
    assert standby is not None
    assert (standby.conninfo, standby.name, standby.lock_timeout_ms) == ("host=standby", "shop", 7)
    with pytest.raises(ConfigurationError, match=r"snapshot\.dsn_env must name"):
        SnapshotPolicy(dsn_env=" ")
