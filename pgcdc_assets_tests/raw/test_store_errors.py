"""Errors of the clients of an object store: their codes, and whether a repetition may succeed."""

from __future__ import annotations

import pytest

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.raw.store_errors import explain_store_error

URI = "s3://lake/shop/scd1/shop/orders"
# As Spark shows an error of S3A.
S3A = (
    "[TASK_WRITE_FAILED] Task failed. Caused by: org.apache.hadoop.fs.s3a.AWSBadRequestException: "
    "Writing Object on shop/part-0.parquet: software.amazon.awssdk.services.s3.model.S3Exception: "
    "secret (Service: S3, Status Code: {status}, Request ID: null) (SDK Attempt Count: 1):{code}: "
    "secret (Service: S3, Status Code: {status}, Request ID: null) (SDK Attempt Count: 1)"
)


@pytest.mark.parametrize(
    ("status", "code", "shown"),
    [
        (400, "ExpiredToken", "ExpiredToken"),
        (403, "InvalidAccessKeyId", "InvalidAccessKeyId"),
        (403, "null", "403"),
    ],
)
def test_refused_credentials_of_s3a_are_definite(status: int, code: str, shown: str) -> None:
    error = explain_store_error(URI, RuntimeError(S3A.format(status=status, code=code)))
    assert isinstance(error, ConfigurationError)
    expected = f"The object store refused access to {URI} ({shown}). Check the credentials in the "
    assert str(error).startswith(expected)
    assert "secret" not in str(error)


def test_a_missing_bucket_of_s3a_is_definite() -> None:
    error = explain_store_error(URI, RuntimeError(S3A.format(status=404, code="NoSuchBucket")))
    assert isinstance(error, ConfigurationError)
    assert "(NoSuchBucket). Create it" in str(error)


def test_a_busy_store_is_transient_and_other_errors_are_not_of_the_store() -> None:
    error = explain_store_error(URI, RuntimeError(S3A.format(status=503, code="SlowDown")))
    assert isinstance(error, TransientError)
    assert "(SlowDown)" in str(error)
    assert explain_store_error(URI, RuntimeError("[CAST_INVALID_INPUT] ExpiredToken")) is None
    local = RuntimeError(S3A.format(status=400, code="ExpiredToken"))
    assert explain_store_error("/data/lake", local) is None
