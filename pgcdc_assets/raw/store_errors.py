"""Errors of an object store: what failed, and whether a repetition may succeed.

The texts of the clients contain requests and signatures, so an error names the store's code only.
"""

from __future__ import annotations

import re

from pgcdc_assets.errors import ConfigurationError, TransientError
from pgcdc_assets.settings.storage import scheme_of

# Of delta-rs, of Arrow, of delta-rs after a 403 without a body, and of Spark's S3A.
_FROM_STORE = re.compile(
    r"Error performing|AWS Error|Generic \w+ error|necessary privileges|amazon\.awssdk"
)
_CODES = (
    re.compile(r"<Code>(\w+)</Code>"),
    re.compile(r"ExceptionName: (\w+)"),
    re.compile(r"AWS Error (\w+)"),
    re.compile(r"Status Code: \d+[^()]*\)(?: \([^()]*\))?:(?!null\b)(\w+)"),
    re.compile(r"Status Code: (\d+)"),
    re.compile(r"\b([45]\d\d [A-Z][A-Za-z]+(?: [A-Z][A-Za-z]+)*)"),
    re.compile(r"(Connection \w+|operation timed out|lacked the necessary privileges)"),
)
_CREDENTIALS = frozenset(
    "expiredtoken invalidtoken tokenrefreshrequired invalidaccesskeyid signaturedoesnotmatch "
    "accessdenied 403 401 403forbidden 401unauthorized lackedthenecessaryprivileges "
    "requesttimetooskewed xadminusernotfound".split()
)
_BUCKET = frozenset("nosuchbucket invalidbucketname permanentredirect".split())


def explain_store_error(uri: str, error: Exception) -> ConfigurationError | TransientError | None:
    """Return the error of a store that refused or did not answer; None for another error.

    Args:
        uri: path or URI of the table.
    """
    text = str(error)
    if not scheme_of(uri) or not _FROM_STORE.search(text):
        return None
    code = next((found[1] for each in _CODES if (found := each.search(text))), "no answer")
    name = re.sub(r"[\s_]", "", code).lower()
    if name in _CREDENTIALS:
        return ConfigurationError(
            reason=f"The object store refused access to {uri} ({code}). Check the credentials in "
            "the environment, their expiry and their permissions, and run it again"
        )
    if name in _BUCKET:
        return ConfigurationError(
            reason=f"The bucket of {uri} cannot be used ({code}). Create it, or correct the lake "
            "and storage.region"
        )
    if "not found" in text.lower() and not re.search(r"\b5\d\d\b", text):
        return None
    return TransientError(
        reason=f"The object store did not serve {uri} ({code}). Run it again: the next run "
        "continues from the last commit"
    )
