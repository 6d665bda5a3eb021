"""The pre-flight check warns of a connection that fell back from TLS."""

from __future__ import annotations

import pytest

from pgcdc_assets.demo.programs import binaries
from pgcdc_assets.postgres.connection import ConnectionSettings
from pgcdc_assets_tests.support.database import Database
from pgcdc_assets_tests.support.preflight import findings_of, problems_in
from pgcdc_assets_tests.support.tls_server import VERSION, TlsServer

pytestmark = pytest.mark.postgres


def _warning(conninfo: str) -> str | None:
    problems = problems_in(findings_of(ConnectionSettings(conninfo, "test")))
    return problems.get(("encryption", None))


def test_a_connection_that_fell_back_from_tls_is_a_warning(database: Database) -> None:
    """The test's server has no TLS."""
    for mode in ("prefer", "allow"):
        said = _warning(f"{database.conninfo} sslmode={mode}")
        assert said is not None
        assert said.startswith(f"warning: The connection is not encrypted: with sslmode={mode} it")
        assert "Set sslmode=verify-full" in said
    assert _warning(f"{database.conninfo} sslmode=disable") is None
    assert _warning(database.conninfo) is None
    socket = database.server.conninfo(database.name, unix_socket=True)
    assert _warning(f"{socket} sslmode=prefer") is None


@pytest.mark.sampled
@pytest.mark.skipif(binaries(VERSION) is None, reason="the embedded servers are built without SSL")
def test_an_encrypted_connection_is_no_warning(
    tls_server: TlsServer, tls_database: Database
) -> None:
    assert _warning(tls_server.conninfo(tls_database, "sslmode=prefer")) is None
