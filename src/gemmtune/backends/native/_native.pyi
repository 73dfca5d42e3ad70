def usable_isas() -> list[str]: ...
def compiled_isas() -> list[str]: ...
def packed_bytes(b: int, compute: int, n: int, k: int, nv: int, /) -> int: ...
def pack(
    b: int, compute: int, n: int, k: int, nv: int, src: int, k_stride: int, n_stride: int, dst: int, comp: int, /
) -> None: ...
def unpack(
    b: int, compute: int, n: int, k: int, nv: int, packed: int, dst: int, k_stride: int, n_stride: int, /
) -> None: ...
def advise_huge_pages(address: int, size: int, /) -> None: ...
def can_evict() -> bool: ...
def evict(address: int, size: int, /) -> None: ...

class Pointwise:
    def __init__(self, isa: str, config: dict[str, object], /) -> None: ...
    def run(self, m: int, n: int, src: int, src_stride: int, out: int, ldo: int, aux: list[int], /) -> None: ...

class Kernel:
    def __init__(self, isa: str, config: dict[str, object], /) -> None: ...
    def run_packed(
        self,
        m: int,
        a: int,
        a_row: int,
        a_col: int,
        packed: int,
        scales: int,
        zeros: int,
        compensation: int,
        out: int,
        ldo: int,
        aux: list[int],
        /,
    ) -> None: ...
    def run_raw(
        self,
        batch: int,
        m: int,
        a: tuple[int, ...],
        b: tuple[int, ...],
        out: int,
        ldo: int,
        out_batch: int,
        aux: list[int],
        /,
    ) -> None: ...
