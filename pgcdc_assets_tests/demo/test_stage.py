"""The stage of a demonstration in the environment of a user with a pipeline of their own."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pgcdc_assets.demo import object_store as store_of_demo
from pgcdc_assets.demo import shop
from pgcdc_assets.demo.object_store import ObjectStore
from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.demo.stage import FOLDER, S3, choose_lake, stage
from pgcdc_assets.orchestration.project.home import STATE_VARIABLE, embedded_conninfo
from pgcdc_assets.postgres.connection import ConnectionSettings, query_connection
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.settings.storage import Storage
from pgcdc_assets_tests.support.waits import wait_until

pytestmark = pytest.mark.postgres

# A Postgres server that is not that of the demonstration.
_OTHER_SERVER = {
    "PGHOSTADDR": "192.0.2.1",
    "PGSSLMODE": "require",
    "PGCHANNELBINDING": "require",
    "PGTARGETSESSIONATTRS": "standby",
    "PGOPTIONS": "-c default_transaction_read_only=on",
}


@pytest.fixture
def state() -> Iterator[Path]:
    """A state folder. The user of the server cannot reach `tmp_path` if another pytest starts."""
    with tempfile.TemporaryDirectory(prefix="pgcdc-test-stage-") as folder:
        yield Path(folder, "state")


@pytest.fixture
def environment() -> Iterator[None]:
    """Restore the environment, libpq's included, after the test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.usefixtures("environment")
def test_the_shop_opens_beside_settings_of_another_server(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.update(_OTHER_SERVER, PGSERVICE="of_work", PGCDC_DSN="host=nowhere.invalid")
    choose_lake(FOLDER)
    os.environ[STATE_VARIABLE] = str(state)
    with stage(FOLDER, fresh=False, scale=0.01) as opened:
        assert shop.exists(opened.conninfo)
        os.environ.update(_OTHER_SERVER)
        # The commands of a user in this folder.
        settings = ConnectionSettings(embedded_conninfo(opened.server.data_dir))
        with query_connection(settings, "test") as conn, conn.cursor() as cursor:
            cursor.execute("select count(*) from shop.customers")
            assert cursor.fetchone() != (0,)
    said = capsys.readouterr().out
    assert "PGSSLMODE is ignored, because the demonstration uses its own Postgres server" in said
    assert not opened.server.is_running


@pytest.mark.usefixtures("environment", "object_store")
def test_the_lake_is_in_a_new_store_of_the_demonstration(state: Path) -> None:
    os.environ.update(
        {
            "AWS_ENDPOINT_URL_S3": "https://s3.example.com",
            "AWS_PROFILE": "work",
            "AWS_CA_BUNDLE": str(state / "none.pem"),
            "AWS_SESSION_TOKEN": "of-work",
            "AWS_DEFAULT_REGION": "eu-central-1",
        }
    )
    choose_lake(S3)
    os.environ[STATE_VARIABLE] = str(state)
    # A demonstration that was killed leaves its server.
    earlier = ObjectStore(state / "object-store").start()
    process = psutil.Process(int((state / "object-store" / "server.pid").read_text()))
    with stage(S3, fresh=True, scale=0.01):
        assert not process.is_running()
        names = {name for name in os.environ if name.startswith("AWS_")}
        assert names == {
            *("AWS_ENDPOINT_URL", "AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        }
        assert Storage().found_endpoint == os.environ["AWS_ENDPOINT_URL"]
        assert Storage().found_endpoint.startswith("http://127.0.0.1:")
        lake = Lake.from_environment("")
        assert RawZone(lake, "shop").epochs.latest() is None
    earlier.stop()


@pytest.mark.parametrize("moment", ["PG_VERSION", "pgcdc.conf", "postmaster.pid"])
def test_ctrl_c_while_postgres_starts_leaves_no_server(
    state: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """An interrupt of initdb, of pg_ctl before the server has its pid file, and after it."""
    monkeypatch.setenv(STATE_VARIABLE, str(state))
    folder = state / "postgres"

    def interrupt() -> None:
        wait_until((folder / moment).exists, moment, limit_seconds=60, poll_seconds=0.001)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt), stage(FOLDER, fresh=False, scale=0.01):
        pass
    thread.join()
    assert not servers_in(folder)
    # The next start has a whole cluster.
    with EmbeddedServer(folder) as server:
        assert server.is_running
    assert not servers_in(folder)


@pytest.mark.usefixtures("object_store")
def test_an_interrupt_while_the_store_starts_leaves_no_server(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(port: int) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(store_of_demo, "_accepts", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ObjectStore(state / "object-store").start()
    assert not servers_in(state / "object-store")


def servers_in(folder: Path) -> list[int]:
    """Return the processes of Postgres whose command line has the folder."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]
