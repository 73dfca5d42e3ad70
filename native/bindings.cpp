// Python's view of the kernels. Pointers and strides come as integers: torch tensors are never touched here, so one build
// serves every version of torch. Callers have checked everything that could be wrong.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cmath>
#include <stdexcept>
#include <string>

#include "frame/gemm.hpp"
#include "frame/isa.hpp"
#include "frame/pack_b.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace gemmtune;

namespace {

const char* address(int64_t p) { return reinterpret_cast<const char*>(p); }

// An integer of a configuration; what is none, or does not fit, is the caller's error.
int64_t wide(const nb::dict& d, const char* name) {
  int64_t value = 0;
  if (!nb::try_cast<int64_t>(d[name], value, false)) throw std::invalid_argument(std::string(name) + " must be a 64-bit integer");
  return value;
}

int integer(const nb::dict& d, const char* name) {
  const int64_t value = wide(d, name);
  if (value != static_cast<int>(value)) throw std::invalid_argument(std::string(name) + " is out of range");
  return static_cast<int>(value);
}

// An enumerator from its number. Throws std::invalid_argument for a number that is none.
template <typename Enum>
Enum enumerator(int value, Enum last, const char* what) {
  if (value < 0 || value > static_cast<int>(last)) throw std::invalid_argument(std::string(what) + " is out of range");
  return static_cast<Enum>(value);
}

// A whole number (or an infinity) within kWholeLimit.
int64_t whole(double value) {
  const auto limit = static_cast<double>(kWholeLimit);
  return value <= -limit ? -kWholeLimit : value >= limit ? kWholeLimit : static_cast<int64_t>(value);
}

bool is_whole(double value) { return std::isinf(value) || value == std::trunc(value); }

// Whether a step keeps an integer accumulator exact, as the oracle has it (verify/oracle.py's _needs_float).
bool keeps_integer(const Step& s, double value, double lo, double hi) {
  const bool integers = s.dtype == DType::s8 || s.dtype == DType::u8 || s.dtype == DType::s32;
  switch (s.kind) {
    case StepKind::relu: return true;
    case StepKind::clamp: return is_whole(lo) && is_whole(hi);
    case StepKind::cast: return integers;
    case StepKind::bias:
    case StepKind::add:
    case StepKind::mul: return s.has_tensor && integers && std::isfinite(value) && is_whole(value);
    default: return false;
  }
}

Step step_from(nb::handle h) {
  const auto t = nb::cast<nb::tuple>(h);
  const auto value = nb::cast<double>(t[4]), lo = nb::cast<double>(t[5]), hi = nb::cast<double>(t[6]);
  Step s{enumerator(nb::cast<int>(t[0]), StepKind::cast, "an epilogue step"), enumerator(nb::cast<int>(t[1]), Axis::full, "an axis"),
         enumerator(nb::cast<int>(t[2]), DType::s32, "an epilogue dtype"), nb::cast<bool>(t[3]),
         static_cast<float>(value), static_cast<float>(lo), static_cast<float>(hi), false, 0, 0, 0};
  s.exact = keeps_integer(s, value, lo, hi);
  if (s.exact) s.whole_value = whole(value), s.whole_lo = whole(lo), s.whole_hi = whole(hi);
  return s;
}

Config config_from(const nb::dict& d) {
  Config c{};
  c.a = enumerator(integer(d, "a"), DType::u8, "the dtype of A");
  c.b = enumerator(integer(d, "b"), DType::f8, "the dtype of B");
  c.out = enumerator(integer(d, "out"), DType::s32, "the dtype of the output");
  c.compute = enumerator(integer(d, "compute"), Compute::s8s8, "the compute type");
  c.n = wide(d, "n");
  c.k = wide(d, "k");
  c.nv = integer(d, "nv");
  c.mr = integer(d, "mr");
  c.kc = wide(d, "kc");
  c.mc = wide(d, "mc");
  c.nc = wide(d, "nc");
  c.order = enumerator(integer(d, "order"), Order::a_stays, "the order");
  c.tm = integer(d, "tm");
  c.tn = integer(d, "tn");
  c.tk = integer(d, "tk");
  c.pack_a = enumerator(integer(d, "pack_a"), PackA::panels, "the way of packing A");
  c.prefetch = wide(d, "prefetch");
  c.expand = nb::cast<bool>(d["expand"]);
  c.raw = nb::cast<bool>(d["raw"]);
  c.dot = nb::cast<bool>(d["dot"]);
  c.group = wide(d, "group");
  c.scale_dtype = enumerator(integer(d, "scale_dtype"), DType::f16, "the dtype of scales");
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
  if (n < 1 || k < 1 || n > kMostElements || k > kMostElements || nv < 1 || nv > kMaxVectors)
    throw std::invalid_argument("a packed weight's shape is out of range");
  return {enumerator(b, DType::f8, "the dtype of B"), enumerator(compute, Compute::s8s8, "the compute type"), n, k, nv};
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
