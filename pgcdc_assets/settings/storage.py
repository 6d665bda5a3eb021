"""The settings of an object store, for delta-rs and for Spark.

One set of settings serves both clients. Credentials are never part of the settings: the settings
name the environment variables. delta-rs gets their values when a table is opened. Spark's settings
contain `${env.NAME}`, which Hadoop replaces when a client is built, so that no secret is in a
Spark setting, on a command line or in Dagster's storage.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.settings.variables import check_variable_name

# The schemes of Amazon's S3 and of compatible stores.
S3_SCHEMES = ("s3", "s3a")

ACCESS_KEY = "AWS_ACCESS_KEY_ID"
SECRET_KEY = "AWS_SECRET_ACCESS_KEY"
_TOKEN = "AWS_SESSION_TOKEN"
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
# The forms of addresses, by scheme. The address of a store names its bucket or container.
_BUCKET_FORM = "{scheme}://BUCKET/FOLDER"
_CONTAINER_FORM = "{scheme}://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER"
_STORE_FORMS = {
    **dict.fromkeys((*S3_SCHEMES, "gs"), _BUCKET_FORM),
    **dict.fromkeys(("abfs", "abfss"), _CONTAINER_FORM),
}
# A drive of Windows has one letter.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_LOCAL = re.compile(r"file:(?:/(?!/)|///+)", re.IGNORECASE)
# The beginning of Hadoop's settings of one bucket.
BUCKET_PREFIX = "fs.s3a.bucket."
# The settings that name the environment variable of a credential.
CREDENTIAL_SETTINGS = ("access_key_env", "secret_key_env", "session_token_env")
# Options of delta-rs for S3, without the prefix `aws_`, and the settings that all clients read.
_COVERED_OPTIONS = {
    **dict.fromkeys(("endpoint", "endpoint_url", "endpoint_url_s3"), "endpoint"),
    "allow_http": "endpoint",
    **dict.fromkeys(("region", "default_region"), "region"),
    "virtual_hosted_style_request": "path_style",
    "access_key_id": "access_key_env",
    "secret_access_key": "secret_key_env",
    **dict.fromkeys(("session_token", "token"), "session_token_env"),
}
# A store with its own endpoint accepts any region.
_ANY_REGION = "us-east-1"


def scheme_of(uri: str) -> str:
    """Return the scheme of a URI; empty for a local path."""
    return uri.partition("://")[0].lower() if "://" in uri else ""


def is_s3(uri: str) -> bool:
    """Return whether a URI is in an S3 store."""
    return scheme_of(uri) in S3_SCHEMES


def check_delta_options(uri: str, options: Mapping[str, str]) -> None:
    """Check that options of delta-rs are not settings that Arrow and Spark need too.

    Args:
        uri: the URI of the lake; only a lake in an S3 store has such settings.
        options: the setting `storage_options`, whose values may be secrets.

    Raises:
        ConfigurationError: an option is a setting of `storage`. The error contains no value.
    """
    for option in options if is_s3(uri) else ():
        setting = _COVERED_OPTIONS.get(option.lower().removeprefix("aws_"))
        if setting is not None:
            raise ConfigurationError(
                reason=f"storage_options has {option}, which only one of the clients of an S3 "
                f"store would read. Use storage.{setting} instead",
                setting="storage_options",
            )


def without_file_scheme(uri: str) -> str:
    """Return the path of `file:///FOLDER` or `file:/FOLDER`, and another address unchanged."""
    found = _LOCAL.match(uri)
    return uri if found is None else f"/{uri[found.end() :]}"


def local_folder(text: str, setting: str) -> Path:
    """Return the absolute path of a local folder, whose text may begin with `~`.

    Args:
        setting: the name of the setting that holds the text.

    Raises:
        ConfigurationError: the home folder of a user is not known, or the current folder is gone.
    """
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ConfigurationError(
            reason=f"{setting} begins with ~, and the home folder of this user is not known. Write "
            "the whole path, or set HOME"
        ) from None
    except FileNotFoundError:
        raise ConfigurationError(
            reason="The current folder does not exist any more. Change to another folder"
        ) from None


def check_lake_form(uri: str, setting: str) -> None:
    """Check that a lake's address with a scheme is not a folder below the current one.

    Args:
        uri: a local path, or a URI.
        setting: the name of the setting that holds the URI.

    Raises:
        ConfigurationError: `://` or the bucket is missing. The error does not contain the URI.
    """
    found = _SCHEME.match(without_file_scheme(uri))
    if found is None:
        return
    scheme = found[1].lower()
    form = _STORE_FORMS.get(scheme, _BUCKET_FORM.format(scheme="s3")).format(scheme=scheme)
    form = "file:///FOLDER" if scheme == "file" else form
    rest = uri[found.end() :]
    if scheme == "file" or not rest.startswith("//"):
        raise ConfigurationError(
            reason=f"{setting} begins like a URI, but is none of a lake. Write the address as "
            f"{form}, or the path of a folder, such as ./a:b if its name has a colon"
        )
    authority, _, path = rest.removeprefix("//").partition("/")
    if not authority and (scheme in _STORE_FORMS or not path.strip("/")):
        raise ConfigurationError(
            reason=f"{setting} does not name the bucket of its object store. Write the address as "
            f"{form}"
        )


def check_lake_uri(uri: str, setting: str) -> None:
    """Check the form of a lake's URI, and that it has no credentials, which Dagster would show.

    Args:
        setting: the name of the setting that holds the URI.

    Raises:
        ConfigurationError: the URI is not complete, or has a password or a query. The error does
            not contain the URI.
    """
    check_lake_form(uri, setting)
    if not scheme_of(uri):
        return
    authority = uri.partition("://")[2].partition("/")[0]
    user, _, host = authority.rpartition("@")
    port = host.partition(":")[2]
    # A bucket has no port: a colon is that of a secret key, which may contain a slash.
    has_password = ":" in user or (":" in host and (is_s3(uri) or not port.isdigit()))
    if has_password or "?" in uri:
        raise ConfigurationError(
            reason=f"{setting} contains credentials or a query, which errors and Dagster would "
            "show. Write the address only, such as s3://BUCKET/FOLDER or "
            "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER, and set the credentials as "
            "environment variables"
        )


@dataclass(frozen=True)
class Storage:
    """The settings of an S3 store.

    Attributes:
        endpoint: URL of a compatible store; empty: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else
            Amazon's.
        region: empty: AWS_REGION, AWS_DEFAULT_REGION, else the clients find the region.
        path_style: the bucket is in the path of a request and not in the host name; None: with an
            endpoint.
        access_key_env: the environment variable with the access key.
        secret_key_env: the environment variable with the secret key.
        session_token_env: the environment variable with the token of temporary credentials.

    The default variables are those of Amazon's tools. If they are not set, the clients look for
    credentials as Amazon's tools do: a web identity, a profile, a container's or a machine's role.
    Spark does so if this package has started the session or the server.

    Raises:
        ConfigurationError: a setting of a credential is not the name of a variable.
    """

    endpoint: str = ""
    region: str = ""
    path_style: bool | None = None
    access_key_env: str = ACCESS_KEY
    secret_key_env: str = SECRET_KEY
    session_token_env: str = ""

    def __post_init__(self) -> None:
        check_credential_settings({name: getattr(self, name) for name in CREDENTIAL_SETTINGS})

    def delta_options(self) -> dict[str, str]:
        """Return the options of delta-rs, with the credentials of named variables.

        Raises:
            ConfigurationError: a named variable is not set.
        """
        options = {"aws_conditional_put": "etag"}
        endpoint, region = self.found_endpoint, self.found_region
        if endpoint:
            options["aws_endpoint_url"] = endpoint
            if urlsplit(endpoint).scheme == "http":
                options["aws_allow_http"] = "true"
        if region:
            options["aws_region"] = region
        options["aws_virtual_hosted_style_request"] = str(not self.uses_path_style).lower()
        if self.has_own_variables:
            names = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
            found = zip(names, self.credentials(), strict=True)
            options.update({name: value for name, value in found if value})
        elif endpoint and self.credentials()[0] is None:
            # For a store with its own endpoint, delta-rs does not read profiles by default.
            options["aws_force_credential_load"] = "true"
        return options

    def spark_options(self, uri: str) -> dict[str, str]:
        """Return the Hadoop settings of the bucket of a URI. They contain no credentials."""
        options = {}
        if self.found_endpoint:
            options["endpoint"] = self.found_endpoint
        if self.found_region:
            options["endpoint.region"] = self.found_region
        if self.uses_path_style:
            options["path.style.access"] = "true"
        if self.has_own_variables:
            options["access.key"] = f"${{env.{self.access_key_env}}}"
            options["secret.key"] = f"${{env.{self.secret_key_env}}}"
            if self.session_token_env:
                options["session.token"] = f"${{env.{self.session_token_env}}}"
        bucket = urlsplit(uri).netloc
        return {f"{BUCKET_PREFIX}{bucket}.{name}": value for name, value in options.items()}

    def credentials(self) -> tuple[str | None, str | None, str | None]:
        """Return access key, secret key and token from the environment; None where not set.

        Raises:
            ConfigurationError: a named variable is not set.
        """
        if not self.has_own_variables:
            names = (ACCESS_KEY, SECRET_KEY, _TOKEN)
            key, secret, token = (os.environ.get(name, "").strip() or None for name in names)
            return (key, secret, token) if key and secret else (None, None, None)
        key, secret, token = (self._credential(setting) for setting in CREDENTIAL_SETTINGS)
        return key, secret, token

    def _credential(self, setting: str) -> str | None:
        variable = getattr(self, setting)
        if not variable:
            return None
        value = os.environ.get(variable, "").strip()
        if not value:
            # A key of letters and digits can be the name of a variable.
            raise ConfigurationError(
                reason=f"storage.{setting} names an environment variable that is not set. Set the "
                "variable to the credential of the object store, or name another variable",
                setting=f"storage.{setting}",
            )
        return value

    @property
    def found_endpoint(self) -> str:
        """The endpoint of the settings or of the environment; empty: Amazon's."""
        return self.endpoint or _first_set(_ENDPOINTS)

    @property
    def found_region(self) -> str:
        """The region of the settings or of the environment; empty: the clients find it."""
        return self.region or _first_set(_REGIONS) or (_ANY_REGION if self.found_endpoint else "")

    @property
    def uses_path_style(self) -> bool:
        """Whether the bucket is in the path of a request."""
        return bool(self.found_endpoint) if self.path_style is None else self.path_style

    @property
    def has_own_variables(self) -> bool:
        """Whether the credentials are in other variables than those of Amazon's tools."""
        named = (self.access_key_env, self.secret_key_env)
        return named != (ACCESS_KEY, SECRET_KEY) or bool(self.session_token_env)


def check_credential_settings(settings: Mapping[str, str]) -> None:
    """Check that settings of credentials are names of environment variables.

    Args:
        settings: settings of a store. The setting of the token may be empty.

    Raises:
        ConfigurationError: a value is not a name. The error does not contain the value.
    """
    for name in CREDENTIAL_SETTINGS:
        text = settings.get(name)
        if text is not None and (text or name != "session_token_env"):
            check_variable_name(text, f"storage.{name}")


def storage_of(settings: Mapping[str, str]) -> Storage:
    """Return the settings of a store from their names and texts.

    Raises:
        ConfigurationError: a setting does not exist, or its text is not valid.
    """
    known = {field.name for field in fields(Storage)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ConfigurationError(
            reason=f"storage has no setting {unknown[0]}. Its settings are "
            f"{', '.join(sorted(known))}",
            setting="storage",
        )
    texts: dict[str, Any] = dict(settings)
    style = texts.pop("path_style", "")
    if style not in ("", "true", "false"):
        raise ConfigurationError(
            reason="storage.path_style must be true or false", setting="storage.path_style"
        )
    storage = Storage(path_style=style == "true" if style else None, **texts)
    endpoint = urlsplit(storage.endpoint)
    if storage.endpoint and (endpoint.scheme not in ("http", "https") or not endpoint.netloc):
        raise ConfigurationError(
            reason="storage.endpoint must be a URL such as https://s3.example.com",
            setting="storage.endpoint",
        )
    if endpoint.username or endpoint.password:
        raise ConfigurationError(
            reason="storage.endpoint contains credentials. Set environment variables, and name "
            "them in storage.access_key_env and storage.secret_key_env",
            setting="storage.endpoint",
        )
    return storage


def _first_set(names: tuple[str, ...]) -> str:
    return next((os.environ[name].strip() for name in names if os.environ.get(name)), "")
