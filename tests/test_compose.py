"""``docker-compose.yml`` and Kubernetes' manifests against what they run: commands and options that exist."""

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


def test_the_manifests_for_kubernetes_pass_what_exists_and_agree() -> None:
    documents = list(yaml.safe_load_all((FILE.parent / "examples/kubernetes/cluster.yml").read_text()))
    services = {each["metadata"]["name"] for each in documents if each["kind"] == "Service"}
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"] for each in documents if "template" in each["spec"]
    }
    assert {each["spec"]["serviceName"] for each in documents if each["kind"] == "StatefulSet"} <= services
    (runs,) = pods["taskmanager"]["containers"]
    given = set(re.findall(r"--[a-z0-9-]+", runs["args"][0].partition("dstl taskmanager")[2]))
    assert given
    assert given <= options_of(taskmanager)
    (driver,) = pods["visits"]["containers"]
    options = resolve("cluster", ClusterOptions, None, {e["name"]: e.get("value", "") for e in driver["env"]}, {})
    assert f"--coordinator={options.host}:{options.port}" in runs["args"][0]
    assert f"--secret-file={options.secret_file}" in runs["args"][0]
    assert options.host in services
    assert not options.launch
