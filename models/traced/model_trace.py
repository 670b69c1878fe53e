"""Traces one run of a transformers model, without weights, as a graph of tensor operations.

The run has one sequence of T tokens, where T is a symbol. Each module that this project replaces is
one node of the graph. Each attention call is one node too, with its arguments. The sliding window
of a call is found by evaluating the mask function of the model. The mask must be that of causal
attention, with or without a window or chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ostinato.models.config.hf_source import HFModelSource
from ostinato.models.traced.graph_values import traced_attention, traced_module
from ostinato.models.traced.hf_model import ATTENTION, hf_model
from ostinato.models.traced.leaf_modules import (
    EmbeddingLeaf,
    ExpertsLeaf,
    Leaf,
    LinearLeaf,
    find_leaves,
)

__all__ = ("AttentionCall", "ModelTrace", "trace_model")

_NUM_TOKENS = 23  # tokens of the traced run; unlikely to be a size of the model
_MATRIX_DIMS = 2
# Number of rows of a mask that are evaluated; some are before and some after the row of number
# `abs(window)`.
_MASK_SPAN = 64

_CASTS = frozenset((Tensor.to, Tensor.type, Tensor.float))

# Keyword arguments of attention calls that do not change its result.
_WITHOUT_EFFECT = frozenset(
    ("cache_position", "dropout", "position_embeddings", "position_ids", "use_cache")
)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call of the traced run."""

    module: str  # the name of the attention module
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int  # of values
    scale: float
    sliding_window: int  # as `paged_attention` takes it
    soft_cap: float
    sinks: str = ""  # the name of the parameter; empty = there is none


@dataclass(frozen=True, slots=True, eq=False)
class ModelTrace:
    """The traced run."""

    model: Any  # the transformers model, without weights
    graph: GraphModule  # inputs: the tensors; then token ids, positions and padding, [1, T]
    tensors: dict[str, str]  # name of an input -> name of the parameter or buffer
    leaves: dict[str, Leaf]
    calls: tuple[AttentionCall, ...]  # in order
    layers: tuple[str, ...]  # names of the modules with one attention call each, in order
    # Name of a node -> its section: 0 = before the layers, 2 i + 1 = in layer i, 2 i + 2 = after
    # it.
    sections: dict[str, int]


@dataclass(slots=True, eq=False)
class _Run:
    """What the tracing functions store while the model runs."""

    model: Any
    names: dict[int, str]  # id of a module -> its name
    head: str  # name of the output head
    masks: dict[int, int] = field(default_factory=dict)  # id of a mask -> its window
    # objects that are kept alive, so that ids stay unique
    kept: list[Any] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)
    leaves: dict[str, Leaf] = field(default_factory=dict)  # linear layers and embeddings


_current: ContextVar[_Run] = ContextVar("trace")  # the run that is being traced


@lru_cache(maxsize=4)
def trace_model(source: HFModelSource, dtype: torch.dtype) -> ModelTrace:
    """Run a model once on tensors without data, and trace it.

    Args:
        source: the model's code and sizes.
        dtype: the dtype of weights and activations.

    Raises:
        ValueError: the model does something that this engine cannot repeat exactly; the text says
            what.
    """
    _register()
    model = hf_model(source, dtype)
    config = model.config.get_text_config()
    leaves = find_leaves(model, getattr(config, "hidden_act", None), dtype)
    layers = _layer_names(model, config.num_hidden_layers)
    names = {id(module): name for name, module in model.named_modules()}
    run = _Run(model, names, names.get(id(model.get_output_embeddings()), ""))
    token = _current.set(run)
    try:
        with _leaves_in_place(model, leaves), torch.no_grad():
            graph, tensors, sections = _trace(run, layers)
    except _Unfit as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # a model's code can raise any exception for tensors without data
        text = str(error).strip().splitlines()
        raise ValueError(
            f"{type(model).__name__} cannot be traced: {type(error).__name__}: "
            f"{text[0] if text else ''}"
        ) from error
    finally:
        _current.reset(token)
    _check_calls(model, layers, run.calls)
    inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    tensors_of = dict(zip(inputs, tensors, strict=False))
    found = leaves | run.leaves
    return ModelTrace(model, graph, tensors_of, found, tuple(run.calls), layers, sections)


class _Unfit(Exception):
    """The model does something that the engine cannot repeat."""


def _register() -> None:
    """Register the tracing functions with transformers. Repeated calls change nothing."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _make_mask)


def _layer_names(model: nn.Module, num_layers: int) -> tuple[str, ...]:
    """The names of the decoder's layers, which are the only list of `num_layers` modules."""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == num_layers
        and not any(part.isdigit() for part in name.split("."))
    ]
    if len(lists) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(lists)} lists of {num_layers} modules, not one"
        )
    return tuple(f"{lists[0]}.{index}" for index in range(num_layers))


def _check_calls(model: Any, layers: tuple[str, ...], calls: list[AttentionCall]) -> None:
    kind = type(model).__name__
    for layer in layers:
        count = sum(call.module.startswith(f"{layer}.") for call in calls)
        if count != 1:
            raise ValueError(
                f"{kind}: {layer} makes {count} attention calls, not one; layers with other state "
                "than keys and values are not served"
            )
    if len(calls) != len(layers):
        raise ValueError(f"{kind} makes attention calls outside its {len(layers)} layers")
    shapes = {(call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim) for call in calls}
    if len(shapes) != 1:
        raise ValueError(
            f"{kind}: layers differ in (heads, key and value heads, sizes of a key and a value): "
            f"{sorted(shapes)}"
        )


@contextmanager
def _leaves_in_place(model: nn.Module, leaves: dict[str, Leaf]) -> Iterator[None]:
    """Trace each call of a replaced module as one node, within this context."""
    modules = dict(model.named_modules())
    for name, leaf in leaves.items():
        modules[name].forward = _tracer_of(name, leaf)
    try:
        yield
    finally:
        for name in leaves:
            del modules[name].forward


def _tracer_of(name: str, leaf: Leaf) -> Callable[..., Tensor]:
    def norm(hidden_states: Tensor) -> Tensor:
        return traced_module([hidden_states], hidden_states.shape, name)

    def experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        # The last input has the dtype of the result.
        inputs = [top_k_index, top_k_weights, hidden_states]
        return traced_module(inputs, hidden_states.shape, name)

    return experts if isinstance(leaf, ExpertsLeaf) else norm


class _MatrixFunctions(TorchFunctionMode):
    """Traces linear layers and embeddings: functions that read the weight of a module.

    Args:
        run: gets the modules that are found.
        names: the names of weights, by id.
    """

    def __init__(self, run: _Run, names: dict[int, str]) -> None:
        self._run = run
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            traced = self._linear(*args, **kwargs)
        elif func is F.embedding:
            traced = self._embedding(*args, **kwargs)
        else:
            traced = None
        result = func(*args, **kwargs) if traced is None else traced
        if func in _CASTS and self._module(args[0]) is not None:
            # A weight of another dtype: it is loaded in that dtype.
            self._names[id(result)] = self._names[id(args[0])]
            self._run.kept.append(result)
        return result

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        name = self._module(weight)
        if name is None or (bias is not None and self._names.get(id(bias)) != f"{name}.bias"):
            return None
        if isinstance(self._run.leaves.get(name), EmbeddingLeaf):
            name = self._run.head  # the head is tied to the embedding
        is_biased = bias is not None
        leaf = LinearLeaf(weight.shape[1], weight.shape[0], is_biased, weight.dtype)
        if self._run.leaves.setdefault(name, leaf) != leaf:
            raise _Unfit(f"{name} is used with two dtypes")
        return traced_module([input], (*input.shape[:-1], leaf.out_features), name)

    def _embedding(self, input: Tensor, weight: Tensor, *others: Any, **more: Any) -> Tensor | None:
        name = self._module(weight)
        if name is None:
            return None
        self._run.leaves[name] = leaf = EmbeddingLeaf(*weight.shape)
        # The weight gives the result its dtype.
        return traced_module([input, weight], (*input.shape, leaf.size), name)

    def _module(self, weight: Tensor) -> str | None:
        """The name of the module that has this weight."""
        name = self._names.get(id(weight), "")
        is_weight = name.endswith(".weight") and weight.dim() == _MATRIX_DIMS
        return name.removesuffix(".weight") if is_weight else None


def _trace(noted: _Run, layers: tuple[str, ...]) -> tuple[GraphModule, list[str], dict[str, int]]:
    """The graph of a run, the names of its weights, and the section of each node."""
    model = noted.model
    shapes = ShapeEnv()
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    tokens = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64)
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.STATIC, DimDynamic.DYNAMIC])
    ids = mode.from_tensor(tokens, symbolic_context=dynamic)
    # Token ids and positions have one size, so positions are made from the ids. With a padding
    # mask, transformers does not look for packed sequences in the positions.
    with mode:
        positions = torch.empty_like(ids)
        padding = torch.empty_like(ids, dtype=torch.bool)
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with mode:
        fakes = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            for name, tensor in named.items()
        }
    sections = _Sections()

    def run(tensors: list[Tensor], ids: Tensor, positions: Tensor, padding: Tensor) -> Tensor:
        values = dict(zip(fakes, tensors, strict=True))
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": padding}
        with _MatrixFunctions(noted, {id(value): name for name, value in values.items()}):
            return torch.func.functional_call(
                model, values, (), {**inputs, "use_cache": False}, tie_weights=True
            ).logits

    hooks = []
    for index, layer in enumerate(layers):
        module = model.get_submodule(layer)
        hooks.append(module.register_forward_pre_hook(sections.hook(2 * index + 1)))
        hooks.append(module.register_forward_hook(sections.hook(2 * index + 2)))
    try:
        graph = make_fx(run)(list(fakes.values()), ids, positions, padding)
    finally:
        for hook in hooks:
            hook.remove()
    if sections.order != list(range(2 * len(layers) + 1)):
        raise _Unfit(f"{type(model).__name__} does not call its layers once each, in their order")
    return graph, list(fakes), sections.of_nodes


class _Sections:
    """Notes which nodes were added to the graph before, in and after each layer."""

    def __init__(self) -> None:
        self.of_nodes: dict[str, int] = {}
        self.order = [0]

    def hook(self, section: int) -> Callable[..., None]:
        """A hook that marks the beginning of a section."""

        def begin(*arguments: Any) -> None:
            mode = get_proxy_mode()
            assert mode is not None, "the model is being traced"
            for node in reversed(mode.tracer.graph.nodes):
                if node.name in self.of_nodes:
                    break
                self.of_nodes[node.name] = self.order[-1]
            self.order.append(section)

        return begin


def _make_mask(**arguments: Any) -> Tensor:
    """The mask function that transformers calls: checks the mask and notes its window.

    Returns:
        A tensor whose values have no meaning. `_attend` finds the window by the tensor's id.
    """
    if arguments.get("use_vmap"):
        raise _Unfit("its attention mask is not that of causal attention")
    window = int(arguments.get("local_size") or 0)
    with disable_proxy_modes_tracing(), unset_fake_temporarily():
        if not _is_causal(arguments["mask_function"], window):
            window = -window
            if window == 0 or not _is_causal(arguments["mask_function"], window):
                raise _Unfit("its attention mask is not that of causal attention")
        mask = torch.zeros(1)
    run = _current.get()
    run.kept.append(mask)
    run.masks[id(mask)] = window
    return mask


def _is_causal(function: Callable[..., Any], window: int) -> bool:
    """Whether a mask function is that of causal attention in full, with a window or in chunks.

    Args:
        function: returns whether a row (its third argument) sees a column (its fourth argument).
        window: as `paged_attention` takes it.
    """
    begin = max(0, abs(window) - _MASK_SPAN // 2)
    rows = torch.arange(begin, begin + _MASK_SPAN)[:, None]
    columns = torch.arange(begin + _MASK_SPAN)[None]
    expected = columns <= rows
    if window > 0:
        expected = expected & (columns > rows - window)
    elif window < 0:
        expected = expected & (columns >= rows - rows % -window)
    try:
        got = function(0, 0, rows, columns)
    except (RuntimeError, TypeError, IndexError):  # the function reads tensors of the traced run
        return False
    return bool(torch.equal(torch.as_tensor(got).expand_as(expected), expected))


def _attend(  # noqa: PLR0913 - transformers' signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: traces the call."""
    run = _current.get()
    name = run.names.get(id(module), type(module).__name__)
    unknown = [key for key, stated in others.items() if _has_effect(key, stated)]
    if unknown:
        raise _Unfit(f"{name} passes {', '.join(sorted(unknown))} to attention")
    if attention_mask is None:
        raise _Unfit(f"{name} passes no mask to attention")
    window = run.masks.get(id(attention_mask))
    if window is None:
        raise _Unfit(f"{name} passes a mask of its own to attention")
    if is_causal is False:
        raise _Unfit(f"{name} is not causal")
    if sliding_window is not None and abs(window) not in (sliding_window, 0):
        raise _Unfit(f"{name} has a window of {sliding_window}, and its mask one of {window}")
    head_dim = int(query.shape[-1])
    run.calls.append(
        AttentionCall(
            name,
            int(query.shape[1]),
            int(key.shape[1]),
            head_dim,
            int(value.shape[-1]),
            float(head_dim**-0.5 if scaling is None else scaling),
            window,
            float(softcap or 0.0),
            "" if s_aux is None else _name_of(run, module, s_aux),
        )
    )
    return traced_attention(query, key, value, len(run.calls) - 1), None


def _has_effect(key: str, stated: Any) -> bool:
    return key not in _WITHOUT_EFFECT and stated is not None and stated is not False


def _name_of(run: _Run, module: nn.Module, tensor: Tensor) -> str:
    """The parameter of an attention module that holds its sinks."""
    for key, parameter in module.named_parameters(recurse=False):
        if parameter is tensor:
            return f"{run.names[id(module)]}.{key}"
    raise _Unfit(f"{run.names[id(module)]} computes its sinks")
