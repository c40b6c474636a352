/* Residuals in 2 or about 1 byte per entry: Backend.pack and unpack of kernels/reference.py, bit for bit.
 *
 * Included by dct_kernels.c. Rounding is stochastic: an entry goes to one of the two numbers beside it, with
 * probabilities that make its expectation the entry. Random numbers depend on seed and position alone.
 */

#define PACK_BLOCK 64                    /* entries of int8 that share an exponent */
#define PACK_SMALLEST (-112)             /* of the exponents: 2**(15 - exponent) is a normal number */
#define PACK_LARGEST 0x7F7E0000u         /* 127 * 2**121: what is beyond it is cut */
#define PACK_EACH (1u << 18)             /* entries a thread takes at once; a multiple of PACK_BLOCK */

enum { PACK_BF16, PACK_INT8 };

typedef struct {
    float *wide;
    void *packed;
    int8_t *exponents; /* int8 only: one per PACK_BLOCK */
    uint64_t numel;
    uint32_t seed;
    int32_t dtype;
    int32_t packing;
} pack_t;

/* 32 random bits of a counter: Wellons' "lowbias32" hash (public domain). */
static inline uint32_t mixed(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}


INLINE void pack_bf16(const float *restrict x, uint16_t *restrict out, size_t n, uint32_t counter) {
    const float most = float_of(PACK_LARGEST);
    for (size_t i = 0; i < n; i++) {
        const uint32_t u = bits_of(clampf(x[i], most));
        out[i] = (uint16_t)((u + (mixed(counter + (uint32_t)i) & 0xFFFFu)) >> 16);
    }
}

INLINE void unpack_bf16(const uint16_t *restrict x, float *restrict out, size_t n) {
    for (size_t i = 0; i < n; i++) out[i] = from_bf16(x[i]);
}

INLINE int8_t pack_int8(const float *restrict x, int8_t *restrict out, size_t n, uint32_t counter) {
    const float most = float_of(PACK_LARGEST), magic = 12582912.0f; /* 1.5 * 2**23: rounds to an integer */
    uint32_t largest = 0;
    for (size_t i = 0; i < n; i++) {
        const uint32_t u = bits_of(x[i]) & 0x7FFFFFFFu;
        largest = u > largest ? u : largest;
    }
    if (largest > PACK_LARGEST) largest = PACK_LARGEST;
    /* The smallest exponent with which 127 steps reach the largest entry. */
    int exponent = (int)(largest >> 23) - 133 + ((largest & 0x7FFFFFu) > 0x7E0000u);
    if (exponent < PACK_SMALLEST) exponent = PACK_SMALLEST;
    const float factor = float_of((uint32_t)(142 - exponent) << 23); /* 2**15 steps: below 2**22 */
    for (size_t i = 0; i < n; i++) {
        const int32_t fixed = (int32_t)(bits_of(clampf(x[i], most) * factor + magic) - 0x4B400000u);
        out[i] = (int8_t)((fixed + (int32_t)(mixed(counter + (uint32_t)i) & 0x7FFFu)) >> 15);
    }
    return (int8_t)exponent;
}

INLINE void unpack_int8(const int8_t *restrict x, int exponent, float *restrict out, size_t n) {
    const float step = float_of((uint32_t)(exponent + 127) << 23);
    for (size_t i = 0; i < n; i++) out[i] = (float)x[i] * step;
}

/* Entries [lo, hi), where lo is a multiple of PACK_BLOCK. */
INLINE void pack_range(const pack_t *a, uint64_t lo, uint64_t hi) {
    const uint32_t counter = mixed(a->seed);
    if (a->dtype == PACK_BF16) {
        uint16_t *packed = a->packed;
        if (a->packing)
            pack_bf16(a->wide + lo, packed + lo, hi - lo, counter + (uint32_t)lo);
        else
            unpack_bf16(packed + lo, a->wide + lo, hi - lo);
        return;
    }
    int8_t *packed = a->packed;
    for (uint64_t i = lo; i < hi; i += PACK_BLOCK) {
        const size_t n = hi - i < PACK_BLOCK ? (size_t)(hi - i) : PACK_BLOCK;
        int8_t *exponent = a->exponents + i / PACK_BLOCK;
        if (a->packing)
            *exponent = pack_int8(a->wide + i, packed + i, n, counter + (uint32_t)i);
        else
            unpack_int8(packed + i, *exponent, a->wide + i, n);
    }
}

typedef void pack_range_fn(const pack_t *a, uint64_t lo, uint64_t hi);

static void pack_range_generic(const pack_t *a, uint64_t lo, uint64_t hi) { pack_range(a, lo, hi); }
#ifdef DCT_X86
AVX2 static void pack_range_avx2(const pack_t *a, uint64_t lo, uint64_t hi) { pack_range(a, lo, hi); }
AVX512 static void pack_range_avx512(const pack_t *a, uint64_t lo, uint64_t hi) { pack_range(a, lo, hi); }
#endif

static pack_range_fn *const pack_ranges[] = {
    pack_range_generic,
#ifdef DCT_X86
    pack_range_avx2,
    pack_range_avx512,
#elif defined(DCT_NEON)
    pack_range_generic, /* compilers use NEON by themselves */
#endif
};

static void pack_job(void *p, int t) {
    const pack_t *a = p;
    const uint64_t lo = (uint64_t)t * PACK_EACH, end = lo + PACK_EACH;
    pack_ranges[isa()](a, lo, a->numel < end ? a->numel : end);
}

/* wide fp32 into (packing) or out of the packed entries. */
API int32_t dct_pack(float *wide, void *packed, int8_t *exponents, uint64_t numel, uint32_t seed, int32_t dtype,
                     int32_t packing, int32_t threads) {
    pack_t a = {wide, packed, exponents, numel, seed, dtype, packing};
    parallel_for((int)ceil_div(numel, PACK_EACH), threads, pack_job, &a);
    return OK;
}
