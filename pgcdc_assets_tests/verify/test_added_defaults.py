"""The rule about added defaults, for tables whose source has names of system columns."""

from __future__ import annotations

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from pgcdc_assets.lsn import Lsn
from pgcdc_assets.raw.zone import RawZone
from pgcdc_assets.spark.session import own_sessions
from pgcdc_assets.verify import Rule
from pgcdc_assets_tests.support.merge.history import Landing, column, insert, relation
from pgcdc_assets_tests.support.verify.merged_tables import IMAGE, Merged

pytestmark = [pytest.mark.spark, pytest.mark.slow]


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["_op", "_valid_from_lsn"])
def test_a_source_column_with_the_name_of_a_system_column_is_no_sign_of_the_kind(
    spark: SparkSession, zone: RawZone, name: str
) -> None:
    """SCD1 of a table with a key has neither `_op` nor `_valid_from_lsn` of its own."""
    columns = [column("id"), column(name)]
    landing = Landing(zone, [relation(*columns)])
    landing.begin()
    landing.land([insert("1", "0")])
    added = relation(*columns, column("n", missing="5"))
    zone.relations.register(1, added, Lsn(landing.lsn))
    zone.relations.flush()
    landing.relations = [landing.relation, added]
    landing.land([insert("2", "0", "6", version=2)])
    with own_sessions(spark, 1) as (session,):
        tables = Merged(session, landing)
        tables.merge(IMAGE)
        assert tables.check_all(1, IMAGE).violations[Rule.MISSING_DEFAULTS] == 0
        DeltaTable(tables.path(1)).update(predicate="id = 1", updates={"n": "null"})
        assert tables.check_all(1, IMAGE).violations[Rule.MISSING_DEFAULTS] == 1
