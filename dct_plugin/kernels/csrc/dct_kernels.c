/* Compiled CPU kernels of dct_plugin: the hot loops of kernels/reference.py with the same results, bit for bit.
 *
 * Plain C11 without torch's headers: built in a second or two by any gcc or clang, loaded with ctypes. Portable
 * loops are written so that compilers vectorise them; x86-64 has explicit AVX2 and AVX-512 branches, chosen at run
 * time. Floating point must not be contracted (-ffp-contract=off), or residuals would differ between machines.
 *
 * The caller (kernels/cpu.py) has checked pointers, sizes and header fields; bodies of payloads are checked here.
 * Pointers into payloads have no alignment: they are only accessed through memcpy.
 */
#define _POSIX_C_SOURCE 200809L
#include <float.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__x86_64__) && !defined(DCT_PORTABLE) /* DCT_PORTABLE: as on any other architecture */
#define DCT_X86 1
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__) && !defined(DCT_PORTABLE)
#define DCT_NEON 1
#include <arm_neon.h>
#endif

#define DCT_ABI_VERSION 3
#define API __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define BLOCK 4096      /* entries handled at once: gradient, residual and scratch stay in the first-level cache */
#define SLACK 16        /* compressed vectors are stored in full; this many entries past the end may be written */
#define GROUP 256       /* values of int8, int4 and int2 that share scales */
#define LOG_GROUP 1024  /* values of log4 that share an exponent */
#define LOG_BLOCK 32    /* and a scale above it */
#define HEADER 24
#define MOST_LOWER 16   /* lower bits of a position behind the bitmap of Elias-Fano code */
#define MAX_THREADS 64
#define PREFETCH_AHEAD 512 /* entries */
#define SCATTER_AHEAD 32   /* entries */
#define OVERFLOW_F32 0x7E800000u /* 2**126 */
#define OVERFLOW_BF16 0x7E80
#define OVERFLOW_FP16 0x7C00 /* infinity: fp16 does not reach 2**126 */

enum { GRAD_FP32, GRAD_BF16, GRAD_FP16, OUT_PLACES };
enum { VALUE_FP32, VALUE_BF16, VALUE_FP16, VALUE_INT8, VALUE_INT4, VALUE_INT2, VALUE_LOG4, VALUE_SIGN, VALUE_COUNT };
enum { ISA_GENERIC, ISA_AVX2, ISA_AVX512, ISA_NEON = 1 };

/* Return codes; kernels/cpu.py turns them into exceptions. */
enum {
    OK = 0,
    ERR_MEMORY = -1,
    ERR_CHECKSUM = -2,
    ERR_VALUE = -3,
    ERR_SCALE = -4,
    ERR_RANGE = -5,
    ERR_COUNT = -6,
    ERR_ORDER = -7,
    ERR_TRAILING = -8,
    ERR_HEADER = -9,
};

/* ---- small helpers --------------------------------------------------------------------------------------------- */

static inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float float_of(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static inline uint16_t load16(const uint8_t *p) {
    uint16_t v;
    memcpy(&v, p, 2);
    return v;
}

static inline uint32_t load32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return v;
}

static inline uint64_t load64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return v;
}

static inline float loadf(const uint8_t *p) { return float_of(load32(p)); }
static inline void store16(uint8_t *p, uint16_t v) { memcpy(p, &v, 2); }
static inline void store32(uint8_t *p, uint32_t v) { memcpy(p, &v, 4); }
static inline void store64(uint8_t *p, uint64_t v) { memcpy(p, &v, 8); }
static inline float magnitude(float x) { return float_of(bits_of(x) & 0x7FFFFFFFu); }

static inline float clampf(float x, float limit) {
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}

static inline float from_bf16(uint16_t h) { return float_of((uint32_t)h << 16); }

/* Finite input within the type's range; nearest, ties to even. */
static inline uint16_t to_bf16(float x) {
    uint32_t u = bits_of(x);
    return (uint16_t)((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16);
}

static inline float from_fp16(uint16_t h) {
    const uint32_t body = (uint32_t)(h & 0x7FFF) << 13;
    const uint32_t exponent = body & 0x0F800000u;
    const float normal = float_of(body + (112u << 23));
    const float subnormal = float_of(body + (113u << 23)) - float_of(113u << 23);
    const float inf_nan = float_of(body + (224u << 23));
    const float m = exponent == 0 ? subnormal : exponent == 0x0F800000u ? inf_nan : normal;
    return float_of(bits_of(m) | (uint32_t)(h & 0x8000) << 16);
}

/* Finite input of magnitude <= 65504; nearest, ties to even. Subnormal results are rounded by the addition of 0.5. */
static inline uint16_t to_fp16(float x) {
    const uint32_t u = bits_of(x), sign = u & 0x80000000u, body = u ^ sign;
    const uint32_t normal = (body - (112u << 23) + 0xFFFu + ((body >> 13) & 1u)) >> 13;
    const uint32_t subnormal = bits_of(float_of(body) + 0.5f) - 0x3F000000u;
    return (uint16_t)((body < (113u << 23) ? subnormal : normal) | sign >> 16);
}

static inline float round_even(float x) { /* |x| < 2**22 */
    const float magic = 12582912.0f;      /* 1.5 * 2**23 */
    return (x + magic) - magic;
}

/* Position of the lowest non-zero byte of a word of byte flags, in memory order (the wire format needs a little-endian
 * machine, and so does this). */
static inline size_t first_byte(uint64_t word) { return (size_t)__builtin_ctzll(word) >> 3; }

/* Fetch a stretch ahead of use: the hardware stops at every page, which costs a fifth of the speed. */
static inline void prefetch(const void *base, size_t offset, size_t nbytes) {
    const uintptr_t first = (uintptr_t)base + offset;
    for (size_t i = 0; i < nbytes; i += 64) __builtin_prefetch((const void *)(first + i));
}

static inline uint64_t ceil_div(uint64_t a, uint64_t b) { return a / b + (a % b != 0); }

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static size_t grad_size(int dtype) { return dtype == GRAD_FP32 ? 4 : 2; }

/* The bits of a value, how many values share scales, and the bytes of these, which lie before all values. */
static const struct {
    uint8_t bits;
    uint16_t group;
    uint8_t scales;
} VALUE_TYPES[VALUE_COUNT] = {[VALUE_FP32] = {32, 0, 0},        [VALUE_BF16] = {16, 0, 0},    [VALUE_FP16] = {16, 0, 0},
                              [VALUE_INT8] = {8, GROUP, 4},     [VALUE_INT4] = {4, GROUP, 4}, [VALUE_INT2] = {2, GROUP, 4},
                              [VALUE_LOG4] = {4, LOG_GROUP, 1}, [VALUE_SIGN] = {1, GROUP, 4}};

static uint64_t value_bits(int dtype) { return VALUE_TYPES[dtype].bits; }

static int is_grouped(int dtype) { return VALUE_TYPES[dtype].group != 0; }

static uint64_t scales_nbytes(uint64_t nnz, int dtype) {
    const uint64_t blocks = dtype == VALUE_LOG4 ? ceil_div(nnz, LOG_BLOCK) : 0;
    return is_grouped(dtype) ? VALUE_TYPES[dtype].scales * ceil_div(nnz, VALUE_TYPES[dtype].group) + blocks : 0;
}

static uint64_t values_nbytes(uint64_t nnz, int dtype) {
    return scales_nbytes(nnz, dtype) + ceil_div(nnz * value_bits(dtype), 8);
}

/* Run work(arg, t) once for every t in [0, threads).
 *
 * On torch's own OpenMP pool if there is one in the process: its threads spin for a while after each of torch's loops,
 * and others would have to share the cores with them. GOMP_parallel is the entry point of gcc's runtime; those of clang
 * and Intel offer it, too. The reference is weak, so that nothing needs to be linked. */
typedef void gomp_parallel_fn(void (*work)(void *), void *arg, unsigned threads, unsigned flags);
#if defined(__ELF__) && !defined(DCT_NO_OPENMP)
extern gomp_parallel_fn GOMP_parallel __attribute__((weak, visibility("default")));
static gomp_parallel_fn *openmp(void) { return GOMP_parallel; }
#else
static gomp_parallel_fn *openmp(void) { return NULL; }
#endif

typedef struct {
    void (*work)(void *, int);
    void *arg;
    int threads;
    int next; /* atomic: first t not yet taken; a team may have fewer threads than asked for */
} team_t;

static void serve(void *p) {
    team_t *team = p;
    int t;
    while ((t = __atomic_fetch_add(&team->next, 1, __ATOMIC_RELAXED)) < team->threads) team->work(team->arg, t);
}

static void *serve_thread(void *p) {
    serve(p);
    return NULL;
}

static void parallel(int threads, void (*work)(void *, int), void *arg) {
    team_t team = {work, arg, threads, 0};
    if (threads > 1 && openmp()) {
        openmp()(serve, &team, (unsigned)threads, 0);
        return;
    }
    pthread_t helper[MAX_THREADS];
    int helpers = 0;
    while (helpers < threads - 1 && pthread_create(&helper[helpers], NULL, serve_thread, &team) == 0) helpers++;
    serve(&team);
    while (helpers > 0) pthread_join(helper[--helpers], NULL);
}

/* ---- accumulate and select ------------------------------------------------------------------------------------- */

/* acc = float32(grad) + residual for n <= BLOCK entries; acc goes to left (if any); entries with |acc| >= tau go to
 * (idx, val), in order. Returns their number. idx and val have room for n + SLACK. residual may be NULL or be left. */
typedef size_t select_fn(const void *grad, const float *residual, float *left, size_t n, float tau, uint32_t base,
                         uint32_t *idx, float *val);
/* Whether any of n entries is non-finite or of magnitude >= 2**126. */
typedef int overflow_fn(const void *grad, size_t n);

static void accumulate(const void *grad, int dtype, const float *residual, size_t n, float *restrict x) {
    const float *g32 = grad;
    const uint16_t *g16 = grad;
    if (dtype == GRAD_FP32 && residual) {
        for (size_t i = 0; i < n; i++) x[i] = g32[i] + residual[i];
        return;
    }
    if (dtype == GRAD_FP32)
        for (size_t i = 0; i < n; i++) x[i] = g32[i];
    else if (dtype == GRAD_BF16)
        for (size_t i = 0; i < n; i++) x[i] = from_bf16(g16[i]);
    else
        for (size_t i = 0; i < n; i++) x[i] = from_fp16(g16[i]);
    if (residual)
        for (size_t i = 0; i < n; i++) x[i] = x[i] + residual[i];
}

static size_t select_generic(const void *grad, int dtype, const float *residual, float *left, size_t n, float tau,
                             uint32_t base, uint32_t *idx, float *val) {
    enum { PART = 128, AHEAD = 512 };
    _Alignas(64) float x[PART];
    _Alignas(64) uint8_t mask[PART];
    size_t k = 0;
    for (size_t lo = 0; lo < n; lo += PART) {
        const size_t m = n - lo < PART ? n - lo : PART;
        const void *g = (const char *)grad + grad_size(dtype) * lo;
        const float *r = residual ? residual + lo : NULL;
        prefetch(grad, grad_size(dtype) * (lo + AHEAD), grad_size(dtype) * PART);
        prefetch(residual, sizeof(float) * (lo + AHEAD), sizeof(float) * PART);
        if (dtype == GRAD_FP32 && r) {
            const float *g32 = g;
            for (size_t i = 0; i < m; i++) {
                const float v = g32[i] + r[i];
                x[i] = v;
                mask[i] = magnitude(v) >= tau;
            }
        } else {
            accumulate(g, dtype, r, m, x);
            for (size_t i = 0; i < m; i++) mask[i] = magnitude(x[i]) >= tau;
        }
        if (left) memcpy(left + lo, x, sizeof(float) * m);
        for (size_t i = m; i % 8; i++) mask[i] = 0;
        for (size_t i = 0; i < m; i += 8) {
            uint64_t word;
            memcpy(&word, mask + i, 8);
            for (; word; word &= word - 1) {
                const size_t j = i + first_byte(word);
                idx[k] = base + (uint32_t)(lo + j);
                val[k++] = x[j];
            }
        }
    }
    return k;
}

/* The sign bit of a sum tells whether a magnitude reaches the limit; the loops vectorise without comparisons. */
static inline int overflow32(const void *grad, size_t n) {
    enum { PART = 512, AHEAD = 1024 };
    const uint32_t *bits = grad;
    uint32_t over = 0;
    for (size_t lo = 0; lo < n; lo += PART) {
        const size_t end = n - lo < PART ? n : lo + PART;
        prefetch(grad, 4 * (lo + AHEAD), 4 * PART);
        for (size_t i = lo; i < end; i++) over |= (bits[i] & 0x7FFFFFFFu) + (0x80000000u - OVERFLOW_F32);
    }
    return over >> 31;
}

static inline int overflow16(const void *grad, size_t n, uint16_t limit) {
    enum { PART = 1024, AHEAD = 2048 };
    const uint16_t *bits = grad;
    const uint16_t shift = (uint16_t)(0x8000u - limit);
    uint16_t over = 0;
    for (size_t lo = 0; lo < n; lo += PART) {
        const size_t end = n - lo < PART ? n : lo + PART;
        prefetch(grad, 2 * (lo + AHEAD), 2 * PART);
        for (size_t i = lo; i < end; i++) over |= (uint16_t)((bits[i] & 0x7FFF) + shift);
    }
    return over >> 15;
}

#define GENERIC(NAME, DTYPE, OVERFLOW)                                                                                \
    static size_t select_generic_##NAME(const void *grad, const float *residual, float *left, size_t n, float tau,    \
                                        uint32_t base, uint32_t *idx, float *val) {                                   \
        return select_generic(grad, DTYPE, residual, left, n, tau, base, idx, val);                                   \
    }                                                                                                                 \
    static int overflow_generic_##NAME(const void *grad, size_t n) { return OVERFLOW; }

GENERIC(fp32, GRAD_FP32, overflow32(grad, n))
GENERIC(bf16, GRAD_BF16, overflow16(grad, n, OVERFLOW_BF16))
GENERIC(fp16, GRAD_FP16, overflow16(grad, n, OVERFLOW_FP16))

#ifdef DCT_X86
#define AVX2 __attribute__((target("avx2,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,f16c")))

AVX2 static inline __m256 load8_fp32(const void *p, size_t i) { return _mm256_loadu_ps((const float *)p + i); }
AVX2 static inline __m256 load8_bf16(const void *p, size_t i) {
    const __m128i h = _mm_loadu_si128((const __m128i *)((const uint16_t *)p + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
AVX2 static inline __m256 load8_fp16(const void *p, size_t i) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)((const uint16_t *)p + i)));
}

AVX512 static inline __m512 load16_fp32(const void *p, size_t i) { return _mm512_loadu_ps((const float *)p + i); }
AVX512 static inline __m512 load16_bf16(const void *p, size_t i) {
    const __m256i h = _mm256_loadu_si256((const __m256i *)((const uint16_t *)p + i));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
AVX512 static inline __m512 load16_fp16(const void *p, size_t i) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)((const uint16_t *)p + i)));
}

/* For every mask of 8 lanes the numbers of those that it has, in order, a byte each. */
static uint64_t together[256];

__attribute__((constructor)) static void fill_together(void) {
    for (unsigned mask = 0; mask < 256; mask++)
        for (unsigned lane = 0, n = 0; lane < 8; lane++)
            if (mask >> lane & 1) together[mask] |= (uint64_t)lane << (8 * n++);
}

#define X86(NAME, SIZE, OVERFLOW)                                                                                     \
    AVX2 static size_t select_avx2_##NAME(const void *grad, const float *residual, float *left, size_t n, float tau,  \
                                          uint32_t base, uint32_t *idx, float *val) {                                 \
        enum { GROUP_OF = 32 };                                                                                       \
        const __m256 vtau = _mm256_set1_ps(tau);                                                                      \
        const __m256 sign = _mm256_set1_ps(-0.0f);                                                                    \
        _Alignas(32) float room[BLOCK];                                                                               \
        float *acc = left ? left : room;                                                                              \
        uint32_t masks[BLOCK / GROUP_OF];                                                                             \
        uint8_t hit[BLOCK / GROUP_OF];                                                                                \
        size_t k = 0, i = 0, hits = 0;                                                                                \
        /* Which groups have an entry to keep is noted without a branch, and their entries are moved together by table:\
         * a mispredicted branch waits for the memory that its condition comes from. */                               \
        for (; i + GROUP_OF <= n; i += GROUP_OF) {                                                                    \
            uint32_t mask = 0;                                                                                        \
            prefetch(grad, SIZE * (i + PREFETCH_AHEAD), SIZE * GROUP_OF);                                             \
            prefetch(residual, sizeof(float) * (i + PREFETCH_AHEAD), sizeof(float) * GROUP_OF);                       \
            for (int v = 0; v < 4; v++) {                                                                             \
                __m256 x = load8_##NAME(grad, i + 8 * (size_t)v);                                                     \
                if (residual) x = _mm256_add_ps(x, _mm256_loadu_ps(residual + i + 8 * v));                            \
                const __m256 keep = _mm256_cmp_ps(_mm256_andnot_ps(sign, x), vtau, _CMP_GE_OQ);                       \
                mask |= (uint32_t)_mm256_movemask_ps(keep) << (8 * v);                                                \
                _mm256_storeu_ps(acc + i + 8 * v, x);                                                                 \
            }                                                                                                         \
            masks[i / GROUP_OF] = mask;                                                                               \
            hit[hits] = (uint8_t)(i / GROUP_OF);                                                                      \
            hits += mask != 0;                                                                                        \
        }                                                                                                             \
        for (size_t h = 0; h < hits; h++) {                                                                           \
            const size_t at = GROUP_OF * (size_t)hit[h];                                                              \
            for (int v = 0; v < 4; v++) {                                                                             \
                const uint32_t mask = masks[hit[h]] >> (8 * v) & 255, from = (uint32_t)at + 8 * (uint32_t)v;          \
                const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(together + mask)));      \
                const __m256i where = _mm256_add_epi32(lanes, _mm256_set1_epi32((int32_t)(base + from)));             \
                _mm256_storeu_ps(val + k, _mm256_permutevar8x32_ps(_mm256_loadu_ps(acc + from), lanes));              \
                _mm256_storeu_si256((__m256i *)(idx + k), where);                                                     \
                k += (size_t)__builtin_popcount(mask);                                                                \
            }                                                                                                         \
        }                                                                                                             \
        return k + select_generic_##NAME((const char *)grad + SIZE * i, residual ? residual + i : NULL,               \
                                         left ? left + i : NULL, n - i, tau, base + (uint32_t)i, idx + k, val + k);   \
    }                                                                                                                 \
    AVX2 static int overflow_avx2_##NAME(const void *grad, size_t n) { return OVERFLOW; }                             \
    AVX512 static size_t select_avx512_##NAME(const void *grad, const float *residual, float *left, size_t n,         \
                                              float tau, uint32_t base, uint32_t *idx, float *val) {                  \
        const __m512 vtau = _mm512_set1_ps(tau);                                                                      \
        const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);                \
        size_t k = 0, i = 0;                                                                                          \
        for (; i + 16 <= n; i += 16) {                                                                                \
            __m512 x = load16_##NAME(grad, i);                                                                        \
            __builtin_prefetch((const void *)((uintptr_t)grad + SIZE * (i + PREFETCH_AHEAD)));                        \
            __builtin_prefetch((const void *)((uintptr_t)residual + sizeof(float) * (i + PREFETCH_AHEAD)));           \
            if (residual) x = _mm512_add_ps(x, _mm512_loadu_ps(residual + i));                                        \
            if (left) _mm512_storeu_ps(left + i, x);                                                                  \
            const __mmask16 mask = _mm512_cmp_ps_mask(_mm512_abs_ps(x), vtau, _CMP_GE_OQ);                            \
            /* Compressed in registers and stored in full, without a branch: compressing stores are microcoded on some\
             * CPUs, and mispredicted branches cost more than the stores. */                                          \
            const __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)(base + (uint32_t)i)));             \
            _mm512_storeu_ps(val + k, _mm512_maskz_compress_ps(mask, x));                                             \
            _mm512_storeu_si512(idx + k, _mm512_maskz_compress_epi32(mask, at));                                      \
            k += (size_t)__builtin_popcount(mask);                                                                    \
        }                                                                                                             \
        return k + select_generic_##NAME((const char *)grad + SIZE * i, residual ? residual + i : NULL,               \
                                         left ? left + i : NULL, n - i, tau, base + (uint32_t)i, idx + k, val + k);   \
    }                                                                                                                 \
    AVX512 static int overflow_avx512_##NAME(const void *grad, size_t n) { return OVERFLOW; }

X86(fp32, 4, overflow32(grad, n))
X86(bf16, 2, overflow16(grad, n, OVERFLOW_BF16))
X86(fp16, 2, overflow16(grad, n, OVERFLOW_FP16))
#endif

#ifdef DCT_NEON
static inline float32x4_t load4_fp32(const void *p, size_t i) { return vld1q_f32((const float *)p + i); }
static inline float32x4_t load4_bf16(const void *p, size_t i) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16((const uint16_t *)p + i), 16));
}
static inline float32x4_t load4_fp16(const void *p, size_t i) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)p + i)));
}

/* For every mask of 4 lanes the bytes of those that it has, in order, and their numbers. */
static uint8_t together_bytes[16][16];
static uint32_t together_lanes[16][4];

__attribute__((constructor)) static void fill_together(void) {
    for (unsigned mask = 0; mask < 16; mask++)
        for (unsigned lane = 0, n = 0; lane < 4; lane++)
            if (mask >> lane & 1) {
                for (unsigned byte = 0; byte < 4; byte++) together_bytes[mask][4 * n + byte] = (uint8_t)(4 * lane + byte);
                together_lanes[mask][n++] = lane;
            }
}

/* As with AVX2: groups with an entry to keep are noted without a branch, and their entries moved together by table. */
#define NEON(NAME, SIZE)                                                                                              \
    static size_t select_neon_##NAME(const void *grad, const float *residual, float *left, size_t n, float tau,       \
                                     uint32_t base, uint32_t *idx, float *val) {                                      \
        enum { GROUP_OF = 16 };                                                                                       \
        const float32x4_t vtau = vdupq_n_f32(tau);                                                                    \
        const uint32x4_t bits = {1, 2, 4, 8};                                                                         \
        float room[BLOCK];                                                                                            \
        float *acc = left ? left : room;                                                                              \
        uint16_t masks[BLOCK / GROUP_OF], hit[BLOCK / GROUP_OF];                                                      \
        size_t k = 0, i = 0, hits = 0;                                                                                \
        for (; i + GROUP_OF <= n; i += GROUP_OF) {                                                                    \
            uint32_t mask = 0;                                                                                        \
            prefetch(grad, SIZE * (i + PREFETCH_AHEAD), SIZE * GROUP_OF);                                             \
            prefetch(residual, sizeof(float) * (i + PREFETCH_AHEAD), sizeof(float) * GROUP_OF);                       \
            for (int v = 0; v < 4; v++) {                                                                             \
                float32x4_t x = load4_##NAME(grad, i + 4 * (size_t)v);                                                \
                if (residual) x = vaddq_f32(x, vld1q_f32(residual + i + 4 * v));                                      \
                mask |= vaddvq_u32(vandq_u32(vcgeq_f32(vabsq_f32(x), vtau), bits)) << (4 * v);                        \
                vst1q_f32(acc + i + 4 * v, x);                                                                        \
            }                                                                                                         \
            masks[i / GROUP_OF] = (uint16_t)mask;                                                                     \
            hit[hits] = (uint16_t)(i / GROUP_OF);                                                                     \
            hits += mask != 0;                                                                                        \
        }                                                                                                             \
        for (size_t h = 0; h < hits; h++) {                                                                           \
            const size_t at = GROUP_OF * (size_t)hit[h];                                                              \
            for (int v = 0; v < 4; v++) {                                                                             \
                const uint32_t mask = masks[hit[h]] >> (4 * v) & 15, from = (uint32_t)at + 4 * (uint32_t)v;           \
                const uint8x16_t values = vreinterpretq_u8_f32(vld1q_f32(acc + from));                                \
                vst1q_f32(val + k, vreinterpretq_f32_u8(vqtbl1q_u8(values, vld1q_u8(together_bytes[mask]))));         \
                vst1q_u32(idx + k, vaddq_u32(vld1q_u32(together_lanes[mask]), vdupq_n_u32(base + from)));             \
                k += (size_t)__builtin_popcount(mask);                                                                \
            }                                                                                                         \
        }                                                                                                             \
        return k + select_generic_##NAME((const char *)grad + SIZE * i, residual ? residual + i : NULL,               \
                                         left ? left + i : NULL, n - i, tau, base + (uint32_t)i, idx + k, val + k);   \
    }

NEON(fp32, 4)
NEON(bf16, 2)
NEON(fp16, 2)
#endif

static const struct {
    select_fn *select[3];
    overflow_fn *overflow[3];
} kernels[] = {
    {{select_generic_fp32, select_generic_bf16, select_generic_fp16},
     {overflow_generic_fp32, overflow_generic_bf16, overflow_generic_fp16}},
#ifdef DCT_X86
    {{select_avx2_fp32, select_avx2_bf16, select_avx2_fp16},
     {overflow_avx2_fp32, overflow_avx2_bf16, overflow_avx2_fp16}},
    {{select_avx512_fp32, select_avx512_bf16, select_avx512_fp16},
     {overflow_avx512_fp32, overflow_avx512_bf16, overflow_avx512_fp16}},
#elif defined(DCT_NEON) /* what compilers make of the portable test for overflow is as good */
    {{select_neon_fp32, select_neon_bf16, select_neon_fp16},
     {overflow_generic_fp32, overflow_generic_bf16, overflow_generic_fp16}},
#endif
};

/* What processor and operating system support; cpuid itself, since not every toolchain links __builtin_cpu_supports. */
static int best_isa(void) {
#ifdef DCT_X86
    unsigned a, b, c, d, saved, high;
    const unsigned osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    const unsigned avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 30; /* F and BW */
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (osxsave | avx | f16c)) != (osxsave | avx | f16c)) return ISA_GENERIC;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0)); /* register state the operating system saves */
    (void)high;
    if ((saved & 0x06) != 0x06 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return ISA_GENERIC;
    if ((saved & 0xE6) == 0xE6 && (b & avx512) == avx512) return ISA_AVX512;
    if (b & avx2) return ISA_AVX2;
#elif defined(DCT_NEON)
    return ISA_NEON; /* every AArch64 processor has it */
#endif
    return ISA_GENERIC;
}

static int chosen_isa = -1; /* idempotent: racing threads write the same value */

static int isa(void) {
    int level = __atomic_load_n(&chosen_isa, __ATOMIC_RELAXED);
    if (level < 0) {
        level = best_isa();
        __atomic_store_n(&chosen_isa, level, __ATOMIC_RELAXED);
    }
    return level;
}

API int32_t dct_abi_version(void) { return DCT_ABI_VERSION; }

#ifndef DCT_BUILD_ID
#define DCT_BUILD_ID "none"
#endif
/* Digest of source and flags, given by the builder: tells a library that no longer belongs to this source. */
API const char *dct_build_id(void) { return DCT_BUILD_ID; }

/* The instruction set in use: 0 portable, 1 AVX2 or NEON, 2 AVX-512. A level >= 0 asks for it (no more than the CPU has). */
API int32_t dct_isa(int32_t level) {
    if (level >= 0) {
        const int best = best_isa();
        __atomic_store_n(&chosen_isa, level < best ? level : best, __ATOMIC_RELAXED);
    }
    return isa();
}

/* ---- values ---------------------------------------------------------------------------------------------------- */

/* Equally spaced levels between two bf16 numbers, and a sign: 4 and 2 bits. */
typedef struct {
    float start, step;
} levels_t;

static inline levels_t levels_of(const uint8_t *scales, int levels) {
    const float low = from_bf16(load16(scales)), high = from_bf16(load16(scales + 2));
    return (levels_t){low, (high - low) / (float)(levels - 1)};
}

/* The least and the largest magnitude, as bits, at most 2**127. Integers have the order of magnitudes, and compilers make
 * vectors of their minimum and maximum. */
INLINE void extent_of(const float *restrict x, size_t m, uint32_t *low, uint32_t *high) {
    uint32_t least = 0x7F7FFFFFu, most = 0;
    for (size_t j = 0; j < m; j++) {
        const uint32_t b = bits_of(x[j]) & 0x7FFFFFFFu, v = b > 0x7F000000u ? 0x7F000000u : b;
        least = v < least ? v : least;
        most = v > most ? v : most;
    }
    *low = least, *high = most;
}

/* Put codes of so many bits, one in a byte, side by side. */
INLINE void pack_codes(const uint8_t *restrict code, size_t m, unsigned bits, uint8_t *restrict out) {
    const size_t per = 8 / bits;
    size_t i = 0;
    for (; i < m / per; i++) {
        unsigned byte = 0;
        for (size_t k = 0; k < per; k++) byte |= (unsigned)code[per * i + k] << k * bits;
        out[i] = (uint8_t)byte;
    }
    if (m % per) out[i] = 0;
    for (size_t j = per * i; j < m; j++) out[i] |= (uint8_t)(code[j] << j % per * bits);
}

INLINE void encode_levels(const float *restrict x, size_t m, unsigned bits, uint8_t *restrict out, uint8_t *restrict ends,
                          float *restrict left) {
    const unsigned levels = 1u << (bits - 1);
    /* 4 bits span all magnitudes; for those of 2 see codecs/values.py. */
    const float share[2] = {bits == 2 ? 0.125f : 0.0f, bits == 2 ? 0.5f : 1.0f};
    uint32_t least, most;
    uint8_t code[GROUP];
    extent_of(x, m, &least, &most);
    const float low = float_of(least), high = float_of(most);
    for (int e = 0; e < 2; e++) store16(ends + 2 * e, to_bf16(low + (high - low) * share[e]));
    const levels_t l = levels_of(ends, (int)levels);
    const float step = l.step > 0.0f ? l.step : 1.0f, last = l.step > 0.0f ? (float)(levels - 1) : 0.0f;
    for (size_t j = 0; j < m; j++) {
        float level = round_even((magnitude(clampf(x[j], 0x1p127f)) - l.start) / step);
        level = level > 0.0f ? level : 0.0f;
        level = level < last ? level : last;
        code[j] = (uint8_t)((unsigned)(int)level + (x[j] < 0.0f ? levels : 0u));
    }
    pack_codes(code, m, bits, out);
    for (size_t j = 0; left && j < m; j++) {
        const float decoded = l.start + (float)(code[j] & (levels - 1)) * l.step;
        left[j] = clampf(x[j], FLT_MAX) - (x[j] < 0.0f ? -decoded : decoded);
    }
}

/* Signs and the mean magnitude of a group, added as whole 32767ths of the largest: any order has the same sum. */
INLINE void encode_signs(const float *restrict x, size_t m, uint8_t *restrict out, uint8_t *restrict scales,
                         float *restrict left) {
    uint32_t least, most, sum = 0;
    uint8_t code[GROUP];
    extent_of(x, m, &least, &most);
    const float step = float_of(most) / 32767.0f;
    for (size_t j = 0; step > 0.0f && j < m; j++) {
        const float q = round_even(magnitude(clampf(x[j], 0x1p127f)) / step);
        sum += (uint32_t)(int)(q < 32767.0f ? q : 32767.0f);
    }
    const float scale = (float)sum / (float)m * step;
    store32(scales, bits_of(scale));
    for (size_t j = 0; j < m; j++) code[j] = x[j] < 0.0f;
    pack_codes(code, m, 1, out);
    for (size_t j = 0; left && j < m; j++) left[j] = clampf(x[j], FLT_MAX) - (code[j] ? -scale : scale);
}

/* The levels of log4, codecs/values.py, as shares of the largest magnitude of a group; and what lies between them. */
static const float LOG_LEVELS[8] = {0.0f,           0x1.6a09e6p-5f, 0x1.306fep-4f, 0x1p-3f,
                                    0x1.ae89fap-3f, 0x1.6a09e6p-2f, 0x1.306fep-1f, 0x1p+0f};
static const float LOG_MIDDLES[7] = {0x1.6a09e6p-6f, 0x1.e574d4p-5f, 0x1.9837fp-4f, 0x1.5744fcp-3f,
                                     0x1.20a772p-2f, 0x1.e574d4p-2f, 0x1.9837fp-1f};

/* The scale of a block, of the bytes of its group: an exponent, then steps of three mantissa bits. */
static inline float log_scale(const uint8_t *scales, uint64_t block) {
    const int steps = scales[1 + block] + 8 * scales[0] - 247;
    return float_of((uint32_t)(steps > 0 ? steps : 0) << 20);
}

INLINE void encode_log_block(const float *restrict x, size_t m, float scale, uint8_t *restrict out, float *restrict left) {
    uint8_t code[LOG_BLOCK];
    float middle[7];
    for (int k = 0; k < 7; k++) middle[k] = LOG_MIDDLES[k] * scale;
    for (size_t j = 0; j < m; j++) {
        const float v = magnitude(clampf(x[j], 0x1p127f));
        unsigned level = 0;
        for (int k = 0; k < 7; k++) level += v > middle[k];
        code[j] = (uint8_t)(level + (x[j] < 0.0f && level ? 8u : 0u));
    }
    pack_codes(code, m, 4, out);
    for (size_t j = 0; left && j < m; j++) {
        const float decoded = LOG_LEVELS[code[j] & 7] * scale;
        left[j] = clampf(x[j], FLT_MAX) - (code[j] >= 8 ? -decoded : decoded);
    }
}

INLINE void encode_log4(const float *restrict x, size_t m, uint8_t *restrict out, uint8_t *restrict scales,
                        float *restrict left) {
    uint32_t rounded[LOG_GROUP / LOG_BLOCK], least, largest = 0;
    for (size_t b = 0, lo = 0; lo < m; b++, lo += LOG_BLOCK) {
        extent_of(x + lo, m - lo < LOG_BLOCK ? m - lo : LOG_BLOCK, &least, &rounded[b]);
        rounded[b] = (rounded[b] + 0x80000u) >> 20;
        largest = rounded[b] > largest ? rounded[b] : largest;
    }
    scales[0] = (uint8_t)(largest >> 3);
    for (size_t b = 0, lo = 0; lo < m; b++, lo += LOG_BLOCK) {
        const uint32_t steps = rounded[b] + 247, first = 8u * scales[0];
        scales[1 + b] = (uint8_t)(steps > first ? steps - first : 0);
        float *rest = left ? left + lo : NULL;
        if (m - lo >= LOG_BLOCK) /* a constant number of entries makes vectors of the loops */
            encode_log_block(x + lo, LOG_BLOCK, log_scale(scales, b), out + lo / 2, rest);
        else
            encode_log_block(x + lo, m - lo, log_scale(scales, b), out + lo / 2, rest);
    }
}

/* One group of int8 and its scale. */
INLINE void encode_int8(const float *restrict x, size_t m, uint8_t *restrict out, uint8_t *restrict scales,
                        float *restrict left) {
    uint32_t least, most;
    extent_of(x, m, &least, &most);
    const float scale = float_of(most) / 127.0f;
    store32(scales, bits_of(scale));
    if (!(scale > 0.0f)) {
        memset(out, 0, m);
        for (size_t j = 0; left && j < m; j++) left[j] = clampf(x[j], FLT_MAX);
        return;
    }
    for (size_t j = 0; j < m; j++) {
        /* A subnormal scale may have been rounded so far that the quotient passes 127. */
        const float q = clampf(round_even(clampf(x[j], 0x1p127f) / scale), 127.0f);
        out[j] = (uint8_t)(int8_t)(q == q ? q : 0.0f);
    }
    for (size_t j = 0; left && j < m; j++) left[j] = clampf(x[j], FLT_MAX) - (float)(int8_t)out[j] * scale;
}

INLINE void encode_group(const float *restrict x, size_t m, int dtype, uint8_t *restrict out, uint8_t *restrict scales,
                         float *restrict left) {
    switch (dtype) {
    case VALUE_LOG4: encode_log4(x, m, out, scales, left); break;
    case VALUE_SIGN: encode_signs(x, m, out, scales, left); break;
    case VALUE_INT8: encode_int8(x, m, out, scales, left); break;
    case VALUE_INT4: encode_levels(x, m, 4, out, scales, left); break;
    default: encode_levels(x, m, 2, out, scales, left);
    }
}

/* See encode_values; compiled for each instruction set. */
INLINE void encode_body(const float *restrict x, size_t n, int dtype, uint8_t *restrict out, uint8_t *restrict scales,
                        float *restrict left) {
    if (dtype == VALUE_FP32) {
        for (size_t j = 0; j < n; j++) store32(out + 4 * j, bits_of(clampf(x[j], FLT_MAX)));
        if (left)
            for (size_t j = 0; j < n; j++) left[j] = 0.0f;
    } else if (dtype == VALUE_BF16) {
        for (size_t j = 0; j < n; j++) {
            const float v = clampf(x[j], FLT_MAX);
            const uint16_t h = to_bf16(clampf(v, 0x1.FEp127f));
            if (out) store16(out + 2 * j, h);
            if (left) left[j] = v - from_bf16(h);
        }
    } else if (dtype == VALUE_FP16) {
        for (size_t j = 0; j < n; j++) {
            const float v = clampf(x[j], FLT_MAX);
            const uint16_t h = to_fp16(clampf(v, 65504.0f));
            if (out) store16(out + 2 * j, h);
            if (left) left[j] = v - from_fp16(h);
        }
    } else {
        const size_t size = VALUE_TYPES[dtype].group, whole = n / size * size;
        for (size_t lo = 0; lo < whole; lo += size) /* a constant number of entries makes vectors of the loops */
            encode_group(x + lo, size, dtype, out + lo * value_bits(dtype) / 8, scales + scales_nbytes(lo, dtype),
                         left ? left + lo : NULL);
        if (whole < n)
            encode_group(x + whole, n - whole, dtype, out + whole * value_bits(dtype) / 8,
                         scales + scales_nbytes(whole, dtype), left ? left + whole : NULL);
    }
}

typedef void encode_fn(const float *x, size_t n, int dtype, uint8_t *out, uint8_t *scales, float *left);

static void encode_generic(const float *x, size_t n, int dtype, uint8_t *out, uint8_t *scales, float *left) {
    encode_body(x, n, dtype, out, scales, left);
}
#ifdef DCT_X86
AVX2 static void encode_avx2(const float *x, size_t n, int dtype, uint8_t *out, uint8_t *scales, float *left) {
    encode_body(x, n, dtype, out, scales, left);
}
AVX512 static void encode_avx512(const float *x, size_t n, int dtype, uint8_t *out, uint8_t *scales, float *left) {
    encode_body(x, n, dtype, out, scales, left);
}
static encode_fn *const encoders[] = {encode_generic, encode_avx2, encode_avx512};
#else
static encode_fn *const encoders[] = {encode_generic, encode_generic};
#endif

/* Value section of n accumulated values; left[j] (if any) becomes what the receiver does not get. Only the residual
 * can make a value infinite; FLT_MAX is sent then. Grouped types must be given whole groups (except at the end). */
static void encode_values(const float *x, size_t n, int dtype, uint8_t *out, uint8_t *scales, float *left) {
    encoders[isa()](x, n, dtype, out, scales, left);
}

/* Check a value section: every decoded value is finite and one that encode_values can write. */
static int check_values(const uint8_t *p, uint64_t nnz, int dtype) {
    uint32_t bad = 0;
    if (dtype == VALUE_FP32) {
        for (uint64_t j = 0; j < nnz; j++) bad |= (load32(p + 4 * j) & 0x7F800000u) == 0x7F800000u;
    } else if (dtype == VALUE_BF16 || dtype == VALUE_FP16) {
        const uint16_t exponent = dtype == VALUE_BF16 ? 0x7F80 : 0x7C00;
        for (uint64_t j = 0; j < nnz; j++) bad |= (load16(p + 2 * j) & exponent) == exponent;
    } else if (dtype == VALUE_LOG4) {
        const uint8_t *codes = p + scales_nbytes(nnz, dtype);
        if (memchr(p, 255, (size_t)(codes - p))) return ERR_SCALE;
        for (uint64_t j = 0; j < nnz / 2; j++) bad |= (codes[j] & 15) == 8 || codes[j] >> 4 == 8;
        if (nnz % 2) bad |= codes[nnz / 2] == 8 || codes[nnz / 2] >> 4;
    } else if (dtype != VALUE_INT8) {
        for (const uint8_t *ends = p; ends < p + scales_nbytes(nnz, dtype); ends += 4) {
            const float low = dtype == VALUE_SIGN ? 0.0f : from_bf16(load16(ends));
            const float high = dtype == VALUE_SIGN ? loadf(ends) : from_bf16(load16(ends + 2));
            if (!(low >= 0.0f && high >= low && high <= FLT_MAX)) return ERR_SCALE;
        }
        const uint64_t used = nnz * value_bits(dtype) % 8;
        if (used) bad = p[values_nbytes(nnz, dtype) - 1] >> used;
    } else {
        const uint64_t groups = ceil_div(nnz, GROUP);
        for (uint64_t g = 0; g < groups; g++) {
            const float scale = loadf(p + 4 * g);
            if (!(scale >= 0.0f && scale * 127.0f <= FLT_MAX)) return ERR_SCALE;
        }
        for (uint64_t j = 0; j < nnz; j++) bad |= p[4 * groups + j] == 0x80;
    }
    return bad ? ERR_VALUE : OK;
}

/* Value j of a checked section. */
static inline unsigned code_at(const uint8_t *codes, uint64_t j, uint64_t bits) {
    return codes[j * bits / 8] >> j * bits % 8 & ((1u << bits) - 1u);
}

/* The value of a code in the group of entry j. */
static inline float value_of(const uint8_t *p, uint64_t j, int dtype, unsigned code) {
    if (dtype == VALUE_LOG4) {
        const uint8_t *scales = p + scales_nbytes(j / LOG_GROUP * LOG_GROUP, dtype);
        const float v = LOG_LEVELS[code & 7] * log_scale(scales, j % LOG_GROUP / LOG_BLOCK);
        return code >= 8 ? -v : v;
    }
    if (dtype == VALUE_SIGN) return code ? -loadf(p + j / GROUP * 4) : loadf(p + j / GROUP * 4);
    if (dtype == VALUE_INT8) return (float)(int8_t)code * loadf(p + j / GROUP * 4);
    const unsigned levels = 1u << (value_bits(dtype) - 1);
    const levels_t l = levels_of(p + j / GROUP * 4, (int)levels);
    const float v = l.start + (float)(code & (levels - 1)) * l.step;
    return code >= levels ? -v : v;
}

static inline float value_at(const uint8_t *p, uint64_t j, int dtype, const uint8_t *codes) {
    if (dtype == VALUE_FP32) return loadf(p + 4 * j);
    if (dtype == VALUE_BF16) return from_bf16(load16(p + 2 * j));
    if (dtype == VALUE_FP16) return from_fp16(load16(p + 2 * j));
    return value_of(p, j, dtype, code_at(codes, j, value_bits(dtype)));
}

/* out[idx[j]] += scale * value j; idx NULL: every entry. */
INLINE void add_typed(float *restrict out, const uint32_t *restrict idx, const uint8_t *restrict p, uint64_t nnz,
                             int dtype, float scale) {
    const uint8_t *codes = p + scales_nbytes(nnz, dtype);
    if (!idx && dtype == VALUE_INT8) {
        for (uint64_t lo = 0; lo < nnz; lo += GROUP) {
            const uint64_t end = nnz - lo < GROUP ? nnz : lo + GROUP;
            const float step = loadf(p + lo / GROUP * 4);
            for (uint64_t j = lo; j < end; j++) out[j] += scale * ((float)(int8_t)codes[j] * step);
        }
        return;
    }
    if (!idx && (dtype == VALUE_LOG4 || dtype == VALUE_INT4 || dtype == VALUE_INT2 || dtype == VALUE_SIGN)) {
        const uint64_t bits = value_bits(dtype), size = dtype == VALUE_LOG4 ? LOG_BLOCK : GROUP;
        for (uint64_t lo = 0; lo < nnz; lo += size) {
            const uint64_t end = nnz - lo < size ? nnz : lo + size;
            float terms[16]; /* what each code of the group adds */
            for (unsigned code = 0; code < 1u << bits; code++) terms[code] = scale * value_of(p, lo, dtype, code);
            for (uint64_t j = lo; j < end; j++) out[j] += terms[code_at(codes, j, bits)];
        }
        return;
    }
    if (!idx) {
        for (uint64_t j = 0; j < nnz; j++) out[j] += scale * value_at(p, j, dtype, codes);
        return;
    }
    for (uint64_t j = 0; j < nnz; j++) {
        if (j + SCATTER_AHEAD < nnz) __builtin_prefetch(out + idx[j + SCATTER_AHEAD], 1);
        out[idx[j]] += scale * value_at(p, j, dtype, codes);
    }
}

/* See add_values; compiled for each instruction set. */
INLINE void add_body(float *out, const uint32_t *idx, const uint8_t *p, uint64_t nnz, int dtype, float scale) {
    switch (dtype) { /* one specialised loop each */
    case VALUE_FP32: add_typed(out, idx, p, nnz, VALUE_FP32, scale); break;
    case VALUE_BF16: add_typed(out, idx, p, nnz, VALUE_BF16, scale); break;
    case VALUE_FP16: add_typed(out, idx, p, nnz, VALUE_FP16, scale); break;
    case VALUE_INT8: add_typed(out, idx, p, nnz, VALUE_INT8, scale); break;
    case VALUE_INT4: add_typed(out, idx, p, nnz, VALUE_INT4, scale); break;
    case VALUE_INT2: add_typed(out, idx, p, nnz, VALUE_INT2, scale); break;
    case VALUE_LOG4: add_typed(out, idx, p, nnz, VALUE_LOG4, scale); break;
    case VALUE_SIGN: add_typed(out, idx, p, nnz, VALUE_SIGN, scale); break;
    }
}

typedef void add_fn(float *out, const uint32_t *idx, const uint8_t *p, uint64_t nnz, int dtype, float scale);

static void add_generic(float *out, const uint32_t *idx, const uint8_t *p, uint64_t nnz, int dtype, float scale) {
    add_body(out, idx, p, nnz, dtype, scale);
}
#ifdef DCT_X86
AVX2 static void add_avx2(float *out, const uint32_t *idx, const uint8_t *p, uint64_t nnz, int dtype, float scale) {
    add_body(out, idx, p, nnz, dtype, scale);
}
AVX512 static void add_avx512(float *out, const uint32_t *idx, const uint8_t *p, uint64_t nnz, int dtype, float scale) {
    add_body(out, idx, p, nnz, dtype, scale);
}
static add_fn *const adders[] = {add_generic, add_avx2, add_avx512};
#else
static add_fn *const adders[] = {add_generic, add_generic};
#endif

/* Add scale times the values of a section to out, at idx (NULL: all entries). */
static void add_values(float *out, const uint32_t *idx, const uint8_t *p, uint64_t nnz, int dtype, float scale) {
    adders[isa()](out, idx, p, nnz, dtype, scale);
}

/* ---- indices --------------------------------------------------------------------------------------------------- */

static int bit_length(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }

/* How nnz of numel positions are written (codecs/index.py). */
typedef struct {
    uint64_t bits;  /* of the bitmap; 0: there is no section */
    uint64_t lower; /* bits of each position behind it; 0: the bitmap has a bit per entry */
    uint64_t nbytes;
} index_form_t;

static index_form_t index_form(uint64_t nnz, uint64_t numel) {
    if (nnz == 0 || nnz == numel) return (index_form_t){0, 0, 0};
    const uint64_t most = (uint64_t)bit_length((numel - 1) / nnz) - 1, lower = most < MOST_LOWER ? most : MOST_LOWER;
    const uint64_t bits = nnz + ((numel - 1) >> lower);
    const uint64_t code = ceil_div(bits, 8) + ceil_div(nnz * lower, 8), bitmap = ceil_div(numel, 8);
    return code < bitmap ? (index_form_t){bits, lower, code} : (index_form_t){numel, 0, bitmap};
}

/* 64 bits of a section from bit position on, zeros past its end. */
static inline uint64_t bits_at(const uint8_t *p, uint64_t nbytes, uint64_t bit) {
    const uint64_t byte = bit >> 3;
    uint64_t word = 0;
    if (byte + 8 <= nbytes)
        memcpy(&word, p + byte, 8);
    else if (byte < nbytes)
        memcpy(&word, p + byte, nbytes - byte);
    return word >> (bit & 7);
}

/* The bit of the j-th position in the bitmap. */
static inline uint64_t bit_of(const uint32_t *idx, uint64_t j, uint64_t lower) {
    return lower ? (idx[j] >> lower) + j : idx[j];
}

/* Writes exactly form.nbytes. */
static void encode_indices(const uint32_t *idx, uint64_t nnz, index_form_t form, uint8_t *out) {
    const uint64_t size = ceil_div(form.bits, 8), lower = form.lower;
    if (!form.bits) return;
    memset(out, 0, size);
    for (uint64_t j = 0; j < nnz;) { /* a word at once: bits that follow each other would wait for each other */
        const uint64_t at = bit_of(idx, j, lower) >> 6, left = size - 8 * at;
        uint64_t word = 0, bit;
        for (; j < nnz && (bit = bit_of(idx, j, lower)) >> 6 == at; j++) word |= 1ull << (bit & 63u);
        memcpy(out + 8 * at, &word, left < 8 ? left : 8);
    }
    if (!lower) return;
    const uint64_t mask = (1ull << lower) - 1;
    uint64_t pending = 0;
    unsigned count = 0; /* bits in pending, at most 31 between positions */
    out += size;
    for (uint64_t j = 0; j < nnz; j++) {
        pending |= (idx[j] & mask) << count;
        count += (unsigned)lower;
        if (count >= 32) {
            store32(out, (uint32_t)pending);
            out += 4;
            pending >>= 32;
            count -= 32;
        }
    }
    for (; count; count = count > 8 ? count - 8 : 0, pending >>= 8) *out++ = (uint8_t)pending;
}

/* Check an index section and write its positions to idx [nnz]. Its size is that of the form. */
API int32_t dct_decode_indices(const uint8_t *p, uint64_t nnz, uint64_t numel, uint32_t *idx) {
    const index_form_t form = index_form(nnz, numel);
    const uint64_t size = ceil_div(form.bits, 8), lower = form.lower;
    if (!form.bits) {
        for (uint64_t j = 0; j < nnz; j++) idx[j] = (uint32_t)j;
        return OK;
    }
    uint64_t found = 0;
    for (uint64_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        memcpy(&word, p + at, size - at < 8 ? size - at : 8);
        const uint64_t count = (uint64_t)__builtin_popcountll(word);
        if (count > nnz - found) return ERR_COUNT;
        if (size - at <= 8 && word && 8 * at + 63 - (uint64_t)__builtin_clzll(word) >= form.bits) return ERR_RANGE;
        for (; word; word &= word - 1) {
            const uint64_t bit = 8 * at + (uint64_t)__builtin_ctzll(word);
            idx[found] = (uint32_t)(lower ? bit - found : bit);
            found++;
        }
    }
    if (found != nnz) return ERR_COUNT;
    if (!lower) return OK;
    const uint8_t *rest = p + size;
    const uint64_t rest_size = form.nbytes - size, mask = (1ull << lower) - 1;
    uint32_t disorder = 0, before = 0;
    for (uint64_t j = 0; j < nnz; j++) {
        idx[j] = idx[j] << lower | (uint32_t)(bits_at(rest, rest_size, lower * j) & mask);
        disorder |= j && idx[j] <= before;
        before = idx[j];
    }
    if (lower * nnz % 8 && rest[rest_size - 1] >> (lower * nnz % 8)) return ERR_TRAILING;
    if (idx[nnz - 1] >= numel) return ERR_RANGE;
    return disorder ? ERR_ORDER : OK;
}

/* Write the section of these positions. */
API int32_t dct_encode_indices(const uint32_t *idx, uint64_t nnz, uint64_t numel, uint8_t *out) {
    encode_indices(idx, nnz, index_form(nnz, numel), out);
    return OK;
}

/* ---- payload --------------------------------------------------------------------------------------------------- */

/* Checksums of the header's first 16 bytes and the body. */
static void checksum(const uint8_t *payload, uint64_t nbytes, uint32_t *check1, uint32_t *check2) {
    uint32_t sum = 0, weighted = 0;
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t w = load32(payload + 4 * i);
        sum += w;
        weighted += (i + 1) * w;
    }
    const uint8_t *body = payload + HEADER;
    const uint64_t size = nbytes - HEADER, words = size / 4;
    for (uint64_t i = 0; i < words; i++) {
        const uint32_t w = load32(body + 4 * i);
        sum += w;
        weighted += ((uint32_t)i + 5u) * w;
    }
    uint32_t last = 0;
    if (size % 4) memcpy(&last, body + 4 * words, size % 4);
    *check1 = sum + last;
    *check2 = weighted + ((uint32_t)words + 5u) * last;
}

static void write_header(uint8_t *out, int dtype, int nonfinite, uint64_t numel, uint64_t nnz, uint64_t nbytes) {
    uint32_t check1, check2;
    store16(out, 0xDC7A);
    out[2] = 2;
    out[3] = (uint8_t)dtype;
    store32(out + 4, nonfinite ? 1 : 0);
    store32(out + 8, (uint32_t)numel);
    store32(out + 12, (uint32_t)nnz);
    checksum(out, nbytes, &check1, &check2);
    store32(out + 16, check1);
    store32(out + 20, check2);
}

/* ---- compress -------------------------------------------------------------------------------------------------- */

typedef struct {
    /* in */
    void *grad;
    const float *residual; /* NULL: zeros */
    float *left;           /* residual_out; NULL: none. Equal to residual, or apart from it */
    uint8_t *out;
    uint64_t numel, capacity, start;
    float tau;
    int32_t grad_dtype, value_dtype, dense, threads;
    int32_t clear; /* leave zeros in grad */
    /* out */
    int32_t nonfinite;
    uint64_t nbytes, nnz, above, select_ns, encode_ns;
} dct_compress_t;

/* A stretch of the tensor handled by one thread, and what it selected. */
typedef struct {
    uint64_t begin, end, above, kept, room;
    uint32_t *idx;
    float *val;
    int owner;
} segment_t;

typedef struct {
    dct_compress_t *a;
    segment_t segments[MAX_THREADS + 1];
    int count, check_inside;
    int overflow; /* atomic */
} selection_t;

static const void *grad_at(const dct_compress_t *a, uint64_t i) {
    return (const char *)a->grad + i * grad_size(a->grad_dtype);
}

/* Entries [i, i + n) of the gradient were read. */
static void clear_grad(const dct_compress_t *a, uint64_t i, uint64_t n) {
    if (a->clear && n) memset((char *)a->grad + i * grad_size(a->grad_dtype), 0, n * grad_size(a->grad_dtype));
}

static uint64_t thread_begin(const dct_compress_t *a, int t) {
    return t == a->threads ? a->numel : a->numel / 64 * (uint64_t)t / (uint64_t)a->threads * 64;
}

static void find_overflow(void *arg, int t) {
    selection_t *s = arg;
    const dct_compress_t *a = s->a;
    overflow_fn *overflow = kernels[isa()].overflow[a->grad_dtype];
    const uint64_t begin = thread_begin(a, t), size = thread_begin(a, t + 1) - begin, part = 8 * BLOCK;
    /* From the end, so that the selection, which starts at the beginning, finds that in the cache. */
    for (uint64_t p = ceil_div(size, part); p-- > 0;) {
        const uint64_t i = begin + p * part;
        const uint64_t n = size - p * part < part ? size - p * part : part;
        if (overflow(grad_at(a, i), n)) {
            __atomic_store_n(&s->overflow, 1, __ATOMIC_RELAXED);
            return;
        }
        if (__atomic_load_n(&s->overflow, __ATOMIC_RELAXED)) return;
    }
}

/* Room for one more block; 0 when memory is short. */
static int reserve(segment_t *seg, uint64_t most) {
    const uint64_t needed = seg->kept + BLOCK + SLACK;
    if (needed <= seg->room) return 1;
    /* The first guess is generous, since untouched memory costs nothing, and moving does. */
    uint64_t room = (seg->room ? 2 * seg->room : (seg->end - seg->begin) / 32) + BLOCK + SLACK;
    if (room > most + BLOCK + SLACK) room = most + BLOCK + SLACK;
    if (room < needed) room = needed;
    uint32_t *idx = realloc(seg->idx, 4 * room);
    if (!idx) return 0;
    seg->idx = idx;
    float *val = realloc(seg->val, 4 * room);
    if (!val) return 0;
    seg->val = val;
    seg->room = room;
    return 1;
}

/* Values a receiver will get are final (fp32, bf16, fp16): take them out of the residual while it is in the cache. */
static void update_residual(const uint32_t *idx, const float *val, size_t n, int dtype, float *left) {
    if (dtype == VALUE_FP32) {
        for (size_t j = 0; j < n; j++) left[idx[j]] = 0.0f;
        return;
    }
    float rest[BLOCK];
    encode_values(val, n, dtype, NULL, NULL, rest);
    for (size_t j = 0; j < n; j++) left[idx[j]] = rest[j];
}

static void select_segment(selection_t *s, segment_t *seg) {
    dct_compress_t *a = s->a;
    select_fn *select = kernels[isa()].select[a->grad_dtype];
    overflow_fn *overflow = kernels[isa()].overflow[a->grad_dtype];
    uint32_t spare_idx[BLOCK + SLACK];
    float spare_val[BLOCK + SLACK];
    const uint64_t most = a->capacity < seg->end - seg->begin ? a->capacity : seg->end - seg->begin;
    for (uint64_t i = seg->begin; i < seg->end; i += BLOCK) {
        const size_t n = seg->end - i < BLOCK ? (size_t)(seg->end - i) : BLOCK;
        if (s->check_inside) {
            if (overflow(grad_at(a, i), n)) __atomic_store_n(&s->overflow, 1, __ATOMIC_RELAXED);
            if (__atomic_load_n(&s->overflow, __ATOMIC_RELAXED)) return;
        }
        /* Full, or short of memory: what is selected from here on only counts, and stays in the residual. */
        const int full = seg->kept >= most || !reserve(seg, most);
        uint32_t *idx = full ? spare_idx : seg->idx + seg->kept;
        float *val = full ? spare_val : seg->val + seg->kept;
        const size_t found = select(grad_at(a, i), a->residual ? a->residual + i : NULL, a->left ? a->left + i : NULL,
                                    n, a->tau, (uint32_t)i, idx, val);
        clear_grad(a, i, n);
        seg->above += found;
        if (full) continue;
        const size_t taken = found < most - seg->kept ? found : (size_t)(most - seg->kept);
        if (a->left && !is_grouped(a->value_dtype)) update_residual(idx, val, taken, a->value_dtype, a->left);
        seg->kept += taken;
    }
}

static void select_entries(void *arg, int t) {
    selection_t *s = arg;
    for (int i = 0; i < s->count; i++)
        if (s->segments[i].owner == t) select_segment(s, &s->segments[i]);
}

static void add_segment(selection_t *s, uint64_t begin, uint64_t end, int owner) {
    segment_t *seg = &s->segments[s->count++];
    memset(seg, 0, sizeof *seg);
    seg->begin = begin;
    seg->end = end;
    seg->owner = owner;
}

/* Keep `capacity` entries in all, in positional order from `start` on and wrapping around; a segment begins there. */
static void limit_capacity(selection_t *s) {
    dct_compress_t *a = s->a;
    uint64_t room = a->capacity;
    int first = 0;
    while (first < s->count && s->segments[first].begin < a->start) first++;
    for (int i = 0; i < s->count; i++) {
        segment_t *seg = &s->segments[(first + i) % s->count];
        const uint64_t taken = seg->kept < room ? seg->kept : room;
        if (a->left)
            for (uint64_t j = taken; j < seg->kept; j++) a->left[seg->idx[j]] = seg->val[j];
        seg->kept = taken;
        room -= taken;
    }
}

/* All kept entries in the buffers of the first segment. */
static int gather_segments(selection_t *s, uint64_t nnz) {
    segment_t *head = &s->segments[0];
    if (nnz > head->kept && nnz > head->room) {
        uint32_t *idx = realloc(head->idx, 4 * nnz);
        if (idx) head->idx = idx;
        float *val = realloc(head->val, 4 * nnz);
        if (val) head->val = val;
        if (!idx || !val) return ERR_MEMORY;
    }
    for (int i = 1; i < s->count; i++) {
        const segment_t *seg = &s->segments[i];
        if (!seg->kept) continue;
        memcpy(head->idx + head->kept, seg->idx, 4 * seg->kept);
        memcpy(head->val + head->kept, seg->val, 4 * seg->kept);
        head->kept += seg->kept;
    }
    return OK;
}

/* Value section of kept entries; for grouped types the residual is updated here, when the groups are known. */
static void write_values(const dct_compress_t *a, const uint32_t *idx, const float *val, uint64_t nnz, uint8_t *out) {
    const int late = a->left && is_grouped(a->value_dtype);
    const uint64_t bits = value_bits(a->value_dtype);
    uint8_t *body = out + scales_nbytes(nnz, a->value_dtype);
    float rest[BLOCK];
    for (uint64_t j = 0; j < nnz; j += BLOCK) {
        const size_t n = nnz - j < BLOCK ? (size_t)(nnz - j) : BLOCK;
        encode_values(val + j, n, a->value_dtype, body + bits * j / 8, out + scales_nbytes(j, a->value_dtype), late ? rest : NULL);
        if (late)
            for (size_t i = 0; i < n; i++) a->left[idx[j + i]] = rest[i];
    }
}

/* tau = 0: every entry, no positions, no scratch. */
static void compress_dense(dct_compress_t *a) {
    const uint64_t bits = value_bits(a->value_dtype);
    uint8_t *values = a->out + HEADER, *body = values + scales_nbytes(a->numel, a->value_dtype);
    float x[BLOCK], rest[BLOCK];
    for (uint64_t i = 0; i < a->numel; i += BLOCK) {
        const size_t n = a->numel - i < BLOCK ? (size_t)(a->numel - i) : BLOCK;
        accumulate(grad_at(a, i), a->grad_dtype, a->residual ? a->residual + i : NULL, n, x);
        encode_values(x, n, a->value_dtype, body + bits * i / 8, values + scales_nbytes(i, a->value_dtype), a->left ? rest : NULL);
        if (a->left) memcpy(a->left + i, rest, 4 * n);
        clear_grad(a, i, n);
    }
    a->nnz = a->above = a->numel;
    a->nbytes = HEADER + values_nbytes(a->numel, a->value_dtype);
    write_header(a->out, a->value_dtype, 0, a->numel, a->numel, a->nbytes);
}

static void refuse(dct_compress_t *a) {
    if (a->left && !a->residual)
        memset(a->left, 0, 4 * a->numel);
    else if (a->left && a->left != a->residual)
        memcpy(a->left, a->residual, 4 * a->numel);
    clear_grad(a, 0, a->numel);
    a->nonfinite = 1;
    a->nbytes = HEADER;
    a->nnz = a->above = 0;
    write_header(a->out, a->value_dtype, 1, a->numel, 0, HEADER);
}

static int32_t compress(dct_compress_t *a) {
    const uint64_t began = now_ns();
    int status = OK;
    selection_t s;
    s.a = a;
    s.count = 0;
    s.overflow = 0;
    a->nonfinite = 0;
    if (a->threads < 1) a->threads = 1;
    if (a->threads > MAX_THREADS) a->threads = MAX_THREADS;
    /* In place, the whole gradient must be known to be good before the residual changes; otherwise the check can follow
     * the selection block by block. */
    s.check_inside = !a->dense && !(a->left && a->left == a->residual);
    if (!s.check_inside) parallel(a->threads, find_overflow, &s);

    if (!s.overflow && a->dense) {
        a->select_ns = now_ns() - began;
        compress_dense(a);
        a->encode_ns = now_ns() - began - a->select_ns;
        return OK;
    }
    if (!s.overflow) {
        for (int t = 0; t < a->threads; t++) {
            const uint64_t begin = thread_begin(a, t), end = thread_begin(a, t + 1);
            const uint64_t middle = a->start > begin && a->start < end ? a->start : begin;
            if (begin < middle) add_segment(&s, begin, middle, t);
            if (middle < end || (t == 0 && end == 0)) add_segment(&s, middle, end, t);
        }
        parallel(a->threads, select_entries, &s);
    }
    if (s.overflow) {
        a->select_ns = now_ns() - began;
        refuse(a);
    } else {
        limit_capacity(&s);
        a->nnz = a->above = 0;
        for (int i = 0; i < s.count; i++) {
            a->nnz += s.segments[i].kept;
            a->above += s.segments[i].above;
        }
        status = gather_segments(&s, a->nnz);
        a->select_ns = now_ns() - began;
        if (status == OK) {
            const segment_t *head = &s.segments[0];
            const index_form_t form = index_form(a->nnz, a->numel);
            uint8_t *index = a->out + HEADER, *values = index + form.nbytes;
            encode_indices(head->idx, a->nnz, form, index);
            write_values(a, head->idx, head->val, a->nnz, values);
            a->nbytes = HEADER + form.nbytes + values_nbytes(a->nnz, a->value_dtype);
            write_header(a->out, a->value_dtype, 0, a->numel, a->nnz, a->nbytes);
        }
    }
    a->encode_ns = now_ns() - began - a->select_ns;
    for (int i = 0; i < s.count; i++) {
        free(s.segments[i].idx);
        free(s.segments[i].val);
    }
    return status;
}

/* Payloads one after the other, those of the parts of a tensor. */
API int32_t dct_compress(dct_compress_t *calls, int32_t count) {
    int32_t status = OK;
    for (int32_t i = 0; i < count && status == OK; i++) status = compress(&calls[i]);
    return status;
}

/* ---- decompress ------------------------------------------------------------------------------------------------ */

/* A payload whose header has been parsed and checked against its length. */
typedef struct {
    const uint8_t *data;
    uint64_t nbytes, numel, nnz, index_nbytes;
    int32_t value_dtype;
    uint32_t check1, check2;
} dct_payload_t;

static int check_sums(const dct_payload_t *p) {
    uint32_t check1, check2;
    checksum(p->data, p->nbytes, &check1, &check2);
    return check1 == p->check1 && check2 == p->check2 ? OK : ERR_CHECKSUM;
}

/* Positions of a payload in fresh memory (NULL when dense). */
static int positions_of(const dct_payload_t *p, uint32_t **idx) {
    *idx = NULL;
    if (p->nnz == p->numel) return OK;
    *idx = malloc(4 * p->nnz + 4);
    if (!*idx) return ERR_MEMORY;
    return dct_decode_indices(p->data + HEADER, p->nnz, p->numel, *idx);
}

/* out[index] += value. All is checked before anything is written. */
API int32_t dct_decode_add(const dct_payload_t *p, float *out) {
    const uint8_t *values = p->data + HEADER + p->index_nbytes;
    uint32_t *idx = NULL;
    int status = check_sums(p);
    if (status == OK) status = check_values(values, p->nnz, p->value_dtype);
    if (status == OK) status = positions_of(p, &idx);
    if (status == OK) add_values(out, idx, values, p->nnz, p->value_dtype, 1.0f);
    free(idx);
    return status;
}

/* A message that is read from front to back: payloads, one after the other. */
typedef struct {
    const uint8_t *data;
    uint64_t nbytes;
} dct_message_t;

/* Where a sum goes: zeros on entry. */
typedef struct {
    void *out;
    uint64_t numel;
    int32_t dtype;
} dct_target_t;

/* The payload of numel entries at the front of a message, which then goes on behind it. */
static int take_payload(dct_message_t *message, uint64_t numel, dct_payload_t *p, int *nonfinite) {
    const uint8_t *data = message->data;
    if (message->nbytes < HEADER || load16(data) != 0xDC7A || data[2] != 2 || data[3] >= VALUE_COUNT ||
        load32(data + 4) > 1)
        return ERR_HEADER;
    *p = (dct_payload_t){.data = data,
                         .numel = load32(data + 8),
                         .nnz = load32(data + 12),
                         .value_dtype = data[3],
                         .check1 = load32(data + 16),
                         .check2 = load32(data + 20)};
    *nonfinite = data[4];
    if (p->numel != numel || p->nnz > (*nonfinite ? 0 : numel)) return ERR_HEADER;
    p->index_nbytes = index_form(p->nnz, numel).nbytes;
    p->nbytes = HEADER + p->index_nbytes + values_nbytes(p->nnz, p->value_dtype);
    if (p->nbytes > message->nbytes) return ERR_HEADER;
    message->data += p->nbytes;
    message->nbytes -= p->nbytes;
    return OK;
}

/* What a payload keeps: its positions, in memory that grows and is kept for the next one. */
typedef struct {
    dct_payload_t payload;
    uint32_t *idx, *memory;
    uint64_t room;
} kept_t;

static const uint8_t *values_of(const dct_payload_t *p) { return p->data + HEADER + p->index_nbytes; }

static int open_kept(kept_t *kept) {
    const dct_payload_t *p = &kept->payload;
    int status = check_sums(p);
    if (status == OK) status = check_values(values_of(p), p->nnz, p->value_dtype);
    kept->idx = NULL;
    if (status != OK || p->nnz == p->numel) return status;
    if (p->nnz >= kept->room) {
        free(kept->memory);
        kept->room = p->nnz + p->nnz / 4 + 1;
        kept->memory = malloc(4 * kept->room);
        if (!kept->memory) {
            kept->room = 0;
            return ERR_MEMORY;
        }
    }
    kept->idx = kept->memory;
    return dct_decode_indices(p->data + HEADER, p->nnz, p->numel, kept->idx);
}

static inline void store_scaled(const dct_target_t *to, uint64_t i, float x) {
    uint16_t *out16 = to->out;
    if (to->dtype == GRAD_FP32)
        ((float *)to->out)[i] = x;
    else if (to->dtype == GRAD_BF16)
        out16[i] = to_bf16(x);
    else /* what is rounded to 2**16 is infinite */
        out16[i] = magnitude(x) >= 65520.0f ? (uint16_t)(bits_of(x) >> 16 & 0x8000) | 0x7C00 : to_fp16(x);
}

/* The sum of n payloads in scratch (zeros before and after), scaled and rounded once. */
static void sum_apart(const kept_t *kept, int n, const dct_target_t *to, float scale, float *scratch) {
    for (int p = 0; p < n; p++) {
        const dct_payload_t *each = &kept[p].payload;
        add_values(scratch, kept[p].idx, values_of(each), each->nnz, each->value_dtype, 1.0f);
    }
    for (int p = 0; p < n; p++) {
        const uint32_t *idx = kept[p].idx;
        for (uint64_t j = 0; j < kept[p].payload.nnz; j++) {
            const uint64_t i = idx ? idx[j] : j;
            store_scaled(to, i, scratch[i] * scale);
        }
    }
    for (int p = 0; p < n; p++) {
        const uint32_t *idx = kept[p].idx;
        if (!idx && kept[p].payload.nnz) memset(scratch, 0, 4 * kept[p].payload.nnz);
        for (uint64_t j = 0; idx && j < kept[p].payload.nnz; j++) scratch[idx[j]] = 0.0f;
    }
}

/* The place of a 16-bit float, given by its bits, in the order of the floats; and the bits of a place. */
static inline int16_t place_of(uint16_t bits) { return (int16_t)(bits & 0x8000 ? bits ^ 0x7FFF : bits); }

/* Move 16-bit floats by the values of a payload, in whole places. */
static void move_places(const kept_t *kept, const dct_target_t *to) {
    const dct_payload_t *p = &kept->payload;
    const uint8_t *values = values_of(p), *codes = values + scales_nbytes(p->nnz, p->value_dtype);
    const uint32_t *idx = kept->idx;
    uint16_t *out = to->out;
    for (uint64_t j = 0; j < p->nnz; j++) {
        if (idx && j + SCATTER_AHEAD < p->nnz) __builtin_prefetch(out + idx[j + SCATTER_AHEAD], 1);
        const uint64_t i = idx ? idx[j] : j;
        const float by = clampf(value_at(values, j, p->value_dtype, codes), 32768.0f);
        const int place = place_of(out[i]) + (int)round_even(by);
        out[i] = (uint16_t)place_of((uint16_t)place);
    }
}

static void fill_nan(const dct_target_t *to) {
    uint16_t *out16 = to->out;
    for (uint64_t i = 0; i < to->numel; i++) {
        if (to->dtype == GRAD_FP32)
            ((float *)to->out)[i] = float_of(0x7FC00000u);
        else
            out16[i] = to->dtype == GRAD_BF16 ? 0x7FC0 : 0x7E00;
    }
}

static int is_power_of_two(float x) { return (bits_of(x) & 0x807FFFFFu) == 0 && bits_of(x) >> 23 > 0; }

/* targets[i] = scale * (payload i of every message, added up in their order), for all i. scratch: zeros, as many as the
 * largest target has entries; it may be NULL if all are fp32, and scale is a power of two or there is one message.
 * *where is the message that is wrong. */
API int32_t dct_sum_messages(dct_message_t *messages, int32_t n, const dct_target_t *targets, int32_t count,
                             float scale, float *scratch, int32_t *where) {
    kept_t *kept = calloc((size_t)n + 1, sizeof *kept);
    int status = kept ? OK : ERR_MEMORY;
    for (int i = 0; i < count && status == OK; i++) {
        const dct_target_t *to = &targets[i];
        /* Scaled one by one where that gives the same bits. */
        const int direct = to->dtype == GRAD_FP32 && (n == 1 || is_power_of_two(scale));
        int nonfinite = 0;
        for (int p = 0; p < n && status == OK; p++) {
            int flagged = 0;
            *where = p;
            status = take_payload(&messages[p], to->numel, &kept[p].payload, &flagged);
            if (status == OK) status = open_kept(&kept[p]);
            nonfinite |= flagged;
        }
        if (status != OK) break;
        if (to->dtype == OUT_PLACES && (nonfinite || n != 1))
            status = ERR_VALUE;
        else if (to->dtype == OUT_PLACES)
            move_places(kept, to);
        else if (nonfinite)
            fill_nan(to);
        else if (!direct)
            sum_apart(kept, n, to, scale, scratch);
        else
            for (int p = 0; p < n; p++) {
                const dct_payload_t *each = &kept[p].payload;
                add_values(to->out, kept[p].idx, values_of(each), each->nnz, each->value_dtype, scale);
            }
    }
    for (int p = 0; p < n && status == OK; p++)
        if (messages[p].nbytes) *where = p, status = ERR_HEADER;
    for (int p = 0; kept && p < n; p++) free(kept[p].memory);
    free(kept);
    return status;
}

/* The positions of a payload's entries, uint32 [nnz]. */
API int32_t dct_positions(const dct_payload_t *p, uint32_t *idx) {
    const int status = check_sums(p);
    if (status != OK) return status;
    return dct_decode_indices(p->data + HEADER, p->nnz, p->numel, idx);
}

/* ---- thresholds ------------------------------------------------------------------------------------------------ */

/* The k-th largest (1 <= k <= n) of n non-negative floats given as bits, by radix; u is reordered. */
static float kth_largest(uint32_t *u, uint64_t n, uint64_t k) {
    static const int shifts[] = {21, 10, 0}, widths[] = {10, 11, 10};
    for (int level = 0; level < 3; level++) {
        uint64_t histogram[2048] = {0};
        const int shift = shifts[level];
        const uint32_t mask = (1u << widths[level]) - 1u;
        for (uint64_t i = 0; i < n; i++) histogram[(u[i] >> shift) & mask]++;
        uint32_t bin = mask;
        while (histogram[bin] < k) k -= histogram[bin--];
        uint64_t m = 0;
        for (uint64_t i = 0; i < n; i++) {
            const uint32_t b = u[i];
            u[m] = b;
            m += ((b >> shift) & mask) == bin;
        }
        n = m;
    }
    return float_of(u[0]);
}

static inline float acc_at(const void *grad, int dtype, const float *residual, uint64_t i) {
    const uint16_t *g16 = grad;
    float g;
    if (dtype == GRAD_FP32)
        g = ((const float *)grad)[i];
    else
        g = dtype == GRAD_BF16 ? from_bf16(g16[i]) : from_fp16(g16[i]);
    return residual ? g + residual[i] : g;
}

static uint64_t split_mix(uint64_t seed, uint64_t counter) {
    uint64_t z = seed + counter * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

/* Finite |acc| at random positions (num_samples < numel) or everywhere, as bits in u. Returns their number. */
static uint64_t collect(const void *grad, int dtype, const float *residual, uint64_t numel, uint64_t num_samples,
                        uint64_t seed, uint32_t *u) {
    uint64_t count = 0;
    if (num_samples >= numel) {
        float x[BLOCK];
        for (uint64_t i = 0; i < numel; i += BLOCK) {
            const size_t n = numel - i < BLOCK ? (size_t)(numel - i) : BLOCK;
            accumulate((const char *)grad + i * grad_size(dtype), dtype, residual ? residual + i : NULL, n, x);
            for (size_t j = 0; j < n; j++) {
                const uint32_t b = bits_of(x[j]) & 0x7FFFFFFFu;
                u[count] = b;
                count += b < 0x7F800000u;
            }
        }
        return count;
    }
    uint64_t where[256];
    for (uint64_t i = 0; i < num_samples; i += 256) {
        const uint64_t n = num_samples - i < 256 ? num_samples - i : 256;
        for (uint64_t j = 0; j < n; j++) {
            where[j] = ((split_mix(seed, i + j + 1) >> 32) * numel) >> 32;
            __builtin_prefetch((const char *)grad + where[j] * grad_size(dtype));
            if (residual) __builtin_prefetch(residual + where[j]);
        }
        for (uint64_t j = 0; j < n; j++) {
            const uint32_t b = bits_of(acc_at(grad, dtype, residual, where[j])) & 0x7FFFFFFFu;
            u[count] = b;
            count += b < 0x7F800000u;
        }
    }
    return count;
}

static float at_least_normal(float x) { return x > FLT_MIN ? x : FLT_MIN; }

API int32_t dct_sample_threshold(const void *grad, int32_t dtype, const float *residual, uint64_t numel,
                                 double keep_fraction, uint64_t num_samples, uint64_t seed, float *tau) {
    const uint64_t most = num_samples < numel ? num_samples : numel;
    uint32_t *u = malloc(4 * most + 4);
    if (!u) return ERR_MEMORY;
    const uint64_t n = collect(grad, dtype, residual, numel, num_samples, seed, u);
    uint64_t k = (uint64_t)(keep_fraction * (double)n + 0.5);
    k = k < 1 ? 1 : k > n ? n : k;
    *tau = n ? at_least_normal(kth_largest(u, n, k)) : FLT_MIN;
    free(u);
    return OK;
}

/* Exact k-th largest |acc|: a sample brackets it, one pass counts above the bracket and collects inside it. */
static int bracketed_threshold(const void *grad, int dtype, const float *residual, uint64_t numel, uint64_t k,
                               float *tau) {
    enum { SAMPLES = 65536 };
    uint32_t *u = malloc(4 * SAMPLES);
    uint32_t *inside = NULL;
    if (!u) return 0;
    const uint64_t n = collect(grad, dtype, residual, numel, SAMPLES, k, u);
    const double fraction = (double)k / (double)numel * (double)n;
    /* four standard deviations, and more than that for very few or very many */
    const double share = (double)k / (double)numel;
    double width = 16.0;
    while (width * width < 16.0 * share * (1.0 - share) * (double)n) width += 4.0;
    width += 4.0;
    float low = FLT_MIN, high = float_of(0x7F800000u);
    if (n && fraction + width < (double)n) low = at_least_normal(kth_largest(u, n, (uint64_t)(fraction + width) + 1));
    const uint64_t m = collect(grad, dtype, residual, numel, SAMPLES, k, u);
    if (m && fraction - width >= 1.0) high = kth_largest(u, m, (uint64_t)(fraction - width));
    free(u);
    if (!n || !(high > low)) return 0;

    uint32_t idx[BLOCK + SLACK];
    float val[BLOCK + SLACK];
    select_fn *select = kernels[isa()].select[dtype];
    uint64_t above = 0, count = 0, room = 0;
    for (uint64_t i = 0; i < numel; i += BLOCK) {
        const size_t block = numel - i < BLOCK ? (size_t)(numel - i) : BLOCK;
        if (count + BLOCK > room) {
            room = 2 * room + 4 * BLOCK;
            uint32_t *grown = realloc(inside, 4 * room);
            if (!grown) {
                free(inside);
                return 0;
            }
            inside = grown;
        }
        const void *g = (const char *)grad + i * grad_size(dtype);
        const size_t found = select(g, residual ? residual + i : NULL, NULL, block, low, 0, idx, val);
        for (size_t j = 0; j < found; j++) {
            const uint32_t b = bits_of(val[j]) & 0x7FFFFFFFu;
            const int finite = b < 0x7F800000u, over = b >= bits_of(high);
            inside[count] = b;
            count += finite && !over;
            above += finite && over;
        }
    }
    const int hit = above < k && k - above <= count;
    if (hit) *tau = at_least_normal(kth_largest(inside, count, k - above));
    free(inside);
    return hit;
}

API int32_t dct_exact_threshold(const void *grad, int32_t dtype, const float *residual, uint64_t numel, uint64_t k,
                                float *tau) {
    if (numel > 1u << 18 && k <= numel && bracketed_threshold(grad, dtype, residual, numel, k, tau)) return OK;
    uint32_t *u = malloc(4 * numel + 4);
    if (!u) return ERR_MEMORY;
    const uint64_t n = collect(grad, dtype, residual, numel, numel, 0, u);
    *tau = n ? at_least_normal(kth_largest(u, n, k < n ? k : n)) : FLT_MIN;
    free(u);
    return OK;
}

#include "dct_embedding.c"
#include "dct_residual.c"
#include "dct_changes.c"
#include "dct_step_ahead.c"
