"""The Triton kernels of gemmtune. They run compiled on a GPU and, in tests, in Triton's interpreter.

In ``tiled`` each program computes one tile of the output. In ``persistent`` one program per multiprocessor loops over
tiles with TMA loads; ``convert`` may run before it. Names: A [M, K] and B [K, N] have the leading dimensions ``lda``
and ``ldb``; ``*_COL`` says that the columns of a matrix are contiguous. Up to five epilogue steps run on the
accumulator before it is stored. Step i has the tensor ``t<i>`` (None when it takes none), that tensor's leading
dimension ``ld<i>``, and the constants ``KIND<i>``, ``AXIS<i>``, ``VALUE<i>``, ``LO<i>``, ``HI<i>``.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"))


def _levels_asm(high: bool, exponent: str, one: str, less: str, kind: str) -> tl.constexpr:
    """Return PTX that converts one half of each of 4 bytes ($2) to numbers ($0, $1)."""
    half = "shr.u32 t, $2, 4; and.b32 t, t, 0x0f0f0f0f;" if high else "and.b32 t, $2, 0x0f0f0f0f;"
    return tl.constexpr(
        "{ .reg .b32 t, u, v, one, less;"
        f"{half} prmt.b32 u, t, {exponent}, 0x4140; prmt.b32 v, t, {exponent}, 0x4342;"
        f"mov.b32 one, {one}; mov.b32 less, {less};"
        f"fma.rn.{kind}x2 $0, u, one, less; fma.rn.{kind}x2 $1, v, one, less; }}"
    )


_LOW_BF16 = _levels_asm(False, "0x43434343", "0x3f803f80", "0xc308c308", "bf16")
_HIGH_BF16 = _levels_asm(True, "0x43434343", "0x3f803f80", "0xc308c308", "bf16")
_LOW_FP16 = _levels_asm(False, "0x64646464", "0x3c003c00", "0xe408e408", "f16")
_HIGH_FP16 = _levels_asm(True, "0x64646464", "0x3c003c00", "0xe408e408", "f16")


@triton.jit
def _ahead(t_ptr, rows, cols, M, N, AXIS: tl.constexpr):
    """Load the values that a step takes of a vector (not of a matrix). It is called before the products, so that the
    load has completed when they end."""
    values = 0
    if AXIS == "tensor":
        values = tl.load(t_ptr)
    elif AXIS == "row":
        values = tl.load(t_ptr + rows, mask=rows < M)
    elif AXIS == "col":
        values = tl.load(t_ptr + cols, mask=cols < N)
    return values


@triton.jit
def _step(
    acc, t_ptr, v, ld, rows, cols, M, N,
    KIND: tl.constexpr, AXIS: tl.constexpr, VALUE: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
):  # fmt: skip
    """Compute one step of the epilogue. rows, cols: the tile's indices, shaped to broadcast against ``acc``; v: the
    step's values from ``_ahead``."""
    if KIND == "relu":
        acc = tl.where(acc < 0, tl.zeros_like(acc), acc)  # keeps NaN, unlike maximum(acc, 0)
    elif KIND == "gelu":
        acc = 0.5 * acc * (1.0 + tl.math.erf(acc * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        acc = acc * tl.sigmoid(1.5957691216057308 * (acc + 0.044715 * acc * acc * acc))  # 1 + tanh(u) = 2 sigmoid(2u)
    elif KIND == "silu":
        acc = acc * tl.sigmoid(acc)
    elif KIND == "clamp":
        if LO is not None:
            acc = tl.where(acc < LO, LO, acc)
        if HI is not None:
            acc = tl.where(acc > HI, HI, acc)
    elif KIND == "cast.bfloat16":
        acc = acc.to(tl.bfloat16).to(tl.float32)
    elif KIND == "cast.float16":
        acc = acc.to(tl.float16).to(tl.float32)
    elif KIND == "number":
        acc = acc * VALUE
    elif KIND != "":
        if AXIS == "full":
            v = tl.load(t_ptr + rows.to(tl.int64) * ld + cols, mask=(rows < M) & (cols < N))
        t = v.to(acc.dtype)
        if VALUE != 1.0:
            t = t * VALUE
        if KIND == "scale" or KIND == "mul":
            acc = acc * t
        else:
            acc = acc + t
    return acc


@triton.jit
def _rounded(acc, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Saturate, and round to the nearest integer (ties to even): adding 1.5 * 2**23 leaves no bits for a fraction. NaN
    becomes 0."""
    if acc.dtype == tl.int32:
        return tl.minimum(tl.maximum(acc, LOW), HIGH)
    bounded = tl.where(acc < LOW, LOW * 1.0, tl.where(acc > HIGH, HIGH * 1.0, acc))
    return tl.where(acc != acc, 0.0, (bounded + 12582912.0) - 12582912.0)


@triton.jit
def _vectors(tensors, rows, cols, M, N, STEPS: tl.constexpr):
    """Return the values from ``_ahead`` for each step, or 0."""
    v0, v1 = _ahead(tensors[0], rows, cols, M, N, STEPS[0][1]), _ahead(tensors[1], rows, cols, M, N, STEPS[1][1])
    v2, v3 = _ahead(tensors[2], rows, cols, M, N, STEPS[2][1]), _ahead(tensors[3], rows, cols, M, N, STEPS[3][1])
    return v0, v1, v2, v3, _ahead(tensors[4], rows, cols, M, N, STEPS[4][1])


@triton.jit
def _finish(
    acc, c_ptr, ldc, rows, cols, M, N, tensors, vectors, leads, STEPS: tl.constexpr, FLOAT_AT: tl.constexpr
):  # fmt: skip
    """Compute the epilogue, round once to the output's dtype, and store. vectors: the values from ``_vectors``; leads:
    the tensors' leading dimensions; STEPS: each step's KIND, AXIS, VALUE, LO and HI; FLOAT_AT: the step before which
    integers become floats."""
    for i in tl.static_range(5):
        if i == FLOAT_AT:
            acc = acc.to(tl.float32)
        acc = _step(
            acc, tensors[i], vectors[i], leads[i], rows, cols, M, N,
            STEPS[i][0], STEPS[i][1], STEPS[i][2], STEPS[i][3], STEPS[i][4],
        )  # fmt: skip
    if c_ptr.dtype.element_ty == tl.int8:
        acc = _rounded(acc, -128, 127)
    elif c_ptr.dtype.element_ty == tl.uint8:
        acc = _rounded(acc, 0, 255)
    tl.store(c_ptr + rows.to(tl.int64) * ldc + cols, acc.to(c_ptr.dtype.element_ty), mask=(rows < M) & (cols < N))


@triton.jit
def _tile_position(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return the tile's row and column. GROUP rows of tiles are processed together, so that their shared operands stay
    in the L2."""
    width = GROUP * tiles_n
    first = tile // width * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    return first + tile % width % size, tile % width // size


@triton.jit
def _product(
    a_first, a_places, b_first, b_places, s_ptr, z_ptr, acc, row_ok, col_ok, cols, lo, hi, N, K, lda, ldb,
    A_COL: tl.constexpr, B_COL: tl.constexpr, EVEN_K: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
    QUANT: tl.constexpr, QGROUP: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    """Add the products of blocks lo..hi of K to acc. a_places, b_places: offsets of block lo's elements from a_first
    and b_first; B's are [BN, BK] if B_COL, else [BK, BN]. QGROUP: K elements that share a scale; 0: all. row_ok,
    col_ok: masks, None where all elements may be read.

    PROMOTE: how many products fp8 matrix units may add up themselves, with fewer bits, before float32 addition.
    """
    ks = tl.arange(0, BK)
    for block in tl.range(lo, hi):
        # Along K the block's offset is added to the element offsets, not to the pointers: more instructions, but less
        # time. Updating offsets or pointers from block to block would take more of both (Triton 3.6;
        # docs/notes/triton.md).
        if A_COL:
            a_at = a_first + (block - lo) * (BK * lda).to(tl.int64) + a_places
        else:
            a_at = a_first + (a_places + (block - lo) * BK)
        if B_COL:
            b_at = b_first + (b_places + (block - lo) * BK)
        else:
            b_at = b_first + (block - lo) * (BK * ldb).to(tl.int64) + b_places
        if EVEN_K:
            a = tl.load(a_at, mask=row_ok)
            b = tl.load(b_at, mask=col_ok)
        else:
            left = K - block * BK
            a_ok = ks[None, :] < left
            if row_ok is not None:
                a_ok = a_ok & row_ok
            if B_COL:
                b_ok = ks[None, :] < left
            else:
                b_ok = ks[:, None] < left
            if col_ok is not None:
                b_ok = b_ok & col_ok
            a = tl.load(a_at, mask=a_ok, other=0)
            b = tl.load(b_at, mask=b_ok, other=0)
        if QUANT == 8:
            b = b.to(a.dtype)
        if B_COL:
            w = tl.trans(b)
        else:
            w = b
        if QGROUP:
            scale = tl.load(s_ptr + block * BK // QGROUP * N + cols, mask=cols < N).to(tl.float32)
            part = tl.dot(a, w)
            if z_ptr is not None:
                zero = tl.load(z_ptr + block * BK // QGROUP * N + cols, mask=cols < N).to(tl.float32)
                part = part - tl.sum(a.to(tl.float32), 1)[:, None] * zero
            acc = acc + part * scale
        elif SWAP:
            acc = tl.dot(tl.trans(w), tl.trans(a), acc, max_num_imprecise_acc=PROMOTE, out_dtype=acc.dtype)
        else:
            acc = tl.dot(a, w, acc, max_num_imprecise_acc=PROMOTE, out_dtype=acc.dtype)
    return acc


@triton.jit
def _levels(q, HIGH: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """Return the lower (HIGH: the upper) halves of bytes as numbers of ``dtype``, minus 8, the usual zero point: exact.

    The bits are put behind an exponent with which the last bit of the mantissa stands for 1, which is cheaper than
    converting integers: 128 + q in bfloat16, 1024 + q in float16. With PTX, four bytes are converted at a time.
    """
    if INTERPRETED or not PTX:
        bits = (q >> (4 if HIGH else 0)) & 15
        if dtype == tl.bfloat16:
            number = (bits.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        else:
            number = (bits.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    elif dtype == tl.bfloat16:
        number = tl.inline_asm_elementwise(
            _HIGH_BF16 if HIGH else _LOW_BF16, "=r,=r,r", [q], tl.bfloat16, is_pure=True, pack=4
        )
    else:
        number = tl.inline_asm_elementwise(
            _HIGH_FP16 if HIGH else _LOW_FP16, "=r,=r,r", [q], tl.float16, is_pure=True, pack=4
        )
    return number


@triton.jit
def _product_int4(
    a_ptrs, b_ptrs, s_ptr, z_ptr, acc, cols, lo, hi, N, BK: tl.constexpr, QGROUP: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Add products as ``_product`` does, for packed int4. Byte j of a block of BK contains the elements j (low half)
    and BK / 2 + j."""
    HALF: tl.constexpr = BK // 2
    for block in tl.range(lo, hi):
        a_at = a_ptrs + (block - lo) * BK
        low = tl.load(a_at)
        high = tl.load(a_at + HALF)
        b = tl.load(b_ptrs + (block - lo) * HALF)
        first = tl.dot(low, tl.trans(_levels(b, False, low.dtype, PTX)))
        second = tl.dot(high, tl.trans(_levels(b, True, low.dtype, PTX)))
        g_low = block * BK // QGROUP
        g_high = (block * BK + HALF) // QGROUP
        s_low = tl.load(s_ptr + g_low * N + cols, mask=cols < N).to(tl.float32)
        s_high = tl.load(s_ptr + g_high * N + cols, mask=cols < N).to(tl.float32)
        if z_ptr is not None:
            z_low = tl.load(z_ptr + g_low * N + cols, mask=cols < N).to(tl.float32) - 8.0
            z_high = tl.load(z_ptr + g_high * N + cols, mask=cols < N).to(tl.float32) - 8.0
            first = first - tl.sum(low.to(tl.float32), 1)[:, None] * z_low
            second = second - tl.sum(high.to(tl.float32), 1)[:, None] * z_high
        acc = acc + first * s_low
        acc = acc + second * s_high
    return acc


@triton.jit
def tiled(
    a_ptr, b_ptr, c_ptr, ws_ptr, lock_ptr, s_ptr, z_ptr, t0, t1, t2, t3, t4,
    M, N, K, lda, ldb, ldc, batch_a, batch_b, batch_c, ld0, ld1, ld2, ld3, ld4,
    A_COL: tl.constexpr, B_COL: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, SWAP: tl.constexpr,
    INTEGER: tl.constexpr, QUANT: tl.constexpr, QGROUP: tl.constexpr, PTX: tl.constexpr, PROMOTE: tl.constexpr,
    FLOAT_AT: tl.constexpr,
    KIND0: tl.constexpr, AXIS0: tl.constexpr, VALUE0: tl.constexpr, LO0: tl.constexpr, HI0: tl.constexpr,
    KIND1: tl.constexpr, AXIS1: tl.constexpr, VALUE1: tl.constexpr, LO1: tl.constexpr, HI1: tl.constexpr,
    KIND2: tl.constexpr, AXIS2: tl.constexpr, VALUE2: tl.constexpr, LO2: tl.constexpr, HI2: tl.constexpr,
    KIND3: tl.constexpr, AXIS3: tl.constexpr, VALUE3: tl.constexpr, LO3: tl.constexpr, HI3: tl.constexpr,
    KIND4: tl.constexpr, AXIS4: tl.constexpr, VALUE4: tl.constexpr, LO4: tl.constexpr, HI4: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the output, or one of SPLIT parts of its K, per program. Grid: (tiles * SPLIT, batch).

    Each program with a part of a tile stores its sums in ``ws``. The last one to finish (``lock`` counts them) adds the
    sums in the order of the parts, so that the result is the same on every run, and resets the count to 0. SWAP
    multiplies B^T by A^T: the matrix units take at least 64 rows, which few rows of A do not fill and B's columns do.
    """
    tensors, leads = (t0, t1, t2, t3, t4), (ld0, ld1, ld2, ld3, ld4)
    STEPS: tl.constexpr = (
        (KIND0, AXIS0, VALUE0, LO0, HI0), (KIND1, AXIS1, VALUE1, LO1, HI1), (KIND2, AXIS2, VALUE2, LO2, HI2),
        (KIND3, AXIS3, VALUE3, LO3, HI3), (KIND4, AXIS4, VALUE4, LO4, HI4),
    )  # fmt: skip
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    batch = tl.program_id(1).to(tl.int64)
    pid_m, pid_n = _tile_position(tile, tiles_m, tiles_n, GROUP)
    local_m, local_n, ks = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    rows, cols = pid_m * BM + local_m, pid_n * BN + local_n
    blocks = tl.cdiv(K, BK)
    share = tl.cdiv(blocks, SPLIT)
    lo = part * share
    hi = tl.minimum(lo + share, blocks)
    if SWAP:
        r, c = rows[None, :], cols[:, None]
    else:
        r, c = rows[:, None], cols[None, :]
    if QUANT == 8 and QGROUP == 0:
        scales = tl.load(s_ptr + c, mask=c < N).to(tl.float32)
    vectors = _vectors(tensors, r, c, M, N, STEPS)

    # Beyond the edges the last row and column are read again, since masks would cost more; the results are not stored.
    inside_m = tl.minimum(local_m, M - 1 - pid_m * BM)
    if EVEN_N:
        inside_n = local_n
    else:
        inside_n = tl.minimum(local_n, N - 1 - pid_n * BN)
    a_first = a_ptr + batch * batch_a
    if A_COL:
        a_first += pid_m * BM + (lo * BK).to(tl.int64) * lda
        a_places = local_m[:, None] + ks[None, :] * lda
        row_ok = rows[:, None] < M
    else:
        a_first += (pid_m * BM).to(tl.int64) * lda + lo * BK
        a_places = inside_m[:, None] * lda + ks[None, :]
        row_ok = None
    b_first = b_ptr + batch * batch_b
    if QUANT == 4:
        halves = tl.arange(0, BK // 2)
        a_low = a_first + inside_m[:, None] * lda + halves[None, :]
        b_ptrs = (
            b_first + ((pid_n * BN).to(tl.int64) * ldb + lo * (BK // 2)) + inside_n[:, None] * ldb + halves[None, :]
        )
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        acc = _product_int4(a_low, b_ptrs, s_ptr, z_ptr, acc, cols[None, :], lo, hi, N, BK, QGROUP, PTX)
    else:
        if B_COL:
            b_first += (pid_n * BN).to(tl.int64) * ldb + lo * BK
            b_places = inside_n[:, None] * ldb + ks[None, :]
            col_ok = None
        else:
            b_first += pid_n * BN + (lo * BK).to(tl.int64) * ldb
            b_places = local_n[None, :] + ks[:, None] * ldb
            if EVEN_N:
                col_ok = None
            else:
                col_ok = cols[None, :] < N
        if SWAP:
            acc = tl.zeros((BN, BM), dtype=tl.int32 if INTEGER else tl.float32)
        else:
            acc = tl.zeros((BM, BN), dtype=tl.int32 if INTEGER else tl.float32)
        acc = _product(
            a_first, a_places, b_first, b_places, s_ptr, z_ptr, acc, row_ok, col_ok, cols[None, :], lo, hi, N, K,
            lda, ldb, A_COL, B_COL, EVEN_K, BK, SWAP, QUANT, QGROUP, PROMOTE,
        )  # fmt: skip

    if SWAP:
        places = local_n[:, None] * BM + local_m[None, :]
    else:
        places = local_m[:, None] * BN + local_n[None, :]
    if SPLIT > 1:
        number = batch * (tiles_m * tiles_n) + tile
        area = ws_ptr + number * (SPLIT * BM * BN)
        tl.store(area + part * (BM * BN) + places, acc)
        tl.debug_barrier()  # all threads have stored their sums before one thread signals that
        arrived = tl.atomic_add(lock_ptr + number, 1, sem="acq_rel")
        if arrived == SPLIT - 1:
            acc = tl.load(area + places, cache_modifier=".cg")
            for other in tl.range(1, SPLIT):
                acc += tl.load(area + other * (BM * BN) + places, cache_modifier=".cg")
            tl.store(lock_ptr + number, 0)
            if QUANT == 8 and QGROUP == 0:
                acc = acc * scales
            _finish(acc, c_ptr + batch * batch_c, ldc, r, c, M, N, tensors, vectors, leads, STEPS, FLOAT_AT)
    else:
        if QUANT == 8 and QGROUP == 0:
            acc = acc * scales
        _finish(acc, c_ptr + batch * batch_c, ldc, r, c, M, N, tensors, vectors, leads, STEPS, FLOAT_AT)


@triton.jit
def _first_row_read(pid_m, M, BM: tl.constexpr):
    """Return the first row of A that a tile reads. The last tile starts earlier than at its own rows, so that TMA reads
    no rows beyond M: filling rows with zeros takes TMA longer than reading them."""
    return tl.minimum(pid_m * BM, tl.maximum(M - BM, 0))


@triton.jit
def _fetched(
    a_desc, b_desc, pid_m, pid_n, lo, hi, M, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    INTEGER: tl.constexpr, QUANT: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    """Return the sum over blocks lo..hi of a tile's K; A and B are loaded through descriptors."""
    acc = tl.zeros((BM, BN), dtype=tl.int32 if INTEGER else tl.float32)
    first = _first_row_read(pid_m, M, BM)
    for block in tl.range(lo, hi):
        a = a_desc.load([first, block * BK])
        b = b_desc.load([pid_n * BN, block * BK])
        if QUANT == 8:
            b = b.to(a.dtype)
        acc = tl.dot(a, b.T, acc, max_num_imprecise_acc=PROMOTE, out_dtype=acc.dtype)
    return acc


@triton.jit
def _stored(
    acc, c_ptr, s_ptr, pid_m, pid_n, M, N, ldc, tensors, leads,
    BM: tl.constexpr, BN: tl.constexpr, QUANT: tl.constexpr, STEPS: tl.constexpr, FLOAT_AT: tl.constexpr,
):  # fmt: skip
    """Apply scales and the epilogue to a tile's sum and store it."""
    rows = (_first_row_read(pid_m, M, BM) + tl.arange(0, BM))[:, None]
    rows = tl.where(rows < pid_m * BM, M, rows)  # the tile before stores these
    cols = (pid_n * BN + tl.arange(0, BN))[None, :]
    if QUANT == 8:
        acc = acc * tl.load(s_ptr + cols, mask=cols < N).to(tl.float32)
    vectors = _vectors(tensors, rows, cols, M, N, STEPS)
    _finish(acc, c_ptr, ldc, rows, cols, M, N, tensors, vectors, leads, STEPS, FLOAT_AT)


@triton.jit
def _joined(acc, ws_ptr, lock_ptr, number, position, last, AREA: tl.constexpr, places):
    """Return the sum of a shared tile: acc, the sum over the first blocks of its K, plus the partial sums that programs
    of later positions stored.

    They are added in the order of the positions, so that the sum is the same on every run. number: the tile's number
    among the shared ones; last: the position of the tile's last program.
    """
    while tl.atomic_add(lock_ptr + number, 0, sem="acquire") < last - position:
        pass
    tl.debug_barrier()  # no thread reads before the thread that polls has seen all of them
    for other in tl.range(position + 1, last + 1):
        acc += tl.load(ws_ptr + other * AREA + places, cache_modifier=".cg")
    tl.store(lock_ptr + number, 0)
    return acc


@triton.jit
def persistent(
    a_desc, b_desc, c_ptr, ws_ptr, lock_ptr, s_ptr, t0, t1, t2, t3, t4, M, N, K, ldc, ld0, ld1, ld2, ld3, ld4, PROGRAMS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STREAM: tl.constexpr,
    INTEGER: tl.constexpr, QUANT: tl.constexpr, PROMOTE: tl.constexpr, FLOAT_AT: tl.constexpr,
    KIND0: tl.constexpr, AXIS0: tl.constexpr, VALUE0: tl.constexpr, LO0: tl.constexpr, HI0: tl.constexpr,
    KIND1: tl.constexpr, AXIS1: tl.constexpr, VALUE1: tl.constexpr, LO1: tl.constexpr, HI1: tl.constexpr,
    KIND2: tl.constexpr, AXIS2: tl.constexpr, VALUE2: tl.constexpr, LO2: tl.constexpr, HI2: tl.constexpr,
    KIND3: tl.constexpr, AXIS3: tl.constexpr, VALUE3: tl.constexpr, LO3: tl.constexpr, HI3: tl.constexpr,
    KIND4: tl.constexpr, AXIS4: tl.constexpr, VALUE4: tl.constexpr, LO4: tl.constexpr, HI4: tl.constexpr,
):  # fmt: skip
    """Compute every PROGRAMS-th tile per program, A [M, K] and B^T [N, K] through TMA; a tile's loads start before the
    previous tile ends.

    Beyond M, N and K the descriptors read zeros. STREAM: the tiles of the incomplete last round, and those of the round
    before it, are shared: each program computes the same number of their blocks of K, regardless of where a tile begins
    or ends. The program that computes the beginning of a tile adds the other programs' sums and stores the tile
    (two-tile stream-K: Osama et al. 2023, "Stream-K: work-centric parallel decomposition for dense matrix-matrix
    multiplication on the GPU").
    """
    tensors, leads = (t0, t1, t2, t3, t4), (ld0, ld1, ld2, ld3, ld4)
    STEPS: tl.constexpr = (
        (KIND0, AXIS0, VALUE0, LO0, HI0), (KIND1, AXIS1, VALUE1, LO1, HI1), (KIND2, AXIS2, VALUE2, LO2, HI2),
        (KIND3, AXIS3, VALUE3, LO3, HI3), (KIND4, AXIS4, VALUE4, LO4, HI4),
    )  # fmt: skip
    tiles_m, tiles_n, blocks = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    tiles, program = tiles_m * tiles_n, tl.program_id(0)
    if STREAM:
        whole = tl.maximum(tiles // PROGRAMS - 1, 0) * PROGRAMS
    else:
        whole = tiles
    for tile in tl.range(program, whole, PROGRAMS, flatten=True):
        pid_m, pid_n = _tile_position(tile, tiles_m, tiles_n, GROUP)
        acc = _fetched(a_desc, b_desc, pid_m, pid_n, 0, blocks, M, BM, BN, BK, INTEGER, QUANT, PROMOTE)
        _stored(acc, c_ptr, s_ptr, pid_m, pid_n, M, N, ldc, tensors, leads, BM, BN, QUANT, STEPS, FLOAT_AT)
    if STREAM:
        AREA: tl.constexpr = BM * BN
        places = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        share = tl.cdiv((tiles - whole) * blocks, PROGRAMS)
        # Programs wait for programs at later positions, which have lower program ids: a GPU starts those first,
        # whatever else is running.
        position = PROGRAMS - 1 - program
        begin = position * share
        end = tl.minimum(begin + share, (tiles - whole) * blocks)
        for number in tl.range(begin // blocks, tl.cdiv(end, blocks)):
            pid_m, pid_n = _tile_position(whole + number, tiles_m, tiles_n, GROUP)
            lo, hi = tl.maximum(begin - number * blocks, 0), tl.minimum(end - number * blocks, blocks)
            acc = _fetched(a_desc, b_desc, pid_m, pid_n, lo, hi, M, BM, BN, BK, INTEGER, QUANT, PROMOTE)
            if lo > 0:  # only for the first of a program's tiles, if at all
                tl.store(ws_ptr + position * AREA + places, acc)
                tl.debug_barrier()  # all threads have stored their sums before one thread signals that
                tl.atomic_add(lock_ptr + number, 1, sem="release")
            else:
                if hi < blocks:  # only for the last tile, if at all; the rest has most likely been stored by now
                    last = ((number + 1) * blocks - 1) // share
                    acc = _joined(acc, ws_ptr, lock_ptr, number, position, last, AREA, places)
                _stored(acc, c_ptr, s_ptr, pid_m, pid_n, M, N, ldc, tensors, leads, BM, BN, QUANT, STEPS, FLOAT_AT)


@triton.jit
def convert(source_ptr, target_ptr, COUNT, ITEMS: tl.constexpr):
    """Convert COUNT elements from one dtype to another, ITEMS per program; the first kernel of the template
    ``converted``."""
    at = tl.program_id(0).to(tl.int64) * ITEMS + tl.arange(0, ITEMS)
    values = tl.load(source_ptr + at, mask=at < COUNT)
    tl.store(target_ptr + at, values.to(target_ptr.dtype.element_ty), mask=at < COUNT)
