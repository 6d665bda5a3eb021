"""Spark's settings for a lake in an object store: the jars of S3A, the LogStore and the bucket.

Hadoop's S3A comes with the whole SDK of Amazon in one jar of 600 MB. The modules of the SDK that
S3A uses have 18 MB. Their version is the version that this release of Hadoop was built with.

`s3://` and `s3a://` are the same for Spark with these settings, so a lake has one URI everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.settings.storage import S3_SCHEMES, Storage, is_s3, scheme_of
from pgcdc_assets.spark import logstore

# The Hadoop inside PySpark.
HADOOP = "3.5.0"
_SDK = "2.35.4"

S3_PACKAGES = (
    f"org.apache.hadoop:hadoop-aws:{HADOOP}",
    f"software.amazon.awssdk:s3-transfer-manager:{_SDK}",
    f"software.amazon.awssdk:sts:{_SDK}",
)
# Hadoop's connectors of other stores, which need no settings. Delta has its own LogStores for them.
CONNECTORS: Mapping[str, str] = {
    "abfs": f"org.apache.hadoop:hadoop-azure:{HADOOP}",
    "gs": f"org.apache.hadoop:hadoop-gcp:{HADOOP}",
}
_STORES = {**dict.fromkeys(S3_SCHEMES, "s3"), "abfs": "abfs", "abfss": "abfs", "gs": "gs"}
S3_EXCLUDES = "software.amazon.awssdk:bundle,org.wildfly.openssl:wildfly-openssl"

LOG_STORE = "spark.delta.logStore.s3.impl"
_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
# Where S3A looks for credentials: the settings of a bucket, then the places of Amazon's SDK in its
# order. Hadoop's default list has neither a web identity nor a profile.
_PROVIDERS = (
    "org.apache.hadoop.fs.s3a.TemporaryAWSCredentialsProvider",
    "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    "software.amazon.awssdk.auth.credentials.EnvironmentVariableCredentialsProvider",
    "software.amazon.awssdk.auth.credentials.WebIdentityTokenFileCredentialsProvider",
    "software.amazon.awssdk.auth.credentials.ProfileCredentialsProvider",
    "org.apache.hadoop.fs.s3a.auth.IAMInstanceCredentialsProvider",
)
_PACKAGES, _EXCLUDES, _JARS = "spark.jars.packages", "spark.jars.excludes", "spark.jars"

# Settings of every S3A. A cut connection or a busy server is retried within about a minute; the
# default takes many minutes until a merge fails and is started again.
_S3A_OPTIONS: Mapping[str, str] = {
    "spark.hadoop.fs.s3.impl": _S3A,
    "spark.hadoop.fs.s3a.aws.credentials.provider": ",".join(_PROVIDERS),
    "spark.hadoop.fs.s3a.attempts.maximum": "3",
    "spark.hadoop.fs.s3a.retry.limit": "5",
    "spark.hadoop.fs.s3a.connection.establish.timeout": "10s",
    "spark.hadoop.fs.s3a.connection.timeout": "60s",
    # Delta reads its files as a whole or by ranges; the other stream needs more jars.
    "spark.hadoop.fs.s3a.input.stream.type": "classic",
    # The transfer manager copies objects between buckets. Neither Delta nor this package does.
    "spark.hadoop.fs.s3a.optimized.copy.from.local.enabled": "false",
}


def store_of(uri: str) -> str:
    """Return the store whose connector Spark needs for a lake: `s3`, `abfs`, `gs`, or empty."""
    return _STORES.get(scheme_of(uri), "")


def start_options(uris: Iterable[str], conf: Mapping[str, str]) -> dict[str, str]:
    """Return a session's start settings, with the settings that the lakes need.

    Args:
        uris: the URIs of lakes.
        conf: the settings of the session.
    """
    lakes = list(uris)
    connectors = sorted({CONNECTORS[s] for s in map(store_of, lakes) if s in CONNECTORS})
    if connectors:
        conf = {**conf, _PACKAGES: _joined(conf.get(_PACKAGES, ""), *connectors)}
    if not any(map(is_s3, lakes)):
        return dict(conf)
    stores = {f"spark.delta.logStore.{scheme}.impl": logstore.CLASS for scheme in S3_SCHEMES}
    return {
        **_S3A_OPTIONS,
        **stores,
        **conf,
        _PACKAGES: _joined(conf.get(_PACKAGES, ""), *S3_PACKAGES),
        _EXCLUDES: _joined(conf.get(_EXCLUDES, ""), S3_EXCLUDES),
        _JARS: _joined(conf.get(_JARS, ""), str(logstore.JAR)),
    }


def bucket_options(uri: str, storage: Storage) -> dict[str, str]:
    """Return the settings of a session for the lake's bucket; empty for another store."""
    return storage.spark_options(uri) if is_s3(uri) else {}


def check_reachable(uri: str, remote: str | None, is_here: bool) -> None:
    """Check that a Spark server can reach the lake.

    Args:
        remote: the server's address without parameters; None: an embedded session.
        is_here: the server runs on this machine.

    Raises:
        ConfigurationError: the server is on another machine, and the lake is a local folder.
    """
    if remote is not None and not is_here and "://" not in uri:
        raise ConfigurationError(
            reason=f"The lake {uri} is a folder of this machine, and the Spark server {remote} is "
            "on another machine, which would read and write a folder of its own. Set the lake to "
            "an object store, or use a Spark on this machine"
        )


def find_folder_warning(uri: str, master: str, is_here: bool) -> str | None:
    """Return a warning if the executors of a cluster may not reach the lake; None if they do.

    A folder that all machines of the cluster share is allowed, and cannot be recognized.

    Args:
        master: the value of `spark.master`.
        is_here: the master is on this machine.
    """
    if is_here or "://" in uri:
        return None
    return (
        f"The lake {uri} is a folder, and the Spark executors of {master} may be on other "
        "machines. All machines must share this folder. Otherwise each executor writes to a "
        "folder of its own, and the tables lack its files."
    )


def _joined(*parts: str) -> str:
    return ",".join(part for part in parts if part)
