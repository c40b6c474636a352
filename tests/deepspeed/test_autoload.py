"""Activation: what happens at ``import torch``, and that the engine is found in any order of imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from support import ROOT

#: Small modules that import the standard library alone, and the packages in which they lie.
STUB = [
    "dct_plugin",
    "dct_plugin.integrations",
    "dct_plugin.integrations.autoload",
    "dct_plugin.integrations.deepspeed",
    "dct_plugin.integrations.host",
    "dct_plugin.integrations.host.measured_job",
    "dct_plugin.integrations.host.patching",
]

#: A package that fails, changes and is subclassed at will, as the installed DeepSpeed cannot: for the import
#: machinery alone. What needs DeepSpeed itself uses DeepSpeed itself, here and in test_deepspeed.py.
ENGINE = """
class DeepSpeedEngine:
    def __init__(self, config=None):
        self._config = type("Config", (), {"_param_dict": config or {}})()
        self.base_ready = True

    def method(self):
        return "original"
"""
PIPELINE_ENGINE = """
from ..engine import DeepSpeedEngine

class PipelineEngine(DeepSpeedEngine):
    def __init__(self, config=None):
        super().__init__(config)
        self.ready = True
"""

#: Only notes which engines are ready, so that the stub can be looked at by itself.
NOTE = """
import sys
import dct_plugin.integrations.deepspeed.engine_hook as stub
seen = []
stub.engine_ready = lambda engine: seen.append((type(engine).__name__, getattr(engine, "ready", None)))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with an importable ``deepspeed.runtime.engine``."""
    runtime = tmp_path / "deepspeed" / "runtime"
    runtime.mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    (runtime / "__init__.py").write_text("")
    (runtime / "engine.py").write_text(ENGINE)
    (runtime / "pipe").mkdir()
    (runtime / "pipe" / "__init__.py").write_text("")
    (runtime / "pipe" / "engine.py").write_text(PIPELINE_ENGINE)
    return tmp_path


def python(*code: str, path: Path | None = None, **environment: str) -> str:
    """Run pieces of code in a new interpreter, which collects no garbage, and return what they printed."""
    variables = {**os.environ, **environment}
    if path is not None:
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(["import gc; gc.disable()", *map(dedent, code)])],
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_switched_off_nothing_is_loaded_and_switched_on_the_stub_alone() -> None:
    """What the stub imports besides, also of the standard library, is there anyway: some 2 ms in all."""
    loaded = python(
        """
        import json, sys, torch
        before = set(sys.modules)
        print([name for name in sys.modules if name.startswith("dct_plugin.")])
        from dct_plugin.integrations.autoload import autoload
        autoload()
        print(json.dumps(sorted(set(sys.modules) - before)))
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    off, on = loaded.splitlines()
    assert off == "[]"
    assert json.loads(on) == STUB


@pytest.mark.slow
def test_a_process_without_the_plugin_is_left_as_it_was(package: Path) -> None:
    """``import torch`` loads the stub and nothing more. A finder waits for each of DeepSpeed's engines, also
    when somebody asks whether it is installed.
    """
    out = python(
        """
        import importlib.util, sys
        excepthook, before = sys.excepthook, list(sys.meta_path)
        import torch
        print(sorted(name for name in sys.modules if name.startswith("dct_plugin")))
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils import cpp_extension, file_baton
        cpp_baton = getattr(cpp_extension, "FileBaton", file_baton.FileBaton)  # torch 2.15 has none there
        importlib.util.find_spec("deepspeed")
        added = [type(finder).__name__ for finder in sys.meta_path
                 if finder not in before and type(finder).__module__.startswith("dct_plugin")]
        print(added, sys.excepthook is excepthook, cpp_baton is file_baton.FileBaton)
        print(file_baton.FileBaton.wait.__module__, DistributedDataParallel.register_comm_hook.__module__)
        import deepspeed.runtime.engine
        import deepspeed.runtime.pipe.engine
        print(any(type(finder).__module__.startswith("dct_plugin") for finder in sys.meta_path))
        """,
        path=package,
    )
    assert out.splitlines() == [
        str(STUB),
        "['_Finder', '_Finder'] True True",
        "torch.utils.file_baton torch.nn.parallel.distributed",
        "False",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "automatic"),
    [
        ("import deepspeed", "1"),
        ("import deepspeed; import dct_plugin.integrations.deepspeed", "0"),
        ("import dct_plugin.integrations.deepspeed; import deepspeed.runtime.engine", "0"),
    ],
)
def test_start_orders_with_deepspeed(order: str, automatic: str) -> None:
    pytest.importorskip("deepspeed")
    out = python(
        order,
        """
        from deepspeed.runtime.engine import DeepSpeedEngine
        from deepspeed.runtime.pipe.engine import PipelineEngine
        from dct_plugin.integrations.deepspeed import engine_hook
        print(engine_hook._hooked == {DeepSpeedEngine, PipelineEngine})
        """,
        TORCH_DEVICE_BACKEND_AUTOLOAD=automatic,
        LOCAL_RANK="0",
        DS_ACCELERATOR="cpu",
    )
    assert out.strip().split("\n")[-1] == "True"


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        "import dct_plugin.integrations.deepspeed, deepspeed.runtime.engine",
        "import deepspeed.runtime.engine, dct_plugin.integrations.deepspeed",
        "autoload(); autoload(); import deepspeed.runtime.engine; autoload()",
        "from deepspeed.runtime import engine; autoload(); import deepspeed.runtime.engine",
        "autoload(); import importlib; importlib.import_module('deepspeed.runtime.engine')",
    ],
)
def test_start_orders(package: Path, order: str) -> None:
    out = python(
        "from dct_plugin.integrations.autoload import autoload",
        order,
        NOTE,
        """
        import deepspeed.runtime.pipe.engine as pipe
        module = sys.modules["deepspeed.runtime.engine"]
        assert not any("dct_plugin" in type(finder).__module__ for finder in sys.meta_path)
        class Own(pipe.PipelineEngine):
            def __init__(self):
                super().__init__()
                self.ready = "own"
        class Plain(module.DeepSpeedEngine):
            pass
        for cls in (module.DeepSpeedEngine, pipe.PipelineEngine, Own, Plain):
            assert cls().method() == "original"
        print(seen)
        """,
        path=package,
    )
    # Once per engine, when the constructor of DeepSpeed's own class is through.
    expected = [("DeepSpeedEngine", None), ("PipelineEngine", True), ("Own", True), ("Plain", None)]
    assert out.strip() == str(expected)


HOOKED = "import sys, dct_plugin.integrations.deepspeed, deepspeed.runtime.engine as engine"


@pytest.mark.slow
def test_the_module_keeps_its_own_loader(package: Path) -> None:
    out = python(
        HOOKED,
        """
        import inspect
        print(type(engine.__spec__.loader).__name__, type(engine.__loader__).__name__)
        print(inspect.signature(engine.DeepSpeedEngine), bool(inspect.getsource(engine)))
        """,
        path=package,
    )
    assert out.split("\n")[:2] == ["SourceFileLoader SourceFileLoader", "(config=None) True"]


@pytest.mark.slow
def test_a_failed_import_can_be_tried_again(package: Path) -> None:
    engine = package / "deepspeed" / "runtime" / "engine.py"
    engine.write_text("import os\nif 'BROKEN' in os.environ: raise ImportError('not now')\n" + ENGINE)
    out = python(
        "import os, dct_plugin.integrations.deepspeed",
        NOTE,
        """
        try:
            import deepspeed.runtime.engine
        except ImportError:
            del os.environ["BROKEN"]
        import deepspeed.runtime.engine as engine
        engine.DeepSpeedEngine()
        print(seen)
        """,
        path=package,
        BROKEN="1",
    )
    assert out.strip() == "[('DeepSpeedEngine', None)]"


@pytest.mark.slow
def test_a_failing_init_is_not_attached_to(package: Path) -> None:
    out = python(
        HOOKED,
        NOTE,
        """
        import deepspeed.runtime.pipe.engine as pipe
        class Failing(pipe.PipelineEngine):
            ready = property(lambda self: None)  # cannot be set
        try:
            Failing()
        except AttributeError:
            print(seen)
        """,
        path=package,
    )
    assert out.strip() == "[]"


@pytest.mark.slow
def test_an_engine_without_a_section_is_left_alone(package: Path) -> None:
    out = python(
        HOOKED,
        """
        made = engine.DeepSpeedEngine({"train_batch_size": 1})
        print(sorted(made.__dict__), "dct_plugin.integrations.deepspeed.attachment" in sys.modules)
        """,
        path=package,
    )
    assert out.strip() == "['_config', 'base_ready'] False"


@pytest.mark.slow
def test_a_section_with_an_incomplete_installation_is_an_error(package: Path) -> None:
    out = python(
        HOOKED,
        """
        sys.modules["dct_plugin.integrations.deepspeed.attachment"] = None  # as if the file were missing
        try:
            engine.DeepSpeedEngine({"dct": {"enabled": True}})
        except ImportError as error:
            print(error)
        """,
        path=package,
    )
    assert "not completely installed" in out
    assert "pip install 'dct-plugin[deepspeed]'" in out


@pytest.mark.slow
def test_never_raises_at_import(package: Path) -> None:
    """An engine module without the class: a warning, and the import goes on."""
    (package / "deepspeed" / "runtime" / "engine.py").write_text("value = 1\n")
    out = python(
        """
        import warnings, dct_plugin.integrations.deepspeed
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            import deepspeed.runtime.engine as engine
        print(engine.value, [str(w.message) for w in caught])
        """,
        path=package,
    )
    assert out.startswith("1 [")
    assert "could not hook deepspeed.runtime.engine" in out


#: A training of two steps that prints what differs from a process without the plugin: functions of hosts that
#: come from its files, its modules, keys in the store, hooks.
TRAINING = """
import atexit, functools, json, logging, pathlib, sys, threading, types, warnings
import torch, deepspeed, deepspeed.runtime.pipe.engine, deepspeed.runtime.zero.stage3
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

ours = [pathlib.Path(name).resolve().as_posix() for name in OURS]

@functools.cache
def is_ours(file):
    return any(pathlib.Path(file).resolve().as_posix().startswith(folder) for folder in ours)

def functions():
    found, classes = set(), set()
    def look(place, members):
        for name, value in list(members.items()):
            value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if isinstance(value, types.FunctionType) and is_ours(value.__code__.co_filename):
                found.add(f"{place}.{name}")
    for name, host in list(sys.modules.items()):
        if name.split(".")[0] in ("deepspeed", "torch"):
            look(name, vars(host))
            classes.update(value for value in list(vars(host).values()) if isinstance(value, type))
    for each in classes:  # many modules have the same ones
        look(f"{each.__module__}.{each.__qualname__}", vars(each))
    return sorted(found)

def state():
    return {
        "functions": functions(),
        "excepthook": sys.excepthook is sys.__excepthook__,
        "finders": [type(finder).__name__ for finder in sys.meta_path],
        "hooks": len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks)
        + len(optimizers._global_optimizer_pre_hooks) + len(optimizers._global_optimizer_post_hooks),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "at exit": atexit._ncallbacks(),
    }

def job(content):
    said.clear()
    before, model = state(), torch.nn.Linear(40, 40)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        **content,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 40)).square().mean())
        engine.step()
    during = state()
    engine.destroy()
    return {
        "before": before, "during": during, "after": state(),
        "attributes": sorted(engine.__dict__),
        "hooks": len(model._forward_pre_hooks) + len(model._forward_hooks),
        "modules": sorted(name for name in sys.modules if name.startswith("dct_plugin")),
        "keys": pathlib.Path(FOLDER, "store").read_bytes().count(b"dct"),
        "said": list(said),
    }

dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=0, world_size=1)
deepspeed.init_distributed()
said = []
warnings.showwarning = lambda message, *more: said.extend([str(message)] if "dct" in str(message) else [])
keep = logging.Handler()
keep.emit = lambda record: said.append(record.getMessage())
logging.getLogger("dct_plugin").addHandler(keep)
print("RESULT" + json.dumps([job(content) for content in CONTENTS]))
"""


def trained(folder: Path, *contents: dict[str, object], automatic: str = "1") -> list[dict[str, Any]]:
    """Results of engines, one after the other in one process."""
    folder.mkdir()
    folders = [str(ROOT / "dct_plugin")]
    out = python(
        f"OURS, FOLDER, CONTENTS = {folders!r}, {str(folder)!r}, {contents!r}",
        TRAINING,
        TORCH_DEVICE_BACKEND_AUTOLOAD=automatic,
        LOCAL_RANK="0",
        DS_ACCELERATOR="cpu",
    )
    results: list[dict[str, Any]] = json.loads(out.partition("RESULT")[2].splitlines()[0])
    return results


#: Keys of other people's tools.
OTHERS = ["dict", "dit", "det", "dst", "dpt", "dt", "ct", "act"]
CONSTRUCTORS = [
    "deepspeed.runtime.engine.DeepSpeedEngine.__init__",
    "deepspeed.runtime.pipe.engine.PipelineEngine.__init__",
]


@pytest.mark.slow
def test_what_a_job_is_left_with(tmp_path: Path) -> None:
    """Without a section: what a process without the plugin has, and two constructors. With one: the same,
    when the engine is destroyed.
    """
    pytest.importorskip("deepspeed")
    others = {name: {"size": 3, "enabled": True} for name in OTHERS}
    (plain,) = trained(tmp_path / "plain", others, automatic="0")
    section: Any = {"dct": {"data_parallel": {"sparsity": 0.5, "min_numel": 1}}}
    without, section = trained(tmp_path / "installed", others, section)
    assert plain["modules"] == []
    assert {*without.pop("modules"), *plain.pop("modules")} <= {
        *STUB,
        "dct_plugin.console",
        "dct_plugin.errors",
        "dct_plugin.integrations.deepspeed",
        "dct_plugin.integrations.deepspeed.engine_hook",
        "dct_plugin.integrations.deepspeed.section",
        "dct_plugin.integrations.host",
        "dct_plugin.integrations.host.measured_job",
        "dct_plugin.integrations.host.patching",
        "dct_plugin.integrations.host.versions",
    }
    for when in ("before", "during", "after"):
        assert plain[when]["functions"] == []
        plain[when]["functions"] = CONSTRUCTORS
    assert without == plain
    assert (without["keys"], without["said"]) == (0, [])

    assert not section["during"]["excepthook"]
    assert section["during"]["functions"] != CONSTRUCTORS
    # An interpreter counts what was taken off, too, and modules of torch that were loaded since.
    assert {**section["after"], "at exit": plain["after"]["at exit"]} == plain["after"]
    assert section["hooks"] == plain["hooks"]
    assert set(section["attributes"]) - {"dct"} == set(plain["attributes"])
