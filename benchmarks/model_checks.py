"""Check and time one model of ``benchmarks/models.py``, in a process of its own.

For the checks, every linear that can be packed is packed, whether or not this is fast: a separate store has decisions
for it. The times are those of the model that ``gemmtune.optimize`` tunes.

The bound of a check: with |y| the largest magnitude of an output in float64, the difference between the optimized
model's output and the float64 output is at most twice the plain model's difference, plus 4 units in the last place of
|y| in fp32, or one in bf16. Both models round, in different ways. A bound on the difference between the two models
would therefore include the plain model's error.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Entrant, Spread, interleave
from model_zoo import CASES, TOKENS, Case, Inputs
from torch import Tensor, nn

import gemmtune
from gemmtune import backends
from gemmtune.backends.aten import AtenBackend
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, Sample, Verdict
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.nn.packed_tensor import PackedTensor
from gemmtune.store import MemoryStore
from gemmtune.timing.stats import ratio_interval

DEVICE = torch.device("cpu")  # --device
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# The absolute term of the bound, relative to the largest magnitude of an output: a few roundings.
TOLERANCE = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}
NEW_TOKENS = 50
NEW_PROCESS_LIMIT_S = 120


class Failed(Exception):
    """Exception for a difference between the optimized and the plain model; the message describes it."""


class NotApplicable(Exception):
    """Exception for a check that does not apply to this model; the message gives the reason."""


# --- models and their outputs ------------------------------------------------------------------------------------


def cast_inputs(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Return the inputs on ``DEVICE``, floating tensors in ``dtype``."""
    return {
        name: value.to(DEVICE, dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }


def output_tensors(output: Any) -> list[Tensor]:
    """Return the tensors of a model's output in order, without caches."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in output_tensors(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in output_tensors(value)]
    return []


def float_outputs(output: Any) -> list[Tensor]:
    """Return the floating tensors of a model's output."""
    return [tensor for tensor in output_tensors(output) if tensor.is_floating_point()]


class TupleOutput(nn.Module):
    """Module whose output is a tuple of tensors, so that exported programs need no class of the model's library."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> tuple[Tensor, ...]:
        return tuple(output_tensors(self.model(**inputs)))


def run_model(model: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    """Return the floating outputs of one forward without gradients."""
    with torch.no_grad():
        return float_outputs(model(**inputs))


def make_plain(case: Case, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Return the model in ``dtype`` with random weights of ``seed``, after the case's ``change``."""
    torch.manual_seed(seed)
    model = cast_weights(case.make(), dtype).to(DEVICE)
    if case.change is not None:
        torch.manual_seed(seed + 1)
        model = case.change(model)
    return model.eval()


def cast_weights(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the weights to ``dtype`` and keep non-persistent buffers (rotary frequencies) in fp32, as
    ``from_pretrained`` does."""
    buffers = ((module, name) for module in model.modules() for name in module._non_persistent_buffers_set)
    own_buffers = {(module, name): module._buffers[name] for module, name in buffers}
    model.to(dtype)
    for (module, name), buffer in own_buffers.items():
        module._buffers[name] = buffer
    return model


def make_reference(plain: nn.Module) -> nn.Module:
    """Return a copy of the model in float64; quantised weights are dequantised."""
    model = copy.deepcopy(plain)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):  # the grouped product does not support float64
            config._experts_implementation = "eager"
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and type(parameter) is not nn.Parameter and hasattr(parameter, "dequantize"):
                module._parameters[name] = nn.Parameter(parameter.dequantize().double(), requires_grad=False)
    return model.double()


# --- decisions that pack everything ------------------------------------------------------------------------------


def pack_all_weights(model: nn.Module, examples: Sequence[Inputs], store: MemoryStore) -> None:
    """Put a Decision into ``store`` for every Problem with a constant weight and for every ``scaled_mm`` (whose weight
    is not packed). Its winner has gemmtune's default layout; on a GPU it is the first candidate. Its times are not
    measured: the decisions only serve to check packed models."""
    with gemmtune.record() as recorded, torch.no_grad():
        for inputs in examples:
            model(**inputs)
    target = current_target(DEVICE)
    for problem, _ in recorded.problems:
        is_packable = problem.b.constant or problem.family == "scaled_mm"
        candidate = _default_candidate(problem, target) if is_packable else None
        if candidate is not None:
            plain = AtenBackend().default_candidate(problem)
            rows = _evidence(problem, candidate, 1e-6, 0.1), _evidence(problem, plain, 1e-3, 1.0)
            alternatives = {row.packing or "": row.id for row in rows}
            store.put(
                target,
                Decision(
                    problem.key, problem.to_dict(), target.key, "winner", candidate.id, rows, alternatives=alternatives
                ),
            )
    RUNTIME.refresh(store)


def _default_candidate(problem: Problem, target: Target) -> Candidate | None:
    """Return the candidate of the default layout; on a GPU the first candidate of the CUDA or the Triton backend."""
    if DEVICE.type == "cpu":
        return backends.get("native").default_packing(problem, target)
    candidates = (item for name in ("cuda", "triton") for item in backends.get(name).candidates(problem, target))
    return next((item for item in candidates if isinstance(item, Candidate)), None)


def _evidence(problem: Problem, candidate: Candidate, seconds: float, ratio: float) -> Evidence:
    return Evidence(
        candidate.to_dict(), candidate.id, "finalist",
        packing=backends.get(candidate.backend).packing_of(problem, candidate), verdict=Verdict("within_bound"),
        sample=Sample(seconds, seconds, seconds, 50, ratio, ratio, ratio),
    )  # fmt: skip


def describe_handle(handle: gemmtune.Handle) -> dict[str, Any]:
    """Return a Handle's counts: linears that gemmtune serves, by layout, and the others by reason."""
    return {
        "swapped": len(handle.swapped), "layouts": dict(Counter(handle.swapped.values())),
        "left": dict(Counter(handle.left.values())), "left_names": dict(handle.left),
    }  # fmt: skip


# --- a row -------------------------------------------------------------------------------------------------------


class Row:
    """Plain and optimized model of one row, and the reference of their outputs."""

    def __init__(self, case: Case, dtype: torch.dtype, folder: Path, *, pack: bool) -> None:
        self.case, self.dtype, self.folder = case, dtype, folder
        self.examples = [cast_inputs(case.inputs(length), dtype) for length in case.lengths]
        self.plain = make_plain(case, dtype)
        self.initial_state = {name: _copy_value(value) for name, value in self.plain.state_dict().items()}
        self.store = MemoryStore()
        self.handle: gemmtune.Handle | None = None
        if not pack:
            self.optimized = copy.deepcopy(self.plain)
        elif case.optimize_first and case.change is not None:
            torch.manual_seed(0)
            base = cast_weights(case.make(), dtype).to(DEVICE).eval()
            self._optimize(base)
            torch.manual_seed(1)
            self.optimized = case.change(base).eval()
        else:
            self.optimized = copy.deepcopy(self.plain)
            self._optimize(self.optimized)
        self.expected = [run_model(self.plain, inputs) for inputs in self.examples]
        self.reference, self.reference_note = self._compute_reference()

    def _optimize(self, model: nn.Module) -> None:
        pack_all_weights(model, self.examples, self.store)
        self.handle = gemmtune.optimize(model, self.examples, tune=False, store=self.store)

    def _compute_reference(self) -> tuple[list[list[Tensor]], str]:
        """Return the outputs in float64; if float64 fails, the plain model's outputs and a note."""
        try:
            model = make_reference(self.plain)
            outputs = [run_model(model, cast_inputs(inputs, torch.float64)) for inputs in self.examples]
        except Exception as error:  # whatever the model's library raises on a dtype that it does not expect
            return self.expected, f"the reference is the plain model itself, as float64 fails: {_error_text(error)}"
        return outputs, ""

    def error(self, outputs: Sequence[Tensor], example: int = 0) -> float:
        """Return the largest difference from the reference, relative to the output's largest magnitude. Raises Failed
        for other shapes, and for values that are not finite although the reference's are."""
        return difference(outputs, self.reference[example])

    def check(
        self, outputs: Sequence[Tensor], what: str, example: int = 0, *, plain: float | None = None,
        tolerance: float | None = None,
    ) -> str:  # fmt: skip
        """Raise Failed unless outputs are within the bound; return the errors as text. plain: the plain model's error,
        if not in eager mode."""
        allowed = self.error(self.expected[example], example) if plain is None else plain
        limit = 2 * allowed + (TOLERANCE[self.dtype] if tolerance is None else tolerance)
        if self.reference_note:
            limit *= 8  # the difference of two models that both round, not the error of one
        actual = self.error(outputs, example)
        if not actual <= limit:
            detail = f"error {actual:.2e} of the largest value, the plain model's {allowed:.2e}, limit {limit:.2e}"
            raise Failed(f"{what}: {detail}")
        return f"{actual:.1e} (plain {allowed:.1e})"

    def equal(self, actual: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> None:
        """Raise Failed unless outputs are bitwise equal."""
        if not _bitwise_equal(actual, expected):
            raise Failed(f"{what}: outputs differ by {difference(actual, expected):.2e} of the largest value")


def _copy_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _bitwise_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(actual) == len(expected) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(actual, expected, strict=True)
    )


def difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference relative to the output's largest finite magnitude. Raises Failed as
    ``Row.error``."""
    if [tuple(t.shape) for t in actual] != [tuple(t.shape) for t in expected]:
        raise Failed(f"shapes {[tuple(t.shape) for t in actual]} in the place of {[tuple(t.shape) for t in expected]}")
    worst = 0.0
    for value, reference in zip(actual, expected, strict=True):
        a, b = value.detach().double(), reference.detach().double()
        finite = b.isfinite() & (b.abs() < 1e30)  # masks are filled with the lowest value of a dtype
        if not bool(a[finite].isfinite().all()):
            raise Failed("a value is not finite where the reference's is")
        if bool(finite.any()):
            scale = float(b[finite].abs().max())
            worst = max(worst, float((a[finite] - b[finite]).abs().max()) / max(scale, 1e-30))
    return worst


def _error_text(error: BaseException) -> str:
    """Return an exception's type and the first line of its message."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:220]}"


def _run_or_skip(optimized: Callable[[], Any], plain: Callable[[], Any]) -> Any:
    """Return the result of ``optimized``. If it fails, raise NotApplicable if ``plain`` fails too, otherwise Failed."""
    try:
        return optimized()
    except (Failed, NotApplicable):
        raise
    except Exception as error:  # anything that torch or the model's library raises
        try:
            plain()
        except Exception as own_error:
            raise NotApplicable(f"plain torch fails: {_error_text(own_error)}") from own_error
        raise Failed(_error_text(error)) from error


# --- checks ------------------------------------------------------------------------------------------------------


def check_outputs(row: Row) -> str:
    details = [
        row.check(run_model(row.optimized, inputs), f"{length} tokens", index)
        for index, (length, inputs) in enumerate(zip(row.case.lengths, row.examples, strict=True))
    ]
    return "; ".join(details) + (f" ({row.reference_note})" if row.reference_note else "")


def check_modes(row: Row) -> str:
    """Check that no_grad and inference_mode give equal bits, and outputs with gradients enabled (frozen weights)."""
    inputs = row.examples[0]
    without_grad = run_model(row.optimized, inputs)
    with torch.inference_mode():
        row.equal(float_outputs(row.optimized(**inputs)), without_grad, "inference_mode against no_grad")
    frozen = copy.deepcopy(row.optimized).requires_grad_(False)
    other = copy.deepcopy(row.plain).requires_grad_(False)
    with torch.enable_grad():
        actual = _run_or_skip(lambda: float_outputs(frozen(**inputs)), lambda: other(**inputs))
        allowed = row.error(float_outputs(other(**inputs)))
    row.check(actual, "gradients enabled", plain=allowed)
    return ""


def check_generate(row: Row) -> str:
    if row.case.prompt is None:
        raise NotApplicable("the class does not generate")
    prompt = cast_inputs(row.case.prompt(), row.dtype)

    def generate(model: Any) -> Any:
        return model.generate(
            **prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip

    actual = _run_or_skip(lambda: generate(row.optimized), lambda: generate(row.plain))
    expected = generate(row.plain)
    tokens, expected_tokens = actual.sequences, expected.sequences
    if tokens.shape == expected_tokens.shape and bool((tokens == expected_tokens).all()):
        return f"{NEW_TOKENS} equal tokens"
    start = expected_tokens.shape[1] - NEW_TOKENS
    step = int((tokens[:, start:] != expected_tokens[:, start:]).any(0).nonzero()[0])
    logits, plain_logits = actual.logits[step][0].double(), expected.logits[step][0].double()
    gap = float(plain_logits.max() - plain_logits[int(tokens[0, start + step])])
    scale = float(plain_logits.abs().max())
    error = float((logits - plain_logits).abs().max())
    # As in Row.check: without a float64 reference the plain model's error is unknown, and is not taken as 0.
    limit = (3 * row.error(row.expected[0]) + TOLERANCE[row.dtype]) * (8 if row.reference_note else 2) * scale
    gap_text = f"its logits are {gap:.2e} apart in the plain model"
    detail = f"token {step} differs: {gap_text}, the models differ by {error:.2e}"
    if error > limit or gap > 2 * error:
        raise Failed(f"{detail}, limit {limit:.2e}")
    return f"{step} equal tokens, then a tie ({detail})"


def check_state(row: Row) -> str:
    """Check that a saved state_dict and the files of save_pretrained have the plain model's names and bits, and that a
    plain model loads them."""
    inputs = row.examples[0]
    path = row.folder / "state.pt"
    state = row.optimized.state_dict()
    torch.save(state, path)
    loaded = _run_or_skip(
        lambda: torch.load(path, weights_only=False),
        lambda: torch.save(row.plain.state_dict(), row.folder / "plain.pt"),
    )
    if set(loaded) != set(row.initial_state):
        raise Failed(f"names differ: {sorted(set(loaded) ^ set(row.initial_state))[:4]}")
    for name, value in row.initial_state.items():
        if isinstance(value, Tensor) and type(value) is Tensor and not torch.equal(loaded[name], value):
            raise Failed(f"{name} is not what it was")
    new_model = make_plain(row.case, row.dtype, seed=7)
    new_model.load_state_dict(loaded)
    row.equal(run_model(new_model, inputs), row.expected[0], "a plain model with the saved state_dict")
    row.optimized.load_state_dict(row.initial_state)
    row.check(run_model(row.optimized, inputs), "after load_state_dict into the optimized model")
    if not hasattr(row.optimized, "save_pretrained"):
        return "state_dict; the class has no save_pretrained"
    model: Any = row.optimized
    if row.case.package == "peft" and row.case.extra:
        model.save_pretrained(row.folder / "pretrained")
        return "state_dict; save_pretrained wrote the adapter"
    plain: Any = row.plain
    _run_or_skip(
        lambda: model.save_pretrained(row.folder / "pretrained"),
        lambda: plain.save_pretrained(row.folder / "pretrained_plain"),
    )
    if row.case.package == "torchao":
        return "state_dict and save_pretrained"
    reloaded = type(model).from_pretrained(row.folder / "pretrained", dtype=row.dtype).to(DEVICE).eval()
    row.equal(run_model(reloaded, inputs), row.expected[0], "from_pretrained of what save_pretrained wrote")
    return "state_dict and save_pretrained"


def check_deepcopy(row: Row) -> str:
    clone = _run_or_skip(lambda: copy.deepcopy(row.optimized), lambda: copy.deepcopy(row.plain))
    row.equal(run_model(clone, row.examples[0]), run_model(row.optimized, row.examples[0]), "a deepcopy")
    count, original_count = _packed_weight_count(clone), _packed_weight_count(row.optimized)
    if count != original_count:
        raise Failed(f"{count} packed weights in the copy of {original_count}")
    with torch.no_grad():  # a write to the copy does not reach the original
        outputs_before = run_model(row.optimized, row.examples[0])
        for parameter in clone.parameters():
            if isinstance(parameter, PackedTensor) and not parameter.quantized:  # those refuse the write
                parameter.zero_()
        row.equal(run_model(row.optimized, row.examples[0]), outputs_before, "after a write to its deepcopy")
    return ""


def _packed_weight_count(model: nn.Module) -> int:
    return sum(isinstance(parameter, PackedTensor) for parameter in model.parameters())


def check_pickle(row: Row) -> str:
    data = _run_or_skip(lambda: pickle.dumps(row.optimized), lambda: pickle.dumps(row.plain))
    clone = pickle.loads(data)
    row.equal(run_model(clone, row.examples[0]), run_model(row.optimized, row.examples[0]), "an unpickled model")
    buffer = io.BytesIO()
    torch.save(row.optimized, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    row.equal(run_model(loaded, row.examples[0]), run_model(row.optimized, row.examples[0]), "torch.save")
    return f"{_packed_weight_count(clone)} packed weights"


def check_export(row: Row) -> str:
    inputs = row.examples[0]

    def export(model: nn.Module) -> Any:
        with torch.no_grad():
            return torch.export.export(TupleOutput(model), (), inputs)

    program = _run_or_skip(lambda: export(row.optimized), lambda: export(row.plain))
    path = row.folder / "program.pt2"
    _run_or_skip(lambda: torch.export.save(program, path), lambda: _save_program(export(row.plain), row.folder))
    outputs = _run_or_skip(
        lambda: _run_in_new_process(row, "export", path),
        lambda: _run_in_new_process(row, "export", _save_program(export(row.plain), row.folder)),
    )
    return row.check(outputs, "in a fresh process") + f", {_gemmtune_node_count(program)} products by gemmtune"


def _save_program(program: Any, folder: Path) -> Path:
    torch.export.save(program, folder / "plain.pt2")
    return folder / "plain.pt2"


def _gemmtune_node_count(program: Any) -> int:
    return sum("gemmtune" in str(node.target) for node in program.graph.nodes if node.op == "call_function")


def check_aoti(row: Row) -> str:
    inputs = row.examples[0]

    def package(model: nn.Module, name: str) -> Path:
        with torch.no_grad():
            program = torch.export.export(TupleOutput(model), (), inputs)
            path = row.folder / name
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        return path

    try:
        path = _run_or_skip(lambda: package(row.optimized, "packed.pt2"), lambda: package(row.plain, "plain.pt2"))
    except Failed as failure:
        frozen = copy.deepcopy(row.optimized).requires_grad_(False)
        try:
            path = package(frozen, "packed.pt2")
        except Exception:  # report the first exception
            raise failure from None
        row.check(_run_in_new_process(row, "aoti", path), "in a fresh process, of frozen weights")
        raise Failed(f"{failure}; after requires_grad_(False) it works") from None
    outputs = _run_or_skip(
        lambda: _run_in_new_process(row, "aoti", path),
        lambda: _run_in_new_process(row, "aoti", package(row.plain, "plain.pt2")),
    )
    try:
        return row.check(outputs, "in a fresh process")
    except Failed:  # AOTInductor rounds differently from eager code: use the error of the plain model's package
        own_error = row.error(_run_in_new_process(row, "aoti", package(row.plain, "plain.pt2")))
        return row.check(outputs, "in a fresh process", plain=max(own_error, row.error(row.expected[0])))


def _run_in_new_process(row: Row, kind: str, path: Path) -> list[Tensor]:
    """Return the outputs of a saved program in a new process that imports gemmtune and the model's library."""
    torch.save(row.examples[0], row.folder / "inputs.pt")
    command = [sys.executable, __file__, "--load", kind, str(path), str(row.folder)]
    imports = {type(module).__module__ for module in row.plain.modules() if row.case.package in type(module).__module__}
    imports |= {"torchao"} if row.case.package == "torchao" else set()
    command += ["--imports", *sorted(imports)]  # libraries define operators (transformers: grouped products)
    finished = subprocess.run(command, capture_output=True, text=True, timeout=NEW_PROCESS_LIMIT_S, check=False)
    if finished.returncode:
        last = next((line for line in reversed(finished.stderr.splitlines()) if line.strip()), "")
        raise RuntimeError(f"a fresh process ended with {finished.returncode}: {last}")
    outputs: list[Tensor] = torch.load(row.folder / "outputs.pt")
    return outputs


def run_saved_program(kind: str, path: str, folder: Path, imports: Sequence[str]) -> None:
    """Run a saved program and save its floating outputs; this is the new process of a check."""
    for name in imports:
        importlib.import_module(name)
    inputs = torch.load(folder / "inputs.pt")
    with torch.no_grad():
        if kind == "export":
            outputs = torch.export.load(path).module()(**inputs)
        else:
            tensor_inputs = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
            model: Any = torch._inductor.aoti_load_package(path)
            try:
                outputs = model(**inputs)
            except (TypeError, ValueError, RuntimeError):  # the program takes no constants
                outputs = model(**tensor_inputs)
    torch.save(float_outputs(outputs), folder / "outputs.pt")


def check_compile(row: Row) -> str:
    inputs = row.examples[0]
    torch._dynamo.reset()
    compiled: Any = torch.compile(row.optimized)
    other: Any = torch.compile(row.plain)
    outputs = _run_or_skip(lambda: run_model(compiled, inputs), lambda: run_model(other, inputs))
    try:
        detail = row.check(outputs, "compiled")
    except Failed:  # Inductor rounds differently from eager code: use the error of the compiled plain model
        own_error = row.error(run_model(other, inputs))
        detail = row.check(outputs, "compiled", plain=max(own_error, row.error(row.expected[0])))
    row.equal(run_model(compiled, inputs), outputs, "a second compiled call")
    row.check(run_model(row.optimized, inputs), "eager code after torch.compile")
    return detail


def check_autocast(row: Row) -> str:
    inputs = row.examples[0]

    def forward(model: nn.Module) -> list[Tensor]:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return run_model(model, inputs)

    outputs = _run_or_skip(lambda: forward(row.optimized), lambda: forward(row.plain))
    expected = forward(row.plain)
    if [t.dtype for t in outputs] != [t.dtype for t in expected]:
        raise Failed(f"dtypes {[t.dtype for t in outputs]} in the place of {[t.dtype for t in expected]}")
    return row.check(outputs, "under autocast", plain=row.error(expected), tolerance=TOLERANCE[torch.bfloat16])


def check_profiler(row: Row) -> str:
    """Check that the profiler changes no output and that it lists fewer of PyTorch's products than in the plain
    model."""
    outputs_before = run_model(row.optimized, row.examples[0])
    events, outputs = _profiled(row.optimized, row.examples[0])
    plain_events, _ = _profiled(row.plain, row.examples[0])
    row.equal(outputs, outputs_before, "under the profiler")
    gemmtune_ops = sorted(item for item in events.items() if item[0].startswith("gemmtune::"))
    gemmtune_text = ", ".join(f"{name} x{count}" for name, count in gemmtune_ops)
    products, plain_products = (sum(counts[name] for name in _PRODUCTS) for counts in (events, plain_events))
    packed = _packed_weight_count(row.optimized)
    if packed and plain_products and products >= plain_products:
        raise Failed(f"{packed} weights are packed; PyTorch still runs {products} of {plain_products} products")
    return f"{products} of {plain_products} products are PyTorch's; {gemmtune_text or 'no gemmtune:: event'}"


# The ATen ops in which eager products with a weight end.
_PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::mkldnn_linear",
    "aten::_int_mm", "aten::_scaled_mm", "aten::_weight_int4pack_mm",
)  # fmt: skip


def _profiled(model: nn.Module, inputs: Inputs) -> tuple[Counter[str], list[Tensor]]:
    with torch.profiler.profile(record_shapes=True) as profile:
        outputs = run_model(model, inputs)
    return Counter({event.key: event.count for event in profile.key_averages()}), outputs


def check_backward(row: Row) -> str:
    """Check the gradient of the input against float64; the weights are frozen."""
    name = row.case.differentiable
    if name is None:
        raise NotApplicable("the forward takes no single floating input")

    def gradient(model: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = cast_inputs(row.examples[0], dtype)
        if name == "inputs_embeds":
            embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
            inputs[name] = embedded.detach()
        inputs[name] = inputs[name].detach().clone().requires_grad_(True)
        with torch.enable_grad():
            out = float_outputs(model(**inputs))[0]
            out.double().cos().sum().backward()  # type: ignore[no-untyped-call]
        grad: Tensor = inputs[name].grad
        return [grad]

    frozen = copy.deepcopy(row.optimized).requires_grad_(False)
    plain = copy.deepcopy(row.plain).requires_grad_(False)
    actual = _run_or_skip(lambda: gradient(frozen, row.dtype), lambda: gradient(plain, row.dtype))
    try:
        expected = gradient(plain, row.dtype)
    except RuntimeError as error:  # torch lacks a derivative that gemmtune has
        raise NotApplicable(f"plain torch fails: {_error_text(error)}") from error
    if row.reference_note:
        raise NotApplicable(row.reference_note)
    reference = gradient(make_reference(plain).requires_grad_(False), torch.float64)
    allowed = difference(expected, reference)
    grad_error, limit = difference(actual, reference), 2 * allowed + 4 * TOLERANCE[row.dtype]
    if not grad_error <= limit:
        raise Failed(f"gradient of {name}: error {grad_error:.2e}, the plain model's {allowed:.2e}, limit {limit:.2e}")
    return f"{name}: {grad_error:.1e} (plain {allowed:.1e})"


def check_merge(row: Row) -> str:
    """Check that PEFT merges adapters into packed weights and unmerges them."""
    if "merge" not in row.case.extra:
        raise NotApplicable("no adapters")
    inputs = row.examples[0]
    optimized: Any = copy.deepcopy(row.optimized)
    plain: Any = copy.deepcopy(row.plain)
    for change in ("merge_adapter", "unmerge_adapter"):
        getattr(optimized, change)()
        getattr(plain, change)()
        row.check(run_model(optimized, inputs), change, plain=row.error(run_model(plain, inputs)))
    with optimized.disable_adapter(), plain.disable_adapter():
        error = difference(run_model(optimized, inputs), run_model(plain, inputs))
        if error > 16 * TOLERANCE[row.dtype]:
            raise Failed(f"disable_adapter: outputs differ by {error:.2e}")
    merged, merged_plain = optimized.merge_and_unload(), plain.merge_and_unload()
    row.check(run_model(merged, inputs), "merge_and_unload", plain=row.error(run_model(merged_plain, inputs)))
    return f"merge, unmerge, disable, merge_and_unload; then {_packed_weight_count(merged)} packed weights"


def check_restore(row: Row) -> str:
    if row.handle is None:
        return "not optimized"
    row.handle.restore()
    still_packed = [name for name, parameter in row.optimized.named_parameters() if isinstance(parameter, PackedTensor)]
    if still_packed:
        raise Failed(f"still packed: {still_packed[:3]}")
    state = row.optimized.state_dict()
    if list(state) != list(row.initial_state):
        raise Failed("the names of the state_dict are not what they were")
    for name, value in row.initial_state.items():
        if isinstance(value, Tensor) and type(value) is Tensor and not torch.equal(state[name], value):
            raise Failed(f"{name} is not what it was")
    for index, inputs in enumerate(row.examples):
        row.equal(run_model(row.optimized, inputs), row.expected[index], "after restore()")
    return "bitwise"


# restore() is last: it unpacks the weights that the other checks need. Report.begin identifies a check that crashes.
CHECKS: dict[str, Callable[[Row], str]] = {
    "outputs": check_outputs, "modes": check_modes, "generate": check_generate, "deepcopy": check_deepcopy,
    "pickle": check_pickle, "autocast": check_autocast, "profiler": check_profiler, "backward": check_backward,
    "merge": check_merge, "state": check_state, "export": check_export, "aoti": check_aoti, "compile": check_compile,
    "restore": check_restore,
}  # fmt: skip


def run_checks(case: Case, dtype: torch.dtype, names: Sequence[str], report: Report, *, pack: bool) -> None:
    """Run the named checks and report the start and the end of each."""
    with tempfile.TemporaryDirectory(prefix="gemmtune-models-") as folder:
        report.begin("setup")
        row = Row(case, dtype, Path(folder), pack=pack)
        linears = sum(isinstance(module, nn.Linear) for module in row.plain.modules())
        report.add(linears=linears, reference=row.reference_note or "float64")
        if row.handle is not None:
            report.add(packed=describe_handle(row.handle))
        report.end("setup", "ok", "")
        for name in names:
            report.begin(name)
            try:
                report.end(name, "ok", CHECKS[name](row))
            except NotApplicable as reason:
                report.end(name, "not applicable", str(reason))
            except Failed as failure:
                report.end(name, "failed", str(failure))
            except Exception as error:  # report it and continue
                report.end(name, "failed", _error_text(error))


# --- times -------------------------------------------------------------------------------------------------------


def run_times(case: Case, dtype: torch.dtype, seconds: float, budget: float, report: Report) -> None:
    """Tune and optimize the model as a user does; then time forwards of it and of the plain model in pairs."""
    report.begin("time")
    store = MemoryStore()
    plain = make_plain(case, dtype)
    examples = [cast_inputs(case.inputs(length), dtype) for length in case.lengths]
    start = time.perf_counter()
    if case.optimize_first and case.change is not None:
        torch.manual_seed(0)
        tuned = cast_weights(case.make(), dtype).to(DEVICE).eval()
        handle = gemmtune.optimize(tuned, examples, store=store, budget=budget, latency="eager", m=None)
        torch.manual_seed(1)
        tuned = case.change(tuned).eval()
    else:
        tuned = copy.deepcopy(plain)
        handle = gemmtune.optimize(tuned, examples, store=store, budget=budget, latency="eager", m=None)
    tuning_s = time.perf_counter() - start
    results = {}
    for length, inputs in zip(case.lengths, examples, strict=True):
        entrants = {
            name: Entrant(lambda _, model=model, inputs=inputs: forward(model, inputs))  # type: ignore[misc]
            for name, model in (("plain", plain), ("optimized", tuned))
        }
        with torch.no_grad():
            times = interleave(entrants, sets=1, seconds=seconds, rounds=(15, 301))
        ratio = ratio_interval(times["optimized"], times["plain"])
        results["prefill" if length == TOKENS else f"{length} token"] = {
            "ratio": ratio.center, "low": ratio.lo, "high": ratio.hi, "pairs": len(times["plain"]),
            "plain_s": Spread.of(times["plain"]).median, "optimized_s": Spread.of(times["optimized"]).median,
            "plain_times": times["plain"], "optimized_times": times["optimized"],
        }  # fmt: skip
    report.add(tuned=describe_handle(handle), tuning_s=tuning_s, times=results)
    report.end("time", "ok", "")


def forward(model: nn.Module, inputs: Inputs) -> None:
    """Run one forward and wait for the device."""
    model(**inputs)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Report:
    """Report to the parent process, in lines of JSON: starts and ends of checks, and values of the row."""

    def __init__(self, path: Path) -> None:
        self.path, self.started = path, 0.0

    def begin(self, name: str) -> None:
        """Report the start of a check."""
        self.started = time.perf_counter()
        self._write({"begin": name})

    def end(self, name: str, outcome: str, detail: str) -> None:
        """Report the end of a check."""
        seconds = round(time.perf_counter() - self.started, 2)
        self._write({"end": name, "outcome": outcome, "detail": detail, "seconds": seconds})

    def add(self, **values: Any) -> None:
        """Report values of the row."""
        self._write({"add": values})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs=3, metavar=("KIND", "PATH", "FOLDER"), help="run a saved program")
    parser.add_argument("--imports", nargs="*", default=[])
    parser.add_argument("--row", nargs=3, metavar=("NAME", "DTYPE", "REPORT"))
    parser.add_argument("--checks", nargs="*", default=[])
    parser.add_argument("--plain", action="store_true", help="check the plain model alone, not optimized")
    parser.add_argument("--seconds", type=float, help="time a forward for this long, instead of checking")
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    DEVICE = torch.device(args.device)
    if args.load:
        import gemmtune.nn  # noqa: F401 - registers the operators that saved programs call

        run_saved_program(args.load[0], args.load[1], Path(args.load[2]), args.imports)
        return
    name, dtype, path = args.row
    report = Report(Path(path))
    if args.seconds is not None:
        run_times(CASES[name], DTYPES[dtype], args.seconds, args.budget, report)
    else:
        run_checks(CASES[name], DTYPES[dtype], args.checks, report, pack=not args.plain)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
