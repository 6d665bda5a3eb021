"""Several errors told as one."""

from __future__ import annotations

from pgcdc_assets.errors import ConfigurationError, MergeConflict, PgcdcError, TransientError
from pgcdc_assets.orchestration.runs.errors import FailedRun, joined, naming


def test_one_error_stays_as_it_is() -> None:
    error = TransientError(reason="try again.")
    assert joined([error]) is error


def test_of_several_the_worst_comes_first_and_gives_the_status() -> None:
    errors = [
        TransientError(reason="Try again."),
        PgcdcError(reason="Strange"),
        MergeConflict(table="t", reason="a person must act."),
        ConfigurationError(reason="Settings."),
    ]
    error = joined(errors)
    assert error.exit_status == MergeConflict.exit_status
    sentence = "Table t cannot be merged: a person must act. Settings. Strange. Try again."
    assert str(error) == sentence
    assert joined([errors[0], errors[3]]).exit_status == ConfigurationError.exit_status


def test_a_transient_error_of_several_tables_names_them_all() -> None:
    lost = FailedRun.of(TransientError, "Lost.", "a run")
    named = naming("Not merged", {"public.b", "public.a"}, lost)
    assert str(named) == "Not merged: public.a, public.b. Lost."
    assert (named.exit_status, named.run_id) == (3, "a run")
    lasting = ConfigurationError(reason="Not merged: public.a. Settings.")
    assert naming("Not merged", {"public.a"}, lasting) is lasting
