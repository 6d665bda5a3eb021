"""Several errors are joined to one error."""

from __future__ import annotations

from pgcdc_assets.errors import (
    ConfigurationError,
    FailedRun,
    MergeConflict,
    PgcdcError,
    TransientError,
)
from pgcdc_assets.orchestration.runs.errors import join_errors, name_tables


def test_one_error_is_returned_unchanged() -> None:
    error = TransientError(reason="try again.")
    assert join_errors([error]) is error


def test_of_several_errors_the_most_severe_is_first_and_determines_the_status() -> None:
    errors = [
        TransientError(reason="Try again."),
        PgcdcError(reason="Strange"),
        MergeConflict(table="t", reason="a person must act."),
        ConfigurationError(reason="Settings."),
    ]
    error = join_errors(errors)
    assert error.exit_status == MergeConflict.exit_status
    sentence = "Table t cannot be merged: a person must act. Settings. Strange. Try again."
    assert str(error) == sentence
    assert join_errors([errors[0], errors[3]]).exit_status == ConfigurationError.exit_status


def test_a_transient_error_of_several_tables_names_all_tables() -> None:
    lost = FailedRun.of(TransientError, "Lost.", "a run")
    named = name_tables("Not merged", {"public.b", "public.a"}, lost)
    assert str(named) == "Not merged: public.a, public.b. Lost."
    assert isinstance(named, FailedRun)
    assert (named.exit_status, named.run_id) == (3, "a run")
    lasting = ConfigurationError(reason="Not merged: public.a. Settings.")
    assert name_tables("Not merged", {"public.a"}, lasting) is lasting
