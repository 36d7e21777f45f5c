"""Opens a backend: selection, requirements, environment, plugin import, registration with pluggy.

`open_backend` is what the engine's workers, `deepinfer ops` and the conformance kit start with; its result goes to
`build.build_ops`. Nothing here looks at ops. Opening twice in a process, or again in a spawned one, gives an equal
result: no state is kept outside the returned object.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

from deepinfer.environ import Settings
from deepinfer.errors import BackendError, DeepInferError
from deepinfer.hooks import discover, specs
from deepinfer.hooks.api import PROJECT
from deepinfer.hooks.discover import OP_PACKS, Installed
from deepinfer.hooks.record import Backend, OpPack
from deepinfer.hooks.requirements import apply_environment, check_requirements
from deepinfer.hooks.table import Provider

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("deepinfer.hooks")

_HOOK_PREFIX = "deepinfer_"


@dataclass(frozen=True)
class LoadedBackend:
    """A backend and the op packs of this run, registered and ready to create ops.

    record       the backend's record; `record.device_type` is the device its tensors live on
    entry        where it is installed
    reason       why it was chosen, in words
    providers    op packs in the order named, then the backend: most preferred first
    environment  variables core set for it
    manager      the pluggy manager that holds all plugins, by provider name
    """

    record: Backend
    entry: Installed = field(repr=False)
    reason: str
    providers: tuple[Provider, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    manager: pluggy.PluginManager = field(repr=False, kw_only=True)

    @property
    def name(self) -> str:
        """What `DEEPINFER_ACCELERATOR` calls it."""
        return self.record.name

    @property
    def device_type(self) -> str:
        """`torch.device` type of its tensors."""
        return self.record.device_type

    def device(self, index: int = 0) -> torch.device:
        """The `torch.device` of a worker, `index` being its number on this host; a CPU has no numbers.

        Lets the backend register its device type, or name the device that stands for it, first. Raises `BackendError`
        if torch still does not know the type.
        """
        import torch

        named = [
            implementation.function()
            for implementation in self.manager.hook.deepinfer_register_device.get_hookimpls()
            if implementation.plugin_name == self.name
        ]
        if named and named[0] is not None:
            return self._checked_device(named[0])
        try:
            return torch.device("cpu") if self.device_type == "cpu" else torch.device(self.device_type, index)
        except RuntimeError as error:
            raise BackendError(
                f"{self.entry}: torch {torch.__version__} knows no device type {self.device_type!r}.\n"
                f"  The backend has to register it in the hook deepinfer_register_device"
            ) from error

    def _checked_device(self, named: object) -> torch.device:
        import torch

        if not isinstance(named, torch.device):
            raise BackendError(
                f"{self.entry}: deepinfer_register_device returned {named!r}, expected a torch.device or None"
            )
        return named


def open_backend(
    name: str | None = None, op_packs: Iterable[str] | None = None, settings: Settings | None = None
) -> LoadedBackend:
    """Select, check and load the backend of this run, and the op packs named.

    name      backend; None takes `settings.accelerator`, and without that asks every installed backend's probe
    op_packs  most preferred first; None takes `settings.op_packs`
    settings  None loads them from the environment

    Raises `BackendError` with the whole story when anything is missing, broken or written for another API.
    """
    settings = Settings.load() if settings is None else settings
    wanted = f"accelerator={name}" if name and name != settings.accelerator else ""
    entry, record, reason = discover.select(name or settings.accelerator, wanted)
    check_requirements(entry, record.requires, discover.call)
    environment: dict[str, str] = {}
    if record.environment is not None:
        environment = apply_environment(entry, discover.call(entry, record.environment, "environment"))

    manager = new_manager()
    names = settings.op_packs if op_packs is None else tuple(op_packs)
    packs = [_load_pack(manager, pack, taken=record.name) for pack in names]
    provider = load_plugin(manager, entry, record.plugin)
    logger.info("backend %s: %s", provider, reason)
    return LoadedBackend(record, entry, reason, (*packs, provider), environment, manager=manager)


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows the hooks of `specs.py`."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    return manager


def _load_pack(manager: pluggy.PluginManager, name: str, taken: str) -> Provider:
    entry = discover.find(OP_PACKS, name, f"DEEPINFER_OP_PACKS={name}")
    if name == taken or manager.has_plugin(name):
        raise BackendError(
            f"{entry}: the name {name} is in use twice in this run; name each op pack once, and none like the backend"
        )
    record = discover.load_record(entry, OpPack)
    check_requirements(entry, record.requires, discover.call)
    return load_plugin(manager, entry, record.plugin)


def load_plugin(manager: pluggy.PluginManager, entry: Installed, target: str) -> Provider:
    """Import, instantiate and register the plugin class `target`, and check that every hook it means to implement
    is one pluggy will call."""
    plugin_class = discover.resolve(entry, target, f"{entry}: its plugin cannot be imported")
    if not inspect.isclass(plugin_class):
        raise BackendError(f"{entry}: plugin {target} is of type {type(plugin_class).__name__}, expected a class")
    try:
        plugin = plugin_class()
    except DeepInferError:
        raise
    except Exception as error:
        raise BackendError(f"{entry}: {target}() failed: {type(error).__name__}: {error}") from error
    try:
        manager.register(plugin, name=entry.name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise BackendError(f"{entry}: {_validation_text(error, plugin)}") from error
    problems = hook_problems(manager, plugin)
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise BackendError(f"{entry}: {target} has hooks that would not work:\n{lines}")
    provider = Provider(entry.name, entry.distribution, entry.version)
    event = {"plugin_name": provider.name, "distribution": provider.distribution, "version": provider.version}
    manager.hook.deepinfer_plugin_registered.call_historic(kwargs=event)
    return provider


def _validation_text(error: pluggy.PluginValidationError, plugin: object) -> str:
    """pluggy's message, with the nearest hook name where a hook is unknown."""
    known = specs.hook_names()
    unknown = [n for n in dir(plugin) if n.startswith(_HOOK_PREFIX) and n not in known]
    if not unknown:
        return " ".join(str(error).split())
    close = difflib.get_close_matches(unknown[0], known, n=1)
    hint = f" Did you mean {close[0]}?" if close else f" Hooks: {', '.join(known)}"
    return f"{type(plugin).__name__}.{unknown[0]} implements no hook of this core.{hint}"


def hook_problems(manager: pluggy.PluginManager, plugin: object) -> list[str]:
    """Attributes named like hooks that pluggy does not call as written: undeclared, unseen, or with arguments it drops.

    pluggy looks at functions that carry `@hookimpl` only; anything else (a `functools.partial`, a callable object, a
    forgotten marker) it skips without a word.
    """
    called = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    problems = []
    for name in (n for n in dir(plugin) if n.startswith(_HOOK_PREFIX)):
        value = getattr(plugin, name)
        if name not in called:
            what = "has no @hookimpl" if inspect.isroutine(value) else f"is a {type(value).__name__}"
            problems.append(f"{name} {what}, so it is not seen; write a plain method marked @hookimpl")
        else:
            problems += _signature_problems(manager, plugin, name)
    return problems


def _signature_problems(manager: pluggy.PluginManager, plugin: object, name: str) -> list[str]:
    problems = []
    parameters = inspect.signature(getattr(plugin, name)).parameters.values()
    dropped = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    dropped += [p.name for p in parameters if p.default is not p.empty and p.kind is not p.KEYWORD_ONLY]
    if dropped:
        problems.append(f"{name}: parameter {', '.join(dropped)} is never passed; no keyword-only ones, no defaults")
    implementation = next(i for i in getattr(manager.hook, name).get_hookimpls() if i.plugin is plugin)
    if implementation.hookwrapper or implementation.wrapper:
        problems.append(f"{name} is a wrapper; a factory belongs to one plugin and cannot be wrapped")
    return problems


def factories(manager: pluggy.PluginManager, hook: str) -> dict[str, Any]:
    """{provider name: factory taking the context} of one factory hook; provenance is kept by the name."""
    found = {}
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        wants_context = "context" in implementation.argnames
        function: Any = implementation.function
        found[implementation.plugin_name] = function if wants_context else (lambda _context, f=function: f())
    return found
