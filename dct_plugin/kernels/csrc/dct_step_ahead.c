/* Step-ahead's two passes over memory: Backend.displace of kernels/displacement.py bit for bit, and add_squares, which
 * sums in an order of its own.
 *
 * Included by dct_kernels.c. Results do not depend on the number of threads.
 */

#define DISPLACE_EACH (1u << 16) /* entries a thread displaces at once */
#define SQUARES_EACH (1u << 18)  /* entries a thread squares at once, in whole rows */
#define LANES 16

typedef struct {
    const void *weight;
    void *out;
    const float *residual;
    const float *factors, *roots; /* of the rows and columns of the moment; NULL: nothing is divided */
    uint64_t numel, columns, first;
    float eps, limit, scale;
    int32_t dtype;
} displace_t;

/* One column: the factor is the root of all entries. */
INLINE void displace_row(const displace_t *a, uint64_t at, size_t n, float factor, const float *roots, float *x) {
    const float *residual = a->residual + at, eps = a->eps, limit = a->limit, scale = a->scale;
    if (!a->factors)
        for (size_t j = 0; j < n; j++) x[j] = residual[j] * scale;
    else if (a->columns == 1)
        for (size_t j = 0; j < n; j++) x[j] = clampf(residual[j] / (factor + eps), limit) * scale;
    else
        for (size_t j = 0; j < n; j++) x[j] = clampf(residual[j] / (factor * roots[j] + eps), limit) * scale;
}

INLINE uint16_t nan_or(float x, uint16_t nan, uint16_t otherwise) { return x != x ? nan : otherwise; }

INLINE void add_weight(const displace_t *a, uint64_t at, size_t n, const float *x) {
    const float *w32 = (const float *)a->weight + at;
    const uint16_t *w16 = (const uint16_t *)a->weight + at;
    float *out32 = (float *)a->out + at;
    uint16_t *out16 = (uint16_t *)a->out + at;
    if (a->dtype == GRAD_FP32) {
        for (size_t j = 0; j < n; j++) out32[j] = x[j] + w32[j];
    } else if (a->dtype == GRAD_BF16) {
        for (size_t j = 0; j < n; j++) {
            const float sum = x[j] + from_bf16(w16[j]);
            out16[j] = nan_or(sum, 0x7FC0, to_bf16(sum));
        }
    } else {
        const dct_target_t to = {out16, n, GRAD_FP16};
        for (size_t j = 0; j < n; j++) {
            const float sum = x[j] + from_fp16(w16[j]);
            if (sum != sum)
                out16[j] = 0x7E00;
            else
                store_scaled(&to, j, sum);
        }
    }
}

INLINE void displace_range(const displace_t *a, uint64_t lo, uint64_t hi) {
    float x[BLOCK];
    const uint64_t width = a->factors && a->columns > 1 ? a->columns : UINT64_MAX;
    while (lo < hi) {
        const uint64_t place = width == UINT64_MAX ? 0 : (a->first + lo) % width;
        const uint64_t row = width == UINT64_MAX ? 0 : (a->first + lo) / width - a->first / width;
        uint64_t n = width - place < hi - lo ? width - place : hi - lo;
        if (n > BLOCK) n = BLOCK;
        displace_row(a, lo, n, a->factors ? a->factors[row] : 0.0f, a->roots ? a->roots + place : NULL, x);
        add_weight(a, lo, n, x);
        lo += n;
    }
}

typedef struct {
    const void *gradient;
    float *rows, *columns; /* that the means are added to; columns NULL: all squares have one mean */
    uint64_t height, width, each;
    float *sums;   /* [tasks, width]: of the columns */
    double *total; /* [tasks]: without columns */
    int32_t dtype;
} squares_t;

INLINE float square_row(const squares_t *a, uint64_t at, size_t n, float *sums) {
    float x[BLOCK], lanes[LANES] = {0}, total = 0.0f;
    const char *gradient = (const char *)a->gradient + at * grad_size(a->dtype);
    const float *g = (const float *)gradient;
    if (a->dtype != GRAD_FP32) {
        accumulate(gradient, a->dtype, NULL, n, x);
        g = x;
    }
    if (sums)
        for (size_t j = 0; j < n; j++) sums[j] += g[j] * g[j];
    size_t j = 0;
    for (; j + LANES <= n; j += LANES)
        for (size_t lane = 0; lane < LANES; lane++) lanes[lane] += g[j + lane] * g[j + lane];
    for (; j < n; j++) total += g[j] * g[j];
    for (size_t lane = 0; lane < LANES; lane++) total += lanes[lane];
    return total;
}

INLINE void square_rows(const squares_t *a, int t) {
    const uint64_t end = (t + 1) * a->each < a->height ? (t + 1) * a->each : a->height;
    for (uint64_t row = t * a->each; row < end; row++) {
        double total = 0.0;
        for (uint64_t at = 0; at < a->width; at += BLOCK) {
            const uint64_t n = a->width - at < BLOCK ? a->width - at : BLOCK;
            total += square_row(a, row * a->width + at, n, a->sums ? a->sums + t * a->width + at : NULL);
        }
        if (a->columns)
            a->rows[row] += (float)(total / (double)a->width);
        else
            a->total[t] += total;
    }
}

typedef void displace_range_fn(const displace_t *a, uint64_t lo, uint64_t hi);
typedef void square_rows_fn(const squares_t *a, int t);

static void displace_range_generic(const displace_t *a, uint64_t lo, uint64_t hi) { displace_range(a, lo, hi); }
static void square_rows_generic(const squares_t *a, int t) { square_rows(a, t); }
#ifdef DCT_X86
AVX2 static void displace_range_avx2(const displace_t *a, uint64_t lo, uint64_t hi) { displace_range(a, lo, hi); }
AVX512 static void displace_range_avx512(const displace_t *a, uint64_t lo, uint64_t hi) { displace_range(a, lo, hi); }
AVX2 static void square_rows_avx2(const squares_t *a, int t) { square_rows(a, t); }
AVX512 static void square_rows_avx512(const squares_t *a, int t) { square_rows(a, t); }
#endif

static const struct {
    displace_range_fn *displace;
    square_rows_fn *square;
} step_ahead[] = {
    {displace_range_generic, square_rows_generic},
#ifdef DCT_X86
    {displace_range_avx2, square_rows_avx2},
    {displace_range_avx512, square_rows_avx512},
#elif defined(DCT_NEON)
    {displace_range_generic, square_rows_generic}, /* compilers use NEON by themselves */
#endif
};

static void displace_job(void *p, int t) {
    const displace_t *a = p;
    const uint64_t lo = (uint64_t)t * DISPLACE_EACH, end = lo + DISPLACE_EACH;
    step_ahead[isa()].displace(a, lo, a->numel < end ? a->numel : end);
}

static void square_job(void *p, int t) { step_ahead[isa()].square(p, t); }

/* out = weight + scale * clamp(residual / (factors * roots + eps)), see displace_t; factors begin with the row of the
 * first entry. */
API int32_t dct_displace(const void *weight, void *out, int32_t dtype, const float *residual, const float *factors,
                         const float *roots, uint64_t numel, uint64_t columns, uint64_t first, float eps, float limit,
                         float scale, int32_t threads) {
    displace_t a = {weight, out, residual, factors, roots, numel, columns, first, eps, limit, scale, dtype};
    parallel_for((int)ceil_div(numel, DISPLACE_EACH), threads, displace_job, &a);
    return OK;
}

/* Add the means of the rows and columns of squares [height, width] to rows and columns. columns NULL: add the mean of
 * the squares [width] to each of the height rows. */
API int32_t dct_add_squares(const void *gradient, int32_t dtype, float *rows, float *columns, uint64_t height,
                            uint64_t width, int32_t threads) {
    const uint64_t numel = columns ? height * width : width;
    if (!numel) return OK;
    squares_t a = {gradient, rows, columns, height, width, 0, NULL, NULL, dtype};
    if (!columns) { /* rows of a block each: threads share them */
        a.width = BLOCK;
        a.height = numel / BLOCK;
    }
    uint64_t tasks = ceil_div(numel, SQUARES_EACH);
    if (tasks > MAX_THREADS) tasks = MAX_THREADS;
    if (tasks > a.height) tasks = a.height ? a.height : 1;
    a.each = ceil_div(a.height, tasks);
    void *memory = columns ? calloc(tasks * width, sizeof(float)) : calloc(tasks, sizeof(double));
    if (!memory) return ERR_MEMORY;
    a.sums = columns ? memory : NULL;
    a.total = columns ? NULL : memory;
    parallel_for((int)tasks, threads, square_job, &a);
    if (columns) {
        for (uint64_t t = 1; t < tasks; t++)
            for (uint64_t j = 0; j < width; j++) a.sums[j] += a.sums[t * width + j];
        for (uint64_t j = 0; j < width; j++) columns[j] += a.sums[j] / (float)height;
    } else {
        const uint64_t done = a.height * BLOCK;
        double total = done < numel ? square_row(&a, done, numel - done, NULL) : 0.0;
        for (uint64_t t = 0; t < tasks; t++) total += a.total[t];
        for (uint64_t r = 0; r < height; r++) rows[r] += (float)(total / (double)numel);
    }
    free(memory);
    return OK;
}
