// Python's view of the kernels. Pointers and strides come as integers: torch tensors are never touched here, so one build
// serves every version of torch. Callers have checked everything that could be wrong.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "frame/gemm.hpp"
#include "frame/isa.hpp"
#include "frame/pack_b.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace gemmtune;

namespace {

const char* address(int64_t p) { return reinterpret_cast<const char*>(p); }

int integer(const nb::dict& d, const char* name) { return nb::cast<int>(d[name]); }

Step step_from(nb::handle h) {
  const auto t = nb::cast<nb::tuple>(h);
  return {static_cast<StepKind>(nb::cast<int>(t[0])), static_cast<Axis>(nb::cast<int>(t[1])), static_cast<DType>(nb::cast<int>(t[2])),
          nb::cast<bool>(t[3]), nb::cast<float>(t[4]), nb::cast<float>(t[5]), nb::cast<float>(t[6])};
}

Config config_from(const nb::dict& d) {
  Config c{};
  c.a = static_cast<DType>(integer(d, "a"));
  c.b = static_cast<DType>(integer(d, "b"));
  c.out = static_cast<DType>(integer(d, "out"));
  c.compute = static_cast<Compute>(integer(d, "compute"));
  c.n = nb::cast<int64_t>(d["n"]);
  c.k = nb::cast<int64_t>(d["k"]);
  c.nv = integer(d, "nv");
  c.mr = integer(d, "mr");
  c.kc = nb::cast<int64_t>(d["kc"]);
  c.mc = nb::cast<int64_t>(d["mc"]);
  c.nc = nb::cast<int64_t>(d["nc"]);
  c.order = static_cast<Order>(integer(d, "order"));
  c.tm = integer(d, "tm");
  c.tn = integer(d, "tn");
  c.tk = integer(d, "tk");
  c.pack_a = static_cast<PackA>(integer(d, "pack_a"));
  c.prefetch = nb::cast<int64_t>(d["prefetch"]);
  c.expand = nb::cast<bool>(d["expand"]);
  c.raw = nb::cast<bool>(d["raw"]);
  c.dot = nb::cast<bool>(d["dot"]);
  c.group = nb::cast<int64_t>(d["group"]);
  c.scale_dtype = static_cast<DType>(integer(d, "scale_dtype"));
  c.zero_point = nb::cast<bool>(d["zero_point"]);
  c.zero_offset = nb::cast<float>(d["zero_offset"]);
  for (nb::handle h : nb::cast<nb::list>(d["steps"])) c.steps.push_back(step_from(h));
  return c;
}

// Below this many multiply-adds a call is too short to be worth handing the interpreter to another thread.
constexpr int64_t kReleaseAbove = 1 << 18;

class Kernel {
 public:
  Kernel(const std::string& isa, const nb::dict& config) : gemm_(isa_ops(isa), config_from(config)) {}

  void run_packed(int64_t m, int64_t a, int64_t a_row, int64_t a_col, int64_t packed, int64_t scales, int64_t zeros,
                  int64_t compensation, int64_t out, int64_t ldo, const std::vector<int64_t>& aux) const {
    Call call{};
    call.batch = 1, call.m = m;
    call.a = {address(a), a_row, a_col, 0};
    call.packed = address(packed), call.scales = address(scales), call.zeros = address(zeros);
    call.compensation = reinterpret_cast<const int32_t*>(compensation);
    call.out = reinterpret_cast<char*>(out), call.ldo = ldo;
    launch(call, aux);
  }

  void run_raw(int64_t batch, int64_t m, const std::vector<int64_t>& a, const std::vector<int64_t>& b, int64_t out, int64_t ldo,
               int64_t out_batch, const std::vector<int64_t>& aux) const {
    Call call{};
    call.batch = batch, call.m = m;
    call.a = {address(a[0]), a[1], a[2], a[3]};
    call.b = {address(b[0]), b[1], b[2], b[3]};
    call.out = reinterpret_cast<char*>(out), call.ldo = ldo, call.out_batch = out_batch;
    launch(call, aux);
  }

 private:
  void launch(Call& call, const std::vector<int64_t>& flat) const {
    constexpr size_t kMost = 16;
    Aux aux[kMost];
    if (flat.size() > 3 * kMost) throw nb::value_error("at most 16 epilogue tensors");
    for (size_t i = 0; i * 3 < flat.size(); ++i) aux[i] = {address(flat[3 * i]), flat[3 * i + 1], flat[3 * i + 2]};
    call.aux = aux;
    const Config& c = gemm_.config();
    if (call.batch * call.m * c.n * c.k < kReleaseAbove) return gemm_.run(call);
    nb::gil_scoped_release release;
    gemm_.run(call);
  }

  Gemm gemm_;
};

PackedShape shape_of(int b, int compute, int64_t n, int64_t k, int nv) {
  return {static_cast<DType>(b), static_cast<Compute>(compute), n, k, nv};
}

// Asks for large pages under a weight before it is first touched: fewer TLB misses while it streams by.
void advise_huge_pages(int64_t p, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kPage = 4096;
  const int64_t first = (p + kPage - 1) / kPage * kPage, last = (p + bytes) / kPage * kPage;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)p, (void)bytes;
#endif
}

}  // namespace

NB_MODULE(_native, m) {
  // Compiled graphs and caches keep kernels until the interpreter is gone: that is no leak to report to users.
  nb::set_leak_warnings(false);
  m.def("usable_isas", &usable_isas);
  m.def("compiled_isas", &compiled_isas);
  m.def("packed_bytes", [](int b, int compute, int64_t n, int64_t k, int nv) { return shape_of(b, compute, n, k, nv).bytes(); });
  m.def("pack", [](int b, int compute, int64_t n, int64_t k, int nv, int64_t src, int64_t k_stride, int64_t n_stride, int64_t dst, int64_t compensation) {
    nb::gil_scoped_release release;
    pack_b(shape_of(b, compute, n, k, nv), address(src), k_stride, n_stride, reinterpret_cast<char*>(dst), reinterpret_cast<int32_t*>(compensation));
  });
  m.def("unpack", [](int b, int compute, int64_t n, int64_t k, int nv, int64_t packed, int64_t dst, int64_t k_stride, int64_t n_stride) {
    nb::gil_scoped_release release;
    unpack_b(shape_of(b, compute, n, k, nv), address(packed), reinterpret_cast<char*>(dst), k_stride, n_stride);
  });
  m.def("advise_huge_pages", &advise_huge_pages);
  nb::class_<Kernel>(m, "Kernel")
      .def(nb::init<const std::string&, const nb::dict&>())
      .def("run_packed", &Kernel::run_packed)
      .def("run_raw", &Kernel::run_raw);
}
