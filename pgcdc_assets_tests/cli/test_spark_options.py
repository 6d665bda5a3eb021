"""The options of `pgcdc spark start`."""

from __future__ import annotations

import pytest

from pgcdc_assets.cli import main
from pgcdc_assets.cli.arguments import build_parser
from pgcdc_assets.cli.spark import read_settings


def test_settings_of_a_server_are_names_and_values() -> None:
    words = ["spark", "start", "--memory", "1g", "--conf", "spark.a=b=c", "--conf", "spark.d="]
    options = build_parser().parse_args(words)
    assert read_settings(options) == {
        "spark.driver.memory": "1g",
        "spark.a": "b=c",
        "spark.d": "",
    }


@pytest.mark.parametrize("text", ["spark.a", "=b", " =b"])
def test_a_setting_without_a_name_or_a_value_is_refused(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["spark", "start", "--conf", text]) == 2
    assert "--conf takes a Spark setting as NAME=VALUE" in capsys.readouterr().err
