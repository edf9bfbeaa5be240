"""The manifests of examples/kubernetes: their schemas, and whether the commands in them are true and agree."""

from __future__ import annotations

import copy
import shlex
import urllib.request
from pathlib import PurePath

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from recipe_helpers import ROOT
from recipe_tools.build import build
from torch.distributed.run import get_args_parser

from lightning_recsys.cli import RECIPES
from lightning_recsys.monitoring import MonitoringEndpoint
from lightning_recsys.parameter_server.cli import _parser
from lightning_recsys.strategies import HETStrategy, ShadowSyncStrategy

FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = {
    (manifest["kind"], manifest["metadata"]["name"]): manifest
    for path in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text())
}
SERVERS, TRAIN = MANIFESTS["StatefulSet", "servers"], MANIFESTS["JobSet", "train"]
RAY_JOB = MANIFESTS["RayJob", "train-on-ray"]
(JOB,) = TRAIN["spec"]["replicatedJobs"]
PODS = {"server": SERVERS["spec"]["template"], "worker": JOB["template"]["spec"]["template"]}
CONTAINERS = {role: pod["spec"]["containers"][0] for role, pod in PODS.items()}


# Fields of ray.io/v1 that the manifest uses, as the types of KubeRay 1.5 name them. No registry has its schema.
RAY_FIELDS = {
    "job": {"entrypoint", "backoffLimit", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"}
    | {"submitterPodTemplate", "rayClusterSpec"},
    "cluster": {"rayVersion", "headGroupSpec", "workerGroupSpecs"},
    "head": {"rayStartParams", "template"},
    "worker": {"rayStartParams", "template", "groupName", "replicas", "minReplicas", "maxReplicas"},
}


def check_schema(manifest):
    """By the published schemas of Kubernetes, where a field that they do not know is an error, and of JobSet.

    Of a RayJob the pods are checked by a schema, and its own fields by their names.
    """
    if manifest["kind"] == "RayJob":
        job = manifest["spec"]
        cluster = job["rayClusterSpec"]
        head, groups = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
        kinds = [("job", job), ("cluster", cluster), ("head", head), *(("worker", group) for group in groups)]
        assert all(fields.keys() == RAY_FIELDS[kind] for kind, fields in kinds)
        assert all(isinstance(x, str) for group in (head, *groups) for x in group["rayStartParams"].values())
        for pod in (job["submitterPodTemplate"], *(group["template"] for group in (head, *groups))):
            pod = pod | {"metadata": pod["metadata"] | {"name": "pod"}}
            check_schema({"apiVersion": "v1", "kind": "Pod", **pod})
        return
    if manifest["kind"] != "JobSet":
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
        return
    assert JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest  # which leaves out what it does not know
    for job in manifest["spec"]["replicatedJobs"]:
        check_schema({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]})


@pytest.mark.parametrize("name", MANIFESTS, ids="/".join)
def test_manifest_then_fits_its_schema(name):
    check_schema(MANIFESTS[name])


@pytest.mark.parametrize("place", ["job", "cluster", "head", "pod"])
def test_schema_of_rayjob_then_knows_no_misspelt_field(place):
    wrong = copy.deepcopy(RAY_JOB)
    cluster = wrong["spec"]["rayClusterSpec"]
    head = cluster["headGroupSpec"]
    {"job": wrong["spec"], "cluster": cluster, "head": head, "pod": head["template"]["spec"]}[place]["misspelt"] = True
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        check_schema(wrong)


def test_rayjob_then_its_recipe_has_the_room_and_the_folders_that_it_names(composed):
    program, recipe, *overrides = shlex.split(RAY_JOB["spec"]["entrypoint"])
    assert (program, recipe) == ("lightning-recsys", "train")
    config = composed(recipe, *(x for x in overrides if not x.startswith("hydra.run.dir=")))
    (run_dir,) = [x.partition("=")[2] for x in overrides if x.startswith("hydra.run.dir=")]
    launcher = config.launcher
    build(dict(launcher))
    assert config.strategy._target_.endswith(ShadowSyncStrategy.__name__)
    ShadowSyncStrategy(max_replacements=config.strategy.max_replacements)

    cluster = RAY_JOB["spec"]["rayClusterSpec"]
    head, (nodes,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    cpus = nodes["replicas"] * int(nodes["rayStartParams"]["num-cpus"])
    assert launcher.num_workers + launcher.num_servers <= cpus
    assert head["rayStartParams"]["num-cpus"] == "0"
    (container,) = nodes["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == nodes["rayStartParams"]["num-cpus"]
    assert cluster["rayVersion"] >= "2.60"  # which replaces single workers
    assert (FOLDER / "rayjob.yaml").read_text().count(f"ray[default,train]=={cluster['rayVersion']}") == 1

    for group in (head, nodes):
        (container,) = group["template"]["spec"]["containers"]
        volumes = {x["name"]: x for x in group["template"]["spec"]["volumes"]}
        shared = volumes[volume_of_container(container, run_dir)]
        assert ("PersistentVolumeClaim", shared["persistentVolumeClaim"]["claimName"]) in MANIFESTS
        policies = [
            MANIFESTS["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"] for name in ("workers", "kuberay")
        ]
        assert policies == [group["template"]["metadata"]["labels"]] * 2
    assert "emptyDir" in volumes[volume_of_container(container, launcher.store_folder)]


@pytest.mark.parametrize("place", ["spec", "network", "replicatedJobs", "template"])
def test_schema_of_jobset_then_knows_no_misspelt_field(place):
    wrong = copy.deepcopy(TRAIN)
    spec = wrong["spec"]
    job = spec["replicatedJobs"][0]
    {"spec": spec, "network": spec["network"], "replicatedJobs": job, "template": job["template"]["spec"]}[place][
        "misspelt"
    ] = True
    with pytest.raises((AssertionError, kubernetes_validate.ValidationError)):
        check_schema(wrong)


def test_worker_then_torchrun_and_the_recipe_take_its_arguments(composed):
    arguments = [x.replace("$(JOB_COMPLETION_INDEX)", "1") for x in CONTAINERS["worker"]["args"]]
    assert CONTAINERS["worker"]["command"] == ["torchrun"]
    options = get_args_parser().parse_args(arguments)
    assert (options.module, options.training_script) == (True, "lightning_recsys")
    recipe, *overrides = options.training_script_args
    assert recipe in RECIPES

    job = JOB["template"]["spec"]
    assert int(options.nnodes) == job["parallelism"] == job["completions"]
    assert job["completionMode"] == "Indexed"  # else no pod has a number
    assert options.master_addr == f"{TRAIN['metadata']['name']}-{JOB['name']}-0-0.{TRAIN['metadata']['name']}"

    config = composed(recipe, *(x for x in overrides if not x.startswith("hydra.run.dir=")))
    (run_dir,) = [x.partition("=")[2] for x in overrides if x.startswith("hydra.run.dir=")]
    assert (config.trainer.num_nodes, config.trainer.devices, config.ckpt_path) == ("auto", "auto", "last")
    assert config.strategy._target_.endswith(HETStrategy.__name__)
    names = [f"servers-{x}.{SERVERS['spec']['serviceName']}" for x in range(SERVERS["spec"]["replicas"])]
    port, _ = CONTAINERS["server"]["ports"]
    assert config.strategy.servers == [f"tcp://{name}:{port['containerPort']}" for name in names]
    HETStrategy(servers=list(config.strategy.servers), key_file=config.strategy.key_file)  # takes these endpoints
    assert volume_of("worker", config.strategy.key_file) == "keys"
    shared = next(x for x in PODS["worker"]["spec"]["volumes"] if x["name"] == volume_of("worker", run_dir))
    claim = MANIFESTS["PersistentVolumeClaim", shared["persistentVolumeClaim"]["claimName"]]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_server_then_its_command_takes_its_arguments():
    assert CONTAINERS["server"]["command"] == ["lightning-recsys-server"]
    options = _parser().parse_args(CONTAINERS["server"]["args"])
    port, _ = CONTAINERS["server"]["ports"]
    assert options.bind == f"tcp://0.0.0.0:{port['containerPort']}"
    assert volume_of("server", options.keys) == "keys"
    (claim,) = SERVERS["spec"]["volumeClaimTemplates"]
    assert volume_of("server", options.folder) == claim["metadata"]["name"]
    assert MANIFESTS["Service", "servers"]["spec"]["ports"][0]["port"] == port["containerPort"]
    assert MANIFESTS["Service", "servers"]["spec"]["selector"].items() <= PODS["server"]["metadata"]["labels"].items()


def test_server_then_its_probes_and_annotations_name_the_port_at_which_it_tells_metrics():
    options = _parser().parse_args(CONTAINERS["server"]["args"])
    _, port = CONTAINERS["server"]["ports"]
    assert port == {"name": "metrics", "containerPort": options.metrics_port}
    notes = PODS["server"]["metadata"]["annotations"]
    assert notes["prometheus.io/scrape"] == "true"
    with MonitoringEndpoint() as endpoint:
        endpoint.set_ready()
        paths = [CONTAINERS["server"][x]["httpGet"]["path"] for x in ("readinessProbe", "livenessProbe")]
        for path in (*paths, notes["prometheus.io/path"]):
            with urllib.request.urlopen(endpoint.url + path, timeout=20) as answer:
                assert answer.status == 200
    assert {CONTAINERS["server"][x]["httpGet"]["port"] for x in ("readinessProbe", "livenessProbe")} == {"metrics"}
    assert notes["prometheus.io/port"] == str(port["containerPort"])


@pytest.mark.parametrize("role", PODS)
def test_keys_then_are_copied_for_their_owner_alone(role):
    (container,) = PODS[role]["spec"]["initContainers"]
    command, mode, source, target = container["command"]
    assert (command, mode) == ("install", "--mode=600")
    mounts = {PurePath(mount["mountPath"]): mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in PODS[role]["spec"]["volumes"]}
    assert volumes[mounts[PurePath(source).parent]]["secret"]["secretName"] == "lightning-recsys-keys"
    assert mounts[PurePath(target).parent] == volume_of(role, target) == "keys"


def test_network_then_lets_workers_to_each_other_and_to_the_port_of_servers():
    port, _ = CONTAINERS["server"]["ports"]
    for role, ports in (("worker", None), ("server", [{"protocol": "TCP", "port": port["containerPort"]}])):
        policy = MANIFESTS["NetworkPolicy", f"{role}s"]["spec"]
        rule, *others = policy["ingress"]
        (peer,) = rule["from"]
        assert policy["podSelector"]["matchLabels"] == PODS[role]["metadata"]["labels"]
        assert peer["podSelector"]["matchLabels"] == PODS["worker"]["metadata"]["labels"]
        assert rule.get("ports") == ports
        metrics = [{"protocol": "TCP", "port": x["containerPort"]} for x in CONTAINERS[role].get("ports", [])[1:]]
        assert [x["ports"] for x in others] == ([metrics] if role == "server" else [])


def test_shared_memory_then_fits_into_the_memory_of_the_pod():
    volume = volume_of("worker", "/dev/shm/lightning_recsys")
    (limit,) = [x["emptyDir"]["sizeLimit"] for x in PODS["worker"]["spec"]["volumes"] if x["name"] == volume]
    memory = CONTAINERS["worker"]["resources"]["limits"]["memory"]
    assert int(limit.removesuffix("Gi")) < int(memory.removesuffix("Gi"))


def volume_of(role, path):
    """The volume in which a path of the container lies."""
    return volume_of_container(CONTAINERS[role], path)


def volume_of_container(container, path):
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    (mount,) = [x for x in mounts if PurePath(path).is_relative_to(x)]
    return mounts[mount]
