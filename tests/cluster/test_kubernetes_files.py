"""The files of examples/cluster/kubernetes against the schemas of Kubernetes and Kubeflow.

A function is run by the backend that Kubeflow's SDK has for one machine.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import os
import re
import shlex
import sys
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

import slipstream
from slipstream.cli import main
from tests.harness.ranks import free_port

# The SDK is imported where it is used: it takes a second, and every worker collects this file.
if not importlib.util.find_spec("kubeflow"):
    pytest.skip("needs pip install 'slipstream[cluster]'", allow_module_level=True)

FOLDER = Path(__file__).parents[2] / "examples/cluster/kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
DOCUMENTS = {
    document["kind"]: document
    for file in FILES
    for document in yaml.safe_load_all(file.read_text())
}
KUBERNETES = {"Job": "batch/v1", "Service": "v1", "NetworkPolicy": "networking.k8s.io/v1"}
"""Groups of what Kubernetes itself has; all else is Kubeflow's."""
TOKEN = "metadata.labels['batch.kubernetes.io/controller-uid']"


class Answer:
    """A document as a server would send it."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.data = json.dumps(document)


def understood(document: dict[str, Any]) -> dict[str, Any]:
    """What is left of a document when its classes have read it: they drop what they do not know."""
    from kubeflow_trainer_api import models
    from kubernetes.client import ApiClient

    kind = document["kind"]
    if kind in KUBERNETES:
        client = ApiClient()
        return client.sanitize_for_serialization(client.deserialize(Answer(document), f"V1{kind}"))
    return getattr(models, f"TrainerV1alpha1{kind}").from_dict(document).to_dict()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_says_how_to_use_it_and_what_to_change(file: Path) -> None:
    first, second, *_ = file.read_text().splitlines()
    assert re.fullmatch(rf"# .*: kubectl (create|apply) -f {file.name}", first)
    assert second.startswith("# Change: ")


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_has_nothing_that_its_schema_has_not(kind: str) -> None:
    document = DOCUMENTS[kind]
    assert understood(document) == document
    assert document["apiVersion"] == KUBERNETES.get(kind, "trainer.kubeflow.org/v1alpha1")


def test_a_word_that_the_schema_has_not_is_found() -> None:
    wrong = json.loads(json.dumps(DOCUMENTS["Job"]))
    wrong["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    assert understood(wrong) != wrong


def pods() -> list[dict[str, Any]]:
    """What the runtime and the job say of a pod."""
    runtime, job = (
        DOCUMENTS[kind]["spec"]["template"]["spec"] for kind in ("TrainingRuntime", "Job")
    )
    (node,) = runtime["replicatedJobs"]
    return [node["template"]["spec"]["template"]["spec"], job]


@pytest.mark.parametrize("pod", pods(), ids=["runtime", "job"])
def test_a_pod_has_shared_memory_and_the_token_of_its_job(pod: dict[str, Any]) -> None:
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    variable = container["env"][0]
    assert variable["name"] == "SLIPSTREAM_TOKEN"
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": TOKEN}}


def test_the_training_runs_on_the_runtime_beside_it() -> None:
    job, runtime = DOCUMENTS["TrainJob"], DOCUMENTS["TrainingRuntime"]
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": runtime["apiVersion"].partition("/")[0],
        "kind": runtime["kind"],
        "name": runtime["metadata"]["name"],
    }
    trainer = job["spec"]["trainer"]
    limits = trainer["resourcesPerNode"]["limits"]
    assert trainer["numProcPerNode"] == int(limits["nvidia.com/gpu"])
    assert pods()[0]["containers"][0]["command"] == ["torchrun"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["name"] == "node"  # the trainer looks for a container of this name in this step
    assert node["template"]["metadata"]["labels"] == step


def test_one_pod_that_fails_starts_all_anew() -> None:
    jobs = DOCUMENTS["TrainingRuntime"]["spec"]["template"]["spec"]
    (node,) = jobs["replicatedJobs"]
    assert jobs["failurePolicy"]["maxRestarts"] > 0
    assert node["template"]["spec"]["backoffLimit"] == 0
    assert pods()[0]["restartPolicy"] == "Never"


def test_a_rank_has_threads_for_its_share_of_the_cores() -> None:
    container = pods()[1]["containers"][0]
    trainer = DOCUMENTS["TrainJob"]["spec"]["trainer"]
    for variables, limits in (
        (trainer["env"], trainer["resourcesPerNode"]["limits"]),
        (container["env"], container["resources"]["limits"]),
    ):
        (threads,) = (int(v["value"]) for v in variables if v["name"] == "OMP_NUM_THREADS")
        assert threads * int(limits["nvidia.com/gpu"]) == int(limits["cpu"])


def test_the_launchers_of_the_job_meet_at_its_first_pod() -> None:
    job, service = DOCUMENTS["Job"], DOCUMENTS["Service"]
    name, spec, pod = job["metadata"]["name"], job["spec"], pods()[1]
    assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
    policy = DOCUMENTS["NetworkPolicy"]["spec"]
    (sources,) = policy["ingress"]
    own = {"podSelector": {"matchLabels": {"job-name": name}}}
    assert ({"podSelector": policy["podSelector"]}, sources["from"]) == (own, [own])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["metadata"]["name"] == pod["subdomain"]
    execute, program, *words = shlex.split(pod["containers"][0]["args"][0])
    assert (execute, program, words.pop(0)) == ("exec", "slipstream", "launch")
    launch: Any = get_command(main.app)
    context = launch.commands["launch"].make_context(
        "launch",
        [word.replace("$JOB_COMPLETION_INDEX", "3") for word in words],
        allow_interspersed_args=False,
    )
    given = context.params
    assert given["nnodes"] == spec["completions"] == spec["parallelism"]
    assert given["node_rank"] == 3
    assert given["rdzv_endpoint"] == f"{name}-0.{pod['subdomain']}:29500"
    assert (given["nproc"], given["script"]) == ("gpu", "train.py")


# Kubeflow's backend for one machine makes an environment, installs into it, and starts torchrun
# there. It knows one node, which may have several ranks.


def torch_of_this_environment(folder: Path) -> None:
    """A wheel that stands for the download of torch: torchrun, and where this environment is."""
    paths = [str(Path(slipstream.__file__).parents[1]), *(p for p in sys.path if p)]
    files = {
        "torch_of_the_tests.pth": "\n".join(paths),
        "torch-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 0\n",
        "torch-0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "torch-0.dist-info/entry_points.txt": (
            "[console_scripts]\ntorchrun = torch.distributed.run:main\n"
        ),
    }
    with zipfile.ZipFile(folder / "torch-0-py3-none-any.whl", "w") as wheel:
        record = ["torch-0.dist-info/RECORD,,"]
        for name, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
            record.append(f"{name},sha256={digest.decode()},{len(text)}")
            wheel.writestr(name, text)
        wheel.writestr("torch-0.dist-info/RECORD", "\n".join(record))


def function() -> Any:
    spec = importlib.util.spec_from_file_location("submit", FOLDER / "submit.py")
    assert spec is not None
    assert spec.loader is not None
    submit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(submit)
    return submit.train


@pytest.mark.process
@pytest.mark.timeout(600)
def test_kubeflow_trains_on_two_ranks_of_this_machine(tmp_path: Path, monkeypatch) -> None:
    kubeflow = pytest.importorskip("kubeflow.trainer")  # it hides the warnings of the import
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    torch_of_this_environment(tmp_path)
    env = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PET_NPROC_PER_NODE": "2",  # as the operator sets it from numProcPerNode
        "PET_MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    client = kubeflow.TrainerClient(backend_config=kubeflow.LocalProcessBackendConfig())
    trainer = kubeflow.CustomTrainer(func=function(), packages_to_install=["torch"], env=env)
    job = client.train(runtime="torch-distributed", trainer=trainer)
    ended = client.wait_for_job_status(
        job, status={"Complete", "Failed"}, timeout=500, polling_interval=1
    )
    for thread in threading.enumerate():
        if thread.name == f"{job}-train":
            thread.join(60)  # it goes back to the folder of before
    printed = "\n".join(client.get_job_logs(job))
    assert ended.status == "Complete", printed
    assert re.search(r"^2 ranks, final loss 0\.0\d+$", printed, re.MULTILINE), printed
    assert [entry.name for entry in tmp_path.iterdir()] == ["torch-0-py3-none-any.whl"]
