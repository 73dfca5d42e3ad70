// Python bindings of the kernels. Pointers and strides are passed as integers: this module never touches torch tensors, so
// one build serves every version of torch. Callers have checked shapes, strides and pointers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cmath>
#include <stdexcept>
#include <string>

#include "frame/evict.hpp"
#include "frame/gemm.hpp"
#include "frame/isa.hpp"
#include "frame/pack_b.hpp"
#include "frame/pointwise.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace gemmtune;

namespace {

const char* to_pointer(int64_t p) { return reinterpret_cast<const char*>(p); }

// Read an integer of a configuration. Throws std::invalid_argument for another type and for a value out of range.
int64_t read_int64(const nb::dict& d, const char* name) {
  int64_t value = 0;
  if (!nb::try_cast<int64_t>(d[name], value, false)) throw std::invalid_argument(std::string(name) + " must be a 64-bit integer");
  return value;
}

int read_int(const nb::dict& d, const char* name) {
  const int64_t value = read_int64(d, name);
  if (value != static_cast<int>(value)) throw std::invalid_argument(std::string(name) + " is out of range");
  return static_cast<int>(value);
}

// Convert a number to an enumerator. Throws std::invalid_argument for a number that the enumeration lacks.
template <typename Enum>
Enum to_enum(int value, Enum last, const char* what) {
  if (value < 0 || value > static_cast<int>(last)) throw std::invalid_argument(std::string(what) + " is out of range");
  return static_cast<Enum>(value);
}

// Convert an integral (or infinite) value to int64, saturating at kSaturationLimit.
int64_t saturate(double value) {
  const auto limit = static_cast<double>(kSaturationLimit);
  return value <= -limit ? -kSaturationLimit : value >= limit ? kSaturationLimit : static_cast<int64_t>(value);
}

bool is_integral(double value) { return std::isinf(value) || value == std::trunc(value); }

// Whether a step keeps an integer accumulator exact, by the oracle's rule (_needs_float in verify/oracle.py).
bool is_exact(const Step& s, double value, double lo, double hi) {
  const bool has_integers = s.dtype == DType::s8 || s.dtype == DType::u8 || s.dtype == DType::s32;
  switch (s.kind) {
    case StepKind::relu: return true;
    case StepKind::clamp: return is_integral(lo) && is_integral(hi);
    case StepKind::cast: return has_integers;
    case StepKind::bias:
    case StepKind::add:
    case StepKind::mul: return s.has_tensor && has_integers && std::isfinite(value) && is_integral(value);
    default: return false;
  }
}

Step parse_step(nb::handle h) {
  const auto t = nb::cast<nb::tuple>(h);
  const auto value = nb::cast<double>(t[4]), lo = nb::cast<double>(t[5]), hi = nb::cast<double>(t[6]);
  Step s{to_enum(nb::cast<int>(t[0]), StepKind::cast, "an epilogue step"), to_enum(nb::cast<int>(t[1]), Axis::full, "an axis"),
         to_enum(nb::cast<int>(t[2]), DType::s32, "an epilogue dtype"), nb::cast<bool>(t[3]),
         static_cast<float>(value), static_cast<float>(lo), static_cast<float>(hi), false, 0, 0, 0};
  s.exact = is_exact(s, value, lo, hi);
  if (s.exact) s.int_value = saturate(value), s.int_lo = saturate(lo), s.int_hi = saturate(hi);
  return s;
}

Gate parse_gate(const nb::dict& d) { return to_enum(read_int(d, "gate"), Gate::gelu_tanh, "the gate"); }

Config parse_config(const nb::dict& d) {
  Config c{};
  c.a = to_enum(read_int(d, "a"), DType::u8, "the dtype of A");
  c.b = to_enum(read_int(d, "b"), DType::f8, "the dtype of B");
  c.out = to_enum(read_int(d, "out"), DType::s32, "the dtype of the output");
  c.compute = to_enum(read_int(d, "compute"), Compute::s8s8, "the compute type");
  c.n = read_int64(d, "n");
  c.k = read_int64(d, "k");
  c.nv = read_int(d, "nv");
  c.mr = read_int(d, "mr");
  c.kc = read_int64(d, "kc");
  c.mc = read_int64(d, "mc");
  c.nc = read_int64(d, "nc");
  c.order = to_enum(read_int(d, "order"), Order::a_in_l1, "the order");
  c.tm = read_int(d, "tm");
  c.tn = read_int(d, "tn");
  c.tk = read_int(d, "tk");
  c.pack_a = to_enum(read_int(d, "pack_a"), PackA::panels, "the way of packing A");
  c.prefetch = read_int64(d, "prefetch");
  c.expand = nb::cast<bool>(d["expand"]);
  c.raw = nb::cast<bool>(d["raw"]);
  c.dot = nb::cast<bool>(d["dot"]);
  c.quant_group = read_int64(d, "group");
  c.scale_dtype = to_enum(read_int(d, "scale_dtype"), DType::f16, "the dtype of scales");
  c.zero_point = nb::cast<bool>(d["zero_point"]);
  c.zero_offset = nb::cast<float>(d["zero_offset"]);
  for (nb::handle h : nb::cast<nb::list>(d["steps"])) c.steps.push_back(parse_step(h));
  c.gate = parse_gate(d);
  return c;
}

// A call of fewer multiply-adds keeps the GIL: releasing it would cost more than another thread could gain.
constexpr int64_t kGilReleaseMacs = 1 << 18;

// The tensors of a call's epilogue: address, row stride and batch stride of each, in elements.
class AuxList {
 public:
  explicit AuxList(const std::vector<int64_t>& flat) {
    if (flat.size() > 3 * kMaxAux) throw nb::value_error("at most 16 epilogue tensors");
    for (size_t i = 0; i * 3 < flat.size(); ++i) aux_[i] = {to_pointer(flat[3 * i]), flat[3 * i + 1], flat[3 * i + 2]};
  }
  const Aux* get() const { return aux_; }

 private:
  static constexpr size_t kMaxAux = 16;
  Aux aux_[kMaxAux];
};

class Kernel {
 public:
  Kernel(const std::string& isa, const nb::dict& config) : gemm_(isa_ops(isa), parse_config(config)) {}

  void run_packed(int64_t m, int64_t a, int64_t a_row_stride, int64_t a_col_stride, int64_t packed, int64_t scales, int64_t zeros,
                  int64_t compensation, int64_t out, int64_t ldo, const std::vector<int64_t>& aux) const {
    Call call{};
    call.batch = 1, call.m = m;
    call.a = {to_pointer(a), a_row_stride, a_col_stride, 0};
    call.packed = to_pointer(packed), call.scales = to_pointer(scales), call.zeros = to_pointer(zeros);
    call.compensation = reinterpret_cast<const int32_t*>(compensation);
    call.out = reinterpret_cast<char*>(out), call.ldo = ldo;
    launch(call, aux);
  }

  void run_raw(int64_t batch, int64_t m, const std::vector<int64_t>& a, const std::vector<int64_t>& b, int64_t out, int64_t ldo,
               int64_t out_batch_stride, const std::vector<int64_t>& aux) const {
    Call call{};
    call.batch = batch, call.m = m;
    call.a = {to_pointer(a[0]), a[1], a[2], a[3]};
    call.b = {to_pointer(b[0]), b[1], b[2], b[3]};
    call.out = reinterpret_cast<char*>(out), call.ldo = ldo, call.out_batch_stride = out_batch_stride;
    launch(call, aux);
  }

 private:
  void launch(Call& call, const std::vector<int64_t>& flat_aux) const {
    const AuxList aux(flat_aux);
    call.aux = aux.get();
    const Config& c = gemm_.config();
    if (call.batch * call.m * c.n * c.k < kGilReleaseMacs) return gemm_.run(call);
    nb::gil_scoped_release release;
    gemm_.run(call);
  }

  Gemm gemm_;
};

// The steps of an epilogue, and a gate, from floating-point matrices in memory.
class Pointwise {
 public:
  Pointwise(const std::string& isa, const nb::dict& d) : isa_(isa_ops(isa)) {
    args_.src_dtype = to_enum(read_int(d, "src"), DType::f16, "the dtype of the source");
    args_.out_dtype = to_enum(read_int(d, "out"), DType::s32, "the dtype of the output");
    args_.gate = parse_gate(d);
    for (nb::handle h : nb::cast<nb::list>(d["steps"])) steps_.push_back(parse_step(h));
  }

  void run(int64_t m, int64_t n, int64_t src, int64_t src_stride, int64_t out, int64_t ldo, const std::vector<int64_t>& flat_aux) const {
    if (args_.gate != Gate::none && n % 2) throw std::invalid_argument("a gate needs an even number of columns");
    const AuxList aux(flat_aux);
    PointwiseArgs args = args_;
    args.rows = m, args.n = n;
    args.src = to_pointer(src), args.src_stride = src_stride;
    args.out = reinterpret_cast<char*>(out), args.ldo = ldo;
    args.steps = steps_.data(), args.n_steps = static_cast<int>(steps_.size());
    args.aux = aux.get();
    nb::gil_scoped_release release;
    run_pointwise_threaded(isa_, args);
  }

 private:
  const IsaOps& isa_;
  PointwiseArgs args_{};
  std::vector<Step> steps_;
};

PackedShape parse_packed_shape(int b, int compute, int64_t n, int64_t k, int nv) {
  if (n < 1 || k < 1 || n > kMaxElements || k > kMaxElements || nv < 1 || nv > kMaxVectors)
    throw std::invalid_argument("a packed weight's shape is out of range");
  return {to_enum(b, DType::f8, "the dtype of B"), to_enum(compute, Compute::s8s8, "the compute type"), n, k, nv};
}

// Ask for huge pages for a weight before its memory is first touched: fewer TLB misses while kernels stream it.
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
  // Compiled graphs and caches hold kernels until the interpreter exits: this is no leak to report to users.
  nb::set_leak_warnings(false);
  m.def("usable_isas", &usable_isas);
  m.def("compiled_isas", &compiled_isas);
  m.def("packed_bytes", [](int b, int compute, int64_t n, int64_t k, int nv) { return parse_packed_shape(b, compute, n, k, nv).bytes(); });
  m.def("pack", [](int b, int compute, int64_t n, int64_t k, int nv, int64_t src, int64_t k_stride, int64_t n_stride, int64_t dst, int64_t compensation) {
    nb::gil_scoped_release release;
    pack_b(parse_packed_shape(b, compute, n, k, nv), to_pointer(src), k_stride, n_stride, reinterpret_cast<char*>(dst), reinterpret_cast<int32_t*>(compensation));
  });
  m.def("unpack", [](int b, int compute, int64_t n, int64_t k, int nv, int64_t packed, int64_t dst, int64_t k_stride, int64_t n_stride) {
    nb::gil_scoped_release release;
    unpack_b(parse_packed_shape(b, compute, n, k, nv), to_pointer(packed), reinterpret_cast<char*>(dst), k_stride, n_stride);
  });
  m.def("advise_huge_pages", &advise_huge_pages);
  m.def("can_evict", &can_evict);
  m.def("evict", [](int64_t p, int64_t bytes) {
    nb::gil_scoped_release release;
    evict(to_pointer(p), bytes);
  });
  nb::class_<Kernel>(m, "Kernel")
      .def(nb::init<const std::string&, const nb::dict&>())
      .def("run_packed", &Kernel::run_packed)
      .def("run_raw", &Kernel::run_raw);
  nb::class_<Pointwise>(m, "Pointwise").def(nb::init<const std::string&, const nb::dict&>()).def("run", &Pointwise::run);
}
