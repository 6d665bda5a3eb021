"""Settings whose value is the name of an environment variable, such as `dsn_env`.

The variable has the secret. A user who writes the secret into the setting must not find it in an
error, in Dagster's metadata or in a Spark setting.
"""

from __future__ import annotations

import re

from pgcdc_assets.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_variable_name(text: str, setting: str) -> None:
    """Check that the value of a setting can be the name of an environment variable.

    A password of letters and digits passes the check.

    Args:
        text: the value of the setting, which may be a secret.
        setting: the name of the setting.

    Raises:
        ConfigurationError: the text is not a name. The error does not contain the text.
    """
    if not _NAME.fullmatch(text):
        raise ConfigurationError(
            reason=f"{setting} must name an environment variable, by letters, digits and "
            "underscores. Write the name of the variable, not its value and no template that "
            "inserts the value",
            setting=setting,
        )
