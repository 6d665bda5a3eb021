"""The two kinds of Spark session of the tests, each started once per test run.

A test with the fixture `spark` (or `pipeline`) runs on an embedded session. Tests below `merge/`,
without the modules in `ONCE`, run a second time on a session of a Spark Connect server. `--spark`
selects the kinds.

A short test run (`-m "not soak"`) runs each test of the merge once: every second test of a module
on the server. The modules in `ON_SERVER` share one expensive pipeline among their tests, so a short
run has them on the server only. The other half of the pairs is marked `soak`.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from pgcdc_assets.spark.server_process import RunningServer

EMBEDDED, CONNECT = KINDS = ("embedded", "connect")
# The driver in the test process or on a server, and the executors in a cluster (`cluster.py`).
ON_CLUSTER = ("cluster", "cluster_connect")
TESTS = Path(__file__).parents[1]
ONCE = (
    "test_added_defaults.py",
    "test_bytes_that_are_not_text.py",
    "test_chosen_types.py",
    "test_combined_changes.py",
    "test_encodings.py",
    "test_every_type.py",
    "test_renamed_tables.py",
    "test_rebuild.py",
    "test_retention.py",
    "test_schema_evolution.py",
)

ON_SERVER = ("test_types.py",)

# The second compiler takes half of the time of a short run, and its code pays off after minutes
# only. With the first compiler alone, the code cache is small by default, and a whole test run
# fills it. Below the size of the metaspace, the JVM starts no full collection to unload classes.
JAVA_OPTIONS = (
    "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC -XX:MetaspaceSize=512m"
)

# A whole test run shares these sessions. Hundreds of tables leave objects in caches, which each
# collection copies. Each growth of the heap is a full collection. So the heap is large at the
# start, and Delta's cache is small.
SHARED_JAVA_OPTIONS = f"{JAVA_OPTIONS} -Xms1200m -Xmn400m -Ddelta.log.cacheSize=20"

CONF = {
    "spark.master": "local[2]",
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.ui.enabled": "false",
    "spark.ui.retainedJobs": "20",
    "spark.ui.retainedStages": "20",
    "spark.ui.retainedTasks": "200",
    "spark.sql.ui.retainedExecutions": "5",
    # Each query keeps its plan as a text for the UI. This mode makes the text short.
    "spark.sql.ui.explainMode": "simple",
    # For tables of a few rows, adaptive planning and code generation take most of the time.
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.driver.extraJavaOptions": SHARED_JAVA_OPTIONS,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--spark",
        default=",".join(KINDS),
        help="kinds of Spark session to run the tests of the merge on; the others run on the "
        "first (default: %(default)s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    known = (*KINDS, *ON_CLUSTER)
    unknown = set(asked_kinds(config)) - set(known)
    if unknown:
        raise pytest.UsageError(f"--spark takes {', '.join(known)}, not {', '.join(unknown)}")
    # Tests do not use a server that the developer runs in this clone.
    os.environ["PGCDC_SPARK_REMOTE"] = "local"
    # These options apply to every JVM, also to those of child processes.
    os.environ["JDK_JAVA_OPTIONS"] = JAVA_OPTIONS


def asked_kinds(config: pytest.Config) -> list[str]:
    """Return the kinds of `--spark`, in order."""
    return [kind.strip() for kind in config.getoption("--spark").split(",")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    kinds = asked_kinds(metafunc.config)
    if "spark_kind" not in metafunc.fixturenames:
        if "spark_server" not in metafunc.fixturenames:
            return
        # The test's name contains the kind, so that one process runs all tests of the server.
        metafunc.fixturenames.append("spark_kind")
        kinds = [CONNECT]
    metafunc.parametrize(
        "spark_kind",
        kinds if _is_about_merging(metafunc.definition.path) else kinds[:1],
        scope="module",
    )


def _is_about_merging(module: Path) -> bool:
    return module.relative_to(TESTS).parts[0] == "merge" and module.name not in ONCE


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all kinds of a merge test but one as `soak`. The remaining kinds alternate."""
    if len(asked_kinds(config)) < len(KINDS):
        return
    kinds: dict[str, dict[str, str]] = defaultdict(dict)
    for item in items:
        kind = _kind_of(item)
        is_short = item.get_closest_marker("soak") is None
        if kind is not None and is_short and _is_about_merging(item.path):
            module, _, test = item.nodeid.replace(f"[{kind}", "[", 1).partition("::")
            in_turns = KINDS[len(kinds[module]) % len(KINDS)]
            own = CONNECT if item.path.name in ON_SERVER else in_turns
            chosen = kinds[module].setdefault(test, own)
            if kind != chosen:
                item.add_marker(pytest.mark.soak)


def _kind_of(item: pytest.Item) -> Any:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("spark_kind") if callspec is not None else None


@pytest.fixture(scope="module")
def spark_kind() -> str:
    """`embedded` or `connect`, from `pytest_generate_tests`."""
    return EMBEDDED


@pytest.fixture(scope="module")
def spark(spark_kind: str, request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """The shared session of the test's kind.

    An environment variable determines whether PySpark's functions build Connect columns. One
    process can therefore use both kinds, one after the other: a module's tests run on one kind,
    then on the other kind.
    """
    with pytest.MonkeyPatch.context() as patch:
        if spark_kind in (EMBEDDED, "cluster"):
            patch.delenv("SPARK_CONNECT_MODE_ENABLED", raising=False)
        elif spark_kind != CONNECT:
            patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        else:
            server: RunningServer = request.getfixturevalue("spark_server")
            patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
            patch.setenv("PGCDC_SPARK_REMOTE", server.remote)
        yield request.getfixturevalue(f"{spark_kind}_session")


@pytest.fixture(scope="session")
def embedded_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A small embedded session, built by the package."""
    from pgcdc_assets.spark.session import spark_session

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SPARK_CONNECT_MODE_ENABLED", raising=False)
        session = spark_session(
            "pgcdc tests",
            conf={
                **CONF,
                "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
            },
        )
    try:
        yield session
    finally:
        session.stop()


@pytest.fixture(scope="session")
def spark_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A small Spark Connect server of the package, in a state folder of the test run."""
    from pgcdc_assets.spark.server import SparkServer

    conf = {**CONF, "spark.driver.memory": "1500m"}
    server = SparkServer(tmp_path_factory.mktemp("spark"), conf)
    with server.running() as running:
        yield running


@pytest.fixture(scope="session")
def connect_session(spark_server: RunningServer) -> Iterator[SparkSession]:
    """A session on the Spark Connect server."""
    from pyspark.sql.connect.session import SparkSession as ConnectSession

    from pgcdc_assets.spark.session import release_at_exit, release_session

    session: Any = ConnectSession.builder.remote(spark_server.remote).create()
    yield release_at_exit(session)
    release_session(session)
