/* Compiled kernels of the embedding exchange; kernels/embedding.py has the format.
 *
 * Included by dct_kernels.c, whose helpers it uses. One call serves all messages of a step, to or from all peers; each
 * message holds the segments of several tables. The caller (kernels/embedding.py) has checked pointers and sizes;
 * messages of peers are checked here, field by field, and nothing outside of them or of their outputs is touched.
 */

#define EMBEDDING_HEADER 20
#define EMBEDDING_MAGIC 0xDC7Bu
#define EMBEDDING_VERSION 2
#define FLAG_NONFINITE 1
#define MAX_RICE 12
#define METHOD_SPARSE 13
#define METHOD_RAW 14
#define METHOD_ZERO 15
#define METHOD_PACKED 16 /* to 32: 16 + bits per code */
#define MAX_ZIGZAG 65534u /* |q| < 2**15 */
#define ESCAPE 24         /* a quotient from here on is written as that many zeros and 16 bits of the code */
#define ESCAPED_BITS 16
#define TAIL 8 /* bytes that the bit writer may touch past its end */

/* Return codes beyond those of dct_kernels.c; kernels/embedding.py turns them into messages. */
enum {
    EMB_SHORT = 1,
    EMB_MAGIC = 2,
    EMB_VERSION = 3,
    EMB_FLAGS = 4,
    EMB_SHAPE = 5,
    EMB_BODY = 6,
    EMB_CHECKSUM = 7,
    EMB_METHOD = 8,
    EMB_WIDTH = 9,
    EMB_TRUNCATED = 10,
    EMB_CODE = 11,
    EMB_VALUE = 12,
    EMB_TRAILING = 13,
    EMB_NONFINITE = 15, /* not a fault: every entry is NaN */
};

/* ---- jobs ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    void (*work)(void *, int);
    void *arg;
    int count;
    int next; /* atomic */
} jobs_t;

static void serve_jobs(void *p, int t) {
    jobs_t *jobs = p;
    (void)t;
    while ((t = __atomic_fetch_add(&jobs->next, 1, __ATOMIC_RELAXED)) < jobs->count) jobs->work(jobs->arg, t);
}

/* work(arg, t) for every t in [0, count). */
static void parallel_for(int count, int threads, void (*work)(void *, int), void *arg) {
    jobs_t jobs = {work, arg, count, 0};
    if (threads > count) threads = count;
    if (threads > 1)
        parallel(threads, serve_jobs, &jobs);
    else
        serve_jobs(&jobs, 0);
}

/* ---- CRC-32 (zlib's), eight bytes at a time ----------------------------------------------------------------------- */

static uint32_t crc_table[8][256];
static pthread_once_t crc_once = PTHREAD_ONCE_INIT;

static void fill_crc_table(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int bit = 0; bit < 8; bit++) c = c & 1 ? 0xEDB88320u ^ c >> 1 : c >> 1;
        crc_table[0][n] = c;
    }
    for (uint32_t n = 0; n < 256; n++)
        for (int t = 1; t < 8; t++) crc_table[t][n] = crc_table[t - 1][n] >> 8 ^ crc_table[0][crc_table[t - 1][n] & 255];
}

static uint32_t crc32_of(uint32_t crc, const uint8_t *p, uint64_t n) {
    pthread_once(&crc_once, fill_crc_table);
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        const uint32_t a = load32(p) ^ crc, b = load32(p + 4);
        crc = crc_table[7][a & 255] ^ crc_table[6][a >> 8 & 255] ^ crc_table[5][a >> 16 & 255] ^ crc_table[4][a >> 24] ^
              crc_table[3][b & 255] ^ crc_table[2][b >> 8 & 255] ^ crc_table[1][b >> 16 & 255] ^ crc_table[0][b >> 24];
    }
    for (; n; n--) crc = crc >> 8 ^ crc_table[0][(crc ^ *p++) & 255];
    return ~crc;
}

/* ---- quantise ------------------------------------------------------------------------------------------------------- */

/* Half of the step width for a bound: the largest bf16 number safely below it; 0: too small to work with. */
static double half_step(double bound) {
    const float target = (float)(bound * (1.0 - 0x1p-12));
    const double half = (double)float_of(bits_of(target) & 0xFFFF0000u);
    return half >= 0x1p-100 ? half : 0.0;
}

static uint32_t largest_bits(const float *x, uint64_t n) {
    uint32_t most = 0;
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t u = bits_of(x[i]) & 0x7FFFFFFFu;
        most = u > most ? u : most;
    }
    return most;
}

/* Codes of a segment as 0, 1, -1, 2, ... -> 0, 1, 2, 3, ...; every |x| is below width * (2**15 - 1). */
static void quantise(const float *restrict x, uint64_t n, double width, uint32_t *restrict z) {
    const double magic = 0x1.8p52; /* adding it rounds to an integer, ties to even */
    for (uint64_t i = 0; i < n; i++) {
        const int32_t m = -(int32_t)((double)x[i] / width + magic - magic);
        z[i] = (uint32_t)m << 1 ^ (uint32_t)(m >> 31);
    }
}

static void dequantise(const uint32_t *restrict z, uint64_t n, float width, float *restrict out) {
    for (uint64_t i = 0; i < n; i++) {
        const int32_t m = (int32_t)(z[i] >> 1) ^ -(int32_t)(z[i] & 1);
        out[i] = (float)-m * width + 0.0f; /* exact: 15 bits times 8 */
    }
}

/* ---- choice of a method --------------------------------------------------------------------------------------------- */

typedef struct {
    int method, gap_param, value_param;
    uint64_t nnz;
} plan_t;

static int best_rice(const uint32_t *v, uint64_t n, uint64_t sum, uint64_t *bits) {
    int best = 0;
    *bits = sum + n;
    for (int k = 1; k <= MAX_RICE; k++) {
        uint64_t total = n * (uint64_t)(k + 1), part = 0;
        for (uint64_t i = 0; i < n; i++) part += v[i] >> k;
        total += part;
        if (total >= *bits) break; /* convex in k */
        *bits = total;
        best = k;
    }
    return best;
}

/* The cheapest method for the codes z: bits at bit_cost each, and the work of coding. at, v: scratch for n numbers. */
static plan_t choose(const uint32_t *z, uint64_t n, uint64_t bit_cost, uint64_t rice_cost, uint32_t *at, uint32_t *v) {
    plan_t plan = {METHOD_ZERO, 0, 0, 0};
    uint64_t sum = 0, nnz = 0;
    uint32_t all = 0;
    for (uint64_t i = 0; i < n; i++) {
        sum += z[i];
        nnz += z[i] != 0;
        all |= z[i];
    }
    if (!nnz) return plan;
    const int width = bit_length(all);
    uint64_t least = n * (uint64_t)width * bit_cost, bits;
    plan.method = METHOD_PACKED + width;
    if (!bit_cost) return plan;
    const int k = best_rice(z, n, sum, &bits);
    if (bits * bit_cost + n * rice_cost < least) {
        least = bits * bit_cost + n * rice_cost;
        plan.method = k;
    }
    if (4 * nnz < n) {
        const int b = bit_length((n - nnz) / nnz) - 1, gap = b < 0 ? 0 : b > MAX_RICE ? MAX_RICE : b;
        uint64_t found = 0, rest = 0;
        bits = (uint64_t)bit_length(n) + 8 + nnz * (uint64_t)(gap + 1);
        for (uint64_t i = 0; i < n; i++) {
            if (!z[i]) continue;
            const uint32_t space = (uint32_t)i - (found ? at[found - 1] + 1 : 0);
            bits += space >> gap;
            at[found] = (uint32_t)i;
            v[found] = z[i] - 1;
            rest += v[found++];
        }
        uint64_t value_bits;
        const int value = best_rice(v, nnz, rest, &value_bits);
        bits += value_bits;
        if (bits * bit_cost + 2 * nnz * rice_cost < least)
            plan = (plan_t){METHOD_SPARSE, gap, value, nnz};
    }
    return plan;
}

/* ---- bits ----------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *out;
    uint64_t pending;
    unsigned count; /* bits in pending, at most 7 between codes */
} writer_t;

/* Up to 56 bits; writes 8 bytes from the current one on. */
static inline void put(writer_t *w, uint64_t code, unsigned bits) {
    w->pending |= code << w->count;
    w->count += bits;
    store64(w->out, w->pending);
    w->out += w->count >> 3;
    w->pending >>= w->count & ~7u;
    w->count &= 7;
}

static inline void put_rice(writer_t *w, uint32_t v, int k, int escaped_bits) {
    const uint32_t quotient = v >> k;
    if (quotient < ESCAPE) {
        put(w, (1u | (uint64_t)(v & ((1u << k) - 1u)) << 1) << quotient, quotient + 1 + (unsigned)k);
    } else {
        put(w, (uint64_t)v << ESCAPE, ESCAPE + (unsigned)escaped_bits);
    }
}

typedef struct {
    const uint8_t *p;
    uint64_t nbytes, bit;
} reader_t;

/* 57 valid bits from the current position on, zeros past the end; "end" is checked by the caller. */
static inline uint64_t peek(const reader_t *r) { return bits_at(r->p, r->nbytes, r->bit); }

static inline uint32_t take_rice(reader_t *r, int k, int escaped_bits) {
    const uint64_t word = peek(r);
    const unsigned zeros = (unsigned)__builtin_ctzll(word | (uint64_t)1 << ESCAPE);
    if (zeros == ESCAPE) {
        r->bit += ESCAPE + (unsigned)escaped_bits;
        return (uint32_t)(word >> ESCAPE & (((uint64_t)1 << escaped_bits) - 1));
    }
    r->bit += zeros + 1 + (unsigned)k;
    return zeros << k | (uint32_t)(word >> (zeros + 1) & ((1u << k) - 1u));
}

static inline uint64_t take(reader_t *r, unsigned bits) {
    const uint64_t word = peek(r) & (((uint64_t)1 << bits) - 1);
    r->bit += bits;
    return word;
}

/* ---- encode --------------------------------------------------------------------------------------------------------- */

typedef struct {
    const float *x;      /* the segments' entries, one after the other */
    float *decoded;      /* what a receiver gets, or NULL */
    uint8_t *out;        /* room for the message (dct_embedding_bound), or NULL: decoded alone is wanted */
    uint64_t numel;
    uint64_t first;      /* of its segments in lengths and bounds */
    uint64_t segments;
    uint64_t nbytes;     /* result: of the message */
    int32_t kind;        /* last byte of the message */
    int32_t status;      /* result: OK, ERR_MEMORY, or EMB_NONFINITE: no entry passes */
} outgoing_t;

typedef struct {
    outgoing_t *messages;
    const int64_t *lengths; /* entries of each segment */
    const double *bounds;   /* of each segment */
    uint64_t bit_cost;  /* of a bit on the wire */
    uint64_t rice_cost; /* of a Rice code beyond a packed one, in the same unit */
} encode_t;

static void write_embedding_header(uint8_t *out, int flags, uint64_t numel, uint64_t segments, uint64_t body) {
    store16(out, EMBEDDING_MAGIC);
    out[2] = EMBEDDING_VERSION;
    out[3] = (uint8_t)flags;
    store32(out + 4, (uint32_t)numel);
    store16(out + 8, (uint16_t)segments);
    store16(out + 10, 0);
    store32(out + 12, (uint32_t)body);
    store32(out + 16, crc32_of(crc32_of(0, out, 16), out + EMBEDDING_HEADER, body));
}

static void write_segment(writer_t *w, const uint32_t *z, uint64_t n, plan_t plan, const uint32_t *at,
                          const uint32_t *v) {
    writer_t local = *w; /* in registers */
    if (plan.method <= MAX_RICE) {
        for (uint64_t i = 0; i < n; i++) put_rice(&local, z[i], plan.method, ESCAPED_BITS);
    } else if (plan.method == METHOD_SPARSE) {
        const unsigned width = (unsigned)bit_length(n);
        put(&local, plan.nnz | (uint64_t)(plan.gap_param | plan.value_param << 4) << width, width + 8);
        for (uint64_t j = 0; j < plan.nnz; j++) {
            put_rice(&local, at[j] - (j ? at[j - 1] + 1 : 0), plan.gap_param, 32);
            put_rice(&local, v[j], plan.value_param, ESCAPED_BITS);
        }
    } else if (plan.method > METHOD_PACKED) {
        const unsigned width = (unsigned)(plan.method - METHOD_PACKED);
        for (uint64_t i = 0; i < n; i++) put(&local, z[i], width);
    }
    *w = local;
}

static void encode_message(const encode_t *a, outgoing_t *m) {
    const int64_t *lengths = a->lengths + m->first;
    const double *bounds = a->bounds + m->first;
    uint64_t longest = 1, raw = 0, start = 0;
    m->status = OK;
    m->nbytes = 0;
    if (largest_bits(m->x, m->numel) >= OVERFLOW_F32) {
        m->status = EMB_NONFINITE;
        if (!m->out) return;
        write_embedding_header(m->out, FLAG_NONFINITE, m->numel, m->segments, 0);
        m->out[EMBEDDING_HEADER] = (uint8_t)m->kind;
        m->nbytes = EMBEDDING_HEADER + 1;
        return;
    }
    for (uint64_t s = 0; s < m->segments; s++) longest = (uint64_t)lengths[s] > longest ? (uint64_t)lengths[s] : longest;
    uint32_t *z = malloc(3 * longest * sizeof *z + m->segments * sizeof(float));
    if (!z) {
        m->status = ERR_MEMORY;
        return;
    }
    uint32_t *at = z + longest, *v = at + longest;
    float *halves = (float *)(v + longest);
    for (uint64_t s = 0; s < m->segments; start += (uint64_t)lengths[s++]) {
        const uint64_t n = (uint64_t)lengths[s];
        const double largest = (double)float_of(largest_bits(m->x + start, n));
        const double half = largest == 0.0 ? half_step(1.0) : half_step(bounds[s]);
        halves[s] = largest < half * (2.0 * 32767.0) ? (float)half : 0.0f;
        if (halves[s] == 0.0f) raw += n;
    }
    uint8_t *body = m->out ? m->out + EMBEDDING_HEADER : NULL;
    uint8_t *values = body ? body + 3 * m->segments : NULL;
    writer_t w = {values ? values + 4 * raw : NULL, 0, 0};
    start = 0;
    for (uint64_t s = 0; s < m->segments; start += (uint64_t)lengths[s++]) {
        const uint64_t n = (uint64_t)lengths[s];
        const float *x = m->x + start;
        plan_t plan = {METHOD_RAW, 0, 0, 0};
        if (halves[s] == 0.0f) {
            if (m->decoded && n) memcpy(m->decoded + start, x, 4 * n);
            if (values && n) memcpy(values, x, 4 * n), values += 4 * n;
        } else {
            quantise(x, n, 2.0 * (double)halves[s], z);
            if (m->decoded) dequantise(z, n, 2.0f * halves[s], m->decoded + start);
            if (body) {
                plan = choose(z, n, a->bit_cost, a->rice_cost, at, v);
                write_segment(&w, z, n, plan, at, v);
            }
        }
        if (!body) continue;
        body[s] = (uint8_t)plan.method;
        store16(body + m->segments + 2 * s, (uint16_t)(bits_of(halves[s]) >> 16));
    }
    free(z);
    if (!body) return;
    if (w.count) *w.out++ = (uint8_t)w.pending;
    write_embedding_header(m->out, 0, m->numel, m->segments, (uint64_t)(w.out - body));
    *w.out++ = (uint8_t)m->kind;
    m->nbytes = (uint64_t)(w.out - m->out);
}

/* Mean of the squares of every segment as torch's segment_reduce finds it: a running fp32 sum. 0 for an empty one. */
API int32_t dct_mean_squares(const outgoing_t *messages, const int64_t *lengths, int32_t count, double *out) {
    for (int t = 0; t < count; t++) {
        const outgoing_t *m = &messages[t];
        const float *x = m->x;
        for (uint64_t s = m->first; s < m->first + m->segments; s++) {
            float sum = 0.0f;
            for (int64_t i = 0; i < lengths[s]; i++, x++) sum += *x * *x;
            out[s] = lengths[s] ? (double)(sum / (float)lengths[s]) : 0.0;
        }
    }
    return OK;
}

static void encode_one(void *arg, int t) {
    const encode_t *a = arg;
    encode_message(a, &a->messages[t]);
}

/* Room for a message of numel entries in segments: escaped codes are the largest. */
API int64_t dct_embedding_bound(uint64_t numel, uint64_t segments) {
    return (int64_t)(EMBEDDING_HEADER + 8 * segments + 5 * numel + TAIL + 2);
}

API int32_t dct_embedding_encode(outgoing_t *messages, const int64_t *lengths, const double *bounds, uint64_t bit_cost,
                                 uint64_t rice_cost, int32_t count, int32_t threads) {
    encode_t a = {messages, lengths, bounds, bit_cost, rice_cost};
    parallel_for(count, threads, encode_one, &a);
    for (int t = 0; t < count; t++)
        if (messages[t].status == ERR_MEMORY) return ERR_MEMORY;
    return OK;
}

/* ---- decode --------------------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *data;
    float *out; /* fp32 [numel] */
    uint64_t nbytes, numel, first, segments;
    int64_t found; /* result: what was found in place of what a message has to hold */
    int32_t status;
    int32_t reserved;
} incoming_t;

typedef struct {
    incoming_t *messages;
    const int64_t *lengths;
} decode_t;

static int read_segment(reader_t *r, int method, uint64_t n, uint32_t *z) {
    const uint64_t total = 8 * r->nbytes;
    uint32_t most = 0;
    if (method <= MAX_RICE) {
        if (n > total) return EMB_TRUNCATED;
        reader_t local = *r;
        for (uint64_t i = 0; i < n; i++) {
            z[i] = take_rice(&local, method, ESCAPED_BITS);
            most = z[i] > most ? z[i] : most;
        }
        *r = local;
    } else if (method == METHOD_SPARSE) {
        const uint64_t nnz = take(r, (unsigned)bit_length(n));
        const int gap = (int)take(r, 4), value = (int)take(r, 4);
        if (gap > MAX_RICE || value > MAX_RICE) return EMB_CODE;
        if (nnz > n || nnz > total) return EMB_TRUNCATED;
        memset(z, 0, n * sizeof *z);
        uint64_t next = 0;
        for (uint64_t j = 0; j < nnz; j++) {
            next += take_rice(r, gap, 32);
            const uint32_t code = take_rice(r, value, ESCAPED_BITS) + 1;
            if (next >= n || r->bit > total) return next >= n ? EMB_CODE : EMB_TRUNCATED;
            z[next++] = code;
            most = code > most ? code : most;
        }
    } else if (method > METHOD_PACKED) {
        const unsigned width = (unsigned)(method - METHOD_PACKED);
        if (n > (total - r->bit) / width) return EMB_TRUNCATED;
        reader_t local = *r;
        for (uint64_t i = 0; i < n; i++) {
            z[i] = (uint32_t)take(&local, width);
            most = z[i] > most ? z[i] : most;
        }
        *r = local;
    } else {
        memset(z, 0, n * sizeof *z);
    }
    if (r->bit > total) return EMB_TRUNCATED;
    return most > MAX_ZIGZAG ? EMB_CODE : OK;
}

static int decode_message(const int64_t *lengths, incoming_t *m) {
    const uint8_t *p = m->data;
    m->found = (int64_t)m->nbytes;
    if (m->nbytes < EMBEDDING_HEADER) return EMB_SHORT;
    if (load16(p) != EMBEDDING_MAGIC) return m->found = load16(p), EMB_MAGIC;
    if (p[2] != EMBEDDING_VERSION) return m->found = p[2], EMB_VERSION;
    if (p[3] > FLAG_NONFINITE || load16(p + 10)) return m->found = p[3], EMB_FLAGS;
    if (load32(p + 4) != m->numel) return m->found = load32(p + 4), EMB_SHAPE;
    if (load16(p + 8) != m->segments) return m->found = load16(p + 8), EMB_SHAPE;
    const uint64_t size = m->nbytes - EMBEDDING_HEADER;
    if (load32(p + 12) != size || (p[3] == FLAG_NONFINITE && size)) return EMB_BODY;
    const uint8_t *body = p + EMBEDDING_HEADER;
    if (load32(p + 16) != crc32_of(crc32_of(0, p, 16), body, size)) return EMB_CHECKSUM;
    if (p[3] == FLAG_NONFINITE) {
        for (uint64_t i = 0; i < m->numel; i++) m->out[i] = float_of(0x7FC00000u);
        return EMB_NONFINITE;
    }
    if (size < 3 * m->segments) return EMB_TRUNCATED;
    uint64_t raw = 0, longest = 1;
    for (uint64_t s = 0; s < m->segments; s++) {
        const uint64_t n = (uint64_t)lengths[s];
        const int method = body[s], is_raw = method == METHOD_RAW;
        const uint32_t half = (uint32_t)load16(body + m->segments + 2 * s) << 16;
        m->found = method;
        if (method > METHOD_PACKED + 16 || method == METHOD_PACKED) return EMB_METHOD;
        if (half >= 0x7F800000u || (n && is_raw != (half == 0))) return EMB_WIDTH; /* negative, inf or NaN */
        if (is_raw) raw += n;
        longest = n > longest ? n : longest;
    }
    if (4 * raw > size - 3 * m->segments) return EMB_TRUNCATED;
    const uint8_t *values = body + 3 * m->segments;
    reader_t r = {values + 4 * raw, size - 3 * m->segments - 4 * raw, 0};
    uint32_t *z = malloc(longest * sizeof *z);
    if (!z) return ERR_MEMORY;
    uint32_t most = 0;
    uint64_t start = 0;
    int status = OK;
    for (uint64_t s = 0; s < m->segments && status == OK; start += (uint64_t)lengths[s++]) {
        const uint64_t n = (uint64_t)lengths[s];
        float *out = m->out + start;
        if (body[s] == METHOD_RAW) {
            if (n) memcpy(out, values, 4 * n);
            values += 4 * n;
        } else {
            status = read_segment(&r, body[s], n, z);
            if (status == OK) dequantise(z, n, 2.0f * float_of((uint32_t)load16(body + m->segments + 2 * s) << 16), out);
        }
        const uint32_t here = largest_bits(out, status == OK ? n : 0);
        most = here > most ? here : most;
    }
    free(z);
    if (status != OK) return status;
    if (most >= 0x7F800000u) return EMB_VALUE;
    if (ceil_div(r.bit, 8) != r.nbytes || (r.bit & 7 && r.p[r.nbytes - 1] >> (r.bit & 7))) return EMB_TRAILING;
    return OK;
}

static void decode_one(void *arg, int t) {
    const decode_t *a = arg;
    incoming_t *m = &a->messages[t];
    m->status = decode_message(a->lengths + m->first, m);
}

/* Every message's status tells; a fault in one does not keep the others from being read. */
API int32_t dct_embedding_decode(incoming_t *messages, const int64_t *lengths, int32_t count, int32_t threads) {
    decode_t a = {messages, lengths};
    parallel_for(count, threads, decode_one, &a);
    for (int t = 0; t < count; t++)
        if (messages[t].status == ERR_MEMORY) return ERR_MEMORY;
    return OK;
}

/* ---- rows ----------------------------------------------------------------------------------------------------------- */

#define DIGIT 11

/* Distinct ids of every column of ids [samples, columns], ascending, and which one each sample has.
 *
 * Columns are taken in the order of order [columns]; rows, counts and positions count through them:
 * rows[positions[sample, column] - first] of a column is base[column] + the sample's id.
 * An id outside of 0..limits[column] - 1 ends it: fault = {column, id}. */
API int32_t dct_distinct_rows(const int64_t *ids, uint64_t samples, uint64_t columns, const int64_t *order,
                              const int64_t *limits, const int64_t *base, int64_t *rows, int64_t *counts,
                              int64_t *positions, int64_t *fault) {
    uint64_t *keys = malloc(2 * (samples ? samples : 1) * sizeof *keys), total = 0;
    if (!keys) return ERR_MEMORY;
    for (uint64_t c = 0; c < columns; c++) {
        const uint64_t column = (uint64_t)order[c], first = total;
        uint64_t *from = keys, *to = keys + samples;
        for (uint64_t i = 0; i < samples; i++) {
            const int64_t id = ids[i * columns + column];
            if (id < 0 || id >= limits[column]) {
                fault[0] = (int64_t)column;
                fault[1] = id;
                free(keys);
                return ERR_RANGE;
            }
            from[i] = (uint64_t)id << 32 | i; /* limits are below 2**31 */
        }
        const int bits = bit_length((uint64_t)limits[column] - 1);
        for (int shift = 32; shift < 32 + bits; shift += DIGIT) { /* least significant digit first: stable */
            uint32_t place[1 << DIGIT] = {0};
            for (uint64_t i = 0; i < samples; i++) place[from[i] >> shift & ((1 << DIGIT) - 1)]++;
            uint32_t sum = 0;
            for (int d = 0; d < 1 << DIGIT; d++) {
                const uint32_t n = place[d];
                place[d] = sum;
                sum += n;
            }
            for (uint64_t i = 0; i < samples; i++) to[place[from[i] >> shift & ((1 << DIGIT) - 1)]++] = from[i];
            uint64_t *other = from;
            from = to;
            to = other;
        }
        for (uint64_t i = 0; i < samples; i++) {
            const uint64_t id = from[i] >> 32;
            if (!i || id != from[i - 1] >> 32) rows[total++] = base[column] + (int64_t)id;
            positions[(from[i] & 0xFFFFFFFFu) * columns + column] = (int64_t)(total - 1);
        }
        counts[c] = (int64_t)(total - first);
    }
    free(keys);
    return OK;
}

/* out[rows[i]] += x[i], in ascending order of i; x [n, dim], out [any, dim]. */
API int32_t dct_add_rows(float *out, const int64_t *rows, const float *x, uint64_t n, uint64_t dim) {
    for (uint64_t i = 0; i < n; i++) {
        float *restrict into = out + (uint64_t)rows[i] * dim;
        const float *restrict from = x + i * dim;
        for (uint64_t d = 0; d < dim; d++) into[d] += from[d];
    }
    return OK;
}
