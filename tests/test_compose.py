"""``docker-compose.yml`` against what it runs: its commands and options are those that exist."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main

from dstl.cli.demo import demo
from dstl.cli.taskmanager import taskmanager
from dstl.option_sources import resolve
from dstl.options import ClusterOptions

yaml = pytest.importorskip("yaml")

FILE = Path(__file__).parents[1] / "docker-compose.yml"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
    return found


def options_of(command: Any) -> set[str]:
    app = typer.Typer()
    app.command()(command)
    return {option for each in typer.main.get_command(app).params for option in each.opts}


@pytest.mark.parametrize(("service", "command"), [("demo", demo), ("taskmanager", taskmanager)])
def test_it_passes_options_that_exist(services: dict[str, Any], service: str, command: Any) -> None:
    line = " ".join(services[service]["command"])
    given = set(re.findall(r"--[a-z0-9-]+", line[line.index(f"dstl {service}") :]))
    assert given
    assert given <= options_of(command)


def test_the_driver_and_the_task_manager_agree_on_where_to_meet(services: dict[str, Any]) -> None:
    driver = resolve("cluster", ClusterOptions, None, services["demo"]["environment"], {})
    assert f"--coordinator={driver.host}:{driver.port}" in services["taskmanager"]["command"]
    assert f"--secret-file={driver.secret_file}" in services["taskmanager"]["command"]
    assert driver.host == services["demo"]["hostname"]


def test_everything_that_serves_has_a_health_check_and_nothing_waits_for_what_has_none(
    services: dict[str, Any],
) -> None:
    assert {name for name, service in services.items() if "healthcheck" not in service} == {"demo"}
    waited_for = {other for service in services.values() for other in service.get("depends_on", {})}
    assert waited_for == set(services) - {"demo"}


def test_no_secret_is_in_a_command(services: dict[str, Any]) -> None:
    text = " ".join(" ".join(service.get("command", ())) for service in services.values())
    assert not re.search(r"SECRET|ACCESS_KEY|only-for-this-demo", text)


def test_compose_reads_it() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("there is no docker compose here")
    done = subprocess.run(
        [docker, "compose", "--file", str(FILE), "--profile", "demo", "config", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
