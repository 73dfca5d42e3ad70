"""One row of ``benchmarks/models.py``, in a process of its own: what becomes of one model when it is optimized.

The checks run with every linear packed that can be, whether that is fast or not: decisions that say so are put into a
store of their own. The times are of the model that ``gemmtune.optimize`` tunes and decides on itself.

The bound of a check: with |y| the largest magnitude of an output in float64, the difference of the optimized model's
output from the float64 one is at most twice the plain model's own difference, plus 4 units in the last place of |y| in
fp32, and one in bf16. Both models round; each rounds differently; neither is the truth, so that a bound on the
difference between the two would measure the plain model's error as well.
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
# The absolute term of the bound, as a share of the largest magnitude of an output: a few roundings of it.
SLACK = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7}
NEW_TOKENS = 50
FRESH_LIMIT_S = 120


class Failed(Exception):
    """The optimized model does not do what the plain one does; the message says how."""


class NotApplicable(Exception):
    """The check says nothing of gemmtune here; the message says why."""


# --- models and their outputs ------------------------------------------------------------------------------------


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same inputs on ``DEVICE``, floating tensors in ``dtype``."""
    return {
        name: value.to(DEVICE, dtype if value.is_floating_point() else value.dtype)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }


def tensors(output: Any) -> list[Tensor]:
    """The tensors of a model's output, in order; caches are left out."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for value in output.values() for tensor in tensors(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in tensors(value)]
    return []


def floats(output: Any) -> list[Tensor]:
    """The floating tensors of a model's output."""
    return [tensor for tensor in tensors(output) if tensor.is_floating_point()]


class Flat(nn.Module):
    """A model whose output is a tuple of tensors: exported programs need no class of the model's library."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> tuple[Tensor, ...]:
        return tuple(tensors(self.model(**inputs)))


def run(model: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    """The floating outputs of one forward without gradients."""
    with torch.no_grad():
        return floats(model(**inputs))


def make_plain(case: Case, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """The model in ``dtype`` with the weights of ``seed``, changed as the case says."""
    torch.manual_seed(seed)
    model = with_weights_in(case.make(), dtype).to(DEVICE)
    if case.change is not None:
        torch.manual_seed(seed + 1)
        model = case.change(model)
    return model.eval()


def with_weights_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its weights in ``dtype``, and what it computes itself (the frequencies of rotary embeddings) in
    fp32, as ``from_pretrained`` makes it."""
    own = ((module, name) for module in model.modules() for name in module._non_persistent_buffers_set)
    kept = {(module, name): module._buffers[name] for module, name in own}
    model.to(dtype)
    for (module, name), buffer in kept.items():
        module._buffers[name] = buffer
    return model


def make_reference(plain: nn.Module) -> nn.Module:
    """The model in float64; weights of a quantised format are dequantised."""
    model = copy.deepcopy(plain)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_experts_implementation"):  # the grouped product has no float64
            config._experts_implementation = "eager"
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and type(parameter) is not nn.Parameter and hasattr(parameter, "dequantize"):
                module._parameters[name] = nn.Parameter(parameter.dequantize().double(), requires_grad=False)
    return model.double()


# --- decisions that pack everything ------------------------------------------------------------------------------


def pack_everything(model: nn.Module, examples: Sequence[Inputs], store: MemoryStore) -> None:
    """Put a Decision into ``store`` for every Problem with a constant weight, and every ``scaled_mm`` (whose weight is
    served as it lies): gemmtune's default layout wins it (on a GPU the first kernel that is listed). No time in it was
    measured; it serves to check what a packed model does."""
    with gemmtune.record() as recorded, torch.no_grad():
        for inputs in examples:
            model(**inputs)
    target = current_target(DEVICE)
    for problem, _ in recorded.problems:
        served = problem.b.constant or problem.family == "scaled_mm"
        candidate = _default(problem, target) if served else None
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


def _default(problem: Problem, target: Target) -> Candidate | None:
    """gemmtune's default layout of a weight; on a GPU the first candidate that the CUDA or the Triton backend lists."""
    if DEVICE.type == "cpu":
        return backends.get("native").default_packing(problem, target)
    listed = (item for name in ("cuda", "triton") for item in backends.get(name).candidates(problem, target))
    return next((item for item in listed if isinstance(item, Candidate)), None)


def _evidence(problem: Problem, candidate: Candidate, seconds: float, ratio: float) -> Evidence:
    return Evidence(
        candidate.to_dict(), candidate.id, "finalist",
        packing=backends.get(candidate.backend).packing_of(problem, candidate), verdict=Verdict("within_bound"),
        sample=Sample(seconds, seconds, seconds, 50, ratio, ratio, ratio),
    )  # fmt: skip


def describe(handle: gemmtune.Handle) -> dict[str, Any]:
    """What a Handle says: how many linears are served, and of the others how many for each reason."""
    return {
        "swapped": len(handle.swapped), "layouts": dict(Counter(handle.swapped.values())),
        "left": dict(Counter(handle.left.values())), "left_names": dict(handle.left),
    }  # fmt: skip


# --- a row -------------------------------------------------------------------------------------------------------


class Row:
    """The plain model, the optimized one, and what their outputs are compared by."""

    def __init__(self, case: Case, dtype: torch.dtype, folder: Path, *, pack: bool) -> None:
        self.case, self.dtype, self.folder = case, dtype, folder
        self.examples = [cast(case.inputs(length), dtype) for length in case.lengths]
        self.plain = make_plain(case, dtype)
        self.saved = {name: _copied(value) for name, value in self.plain.state_dict().items()}
        self.store = MemoryStore()
        self.handle: gemmtune.Handle | None = None
        if not pack:
            self.packed = copy.deepcopy(self.plain)
        elif case.optimize_first and case.change is not None:
            torch.manual_seed(0)
            base = with_weights_in(case.make(), dtype).to(DEVICE).eval()
            self._optimize(base)
            torch.manual_seed(1)
            self.packed = case.change(base).eval()
        else:
            self.packed = copy.deepcopy(self.plain)
            self._optimize(self.packed)
        self.wanted = [run(self.plain, inputs) for inputs in self.examples]
        self.reference, self.reference_note = self._find_reference()

    def _optimize(self, model: nn.Module) -> None:
        pack_everything(model, self.examples, self.store)
        self.handle = gemmtune.optimize(model, self.examples, tune=False, store=self.store)

    def _find_reference(self) -> tuple[list[list[Tensor]], str]:
        """Outputs in float64, and a note where the model does not run in float64."""
        try:
            model = make_reference(self.plain)
            found = [run(model, cast(inputs, torch.float64)) for inputs in self.examples]
        except Exception as error:  # whatever the model's library raises on a dtype that it does not expect
            return self.wanted, f"the reference is the plain model itself, as float64 fails: {_words(error)}"
        return found, ""

    def error(self, outputs: Sequence[Tensor], example: int = 0) -> float:
        """The largest difference from the reference, as a share of the largest magnitude of that output. Raises Failed
        for other shapes and for values that are not finite where the reference's are."""
        return difference(outputs, self.reference[example])

    def check(
        self, outputs: Sequence[Tensor], what: str, example: int = 0, *, plain: float | None = None,
        slack: float | None = None,
    ) -> str:  # fmt: skip
        """Raises Failed unless outputs are within the bound. plain: the plain model's error, where it was asked for
        under other conditions than eager mode."""
        allowed = self.error(self.wanted[example], example) if plain is None else plain
        limit = 2 * allowed + (SLACK[self.dtype] if slack is None else slack)
        if self.reference_note:
            limit *= 8  # not an error of the plain model, but the difference of two that both round
        got = self.error(outputs, example)
        if not got <= limit:
            words = f"error {got:.2e} of the largest value, the plain model's {allowed:.2e}, limit {limit:.2e}"
            raise Failed(f"{what}: {words}")
        return f"{got:.1e} (plain {allowed:.1e})"

    def equal(self, got: Sequence[Tensor], wanted: Sequence[Tensor], what: str) -> None:
        """Raises Failed unless outputs are equal bit for bit."""
        if not _equal(got, wanted):
            raise Failed(f"{what}: outputs differ by {difference(got, wanted):.2e} of the largest value")


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _equal(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return len(got) == len(wanted) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(got, wanted, strict=True)
    )


def difference(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference as a share of the largest finite magnitude of that output."""
    if [tuple(t.shape) for t in got] != [tuple(t.shape) for t in wanted]:
        raise Failed(f"shapes {[tuple(t.shape) for t in got]} in the place of {[tuple(t.shape) for t in wanted]}")
    worst = 0.0
    for mine, theirs in zip(got, wanted, strict=True):
        a, b = mine.detach().double(), theirs.detach().double()
        finite = b.isfinite() & (b.abs() < 1e30)  # masks are filled with the lowest value of a dtype
        if not bool(a[finite].isfinite().all()):
            raise Failed("a value is not finite where the reference's is")
        if bool(finite.any()):
            scale = float(b[finite].abs().max())
            worst = max(worst, float((a[finite] - b[finite]).abs().max()) / max(scale, 1e-30))
    return worst


def _words(error: BaseException) -> str:
    """The first line of what was raised, with its type."""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text[:220]}"


def _or_plain(optimized: Callable[[], Any], plain: Callable[[], Any]) -> Any:
    """What the first gives. Where it fails, and the second as well, the check is not applicable."""
    try:
        return optimized()
    except (Failed, NotApplicable):
        raise
    except Exception as error:  # anything that torch or the model's library raises
        try:
            plain()
        except Exception as own:
            raise NotApplicable(f"plain torch fails: {_words(own)}") from own
        raise Failed(_words(error)) from error


# --- checks ------------------------------------------------------------------------------------------------------


def check_outputs(row: Row) -> str:
    found = [
        row.check(run(row.packed, inputs), f"{length} tokens", place)
        for place, (length, inputs) in enumerate(zip(row.case.lengths, row.examples, strict=True))
    ]
    return "; ".join(found) + (f" ({row.reference_note})" if row.reference_note else "")


def check_modes(row: Row) -> str:
    """no_grad, inference_mode and gradients enabled (of weights that require none) give the same bits."""
    inputs = row.examples[0]
    without = run(row.packed, inputs)
    with torch.inference_mode():
        row.equal(floats(row.packed(**inputs)), without, "inference_mode against no_grad")
    frozen = copy.deepcopy(row.packed).requires_grad_(False)
    other = copy.deepcopy(row.plain).requires_grad_(False)
    with torch.enable_grad():
        got = _or_plain(lambda: floats(frozen(**inputs)), lambda: other(**inputs))
        allowed = row.error(floats(other(**inputs)))
    row.check(got, "gradients enabled", plain=allowed)
    return ""


def check_generate(row: Row) -> str:
    if row.case.prompt is None:
        raise NotApplicable("the class does not generate")
    prompt = cast(row.case.prompt(), row.dtype)

    def generate(model: Any) -> Any:
        return model.generate(
            **prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip

    got = _or_plain(lambda: generate(row.packed), lambda: generate(row.plain))
    wanted = generate(row.plain)
    mine, theirs = got.sequences, wanted.sequences
    if mine.shape == theirs.shape and bool((mine == theirs).all()):
        return f"{NEW_TOKENS} equal tokens"
    start = theirs.shape[1] - NEW_TOKENS
    step = int((mine[:, start:] != theirs[:, start:]).any(0).nonzero()[0])
    ours, plain = got.logits[step][0].double(), wanted.logits[step][0].double()
    gap = float(plain.max() - plain[int(mine[0, start + step])])
    scale = float(plain.abs().max())
    apart = float((ours - plain).abs().max())
    # As in Row.check: without a float64 reference the plain model's own error is not known, and does not count as 0.
    limit = (3 * row.error(row.wanted[0]) + SLACK[row.dtype]) * (8 if row.reference_note else 2) * scale
    words = f"token {step} differs: its logits are {gap:.2e} apart in the plain model, the models differ by {apart:.2e}"
    if apart > limit or gap > 2 * apart:
        raise Failed(f"{words}, limit {limit:.2e}")
    return f"{step} equal tokens, then a tie ({words})"


def check_state(row: Row) -> str:
    """A saved state_dict has the plain model's names and bits, and a plain model loads it; so do the files of
    save_pretrained."""
    inputs = row.examples[0]
    path = row.folder / "state.pt"
    state = row.packed.state_dict()
    torch.save(state, path)
    loaded = _or_plain(
        lambda: torch.load(path, weights_only=False),
        lambda: torch.save(row.plain.state_dict(), row.folder / "plain.pt"),
    )
    if set(loaded) != set(row.saved):
        raise Failed(f"names differ: {sorted(set(loaded) ^ set(row.saved))[:4]}")
    for name, value in row.saved.items():
        if isinstance(value, Tensor) and type(value) is Tensor and not torch.equal(loaded[name], value):
            raise Failed(f"{name} is not what it was")
    fresh = make_plain(row.case, row.dtype, seed=7)
    fresh.load_state_dict(loaded)
    row.equal(run(fresh, inputs), row.wanted[0], "a plain model with the saved state_dict")
    row.packed.load_state_dict(row.saved)
    row.check(run(row.packed, inputs), "after load_state_dict into the optimized model")
    if not hasattr(row.packed, "save_pretrained"):
        return "state_dict; the class has no save_pretrained"
    model: Any = row.packed
    if row.case.package == "peft" and row.case.extra:
        model.save_pretrained(row.folder / "pretrained")
        return "state_dict; save_pretrained wrote the adapter"
    theirs: Any = row.plain
    _or_plain(
        lambda: model.save_pretrained(row.folder / "pretrained"),
        lambda: theirs.save_pretrained(row.folder / "pretrained_plain"),
    )
    if row.case.package == "torchao":
        return "state_dict and save_pretrained"
    again = type(model).from_pretrained(row.folder / "pretrained", dtype=row.dtype).to(DEVICE).eval()
    row.equal(run(again, inputs), row.wanted[0], "from_pretrained of what save_pretrained wrote")
    return "state_dict and save_pretrained"


def check_deepcopy(row: Row) -> str:
    twin = _or_plain(lambda: copy.deepcopy(row.packed), lambda: copy.deepcopy(row.plain))
    row.equal(run(twin, row.examples[0]), run(row.packed, row.examples[0]), "a deepcopy")
    if _packed_count(twin) != _packed_count(row.packed):
        raise Failed(f"{_packed_count(twin)} packed weights in the copy of {_packed_count(row.packed)}")
    with torch.no_grad():  # a write to the copy does not reach the original
        before = run(row.packed, row.examples[0])
        for parameter in twin.parameters():
            if isinstance(parameter, PackedTensor) and not parameter.quantized:  # those refuse the write
                parameter.zero_()
        row.equal(run(row.packed, row.examples[0]), before, "after a write to its deepcopy")
    return ""


def _packed_count(model: nn.Module) -> int:
    return sum(isinstance(parameter, PackedTensor) for parameter in model.parameters())


def check_pickle(row: Row) -> str:
    data = _or_plain(lambda: pickle.dumps(row.packed), lambda: pickle.dumps(row.plain))
    twin = pickle.loads(data)
    row.equal(run(twin, row.examples[0]), run(row.packed, row.examples[0]), "an unpickled model")
    buffer = io.BytesIO()
    torch.save(row.packed, buffer)
    buffer.seek(0)
    row.equal(
        run(torch.load(buffer, weights_only=False), row.examples[0]), run(row.packed, row.examples[0]), "torch.save"
    )
    return f"{_packed_count(twin)} packed weights"


def check_export(row: Row) -> str:
    inputs = row.examples[0]

    def export(model: nn.Module) -> Any:
        with torch.no_grad():
            return torch.export.export(Flat(model), (), inputs)

    program = _or_plain(lambda: export(row.packed), lambda: export(row.plain))
    path = row.folder / "program.pt2"
    _or_plain(lambda: torch.export.save(program, path), lambda: _saved(export(row.plain), row.folder))
    outputs = _or_plain(
        lambda: _fresh(row, "export", path), lambda: _fresh(row, "export", _saved(export(row.plain), row.folder))
    )
    return row.check(outputs, "in a fresh process") + f", {_served_nodes(program)} products by gemmtune"


def _saved(program: Any, folder: Path) -> Path:
    torch.export.save(program, folder / "plain.pt2")
    return folder / "plain.pt2"


def _served_nodes(program: Any) -> int:
    return sum("gemmtune" in str(node.target) for node in program.graph.nodes if node.op == "call_function")


def check_aoti(row: Row) -> str:
    inputs = row.examples[0]

    def package(model: nn.Module, name: str) -> Path:
        with torch.no_grad():
            program = torch.export.export(Flat(model), (), inputs)
            path = row.folder / name
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        return path

    try:
        path = _or_plain(lambda: package(row.packed, "packed.pt2"), lambda: package(row.plain, "plain.pt2"))
    except Failed as failure:
        frozen = copy.deepcopy(row.packed).requires_grad_(False)
        try:
            path = package(frozen, "packed.pt2")
        except Exception:  # what was raised first says enough
            raise failure from None
        row.check(_fresh(row, "aoti", path), "in a fresh process, of frozen weights")
        raise Failed(f"{failure}; after requires_grad_(False) it works") from None
    outputs = _or_plain(lambda: _fresh(row, "aoti", path), lambda: _fresh(row, "aoti", package(row.plain, "plain.pt2")))
    try:
        return row.check(outputs, "in a fresh process")
    except Failed:  # AOTInductor rounds differently from eager code: by its own error, then
        own = row.error(_fresh(row, "aoti", package(row.plain, "plain.pt2")))
        return row.check(outputs, "in a fresh process", plain=max(own, row.error(row.wanted[0])))


def _fresh(row: Row, kind: str, path: Path) -> list[Tensor]:
    """What a process that has imported gemmtune and the model's library computes by a saved program."""
    torch.save(row.examples[0], row.folder / "inputs.pt")
    command = [sys.executable, __file__, "--load", kind, str(path), str(row.folder)]
    imports = {type(module).__module__ for module in row.plain.modules() if row.case.package in type(module).__module__}
    imports |= {"torchao"} if row.case.package == "torchao" else set()
    command += ["--imports", *sorted(imports)]  # libraries have operators of their own (transformers: grouped products)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=FRESH_LIMIT_S, check=False)
    if ended.returncode:
        last = next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), "")
        raise RuntimeError(f"a fresh process ended with {ended.returncode}: {last}")
    found: list[Tensor] = torch.load(row.folder / "outputs.pt")
    return found


def load_fresh(kind: str, path: str, folder: Path, imports: Sequence[str]) -> None:
    """The fresh process: run a saved program and save its floating outputs."""
    for name in imports:
        importlib.import_module(name)
    inputs = torch.load(folder / "inputs.pt")
    with torch.no_grad():
        if kind == "export":
            outputs = torch.export.load(path).module()(**inputs)
        else:
            given = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
            model: Any = torch._inductor.aoti_load_package(path)
            try:
                outputs = model(**inputs)
            except (TypeError, ValueError, RuntimeError):  # constants among the inputs are not asked for
                outputs = model(**given)
    torch.save(floats(outputs), folder / "outputs.pt")


def check_compile(row: Row) -> str:
    inputs = row.examples[0]
    torch._dynamo.reset()
    compiled: Any = torch.compile(row.packed)
    other: Any = torch.compile(row.plain)
    outputs = _or_plain(lambda: run(compiled, inputs), lambda: run(other, inputs))
    try:
        words = row.check(outputs, "compiled")
    except Failed:  # Inductor rounds differently from eager code: by its own error, then
        own = row.error(run(other, inputs))
        words = row.check(outputs, "compiled", plain=max(own, row.error(row.wanted[0])))
    row.equal(run(compiled, inputs), outputs, "a second compiled call")
    row.check(run(row.packed, inputs), "eager code after torch.compile")
    return words


def check_autocast(row: Row) -> str:
    inputs = row.examples[0]

    def forward(model: nn.Module) -> list[Tensor]:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            return run(model, inputs)

    outputs = _or_plain(lambda: forward(row.packed), lambda: forward(row.plain))
    wanted = forward(row.plain)
    if [t.dtype for t in outputs] != [t.dtype for t in wanted]:
        raise Failed(f"dtypes {[t.dtype for t in outputs]} in the place of {[t.dtype for t in wanted]}")
    return row.check(outputs, "under autocast", plain=row.error(wanted), slack=SLACK[torch.bfloat16])


def check_profiler(row: Row) -> str:
    """The profiler changes nothing, and its table says which products are no more PyTorch's."""
    before = run(row.packed, row.examples[0])
    seen, outputs = _profiled(row.packed, row.examples[0])
    plain, _ = _profiled(row.plain, row.examples[0])
    row.equal(outputs, before, "under the profiler")
    ours = ", ".join(f"{name} x{count}" for name, count in sorted(seen.items()) if name.startswith("gemmtune::"))
    mine, theirs = (sum(found[name] for name in _PRODUCTS) for found in (seen, plain))
    if _packed_count(row.packed) and theirs and mine >= theirs:
        raise Failed(f"{_packed_count(row.packed)} weights are packed; PyTorch still runs {mine} of {theirs} products")
    return f"{mine} of {theirs} products are PyTorch's; {ours or 'no gemmtune:: event'}"


# What every product of a matrix by a weight ends in, in eager code.
_PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::mkldnn_linear",
    "aten::_int_mm", "aten::_scaled_mm", "aten::_weight_int4pack_mm",
)  # fmt: skip


def _profiled(model: nn.Module, inputs: Inputs) -> tuple[Counter[str], list[Tensor]]:
    with torch.profiler.profile(record_shapes=True) as profile:
        outputs = run(model, inputs)
    return Counter({event.key: event.count for event in profile.key_averages()}), outputs


def check_backward(row: Row) -> str:
    """Gradients of the input, in float64's bound: the weights are frozen."""
    name = row.case.differentiable
    if name is None:
        raise NotApplicable("the forward takes no single floating input")

    def gradient(model: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = cast(row.examples[0], dtype)
        if name == "inputs_embeds":
            embedded = model.get_input_embeddings()(inputs.pop("input_ids"))
            inputs[name] = embedded.detach()
        inputs[name] = inputs[name].detach().clone().requires_grad_(True)
        with torch.enable_grad():
            out = floats(model(**inputs))[0]
            out.double().cos().sum().backward()  # type: ignore[no-untyped-call]
        grad: Tensor = inputs[name].grad
        return [grad]

    frozen = copy.deepcopy(row.packed).requires_grad_(False)
    plain = copy.deepcopy(row.plain).requires_grad_(False)
    mine = _or_plain(lambda: gradient(frozen, row.dtype), lambda: gradient(plain, row.dtype))
    try:
        wanted = gradient(plain, row.dtype)
    except RuntimeError as error:  # torch has no derivative of a product that gemmtune has one of
        raise NotApplicable(f"plain torch fails: {_words(error)}") from error
    if row.reference_note:
        raise NotApplicable(row.reference_note)
    truth = gradient(make_reference(plain).requires_grad_(False), torch.float64)
    allowed = difference(wanted, truth)
    got, limit = difference(mine, truth), 2 * allowed + 4 * SLACK[row.dtype]
    if not got <= limit:
        raise Failed(f"gradient of {name}: error {got:.2e}, the plain model's {allowed:.2e}, limit {limit:.2e}")
    return f"{name}: {got:.1e} (plain {allowed:.1e})"


def check_merge(row: Row) -> str:
    """PEFT: merging writes to packed weights, and unmerging takes it back."""
    if "merge" not in row.case.extra:
        raise NotApplicable("no adapters")
    inputs = row.examples[0]
    mine: Any = copy.deepcopy(row.packed)
    theirs: Any = copy.deepcopy(row.plain)
    for change in ("merge_adapter", "unmerge_adapter"):
        getattr(mine, change)()
        getattr(theirs, change)()
        row.check(run(mine, inputs), change, plain=row.error(run(theirs, inputs)))
    with mine.disable_adapter(), theirs.disable_adapter():
        found = difference(run(mine, inputs), run(theirs, inputs))
        if found > 16 * SLACK[row.dtype]:
            raise Failed(f"disable_adapter: outputs differ by {found:.2e}")
    merged, plainly = mine.merge_and_unload(), theirs.merge_and_unload()
    row.check(run(merged, inputs), "merge_and_unload", plain=row.error(run(plainly, inputs)))
    return f"merge, unmerge, disable, merge_and_unload; then {_packed_count(merged)} packed weights"


def check_restore(row: Row) -> str:
    if row.handle is None:
        return "not optimized"
    row.handle.restore()
    left = [name for name, parameter in row.packed.named_parameters() if isinstance(parameter, PackedTensor)]
    if left:
        raise Failed(f"still packed: {left[:3]}")
    state = row.packed.state_dict()
    if list(state) != list(row.saved):
        raise Failed("the names of the state_dict are not what they were")
    for name, value in row.saved.items():
        if isinstance(value, Tensor) and type(value) is Tensor and not torch.equal(state[name], value):
            raise Failed(f"{name} is not what it was")
    for place, inputs in enumerate(row.examples):
        row.equal(run(row.packed, inputs), row.wanted[place], "after restore()")
    return "bitwise"


# restore() comes last: it ends what the others need. What crashes is told by the line that says it begins.
CHECKS: dict[str, Callable[[Row], str]] = {
    "outputs": check_outputs, "modes": check_modes, "generate": check_generate, "deepcopy": check_deepcopy,
    "pickle": check_pickle, "autocast": check_autocast, "profiler": check_profiler, "backward": check_backward,
    "merge": check_merge, "state": check_state, "export": check_export, "aoti": check_aoti, "compile": check_compile,
    "restore": check_restore,
}  # fmt: skip


def run_checks(case: Case, dtype: torch.dtype, names: Sequence[str], report: Report, *, pack: bool) -> None:
    """Every named check, each reported as it begins and ends."""
    with tempfile.TemporaryDirectory(prefix="gemmtune-models-") as folder:
        report.begin("setup")
        row = Row(case, dtype, Path(folder), pack=pack)
        linears = sum(isinstance(module, nn.Linear) for module in row.plain.modules())
        report.add(linears=linears, reference=row.reference_note or "float64")
        if row.handle is not None:
            report.add(packed=describe(row.handle))
        report.end("setup", "ok", "")
        for name in names:
            report.begin(name)
            try:
                report.end(name, "ok", CHECKS[name](row))
            except NotApplicable as reason:
                report.end(name, "not applicable", str(reason))
            except Failed as failure:
                report.end(name, "failed", str(failure))
            except Exception as error:  # a row of the table, not the end of it
                report.end(name, "failed", _words(error))


# --- times -------------------------------------------------------------------------------------------------------


def run_times(case: Case, dtype: torch.dtype, seconds: float, budget: float, report: Report) -> None:
    """Tune and optimize the model as a user does, then time whole forwards of it and of the plain model in pairs."""
    report.begin("time")
    store = MemoryStore()
    plain = make_plain(case, dtype)
    examples = [cast(case.inputs(length), dtype) for length in case.lengths]
    start = time.perf_counter()
    if case.optimize_first and case.change is not None:
        torch.manual_seed(0)
        tuned = with_weights_in(case.make(), dtype).to(DEVICE).eval()
        handle = gemmtune.optimize(tuned, examples, store=store, budget=budget, latency="eager")
        torch.manual_seed(1)
        tuned = case.change(tuned).eval()
    else:
        tuned = copy.deepcopy(plain)
        handle = gemmtune.optimize(tuned, examples, store=store, budget=budget, latency="eager")
    spent = time.perf_counter() - start
    found = {}
    for length, inputs in zip(case.lengths, examples, strict=True):
        entrants = {
            name: Entrant(lambda _, model=model, inputs=inputs: forward(model, inputs))  # type: ignore[misc]
            for name, model in (("plain", plain), ("optimized", tuned))
        }
        with torch.no_grad():
            times = interleave(entrants, sets=1, seconds=seconds, rounds=(15, 301))
        ratio = ratio_interval(times["optimized"], times["plain"])
        found["prefill" if length == TOKENS else f"{length} token"] = {
            "ratio": ratio.center, "low": ratio.lo, "high": ratio.hi, "pairs": len(times["plain"]),
            "plain_s": Spread.of(times["plain"]).median, "optimized_s": Spread.of(times["optimized"]).median,
            "plain_times": times["plain"], "optimized_times": times["optimized"],
        }  # fmt: skip
    report.add(tuned=describe(handle), tuning_s=spent, times=found)
    report.end("time", "ok", "")


def forward(model: nn.Module, inputs: Inputs) -> None:
    """One whole forward, to its end on the device."""
    model(**inputs)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Report:
    """Lines of JSON for the process that asked: what begins, what ended, and what was found."""

    def __init__(self, path: Path) -> None:
        self.path, self.started = path, 0.0

    def begin(self, name: str) -> None:
        """A check begins."""
        self.started = time.perf_counter()
        self._write({"begin": name})

    def end(self, name: str, outcome: str, detail: str) -> None:
        """A check ended."""
        seconds = round(time.perf_counter() - self.started, 2)
        self._write({"end": name, "outcome": outcome, "detail": detail, "seconds": seconds})

    def add(self, **values: Any) -> None:
        """More of the row."""
        self._write({"add": values})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", nargs=3, metavar=("KIND", "PATH", "FOLDER"), help="the fresh process of a check")
    parser.add_argument("--imports", nargs="*", default=[])
    parser.add_argument("--row", nargs=3, metavar=("NAME", "DTYPE", "REPORT"))
    parser.add_argument("--checks", nargs="*", default=[])
    parser.add_argument("--plain", action="store_true", help="checks of the plain model alone, not optimized")
    parser.add_argument("--seconds", type=float, help="time a forward for this long, instead of checking")
    parser.add_argument("--budget", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    DEVICE = torch.device(args.device)
    if args.load:
        import gemmtune.nn  # noqa: F401 - registers the operators that saved programs call

        load_fresh(args.load[0], args.load[1], Path(args.load[2]), args.imports)
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
