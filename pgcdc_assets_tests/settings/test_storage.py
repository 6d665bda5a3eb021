"""The settings of an S3 store, translated for delta-rs and for Spark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.orchestration.component_storage import StorageModel
from pgcdc_assets.orchestration.project.code_location import load_defs_folders
from pgcdc_assets.raw.lake import Lake
from pgcdc_assets.settings.storage import (
    ACCESS_KEY,
    SECRET_KEY,
    Storage,
    check_lake_uri,
    storage_of,
)

AMAZON = {"aws_conditional_put": "etag", "aws_virtual_hosted_style_request": "true"}
URL = "https://s3.example.com"
COMPATIBLE = {
    **AMAZON,
    "aws_endpoint_url": URL,
    "aws_force_credential_load": "true",
    "aws_region": "us-east-1",
    "aws_virtual_hosted_style_request": "false",
}
OF_COMPATIBLE = {
    "endpoint": URL,
    "endpoint.region": "us-east-1",
    "path.style.access": "true",
}
KEYS = {"access_key_env": "LAKE_KEY", "secret_key_env": "LAKE_SECRET"}
DELTA_KEYS = {"aws_access_key_id": "key-1", "aws_secret_access_key": "secret-1"}
SPARK_KEYS = {"access.key": "${env.LAKE_KEY}", "secret.key": "${env.LAKE_SECRET}"}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with credentials in own variables, and without settings of Amazon's tools."""
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name in (ACCESS_KEY, SECRET_KEY, "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LAKE_KEY", "key-1")
    monkeypatch.setenv("LAKE_SECRET", "secret-1")
    monkeypatch.setenv("LAKE_TOKEN", "token-1")


@pytest.mark.parametrize(
    ("settings", "delta", "spark"),
    [
        pytest.param({}, AMAZON, {}, id="nothing"),
        pytest.param({"endpoint": URL}, COMPATIBLE, OF_COMPATIBLE, id="endpoint"),
        pytest.param(
            {"endpoint": "http://localhost:9000"},
            COMPATIBLE | {"aws_endpoint_url": "http://localhost:9000", "aws_allow_http": "true"},
            OF_COMPATIBLE | {"endpoint": "http://localhost:9000"},
            id="endpoint-without-tls",
        ),
        pytest.param(
            {"region": "eu-central-1"},
            AMAZON | {"aws_region": "eu-central-1"},
            {"endpoint.region": "eu-central-1"},
            id="region",
        ),
        pytest.param(
            {"path_style": "true"},
            AMAZON | {"aws_virtual_hosted_style_request": "false"},
            {"path.style.access": "true"},
            id="path_style",
        ),
        pytest.param(
            {"endpoint": URL, "path_style": "false"},
            COMPATIBLE | {"aws_virtual_hosted_style_request": "true"},
            {"endpoint": URL, "endpoint.region": "us-east-1"},
            id="host_style",
        ),
        pytest.param(KEYS, AMAZON | DELTA_KEYS, SPARK_KEYS, id="keys"),
        pytest.param(
            KEYS | {"session_token_env": "LAKE_TOKEN"},
            AMAZON | DELTA_KEYS | {"aws_session_token": "token-1"},
            SPARK_KEYS | {"session.token": "${env.LAKE_TOKEN}"},
            id="token",
        ),
    ],
)
def test_each_setting_is_an_option_of_delta_rs_and_of_s3a(
    settings: dict[str, str], delta: dict[str, str], spark: dict[str, str]
) -> None:
    storage = storage_of(settings)
    assert storage.delta_options() == delta
    prefixed = {f"fs.s3a.bucket.my-bucket.{name}": value for name, value in spark.items()}
    assert storage.spark_options("s3://my-bucket/lake") == prefixed


def test_the_variables_of_amazons_tools_are_used_without_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://other.example.com")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", URL)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    storage = storage_of({})
    assert storage.delta_options() == COMPATIBLE | {"aws_region": "eu-west-1"}
    assert storage.credentials() == (None, None, None), "the clients look for a role"
    monkeypatch.setenv(ACCESS_KEY, "key-2")
    monkeypatch.setenv(SECRET_KEY, "secret-2")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-2")
    assert storage.credentials() == ("key-2", "secret-2", "token-2")
    options = {**storage.delta_options(), **storage.spark_options("s3://bucket/lake")}
    assert "aws_force_credential_load" not in options, "the variables have the keys"
    assert not {"key-2", "secret-2", "token-2"} & set(options.values())
    named = storage_of({"endpoint": "https://mine.example.com", "region": "eu-north-1"})
    assert named.delta_options()["aws_endpoint_url"] == "https://mine.example.com"
    assert named.delta_options()["aws_region"] == "eu-north-1"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket": "b"}, "storage has no setting bucket. Its settings are access_key_env, "),
        ({"path_style": "yes"}, "storage.path_style must be true or false"),
        ({"endpoint": "s3.example.com"}, "storage.endpoint must be a URL such as https://"),
        ({"endpoint": "ftp://s3.example.com"}, "storage.endpoint must be a URL such as https://"),
        ({"endpoint": "https://"}, "storage.endpoint must be a URL such as https://"),
        ({"endpoint": "https://me:hidden@s3.example.com"}, "storage.endpoint contains credentials"),
        ({"endpoint": "https://hidden@s3.example.com"}, "storage.endpoint contains credentials"),
    ],
)
def test_a_wrong_setting_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)) as caught:
        storage_of(settings)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "setting"),
    [
        ("LAKE_KEY", "access_key_env"),
        ("LAKE_SECRET", "secret_key_env"),
        ("LAKE_TOKEN", "session_token_env"),
    ],
)
def test_a_named_variable_that_is_not_set_is_an_error_without_a_credential(
    variable: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the variable is not shown: a key of letters and digits looks like a name."""
    storage = storage_of(KEYS | {"session_token_env": "LAKE_TOKEN"})
    monkeypatch.setenv(variable, " ")
    with pytest.raises(
        ConfigurationError, match=rf"^storage\.{setting} names an environment variable that is not"
    ) as caught:
        storage.delta_options()
    assert "-1" not in str(caught.value)
    assert variable not in str(caught.value)
    texts = f"{storage} {storage.spark_options('s3://bucket/lake')}"
    assert not re.search("(key|secret|token)-1", texts)


def test_the_settings_of_the_component_arrive_as_texts() -> None:
    model = StorageModel(
        endpoint=URL,
        region="eu-central-1",
        path_style=False,
        access_key_env="LAKE_KEY",
        secret_key_env="LAKE_SECRET",
        session_token_env="LAKE_TOKEN",
    )
    expected = Storage(URL, "eu-central-1", False, "LAKE_KEY", "LAKE_SECRET", "LAKE_TOKEN")
    assert storage_of(model.texts()) == expected
    assert storage_of(StorageModel().texts()) == Storage()


@pytest.mark.parametrize(
    "uri",
    [
        "/lake",
        "lake?",
        "s3://bucket",
        "s3://bucket/a:b@c",
        "abfss://container@account.dfs.core.windows.net/folder",
        "gs://bucket/folder",
        "hdfs://namenode:8020/folder",
    ],
)
def test_the_address_of_a_lake_is_accepted(uri: str) -> None:
    check_lake_uri(uri, "lake")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://key:sesame@bucket",
        "s3://k:s/esame@bucket/x",
        "s3://k:5/esame@bucket/x",
        "gs://k:s/esame@bucket/x",
        "gs://bucket?sesame",
        "gs://bucket/x?sesame",
    ],
)
def test_the_address_of_a_lake_has_no_credentials(uri: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^lake contains credentials") as refused:
        check_lake_uri(uri, "lake")
    assert "esame" not in str(refused.value)


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        ("endpoint", "endpoint"),
        ("aws_endpoint", "endpoint"),
        ("aws_endpoint_url", "endpoint"),
        ("AWS_ENDPOINT_URL_S3", "endpoint"),
        ("allow_http", "endpoint"),
        ("AWS_ALLOW_HTTP", "endpoint"),
        ("region", "region"),
        ("aws_default_region", "region"),
        ("aws_virtual_hosted_style_request", "path_style"),
        ("aws_access_key_id", "access_key_env"),
        ("Secret_Access_Key", "secret_key_env"),
        ("AWS_SECRET_ACCESS_KEY", "secret_key_env"),
        ("aws_session_token", "session_token_env"),
        ("token", "session_token_env"),
    ],
)
def test_an_option_that_only_delta_rs_would_read_is_refused(
    option: str, setting: str, tmp_path: Path
) -> None:
    file = tmp_path / "shop" / "defs.yaml"
    file.parent.mkdir()
    file.write_text(
        "type: pgcdc_assets.PostgresCdcComponent\nattributes:\n  name: shop\n  publication: shop\n"
        "  tables: [{name: shop.orders}]\n  lake: s3://bucket/lake\n"
        f"  storage_options: {{{option}: sesame}}\n"
    )
    sentence = rf"storage_options has {option}, .* Use storage\.{setting} instead$"
    for call in (
        lambda: Lake("s3a://bucket/lake", {"timeout": "20s", option: "sesame"}),
        lambda: load_defs_folders([tmp_path]),
    ):
        with pytest.raises(ConfigurationError, match=sentence) as caught:
            call()
        assert "sesame" not in str(caught.value)
    assert Lake("gs://bucket/lake", {option: "x"}).delta_options == {option: "x"}


def test_other_options_are_those_of_delta_rs() -> None:
    options = Lake("s3://bucket/lake", {"timeout": "20s", "aws_imdsv1_fallback": "true"})
    assert options.delta_options == AMAZON | {"timeout": "20s", "aws_imdsv1_fallback": "true"}
