// What emulated.h includes, which test_cuda_kernels.py has the compiler parse once for all kernels.
#include <ucontext.h>

#include "convert.hpp"

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
