"""Spark settings in a file that only this user can read."""

from __future__ import annotations

from pathlib import Path

import pytest

from pgcdc_assets.errors import ConfigurationError
from pgcdc_assets.spark.properties_file import check_values, properties_file


def test_the_file_is_private_and_is_deleted_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), properties_file({"spark.a": "b=c"}, tmp_path) as file:
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.read_text() == "spark.a=b\\u003dc\n"
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [" sesame", "sesame\t", "\0", "sesame\n ", " \nsesame"])
def test_a_blank_at_the_end_of_a_value_is_refused(value: str) -> None:
    """Spark removes it, so a password would be another one."""
    with pytest.raises(ConfigurationError, match=r"The Spark setting spark\.b begins or") as caught:
        check_values({"spark.a": "", "spark.b": value})
    assert "sesame" not in str(caught.value)


def test_line_ends_and_blanks_within_a_value_are_kept() -> None:
    check_values({"spark.a": "\nses ame\r\n", "spark.b": "\xa0", "spark.c": "#"})
