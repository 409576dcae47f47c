"""The manifest in the docs is one of Kubernetes, and its command is one of ours: a dry run without a cluster."""

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from parallel_backend import env
from parallel_backend.machines.nodes import command

DOCS = Path(__file__).resolve().parents[4] / "docs" / "hosts.md"


@pytest.fixture
def manifests() -> dict[str, Any]:
    """The objects of the manifest, by kind."""
    [text] = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def test_kubernetes_knows_every_field(manifests: dict[str, Any]) -> None:
    assert manifests.keys() == {"Service", "Job"}
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_each_pod_is_a_host(manifests: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    job = manifests["Job"]["spec"]
    [container] = job["template"]["spec"]["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    shell, flag, line = container["command"]
    assert (shell, flag) == ("sh", "-c")
    assignment, _, program = line.partition(" exec ")
    assert assignment == "RANK=$JOB_COMPLETION_INDEX"
    python, _, module, name, *arguments = shlex.split(program)
    assert (python, module, name) == ("python", "parallel_backend", "host")
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert parser.parse_args(arguments).interface == "eth0"
    for pod in range(job["completions"]):
        monkeypatch.setenv("RANK", str(pod))
        launched = command.Launched.read()
        assert (launched.node, launched.nodes) == (pod, job["parallelism"])
        # A pod of an indexed Job has the name JOB-INDEX, and with a headless service a domain name.
        service, pods = manifests["Service"], job["template"]["spec"]["subdomain"]
        assert launched.first == f"{manifests['Job']['metadata']['name']}-0.{pods}"
        assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pods, "None")
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {variable["value"] for variable in container["env"] if variable["name"] == env.CERTIFICATES.name} <= mounts
    volumes = {volume["name"] for volume in job["template"]["spec"]["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}
