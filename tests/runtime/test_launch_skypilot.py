"""The rendered SkyPilot task against the schema in SkyPilot's own package, read without its cloud libraries."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml

from shardwright.runtime.launch import skypilot
from shardwright.runtime.launch.job import Job
from shardwright.runtime.launch.options import LaunchOptions


class Stub(ModuleType):
    """A module of SkyPilot that the schemas only take constants from."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "AutostopWaitFor":
            return SimpleNamespace(supported_modes=list)
        return ("kubernetes",) if name == "ALL_CLOUDS" else name


@pytest.fixture
def schemas(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``sky.utils.schemas``; importing ``sky`` itself would need every cloud's client."""
    found = importlib.util.find_spec("sky")
    if found is None or not found.submodule_search_locations:
        pytest.skip("skypilot is not installed")
    root = Path(next(iter(found.submodule_search_locations)))
    for name in ("sky", "sky.skylet", "sky.utils", "sky.skylet.autostop_lib", "sky.skylet.constants"):
        stub = Stub(name)
        monkeypatch.setitem(sys.modules, name, stub)
        if "." in name:
            setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], stub)
    module = sys.modules["sky"]
    for short in ("kubernetes_enums", "schemas"):
        spec = importlib.util.spec_from_file_location(f"sky.utils.{short}", root / "utils" / f"{short}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        setattr(sys.modules["sky.utils"], short, module)
        spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_task_config_schema", dict)
    monkeypatch.setattr(module, "_get_infra_pattern", lambda: ".*")
    return module


def broken(task: dict[str, Any], schemas: Any) -> list[str]:
    """Keys that SkyPilot does not know, and values that it refuses."""
    found = []
    tables = (("", task, schemas.get_task_schema()), ("resources.", task["resources"], schemas.get_resources_schema()))
    for prefix, values, schema in tables:
        for key, value in values.items():
            if key not in schema["properties"]:
                found.append(f"{prefix}{key}: unknown")
            elif key != "resources":
                checker = jsonschema.Draft202012Validator(schema["properties"][key])
                found += [f"{prefix}{key}: {error.message}" for error in checker.iter_errors(value)]
    return found


def test_the_task_follows_the_published_schema(tiny: Any, make_job: Any, strategy: Any, schemas: Any) -> None:
    made = make_job(tiny, strategy(ep=4))
    named = {"device_type": "cuda", "device_name": "NVIDIA H200", "world_size": 4, "devices_per_node": 2}
    cluster = made.plan.decision.cluster.model_copy(update=named)
    made = make_job(tiny, strategy(ep=4), cluster=cluster)
    job = Job.of(made.plan_path, tiny.checkpoint, tiny.data, made.approvals, made.run_dir)
    task = yaml.safe_load(skypilot.render(job, LaunchOptions(engine="skypilot", image="registry/image:1")))
    assert broken(task, schemas) == []
    wrong = {**task, "nodes": 2, "num_nodes": "two", "resources": {**task["resources"], "accelerator": "H200"}}
    assert [line.partition(":")[0] for line in broken(wrong, schemas)] == [
        "num_nodes",
        "nodes",
        "resources.accelerator",
    ]
