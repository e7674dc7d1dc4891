"""What examples/deploy holds is valid for Kubernetes, KServe, llm-d and systemd, and starts as written."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from page_blocks import check_printed, on_page, run_shell
from repository import ROOT, TESTS

from kvkit.adapters.vllm.settings import NAME, read_settings
from kvkit.config import load_config
from kvkit.router.settings import read_router_config
from kvkit.tiers.shm.file import pool_path

pytest.importorskip("vllm")

from kvkit.adapters.engine import tier_settings
from kvkit.adapters.vllm.offloading import TIER_MODULE
from kvkit.adapters.vllm_tier.settings import WHERE, TierSettings

DEPLOY = ROOT / "examples/deploy"
KUSTOMIZE = DEPLOY / "kustomize"
SCHEMAS = TESTS / "fixtures/schemas"
KUBERNETES = "1.37"
CORE = {"Deployment", "Service", "StatefulSet", "ConfigMap", "Pod"}
Object = dict[str, Any]


def documents(path: Path) -> list[Object]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def objects() -> list[Object]:
    """All objects of the kustomization, as it lists them."""
    listed = documents(KUSTOMIZE / "kustomization.yaml")[0]["resources"]
    return [each for name in listed for each in documents(KUSTOMIZE / name)]


def pod_templates() -> dict[str, Object]:
    found = (each for each in objects() if "template" in each["spec"])
    return {each["metadata"]["name"]: each["spec"]["template"] for each in found}


def strict(schema: Any) -> Any:
    """A schema of Kubernetes' kind that refuses fields that it does not name, as an API server warns of."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    if "properties" in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


def check(given: Object, schema: str) -> None:
    wanted = strict(json.loads((SCHEMAS / f"{schema}.json").read_text()))
    if "apiVersion" in given:  # those that every object has
        wanted["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {"type": "object"}}
    jsonschema.validate(given, wanted)


def check_pod(spec: Object) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
    kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def test_objects_are_what_their_schemas_want() -> None:
    kinds = set()
    for each in [*objects(), *documents(DEPLOY / "kserve.yaml")]:
        kinds.add(each["kind"])
        if each["kind"] in CORE:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)
        else:
            check(each, each["kind"].lower())
    assert {"Deployment", "StatefulSet", "Service", "PodMonitor", "LLMInferenceService"} <= kinds
    (service,) = (each for each in documents(DEPLOY / "kserve.yaml") if each["kind"] == "LLMInferenceService")
    check_pod(service["spec"]["template"])


def test_values_are_what_the_chart_of_llm_d_wants() -> None:
    (values,) = documents(DEPLOY / "llm-d-values.yaml")
    check(values, "llm-d-modelservice")
    for each in values["extraObjects"]:
        kubernetes_validate.validate(each, KUBERNETES, strict=True)


@pytest.mark.parametrize("change", ["port", "unknown", "kind"])
def test_what_is_wrong_is_found(change: str) -> None:
    if change == "port":
        (monitor, *_) = documents(KUSTOMIZE / "podmonitor.yaml")
        monitor["spec"]["podMetricsEndpoints"][0]["port"] = 8000
        with pytest.raises(jsonschema.ValidationError):
            check(monitor, "podmonitor")
        return
    (template,) = (t for name, t in pod_templates().items() if name == "kvkit-engine")
    container = template["spec"]["containers"][0]
    container |= {"imagePolicy": "x"} if change == "unknown" else {"args": "--port"}
    with pytest.raises(kubernetes_validate.ValidationError):
        check_pod(template["spec"])


def test_pods_write_nowhere_but_to_volumes_and_run_as_nobody() -> None:
    for template in pod_templates().values():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"] for volume in spec["volumes"]} | {"cache"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert mounts.keys() <= volumes
            assert mounts["tmp"] == "/tmp"
            names = {port["name"] for port in container["ports"]}
            for probe in ("readinessProbe", "livenessProbe"):
                assert container[probe]["httpGet"]["port"] in names


def test_what_is_referred_to_is_there() -> None:
    """Config maps, labels, ports of monitors, and the images that the Containerfile has targets for."""
    kustomization = documents(KUSTOMIZE / "kustomization.yaml")[0]
    maps = {each["name"] for each in kustomization["configMapGenerator"]}
    images = {each["name"] for each in kustomization["images"]}
    targets = re.findall(r"^FROM \S+ AS (\w+)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    assert images == {f"kvkit-{target}" for target in targets if target != "build"}
    ports: dict[str, set[str]] = {}
    for name, template in pod_templates().items():
        labels = template["metadata"]["labels"]
        ports[labels["app.kubernetes.io/name"]] = {
            port["name"] for container in template["spec"]["containers"] for port in container["ports"]
        }
        assert {v["configMap"]["name"] for v in template["spec"]["volumes"] if "configMap" in v} <= maps, name
        assert {c["image"] for c in template["spec"]["containers"]} <= images
    for each in objects():
        selector = each["spec"].get("selector", {})
        labels = selector.get("matchLabels", selector)
        assert labels["app.kubernetes.io/name"] in ports
        for endpoint in each["spec"].get("podMetricsEndpoints", ()):
            assert endpoint["port"] in ports[labels["app.kubernetes.io/name"]]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_builds_the_kustomization() -> None:
    shown = run_shell(on_page("docs/serve/deploy.md", "kubectl kustomize"), ROOT)
    check_printed("docs/serve/deploy.md", "kubectl kustomize", shown.stdout)
    built = subprocess.run(["kubectl", "kustomize", str(KUSTOMIZE)], capture_output=True, check=True)
    found = [each for each in yaml.safe_load_all(built.stdout) if each]
    assert len(found) == len(objects()) + 2
    for each in found:
        if each["kind"] in CORE:
            kubernetes_validate.validate(each, KUBERNETES, strict=True)


def configured(extra: Object, toml: str, tmp_path: Path) -> Object:
    """An engine's settings with the file that its pod mounts."""
    assert extra["kvkit_config"] == "/etc/kvkit/kvkit.toml"
    text = toml.replace("/var/cache/kvkit", f"{tmp_path}/cache").replace("/etc/kvkit-token", str(tmp_path))
    (tmp_path / "kvkit.toml").write_text(text)
    return extra | {"kvkit_config": str(tmp_path / "kvkit.toml")}


def check_connector(given: str, toml: str, tmp_path: Path) -> None:
    transfer = json.loads(given)
    extra = transfer["kv_connector_extra_config"]
    if transfer["kv_connector"] == NAME:
        settings, config = read_settings(configured(extra, toml, tmp_path))
        assert transfer["kv_load_failure_policy"] == "recompute"
        assert settings.load == "async"
        assert config.tiers
    else:
        (tier,) = extra["secondary_tiers"]
        assert (tier.pop("type"), tier.pop("module_path")) == ("KVKitTier", TIER_MODULE)
        assert tier_settings.read(TierSettings, configured(tier, toml, tmp_path), WHERE)[1].tiers


def test_engines_are_given_settings_that_they_take(tmp_path: Path) -> None:
    (engine,) = (t for name, t in pod_templates().items() if name == "kvkit-engine")
    arguments = engine["spec"]["containers"][0]["args"]
    toml = (KUSTOMIZE / "kvkit.toml").read_text()
    check_connector(arguments[arguments.index("--kv-transfer-config") + 1], toml, tmp_path)
    (values,) = documents(DEPLOY / "llm-d-values.yaml")
    arguments = values["decode"]["containers"][0]["args"]
    toml = values["extraObjects"][0]["data"]["kvkit.toml"]
    check_connector(arguments[arguments.index("--kv-transfer-config") + 1], toml, tmp_path)


def test_kserves_shell_passes_the_setting_on_as_it_is(tmp_path: Path) -> None:
    """Its template evaluates `exec vllm serve … ${VLLM_ADDITIONAL_ARGS} $@`."""
    settings, service = documents(DEPLOY / "kserve.yaml")
    (variable,) = service["spec"]["template"]["containers"][0]["env"]
    script = 'eval "exec \\"$PYTHON\\" -c \'import json, sys; print(json.dumps(sys.argv[1:]))\' ${%s} $@"'
    found = subprocess.run(
        ["bash", "-c", script % variable["name"], "--"],
        env={"PYTHON": sys.executable, variable["name"]: variable["value"]},
        capture_output=True,
        text=True,
        check=True,
    )
    option, given = json.loads(found.stdout)
    assert option == "--kv-transfer-config"
    check_connector(given, settings["data"]["kvkit.toml"], tmp_path)


def test_the_router_is_given_settings_that_it_takes(tmp_path: Path) -> None:
    text = (KUSTOMIZE / "router.toml").read_text().replace("/etc/kvkit-token", str(tmp_path))
    (tmp_path / "router.toml").write_text(text)
    config = read_router_config(tmp_path / "router.toml")
    (service,) = (s for s in objects() if s["kind"] == "Service" and s["metadata"]["name"] == "kvkit-engine")
    ports = {port["port"] for port in service["spec"]["ports"]}
    (engines,) = (each for each in objects() if each["kind"] == "StatefulSet")
    assert len(config.decode) == engines["spec"]["replicas"]
    for number, engine in enumerate(config.decode.values()):
        for url in (engine.url, engine.cache or ""):
            host, port = url.removeprefix("http://").split(":")
            assert host == f"kvkit-engine-{number}.{engines['spec']['serviceName']}"
            assert int(port) in ports
    kvkit = load_config(**tomllib.loads((KUSTOMIZE / "kvkit.toml").read_text()))
    assert kvkit.server.port in ports


def units() -> list[Path]:
    return sorted((DEPLOY / "systemd").glob("*.service"))


def commands(unit: Path, setting: str) -> list[str]:
    """What a unit runs; systemd writes $ as $$."""
    return [c.replace("$$", "$") for c in re.findall(rf"^{setting}=(.*)$", unit.read_text(), re.MULTILINE)]


def test_the_routers_unit_runs_a_command_that_is_there() -> None:
    (router,) = (unit for unit in units() if "router" in unit.name)
    (program, *command) = commands(router, "ExecStart")[0].split()
    assert program == "/opt/kvkit/bin/kvkit"
    kvkit = [sys.executable, "-c", "from kvkit.cli import main; main()"]
    found = subprocess.run([*kvkit, command[0], "--help"], capture_output=True, text=True, check=True)
    assert command[1] in found.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Where its programs are: systemd-analyze looks for them."""
    for unit in units():
        text = re.sub(r"/opt/kvkit/bin/kvkit", shutil.which("true") or "", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    (tmp_path / "vllm.service").write_text("[Service]\nExecStart=/bin/true\n")
    verify = ["systemd-analyze", "verify", *(str(tmp_path / unit.name) for unit in units())]
    found = subprocess.run(verify, capture_output=True, text=True, env=os.environ)
    ours = [line for line in found.stderr.splitlines() if str(tmp_path) in line or "kvkit" in line]
    assert ours == [], found.stderr


def test_the_pools_unit_removes_pools_of_its_user_alone(tmp_path: Path) -> None:
    (unit,) = (unit for unit in units() if "pool" in unit.name)
    (stop,) = commands(unit, "ExecStop")
    ours, *others = (
        tmp_path / Path(pool_path("shm://llama")).name,
        tmp_path / "kvkit-4711-a",
        tmp_path / "b",
    )
    for path in (ours, *others):
        path.touch()
    assert Path(pool_path("shm://llama")).parent == Path("/dev/shm")
    subprocess.run(["/bin/sh", "-c", f"exec {stop.replace('/dev/shm', str(tmp_path))}"], check=True)
    assert [path.exists() for path in (ours, *others)] == [False, True, True]


def steps(target: str) -> Iterator[tuple[str, str]]:
    """Instructions of a target of the Containerfile and of the one that it copies from."""
    text = re.sub(r"\\\n\s*", "", (DEPLOY / "Containerfile").read_text())
    stage = ""
    for line in text.splitlines():
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            stage = rest.rpartition(" ")[2]
        elif stage in ("build", target) and instruction.isupper():
            yield instruction, rest


@pytest.mark.nightly
def test_the_routers_image_works_with_a_read_only_root(tmp_path: Path) -> None:
    """By its steps: built from a copy of the code, run as its user in a namespace whose root is read-only."""
    program = TESTS / "support/read_only_router.py"
    found = list(steps("router"))
    user = next(rest for instruction, rest in found if instruction == "USER")
    runs = [rest for instruction, rest in found if instruction == "RUN"]
    entry = json.loads(next(rest for instruction, rest in found if instruction == "ENTRYPOINT"))
    assert [len(runs), entry] == [2, ["kvkit", "router"]]
    asked = {"runs": runs, "entry": entry, "user": user, "root": str(ROOT), "folder": str(tmp_path)}
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, str(program), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"/livez": 200, "/readyz": 503, "written": False}
