"""The object store of a lake and the options of its clients, as the component's YAML declares."""

from __future__ import annotations

from typing import Annotated

import dagster as dg
from dagster.components.resolved.base import Resolvable
from pydantic import Field

from pgcdc_assets.orchestration.component_texts import resolve_text
from pgcdc_assets.settings.storage import Storage

_STYLE = "path_style"


def _resolve_options(context: dg.ResolutionContext, options: dict[str, str]) -> dict[str, str]:
    """Return options with their templates replaced, and otherwise as written."""
    return {name: resolve_text(context.at_path(name), text) for name, text in options.items()}


Options = Annotated[
    dict[str, str],
    dg.Resolver(_resolve_options, model_field_type=dict[str, str], inject_before_resolve=False),
]


class StorageModel(dg.Model, Resolvable):
    """The S3 store of the lake, for delta-rs and Spark. Credentials are environment variables."""

    endpoint: str = Field(
        default=Storage.endpoint,
        description="URL of a compatible store. Unset: `AWS_ENDPOINT_URL_S3` or "
        "`AWS_ENDPOINT_URL`, else Amazon's.",
    )
    region: str = Field(
        default=Storage.region,
        description="Unset: `AWS_REGION`, `AWS_DEFAULT_REGION`, else the clients find the region.",
    )
    path_style: bool | None = Field(
        default=None,
        description="The bucket is in the path of a request and not in the host name. Unset: with "
        "an endpoint.",
    )
    access_key_env: str = Field(
        default=Storage.access_key_env, description="The environment variable with the access key."
    )
    secret_key_env: str = Field(
        default=Storage.secret_key_env, description="The environment variable with the secret key."
    )
    session_token_env: str = Field(
        default=Storage.session_token_env,
        description="The environment variable with the token of temporary credentials. Unset: "
        "`AWS_SESSION_TOKEN`, if the keys are in their default variables.",
    )

    def texts(self) -> dict[str, str]:
        """Return the settings that are set, as texts."""
        found = self.model_dump(exclude_defaults=True)
        return {
            name: str(value).lower() if name == _STYLE else value for name, value in found.items()
        }
