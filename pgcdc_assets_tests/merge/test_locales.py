"""A database whose `lc_monetary` is not C: the amounts of `money` arrive by one rule."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from pgcdc_assets.demo.server import EmbeddedServer
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets_tests.support.database import create_database
from pgcdc_assets_tests.support.merge.pipeline import Pipeline
from pgcdc_assets_tests.support.verify.comparison import verify

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

_SOURCES = Path("/usr/share/i18n/locales")


@pytest.fixture
def german_server(
    own_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    """A server that knows the locales of Germany and Japan, and prints amounts as in Germany."""
    compiler = shutil.which("localedef")
    if compiler is None or not (_SOURCES / "de_DE").exists():
        if os.environ.get("CI") == "true":
            pytest.fail("Debian's package locales is not installed")
        pytest.skip("Debian's package locales is not installed")
    folder = own_server.data_dir.with_name("locales")
    folder.mkdir()
    for name in ("de_DE", "ja_JP"):
        subprocess.run(
            [compiler, "-i", name, "-f", "UTF-8", str(folder / f"{name}.UTF-8")], check=True
        )
    own_server.settings["lc_monetary"] = "de_DE.UTF-8"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCPATH", str(folder))
        try:
            yield own_server.start()
        finally:
            shutil.rmtree(folder)


@pytest.mark.sampled
def test_money_of_a_database_with_another_locale_is_the_exact_amount(
    german_server: EmbeddedServer, spark: SparkSession, zone: RawZone
) -> None:
    """G2: by snapshot and by stream, alone and in arrays; also without digits after the point."""
    database = create_database(german_server)
    pipeline = Pipeline(database, zone, spark)
    pipeline.start(
        "create table t (id int primary key, v money, a money[])",
        "insert into t select i, (-1234.56)::numeric::money, array[v, null] "
        "from (values (1, 92233720368547758.07::money)) x(i, v)",
    )
    assert database.value("select v::text from t") == "-1.234,56 €"
    database.execute("insert into t values (2, 1234567, '{}')")
    database.execute("update t set v = v * -1")
    # The smallest unit of the Japanese locale is one: the same eight bytes.
    database.execute(f"alter database {database.name} set lc_monetary = 'ja_JP.UTF-8'")
    assert database.value("select v::text from t where id = 1") == "￥123,456"
    database.execute("insert into t values (3, 1234, null)")
    pipeline.sync()
    most = "$92,233,720,368,547,758.07"
    assert pipeline.rows(columns="id, v, a") == [
        (1, "$1,234.56", [most, None]),
        (2, "-$1,234,567.00", []),
        (3, "$12.34", None),
    ]
    assert verify(pipeline).is_equal
