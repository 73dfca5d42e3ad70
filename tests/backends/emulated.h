// ptx.cu's and hopper.cu's part on a CPU, so that skinny.cu, slab.cu and mixed.cu run without a GPU: every thread of a
// cluster is a fiber, which goes on until it meets the others of its warp, its block or its cluster, or waits at a barrier.
#include "emulated_libraries.h"

#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

typedef unsigned int u32;
struct uint4 { u32 x, y, z, w; };
struct Index { int x, y; };
struct bfloat16 { unsigned short bits; };
struct float16 { unsigned short bits; };

struct Group {
    int waiting = 0;
    long generation = 0;
};

struct Warp {
    Group group;
    float b[32][16], a[32][8];
    unsigned long long words[32];
};

// mbarrier: a phase ends when all have arrived and all bytes have come.
struct Barrier {
    int count, missing, bytes = 0;
    long phase = 0;
};

struct Block {
    std::vector<char> memory;
    std::map<u32, Barrier> barriers;
    Group group, some[2];
    Warp warps[WARPS];
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    int rank, thread;
    long greeted;
    bool done, following;
};

constexpr int STACK = 256 << 10, MEMORY = 227 << 10;
static std::vector<Block> cluster;
static Group everyone;
static Fiber* now;
static ucontext_t scheduler;
static Index first_block, grid;

// Whether the kernel may read B before those before it have ended. All else, what becomes of products above all, must wait.
static bool early_given;
static int too_early;

static void pdl_wait() { now->following = true; }
static void pdl_launch_dependents() { too_early += !now->following; }
static void needs(bool b = false) { too_early += !now->following && !(b && early_given); }

// A CPU reads what the L2 would fetch: no address may be outside of the matrix.
template <class T> static void prefetch(const T* at) {
    needs();
    (void)*reinterpret_cast<const volatile char*>(at);
}

#define threadIdx (Index{now->thread, 0})
#define blockIdx (Index{first_block.x + now->rank, first_block.y})
#define gridDim grid

static long arrive(Group& group, int count) {
    const long generation = group.generation;
    if (++group.waiting == count) {
        group.waiting = 0;
        ++group.generation;
    }
    return generation;
}

static void wait_for_others(const Group& group, long generation) {
    while (group.generation == generation) swapcontext(&now->context, &scheduler);
}

static void sync_threads_of(Group& group, int count) { wait_for_others(group, arrive(group, count)); }

static void __syncthreads() { sync_threads_of(cluster[now->rank].group, 32 * WARPS); }
static void __syncwarp() { sync_threads_of(cluster[now->rank].warps[now->thread / 32].group, 32); }
static void wait_for_cluster() { sync_threads_of(everyone, 32 * WARPS * CLUSTER); }
static void leave_cluster() { wait_for_cluster(); }

template <class T> static T shuffle_xor(T x, int bit) {
    Warp& warp = cluster[now->rank].warps[now->thread / 32];
    warp.words[now->thread % 32] = x;
    sync_threads_of(warp.group, 32);
    const T found = static_cast<T>(warp.words[now->thread % 32 ^ bit]);
    sync_threads_of(warp.group, 32);
    return found;
}

inline float logistic(float x) { return 1.0f / (1.0f + expf(-x)); }

#define SHARED(type, name)                                                  \
    static_assert(sizeof(type) <= 48 << 10, "a kernel has 48 KB by itself"); \
    type& name = *reinterpret_cast<type*>(cluster[now->rank].memory.data())

static sum_t load_remote(int rank, const sum_t* here) {
    const auto place = reinterpret_cast<const char*>(here) - cluster[now->rank].memory.data();
    return *reinterpret_cast<const sum_t*>(cluster[rank].memory.data() + place);
}

static float __uint_as_float(u32 x) { return gemmtune::from_bits(x); }
static u32 __float_as_uint(float x) {
    u32 bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}
static float __int_as_float(int x) { return gemmtune::from_bits(static_cast<u32>(x)); }
// PTX ISA, cvt: integers saturate, and NaN becomes 0.
static int __float2int_rn(float x) {
    if (std::isnan(x)) return 0;
    return static_cast<int>(std::lrint(std::fmin(std::fmax(static_cast<double>(x), -2147483648.0), 2147483647.0)));
}
static int min(int x, int y) { return x < y ? x : y; }
static int max(int x, int y) { return x < y ? y : x; }

static u32 __byte_perm(u32 x, u32 y, u32 pick) {
    const unsigned long long both = static_cast<unsigned long long>(y) << 32 | x;
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= static_cast<u32>(both >> 8 * (pick >> 4 * i & 7) & 255) << 8 * i;
    return found;
}

static float number(float x) { return x; }
static float number(int x) { return static_cast<float>(x); }
static float number(bfloat16 x) { return gemmtune::bf16_to_f32(x.bits); }
static float number(float16 x) { return gemmtune::f16_to_f32(x.bits); }
static void round_to(float& to, float x) { to = x; }
static void round_to(float16& to, float x) { to.bits = gemmtune::f32_to_f16(x); }
static void round_to(bfloat16& to, float x) { to.bits = gemmtune::f32_to_bf16(x); }

template <class T> static T load_now(const T* from) {
    needs();
    return *from;
}

template <class Half> static u32 pack_halves(Half x, float low, float high) {
    Half y;
    round_to(x, low);
    round_to(y, high);
    return static_cast<u32>(y.bits) << 16 | x.bits;
}

static uint4 load(const char* from, bool b = false) {
    needs(b);
    if (reinterpret_cast<std::uintptr_t>(from) % 16) std::abort();  // as a GPU does
    uint4 v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
static uint4 load_once(const char* from) { return load(from); }
static uint4 load_early(const char* from) { return load(from, true); }

static u32 subtract_halves(u32 one, u32 other) {
    typedef std::conditional_t<HALF, float16, bfloat16> Half;
    u32 found = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        Half difference;
        const Half x{static_cast<unsigned short>(one >> shift)}, y{static_cast<unsigned short>(other >> shift)};
        round_to(difference, number(x) - number(y));
        found |= static_cast<u32>(difference.bits) << shift;
    }
    return found;
}

static u32 multiply_halves(u32 one, u32 other) {
    u32 found = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        bfloat16 result;
        const bfloat16 x{static_cast<unsigned short>(one >> shift)}, y{static_cast<unsigned short>(other >> shift)};
        round_to(result, number(x) * number(y));
        found |= static_cast<u32>(result.bits) << shift;
    }
    return found;
}

static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

static float eight_bits(const std::string& type, u32 x) {
    if (type == "s8") return static_cast<signed char>(x);
    const int fraction = type == "e4m3" ? 3 : 2, bias = type == "e4m3" ? 7 : 15;
    const int exponent = (x & 127) >> fraction, rest = x & ((1 << fraction) - 1);
    float value = exponent ? std::ldexp(1.0f + std::ldexp(rest, -fraction), exponent - bias)
                           : std::ldexp(rest, 1 - bias - fraction);
    if (type == "e4m3" ? (x & 127) == 127 : exponent == 31) value = type == "e5m2" && !rest ? INFINITY : NAN;
    return x & 128 ? -value : value;
}

// The instruction's name: m16n8k16.row.col.f32.bf16.bf16.f32, say.
static std::string part(int place) {
    std::string name = MMA;
    for (; place; --place) name = name.substr(name.find('.') + 1);
    return name.substr(0, name.find('.'));
}

constexpr int PER = WIDTH == 2 ? 2 : 4;  // elements in a register

static void spread(float* to, u32 x, const std::string& type) {
    for (int i = 0; i < PER; ++i) {
        const u32 bits = x >> 32 / PER * i;
        if (type == "bf16") to[i] = number(bfloat16{static_cast<unsigned short>(bits)});
        else if (type == "f16") to[i] = number(float16{static_cast<unsigned short>(bits)});
        else to[i] = eight_bits(type, bits & 255);
    }
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16" and "for mma.m16n8k32": who holds what.
static void multiply(sum_t (&d)[4], u32 b0, u32 b1, u32 b2, u32 b3, u32 a0, u32 a1) {
    needs();
    static const std::string b_type = part(4), a_type = part(5);
    Warp& warp = cluster[now->rank].warps[now->thread / 32];
    const int lane = now->thread % 32;
    const u32 b[4] = {b0, b1, b2, b3}, a[2] = {a0, a1};
    for (int i = 0; i < 4; ++i) spread(warp.b[lane] + PER * i, b[i], b_type);
    for (int i = 0; i < 2; ++i) spread(warp.a[lane] + PER * i, a[i], a_type);
    sync_threads_of(warp.group, 32);
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        double sum = d[e];
        for (int k = 0; k < 8 * PER; ++k) {
            const int quad = k % (4 * PER) / PER, half = k / (4 * PER);
            sum += static_cast<double>(warp.b[row % 8 * 4 + quad][(row / 8 + 2 * half) * PER + k % PER]) *
                   warp.a[column * 4 + quad][half * PER + k % PER];
        }
        d[e] = static_cast<sum_t>(sum);
    }
    sync_threads_of(warp.group, 32);
}

// --- what compute capability 9.0 has; addresses in shared memory are offsets -----------------------------------------

#ifndef SHARE
#define SHARE 1
#endif
#define DYNAMIC(name) char* const name = cluster[now->rank].memory.data()

// What tests/helpers/drivers.py writes for a descriptor.
struct Map {
    unsigned long long matrix, element, columns, rows, lead, box_columns, box_rows, rest[9];
};

static u32 address_of(const void* here) {
    return static_cast<u32>(static_cast<const char*>(here) - cluster[now->rank].memory.data());
}

static void init_barrier(u32 barrier, int count) { cluster[now->rank].barriers[barrier] = Barrier{count, count}; }
static void fence_barrier_init() {}
static void arrive_cluster() { now->greeted = arrive(everyone, 32 * WARPS * CLUSTER); }
static void wait_cluster() { wait_for_others(everyone, now->greeted); }
template <int THREADS> static void sync_threads_of(int group = 0) { sync_threads_of(cluster[now->rank].some[group], THREADS); }

static void came(Barrier& barrier, int arrivals, int bytes) {
    barrier.missing -= arrivals;
    barrier.bytes -= bytes;
    if (barrier.missing || barrier.bytes) return;
    barrier.missing = barrier.count;
    ++barrier.phase;
}

static void wait_barrier(u32 barrier, int turn) {
    const Barrier& held = cluster[now->rank].barriers.at(barrier);
    while (held.phase % 2 == turn) swapcontext(&now->context, &scheduler);
}

static void arrive_expect_bytes(u32 barrier, int bytes) { came(cluster[now->rank].barriers.at(barrier), 1, -bytes); }

static int warp_index() { return now->thread / 32; }

// A warp comes together for what it does once.
static bool elected() {
    __syncwarp();
    return now->thread % 32 == 0;
}
static void expect_bytes_once(u32 barrier, int bytes) {
    if (elected()) arrive_expect_bytes(barrier, bytes);
}

static void arrive_remote(u32 barrier, int rank) { came(cluster[rank].barriers.at(barrier), 1, 0); }
static void arrive(u32 barrier) { arrive_remote(barrier, now->rank); }
static void arrive_at(u32 barrier, int rank) { arrive_remote(barrier, SHARE > 1 ? rank : now->rank); }

static u32 remote_address(u32 own, int rank) { return static_cast<u32>(rank) << 24 | own; }

template <class Four> static void send(u32 to, u32 barrier, Four four) {
    if (to % sizeof four || to >> 24 != barrier >> 24) std::abort();
    Block& there = cluster[to >> 24];
    std::memcpy(there.memory.data() + (to & 0xffffff), &four, sizeof four);
    came(there.barriers.at(barrier & 0xffffff), 0, sizeof four);
}

// The 16-byte pieces of 128-byte rows change places: bits 4 to 6 of an address, by bits 7 to 9; of 64-byte rows: bits 4
// and 5, by bits 7 and 8.
static u32 swizzled(u32 address, int row = 128) { return address ^ (address >> 3 & (row == 128 ? 0x70 : 0x30)); }

static void prefetch_map(const Map*) {}

static void tma_load(int rank, u32 to, const Map& map, int k, int row, u32 barrier) {
    Block& block = cluster[rank];
    // TMA fills boxes that reach beyond a matrix slowly. A matrix with fewer rows than a tile may be read so.
    if (READS_WITHIN && row + map.box_rows > map.rows && map.rows >= BM && map.rows >= BN) std::abort();
    for (unsigned r = 0; r < map.box_rows; ++r)
        for (unsigned c = 0; c < map.box_columns; ++c) {
            const u32 offset = static_cast<u32>((r * map.box_columns + c) * map.element);
            char* place = block.memory.data() + swizzled(to + offset, static_cast<int>(map.box_columns * map.element));
            if (k + c < map.columns && row + r < map.rows)
                std::memcpy(place, reinterpret_cast<const char*>(map.matrix) + (row + r) * map.lead + (k + c) * map.element,
                            map.element);
            else
                std::memset(place, 0, map.element);
        }
    came(block.barriers.at(barrier), 0, static_cast<int>(map.box_rows * map.box_columns * map.element));
}

static void tma_load(u32 to, const Map* map, int k, int row, u32 barrier) {
    needs();
    if (elected()) tma_load(now->rank, to, *map, k, row, barrier);
}
static void tma_load_once(u32 to, const Map* map, int k, int row, u32 barrier) {
    needs(true);
    if (elected()) tma_load(now->rank, to, *map, k, row, barrier);
}

static void tma_load_multicast(u32 to, const Map* map, int k, int row, u32 barrier) {
    needs();
    if (!elected()) return;
    for (int rank = 0; rank < SHARE; ++rank) tma_load(SHARE > 1 ? rank : now->rank, to, *map, k, row, barrier);
}

static void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
    needs();
    if (to % 16 || reinterpret_cast<std::uintptr_t>(from) % 16 || bytes % 16 || bytes <= 0) std::abort();
    if (!elected()) return;
    std::memcpy(cluster[now->rank].memory.data() + to, from, static_cast<std::size_t>(bytes));
    came(cluster[now->rank].barriers.at(barrier), 0, bytes);
}

static void release_registers() {}
static void acquire_registers() {}

template <class T> static T shared_at(u32 address) {
    if (address % sizeof(T)) std::abort();
    T found;
    std::memcpy(&found, cluster[now->rank].memory.data() + address, sizeof found);
    return found;
}
static uint4 load_shared(u32 address) { return shared_at<uint4>(address); }
static float load_shared_float(u32 address) { return shared_at<float>(address); }
template <class T> static void store_shared(u32 address, T x) {
    if (address % sizeof x) std::abort();
    std::memcpy(cluster[now->rank].memory.data() + address, &x, sizeof x);
}
static void fence_shared_writes() {}

static u32 load_two_halves(u32 address) {
    return shared_at<unsigned short>(address);
}

// All that a register's part can be, by its bits.
static std::vector<float> values_of(const std::string& type) {
    std::vector<float> values(PER == 2 ? 1 << 16 : 256);
    for (u32 bits = 0; bits < values.size(); ++bits) {
        float found[PER];
        spread(found, bits, type);
        values[bits] = found[0];
    }
    return values;
}

static float element_at(u32 address, const std::vector<float>& values) {
    const char* place = cluster[now->rank].memory.data() + swizzled(address);
    unsigned short bits;
    std::memcpy(&bits, place, 2);
    return values[PER == 2 ? bits : bits & 255];
}

template <int N> static void begin(sum_t (&)[N]) {}
static void commit() {}
template <int LEFT, int N> static void wait_for_sums(sum_t (&)[N]) {}

static u32 rows_from(u32 address) { return address / 16 | 1 << 16; }
static u32 address_in(u32 rows) { return (rows & 0x3fff) * 16; }

// PTX ISA, "Matrix Fragments for wgmma": D of m64nNk16. It happens at once.
template <int N> static void multiply_group(sum_t (&d)[N], u32 a, u32 b, int add) {
    needs();
    static const std::vector<float> b_values = values_of(part(4)), a_values = values_of(part(5));
    const int lane = now->thread % 32, first = now->thread / 32 % 4 * 16 + lane / 4;
    for (int i = 0; i < N; ++i) {
        const u32 row = first + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        double sum = add ? d[i] : 0;
        for (u32 k = 0; k < 32; k += 4 / PER)
            sum += static_cast<double>(element_at(address_in(a) + 128 * row + k, a_values)) *
                   element_at(address_in(b) + 128 * column + k, b_values);
        d[i] = static_cast<sum_t>(sum);
    }
}

struct Fragment { u32 r[4]; };
static void keep_in_registers(Fragment&) {}

// "Register Fragments for wgmma.mma_async.m64nNk16": each warp's rows are those of mma.m16n8k16.
template <int N> static void multiply_group(sum_t (&d)[N], const Fragment& a, u32 b, int add) {
    needs();
    static const std::string a_type = part(4);
    static const std::vector<float> b_values = values_of(part(5));
    Warp& warp = cluster[now->rank].warps[now->thread / 32];
    const int lane = now->thread % 32;
    for (int i = 0; i < 4; ++i) spread(warp.b[lane] + PER * i, a.r[i], a_type);
    sync_threads_of(warp.group, 32);
    for (int i = 0; i < N; ++i) {
        const int row = lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
        double sum = add ? d[i] : 0;
        for (int k = 0; k < 16; ++k)
            sum += static_cast<double>(warp.b[row % 8 * 4 + k % 8 / 2][(row / 8 + k / 8 * 2) * 2 + k % 2]) *
                   element_at(address_in(b) + 128 * column + 2 * k, b_values);
        d[i] = static_cast<sum_t>(sum);
    }
    sync_threads_of(warp.group, 32);
}

template <class... A, std::size_t... I>
static void call(void (*kernel)(A...), void** slots, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(slots[I])...);
}

static void (*entry)();

static void begin() {
    entry();
    now->done = true;
    swapcontext(&now->context, &scheduler);
}

// All blocks of a grid of x by y, a cluster after another. What nobody wrote in shared memory is NaN.
static void run_all(void (*kernel)(), int x, int y) {
    entry = kernel;
    grid = {x, y};
    std::vector<Fiber> fibers(32 * WARPS * CLUSTER);
    for (Fiber& fiber : fibers) fiber.stack.reset(new char[STACK]);
    for (first_block.y = 0; first_block.y < y; ++first_block.y)
        for (first_block.x = 0; first_block.x < x; first_block.x += CLUSTER) {
            cluster = std::vector<Block>(CLUSTER);
            for (Block& block : cluster) block.memory.assign(MEMORY, static_cast<char>(0xff));
            for (std::size_t i = 0; i < fibers.size(); ++i) {
                Fiber& fiber = fibers[i];
                fiber.rank = static_cast<int>(i) / (32 * WARPS);
                fiber.thread = static_cast<int>(i) % (32 * WARPS);
                fiber.done = fiber.following = false;
                getcontext(&fiber.context);
                fiber.context.uc_stack.ss_sp = fiber.stack.get();
                fiber.context.uc_stack.ss_size = STACK;
                makecontext(&fiber.context, begin, 0);
            }
            for (bool some = true; some;) {
                some = false;
                for (Fiber& fiber : fibers)
                    if (!fiber.done) {
                        some = true;
                        now = &fiber;
                        swapcontext(&scheduler, &fiber.context);
                    }
            }
        }
}
