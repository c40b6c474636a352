/* Payloads of changed 16-bit weights (codecs/changes.py); included by dct_kernels.c. */

enum { CHANGES_PART = 64, BANDS = 5 };

/* Largest distance and type of the values of each payload. */
static const struct { int last, dtype; } bands[BANDS] = {
    {1, VALUE_SIGN}, {9, VALUE_INT4}, {127, VALUE_INT8}, {1 << 11, VALUE_FP16}, {1 << 15, VALUE_FP32}};

/* The entries that differ, and by how many places. */
static uint64_t find_changes(const uint16_t *wanted, const uint16_t *held, uint64_t numel, uint32_t *idx, int16_t *moved) {
    uint64_t nnz = 0;
    for (uint64_t lo = 0; lo < numel; lo += CHANGES_PART) {
        const uint64_t n = numel - lo < CHANGES_PART ? numel - lo : CHANGES_PART;
        /* Written everywhere, and kept where an entry differs: no branch waits for memory. */
        int16_t found[CHANGES_PART];
        uint16_t any = 0;
        for (uint64_t i = 0; i < n; i++) {
            found[i] = (int16_t)(uint16_t)(place_of(wanted[lo + i]) - place_of(held[lo + i]));
            any |= (uint16_t)found[i];
        }
        if (!any) continue;
        for (uint64_t i = 0; i < n; i++) {
            idx[nnz] = (uint32_t)(lo + i);
            moved[nnz] = found[i];
            nnz += found[i] != 0;
        }
    }
    return nnz;
}

/* The payloads that turn held into wanted, one behind the other in so much room. sizes: {bytes of each, entries sent,
 * entries that differ}; nothing is sent if there is not enough room. scratch: 14 bytes per entry. */
API int32_t dct_encode_changes(const uint16_t *wanted, const uint16_t *held, uint64_t numel, uint8_t *out,
                               uint64_t room, void *scratch, uint64_t *sizes) {
    uint32_t *all = scratch, *idx = all + numel;
    float *val = (float *)(idx + numel);
    int16_t *moved = (int16_t *)(val + numel);
    const uint64_t changed = find_changes(wanted, held, numel, all, moved);
    memset(sizes, 0, (BANDS + 1) * sizeof *sizes);
    sizes[BANDS + 1] = changed;
    uint64_t sent[BANDS] = {0};
    int first = 1;
    for (int b = 0; b < BANDS; b++) {
        const dct_compress_t a = {.value_dtype = bands[b].dtype};
        const int last = bands[b].last;
        uint64_t n = 0;
        for (uint64_t j = 0; j < changed; j++) {
            const int distance = moved[j] < 0 ? -(int)moved[j] : moved[j];
            idx[n] = all[j];
            val[n] = moved[j];
            n += distance >= first && distance <= last;
        }
        first = last + 1;
        const index_form_t form = index_form(n, numel);
        sent[b] = HEADER + form.nbytes + values_nbytes(n, a.value_dtype);
        if (sent[b] > room) return OK;
        encode_indices(idx, n, form, out + HEADER);
        write_values(&a, idx, val, n, out + HEADER + form.nbytes);
        write_header(out, a.value_dtype, 0, numel, n, sent[b]);
        out += sent[b];
        room -= sent[b];
    }
    memcpy(sizes, sent, sizeof sent);
    sizes[BANDS] = changed;
    return OK;
}
