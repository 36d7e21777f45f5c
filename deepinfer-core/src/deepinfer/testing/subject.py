"""The backend under test: opened, and bound for one model. Every level of the kit starts from a `Subject`.

`make_subject` opens an installed backend; `load_plugin_object` makes one of a plugin object in this process, which is
how a backend's own tests try an implementation before it is installed. The reference twin is core's own bodies alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from deepinfer.environ import Settings
from deepinfer.hooks import (
    PLUGIN_API,
    Backend,
    LoadedBackend,
    ModelTraits,
    Numerics,
    OpContext,
    OpGroup,
    OpTable,
    Provider,
    hookimpl,
    open_backend,
)  # fmt: skip
from deepinfer.hooks.bind import bind
from deepinfer.hooks.build import contributions
from deepinfer.hooks.discover import Installed
from deepinfer.hooks.load import hook_problems, new_manager
from deepinfer.hooks.table import REFERENCE
from deepinfer.hooks.trace import Wrapper
from deepinfer.models.deepseek_v41.config import ModelConfig

BLOCK_SIZE = 128
"""tokens of a paged cache block"""

BACKTRACKING = 6
"""spare rows of a window ring"""

MAX_POSITIONS = 4096
"""exclusive bound of positions that the kit's samples use"""

EXACT = Numerics()


@dataclass(frozen=True)
class Subject:
    """A backend with its ops bound.

    name       what `DEEPINFER_ACCELERATOR` calls it
    loaded     the opened backend;  context, ops: what it was bound with, and the table
    config     model whose sizes it was bound for
    overrides  "PATTERN=PROVIDER" texts it was bound with
    seed       of everything random that the kit feeds it
    """

    name: str
    loaded: LoadedBackend
    context: OpContext
    ops: OpTable
    config: ModelConfig
    overrides: tuple[str, ...] = ()
    seed: int = 0

    @property
    def traits(self) -> ModelTraits:
        """Sizes its ops were bound for."""
        return self.context.traits

    @property
    def providers(self) -> tuple[str, ...]:
        """Names of the op packs and the backend, most preferred first."""
        return tuple(provider.name for provider in self.loaded.providers)

    @property
    def native(self) -> tuple[str, ...]:
        """Ops that an implementation other than core's own body serves, in the order of the contracts."""
        return tuple(binding.spec.name for binding in self.ops.bindings if binding.kind == "native")

    def rebound(
        self,
        overrides: Iterable[str] | None = None,
        numerics: Numerics | None = None,
        wrappers: Sequence[Wrapper] = (),
        batch_invariant: bool | None = None,
    ) -> Subject:
        """The same backend bound again; what is None stays as it is."""
        settings = self.context.settings
        if batch_invariant is not None:
            settings = settings.override(batch_invariant=batch_invariant)
        texts = self.overrides if overrides is None else tuple(overrides)
        context = replace(self.context, numerics=numerics or self.context.numerics, settings=settings)
        return replace(self, context=context, ops=_bound(self.loaded, context, texts, wrappers), overrides=texts)


def make_subject(
    name: str | LoadedBackend,
    config: str | ModelConfig = "micro",
    numerics: Numerics = EXACT,
    overrides: Iterable[str] = (),
    wrappers: Sequence[Wrapper] = (),
    settings: Settings | None = None,
    seed: int = 0,
) -> Subject:
    """Open a backend, or take an opened one, and bind its ops for a model.

    config    built-in name ("micro", "tiny", "full") or a configuration
    settings  None: `Settings.load()`
    Raises what opening and binding raise: `BackendError`, `OpBindingError`.
    """
    settings = Settings.load() if settings is None else settings
    loaded = open_backend(name, settings=settings) if isinstance(name, str) else name
    model = ModelConfig.builtin(config) if isinstance(config, str) else config
    context = OpContext(loaded.device(), numerics, model_traits(model), settings)
    texts = tuple(overrides)
    return Subject(loaded.name, loaded, context, _bound(loaded, context, texts, wrappers), model, texts, seed)


def model_traits(config: ModelConfig) -> ModelTraits:
    """Sizes of a model as the kit binds ops for it."""
    return config.traits(BLOCK_SIZE, BACKTRACKING, min(MAX_POSITIONS, config.text.max_position_embeddings))


def _bound(
    loaded: LoadedBackend, context: OpContext, overrides: tuple[str, ...], wrappers: Sequence[Wrapper]
) -> OpTable:
    """The table as `build_ops` makes it, without its log lines: the kit binds many times, and reports by itself."""
    settings = context.settings
    ops = bind(
        contributions(loaded),
        context,
        (*settings.ops, *overrides),
        strict=settings.strict_ops,
        batch_invariant=settings.batch_invariant,
        wrappers=wrappers,
    )
    ops.runtime.select(0)
    ops.runtime.warm_up()
    return ops


def make_reference(subject: Subject, order_free: bool | None = None) -> OpTable:
    """Core's own bodies for the subject's model and numerics, on the CPU.

    order_free  True sums in float64, the yardstick of the tolerance rule; None: as the subject
    """
    context = reference_context(subject, order_free)
    return bind((), context)


def reference_context(subject: Subject, order_free: bool | None = None) -> OpContext:
    """Context of the reference twin."""
    numerics = subject.context.numerics
    if order_free is not None:
        numerics = replace(numerics, order_free=order_free)
    return replace(
        subject.context, device=torch.device("cpu"), numerics=numerics, settings=None, runtime=None, communicator=None
    )


def load_plugin_object(plugin: object, name: str = "local", device_type: str = "cpu") -> LoadedBackend:
    """A plugin object of this process as an opened backend; nothing has to be installed.

    Raises ValueError where the object has hooks that pluggy would not call.
    """
    manager = new_manager()
    manager.register(plugin, name=name)
    manager.check_pending()
    problems = hook_problems(manager, plugin)
    if problems:
        raise ValueError(f"{type(plugin).__name__} has hooks that would not work: {'; '.join(problems)}")
    target = f"{type(plugin).__module__}:{type(plugin).__name__}"
    record = Backend(name, PLUGIN_API, device_type, target)
    entry = Installed("backend", name, target, IN_PROCESS, "0", "in process", ())
    return LoadedBackend(record, entry, "given as an object", (Provider(name, IN_PROCESS, "0"),), manager=manager)


IN_PROCESS = "in-process"
"""Stands for the distribution of a backend that was given as an object."""


def load_groups(*classes: type[OpGroup], name: str = "local") -> LoadedBackend:
    """An opened backend whose plugin creates an object of each of these op group classes."""

    def factory(group_class: type[OpGroup]) -> object:
        def create(self: object, context: OpContext) -> object:
            return group_class(context)

        create.__name__ = group_class.factory
        return hookimpl(create)

    members = {klass.factory: factory(klass) for klass in classes}
    return load_plugin_object(type("LocalPlugin", (), members)(), name)


def provider_of(subject: Subject, op: str) -> str:
    """Name of the provider that serves an op; `reference` for core's own body."""
    binding = subject.ops.binding(op)
    return binding.provider.name if binding.kind == "native" else REFERENCE
